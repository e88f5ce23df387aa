"""Plays scenarios on several cores, seed after seed. The commands and the library share it.

Points (one scenario each) are played in rounds: one seed, then ``replication.MIN_SEEDS`` seeds,
then as many as the spread of the results requires, all points side by side. The number of seeds
depends on the results and not on the number of processes. Only if the time limit is reached does
the machine's speed matter, and then the summary mentions it. Nothing is printed here: a ``Watcher``
is called with the progress, and whatever it raises ends the work and its processes at once.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from edgespec import __version__
from edgespec.bench.arms import Arm
from edgespec.core.device.events import Fail, Finish
from edgespec.operating_system import usable_cores
from edgespec.telemetry.trace import TraceFile, Tracer
from edgespec_sim.replication import MAX_SEEDS, TARGET_HALF_WIDTH, count_seeds_needed
from edgespec_sim.report.page import first_generation_path, first_generation_paths
from edgespec_sim.run_summary import RunSummary
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.worker_pool import Finished, Progress, WorkerPool
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.parts import NO_PARTS, Parts
from edgespec_sim.world.run import Job, check, make_jobs, play, summarise, widest_half_width

SECONDS: Final = 60.0
"""Default time limit of a point, in seconds."""


@dataclass(frozen=True, slots=True)
class PlayProgress:
    """Progress of a run: virtual seconds, summed over all worlds that are known to be needed."""

    doing: str
    """The work in progress, in words."""
    done_s: float
    total_s: float
    """Virtual seconds of all rounds so far. It grows with each round of seeds."""
    is_new_round: bool = False


Watcher = Callable[[PlayProgress], None]
"""Called with the progress, several times a second. An exception that it raises ends the run, whose
processes are ended too, and reaches the caller of the run."""


def ignore_progress(progress: PlayProgress) -> None:
    """Do nothing: the watcher of a run without a display."""


@dataclass(frozen=True, slots=True)
class SeedPlan:
    """The seeds to play: ``count`` seeds from ``first`` on, or as many as needed if it is None.

    ``within`` is the half-width that the speed-ups' intervals should reach, ``seconds`` the time
    limit of each point."""

    first: int
    count: int | None
    within: float = TARGET_HALF_WIDTH
    seconds: float = SECONDS

    @classmethod
    def from_options(cls, seed: int | None, seeds: int | None, seconds: float) -> SeedPlan:
        count = 1 if seed is not None and seeds is None else seeds
        return cls(1 if seed is None else seed, count, seconds=seconds)


@dataclass(slots=True, eq=False)
class ScenarioPoint:
    """One scenario and the outcomes of its seeds so far. The first seed's trace is written to
    ``trace``."""

    name: str
    scenario: Scenario
    folder: Path
    trace: Path | None = None
    parts: Parts = NO_PARTS
    outcomes: list[tuple[Arm, WorldOutcome]] = field(default_factory=list)
    """Outcomes of all jobs, seed after seed."""
    seeds: int = 0
    notes: tuple[str, ...] = ()
    """Remarks on the seeds that a reader of the summary needs."""


def play_seeds(
    points: Sequence[ScenarioPoint],
    seed_plan: SeedPlan,
    workers: Workers,
    on_done: Callable[[ScenarioPoint], None] = lambda point: None,
) -> None:
    """Play the seeds of every point. ``on_done`` is called with each point that has all its
    seeds."""
    began_s = time.monotonic()
    limit_s = seed_plan.seconds * len(points)
    remaining = list(points)
    played = 0
    while remaining:
        spent_s = time.monotonic() - began_s
        seed_s = spent_s / played if played else 0.0
        playing: list[tuple[ScenarioPoint, int]] = []
        for point in remaining:
            new_seeds = _count_new_seeds(point, seed_plan)
            if new_seeds and seed_plan.count is None and point.seeds:
                room = (limit_s - spent_s) / len(remaining)
                new_seeds = min(new_seeds, int(room / max(seed_s, 1e-9)))
            if new_seeds:
                playing.append((point, new_seeds))
            else:
                _note_certainty(point, seed_plan, limit_s)
                on_done(point)
        remaining = [point for point, _ in playing]
        played += sum(new_seeds for _, new_seeds in playing)
        _play_round(workers, playing, seed_plan)


def _count_new_seeds(point: ScenarioPoint, seed_plan: SeedPlan) -> int:
    """Return how many seeds to play next. The first seed is played alone, to measure its
    duration."""
    if seed_plan.count is not None:
        return seed_plan.count - point.seeds
    if not point.seeds:
        return 1
    return (
        count_seeds_needed(point.seeds, widest_half_width(point.outcomes), seed_plan.within)
        - point.seeds
    )


def _play_round(
    workers: Workers, playing: Sequence[tuple[ScenarioPoint, int]], seed_plan: SeedPlan
) -> None:
    tasks: list[Task] = []
    owners: list[tuple[ScenarioPoint, Job]] = []
    for point, new_seeds in playing:
        for seed in range(seed_plan.first + point.seeds, seed_plan.first + point.seeds + new_seeds):
            for job in make_jobs(point.scenario, seed, point.folder, point.parts):
                tasks.append(_make_task(point, job, seed_plan))
                owners.append((point, job))
    if not tasks:
        return
    outcomes = dict(workers.play(tasks, _describe_round(playing)))
    for index, (point, job) in enumerate(owners):
        point.outcomes.append((job.arm, outcomes[index]))
    for point, new_seeds in playing:
        point.seeds += new_seeds


def _describe_round(playing: Sequence[tuple[ScenarioPoint, int]]) -> str:
    if len(playing) > 1:
        return f"{len(playing)} points"
    ((point, new_seeds),) = playing
    seeds = point.seeds + new_seeds
    return "" if seeds == 1 else f"{point.name}: {seeds} seeds"


def _make_task(point: ScenarioPoint, job: Job, seed_plan: SeedPlan) -> Task:
    """Make the task of one job. Only the first seed's first shard writes traces: the whole trace
    for edgespec's arm (or the last arm, if edgespec's is missing), the first generation only for
    the other arms."""
    name = f"{point.name}: {job.arm.value}"
    if point.trace is None or job.shard or job.seed != seed_plan.first:
        return Task(name, job)
    arms = point.scenario.arms
    shown = next((arm for arm in (Arm.BOTH, Arm.EDGESPEC) if arm in arms), arms[-1])
    if job.arm is shown:
        return Task(name, job, point.trace)
    return Task(name, job, first_generation_path(point.trace.parent, job.arm.value), first=True)


def _note_certainty(point: ScenarioPoint, seed_plan: SeedPlan, limit_s: float) -> None:
    last = seed_plan.first + point.seeds - 1
    width = widest_half_width(point.outcomes)
    which = f"seed {seed_plan.first}" if point.seeds == 1 else f"seeds {seed_plan.first} to {last}"
    if width is None and point.seeds > 1:
        point.notes = (f"Some speed-ups are missing: an arm has no complete request in {which}.",)
        return
    if width is None:
        certainty = f"Speed-ups come from {which} alone, so their certainty is unknown"
        point.notes = (f"{certainty}; --seeds N or --max-seconds S plays more.",)
        return
    if width == 0.0:
        return
    certainty = (
        f"Speed-ups are ratios of mean TPOTs over {which}, with 95 % intervals (delta method)"
    )
    if seed_plan.count is not None or width <= seed_plan.within:
        point.notes = (f"{certainty}, the widest of them +/- {width:.1%}.",)
        return
    limit = f"{MAX_SEEDS} seeds" if point.seeds >= MAX_SEEDS else f"{limit_s:.0f} s of time"
    point.notes = (
        f"{certainty}. The widest is +/- {width:.1%} and not +/- {seed_plan.within:.0%},"
        f" as {limit} were the limit.",
    )


def simulate(
    scenario: Scenario,
    seed_plan: SeedPlan,
    folder: Path,
    workers: Workers,
    trace: Path | None,
    parts: Parts = NO_PARTS,
) -> ScenarioPoint:
    """Play all arms of a scenario on the seeds that ``seed_plan`` describes. ``trace`` gets the
    trace of the first devices of one arm."""
    check(scenario, folder, parts)
    if trace is not None:
        # Traces of an earlier run with other arms would be taken for ours.
        for old in first_generation_paths(trace.parent).values():
            old.unlink()
        first_generation_path(trace.parent, "").parent.mkdir(parents=True, exist_ok=True)
    point = ScenarioPoint(scenario.name, scenario, folder, trace, parts)
    play_seeds([point], seed_plan, workers)
    return point


def summary_of(point: ScenarioPoint, seed_plan: SeedPlan) -> RunSummary:
    """Summarise the outcomes of a point, which are consumed."""
    seeds = range(seed_plan.first, seed_plan.first + point.seeds)
    summary = summarise(
        point.scenario,
        seeds,
        point.folder,
        point.outcomes,
        environment(),
        point.notes,
        point.parts,
    )
    return replace(summary, settings={**summary.settings, "ask": asdict(seed_plan)})


def environment() -> dict[str, str]:
    return {
        "edgespec": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


# --- worlds on several processes, and a trace of the first device's first generation ------------

MAX_TRACE_LINES: Final = 50_000


class FirstGenerationTracer:
    """A ``Tracer`` that passes records on until the first session of a device has ended. Of the
    device side it records only that session, and at most ``MAX_TRACE_LINES`` records in all."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._session: str | None = None
        self._remaining = MAX_TRACE_LINES

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        if self._remaining <= 0:
            return
        if side == "device":
            self._session = self._session or session
            if session != self._session:
                return
        self._remaining -= 1
        self._tracer.record(at_s, side, session, kind, item)
        if side == "device" and isinstance(item, Finish | Fail):
            self._remaining = 0


_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Task:
    """A job with its name. If ``trace`` is set, its trace is written there: whole, or only its
    first generation if ``first`` is True."""

    name: str
    job: Job
    trace: Path | None = None
    first: bool = False


def default_processes() -> int:
    """Return the number of cores that this process may use."""
    return usable_cores()


class Workers:
    """Plays tasks, round after round, on the same processes, and reports the progress of all rounds
    together to ``watcher``.

    Enter it once, as a context manager; leaving it ends the processes at once. With one process,
    and for a single task, worlds are played in this process."""

    def __init__(
        self,
        processes: int,
        watcher: Watcher = ignore_progress,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes, self._watcher, self._clock = processes, watcher, clock
        self._doing, self._until_s = "", math.inf
        self._pool: WorkerPool[Task, WorldOutcome] = WorkerPool(processes, _play_task)
        self._total_s = self._done_s = 0.0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.terminate()

    def play(
        self, tasks: Sequence[Task], doing: str = "", until_s: float = math.inf
    ) -> Iterator[tuple[int, WorldOutcome]]:
        """Play ``tasks``, and yield the index and the outcome of each as it completes.

        ``doing`` names the work for the watcher. Raises what ``world.run.play`` and the watcher
        raise, ``ChildProcessError`` if a process died, and ``TimeoutError`` once the clock has
        reached ``until_s``; tasks that were incomplete by then are lost."""
        self._doing, self._until_s = doing or "simulated", until_s
        self._total_s += sum(task.job.scenario.duration_s for task in tasks)
        self._watcher(PlayProgress(self._doing, self._done_s, self._total_s, is_new_round=True))
        if self._processes == 1 or (len(tasks) == 1 and not self._pool.is_running):
            for index, task in enumerate(tasks):
                self._doing = doing or task.name
                yield (
                    index,
                    _play_task(task, lambda now_s: self._report(self._done_s + now_s)),
                )
                self._done_s += task.job.scenario.duration_s
        else:
            yield from self._play_on_processes(tasks)

    def _report(self, done_s: float) -> None:
        """Report the progress of all tasks together. Raises ``TimeoutError``."""
        self._watcher(PlayProgress(self._doing, done_s, self._total_s))
        if self._clock() >= self._until_s:
            self._pool.terminate()
            raise TimeoutError(f"the time is up: {self._doing}")

    def _play_on_processes(self, tasks: Sequence[Task]) -> Iterator[tuple[int, WorldOutcome]]:
        done_s = [0.0] * len(tasks)
        # Arms that draft take longest. They begin first, and the short worlds fill the end evenly.
        order = sorted(enumerate(tasks), key=lambda numbered: not numbered[1].job.arm.drafts)
        remaining = len(tasks)
        for event in self._pool.work_on(order, _POLL_S):
            if isinstance(event, Finished):
                remaining -= 1
                done_s[event.index] = tasks[event.index].job.scenario.duration_s
                yield event.index, event.outcome
            elif isinstance(event, Progress):
                done_s[event.index] = event.done
            if remaining:  # A complete round is kept, even after the deadline.
                self._report(self._done_s + sum(done_s))
        self._done_s += sum(task.job.scenario.duration_s for task in tasks)


def _play_task(task: Task, report: Callable[[float], None]) -> WorldOutcome:
    if task.trace is None:
        return play(task.job, None, report)
    with TraceFile(task.trace) as tracer:
        return play(task.job, FirstGenerationTracer(tracer) if task.first else tracer, report)
