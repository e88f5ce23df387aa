"""``edgespec health``: one question to a verifier's health service, for probes."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from edgespec.cli.running import FAILED, fail, reported
from edgespec.cli.tls_options import Ca, ClientCert, ClientKey, ServerName, Tls
from edgespec.config import DEFAULT_ADDRESS, ConfigError
from edgespec.config.device import check_address
from edgespec.config.security import DeviceTlsSection
from edgespec.config.setup_error import needs
from edgespec.device.many_verifiers import with_port
from edgespec.wire.access import device_credentials

_MAX_TIMEOUT_S = 600.0


def health(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Also unix:PATH")
    ] = DEFAULT_ADDRESS,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Wait so long")] = 5.0,
    tls: Tls = None,
    ca: Ca = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    server_name: ServerName = None,
) -> None:
    """Ask a verifier whether it serves: exit code 0 if so, 1 if not.

    Asks gRPC's standard health service, which needs no key. It says no from the moment a verifier
    begins to drain.

    [dim]edgespec health 127.0.0.1:7420 --ca ca.crt --server-name gpu-box[/]
    """
    with reported():
        if not 0.0 < timeout_s <= _MAX_TIMEOUT_S:
            raise ConfigError(f"--timeout-s is {timeout_s:g}, but must be in (0, 600]")
        try:
            check_address(address)
            trusts = DeviceTlsSection(
                bool(tls), ca or "", client_cert or "", client_key or "", server_name or ""
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        with needs("grpc", "edgespec"):
            from edgespec.wire.health_probe import SERVING, ask_health
        credentials = device_credentials(trusts)
        asking = ask_health(
            with_port(address),
            credentials=credentials,
            server_name=trusts.server_name,
            timeout_s=timeout_s,
        )
        answer = asyncio.run(asking)
        if answer != SERVING:
            fail(f"the verifier at {with_port(address)} says {answer}", FAILED)
        typer.echo(answer)
