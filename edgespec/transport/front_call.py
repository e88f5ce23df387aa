"""A call that a front process has taken, as the verifier's process sees it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc
from grpc.aio import EOF, AbortError

from edgespec.transport.front_frames import (
    END,
    GREET,
    UNREAD,
    UNWRITTEN,
    WRITE,
    FrameError,
    FramePipe,
)
from edgespec.transport.shielded_call import InterruptedOperation


class FrontCall:
    """What the service uses of ``grpc.aio.ServicerContext``, and the ``MessageWriter`` of a stream.

    One reader at a time, and ``UNWRITTEN`` writes under way. What is asked of a call that is over
    raises ``ConnectionError``.
    """

    __slots__ = (
        "_half_closed",
        "_inbox",
        "_loop",
        "_metadata",
        "_number",
        "_over",
        "_pass_on",
        "_peer",
        "_pipe",
        "_reader",
        "_send",
        "_settled",
        "_unwritten",
    )

    def __init__(
        self, number: int, peer: str, metadata: Sequence[tuple[str, str]], pipe: FramePipe
    ) -> None:
        self._number, self._peer, self._metadata, self._pipe = number, peer, metadata, pipe
        self._send = pipe.send
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[bytes] = deque()
        self._half_closed = False
        self._over: str | None = None
        self._reader: asyncio.Future[None] | None = None
        self._pass_on: Callable[[bytes], bool] | None = None
        self._unwritten: deque[Callable[[BaseException | None], None]] = deque()
        """Who hears of the ends of the writes under way."""
        self._settled: asyncio.Future[None] | None = None
        """Somebody waits for all of them."""

    # --- for the service -------------------------------------------------------------------

    def peer(self) -> str:
        """The peer as gRPC spells it."""
        return self._peer

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """The headers that the service looks at."""
        return self._metadata

    async def send_initial_metadata(self, _metadata: Any) -> None:
        """Let the device know that its call has come, with no metadata of our own."""
        self._send(GREET, self._number, b"")

    async def read(self) -> Any:
        """The next message, or ``EOF`` when the device sends no more."""
        while not self._inbox:
            if self._over is not None:
                raise ConnectionResetError(self._over)
            if self._half_closed:
                return EOF
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._over is None:
            self._pipe.note(self._number)
        return self._inbox.popleft()

    def pass_on(self, take: Callable[[bytes], bool]) -> None:
        """Offer each message to ``take`` first, while nothing else waits to be read; what it
        refuses is left for ``read``. It costs the loop one turn less."""
        self._pass_on = take

    async def write(self, payload: bytes) -> None:
        """Send one message, and wait until gRPC has taken it."""
        failures: list[BaseException] = []
        await self.settle()
        self.begin(payload, lambda error: None if error is None else failures.append(error))
        await self.settle()
        for error in failures:
            raise error

    def reply(self, payload: bytes) -> None:
        """Answer a unary call; ``end`` sends it."""
        if self._over is None:
            self._send(WRITE, self._number, payload)

    async def abort(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> NoReturn:
        """End the call with this status; raises ``AbortError``, as gRPC's own does."""
        if self._over is not None:
            raise ConnectionResetError(self._over)
        self.end(code, details, metadata)
        raise AbortError(details)

    def end(
        self,
        code: grpc.StatusCode = grpc.StatusCode.OK,
        details: str = "",
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """End the call with this status, behind what was written; unless it is over."""
        if self._over is None:
            status = [code.value[0], details, [list(pair) for pair in metadata]]
            self._send(END, self._number, json.dumps(status).encode())
            self.gone("the call has ended")

    # --- as the writer of a stream ---------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether no write may be begun."""
        return len(self._unwritten) >= UNWRITTEN

    @property
    def under_way(self) -> bool:
        """Whether a write has not ended."""
        return bool(self._unwritten)

    def begin(self, payload: bytes, ended: Callable[[BaseException | None], None]) -> None:
        """Begin to write; ``ended`` hears what went wrong, None for a good end. Not when it is
        ``busy``."""
        self._unwritten.append(ended)
        if self._over is None:
            self._send(WRITE, self._number, payload)
        else:
            self._loop.call_soon(self._write_no_more, ConnectionResetError(self._over))

    async def settle(
        self, unless: asyncio.Future[Any] | None = None, timeout_s: float | None = None
    ) -> None:
        """Wait for the writes under way, if any. Raises ``InterruptedOperation`` when ``unless``
        comes first, ``TimeoutError`` after that time."""
        if not self._unwritten:
            return
        if self._settled is None:
            self._settled = self._loop.create_future()
        settled = self._settled
        waits = (settled,) if unless is None else (settled, unless)
        done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise TimeoutError(f"the write took more than {timeout_s} s")
        if not settled.done():
            raise InterruptedOperation("interrupted")

    # --- for the pipe ----------------------------------------------------------------------

    def deliver(self, payload: bytes) -> None:
        """A message of the device has come. Raises ``FrameError`` for one more than may come."""
        if self._over is not None:
            return
        if len(self._inbox) >= UNREAD:
            raise FrameError(f"{UNREAD + 1} messages of a call are unread, the limit is {UNREAD}")
        reader = self._reader
        if self._pass_on is not None and reader is not None and not reader.done():
            if self._pass_on(payload):
                self._pipe.note(self._number)
                return
        self._inbox.append(payload)
        self._wake_reader()

    def half_close(self) -> None:
        """The device sends no more."""
        self._half_closed = True
        self._wake_reader()

    def wrote(self, error: BaseException | None = None) -> None:
        """The oldest write under way has ended."""
        if self._unwritten:
            self._unwritten.popleft()(error)
        if self._settled is not None and not self._unwritten:
            settled, self._settled = self._settled, None
            if not settled.done():
                settled.set_result(None)

    def _write_no_more(self, error: BaseException) -> None:
        while self._unwritten:
            self.wrote(error)

    def gone(self, why: str) -> None:
        """The call is over, from either side."""
        if self._over is not None:
            return
        self._over = why
        self._wake_reader()
        if self._unwritten:
            self._loop.call_soon(self._write_no_more, ConnectionResetError(why))

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
