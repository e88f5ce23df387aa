"""The verifier's end of one gRPC stream.

Theory of operation. A stream is open until something ends it: the device leaves, a side breaks the
protocol, a Fault was sent, or the server hangs up. ``over`` then has the verdict; the first one
counts, and from then on every ``send`` and ``receive`` raises ``LinkError``. Messages already
handed over leave before the status does.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF

from edgespec.core.messages import Downlink, Fault, FaultCode, Uplink
from edgespec.ports import ByteMeter, LinkError
from edgespec.transport.codec import decode_uplink, encode_downlink
from edgespec.transport.unbroken import Unbroken
from edgespec.transport.wire_limits import ProtocolViolation, WireLimits

# How long a device that does not read may hold up its own last fault.
_LAST_WORD_S = 0.5
# What the library raises when the call is gone; the exact one varies with the moment.
_GONE = (
    grpc.aio.BaseError,
    grpc.RpcError,
    ConnectionError,
    asyncio.InvalidStateError,
    RuntimeError,
)


class GrpcVerifierStream:
    """``send`` and ``receive`` may be cancelled: a message is then taken or sent whole, or not at
    all, and the order stays. One receiver at a time."""

    def __init__(self, context: Any, limits: WireLimits, meter: ByteMeter | None) -> None:
        self._context = context
        # Asked once: grpcio 1.85 reads freed memory when asked after the call has ended.
        self.peer = str(context.peer())
        self._limits = limits
        self._meter = meter
        self._reading: Unbroken[Any] = Unbroken()
        self._writing: Unbroken[None] = Unbroken()
        self._write_lock = asyncio.Lock()
        self._verdict: asyncio.Future[Fault | None] = asyncio.get_running_loop().create_future()
        self._reason = "the stream is open"
        self._retryable = True
        self._spoke_last = False

    async def send(self, message: Downlink) -> None:
        """Raises ``LinkError`` when the stream is gone, ``ProtocolViolation`` for a message over
        a bound. Waits while the device does not read. A Fault is the last message."""
        payload = encode_downlink(message, self._limits)
        async with self._write_lock:
            self._raise_if_over()
            if isinstance(message, Fault):
                self._spoke_last = True
            try:
                await self._writing.settle(self._verdict)
                await self._writing.take(lambda: self._context.write(payload), self._verdict)
            except _GONE as error:
                self._end(None, f"the device at {self.peer} is gone: {error}")
                raise self._gone() from None
        if self._meter is not None:
            self._meter.count(message, len(payload))
        if isinstance(message, Fault):
            self.hang_up(message)

    async def receive(self) -> Uplink:
        """Raises ``LinkError`` when the device is gone or broke the protocol."""
        self._raise_if_over()
        try:
            payload = await self._reading.take(self._context.read, self._verdict)
        except _GONE as error:
            self._end(None, f"the device at {self.peer} is gone: {error}")
            raise self._gone() from None
        if payload is EOF:
            self._end(None, f"the device at {self.peer} sends no more")
            raise self._gone()
        try:
            message = decode_uplink(payload, self._limits)
        except ProtocolViolation as violation:
            self._retryable = False
            self.hang_up(Fault(FaultCode.INVALID, str(violation)))
            raise self._gone() from None
        if self._meter is not None:
            self._meter.count(message, len(payload))
        return message

    async def close(self) -> None:
        self.hang_up(None)

    async def over(self) -> Fault | None:
        """Wait for the end of the stream: the fault it ended by, or None."""
        await asyncio.wait((self._verdict,))
        return self._verdict.result()

    def hang_up(self, fault: Fault | None) -> None:
        """End the stream from this side, unless it has ended."""
        self._end(fault, "the stream was closed here" if fault is None else fault.message)

    def lost(self) -> None:
        """The library says that the device left."""
        self._end(None, f"the device at {self.peer} is gone")

    async def say_last(self, fault: Fault) -> None:
        """Send the fault after the end, unless one was sent; a device that left does not hear."""
        if self._spoke_last:
            return
        self._spoke_last = True
        payload = encode_downlink(fault, self._limits)
        try:
            async with asyncio.timeout(_LAST_WORD_S), self._write_lock:
                await self._writing.settle()
                await self._writing.take(lambda: self._context.write(payload))
        except (TimeoutError, *_GONE):
            return
        if self._meter is not None:
            self._meter.count(fault, len(payload))

    def _end(self, fault: Fault | None, reason: str) -> None:
        if not self._verdict.done():
            self._reason = reason
            self._verdict.set_result(fault)

    def _raise_if_over(self) -> None:
        if self._verdict.done():
            raise self._gone()

    def _gone(self) -> LinkError:
        return LinkError(self._reason, retryable=self._retryable)
