"""``edgespec-sim``: the commands and what ``--help`` says first."""

from __future__ import annotations

from edgespec.cli.entry import EXIT_CODES
from edgespec.cli.lazy import lazy_app

# In the order of `--help`.
COMMANDS = {
    "run": "edgespec.cli.sim.run:run",
    "list": "edgespec.cli.sim.scenario:list_scenarios",
    "scenario": "edgespec.cli.sim.scenario:scenario",
    "sweep": "edgespec.cli.sim.sweep:sweep",
    "replay": "edgespec.cli.sim.replay:replay",
    "report": "edgespec.cli.sim.report:report",
    "mean-field": "edgespec.cli.sim.mean_field:mean_field",
    "trace": "edgespec.cli.sim.trace:app",
}

app = lazy_app("edgespec-sim", COMMANDS)


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
