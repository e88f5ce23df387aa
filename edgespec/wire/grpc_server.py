"""The verifier's end of the wire over gRPC: the daemon's listener.

Theory of operation. Each stream a device opens waits for its turn, takes a slot and is handed to
``serve`` as a ``VerifierStream``. A slot is given back when ``serve`` returns or the stream ends,
whichever is first. A device that breaks the protocol gets a Fault and the status that matches it on
that stream; all others go on.
Beside the service stand gRPC's own health (NOT_SERVING while draining) and reflection.

What one peer can do to others is bounded: how fast its streams are read (``UplinkLimits``), how
often it opens one or asks for ``Info`` (``CallLimits``), how many it holds (``StreamSlots``), and
how many it has under way in all, with those that wait for their turn or for their refusal.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc
import grpc.aio

from edgespec.core.ports import Authenticate, ByteMeter, LinkError, ServeStream
from edgespec.core.protocol.messages import Fault, FaultCode, VerifierInfo
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.traffic_budget import (
    INFO_LIMITS,
    OPEN_LIMITS,
    CallBudget,
    CallLimits,
    UplinkBudget,
    UplinkLimits,
    Wait,
    without_keys,
)
from edgespec.wire.callers import (
    TOKENIZER_LIMITS,
    WRONG_KEY,
    Authenticator,
    CallLine,
    LoadTexts,
    Refusals,
    SideServices,
    TokenizerAnswers,
    caller,
    payer,
    retry_metadata,
    shown_key,
)
from edgespec.wire.codec import SERVICE, encode_downlink, encode_info
from edgespec.wire.grpc_calls import Keepalive, abort_call, peer_address, server_options
from edgespec.wire.grpc_stream import STALLED_S, GrpcVerifierStream
from edgespec.wire.wire_limits import ProtocolViolation, WireLimits

LAST_WORDS_S = 0.5
"""For the last faults to leave before the connections are cut."""
SPARE_STREAMS: Final = 8
_KEY: Final = "key "
_S = TypeVar("_S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Entry(Generic[_S]):
    refusal: str | None = None
    """Why it got none, with the bound and the value."""
    evicted: _S | None = None
    """The idle stream that lost its slot and has to be ended."""


class StreamSlots(Generic[_S]):
    """A bounded table of ``max_streams`` slots that one peer or one key cannot fill alone.

    A stream takes a slot when it comes and gives it back when it ends; it is *idle* until its Open
    has arrived. It counts for its owners: the peer it comes from and, where keys are asked for, the
    credential of its key. One owner holds at most the share ``peer_share`` of the slots, and at
    least one; a credential with a limit of sessions no more than twice these and ``SPARE_STREAMS``,
    since a device may come back before its last stream is known to be dead.

    When a new stream finds no slot, an idle one has to leave in its favour: the oldest one of the
    owner that has reached its bound, else the oldest one of the peer that has most idle streams.
    Where no such stream is idle the new one is refused. So a stream whose Open has arrived never
    loses its slot to another."""

    def __init__(self, max_streams: int, peer_share: float) -> None:
        assert max_streams > 0
        assert 0.0 < peer_share <= 1.0
        self.max_streams = max_streams
        self.peer_streams = max(1, math.floor(max_streams * peer_share))
        self._owners_of: dict[_S, tuple[str, ...]] = {}
        """The peer first."""
        self._held: Counter[str] = Counter()
        # In the order of arrival.
        self._idle: dict[str, dict[_S, None]] = {}

    def __len__(self) -> int:
        return len(self._owners_of)

    def enter(self, stream: _S, peer: str, credential: Credential = ANYBODY) -> Entry[_S]:
        """Take a slot for a new stream of ``peer``, which showed the key of ``credential``."""
        bounds = {peer: self.peer_streams}
        if credential.name:
            bounds[f"{_KEY}{credential.name!r}"] = self._key_streams(credential)
        owners = tuple(bounds)
        full = [owner for owner in owners if self._held[owner] >= bounds[owner]]
        if not full and len(self) < self.max_streams:
            self._take(stream, owners)
            return Entry()
        # Where both owners are full, an idle stream that counts for both has to leave.
        yielding = self._oldest_idle(full) if full else self._oldest_idle([self._most_idle()])
        if yielding is None:
            for owner in full:
                if bounds[owner] < self.max_streams:
                    held = f"{self._held[owner]} streams of {owner} are open"
                    return Entry(f"{held}, the limit is {bounds[owner]}")
            return Entry(f"{len(self)} streams are open, the limit is {self.max_streams}")
        self.leave(yielding)
        self._take(stream, owners)
        return Entry(evicted=yielding)

    def opened(self, stream: _S) -> None:
        """The stream's Open has arrived. A stream without a slot is ignored."""
        self._forget_idle(stream, self._owners_of.get(stream, ()))

    def leave(self, stream: _S) -> None:
        owners = self._owners_of.pop(stream, ())
        self._forget_idle(stream, owners)
        for owner in owners:
            self._held[owner] -= 1
            if not self._held[owner]:
                del self._held[owner]

    def _key_streams(self, credential: Credential) -> int:
        if not credential.max_sessions:
            return self.peer_streams
        return min(self.peer_streams, 2 * credential.max_sessions + SPARE_STREAMS)

    def _take(self, stream: _S, owners: tuple[str, ...]) -> None:
        self._owners_of[stream] = owners
        for owner in owners:
            self._held[owner] += 1
            self._idle.setdefault(owner, {})[stream] = None

    def _forget_idle(self, stream: _S, owners: tuple[str, ...]) -> None:
        for owner in owners:
            idle = self._idle.get(owner)
            if idle is not None:
                idle.pop(stream, None)
                if not idle:
                    del self._idle[owner]

    def _most_idle(self) -> str:
        peers = [owner for owner in self._idle if not owner.startswith(_KEY)]
        return max(peers, key=lambda peer: len(self._idle[peer]), default="")

    def _oldest_idle(self, owners: list[str]) -> _S | None:
        """The oldest idle stream that counts for all of these."""
        first, *others = (self._idle.get(owner, {}) for owner in owners)
        return next((one for one in first if all(one in other for other in others)), None)


_LOG = logging.getLogger(__name__)
# A status travels in a header; peers refuse long ones. The Fault message carries the whole text.
_MAX_DETAILS = 512
# How long a refused device should wait: by then a slot or a place in the line may be free.
_RETRY_AFTER_S = 1.0
_MOST_RETRY_S = 10.0
# Calls of one peer, beyond its slots and its places in the line, that may wait for their refusal.
_SPARE_CALLS = 64
_STATUS = {
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
_SHUTTING_DOWN = Fault(
    FaultCode.SHUTTING_DOWN, "the verifier is shutting down; resume elsewhere", _RETRY_AFTER_S
)


class GrpcServer:
    """Serves the calls that come to ``address`` ("host:port", port 0 for a free one, or
    "unix:path").

    ``serve`` is called once per stream, at most ``max_streams`` at a time and at most
    ``peer_share`` of them for one peer; ``info`` answers what is served and how busy it is.
    ``credentials`` None is plaintext; without ``authenticate`` nobody needs a key. ``stalled_s`` is
    how long a device may leave a message unread. ``refused`` hears why a stream ended on which no
    generation began, ``waits`` how long and why one is not read. ``texts`` reads the tokenizer for
    devices that ask for it; None: there is none to send.
    """

    def __init__(
        self,
        address: str,
        serve: ServeStream,
        info: Callable[[], VerifierInfo],
        *,
        limits: WireLimits | None = None,
        keepalive: Keepalive | None = None,
        credentials: grpc.ServerCredentials | None = None,
        authenticate: Authenticate | None = None,
        meter: ByteMeter | None = None,
        max_streams: int = 1024,
        peer_share: float = 0.75,
        uplink: UplinkLimits | None = None,
        opens: CallLimits = OPEN_LIMITS,
        infos: CallLimits = INFO_LIMITS,
        stalled_s: float = STALLED_S,
        refused: Callable[[FaultCode], None] | None = None,
        waits: Callable[[Wait, float], None] | None = None,
        texts: LoadTexts | None = None,
    ) -> None:
        self._serve = serve
        self._info = info
        self._limits = limits or WireLimits()
        self._address, self._credentials = address, credentials
        self._options = server_options(self._limits, keepalive or Keepalive())
        self._server: grpc.aio.Server | None = None
        self._health: Any = None
        self._authenticator = Authenticator(authenticate)
        self._meter = meter
        self._uplink_limits, self._open_limits, self._info_limits = uplink, opens, infos
        self._stalled_s, self._texts = stalled_s, texts
        self._refused = refused or (lambda code: None)
        self._waits = waits or (lambda reason, wait_s: None)
        self._slots: StreamSlots[GrpcVerifierStream] = StreamSlots(max_streams, peer_share)
        self._max_peer_calls = self._slots.peer_streams + _SPARE_CALLS
        self._max_peer_calls += round(opens.max_wait_s * opens.peer_rate)
        self._streams: dict[GrpcVerifierStream, asyncio.Task[None]] = {}
        self._in_line: set[GrpcVerifierStream] = set()
        self._calls: Counter[str] = Counter()
        self._refusals = Refusals()
        self._told: VerifierInfo | None = None
        self._answer = b""
        self._draining = False
        self.port = 0
        """The port listened on; 0 before ``start`` and for unix sockets."""

    async def start(self) -> None:
        """Listen and report SERVING. Raises ``OSError`` naming an address that cannot be had."""
        clock = asyncio.get_running_loop().time
        uplink = self._uplink_limits or UplinkLimits()
        if not self._authenticator.asks_for_keys:
            uplink = without_keys(uplink)
        self._uplink = UplinkBudget(uplink, clock(), self._waits)
        self._opens = CallBudget(self._open_limits, clock())
        self._questions = CallLine(self._info_limits, clock)
        self._tokenizers = TokenizerAnswers(
            self._texts, CallLine(TOKENIZER_LIMITS, clock), self._authenticator
        )
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        beside = SideServices(SERVICE, self._questions)
        server = grpc.aio.server(options=self._options, interceptors=(beside,))
        # No serialisers: bytes in, bytes out, so that the codec's errors are ours to answer.
        handlers: Any = {
            "Speculate": grpc.stream_stream_rpc_method_handler(self._speculate),
            "Info": grpc.unary_unary_rpc_method_handler(self._answer_info),
            "Tokenizer": grpc.unary_unary_rpc_method_handler(self._tokenizers.answer),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_aio: Any = health.aio
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        self.port = self._bind(server)
        await server.start()
        self._server = server
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def _bind(self, server: grpc.aio.Server) -> int:
        reason = "no reason given"
        try:
            if self._credentials is None:
                port = server.add_insecure_port(self._address)
            else:
                port = server.add_secure_port(self._address, self._credentials)
        except RuntimeError as error:
            port, reason = 0, str(error)
        if port == 0:
            raise OSError(f"cannot listen on {self._address} (is it in use?): {reason}")
        return 0 if self._address.startswith("unix:") else port

    async def _answer_info(self, _request: bytes, context: Any) -> bytes:
        """The reply to one call of ``Info``, which is encoded again only when it would differ."""
        if (credential := self._authenticator.credential(shown_key(context))) is None:
            await self._authenticator.turn_away(context)
        await self._questions.turn(context, credential)
        if (info := self._info()) != self._told:
            self._told, self._answer = info, encode_info(info, self._limits)
        return self._answer

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    async def drain(self) -> None:
        """Report NOT_SERVING and refuse new streams, those in line too; the others go on."""
        if self._server is None or self._draining:
            return
        self._draining = True
        # One that watches the health and does not read would hold this up for ever.
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._health.enter_graceful_shutdown()
        for stream in tuple(self._in_line):
            stream.hang_up(_SHUTTING_DOWN)

    async def drained(self) -> None:
        """Wait until no stream is served any more; after ``drain``."""
        while self._streams:
            await asyncio.wait(self._streams.values())

    async def stop(self, grace_s: float = 0.0) -> None:
        """``drain``, give the running streams ``grace_s`` seconds, then end them with
        Fault(SHUTTING_DOWN)."""
        await self.drain()
        if (server := self._server) is None:
            return
        self._server = None
        if self._streams:
            await asyncio.wait(self._streams.values(), timeout=grace_s)
        for stream in tuple(self._streams):
            stream.hang_up(_SHUTTING_DOWN)
        await server.stop(LAST_WORDS_S)
        await self._tokenizers.close()
        left = tuple(self._streams.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _speculate(self, _requests: Any, context: Any) -> None:
        # Asked once: grpcio 1.85 reads freed memory when asked after the call has ended.
        address = str(context.peer())
        key = shown_key(context)
        if (credential := self._authenticator.credential(key)) is None:
            self._refused(FaultCode.UNAUTHENTICATED)
            await self._authenticator.turn_away(
                context, lambda fault: encode_downlink(fault, self._limits)
            )
        peer = caller(host := peer_address(address), credential)
        if self._calls[peer] >= self._max_peer_calls:
            self._refused(FaultCode.OVERLOADED)
            text = f"{self._calls[peer]} calls of {peer} are under way, the limit is "
            await self._refusals.hold(peer)
            await abort_call(
                context,
                _STATUS[FaultCode.OVERLOADED],
                f"{text}{self._max_peer_calls}",
                retry_metadata(_RETRY_AFTER_S),
            )
        self._calls[peer] += 1
        try:
            await context.send_initial_metadata(())
            stream = GrpcVerifierStream(
                context,
                address,
                self._limits,
                self._uplink.open(asyncio.get_running_loop().time(), payer(host, credential)),
                credential=credential,
                meter=self._meter,
                on_open=self._slots.opened,
                stalled_s=self._stalled_s,
            )
            await self._from_line_to_status(stream, context, key)
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]

    async def _from_line_to_status(
        self, stream: GrpcVerifierStream, context: Any, key: str
    ) -> None:
        try:
            if refusal := await self._refusal(stream):
                stream.hang_up(refusal)
            elif not await stream.over(0.0):
                task = asyncio.create_task(self._run(stream, key))
                self._streams[stream] = task
                task.add_done_callback(lambda _: self._streams.pop(stream, None))
            await stream.over()
            self._slots.leave(stream)
            fault = stream.verdict
            if fault is not None and not stream.greeted:
                self._refused(fault.code)
            await stream.say_last(fault)
        except asyncio.CancelledError:  # the device is gone, or the server stops
            stream.lost()
            raise
        finally:
            self._slots.leave(stream)
        if fault is not None:
            details, advice = fault.message[:_MAX_DETAILS], retry_metadata(fault.retry_after_s)
            await abort_call(context, _STATUS[fault.code], details, advice)

    async def _refusal(self, stream: GrpcVerifierStream) -> Fault | None:
        """Wait for the stream's turn and take a slot for it; why there is none, or None."""
        most_s = self._open_limits.max_wait_s
        who, pays = (whose(stream.peer, stream.credential) for whose in (caller, payer))
        now = asyncio.get_running_loop().time()
        wait_s = self._opens.turn(who, now, pays)
        if wait_s <= most_s:
            wait_s = max(wait_s, self._uplink.turn(pays, now, most_s))
        if wait_s > most_s:
            await self._refusals.hold(pays, stream.over)
            retry_s = min(max(_RETRY_AFTER_S, wait_s - most_s), _MOST_RETRY_S)
            text = (
                f"{who} opens streams too often: the wait would be {wait_s:.1f} s, "
                f"the limit is {most_s:g} s"
            )
            return Fault(FaultCode.OVERLOADED, text, retry_s)
        if wait_s > 0.0 and not self._draining:
            self._in_line.add(stream)
            self._waits(Wait.LINE, wait_s)
            try:
                await stream.over(wait_s)
            finally:
                self._in_line.discard(stream)
        if self._draining:
            return _SHUTTING_DOWN
        entry = self._slots.enter(stream, stream.peer, stream.credential)
        if entry.evicted is not None:
            text = "no Open has come on this stream, and its place is needed for another"
            entry.evicted.hang_up(Fault(FaultCode.OVERLOADED, text, _RETRY_AFTER_S))
        if entry.refusal is None:
            return None
        return Fault(FaultCode.OVERLOADED, entry.refusal, _RETRY_AFTER_S)

    async def _run(self, stream: GrpcVerifierStream, key: str) -> None:
        """Serve one stream; whatever goes wrong ends this one only."""
        fault: Fault | None = None
        try:
            # The key may have been revoked while the stream stood in line.
            if self._authenticator.credential(key) is None:
                fault = WRONG_KEY
            else:
                await self._serve(stream)
        except LinkError as error:
            _LOG.info("stream of %s: %s", stream.address, error)
        except ProtocolViolation as violation:
            _LOG.error(
                "stream of %s: a message here broke the protocol: %s", stream.address, violation
            )
            fault = Fault(FaultCode.INTERNAL, f"the verifier broke the protocol: {violation}")
        except Exception as error:
            _LOG.exception("stream of %s failed", stream.address)
            fault = Fault(FaultCode.INTERNAL, f"the verifier failed: {type(error).__name__}")
        finally:
            stream.hang_up(fault)
