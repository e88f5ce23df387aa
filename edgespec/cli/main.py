"""``edgespec``: the commands and what ``--help`` says first."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated

import typer

from edgespec import __version__
from edgespec.cli.certs import certs
from edgespec.cli.chat import chat
from edgespec.cli.demo import demo
from edgespec.cli.doctor import doctor
from edgespec.cli.draft import draft
from edgespec.cli.export import export
from edgespec.cli.generate import generate
from edgespec.cli.health import health
from edgespec.cli.keys import keys
from edgespec.cli.plan import plan
from edgespec.cli.profile import profile
from edgespec.cli.running import EXIT_CODES
from edgespec.cli.serve import serve
from edgespec.cli.top import top
from edgespec.cli.verifier import verifier

app = typer.Typer(
    name="edgespec",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


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


for command in (demo, verifier, generate, chat, serve, doctor, health, export):
    app.command(epilog=EXIT_CODES)(command)
if importlib.util.find_spec("edgespec.cli.bench") is not None:
    app.command(epilog=EXIT_CODES)(importlib.import_module("edgespec.cli.bench").bench)
app.command(epilog=EXIT_CODES)(profile)
app.command(epilog=EXIT_CODES)(top)
app.add_typer(plan)
app.add_typer(draft)
app.add_typer(keys)
app.add_typer(certs)
