"""``edgespec-sim run``: one scenario, all arms, a report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from edgespec.cli.running import reported, say
from edgespec.config.loading import dump_config
from edgespec_sim.commands.play import (
    SECONDS,
    SUMMARY,
    TRACE,
    Ask,
    SeedOption,
    SeedsOption,
    SettingsOption,
    TimeOption,
    default_processes,
    output,
    parse_settings,
    show,
    simulate,
)
from edgespec_sim.report.page import refuse_to_replace, report_on, write_report
from edgespec_sim.scenario.sections import bundled_scenarios, load_scenario, scenario_path
from edgespec_sim.world.run import check


def run(
    scenario: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a bundled scenario (see `list`)")
    ],
    seed: SeedOption = None,
    seeds: SeedsOption = None,
    max_seconds: TimeOption = SECONDS,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write summary.json, trace.jsonl and report.html there"),
    ] = None,
    settings: SettingsOption = None,
) -> None:
    """Play a scenario with every arm and compare them.

    The sessions, policies and schedulers are the product's own; only the clock is virtual. One seed
    is no result: unless --seed or --seeds says otherwise, seeds are played until every speed-up is
    known within 5 %, or the time is up.

    [bold]Examples[/]

    edgespec-sim run household --out runs/household

    edgespec-sim run household --seed 1

    edgespec-sim run laptop-floor --set slo.tpot_p95_ms=40 --set verifiers.h200.count=2

    edgespec-sim run replay --set links.network.trace=ride.ping.txt --set tokens.tape=mine.jsonl

    edgespec-sim run single-device --set links.internet.rtt_ms=100 --set tokens.acceptance=0.6
    """
    with reported():
        path = scenario_path(scenario)
        loaded = load_scenario(scenario, parse_settings(settings or ()))
        if out is not None:
            refuse_to_replace(out)
            out.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        trace = None if out is None else out / TRACE
        ask = Ask.of(seed, seeds, max_seconds)
        summary = simulate(loaded, ask, path.parent, default_processes(), trace)
        took_s = time.monotonic() - started_s
        virtual_s = loaded.duration_s * len(loaded.arms) * summary.seeds
        show(summary)
        times = virtual_s / took_s
        say(f"{virtual_s:.0f} virtual seconds in {took_s:.1f} s ({times:.1f} times real time)")
        if out is not None:
            (out / SUMMARY).write_text(summary.to_json(), encoding="utf-8")
            for written in write_report(out):
                say(f"wrote {written}")


# --- ``edgespec-sim list`` and ``scenario`` ----------------------------------------------------
# what there is to play, and every key of it.


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
    settings: SettingsOption = None,
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


# --- ``edgespec-sim report`` -------------------------------------------------------------------
# pages and tables of a run that is over, simulated or real.


Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="A run's folder, its summary.json, or one or two traces (device's, verifier's)",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", help="Where to write (default: beside the run)"),
]


def report(runs: Runs, out: Out = None) -> None:
    """Write the report of a run: a page, tables, and a timeline for ui.perfetto.dev.

    A trace is what --set trace=FILE wrote, of `edgespec generate`, `chat` or `verifier`. What a run
    left is never replaced by less: a trace in a run's folder gets a folder of its own there.

    [dim]edgespec-sim report runs/household[/]

    [dim]edgespec-sim report device.jsonl verifier.jsonl --out report[/]
    """
    with reported():
        for path in report_on(runs, out):
            size = path.stat().st_size
            say(
                f"wrote {path} ({size / 1e6:.1f} MB)" if size >= 1e6 else f"wrote {path} ({size} B)"
            )
