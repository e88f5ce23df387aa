"""The commands of ``edgespec-sim`` that play scenarios and show results: ``run``, ``list``,
``scenario``, ``report`` and ``sweep``."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table

from edgespec.cli.main import FAILED
from edgespec.cli.options import option, read_settings
from edgespec.cli.running import reporting_errors, say
from edgespec.config.loading import ConfigError, dump_config
from edgespec_sim import playing
from edgespec_sim.bundle import rerun as play_again
from edgespec_sim.bundle import write_bundle
from edgespec_sim.commands import play
from edgespec_sim.library import make_result
from edgespec_sim.report import tables
from edgespec_sim.report.document import write_page
from edgespec_sim.report.page import SUMMARY, TRACE, headline, refuse_to_replace, report_on
from edgespec_sim.report.sweep_page import render_sweep, sweep_csv
from edgespec_sim.run_summary import RunSummary, SummaryError, read_summary
from edgespec_sim.scenario.device_power import bundled_profiles, load_profile
from edgespec_sim.scenario.sections import Scenario, bundled_scenarios, load_scenario, scenario_path
from edgespec_sim.world.run import check


def run(
    scenario: Annotated[
        str,
        typer.Argument(
            metavar="SCENARIO", help="A YAML file, or the name of a bundled scenario (see `list`)"
        ),
    ],
    seed: play.SeedOption = None,
    seeds: play.SeedsOption = None,
    max_seconds: play.TimeOption = playing.SECONDS,
    out: Annotated[
        Path | None, option("Write summary.json, trace.jsonl and report.html here", metavar="DIR")
    ] = None,
    bundle: Annotated[
        Path | None,
        option("Write the results and all that made them here, for `rerun`", metavar="FILE.zip"),
    ] = None,
    settings: play.SettingsOption = None,
) -> None:
    """Play a scenario with every arm and compare them.

    The sessions, policies and schedulers are the product's own; only the clock is virtual. One seed
    is no result: without --seed or --seeds, seeds are played until every speed-up is known within 5
    %, or the time is up.

    [bold]Examples[/]

    edgespec-sim run household --out runs/household

    edgespec-sim run household --seed 1

    edgespec-sim run household --seeds 8 --bundle household.zip

    edgespec-sim run laptop-floor --set slo.tpot_p95_ms=40 --set verifiers.h200.count=2

    edgespec-sim run replay --set links.network.trace=ride.ping.txt --set tokens.tape=mine.jsonl

    edgespec-sim run single-device --set links.internet.rtt_ms=100 --set tokens.acceptance=0.6"""
    with reporting_errors():
        path = scenario_path(scenario)
        loaded = load_scenario(scenario, read_settings(settings or ()))
        if out is not None:
            refuse_to_replace(out)
            out.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        trace = None if out is None else out / TRACE
        seed_plan = playing.SeedPlan.from_options(seed, seeds, max_seconds)
        with play.shown_workers() as workers:
            point = playing.simulate(loaded, seed_plan, path.parent, workers, trace)
        result = make_result(point, seed_plan)
        if bundle is not None:
            named = {**result.summary.environment, "bundle": bundle.name}
            result = replace(result, summary=replace(result.summary, environment=named))
        summary = result.summary
        took_s = time.monotonic() - started_s
        virtual_s = loaded.duration_s * len(loaded.arms) * summary.seeds
        play.show(summary)
        play.make_console().print(headline(summary), highlight=False)
        times = virtual_s / took_s
        say(f"{virtual_s:.0f} virtual seconds in {took_s:.1f} s ({times:.1f} times real time)")
        if out is not None:
            (out / SUMMARY).write_text(summary.to_json(), encoding="utf-8")
            for written in report_on([out]):
                say(f"wrote {written}")
        if bundle is not None:
            write_bundle(bundle, result)
            say(f"wrote {bundle}: play it again with `edgespec-sim rerun {bundle}`")


def rerun(
    bundle: Annotated[Path, typer.Argument(metavar="FILE.zip", help="A file of `run --bundle`")],
) -> None:
    """Play the scenario of a bundle again and compare every number with the recorded one.

    Exits with 0 if all numbers are the same, also if they differ by rounding alone (another version
    of Python), and with 1 otherwise. The first differences are listed.

    edgespec-sim rerun household.zip"""
    with reporting_errors():
        with play.watched() as progress:
            found = play_again(bundle, processes=playing.default_processes(), progress=progress)
        typer.echo(found.about)
        for text in found.differences:
            typer.echo(f"  {text}")
        for name in dict.fromkeys((*found.recorded, *found.found)):
            one, other = found.recorded.get(name, ""), found.found.get(name, "")
            if one != other and name not in ("command", "bundle"):
                typer.echo(f"{name}: {one or 'unknown'} in the bundle, {other or 'unknown'} now")
    if not (found.is_same or found.is_rounding_only):
        raise typer.Exit(FAILED)


def list_scenarios() -> None:
    """List the scenarios and the energy profiles of devices that come with the simulator."""
    with reporting_errors():
        table = Table("scenario", "devices", "verifiers", "about")
        for name, path in bundled_scenarios().items():
            scenario = load_scenario(str(path))
            verifiers = sum(section.count for section in scenario.verifiers.values())
            table.add_row(
                name, f"{scenario.device_count:,}", str(verifiers), scenario.about.strip()
            )
        play.make_console().print(table)
        table = Table("device profile", "idle W", "draft W above it", "about")
        for name in bundled_profiles():
            profile = load_profile(name, Path())
            known = dict(profile.figures)
            watts = (
                f"{known[key].value:g}" if key in known else tables.MISSING
                for key in ("idle_w", "draft_w")
            )
            table.add_row(name, *watts, profile.about.strip())
        play.make_console().print(table)


def scenario(
    name: Annotated[
        str,
        typer.Argument(metavar="SCENARIO", help="A YAML file, or the name of a bundled scenario"),
    ],
    settings: play.SettingsOption = None,
) -> None:
    """Check a scenario and print every key of it, defaults too, as YAML.

    Everything that `run` would refuse is refused here with the same message, unknown names of
    traces, tapes, profiles and policies included.

    edgespec-sim scenario household > mine.yaml"""
    with reporting_errors():
        loaded = load_scenario(name, read_settings(settings or ()))
        check(loaded, scenario_path(name).parent)
        typer.echo(dump_config(loaded), nl=False)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="A run's folder, its summary.json, or one or two traces (device's, verifier's)",
        ),
    ],
    out: Annotated[
        Path | None,
        option("Where to write (default: beside the run)", "--out", "-o", metavar="DIR"),
    ] = None,
) -> None:
    """Write the report of a run: a page, tables, and a timeline for ui.perfetto.dev.

    A trace is a file that `edgespec generate`, `chat` or `verifier` wrote with --set trace=FILE.
    The report of a trace never replaces the report of a run: a trace in a run's folder gets its own
    folder there.

    [dim]edgespec-sim report runs/household[/]

    [dim]edgespec-sim report device.jsonl verifier.jsonl --out report[/]"""
    with reporting_errors():
        for path in report_on(runs, out):
            size = path.stat().st_size
            say(f"wrote {path} (" + (f"{size / 1e6:.1f} MB)" if size >= 1e6 else f"{size} B)"))


# ``edgespec-sim sweep`` plays a scenario over a grid of settings, on all cores, and can be resumed.
#
# Each point has its own folder with its summary. A sweep that is run again plays only the points
# whose summary is missing or was made with other settings.


MAX_POINTS = 10_000


@dataclass(frozen=True, slots=True)
class GridPoint:
    varied: dict[str, Any]
    scenario: Scenario
    folder: Path
    """The folder of the point's summary."""

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.varied.items())

    def finished_summary(self, seed_plan: playing.SeedPlan) -> RunSummary | None:
        """Read the point's summary. None if there is none, or if it was made with other
        settings."""
        try:
            summary = read_summary(self.folder / SUMMARY)
        except SummaryError:
            return None
        same = summary.settings.get("yaml") == dump_config(self.scenario)
        return summary if same and summary.settings.get("ask") == asdict(seed_plan) else None


def sweep(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A YAML file, or a bundled scenario's name")
    ],
    vary: Annotated[
        list[str], option("A key and its values; repeat for a grid", metavar="KEY=V1,V2,...")
    ],
    out: Annotated[Path, option("Points, sweep.html and sweep.csv", metavar="DIR")],
    seeds: play.SeedsOption = None,
    max_seconds: play.TimeOption = playing.SECONDS,
    settings: play.SettingsOption = None,
) -> None:
    """Play a scenario over a grid of settings; run it again to go on where it stopped.

    Each point gets as many seeds as are needed to know its speed-ups within 5 %; --max-seconds is
    the limit for each point.

    edgespec-sim sweep single-device --vary links.internet.rtt_ms=2,20,50,100,200 --out runs/rtt"""
    with reporting_errors():
        folder = scenario_path(scenario).parent
        seed_plan = playing.SeedPlan.from_options(None, seeds, max_seconds)
        grid = _make_grid(scenario, vary, read_settings(settings or ()), out)
        finished = {
            index: done
            for index, one in enumerate(grid)
            if (done := one.finished_summary(seed_plan))
        }
        if finished:
            say(f"{len(finished)} of {len(grid)} points exist already")
        missing = [index for index in range(len(grid)) if index not in finished]
        for index in missing:
            check(grid[index].scenario, folder)
        if missing:
            finished |= _play_points(grid, missing, seed_plan, folder)
        pairs = [(grid[index].varied, finished[index]) for index in sorted(finished)]
        write_page(out / "sweep.html", render_sweep(pairs, grid[0].scenario.name))
        (out / "sweep.csv").write_text(sweep_csv(pairs), encoding="utf-8", newline="")
        for written in ("sweep.html", "sweep.csv"):
            say(f"wrote {out / written}")
        play.show(pairs[-1][1])


def _make_grid(
    name: str, vary: Sequence[str], settings: dict[str, object], out: Path
) -> list[GridPoint]:
    keys: list[str] = []
    columns: list[list[Any]] = []
    for item in vary:
        key, _, values = item.partition("=")
        if not key or not values:
            raise ConfigError(f"--vary is {item!r}, but must be KEY=VALUE,VALUE,...")
        keys.append(key)
        columns.append([yaml.safe_load(value) for value in values.split(",")])
    if (count := math.prod(map(len, columns))) > MAX_POINTS:
        raise ConfigError(
            f"the values of --vary make a grid of {count} points, but the limit is {MAX_POINTS}"
        )
    points = []
    for number, combination in enumerate(itertools.product(*columns)):
        varied = dict(zip(keys, combination, strict=True))
        folder = out / "points" / f"{number:04d}"
        points.append(GridPoint(varied, load_scenario(name, {**settings, **varied}), folder))
    return points


def _play_points(
    grid: Sequence[GridPoint], missing: Sequence[int], seed_plan: playing.SeedPlan, folder: Path
) -> dict[int, RunSummary]:
    """Play the missing points. Each summary is written as soon as its point has all its seeds."""
    points = {
        playing.ScenarioPoint(grid[one].name, grid[one].scenario, folder): one for one in missing
    }
    summaries: dict[int, RunSummary] = {}

    def finish(done: playing.ScenarioPoint) -> None:
        index = points[done]
        summaries[index] = playing.summary_of(done, seed_plan)
        done.outcomes.clear()
        _write_point(grid[index], summaries[index])

    with play.shown_workers() as workers:
        playing.play_seeds(list(points), seed_plan, workers, finish)
    return summaries


def _write_point(point: GridPoint, summary: RunSummary) -> None:
    point.folder.mkdir(parents=True, exist_ok=True)
    (point.folder / "varied.json").write_text(json.dumps(point.varied), encoding="utf-8")
    # The summary is written in one step: a sweep stopped here must not find half of it later.
    unfinished = point.folder / f"{SUMMARY}.part"
    unfinished.write_text(summary.to_json(), encoding="utf-8")
    unfinished.replace(point.folder / SUMMARY)
