"""The simulator as a Python library: runs of scenarios, sweeps and plans, without commands.

    import edgespec_sim as sim

    result = sim.run("household", seeds=8, arms=["target-only", "edgespec"])
    print(result.arm("edgespec").speedup, result.arm("edgespec").speedup_interval)
    requests = result.frame()

Nothing is printed. Worlds are played on all cores; equal seeds give equal results, bit for bit,
whatever the number of processes. ``progress`` is called several times a second, and an exception
that it raises ends the run and its processes, so that a caller can cancel.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from edgespec.bench.arms import Arm
from edgespec.config.files import write_output
from edgespec.config.loading import NULL
from edgespec_sim.playing import (
    SECONDS,
    ScenarioPoint,
    SeedPlan,
    Watcher,
    Workers,
    default_processes,
    ignore_progress,
    play_seeds,
    simulate,
    summary_of,
)
from edgespec_sim.report.document import arm_cells, group_cells
from edgespec_sim.report.page import SUMMARY, TRACE, refuse_to_replace, report_on
from edgespec_sim.report.timeline import TraceLine, read_lines
from edgespec_sim.run_summary import ArmSummary, RequestRow, RunSummary
from edgespec_sim.scenario.sections import Scenario, load_scenario, scenario_path
from edgespec_sim.world.meters import make_request_row
from edgespec_sim.world.parts import NO_PARTS, Parts
from edgespec_sim.world.run import check

MAX_POINTS: Final = 10_000
"""Most points of a sweep."""
Row = dict[str, Any]
Frame = Any
"""A ``pandas.DataFrame``, a ``polars.DataFrame``, or a list of ``Row``."""


@dataclass(frozen=True, slots=True)
class PlayedRequest:
    """One request of a run, with the arm and the seed under which it was played."""

    arm: str
    seed: int
    row: RequestRow


@dataclass(frozen=True, slots=True)
class RunResult:
    """The results of a run."""

    summary: RunSummary
    """Means, quantiles and 95 % intervals, by arm."""
    requests: tuple[PlayedRequest, ...]
    """Every request that counts, by seed, arm and time."""
    scenario: Scenario
    """The scenario as it was played."""
    folder: Path
    """Base of relative file names in the scenario."""
    trace: tuple[TraceLine, ...] = ()
    """Events and actions of the first devices of one arm on the first seed, if a trace was asked
    for (``docs/simulator-files.md``)."""

    def arm(self, name: str) -> ArmSummary:
        """Return the summary of an arm. Raises ``KeyError`` that names the arms of the run."""
        for one in self.summary.arms:
            if one.arm == name:
                return one
        known = ", ".join(one.arm for one in self.summary.arms)
        raise KeyError(f"no arm {name!r}: the run has {known}")

    def frame(self, of: Literal["requests", "arms"] = "requests") -> Frame:
        """Return the requests, or the arms, as a table.

        A ``pandas.DataFrame`` if pandas is installed, else a ``polars.DataFrame`` if polars is,
        else a list of dicts. ``docs/simulator-files.md`` describes the columns."""
        if of == "arms":
            return make_frame([arm_row(one) for one in self.summary.arms])
        return make_frame(
            [{"arm": one.arm, "seed": one.seed, **asdict(one.row)} for one in self.requests]
        )


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One point of a sweep: the settings that were varied, and the summary."""

    varied: Mapping[str, object]
    summary: RunSummary


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The results of a sweep, point by point. The last setting varies fastest."""

    points: tuple[SweepPoint, ...]

    def frame(self) -> Frame:
        """Return one row for each point and arm, as ``RunResult.frame`` returns tables."""
        return make_frame(
            [
                {**point.varied, **arm_row(arm)}
                for point in self.points
                for arm in point.summary.arms
            ]
        )


def run(
    scenario: str | Path | Scenario,
    *,
    seeds: int | None = None,
    first_seed: int = 1,
    arms: Sequence[str] | None = None,
    max_seconds: float = SECONDS,
    parts: Parts = NO_PARTS,
    processes: int | None = None,
    progress: Watcher = ignore_progress,
    trace: bool = False,
    folder: Path | str | None = None,
    **overrides: object,
) -> RunResult:
    """Play a scenario with every arm, and return what was measured.

    Args:
        scenario: Name of a bundled scenario, a YAML file, or a ``Scenario``.
        seeds: Number of seeds. None plays as many as are needed to know every speed-up within 5 %,
            within ``max_seconds``; the summary states how certain it is.
        first_seed: First seed.
        arms: Names of the arms to play. None takes the scenario's.
        max_seconds: Seconds after which no further seed is started, if ``seeds`` is None.
        parts: Own policies, links, times, tokens and workloads in place of the scenario's.
        processes: Number of processes. None takes one for each core. Parts whose classes a process
            cannot import, as in a notebook or in the script itself, are played in this process.
        progress: Called with a ``PlayProgress`` several times a second. Whatever it raises ends the
            run and reaches the caller.
        trace: Whether to keep a trace of the first devices.
        folder: Base of relative file names in the scenario. None is the scenario file's folder, or
            the working directory for a ``Scenario``.
        overrides: Changed keys, with ``__`` for a dot: ``links__wifi__rtt_ms=20``. A key with dots
            can be given as ``**{"links.wifi.rtt_ms": 20}``. None is null.

    Raises:
        ConfigError: A key of the scenario is unknown or its value is not allowed.
        ValueError: The scenario cannot be played, or a part has no place in it.
        ConservationError: A law of the simulated world was broken, which is a fault of the
            simulator or of an own part.
    """
    loaded, base = _load(scenario, arms, overrides, folder)
    seed_plan = SeedPlan(first_seed, seeds, seconds=max_seconds)
    with (
        tempfile.TemporaryDirectory() as temporary,
        Workers(_count_processes(processes, parts), progress) as workers,
    ):
        file = Path(temporary) / TRACE if trace else None
        point = simulate(loaded, seed_plan, base, workers, file, parts)
        lines = () if file is None else tuple(read_lines([file]))
    return make_result(point, seed_plan, lines)


def make_result(
    point: ScenarioPoint, seed_plan: SeedPlan, trace: tuple[TraceLine, ...] = ()
) -> RunResult:
    """Return the result of a played point, whose outcomes are consumed."""
    jobs = len(point.outcomes) // max(1, point.seeds)
    requests = tuple(
        PlayedRequest(arm.value, seed_plan.first + index // jobs, make_request_row(record))
        for index, (arm, outcome) in enumerate(point.outcomes)
        for record in outcome.meters.records
    )
    return RunResult(
        summary=summary_of(point, seed_plan),
        requests=requests,
        scenario=point.scenario,
        folder=point.folder,
        trace=trace,
    )


def sweep(
    scenario: str | Path | Scenario,
    vary: Mapping[str, Sequence[object]],
    *,
    seeds: int | None = None,
    first_seed: int = 1,
    arms: Sequence[str] | None = None,
    max_seconds: float = SECONDS,
    parts: Parts = NO_PARTS,
    processes: int | None = None,
    progress: Watcher = ignore_progress,
    folder: Path | str | None = None,
    **overrides: object,
) -> SweepResult:
    """Play a scenario over a grid of settings, all points side by side.

    ``vary`` maps keys to their values, as ``{"links.internet.rtt_ms": [2, 20, 50]}``. The grid is
    the product of all values. ``max_seconds`` is the limit for each point. The other arguments and
    the errors are the same as for ``run``; a grid of more than ``MAX_POINTS`` points raises
    ``ValueError``."""
    if (count := math.prod(len(values) for values in vary.values())) > MAX_POINTS:
        raise ValueError(f"the grid has {count} points, but the limit is {MAX_POINTS}")
    seed_plan = SeedPlan(first_seed, seeds, seconds=max_seconds)
    points: list[tuple[dict[str, object], ScenarioPoint]] = []
    for values in itertools.product(*vary.values()):
        varied = dict(zip(vary, values, strict=True))
        loaded, base = _load(scenario, arms, {**overrides, **varied}, folder)
        check(loaded, base, parts)
        name = ", ".join(f"{key}={value}" for key, value in varied.items()) or loaded.name
        points.append((varied, ScenarioPoint(name, loaded, base, parts=parts)))
    summaries: dict[int, RunSummary] = {}

    def finish(point: ScenarioPoint) -> None:
        summaries[id(point)] = summary_of(point, seed_plan)
        point.outcomes.clear()

    with Workers(_count_processes(processes, parts), progress) as workers:
        play_seeds([point for _, point in points], seed_plan, workers, finish)
    return SweepResult(tuple(SweepPoint(varied, summaries[id(one)]) for varied, one in points))


def write_run(result: RunResult, folder: Path | str) -> list[Path]:
    """Write ``summary.json`` and the report of a run into ``folder``, as ``edgespec-sim run --out``
    does, and return the paths. Raises ``ReportError`` if the folder holds another run."""
    out = Path(folder)
    refuse_to_replace(out)
    out.mkdir(parents=True, exist_ok=True)
    summary = out / SUMMARY
    write_output(summary, result.summary.to_json())
    return [summary, *report_on([out])]


def arm_row(arm: ArmSummary) -> Row:
    """Return the cells of an arm in the table of arms."""
    return {**arm_cells(arm), **group_cells(arm.all)}


def make_frame(rows: Sequence[Row]) -> Frame:
    """Return rows as a table: of pandas, else of polars, else the rows themselves."""
    if importlib.util.find_spec("pandas") is not None:
        pandas = importlib.import_module("pandas")
        return pandas.DataFrame.from_records(rows)
    if importlib.util.find_spec("polars") is not None:
        polars = importlib.import_module("polars")
        return polars.DataFrame(list(rows), infer_schema_length=None)
    return list(rows)


def _load(
    scenario: str | Path | Scenario,
    arms: Sequence[str] | None,
    overrides: Mapping[str, object],
    folder: Path | str | None,
) -> tuple[Scenario, Path]:
    """Return the scenario with its changes, and the base of its file names."""
    base = None if folder is None else Path(folder)
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    if arms is not None:
        changes["arms"] = list(arms)
    if not isinstance(scenario, Scenario):
        name = str(scenario)
        # A loader of configurations leaves out what is None; here it is the value of the key.
        given = {key: NULL if value is None else value for key, value in changes.items()}
        return load_scenario(name, given), base or scenario_path(name).parent
    dotted = [key for key in changes if key != "arms" and not hasattr(scenario, key)]
    if dotted:
        raise ValueError(
            f"{dotted[0]} changes a part of a Scenario that is given as an object: build it with"
            " the value instead, or give the scenario's name or file"
        )
    if arms is not None:
        changes["arms"] = tuple(Arm(name) for name in arms)
    return replace(scenario, **changes), base or Path()  # type: ignore[arg-type] # checked by it


def _count_processes(processes: int | None, parts: Parts) -> int:
    """Return the number of processes to use: one if another process cannot have the parts."""
    if processes is not None and processes < 1:
        raise ValueError(f"processes is {processes}, but must be at least 1")
    try:
        # The classes of a script or notebook are stored by name, below `__main__`.
        is_portable = b"__main__" not in pickle.dumps(parts)
    except (pickle.PicklingError, AttributeError, TypeError):
        is_portable = False
    return (processes or default_processes()) if is_portable else 1
