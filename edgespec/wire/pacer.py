"""Waiting until a moment, exactly enough to imitate a link.

The event loop's own timers sleep in whole milliseconds (epoll): 0.7 to 0.8 ms late, the median of
300 on a busy two-core machine. There a thread that sleeps on a condition and hands over to the loop
is 0.2 ms late, and a whole shaped gRPC direction 0.45 ms, the hops between tasks included.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from typing import Final, Protocol

_MAX_WAITERS: Final = 1 << 16


class Pacer(Protocol):
    """A clock one can wait on."""

    def now(self) -> float:
        """Seconds on a monotonic clock of arbitrary origin."""

    async def wait_until(self, when_s: float) -> None:
        """Return at ``when_s`` or as soon after it as can be; at once when it is past."""

    def close(self) -> None:
        """Release what it holds; nobody may wait any more."""


class ThreadPacer:
    """One thread, started by the first wait, ended by ``close``."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiters: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def now(self) -> float:
        return time.monotonic()

    async def wait_until(self, when_s: float) -> None:
        if when_s <= time.monotonic():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._condition:
            if self._closed:
                raise RuntimeError("the pacer is closed")
            if len(self._waiters) >= _MAX_WAITERS:
                raise RuntimeError(f"{len(self._waiters)} wait, the limit is {_MAX_WAITERS}")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pacer", daemon=True)
                self._thread.start()
            heapq.heappush(self._waiters, (when_s, next(self._numbers), future))
            if self._waiters[0][2] is future:
                self._condition.notify()
        await future

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with self._condition:
            while not self._closed:
                if not self._waiters:
                    self._condition.wait()
                    continue
                ahead_s = self._waiters[0][0] - time.monotonic()
                if ahead_s > 0.0:
                    self._condition.wait(ahead_s)
                    continue
                _wake(heapq.heappop(self._waiters)[2])


def _wake(future: asyncio.Future[None]) -> None:
    try:
        future.get_loop().call_soon_threadsafe(_set, future)
    except RuntimeError:
        return  # its loop has been closed: nobody waits


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
