"""Plays jobs of scenarios on several cores, with progress, and stops cleanly.

A worker tells how far its job is through a queue; the main process only waits and draws. Ctrl-C and
SIGTERM end the workers at once: what was complete by then is kept by whoever asked.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from edgespec.cli.running import Interrupted
from edgespec.telemetry.trace import TraceFile
from edgespec_sim.city.run import Job, play
from edgespec_sim.city.world import WorldOutcome

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Task:
    """A job, what to call it, and where its trace goes (None: nowhere)."""

    name: str
    job: Job
    trace: Path | None = None


def default_processes() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def play_all(
    tasks: Sequence[Task], processes: int, *, quiet: bool = False
) -> Iterator[tuple[int, WorldOutcome]]:
    """Index of a task and its outcome, as they come. Raises what ``play`` raises, and
    ``Interrupted``."""
    with _progress(quiet) as bar, _interruptible():
        total_s = sum(task.job.scenario.duration_s for task in tasks)
        overall = bar.add_task("simulated", total=total_s)
        if processes == 1 or len(tasks) == 1:
            yield from _play_here(tasks, bar, overall)
        else:
            yield from _play_there(tasks, min(processes, len(tasks)), bar, overall)


def _play_here(
    tasks: Sequence[Task], bar: Progress, overall: object
) -> Iterator[tuple[int, WorldOutcome]]:
    before_s = 0.0
    for index, task in enumerate(tasks):
        bar.update(overall, description=task.name)  # type: ignore[arg-type] # its own id

        def told(now_s: float, before_s: float = before_s) -> None:
            bar.update(overall, completed=before_s + now_s)  # type: ignore[arg-type]

        yield index, _played(task, told)
        before_s += task.job.scenario.duration_s


def _play_there(
    tasks: Sequence[Task], processes: int, bar: Progress, overall: object
) -> Iterator[tuple[int, WorldOutcome]]:
    context = multiprocessing.get_context("spawn")
    told: Queue[tuple[int, float]] = context.Queue()
    done_s = [0.0] * len(tasks)
    with context.Pool(processes, _start_worker, (told,)) as pool:
        results = pool.imap_unordered(_work, list(enumerate(tasks)))
        left = len(tasks)
        while left:
            try:
                index, outcome = results.next(timeout=_POLL_S)
            except multiprocessing.TimeoutError:
                pass
            else:
                left -= 1
                done_s[index] = tasks[index].job.scenario.duration_s
                yield index, outcome
            _drain(told, done_s)
            bar.update(overall, completed=sum(done_s))  # type: ignore[arg-type]


def _drain(told: Queue[tuple[int, float]], done_s: list[float]) -> None:
    while True:
        try:
            index, now_s = told.get_nowait()
        except queue.Empty:
            return
        done_s[index] = max(done_s[index], now_s)


def _played(task: Task, told: object) -> WorldOutcome:
    assert callable(told)
    if task.trace is None:
        return play(task.job, None, told)
    with TraceFile(task.trace) as tracer:
        return play(task.job, tracer, told)


# --- in a worker ----------------------------------------------------------------------------

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


# --- around it ------------------------------------------------------------------------------


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
