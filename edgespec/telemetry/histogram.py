"""Counts of values by size, in plain numbers: cheap to add to, translated only when asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """``bounds`` ascend; a value counts for the first bound that it does not exceed, and for none
    of them when it exceeds all. One thread adds, any may read: what is read is at most one addition
    apart from itself."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        """Sum of the values."""

    def add(self, value: float, times: int = 1) -> None:
        """Count ``value`` so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def cumulative(self) -> list[int]:
        """For each bound how many values were at most that, and at the end how many in all."""
        return list(accumulate(tuple(self.counts)))


# --- bounds ---------------------------------------------------------------------------------

LATENCY_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0),
)
"""From a token every millisecond to a first token after a minute; finest where streams live."""
LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
