"""Runs blocking work for an event loop in threads: one small pool for each kind of work.

asyncio has one executor for everything, so slow work of one kind (grammars, say) would hold up all
other kinds. A ``WorkerPool`` has a bounded number of threads, a bounded queue and a deadline.
Clients take turns in the queue. A thread whose work outlives the deadline stays busy until that
work ends, which costs this pool a thread and no other pool anything. The threads are daemons: work
that never ends does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SHARE: Final = 0.75
"""Share of the queue that one client may fill, so that it cannot crowd out all others."""
_busy_threads = 0
_count_lock = threading.Lock()


class PoolBusyError(RuntimeError):
    """The queue is full, one client has filled its share of it, or the pool was closed."""


class PoolLateError(RuntimeError):
    """The work was not done by the deadline of its pool."""


@dataclass(slots=True, eq=False)
class _Work:
    client: str
    call: Callable[[], Any]
    done: Future[Any]


class WorkerPool:
    """Threads for one kind of blocking work. They start when they are needed.

    Args:
        name: Name of the work, for errors and for the names of threads.
        threads: Most calls that run at the same time.
        max_waiting: Most calls that wait for a thread.
        timeout_s: Limit in seconds for one call, including its time in the queue.
    """

    def __init__(self, name: str, *, threads: int, max_waiting: int, timeout_s: float) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._max_threads, self._max_waiting = threads, max_waiting
        self._changed = threading.Condition()
        self._queues: dict[str, deque[_Work]] = {}
        """Waiting calls, by client. The client whose turn is next stands first."""
        self._waiting = self._threads = self._busy = 0
        self._closed = False

    @property
    def busy(self) -> int:
        """Calls that run now, including calls past their deadline."""
        return self._busy

    async def run(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return ``function(*args, **kwargs)``, called in a thread. Raises as ``run_for``."""
        return await self.run_for("", function, *args, **kwargs)

    async def run_for(
        self, client: str, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Return ``function(*args, **kwargs)``, called in a thread in the turn of ``client``.

        A cancelled caller takes its work out of the queue; work that has begun goes on unwatched.
        Raises ``PoolBusyError``, ``PoolLateError`` and what the function raises. A function that
        raises no ``Exception`` (a library's panic, an exit) becomes a ``RuntimeError``."""
        context = contextvars.copy_context()
        done = self._submit(client, partial(context.run, partial(function, *args, **kwargs)))
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                result: _T = await asyncio.wrap_future(done)
                return result
        except TimeoutError:
            if not limit.expired():
                raise  # The function itself raised this error.
            why = f"{self.name} took longer than its limit of {self.timeout_s:g} s"
            raise PoolLateError(why) from None

    def close(self) -> None:
        """Refuse new work and drop the queue. The threads end after their current work."""
        with self._changed:
            self._closed = True
            waiting = [work for queue in self._queues.values() for work in queue]
            self._changed.notify_all()
        for work in waiting:
            work.done.cancel()

    def _submit(self, client: str, call: Callable[[], Any]) -> Future[Any]:
        work = _Work(client, call, Future())
        with self._changed:
            if self._closed:
                raise PoolBusyError(f"{self.name}: this side is stopping")
            is_idle = self._busy + self._waiting < self._max_threads
            own = len(self._queues.get(client, ()))
            share = max(1, int(_SHARE * self._max_waiting)) if client else self._max_waiting
            if not is_idle and (self._waiting >= self._max_waiting or own >= share):
                whose = f"{own} of this client's, limit {share}" if own >= share else "a full queue"
                raise PoolBusyError(f"{self.name}: {self._waiting} wait already ({whose})")
            self._queues.setdefault(client, deque()).append(work)
            self._waiting += 1
            if self._threads < min(self._max_threads, self._busy + self._waiting):
                self._threads += 1
                name = f"edgespec-{self.name.replace(' ', '-')}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()
            self._changed.notify()
        work.done.add_done_callback(partial(self._drop, work))
        return work.done

    def _drop(self, work: _Work, done: Future[Any]) -> None:
        """Take work out of the queue because its caller was cancelled."""
        with self._changed:
            queue = self._queues.get(work.client)
            if queue is not None and work in queue:
                queue.remove(work)
                self._waiting -= 1
                if not queue:
                    del self._queues[work.client]

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            if work.done.set_running_or_notify_cancel():
                try:
                    work.done.set_result(work.call())
                except Exception as error:
                    work.done.set_exception(error)
                except BaseException as error:
                    why = f"{self.name} failed: {type(error).__name__}"
                    work.done.set_exception(RuntimeError(why))
            del work  # Releases its objects before the thread waits for the next work.
            _count_busy(-1)
            with self._changed:
                self._busy -= 1

    def _next(self) -> _Work | None:
        """Wait for work and return the next one. None ends the thread."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    self._threads -= 1
                    return None
                self._changed.wait()
            client = next(iter(self._queues))
            queue = self._queues.pop(client)
            work = queue.popleft()
            if queue:
                self._queues[client] = queue  # The client moves behind all others.
            self._waiting -= 1
            self._busy += 1
        _count_busy(1)
        return work


def _count_busy(step: int) -> None:
    global _busy_threads
    with _count_lock:
        _busy_threads += step


def exit_despite_stuck_work(code: int = 0) -> None:
    """End the process with ``code`` if a pool's thread is still at work; otherwise do nothing.

    The interpreter's own ending would let such a thread run into a half dismantled interpreter,
    which foreign libraries answer with an abort. Call this after everything else is finished."""
    with _count_lock:
        is_stuck = _busy_threads > 0
    if is_stuck:
        os._exit(code)
