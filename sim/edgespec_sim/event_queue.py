"""Virtual time: callbacks in order of (time, scheduling), so that equal seeds replay exactly."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class EventQueue:
    """``now`` moves only in ``run`` and ``step``; scheduling in the past is an error."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def at(self, time_s: float, callback: Callable[[], object]) -> None:
        if time_s < self.now:
            raise ValueError(f"cannot schedule at {time_s} s, it is {self.now} s already")
        heapq.heappush(self._heap, (time_s, next(self._order), callback))

    def after(self, delay_s: float, callback: Callable[[], object]) -> None:
        if delay_s < 0.0:
            raise ValueError(f"delay is {delay_s} s, but must be at least 0")
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), callback))

    def run(self, until_s: float) -> int:
        """Run everything due by ``until_s``; the number of events run."""
        heap, count = self._heap, 0
        while heap and heap[0][0] <= until_s:
            self.now, _, callback = heapq.heappop(heap)
            callback()
            count += 1
        return count

    def step(self, until_s: float) -> bool:
        """Run the next event due by ``until_s``; whether there was one."""
        if not self._heap or self._heap[0][0] > until_s:
            return False
        self.now, _, callback = heapq.heappop(self._heap)
        callback()
        return True
