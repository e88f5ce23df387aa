"""Reads a trace of any known format into a ``NetworkTrace``.

The format is recognised by the content. A file's name matters only for the direction of a
packet-delivery file. Every error is a ``TraceError`` that names the file, the line, what was
expected there, and the format as which the file was read. Columns and cells that a trace does not
need may be missing.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from edgespec_sim.links.column_tables import (
    Columns,
    explain_columns,
    is_known_table,
    is_plain,
    read_columns,
    read_known_table,
    read_plain,
)
from edgespec_sim.links.measuring_tools import (
    is_iperf3_text,
    is_json,
    read_iperf3_text,
    read_json,
)
from edgespec_sim.links.network_trace import (
    MAX_ROWS,
    NetworkTrace,
    TraceError,
    describe_improbable,
    in_outage,
    values_at,
)
from edgespec_sim.links.ping_logs import (
    is_fping,
    is_ping,
    is_windows_ping,
    read_fping,
    read_ping,
    read_windows_ping,
)
from edgespec_sim.links.trace_text import (
    OUTAGE_S,
    Probe,
    TraceText,
    find_outages,
    from_probes,
    read_lines,
    read_table,
    stamp_s,
    usual_step_s,
)

# --- CSV of round-trip times, ``epoch,values`` -------------------------------------------------
# The epoch is in seconds, the RTT in ms (Jitterbug's format). Several samples may share an epoch:
# they are spread evenly over the usual step between epochs, or up to the next epoch if that is
# earlier, in their order. Lost probes have no row, so there is no loss column. A last line without
# a line end may be incomplete and is then left out.

_HEADER: Final = "epoch,values"


def read_rtt_csv(text: TraceText) -> NetworkTrace:
    samples: dict[float, list[float]] = {}
    latest_s = 0.0
    for number, cells in read_table(text):
        epoch_s = text.number(number, cells.get("epoch", ""), "the epoch in seconds")
        if samples and epoch_s < latest_s:
            raise text.error(number, f"an epoch not before {latest_s:g}")
        latest_s = epoch_s
        rtt_s = text.number(number, cells.get("values", ""), "the RTT in ms") / 1000.0
        samples.setdefault(epoch_s, []).append(rtt_s)
    if not samples:
        raise text.no_rows()
    epochs_s = list(samples)
    usual_s = usual_step_s(epochs_s)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(epochs_s)]
    times_s: list[float] = []
    for (epoch_s, group), gap_s in zip(samples.items(), [*gaps_s, usual_s], strict=True):
        spread_s = min(gap_s, usual_s)
        for place in range(len(group)):
            times_s.append(epoch_s - epochs_s[0] + spread_s * place / len(group))
    rtts_s = tuple(rtt_s for group in samples.values() for rtt_s in group)
    duration_s = epochs_s[-1] - epochs_s[0] + usual_s
    return NetworkTrace(text.name, text.source, tuple(times_s), rtts_s, duration_s)


# --- CSV of a Starlink dish: FjordLink's, and that of starlink-grpc-tools -----------------------
# There is a row per second (or per poll) with the state that the dish reports. The reader uses the
# time, the ping latency to the point of presence and, if present, the state and the share of pings
# dropped. The throughput columns contain the traffic carried, not what could be carried, so there
# is no capacity. A second counts as lost if all its pings were lost, if it has no latency, or if
# the dish was not ``CONNECTED``; a run of such seconds is an outage. The dish reports
# ``OBSTRUCTED`` while some pings still pass; such a second keeps its latency.

_DISH_TIMES: Final = {"@timestamp": "dish_status.", "datetimestamp_utc": ""}
"""The column of time, and the prefix of the names of the dish's own columns."""
_CARRYING: Final = ("CONNECTED", "OBSTRUCTED")


def is_starlink(head: str) -> bool:
    columns = head.partition("\n")[0].split(",")
    prefix = _DISH_TIMES.get(columns[0])
    return prefix is not None and f"{prefix}pop_ping_latency_ms" in columns


def read_starlink(text: TraceText) -> NetworkTrace:
    time_column = text.lines[0].partition(",")[0]
    prefix = _DISH_TIMES[time_column]
    latency_column, drop_column = f"{prefix}pop_ping_latency_ms", f"{prefix}pop_ping_drop_rate"
    times_s: list[float] = []
    up: list[bool] = []
    rows: list[tuple[float, float, float]] = []
    drops = False
    for number, cells in read_table(text):
        drops |= drop_column in cells
        time_s = stamp_s(text, number, cells.get(time_column, ""), "a time in ISO 8601")
        if times_s and time_s <= times_s[-1]:
            raise text.error(number, "a time later than in the row before")
        latency = cells.get(latency_column, "")
        loss = text.number(number, cells.get(drop_column) or "0", "the share of pings dropped")
        rtt_s = text.number(number, latency or "0", "the latency in ms") / 1000.0
        times_s.append(time_s)
        carries = (cells.get(f"{prefix}state") or _CARRYING[0]) in _CARRYING
        up.append(carries and latency != "" and loss < 1.0)
        if up[-1]:
            rows.append((time_s - times_s[0], rtt_s, loss))
    if not rows:
        raise text.no_rows()
    times_s = [time_s - times_s[0] for time_s in times_s]
    end_s = times_s[-1] + usual_step_s(times_s)
    return NetworkTrace(
        text.name,
        text.source,
        (0.0, *(time_s for time_s, _, _ in rows[1:])),
        tuple(rtt_s for _, rtt_s, _ in rows),
        end_s,
        loss=tuple(loss for _, _, loss in rows) if drops else None,
        outages_s=find_outages(times_s, end_s, (not one for one in up)),
    )


# --- CICV5G's logs -----------------------------------------------------------------------------
# A row is one application message from a car to a server and back. Columns are separated by one
# space each and identified by position, because the header's spelling varies between files: time
# published and time received (ms since the epoch), delay (ms), then pose and radio, which are
# ignored and may be missing. The delay includes in-order delivery. Lost messages have no row. A gap
# of at least ``OUTAGE_S`` in the times published is an outage; shorter gaps are the publisher's own
# pauses.


def read_cicv5g(text: TraceText) -> NetworkTrace:
    rows: list[tuple[float, float]] = []
    separator = None if "  " in text.lines[0].strip() else " "  # None for an aligned table
    for number, line in enumerate(text.lines[1:], start=2):
        if text.may_be_cut(number):
            break
        published, _, delay = (*line.split(separator)[:3], "", "", "")[:3]
        published_ms = text.number(number, published, "pub_time in ms")
        if rows and published_ms <= rows[-1][0]:
            raise text.error(number, f"a pub_time after {rows[-1][0]:.0f}")
        rows.append((published_ms, text.number(number, delay, "the delay in ms")))
    if not rows:
        raise text.no_rows()
    steps_ms = [later[0] - earlier[0] for earlier, later in itertools.pairwise(rows)]
    step_s = statistics.median(steps_ms) / 1000.0 if steps_ms else 1.0
    probes: list[Probe] = []
    for published_ms, delay_ms in rows:
        sent_s = (published_ms - rows[0][0]) / 1000.0
        # The lost message of an outage is the one due a step after the last that arrived.
        if probes and sent_s - probes[-1].sent_s >= OUTAGE_S + step_s:
            probes.append(Probe(probes[-1].sent_s + step_s, None))
        probes.append(Probe(sent_s, delay_ms / 1000.0))
    return from_probes(text, probes, step_s, counts_loss=False)


# --- Mahimahi's packet-delivery files ----------------------------------------------------------
# A line is a time in ms at which 1500 bytes may leave (Netravali et al., USENIX ATC 2015). Times do
# not decrease, repeat if several packets may leave, and the file starts again at its last time.
# Opportunities are counted in windows of ``CAPACITY_WINDOW_S``, which gives capacity in steps.
# Windows without any are joined to the next one that has some, so that bytes are conserved;
# ``OUTAGE_S`` or more of them are an outage. A file has no delay and describes one direction, which
# its name gives in a word (``lte.down``, ``uplink-3.txt``, ``cell_dl``). If the name has no such
# word, the file applies to both directions, with a warning. ``NAME.up`` and ``NAME.down`` side by
# side are one trace, given by either name, of the length of the shorter one. An outage of one
# direction is an outage of both, as no answer passes. A last line without a line end counts, as in
# Mahimahi's own reader.

PACKET_BITS: Final = 1500 * 8
CAPACITY_WINDOW_S: Final = 0.1
_WHOLE_MS: Final = re.compile(r"[0-9]{1,15}")


_OTHER_WAY: Final = {".up": ".down", ".down": ".up"}
_UP_WORDS: Final = {"up", "uplink", "upload", "ul"}
_DOWN_WORDS: Final = {"down", "downlink", "download", "dl"}


def is_mahimahi(head: str) -> bool:
    """Return whether the lines are whole ms that do not decrease. Round trips in whole ms do
    decrease."""
    lines = head.split("\n")
    if not lines[0] or not all(_WHOLE_MS.fullmatch(line) or not line for line in lines):
        return False
    times_ms = [int(line) for line in lines if line]
    return times_ms == sorted(times_ms)


def _directions_in_name(name: str) -> tuple[bool, bool]:
    """Return whether a file's name has a word for up, and whether it has one for down."""
    words = set(re.findall(r"[a-z]+", name.lower()))
    return bool(words & _UP_WORDS), bool(words & _DOWN_WORDS)


def read_mahimahi(text: TraceText) -> NetworkTrace:
    partner = text.path.with_suffix(_OTHER_WAY.get(text.path.suffix, text.path.suffix))
    one = _one_way(text)
    if partner == text.path or not partner.is_file():
        return one
    other = _open_trace(partner)
    if other.source != text.source:
        raise other.error(1, f"a packet-delivery file like {text.name}")
    way = _one_way(other)
    return _both_ways(one, way) if one.up_bits_per_s else _both_ways(way, one)


def _both_ways(up: NetworkTrace, down: NetworkTrace) -> NetworkTrace:
    end_s = min(up.duration_s, down.duration_s)
    edges_s = {edge_s for way in (up, down) for outage in way.outages_s for edge_s in outage}
    times_s = [time_s for time_s in sorted({*up.time_s, *down.time_s, *edges_s}) if time_s < end_s]
    grid = np.array(times_s)
    out = in_outage(up, grid) | in_outage(down, grid)
    return NetworkTrace(
        f"{up.name} and {down.name}",
        up.source,
        tuple(times_s),
        None,
        end_s,
        up_bits_per_s=tuple(values_at(up, up.up_bits_per_s or (), grid).tolist()),
        down_bits_per_s=tuple(values_at(down, down.down_bits_per_s or (), grid).tolist()),
        outages_s=find_outages(times_s, end_s, out.tolist()),
    )


def _one_way(text: TraceText) -> NetworkTrace:
    counts: Counter[int] = Counter()
    previous_ms = 0
    for number, line in enumerate(text.lines, start=1):
        if not _WHOLE_MS.fullmatch(line.strip()):
            raise text.error(number, "a time in whole ms, of at most 15 digits")
        time_ms = int(line)
        if time_ms < previous_ms:
            raise text.error(number, f"a time not before {previous_ms} ms")
        previous_ms = time_ms
        # A packet at the very end of a window belongs to it, so the last time ends the last window.
        counts[max(math.ceil(time_ms / (CAPACITY_WINDOW_S * 1000.0)) - 1, 0)] += 1
    if previous_ms == 0:
        raise TraceError(f"{text.path}: lasts 0 ms, but must last longer")
    duration_s, free_s = previous_ms / 1000.0, 0.0
    times_s: list[float] = []
    rates: list[float] = []
    outages_s: list[tuple[float, float]] = []
    for window, count in sorted(counts.items()):
        start_s = window * CAPACITY_WINDOW_S
        end_s = min((window + 1) * CAPACITY_WINDOW_S, duration_s)
        if start_s - free_s >= OUTAGE_S - 1e-9:
            outages_s.append((free_s, start_s))
            free_s = start_s
        times_s.append(free_s)
        rates.append(count * PACKET_BITS / (end_s - free_s))
        free_s = end_s
    if len(times_s) > MAX_ROWS:
        raise TraceError(f"{text.path}: {len(times_s)} windows, but the limit is {MAX_ROWS}")
    times_s[0] = 0.0
    is_up, is_down = _directions_in_name(text.name)
    known = is_up is not is_down
    warning = (
        f"the name {text.name} does not give the direction of its packets, so both directions have"
        " this capacity; name it NAME.up or NAME.down, both files side by side for both"
    )
    return NetworkTrace(
        text.name,
        text.source,
        tuple(times_s),
        None,
        duration_s,
        up_bits_per_s=None if known and is_down else tuple(rates),
        down_bits_per_s=None if known and is_up else tuple(rates),
        outages_s=tuple(outages_s),
        warnings=() if known else (warning,),
    )


FORMATS: Final[dict[str, tuple[Callable[[str], bool], Callable[[TraceText], NetworkTrace]]]] = {
    "plain": (is_plain, read_plain),
    "ping": (is_ping, read_ping),
    "fping": (is_fping, read_fping),
    "windows-ping": (is_windows_ping, read_windows_ping),
    "rtt-csv": (lambda head: head.splitlines()[:1] == [_HEADER], read_rtt_csv),
    "cicv5g": (lambda head: head.startswith("pub_time"), read_cicv5g),
    "starlink": (is_starlink, read_starlink),
    "irtt-or-iperf3-json": (is_json, read_json),
    "iperf3-text": (is_iperf3_text, read_iperf3_text),
    "mahimahi": (is_mahimahi, read_mahimahi),
    "table": (is_known_table, read_known_table),
}

# Part of a file that is examined to recognise its format: number of lines, characters of each.
_HEAD_LINES, _HEAD_CHARACTERS = 200, 4096


def read_trace(path: Path, columns: Columns | None = None) -> NetworkTrace:
    """Read the trace in a file. Its format is recognised by its content, unless ``columns``
    describes it as a table with these columns. Raises ``TraceError``."""
    text = _open_trace(path, columns)
    if columns is not None:
        trace = read_columns(text, columns)
    elif text.source:
        trace = FORMATS[text.source][1](text)
    else:
        known = f"the beginning of a known format ({', '.join(FORMATS)})"
        if re.fullmatch(r"[0-9.]+", text.lines[0]):
            known += ": round trips need a time in each row, time_s,rtt_ms"
        raise TraceError(f"{text.error(1, known)}; {explain_columns(text.lines)}")
    return replace(trace, warnings=(*trace.warnings, *describe_improbable(trace)))


def _open_trace(path: Path, columns: Columns | None = None) -> TraceText:
    """Read a file's lines. ``source`` is empty if no known format begins like that. Raises
    ``TraceError``."""
    lines, ends_cut = read_lines(path)
    if not any(lines):
        raise TraceText(path, "", lines, ends_cut).no_rows()
    head = "\n".join(line[:_HEAD_CHARACTERS] for line in lines[:_HEAD_LINES])
    format = next((known for known, (sniff, _) in FORMATS.items() if sniff(head)), "")
    return TraceText(path, "table" if columns is not None else format, lines, ends_cut)
