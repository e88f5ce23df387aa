"""The verifier's end of the wire over gRPC: the daemon's listener.

Theory of operation. Each stream that a device opens waits for its turn, takes a slot and is passed
to ``serve`` as a ``VerifierStream``. The slot is released when ``serve`` returns or the stream
ends, whichever is first. A device that breaks the protocol receives a Fault and the matching status
on that stream; all others go on. gRPC's own health (NOT_SERVING while draining) and reflection
services run beside it.

The effects of one peer on others are bounded: how fast its streams are read (``UplinkLimits``), how
often it opens one or calls ``Info`` (``CallLimits``), how many it holds (``StreamSlots``), and how
many calls it has open in all, including calls that wait for their turn or for their refusal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc.aio import EOF

from edgespec.config.common import host_names, host_of, join_host_port
from edgespec.core.ports import Authenticate, LinkError, ServeStream
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.verifier import traffic_budget as budgets
from edgespec.telemetry.logs import log_failure
from edgespec.telemetry.verifier_counts import VerifierTelemetry
from edgespec.wire import call_end, callers, channel_options, codec
from edgespec.wire.shielded_call import InterruptedOperation, ShieldedCall
from edgespec.wire.tokenizer_lending import PackedTexts

STALLED_S = 10.0
"""Seconds that a device may leave a message unread, behind a full window, before it counts as
gone."""
# Received messages that wait for their receiver while the next one is read.
_READ_AHEAD = 1


class GrpcVerifierStream:
    """The verifier's end of one stream, a ``VerifierStream``.

    The stream is open until something ends it: the device leaves, a side breaks the protocol, a
    Fault was sent, the device does not read for too long, or the server hangs up. ``wait_ended``
    then returns. The first verdict counts, and from then on every ``send`` and ``receive`` raises
    ``LinkError``. A device that only *half-closes*, which means that it sends no more, still reads:
    ``receive`` raises and ``send`` goes on, so a Fault that is on its way is the one that ends the
    stream.

    One task reads for as long as the stream lives and is one message ahead of the receiver. A
    message is written while its sender goes on, one at a time. So neither costs a task and a wait
    for each message, and cancelling a sender or a receiver cancels no operation of the library: a
    message is received or sent whole, or not at all, and the order stays. There is one receiver at
    a time. A stream that exceeds its budget is not read for a while, and flow control then stops
    the device. Messages that were accepted for sending leave before the status does.

    ``address`` is the peer as gRPC spells it. ``payer`` is the name that its share of the uplink is
    charged to."""

    def __init__(
        self, server: GrpcServer, context: Any, address: str, credential: Credential
    ) -> None:
        self._context, self.address, self.credential = context, address, credential
        self.peer = peer = callers.peer_address(address)
        self.caller = callers.caller_name(peer, credential)
        self.payer = callers.payer_name(peer, credential)
        self._server, self._limits = server, server.limits
        self._budget = server.uplink.open(time.monotonic(), self.payer)
        self._count = server.watch.traffic.count
        self._loop = asyncio.get_running_loop()
        self._end_verdict: asyncio.Future[m.Fault | None] = self._loop.create_future()
        self._reading: asyncio.Task[None] | None = None
        self._received: deque[m.Uplink] = deque()
        self._receiver_wakeup: asyncio.Future[None] | None = None
        """Future of a receiver that waits for a message."""
        self._reader_wakeup: asyncio.Future[None] | None = None
        """Future of the reading task while it waits until a message is received."""
        self._on_message: Callable[[m.Uplink], None] | None = None
        """Callback that receives the messages instead of a receiver."""
        self._writing: ShieldedCall[None] = ShieldedCall()
        self._write_lock = asyncio.Lock()
        self._write_began = 0.0
        self._stall_timer: asyncio.TimerHandle | None = None
        self.is_opened = False
        self._reason = "the stream is open"
        self._retryable = True
        self._stalled = False

    async def send(self, message: m.Downlink) -> None:
        """Send ``message``; wait while the device does not read, but not longer than the stream may
        stall.

        A Fault ends the stream and is its last message. Raises ``LinkError`` if the stream has
        ended, and ``ProtocolViolation`` for a message over a bound."""
        if self.send_now(message):  # This is the usual case.
            return
        payload = codec.encode_downlink(message, self._limits)
        if isinstance(message, m.Fault):
            self._raise_if_ended()
            return self.hang_up(message)
        async with self._write_lock:
            with suppress(InterruptedOperation):  # The stream has ended.
                await self._writing.wait_finished(self._end_verdict)
            self._raise_if_ended()
            self._write(message, payload)

    def send_now(self, message: m.Downlink) -> bool:
        """Send ``message`` if that needs no wait, and return whether it was sent."""
        if self._end_verdict.done() or isinstance(message, m.Fault):
            return False
        if self._writing.is_busy or self._write_lock.locked():
            return False
        try:
            payload = codec.encode_downlink(message, self._limits)
        except codec.ProtocolViolation:  # ``send`` raises this error.
            return False
        self._write(message, payload)
        return True

    async def receive(self) -> m.Uplink:
        """Return the next message.

        Raises ``LinkError`` if the device is gone, sends no more or broke the protocol."""
        self._raise_if_ended()
        while not self._received:
            await self._wait_message()
        _wake(self._reader_wakeup)
        return self._received.popleft()

    async def feed(self, handle: Callable[[m.Uplink], None]) -> NoReturn:
        """Pass each message to ``handle`` as it arrives, until the stream ends.

        Then it raises as ``receive`` does, or the error of ``handle``. A message costs one
        iteration of the event loop less than with ``receive``."""
        while self._received:
            handle(await self.receive())
        self._raise_if_ended()
        self._on_message = handle
        try:
            while True:
                await self._wait_message()
        finally:
            self._on_message = None

    async def _wait_message(self) -> None:
        if self._reading is None:
            self._reading = self._loop.create_task(self._read_messages())
        if self._reading.done():
            self._reading.result()  # This raises if reading failed.
            # The device may still read, so the stream has not ended.
            raise LinkError(f"the device at {self.address} sends no more")
        self._receiver_wakeup = self._loop.create_future()
        try:
            await self._receiver_wakeup
        finally:
            self._receiver_wakeup = None
        self._raise_if_ended()

    async def close(self) -> None:
        self.hang_up(None)

    async def wait_ended(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the stream, at most ``timeout_s`` seconds. Return whether it has
        ended."""
        await asyncio.wait((self._end_verdict,), timeout=timeout_s)
        return self._end_verdict.done()

    @property
    def verdict(self) -> m.Fault | None:
        """Fault that ended the stream, or None for an end without one. Only valid after the end."""
        return self._end_verdict.result()

    def hang_up(self, fault: m.Fault | None) -> None:
        self._set_verdict(fault, "the stream was closed here" if fault is None else fault.message)

    def mark_lost(self, error: BaseException | None = None) -> None:
        """End the stream because the library reports that the device left."""
        why = "" if error is None else f": {error}"
        self._set_verdict(None, f"the device at {self.address} is gone{why}")

    async def send_last(self, fault: m.Fault | None) -> None:
        """After the end, let accepted messages leave, and then ``fault``, unless the device has
        left."""
        if self._stalled:  # A stalled stream has no room for another message.
            return
        try:
            async with asyncio.timeout(callers.LAST_FAULT_TIMEOUT_S), self._write_lock:
                await self._writing.wait_finished()
                if fault is None:
                    return
                payload = codec.encode_downlink(fault, self._limits)
                await self._writing.run(lambda: self._context.write(payload))
        except (TimeoutError, *call_end.CALL_ENDED_ERRORS):
            return
        self._count(fault, len(payload))

    async def _read_messages(self) -> None:
        """Read until the device sends no more or the stream has ended. Raises errors of reading
        itself."""
        try:
            while not self._end_verdict.done():
                payload = await self._context.read()
                if payload is EOF:
                    return
                pause_s = self._receive_payload(payload)
                if pause_s > 0.0:
                    await self.wait_ended(pause_s)
                while len(self._received) > _READ_AHEAD and not self._end_verdict.done():
                    self._reader_wakeup = self._loop.create_future()
                    await self._reader_wakeup
        except asyncio.CancelledError:  # The library cancels the task when the call has ended.
            self.mark_lost()
            raise
        except codec.ProtocolViolation as violation:
            self._retryable = False
            self.hang_up(m.Fault(violation.code, str(violation)))
        except call_end.CALL_ENDED_ERRORS as error:
            self.mark_lost(error)
        finally:
            _wake(self._receiver_wakeup)

    def _receive_payload(self, payload: bytes) -> float:
        """Pass on a message. Return the seconds for which no other message must be read."""
        try:
            message = codec.decode_uplink(payload, self._limits)
        except codec.ProtocolViolation:
            self._budget.spend(time.monotonic(), len(payload))
            raise
        size = codec.charged_bytes(message, len(payload))
        pause_s = self._budget.spend(time.monotonic(), size)
        if isinstance(message, m.Open):
            self._server.slots.mark_opened(self)
        self._count(message, len(payload))
        if self._on_message is not None:
            self._on_message(message)
        else:
            self._received.append(message)
            _wake(self._receiver_wakeup)
        return pause_s

    def _write(self, message: m.Downlink, payload: bytes) -> None:
        """Begin to write. No other write may be under way."""
        self._write_began = now = time.monotonic()
        self._writing.start(self._context.write(payload), self.mark_lost)
        if self._stall_timer is None:
            self._stall_timer = self._loop.call_later(self._server.stalled_s, self._check_stall)
        self._count(message, len(payload))
        if isinstance(message, m.Commit):
            self._budget.earn(len(message.tokens), now, message.accepted)
        else:
            self.is_opened = True

    def _check_stall(self) -> None:
        """End the stream if a write takes too long. This is the stream's only timer."""
        self._stall_timer = None
        if self._end_verdict.done() or not self._writing.is_busy:
            return
        stalled_s = self._server.stalled_s
        remaining_s = self._write_began + stalled_s - time.monotonic()
        if remaining_s > 0.0:
            self._stall_timer = self._loop.call_later(remaining_s, self._check_stall)
            return
        self._stalled = True
        why = f"the device at {self.address} did not read for {stalled_s:g} s"
        self.hang_up(m.Fault(m.FaultCode.OVERLOADED, why))

    def _set_verdict(self, fault: m.Fault | None, reason: str) -> None:
        if self._end_verdict.done():
            return
        self._reason = reason
        self._end_verdict.set_result(fault)
        for waiter in (self._receiver_wakeup, self._reader_wakeup):
            _wake(waiter)
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _raise_if_ended(self) -> None:
        if self._end_verdict.done():
            raise LinkError(self._reason, retryable=self._retryable)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


_LOG = logging.getLogger(__name__)
# Seconds that a refused device should wait. By then a slot or a place in the queue may be free.
_RETRY_AFTER_S = 1.0
_MAX_RETRY_S = 10.0
# Calls of one peer, beyond its slots and its places in the queue, that may wait for their refusal.
_SPARE_CALLS = 64
_SHUTTING_DOWN = m.Fault(
    m.FaultCode.SHUTTING_DOWN, "the verifier is shutting down; resume elsewhere", _RETRY_AFTER_S
)


class GrpcServer:
    """Serves the calls that arrive at one address.

    Args:
        address: "host:port", with port 0 for a free one, or "unix:path".
        serve: Called once for each stream.
        info: Returns the models that are served and how busy the verifier is.
        limits: Bounds of messages.
        credentials: Makes the TLS credentials of one port. None for plaintext.
        authenticate: Returns the credential of an API key. If None, no key is required.
        max_streams: Most streams at a time.
        peer_share: Largest share of them for one peer.
        uplink: Limits on the rate at which streams are read.
        opens: Limits on opening streams.
        infos: Limits on the calls of ``Info``, health and reflection.
        stalled_s: Seconds that a device may leave a message unread.
        watch: Counts messages, streams on which no generation began, and the times and reasons of
            waits.
        texts: The tokenizer for devices that request it, or the reason why there is none.
    """

    def __init__(
        self,
        address: str,
        serve: ServeStream,
        info: Callable[[], m.VerifierInfo],
        *,
        limits: codec.WireLimits | None = None,
        credentials: Callable[[], grpc.ServerCredentials] | None = None,
        authenticate: Authenticate | None = None,
        max_streams: int = 1024,
        peer_share: float = 0.75,
        uplink: budgets.UplinkLimits | None = None,
        opens: budgets.CallLimits = budgets.OPEN_LIMITS,
        infos: budgets.CallLimits = budgets.INFO_LIMITS,
        stalled_s: float = STALLED_S,
        watch: VerifierTelemetry | None = None,
        texts: PackedTexts | str = "this verifier has no tokenizer to send",
    ) -> None:
        self._serve, self._info = serve, info
        self.limits = limits or codec.WireLimits()
        self._address, self._credentials = address, credentials
        self._server: grpc.aio.Server | None = None
        self._health: Any = None
        self._authenticate = authenticate or (lambda _: ANYBODY)
        self._key_refusals = callers.RefusalDelay()
        """Delay of calls without a valid key. It is separate, so that guesses at keys delay no
        other client."""
        self.stalled_s, self._texts = stalled_s, texts
        self.watch = watch = watch or VerifierTelemetry()
        self._count_refusal = watch.streams.count_refusal
        uplink = uplink or budgets.UplinkLimits()
        if authenticate is None:
            uplink = budgets.limits_without_keys(uplink)
        self.uplink = budgets.UplinkBudget(uplink, time.monotonic(), watch.add_wait)
        self._opens = budgets.CallBudget(opens, time.monotonic())
        self._info_queue = callers.CallQueue(infos)
        self._tokenizer_queue = callers.CallQueue(callers.TOKENIZER_LIMITS)
        self.slots: callers.StreamSlots[GrpcVerifierStream] = callers.StreamSlots(
            max_streams, peer_share
        )
        self._max_peer_calls = self.slots.peer_streams + _SPARE_CALLS
        self._max_peer_calls += round(opens.max_wait_s * opens.peer_rate)
        self._streams: dict[GrpcVerifierStream, asyncio.Task[None]] = {}
        self._queued: set[GrpcVerifierStream] = set()
        self._calls: Counter[str] = Counter()
        self._refusals = callers.RefusalDelay()
        self._encoded_info: m.VerifierInfo | None = None
        self._info_reply = b""
        self._draining = False
        self.port = 0
        """Port that the server listens on. 0 before ``start`` and for unix sockets."""

    async def start(self) -> None:
        """Listen and report SERVING. Raises ``OSError`` naming an address that is not available."""
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        side_services = callers.SideServices(codec.SERVICE, self._info_queue)
        options = channel_options.server_options(self.limits)
        server = grpc.aio.server(options=options, interceptors=(side_services,))
        # Without serialisers the handlers receive bytes, so that the codec's errors are answered
        # here.
        handlers: Any = {
            "Speculate": grpc.stream_stream_rpc_method_handler(self._speculate),
            "Info": grpc.unary_unary_rpc_method_handler(self._answer_info),
            "Tokenizer": grpc.unary_unary_rpc_method_handler(self._answer_tokenizer),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(codec.SERVICE, handlers),)
        )
        health_aio: Any = health.aio
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (codec.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        self.port = self._bind(server)
        await server.start()
        self._server = server
        for service in ("", codec.SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def _bind(self, server: grpc.aio.Server) -> int:
        if self._address.startswith("unix:"):
            self._bind_one(server, self._address)
            return 0
        wanted_port, port = int(self._address.rpartition(":")[2]), 0
        for host in host_names(host_of(self._address)):
            try:
                port = self._bind_one(server, join_host_port(host, port or wanted_port))
            except OSError:
                if wanted_port or not port:
                    raise
        return port

    def _bind_one(self, server: grpc.aio.Server, address: str) -> int:
        """Listen on one address and return its port. Raises ``OSError``."""
        try:
            if self._credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, self._credentials())
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address} (is it in use?): {error}") from None

    async def _answer_info(self, _request: bytes, context: Any) -> bytes:
        """Return the reply to one call of ``Info``. It is encoded again only if it differs."""
        await self._info_queue.wait_turn(context, await self._authenticate_call(context))
        if (info := self._info()) != self._encoded_info:
            self._encoded_info, self._info_reply = info, codec.encode_info(info, self.limits)
        return self._info_reply

    async def _answer_tokenizer(self, request: bytes, context: Any) -> bytes:
        await self._tokenizer_queue.wait_turn(context, await self._authenticate_call(context))
        if isinstance(self._texts, str):
            await call_end.abort_call(context, grpc.StatusCode.FAILED_PRECONDITION, self._texts)
        try:
            return self._texts.answer(request)
        except codec.ProtocolViolation as error:
            await call_end.abort_call(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _authenticate_call(self, context: Any, *, stream: bool = False) -> Credential:
        """Return the credential of a call's API key, before anything of the call is read.

        A call without a valid key is refused after a while. On a ``stream``, the device first
        receives the reason as a Fault."""
        key = callers.read_key(context)
        if (credential := self._authenticate(key)) is not None:
            return credential
        fault = callers.WRONG_KEY if key else callers.NO_KEY
        if stream:
            self._count_refusal(fault.code)
        # The peer is read while the call certainly exists (see ``_speculate``).
        await self._key_refusals.delay(callers.peer_address(str(context.peer())))
        if stream:
            with suppress(TimeoutError, *call_end.CALL_ENDED_ERRORS):
                async with asyncio.timeout(callers.LAST_FAULT_TIMEOUT_S):
                    await context.write(codec.encode_downlink(fault, self.limits))
        await call_end.refuse(context, fault)

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    async def drain(self) -> None:
        """Report NOT_SERVING and refuse new streams, including those in the queue. Others go on."""
        if self._server is None or self._draining:
            return
        self._draining = True
        # A client that watches the health and does not read would block this for ever.
        with suppress(TimeoutError):
            async with asyncio.timeout(callers.LAST_FAULT_TIMEOUT_S):
                await self._health.enter_graceful_shutdown()
        for stream in tuple(self._queued):
            stream.hang_up(_SHUTTING_DOWN)

    async def drained(self) -> None:
        """Wait until no stream is served any more. Call ``drain`` before."""
        while self._streams:
            await asyncio.wait(self._streams.values())

    async def stop(self, grace_s: float = 0.0) -> None:
        """Drain, give the running streams ``grace_s`` seconds, and end them with
        Fault(SHUTTING_DOWN)."""
        await self.drain()
        if (server := self._server) is None:
            return
        self._server = None
        if self._streams:
            await asyncio.wait(self._streams.values(), timeout=grace_s)
        for stream in tuple(self._streams):
            stream.hang_up(_SHUTTING_DOWN)
        await server.stop(callers.LAST_FAULT_TIMEOUT_S)
        remaining = tuple(self._streams.values())
        for task in remaining:
            task.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)

    async def _speculate(self, _requests: Any, context: Any) -> None:
        # The peer is read once: grpcio 1.85 reads freed memory if it is read after the call has
        # ended.
        address = str(context.peer())
        key = callers.read_key(context)
        credential = await self._authenticate_call(context, stream=True)
        peer = callers.caller_name(callers.peer_address(address), credential)
        if self._calls[peer] >= self._max_peer_calls:
            self._count_refusal(m.FaultCode.OVERLOADED)
            text = f"{self._calls[peer]} calls of {peer} are under way"
            text += f", the limit is {self._max_peer_calls}"
            await self._refusals.delay(peer)
            fault = m.Fault(m.FaultCode.OVERLOADED, text, _RETRY_AFTER_S)
            await call_end.refuse(context, fault)
        self._calls[peer] += 1
        try:
            await context.send_initial_metadata(())
            stream = GrpcVerifierStream(self, context, address, credential)
            await self._run_to_status(stream, context, key)
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]

    async def _run_to_status(self, stream: GrpcVerifierStream, context: Any, key: str) -> None:
        try:
            if refusal := await self._take_slot(stream):
                stream.hang_up(refusal)
            elif not await stream.wait_ended(0.0):
                task = asyncio.create_task(self._run(stream, key))
                self._streams[stream] = task
                task.add_done_callback(lambda _: self._streams.pop(stream, None))
            await stream.wait_ended()
            self.slots.release(stream)
            fault = stream.verdict
            if fault is not None and not stream.is_opened:
                self._count_refusal(fault.code)
            await stream.send_last(fault)
        except asyncio.CancelledError:  # The device is gone, or the server stops.
            stream.mark_lost()
            raise
        finally:
            self.slots.release(stream)
        if fault is not None:
            await call_end.refuse(context, fault)

    async def _take_slot(self, stream: GrpcVerifierStream) -> m.Fault | None:
        """Wait for the stream's turn and take a slot for it. Return the reason if it gets none,
        else None."""
        most_s, now = self._opens.limits.max_wait_s, time.monotonic()
        wait_s = self._opens.charge_call(stream.caller, now, stream.payer)
        if wait_s <= most_s:
            wait_s = max(wait_s, self.uplink.charge_open(stream.payer, now, most_s))
        if wait_s > most_s:
            await self._refusals.delay(stream.payer, stream.wait_ended)
            retry_s = min(max(_RETRY_AFTER_S, wait_s - most_s), _MAX_RETRY_S)
            wait = f"the wait would be {wait_s:.1f} s, the limit is {most_s:g} s"
            text = f"{stream.caller} opens streams too often: {wait}"
            return m.Fault(m.FaultCode.OVERLOADED, text, retry_s)
        if wait_s > 0.0 and not self._draining:
            self._queued.add(stream)
            self.watch.add_wait(budgets.WaitReason.QUEUE, wait_s)
            try:
                await stream.wait_ended(wait_s)
            finally:
                self._queued.discard(stream)
        if self._draining:
            return _SHUTTING_DOWN
        grant = self.slots.acquire(stream, stream.peer, stream.credential)
        if grant.evicted is not None:
            text = "no Open has arrived on this stream, and its slot is needed for another"
            grant.evicted.hang_up(m.Fault(m.FaultCode.OVERLOADED, text, _RETRY_AFTER_S))
        if grant.refusal is None:
            return None
        return m.Fault(m.FaultCode.OVERLOADED, grant.refusal, _RETRY_AFTER_S)

    async def _run(self, stream: GrpcVerifierStream, key: str) -> None:
        """Serve one stream. An error ends this stream only."""
        fault: m.Fault | None = None
        try:
            # The key may have been revoked while the stream waited in the queue.
            if self._authenticate(key) is None:
                fault = callers.WRONG_KEY
            else:
                await self._serve(stream)
        except LinkError as error:
            _LOG.info("stream of %s: %s", stream.address, error)
        except codec.ProtocolViolation as violation:
            _LOG.error(
                "stream of %s: a message here broke the protocol: %s", stream.address, violation
            )
            fault = m.Fault(m.FaultCode.INTERNAL, f"the verifier broke the protocol: {violation}")
        except Exception as error:
            what = "stream of %s failed"
            log_failure(_LOG, what, stream.address, error=error, may_quote_client=True)
            fault = m.Fault(m.FaultCode.INTERNAL, f"the verifier failed: {type(error).__name__}")
        finally:
            stream.hang_up(fault)
