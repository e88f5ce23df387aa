"""The receiving half of a TCP connection, as Linux does it: in order, and when it answers.

Theory of operation. A packet that arrives behind a gap, fills one or came before is answered at
once. Any other one is answered as soon as the application has read it, unless this end is in a
conversation (it sent data shortly after it had got some): then the answer waits for data to ride
on, or for a second packet, for 40 ms at most.
"""

from __future__ import annotations

import math
from typing import Final

from edgespec_sim.links.tcp_segments import SEGMENT_BYTES, Acknowledgement, ticks_s

_DELAY_S: Final = 0.040
"""TCP_DELACK_MIN and TCP_ATO_MIN."""
_REPORTED: Final = 3
"""Ranges that fit beside the timestamps."""


class TcpReceiver:
    """``arrived`` says whether to answer now; ``timer_s`` when to answer without being asked."""

    def __init__(self) -> None:
        self.timer_s = math.inf
        self.upto = 0
        """All bytes before this one may be read."""
        self._behind: list[tuple[int, int]] = []
        self._last: tuple[int, int] | None = None
        self._duplicate = False
        self._conversing = False
        self._last_data_s = -math.inf
        self._waiting = 0
        """Packets not yet answered."""

    def arrived(self, now_s: float, start: int, end: int) -> bool:
        """A packet with these bytes."""
        self._last_data_s = now_s
        if end <= self.upto:
            self._duplicate = True
            return self._at_once()
        if start > self.upto:
            self._duplicate = any(a <= start and end <= b for a, b in self._behind)
            self._add(start, end)
            return self._at_once()
        self.upto = end
        if self._behind:
            while self._behind and self._behind[0][0] <= self.upto:
                self.upto = max(self.upto, self._behind.pop(0)[1])
            return self._at_once()
        self._waiting += 1
        if not self._conversing or self._waiting > 1 or end - start >= SEGMENT_BYTES:
            return True
        self.timer_s = now_s + ticks_s(_DELAY_S)
        return False

    def sent_data(self, now_s: float) -> None:
        if now_s - self._last_data_s < _DELAY_S:
            self._conversing = True

    def timer_ran(self) -> None:
        self._conversing = False

    def answer(self) -> Acknowledgement:
        """For a packet that leaves now."""
        duplicate, self._duplicate = self._duplicate, False
        self.timer_s, self._waiting = math.inf, 0
        ranges = list(self._behind)
        if self._last in ranges:  # the latest comes first
            ranges.remove(self._last)
            ranges.insert(0, self._last)
        return Acknowledgement(self.upto, tuple(ranges[:_REPORTED]), duplicate)

    def _at_once(self) -> bool:
        self._conversing = False
        return True

    def _add(self, start: int, end: int) -> None:
        joined = []
        for a, b in self._behind:
            if b < start or end < a:
                joined.append((a, b))
            else:
                start, end = min(a, start), max(b, end)
        joined.append((start, end))
        self._last = (start, end)
        self._behind = sorted(joined)
