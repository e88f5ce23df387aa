"""CSV of round-trip times, ``epoch,values``: epoch in seconds, RTT in ms (Jitterbug's format).

Several samples may share an epoch: they are spread evenly over the usual step between epochs, or
up to the next epoch where that comes sooner, in their order. Lost probes have no row, so there is
no loss column. A last line without a line end may be cut and is then left out.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Final

from edgespec_sim.traces.network_trace import NetworkTrace
from edgespec_sim.traces.readers.source import TraceText

FORMAT: Final = "rtt-csv"
_HEADER: Final = "epoch,values"


def sniff(head: str) -> bool:
    return head.splitlines()[:1] == [_HEADER]


def read(text: TraceText) -> NetworkTrace:
    if text.lines[0] != _HEADER:
        raise text.error(1, f"the header {_HEADER!r}")
    samples: list[tuple[float, list[float]]] = []
    for number, line in enumerate(text.lines[1:], start=2):
        fields = line.split(",")
        if text.may_be_cut(number):
            break
        if len(fields) != 2:
            raise text.error(number, "epoch seconds and RTT in ms, separated by a comma")
        epoch_s = text.number(number, fields[0], "the epoch in seconds")
        rtt_s = text.number(number, fields[1], "the RTT in ms") / 1000.0
        if samples and epoch_s < samples[-1][0]:
            raise text.error(number, f"an epoch not before {samples[-1][0]:g}")
        if not samples or epoch_s > samples[-1][0]:
            samples.append((epoch_s, []))
        samples[-1][1].append(rtt_s)
    if not samples:
        raise text.no_rows()
    origin_s = samples[0][0]
    gaps_s = [later[0] - earlier[0] for earlier, later in itertools.pairwise(samples)]
    usual_s = statistics.median(gaps_s) if gaps_s else 1.0
    times_s: list[float] = []
    rtts_s: list[float] = []
    for (epoch_s, group), gap_s in zip(samples, [*gaps_s, usual_s], strict=True):
        spread_s = min(gap_s, usual_s)
        for place, rtt_s in enumerate(group):
            times_s.append(epoch_s - origin_s + spread_s * place / len(group))
            rtts_s.append(rtt_s)
    duration_s = samples[-1][0] - origin_s + usual_s
    return NetworkTrace(text.name, FORMAT, tuple(times_s), tuple(rtts_s), duration_s)
