"""The endpoint as an ASGI application: the paths, the writing of responses, whole or as events, and
the status page.

While a request is served its connection is watched: a client that disconnects cancels its
generations. A stream begins with the first chunk, so an earlier failure has a status code. After
``keep_alive_s`` without a chunk it begins anyway, with a comment, and a later failure is an event.

The status page is one file that fetches nothing but ``/status.json``, once a second while it is
visible. A fetch also makes the watch check idle verifiers more often.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
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
from edgespec.endpoint.admission import client_of, current_client
from edgespec.endpoint.answer import KEEP_ALIVE
from edgespec.endpoint.bodies import Body
from edgespec.endpoint.request_json import (
    ApiError,
    nested_too_deep,
    no_such_model,
    unavailable,
)
from edgespec.endpoint.server import (
    HEALTH,
    Guard,
    error_response,
    foreign_origin,
    origin_pattern,
    shows_key,
    too_large,
)
from edgespec.telemetry import agent_status
from edgespec.telemetry.logs import log_failure, request_id
from edgespec.telemetry.metric_table import Table, registry_of
from edgespec.telemetry.trace import plain

_GONE, _CUT, _DONE = "gone", "cut", "200"
REQUEST_ID: Final = "X-Request-Id"
IGNORED: Final = "X-Edgespec-Ignored"
_REQUEST_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_PLACES: Final = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/models"
_EVENTS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise a proxy such as nginx buffers the stream
)
_UNREAD: Final = "edgespec.unread"
"""Key of an ASGI scope: true until the request's body has been read to its end."""
_MOST_NAMES: Final = 16
_LONGEST_NAME: Final = 40
_ASSETS: Final = Path(__file__).parent / "status"
_PAGE_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_WITHOUT_EVENTS: Final = 1 << 62

_log = logging.getLogger(__name__)

Prepare = Callable[[Mapping[str, Any]], Awaitable[service.Answer]]


def build_app(endpoint: service.Endpoint, status: StatusSource | None = None) -> ASGIApp:
    """Return the application with all routes, guarded. With ``status`` it serves the status page
    and the agent's metrics too."""
    places, post = _Places(endpoint, status), ["POST"]
    api: list[tuple[str, Any, list[str] | None]] = [
        ("/chat/completions", _Generation(endpoint, endpoint.chat), post),
        ("/completions", _Generation(endpoint, endpoint.completion), post),
        ("/responses", _Generation(endpoint, endpoint.response), post),
        ("/models", places.models, None),
        ("/models/", places.models, None),
        ("/models/{name:path}", places.model, None),
        ("/tokenize", places.tokenize, post),
        ("/detokenize", places.detokenize, post),
    ]
    routes: list[BaseRoute] = [
        # A client whose base URL lacks the /v1 finds the same paths.
        *(
            Route(base + path, place, methods=methods)
            for path, place, methods in api
            for base in ("/v1", "")
        ),
        Route(HEALTH, places.health),
        Route("/metrics", places.metrics),
        Route("/version", places.version),
        *(() if status is None else status_routes(status)),
    ]
    kinds: tuple[type[Exception], ...] = (ApiError, HTTPException, Exception)
    app: ASGIApp = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _told))
    settings = endpoint.settings
    app = Guard(app, endpoint.key, settings)
    return _WithRequestId(_with_cors(app, settings))


def waiting_app(key: str, settings: EndpointSection) -> ASGIApp:
    """Return the application of an endpoint that has no tokenizer yet. ``/health`` reports
    ``waiting``, and every other path returns 503."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "waiting"})

    async def wait(request: Request, error: Exception) -> Response:
        why = "no verifier answers yet, and one has to lend its tokenizer first"
        return error_response(unavailable(why))

    app: ASGIApp = Starlette(
        routes=[Route(HEALTH, health)], exception_handlers={HTTPException: wait}
    )
    return _WithRequestId(_with_cors(Guard(app, key, settings), settings))


def _with_cors(app: ASGIApp, settings: EndpointSection) -> ASGIApp:
    return _Cors(
        app,
        allow_origin_regex=origin_pattern(settings),
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=("Retry-After", REQUEST_ID, IGNORED),
    )


class _Cors(CORSMiddleware):
    """CORS middleware. It answers preflights, also those of pages that reach into a private network
    (Chrome), and adds CORS headers to every response that the page's origin may read. A foreign
    origin is refused with an error that names the option which admits it."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the response to a preflight."""
        origin = request_headers["origin"]
        if not self.is_allowed_origin(origin):
            return error_response(foreign_origin(origin))
        return super().preflight_response(request_headers)


class _WithRequestId:
    """ASGI middleware that names each request: in the header ``X-Request-Id`` of its response, and
    in every log line that is written for it. A client's own name is kept if it is short and has
    harmless characters only; otherwise a random one is made."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID, "") if scope["type"] == "http" else ""
        name = given if _REQUEST_NAME.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        request_id.set(name)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        await self._app(scope, receive, named)


class _Generation:
    """An ASGI application for one path. ``prepare`` makes a request with its choices from JSON."""

    def __init__(self, endpoint: service.Endpoint, prepare: Prepare) -> None:
        self._endpoint, self._prepare = endpoint, prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome, began_s = _GONE, time.monotonic()
        try:
            async with _body_of(scope, receive, self._endpoint) as body:
                work = asyncio.create_task(self._serve(body, scope, receive, send))
                gone = asyncio.create_task(_gone(receive))
                try:
                    await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                    outcome = work.result() if work.done() else _GONE
                finally:
                    for task in (work, gone):
                        task.cancel()
                    await asyncio.gather(work, gone, return_exceptions=True)
        except ApiError as error:
            outcome = await _refuse(error, scope, receive, send)
        except _ClientGoneError:
            outcome = _GONE
        finally:
            self._endpoint.counts.requests[scope["path"], outcome] += 1
            took_s = time.monotonic() - began_s
            _log.info("%s: %s after %.3f s", scope["path"], outcome, took_s)

    async def _serve(self, body: Body, scope: Scope, receive: Receive, send: Send) -> str:
        """Serve a request and return its outcome. Every error becomes a response if one can still
        be written."""
        writer: _Writer | None = None
        try:
            answer = await _prepared(self._endpoint, body, self._prepare)
            settings, streams = self._endpoint.settings, answer.request.stream
            writer = _Writer(send, self._endpoint, answer)
            async with self._endpoint.running(answer) as run:
                while not run.over:
                    news = await run.next(settings.keep_alive_s if streams else None)
                    said = self._add(answer, news) if news else KEEP_ALIVE
                    if streams:
                        await writer.write(said)
            # The last event is written after everything else: as soon as a response is complete,
            # the server reports the client as disconnected, and this task is cancelled.
            if streams:
                ending = answer.envelope.ending(answer.choices, answer.usage())
                await writer.write(ending, more=False)
            else:
                whole = answer.envelope.whole(answer.choices, answer.usage())
                await JSONResponse(whole, headers=writer.headers)(scope, receive, send)
            return _DONE
        except _ClientGoneError:
            return _GONE
        except Exception as error:
            told = _told_of(error)
            if writer is None or not writer.begun:
                return await _refuse(told, scope, receive, send)
            with contextlib.suppress(_ClientGoneError):
                await writer.write(writer.answer.envelope.failed(told), more=False)
            return _CUT

    def _add(self, answer: service.Answer, news: list[tuple[int, Chunk]]) -> bytes:
        """Add chunks to their choices and return the server-sent events for them."""
        envelope, said = answer.envelope, []
        for index, chunk in news:
            choice = answer.choices[index]
            if chunk.tokens:
                self._endpoint.note_first(answer)
            delta = choice.add(chunk)
            if not answer.request.stream:
                continue
            if delta.parts or delta.scores:
                said.append(envelope.delta(choice, delta))
            if choice.finish is not None:
                said.append(envelope.closing(choice))
        return b"".join(said)


class _ClientGoneError(Exception):
    """The client has disconnected or does not read any more."""


class _Writer:
    """Writer of a response, as a stream of events or whole. Raises ``_ClientGoneError`` if a write
    takes longer than ``write_within_s``, or than ``unread_within_s`` while another request
    waits."""

    def __init__(self, send: Send, endpoint: service.Endpoint, answer: service.Answer) -> None:
        self._send, self._endpoint, self.answer = send, endpoint, answer
        self.begun = False
        self._opening = answer.envelope.opening(answer.choices) if answer.request.stream else b""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response. They are complete only after generation has begun."""
        if not (names := self.answer.ignored[:_MOST_NAMES]):
            return {}
        safe = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:_LONGEST_NAME]) for name in names]
        # The names are the client's words, which are never logged.
        _log.info("ignored %d fields of a request", len(self.answer.ignored))
        return {IGNORED: ", ".join(safe)}

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Write events; the opening events come before the first ones. ``more`` false ends the
        stream."""
        try:
            limit = asyncio.timeout(self._endpoint.settings.write_within_s)
            async with limit:
                with self._endpoint.admission.unread(limit):
                    if not self.begun:
                        self.begun = True
                        own = [(n.lower().encode(), v.encode()) for n, v in self.headers.items()]
                        headers = [*_EVENTS, *own]
                        start = {"type": "http.response.start", "status": 200, "headers": headers}
                        await self._send(start)
                        data = self._opening + data
                    await self._send(
                        {"type": "http.response.body", "body": data, "more_body": more}
                    )
        except (TimeoutError, OSError) as error:
            raise _ClientGoneError from error


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> str:
    await error_response(error, _if_unread(scope))(scope, receive, send)
    return str(error.status)


def _if_unread(scope: Scope) -> dict[str, str]:
    """Return the header that closes a connection whose request body was not read to its end."""
    return {"Connection": "close"} if scope.get(_UNREAD) else {}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_Made = TypeVar("_Made")


async def _prepared(
    endpoint: service.Endpoint, body: Body, prepare: Callable[[Mapping[str, Any]], Awaitable[_Made]]
) -> _Made:
    """Return what ``prepare`` makes of the JSON in ``body``, whose memory is released then. Raises
    ``ApiError``, also if preparing takes too long."""
    async with endpoint.preparing():
        async with endpoint.one_large if body.is_large else contextlib.nullcontext():
            made = await prepare(await endpoint.read(endpoint.read_json, body.whole()))
    body.close()
    return made


@contextlib.asynccontextmanager
async def _body_of(
    scope: Scope, receive: Receive, endpoint: service.Endpoint
) -> AsyncIterator[Body]:
    """Read a request's body, which occupies memory until the block ends or the body is closed.

    No byte of it is read if the endpoint is stopping, the queue is full, or there is no memory for
    it. Raises ``_ClientGoneError``, and ``ApiError`` also for a body that is too large or too
    slow."""
    current_client.set(client_of(scope))
    scope[_UNREAD] = True
    if endpoint.stopping:
        raise service.stopping()
    endpoint.admission.check()
    settings = endpoint.settings
    within_s, limit_bytes, more = settings.body_within_s, settings.max_body_bytes, True
    limit = asyncio.timeout(within_s)
    announced = int(Headers(scope=scope).get("content-length", "0"))  # checked by the guard

    def drop() -> None:
        limit.reschedule(asyncio.get_running_loop().time())

    body = endpoint.bodies.open(current_client.get(), announced, drop)
    try:
        try:
            async with limit:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGoneError
                    more = message.get("more_body", False)
                    data = message.get("body", b"")
                    if body.held_bytes + len(data) > limit_bytes:
                        raise too_large(limit_bytes, f"more than {limit_bytes}")
                    body.add(data)
                body.is_coming = scope[_UNREAD] = False
        except TimeoutError:
            why = f"the request did not arrive within {within_s:g} s"
            if body.was_dropped:
                why = "the request stopped arriving, and another one needed its room"
            raise ApiError(408, why) from None
        yield body
    finally:
        body.close()


def status_routes(status: StatusSource) -> list[Route]:
    """Return the routes of the status page, for an application that runs in the agent's event loop.
    The page shows addresses and counts, and no text of requests or outputs."""
    page, policy = rendered_page()
    headers = {**_PAGE_HEADERS, "Content-Security-Policy": policy}

    async def show(request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def numbers(request: Request) -> Response:
        status.looked_upon()
        after = request.query_params.get("after", "0")
        number = int(after) if re.fullmatch("[0-9]{1,15}", after) else 0
        return JSONResponse(status.snapshot(number).as_json(), headers=_PAGE_HEADERS)

    return [Route("/", show), Route("/status.json", numbers)]


def rendered_page() -> tuple[bytes, str]:
    """Return the page and a content security policy that lets its own script and style run, and
    nothing else."""
    page, style, script = (
        (_ASSETS / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    page = page.replace("STYLE", style).replace("SCRIPT", script)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none';"
        f" style-src '{_csp_digest(style)}'; script-src '{_csp_digest(script)}'"
    )
    return page.encode(), policy


def _csp_digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class _Places:
    def __init__(self, endpoint: service.Endpoint, status: StatusSource | None) -> None:
        self._endpoint, self._status = endpoint, status
        tables = [Table(service.METRICS_PREFIX, service.METRICS, endpoint.counted)]
        if status is not None:
            snapshot = partial(status.snapshot, _WITHOUT_EVENTS)
            tables.append(Table(agent_status.METRICS_PREFIX, agent_status.AGENT_METRICS, snapshot))
        self._registry = registry_of(*tables)

    async def health(self, request: Request) -> Response:
        """Report ``status``: ``ok``, ``waiting`` (no verifier is ready) or ``stopping``. A request
        without the API key gets nothing more."""
        endpoint = self._endpoint
        usual = "ok" if endpoint.verifiers.ready else "waiting"
        found: dict[str, Any] = {"status": "stopping" if endpoint.stopping else usual}
        if not endpoint.key or shows_key(request.headers, endpoint.key):
            found |= {
                "version": __version__,
                "model": endpoint.models.name,
                "verifiers": plain(endpoint.verifiers.statuses),
                "texts_running": endpoint.admission.running,
                "requests_waiting": endpoint.admission.waiting,
            }
        return JSONResponse(found, status_code=503 if endpoint.stopping else 200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        if self._status is not None:
            self._status.looked_upon()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"Content-Type": content_type})

    async def tokenize(self, request: Request) -> Response:
        """Tokenize a text, as vLLM's server does. The text may also stand in ``content``, as for
        llama.cpp's."""
        tokens, most = await self._answered(request, self._endpoint.tokenize)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": most})

    async def detokenize(self, request: Request) -> Response:
        text = await self._answered(request, self._endpoint.detokenize)
        return JSONResponse({"prompt": text, "content": text})

    async def _answered(
        self, request: Request, prepare: Callable[[Mapping[str, Any]], Awaitable[_Made]]
    ) -> _Made:
        """Read the request's JSON, under the same limits as for a generation, and return what
        ``prepare`` makes of it."""
        try:
            async with _body_of(request.scope, request.receive, self._endpoint) as body:
                return await _prepared(self._endpoint, body, prepare)
        except _ClientGoneError:
            raise ApiError(400, "the request was not sent to its end") from None

    async def models(self, request: Request) -> Response:
        served = self._endpoint.models.listed or (None,)
        return JSONResponse({"object": "list", "data": [self._model(one) for one in served]})

    async def model(self, request: Request) -> Response:
        name, usual = request.path_params["name"], self._endpoint.models.name
        chosen = await self._endpoint.choose_model(name)
        if chosen.served is None and name not in (usual, service.ALIAS):
            raise no_such_model(name, (usual,))
        return JSONResponse(self._model(chosen.served))

    def _model(self, served: service.ServedModel | None) -> dict[str, Any]:
        """Return a model in OpenAI's form, with the fields that vLLM's server adds. None: no
        verifier has reported its models yet."""
        return {
            "id": self._endpoint.models.name if served is None else served.name,
            "object": "model",
            "created": self._endpoint.started,
            "owned_by": "edgespec",
            "parent": None if served is None else served.parent,
            "max_model_len": None if served is None else served.context_length,
        }


async def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        what = f"{request.method} {request.url.path[:200]}"
        why = {
            404: f"there is no {what} here; there are {_PLACES}",
            405: f"{request.url.path[:200]} does not take {request.method}; there are {_PLACES}",
        }
        found = ApiError(error.status_code, why.get(error.status_code, error.detail))
        return error_response(found, error.headers)
    return error_response(_told_of(error), _if_unread(request.scope))


def _told_of(error: Exception) -> ApiError:
    """Return the error to send for an exception. Failures of the endpoint itself are logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecursionError):
        return nested_too_deep()
    log_failure(_log, "answering a request failed", error=error, may_quote_client=True)
    return ApiError(500, f"the endpoint failed: {type(error).__name__}")
