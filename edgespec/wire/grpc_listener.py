"""The listener takes the calls of devices from a port and hands them to the service, as bytes.

It has gRPC in it and nothing of the service. Beside it stand gRPC's own health and reflection
(health per service, NOT_SERVING while draining).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import grpc
import grpc.aio

from edgespec.wire.call_line import CallLine, SideServices
from edgespec.wire.codec import SERVICE
from edgespec.wire.grpc_options import Options

LAST_WORDS_S = 0.5
"""For the last faults to leave before the connections are cut."""

ServeCall = Callable[[Any, Any], Awaitable[Any]]
"""Takes gRPC's request (or requests) and context, and runs the call to its end."""
STREAMED: Final = "Speculate"
ANSWERED: Final = ("Info", "Tokenizer")
"""The service's methods: the one that streams both ways, and those of one request and one reply."""
Methods = Mapping[str, ServeCall]
"""What runs the calls, for each of these names."""


class GrpcListener:
    """Listens on ``address`` ("host:port", port 0 for a free one, or "unix:path") in this event
    loop; ``credentials`` None is plaintext."""

    def __init__(
        self,
        address: str,
        options: Options,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._address, self._options, self._credentials = address, options, credentials
        self._server: grpc.aio.Server | None = None
        self._health: Any = None

    async def start(self, methods: Methods, line: CallLine) -> int:
        """Listen and report SERVING; the port, 0 for a unix socket. ``line`` is where calls of side
        services wait. Raises ``OSError`` naming an address that cannot be had."""
        from grpc_health.v1 import health, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        server = grpc.aio.server(options=self._options, interceptors=(SideServices(SERVICE, line),))
        # No serialisers: bytes in, bytes out, so that the codec's errors are ours to answer.
        handlers: Any = {
            name: grpc.unary_unary_rpc_method_handler(methods[name]) for name in ANSWERED
        }
        handlers[STREAMED] = grpc.stream_stream_rpc_method_handler(methods[STREAMED])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_aio: Any = health.aio
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        port = self._bind(server)
        await server.start()
        self._server = server
        await self.report(serving=True)
        return port

    async def report(self, *, serving: bool) -> None:
        """What health says from now on; after ``drain`` nothing changes it."""
        from grpc_health.v1 import health_pb2

        status = health_pb2.HealthCheckResponse
        for service in ("", SERVICE):
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def drain(self) -> None:
        """Report NOT_SERVING; calls go on."""
        # One that watches the health and does not read would hold this up for ever.
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and cut what is left after ``grace_s`` seconds."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)

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
