"""A question to gRPC's standard health service: does the daemon at an address serve?

For probes that start as processes of their own, of a container or a service manager. A proxy of the
environment is left aside: gRPC would send even a question to this machine through it.
"""

from __future__ import annotations

import grpc
import grpc.aio

from edgespec.core.ports import LinkError

SERVING = "SERVING"


async def ask_health(
    address: str,
    service: str = "",
    *,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    timeout_s: float = 5.0,
) -> str:
    """``SERVING``, or what else the health service says of ``service`` (empty: the whole daemon).

    ``credentials`` None asks in plaintext. ``server_name`` is the name to look for in the
    certificate when it is not that of the address, as behind ``127.0.0.1``. Raises ``LinkError``
    when no answer comes within ``timeout_s``.
    """
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with _channel(address, credentials, server_name) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
            raise LinkError(f"no health from {address}: {why}") from None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _channel(
    address: str, credentials: grpc.ChannelCredentials | None, server_name: str
) -> grpc.aio.Channel:
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)
