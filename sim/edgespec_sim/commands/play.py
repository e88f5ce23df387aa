"""Plays scenarios on several cores, seed after seed, with progress. ``run``, ``sweep`` and the
plans share it.

Points (one scenario each) are played in rounds: one seed, then ``replication.FIRST`` seeds, then as
many as the spread of the results requires, all points side by side. The number of seeds depends on
the results and not on the number of processes. Only if the time limit is reached does the machine's
speed matter, and then the summary mentions it. Progress is a bar on a terminal, and an occasional
line elsewhere. Ctrl-C and SIGTERM end the workers at once; the caller keeps what was complete by
then.
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
from edgespec.cli.running import Interrupted, answered_by, say
from edgespec.config import ConfigError
from edgespec.core.device.events import Fail, Finish
from edgespec.telemetry.trace import TraceFile, Tracer
from edgespec_sim.commands.worker_pool import Finished, WorkerPool
from edgespec_sim.commands.worker_pool import Progress as TaskProgress
from edgespec_sim.replication import MOST_SEEDS, WITHIN, seeds_wanted
from edgespec_sim.report import tables
from edgespec_sim.report.page import first_question, first_questions
from edgespec_sim.run_summary import LOSSY, WARNING, RunSummary, Spread
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job, check, jobs_of, play, summarise, widest

SECONDS = 60.0
_SEED = option("Play this seed; equal seeds give equal results, bit for bit", min=0)
SeedOption = Annotated[int | None, _SEED]
_SEEDS = option("Number of seeds, from 1 or --seed on; default: as needed", min=1, max=10_000)
SeedsOption = Annotated[int | None, _SEEDS]
TimeOption = Annotated[float, option("Start no further seed after this time", min=1.0)]
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
class Ask:
    """The seeds to play: ``count`` of them from ``first`` on, or as many as needed if it is None.

    ``within`` is the half-width that the speed-ups' intervals should reach, ``seconds`` the time
    limit of each point."""

    first: int
    count: int | None
    within: float = WITHIN
    seconds: float = SECONDS

    @classmethod
    def of(cls, seed: int | None, seeds: int | None, seconds: float) -> Ask:
        count = 1 if seed is not None and seeds is None else seeds
        return cls(1 if seed is None else seed, count, seconds=seconds)


@dataclass(slots=True, eq=False)
class Point:
    """One scenario and the outcomes of its seeds so far. The first seed's trace is written to
    ``trace``."""

    name: str
    scenario: Scenario
    folder: Path
    trace: Path | None = None
    outcomes: list[tuple[Arm, WorldOutcome]] = field(default_factory=list)
    """Outcomes of all jobs, seed after seed."""
    seeds: int = 0
    said: tuple[str, ...] = ()
    """Remarks on the seeds that a reader of the summary needs."""


def play_seeds(
    points: Sequence[Point],
    ask: Ask,
    processes: int,
    on_done: Callable[[Point], None] = lambda point: None,
    *,
    quiet: bool = False,
) -> None:
    """Play the seeds of every point. ``on_done`` is called with each point that has all its
    seeds."""
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
    """Return how many seeds to play next. The first seed is played alone, to measure its
    duration."""
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
    seeds = point.seeds + more
    return "" if seeds == 1 else f"{point.name}: {seeds} seeds"


def _task(point: Point, job: Job, ask: Ask) -> Task:
    """Make the task of one job. Only the first seed's first shard writes traces: the whole trace
    for edgespec's arm (or the last arm, if edgespec's is missing), the first generation only for
    the other arms."""
    name = f"{point.name}: {job.arm.value}"
    if point.trace is None or job.shard or job.seed != ask.first:
        return Task(name, job)
    arms = point.scenario.arms
    shown = next((arm for arm in (Arm.BOTH, Arm.EDGESPEC) if arm in arms), arms[-1])
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
        sure = f"Speed-ups come from {which} alone, so their certainty is unknown"
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


def simulate(
    scenario: Scenario, ask: Ask, folder: Path, processes: int, trace: Path | None
) -> RunSummary:
    """Play all arms of a scenario on the seeds that ``ask`` describes. ``trace`` gets the trace of
    the first devices of one arm."""
    check(scenario, folder)
    if trace is not None:
        # Traces of an earlier run with other arms would be taken for ours.
        for old in first_questions(trace.parent).values():
            old.unlink()
        first_question(trace.parent, "").parent.mkdir(parents=True, exist_ok=True)
    point = Point(scenario.name, scenario, folder, trace)
    play_seeds([point], ask, processes)
    return summary_of(point, ask)


def summary_of(point: Point, ask: Ask) -> RunSummary:
    seeds = range(ask.first, ask.first + point.seeds)
    summary = summarise(
        point.scenario, seeds, point.folder, point.outcomes, environment(), point.said
    )
    return replace(summary, settings={**summary.settings, "ask": asdict(ask)})


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
        f"p95 (95 %)\n{_objective(first.slo_ttft_s)}",
        "TPOT ms\np50",
        f"p95 (95 %)\n{_objective(first.slo_tpot_s)}",
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
    for arm, found in judged:
        low, high = found.share_interval
        table.add_row(
            arm.name,
            tables.quantile_ms(arm.all.ttft_s, 0.5),
            _p95(arm.all.ttft_s, found.ttft_p95_interval),
            tables.quantile_ms(arm.all.tpot_s, 0.5),
            _p95(arm.all.tpot_s, found.tpot_p95_interval),
            f"{100 * found.share:.1f} % ({100 * low:.0f}–{100 * high:.0f})",
            f"{found.goodput:.2f}",
            str(found.asked),
            str(arm.all.unfinished),
        )
    return table


def _objective(slo_s: float | None) -> str:
    return "no objective" if slo_s is None else f"objective {1e3 * slo_s:g}"


def _p95(spread: Spread | None, ends: tuple[float, float] | None) -> str:
    if spread is None or ends is None:
        return "–"
    return f"{1e3 * spread.p95:.1f} ({1e3 * ends[0]:.1f}–{1e3 * ends[1]:.1f})"


def output() -> Console:
    """Return the console for tables: as wide as the terminal, or wide enough without one."""
    return Console(width=None if sys.stdout.isatty() else 120)


def show(summary: RunSummary) -> None:
    output().print(arms_table(summary))
    service = service_table(summary)
    if service is not None:
        output().print(service)
    drafts = tables.drafts_rows(summary)
    if drafts:
        table = Table(*tables.DRAFTS_HEADER, box=box.SIMPLE, padding=(0, 1, 0, 0))
        for row in drafts:
            table.add_row(*row)
        output().print(table)
    for index, note in enumerate(summary.notes):
        is_memory = note.startswith("Memory: ") and "memory has room" in note
        if note.startswith((LOSSY, WARNING)) or is_memory or (index == 0 and "peed-ups" in note):
            say(note)


# --- worlds on several processes, and a trace of the first device's first generation ------------

MOST_LINES: Final = 50_000


class FirstQuestion:
    """A ``Tracer`` that passes records on until the first session of a device has ended. Of the
    device side it records only that session, and at most ``MOST_LINES`` records in all."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._session: str | None = None
        self._left = MOST_LINES

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        if self._left <= 0:
            return
        if side == "device":
            self._session = self._session or session
            if session != self._session:
                return
        self._left -= 1
        self._tracer.record(at_s, side, session, kind, item)
        if side == "device" and isinstance(item, Finish | Fail):
            self._left = 0


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
        self._bar = _progress(quiet)
        self._lines_every_s = 10.0 if self._bar.disable and not quiet else math.inf
        self._line_at = math.inf
        self._doing, self._until_s = "", math.inf
        self._around = ExitStack()
        self._pool: WorkerPool[Task, WorldOutcome] = WorkerPool(processes, _played)
        self._total_s = self._done_s = 0.0

    def __enter__(self) -> Workers:
        self._around.enter_context(self._bar)
        self._around.enter_context(answered_by(_stop))
        self._overall = self._bar.add_task("simulated", total=0.0)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._pool.terminate()
        finally:
            self._around.close()

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
            self._say(self._done_s)
        if self._processes == 1 or (len(tasks) == 1 and not self._pool.is_running):
            for index, task in enumerate(tasks):
                self._bar.update(self._overall, description=doing or task.name)
                yield index, _played(task, lambda now_s: self._completed(self._done_s + now_s))
                self._done_s += task.job.scenario.duration_s
        else:
            yield from self._play_there(tasks)

    def _completed(self, virtual_s: float) -> None:
        """Show the progress of all tasks together. Raises ``TimeoutError``."""
        self._bar.update(self._overall, completed=virtual_s)
        now = self._clock()
        if now >= self._line_at:
            self._say(virtual_s)
        if now >= self._until_s:
            self._pool.terminate()
            raise TimeoutError(f"the time is up: {self._doing}")

    def _say(self, virtual_s: float) -> None:
        self._line_at = self._clock() + self._lines_every_s
        say(f"{self._doing}: {virtual_s:.0f} of {self._total_s:.0f} virtual s")

    def _play_there(self, tasks: Sequence[Task]) -> Iterator[tuple[int, WorldOutcome]]:
        done_s = [0.0] * len(tasks)
        # Arms that draft take longest. They begin first, and the short worlds fill the end evenly.
        order = sorted(enumerate(tasks), key=lambda numbered: not numbered[1].job.arm.drafts)
        left = len(tasks)
        for event in self._pool.work_on(order, _POLL_S):
            if isinstance(event, Finished):
                left -= 1
                done_s[event.index] = tasks[event.index].job.scenario.duration_s
                yield event.index, event.outcome
            elif isinstance(event, TaskProgress):
                done_s[event.index] = event.done
            if left:  # A complete round is kept, even after the deadline.
                self._completed(self._done_s + sum(done_s))
        self._done_s += sum(task.job.scenario.duration_s for task in tasks)


def _played(task: Task, told: Callable[[float], None]) -> WorldOutcome:
    if task.trace is None:
        return play(task.job, None, told)
    with TraceFile(task.trace) as tracer:
        return play(task.job, FirstQuestion(tracer) if task.first else tracer, told)


def _progress(quiet: bool) -> Progress:
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


def _stop(number: int, frame: FrameType | None) -> None:
    """Unwind like Ctrl-C on a signal, so that the workers end with this process."""
    raise Interrupted(number)
