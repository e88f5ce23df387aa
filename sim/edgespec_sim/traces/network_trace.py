"""What a recorded or generated network did over time, whatever format it came in.

Theory of operation. A trace is a table over time, from 0 on: each row holds until the next one.
Delay, loss and capacity are separate columns, because they act at separate stages of a link
(``core/network/link_model.py``): the round-trip time is the delay of a lone small packet, capacity
is what serialisation takes its time from, loss makes packets late, and an outage holds everything
back. A column that was not measured is None, never a guess.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Final

MAX_ROWS: Final = 1_000_000


class TraceError(ValueError):
    """A trace cannot be used; the message names the file, the line or row, and what is wrong."""


@dataclass(frozen=True, slots=True)
class NetworkTrace:
    """Columns of equal length; ``time_s`` starts at 0 and increases. Raises ``TraceError``."""

    name: str
    source: str
    """The format it was read from, or the generator and its seed."""
    time_s: tuple[float, ...]
    rtt_s: tuple[float, ...]
    """Round-trip time of a small packet; finite, at least 0."""
    duration_s: float
    """The last row holds until then; a replay starts over there."""
    loss: tuple[float, ...] | None = None
    """Share of packets lost, in [0, 1); those of outages are not counted here."""
    up_bits_per_s: tuple[float, ...] | None = None
    """Capacity, above 0 (an outage says that there is none); None: not measured."""
    down_bits_per_s: tuple[float, ...] | None = None
    outages_s: tuple[tuple[float, float], ...] = ()
    """Intervals [start, end) in which nothing passes; in order, apart from one another."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.time_s) <= MAX_ROWS:
            raise TraceError(f"{self.name}: {len(self.time_s)} rows, but 1 to {MAX_ROWS} go")
        if self.time_s[0] != 0.0:
            raise TraceError(f"{self.name}: begins at {self.time_s[0]} s, but must at 0")
        for row, (earlier, later) in enumerate(itertools.pairwise(self.time_s), start=1):
            if not earlier < later:
                raise TraceError(f"{self.name}: row {row}: time {later} s is not after {earlier} s")
        if not self.time_s[-1] <= self.duration_s < math.inf or self.duration_s <= 0.0:
            raise TraceError(
                f"{self.name}: lasts {self.duration_s} s, but its last row is at {self.time_s[-1]}"
            )
        self._check_column("rtt_s", self.rtt_s, 0.0, math.inf)
        self._check_column("loss", self.loss, 0.0, 1.0)
        self._check_column("up_bits_per_s", self.up_bits_per_s, math.ulp(0.0), math.inf)
        self._check_column("down_bits_per_s", self.down_bits_per_s, math.ulp(0.0), math.inf)
        previous_end_s = 0.0
        for start_s, end_s in self.outages_s:
            if not previous_end_s <= start_s < end_s <= self.duration_s:
                raise TraceError(f"{self.name}: outage ({start_s}, {end_s}) s is out of order")
            previous_end_s = end_s

    def _check_column(
        self, name: str, values: tuple[float, ...] | None, low: float, below: float
    ) -> None:
        if values is None:
            return
        if len(values) != len(self.time_s):
            raise TraceError(
                f"{self.name}: {name} has {len(values)} rows, time_s has {len(self.time_s)}"
            )
        for row, value in enumerate(values):
            if not low <= value < below:
                raise TraceError(
                    f"{self.name}: row {row}: {name} is {value}, not in [{low}, {below})"
                )
