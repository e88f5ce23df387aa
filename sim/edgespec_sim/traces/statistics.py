"""What a trace is like, in a few numbers that can be compared between traces.

Theory of operation. Statistics are over time, not over rows: the trace is read on an even grid, so
that a burst of rows counts for as long as it lasted. Times in an outage have no delay and are left
out. The autocorrelation is that of the logarithm of the RTT, because a few spikes would decide it
otherwise; pairs that span an outage count too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from edgespec_sim.traces.network_trace import NetworkTrace

_GRID_S: Final = 0.1
_MAX_GRID_POINTS: Final = 1_000_000
_LEAST_RTT_S: Final = 1e-6

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Of the RTT, the losses and the outages; lengths of outages are 0 when there is none."""

    rtt_mean_s: float
    rtt_median_s: float
    rtt_p95_s: float
    rtt_p99_s: float
    autocorrelation: float
    """Of log RTT at ``lag_s``; 0 when it does not vary or the trace is too short."""
    lag_s: float
    """1 s, or the grid's step in a trace of more than 10**6 s."""
    loss: float
    """Mean share of packets lost outside outages; 0 when it was not measured."""
    outage_count: int
    outage_share: float
    """Of the time."""
    outage_median_s: float
    outage_p95_s: float
    outage_max_s: float

    @classmethod
    def of(cls, trace: NetworkTrace) -> TraceStatistics:
        times_s, step_s = even_times(trace)
        rtt_s = values_at(trace, trace.rtt_s, times_s)
        up = ~in_outage(trace, times_s)
        heard_s = rtt_s[up] if up.any() else rtt_s
        lengths_s = np.array([end_s - start_s for start_s, end_s in trace.outages_s] or [0.0])
        lag = max(round(1.0 / step_s), 1)
        loss = 0.0
        if trace.loss is not None and up.any():
            loss = float(values_at(trace, trace.loss, times_s)[up].mean())
        median_s, p95_s, p99_s = (float(x) for x in np.percentile(heard_s, (50, 95, 99)))
        return cls(
            rtt_mean_s=float(heard_s.mean()),
            rtt_median_s=median_s,
            rtt_p95_s=p95_s,
            rtt_p99_s=p99_s,
            autocorrelation=_autocorrelation(rtt_s, up, lag),
            lag_s=lag * step_s,
            loss=loss,
            outage_count=len(trace.outages_s),
            outage_share=float(lengths_s.sum()) / trace.duration_s,
            outage_median_s=float(np.median(lengths_s)),
            outage_p95_s=float(np.percentile(lengths_s, 95)),
            outage_max_s=float(lengths_s.max()),
        )


def even_times(trace: NetworkTrace) -> tuple[Array, float]:
    """A grid over the trace, from 0 on, and its step in seconds."""
    step_s = max(_GRID_S, trace.duration_s / _MAX_GRID_POINTS)
    count = max(int(trace.duration_s / step_s), 1)
    return np.arange(count, dtype=np.float64) * np.float64(step_s), step_s


def values_at(trace: NetworkTrace, column: tuple[float, ...], times_s: Array) -> Array:
    """The column's values in force at these times."""
    rows = np.searchsorted(np.array(trace.time_s), times_s, side="right") - 1
    return np.array(column)[rows]


def in_outage(trace: NetworkTrace, times_s: Array) -> npt.NDArray[np.bool_]:
    """Whether each of these times lies in an outage."""
    if not trace.outages_s:
        return np.zeros(len(times_s), dtype=np.bool_)
    edges_s = np.array(trace.outages_s).ravel()
    return np.asarray(np.searchsorted(edges_s, times_s, side="right") % 2 == 1)


def _autocorrelation(rtt_s: Array, up: npt.NDArray[np.bool_], lag: int) -> float:
    if len(rtt_s) <= lag + 1:
        return 0.0
    both = up[:-lag] & up[lag:]
    logs = np.log(np.maximum(rtt_s, _LEAST_RTT_S))
    early, late = logs[:-lag][both], logs[lag:][both]
    if len(early) < 2 or early.std() == 0.0 or late.std() == 0.0:
        return 0.0
    return float(np.corrcoef(early, late)[0, 1])
