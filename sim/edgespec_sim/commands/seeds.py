"""How many seeds a command plays: one, so many, or as many as an interval takes.

Points (a scenario each) are played in rounds: one seed, then ``replication.FIRST``, then as many
as their spread asks for, all points side by side. Which seeds these are depends on what came out
and not on the number of processes; only when the time is up does the machine's speed count, and
then the summary says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from edgespec.bench.arms import Arm
from edgespec_sim.commands.pool import Task, Workers
from edgespec_sim.planning.replication import MOST_SEEDS, WITHIN, seeds_wanted
from edgespec_sim.report.write import first_question
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job, jobs_of, widest

SECONDS = 60.0
SeedOption = Annotated[
    int | None,
    typer.Option(min=0, help="Exactly this one: equal seeds give equal results, bit for bit"),
]
SeedsOption = Annotated[
    int | None,
    typer.Option(min=1, max=10_000, help="So many, from 1 or --seed on; else as many as it takes"),
]
WithinOption = Annotated[
    float,
    typer.Option(min=0.1, max=100.0, help="Percent: play seeds until speed-ups are so sure (95 %)"),
]
TimeOption = Annotated[
    float, typer.Option(min=1.0, help="Play no further seed after so long a time")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace another run that is in the folder")
]


@dataclass(frozen=True, slots=True)
class Ask:
    """``count`` None: as many as it takes from ``first`` on."""

    first: int
    count: int | None
    within: float = WITHIN
    seconds: float = SECONDS

    @classmethod
    def of(cls, seed: int | None, seeds: int | None, within_percent: float, seconds: float) -> Ask:
        count = 1 if seed is not None and seeds is None else seeds
        return cls(1 if seed is None else seed, count, within_percent / 100.0, seconds)


@dataclass(slots=True)
class Point:
    """One scenario, and what its seeds came to so far. ``trace`` gets the first seed's."""

    name: str
    scenario: Scenario
    folder: Path
    trace: Path | None = None
    outcomes: list[tuple[Arm, WorldOutcome]] = field(default_factory=list)
    """Of all jobs, seed after seed."""
    seeds: int = 0
    said: tuple[str, ...] = ()
    """What a reader has to know of the seeds."""


def play_seeds(
    points: Sequence[Point],
    ask: Ask,
    processes: int,
    on_done: Callable[[Point], None] = lambda point: None,
    *,
    quiet: bool = False,
) -> None:
    """Fill ``points``; ``on_done`` hears of each as soon as it has all its seeds."""
    began_s = time.monotonic()
    limit_s = ask.seconds * len(points)
    left = list(points)
    played = 0
    with Workers(processes, quiet=quiet) as workers:
        while left:
            spent_s = time.monotonic() - began_s
            seed_s = spent_s / played if played else 0.0
            going: list[tuple[Point, int]] = []
            for point in left:
                more = _more(point, ask)
                if more and ask.count is None and point.seeds:
                    room = (limit_s - spent_s) / len(left)
                    more = min(more, int(room / max(seed_s, 1e-9)))
                if more:
                    going.append((point, more))
                else:
                    _finish(point, ask, limit_s)
                    on_done(point)
            left = [point for point, _ in going]
            played += sum(more for _, more in going)
            _round(workers, going, ask)


def _more(point: Point, ask: Ask) -> int:
    """Seeds to play next; the first one alone, to learn what one takes."""
    if ask.count is not None:
        return ask.count - point.seeds
    if not point.seeds:
        return 1
    return seeds_wanted(point.seeds, widest(point.outcomes), ask.within) - point.seeds


def _round(workers: Workers, going: Sequence[tuple[Point, int]], ask: Ask) -> None:
    tasks: list[Task] = []
    owners: list[tuple[Point, Job]] = []
    for point, more in going:
        for seed in range(ask.first + point.seeds, ask.first + point.seeds + more):
            for job in jobs_of(point.scenario, seed, point.folder):
                tasks.append(_task(point, job, ask))
                owners.append((point, job))
    if not tasks:
        return
    outcomes = dict(workers.play(tasks, _doing(going)))
    for index, (point, job) in enumerate(owners):
        point.outcomes.append((job.arm, outcomes[index]))
    for point, more in going:
        point.seeds += more


def _doing(going: Sequence[tuple[Point, int]]) -> str:
    if len(going) > 1:
        return f"{len(going)} points"
    ((point, more),) = going
    if point.seeds + more == 1:
        return ""
    return f"{point.name}: {point.seeds + more} seeds"


def _task(point: Point, job: Job, ask: Ask) -> Task:
    """The first seed's first shard leaves traces: ours (without ours the last arm's) whole, of the
    others the first question."""
    name = f"{point.name}: {job.arm.value}"
    if point.trace is None or job.shard or job.seed != ask.first:
        return Task(name, job)
    arms = point.scenario.arms
    shown = Arm.EDGESPEC if Arm.EDGESPEC in arms else arms[-1]
    if job.arm is shown:
        return Task(name, job, point.trace)
    return Task(name, job, first_question(point.trace.parent, job.arm.value), first=True)


def _finish(point: Point, ask: Ask, limit_s: float) -> None:
    last = ask.first + point.seeds - 1
    found = widest(point.outcomes)
    which = f"seed {ask.first}" if point.seeds == 1 else f"seeds {ask.first} to {last}"
    if found is None and point.seeds > 1:
        point.said = (f"Some speed-ups are missing: an arm has no complete request in {which}.",)
        return
    if found is None:
        sure = f"Speed-ups are of {which} alone, so nobody knows how sure they are"
        point.said = (f"{sure}; --seeds N or --max-seconds S plays more.",)
        return
    if found == 0.0:
        return
    sure = f"Speed-ups are ratios of mean TPOTs over {which}, with 95 % intervals (delta method)"
    if ask.count is not None or found <= ask.within:
        point.said = (f"{sure}, the widest of them +/- {found:.1%}.",)
        return
    why = f"{MOST_SEEDS} seeds" if point.seeds >= MOST_SEEDS else f"{limit_s:.0f} s of time"
    point.said = (
        f"{sure}. The widest is +/- {found:.1%} and not +/- {ask.within:.0%},"
        f" as {why} were the limit.",
    )
