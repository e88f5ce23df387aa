"""Plays jobs of scenarios on several cores, with progress, and stops cleanly.

Progress is a bar on a terminal, and elsewhere, where it is wished for, a line now and then. A
worker tells how far its job is through a queue; the main process only waits and draws. Ctrl-C and
SIGTERM end the workers at once: what was complete by then is kept by whoever asked.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.pool import Pool
from multiprocessing.queues import Queue
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from edgespec.cli.running import Interrupted, say
from edgespec.core.device.events import Fail, Finish
from edgespec.telemetry.trace import TraceFile, Tracer
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job, play

# --- a trace of the first question of the first device, to draw arms beside each other ---------


MOST_LINES: Final = 50_000


class FirstQuestion:
    """A ``Tracer`` that hands on what is said until the first session of a device has ended; of
    devices nothing but that session, and so many lines at most."""

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
    """A job, what to call it, and where its trace goes (None: nowhere); ``first``: that of its
    first question."""

    name: str
    job: Job
    trace: Path | None = None
    first: bool = False


def default_processes() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Plays tasks, round after round, on the same processes and under one bar of progress. To be
    entered once; leaving ends the processes, whatever they are at. ``lines_every_s``: where there
    is no terminal a line says so often how far it is, and one what each round does."""

    def __init__(
        self,
        processes: int,
        *,
        quiet: bool = False,
        lines_every_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes, self._clock = processes, clock
        self._bar = _progress(quiet)
        self._lines_every_s = lines_every_s if self._bar.disable and not quiet else math.inf
        self._line_at = math.inf
        self._doing, self._until_s = "", math.inf
        self._around = ExitStack()
        self._pool: Pool | None = None
        self._told: Queue[tuple[int, float]] | None = None
        self._total_s = self._done_s = 0.0
        self._workers: set[int | None] = set()

    def __enter__(self) -> Workers:
        self._around.enter_context(self._bar)
        self._around.enter_context(_interruptible())
        self._overall = self._bar.add_task("simulated", total=0.0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._around.close()

    def _end(self) -> None:
        """Whatever the processes are at."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._pool = self._told = None

    def play(
        self, tasks: Sequence[Task], doing: str = "", until_s: float = math.inf
    ) -> Iterator[tuple[int, WorldOutcome]]:
        """Index of a task and its outcome, as they come. ``doing`` stands before the bar. Raises
        what ``city.run.play`` raises, ``Interrupted``, and ``TimeoutError`` when the clock says
        ``until_s``: then what was not complete is lost."""
        self._doing, self._until_s = doing or "simulated", until_s
        self._total_s += sum(task.job.scenario.duration_s for task in tasks)
        self._bar.update(self._overall, total=self._total_s, description=self._doing)
        if self._lines_every_s < math.inf:
            self._say(self._done_s)
        if self._processes == 1 or (len(tasks) == 1 and self._pool is None):
            yield from self._play_here(tasks, doing)
        else:
            yield from self._play_there(tasks)

    def _play_here(self, tasks: Sequence[Task], doing: str) -> Iterator[tuple[int, WorldOutcome]]:
        for index, task in enumerate(tasks):
            self._bar.update(self._overall, description=doing or task.name)
            yield index, _played(task, self._tell)
            self._done_s += task.job.scenario.duration_s

    def _tell(self, now_s: float) -> None:
        self._completed(self._done_s + now_s)

    def _completed(self, virtual_s: float) -> None:
        """So far. Raises ``TimeoutError``."""
        self._bar.update(self._overall, completed=virtual_s)
        now = self._clock()
        if now >= self._line_at:
            self._say(virtual_s)
        if now >= self._until_s:
            self._end()
            raise TimeoutError(f"the time is up: {self._doing}")

    def _say(self, virtual_s: float) -> None:
        self._line_at = self._clock() + self._lines_every_s
        say(f"{self._doing}: {virtual_s:.0f} of {self._total_s:.0f} virtual s")

    def _play_there(self, tasks: Sequence[Task]) -> Iterator[tuple[int, WorldOutcome]]:
        pool, told = self._started()
        done_s = [0.0] * len(tasks)
        results = pool.imap_unordered(_work, list(enumerate(tasks)))
        left = len(tasks)
        while left:
            self._completed(self._done_s + sum(done_s))
            try:
                index, outcome = results.next(timeout=_POLL_S)
            except multiprocessing.TimeoutError:
                self._check_children()
            else:
                left -= 1
                done_s[index] = tasks[index].job.scenario.duration_s
                yield index, outcome
            _drain(told, done_s)
        _drain(told, done_s)
        self._done_s += sum(task.job.scenario.duration_s for task in tasks)

    def _check_children(self) -> None:
        """A process that was killed (memory) takes its task with it, and nobody would wait less."""
        if not self._workers <= _children():
            raise ChildProcessError(
                "a process that played worlds was killed, for want of memory perhaps;"
                " --processes 1 needs least"
            )

    def _started(self) -> tuple[Pool, Queue[tuple[int, float]]]:
        if self._pool is None or self._told is None:
            context = multiprocessing.get_context("spawn")
            self._told = context.Queue()
            before = _children()
            self._pool = context.Pool(self._processes, _start_worker, (self._told,))
            self._workers = _children() - before
        return self._pool, self._told


def play_all(
    tasks: Sequence[Task], processes: int, *, quiet: bool = False
) -> Iterator[tuple[int, WorldOutcome]]:
    """One round of ``Workers``."""
    with Workers(min(processes, len(tasks)), quiet=quiet) as workers:
        yield from workers.play(tasks)


def _children() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


def _drain(told: Queue[tuple[int, float]], done_s: list[float]) -> None:
    while True:
        try:
            index, now_s = told.get_nowait()
        except queue.Empty:
            return
        done_s[index] = max(done_s[index], now_s)


def _played(task: Task, told: Callable[[float], None]) -> WorldOutcome:
    if task.trace is None:
        return play(task.job, None, told)
    with TraceFile(task.trace) as tracer:
        return play(task.job, FirstQuestion(tracer) if task.first else tracer, told)


_told: Queue[tuple[int, float]] | None = None


def _start_worker(told: Queue[tuple[int, float]]) -> None:
    global _told
    _told = told
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides


def _work(numbered: tuple[int, Task]) -> tuple[int, WorldOutcome]:
    index, task = numbered
    told = _told
    assert told is not None
    return index, _played(task, lambda now_s: told.put((index, now_s)))


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


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that the workers are ended with us."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
