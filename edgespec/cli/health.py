"""``edgespec health``: one question to a verifier's health service, for probes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec.cli.running import FAILED, fail, reported
from edgespec.compose import needs, with_port
from edgespec.config import DEFAULT_ADDRESS, ConfigError

_TLS = "TLS"
_MAX_TIMEOUT_S = 600.0


def _file(flag: str, meaning: str) -> Any:
    return typer.Option(flag, metavar="FILE", help=meaning, rich_help_panel=_TLS)


def health(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Also unix:PATH")
    ] = DEFAULT_ADDRESS,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Wait so long")] = 5.0,
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Trust the system's authorities", rich_help_panel=_TLS),
    ] = False,
    ca: Annotated[Path | None, _file("--ca", "Trust this authority instead")] = None,
    client_cert: Annotated[Path | None, _file("--client-cert", "Show this certificate")] = None,
    client_key: Annotated[
        Path | None, _file("--client-key", "The private key of --client-cert")
    ] = None,
    server_name: Annotated[
        str,
        typer.Option(
            "--server-name",
            metavar="NAME",
            help="The name in the verifier's certificate, when it is not HOST",
            rich_help_panel=_TLS,
        ),
    ] = "",
) -> None:
    """Ask a verifier whether it serves: exit code 0 if so, 1 if not.

    Asks gRPC's standard health service, which needs no key. It says no from the moment a verifier
    begins to drain.

    [dim]edgespec health 127.0.0.1:7420 --ca ca.crt --server-name gpu-box[/]
    """
    with reported():
        if not 0.0 < timeout_s <= _MAX_TIMEOUT_S:
            raise ConfigError(f"--timeout-s is {timeout_s:g}, but must be in (0, 600]")
        if (client_cert is None) != (client_key is None):
            raise ConfigError("--client-cert and --client-key belong together; one is missing")
        with needs("grpc", "edgespec"):
            from edgespec.transport.health_probe import SERVING, ProbeTls, ask_health
        wanted = tls or bool(ca or client_cert or server_name)
        files = ProbeTls(ca, client_cert, client_key, server_name) if wanted else None
        answer = asyncio.run(ask_health(with_port(address), tls=files, timeout_s=timeout_s))
        if answer != SERVING:
            fail(f"the verifier at {with_port(address)} says {answer}", FAILED)
        typer.echo(answer)
