"""FjordLink's CSV of a Starlink dish: a row a second with the state that the dish reports.

Read are the time, the state, the ping latency to the point of presence and the share of pings
dropped. The throughput columns are what was carried, not what could be, so there is no capacity. A
second counts as lost when all its pings were, when it has no latency or when the dish was not
``CONNECTED``: a run of such seconds is an outage. The dish reports ``OBSTRUCTED`` while some pings
still pass; such a second keeps its latency.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from datetime import datetime
from typing import Final

from edgespec_sim.traces.network_trace import NetworkTrace
from edgespec_sim.traces.readers.source import TraceText

FORMAT: Final = "starlink"
_TIME: Final = "@timestamp"
_STATE: Final = "dish_status.state"
_LATENCY: Final = "dish_status.pop_ping_latency_ms"
_DROP: Final = "dish_status.pop_ping_drop_rate"
_CARRYING: Final = ("CONNECTED", "OBSTRUCTED")


def sniff(head: str) -> bool:
    return head.startswith(_TIME + ",") and _LATENCY in head.partition("\n")[0]


def read(text: TraceText) -> NetworkTrace:
    try:
        columns = next(csv.reader(text.lines[:1]))
    except csv.Error as error:
        raise text.error(1, f"a header in CSV ({error})") from None
    missing = [name for name in (_TIME, _STATE, _LATENCY, _DROP) if name not in columns]
    if missing:
        raise text.error(1, f"a column {missing[0]}")
    time_at, state_at, latency_at, drop_at = map(columns.index, (_TIME, _STATE, _LATENCY, _DROP))
    times_s: list[float] = []
    seconds: list[tuple[float, float] | None] = []  # (rtt, loss), or None when it was lost
    for number, line in enumerate(text.lines[1:], start=2):
        if text.may_be_cut(number):
            break
        fields = line.split(",")
        if len(fields) != len(columns):
            raise text.error(number, f"{len(columns)} columns")
        time_s = _time_s(text, number, fields[time_at])
        if times_s and time_s <= times_s[-1]:
            raise text.error(number, "a time after that of the row before")
        loss = text.number(number, fields[drop_at] or "1", "the share of pings dropped")
        up = fields[state_at] in _CARRYING and fields[latency_at] and loss < 1.0
        rtt_s = text.number(number, fields[latency_at] or "0", "the latency in ms") / 1000.0
        times_s.append(time_s)
        seconds.append((rtt_s, loss) if up else None)
    if not any(seconds):
        raise text.no_rows()
    return _trace(text.name, [time_s - times_s[0] for time_s in times_s], seconds)


def _trace(
    name: str, times_s: list[float], seconds: list[tuple[float, float] | None]
) -> NetworkTrace:
    steps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    end_s = times_s[-1] + (statistics.median(steps_s) if steps_s else 1.0)
    outages_s: list[tuple[float, float]] = []
    rows: list[tuple[float, float, float]] = []
    for time_s, until_s, second in zip(times_s, [*times_s[1:], end_s], seconds, strict=True):
        if second is not None:
            rows.append((time_s, *second))
        elif outages_s and outages_s[-1][1] == time_s:
            outages_s[-1] = (outages_s[-1][0], until_s)
        else:
            outages_s.append((time_s, until_s))
    return NetworkTrace(
        name,
        FORMAT,
        (0.0, *(time_s for time_s, _, _ in rows[1:])),
        tuple(rtt_s for _, rtt_s, _ in rows),
        end_s,
        loss=tuple(loss for _, _, loss in rows),
        outages_s=tuple(outages_s),
    )


def _time_s(text: TraceText, number: int, stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (ValueError, OverflowError):
        raise text.error(number, "a time in ISO 8601") from None
