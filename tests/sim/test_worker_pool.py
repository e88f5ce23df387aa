"""The processes that play worlds: late messages, deaths and signals.

Oracle: which tasks were given and which of them may be reported; every process of a pool holds the
other end of a pipe, which is therefore closed only when all of them have ended. Tasks wait at FIFOs
that the test opens, so nothing depends on the speed of the machine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec_sim.worker_pool import Finished, Progress, Quiet, Report, WorkerPool

ROOT = Path(__file__).parents[2]
Pool = WorkerPool[tuple[str, str], str]


class OddError(Exception):
    """An exception that pickle cannot rebuild from its arguments at the other end."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def work(task: tuple[str, str], report: Report) -> Any:
    what, argument = task
    match what:
        case "say":
            report(1.0)
            return argument
        case "gate":
            report(0.5)
            Path(argument).read_bytes()  # waits for the writer
            report(99.0)
            return argument
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fail":
            raise ValueError(argument)
        case "odd":
            raise OddError("a", "b")
        case "unpicklable":
            return lambda: None
        case "forever":
            while True:
                report(0.0)
    raise AssertionError(what)


def collect_outcomes(events: Iterator[Progress | Finished[str] | Quiet]) -> dict[int, str]:
    return {one.index: one.outcome for one in events if isinstance(one, Finished)}


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(2, work)
    try:
        yield made
    finally:
        made.terminate()
        assert multiprocessing.active_children() == []


def gate(folder: Path, name: str) -> Path:
    path = folder / name
    os.mkfifo(path)
    return path


def test_messages_of_an_earlier_round_are_dropped(pool: Pool, tmp_path: Path) -> None:
    """The first round ends while a worker is at its task 7. That worker reports 7 in the second
    round, which has no task 7."""
    first, second = gate(tmp_path, "first"), gate(tmp_path, "second")
    for event in pool.work_on([(0, ("say", "a")), (7, ("gate", str(first)))], 0.01):
        if isinstance(event, Progress) and event.index == 7:
            break
    first.write_bytes(b"go")  # The late messages are on their way.
    seen: list[int] = []
    outcomes: dict[int, str] = {}
    for event in pool.work_on([(0, ("gate", str(second))), (1, ("say", "b"))], 0.01):
        if isinstance(event, Quiet):
            continue
        seen.append(event.index)
        if isinstance(event, Finished):
            outcomes[event.index] = event.outcome
            if event.index == 1:
                second.write_bytes(b"go")
    assert set(seen) == {0, 1}
    assert outcomes == {0: str(second), 1: "b"}


@pytest.mark.parametrize("count", [1, 2, 9])
def test_every_task_is_worked_on_once(pool: Pool, count: int) -> None:
    for _ in range(2):
        tasks = [(10 * n, ("say", str(n))) for n in range(count)]
        assert collect_outcomes(pool.work_on(tasks, 0.01)) == {10 * n: str(n) for n in range(count)}


def test_a_process_that_dies_at_a_task_is_noticed(pool: Pool) -> None:
    with pytest.raises(ChildProcessError, match=r"has died .SIGKILL, perhaps for lack of memory"):
        collect_outcomes(
            pool.work_on([(0, ("say", "a")), (1, ("die", "")), (2, ("say", "b"))], 0.01)
        )


def test_a_process_that_dies_between_rounds_is_noticed(pool: Pool) -> None:
    collect_outcomes(pool.work_on([(0, ("say", "a"))], 0.01))
    process = next(
        one for one in multiprocessing.active_children() if one.pid == pool.process_ids[0]
    )
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with pytest.raises(ChildProcessError, match="SIGKILL"):
        collect_outcomes(pool.work_on([(0, ("say", "a")), (1, ("say", "a"))], 0.01))


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("fail", ValueError, "^why$"),
        ("odd", RuntimeError, "OddError: ab"),
        ("unpicklable", Exception, "pickle"),
    ],
)
def test_an_error_of_a_task_arrives_and_the_pool_goes_on(
    pool: Pool, what: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        collect_outcomes(pool.work_on([(0, (what, "why"))], 0.01))
    assert collect_outcomes(pool.work_on([(5, ("say", "on"))], 0.01)) == {5: "on"}


def test_it_ends_whatever_its_processes_are_at(pool: Pool, tmp_path: Path) -> None:
    closed = gate(tmp_path, "closed")
    for event in pool.work_on([(0, ("gate", str(closed))), (1, ("forever", ""))], 0.01):
        if isinstance(event, Progress) and event.index == 1:
            break
    pool.terminate()
    assert multiprocessing.active_children() == []
    assert collect_outcomes(pool.work_on([(0, ("say", "again"))], 0.01)) == {0: "again"}


MAIN = """
import sys
from edgespec.cli.running import reporting_errors
from edgespec_sim.commands import play
from edgespec_sim.worker_pool import Progress, WorkerPool
from tests.sim.test_worker_pool import work
with reporting_errors():
    with play.shown_workers(quiet=True) as workers:
        workers._pool = WorkerPool(2, work)
        begun = set()
        for event in workers._pool.work_on([(0, ("forever", "")), (1, ("forever", ""))], 0.01):
            if isinstance(event, Progress) and event.index not in begun:
                begun.add(event.index)
                if len(begun) == 2:
                    print("both at work", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_a_signal_ends_every_process_without_a_word(number: signal.Signals, status: int) -> None:
    """The workers hold the other end of stdout too, so it ends only when all have ended. A killed
    main process cannot end them: they notice that it is gone."""
    main = subprocess.Popen(
        [sys.executable, "-c", f"import typer\ntyper.run(lambda: exec({MAIN!r}))"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert main.stdout is not None
        assert main.stdout.readline() == "both at work\n"
        # A terminal's Ctrl-C and `timeout` signal the whole group; SIGKILL goes to the main
        # process.
        if number is signal.SIGKILL:
            main.kill()
        else:
            os.killpg(main.pid, number)
        out, error = main.communicate(timeout=120)
    finally:
        main.kill()
    assert (main.returncode, out) == (status, "")
    assert "Traceback" not in error
