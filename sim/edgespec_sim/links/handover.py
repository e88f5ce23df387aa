"""A path whose attachment changes: from cell to cell, with a gap in between.

Theory of operation. Each attachment is a path of its own, in force until the next change. For
``gap_s`` from a change on nothing is handed over; what is sent then waits and goes to the
attachment in force when the gap ends, in order. What an old one had accepted still arrives: the
cells forward it. A message that a new attachment delivers sooner waits for those sent before it, so
order holds across the change.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import Path, PathCounts


class Handover:
    """A path that begins as ``path``; ``change`` attaches it to another."""

    def __init__(self, queue: EventQueue, path: Path, gap_s: float) -> None:
        if not 0.0 <= gap_s < math.inf:
            raise ValueError(f"gap_s is {gap_s}, but must be finite and not negative")
        self._queue, self._path, self._gap_s = queue, path, gap_s
        self._up_from_s = 0.0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._order: deque[list[Callable[[], None] | None]] = deque()
        self.counts = PathCounts()

    def change(self, path: Path) -> None:
        """From now on ``path`` is in force, and passes messages when the gap is over."""
        self._path, self._up_from_s = path, self._queue.now + self._gap_s

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self.counts.enter(size_bytes)
        # A cell of the order: empty until its message has arrived.
        cell: list[Callable[[], None] | None] = [None]
        self._order.append(cell)

        def arrive() -> None:
            assert cell[0] is None, "a path delivered a message twice"
            cell[0] = lambda: self._out(size_bytes, deliver)
            self._release()

        if self._waiting or self._up_from_s > self._queue.now:
            if not self._waiting:
                self._queue.at(self._up_from_s, self._flush)
            self._waiting.append((size_bytes, arrive))
            return
        self._path.send(size_bytes, arrive)

    def _flush(self) -> None:
        if self._up_from_s > self._queue.now:  # another change came within the gap
            self._queue.at(self._up_from_s, self._flush)
            return
        waiting, self._waiting = self._waiting, deque()
        for size_bytes, arrive in waiting:
            self._path.send(size_bytes, arrive)

    def _release(self) -> None:
        while self._order and (deliver := self._order[0][0]) is not None:
            self._order.popleft()
            deliver()

    def _out(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self.counts.leave(size_bytes)
        deliver()
