"""``edgespec-sim``: the table of commands and the text of ``--help``."""

from __future__ import annotations

from edgespec.cli.main import lazy_app

# The order is that of `--help`.
COMMANDS = {
    "run": "edgespec_sim.commands.run:run",
    "rerun": "edgespec_sim.commands.run:rerun",
    "list": "edgespec_sim.commands.run:list_scenarios",
    "scenario": "edgespec_sim.commands.run:scenario",
    "sweep": "edgespec_sim.commands.run:sweep",
    "report": "edgespec_sim.commands.run:report",
    "plan": "edgespec_sim.commands.plan:plan",
    "profile": "edgespec_sim.commands.profile:profile",
    "trace": "edgespec_sim.commands.trace:trace",
}
app = lazy_app("edgespec-sim", COMMANDS)


@app.callback()
def main() -> None:
    """Simulate what users would experience and how many GPUs a deployment needs.

    Plays deployments of edgespec in virtual time: the product's own sessions, policies and
    schedulers, on networks and machines that a scenario describes.

    [bold]See it[/]     edgespec-sim run single-device --out runs/first

    [bold]Choose[/]     edgespec-sim list

    [bold]Replay[/]     edgespec-sim run replay --set links.network.trace=generate:starlink

    [bold]Compare[/]    edgespec-sim sweep household --vary tokens.acceptance=0.6,0.8 --out runs/x
    """
