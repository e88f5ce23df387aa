"""Limits for callers: API keys, a queue for unary calls, slots for streams, and delayed refusals.

Unary calls are ``Info``, health, reflection and the tokenizer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass
from ipaddress import IPv6Network, ip_address
from typing import Any, Final, Generic, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio

from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.messages import Fault, FaultCode
from edgespec.core.verifier.traffic_budget import CallBudget, CallLimits
from edgespec.wire.access import KEY_HEADER, KEY_SCHEME
from edgespec.wire.call_end import refuse

MIN_DELAY_S: Final = 0.5
REFUSALS_PER_S: Final = 20.0
MAX_DELAY_S: Final = 10.0
MAX_DELAYED_CALLS_PER_PAYER: Final = 512
"""Most calls of one payer that are held."""
MAX_DELAYED_CALLS: Final = 4_096
LAST_FAULT_TIMEOUT_S: Final = 0.5
"""Seconds for a last fault to leave, although its device may not read."""
_HINT: Final = "set EDGESPEC_API_KEY or api_key_file on the device"
NO_KEY: Final = Fault(FaultCode.UNAUTHENTICATED, f"this verifier requires an API key; {_HINT}")
WRONG_KEY: Final = Fault(
    FaultCode.UNAUTHENTICATED, f"the API key is unknown to this verifier or was revoked; {_HINT}"
)
# A tokenizer of 11 MB travels as 3 MB, which is 24 parts. All peers together receive at most 8 MiB
# a second, and one peer 4 MiB.
TOKENIZER_LIMITS: Final = CallLimits(
    peer_rate=32.0, peer_burst=64.0, total_rate=64.0, total_burst=128.0, max_wait_s=2.0
)
SPARE_STREAMS: Final = 8
_S = TypeVar("_S", bound=Hashable)


class RefusalDelay:
    """Delays refusals: the more calls of a payer are held, the later each one is refused.

    A refusal costs the event loop about 0.4 ms, so a caller that is refused at once and calls again
    in a loop could fill it. Each refused call is held for half a second, or longer if many of one
    payer's calls are held, so that at most ``REFUSALS_PER_S`` calls end in a second. Held calls
    cost memory only. Beyond ``MAX_DELAYED_CALLS_PER_PAYER`` calls are refused at once again, but
    that takes as many calls open at the same time."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self.delayed = 0

    async def delay(
        self, payer: str, wait: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        """Return when a call of ``payer`` may be refused.

        ``wait`` waits for the given seconds, or until the call has ended."""
        if self._held[payer] >= MAX_DELAYED_CALLS_PER_PAYER or self.delayed >= MAX_DELAYED_CALLS:
            return
        self._held[payer] += 1
        self.delayed += 1
        try:
            await wait(min(max(MIN_DELAY_S, self._held[payer] / REFUSALS_PER_S), MAX_DELAY_S))
        finally:
            self.delayed -= 1
            self._held[payer] -= 1
            if not self._held[payer]:
                del self._held[payer]


_NETWORK_BITS: Final = 64
"""Size of the network of an IPv6 host, which can call from any address in it."""


def peer_address(uri: str) -> str:
    """Return the peer in ``uri``, as gRPC spells it, in a form that all its connections share.

    ``ipv4:10.0.0.7:5123`` becomes ``ipv4:10.0.0.7``, ``ipv6:%5B2001:db8::7%5D:5123`` becomes
    ``ipv6:2001:db8::/64``, and any unix socket becomes ``unix``."""
    kind, _, rest = uri.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    host = unquote(rest).rpartition(":")[0].strip("[]")
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return f"{kind}:{host}"
    address = getattr(address, "ipv4_mapped", None) or address
    if address.version == 4:
        return f"ipv4:{address}"
    return f"ipv6:{IPv6Network((int(address), _NETWORK_BITS), strict=False)}"


def caller_name(peer: str, credential: Credential) -> str:
    """Return the name under which a call waits in a queue: the peer, and the name of its API key.

    So no key can fill the queue of others that call from the same address, such as a proxy's."""
    return f"{peer} (key {credential.name!r})" if credential.name else peer


def payer_name(peer: str, credential: Credential) -> str:
    """Return the name under which a call or a message is charged.

    It is the API key, from any address, or the peer if no key was shown."""
    return f"key {credential.name!r}" if credential.name else peer


class CallQueue:
    """One queue for all callers, in which each peer has its own rate."""

    def __init__(self, limits: CallLimits) -> None:
        self._budget = CallBudget(limits, time.monotonic())
        self._refusals = RefusalDelay()

    async def wait_turn(self, context: Any, credential: Credential = ANYBODY) -> None:
        """Wait until the call of ``context`` is next. Abort the call if the queue is too long."""
        address = peer_address(str(context.peer()))
        peer = caller_name(address, credential)
        wait_s = self._budget.charge_call(peer, time.monotonic(), payer_name(address, credential))
        most_s = self._budget.limits.max_wait_s
        if wait_s > most_s:
            wait = f"the wait would be {wait_s:.1f} s, the limit is {most_s:g} s"
            await self._refusals.delay(peer)
            why = f"{peer} calls too often: {wait}"
            await refuse(context, Fault(FaultCode.OVERLOADED, why, wait_s - most_s))
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)


class SideServices(grpc.aio.ServerInterceptor):
    """Puts the calls of all services but ``own`` into a queue.

    The library's health and reflection services would otherwise answer a peer that calls in a loop
    as fast as they can."""

    def __init__(self, own: str, queue: CallQueue) -> None:
        self._own, self._queue = f"/{own}/", queue

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(self._own):
            return handler
        parts = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._queue_call(handler.unary_unary), *parts
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._queue_call(handler.unary_stream), *parts
            )
        return grpc.stream_stream_rpc_method_handler(
            self._queue_messages(handler.stream_stream), *parts
        )

    def _queue_call(self, answer: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def in_turn(request: Any, context: Any) -> Any:
            await self._queue.wait_turn(context)
            return await answer(request, context)

        return in_turn

    def _queue_messages(self, answer: Callable[[Any, Any], Any]) -> Any:
        async def in_turn(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async def paced() -> AsyncIterator[Any]:
                async for request in requests:
                    await self._queue.wait_turn(context)
                    yield request

            async for reply in answer(paced(), context):
                yield reply

        return in_turn


def read_key(context: Any) -> str:
    """Return the API key in a call's metadata. Empty if there is none, or more than one."""
    values = [value for key, value in context.invocation_metadata() or () if key == KEY_HEADER]
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    scheme, _, key = values[0].partition(" ")
    return key.strip() if scheme.lower() == KEY_SCHEME.lower() else ""


@dataclass(frozen=True, slots=True)
class SlotGrant(Generic[_S]):
    refusal: str | None = None
    """Reason why the stream got no slot, with the bound and the value."""
    evicted: _S | None = None
    """Idle stream that lost its slot and has to be ended."""


class StreamSlots(Generic[_S]):
    """A bounded table of ``max_streams`` slots that one peer or one key cannot fill alone.

    A stream takes a slot when it arrives and releases it when it ends. It is *idle* until its Open
    has arrived. It counts for its owners: its peer and, if keys are required, the credential of its
    key. One owner holds at most the share ``peer_share`` of the slots, and at least one. A
    credential with a limit of sessions holds at most twice that limit and ``SPARE_STREAMS``, since
    a device may come back before its last stream is known to be dead.

    If a new stream finds no slot, an idle one has to leave: the oldest one of the owner that has
    reached its bound, or else the oldest one of the peer with most idle streams. If no such stream
    is idle, the new one is refused. So a stream whose Open has arrived never loses its slot to
    another."""

    def __init__(self, max_streams: int, peer_share: float) -> None:
        assert max_streams > 0
        assert 0.0 < peer_share <= 1.0
        self.max_streams = max_streams
        self.peer_streams = max(1, math.floor(max_streams * peer_share))
        self._owners: dict[_S, tuple[str, ...]] = {}
        """Owners of each stream, its peer first."""
        self._held: Counter[str] = Counter()
        self._idle: dict[_S, None] = {}
        """Idle streams in the order of arrival."""

    def __len__(self) -> int:
        return len(self._owners)

    def acquire(self, stream: _S, peer: str, credential: Credential = ANYBODY) -> SlotGrant[_S]:
        """Take a slot for a new stream of ``peer``, which showed the key of ``credential``."""
        bounds = {peer: self.peer_streams}
        if credential.name:
            key_bound = 2 * credential.max_sessions + SPARE_STREAMS
            bound = (
                min(self.peer_streams, key_bound) if credential.max_sessions else self.peer_streams
            )
            bounds[payer_name(peer, credential)] = bound
        owners = tuple(bounds)
        full = [owner for owner in owners if self._held[owner] >= bounds[owner]]
        evicted = None
        if full or len(self) >= self.max_streams:
            if (evicted := self._oldest_idle(set(full))) is None:
                for owner in full:
                    if bounds[owner] < self.max_streams:
                        why = f"{self._held[owner]} streams of {owner} are open"
                        return SlotGrant(f"{why}, the limit is {bounds[owner]}")
                return SlotGrant(f"{len(self)} streams are open, the limit is {self.max_streams}")
            self.release(evicted)
        self._owners[stream], self._idle[stream] = owners, None
        self._held.update(owners)
        return SlotGrant(evicted=evicted)

    def _oldest_idle(self, owners: set[str]) -> _S | None:
        """Return the oldest idle stream that counts for all of ``owners``.

        Without owners, it is the oldest one of the peer with most idle streams."""
        if not owners:
            idle_peers = Counter(self._owners[one][0] for one in self._idle)
            owners = {peer for peer, _ in idle_peers.most_common(1)}
        return next((one for one in self._idle if owners.issubset(self._owners[one])), None)

    def mark_opened(self, stream: _S) -> None:
        """Note that the stream's Open has arrived. A stream without a slot is ignored."""
        self._idle.pop(stream, None)

    def release(self, stream: _S) -> None:
        self._idle.pop(stream, None)
        for owner in self._owners.pop(stream, ()):
            self._held[owner] -= 1
            if not self._held[owner]:
                del self._held[owner]
