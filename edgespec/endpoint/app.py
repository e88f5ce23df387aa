"""The endpoint as an ASGI application: which path is what, how an answer is written, at once or as
events, and the status page.

While a request is answered its connection is listened to: a client that hangs up cancels the
generation. A stream begins with the first chunk, so that what fails before it fails with a status
code; after ``keep_alive_s`` without one it begins anyway, with a comment, and fails in an event.

The status page is one file whose style and script the content security policy names by their
hashes: nothing else runs, and nothing is fetched but ``/status.json``, once a second while the page
is visible. A fetch tells the source that somebody looks: only then are idle verifiers asked.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec import __version__
from edgespec.config.common import is_loopback
from edgespec.device.reply import Chunk
from edgespec.device.status import StatusSource
from edgespec.endpoint.answer import KEEP_ALIVE
from edgespec.endpoint.models import ALIAS, ServedModel
from edgespec.endpoint.request_json import (
    ApiError,
    nested_too_deep,
    no_such_model,
    read_object,
)
from edgespec.endpoint.server import HEALTH, Guard, error_response, shows_key, too_large
from edgespec.endpoint.service import METRICS, METRICS_PREFIX, Answer, Endpoint, Run, stopping
from edgespec.telemetry import agent_status
from edgespec.telemetry.metric_table import Table, registry_of

_GONE, _CUT, _DONE = "gone", "cut", "200"
_LARGE: Final = 1 << 18
"""Bodies beyond this are read one after the other: in memory they are many times as much."""
_EVENTS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or a proxy such as nginx collects what should flow
)
_MOST_NAMES: Final = 16
_LONGEST_NAME: Final = 40
Prepare = Callable[[Mapping[str, Any]], Awaitable[Answer]]


class GenerationRoute:
    """An ASGI application for one path; ``prepare`` turns a request's JSON into an answer."""

    def __init__(self, endpoint: Endpoint, prepare: Prepare) -> None:
        self._endpoint, self._prepare = endpoint, prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome, settings, began_s = _GONE, self._endpoint.settings, time.monotonic()
        try:
            async with asyncio.timeout(settings.body_within_s):
                body = await read_body(receive, settings.max_body_bytes)
            if body is not None:
                work = self._serve([body], scope, receive, send)
                del body
                outcome = await while_connected(receive, work) or _GONE
        except TimeoutError:
            late = ApiError(408, _late(settings.body_within_s))
            outcome = await self._refuse(late, scope, receive, send)
        except ApiError as error:
            outcome = await self._refuse(error, scope, receive, send)
        finally:
            self._endpoint.counts.requests[scope["path"], outcome] += 1
            took_s = time.monotonic() - began_s
            _log.info("%s: %s after %.3f s", scope["path"], outcome, took_s)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> str:
        unread = {"Connection": "close"} if error.status in (408, 413) else {}
        await error_response(error, unread)(scope, receive, send)
        return str(error.status)

    async def _serve(self, bodies: list[bytes], scope: Scope, receive: Receive, send: Send) -> str:
        """What became of the one of ``bodies``, which is let go once it is read. Never raises what
        a client could not be told."""
        writer = _Writer(send, self._endpoint.settings.write_within_s)
        try:
            if self._endpoint.stopping:
                raise stopping()
            self._endpoint.admission.check()
            large = len(bodies[0]) > _LARGE
            async with self._endpoint.one_large if large else contextlib.nullcontext():
                data = await asyncio.to_thread(read_object, bodies.pop())
            answer = await self._prepare(data)
            del data
            writer.answer(answer)
            async with self._turn(answer, writer) as run:
                if answer.stream:
                    await self._stream(answer, run, writer)
                else:
                    await self._at_once(answer, run)
            if not answer.stream:
                whole = answer.envelope.whole(answer.choices, answer.usage())
                await JSONResponse(whole, headers=writer.headers)(scope, receive, send)
            return _DONE
        except _ClientGoneError:
            return _GONE
        except Exception as error:
            if isinstance(error, RecursionError):
                error = nested_too_deep()
            if not isinstance(error, ApiError):
                _log.exception("answering a request failed")
                error = ApiError(500, f"the endpoint failed: {type(error).__name__}")
            if not writer.begun:
                return await self._refuse(error, scope, receive, send)
            with contextlib.suppress(_ClientGoneError):
                await writer.failed(error)
            return _CUT

    @asynccontextmanager
    async def _turn(self, answer: Answer, writer: _Writer) -> AsyncIterator[Run]:
        """The generations of ``answer``, once it is their turn; a stream that waits for it is kept
        alive."""
        waits = [asyncio.create_task(self._keep_alive(writer))] if answer.stream else []
        try:
            async with self._endpoint.running(answer) as run:
                await _cancelled(waits)
                yield run
        finally:
            await _cancelled(waits)

    async def _keep_alive(self, writer: _Writer) -> None:
        while True:
            await asyncio.sleep(self._endpoint.settings.keep_alive_s)
            await writer.write(KEEP_ALIVE)

    async def _at_once(self, answer: Answer, run: Run) -> None:
        while not run.over:
            self._add(answer, await run.next())

    async def _stream(self, answer: Answer, run: Run, writer: _Writer) -> None:
        keep_alive_s = self._endpoint.settings.keep_alive_s
        while not run.over:
            news = await run.next(keep_alive_s)
            await writer.write(self._add(answer, news) if news else KEEP_ALIVE)
        await writer.end(answer.envelope.ending(answer.choices, answer.usage()))

    def _add(self, answer: Answer, news: list[tuple[int, Chunk]]) -> bytes:
        """Takes in what came; returns the server-sent events that it is."""
        envelope, said = answer.envelope, []
        for index, chunk in news:
            choice = answer.choices[index]
            if chunk.tokens:
                self._endpoint.note_first(answer)
            delta = choice.add(chunk)
            if not answer.stream:
                continue
            if not delta.empty:
                said.append(envelope.delta(choice, delta))
            if choice.finish is not None:
                said.append(envelope.closing(choice))
        return b"".join(said)


def _names(names: Sequence[str]) -> str:
    """For a header: a few of them, each of letters that may stand there."""
    safe = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:_LONGEST_NAME]) for name in names[:_MOST_NAMES]]
    return ", ".join(safe)


def _late(within_s: float) -> str:
    return f"the request did not arrive within {within_s:g} s"


class _ClientGoneError(Exception):
    """It reads nothing any more."""


class _Writer:
    """Writes a stream of events. Raises ``_ClientGoneError`` where a write takes longer than
    ``within_s``."""

    def __init__(self, send: Send, within_s: float) -> None:
        self._send, self._within_s = send, within_s
        self.begun = False
        self.headers: dict[str, str] = {}
        self._answer: Answer | None = None

    def answer(self, answer: Answer) -> None:
        """What the stream is of: its first events stand before the first that is written."""
        self._answer = answer
        if answer.ignored:
            self.headers = {"X-Edgespec-Ignored": _names(answer.ignored)}
            # Their names are the client's words, which stand in no log.
            _log.info("ignored %d fields of a request", len(answer.ignored))

    async def failed(self, error: ApiError) -> None:
        """End a stream in the middle."""
        await self.end(b"" if self._answer is None else self._answer.envelope.failed(error))

    async def write(self, data: bytes) -> None:
        await self._body(data, more=True)

    async def end(self, data: bytes) -> None:
        await self._body(data, more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._within_s):
                if not self.begun:
                    self.begun = True
                    own = [(n.lower().encode(), v.encode()) for n, v in self.headers.items()]
                    headers = [*_EVENTS, *own]
                    start = {"type": "http.response.start", "status": 200, "headers": headers}
                    await self._send(start)
                    if self._answer is not None:
                        data = self._answer.envelope.opening(self._answer.choices) + data
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except (TimeoutError, OSError) as error:
            raise _ClientGoneError from error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, str]) -> str | None:
    """The result of ``work``, which is cancelled when the client hangs up: then None."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        await _cancelled((task, gone))


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Until all of them have ended."""
    for one in tasks:
        one.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """All of a request's body; None: the client has gone. Raises ``ApiError`` beyond ``limit``."""
    parts: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large(limit, f"more than {limit}")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


_ASSETS: Final = Path(__file__).parent / "status"
_FIRST_ANSWER_S: Final = 0.5
"""How long the first fetch waits for the verifiers to answer."""
_PAGE_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def status_routes(status: StatusSource) -> list[Route]:
    """The routes of the page, for an application that runs in the agent's event loop. Whoever may
    fetch them sees addresses and counts, and no text."""
    page, policy = rendered_page()
    headers = {**_PAGE_HEADERS, "Content-Security-Policy": policy}

    async def show(request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def numbers(request: Request) -> Response:
        asking = status.ask_soon()
        after = request.query_params.get("after", "0")
        if asking is not None and not status.asked:
            await asyncio.wait([asking], timeout=_FIRST_ANSWER_S)
        return JSONResponse(status.snapshot(_number_of(after)).as_json(), headers=_PAGE_HEADERS)

    return [Route("/", show), Route("/status.json", numbers)]


def rendered_page() -> tuple[bytes, str]:
    """The page and the content security policy that lets it, and nothing else, run."""
    style, script = (_read(f"page.{kind}") for kind in ("css", "js"))
    page = _read("page.html").replace("STYLE", style).replace("SCRIPT", script)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none';"
        f" style-src '{_csp_digest(style)}'; script-src '{_csp_digest(script)}'"
    )
    return page.encode(), policy


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _csp_digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _number_of(text: str) -> int:
    """0 for whatever is no count."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


_WITHOUT_EVENTS: Final = 1 << 62
_log = logging.getLogger(__name__)


def build_app(endpoint: Endpoint, status: StatusSource | None = None) -> ASGIApp:
    """All routes, guarded. With ``status`` there are the page of it and the agent's metrics."""
    places = _Places(endpoint, status)
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", GenerationRoute(endpoint, endpoint.chat), methods=["POST"]),
        Route("/v1/completions", GenerationRoute(endpoint, endpoint.completion), methods=["POST"]),
        Route("/v1/responses", GenerationRoute(endpoint, endpoint.response), methods=["POST"]),
        Route("/v1/models", places.models),
        Route("/tokenize", places.tokenize, methods=["POST"]),
        Route("/detokenize", places.detokenize, methods=["POST"]),
        Route("/v1/models/{name:path}", places.model),
        Route(HEALTH, places.health),
        Route("/metrics", places.metrics),
        Route("/version", places.version),
        *(() if status is None else status_routes(status)),
    ]
    app: ASGIApp = Starlette(
        routes=routes,
        exception_handlers={ApiError: _refused, HTTPException: _no_such_place, Exception: _failed},
    )
    settings = endpoint.settings
    app = Guard(
        app,
        key=endpoint.key,
        on_loopback=is_loopback(settings.host),
        allow_hosts=settings.allow_hosts,
        allow_origins=settings.allow_origins,
        max_body_bytes=settings.max_body_bytes,
    )
    if settings.allow_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allow_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After",),
        )
    return app


def health_of(endpoint: Endpoint) -> dict[str, Any]:
    """What ``/health`` says: ``status`` is ``ok``, ``waiting`` (no verifier is ready) or
    ``stopping``."""
    ready = endpoint.verifiers.ready
    status = "stopping" if endpoint.stopping else "ok" if ready else "waiting"
    return {
        "status": status,
        "version": __version__,
        "model": endpoint.models.name,
        "verifiers": [one.as_json() for one in endpoint.verifiers.statuses],
        "texts_running": endpoint.admission.running,
        "requests_waiting": endpoint.admission.waiting,
    }


class _Places:
    """The routes that do not generate."""

    def __init__(self, endpoint: Endpoint, status: StatusSource | None) -> None:
        self._endpoint, self._status = endpoint, status
        tables = [Table(METRICS_PREFIX, METRICS, endpoint.counted)]
        if status is not None:
            snapshot = partial(status.snapshot, _WITHOUT_EVENTS)
            tables.append(Table(agent_status.METRICS_PREFIX, agent_status.AGENT_METRICS, snapshot))
        self._registry = registry_of(*tables)

    async def health(self, request: Request) -> Response:
        """Without the key only whether it serves."""
        found = health_of(self._endpoint)
        key = self._endpoint.key
        if key and not shows_key(request.headers, key):
            found = {"status": found["status"]}
        return JSONResponse(found, status_code=503 if self._endpoint.stopping else 200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        if self._status is not None:
            self._status.ask_soon()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"Content-Type": content_type})

    async def tokenize(self, request: Request) -> Response:
        """As vLLM's server has it; llama.cpp's ``content`` is ``prompt``."""
        tokens, most = await self._endpoint.tokenize(await self._json(request))
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": most})

    async def detokenize(self, request: Request) -> Response:
        text = await self._endpoint.detokenize(await self._json(request))
        return JSONResponse({"prompt": text, "content": text})

    async def _json(self, request: Request) -> Mapping[str, Any]:
        settings = self._endpoint.settings
        try:
            async with asyncio.timeout(settings.body_within_s):
                body = await read_body(request.receive, settings.max_body_bytes)
        except TimeoutError:
            raise ApiError(408, _late(settings.body_within_s)) from None
        return await asyncio.to_thread(read_object, body or b"")

    async def models(self, request: Request) -> Response:
        listed = self._endpoint.models.listed
        data = [self._model(one.name, one) for one in listed]
        return JSONResponse({"object": "list", "data": data or [self._model(self._usual)]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        chosen = await self._endpoint.choose_model(name)
        if chosen.served is None and name not in (self._usual, ALIAS):
            raise no_such_model(name, (self._usual,))
        return JSONResponse(self._model(self._usual, chosen.served))

    @property
    def _usual(self) -> str:
        return self._endpoint.models.name

    def _model(self, name: str, served: ServedModel | None = None) -> dict[str, Any]:
        """As OpenAI has it, with the fields that vLLM's server adds; ``name`` where nobody has told
        yet."""
        return {
            "id": name if served is None else served.name,
            "object": "model",
            "created": self._endpoint.started,
            "owned_by": "edgespec",
            "parent": None if served is None else served.parent,
            "max_model_len": None if served is None else served.context_length,
        }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _no_such_place(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    why = {
        404: f"there is no {what} here; see /v1/models, /v1/chat/completions, /v1/completions",
        405: f"{what} is not how this is asked",
    }
    found = ApiError(error.status_code, why.get(error.status_code, error.detail))
    return error_response(found, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    _log.error("answering a request failed", exc_info=error)
    return error_response(ApiError(500, f"the endpoint failed: {type(error).__name__}"))
