"""The routes that generate: reads a request, and writes its answer at once or as events.

While a request is answered its connection is listened to: a client that hangs up cancels the
generation. A stream begins with the first chunk, so that what fails before it fails with a status
code; after ``keep_alive_s`` without one it begins anyway, with a comment, and fails in an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from edgespec.device.reply import Chunk, ReplyEvent
from edgespec.endpoint import events
from edgespec.endpoint.errors import ApiError, stopping
from edgespec.endpoint.guard import error_response, too_large
from edgespec.endpoint.request_json import nested_too_deep, read_object
from edgespec.endpoint.run import Run
from edgespec.endpoint.service import Answer, Endpoint

_GONE, _CUT, _DONE = "gone", "cut", "200"
_LARGE: Final = 1 << 18
"""Bodies beyond this are read one after the other: in memory they are many times as much."""
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or a proxy such as nginx collects what should flow
)
_log = logging.getLogger(__name__)
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
            late = f"the request did not arrive within {settings.body_within_s:g} s"
            outcome = await self._refuse(ApiError(408, late), scope, receive, send)
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
            async with self._turn(answer, writer) as run:
                if answer.stream:
                    await self._stream(answer, run, writer)
                else:
                    await self._at_once(answer, run)
            if not answer.stream:
                choices = [answer.envelope.shape.whole(one) for one in answer.choices]
                whole = answer.envelope.whole(choices, answer.usage())
                await JSONResponse(whole)(scope, receive, send)
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
                await writer.end(events.error_event(error))
            return _CUT

    @asynccontextmanager
    async def _turn(self, answer: Answer, writer: _Writer) -> AsyncIterator[Run]:
        """The generations of ``answer``, once it is their turn; a stream that waits for it is kept
        alive."""
        waits = [asyncio.create_task(self._keep_alive(answer, writer))] if answer.stream else []
        try:
            async with self._endpoint.running(answer) as run:
                await _cancelled(waits)
                yield run
        finally:
            await _cancelled(waits)

    async def _keep_alive(self, answer: Answer, writer: _Writer) -> None:
        while True:
            await asyncio.sleep(self._endpoint.settings.keep_alive_s)
            opening = b"" if writer.begun else _opening(answer)
            await writer.write(opening + events.KEEP_ALIVE)

    async def _at_once(self, answer: Answer, run: Run) -> None:
        while not run.over:
            self._add(answer, await run.next())

    async def _stream(self, answer: Answer, run: Run, writer: _Writer) -> None:
        keep_alive_s, envelope = self._endpoint.settings.keep_alive_s, answer.envelope
        while not run.over:
            news = await run.next(keep_alive_s)
            said = b"" if writer.begun else _opening(answer)
            said += self._add(answer, news) if news else events.KEEP_ALIVE
            await writer.write(said)
        if envelope.with_usage:
            await writer.write(envelope.chunk([], answer.usage()))
        await writer.end(events.DONE)

    def _add(self, answer: Answer, news: list[tuple[int, ReplyEvent]]) -> bytes:
        """Takes in what came; returns the server-sent events that it is."""
        envelope, said = answer.envelope, []
        for index, chunk in news:
            choice = answer.choices[index]
            if not isinstance(chunk, Chunk):
                if answer.stream:
                    said.append(envelope.unverified(choice, chunk))
                continue
            if chunk.tokens:
                self._endpoint.note_first(answer)
            delta = choice.add(chunk)
            if not answer.stream:
                continue
            if not delta.empty:
                said += [envelope.chunk([one]) for one in envelope.shape.delta(choice, delta)]
            if choice.finish is not None:
                said.append(envelope.chunk([envelope.shape.closing(choice)]))
        return b"".join(said)


class _ClientGoneError(Exception):
    """It reads nothing any more."""


class _Writer:
    """Writes a stream of events. Raises ``_ClientGoneError`` where a write takes longer than
    ``within_s``."""

    def __init__(self, send: Send, within_s: float) -> None:
        self._send, self._within_s = send, within_s
        self.begun = False

    async def write(self, data: bytes) -> None:
        await self._body(data, more=True)

    async def end(self, data: bytes) -> None:
        await self._body(data, more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._within_s):
                if not self.begun:
                    self.begun = True
                    start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                    await self._send(start)
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except (TimeoutError, OSError) as error:
            raise _ClientGoneError from error


def _opening(answer: Answer) -> bytes:
    envelope = answer.envelope
    found = [envelope.shape.opening(choice.index) for choice in answer.choices]
    return b"".join(envelope.chunk([one]) for one in found if one is not None)


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
