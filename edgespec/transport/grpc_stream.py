"""The verifier's end of one gRPC stream.

Theory of operation. A stream is open until something ends it: the device leaves, a side breaks the
protocol, a Fault was sent, the device does not read for too long, or the server hangs up. ``over``
then returns the verdict; the first one counts, and from then on every ``send`` and ``receive``
raises ``LinkError``. A device that only *half-closes* (it sends no more) still reads: ``receive``
raises, ``send`` goes on, so a Fault that is on its way is the one that ends the stream.

A stream that is read too fast for its budget is not read for a while: flow control then holds the
device, and nothing is lost. Messages already handed over leave before the status does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF

from edgespec.core.protocol.messages import (
    Commit,
    Downlink,
    Draft,
    Fault,
    FaultCode,
    Open,
    Opened,
    Uplink,
)
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.stream_budget import StreamBudget
from edgespec.ports import ByteMeter, LinkError
from edgespec.transport.codec import decode_uplink, encode_downlink
from edgespec.transport.peer_address import peer_address
from edgespec.transport.shielded_call import ShieldedCall
from edgespec.transport.wire_limits import ProtocolViolation, WireLimits

LAST_WORD_S = 0.5
"""How long a device that does not read may hold up its own last fault."""
STALLED_S = 10.0
"""How long a device may leave a message unread, behind a full window, before it counts as gone."""
# What the library raises when the call is gone; the exact one varies with the moment.
_GONE = (
    grpc.aio.BaseError,
    grpc.RpcError,
    ConnectionError,
    asyncio.InvalidStateError,
    RuntimeError,
)


class GrpcVerifierStream:
    """The stream as a ``VerifierStream``. ``send`` and ``receive`` may be cancelled: a message is
    then taken or sent whole, or not at all, and the order stays. One receiver at a time.

    ``address`` is the peer as gRPC spells it; ``on_open`` is called when the Open has arrived.
    """

    def __init__(
        self,
        context: Any,
        address: str,
        limits: WireLimits,
        budget: StreamBudget,
        *,
        credential: Credential = ANYBODY,
        meter: ByteMeter | None = None,
        on_open: Callable[[GrpcVerifierStream], None] = lambda _: None,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._context = context
        self.address = address
        self._credential = credential
        self._peer = peer_address(address)
        self._limits = limits
        self._budget = budget
        self._meter = meter
        self._on_open = on_open
        self._stalled_s = stalled_s
        self._reading: ShieldedCall[Any] = ShieldedCall()
        self._writing: ShieldedCall[None] = ShieldedCall()
        self._write_lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[Fault | None] = self._loop.create_future()
        self._read_at = 0.0
        """Not before this moment on the loop's clock is the next message read."""
        self._max_nodes = 0
        self._reason = "the stream is open"
        self._retryable = True
        self._spoke_last = False

    @property
    def peer(self) -> str:
        """What fairness counts by: the device's address without its port."""
        return self._peer

    @property
    def credential(self) -> Credential:
        """Whose key the device showed."""
        return self._credential

    async def send(self, message: Downlink) -> None:
        """Raises ``LinkError`` when the stream is gone, ``ProtocolViolation`` for a message over
        a bound. Waits while the device does not read, but for no longer than the stream may stall.
        A Fault is the last message."""
        payload = encode_downlink(message, self._limits)
        async with self._write_lock:
            self._raise_if_over()
            # A fault ends the stream: who does not read it loses the stream soon, too.
            patience_s = LAST_WORD_S if isinstance(message, Fault) else self._stalled_s
            if isinstance(message, Fault):
                self._spoke_last = True
            try:
                await self._writing.settle(self._verdict, patience_s)
                await self._writing.take(
                    lambda: self._context.write(payload), self._verdict, patience_s
                )
            except TimeoutError:
                self._stalled(message)
                raise self._gone() from None
            except _GONE as error:
                self._end(None, f"the device at {self.address} is gone: {error}")
                raise self._gone() from None
        if self._meter is not None:
            self._meter.count(message, len(payload))
        match message:
            case Commit(tokens=tokens):
                self._budget.earn(len(tokens), self._max_nodes, self._loop.time())
            case Opened(limits=limits):
                self._max_nodes = limits.max_nodes_outstanding
            case Fault():
                self.hang_up(message)

    async def receive(self) -> Uplink:
        """Raises ``LinkError`` when the device is gone, sends no more or broke the protocol."""
        await self._until_affordable()
        self._raise_if_over()
        try:
            payload = await self._reading.take(self._context.read, self._verdict)
        except _GONE as error:
            self._end(None, f"the device at {self.address} is gone: {error}")
            raise self._gone() from None
        if payload is EOF:  # it may still read, so the stream is not over
            self._raise_if_over()
            raise LinkError(f"the device at {self.address} sends no more")
        try:
            message = decode_uplink(payload, self._limits)
        except ProtocolViolation as violation:
            self._retryable = False
            self.hang_up(Fault(violation.code, str(violation)))
            raise self._gone() from None
        nodes = len(message.tokens) if isinstance(message, Draft) else 0
        now = self._loop.time()
        self._read_at = now + self._budget.spend(nodes, now)
        if isinstance(message, Open):
            self._on_open(self)
        if self._meter is not None:
            self._meter.count(message, len(payload))
        return message

    async def close(self) -> None:
        """End the stream from this side, at once."""
        self.hang_up(None)

    async def over(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the stream, at most ``timeout_s``; whether it has come."""
        await asyncio.wait((self._verdict,), timeout=timeout_s)
        return self._verdict.done()

    @property
    def verdict(self) -> Fault | None:
        """The fault that ended the stream, None for an end without one. Only after the end."""
        return self._verdict.result()

    def hang_up(self, fault: Fault | None) -> None:
        """End the stream from this side, unless it has ended."""
        self._end(fault, "the stream was closed here" if fault is None else fault.message)

    def lost(self) -> None:
        """End the stream, because the library says that the device left."""
        self._end(None, f"the device at {self.address} is gone")

    async def say_last(self, fault: Fault) -> None:
        """Send the fault after the end, unless one was sent; a device that left does not hear."""
        if self._spoke_last:
            return
        self._spoke_last = True
        payload = encode_downlink(fault, self._limits)
        try:
            async with asyncio.timeout(LAST_WORD_S), self._write_lock:
                await self._writing.settle()
                await self._writing.take(lambda: self._context.write(payload))
        except (TimeoutError, *_GONE):
            return
        if self._meter is not None:
            self._meter.count(fault, len(payload))

    async def _until_affordable(self) -> None:
        """Wait until the budget has recovered from the last message."""
        while (wait_s := self._read_at - self._loop.time()) > 0.0:
            if await self.over(wait_s):
                return

    def _stalled(self, message: Downlink) -> None:
        """The device did not read in time."""
        self._spoke_last = True  # there is no room for another word
        if isinstance(message, Fault):
            self.hang_up(message)
        else:
            why = f"the device at {self.address} did not read for {self._stalled_s:g} s"
            self.hang_up(Fault(FaultCode.OVERLOADED, why))

    def _end(self, fault: Fault | None, reason: str) -> None:
        if not self._verdict.done():
            self._reason = reason
            self._verdict.set_result(fault)

    def _raise_if_over(self) -> None:
        if self._verdict.done():
            raise self._gone()

    def _gone(self) -> LinkError:
        return LinkError(self._reason, retryable=self._retryable)
