"""Mahimahi's packet-delivery files: a line is a time in ms at which 1500 bytes may leave.

Theory of operation (Netravali et al., USENIX ATC 2015). Times do not decrease, repeat when several
packets may leave, and the file starts over at its last time. Opportunities are counted in windows
of ``WINDOW_S``, which gives capacity in steps. Windows without any are joined to the next one that
has some, so the bytes are conserved; ``OUTAGE_S`` or more of them are an outage. A file knows one
direction and no delay: it is the up column, with an RTT of 0, until ``read_pair`` says more. A
last line without a line end counts, as Mahimahi's own reader has it.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from typing import Final

from edgespec_sim.traces.network_trace import MAX_ROWS, NetworkTrace, TraceError
from edgespec_sim.traces.readers.probes import OUTAGE_S
from edgespec_sim.traces.readers.source import TraceText

FORMAT: Final = "mahimahi"
PACKET_BITS: Final = 1500 * 8
WINDOW_S: Final = 0.1
_TIME: Final = re.compile(r"[0-9]{1,15}")


def sniff(head: str) -> bool:
    lines = head.split("\n")[:20]
    return bool(lines[0]) and all(_TIME.fullmatch(line) or not line for line in lines)


def read(text: TraceText) -> NetworkTrace:
    counts: dict[int, int] = {}
    previous_ms = 0
    for number, line in enumerate(text.lines, start=1):
        if not _TIME.fullmatch(line.strip()):
            raise text.error(number, "a time in whole ms, of at most 15 digits")
        time_ms = int(line)
        if time_ms < previous_ms:
            raise text.error(number, f"a time not before {previous_ms} ms")
        previous_ms = time_ms
        # What leaves at the very end of a window leaves in it: the last time ends the last one.
        window = max(math.ceil(time_ms / (WINDOW_S * 1000.0)) - 1, 0)
        counts[window] = counts.get(window, 0) + 1
    if previous_ms == 0:
        raise TraceError(f"{text.path}: lasts 0 ms, but must last longer")
    duration_s = previous_ms / 1000.0
    times_s: list[float] = []
    rates: list[float] = []
    outages_s: list[tuple[float, float]] = []
    free_s = 0.0
    for window, count in sorted(counts.items()):
        start_s, end_s = window * WINDOW_S, min((window + 1) * WINDOW_S, duration_s)
        if start_s - free_s >= OUTAGE_S - 1e-9:
            outages_s.append((free_s, start_s))
            free_s = start_s
        times_s.append(free_s)
        rates.append(count * PACKET_BITS / (end_s - free_s))
        free_s = end_s
    if len(times_s) > MAX_ROWS:
        raise TraceError(f"{text.path}: {len(times_s)} windows, but at most {MAX_ROWS} go")
    times_s[0] = 0.0
    return NetworkTrace(
        text.name,
        FORMAT,
        tuple(times_s),
        (0.0,) * len(times_s),
        duration_s,
        up_bits_per_s=tuple(rates),
        outages_s=tuple(outages_s),
    )


def paired(up: NetworkTrace, down: NetworkTrace, rtt_s: float) -> NetworkTrace:
    """Two directions as one trace, with a delay. It lasts as long as the shorter one; nothing
    passes while either direction is out."""
    if up.up_bits_per_s is None or down.up_bits_per_s is None:
        raise TraceError(f"{up.name}, {down.name}: a pair needs the capacity of both")
    duration_s = min(up.duration_s, down.duration_s)
    times_s = sorted({time_s for time_s in (*up.time_s, *down.time_s) if time_s < duration_s})
    return dataclasses.replace(
        up,
        name=f"{up.name}+{down.name}",
        time_s=tuple(times_s),
        rtt_s=(rtt_s,) * len(times_s),
        duration_s=duration_s,
        up_bits_per_s=_at(up.time_s, up.up_bits_per_s, times_s),
        down_bits_per_s=_at(down.time_s, down.up_bits_per_s, times_s),
        outages_s=_union((*up.outages_s, *down.outages_s), duration_s),
    )


def _at(
    times_s: tuple[float, ...], values: tuple[float, ...], wanted_s: list[float]
) -> tuple[float, ...]:
    return tuple(values[bisect.bisect_right(times_s, time_s) - 1] for time_s in wanted_s)


def _union(
    intervals_s: tuple[tuple[float, float], ...], until_s: float
) -> tuple[tuple[float, float], ...]:
    joined: list[tuple[float, float]] = []
    for start_s, end_s in sorted(intervals_s):
        if joined and start_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], min(max(joined[-1][1], end_s), until_s))
        elif start_s < until_s:
            joined.append((start_s, min(end_s, until_s)))
    return tuple(joined)
