"""Reading a trace of any known format into a ``NetworkTrace``.

The format is told by the content, never by the file's name. Every error is a ``TraceError`` that
names the file, the line and what was expected there.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from edgespec_sim.links.network_trace import MAX_ROWS, NetworkTrace, TraceError

# --- a trace file as bounded lines, and errors that say where in it ----------------------------


MAX_FILE_BYTES: Final = 2**28


@dataclass(frozen=True, slots=True)
class TraceText:
    """The lines of one file; line numbers count from 1."""

    path: Path
    name: str
    lines: tuple[str, ...]
    ends_cut: bool
    """The last line has no line end, so it may be half a line: a recording that was killed."""

    def error(self, number: int, expected: str) -> TraceError:
        line = self.lines[number - 1] if 1 <= number <= len(self.lines) else ""
        return TraceError(f"{self.path}:{number}: expected {expected}, found {line[:80]!r}")

    def number(self, number: int, text: str, what: str, low: float = 0.0) -> float:
        """``text`` of line ``number`` as a finite number of at least ``low``."""
        try:
            value = float(text)
        except ValueError:
            raise self.error(number, f"{what} as a number") from None
        if not low <= value < math.inf:
            raise self.error(number, f"{what} finite and at least {low:g}")
        return value

    def may_be_cut(self, number: int) -> bool:
        return self.ends_cut and number == len(self.lines)

    def no_rows(self) -> TraceError:
        return TraceError(f"{self.path}: holds no measurement")


def read_bytes(path: Path) -> bytes:
    """The whole file; raises ``TraceError`` when it is missing or too large."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise TraceError(f"{path}: {size} bytes, but at most {MAX_FILE_BYTES} go")
        return path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error


def as_text(path: Path, name: str, data: bytes) -> TraceText:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(f"{path}:{line}: expected UTF-8 text, found byte {error.start}") from None
    lines = tuple(line.rstrip("\r") for line in text.split("\n"))
    ends_cut = lines[-1] != ""
    return TraceText(path, name, lines if ends_cut else lines[:-1], ends_cut)


# --- the plain format --------------------------------------------------------------------------
# ``time_s,rtt_ms[,loss,up_mbps,down_mbps]``, read and written.
# The header names the columns, the optional ones in any number; times begin at 0 and increase. A
# row holds until the next one. A ``loss`` of 1 is an outage until the next row below 1; its other
# values stand all the same. ``# duration_s=...`` before the header says how long the last row
# holds, otherwise it does for as long as the one before it. Other lines with ``#`` are comments.
# A last line without a line end may be cut and is then left out.


PLAIN_FORMAT: Final = "plain"
_REQUIRED: Final = ("time_s", "rtt_ms")
_OPTIONAL: Final = ("loss", "up_mbps", "down_mbps")
_DURATION: Final = "# duration_s="


@dataclass(slots=True)
class _Table:
    columns: list[str] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)
    duration_s: float | None = None

    def column(self, name: str, scale: float = 1.0) -> tuple[float, ...] | None:
        if name not in self.columns:
            return None
        index = self.columns.index(name)
        return tuple(row[index] * scale for row in self.rows)


def is_plain(head: str) -> bool:
    lines = (line for line in head.splitlines() if not line.startswith("#"))
    return next(lines, "").startswith(",".join(_REQUIRED))


def read_plain(text: TraceText) -> NetworkTrace:
    table = _plain_table(text)
    times_s, rtts_s = table.column("time_s"), table.column("rtt_ms", 1e-3)
    if not times_s or rtts_s is None:
        raise text.no_rows()
    step_s = times_s[-1] - times_s[-2] if len(times_s) > 1 else 1.0
    duration_s = times_s[-1] + step_s if table.duration_s is None else table.duration_s
    loss = table.column("loss")
    return NetworkTrace(
        text.name,
        PLAIN_FORMAT,
        times_s,
        rtts_s,
        duration_s,
        loss=None if loss is None else tuple(0.0 if value >= 1.0 else value for value in loss),
        up_bits_per_s=table.column("up_mbps", 1e6),
        down_bits_per_s=table.column("down_mbps", 1e6),
        outages_s=_plain_outages(times_s, loss or (), duration_s),
    )


def _plain_table(text: TraceText) -> _Table:
    table = _Table()
    for number, line in enumerate(text.lines, start=1):
        if line.startswith(_DURATION):
            table.duration_s = text.number(number, line[len(_DURATION) :], "duration_s")
        elif line.startswith("#"):
            continue
        elif not table.columns:
            table.columns = line.split(",")
            known = (*_REQUIRED, *_OPTIONAL)
            names = table.columns
            if names[:2] != [*_REQUIRED] or len({*names} & {*known}) != len(names):
                raise text.error(number, "the header time_s,rtt_ms[,loss,up_mbps,down_mbps]")
        elif not text.may_be_cut(number):
            table.rows.append(_plain_row(text, number, table))
    return table


def _plain_row(text: TraceText, number: int, table: _Table) -> list[float]:
    fields = text.lines[number - 1].split(",")
    if len(fields) != len(table.columns):
        raise text.error(number, f"{len(table.columns)} columns ({','.join(table.columns)})")
    row = [
        text.number(number, value, name) for name, value in zip(table.columns, fields, strict=True)
    ]
    values = dict(zip(table.columns, row, strict=True))
    if not table.rows and row[0] != 0.0:
        raise text.error(number, "the first time_s to be 0")
    if table.rows and row[0] <= table.rows[-1][0]:
        raise text.error(number, f"a time_s after {table.rows[-1][0]:g}")
    if values.get("loss", 0.0) > 1.0:
        raise text.error(number, "a loss in [0, 1], 1 for an outage")
    for name in ("up_mbps", "down_mbps"):
        if values.get(name) == 0.0:
            raise text.error(number, f"{name} above 0 (an outage is a loss of 1)")
    return row


def _plain_outages(
    times_s: tuple[float, ...], loss: tuple[float, ...], duration_s: float
) -> tuple[tuple[float, float], ...]:
    found: list[tuple[float, float]] = []
    for time_s, until_s, value in zip(times_s, (*times_s[1:], duration_s), loss, strict=False):
        if value < 1.0:
            continue
        if found and found[-1][1] == time_s:
            found[-1] = (found[-1][0], until_s)
        else:
            found.append((time_s, until_s))
    return tuple(found)


def write_plain(trace: NetworkTrace) -> str:
    """The trace as text that ``read`` turns into one that behaves the same: rows are added where an
    outage begins and ends within a row. Reading and writing that one again changes nothing."""
    columns: list[tuple[str, tuple[float, ...], float]] = [("rtt_ms", trace.rtt_s, 1e3)]
    if trace.loss is not None or trace.outages_s:
        columns.append(("loss", trace.loss or (0.0,) * len(trace.time_s), 1.0))
    if trace.up_bits_per_s is not None:
        columns.append(("up_mbps", trace.up_bits_per_s, 1e-6))
    if trace.down_bits_per_s is not None:
        columns.append(("down_mbps", trace.down_bits_per_s, 1e-6))
    edges_s = {edge_s for outage_s in trace.outages_s for edge_s in outage_s}
    times_s = sorted({*trace.time_s, *(edge_s for edge_s in edges_s if edge_s < trace.duration_s)})
    lines = [
        f"# {trace.name.splitlines()[0] if trace.name else 'trace'}",
        f"{_DURATION}{trace.duration_s!r}",
        ",".join(("time_s", *(name for name, _, _ in columns))),
    ]
    row = outage = 0
    for time_s in times_s:
        while row + 1 < len(trace.time_s) and trace.time_s[row + 1] <= time_s:
            row += 1
        while outage < len(trace.outages_s) and trace.outages_s[outage][1] <= time_s:
            outage += 1
        out = outage < len(trace.outages_s) and trace.outages_s[outage][0] <= time_s
        values = [
            1.0 if out and name == "loss" else float(f"{values[row] * scale:.12g}")
            for name, values, scale in columns
        ]
        lines.append(",".join(repr(value) for value in (time_s, *values)))
    return "\n".join(lines) + "\n"


# --- cSV of round-trip times, ``epoch,values`` -------------------------------------------------
# epoch in seconds, RTT in ms (Jitterbug's format).
# Several samples may share an epoch: they are spread evenly over the usual step between epochs,
# or up to the next epoch where that comes sooner, in their order. Lost probes have no row, so
# there is no loss column. A last line without a line end may be cut and is then left out.


RTT_CSV_FORMAT: Final = "rtt-csv"
_HEADER: Final = "epoch,values"


def is_rtt_csv(head: str) -> bool:
    return head.splitlines()[:1] == [_HEADER]


def read_rtt_csv(text: TraceText) -> NetworkTrace:
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
    return NetworkTrace(text.name, RTT_CSV_FORMAT, tuple(times_s), tuple(rtts_s), duration_s)


# --- from probes that were answered or not to a trace ------------------------------------------
# which losses are loss, and which an outage.
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
    name: str, source: str, probes: Sequence[Probe], step_s: float, *, counts_loss: bool = True
) -> NetworkTrace:
    """``probes`` in order of sending, at least one answered, the first at 0; the last one counts
    for ``step_s``. ``counts_loss`` False: the format cannot tell, so there is no loss column."""
    end_s = probes[-1].sent_s + step_s
    outages_s: list[tuple[float, float]] = []
    loss_runs: list[list[Probe]] = []
    run: list[Probe] = []
    for probe in (*probes, Probe(end_s, 0.0)):
        if probe.rtt_s is None:
            run.append(probe)
            continue
        if run and probe.sent_s - run[0].sent_s >= OUTAGE_S - 1e-9:
            outages_s.append((run[0].sent_s, probe.sent_s))
        elif run:
            loss_runs.append(run)
        run = []
    answered = [(probe.sent_s, probe.rtt_s) for probe in probes if probe.rtt_s is not None]
    lost = [probe.sent_s for loss_run in loss_runs for probe in loss_run]
    times_s = [time_s for time_s, _ in answered]
    times_s[0] = 0.0  # What was lost before the first answer has no delay of its own.
    return NetworkTrace(
        name=name,
        source=source,
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
        target = min(later) if later else max(answered_in)
        lost_in[target] = lost_in.get(target, 0) + lost_in.pop(window)
    windows = [int(time_s // LOSS_WINDOW_S) for time_s in answered_s]
    return tuple(
        lost_in.get(window, 0) / (lost_in.get(window, 0) + answered_in[window])
        for window in windows
    )


def _per_window(times_s: Sequence[float]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for time_s in times_s:
        window = int(time_s // LOSS_WINDOW_S)
        counts[window] = counts.get(window, 0) + 1
    return counts


# --- logs of ``ping`` and ``ping -D``, one run or many of them one after the other -------------
# A run begins with a line ``PING`` (or ``Start time:``, as operators' logs have it) and numbers
# its probes. Probes leave at a steady pace, so a probe's time is its number times the pace: the
# median of arrival minus round-trip time from number to number when arrivals are stamped
# (``[epoch]`` or ``[local time]``), else the one that the run's summary implies, else 1 s, ping's
# default. Numbers that never appear are lost probes; those after the last answer are known from
# the summary. Duplicates (``DUP!``) are ignored. Runs are joined end to end: the pauses between
# them were not measured. A last line without a line end may be cut anywhere.


PING_FORMAT: Final = "ping"
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
        steps = sorted(
            (later_s - earlier_s) / (later - earlier)
            for (earlier, earlier_s), (later, later_s) in itertools.pairwise(times)
        )
        if steps and steps[len(steps) // 2] > 0.0:
            return steps[len(steps) // 2]
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
    return from_probes(text.name, PING_FORMAT, probes, step_s)


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
            at_s = _stamp_s(text, number, reply["stamp"]) if reply["stamp"] else None
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


def _stamp_s(text: TraceText, number: int, stamp: str) -> float:
    if _EPOCH.fullmatch(stamp):
        return float(stamp)
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (ValueError, OverflowError):
        raise text.error(number, "[epoch seconds] or [YYYY-MM-DD HH:MM:SS.ffffff]") from None


# --- fjordLink's CSV of a Starlink dish --------------------------------------------------------
# a row a second with the state that the dish reports.
# Read are the time, the state, the ping latency to the point of presence and the share of pings
# dropped. The throughput columns are what was carried, not what could be, so there is no
# capacity. A second counts as lost when all its pings were, when it has no latency or when the
# dish was not ``CONNECTED``: a run of such seconds is an outage. The dish reports ``OBSTRUCTED``
# while some pings still pass; such a second keeps its latency.


STARLINK_FORMAT: Final = "starlink"
_TIME: Final = "@timestamp"
_STATE: Final = "dish_status.state"
_LATENCY: Final = "dish_status.pop_ping_latency_ms"
_DROP: Final = "dish_status.pop_ping_drop_rate"
_CARRYING: Final = ("CONNECTED", "OBSTRUCTED")


def is_starlink(head: str) -> bool:
    return head.startswith(_TIME + ",") and _LATENCY in head.partition("\n")[0]


def read_starlink(text: TraceText) -> NetworkTrace:
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
        time_s = _starlink_time_s(text, number, fields[time_at])
        if times_s and time_s <= times_s[-1]:
            raise text.error(number, "a time after that of the row before")
        loss = text.number(number, fields[drop_at] or "1", "the share of pings dropped")
        up = fields[state_at] in _CARRYING and fields[latency_at] and loss < 1.0
        rtt_s = text.number(number, fields[latency_at] or "0", "the latency in ms") / 1000.0
        times_s.append(time_s)
        seconds.append((rtt_s, loss) if up else None)
    if not any(seconds):
        raise text.no_rows()
    return _starlink_trace(text.name, [time_s - times_s[0] for time_s in times_s], seconds)


def _starlink_trace(
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
        STARLINK_FORMAT,
        (0.0, *(time_s for time_s, _, _ in rows[1:])),
        tuple(rtt_s for _, rtt_s, _ in rows),
        end_s,
        loss=tuple(loss for _, _, loss in rows),
        outages_s=tuple(outages_s),
    )


def _starlink_time_s(text: TraceText, number: int, stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (ValueError, OverflowError):
        raise text.error(number, "a time in ISO 8601") from None


# --- cICV5G's logs -----------------------------------------------------------------------------
# one application message a row, from a car to a server and back.
# Columns are separated by spaces and told by position, because the header's spelling varies
# between files: time published and time received (ms since the epoch), delay (ms), then pose and
# radio. The delay includes in-order delivery. Lost messages have no row; a gap of at least
# ``OUTAGE_S`` in the times published is an outage, shorter ones are the publisher's own pauses.


CICV5G_FORMAT: Final = "cicv5g"
_MIN_COLUMNS: Final = 10


def is_cicv5g(head: str) -> bool:
    return head.startswith("pub_time")


def read_cicv5g(text: TraceText) -> NetworkTrace:
    if not is_cicv5g(text.lines[0]):
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
    return from_probes(text.name, CICV5G_FORMAT, probes, step_s, counts_loss=False)


# --- mahimahi's packet-delivery files ----------------------------------------------------------
# a line is a time in ms at which 1500 bytes may leave. Theory of operation (Netravali et al.,
# USENIX ATC 2015). Times do not decrease, repeat when several packets may leave, and the file
# starts over at its last time. Opportunities are counted in windows of ``CAPACITY_WINDOW_S``, which
# gives capacity in steps. Windows without any are joined to the next one that has some, so the
# bytes are conserved; ``OUTAGE_S`` or more of them are an outage. A file knows one direction and no
# delay: it is the up column, with an RTT of 0. A last line without a line end counts, as Mahimahi's
# own reader has it.


MAHIMAHI_FORMAT: Final = "mahimahi"
PACKET_BITS: Final = 1500 * 8
CAPACITY_WINDOW_S: Final = 0.1
_WHOLE_MS: Final = re.compile(r"[0-9]{1,15}")


def is_mahimahi(head: str) -> bool:
    lines = head.split("\n")[:20]
    return bool(lines[0]) and all(_WHOLE_MS.fullmatch(line) or not line for line in lines)


def read_mahimahi(text: TraceText) -> NetworkTrace:
    counts: dict[int, int] = {}
    previous_ms = 0
    for number, line in enumerate(text.lines, start=1):
        if not _WHOLE_MS.fullmatch(line.strip()):
            raise text.error(number, "a time in whole ms, of at most 15 digits")
        time_ms = int(line)
        if time_ms < previous_ms:
            raise text.error(number, f"a time not before {previous_ms} ms")
        previous_ms = time_ms
        # What leaves at the very end of a window leaves in it: the last time ends the last one.
        window = max(math.ceil(time_ms / (CAPACITY_WINDOW_S * 1000.0)) - 1, 0)
        counts[window] = counts.get(window, 0) + 1
    if previous_ms == 0:
        raise TraceError(f"{text.path}: lasts 0 ms, but must last longer")
    duration_s = previous_ms / 1000.0
    times_s: list[float] = []
    rates: list[float] = []
    outages_s: list[tuple[float, float]] = []
    free_s = 0.0
    for window, count in sorted(counts.items()):
        start_s, end_s = (
            window * CAPACITY_WINDOW_S,
            min((window + 1) * CAPACITY_WINDOW_S, duration_s),
        )
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
        MAHIMAHI_FORMAT,
        tuple(times_s),
        (0.0,) * len(times_s),
        duration_s,
        up_bits_per_s=tuple(rates),
        outages_s=tuple(outages_s),
    )


_TEXT_FORMATS: Final[
    dict[str, tuple[Callable[[str], bool], Callable[[TraceText], NetworkTrace]]]
] = {
    PLAIN_FORMAT: (is_plain, read_plain),
    PING_FORMAT: (is_ping, read_ping),
    RTT_CSV_FORMAT: (is_rtt_csv, read_rtt_csv),
    CICV5G_FORMAT: (is_cicv5g, read_cicv5g),
    STARLINK_FORMAT: (is_starlink, read_starlink),
    MAHIMAHI_FORMAT: (is_mahimahi, read_mahimahi),
}
FORMATS: Final = tuple(_TEXT_FORMATS)

# What is looked at to tell the format.
_HEAD_CHARACTERS: Final = 8192


def read_trace(path: Path) -> NetworkTrace:
    """The trace in a file, whose format its content tells. Raises ``TraceError``."""
    data = read_bytes(path)
    text = as_text(path, path.name, data)
    if not any(text.lines):
        raise text.no_rows()
    head = "\n".join(text.lines[:200])[:_HEAD_CHARACTERS]
    format = next((known for known, (sniff, _) in _TEXT_FORMATS.items() if sniff(head)), None)
    if format is None:
        raise text.error(1, f"the beginning of a known format ({', '.join(FORMATS)})")
    return _TEXT_FORMATS[format][1](text)
