"""``edgespec-sim sweep``: a scenario over a grid of settings, on all cores, resumable.

Each point has a folder of its own with its summary; a sweep that is run again plays only the points
whose summary is missing or was made from other settings.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from edgespec.cli.running import reported, say
from edgespec.config.loading import dump_config
from edgespec_sim.commands.play import (
    SECONDS,
    SUMMARY,
    Ask,
    Point,
    SeedsOption,
    SettingsOption,
    TimeOption,
    default_processes,
    parse_settings,
    play_seeds,
    show,
    summary_of,
)
from edgespec_sim.report.document import write_page
from edgespec_sim.report.sweep_page import render_sweep, sweep_csv
from edgespec_sim.run_summary import RunSummary, SummaryError, read_summary
from edgespec_sim.scenario.sections import Scenario, load_scenario, scenario_path
from edgespec_sim.world.run import check

MAX_POINTS = 10_000


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One combination of settings."""

    varied: dict[str, Any]
    scenario: Scenario
    ask: Ask
    folder: Path
    """Where its summary goes."""

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.varied.items())

    def done(self) -> RunSummary | None:
        """Its summary, if there is one of these very settings."""
        path = self.folder / SUMMARY
        if not path.is_file():
            return None
        try:
            summary = read_summary(path)
        except SummaryError:
            return None
        same = summary.settings.get("yaml") == dump_config(self.scenario)
        return summary if same and summary.settings.get("ask") == asdict(self.ask) else None


def sweep(
    scenario: Annotated[str, typer.Argument(help="A YAML file, or a bundled scenario's name")],
    vary: Annotated[
        list[str],
        typer.Option(metavar="KEY=V1,V2,...", help="A key and its values; repeat for a grid"),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Points, sweep.html and sweep.csv")],
    seeds: SeedsOption = None,
    max_seconds: TimeOption = SECONDS,
    settings: SettingsOption = None,
) -> None:
    """Play a scenario over a grid of settings; run it again to go on where it stopped.

    Each point gets as many seeds as its speed-ups take to be known within 5 %; --max-seconds is for
    each of them.

    edgespec-sim sweep single-device --vary links.internet.rtt_ms=2,20,50,100,200 --out runs/rtt
    """
    with reported():
        folder = scenario_path(scenario).parent
        ask = Ask.of(None, seeds, max_seconds)
        grid = _grid(scenario, vary, ask, parse_settings(settings or ()), out)
        finished = {index: done for index, one in enumerate(grid) if (done := one.done())}
        if finished:
            say(f"{len(finished)} of {len(grid)} points are there already")
        missing = [index for index in range(len(grid)) if index not in finished]
        for index in missing:
            check(grid[index].scenario, folder)
        finished |= _play(grid, missing, folder)
        pairs = [(grid[index].varied, finished[index]) for index in sorted(finished)]
        write_page(out / "sweep.html", render_sweep(pairs, grid[0].scenario.name))
        (out / "sweep.csv").write_text(sweep_csv(pairs), encoding="utf-8", newline="")
        for written in ("sweep.html", "sweep.csv"):
            say(f"wrote {out / written}")
        show(pairs[-1][1])


def _grid(
    name: str, vary: Sequence[str], ask: Ask, settings: dict[str, object], out: Path
) -> list[GridPoint]:
    grid: list[tuple[str, list[Any]]] = []
    for item in vary:
        key, sign, values = item.partition("=")
        if not sign or not key or not values:
            raise ValueError(f"vary is {item!r}, but must be KEY=VALUE,VALUE,...")
        grid.append((key, [yaml.safe_load(value) for value in values.split(",")]))
    count = len(list(itertools.product(*(values for _, values in grid))))
    if count > MAX_POINTS:
        raise ValueError(f"the grid has {count} points, but at most {MAX_POINTS} go")
    points = []
    for number, combination in enumerate(itertools.product(*(values for _, values in grid))):
        varied = dict(zip((key for key, _ in grid), combination, strict=True))
        folder = out / "points" / f"{number:04d}"
        points.append(GridPoint(varied, load_scenario(name, {**settings, **varied}), ask, folder))
    return points


def _play(grid: Sequence[GridPoint], missing: Sequence[int], folder: Path) -> dict[int, RunSummary]:
    """Each point's summary is written as soon as it has all its seeds."""
    if not missing:
        return {}
    ask = grid[missing[0]].ask
    points = {index: Point(grid[index].name, grid[index].scenario, folder) for index in missing}
    summaries: dict[int, RunSummary] = {}

    def finish(done: Point) -> None:
        (index,) = (index for index, point in points.items() if point is done)
        summaries[index] = summary = summary_of(done, ask)
        done.outcomes.clear()
        _write(grid[index], summary)

    play_seeds(list(points.values()), ask, default_processes(), finish)
    return summaries


def _write(point: GridPoint, summary: RunSummary) -> None:
    point.folder.mkdir(parents=True, exist_ok=True)
    (point.folder / "varied.json").write_text(json.dumps(point.varied), encoding="utf-8")
    # In one go: a sweep that is stopped here must not find half a summary later.
    unfinished = point.folder / f"{SUMMARY}.part"
    unfinished.write_text(summary.to_json(), encoding="utf-8")
    unfinished.replace(point.folder / SUMMARY)
