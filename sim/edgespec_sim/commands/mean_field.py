"""``edgespec-sim mean-field``: a scenario at any size, without playing every device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from edgespec.cli.running import reported, say
from edgespec_sim.association import association_policy
from edgespec_sim.commands.simulate import parse_settings
from edgespec_sim.planning.mean_field import MeanField, MeanFieldModel
from edgespec_sim.scenario.sections import load_scenario, scenario_path
from edgespec_sim.world.run import check, token_source
from edgespec_sim.world.surrounding import Surrounding


def mean_field(
    scenario: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a bundled scenario (see `list`)")
    ],
    scale: Annotated[
        float, typer.Option(min=1e-3, help="Multiplies the devices and the verifiers")
    ] = 1.0,
    long_run: Annotated[
        bool, typer.Option(help="The law in the long run, not the scenario's own first minutes")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the small worlds that are measured")] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key")
    ] = None,
) -> None:
    """Compute what a scenario comes to, for up to millions of devices.

    Small worlds measure how fast one verifier serves n sessions; queueing theory does the rest. It
    assumes that links are not shared and that verifiers are not full.

    edgespec-sim mean-field city --scale 1000
    """
    with reported():
        folder = scenario_path(scenario).parent
        loaded = load_scenario(scenario, parse_settings(settings or ()))
        check(loaded, folder)
        surrounding = Surrounding(
            token_source(loaded, seed, folder),
            association_policy(loaded.association, seed),
            folder,
            checks=False,
        )
        started_s = time.monotonic()
        model = MeanFieldModel(loaded, surrounding, seed=seed)
        found = [model.solve(arm, scale=scale, transient=not long_run) for arm in loaded.arms]
        Console().print(_table(loaded.name, found))
        say(f"computed in {time.monotonic() - started_s:.1f} s")


def _table(name: str, found: Sequence[MeanField]) -> Table:
    first = found[0]
    title = f"{name}: {first.devices:,} devices, {first.verifiers:,} verifiers"
    table = Table(title=title)
    for column in ("arm", "TTFT ms", "TPOT ms", "p95", "tokens/s", "GPU busy", "active/GPU"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for one in found:
        table.add_row(
            one.arm.value,
            f"{1e3 * one.ttft_s.median:.1f}",
            f"{1e3 * one.tpot_s.median:.1f}",
            f"{1e3 * one.tpot_s.p95:.1f}",
            f"{one.tokens_per_second:,.0f}",
            f"{100 * one.utilisation:.0f} %",
            f"{one.active:.1f}",
        )
    return table
