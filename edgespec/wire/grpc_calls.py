"""A shielded call runs an operation to its end, even if the waiting caller is cancelled.

Drivers wait with deadlines, and a deadline cancels. But a cancelled ``read()`` of grpc.aio cancels
the whole RPC on the client and loses a message on the server. So the operation runs in a task of
its own, and the next caller receives the result that a cancelled one left behind.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from ipaddress import IPv6Network, ip_address
from typing import Any, Final, Generic, NoReturn, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio

from edgespec.core.protocol.messages import Fault, FaultCode
from edgespec.wire.codec import WINDOW_BYTES, WireLimits

_T = TypeVar("_T")


class InterruptedOperation(ConnectionError):
    """The operation has no result: it was cancelled, or ``unless`` was done first."""


class ShieldedCall(Generic[_T]):
    """Runs one operation at a time, for one caller at a time."""

    def __init__(self) -> None:
        self._task: asyncio.Task[_T] | None = None

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    def start(
        self, operation: Coroutine[Any, Any, _T], failed: Callable[[BaseException], None]
    ) -> None:
        """Start ``operation`` without waiting for it.

        ``failed`` is called with its error if there is one. No other operation may be running."""
        assert self._task is None
        self._task = task = asyncio.create_task(operation)

        def forget(done: asyncio.Task[_T]) -> None:
            if self._task is task:
                self._task = None
            if done.cancelled():
                failed(InterruptedOperation("the operation was cancelled"))
            elif (error := done.exception()) is not None:
                failed(error)

        task.add_done_callback(forget)

    async def run(
        self,
        operation: Callable[[], Coroutine[Any, Any, _T]],
        unless: asyncio.Future[Any] | None = None,
    ) -> _T:
        """Return the result of the running operation, or of a new one if there is none.

        Each result is returned once. Raises the operation's error, and ``InterruptedOperation``."""
        if self._task is None:
            self._task = asyncio.create_task(operation())
            # When no caller comes back, asyncio must not report an error as lost.
            self._task.add_done_callback(lambda done: done.cancelled() or done.exception())
        task = await self._wait(self._task, unless)
        if task.cancelled():
            raise InterruptedOperation("the operation was cancelled")
        return task.result()

    async def wait_finished(self, unless: asyncio.Future[Any] | None = None) -> None:
        """Wait for the operation that a cancelled caller left running, and drop its result.

        Raises ``InterruptedOperation``."""
        if self._task is not None:
            await self._wait(self._task, unless)

    async def _wait(
        self, task: asyncio.Task[_T], unless: asyncio.Future[Any] | None
    ) -> asyncio.Task[_T]:
        futures = (task,) if unless is None else (task, unless)
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise InterruptedOperation("interrupted")
        self._task = None
        return task


CALL_ENDED_ERRORS: Final = (
    grpc.aio.BaseError,
    grpc.RpcError,
    ConnectionError,
    asyncio.InvalidStateError,
    RuntimeError,
)
"""Errors of the library on a call that has ended. Which of them it raises depends on timing."""


async def abort_call(
    context: Any, code: grpc.StatusCode, details: str, metadata: Any = ()
) -> NoReturn:
    """End the call with this status; never returns.

    If the client has left meanwhile, the call counts as cancelled."""
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.AbortError:
        raise
    except CALL_ENDED_ERRORS as error:
        raise asyncio.CancelledError(f"the client left before its refusal: {error}") from None
    raise AssertionError("abort raises")


STATUS_OF_FAULT: Final = {
    FaultCode.RESYNC: grpc.StatusCode.ABORTED,
    FaultCode.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    FaultCode.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    FaultCode.VOCABULARY_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    FaultCode.CONTEXT_TOO_LONG: grpc.StatusCode.OUT_OF_RANGE,
    FaultCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FaultCode.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    FaultCode.INTERNAL: grpc.StatusCode.INTERNAL,
    FaultCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
}
# Most characters of a status. It travels in a header, and peers refuse long ones. The Fault message
# carries the whole text.
_MAX_DETAILS_CHARS: Final = 512


async def refuse(context: Any, fault: Fault) -> NoReturn:
    """End the call with the status of ``fault``.

    The metadata give the time to wait for any gRPC client: in whole seconds as in HTTP, and in
    milliseconds as in gRPC's own retries."""
    advice: tuple[tuple[str, str], ...] = ()
    if (wait_s := fault.retry_after_s) > 0.0:
        whole, milliseconds = str(math.ceil(wait_s)), str(math.ceil(wait_s * 1e3))
        advice = ("retry-after", whole), ("grpc-retry-pushback-ms", milliseconds)
    await abort_call(
        context, STATUS_OF_FAULT[fault.code], fault.message[:_MAX_DETAILS_CHARS], advice
    )


# Channel arguments of both ends bound messages and windows, and detect dead peers.
#
# Keepalive needs three arguments together (measured with grpcio 1.85). With the defaults, a black
# hole is not noticed within 45 s. With only time and timeout, a stopped peer whose kernel still
# acknowledges is noticed after 60 s, because of ``http2.ping_timeout_ms``. A server with the
# default ping policy ends such a client with "too many pings" within seconds, so the policy is
# relaxed.

Options = list[tuple[str, int | str]]
PING_INTERVAL_S = PING_TIMEOUT_S = 1.5
"""Seconds between pings while a stream is open, and until a ping counts as lost. A dead peer is
noticed after about the sum of the two."""


def client_options(limits: WireLimits, connect_timeout_s: float) -> Options:
    return [
        *_common_options(limits),
        # A transport has one connection. The library would share it with every equal channel.
        ("grpc.use_local_subchannel_pool", 1),
        # An idle device does not ping, to save battery and mobile radio.
        ("grpc.keepalive_permit_without_calls", 0),
        # Milliseconds between connection attempts of a channel whose peer is gone. The library's
        # default grows to two minutes. It has to be less than the waits of a session, or the
        # library would refuse the session's attempts without trying.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 300),
        # In spite of its name this is no pause, but the limit of one attempt. It is longer than
        # ours, so that the caller's own limit is reached first.
        ("grpc.min_reconnect_backoff_ms", int(connect_timeout_s * 1000) + 1000),
    ]


def server_options(limits: WireLimits) -> Options:
    return [
        *_common_options(limits),
        # Off, so that a second daemon on the port fails instead of stealing half of the devices.
        ("grpc.so_reuseport", 0),
        # Limit of a client's TLS handshake. The library waits two minutes.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _common_options(limits: WireLimits) -> Options:
    timeout_ms = int(PING_TIMEOUT_S * 1000)
    return [
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.keepalive_time_ms", int(PING_INTERVAL_S * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
        # A fixed window; probing would let it grow with the link's speed.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ]


_NETWORK_BITS = 64
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


KEY_HEADER: Final = "authorization"
KEY_SCHEME: Final = "Bearer"
CONVERSATION_HEADER: Final = "edgespec-conversation"
"""Header with sixteen hexadecimal digits (``core/association/policies.py``)."""
