"""Bandwidth that one or several links send through, one message at a time.

Theory of operation. A queue is a line of slots in time, each taken by one message; a message gets
the first slot that is long enough from the time on at which it is ready. That is first come,
first served, except that a message which may start only later (its link is out) reserves a later
slot, and messages of other links that are ready sooner use the gap before it when they fit. How
long a slot has to be is the message's size over the capacity, which is a constant or a
``CapacitySchedule`` (then it is integrated from the slot's start on).

Slots that touch are joined and slots that have passed are forgotten, so the list is as long as
there are gaps ahead: a message costs amortised constant time while messages come in order.
"""

from __future__ import annotations

import bisect
import math
from typing import Final

from edgespec.core.network.link_schedules import CapacitySchedule

# How many slots that have passed are kept before they are deleted, all at once.
_MAX_PASSED: Final = 64


class SharedQueue:
    """``bits_per_s`` is the capacity; a schedule's time 0 lies ``offset_s`` before this clock's."""

    def __init__(
        self, bits_per_s: float | CapacitySchedule = math.inf, *, offset_s: float = 0.0
    ) -> None:
        self._schedule = bits_per_s if isinstance(bits_per_s, CapacitySchedule) else None
        self._bits_per_s = math.inf if isinstance(bits_per_s, CapacitySchedule) else bits_per_s
        if not self._bits_per_s > 0.0:
            raise ValueError(f"bits_per_s is {bits_per_s}, but must be above 0")
        self._offset_s = offset_s
        self._busy: list[tuple[float, float]] = []
        self._passed = 0  # as many of the first slots are forgotten
        self.sent_s = 0.0
        """For how long links' messages have occupied it, those ahead included."""

    @property
    def slot_count(self) -> int:
        """Stretches of time reserved, as joined."""
        return len(self._busy) - self._passed

    def capacity_bits_per_s(self, time_s: float) -> float:
        if self._schedule is None:
            return self._bits_per_s
        return self._schedule.at(time_s + self._offset_s)

    def serialisation_s(self, start_s: float, size_bytes: int) -> float:
        """How long a message takes that starts to leave at ``start_s`` and has the queue alone."""
        if self._schedule is None:
            return size_bytes * 8 / self._bits_per_s
        return self._schedule.duration_s(start_s + self._offset_s, size_bytes * 8)

    def first_free_s(self, now_s: float, ready_s: float, size_bytes: int) -> float:
        """Start of the first slot from ``ready_s`` on that the message fits into; what ended by
        ``now_s`` is forgotten, so ``now_s`` must not decrease, nor be after ``ready_s``."""
        busy = self._busy
        if not busy:
            return ready_s
        count, first = len(busy), self._passed
        while first < count and busy[first][1] <= now_s:
            first += 1
        if first > _MAX_PASSED or first == count:
            del busy[:first]
            count, first = len(busy), 0
        self._passed = first
        start_s = ready_s
        for index in range(first, count):
            busy_start_s, busy_end_s = busy[index]
            if (
                start_s < busy_start_s
                and start_s + self.serialisation_s(start_s, size_bytes) <= busy_start_s
            ):
                break
            start_s = max(start_s, busy_end_s)
        return start_s

    def take(self, start_s: float, end_s: float, size_bytes: int) -> None:
        """Occupy a slot that ``first_free_s`` found for a message of that size; joined with a
        neighbour it touches."""
        if start_s == end_s:
            return
        busy = self._busy
        if not busy or busy[-1][1] <= start_s:  # behind all others, as usual
            if busy and busy[-1][1] == start_s:
                start_s = busy.pop()[0]
            busy.append((start_s, end_s))
            return
        index = bisect.bisect(busy, (start_s, end_s), lo=self._passed)
        first, last = index, index
        if index > self._passed and busy[index - 1][1] == start_s:
            first, start_s = index - 1, busy[index - 1][0]
        if index < len(busy) and busy[index][0] == end_s:
            last, end_s = index + 1, busy[index][1]
        busy[first:last] = [(start_s, end_s)]
