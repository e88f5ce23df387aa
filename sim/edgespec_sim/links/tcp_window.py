"""How many packets TCP lets be under way: Linux's congestion window, for flows of small messages.

Theory of operation. Slow start and a friendly CUBIC (RFC 9438, 4.3: its region for small products
of bandwidth and delay, where it grows as Reno would), the reduction in proportion to what arrives
(RFC 6937), and what Linux does to a window that is not used: it does not grow, decays when a
window's worth is not sent for a timeout, and is halved for each timeout of silence (RFC 2861).
CUBIC's convex growth of long fast transfers is not here.
"""

from __future__ import annotations

import math
from typing import Final

from edgespec_sim.links.tcp_segments import FIRST_WINDOW

_KEPT: Final = 717 / 1024
"""Share of the window after a loss (CUBIC's beta)."""
_ACKED_PER_GROWTH: Final = 1.875
"""Windows that have to arrive for one packet more (bictcp_update's friendly region)."""
_LEAST: Final = 2


class CongestionWindow:
    """In packets; the sender says what happened."""

    def __init__(self) -> None:
        self.packets = FIRST_WINDOW
        self._threshold = math.inf
        self._grown_by = 0
        self._limited = False
        self._most_used = 0
        self._used_since_s = 0.0
        self._before = 0
        """Window at the start of a reduction."""
        self._delivered = self._sent = 0

    @property
    def slow_start(self) -> bool:
        return self.packets < self._threshold

    def sent(self, now_s: float, in_flight: int, timeout_s: float, *, reducing: bool) -> None:
        """A packet left; ``in_flight`` with it."""
        if reducing:
            self._sent += 1
        self._limited = in_flight >= self.packets
        self._most_used = max(self._most_used, in_flight)
        if self._limited:
            self._most_used, self._used_since_s = 0, now_s
        elif now_s - self._used_since_s >= timeout_s and not reducing:
            used = max(self._most_used, FIRST_WINDOW)
            if used < self.packets:
                self._remember()
                self.packets = (self.packets + used) // 2
            self._most_used, self._used_since_s = 0, now_s

    def idle(self, for_s: float, timeout_s: float) -> None:
        """Something is to leave after ``for_s`` of silence."""
        if for_s <= timeout_s:
            return
        self._remember()
        least = min(FIRST_WINDOW, self.packets)
        left_s = for_s - timeout_s
        while left_s > 0.0 and self.packets > least:
            self.packets //= 2
            left_s -= timeout_s
        self.packets = max(self.packets, least)

    def acknowledged(self, count: int) -> None:
        """So many arrived while nothing was missing."""
        if not self._limited and not (self.slow_start and self.packets < 2 * self._most_used):
            return
        if self.slow_start:
            self.packets += count
            return
        self._grown_by += count
        if self._grown_by >= _ACKED_PER_GROWTH * self.packets:
            self._grown_by = 0
            self.packets += 1

    def begin_reduction(self) -> None:
        self._before = self.packets
        self._threshold = max(int(self.packets * _KEPT), _LEAST)
        self._delivered = self._sent = 0

    def reduce(self, in_flight: int, delivered: int, *, advanced: bool) -> None:
        """In a reduction: ``delivered`` packets arrived."""
        if not delivered:
            return
        self._delivered += delivered
        room = int(self._threshold) - in_flight
        if room < 0:
            share = -(-int(self._threshold) * self._delivered // self._before)
            allowed = share - self._sent
        else:
            allowed = min(room, max(self._delivered - self._sent, delivered) + advanced)
        self.packets = in_flight + max(allowed, 0 if self._sent else 1)

    def end_reduction(self) -> None:
        self.packets = int(self._threshold)

    def collapse(self, in_flight: int, *, again: bool) -> None:
        """A timeout; ``again``: one after another."""
        if not again:
            self.begin_reduction()
        self.packets = in_flight + 1

    def _remember(self) -> None:
        if self._threshold < math.inf:
            self._threshold = max(self._threshold, 3 * self.packets // 4)
