"""Reading a trace of any known format into a ``NetworkTrace``.

The format is told by the content; a name's end says only which way a packet-delivery file goes.
Every error is a ``TraceError`` that names the file, the line, what was expected there and the
format that the file was taken for. What a trace does not need may be missing: columns, and cells.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np

from edgespec.config.files import TooLargeError, read_bytes
from edgespec_sim.links.network_trace import (
    MAX_ROWS,
    NetworkTrace,
    TraceError,
    in_outage,
    values_at,
)

# --- a trace file as bounded lines, and errors that say where in it ----------------------------

MAX_FILE_BYTES: Final = 2**28


@dataclass(frozen=True, slots=True)
class TraceText:
    """The lines of one file; line numbers count from 1."""

    path: Path
    source: str
    """The format that they are read as."""
    lines: tuple[str, ...]
    ends_cut: bool
    """The last line has no line end, so it may be half a line: a recording that was killed."""

    @property
    def name(self) -> str:
        return self.path.name

    def error(self, number: int, expected: str) -> TraceError:
        line = self.lines[number - 1] if 1 <= number <= len(self.lines) else ""
        found = f"{self.path}:{number}: expected {expected}, found {line[:80]!r}"
        return TraceError(f"{found} (read as {self.source})" if self.source else found)

    def number(self, number: int, text: str, what: str) -> float:
        """``text`` of line ``number`` as a finite number of at least 0."""
        try:
            value = float(text)
        except ValueError:
            raise self.error(number, f"{what} as a number") from None
        if not 0.0 <= value < math.inf:
            raise self.error(number, f"{what} finite and at least 0")
        return value

    def may_be_cut(self, number: int) -> bool:
        return self.ends_cut and number == len(self.lines)

    def no_rows(self) -> TraceError:
        return TraceError(f"{self.path}: holds no measurement")


def _table(text: TraceText, header: int = 1) -> Iterator[tuple[int, dict[str, str]]]:
    """Number of each line behind line ``header``, and its cells by column. A row may end early, but
    not go on beyond the header. Left out are empty lines, comments (``#``) and a last line that may
    be cut."""
    lines = csv.reader(text.lines[header - 1 :])
    columns: list[str] = []
    try:
        for number, cells in ((header - 1 + lines.line_num, cells) for cells in lines):
            if not columns:
                columns = cells
            elif text.may_be_cut(number):
                return
            elif not cells or cells[0].startswith("#"):
                continue
            elif len(cells) > len(columns):
                raise text.error(number, f"at most {len(columns)} columns")
            else:
                yield number, dict(zip(columns, cells, strict=False))
    except csv.Error as error:
        number = header - 1 + lines.line_num
        raise text.error(number, f"a table in CSV ({error})") from None


def _usual_step_s(times_s: Sequence[float]) -> float:
    """The median step, and a second of a single time."""
    return statistics.median([b - a for a, b in itertools.pairwise(times_s)] or [1.0])


def _outages(
    times_s: Sequence[float], end_s: float, lost: Iterable[bool]
) -> tuple[tuple[float, float], ...]:
    """Rows that were lost last until the next one; neighbours are one outage."""
    found: list[tuple[float, float]] = []
    for time_s, until_s, is_lost in zip(times_s, (*times_s[1:], end_s), lost, strict=True):
        if is_lost and found and found[-1][1] == time_s:
            found[-1] = (found[-1][0], until_s)
        elif is_lost:
            found.append((time_s, until_s))
    return tuple(found)


def _stamp_s(text: TraceText, number: int, stamp: str, expected: str) -> float:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (ValueError, OverflowError):
        raise text.error(number, expected) from None


# --- the plain format --------------------------------------------------------------------------
# ``time_s,rtt_ms[,loss,up_mbps,down_mbps]``, read and written.
# The header names the columns, the optional ones in any number; times begin at 0 and increase. A
# row holds until the next one. A ``loss`` of 1 is an outage until the next row below 1; its other
# values stand all the same. ``# duration_s=...`` before the header says how long the last row
# holds, otherwise it does for as long as the one before it. Other lines with ``#`` are comments.
# An empty cell of an optional column is as in the row before.
# A last line without a line end may be cut and is then left out.

_REQUIRED: Final = ("time_s", "rtt_ms")
_KNOWN: Final = (*_REQUIRED, "loss", "up_mbps", "down_mbps")
_DURATION: Final = "# duration_s="


def is_plain(head: str) -> bool:
    lines = (line for line in head.splitlines() if not line.startswith("#"))
    return next(lines, "").startswith(",".join(_REQUIRED))


def read_plain(text: TraceText) -> NetworkTrace:
    duration_s: float | None = None
    header = 1 + next(n for n, line in enumerate(text.lines) if not line.startswith("#"))
    for number, line in enumerate(text.lines[:header], start=1):
        if line.startswith(_DURATION):
            duration_s = text.number(number, line[len(_DURATION) :], "duration_s")
    columns = text.lines[header - 1].split(",")
    if columns[:2] != [*_REQUIRED] or len({*columns} & {*_KNOWN}) != len(columns):
        raise text.error(header, "the header time_s,rtt_ms[,loss,up_mbps,down_mbps]")
    rows: list[dict[str, float]] = []
    for number, cells in _table(text, header):
        rows.append(_plain_row(text, number, cells, rows[-1] if rows else {}))
    if not rows:
        raise text.no_rows()

    def column(name: str, scale: float) -> tuple[float, ...] | None:
        """A cell that says nothing is that of the row before, or the first one that says it."""
        first = next((row[name] for row in rows if name in row), None)
        return None if first is None else tuple(row.get(name, first) * scale for row in rows)

    times_s = column("time_s", 1.0) or ()
    if duration_s is None:
        duration_s = times_s[-1] + (times_s[-1] - times_s[-2] if len(times_s) > 1 else 1.0)
    loss = column("loss", 1.0)
    return NetworkTrace(
        text.name,
        text.source,
        times_s,
        column("rtt_ms", 1e-3) or (),
        duration_s,
        loss=loss and tuple(0.0 if value >= 1.0 else value for value in loss),
        up_bits_per_s=column("up_mbps", 1e6),
        down_bits_per_s=column("down_mbps", 1e6),
        outages_s=_outages(times_s, duration_s, (row.get("loss", 0.0) >= 1.0 for row in rows)),
    )


def _plain_row(
    text: TraceText, number: int, cells: dict[str, str], before: dict[str, float]
) -> dict[str, float]:
    given = (name for name in _KNOWN if name in _REQUIRED or cells.get(name))
    row = {name: text.number(number, cells.get(name, ""), name) for name in given}
    if not before and row["time_s"] != 0.0:
        raise text.error(number, "the first time_s to be 0")
    if before and row["time_s"] <= before["time_s"]:
        raise text.error(number, f"a time_s after {before['time_s']:g}")
    if row.get("loss", 0.0) > 1.0:
        raise text.error(number, "a loss in [0, 1], 1 for an outage")
    for name in ("up_mbps", "down_mbps"):
        if row.get(name) == 0.0:
            raise text.error(number, f"{name} above 0 (an outage is a loss of 1)")
    return {**before, **row}


def write_plain(trace: NetworkTrace) -> str:
    """The trace as text that ``read`` turns into one that behaves the same: rows are added where an
    outage begins and ends within a row. Reading and writing that one again changes nothing."""
    edges_s = {edge_s for outage_s in trace.outages_s for edge_s in outage_s}
    times_s = sorted({*trace.time_s, *(edge_s for edge_s in edges_s if edge_s < trace.duration_s)})
    grid = np.array(times_s)
    loss = trace.loss or (0.0,) * len(trace.time_s) if trace.outages_s else trace.loss
    columns: dict[str, Sequence[float]] = {"time_s": times_s}
    for name, values, scale in (
        ("rtt_ms", trace.rtt_s, 1e3),
        ("loss", loss, 1.0),
        ("up_mbps", trace.up_bits_per_s, 1e-6),
        ("down_mbps", trace.down_bits_per_s, 1e-6),
    ):
        if values is not None:
            scaled = (values_at(trace, values, grid) * scale).tolist()
            columns[name] = [float(f"{value:.12g}") for value in scaled]
    if "loss" in columns:
        columns["loss"] = np.where(in_outage(trace, grid), 1.0, columns["loss"]).tolist()
    lines = [
        f"# {trace.name.splitlines()[0] if trace.name else 'trace'}",
        f"{_DURATION}{trace.duration_s!r}",
        ",".join(columns),
        *(",".join(map(repr, row)) for row in zip(*columns.values(), strict=True)),
    ]
    return "\n".join(lines) + "\n"


# --- CSV of round-trip times, ``epoch,values`` -------------------------------------------------
# epoch in seconds, RTT in ms (Jitterbug's format).
# Several samples may share an epoch: they are spread evenly over the usual step between epochs,
# or up to the next epoch where that comes sooner, in their order. Lost probes have no row, so
# there is no loss column. A last line without a line end may be cut and is then left out.

_HEADER: Final = "epoch,values"


def read_rtt_csv(text: TraceText) -> NetworkTrace:
    samples: dict[float, list[float]] = {}
    latest_s = 0.0
    for number, cells in _table(text):
        epoch_s = text.number(number, cells.get("epoch", ""), "the epoch in seconds")
        if samples and epoch_s < latest_s:
            raise text.error(number, f"an epoch not before {latest_s:g}")
        latest_s = epoch_s
        rtt_s = text.number(number, cells.get("values", ""), "the RTT in ms") / 1000.0
        samples.setdefault(epoch_s, []).append(rtt_s)
    if not samples:
        raise text.no_rows()
    epochs_s = list(samples)
    usual_s = _usual_step_s(epochs_s)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(epochs_s)]
    times_s: list[float] = []
    for (epoch_s, group), gap_s in zip(samples.items(), [*gaps_s, usual_s], strict=True):
        spread_s = min(gap_s, usual_s)
        for place in range(len(group)):
            times_s.append(epoch_s - epochs_s[0] + spread_s * place / len(group))
    rtts_s = tuple(rtt_s for group in samples.values() for rtt_s in group)
    duration_s = epochs_s[-1] - epochs_s[0] + usual_s
    return NetworkTrace(text.name, text.source, tuple(times_s), rtts_s, duration_s)


# --- from probes that were answered or not to a trace ------------------------------------------
# A probe is sent at a time and has a round-trip time, or None when no answer came. A run of lost
# probes that lasts at least ``OUTAGE_S`` is an outage, from the first lost probe to the next
# answered one: a link that drops everything for a second is gone, and what is sent then waits.
# All other lost probes are loss, as the share of the probes in the window of ``LOSS_WINDOW_S``
# they fall into (those of outages left out), because single losses say little about their
# neighbours.

OUTAGE_S: Final = 1.0
LOSS_WINDOW_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Probe:
    """``rtt_s`` None: no answer came."""

    sent_s: float
    rtt_s: float | None


def from_probes(
    text: TraceText, probes: Sequence[Probe], step_s: float, *, counts_loss: bool = True
) -> NetworkTrace:
    """``probes`` in order of sending, at least one answered, the first at 0; the last one counts
    for ``step_s``. ``counts_loss`` False: the format cannot tell, so there is no loss column."""
    end_s = probes[-1].sent_s + step_s
    outages_s: list[tuple[float, float]] = []
    lost: list[float] = []
    run: list[Probe] = []
    for probe in (*probes, Probe(end_s, 0.0)):
        if probe.rtt_s is None:
            run.append(probe)
            continue
        if run and probe.sent_s - run[0].sent_s >= OUTAGE_S - 1e-9:
            outages_s.append((run[0].sent_s, probe.sent_s))
        elif run:
            lost += [one.sent_s for one in run]
        run = []
    answered = [(probe.sent_s, probe.rtt_s) for probe in probes if probe.rtt_s is not None]
    times_s = [time_s for time_s, _ in answered]
    times_s[0] = 0.0  # What was lost before the first answer has no delay of its own.
    return NetworkTrace(
        name=text.name,
        source=text.source,
        time_s=tuple(times_s),
        rtt_s=tuple(rtt_s for _, rtt_s in answered),
        duration_s=end_s,
        loss=_probes_loss(times_s, lost) if counts_loss else None,
        outages_s=tuple(outages_s),
    )


def _probes_loss(answered_s: Sequence[float], lost_s: Sequence[float]) -> tuple[float, ...]:
    answered_in, lost_in = _per_window(answered_s), _per_window(lost_s)
    # A window in which nothing was answered has no row; its losses are the next window's.
    for window in sorted(lost_in.keys() - answered_in.keys(), reverse=True):
        later = [other for other in answered_in if other > window]
        lost_in[min(later) if later else max(answered_in)] += lost_in.pop(window)
    windows = [int(time_s // LOSS_WINDOW_S) for time_s in answered_s]
    return tuple(lost_in[window] / (lost_in[window] + answered_in[window]) for window in windows)


def _per_window(times_s: Sequence[float]) -> Counter[int]:
    return Counter(int(time_s // LOSS_WINDOW_S) for time_s in times_s)


# --- logs of ``ping`` and ``ping -D``, one run or many of them one after the other -------------
# A run begins with a line ``PING`` (or ``Start time:``, as operators' logs have it) and numbers
# its probes. Probes leave at a steady pace, so a probe's time is its number times the pace: the
# median of arrival minus round-trip time from number to number when arrivals are stamped
# (``[epoch]`` or ``[local time]``), else the one that the run's summary implies, else 1 s, ping's
# default. Numbers that never appear are lost probes; those after the last answer are known from
# the summary. Duplicates (``DUP!``) are ignored. Runs are joined end to end: the pauses between
# them were not measured. A last line without a line end may be cut anywhere.

_STAMP: Final = r"(?:\[(?P<stamp>[^\]]+)\] ?)?"
_REPLY: Final = re.compile(
    _STAMP
    + r"\d+ bytes from .*icmp_seq=(?P<seq>[0-9]{1,9}) .*time=(?P<rtt>[\d.]+) ?ms(?P<dup>.*DUP!.*)?$"
)
_SUMMARY: Final = re.compile(
    _STAMP
    + r"(?P<sent>[0-9]{1,15}) packets transmitted,.*loss(?:, time (?P<time>[0-9]{1,15}) ?ms)?"
)
_EPOCH: Final = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")
_START: Final = re.compile(_STAMP + r"PING ")

# Lines that say nothing of their own: a probe reported lost is missing from the replies anyway.
_OTHER: Final = re.compile(
    _STAMP
    + r"(|--- .*|rtt .*|round-trip .*|(Start|End) time: \d+|\^C.*|[Ff]rom .*|no answer yet .*"
    + r"|Request timeout .*|ping: .*)$"
)
_SEQUENCE_NUMBERS: Final = 2**16
_DEFAULT_STEP_S: Final = 1.0


class _Run:
    """One run's replies: number of the probe -> (time of the reply or None, round-trip time)."""

    def __init__(self) -> None:
        self.replies: dict[int, tuple[float | None, float]] = {}
        self.sent = 0
        self.took_s: float | None = None
        self.latest = 0

    def unwrapped(self, sequence: int) -> int:
        """Numbers have 16 bits: one far below the latest has begun anew."""
        wraps, low = divmod(self.latest, _SEQUENCE_NUMBERS)
        if sequence < low - _SEQUENCE_NUMBERS // 2:
            wraps += 1
        elif sequence > low + _SEQUENCE_NUMBERS // 2 and wraps:
            wraps -= 1
        return wraps * _SEQUENCE_NUMBERS + sequence

    def step_s(self) -> float:
        times = [
            (number, at_s - rtt_s)
            for number, (at_s, rtt_s) in sorted(self.replies.items())
            if at_s is not None
        ]
        steps = [
            (later_s - earlier_s) / (later - earlier)
            for (earlier, earlier_s), (later, later_s) in itertools.pairwise(times)
        ]
        if steps and (usual_s := statistics.median_high(steps)) > 0.0:
            return usual_s
        if self.took_s and self.sent > 1:
            return self.took_s / (self.sent - 1)
        return _DEFAULT_STEP_S

    def probes(self, text: TraceText, from_s: float) -> tuple[list[Probe], float]:
        """In order of sending, the first at ``from_s``; and the pace."""
        step_s = self.step_s()
        first = 0 if 0 in self.replies else 1
        # The summary counts from the first probe; a wrong count never drops a reply.
        last = max((first + self.sent - 1, *self.replies))
        if last - first >= MAX_ROWS:
            count = last - first + 1
            raise TraceError(f"{text.path}: a run of {count} probes, but at most {MAX_ROWS} go")
        found = []
        for number in range(first, last + 1):
            reply = self.replies.get(number)
            sent_s = from_s + (number - first) * step_s
            found.append(Probe(sent_s, None if reply is None else reply[1]))
        return found, step_s


def is_ping(head: str) -> bool:
    return any(_REPLY.match(line) or _START.match(line) for line in head.splitlines()[:10])


def read_ping(text: TraceText) -> NetworkTrace:
    probes: list[Probe] = []
    end_s = step_s = 0.0
    for run in _runs(text):
        found, step_s = run.probes(text, end_s)
        probes += found
        end_s = found[-1].sent_s + step_s
    if not any(probe.rtt_s is not None for probe in probes):
        raise text.no_rows()
    return from_probes(text, probes, step_s)


def _runs(text: TraceText) -> list[_Run]:
    runs = [_Run()]
    for number, line in enumerate(text.lines, start=1):
        if reply := _REPLY.match(line):
            if reply["dup"]:
                continue
            run = runs[-1]
            sequence = run.unwrapped(int(reply["seq"]))
            run.latest = max(run.latest, sequence)
            rtt_s = text.number(number, reply["rtt"], "a round-trip time in ms") / 1000.0
            at_s = _stamped_s(text, number, reply["stamp"]) if reply["stamp"] else None
            run.replies.setdefault(sequence, (at_s, rtt_s))
        elif summary := _SUMMARY.match(line):
            runs[-1].sent = int(summary["sent"])
            runs[-1].took_s = int(summary["time"]) / 1000.0 if summary["time"] else None
        elif _START.match(line):
            runs.append(_Run())
        elif not _OTHER.match(line) and not text.may_be_cut(number):
            raise text.error(number, "a line of ping's output")
    # A run that was cut before its first answer or summary says nothing; one of which the summary
    # says that nothing came back is an outage.
    return [run for run in runs if run.replies or run.sent]


def _stamped_s(text: TraceText, number: int, stamp: str) -> float:
    if _EPOCH.fullmatch(stamp):
        return float(stamp)
    return _stamp_s(text, number, stamp, "[epoch seconds] or [YYYY-MM-DD HH:MM:SS.ffffff]")


# --- FjordLink's CSV of a Starlink dish --------------------------------------------------------
# a row a second with the state that the dish reports.
# Read are the time and the ping latency to the point of presence and, where they are there, the
# state and the share of pings dropped. The throughput columns are what was carried, not what could
# be, so there is no capacity. A second counts as lost when all its pings were, when it has no
# latency or when the dish was not ``CONNECTED``: a run of such seconds is an outage. The dish
# reports ``OBSTRUCTED`` while some pings still pass; such a second keeps its latency.

_TIME: Final = "@timestamp"
_STATE: Final = "dish_status.state"
_LATENCY: Final = "dish_status.pop_ping_latency_ms"
_DROP: Final = "dish_status.pop_ping_drop_rate"
_CARRYING: Final = ("CONNECTED", "OBSTRUCTED")


def is_starlink(head: str) -> bool:
    return head.startswith(_TIME + ",") and _LATENCY in head.partition("\n")[0].split(",")


def read_starlink(text: TraceText) -> NetworkTrace:
    times_s: list[float] = []
    up: list[bool] = []
    rows: list[tuple[float, float, float]] = []
    drops = False
    for number, cells in _table(text):
        drops |= _DROP in cells
        time_s = _stamp_s(text, number, cells.get(_TIME, ""), "a time in ISO 8601")
        if times_s and time_s <= times_s[-1]:
            raise text.error(number, "a time after that of the row before")
        latency = cells.get(_LATENCY, "")
        loss = text.number(number, cells.get(_DROP) or "0", "the share of pings dropped")
        rtt_s = text.number(number, latency or "0", "the latency in ms") / 1000.0
        times_s.append(time_s)
        carries = (cells.get(_STATE) or _CARRYING[0]) in _CARRYING
        up.append(carries and latency != "" and loss < 1.0)
        if up[-1]:
            rows.append((time_s - times_s[0], rtt_s, loss))
    if not rows:
        raise text.no_rows()
    times_s = [time_s - times_s[0] for time_s in times_s]
    end_s = times_s[-1] + _usual_step_s(times_s)
    return NetworkTrace(
        text.name,
        text.source,
        (0.0, *(time_s for time_s, _, _ in rows[1:])),
        tuple(rtt_s for _, rtt_s, _ in rows),
        end_s,
        loss=tuple(loss for _, _, loss in rows) if drops else None,
        outages_s=_outages(times_s, end_s, (not one for one in up)),
    )


# --- CICV5G's logs -----------------------------------------------------------------------------
# one application message a row, from a car to a server and back.
# Columns are separated by a space each and told by position, because the header's spelling varies
# between files: time published and time received (ms since the epoch), delay (ms), then pose and
# radio, which are not read and need not be there. The delay includes in-order delivery. Lost
# messages have no row; a gap of at least ``OUTAGE_S`` in the times published is an outage, shorter
# ones are the publisher's own pauses.


def read_cicv5g(text: TraceText) -> NetworkTrace:
    rows: list[tuple[float, float]] = []
    separator = None if "  " in text.lines[0].strip() else " "  # a table that was aligned
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
        # The lost message of an outage is the one due a step after the last that came.
        if probes and sent_s - probes[-1].sent_s >= OUTAGE_S + step_s:
            probes.append(Probe(probes[-1].sent_s + step_s, None))
        probes.append(Probe(sent_s, delay_ms / 1000.0))
    return from_probes(text, probes, step_s, counts_loss=False)


# --- Mahimahi's packet-delivery files ----------------------------------------------------------
# a line is a time in ms at which 1500 bytes may leave. Theory of operation (Netravali et al.,
# USENIX ATC 2015). Times do not decrease, repeat when several packets may leave, and the file
# starts over at its last time. Opportunities are counted in windows of ``CAPACITY_WINDOW_S``, which
# gives capacity in steps. Windows without any are joined to the next one that has some, so the
# bytes are conserved; ``OUTAGE_S`` or more of them are an outage. A file knows no delay (an RTT of
# 0) and one direction: down where its name ends so, and else up. ``NAME.up`` and ``NAME.down``
# side by side are one trace, whichever is named, as long as the shorter one; where one way is out
# both are, as no answer passes. A last line without a line end counts, as Mahimahi's own reader has
# it.

PACKET_BITS: Final = 1500 * 8
CAPACITY_WINDOW_S: Final = 0.1
_WHOLE_MS: Final = re.compile(r"[0-9]{1,15}")


_OTHER_WAY: Final = {".up": ".down", ".down": ".up"}


def is_mahimahi(head: str) -> bool:
    """Round trips in whole ms are a column of numbers too, but go down again."""
    lines = head.split("\n")
    if not lines[0] or not all(_WHOLE_MS.fullmatch(line) or not line for line in lines):
        return False
    times_ms = [int(line) for line in lines if line]
    return times_ms == sorted(times_ms)


def read_mahimahi(text: TraceText) -> NetworkTrace:
    partner = text.path.with_suffix(_OTHER_WAY.get(text.path.suffix, text.path.suffix))
    one = _one_way(text)
    if partner == text.path or not partner.is_file():
        return one
    other = _opened(partner)
    if other.source != text.source:
        raise other.error(1, f"a packet-delivery file as {text.name} is")
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
        (0.0,) * len(times_s),
        end_s,
        up_bits_per_s=tuple(values_at(up, up.up_bits_per_s or (), grid).tolist()),
        down_bits_per_s=tuple(values_at(down, down.down_bits_per_s or (), grid).tolist()),
        outages_s=_outages(times_s, end_s, out.tolist()),
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
        # What leaves at the very end of a window leaves in it: the last time ends the last one.
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
        raise TraceError(f"{text.path}: {len(times_s)} windows, but at most {MAX_ROWS} go")
    times_s[0] = 0.0
    down = text.path.suffix == ".down"
    return NetworkTrace(
        text.name,
        text.source,
        tuple(times_s),
        (0.0,) * len(times_s),
        duration_s,
        up_bits_per_s=None if down else tuple(rates),
        down_bits_per_s=tuple(rates) if down else None,
        outages_s=tuple(outages_s),
    )


FORMATS: Final[dict[str, tuple[Callable[[str], bool], Callable[[TraceText], NetworkTrace]]]] = {
    "plain": (is_plain, read_plain),
    "ping": (is_ping, read_ping),
    "rtt-csv": (lambda head: head.splitlines()[:1] == [_HEADER], read_rtt_csv),
    "cicv5g": (lambda head: head.startswith("pub_time"), read_cicv5g),
    "starlink": (is_starlink, read_starlink),
    "mahimahi": (is_mahimahi, read_mahimahi),
}

# What is looked at to tell the format: so many lines, so much of each.
_HEAD_LINES, _HEAD_CHARACTERS = 200, 4096


def read_trace(path: Path) -> NetworkTrace:
    """The trace in a file, whose format its content tells. Raises ``TraceError``."""
    text = _opened(path)
    if not text.source:
        known = f"the beginning of a known format ({', '.join(FORMATS)})"
        if re.fullmatch(r"[0-9.]+", text.lines[0]):
            known += ": round trips need their times beside them, time_s,rtt_ms"
        raise text.error(1, known)
    return FORMATS[text.source][1](text)


def _opened(path: Path) -> TraceText:
    """Its ``source`` is empty where no format begins like that. Raises ``TraceError``."""
    try:
        data = read_bytes(path, MAX_FILE_BYTES)
    except TooLargeError as error:
        raise TraceError(f"{path}: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(f"{path}:{line}: expected UTF-8 text, found byte {error.start}") from None
    lines = tuple(line.rstrip("\r") for line in content.split("\n"))
    ends_cut = lines[-1] != ""
    lines = lines if ends_cut else lines[:-1]
    head = "\n".join(line[:_HEAD_CHARACTERS] for line in lines[:_HEAD_LINES])
    format = next((known for known, (sniff, _) in FORMATS.items() if sniff(head)), "")
    text = TraceText(path, format, lines, ends_cut)
    if not any(lines):
        raise text.no_rows()
    return text
