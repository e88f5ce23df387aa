"""``edgespec-sim``: the commands and what ``--help`` says first."""

from __future__ import annotations

import typer

from edgespec.cli.running import EXIT_CODES
from edgespec.cli.sim import trace
from edgespec.cli.sim.mean_field import mean_field
from edgespec.cli.sim.replay import replay
from edgespec.cli.sim.report import report
from edgespec.cli.sim.run import run
from edgespec.cli.sim.scenario import list_scenarios, scenario
from edgespec.cli.sim.sweep import sweep

app = typer.Typer(
    name="edgespec-sim",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


@app.callback(epilog=EXIT_CODES)
def main() -> None:
    """What would my users feel, and how many GPUs do I need?

    Plays deployments of edgespec in virtual time: the product's own sessions, policies and
    schedulers, on networks and machines that a scenario describes.

    [bold]See it[/]     edgespec-sim run single-device --out runs/first

    [bold]Choose[/]     edgespec-sim list

    [bold]Replay[/]     edgespec-sim replay generate:starlink --out runs/starlink

    [bold]Compare[/]    edgespec-sim sweep household --vary tokens.acceptance=0.6,0.8 --out runs/x
    """


app.command(epilog=EXIT_CODES)(run)
app.command("list", epilog=EXIT_CODES)(list_scenarios)
app.command(epilog=EXIT_CODES)(scenario)
for command in (sweep, replay, report):
    app.command(epilog=EXIT_CODES)(command)
app.command("mean-field", epilog=EXIT_CODES)(mean_field)
app.add_typer(trace.app, name="trace", epilog=EXIT_CODES)
