"""``edgespec doctor``: is this installation in order, and if not, what to run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from edgespec.cli import checks, options
from edgespec.cli.checks import Check, State
from edgespec.cli.running import FAILED, reported, run
from edgespec.config import DEFAULT_PORT, AgentConfig

_MAX_PORT = 65_535
_MARKS = {State.GOOD: "[green]ok[/]  ", State.NOTE: "[yellow]note[/]", State.BAD: "[red]BAD[/] "}


def doctor(
    context: typer.Context,
    verifier: Annotated[
        list[str] | None,
        typer.Option(
            "--verifier",
            envvar="EDGESPEC_VERIFIER",
            metavar="HOST:PORT",
            help="Also ask this verifier what it serves; repeatable",
        ),
    ] = None,
    tls: options.Tls = None,
    ca: options.Ca = None,
    client_cert: options.ClientCert = None,
    client_key: options.ClientKey = None,
    server_name: options.ServerName = None,
    api_key_file: options.ApiKeyFile = None,
    insecure: options.Insecure = None,
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=_MAX_PORT, help="The port a verifier here would take"),
    ] = DEFAULT_PORT,
) -> None:
    """Check this installation and say what to run.

    Exit code 1 if something a device needs is broken; notes are about what is optional.
    """
    with reported():
        config = options.configured(AgentConfig, context, options.ACCESS_KEYS)
        found = [
            checks.python(),
            *checks.packages(),
            checks.one_onnxruntime(),
            checks.onnx_session(),
            *checks.bundled_models(),
            checks.torch(),
            checks.exactness(),
            checks.free_port(port),
        ]
        found += [run(checks.verifier(address, config)) for address in verifier or ()]
    console = Console(highlight=False)
    for check in found:
        _print(console, check)
    if any(check.state is State.BAD for check in found):
        raise typer.Exit(FAILED)


def _print(console: Console, check: Check) -> None:
    line = f"{_MARKS[check.state]} {escape(check.name)}: {escape(check.finding)}"
    console.print(line, soft_wrap=True)
    if check.advice:
        console.print(f"     run: [bold]{escape(check.advice)}[/]", soft_wrap=True)
