"""The device's end of the wire over gRPC.

A transport has one channel, and each generation has one bidirectional call with explicit ``read``
and ``write``. The library passes raw bytes, and the codec turns them into messages here. So a
malformed message ends this stream with an error that names the fault.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import grpc
import grpc.aio
from grpc.aio import EOF

from edgespec.config.common import host_of, is_loopback
from edgespec.config.proxies import proxy_of_address
from edgespec.core.ports import DeviceStream, LinkError, UntrustedPeerError
from edgespec.core.protocol.messages import Downlink, Fault, Uplink, VerifierInfo
from edgespec.wire import call_end, channel_options, codec, early_connection
from edgespec.wire.access import KEY_HEADER, KEY_SCHEME, DeviceAccess
from edgespec.wire.early_connection import EarlyConnection
from edgespec.wire.shielded_call import ShieldedCall
from edgespec.wire.watched_connection import WatchedConnection

# Statuses that a second attempt would meet again.
_FINAL_STATUSES: Final = {
    status for code, status in call_end.STATUS_OF_FAULT.items() if not code.retryable
} | {
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
}
_REPLACED_TEXT: Final = "the connection was dead and is replaced"
_TOO_LARGE_TEXT: Final = "message larger than max"
CONVERSATION_HEADER: Final = "edgespec-conversation"
"""Header (gRPC metadata) with the conversation's hash, sixteen hexadecimal digits, by which a proxy
may choose a replica (``core/association/policies.py``)."""
CALL_TIMEOUT_S = 5.0
"""Limit in seconds for connecting and for each unary call."""
_log = logging.getLogger(__name__)
# Seconds that a closed stream may wait for the verifier to end it too.
_LINGER_TIMEOUT_S: Final = 1.0


class GrpcTransport:
    """Streams to the verifier at ``address`` ("host:port" or "unix:path").

    ``conversation`` is called at each connect and returns the hash by which a proxy may choose a
    replica, or "". ``early`` lets the first requests leave before the verifier's HTTP/2 settings
    have arrived; by default that is done for other machines that are reached without a proxy.
    Raises ``ConfigError`` if others could read the API key of ``access`` on its way."""

    def __init__(
        self,
        address: str,
        access: DeviceAccess | None = None,
        *,
        limits: codec.WireLimits | None = None,
        conversation: Callable[[], str] = lambda: "",
        early: bool | None = None,
    ) -> None:
        self.address, self._access = address, access or DeviceAccess()
        self.limits = limits or codec.WireLimits()
        key = self._access.key_for(address)
        self._metadata = ((KEY_HEADER, f"{KEY_SCHEME} {key}"),) if key else ()
        self._conversation = conversation
        self._channel: grpc.aio.Channel | None = None
        self._sends_early = self._may_send_early() if early is None else early
        self._early: EarlyConnection | None = None
        """The connection that is used until the channel is ready."""
        self._streams: set[GrpcDeviceStream] = set()
        self._lingering: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        """Closings of connections that ``renew`` has replaced."""
        self._calls = 0
        """Number of calls that are under way, to open a stream or for a unary request."""
        self._call_limits: set[asyncio.Timeout] = set()
        """Time limits of the calls that are under way."""
        self._replacements = 0
        """Number of times that the channel was replaced."""
        self._watched = WatchedConnection(self._probe, self._connect_fresh, self._use_fresh)
        self._closed = False

    @property
    def is_idle(self) -> bool:
        return not (self._calls or self._streams or self._lingering)

    async def connect(self) -> DeviceStream:
        """Open a stream. Raises ``LinkError`` naming the address and the reason."""
        metadata = self._metadata
        if conversation := self._conversation():
            metadata = (*metadata, (CONVERSATION_HEADER, conversation))
        call: Any = None
        early: EarlyConnection | None = None
        self._watched.begin_use()
        try:
            async with self._timed_call("connect"):
                channel, early = await self._choose_channel()
                method: Any = channel.stream_stream(f"/{codec.SERVICE}/Speculate", None, None)
                call = method(metadata=metadata)
                await call.wait_for_connection()
        except BaseException:
            if call is not None:
                call.cancel()
            self._leave_early(early)
            self._watched.end_use()
            raise
        stream = GrpcDeviceStream(self, call, early)
        self._streams.add(stream)
        return stream

    async def info(self) -> VerifierInfo:
        payload = await self.call_unary("Info", b"")
        try:
            return codec.decode_info(payload, self.limits)
        except codec.ProtocolViolation as violation:
            raise LinkError(f"verifier at {self.address}: {violation}", retryable=False) from None

    async def call_unary(self, name: str, request: bytes) -> bytes:
        """Make one unary call of the service, such as ``Tokenizer``. It is repeated once if its
        connection was found to be dead. Raises ``LinkError``."""
        try:
            with self._watched.used_by_call():
                return await self._call_once(name, request)
        except LinkError as error:
            if error.again_s is None:
                raise
        with self._watched.used_by_call():
            return await self._call_once(name, request)

    async def _call_once(self, name: str, request: bytes) -> bytes:
        early: EarlyConnection | None = None
        try:
            async with self._timed_call(name.lower()):
                channel, early = await self._choose_channel()
                method: Any = channel.unary_unary(f"/{codec.SERVICE}/{name}", None, None)
                call = method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
                return bytes(await call)
        except LinkError:
            if early is None or not early.was_refused:
                raise
        finally:
            self._leave_early(early)
        return await self._call_once(name, request)  # whose failure has a reason

    def renew(self) -> None:
        """Use a new connection from now on. The old one is closed, and what runs on it breaks.

        Call this where the old connection is probably dead, such as after the machine has slept. A
        dead connection would otherwise hold the next call until its pings are lost."""
        self._watched.note_replaced()
        self._replace_channel(None)

    async def close(self) -> None:
        """End all streams, after a moment in which sent messages may arrive."""
        self._closed = True
        await self._watched.close()
        for stream in tuple(self._streams):
            await stream.close()
        await asyncio.gather(*self._lingering)
        self._drop_early()
        await asyncio.gather(*self._closing)
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    @asynccontextmanager
    async def _timed_call(self, what: str) -> AsyncIterator[None]:
        """Count a call that is under way, limit its time, and turn the library's errors into a
        ``LinkError``. ``again_s`` is 0 if the connection was replaced meanwhile."""
        self._calls += 1
        replacements = self._replacements
        # ``wait_for`` of Python 3.11 may connect for a caller that was cancelled.
        limit = asyncio.timeout(CALL_TIMEOUT_S)
        try:
            async with limit:
                self._call_limits.add(limit)
                yield
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            if replacements != self._replacements:
                raise self._replaced_error() from None
            raise self._call_error(error, what) from None
        except asyncio.CancelledError:
            # The library cancels the calls of a channel that is closed, as if their caller had.
            task = asyncio.current_task()
            if replacements == self._replacements or (task is not None and task.cancelling()):
                raise
            raise self._replaced_error() from None
        finally:
            self._calls -= 1
            self._call_limits.discard(limit)

    def _replaced_error(self) -> LinkError:
        return LinkError(f"verifier at {self.address}: {_REPLACED_TEXT}", again_s=0.0)

    # --- a connection that may be dead -----------------------------------------------------

    async def _probe(self) -> None:
        await self._call_once("Info", b"")

    async def _connect_fresh(self) -> grpc.aio.Channel:
        """Return a new channel over which the verifier has answered. Raises ``LinkError``."""
        options = channel_options.client_options(self.limits, CALL_TIMEOUT_S)
        channel = _make_channel(self.address, self._access, options)
        try:
            method: Any = channel.unary_unary(f"/{codec.SERVICE}/Info", None, None)
            await method(b"", timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except BaseException as error:
            self._close_later(channel.close(None))
            if isinstance(error, grpc.aio.AioRpcError):
                raise self._call_error(error, "info") from None
            raise
        return channel

    def _use_fresh(self, channel: grpc.aio.Channel) -> None:
        """Use ``channel`` from now on. What runs on the dead connection breaks, and may be repeated
        at once."""
        _log.info("the connection to %s was dead and is replaced", self.address)
        for stream in self._streams:
            stream.was_replaced = True
        self._replace_channel(channel)

    def _replace_channel(self, channel: grpc.aio.Channel | None) -> None:
        """Close the present channel and use ``channel``; None: one that the next call makes."""
        dead, self._channel = self._channel, channel
        self._replacements += 1
        for limit in self._call_limits:  # A call that waits to be connected would wait on.
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
        if dead is not None:
            self._close_later(dead.close(None))
        self._drop_early()

    def note_message(self) -> None:
        """Note that a stream has received something, so that the connection is alive."""
        self._watched.note_message()

    def linger(self, stream: GrpcDeviceStream) -> None:
        """Close ``stream`` in the background, since its messages may still arrive."""
        if stream in self._streams:
            self._streams.remove(stream)
            self._watched.end_use()
        task = asyncio.create_task(stream.linger())
        self._lingering.add(task)

        def end_linger(task: asyncio.Task[None]) -> None:
            self._lingering.discard(task)
            self._leave_early(stream.early)

        task.add_done_callback(end_linger)

    def _may_send_early(self) -> bool:
        host = host_of(self.address)
        is_far = bool(host) and not is_loopback(host) and not self.address.startswith("dns:")
        return (
            early_connection.IS_SUPPORTED
            and is_far
            and proxy_of_address(self.address, self._access.server_name) is None
        )

    async def _choose_channel(self) -> tuple[grpc.aio.Channel, EarlyConnection | None]:
        """Return the channel for the next call, and the early connection if it is that one's. Then
        the caller must pass it to ``_leave_early`` at the end of the call."""
        channel = self._get_channel()
        ready = grpc.ChannelConnectivity.READY
        if not self._sends_early or channel.get_state(try_to_connect=True) is ready:
            return channel, None
        early = self._early
        if early is None or (early.opened.done() and not early.is_usable):
            self._drop_early()
            options = channel_options.client_options(self.limits, CALL_TIMEOUT_S)
            early = EarlyConnection(self.address, self._access, options, CALL_TIMEOUT_S)
            self._early = early
        early.uses += 1
        try:
            if not early.opened.done():
                usual = asyncio.ensure_future(channel.channel_ready())
                try:
                    await asyncio.wait((early.opened, usual), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    usual.cancel()
                    await asyncio.gather(usual, return_exceptions=True)
            if early.is_usable:
                return early.channel, early
        except BaseException:
            self._leave_early(early)
            raise
        self._leave_early(early)
        return channel, None

    def _leave_early(self, early: EarlyConnection | None) -> None:
        """End one use of an early connection. Close it if it has no other, and the usual one has
        taken its place."""
        if early is None:
            return
        early.uses -= 1
        if early.was_refused:
            self._sends_early = False
        if early is self._early and not early.uses and self._channel is not None:
            if self._channel.get_state() is grpc.ChannelConnectivity.READY:
                self._drop_early()

    def _drop_early(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            self._close_later(early.close())

    def _close_later(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _get_channel(self) -> grpc.aio.Channel:
        """Return the channel. It is made on first use, because it belongs to the running event
        loop."""
        if self._closed:
            raise LinkError(f"the transport to {self.address} was closed here", retryable=False)
        if self._channel is None:
            options = channel_options.client_options(self.limits, CALL_TIMEOUT_S)
            self._channel = _make_channel(self.address, self._access, options)
        return self._channel

    def _call_error(self, error: TimeoutError | grpc.aio.AioRpcError, what: str) -> LinkError:
        """Return the reason why a call failed. gRPC's own words for a failed handshake hide it."""
        if isinstance(error, TimeoutError) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            late = f"no answer to {what} within {CALL_TIMEOUT_S} s"
            proxy = _describe_proxy(self.address, self._access)
            return LinkError(f"verifier at {self.address}: {late}{proxy}")
        if (why := self._access.handshake_failure(error.details() or "")) is not None:
            return UntrustedPeerError(f"verifier at {self.address}: {why}")
        details = error.details() or ""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            details += _describe_proxy(self.address, self._access)
        return _link_error(self.address, error.code(), details)


class GrpcDeviceStream:
    """One bidirectional call.

    ``send`` and ``receive`` may be cancelled: a message is then sent or received whole, or not at
    all, and the order stays. One receiver at a time."""

    def __init__(self, transport: GrpcTransport, call: Any, early: EarlyConnection | None) -> None:
        self._transport, self._call, self.early = transport, call, early
        self._address, self._limits = transport.address, transport.limits
        self.verifier = transport.address
        self._reading: ShieldedCall[Any] = ShieldedCall()
        self._writing: ShieldedCall[None] = ShieldedCall()
        self._write_lock = asyncio.Lock()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fault: Fault | None = None
        self._violation: str | None = None
        self.was_replaced = False
        """Whether the connection of this stream was found to be dead and was replaced."""

    async def send(self, message: Uplink) -> None:
        """Send ``message``; wait while the verifier does not read.

        Messages that are sent after the verifier has ended the stream, and before ``receive`` has
        reported the end, are lost without an error, as they could be on their way. Raises
        ``LinkError`` if the stream is known to have ended, and ``ProtocolViolation`` for a message
        over a bound; the stream lives on then."""
        payload = codec.encode_uplink(message, self._limits)
        async with self._write_lock:
            if self._closed.done() or self._call.done():
                raise await self._end_error()
            try:
                await self._writing.wait_finished(self._closed)
                await self._writing.run(lambda: self._write(payload), self._closed)
            except call_end.CALL_ENDED_ERRORS:
                raise await self._end_error() from None

    async def receive(self) -> Downlink:
        """Return the next message.

        Raises ``LinkError`` if the stream has ended, also because a message exceeded a bound."""
        if self._closed.done():
            raise await self._end_error()
        try:
            payload = await self._reading.run(self._call.read, self._closed)
        except call_end.CALL_ENDED_ERRORS:
            raise await self._end_error() from None
        if payload is EOF:
            raise await self._end_error()
        self._transport.note_message()
        try:
            message = codec.decode_downlink(payload, self._limits)
        except codec.ProtocolViolation as violation:
            self._violation = str(violation)
            self._call.cancel()
            raise await self._end_error() from None
        if isinstance(message, Fault):
            self._fault = message
        return message

    async def _write(self, payload: bytes) -> None:
        """Call ``call.write`` without its way of failing.

        If the verifier has just ended the stream, a failing write replaces the verifier's status
        with INTERNAL and makes earlier messages unreadable, including the Fault
        (grpc/grpc#36066)."""
        with suppress(grpc.aio.InternalError):
            await self._call._cython_call.send_serialized_message(payload)

    async def close(self) -> None:
        """Close the stream and return at once. Messages that were sent, such as a Cancel, may still
        arrive."""
        if not self._closed.done():
            self._closed.set_result(None)
            self._transport.linger(self)

    async def linger(self) -> None:
        """Half-close the call and wait for the verifier's answer.

        Cancelling the call at once would drop messages that the verifier has not read. A call that
        ended with unread messages here would never be freed by the library."""
        try:
            async with asyncio.timeout(_LINGER_TIMEOUT_S):
                with suppress(*call_end.CALL_ENDED_ERRORS):
                    async with self._write_lock:
                        await self._writing.wait_finished()
                        await self._writing.run(self._call.done_writing)
                while await self._reading.run(self._call.read) is not EOF:
                    pass
        except (TimeoutError, *call_end.CALL_ENDED_ERRORS):
            return
        finally:
            self._call.cancel()

    async def _end_error(self) -> LinkError:
        if self._violation is not None:
            return LinkError(f"verifier at {self._address}: {self._violation}", retryable=False)
        if self._closed.done():
            return LinkError(f"the stream to {self._address} was closed here", retryable=False)
        if self.was_replaced:
            return LinkError(f"verifier at {self._address}: {_REPLACED_TEXT}", again_s=0.0)
        code, details = await self._call.code(), await self._call.details()
        error = _link_error(self._address, code, details)
        if self._fault is not None:
            error.retryable = self._fault.code.retryable
        return error


def _link_error(address: str, code: grpc.StatusCode, details: str | None) -> LinkError:
    if code is grpc.StatusCode.OK:
        return LinkError(f"verifier at {address} ended the stream")
    text = f"verifier at {address}: {code.name}: {details or 'no details'}"
    # The library's own refusal of a message has the status of a verifier that is merely busy.
    too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE_TEXT in (details or "")
    alive = code in _FINAL_STATUSES or code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return LinkError(text, retryable=code not in _FINAL_STATUSES and not too_large, alive=alive)


SERVING = "SERVING"


async def check_health(address: str, access: DeviceAccess, timeout_s: float) -> str:
    """Return ``SERVING``, or another state of the daemon from gRPC's standard health service.

    This is for probes that run in separate processes. Raises ``LinkError``."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with _make_channel(address, access, []) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}{_describe_proxy(address, access)}"
            raise LinkError(f"no health from {address}: {why}") from None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _describe_proxy(address: str, access: DeviceAccess) -> str:
    """Return the proxy on the way to ``address`` as words to append to an error, or "" if none."""
    proxy = proxy_of_address(address, access.server_name)
    return "" if proxy is None else f" ({proxy.explain(access.server_name or host_of(address))})"


def _make_channel(
    address: str, access: DeviceAccess, options: channel_options.Options
) -> grpc.aio.Channel:
    if proxy_of_address(address, access.server_name) is None:
        options = [*options, ("grpc.enable_http_proxy", 0)]
    if access.server_name:
        options = [*options, ("grpc.ssl_target_name_override", access.server_name)]
    if access.credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, access.credentials, options=options)
