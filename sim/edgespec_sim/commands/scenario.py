"""``edgespec-sim list`` and ``scenario``: what there is to play, and every key of it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from edgespec.cli.running import reported
from edgespec.config.loading import dump_config
from edgespec_sim.commands.simulate import output, parse_settings
from edgespec_sim.scenario.loading import bundled_scenarios, load_scenario, scenario_path
from edgespec_sim.world.run import check


def list_scenarios() -> None:
    """List the scenarios that come with the simulator."""
    with reported():
        table = Table()
        for name in ("scenario", "devices", "verifiers", "about"):
            table.add_column(name)
        for name, path in bundled_scenarios().items():
            scenario = load_scenario(str(path))
            devices = sum(section.count for section in scenario.devices.values())
            verifiers = sum(section.count for section in scenario.verifiers.values())
            table.add_row(name, f"{devices:,}", str(verifiers), scenario.about.strip())
        output().print(table)


def scenario(
    name: Annotated[str, typer.Argument(help="A YAML file, or the name of a bundled scenario")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key")
    ] = None,
) -> None:
    """Check a scenario and print every key of it, defaults too, as YAML.

    What `run` would refuse is refused here, in the same words: names of traces, tapes, profiles and
    policies too.

    edgespec-sim scenario household > mine.yaml
    """
    with reported():
        loaded = load_scenario(name, parse_settings(settings or ()))
        check(loaded, scenario_path(name).parent)
        typer.echo(dump_config(loaded), nl=False)
