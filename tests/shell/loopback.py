"""A link in memory: a ``Transport`` for tests in one process.

Messages pass through the codec, so that bytes and bounds are those of the wire; ``encoded=False``
passes the objects. ``cut`` loses what is under way, as a dead link does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from edgespec.core.ports import ByteMeter, DeviceStream, LinkError, ServeStream
from edgespec.core.protocol.messages import Downlink, Fault, FaultCode, Uplink, VerifierInfo
from edgespec.core.verifier.credential import ANYBODY
from edgespec.wire.codec import decode_downlink, decode_uplink, encode_downlink, encode_uplink
from edgespec.wire.shaped import Pipe
from edgespec.wire.wire_limits import ProtocolViolation, WireLimits

_DEPTH: Final = 64

_LOG = logging.getLogger(__name__)


class LoopbackTransport:
    """Streams to ``serve`` in this event loop.

    ``depth`` messages wait in each direction before a sender has to. ``meter`` counts what arrives.
    """

    def __init__(
        self,
        serve: ServeStream,
        info: Callable[[], VerifierInfo],
        *,
        limits: WireLimits | None = None,
        meter: ByteMeter | None = None,
        encoded: bool = True,
        depth: int = _DEPTH,
    ) -> None:
        self._serve = serve
        self._info = info
        self._limits = limits or WireLimits()
        self._meter = meter
        self._encoded = encoded or meter is not None
        self._depth = depth
        self._links: dict[_Link, asyncio.Task[None]] = {}
        self._refusal: LinkError | None = None

    @property
    def stream_count(self) -> int:
        """Streams whose ``serve`` is running."""
        return len(self._links)

    async def connect(self) -> DeviceStream:
        """Raises ``LinkError`` after ``close`` or while refusing."""
        self._raise_if_refusing()
        link = _Link(self._depth)
        task = asyncio.create_task(self._run(link))
        self._links[link] = task
        task.add_done_callback(lambda _: self._links.pop(link, None))
        return _DeviceEnd(link, self._codec())

    async def info(self) -> VerifierInfo:
        self._raise_if_refusing()
        return self._info()

    async def close(self) -> None:
        """End all streams and wait for ``serve`` to let go of them."""
        self.refuse("the loopback was closed here", retryable=False)
        self.cut("the loopback was closed")
        tasks = tuple(self._links.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut(self, reason: str = "the loopback was cut") -> None:
        """Lose every stream and what is under way on it; new ones can be opened."""
        for link in tuple(self._links):
            link.end(reason, drop=True)

    def refuse(self, reason: str, *, retryable: bool = True) -> None:
        """Fail ``connect`` and ``info`` from now on."""
        self._refusal = LinkError(reason, retryable=retryable)

    def accept(self) -> None:
        """Undo ``refuse``."""
        self._refusal = None

    def _raise_if_refusing(self) -> None:
        if self._refusal is not None:
            raise LinkError(str(self._refusal), retryable=self._refusal.retryable)

    def _codec(self) -> _Codec:
        return _Codec(self._limits, self._meter, self._encoded)

    async def _run(self, link: _Link) -> None:
        stream = _VerifierEnd(link, self._codec())
        try:
            await self._serve(stream)
        except LinkError:
            pass  # the stream is gone, and so is its reader
        except Exception as error:
            _LOG.exception("a loopback stream failed")
            text = f"the verifier failed: {type(error).__name__}"
            await _speak(stream, Fault(FaultCode.INTERNAL, text))
        finally:
            link.end("the verifier ended the stream")


class _Link:
    """The two directions of one stream."""

    def __init__(self, depth: int) -> None:
        self.up: Pipe[Uplink | bytes] = Pipe(depth)
        self.down: Pipe[Downlink | bytes] = Pipe(depth)

    def end(self, reason: str, *, retryable: bool = True, drop: bool = False) -> None:
        self.up.end(reason, retryable=retryable, drop=drop)
        self.down.end(reason, retryable=retryable, drop=drop)


class _Codec:
    """What a message becomes in the pipe."""

    def __init__(self, limits: WireLimits, meter: ByteMeter | None, encoded: bool) -> None:
        self._limits = limits
        self._meter = meter
        self._encoded = encoded

    def pack_up(self, message: Uplink) -> Uplink | bytes:
        return encode_uplink(message, self._limits) if self._encoded else message

    def pack_down(self, message: Downlink) -> Downlink | bytes:
        return encode_downlink(message, self._limits) if self._encoded else message

    def unpack_up(self, item: Uplink | bytes) -> Uplink:
        if not isinstance(item, bytes):
            return item
        message = decode_uplink(item, self._limits)
        if self._meter is not None:
            self._meter.count(message, len(item))
        return message

    def unpack_down(self, item: Downlink | bytes) -> Downlink:
        if not isinstance(item, bytes):
            return item
        message = decode_downlink(item, self._limits)
        if self._meter is not None:
            self._meter.count(message, len(item))
        return message


class _DeviceEnd:
    def __init__(self, link: _Link, codec: _Codec) -> None:
        self._link = link
        self._codec = codec

    async def send(self, message: Uplink) -> None:
        await self._link.up.put(self._codec.pack_up(message))

    async def receive(self) -> Downlink:
        message = self._codec.unpack_down(await self._link.down.get())
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

    def __init__(self, link: _Link, codec: _Codec) -> None:
        self._link = link
        self._codec = codec

    async def send(self, message: Downlink) -> None:
        await self._link.down.put(self._codec.pack_down(message))
        if isinstance(message, Fault):
            self._link.end(message.message, retryable=message.code.retryable)

    async def receive(self) -> Uplink:
        item = await self._link.up.get()
        try:
            return self._codec.unpack_up(item)
        except ProtocolViolation as violation:
            text = str(violation)
            await _speak(self, Fault(violation.code, text))
            raise LinkError(text, retryable=False) from None

    async def close(self) -> None:
        self._link.end("the verifier closed the stream")


async def _speak(stream: _VerifierEnd, fault: Fault) -> None:
    """Send a last fault. A device that left does not hear it."""
    try:
        await stream.send(fault)
    except LinkError:
        return
