"""What a front process and the verifier's own process tell each other, and the pipe between them.

Theory of operation. A frame is a kind, the number of a call (0: none) and bytes, behind their
length. Frames that are sent within one turn of an event loop leave in one write, and what has
gathered in the socket is read at once: so where a loop is busy, the cost of a system call is shared
by the messages of all sessions. What devices send is gathered for ``GATHER_S`` besides, unless
nothing was sent for so long: a write that wakes the other process costs as much as what it does for
a message. How much may be under way is bounded call by call: a front process
has handed over at most ``UNREAD`` messages of a call that nobody has read, and the verifier has at
most ``UNWRITTEN`` writes of a call under way. That one was read or written is said for all calls
together, with the next frame or ``GATHER_S`` later.
"""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Final

# From the verifier to a front process.
LISTEN: Final = 1
"""The first frame: JSON of ``front_orders.Orders``."""
IDENTITY: Final = 2
"""The certificate to show from now on, as in LISTEN."""
DRAIN: Final = 3
"""Report NOT_SERVING."""
STOP: Final = 4
"""Cut all calls after so many milliseconds (the frame's number), and end."""
PING: Final = 5
GREET: Final = 6
"""Send the call's initial metadata."""
WRITE: Final = 7
"""A message for the device; of a call with one reply, that."""
READ: Final = 8
"""Numbers of calls, of each of which a message was read: one more may come."""
END: Final = 9
"""End the call: JSON of its status (number, details, metadata)."""
# From a front process to the verifier.
LISTENING: Final = 10
REFUSED: Final = 11
"""Why it cannot listen; it ends."""
SAID: Final = 12
"""A line for the log; the frame's number is its level."""
PONG: Final = 13
OPEN: Final = 14
"""A call has come: JSON of its method, its peer and its metadata."""
MESSAGE: Final = 15
"""A message of the device; of a call with one reply, its request."""
HALF_CLOSED: Final = 16
"""The device sends no more."""
WROTE: Final = 17
"""Numbers of calls, of each of which the oldest WRITE has left."""
GONE: Final = 18
"""The call is over and nobody hears of it any more; why."""

PING_EVERY_S: Final = 2.0
MOST_PINGS: Final = 6
"""Pings without an answer, or intervals without a ping, after which the other end hangs."""
GATHER_S: Final = 5e-4
"""Frames that can wait do so for others, this long; asyncio's timers make a millisecond of it."""
UNREAD: Final = 2
UNWRITTEN: Final = 4
MAX_BODY_BYTES: Final = 1 << 23
"""More than any message, status or pair of certificates has."""
_HEADER: Final = struct.Struct("<IBI")
_NUMBERS: Final = "I"

Hear = Callable[[int, int, bytes], None]
"""Takes the kind, the call's number and the body of a frame."""


def numbers_in(body: bytes) -> Iterable[int]:
    """The numbers of calls in a READ or WROTE. Raises ``TypeError`` for half a number."""
    return memoryview(body).cast(_NUMBERS)


class FrameError(ValueError):
    """What came on the pipe is no frame, or none that may come now."""


class FramePipe(asyncio.Protocol):
    """One end of the pipe, for a socket in an event loop. ``lost`` hears once why it has ended:
    the other end is gone, or ``hear`` raised. ``note`` sends frames of the kind ``notes``."""

    def __init__(self, hear: Hear, lost: Callable[[str], None], notes: int) -> None:
        self._hear, self._lost, self._notes = hear, lost, notes
        self._noted = array(_NUMBERS)
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._rest = b""
        self._unsent: list[bytes] = []
        self._leaves_soon = False
        """At the end of this turn of the loop."""
        self._leaves_later: asyncio.TimerHandle | None = None
        self._sent_at = 0.0
        self._why = ""

    def send(self, kind: int, number: int = 0, body: bytes = b"") -> None:
        """Send a frame, at the end of this turn of the loop; nothing happens after the end."""
        if not self._leaves_soon:
            self._leaves_soon = True
            self._loop.call_soon(self._flush)
        self._unsent.append(_HEADER.pack(len(body), kind, number))
        if body:
            self._unsent.append(body)

    def gather(self, kind: int, number: int, body: bytes) -> None:
        """Send a frame as ``send`` does, but no sooner than ``GATHER_S`` behind the last one."""
        if self._leaves_later is None and self._loop.time() - self._sent_at > GATHER_S:
            return self.send(kind, number, body)
        self._leave_later()
        self._unsent += _HEADER.pack(len(body), kind, number), body

    def note(self, number: int) -> None:
        """Send the number of a call, in one frame with others, behind the next one that is sent or
        after ``GATHER_S``."""
        if not self._noted:
            self._leave_later()
        self._noted.append(number)

    def _leave_later(self) -> None:
        if self._leaves_later is None and not self._leaves_soon:
            self._leaves_later = self._loop.call_later(GATHER_S, self._flush)

    def close(self, why: str) -> None:
        """End the pipe from this side; ``lost`` hears ``why``."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's word for the beginning."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio's word for bytes that have come: whole frames are heard, the rest is kept."""
        try:
            self._rest = self._take(self._rest + data if self._rest else data)
        except Exception as error:
            self.close(f"{type(error).__name__}: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio's word for the end."""
        self._unsent.clear()
        del self._noted[:]
        if self._leaves_later is not None:
            self._leaves_later.cancel()
        self._transport = None
        self._lost(self._why or str(error or "it closed the pipe"))

    def _take(self, data: bytes) -> bytes:
        at, length, hear, header = 0, len(data), self._hear, _HEADER
        while length - at >= header.size:
            size, kind, number = header.unpack_from(data, at)
            if size > MAX_BODY_BYTES:
                raise FrameError(
                    f"a frame has {size} bytes, but must have at most {MAX_BODY_BYTES}"
                )
            begin = at + header.size
            end = begin + size
            if end > length:
                break
            hear(kind, number, data[begin:end])
            at = end
        return data[at:]

    def _flush(self) -> None:
        frames, self._unsent, self._leaves_soon = self._unsent, [], False
        if self._leaves_later is not None:
            self._leaves_later.cancel()
            self._leaves_later = None
        if self._noted:
            numbers, self._noted = self._noted.tobytes(), array(_NUMBERS)
            frames += _HEADER.pack(len(numbers), self._notes, 0), numbers
        if self._transport is not None:
            self._sent_at = self._loop.time()
            self._transport.write(b"".join(frames))
