"""A pool of processes that work on tasks, for playing worlds on several cores.

Theory of operation. Each process has its own pipe to the main process. No queue, lock or thread is
shared between two of them, so a process that dies at any point blocks no other. The main process
sends a task only to an idle worker. Every task has a ticket that is never used again, and every
message carries the ticket of its task, so messages about an abandoned task are recognised and
dropped. A closed pipe means that the worker is dead, and ``work_on`` raises at once. A worker ends
by itself when the main process is gone, because its pipe then breaks.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any, Final, Generic, TypeVar

from edgespec.operating_system import hold_signals, leave_process_group

_Task = TypeVar("_Task")
_Outcome = TypeVar("_Outcome")
Report = Callable[[float], None]
"""Called with a task's progress, in a unit that the task chooses."""

_TERMINATE_TIMEOUT_S: Final = 2.0
"""Seconds that a worker has to end after SIGTERM, before it is killed. A worker has no handler for
SIGTERM and holds nothing that another process waits for, so only a stopped machine needs them."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A report of a task's progress: ``done``, in the task's own unit."""

    index: int
    done: float


@dataclass(frozen=True, slots=True)
class Finished(Generic[_Outcome]):
    """A task is finished."""

    index: int
    outcome: _Outcome


@dataclass(frozen=True, slots=True)
class Quiet:
    """No worker has sent anything for ``poll_s`` seconds."""


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    ticket: int | None = None
    """Ticket of the task that the worker works on. None if it is idle."""


class WorkerPool(Generic[_Task, _Outcome]):
    """Processes that call ``work(task, report)``.

    ``work`` must be a function of a module, since the processes import it anew, and tasks and
    outcomes must be picklable. ``start`` starts the processes and ``terminate`` ends them, whatever
    they are doing; both may be called repeatedly."""

    def __init__(self, processes: int, work: Callable[[_Task, Report], _Outcome]) -> None:
        self._processes, self._work = processes, work
        self._workers: list[_Worker] = []
        self._next_ticket = 0

    @property
    def is_running(self) -> bool:
        return bool(self._workers)

    @property
    def process_ids(self) -> tuple[int | None, ...]:
        return tuple(worker.process.pid for worker in self._workers)

    def start(self) -> None:
        """Start the processes unless they are running already. Raises ``OSError``."""
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < self._processes:
            # A signal between the start of a process and its entry in the list would leave the
            # process behind, and one in its first milliseconds would end it with a traceback.
            with hold_signals(), _hide_main_module():
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, self._work), daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours))

    def work_on(
        self, tasks: Sequence[tuple[int, _Task]], poll_s: float
    ) -> Iterator[Progress | Finished[_Outcome] | Quiet]:
        """Work on ``tasks``, pairs of an index and a task, which begin in this order.

        Yields the reports of the workers, and ``Quiet`` after each ``poll_s`` seconds without a
        report. Ends when all tasks are finished. Raises what ``work`` raised for a task, and
        ``ChildProcessError`` if a worker has died. The caller may drop the generator before its
        end: the workers then finish their tasks and the results are ignored."""
        self.start()
        waiting = list(reversed(tasks))
        index_of: dict[int, int] = {}
        while waiting or index_of:
            for worker in self._workers:
                if worker.ticket is None and waiting:
                    index, task = waiting.pop()
                    worker.ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
                    index_of[worker.ticket] = index
                    try:
                        worker.pipe.send((worker.ticket, task))
                    except OSError:
                        raise _death_error(worker) from None
            ready = connection.wait([worker.pipe for worker in self._workers], poll_s)
            if not ready:
                yield Quiet()
            for worker in [one for one in self._workers if one.pipe in ready]:
                try:
                    ticket, kind, value = worker.pipe.recv()
                except (EOFError, OSError):
                    raise _death_error(worker) from None
                if kind != "progress":
                    worker.ticket = None
                if ticket not in index_of:
                    continue  # The task belongs to a round that was abandoned.
                if kind == "progress":
                    yield Progress(index_of[ticket], value)
                    continue
                index = index_of.pop(ticket)
                if kind == "failed":
                    raise value
                yield Finished(index, value)

    def terminate(self) -> None:
        """End the processes at once. A process that does not end on SIGTERM is killed."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.terminate()
            worker.pipe.close()
        for worker in workers:
            worker.process.join(_TERMINATE_TIMEOUT_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _death_error(worker: _Worker) -> ChildProcessError:
    worker.process.join(_TERMINATE_TIMEOUT_S)
    code = worker.process.exitcode
    why = f"exit status {code}"
    if code is not None and code < 0:
        with suppress(ValueError):
            why = signal.Signals(-code).name
        if why == "SIGKILL":
            why += ", perhaps for lack of memory"
    return ChildProcessError(f"a process that played worlds has died ({why})")


@contextmanager
def _hide_main_module() -> Iterator[None]:
    """Hide the program's main module until the end of the block.

    A process that is started meanwhile does not import it. So a script that plays worlds needs no
    ``if __name__ == "__main__"``: without it, each new process would begin the script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# --- what runs in a worker ----------------------------------------------------------------------


def _serve(pipe: Connection, work: Callable[[Any, Report], Any]) -> None:
    """Work on the tasks that come through ``pipe`` until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The main process handles Ctrl-C.
    # A signal to the process group, such as that of `timeout`, is handled by the main process.
    leave_process_group()
    with suppress(EOFError, OSError):  # The main process is gone, or has closed the pipe.
        while True:
            ticket, task = pipe.recv()
            try:
                outcome = work(task, partial(_report, pipe, ticket))
                reply = ForkingPickler.dumps((ticket, "finished", outcome))
            except _MainProcessGone:
                return
            except Exception as error:
                reply = ForkingPickler.dumps((ticket, "failed", _make_picklable(error)))
            pipe.send_bytes(reply)


class _MainProcessGone(BaseException):
    """The main process is gone, so ``work`` must end. This is no error of ``work``."""


def _report(pipe: Connection, ticket: int, done: float) -> None:
    """Send how far the task has come. Raises ``_MainProcessGone``."""
    try:
        pipe.send((ticket, "progress", done))
    except OSError:
        raise _MainProcessGone from None


def _make_picklable(error: Exception) -> Exception:
    """Return ``error``, or a ``RuntimeError`` with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
