"""``edgespec doctor``: is this installation in order, and if not, what to run."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from edgespec.cli import checks
from edgespec.cli.checks import Check, State
from edgespec.cli.options import VERIFIER_FLAGS, from_config
from edgespec.cli.running import FAILED, fail, run
from edgespec.config import DEFAULT_PORT, AgentConfig, ConfigError
from edgespec.config.setup_error import needs
from edgespec.device.build import with_port
from edgespec.wire.access import device_credentials

_MAX_PROBE_S = 600.0
_MARKS = {State.GOOD: "[green]ok[/]  ", State.NOTE: "[yellow]note[/]", State.BAD: "[red]BAD[/] "}


@from_config(AgentConfig, *VERIFIER_FLAGS, explains=False)
def doctor(
    settings: AgentConfig,
    probe_s: Annotated[
        float | None,
        typer.Option(
            "--probe",
            metavar="SECONDS",
            help="Only ask whether the verifier serves, and wait at most so long",
        ),
    ] = None,
) -> None:
    """Check this installation and its verifier, and say what to run.

    Exit code 1 if something a device needs is broken; notes are about what is optional. With
    --probe, a verifier's health service is asked, which needs no key: 0 if it serves, 1 if not. It
    says no from the moment a verifier begins to drain.

    [dim]edgespec doctor --verifier gpu-box:7420 --ca ca.crt[/]
    """
    if probe_s is not None:
        for address in settings.verifiers:
            _probe(address, settings, probe_s)
        return
    found = [
        checks.python(),
        *checks.packages(),
        checks.one_onnxruntime(),
        checks.onnx_session(),
        *checks.bundled_models(),
        checks.torch(),
        checks.exactness(),
        checks.free_port(DEFAULT_PORT),
    ]
    found += [run(checks.verifier(address, settings)) for address in settings.verifiers]
    console = Console(highlight=False)
    for check in found:
        _print(console, check)
    if any(check.state is State.BAD for check in found):
        raise typer.Exit(FAILED)


def _probe(address: str, settings: AgentConfig, within_s: float) -> None:
    """Ends the command with exit code 1 unless the verifier says that it serves."""
    if not 0.0 < within_s <= _MAX_PROBE_S:
        raise ConfigError(f"--probe is {within_s:g}, but must be in (0, {_MAX_PROBE_S:g}]")
    with needs("grpc", "edgespec"):
        from edgespec.wire.grpc_client import SERVING, ask_health
    asking = ask_health(
        with_port(address),
        credentials=device_credentials(settings.tls),
        server_name=settings.tls.server_name,
        timeout_s=within_s,
    )
    answer = asyncio.run(asking)
    typer.echo(answer)
    if answer != SERVING:
        fail(f"the verifier at {with_port(address)} says {answer}", FAILED)


def _print(console: Console, check: Check) -> None:
    line = f"{_MARKS[check.state]} {escape(check.name)}: {escape(check.finding)}"
    console.print(line, soft_wrap=True)
    if check.advice:
        console.print(f"     run: [bold]{escape(check.advice)}[/]", soft_wrap=True)
