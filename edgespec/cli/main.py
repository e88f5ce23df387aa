"""``edgespec``: the commands and what ``--help`` says first."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec import __version__
from edgespec.cli.entry import EXIT_CODES, lazy_app

# In the order of `--help`: what people use first comes first.
COMMANDS = {
    "demo": "edgespec.cli.demo:demo",
    "verifier": "edgespec.cli.verifier:verifier",
    "generate": "edgespec.cli.generate:generate",
    "chat": "edgespec.cli.chat:chat",
    "serve": "edgespec.cli.serve:serve",
    "doctor": "edgespec.cli.doctor:doctor",
    "export": "edgespec.cli.export:export",
    "distill": "edgespec.cli.distill:distill",
    "bench": "edgespec.cli.bench:bench",
    "profile": "edgespec.cli.bench:profile",
    "plan": "edgespec_sim.commands.plan:plan",
    "keys": "edgespec.cli.credentials:keys",
    "certs": "edgespec.cli.credentials:certs",
}

app = lazy_app("edgespec", COMMANDS)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgespec {__version__}")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES)
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop"
        ),
    ] = False,
) -> None:
    """Speculative decoding between a device and a verifier.

    A small draft model on the device guesses, the big model on the verifier decides.

    The text is the big model's own, token for token; good guesses make it come sooner.

    [bold]See it[/]   edgespec demo

    [bold]Serve[/]    edgespec verifier

    [bold]Use[/]      edgespec generate "def fibonacci(n):"

    [bold]Connect[/]  edgespec serve (OpenAI's API, for other programs)

    [bold]Plan[/]     edgespec plan link --rtt-ms 80 --acceptance 0.7

    [bold]Simulate[/] edgespec-sim run household (a deployment in virtual time)

    [bold]Check[/]    edgespec doctor
    """
