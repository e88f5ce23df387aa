"""The endpoint as an ASGI application: the paths, the writing of responses, whole or as events, and
their errors.

While a request is served its connection is watched: a client that disconnects cancels its
generations. A stream begins with the first chunk, so an earlier failure has a status code. After
``keep_alive_s`` without a chunk it begins anyway, with a comment, and a later failure is an event.

The pages for people are in ``pages.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec import __version__
from edgespec.config.device import EndpointSection
from edgespec.device.agent import Chunk
from edgespec.device.status import StatusSource
from edgespec.endpoint import service
from edgespec.endpoint.admission import client_address, current_client
from edgespec.endpoint.bodies import Body
from edgespec.endpoint.messages import model_page
from edgespec.endpoint.ollama import (
    NDJSON,
    VERSION,
    model_description,
    model_entry,
    time_text,
)
from edgespec.endpoint.pages import chat_route, status_routes
from edgespec.endpoint.recent_failures import RecentFailures
from edgespec.endpoint.request_json import (
    ApiError,
    Fields,
    compact_json,
    nested_too_deep,
    unavailable_error,
    unknown_model_error,
)
from edgespec.endpoint.server import (
    FAILURES,
    HEALTH,
    OLLAMA_PREFIX,
    Guard,
    error_response,
    foreign_origin,
    has_key,
    is_for_messages,
    origin_pattern,
    record_failure,
    too_large,
)
from edgespec.telemetry import agent_status
from edgespec.telemetry.logs import log_failure, request_id
from edgespec.telemetry.metric_table import Table, make_registry
from edgespec.telemetry.trace import to_plain_data

_GONE, _CUT, _DONE = "gone", "cut", "200"
REQUEST_ID: Final = "X-Request-Id"
IGNORED: Final = "X-Edgespec-Ignored"
ANSWERED_BY: Final = "X-Edgespec-Answered-By"
"""Header that names the model of this device which answers in place of the target."""
_AWAY_CHECK_S: Final = 1.0
"""Seconds without a token after which a request checks whether a verifier can be reached at all,
if there is a fallback."""
_REQUEST_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_ANTHROPIC_REQUEST_ID: Final = "request-id"
"""Header in which Anthropic's clients look for the name of a request."""
_KNOWN_PATHS: Final = (
    "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /api/chat"
    " and /api/generate"
)
_OTHER_TASKS: Final[Mapping[str, str]] = {
    "/embeddings": "embeddings",
    "/rerank": "reranking",
    "/score": "scoring of pairs",
    "/moderations": "moderation",
    "/images/generations": "images",
    "/audio/speech": "speech",
    "/audio/transcriptions": "transcription",
}
"""Tasks of other models, by the paths under which clients ask for them."""
_STREAM_HEADERS: Final = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise a proxy such as nginx buffers the stream
)
_UNREAD: Final = "edgespec.unread"
"""Key of an ASGI scope: true until the request's body has been read to its end."""
_MAX_IGNORED_NAMES: Final = 16
_MAX_NAME_LENGTH: Final = 40
_AFTER_ALL_EVENTS: Final = 1 << 62

_log = logging.getLogger(__name__)

Prepare = Callable[[service.Endpoint, Mapping[str, Any]], Awaitable[service.PreparedRequest]]


def build_app(endpoint: service.Endpoint, status: StatusSource | None = None) -> ASGIApp:
    """Return the application with all routes, guarded. With ``status`` it serves the status page
    and the agent's metrics too."""
    handlers, post_only = _Handlers(endpoint, status), ["POST"]
    api_routes: list[tuple[str, Any, list[str] | None]] = [
        ("/chat/completions", _GenerationRoute(endpoint, service.Endpoint.prepare_chat), post_only),
        (
            "/completions",
            _GenerationRoute(endpoint, service.Endpoint.prepare_completion),
            post_only,
        ),
        ("/responses", _GenerationRoute(endpoint, service.Endpoint.prepare_response), post_only),
        ("/responses/{name}", handlers.stored_response, ["GET", "DELETE"]),
        ("/responses/{name}/input_items", handlers.stored_input, None),
        *((path, handlers.refuse_task, ["GET", "POST"]) for path in _OTHER_TASKS),
        ("/messages", _GenerationRoute(endpoint, service.Endpoint.prepare_message), post_only),
        ("/messages/count_tokens", handlers.count_message_tokens, post_only),
        ("/models", handlers.models, None),
        ("/models/", handlers.models, None),
        ("/models/{name:path}", handlers.model, None),
        ("/tokenize", handlers.tokenize, post_only),
        ("/detokenize", handlers.detokenize, post_only),
    ]
    routes: list[BaseRoute] = [
        # A client whose base URL lacks the /v1 finds the same paths.
        *(
            Route(base + path, handler, methods=methods)
            for path, handler, methods in api_routes
            for base in ("/v1", "")
        ),
        *_ollama_routes(endpoint, handlers),
        Route(HEALTH, handlers.health),
        Route("/metrics", handlers.metrics),
        Route("/version", handlers.version),
        chat_route(),
        *(() if status is None else status_routes(status, endpoint)),
    ]
    kinds: tuple[type[Exception], ...] = (ApiError, HTTPException, Exception)
    app: ASGIApp = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _handle_error))
    settings = endpoint.settings
    app = Guard(app, endpoint.key, settings, endpoint.max_body_bytes)
    return _WithRequestId(_with_cors(_WithFailures(app, endpoint.failures), settings))


def _ollama_routes(endpoint: service.Endpoint, handlers: _Handlers) -> list[Route]:
    routes: dict[str, tuple[Any, str]] = {
        "chat": (_GenerationRoute(endpoint, service.Endpoint.prepare_ollama_chat), "POST"),
        "generate": (_GenerationRoute(endpoint, service.Endpoint.prepare_ollama_generate), "POST"),
        "tags": (handlers.ollama_models, "GET"),
        "ps": (handlers.ollama_models, "GET"),
        "show": (handlers.show_ollama_model, "POST"),
        "version": (handlers.ollama_version, "GET"),
        "pull": (handlers.pull_ollama_model, "POST"),
        "delete": (_refuse_ollama_work, "DELETE"),
        **{name: (_refuse_ollama_work, "POST") for name in _REFUSED_BY_NAME if name != "delete"},
    }
    return [
        Route(OLLAMA_PREFIX + name, handler, methods=[method])
        for name, (handler, method) in routes.items()
    ]


_NO_EMBEDDINGS: Final = "it generates text and has no embeddings"
_NO_MANAGEMENT: Final = "its models belong to the verifiers, which are not managed from here"
_REFUSED_BY_NAME: Final = {
    **dict.fromkeys(("embed", "embeddings"), _NO_EMBEDDINGS),
    **dict.fromkeys(("create", "copy", "delete", "push"), _NO_MANAGEMENT),
}
"""Names of Ollama's paths that this endpoint refuses, with the reasons."""


async def _refuse_ollama_work(request: Request) -> Response:
    path = request.url.path
    why = f"this endpoint does not serve {path}: {_REFUSED_BY_NAME[path.rpartition('/')[2]]}"
    raise ApiError(501, why, code="unsupported_path")


def waiting_app(key: str, settings: EndpointSection) -> ASGIApp:
    """Return the application of an endpoint that has no tokenizer yet. ``/health`` reports
    ``waiting``, and every other path returns 503."""

    async def health(request: Request) -> Response:
        needs_key = bool(key) and not has_key(request.headers, key)
        return JSONResponse({"status": "waiting", **({"needs_key": True} if needs_key else {})})

    async def wait(request: Request, error: Exception) -> Response:
        why = "no verifier answers yet, and one has to lend its tokenizer first"
        return error_response(unavailable_error(why), request.scope)

    app: ASGIApp = Starlette(
        routes=[Route(HEALTH, health), chat_route()], exception_handlers={HTTPException: wait}
    )
    # No body is read, so the bound without a memory budget is never above what is there.
    guard = Guard(app, key, settings, settings.most_body_bytes(has_budget=False))
    return _WithRequestId(_with_cors(guard, settings))


def _with_cors(app: ASGIApp, settings: EndpointSection) -> ASGIApp:
    return _Cors(
        app,
        allow_origin_regex=origin_pattern(settings),
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=("Retry-After", REQUEST_ID, IGNORED, ANSWERED_BY),
    )


class _Cors(CORSMiddleware):
    """CORS middleware. It answers preflights, also from pages that reach into a private network
    (Chrome), and adds CORS headers to every response that the page's origin may read. A foreign
    origin is refused with an error that names the option which admits it."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the response to a preflight."""
        origin = request_headers["origin"]
        if not self.is_allowed_origin(origin):
            error = foreign_origin(origin)  # no page can read its shape
            return JSONResponse(error.body, status_code=error.status)
        return super().preflight_response(request_headers)


class _WithRequestId:
    """ASGI middleware that names each request: in the header ``X-Request-Id`` of its response, and
    in every log line that is written for it. A client's own name is kept if it is short and has
    harmless characters only; otherwise a random one is made."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        requested_id = Headers(scope=scope).get(REQUEST_ID, "") if scope["type"] == "http" else ""
        identity = (
            requested_id
            if _REQUEST_NAME.fullmatch(requested_id)
            else f"req_{secrets.token_hex(12)}"
        )
        request_id.set(identity)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = identity
                if is_for_messages(scope):
                    headers[_ANTHROPIC_REQUEST_ID] = identity
            await send(message)

        await self._app(scope, receive, named)


class _WithFailures:
    """ASGI middleware that lets ``error_response`` record each refused request."""

    def __init__(self, app: ASGIApp, failures: RecentFailures) -> None:
        self._app, self._failures = app, failures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[FAILURES] = self._failures
        await self._app(scope, receive, send)


class _GenerationRoute:
    """An ASGI application for one path. ``prepare`` makes a request with its choices from JSON."""

    def __init__(self, endpoint: service.Endpoint, prepare: Prepare) -> None:
        self._endpoint, self._prepare = endpoint, prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome, received_at_s = _GONE, time.monotonic()
        try:
            async with _received_body(scope, receive, self._endpoint) as body:
                work = asyncio.create_task(self._serve(body, scope, receive, send))
                disconnected = asyncio.create_task(_wait_for_disconnect(receive))
                try:
                    await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
                    outcome = work.result() if work.done() else _GONE
                finally:
                    for task in (work, disconnected):
                        task.cancel()
                    await asyncio.gather(work, disconnected, return_exceptions=True)
        except ApiError as error:
            outcome = await _refuse(error, scope, receive, send)
        except _ClientGoneError:
            outcome = _GONE
        finally:
            self._endpoint.counts.requests[scope["path"], outcome] += 1
            took_s = time.monotonic() - received_at_s
            _log.info("%s: %s after %.3f s", scope["path"], outcome, took_s)

    async def _serve(self, body: Body, scope: Scope, receive: Receive, send: Send) -> str:
        """Serve a request and return its outcome. Every error becomes a response if one can still
        be written."""
        answerer = await self._endpoint.choose_answerer()
        while True:
            attempt = _Attempt(answerer, body, scope, receive, send)
            outcome = await attempt.serve(self._prepare)
            if outcome is not None:
                return outcome
            assert self._endpoint.fallback is not None  # it can answer, since nothing was sent
            answerer = self._endpoint.fallback


class _Attempt:
    """One attempt to serve a request, by the target or by the fallback.

    A request whose verifiers are away may be tried again by the fallback, as long as no token was
    generated and nothing was sent."""

    def __init__(
        self, endpoint: service.Endpoint, body: Body, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._endpoint, self._body = endpoint, body
        self._scope, self._receive, self._send = scope, receive, send
        self._writer: _ResponseWriter | None = None
        self._has_tokens = False

    async def serve(self, prepare: Prepare) -> str | None:
        """Serve the request and return its outcome. None: no verifier can be reached, so the
        fallback should serve it. Every error becomes a response if one can still be written."""
        try:
            prepared = await _prepare_from_body(
                self._endpoint, self._body, partial(prepare, self._endpoint)
            )
            streams = prepared.request.stream
            self._writer = writer = _ResponseWriter(self._send, self._endpoint, prepared)
            async with self._endpoint.run_generations(prepared) as run:
                while not run.is_finished:
                    chunks = await self._next_chunks(run, streams)
                    if streams:
                        writer.open()
                    events = (
                        self._add_chunks(prepared, chunks)
                        if chunks
                        else prepared.envelope.keep_alive()
                    )
                    if streams:
                        await writer.write(events)
            # The last event is written after everything else: as soon as a response is complete,
            # the server reports the client as disconnected, and this task is cancelled.
            if streams:
                writer.open()
                ending = prepared.envelope.ending(prepared.choices, prepared.usage())
                await writer.write(ending, more=False)
            else:
                whole = prepared.envelope.whole(prepared.choices, prepared.usage())
                response = JSONResponse(whole, headers=writer.headers)
                await response(self._scope, self._receive, self._send)
            return _DONE
        except _ClientGoneError:
            return _GONE
        except _VerifiersAwayError:
            return None
        except Exception as error:
            return await self._answer_error(_api_error(error))

    async def _answer_error(self, error: ApiError) -> str | None:
        """Write an error and return the outcome, or return None if the fallback should answer."""
        if (writer := self._writer) is None or not writer.has_begun:
            can_fall_back = error.status == 503 and not self._has_tokens
            if can_fall_back and await self._endpoint.find_fallback() is not None:
                return None
            return await _refuse(error, self._scope, self._receive, self._send)
        record_failure(error, self._scope)
        with contextlib.suppress(_ClientGoneError):
            await writer.write(writer.prepared.envelope.failed(error), more=False)
        return _CUT

    async def _next_chunks(self, run: service.RequestRun, streams: bool) -> list[tuple[int, Chunk]]:
        """Return the chunks that are ready, or none if the stream should show that it is alive.
        Before the first one it is checked whether a verifier can be reached at all, if there is a
        fallback. Raises ``_VerifiersAwayError``."""
        limit_s = self._endpoint.settings.keep_alive_s if streams else None
        if self._has_tokens or self._endpoint.fallback is None:
            return await run.next(limit_s)
        assert self._writer is not None
        until_s = None if limit_s is None else time.monotonic() + limit_s
        while True:
            chunks = await run.next(_AWAY_CHECK_S)
            if chunks or run.is_finished:
                self._has_tokens = True
                self._body.close()
                return chunks
            if not self._writer.has_begun and not run.is_connected:
                if await self._endpoint.find_fallback() is not None and not run.has_tokens:
                    raise _VerifiersAwayError
            if until_s is not None and time.monotonic() >= until_s:
                return []

    def _add_chunks(
        self, prepared: service.PreparedRequest, chunks: list[tuple[int, Chunk]]
    ) -> bytes:
        """Add chunks to their choices and return the server-sent events for them."""
        envelope, events = prepared.envelope, []
        for index, chunk in chunks:
            choice = prepared.choices[index]
            if chunk.tokens:
                self._endpoint.record_first_token(prepared)
            delta = choice.add(chunk)
            if not prepared.request.stream:
                continue
            if delta.parts or delta.scores or delta.sources is not None:
                events.append(envelope.delta(choice, delta))
            if choice.finish is not None:
                events.append(envelope.closing(choice))
        return b"".join(events)


class _ClientGoneError(Exception):
    """The client has disconnected or does not read any more."""


class _VerifiersAwayError(Exception):
    """No verifier can be reached, and the fallback can answer, since no token was generated."""


class _ResponseWriter:
    """Writer of a response, as a stream of events or whole. Raises ``_ClientGoneError`` if a write
    takes longer than ``write_within_s``, or than ``unread_within_s`` while another request
    waits."""

    def __init__(
        self, send: Send, endpoint: service.Endpoint, prepared: service.PreparedRequest
    ) -> None:
        self._send, self._endpoint, self.prepared = send, endpoint, prepared
        self.has_begun = False
        self._opening: bytes | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response. They are complete only after generation has begun."""
        headers = {}
        if name := self.prepared.answered_by:
            _log.info("answered by %s", name)
            headers[ANSWERED_BY] = re.sub(r"[^ -~]", "?", name)
        if names := self.prepared.ignored_fields[:_MAX_IGNORED_NAMES]:
            safe = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:_MAX_NAME_LENGTH]) for name in names]
            # The names are the client's words, which are never logged.
            _log.info("ignored %d fields of a request", len(self.prepared.ignored_fields))
            headers[IGNORED] = ", ".join(safe)
        return headers

    def open(self) -> None:
        """Make the opening events, once. They have to be made before all others, and state how many
        tokens the prompt has, which is known when the first chunk is there."""
        if self._opening is None:
            self._opening = self.prepared.envelope.opening(self.prepared.choices)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Write events; the opening events come before the first ones. ``more`` false ends the
        stream."""
        try:
            limit = asyncio.timeout(self._endpoint.settings.write_within_s)
            async with limit:
                with self._endpoint.admission.watch_write(limit):
                    if not self.has_begun:
                        self.has_begun = True
                        extra_headers = [
                            (n.lower().encode(), v.encode()) for n, v in self.headers.items()
                        ]
                        content_type = self.prepared.envelope.content_type
                        headers = [
                            (b"content-type", content_type.encode()),
                            *_STREAM_HEADERS,
                            *extra_headers,
                        ]
                        start = {"type": "http.response.start", "status": 200, "headers": headers}
                        await self._send(start)
                        assert self._opening is not None
                        data = self._opening + data
                    await self._send(
                        {"type": "http.response.body", "body": data, "more_body": more}
                    )
        except (TimeoutError, OSError) as error:
            raise _ClientGoneError from error


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> str:
    response = error_response(error, scope, _if_unread(scope))
    await response(scope, receive, send)
    return str(response.status_code)


def _if_unread(scope: Scope) -> dict[str, str]:
    """Return the header that closes a connection whose request body was not read to its end."""
    return {"Connection": "close"} if scope.get(_UNREAD) else {}


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_Prepared = TypeVar("_Prepared")


async def _prepare_from_body(
    endpoint: service.Endpoint,
    body: Body,
    prepare: Callable[[Mapping[str, Any]], Awaitable[_Prepared]],
) -> _Prepared:
    """Return what ``prepare`` makes of the JSON in ``body``. The memory of the body is released
    then, unless a fallback may need it. Raises ``ApiError``, also if preparing takes too long."""
    take = body.take_content if endpoint.fallback is None else body.copy_content
    async with endpoint.prepare_within_limit():
        async with endpoint.large_body_lock if body.is_large else contextlib.nullcontext():
            prepared = await prepare(await endpoint.run_reader(endpoint.read_json, take()))
    if endpoint.fallback is None:
        body.close()
    return prepared


@contextlib.asynccontextmanager
async def _received_body(
    scope: Scope, receive: Receive, endpoint: service.Endpoint
) -> AsyncIterator[Body]:
    """Read a request's body, which occupies memory until the block ends or the body is closed.

    No byte of it is read if the endpoint is stopping, the queue is full, or there is no memory for
    it. Raises ``_ClientGoneError``, and ``ApiError`` also for a body that is too large or too
    slow."""
    current_client.set(client_address(scope))
    scope[_UNREAD] = True
    if endpoint.is_stopping:
        raise service.stopping_error()
    endpoint.admission.check_queue()
    settings = endpoint.settings
    limit_s, limit_bytes, has_more = settings.body_within_s, endpoint.max_body_bytes, True
    limit = asyncio.timeout(limit_s)
    announced = int(Headers(scope=scope).get("content-length", "0"))  # checked by the guard

    def drop() -> None:
        limit.reschedule(asyncio.get_running_loop().time())

    body = endpoint.bodies.open(current_client.get(), announced, drop)
    try:
        try:
            async with limit:
                while has_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGoneError
                    has_more = message.get("more_body", False)
                    data = message.get("body", b"")
                    if body.held_bytes + len(data) > limit_bytes:
                        raise too_large(limit_bytes, f"more than {limit_bytes}")
                    body.add(data)
                body.is_receiving = scope[_UNREAD] = False
        except TimeoutError:
            why = f"the request did not arrive within {limit_s:g} s (endpoint.body_within_s)"
            if body.was_dropped:
                why = "the request stopped arriving, and another one needed its room"
            raise ApiError(408, why) from None
        yield body
    finally:
        body.close()


class _Handlers:
    def __init__(self, endpoint: service.Endpoint, status: StatusSource | None) -> None:
        self._endpoint, self._status = endpoint, status
        tables = [Table(service.METRICS_PREFIX, service.METRICS, endpoint.with_model_series)]
        if status is not None:
            snapshot = partial(status.snapshot, _AFTER_ALL_EVENTS)
            tables.append(Table(agent_status.METRICS_PREFIX, agent_status.AGENT_METRICS, snapshot))
        self._registry = make_registry(*tables)

    async def health(self, request: Request) -> Response:
        """Report ``status``: ``ok``, ``waiting`` (no verifier is ready) or ``stopping``. A request
        without the API key gets nothing more but ``needs_key``."""
        endpoint = self._endpoint
        usual = "ok" if endpoint.verifiers.ready else "waiting"
        reply: dict[str, Any] = {"status": "stopping" if endpoint.is_stopping else usual}
        if endpoint.key and not has_key(request.headers, endpoint.key):
            reply["needs_key"] = True
        else:
            reply |= {
                "version": __version__,
                "model": endpoint.models.name,
                "verifiers": to_plain_data(endpoint.verifiers.statuses),
                "texts_running": endpoint.admission.running,
                "requests_waiting": endpoint.admission.waiting,
            }
        return JSONResponse(reply, status_code=503 if endpoint.is_stopping else 200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        if self._status is not None:
            self._status.refresh_for_display()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"Content-Type": content_type})

    async def tokenize(self, request: Request) -> Response:
        """Tokenize a text, as vLLM's server does. The text may also stand in ``content``, as for
        llama.cpp's."""
        tokens, context_length = await self._with_body(request, self._endpoint.tokenize)
        return JSONResponse(
            {"tokens": tokens, "count": len(tokens), "max_model_len": context_length}
        )

    async def detokenize(self, request: Request) -> Response:
        text = await self._with_body(request, self._endpoint.detokenize)
        return JSONResponse({"prompt": text, "content": text})

    async def _with_body(
        self, request: Request, prepare: Callable[[Mapping[str, Any]], Awaitable[_Prepared]]
    ) -> _Prepared:
        """Read the request's JSON, under the same limits as for a generation, and return what
        ``prepare`` makes of it."""
        try:
            async with _received_body(request.scope, request.receive, self._endpoint) as body:
                return await _prepare_from_body(self._endpoint, body, prepare)
        except _ClientGoneError:
            raise ApiError(400, "the request was not sent to its end") from None

    async def count_message_tokens(self, request: Request) -> Response:
        count = await self._with_body(request, self._endpoint.count_message_tokens)
        return JSONResponse({"input_tokens": count})

    async def stored_response(self, request: Request) -> Response:
        """Return a stored response, or delete it."""
        identity, store = request.path_params["name"], self._endpoint.responses
        if request.method == "DELETE":
            store.delete(identity)
            deleted = {"id": identity, "object": "response.deleted", "deleted": True}
            return JSONResponse(deleted)
        return Response(store.find(identity).body, media_type="application/json")

    async def stored_input(self, request: Request) -> Response:
        """Return the input of a stored response, the newest item first."""
        stored = self._endpoint.responses.find(request.path_params["name"])
        items = stored.conversation[: stored.input_count][::-1]
        return JSONResponse({"object": "list", "data": items, "has_more": False})

    async def refuse_task(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/v1")
        why = f"this endpoint generates text and has no {_OTHER_TASKS[path]}; use another server"
        raise ApiError(404, why, code="unsupported_endpoint")

    async def models(self, request: Request) -> Response:
        data = [self._model(one) for one in self._listed]
        page: dict[str, Any] = {"object": "list", "data": data}
        if is_for_messages(request.scope):
            page |= model_page(data, time_text(self._endpoint.created_at_s))
        return JSONResponse(page)

    @property
    def _listed(self) -> Sequence[service.ServedModel | None]:
        """All served models. None stands for the default one that no verifier has reported yet."""
        return self._endpoint.models.listed or (None,)

    async def model(self, request: Request) -> Response:
        chosen = await self._known_model(request.path_params["name"])
        model = self._model(chosen.served)
        if is_for_messages(request.scope):
            model = model_page([model], time_text(self._endpoint.created_at_s))["data"][0]
        return JSONResponse(model)

    async def _known_model(self, name: str) -> service.ModelChoice:
        """Return the model with a name. Raises ``ApiError`` unless it is known to be served."""
        chosen, usual = await self._endpoint.choose_model(name), self._endpoint.models.name
        if chosen.served is None and name not in (usual, service.ALIAS):
            raise unknown_model_error(name, (usual,))
        return chosen

    def _model(self, served: service.ServedModel | None) -> dict[str, Any]:
        """Return a model in OpenAI's form, with the fields that vLLM's server adds. None: no
        verifier has reported its models yet."""
        return {
            "id": self._endpoint.models.name if served is None else served.name,
            "object": "model",
            "created": self._endpoint.created_at_s,
            "owned_by": "edgespec",
            "parent": None if served is None else served.parent,
            "max_model_len": None if served is None else served.context_length,
        }

    # --- Ollama's paths ---------------------------------------------------------------------------

    async def ollama_version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION, "edgespec": __version__})

    async def ollama_models(self, request: Request) -> Response:
        endpoint = self._endpoint
        entries = [
            model_entry(
                endpoint.models.name if one is None else one.name,
                parent=None if one is None else one.parent,
                fingerprint="" if one is None else one.info.fingerprint,
                context_length=None if one is None else one.context_length,
                since_s=endpoint.created_at_s,
            )
            for one in self._listed
        ]
        return JSONResponse({"models": entries})

    async def show_ollama_model(self, request: Request) -> Response:
        return JSONResponse(await self._with_body(request, self._describe_model))

    async def _describe_model(self, data: Mapping[str, Any]) -> dict[str, Any]:
        chosen = await self._ollama_model(data)
        template = self._endpoint.tokenizer.chat_template(tools=True)
        return model_description(
            parent=None if chosen.served is None else chosen.served.parent,
            template="" if template is None else template.source,
            context_length=chosen.context_length,
            since_s=self._endpoint.created_at_s,
        )

    async def pull_ollama_model(self, request: Request) -> Response:
        """Report success for a model that a verifier serves. No other model can be had here."""
        streams = await self._with_body(request, self._find_model_to_pull)
        done = {"status": "success"}
        if not streams:
            return JSONResponse(done)
        return Response(compact_json(done) + "\n", media_type=NDJSON)

    async def _find_model_to_pull(self, data: Mapping[str, Any]) -> bool:
        """Return whether the response is a stream. Raises ``ApiError`` if the model is not
        served."""
        try:
            await self._ollama_model(data)
        except ApiError as error:
            why = f"{error.message}; this endpoint does not pull models: a verifier has to serve it"
            raise ApiError(error.status, why, param=error.param, code=error.code) from None
        return Fields(data).boolean("stream", absent=True)

    async def _ollama_model(self, data: Mapping[str, Any]) -> service.ModelChoice:
        """Return the model that a request names in ``model`` or, as older clients, in ``name``.
        Raises ``ApiError``."""
        fields = Fields(data)
        if not (name := fields.text("model") or fields.text("name")):
            raise fields.error("model", "is missing")
        return await self._known_model(self._endpoint.models.without_tag(name))


async def _handle_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        requested = f"{request.method} {request.url.path[:200]}"
        why = {
            404: f"there is no {requested} here; there are {_KNOWN_PATHS}",
            405: f"{request.url.path[:200]} does not take {request.method};"
            f" there are {_KNOWN_PATHS}",
        }
        response_error = ApiError(error.status_code, why.get(error.status_code, error.detail))
        return error_response(response_error, request.scope, error.headers)
    return error_response(_api_error(error), request.scope, _if_unread(request.scope))


def _api_error(error: Exception) -> ApiError:
    """Return the error to send for an exception. Failures of the endpoint itself are logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecursionError):
        return nested_too_deep()
    log_failure(_log, "answering a request failed", error=error, may_quote_client=True)
    return ApiError(500, f"the endpoint failed: {type(error).__name__}")
