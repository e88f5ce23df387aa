"""The trace of a run as spans of time in lanes, one set of lanes per session.

Theory of operation. Each side's lines become whole spans (draft, stall; queue, pass) and halves of
spans that cross the link (uplink, downlink). At the end the halves are matched: a draft by its
session, first node id and size, a commit by its session, position and size. Each arrival is matched
to the latest sending before it, so a message that was lost and sent again matches the copy that
arrived. The trace of only one side yields the lanes of that side.

    draft     a draft step: StartStep to StepDone
    uplink    a draft in transit: Transmit to its arrival at the verifier
    queue     from the arrival of the oldest node of a pass to the start of that pass
    pass      RunBatch to BatchDone, of every session in the batch
    downlink  a commit in transit: SendTo to its arrival at the device
    stall     the device waits: the generation runs, but no draft step does; ends where a commit
              arrives

Clocks. The monotonic clocks of two machines are unrelated. Unless the clocks are shared, the offset
of a session is estimated as half the difference of its least uplink and least downlink delay, which
is right if the least delays are equal (NTP's assumption, RFC 5905 section 8). Several verifiers are
assumed to share a clock. The resulting times are on the verifiers' clock, from 0.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

from edgespec.config.files import open_to_read

# --- lines of a trace (``telemetry/trace.py``) as plain dicts, one at a time -------------------

TraceLine = dict[str, Any]
DEVICE: Final = "device"
VERIFIER: Final = "verifier"
_FARTHEST_S: Final = 1e12
_KEYS: Final = ("at_s", "side", "session", "kind", "name")


class TraceLineError(ValueError):
    """A trace cannot be read. The message names the file, the line and what is wrong."""


def read_lines(paths: Sequence[Path]) -> Iterator[TraceLine]:
    """Yield the lines of all files, one file after another. An incomplete last line, as of a killed
    run, is left out. Raises ``TraceLineError`` and ``OSError``."""
    for path in paths:
        with open_to_read(path) as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith("\n"):
                    try:
                        json.loads(text)
                    except ValueError:
                        break
                yield _parse_line(path, number, text)


def _parse_line(path: Path, number: int, text: str) -> TraceLine:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise TraceLineError(f"{path}:{number}: not a line of a trace: {error}") from error
    if not isinstance(line, dict):
        raise TraceLineError(f"{path}:{number}: a line of a trace must be an object")
    for key in _KEYS:
        if key not in line:
            raise TraceLineError(f"{path}:{number}: a line of a trace must have {key!r}")
    at_s, side = line["at_s"], line["side"]
    timed = isinstance(at_s, int | float) and abs(at_s) <= _FARTHEST_S
    if not timed or side not in (DEVICE, VERIFIER):
        where = f"at_s {at_s!r} on side {side!r}"
        raise TraceLineError(f"{path}:{number}: {where} is not a valid time and side")
    for key in ("session", "name"):
        if not isinstance(line[key], str):
            raise TraceLineError(f"{path}:{number}: {key} is {line[key]!r}, but must be text")
    return line


# --- the parts of a timeline, and rows for spans that overlap in a lane ------------------------

Args = dict[str, int | float | str]


class Lane(Enum):
    """The kind of activity of a span, in the order in which a token passes through them."""

    DRAFT = "draft"
    UPLINK = "uplink"
    QUEUE = "queue"
    PASS = "pass"
    DOWNLINK = "downlink"
    STALL = "stall"


_DEVICE_LANES: Final = (Lane.DRAFT, Lane.STALL)
"""Lanes whose times are on the device's own clock."""


@dataclass(frozen=True, slots=True)
class Span:
    session: str
    lane: Lane
    start_s: float
    end_s: float
    """End of the span, at least ``start_s``."""
    name: str
    args: Args = field(default_factory=dict)
    """Details for the reader: tokens, rows, accepted."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An instantaneous event: a correction, a lost link, a reconnect, the end."""

    session: str
    at_s: float
    name: str
    args: Args = field(default_factory=dict)


class CrossingKey(NamedTuple):
    """Identifies a message at both ends of the link."""

    session: str
    lane: Lane
    number: int
    """First node id or position of the message."""
    size: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """A message that is sent over the link, on the sender's clock."""

    at_s: float
    name: str
    args: Args


def assign_rows(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Yield each span with the lowest row in which it overlaps no span of the same session and
    lane. ``spans`` must be ordered by start."""
    ends: dict[tuple[str, Lane], list[float]] = {}
    for span in spans:
        rows = ends.setdefault((span.session, span.lane), [])
        row = next((i for i, end_s in enumerate(rows) if end_s <= span.start_s), len(rows))
        if row == len(rows):
            rows.append(span.end_s)
        rows[row] = span.end_s
        yield row, span


@dataclass(slots=True)
class _TraceParts:
    """Spans, marks and messages collected so far, each time on the clock of the side that recorded
    it."""

    spans: list[Span] = field(default_factory=list)
    marks: list[tuple[bool, Mark]] = field(default_factory=list)
    """Marks, each with whether a device recorded it."""
    sent: dict[CrossingKey, list[Crossing]] = field(default_factory=lambda: defaultdict(list))
    arrived: dict[CrossingKey, list[float]] = field(default_factory=lambda: defaultdict(list))
    ends: int = 0
    """Number of sendings and arrivals recorded."""

    def record_sent(self, key: CrossingKey, at_s: float, name: str, args: Args) -> None:
        self.sent[key].append(Crossing(at_s, name, args))
        self.ends += 1

    def record_arrival(self, key: CrossingKey, at_s: float) -> None:
        self.arrived[key].append(at_s)
        self.ends += 1


# --- one device session's lines as spans -------------------------------------------------------


class DeviceSpans:
    """Collects one session's spans. ``read`` takes its lines in order; several generations may have
    the same name."""

    def __init__(self, parts: _TraceParts) -> None:
        self._parts = parts
        self._step: tuple[float, int] | None = None
        """Start of the running step, and the number of tokens fed."""
        self._waiting_since: float | None = None
        self._ended = True

    def read(self, line: TraceLine) -> None:
        at_s, session = line["at_s"], line["session"]
        match line["name"]:
            case "Start":
                self._ended, self._waiting_since = False, at_s
            case "StartStep":
                self._stall(session, at_s)
                self._step = (at_s, len(line["feed"]))
            case "StepDone" | "StepFailed":
                self._end_step(line)
            case "Transmit" if line["message"]["name"] == "Draft":
                self._send(session, at_s, line["message"])
            case "Commit" if not self._ended:
                key = CrossingKey(session, Lane.DOWNLINK, line["position"], len(line["tokens"]))
                self._parts.record_arrival(key, at_s)
                self._stall(session, at_s)
                self._wait(at_s)
            case "Deliver":
                corrected = line["kinds"].count("corrected")
                if corrected:
                    self._mark(line, "correction", tokens=corrected, position=line["position"])
            case "LinkDown":
                self._mark(line, "link down", why=str(line["why"]))
            case "DraftRestricted":
                self._mark(line, "draft's memory", window=line["window"], width=line["width"])
            case "Connected":
                self._mark(line, "connected")
            case "Finish" | "Fail":
                self._end_generation(line)

    def _send(self, session: str, at_s: float, draft: TraceLine) -> None:
        size = len(draft["tokens"])
        key = CrossingKey(session, Lane.UPLINK, draft["first_node_id"], size)
        name = f"draft of {size}" if size else "no draft"
        args: Args = {"tokens": size, "first_node_id": draft["first_node_id"]}
        self._parts.record_sent(key, at_s, name, args)

    def _end_step(self, line: TraceLine) -> None:
        if self._step is not None:
            start_s, fed = self._step
            args: Args = {"fed": fed, "guesses": len(line.get("candidates", ()))}
            name = "draft step" if line["name"] == "StepDone" else "failed step"
            span = Span(line["session"], Lane.DRAFT, start_s, line["at_s"], name, args)
            self._parts.spans.append(span)
        self._step = None
        self._wait(line["at_s"])

    def _wait(self, at_s: float) -> None:
        if not self._ended and self._step is None:
            self._waiting_since = at_s

    def _stall(self, session: str, at_s: float) -> None:
        """Record the wait that ends now, if there was one."""
        since, self._waiting_since = self._waiting_since, None
        if since is not None and at_s > since:
            self._parts.spans.append(Span(session, Lane.STALL, since, at_s, "waits"))

    def _end_generation(self, line: TraceLine) -> None:
        if not self._ended:
            self._stall(line["session"], line["at_s"])
            self._ended = True
            if line["name"] == "Fail":
                self._mark(line, "failed", why=str(line["why"]))
            else:
                self._mark(line, "finished", reason=str(line["reason"]))

    def _mark(self, line: TraceLine, name: str, **args: int | float | str) -> None:
        self._parts.marks.append((True, Mark(line["session"], line["at_s"], name, args)))


# --- one verifier's lines as spans -------------------------------------------------------------


class VerifierSpans:
    """Collects one verifier's spans. ``read`` takes its lines in order."""

    def __init__(self, parts: _TraceParts) -> None:
        self._parts = parts
        self._session_of: dict[int, str] = {}
        self._batch: tuple[float, list[TraceLine]] | None = None
        self._passes: dict[str, Span] = {}
        """The last finished pass of each session, until its commit is read."""

    def read(self, line: TraceLine) -> None:
        at_s = line["at_s"]
        match line["name"]:
            case "StreamOpened":
                self._session_of[line["stream"]] = line["request"]["session_id"]
            case "StreamLost":
                lost = self._session_of.pop(line["stream"], None)
                if lost is not None:
                    self._parts.marks.append((False, Mark(lost, at_s, "stream lost")))
            case "CloseStream":
                self._session_of.pop(line["stream"], None)
            case "StreamMessage" if line["message"]["name"] == "Draft":
                self._on_draft(line["stream"], at_s, line["message"])
            case "RunBatch":
                self._batch = (at_s, line["requests"])
            case "BatchDone" | "BatchFailed":
                self._end_pass(at_s, failed=line["name"] == "BatchFailed")
            case "SendTo" if line["message"]["name"] == "Commit":
                self._on_commit(line["stream"], at_s, line["message"])

    def _on_draft(self, stream: int, at_s: float, draft: TraceLine) -> None:
        if (session := self._session_of.get(stream)) is not None:
            key = CrossingKey(session, Lane.UPLINK, draft["first_node_id"], len(draft["tokens"]))
            self._parts.record_arrival(key, at_s)

    def _end_pass(self, at_s: float, *, failed: bool) -> None:
        if self._batch is None:
            return  # The trace begins in the middle of a pass.
        start_s, requests = self._batch
        self._batch = None
        rows = [len(request["feed"]) + len(request["tokens"]) for request in requests]
        for request, own in zip(requests, rows, strict=True):
            args: Args = {
                "rows": own,
                "nodes": len(request["tokens"]),
                "batch_rows": sum(rows),
                "batch_sessions": len(requests),
            }
            name = "failed pass" if failed else "pass" if request["sample"] else "prefill"
            span = Span(request["key"], Lane.PASS, start_s, at_s, name, args)
            self._passes[span.session] = span
            self._parts.spans.append(span)

    def _on_commit(self, stream: int, at_s: float, commit: TraceLine) -> None:
        session = self._session_of.get(stream)
        if session is None:
            return
        tokens, accepted = len(commit["tokens"]), commit["accepted"]
        ended = self._passes.pop(session, None)
        if ended is not None and commit["verify_us"]:
            ended.args.update({"committed": tokens, "accepted": accepted})
            self._record_queue(ended, commit)
        key = CrossingKey(session, Lane.DOWNLINK, commit["position"], tokens)
        args: Args = {"tokens": tokens, "accepted": accepted, "stale": commit["stale"]}
        self._parts.record_sent(key, at_s, f"commit of {tokens}", args)

    def _record_queue(self, finished: Span, commit: TraceLine) -> None:
        """Record the wait of a pass's draft nodes. Only the commit shows which arrivals the pass
        used, since others had become stale."""
        if commit["rows"] and commit["queue_us"]:
            since_s = finished.start_s - commit["queue_us"] / 1e6
            args: Args = {"nodes": commit["rows"]}
            span = Span(finished.session, Lane.QUEUE, since_s, finished.start_s, "waits", args)
            self._parts.spans.append(span)


MAX_SPANS: Final = 200_000

# Covers two clock readings for one moment, and rounding to whole microseconds.
_SLACK_S: Final = 2e-6


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans are ordered by start, sessions by their first span or mark."""

    sessions: tuple[str, ...]
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]
    clock_offsets_s: Mapping[str, float]
    """Seconds added to a device's clock, by session. Only estimated offsets are listed."""
    truncated: bool = False
    """Whether the trace continues after ``MAX_SPANS``."""


def build_timeline(lines: Iterable[TraceLine], *, one_clock: bool = False) -> Timeline:
    """Build the timeline. ``lines`` are read once; the sides may be interleaved in any way, but
    each side must be in order. ``one_clock`` means that both sides share one clock."""
    parts, truncated = _TraceParts(), False
    devices: dict[str, DeviceSpans] = defaultdict(lambda: DeviceSpans(parts))
    verifiers: dict[str, VerifierSpans] = defaultdict(lambda: VerifierSpans(parts))
    for line in lines:
        (devices if line["side"] == DEVICE else verifiers)[line["session"]].read(line)
        if len(parts.spans) + parts.ends + len(parts.marks) >= MAX_SPANS:
            truncated = True
            break
    offsets = {} if one_clock else _estimate_offsets(parts)
    spans = [span for span in parts.spans if span.lane not in _DEVICE_LANES]
    for span in parts.spans:
        if span.lane in _DEVICE_LANES:
            spans.append(_shift(span, offsets.get(span.session, 0.0)))
    spans += _pair_crossings(parts, offsets)
    placed = [
        replace(mark, at_s=mark.at_s + (offsets.get(mark.session, 0.0) if on_device else 0.0))
        for on_device, mark in parts.marks
    ]
    return _start_at_zero(spans, placed, offsets, truncated)


def _estimate_offsets(parts: _TraceParts) -> dict[str, float]:
    """Estimate the seconds to add to each session's device clock, from messages that were sent and
    arrived exactly once."""
    least: dict[tuple[str, Lane], float] = {}
    for key, ends in parts.arrived.items():
        starts = parts.sent.get(key, ())
        if len(starts) == len(ends) == 1:
            delay_s = ends[0] - starts[0].at_s
            which = (key.session, key.lane)
            least[which] = min(delay_s, least.get(which, delay_s))
    return {
        session: (up_s - least[session, Lane.DOWNLINK]) / 2
        for (session, lane), up_s in least.items()
        if lane is Lane.UPLINK and (session, Lane.DOWNLINK) in least
    }


def _pair_crossings(parts: _TraceParts, offsets: Mapping[str, float]) -> Iterator[Span]:
    for key, ends in parts.arrived.items():
        shift_s = offsets.get(key.session, 0.0)
        up_s, down_s = (shift_s, 0.0) if key.lane is Lane.UPLINK else (0.0, shift_s)
        starts = sorted(parts.sent.get(key, ()), key=lambda crossing: crossing.at_s)
        for at_s in sorted(ends):
            end_s = at_s + down_s
            count = bisect_right(starts, end_s + _SLACK_S, key=lambda one: one.at_s + up_s)
            if not count:
                continue  # It was sent before the trace begins.
            latest = starts[count - 1]
            del starts[:count]
            start_s = latest.at_s + up_s
            yield Span(
                key.session, key.lane, start_s, max(start_s, end_s), latest.name, latest.args
            )


def _shift(span: Span, offset_s: float) -> Span:
    if not offset_s:
        return span
    return replace(span, start_s=span.start_s + offset_s, end_s=span.end_s + offset_s)


def _start_at_zero(
    spans: list[Span], marks: list[Mark], offsets: Mapping[str, float], truncated: bool
) -> Timeline:
    starts = [span.start_s for span in spans] + [mark.at_s for mark in marks]
    zero_s = min(starts, default=0.0)
    ordered = sorted((_shift(span, -zero_s) for span in spans), key=lambda span: span.start_s)
    placed = sorted(
        (replace(mark, at_s=mark.at_s - zero_s) for mark in marks), key=lambda mark: mark.at_s
    )
    first: dict[str, float] = {}
    for session, at_s in [
        *((span.session, span.start_s) for span in ordered),
        *((mark.session, mark.at_s) for mark in placed),
    ]:
        first[session] = min(at_s, first.get(session, at_s))
    sessions = tuple(sorted(first, key=lambda session: (first[session], session)))
    return Timeline(sessions, tuple(ordered), tuple(placed), dict(offsets), truncated)


# -----------------------------------------------------------------------------------------------
# A timeline in the Chrome trace-event format, which ui.perfetto.dev and chrome://tracing open. A
# session is a process and a lane is one of its threads; spans that overlap in one lane (several
# drafts in flight) go to further threads. Source: Google, "Trace Event Format", complete ("X"),
# instant ("i") and metadata ("M") events; ``ts`` and ``dur`` are microseconds.


_LANES: Final = {lane: number for number, lane in enumerate(Lane)}

# Thread numbers: the first row of a lane is a multiple of this, and its further rows follow.
_ROWS_MAX: Final = 1000


def perfetto_json(timeline: Timeline) -> str:
    """Return the timeline as one JSON object for the viewers."""
    events = list(_write_metadata(timeline)) + sorted(
        _write_events(timeline), key=lambda event: event["ts"]
    )
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _write_metadata(timeline: Timeline) -> Iterator[dict[str, Any]]:
    numbers = _process_numbers(timeline)
    for session, pid in numbers.items():
        yield _metadata_event("process_name", pid, 0, name=session)
        yield _metadata_event("process_sort_index", pid, 0, sort_index=pid)
    threads = {(span.session, span.lane, row) for row, span in assign_rows(timeline.spans)}
    for session, lane, row in sorted(
        threads, key=lambda t: (numbers[t[0]], _thread_number(t[1], t[2]))
    ):
        pid, tid = numbers[session], _thread_number(lane, row)
        yield _metadata_event(
            "thread_name", pid, tid, name=lane.value + (f" {row + 1}" if row else "")
        )
        yield _metadata_event("thread_sort_index", pid, tid, sort_index=tid)


def _metadata_event(what: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}


def _write_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    numbers = _process_numbers(timeline)
    for row, span in assign_rows(timeline.spans):
        start_us = round(span.start_s * 1e6)
        yield {
            "name": span.name,
            "cat": span.lane.value,
            "ph": "X",
            "pid": numbers[span.session],
            "tid": _thread_number(span.lane, row),
            "ts": start_us,
            "dur": round(span.end_s * 1e6) - start_us,
            "args": span.args,
        }
    for mark in timeline.marks:
        yield {
            "name": mark.name,
            "cat": "mark",
            "ph": "i",
            "s": "p",
            "pid": numbers[mark.session],
            "tid": 0,
            "ts": round(mark.at_s * 1e6),
            "args": mark.args,
        }


def _process_numbers(timeline: Timeline) -> dict[str, int]:
    return {session: number for number, session in enumerate(timeline.sessions, start=1)}


def _thread_number(lane: Lane, row: int) -> int:
    return 1 + _LANES[lane] * _ROWS_MAX + min(row, _ROWS_MAX - 1)
