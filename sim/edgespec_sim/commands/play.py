"""Plays scenarios on several cores, seed after seed, with progress. ``run``, ``sweep`` and the
plans share it.

Points (one scenario each) are played in rounds: one seed, then ``replication.MIN_SEEDS`` seeds,
then as many as the spread of the results requires, all points side by side. The number of seeds
depends on the results and not on the number of processes. Only if the time limit is reached does
the machine's speed matter, and then the summary mentions it. Progress is a bar on a terminal, and
an occasional line elsewhere. Ctrl-C and SIGTERM end the workers at once; the caller keeps what was
complete by then.
"""

from __future__ import annotations

import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from edgespec import __version__
from edgespec.bench.arms import Arm
from edgespec.cli.options import option
from edgespec.cli.running import Interrupted, say, signals_handled_by
from edgespec.config import ConfigError
from edgespec.core.device.events import Fail, Finish
from edgespec.telemetry.trace import TraceFile, Tracer
from edgespec_sim.commands.worker_pool import Finished, WorkerPool
from edgespec_sim.commands.worker_pool import Progress as TaskProgress
from edgespec_sim.replication import MAX_SEEDS, TARGET_HALF_WIDTH, count_seeds_needed
from edgespec_sim.report import tables
from edgespec_sim.report.page import first_generation_path, first_generation_paths
from edgespec_sim.run_summary import LOSSY, WARNING, RunSummary, Spread
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job, check, make_jobs, play, summarise, widest_half_width

SECONDS = 60.0
_SEED = option("Play this seed; equal seeds give equal results, bit for bit", min=0)
SeedOption = Annotated[int | None, _SEED]
_SEEDS = option(
    "Number of seeds, counted from --seed or 1; default: as many as the result needs",
    min=1,
    max=10_000,
)
SeedsOption = Annotated[int | None, _SEEDS]
TimeOption = Annotated[float, option("Seconds after which no further seed is started", min=1.0)]
_SET = option("Change a key, as links.wan.rtt_ms=80", "--set", metavar="KEY=VALUE")
SettingsOption = Annotated[list[str] | None, _SET]


@contextmanager
def named_as_typed(options: Mapping[str, str]) -> Iterator[None]:
    """Rewrite the errors raised in this block so that they name the option that the user typed.

    ``options`` maps the name under which the value is known inside, such as a key of a scenario, to
    the option. Every ``ValueError`` of the block becomes a ``ConfigError``."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        for name in sorted(options, key=len, reverse=True):
            known = rf"(?:command line: )?(?<![\w.-]){re.escape(name)} is\b"
            text = re.sub(known, f"{options[name]} is", text)
        raise ConfigError(text) from None


@dataclass(frozen=True, slots=True)
class SeedPlan:
    """The seeds to play: ``count`` of them from ``first`` on, or as many as needed if it is None.

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
    outcomes: list[tuple[Arm, WorldOutcome]] = field(default_factory=list)
    """Outcomes of all jobs, seed after seed."""
    seeds: int = 0
    notes: tuple[str, ...] = ()
    """Remarks on the seeds that a reader of the summary needs."""


def play_seeds(
    points: Sequence[ScenarioPoint],
    seed_plan: SeedPlan,
    processes: int,
    on_done: Callable[[ScenarioPoint], None] = lambda point: None,
    *,
    quiet: bool = False,
) -> None:
    """Play the seeds of every point. ``on_done`` is called with each point that has all its
    seeds."""
    began_s = time.monotonic()
    limit_s = seed_plan.seconds * len(points)
    remaining = list(points)
    played = 0
    with Workers(processes, quiet=quiet) as workers:
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
            for job in make_jobs(point.scenario, seed, point.folder):
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
    scenario: Scenario, seed_plan: SeedPlan, folder: Path, processes: int, trace: Path | None
) -> RunSummary:
    """Play all arms of a scenario on the seeds that ``seed_plan`` describes. ``trace`` gets the
    trace of the first devices of one arm."""
    check(scenario, folder)
    if trace is not None:
        # Traces of an earlier run with other arms would be taken for ours.
        for old in first_generation_paths(trace.parent).values():
            old.unlink()
        first_generation_path(trace.parent, "").parent.mkdir(parents=True, exist_ok=True)
    point = ScenarioPoint(scenario.name, scenario, folder, trace)
    play_seeds([point], seed_plan, processes)
    return summary_of(point, seed_plan)


def summary_of(point: ScenarioPoint, seed_plan: SeedPlan) -> RunSummary:
    seeds = range(seed_plan.first, seed_plan.first + point.seeds)
    summary = summarise(
        point.scenario, seeds, point.folder, point.outcomes, environment(), point.notes
    )
    return replace(summary, settings={**summary.settings, "ask": asdict(seed_plan)})


def environment() -> dict[str, str]:
    return {
        "edgespec": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


_SHOWN: Final = (
    *("TTFT p50 ms", "TPOT mean ms", "p95 ms", "speed-up", "tokens / pass", "acceptance"),
    *("wasted / token", "tokens/s", "GPU busy", "differ"),
)
"""The columns of a report page that a terminal shows."""


def arms_table(summary: RunSummary) -> Table:
    columns = tables.arm_columns(summary)
    table = Table(
        title=f"{summary.marked_name}, {tables.seeds_played(summary)}: {summary.tokens_from}",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("\narm", no_wrap=True)
    for name in (*_SHOWN, "requests"):
        table.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True)
    table.caption = (
        "speed-up: ratio of mean TPOTs, in brackets its 95 % interval; acceptance: share of"
        " positions at which the draft's first candidate was right; differ: tokens that are not"
        " the target's"
    )
    for arm in summary.arms:
        failed = f" ({arm.all.failed} failed)" if arm.all.failed else ""
        ended = tables.count(arm.all.requests) + failed
        cells = [columns[name](arm).replace(" (", "\n(") for name in _SHOWN]
        table.add_row(arm.name, *cells, ended)
    return table


def service_table(summary: RunSummary) -> Table | None:
    """Compare the arms with their objectives. None if neither objectives nor arrivals are given."""
    judged = [(arm, arm.attainment) for arm in summary.arms if arm.attainment is not None]
    if not judged:
        return None
    first = judged[0][1]
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in (
        "\narm",
        "TTFT ms\np50",
        f"p95 (95 %)\n{_show_objective(first.slo_ttft_s)}",
        "TPOT ms\np50",
        f"p95 (95 %)\n{_show_objective(first.slo_tpot_s)}",
        "attained\n(95 %)",
        "goodput\nrequests/s",
        "\nasked",
        "un-\nfinished",
    ):
        table.add_column(name, justify="left" if name == "\narm" else "right", no_wrap=True)
    table.caption = (
        "attained: share of the requests that ended and met every objective; goodput: such"
        " requests per second; TTFT is counted from arrival"
    )
    for arm, attained in judged:
        low, high = attained.share_interval
        table.add_row(
            arm.name,
            tables.quantile_ms(arm.all.ttft_s, 0.5),
            _show_p95(arm.all.ttft_s, attained.ttft_p95_interval),
            tables.quantile_ms(arm.all.tpot_s, 0.5),
            _show_p95(arm.all.tpot_s, attained.tpot_p95_interval),
            f"{100 * attained.share:.1f} % ({100 * low:.0f}–{100 * high:.0f})",
            f"{attained.goodput:.2f}",
            str(attained.asked),
            str(arm.all.unfinished),
        )
    return table


def _show_objective(slo_s: float | None) -> str:
    return "no objective" if slo_s is None else f"objective {1e3 * slo_s:g}"


def _show_p95(spread: Spread | None, ends: tuple[float, float] | None) -> str:
    if spread is None or ends is None:
        return "–"
    return f"{1e3 * spread.p95:.1f} ({1e3 * ends[0]:.1f}–{1e3 * ends[1]:.1f})"


def make_console() -> Console:
    """Return the console for tables: as wide as the terminal, or wide enough without one."""
    return Console(width=None if sys.stdout.isatty() else 120)


def show(summary: RunSummary) -> None:
    make_console().print(arms_table(summary))
    service = service_table(summary)
    if service is not None:
        make_console().print(service)
    drafts = tables.drafts_rows(summary)
    if drafts:
        table = Table(*tables.DRAFTS_HEADER, box=box.SIMPLE, padding=(0, 1, 0, 0))
        for row in drafts:
            table.add_row(*row)
        make_console().print(table)
    for index, note in enumerate(summary.notes):
        is_memory = note.startswith("Memory: ") and "memory has room" in note
        if note.startswith((LOSSY, WARNING)) or is_memory or (index == 0 and "peed-ups" in note):
            say(note)


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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Plays tasks, round after round, on the same processes and under one progress bar.

    Enter it once, as a context manager; leaving it ends the processes at once. Without a terminal
    it prints a line for each round, and one with the progress every 10 s."""

    def __init__(
        self, processes: int, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._processes, self._clock = processes, clock
        self._bar = _make_progress(quiet)
        self._lines_every_s = 10.0 if self._bar.disable and not quiet else math.inf
        self._line_at = math.inf
        self._doing, self._until_s = "", math.inf
        self._exit_stack = ExitStack()
        self._pool: WorkerPool[Task, WorldOutcome] = WorkerPool(processes, _play_task)
        self._total_s = self._done_s = 0.0

    def __enter__(self) -> Workers:
        self._exit_stack.enter_context(self._bar)
        self._exit_stack.enter_context(signals_handled_by(_raise_interrupted))
        self._overall = self._bar.add_task("simulated", total=0.0)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._pool.terminate()
        finally:
            self._exit_stack.close()

    def play(
        self, tasks: Sequence[Task], doing: str = "", until_s: float = math.inf
    ) -> Iterator[tuple[int, WorldOutcome]]:
        """Play ``tasks``, and yield the index and the outcome of each as it completes.

        ``doing`` is the label of the progress bar. Raises what ``world.run.play`` raises,
        ``Interrupted``, ``ChildProcessError`` if a process died, and ``TimeoutError`` once the
        clock has reached ``until_s``; tasks that were incomplete by then are lost."""
        self._doing, self._until_s = doing or "simulated", until_s
        self._total_s += sum(task.job.scenario.duration_s for task in tasks)
        self._bar.update(self._overall, total=self._total_s, description=self._doing)
        if self._lines_every_s < math.inf:
            self._print_progress(self._done_s)
        if self._processes == 1 or (len(tasks) == 1 and not self._pool.is_running):
            for index, task in enumerate(tasks):
                self._bar.update(self._overall, description=doing or task.name)
                yield (
                    index,
                    _play_task(task, lambda now_s: self._show_completed(self._done_s + now_s)),
                )
                self._done_s += task.job.scenario.duration_s
        else:
            yield from self._play_on_processes(tasks)

    def _show_completed(self, virtual_s: float) -> None:
        """Show the progress of all tasks together. Raises ``TimeoutError``."""
        self._bar.update(self._overall, completed=virtual_s)
        now = self._clock()
        if now >= self._line_at:
            self._print_progress(virtual_s)
        if now >= self._until_s:
            self._pool.terminate()
            raise TimeoutError(f"the time is up: {self._doing}")

    def _print_progress(self, virtual_s: float) -> None:
        self._line_at = self._clock() + self._lines_every_s
        say(f"{self._doing}: {virtual_s:.0f} of {self._total_s:.0f} virtual s")

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
            elif isinstance(event, TaskProgress):
                done_s[event.index] = event.done
            if remaining:  # A complete round is kept, even after the deadline.
                self._show_completed(self._done_s + sum(done_s))
        self._done_s += sum(task.job.scenario.duration_s for task in tasks)


def _play_task(task: Task, report: Callable[[float], None]) -> WorldOutcome:
    if task.trace is None:
        return play(task.job, None, report)
    with TraceFile(task.trace) as tracer:
        return play(task.job, FirstGenerationTracer(tracer) if task.first else tracer, report)


def _make_progress(quiet: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} virtual s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )


def _raise_interrupted(number: int, frame: FrameType | None) -> None:
    """Unwind like Ctrl-C on a signal, so that the workers end with this process."""
    raise Interrupted(number)
