"""The verifier's end of one gRPC stream.

Theory of operation. A stream is open until something ends it: the device leaves, a side breaks the
protocol, a Fault was sent, the device does not read for too long, or the server hangs up. ``over``
then returns the verdict; the first one counts, and from then on every ``send`` and ``receive``
raises ``LinkError``. A device that only *half-closes* (it sends no more) still reads: ``receive``
raises, ``send`` goes on, so a Fault that is on its way is the one that ends the stream.

One task reads for as long as the stream lives and is one message ahead of who receives; a message
is written while its sender goes on, one at a time. So neither costs a task and a wait of its own
for each message, and cancelling a sender or a receiver cancels no operation of the library.

A stream that is read too fast for its budget is not read for a while: flow control then holds the
device, and nothing is lost. Messages already handed over leave before the status does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from grpc.aio import EOF

from edgespec.core.ports import ByteMeter, LinkError
from edgespec.core.protocol.messages import (
    Commit,
    Downlink,
    Fault,
    FaultCode,
    Open,
    Opened,
    Uplink,
)
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.traffic_budget import StreamBudget
from edgespec.wire.codec import decode_uplink, encode_downlink
from edgespec.wire.grpc_calls import (
    GONE,
    InterruptedOperation,
    ShieldedCall,
    count_nothing,
    peer_address,
)
from edgespec.wire.wire_limits import ProtocolViolation, WireLimits

LAST_WORD_S = 0.5
"""How long a device that does not read may hold up its own last fault."""
STALLED_S = 10.0
"""How long a device may leave a message unread, behind a full window, before it counts as gone."""
# Messages that have come and wait for their receiver, while the next one is read.
_READ_AHEAD = 1


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
        self.credential = credential
        self.peer = peer_address(address)
        self._limits = limits
        self._budget = budget
        self._count = count_nothing if meter is None else meter.count
        self._on_open = on_open
        self._stalled_s = stalled_s
        self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[Fault | None] = self._loop.create_future()
        self._reading: asyncio.Task[None] | None = None
        self._arrived: deque[Uplink] = deque()
        self._receiver: asyncio.Future[None] | None = None
        """Somebody waits for a message."""
        self._room: asyncio.Future[None] | None = None
        """The reading task waits for one to be taken."""
        self._take: Callable[[Uplink], None] | None = None
        """Who is fed."""
        self._half_closed = False
        self._failure: Exception | None = None
        """A bug in reading, for the receiver."""
        self._writing: ShieldedCall[None] = ShieldedCall()
        self._write_lock = asyncio.Lock()
        self._write_began = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._greeted = False
        self._reason = "the stream is open"
        self._retryable = True
        self._spoke_last = False

    async def send(self, message: Downlink) -> None:
        """Raises ``LinkError`` when the stream is gone, ``ProtocolViolation`` for a message over
        a bound. Waits while the device does not read, but for no longer than the stream may stall.
        A Fault is the last message."""
        payload = encode_downlink(message, self._limits)
        if self._writing.busy or self._write_lock.locked() or isinstance(message, Fault):
            async with self._write_lock:
                self._raise_if_over()
                if isinstance(message, Fault):
                    await self._send_fault(message, payload)
                else:
                    await self._until_written(None)
                    self._write(payload)
        else:  # as nearly always
            self._raise_if_over()
            self._write(payload)
        self._sent(message, len(payload))

    def send_now(self, message: Downlink) -> bool:
        """Send what can leave without waiting; False: it cannot, and nothing happened."""
        if self._verdict.done() or isinstance(message, Fault):
            return False
        if self._writing.busy or self._write_lock.locked():
            return False
        try:
            payload = encode_downlink(message, self._limits)
        except ProtocolViolation:  # for ``send`` to tell
            return False
        self._write(payload)
        self._sent(message, len(payload))
        return True

    def _sent(self, message: Downlink, size: int) -> None:
        self._count(message, size)
        match message:
            case Commit():
                count, accepted = len(message.tokens), message.accepted
                self._budget.earn(count, self._loop.time(), accepted)
            case Opened():
                self._greeted = True
            case Fault():
                self.hang_up(message)

    async def receive(self) -> Uplink:
        """Raises ``LinkError`` when the device is gone, sends no more or broke the protocol."""
        self._raise_if_over()
        while not self._arrived:
            await self._until_news()
        _wake(self._room)
        return self._arrived.popleft()

    async def feed(self, take: Callable[[Uplink], None]) -> NoReturn:
        """Hand each message to ``take`` as it comes, until the stream ends: then raises as
        ``receive`` does, or what ``take`` raised. One message costs one turn of the loop less than
        with ``receive``."""
        while self._arrived:
            take(await self.receive())
        self._raise_if_over()
        self._take = take
        try:
            while True:
                await self._until_news()
        finally:
            self._take = None

    async def _until_news(self) -> None:
        if self._reading is None:
            self._reading = self._loop.create_task(self._read_on())
        if self._failure is not None:
            raise self._failure
        if self._half_closed:  # it may still read, so the stream is not over
            raise LinkError(f"the device at {self.address} sends no more")
        self._receiver = self._loop.create_future()
        try:
            await self._receiver
        finally:
            self._receiver = None
        self._raise_if_over()

    async def close(self) -> None:
        self.hang_up(None)

    async def over(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the stream, at most ``timeout_s``; whether it has come."""
        await asyncio.wait((self._verdict,), timeout=timeout_s)
        return self._verdict.done()

    @property
    def verdict(self) -> Fault | None:
        """The fault that ended the stream, None for an end without one. Only after the end."""
        return self._verdict.result()

    @property
    def greeted(self) -> bool:
        return self._greeted

    def hang_up(self, fault: Fault | None) -> None:
        self._end(fault, "the stream was closed here" if fault is None else fault.message)

    def lost(self) -> None:
        """End the stream, because the library says that the device left."""
        self._end(None, f"the device at {self.address} is gone")

    async def say_last(self, fault: Fault | None) -> None:
        """After the end: let what was handed over leave, and the fault behind it, unless one was
        sent; a device that left does not hear."""
        if self._spoke_last:
            return
        self._spoke_last = True
        try:
            async with asyncio.timeout(LAST_WORD_S), self._write_lock:
                await self._writing.settle()
                if fault is None:
                    return
                payload = encode_downlink(fault, self._limits)
                await self._writing.take(lambda: self._context.write(payload))
        except (TimeoutError, *GONE):
            return
        self._count(fault, len(payload))

    async def _read_on(self) -> None:
        """Read until the device sends no more or the stream is over."""
        try:
            while not self._verdict.done():
                payload = await self._context.read()
                if payload is EOF:
                    self._half_closed = True
                    break
                hold_s = self._take_in(payload)
                if hold_s > 0.0:
                    await self.over(hold_s)
                while len(self._arrived) > _READ_AHEAD and not self._verdict.done():
                    self._room = self._loop.create_future()
                    await self._room
        except asyncio.CancelledError:  # the library's word for a call that has ended
            self.lost()
            raise
        except ProtocolViolation as violation:
            self._retryable = False
            self.hang_up(Fault(violation.code, str(violation)))
        except GONE as error:
            self._end(None, f"the device at {self.address} is gone: {error}")
        except Exception as error:
            self._failure = error
        _wake(self._receiver)

    def _take_in(self, payload: bytes) -> float:
        """Hand a message to its receiver; for how many seconds no other must be read."""
        now = self._loop.time()
        try:
            message = decode_uplink(payload, self._limits)
        except ProtocolViolation:
            self._budget.spend(now, len(payload))
            raise
        hold_s = self._budget.spend(now, len(payload))
        if isinstance(message, Open):
            self._on_open(self)
        self._count(message, len(payload))
        if self._take is not None:
            self._take(message)
        else:
            self._arrived.append(message)
            _wake(self._receiver)
        return hold_s

    def _write(self, payload: bytes) -> None:
        """Begin to write; no other write may be under way."""
        self._write_began = self._loop.time()
        self._writing.begin(self._context.write(payload), self._on_written)
        if self._watch is None:
            self._watch = self._loop.call_later(self._stalled_s, self._look_for_stall)

    def _on_written(self, error: BaseException | None) -> None:
        if error is not None:
            self._end(None, f"the device at {self.address} is gone: {error}")

    async def _until_written(self, patience_s: float | None) -> None:
        """Wait for the write under way. Raises ``LinkError`` and, after that time,
        ``TimeoutError``."""
        try:
            await self._writing.settle(self._verdict, patience_s)
        except InterruptedOperation:
            raise self._gone() from None
        self._raise_if_over()

    async def _send_fault(self, fault: Fault, payload: bytes) -> None:
        """The fault, to its end: who does not read it loses the stream soon, too."""
        self._spoke_last = True
        try:
            await self._until_written(LAST_WORD_S)
            self._write(payload)
            await self._until_written(LAST_WORD_S)
        except TimeoutError:
            self.hang_up(fault)
            raise self._gone() from None

    def _look_for_stall(self) -> None:
        """The one timer of the stream: it looks whether a write takes too long."""
        self._watch = None
        if self._verdict.done() or not self._writing.busy:
            return
        left_s = self._write_began + self._stalled_s - self._loop.time()
        if left_s > 0.0:
            self._watch = self._loop.call_later(left_s, self._look_for_stall)
            return
        self._spoke_last = True  # there is no room for another word
        why = f"the device at {self.address} did not read for {self._stalled_s:g} s"
        self.hang_up(Fault(FaultCode.OVERLOADED, why))

    def _end(self, fault: Fault | None, reason: str) -> None:
        if self._verdict.done():
            return
        self._reason = reason
        self._verdict.set_result(fault)
        for waiter in (self._receiver, self._room):
            _wake(waiter)
        if self._watch is not None:
            self._watch.cancel()

    def _raise_if_over(self) -> None:
        if self._verdict.done():
            raise self._gone()

    def _gone(self) -> LinkError:
        return LinkError(self._reason, retryable=self._retryable)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
