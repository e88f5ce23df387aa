"""Virtual time: callbacks run in order of (time, scheduling), so equal seeds replay exactly."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class EventQueue:
    """``now`` advances only in ``run`` and ``step``. Scheduling in the past is an error."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def at(self, time_s: float, callback: Callable[[], object]) -> None:
        assert time_s >= self.now, f"cannot schedule at {time_s} s, it is {self.now} s already"
        heapq.heappush(self._heap, (time_s, next(self._order), callback))

    def after(self, delay_s: float, callback: Callable[[], object]) -> None:
        assert delay_s >= 0.0, f"cannot schedule {delay_s} s from now"
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), callback))

    def run(self, until_s: float) -> None:
        """Run everything due by ``until_s``."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now, _, callback = heapq.heappop(heap)
            callback()

    def step(self, until_s: float) -> bool:
        """Run the next event due by ``until_s``. Returns False if there is none."""
        if not self._heap or self._heap[0][0] > until_s:
            return False
        self.now, _, callback = heapq.heappop(self._heap)
        callback()
        return True
