"""CICV5G's logs: one application message a row, from a car to a server and back.

Columns are separated by spaces and told by position, because the header's spelling varies between
files: time published and time received (ms since the epoch), delay (ms), then pose and radio. The
delay includes in-order delivery. Lost messages have no row; a gap of at least ``OUTAGE_S`` in the
times published is an outage, shorter ones are the publisher's own pauses.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Final

from edgespec_sim.traces.network_trace import NetworkTrace
from edgespec_sim.traces.readers.probes import OUTAGE_S, Probe, from_probes
from edgespec_sim.traces.readers.source import TraceText

FORMAT: Final = "cicv5g"
_MIN_COLUMNS: Final = 10


def sniff(head: str) -> bool:
    return head.startswith("pub_time")


def read(text: TraceText) -> NetworkTrace:
    if not sniff(text.lines[0]):
        raise text.error(1, "a header that begins with 'pub_time'")
    rows: list[tuple[float, float]] = []
    for number, line in enumerate(text.lines[1:], start=2):
        if text.may_be_cut(number):
            break
        fields = line.split()
        if len(fields) < _MIN_COLUMNS:
            raise text.error(number, f"at least {_MIN_COLUMNS} columns")
        published_ms = text.number(number, fields[0], "pub_time in ms")
        if rows and published_ms <= rows[-1][0]:
            raise text.error(number, f"a pub_time after {rows[-1][0]:.0f}")
        rows.append((published_ms, text.number(number, fields[2], "the delay in ms")))
    if not rows:
        raise text.no_rows()
    steps_ms = [later[0] - earlier[0] for earlier, later in itertools.pairwise(rows)]
    step_s = statistics.median(steps_ms) / 1000.0 if steps_ms else 1.0
    probes: list[Probe] = []
    for published_ms, delay_ms in rows:
        sent_s = (published_ms - rows[0][0]) / 1000.0
        # The lost message of an outage is the one due a step after the last that came.
        if probes and sent_s - probes[-1].sent_s >= OUTAGE_S + step_s:
            probes.append(Probe(probes[-1].sent_s + step_s, None))
        probes.append(Probe(sent_s, delay_ms / 1000.0))
    return from_probes(text.name, FORMAT, probes, step_s, counts_loss=False)
