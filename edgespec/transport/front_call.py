"""A call that a front process has taken, as the verifier's process sees it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc
from grpc.aio import EOF, AbortError

from edgespec.transport.front_frames import END, GREET, READ, UNREAD, WRITE, FrameError
from edgespec.transport.shielded_call import InterruptedOperation

Send = Callable[[int, int, bytes], None]


class FrontCall:
    """What the service uses of ``grpc.aio.ServicerContext``, and the ``MessageWriter`` of a stream.

    One reader and one write at a time. What is asked of a call that is over raises
    ``ConnectionError``.
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
        "_reader",
        "_send",
        "_settled",
        "_written",
    )

    def __init__(
        self, number: int, peer: str, metadata: Sequence[tuple[str, str]], send: Send
    ) -> None:
        self._number, self._peer, self._metadata, self._send = number, peer, metadata, send
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[bytes] = deque()
        self._half_closed = False
        self._over: str | None = None
        self._reader: asyncio.Future[None] | None = None
        self._pass_on: Callable[[bytes], bool] | None = None
        self._written: Callable[[BaseException | None], None] | None = None
        """Hears of the end of the write under way."""
        self._settled: asyncio.Future[None] | None = None
        """Somebody waits for it."""

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
            self._send(READ, self._number, b"")
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
        """Whether a write is under way."""
        return self._written is not None

    def begin(self, payload: bytes, ended: Callable[[BaseException | None], None]) -> None:
        """Begin to write; ``ended`` hears what went wrong, None for a good end. No write may be
        under way."""
        assert self._written is None
        self._written = ended
        if self._over is None:
            self._send(WRITE, self._number, payload)
        else:
            self._loop.call_soon(self.wrote, ConnectionResetError(self._over))

    async def settle(
        self, unless: asyncio.Future[Any] | None = None, timeout_s: float | None = None
    ) -> None:
        """Wait for the write under way, if any. Raises ``InterruptedOperation`` when ``unless``
        comes first, ``TimeoutError`` after that time."""
        if self._written is None:
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
                self._send(READ, self._number, b"")
                return
        self._inbox.append(payload)
        self._wake_reader()

    def half_close(self) -> None:
        """The device sends no more."""
        self._half_closed = True
        self._wake_reader()

    def wrote(self, error: BaseException | None = None) -> None:
        """The write under way has ended."""
        ended, self._written = self._written, None
        settled, self._settled = self._settled, None
        if ended is not None:
            ended(error)
        if settled is not None and not settled.done():
            settled.set_result(None)

    def gone(self, why: str) -> None:
        """The call is over, from either side."""
        if self._over is not None:
            return
        self._over = why
        self._wake_reader()
        if self._written is not None:
            self._loop.call_soon(self.wrote, ConnectionResetError(why))

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
