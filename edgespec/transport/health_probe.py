"""A question to gRPC's standard health service: does the daemon at an address serve?

For probes that start as processes of their own, of a container or a service manager. A proxy of the
environment is left aside: gRPC would send even a question to this machine through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from edgespec.ports import LinkError

SERVING = "SERVING"


@dataclass(frozen=True, slots=True)
class ProbeTls:
    """Files in PEM: whom to trust (None: the system's authorities), and who asks, if the verifier
    wants to know. ``server_name`` is the name to look for in the verifier's certificate when it is
    not that of the address, as behind ``127.0.0.1``."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""


async def ask_health(
    address: str, service: str = "", *, tls: ProbeTls | None = None, timeout_s: float = 5.0
) -> str:
    """``SERVING``, or what else the health service says of ``service`` (empty: the whole daemon).

    ``tls`` None asks in plaintext. Raises ``LinkError`` when no answer comes within ``timeout_s``,
    ``OSError`` for a file that cannot be read.
    """
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with _channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
            raise LinkError(f"no health from {address}: {why}") from None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _channel(address: str, tls: ProbeTls | None) -> grpc.aio.Channel:
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_content(tls.ca),
        private_key=_content(tls.key),
        certificate_chain=_content(tls.certificate),
    )
    return grpc.aio.secure_channel(address, credentials, options=options)


def _content(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
