"""The verifier's end of the wire over gRPC: the daemon's listener.

Each stream a device opens is handed to ``serve`` as a ``VerifierStream``. A device that breaks the
protocol gets a Fault and INVALID_ARGUMENT on that stream; all others go on. Beside the service
stand gRPC's own health (per service, NOT_SERVING while draining) and reflection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from edgespec.core.messages import Fault, FaultCode, VerifierInfo
from edgespec.ports import ByteMeter, LinkError, ServeStream
from edgespec.transport.codec import SERVICE, encode_info
from edgespec.transport.grpc_options import Keepalive, server_options
from edgespec.transport.grpc_stream import GrpcVerifierStream
from edgespec.transport.wire_limits import ProtocolViolation, WireLimits

_LOG = logging.getLogger(__name__)
# A status travels in a header; peers refuse long ones. The Fault message carries the whole text.
_MAX_DETAILS = 512
# For the last faults to leave before the connections are cut.
_LAST_WORDS_S = 0.5

_STATUS = {
    FaultCode.RESYNC: grpc.StatusCode.ABORTED,
    FaultCode.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    FaultCode.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    FaultCode.VOCABULARY_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    FaultCode.CONTEXT_TOO_LONG: grpc.StatusCode.OUT_OF_RANGE,
    FaultCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FaultCode.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    FaultCode.INTERNAL: grpc.StatusCode.INTERNAL,
}


class GrpcServer:
    """Listens on ``address`` ("host:port", port 0 for a free one, or "unix:path").

    ``serve`` is called once per stream, at most ``max_streams`` at a time; ``info`` answers what is
    served and how busy it is. ``credentials`` None is plaintext.
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
        meter: ByteMeter | None = None,
        max_streams: int = 1024,
    ) -> None:
        if max_streams < 1:
            raise ValueError(f"max_streams is {max_streams}, but must be at least 1")
        self._address = address
        self._serve = serve
        self._info = info
        self._limits = limits or WireLimits()
        self._keepalive = keepalive or Keepalive()
        self._credentials = credentials
        self._meter = meter
        self._max_streams = max_streams
        self._streams: dict[GrpcVerifierStream, asyncio.Task[None]] = {}
        self._draining = False
        self._server: grpc.aio.Server | None = None
        self._health: Any = None
        self._port = 0

    @property
    def port(self) -> int:
        """The port listened on; 0 before ``start`` and for unix sockets."""
        return self._port

    async def start(self) -> None:
        """Listen and report SERVING. Raises ``OSError`` naming an address that cannot be had."""
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        server = grpc.aio.server(options=server_options(self._limits, self._keepalive))
        server.add_generic_rpc_handlers((self._handlers(),))
        health_aio: Any = health.aio
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        self._port = self._bind(server)
        await server.start()
        self._server = server
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Report NOT_SERVING, refuse new streams, give the running ones ``grace_s`` seconds, then
        end them with Fault(SHUTTING_DOWN)."""
        if self._server is None:
            return
        server, self._server = self._server, None
        self._draining = True
        await self._health.enter_graceful_shutdown()
        if self._streams:
            await asyncio.wait(self._streams.values(), timeout=grace_s)
        for stream in tuple(self._streams):
            stream.hang_up(Fault(FaultCode.SHUTTING_DOWN, "the verifier is shutting down"))
        await server.stop(_LAST_WORDS_S)
        left = tuple(self._streams.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

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

    def _handlers(self) -> Any:
        # No serialisers: bytes in, bytes out, so that the codec's errors are ours to answer.
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Speculate": grpc.stream_stream_rpc_method_handler(self._speculate),
                "Info": grpc.unary_unary_rpc_method_handler(self._answer_info),
            },
        )

    async def _answer_info(self, _request: bytes, _context: Any) -> bytes:
        return encode_info(self._info(), self._limits)

    async def _speculate(self, _requests: Any, context: Any) -> None:
        """One stream, from its headers to its status."""
        await context.send_initial_metadata(())
        stream = GrpcVerifierStream(context, self._limits, self._meter)
        if refusal := self._refusal():
            stream.hang_up(refusal)
        else:
            task = asyncio.create_task(self._run(stream))
            self._streams[stream] = task
            task.add_done_callback(lambda _: self._streams.pop(stream, None))
        try:
            fault = await stream.over()
            if fault is not None:
                await stream.say_last(fault)
        except asyncio.CancelledError:  # the device is gone, or the server stops
            stream.lost()
            raise
        if fault is not None:
            await context.abort(_STATUS[fault.code], fault.message[:_MAX_DETAILS])

    def _refusal(self) -> Fault | None:
        if self._draining:
            return Fault(FaultCode.SHUTTING_DOWN, "the verifier is shutting down")
        if len(self._streams) >= self._max_streams:
            text = f"{len(self._streams)} streams are open, the limit is {self._max_streams}"
            return Fault(FaultCode.OVERLOADED, text)
        return None

    async def _run(self, stream: GrpcVerifierStream) -> None:
        """Serve one stream; whatever goes wrong ends this one only."""
        fault: Fault | None = None
        try:
            await self._serve(stream)
        except LinkError as error:
            _LOG.info("stream of %s: %s", stream.peer, error)
        except ProtocolViolation as violation:
            _LOG.error(
                "stream of %s: a message here broke the protocol: %s", stream.peer, violation
            )
            fault = Fault(FaultCode.INTERNAL, f"the verifier broke the protocol: {violation}")
        except Exception as error:
            _LOG.exception("stream of %s failed", stream.peer)
            fault = Fault(FaultCode.INTERNAL, f"the verifier failed: {type(error).__name__}")
        finally:
            stream.hang_up(fault)
