"""``edgespec-sim run``: one scenario, all arms, a report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.running import reported, say
from edgespec_sim.commands.pool import default_processes
from edgespec_sim.commands.seeds import (
    SECONDS,
    Ask,
    ForceOption,
    SeedOption,
    SeedsOption,
    TimeOption,
    WithinOption,
)
from edgespec_sim.commands.simulate import SUMMARY, TRACE, parse_settings, show, simulate
from edgespec_sim.planning.replication import WITHIN
from edgespec_sim.report.write import refuse_to_replace, write_report
from edgespec_sim.scenario.loading import load_scenario, scenario_path


def run(
    scenario: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a bundled scenario (see `list`)")
    ],
    seed: SeedOption = None,
    seeds: SeedsOption = None,
    within: WithinOption = 100 * WITHIN,
    max_seconds: TimeOption = SECONDS,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write summary.json, trace.jsonl and report.html there"),
    ] = None,
    force: ForceOption = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key, as links.wan.rtt_ms=80"),
    ] = None,
    slo_ttft: Annotated[
        float | None,
        typer.Option("--slo-ttft-p95", metavar="MS", help="95 % are to begin within so long"),
    ] = None,
    slo_tpot: Annotated[
        float | None,
        typer.Option("--slo-tpot-p95", metavar="MS", help="95 % are to take so long a token"),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Worlds side by side \\[default: all cores]")
    ] = None,
) -> None:
    """Play a scenario with every arm and compare them.

    The sessions, policies and schedulers are the product's own; only the clock is virtual. One seed
    is no result: unless --seed or --seeds says otherwise, seeds are played until every speed-up is
    known within 5 %, or the time is up.

    [bold]Examples[/]

    edgespec-sim run household --out runs/household

    edgespec-sim run household --seed 1

    edgespec-sim run laptop-floor --slo-ttft-p95 1000 --slo-tpot-p95 40 --set verifiers.h200.count=2

    edgespec-sim run single-device --set links.internet.rtt_ms=100 --set tokens.acceptance=0.6
    """
    with reported():
        path = scenario_path(scenario)
        objectives = {"slo.ttft_p95_ms": slo_ttft, "slo.tpot_p95_ms": slo_tpot}
        loaded = load_scenario(scenario, {**parse_settings(settings or ()), **objectives})
        if out is not None:
            if not force:
                refuse_to_replace(out)
            out.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        trace = None if out is None else out / TRACE
        ask = Ask.of(seed, seeds, within, max_seconds)
        summary = simulate(loaded, ask, path.parent, processes or default_processes(), trace)
        took_s = time.monotonic() - started_s
        virtual_s = loaded.duration_s * len(loaded.arms) * summary.seeds
        show(summary)
        times = virtual_s / took_s
        say(f"{virtual_s:.0f} virtual seconds in {took_s:.1f} s ({times:.1f} times real time)")
        if out is not None:
            (out / SUMMARY).write_text(summary.to_json(), encoding="utf-8")
            for written in write_report(out):
                say(f"wrote {written}")
