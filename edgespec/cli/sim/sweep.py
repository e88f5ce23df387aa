"""``edgespec-sim sweep``: a scenario over a grid of settings, on all cores, resumable.

Each point has a folder of its own with its summary; a sweep that is run again plays only the points
whose summary is missing or was made from other settings.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from edgespec.benchmark.arms import Arm
from edgespec.cli.running import reported, say
from edgespec.cli.sim.pool import Task, default_processes, play_all
from edgespec.cli.sim.simulate import (
    SUMMARY,
    arms_table,
    environment,
    output,
    parse_settings,
)
from edgespec.config.loading import dump_config
from edgespec.report.sweep_page import render_sweep, sweep_csv
from edgespec.telemetry.run_summary import RunSummary, SummaryError, read_summary
from edgespec_sim.city.run import Job, jobs_of, summarise
from edgespec_sim.city.world import WorldOutcome
from edgespec_sim.scenario.loading import load_scenario, scenario_path
from edgespec_sim.scenario.sections import Scenario

MAX_POINTS = 10_000


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of settings."""

    varied: dict[str, Any]
    scenario: Scenario
    seed: int
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
        return summary if same and summary.seed == self.seed else None


def sweep(
    scenario: Annotated[str, typer.Argument(help="A YAML file, or a bundled scenario's name")],
    vary: Annotated[
        list[str],
        typer.Option(metavar="KEY=V1,V2,...", help="A key and its values; repeat for a grid"),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Points, sweep.html and sweep.csv")],
    seeds: Annotated[int, typer.Option(min=1, help="Play every point with seeds 1 to N")] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="\\[default: all cores]")] = None,
) -> None:
    """Play a scenario over a grid of settings; run it again to go on where it stopped.

    edgespec-sim sweep single-device --vary links.internet.rtt_ms=2,20,50,100,200 --out runs/rtt
    """
    with reported():
        source = scenario_path(scenario)
        points = _points(scenario, vary, seeds, parse_settings(settings or ()), out)
        finished = {index: done for index, point in enumerate(points) if (done := point.done())}
        if finished:
            say(f"{len(finished)} of {len(points)} points are there already")
        missing = [index for index in range(len(points)) if index not in finished]
        for index, summary in _play(points, missing, source.parent, processes):
            finished[index] = summary
        pairs = [(points[index].varied, finished[index]) for index in sorted(finished)]
        for written, text in (
            ("sweep.html", render_sweep(pairs, points[0].scenario.name)),
            ("sweep.csv", sweep_csv(pairs)),
        ):
            (out / written).write_text(text, encoding="utf-8", newline="")
            say(f"wrote {out / written}")
        output().print(arms_table(pairs[-1][1]))


def _points(
    name: str, vary: Sequence[str], seeds: int, settings: dict[str, object], out: Path
) -> list[Point]:
    grid: list[tuple[str, list[Any]]] = []
    for item in vary:
        key, sign, values = item.partition("=")
        if not sign or not key or not values:
            raise ValueError(f"vary is {item!r}, but must be KEY=VALUE,VALUE,...")
        grid.append((key, [yaml.safe_load(value) for value in values.split(",")]))
    if seeds > 1:
        grid.append(("seed", list(range(1, seeds + 1))))
    count = len(list(itertools.product(*(values for _, values in grid))))
    if count > MAX_POINTS:
        raise ValueError(f"the grid has {count} points, but at most {MAX_POINTS} go")
    points = []
    for number, combination in enumerate(itertools.product(*(values for _, values in grid))):
        varied = dict(zip((key for key, _ in grid), combination, strict=True))
        overrides = {**settings, **{key: v for key, v in varied.items() if key != "seed"}}
        folder = out / "points" / f"{number:04d}"
        loaded = load_scenario(name, overrides)
        points.append(Point(varied, loaded, varied.get("seed", 1), folder))
    return points


def _play(
    points: Sequence[Point], missing: Sequence[int], folder: Path, processes: int | None
) -> list[tuple[int, RunSummary]]:
    """Each point's summary is written as soon as its last job is over."""
    owner: list[int] = []
    jobs: list[Job] = []
    for index in missing:
        for job in jobs_of(points[index].scenario, points[index].seed, folder):
            owner.append(index)
            jobs.append(job)
    if not jobs:
        return []
    left = {index: owner.count(index) for index in missing}
    outcomes: dict[int, WorldOutcome] = {}
    summaries = []
    tasks = [Task(points[index].name, job) for index, job in zip(owner, jobs, strict=True)]
    for number, outcome in play_all(tasks, processes or default_processes()):
        outcomes[number] = outcome
        index = owner[number]
        left[index] -= 1
        if left[index] == 0:
            mine: list[tuple[Arm, WorldOutcome]] = [
                (job.arm, outcomes.pop(n))
                for n, (job, one) in enumerate(zip(jobs, owner, strict=True))
                if one == index
            ]
            summaries.append((index, _finish(points[index], folder, mine)))
    return summaries


def _finish(point: Point, folder: Path, outcomes: Sequence[tuple[Arm, WorldOutcome]]) -> RunSummary:
    summary = summarise(point.scenario, point.seed, folder, outcomes, environment())
    point.folder.mkdir(parents=True, exist_ok=True)
    (point.folder / "varied.json").write_text(json.dumps(point.varied), encoding="utf-8")
    # In one go: a sweep that is stopped here must not find half a summary later.
    unfinished = point.folder / f"{SUMMARY}.part"
    unfinished.write_text(summary.to_json(), encoding="utf-8")
    unfinished.replace(point.folder / SUMMARY)
    return summary
