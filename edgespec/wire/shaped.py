"""Any transport, with the delays of a modelled link, in real time, on the device's side.

Theory of operation. Each message is stamped with its arrival by the ``LinkModel`` of its direction
when it is handed over, waits in a bounded pipe until then, and goes on; order is kept. The end of
the stream is delayed like a message, so the data that came before it is delivered first. Closing
returns at once, while what had left goes on to arrive. Opening costs one round trip. Sizes are the
codec's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final

from edgespec.core.link_model import LinkModel
from edgespec.core.ports import ByteMeter, DeviceStream, LinkError, Transport, is_idle
from edgespec.core.protocol.messages import Downlink, Uplink, VerifierInfo
from edgespec.wire.codec import payload_bytes
from edgespec.wire.pacer import Pacer, ThreadPacer
from edgespec.wire.pipe import Pipe
from edgespec.wire.wire_limits import ProtocolViolation, WireLimits

_DEPTH: Final = 1024
# What opening and closing send: TCP's and HTTP/2's own packets.
_HANDSHAKE_BYTES: Final = 64


class ShapedTransport:
    """``inner`` behind a link. The models' time 0 is ``origin_s`` on the pacer's clock, by default
    the moment of construction; transports that share a ``SharedQueue`` have to share it too.

    ``depth`` messages are under way in each direction of a stream before a sender has to wait.
    """

    def __init__(
        self,
        inner: Transport,
        up: LinkModel,
        down: LinkModel,
        *,
        pacer: Pacer | None = None,
        origin_s: float | None = None,
        limits: WireLimits | None = None,
        meter: ByteMeter | None = None,
        depth: int = _DEPTH,
    ) -> None:
        self._inner = inner
        self._pacer = pacer or ThreadPacer()
        self._owns_pacer = pacer is None
        origin_s = self._pacer.now() if origin_s is None else origin_s
        self._up = _Direction(up, self._pacer, origin_s)
        self._down = _Direction(down, self._pacer, origin_s)
        self._limits = limits or WireLimits()
        self._meter = meter
        self._depth = depth
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls = 0
        """Whose round trip is under way, before they reach ``inner``."""

    @property
    def idle(self) -> bool:
        return not (self._calls or self._tasks) and is_idle(self._inner)

    async def connect(self) -> DeviceStream:
        """Raises ``LinkError`` as ``inner`` does, a round trip later."""
        await self._round_trip()
        stream = _ShapedStream(
            await self._inner.connect(),
            self._up,
            self._down,
            limits=self._limits,
            meter=self._meter,
            depth=self._depth,
        )
        self._spawn(stream.pump_up())
        stream.reader = self._spawn(stream.pump_down())
        return stream

    async def info(self) -> VerifierInfo:
        await self._round_trip()
        return await self._inner.info()

    async def close(self) -> None:
        """End all streams; what is under way is lost."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._inner.close()
        if self._owns_pacer:
            self._pacer.close()

    async def _round_trip(self) -> None:
        self._calls += 1
        try:
            await self._up.wait(self._up.arrival(_HANDSHAKE_BYTES))
            await self._down.wait(self._down.arrival(_HANDSHAKE_BYTES))
        finally:
            self._calls -= 1

    def _spawn(self, pump: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(pump)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Direction:
    """A link model on the pacer's clock."""

    def __init__(self, model: LinkModel, pacer: Pacer, origin_s: float) -> None:
        self._model = model
        self._pacer = pacer
        self._origin_s = origin_s

    def arrival(self, size_bytes: int) -> float:
        """When a message that leaves now arrives, on the pacer's clock."""
        now_s = self._pacer.now() - self._origin_s
        return self._model.arrival(now_s, size_bytes) + self._origin_s

    async def wait(self, when_s: float) -> None:
        await self._pacer.wait_until(when_s)


class _ShapedStream:
    """One sender and one receiver at a time; both may be cancelled without loss."""

    def __init__(
        self,
        inner: DeviceStream,
        up: _Direction,
        down: _Direction,
        *,
        limits: WireLimits,
        meter: ByteMeter | None,
        depth: int,
    ) -> None:
        self._inner = inner
        self._up = up
        self._down = down
        self._limits = limits
        self._meter = meter
        self._going_up: Pipe[tuple[float, Uplink]] = Pipe(depth)
        self._coming_down: Pipe[tuple[float, Downlink | LinkError]] = Pipe(depth)
        self._closing: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.reader: asyncio.Task[None] | None = None

    async def send(self, message: Uplink) -> None:
        """Raises ``LinkError`` when the stream is gone, ``ProtocolViolation`` over a bound."""
        size_bytes = payload_bytes(message, self._limits)
        await self._going_up.put((self._up.arrival(size_bytes), message))
        if self._meter is not None:
            self._meter.count(message, size_bytes)

    async def receive(self) -> Downlink:
        """Raises ``LinkError`` after all messages that came before the end."""
        arrival_s, item = await self._coming_down.peek()
        await self._down.wait(arrival_s)
        await self._coming_down.get()
        if isinstance(item, LinkError):
            for pipe in (self._going_up, self._coming_down):
                pipe.end(str(item), retryable=item.retryable, drop=True)
            raise item
        if self._meter is not None:
            self._meter.count(item, payload_bytes(item, self._limits))
        return item

    async def close(self) -> None:
        """Returns at once; what was sent before still arrives, and then the end does."""
        if self._closing.done():
            return
        self._close_at(self._up.arrival(_HANDSHAKE_BYTES))
        self._going_up.end("the stream was closed here", retryable=False)
        self._coming_down.end("the stream was closed here", retryable=False, drop=True)
        if self.reader is not None:
            self.reader.cancel()

    def _close_at(self, arrival_s: float) -> None:
        if not self._closing.done():
            self._closing.set_result(arrival_s)

    async def pump_up(self) -> None:
        """Carry messages up as they arrive, and the closing of the stream after them."""
        try:
            await self._carry_up()
            await self._up.wait(await self._closing)
        finally:
            await self._inner.close()

    async def _carry_up(self) -> None:
        try:
            while True:
                arrival_s, message = await self._going_up.get()
                await self._up.wait(arrival_s)
                await self._inner.send(message)
        except LinkError as error:
            self._going_up.end(str(error), retryable=error.retryable, drop=True)
        except ProtocolViolation as violation:  # the inner transport's bounds are narrower
            self._going_up.end(str(violation), retryable=False, drop=True)
            self._coming_down.end(str(violation), retryable=False)
            self._close_at(self._up.arrival(0))

    async def pump_down(self) -> None:
        """Stamp what comes down with its arrival."""
        try:
            while True:
                message = await self._inner.receive()
                size_bytes = payload_bytes(message, self._limits)
                await self._coming_down.put((self._down.arrival(size_bytes), message))
        except LinkError as error:
            with suppress(LinkError):
                await self._coming_down.put((self._down.arrival(0), error))
