"""A path whose attachment changes: from cell to cell, with a gap in between.

Theory of operation. Each attachment is a path of its own, in force from its time on. For ``gap_s``
from a change on nothing is handed to either; what is sent then waits and goes to the new one when
the gap ends, in order. What the old one had accepted still arrives: the cells forward it. A message
that the new attachment delivers sooner waits for those sent before it, so order holds across the
change. An old attachment whose queue is long goes on sending in the gap, unless its links have that
outage themselves (``gaps_s`` gives the intervals for that).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import Path, PathCounts


def gaps_s(changes_s: Sequence[float], gap_s: float) -> tuple[tuple[float, float], ...]:
    """The gap of each change, [start, end), for ``LinkSettings.outages_s`` of the attachments."""
    return tuple((change_s, change_s + gap_s) for change_s in changes_s)


class Handover:
    """``attachments``: (from_s, path), the first from 0 on; changes at least ``gap_s`` apart."""

    def __init__(
        self, queue: EventQueue, attachments: Sequence[tuple[float, Path]], gap_s: float
    ) -> None:
        times_s = [from_s for from_s, _ in attachments]
        if not times_s or times_s[0] != 0.0:
            raise ValueError(f"attachments begin at {times_s[:1]} s, but must at 0")
        if not 0.0 <= gap_s < math.inf:
            raise ValueError(f"gap_s is {gap_s}, but must be finite and not negative")
        for earlier_s, later_s in itertools.pairwise(times_s):
            if not later_s > earlier_s or later_s - earlier_s < gap_s:
                raise ValueError(f"a change at {later_s} s, {gap_s} s after the one before or less")
        self._queue = queue
        self._attachments = tuple(attachments)
        self._gap_s = gap_s
        self._current = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._order: deque[list[Callable[[], None] | None]] = deque()
        self.counts = PathCounts()

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self.counts.enter(size_bytes)
        # A cell of the order: empty until its message has arrived.
        cell: list[Callable[[], None] | None] = [None]
        self._order.append(cell)

        def arrive() -> None:
            assert cell[0] is None, "a path delivered a message twice"
            cell[0] = lambda: self._out(size_bytes, deliver)
            self._release()

        up_s = self._up_from_s(self._queue.now)
        if self._waiting or up_s > self._queue.now:
            if not self._waiting:
                self._queue.at(up_s, self._flush)
            self._waiting.append((size_bytes, arrive))
            return
        self._attachments[self._current][1].send(size_bytes, arrive)

    def _up_from_s(self, now_s: float) -> float:
        """Moves to the attachment in force now; the end of its gap, if that is ahead."""
        attachments = self._attachments
        while self._current + 1 < len(attachments) and attachments[self._current + 1][0] <= now_s:
            self._current += 1
        if self._current == 0:
            return now_s
        return max(now_s, attachments[self._current][0] + self._gap_s)

    def _flush(self) -> None:
        up_s = self._up_from_s(self._queue.now)
        if up_s > self._queue.now:  # the next change comes as this gap ends
            self._queue.at(up_s, self._flush)
            return
        waiting, self._waiting = self._waiting, deque()
        for size_bytes, arrive in waiting:
            self._attachments[self._current][1].send(size_bytes, arrive)

    def _release(self) -> None:
        while self._order and (deliver := self._order[0][0]) is not None:
            self._order.popleft()
            deliver()

    def _out(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self.counts.leave(size_bytes)
        deliver()
