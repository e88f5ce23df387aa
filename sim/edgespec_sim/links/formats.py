"""Reads a trace of any known format into a ``NetworkTrace``.

The format is recognised by the content, unless it is named. A file's name matters only for the
direction of a packet-delivery file. Every error is a ``TraceError`` that names the file, the line,
what was expected there, and the format as which the file was read. Columns and cells that a trace
does not need may be missing.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from edgespec_sim.links.column_tables import (
    explain_columns,
    is_known_table,
    is_plain,
    read_columns,
    read_known_table,
    read_plain,
)
from edgespec_sim.links.columns import Columns
from edgespec_sim.links.measuring_tools import (
    is_iperf3_text,
    is_irtt,
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
from edgespec_sim.links.omnet_results import (
    OMNET_FORMATS,
    is_omnet,
    is_omnet_csv,
    read_omnet,
    read_omnet_columns,
)
from edgespec_sim.links.ping_logs import (
    is_fping,
    is_fping_json,
    is_ping,
    is_windows_ping,
    read_fping,
    read_fping_json,
    read_ping,
    read_windows_ping,
)
from edgespec_sim.links.published_traces import (
    is_lumos5g,
    is_ucc,
    is_wireshark,
    read_lumos5g,
    read_pensieve,
    read_ucc,
    read_wireshark,
)
from edgespec_sim.links.trace_text import (
    OUTAGE_S,
    Probe,
    TraceText,
    find_outages,
    from_probes,
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
        epoch_s = text.number(
            number, cells.get("epoch", ""), "the epoch in seconds", column="epoch"
        )
        if samples and epoch_s < latest_s:
            raise text.error(number, f"an epoch not before {latest_s:g}")
        latest_s = epoch_s
        rtt_s = text.number(number, cells.get("values", ""), "the RTT in ms", column="values")
        samples.setdefault(epoch_s, []).append(rtt_s / 1000.0)
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
    time_column = text.head[0].partition(",")[0]
    prefix = _DISH_TIMES[time_column]
    latency_column, drop_column = f"{prefix}pop_ping_latency_ms", f"{prefix}pop_ping_drop_rate"
    times_s: list[float] = []
    up: list[bool] = []
    rows: list[tuple[float, float, float]] = []
    drops = False
    for number, cells in read_table(text):
        drops |= drop_column in cells
        time_s = stamp_s(
            text, number, cells.get(time_column, ""), "a time in ISO 8601", time_column
        )
        if times_s and time_s <= times_s[-1]:
            raise text.error(number, "a time later than in the row before", time_column)
        latency = cells.get(latency_column, "")
        loss = text.number(
            number,
            cells.get(drop_column) or "0",
            "the share of pings dropped",
            column=drop_column,
        )
        rtt_ms = text.number(number, latency or "0", "the latency in ms", column=latency_column)
        times_s.append(time_s)
        carries = (cells.get(f"{prefix}state") or _CARRYING[0]) in _CARRYING
        up.append(carries and latency != "" and loss < 1.0)
        if up[-1]:
            rows.append((time_s - times_s[0], rtt_ms / 1000.0, loss))
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
    separator = None if "  " in text.head[0].strip() else " "  # None for an aligned table
    for number, line in text.numbered_lines(2):
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
    other = open_trace(partner)
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
    for number, line in text.numbered_lines():
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


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format of network traces."""

    read: Callable[[TraceText], NetworkTrace]
    is_like: Callable[[str], bool] | None = None
    """Returns whether the beginning of a file is of this format. None: the content does not show
    it, so that the format must be named."""
    is_log: bool = False
    """Whether a file of this format may begin anywhere, so that its beginning does not have to show
    the format if it is named."""


FORMATS: Final[dict[str, TraceFormat]] = {
    "plain": TraceFormat(read_plain, is_plain),
    "ping": TraceFormat(read_ping, is_ping, is_log=True),
    "fping": TraceFormat(read_fping, is_fping, is_log=True),
    "fping-json": TraceFormat(read_fping_json, is_fping_json, is_log=True),
    "windows-ping": TraceFormat(read_windows_ping, is_windows_ping, is_log=True),
    "rtt-csv": TraceFormat(read_rtt_csv, lambda head: head.splitlines()[:1] == [_HEADER]),
    "cicv5g": TraceFormat(read_cicv5g, lambda head: head.startswith("pub_time")),
    "starlink": TraceFormat(read_starlink, is_starlink),
    "irtt": TraceFormat(read_json, is_irtt),
    "iperf3-json": TraceFormat(read_json, is_json),
    "iperf3-text": TraceFormat(read_iperf3_text, is_iperf3_text, is_log=True),
    "mahimahi": TraceFormat(read_mahimahi, is_mahimahi),
    "ucc": TraceFormat(read_ucc, is_ucc),
    "lumos5g": TraceFormat(read_lumos5g, is_lumos5g),
    "wireshark": TraceFormat(read_wireshark, is_wireshark),
    "omnet-vec": TraceFormat(read_omnet, is_omnet),
    "omnet-csv": TraceFormat(read_omnet, is_omnet_csv),
    "table": TraceFormat(read_known_table, is_known_table),
    "pensieve": TraceFormat(read_pensieve),
}
"""The formats by name, in the order in which they are tried."""
AUTO: Final = "auto"


def read_trace(
    path: Path, columns: Columns | None = None, format: str = AUTO, step_s: float = 0.0
) -> NetworkTrace:
    """Read the trace in a file.

    Args:
        path: The file, which may be packed with gzip.
        columns: The meaning of the columns of a table, or of the vectors of OMNeT++. None: the
            format says it.
        format: A name of ``FORMATS``. ``auto``: the content shows it.
        step_s: Seconds of a table whose rows are merged into one. 0: every row is kept.

    Raises:
        TraceError: The file cannot be read. The message names the line.
    """
    if format not in (*FORMATS, AUTO):
        raise TraceError(f"format is {format!r}, but must be auto or one of {', '.join(FORMATS)}")
    text = open_trace(path, format)
    if columns is not None:
        if text.source in OMNET_FORMATS:
            trace = read_omnet_columns(text, columns)
        elif format != AUTO and text.source != "table":
            raise TraceError(f"{path}: --columns is for tables, and the format is {format}")
        else:
            text.source = "table"
            trace = read_columns(text, columns, step_s)
    elif step_s:
        raise TraceError(f"{path}: --step is for tables with --columns")
    elif text.source:
        trace = FORMATS[text.source].read(text)
    else:
        known = f"the beginning of a known format ({', '.join(FORMATS)})"
        if re.fullmatch(r"[0-9.]+", text.head[0]):
            known += ": round trips need a time in each row, time_s,rtt_ms"
        raise TraceError(f"{text.error(1, known)}; {explain_columns(text.head)}")
    return replace(trace, warnings=(*trace.warnings, *describe_improbable(trace)))


def open_trace(path: Path, format: str = AUTO) -> TraceText:
    """Open a file. Its ``source`` is the format, or what the content shows if that is ``auto``;
    empty if no known format begins like that. Raises ``TraceError``."""
    text = TraceText(path)
    if not any(text.head):
        raise text.no_rows()
    head = "\n".join(text.head)
    if format != AUTO:
        one = FORMATS[format]
        if one.is_like is not None and not one.is_log and not one.is_like(head):
            raise text.error(1, f"the beginning of a file of the format {format}")
        text.source = format
        return text
    text.source = next(
        (name for name, one in FORMATS.items() if one.is_like is not None and one.is_like(head)), ""
    )
    return text
