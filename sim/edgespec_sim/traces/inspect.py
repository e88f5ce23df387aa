"""A trace as plain data of bounded size, for a page or a terminal to draw.

``describe`` returns only dicts, lists, strings and numbers, ready for JSON: the statistics, every
column in ``buckets`` stretches of equal length (least, median and greatest value, so that no spike
is lost), the outages, and the RTT's distribution. Its size does not grow with the trace's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from edgespec_sim.traces.network_trace import NetworkTrace
from edgespec_sim.traces.statistics import (
    Array,
    TraceStatistics,
    even_times,
    in_outage,
    values_at,
)

MAX_BUCKETS: Final = 2000
MAX_OUTAGES_SHOWN: Final = 1000
_HISTOGRAM_BINS: Final = 40
_CDF_PERCENT: Final = (*range(0, 100, 2), 99, 99.5, 99.9, 100)
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_OUT: Final = "×"
_LEAST_RTT_S: Final = 1e-6


def describe(trace: NetworkTrace, *, buckets: int = 400) -> dict[str, Any]:
    """Raises ``ValueError`` for a number of buckets not in 1 to ``MAX_BUCKETS``."""
    if not 1 <= buckets <= MAX_BUCKETS:
        raise ValueError(f"buckets is {buckets}, but must be in 1 to {MAX_BUCKETS}")
    times_s, _ = even_times(trace)
    out = in_outage(trace, times_s)
    heard_s = values_at(trace, trace.rtt_s, times_s)
    heard_s = heard_s if out.all() else heard_s[~out]
    return {
        "name": trace.name,
        "source": trace.source,
        "duration_s": trace.duration_s,
        "row_count": len(trace.time_s),
        "statistics": dataclasses.asdict(TraceStatistics.of(trace)),
        "series": {
            name: _series(trace, column, buckets)
            for name, column in (
                ("rtt_s", trace.rtt_s),
                ("loss", trace.loss),
                ("up_bits_per_s", trace.up_bits_per_s),
                ("down_bits_per_s", trace.down_bits_per_s),
            )
            if column is not None
        },
        "outages_s": [list(outage_s) for outage_s in trace.outages_s[:MAX_OUTAGES_SHOWN]],
        "outages_left_out": max(len(trace.outages_s) - MAX_OUTAGES_SHOWN, 0),
        "rtt_histogram": _histogram(heard_s),
        "rtt_cdf": [
            [float(value), percent / 100.0]
            for percent, value in zip(
                _CDF_PERCENT, np.percentile(heard_s, _CDF_PERCENT), strict=True
            )
        ],
    }


def _series(trace: NetworkTrace, column: tuple[float, ...], buckets: int) -> dict[str, Any]:
    """Rows, not the even grid, because a short spike between two grid points must show. A bucket
    also holds the value that was in force when it began."""
    edges_s = np.linspace(0.0, trace.duration_s, buckets + 1)
    times_s, values = np.array(trace.time_s), np.array(column)
    first = np.searchsorted(times_s, edges_s[:-1], side="right") - 1
    last = np.searchsorted(times_s, edges_s[1:], side="left")
    parts = [values[start : max(end, start + 1)] for start, end in zip(first, last, strict=True)]
    return {
        "start_s": edges_s[:-1].tolist(),
        "min": [float(part.min()) for part in parts],
        "median": [float(np.median(part)) for part in parts],
        "max": [float(part.max()) for part in parts],
    }


def _histogram(heard_s: Array) -> dict[str, list[float]]:
    """Bins of equal width in the logarithm; shares of the time."""
    low = max(float(heard_s.min()), _LEAST_RTT_S)
    high = max(float(heard_s.max()), low * 1.001)
    edges_s = np.geomspace(low, high, _HISTOGRAM_BINS + 1)
    counts, _ = np.histogram(np.clip(heard_s, edges_s[0], edges_s[-1]), edges_s)
    return {"edges_s": edges_s.tolist(), "share": (counts / len(heard_s)).tolist()}


def sparkline(values: Sequence[float], *, logarithmic: bool = False) -> str:
    """One block a value, from the least to the greatest; NaN is an outage's ``×``."""
    scaled = [math.log(max(x, _LEAST_RTT_S)) if logarithmic else x for x in values]
    known = [value for value in scaled if not math.isnan(value)]
    if not known:
        return _OUT * len(scaled)
    low, span = min(known), max(known) - min(known)
    text = []
    for value in scaled:
        if math.isnan(value):
            text.append(_OUT)
        else:
            share = (value - low) / span if span else 0.0
            text.append(_BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)])
    return "".join(text)


def rtt_line(trace: NetworkTrace, *, width: int = 60) -> str:
    """The greatest RTT of each of ``width`` stretches as blocks, logarithmic; stretches that lie in
    an outage altogether are crossed out."""
    series = describe(trace, buckets=width)["series"]["rtt_s"]
    length_s = trace.duration_s / width
    values = [
        math.nan if _lies_out(trace, start_s, start_s + length_s) else greatest_s
        for start_s, greatest_s in zip(series["start_s"], series["max"], strict=True)
    ]
    return sparkline(values, logarithmic=True)


def _lies_out(trace: NetworkTrace, start_s: float, end_s: float) -> bool:
    return any(down_s <= start_s and end_s <= up_s for down_s, up_s in trace.outages_s)
