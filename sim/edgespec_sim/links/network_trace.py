"""The behaviour of a recorded or generated network over time, independent of the file's format.

Theory of operation. A trace is a table over time, starting at 0; each row holds until the next one.
Delay, loss and capacity are separate columns, because they act at separate stages of a link
(``edgespec/core/link_model.py``): the round-trip time is the delay of a single small packet,
capacity determines the time of serialisation, loss makes packets late, and an outage holds
everything back. A column that was not measured is None, never a guess.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_ROWS: Final = 1_000_000


class TraceError(ValueError):
    """A trace cannot be used. The message names the file, the line or row, and what is wrong."""


def find_file(name: str, folder: Path) -> Path:
    """Return the path of a file beside the scenario, or else relative to the working directory."""
    beside = folder / name
    return beside if beside.is_file() else Path(name)


@dataclass(frozen=True, slots=True)
class NetworkTrace:
    """Columns of equal length; ``time_s`` starts at 0 and increases. Raises ``TraceError``."""

    name: str
    source: str
    """The format of the file, or the generator and its seed."""
    time_s: tuple[float, ...]
    rtt_s: tuple[float, ...] | None
    """Round-trip time of a small packet; finite, at least 0. None: not measured."""
    duration_s: float
    """End of the last row, where a replay starts again."""
    loss: tuple[float, ...] | None = None
    """Share of packets lost, in [0, 1), without those lost in outages."""
    up_bits_per_s: tuple[float, ...] | None = None
    """Capacity, above 0 (no capacity is an outage). None: not measured."""
    down_bits_per_s: tuple[float, ...] | None = None
    outages_s: tuple[tuple[float, float], ...] = ()
    """Intervals [start, end) in which nothing passes, in order and separate from one another."""
    remarks: tuple[str, ...] = ()
    """Remarks for the reader on how the file was read."""
    warnings: tuple[str, ...] = ()
    """Guesses, and values that are probably not intended."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.time_s) <= MAX_ROWS:
            raise TraceError(f"{self.name}: {len(self.time_s)} rows, but must have 1 to {MAX_ROWS}")
        if self.time_s[0] != 0.0:
            raise TraceError(f"{self.name}: begins at {self.time_s[0]} s, but must begin at 0")
        for row, (earlier, later) in enumerate(itertools.pairwise(self.time_s), start=1):
            if not earlier < later:
                raise TraceError(f"{self.name}: row {row}: time {later} s is not after {earlier} s")
        if not self.time_s[-1] <= self.duration_s < math.inf or self.duration_s <= 0.0:
            raise TraceError(
                f"{self.name}: lasts {self.duration_s} s, but its last row is at {self.time_s[-1]}"
            )
        if self.rtt_s is None and self.up_bits_per_s is None and self.down_bits_per_s is None:
            raise TraceError(f"{self.name}: has neither a delay nor a capacity")
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


# --- a summary of a trace in a few numbers, for comparisons -------------------------------------
# Statistics are over time, not over rows: the trace is sampled on an even grid, so a burst of rows
# counts for its duration. Times in an outage have no delay and are left out. The autocorrelation is
# that of the logarithm of the RTT, because a few spikes would dominate it otherwise. Pairs that
# span an outage are included.

_GRID_S: Final = 0.1
_MAX_GRID_POINTS: Final = 1_000_000
_LEAST_RTT_S: Final = 1e-6
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Statistics of the RTT, the losses and the outages."""

    rtt_median_s: float
    rtt_p95_s: float
    rtt_p99_s: float
    autocorrelation: float
    """Autocorrelation of log RTT at a lag of one second. 0 if it does not vary or the trace is too
    short."""
    loss: float
    """Mean share of packets lost outside outages. 0 if it was not measured."""
    outage_max_s: float
    """Length of the longest outage. 0 if there is none."""

    @classmethod
    def of(cls, trace: NetworkTrace) -> TraceStatistics:
        """Return the statistics of a trace. Raises ``TraceError`` if it has no delay."""
        if trace.rtt_s is None:
            raise TraceError(f"{trace.name}: has no delay")
        times_s, step_s = even_times(trace)
        rtt_s = values_at(trace, trace.rtt_s, times_s)
        up = ~in_outage(trace, times_s)
        heard_s = rtt_s[up] if up.any() else rtt_s
        lag = max(round(1.0 / step_s), 1)
        median_s, p95_s, p99_s = (float(x) for x in np.percentile(heard_s, (50, 95, 99)))
        return cls(
            rtt_median_s=median_s,
            rtt_p95_s=p95_s,
            rtt_p99_s=p99_s,
            autocorrelation=_measure_autocorrelation(rtt_s, up, lag),
            loss=mean_loss(trace),
            outage_max_s=longest_outage_s(trace),
        )


def mean_loss(trace: NetworkTrace) -> float:
    """Return the mean share of packets lost outside outages. 0 if it was not measured."""
    times_s, _ = even_times(trace)
    up = ~in_outage(trace, times_s)
    if trace.loss is None or not up.any():
        return 0.0
    return float(values_at(trace, trace.loss, times_s)[up].mean())


def longest_outage_s(trace: NetworkTrace) -> float:
    """Return the length of the longest outage. 0 if there is none."""
    return max((end_s - start_s for start_s, end_s in trace.outages_s), default=0.0)


def median_capacity(trace: NetworkTrace, column: tuple[float, ...]) -> float:
    """Return the median of a capacity column over time, in bits per second, without outages."""
    times_s, _ = even_times(trace)
    up = ~in_outage(trace, times_s)
    values = values_at(trace, column, times_s)
    return float(np.median(values[up] if up.any() else values))


# --- values that are probably not intended ------------------------------------------------------
# A confusion of units changes values by a factor of 1,000. These bounds lie beyond what networks do
# and within that factor. Nothing is refused, because an unusual network is also a valid trace.

_PROBABLE_RTT_S: Final = (50e-6, 10.0)
_PROBABLE_BITS_PER_S: Final = (10e3, 1e12)
_PROBABLE_STEP_S: Final = (1e-4, 3600.0)
_PROBABLE_LOSS: Final = 0.5


def describe_improbable(trace: NetworkTrace) -> tuple[str, ...]:
    """Describe the values of a trace that are probably not intended, with the likely reason."""
    found: list[str] = []
    if trace.rtt_s is not None:
        median_s = TraceStatistics.of(trace).rtt_median_s
        low_s, high_s = _PROBABLE_RTT_S
        if median_s < low_s:
            found.append(
                f"the median RTT is {1e6 * median_s:g} us, less than {1e6 * low_s:g} us: are these"
                " seconds in a column of milliseconds?"
            )
        elif median_s > high_s:
            found.append(
                f"the median RTT is {median_s:g} s, more than {high_s:g} s: are these microseconds"
                " in a column of milliseconds?"
            )
    for way, column in (("up", trace.up_bits_per_s), ("down", trace.down_bits_per_s)):
        if column is None:
            continue
        median = median_capacity(trace, column)
        low, high = _PROBABLE_BITS_PER_S
        if not low <= median <= high:
            than = f"less than {low:g}" if median < low else f"more than {high:g}"
            found.append(
                f"the median capacity {way} is {median:g} bit/s, {than}: is it in another unit?"
            )
    if len(trace.time_s) > 1:
        step_s = (trace.time_s[-1] - trace.time_s[0]) / (len(trace.time_s) - 1)
        low_s, high_s = _PROBABLE_STEP_S
        if not low_s <= step_s <= high_s:
            found.append(f"rows are {step_s:g} s apart on average: is the time in another unit?")
    if (loss := mean_loss(trace)) > _PROBABLE_LOSS:
        found.append(f"{loss:.0%} of the packets are lost outside outages")
    out_s = math.fsum(end_s - start_s for start_s, end_s in trace.outages_s)
    if out_s > _PROBABLE_LOSS * trace.duration_s:
        found.append(f"nothing passes for {out_s:.0f} of its {trace.duration_s:.0f} s")
    return tuple(found)


def even_times(trace: NetworkTrace) -> tuple[Array, float]:
    """Return an even grid over the trace, starting at 0, and its step in seconds."""
    step_s = max(_GRID_S, trace.duration_s / _MAX_GRID_POINTS)
    count = max(int(trace.duration_s / step_s), 1)
    return np.arange(count, dtype=np.float64) * np.float64(step_s), step_s


def values_at(trace: NetworkTrace, column: tuple[float, ...], times_s: Array) -> Array:
    """Return the column's values that hold at these times."""
    return np.array(column)[np.searchsorted(np.array(trace.time_s), times_s, side="right") - 1]


def in_outage(trace: NetworkTrace, times_s: Array) -> npt.NDArray[np.bool_]:
    """Return whether each of these times lies in an outage."""
    if not trace.outages_s:
        return np.zeros(len(times_s), dtype=np.bool_)
    edges_s = np.array(trace.outages_s).ravel()
    return np.asarray(np.searchsorted(edges_s, times_s, side="right") % 2 == 1)


def _measure_autocorrelation(rtt_s: Array, up: npt.NDArray[np.bool_], lag: int) -> float:
    if len(rtt_s) <= lag + 1:
        return 0.0
    both = up[:-lag] & up[lag:]
    logs = np.log(np.maximum(rtt_s, _LEAST_RTT_S))
    early, late = logs[:-lag][both], logs[lag:][both]
    if len(early) < 2 or early.std() == 0.0 or late.std() == 0.0:
        return 0.0
    return float(np.corrcoef(early, late)[0, 1])


_FLAT: Final = 1e-3
"""Spread of logarithms below which the line is drawn level."""
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_OUT: Final = "×"


def rtt_line(trace: NetworkTrace, *, width: int = 60) -> str:
    """Draw the greatest RTT of each of ``width`` stretches as a block, on a logarithmic scale, so
    that every spike shows. A trace without delays shows its greatest capacity. Stretches that lie
    entirely in an outage are crossed out."""
    edges_s = np.linspace(0.0, trace.duration_s, width + 1)
    column = trace.rtt_s or trace.down_bits_per_s or trace.up_bits_per_s or (0.0,)
    rtt_s = np.maximum(np.array(column), _LEAST_RTT_S)
    first = np.searchsorted(trace.time_s, edges_s[:-1], side="right") - 1
    last = np.maximum(np.searchsorted(trace.time_s, edges_s[1:], side="left"), first + 1)
    logs = np.array([math.log(rtt_s[a:b].max()) for a, b in zip(first, last, strict=True)])
    spread = float(np.ptp(logs))
    share = (logs - logs.min()) / (spread if spread > _FLAT else 1.0)
    levels = np.minimum(share * len(_BLOCKS), len(_BLOCKS) - 1).astype(int)
    return "".join(
        _OUT if any(down <= start and end <= up for down, up in trace.outages_s) else _BLOCKS[level]
        for start, end, level in zip(edges_s[:-1], edges_s[1:], levels, strict=True)
    )
