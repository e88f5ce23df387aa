"""A transport with the delays of a modelled link, in real time, on the device's side.

Theory of operation. Each message is stamped with its arrival time by the ``LinkModel`` of its
direction when it is sent. It waits in a bounded pipe until then and goes on; order is kept. The end
of the stream is delayed like a message, so earlier data are delivered first. Closing returns at
once, while messages under way still arrive. Sizes are the codec's.

The first use of the connection costs the round trips of its handshakes, and a later stream on the
same connection costs nothing: its first message goes up at once, as in HTTP/2. A link that broke is
connected anew. A call for the verifier's description takes a round trip.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, Generic, TypeVar

from edgespec.core.link_model import LinkModel
from edgespec.core.ports import Connection, DeviceStream, LinkError
from edgespec.core.protocol import messages as m
from edgespec.wire.codec import ProtocolViolation, WireLimits, payload_bytes

_T = TypeVar("_T")
_MAX_ITEMS: Final = 1024
"""Messages under way in each direction of a stream before a sender has to wait."""
# Bytes of opening and closing: TCP's and HTTP/2's own packets.
_HANDSHAKE_BYTES: Final = 64
PLAIN_TRIPS: Final = 1
"""Round trips before the first request leaves on a new connection without TLS: the handshake of
TCP. The request does not wait for the verifier's HTTP/2 settings (``early_connection.py``)."""
TLS_TRIPS: Final = 2
"""The same with TLS 1.3, whose handshake takes another one. With TLS 1.2 it would be two."""
# Bytes of gRPC's message prefix, and of the header of the HTTP/2 DATA frame that carries it. Lower
# layers (TLS records, TCP, IP) depend on how messages coalesce and are not estimated.
FRAMING_BYTES: Final = 5 + 9


class ThreadPacer:
    """A precise timer: one thread, started by the first wait and ended by ``close``.

    The event loop's own timers sleep in whole milliseconds (epoll). They are 0.7 to 0.8 ms late,
    the median of 300 on a busy two-core machine. A thread that sleeps on a condition and hands over
    to the loop is 0.2 ms late there."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiters: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def now(self) -> float:
        return time.monotonic()

    async def wait_until(self, when_s: float) -> None:
        """Return at ``when_s`` or as soon after it as possible, at once if it is past."""
        if when_s <= time.monotonic():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._condition:
            if self._closed:
                raise RuntimeError("the pacer is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pacer", daemon=True)
                self._thread.start()
            heapq.heappush(self._waiters, (when_s, next(self._numbers), future))
            if self._waiters[0][2] is future:
                self._condition.notify()
        await future

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with self._condition:
            while not self._closed:
                if not self._waiters:
                    self._condition.wait()
                    continue
                ahead_s = self._waiters[0][0] - time.monotonic()
                if ahead_s > 0.0:
                    self._condition.wait(ahead_s)
                    continue
                _wake(heapq.heappop(self._waiters)[2])


def _wake(future: asyncio.Future[None]) -> None:
    def wake() -> None:
        if not future.done():
            future.set_result(None)

    with suppress(RuntimeError):  # The future's loop has been closed, so nothing waits for it.
        future.get_loop().call_soon_threadsafe(wake)


class Pipe(Generic[_T]):
    """A queue of at most ``depth`` items. A cancelled call has no effect."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[_T] = deque()
        self._reason: tuple[str, bool] | None = None
        self._changed = asyncio.Event()

    async def put(self, item: _T) -> None:
        """Append ``item``; wait while the pipe is full. Raises ``LinkError`` if the pipe has
        ended."""
        while self._reason is None and len(self._items) >= self._depth:
            await self._changed.wait()
        if self._reason is not None:
            raise self._make_error()
        self._items.append(item)
        self._wake()

    async def peek(self) -> _T:
        while not self._items and self._reason is None:
            await self._changed.wait()
        if not self._items:
            raise self._make_error()
        return self._items[0]

    async def get(self) -> _T:
        item = await self.peek()
        self._items.popleft()
        self._wake()
        return item

    def end(self, reason: str, *, retryable: bool = True, drop: bool = False) -> None:
        """Accept no more items. ``drop`` also drops those inside. The first reason counts."""
        if self._reason is None:
            self._reason = (reason, retryable)
        if drop:
            self._items.clear()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _make_error(self) -> LinkError:
        assert self._reason is not None
        text, retryable = self._reason
        return LinkError(text, retryable=retryable)


class ShapedTransport:
    """A transport ``inner`` behind a link. Time 0 of the link's models is the moment of
    construction. ``handshake_trips`` are the round trips of a new connection, ``PLAIN_TRIPS`` or
    ``TLS_TRIPS``."""

    def __init__(
        self,
        inner: Connection,
        up: LinkModel,
        down: LinkModel,
        *,
        pacer: ThreadPacer | None = None,
        limits: WireLimits | None = None,
        meter: TrafficMeter | None = None,
        handshake_trips: int = PLAIN_TRIPS,
    ) -> None:
        self._inner = inner
        self._handshake_trips = handshake_trips
        self._is_connected = False
        self._connecting = asyncio.Lock()
        self._pacer = pacer or ThreadPacer()
        self.wait_until, self._origin_s = self._pacer.wait_until, self._pacer.now()
        self.up = partial(self._compute_arrival, up)
        self.down = partial(self._compute_arrival, down)
        self.limits, self.meter = limits or WireLimits(), meter
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Always False: messages of a closed stream may still be under way on the link."""
        return False

    async def connect(self) -> DeviceStream:
        """Open a stream, at once on a connection that stands. Raises ``LinkError`` as ``inner``
        does."""
        await self._shake_hands()
        with self._noting_breaks():
            stream = _ShapedStream(await self._inner.connect(), self)
        self._spawn(stream.pump_up())
        stream.reader = self._spawn(stream.pump_down())
        return stream

    async def info(self) -> m.VerifierInfo:
        """Return the verifier's description, a round trip later."""
        await self._shake_hands()
        await self.wait_until(self.up(_HANDSHAKE_BYTES))
        with self._noting_breaks():
            info = await self._inner.info()
        await self.wait_until(self.down(_HANDSHAKE_BYTES))
        return info

    async def call_unary(self, name: str, request: bytes) -> bytes:
        """Make one unary call of the service, which takes its way up and its way down. Raises
        ``LinkError`` as ``inner`` does."""
        await self._shake_hands()
        await self.wait_until(self.up(len(request) + FRAMING_BYTES))
        with self._noting_breaks():
            reply = await self._inner.call_unary(name, request)
        await self.wait_until(self.down(len(reply) + FRAMING_BYTES))
        return reply

    def renew(self) -> None:
        """Use a new connection from now on, which costs its handshakes."""
        self.note_break()
        self._inner.renew()

    def note_break(self) -> None:
        """Let the next use pay for a new connection."""
        self._is_connected = False

    @contextmanager
    def _noting_breaks(self) -> Iterator[None]:
        """Note a break if the connection fails in this block. A refusal is none."""
        try:
            yield
        except LinkError as error:
            if error.retryable and not error.alive:
                self.note_break()
            raise

    async def close(self) -> None:
        """End all streams. Messages under way are lost."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._inner.close()
        self._pacer.close()

    async def _shake_hands(self) -> None:
        """Wait for the handshakes of a new connection. Callers that come meanwhile wait too."""
        async with self._connecting:
            if self._is_connected:
                return
            for arrival in (self.up, self.down) * self._handshake_trips:
                await self.wait_until(arrival(_HANDSHAKE_BYTES))
            self._is_connected = True

    def _compute_arrival(self, way: LinkModel, size_bytes: int) -> float:
        """Return the time at which a message that leaves now arrives."""
        return way.arrival(self._pacer.now() - self._origin_s, size_bytes) + self._origin_s

    def _spawn(self, pump: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(pump)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _ShapedStream:
    """A stream with one sender and one receiver at a time; both may be cancelled without loss."""

    def __init__(self, inner: DeviceStream, link: ShapedTransport) -> None:
        self._inner, self._up, self._down = inner, link.up, link.down
        self.verifier = inner.verifier
        self._wait_until, self._note_break = link.wait_until, link.note_break
        self._limits, self._meter = link.limits, link.meter
        self._going_up: Pipe[tuple[float, m.Uplink]] = Pipe(_MAX_ITEMS)
        self._coming_down: Pipe[tuple[float, m.Downlink | LinkError]] = Pipe(_MAX_ITEMS)
        self._closing: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.reader: asyncio.Task[None] | None = None

    async def send(self, message: m.Uplink) -> None:
        """Send ``message``.

        Raises ``LinkError`` if the stream has ended, and ``ProtocolViolation`` for a message over a
        bound."""
        size_bytes = payload_bytes(message, self._limits)
        await self._going_up.put((self._up(size_bytes), message))
        if self._meter is not None:
            self._meter.count(message, size_bytes)

    async def receive(self) -> m.Downlink:
        """Return the next message. Raises ``LinkError`` after all messages before the end."""
        arrival_s, item = await self._coming_down.peek()
        await self._wait_until(arrival_s)
        await self._coming_down.get()
        if isinstance(item, LinkError):
            for pipe in (self._going_up, self._coming_down):
                pipe.end(str(item), retryable=item.retryable, drop=True)
            raise item
        if self._meter is not None:
            self._meter.count(item, payload_bytes(item, self._limits))
        return item

    async def close(self) -> None:
        """Close the stream and return at once. Messages that were sent still arrive, and then the
        end does."""
        if self._closing.done():
            return
        self._close_at(self._up(_HANDSHAKE_BYTES))
        self._going_up.end("the stream was closed here", retryable=False)
        self._coming_down.end("the stream was closed here", retryable=False, drop=True)
        if self.reader is not None:
            self.reader.cancel()

    def _close_at(self, arrival_s: float) -> None:
        if not self._closing.done():
            self._closing.set_result(arrival_s)

    async def pump_up(self) -> None:
        try:
            while True:
                arrival_s, message = await self._going_up.get()
                await self._wait_until(arrival_s)
                await self._inner.send(message)
        except (LinkError, ProtocolViolation) as error:
            retryable = isinstance(error, LinkError) and error.retryable
            self._going_up.end(str(error), retryable=retryable, drop=True)
            if isinstance(error, ProtocolViolation):  # The inner transport's bounds are narrower.
                self._coming_down.end(str(error), retryable=False)
                self._close_at(self._up(0))
            await self._wait_until(await self._closing)
        finally:
            await self._inner.close()

    async def pump_down(self) -> None:
        try:
            while True:
                message = await self._inner.receive()
                size_bytes = payload_bytes(message, self._limits)
                await self._coming_down.put((self._down(size_bytes), message))
        except LinkError as error:
            if error.retryable and not error.alive:
                self._note_break()
            with suppress(LinkError):
                await self._coming_down.put((self._down(0), error))


class TrafficMeter:
    """Totals of messages and bytes by name. Payload is the encoded message, framing is an
    estimate."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()

    def count(self, message: m.Message, payload_bytes: int) -> None:
        way = "down" if isinstance(message, m.Downlink) else "up"
        for name in (type(message).__name__.lower(), way):
            self.totals[f"{name}_messages"] += 1
            self.totals[f"{name}_payload_bytes"] += payload_bytes
        self.totals[f"{way}_framed_bytes"] += payload_bytes + FRAMING_BYTES
        if isinstance(message, m.Draft):
            self.totals["drafted_nodes"] += len(message.tokens)
