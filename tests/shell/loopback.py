"""A link in memory: a ``Transport`` to a verifier in this event loop. Messages pass through the
codec, so that bytes and bounds are those of the wire; ``meter`` counts what arrives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from edgespec.core.ports import DeviceStream, LinkError, ServeStream
from edgespec.core.protocol.messages import Downlink, Fault, FaultCode, Uplink, VerifierInfo
from edgespec.core.verifier.credential import ANYBODY
from edgespec.wire import codec
from edgespec.wire.shaped import Pipe, TrafficMeter

_LOG = logging.getLogger(__name__)


class LoopbackTransport:
    def __init__(
        self,
        serve: ServeStream,
        info: Callable[[], VerifierInfo],
        *,
        meter: TrafficMeter | None = None,
    ) -> None:
        self._serve, self._info, self._meter = serve, info, meter
        self._links: dict[_Link, asyncio.Task[None]] = {}
        self._refusal = ""

    @property
    def stream_count(self) -> int:
        """Streams whose ``serve`` is running."""
        return len(self._links)

    async def connect(self) -> DeviceStream:
        """Raises ``LinkError`` after ``close`` or while refusing."""
        await self.info()
        link = _Link(self._meter)
        self._links[link] = task = asyncio.create_task(self._run(link))
        task.add_done_callback(lambda _: self._links.pop(link, None))
        return _DeviceEnd(link)

    async def info(self) -> VerifierInfo:
        if self._refusal:
            raise LinkError(self._refusal)
        return self._info()

    async def close(self) -> None:
        """End all streams and wait for ``serve`` to let go of them."""
        self.refuse("the loopback was closed here")
        self.cut("the loopback was closed")
        tasks = tuple(self._links.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut(self, reason: str = "the loopback was cut") -> None:
        """Lose every stream and what is under way on it; new ones can be opened."""
        for link in tuple(self._links):
            link.end(reason, drop=True)

    def refuse(self, reason: str) -> None:
        """Fail ``connect`` and ``info`` from now on."""
        self._refusal = reason

    async def _run(self, link: _Link) -> None:
        stream = _VerifierEnd(link)
        try:
            await self._serve(stream)
        except LinkError:
            pass  # the stream is gone, and so is its reader
        except Exception as error:
            _LOG.exception("a loopback stream failed")
            why = f"the verifier failed: {type(error).__name__}"
            await stream.speak(Fault(FaultCode.INTERNAL, why))
        finally:
            link.end("the verifier ended the stream")


class _Link:
    """The two directions of one stream."""

    def __init__(self, meter: TrafficMeter | None) -> None:
        self.up: Pipe[bytes] = Pipe(64)
        self.down: Pipe[bytes] = Pipe(64)
        self._meter = meter

    def end(self, reason: str, *, retryable: bool = True, drop: bool = False) -> None:
        self.up.end(reason, retryable=retryable, drop=drop)
        self.down.end(reason, retryable=retryable, drop=drop)

    def came(self, message: Uplink | Downlink, size: int) -> None:
        if self._meter is not None:
            self._meter.count(message, size)


class _DeviceEnd:
    def __init__(self, link: _Link) -> None:
        self._link = link

    async def send(self, message: Uplink) -> None:
        await self._link.up.put(codec.encode_uplink(message))

    async def receive(self) -> Downlink:
        payload = await self._link.down.get()
        message = codec.decode_downlink(payload)
        self._link.came(message, len(payload))
        if isinstance(message, Fault):
            self._link.end(message.message, retryable=message.code.retryable)
        return message

    async def close(self) -> None:
        """Let go of the stream; what was sent before still arrives."""
        self._link.up.end("the device closed the stream")
        self._link.down.end("the stream was closed here", retryable=False, drop=True)


class _VerifierEnd:
    peer = "loopback"
    credential = ANYBODY

    def __init__(self, link: _Link) -> None:
        self._link = link

    async def send(self, message: Downlink) -> None:
        await self._link.down.put(codec.encode_downlink(message))
        if isinstance(message, Fault):
            self._link.end(message.message, retryable=message.code.retryable)

    async def receive(self) -> Uplink:
        payload = await self._link.up.get()
        try:
            message = codec.decode_uplink(payload)
        except codec.ProtocolViolation as violation:
            await self.speak(Fault(violation.code, str(violation)))
            raise LinkError(str(violation), retryable=False) from None
        self._link.came(message, len(payload))
        return message

    async def close(self) -> None:
        self._link.end("the verifier closed the stream")

    async def speak(self, fault: Fault) -> None:
        """Send a last fault. A device that left does not hear it."""
        try:
            await self.send(fault)
        except LinkError:
            return
