"""Who did what when: the trace of a run as spans in lanes, a set of lanes a session.

Theory of operation. Each side's lines become spans of their own (draft, stall; queue, pass) and
halves of spans that cross the link (uplink, downlink). At the end the halves are matched: a draft
by its session, first node id and size, a commit by its session, position and size; each arrival
takes the latest sending before it, so a message that was lost and sent again is matched to the
copy that came. With one side's trace there are the lanes that side can know.

    draft     a draft step: StartStep to StepDone
    uplink    a draft on its way: Transmit to its arrival at the verifier
    queue     from the arrival of the oldest node of a pass to the start of that pass
    pass      RunBatch to BatchDone, of every session in the batch
    downlink  a commit on its way: SendTo to its arrival at the device
    stall     the device waits: the generation runs, but no draft step does; cut where a commit
              arrives

Clocks. Two machines' monotonic clocks have nothing in common. Unless told that the clocks are
shared, the offset of a session is estimated as half the difference of its least uplink and least
downlink delay, which is right if the least delays are equal (NTP's assumption, RFC 5905 section
8). Several verifiers are taken to share a clock. Times come out on the verifiers' clock, from 0.
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

Line = dict[str, Any]
DEVICE: Final = "device"
VERIFIER: Final = "verifier"
_FARTHEST_S: Final = 1e12
_KEYS: Final = ("at_s", "side", "session", "kind", "name")


class TraceLineError(ValueError):
    """A trace cannot be read; the message names the file, the line and what is wrong."""


def read_lines(paths: Sequence[Path]) -> Iterator[Line]:
    """All lines, file by file. A last line that was cut off is left out, as by a run that was
    killed. Raises ``TraceLineError``, ``OSError``."""
    for path in paths:
        with open_to_read(path) as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith("\n"):
                    try:
                        json.loads(text)
                    except ValueError:
                        break
                yield _parsed(path, number, text)


def _parsed(path: Path, number: int, text: str) -> Line:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise TraceLineError(f"{path}:{number}: not a line of a trace: {error}") from error
    if not isinstance(line, dict):
        raise TraceLineError(f"{path}:{number}: a line of a trace is an object")
    for key in _KEYS:
        if key not in line:
            raise TraceLineError(f"{path}:{number}: a line of a trace has {key!r}")
    at_s, side = line["at_s"], line["side"]
    timed = isinstance(at_s, int | float) and abs(at_s) <= _FARTHEST_S
    if not timed or side not in (DEVICE, VERIFIER):
        where = f"at_s {at_s!r} on side {side!r}"
        raise TraceLineError(f"{path}:{number}: {where} is no place in a run")
    for key in ("session", "name"):
        if not isinstance(line[key], str):
            raise TraceLineError(f"{path}:{number}: {key} is {line[key]!r}, but must be text")
    return line


# --- the parts of a timeline, and how spans that overlap share a lane --------------------------

Args = dict[str, int | float | str]


class Lane(Enum):
    """What a span of time went on, in the order a token meets them."""

    DRAFT = "draft"
    UPLINK = "uplink"
    QUEUE = "queue"
    PASS = "pass"
    DOWNLINK = "downlink"
    STALL = "stall"


_OF_DEVICE: Final = (Lane.DRAFT, Lane.STALL)
"""Lanes whose times are a device's own."""


@dataclass(frozen=True, slots=True)
class Span:
    session: str
    lane: Lane
    start_s: float
    end_s: float
    """At least ``start_s``."""
    name: str
    args: Args = field(default_factory=dict)
    """What a reader may want to know: tokens, rows, accepted."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that took no time: a correction, a lost link, a reconnect, the end."""

    session: str
    at_s: float
    name: str
    args: Args = field(default_factory=dict)


class CrossingKey(NamedTuple):
    """What both ends of a message's way agree on."""

    session: str
    lane: Lane
    number: int
    """First node id or position."""
    size: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """A message that leaves over the link, on the clock of that end."""

    at_s: float
    name: str
    args: Args


def rows_apart(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with a row number, such that spans of one session, lane and row do not overlap;
    the lowest free row is taken. ``spans`` by start."""
    ends: dict[tuple[str, Lane], list[float]] = {}
    for span in spans:
        rows = ends.setdefault((span.session, span.lane), [])
        row = next((i for i, end_s in enumerate(rows) if end_s <= span.start_s), len(rows))
        if row == len(rows):
            rows.append(span.end_s)
        rows[row] = span.end_s
        yield row, span


@dataclass(slots=True)
class _Found:
    """What the lines came to so far, each time on the clock of the side that wrote it."""

    spans: list[Span] = field(default_factory=list)
    marks: list[tuple[bool, Mark]] = field(default_factory=list)
    """With whether a device wrote it."""
    sent: dict[CrossingKey, list[Crossing]] = field(default_factory=lambda: defaultdict(list))
    arrived: dict[CrossingKey, list[float]] = field(default_factory=lambda: defaultdict(list))
    ends: int = 0
    """Of crossings."""

    def leaves(self, key: CrossingKey, at_s: float, name: str, args: Args) -> None:
        self.sent[key].append(Crossing(at_s, name, args))
        self.ends += 1

    def arrives(self, key: CrossingKey, at_s: float) -> None:
        self.arrived[key].append(at_s)
        self.ends += 1


# --- one device session's lines as spans -------------------------------------------------------


class DeviceSpans:
    """Feed it one session's lines in order; generations of one name may follow each other."""

    def __init__(self, found: _Found) -> None:
        self._found = found
        self._step: tuple[float, int] | None = None
        """When it began, and the tokens fed."""
        self._waiting_since: float | None = None
        self._ended = True

    def read(self, line: Line) -> None:
        at_s, session = line["at_s"], line["session"]
        match line["name"]:
            case "Start":
                self._ended, self._waiting_since = False, at_s
            case "StartStep":
                self._stall(session, at_s)
                self._step = (at_s, len(line["feed"]))
            case "StepDone" | "StepFailed":
                self._step_over(line)
            case "Transmit" if line["message"]["name"] == "Draft":
                self._send(session, at_s, line["message"])
            case "Commit" if not self._ended:
                key = CrossingKey(session, Lane.DOWNLINK, line["position"], len(line["tokens"]))
                self._found.arrives(key, at_s)
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
                self._over(line)

    def _send(self, session: str, at_s: float, draft: Line) -> None:
        size = len(draft["tokens"])
        key = CrossingKey(session, Lane.UPLINK, draft["first_node_id"], size)
        name = f"draft of {size}" if size else "no draft"
        args: Args = {"tokens": size, "first_node_id": draft["first_node_id"]}
        self._found.leaves(key, at_s, name, args)

    def _step_over(self, line: Line) -> None:
        if self._step is not None:
            start_s, fed = self._step
            args: Args = {"fed": fed, "guesses": len(line.get("candidates", ()))}
            name = "draft step" if line["name"] == "StepDone" else "failed step"
            span = Span(line["session"], Lane.DRAFT, start_s, line["at_s"], name, args)
            self._found.spans.append(span)
        self._step = None
        self._wait(line["at_s"])

    def _wait(self, at_s: float) -> None:
        if not self._ended and self._step is None:
            self._waiting_since = at_s

    def _stall(self, session: str, at_s: float) -> None:
        """The device waited until now, if it did."""
        since, self._waiting_since = self._waiting_since, None
        if since is not None and at_s > since:
            self._found.spans.append(Span(session, Lane.STALL, since, at_s, "waits"))

    def _over(self, line: Line) -> None:
        if not self._ended:
            self._stall(line["session"], line["at_s"])
            self._ended = True
            if line["name"] == "Fail":
                self._mark(line, "failed", why=str(line["why"]))
            else:
                self._mark(line, "finished", reason=str(line["reason"]))

    def _mark(self, line: Line, name: str, **args: int | float | str) -> None:
        self._found.marks.append((True, Mark(line["session"], line["at_s"], name, args)))


# --- one verifier's lines as spans -------------------------------------------------------------


class VerifierSpans:
    """Feed it one verifier's lines in order."""

    def __init__(self, found: _Found) -> None:
        self._found = found
        self._session_of: dict[int, str] = {}
        self._batch: tuple[float, list[Line]] | None = None
        self._passes: dict[str, Span] = {}
        """The pass of each session that ended last, until its commit is seen."""

    def read(self, line: Line) -> None:
        at_s = line["at_s"]
        match line["name"]:
            case "StreamOpened":
                self._session_of[line["stream"]] = line["request"]["session_id"]
            case "StreamLost":
                lost = self._session_of.pop(line["stream"], None)
                if lost is not None:
                    self._found.marks.append((False, Mark(lost, at_s, "stream lost")))
            case "CloseStream":
                self._session_of.pop(line["stream"], None)
            case "StreamMessage" if line["message"]["name"] == "Draft":
                self._on_draft(line["stream"], at_s, line["message"])
            case "RunBatch":
                self._batch = (at_s, line["requests"])
            case "BatchDone" | "BatchFailed":
                self._end(at_s, failed=line["name"] == "BatchFailed")
            case "SendTo" if line["message"]["name"] == "Commit":
                self._on_commit(line["stream"], at_s, line["message"])

    def _on_draft(self, stream: int, at_s: float, draft: Line) -> None:
        if (session := self._session_of.get(stream)) is not None:
            key = CrossingKey(session, Lane.UPLINK, draft["first_node_id"], len(draft["tokens"]))
            self._found.arrives(key, at_s)

    def _end(self, at_s: float, *, failed: bool) -> None:
        if self._batch is None:
            return  # the trace begins in the middle of a pass
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
            self._found.spans.append(span)

    def _on_commit(self, stream: int, at_s: float, commit: Line) -> None:
        session = self._session_of.get(stream)
        if session is None:
            return
        tokens, accepted = len(commit["tokens"]), commit["accepted"]
        ended = self._passes.pop(session, None)
        if ended is not None and commit["verify_us"]:
            ended.args.update({"committed": tokens, "accepted": accepted})
            self._queued(ended, commit)
        key = CrossingKey(session, Lane.DOWNLINK, commit["position"], tokens)
        args: Args = {"tokens": tokens, "accepted": accepted, "stale": commit["stale"]}
        self._found.leaves(key, at_s, f"commit of {tokens}", args)

    def _queued(self, taken: Span, commit: Line) -> None:
        """Which arrivals a pass has taken up only its commit tells: others had gone stale."""
        if commit["rows"] and commit["queue_us"]:
            since_s = taken.start_s - commit["queue_us"] / 1e6
            args: Args = {"nodes": commit["rows"]}
            span = Span(taken.session, Lane.QUEUE, since_s, taken.start_s, "waits", args)
            self._found.spans.append(span)


MAX_SPANS: Final = 200_000

# A clock read twice for one moment, and rounding to whole microseconds.
_SLACK_S: Final = 2e-6


@dataclass(frozen=True, slots=True)
class Timeline:
    """``spans`` by start; sessions by their first span or mark."""

    sessions: tuple[str, ...]
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]
    clock_offsets_s: Mapping[str, float]
    """What was added to a device's clock, by session; only those that were estimated."""
    truncated: bool = False
    """The trace goes on after ``MAX_SPANS``."""


def build_timeline(lines: Iterable[Line], *, one_clock: bool = False) -> Timeline:
    """Reads ``lines`` once, in any interleaving of the sides, each side in its own order.
    ``one_clock``: both sides wrote its times."""
    found, truncated = _Found(), False
    devices: dict[str, DeviceSpans] = defaultdict(lambda: DeviceSpans(found))
    verifiers: dict[str, VerifierSpans] = defaultdict(lambda: VerifierSpans(found))
    for line in lines:
        (devices if line["side"] == DEVICE else verifiers)[line["session"]].read(line)
        if len(found.spans) + found.ends + len(found.marks) >= MAX_SPANS:
            truncated = True
            break
    offsets = {} if one_clock else _offsets(found)
    spans = [span for span in found.spans if span.lane not in _OF_DEVICE]
    for span in found.spans:
        if span.lane in _OF_DEVICE:
            spans.append(_moved(span, offsets.get(span.session, 0.0)))
    spans += _crossings(found, offsets)
    placed = [
        replace(mark, at_s=mark.at_s + (offsets.get(mark.session, 0.0) if on_device else 0.0))
        for on_device, mark in found.marks
    ]
    return _from_zero(spans, placed, offsets, truncated)


def _offsets(found: _Found) -> dict[str, float]:
    """Seconds to add to the device's clock, by session, from messages sent and arrived once."""
    least: dict[tuple[str, Lane], float] = {}
    for key, ends in found.arrived.items():
        starts = found.sent.get(key, ())
        if len(starts) == len(ends) == 1:
            delay_s = ends[0] - starts[0].at_s
            which = (key.session, key.lane)
            least[which] = min(delay_s, least.get(which, delay_s))
    return {
        session: (up_s - least[session, Lane.DOWNLINK]) / 2
        for (session, lane), up_s in least.items()
        if lane is Lane.UPLINK and (session, Lane.DOWNLINK) in least
    }


def _crossings(found: _Found, offsets: Mapping[str, float]) -> Iterator[Span]:
    for key, ends in found.arrived.items():
        shift_s = offsets.get(key.session, 0.0)
        up_s, down_s = (shift_s, 0.0) if key.lane is Lane.UPLINK else (0.0, shift_s)
        starts = sorted(found.sent.get(key, ()), key=lambda crossing: crossing.at_s)
        for at_s in sorted(ends):
            end_s = at_s + down_s
            count = bisect_right(starts, end_s + _SLACK_S, key=lambda one: one.at_s + up_s)
            if not count:
                continue  # its sending lies before the trace begins
            taken = starts[count - 1]
            del starts[:count]
            start_s = taken.at_s + up_s
            yield Span(key.session, key.lane, start_s, max(start_s, end_s), taken.name, taken.args)


def _moved(span: Span, offset_s: float) -> Span:
    if not offset_s:
        return span
    return replace(span, start_s=span.start_s + offset_s, end_s=span.end_s + offset_s)


def _from_zero(
    spans: list[Span], marks: list[Mark], offsets: Mapping[str, float], truncated: bool
) -> Timeline:
    starts = [span.start_s for span in spans] + [mark.at_s for mark in marks]
    zero_s = min(starts, default=0.0)
    ordered = sorted((_moved(span, -zero_s) for span in spans), key=lambda span: span.start_s)
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
# A timeline in the Chrome trace-event format, which ui.perfetto.dev and chrome://tracing open.
# A session is a process, a lane a thread of it; spans that overlap in one lane (drafts in flight
# behind each other) go to further threads. Source: Google, "Trace Event Format", complete ("X"),
# instant ("i") and metadata ("M") events; ``ts`` and ``dur`` are microseconds.


_LANES: Final = {lane: number for number, lane in enumerate(Lane)}

# Thread numbers: a lane's first row is a multiple of this, its further rows follow.
_ROWS_MAX: Final = 1000


def perfetto_json(timeline: Timeline) -> str:
    """One JSON object, as the viewers read it."""
    events = list(_metadata(timeline)) + sorted(_events(timeline), key=lambda event: event["ts"])
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _metadata(timeline: Timeline) -> Iterator[dict[str, Any]]:
    numbers = _numbers(timeline)
    for session, pid in numbers.items():
        yield _named("process_name", pid, 0, name=session)
        yield _named("process_sort_index", pid, 0, sort_index=pid)
    threads = {(span.session, span.lane, row) for row, span in rows_apart(timeline.spans)}
    for session, lane, row in sorted(threads, key=lambda t: (numbers[t[0]], _thread(t[1], t[2]))):
        pid, tid = numbers[session], _thread(lane, row)
        yield _named("thread_name", pid, tid, name=lane.value + (f" {row + 1}" if row else ""))
        yield _named("thread_sort_index", pid, tid, sort_index=tid)


def _named(what: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    numbers = _numbers(timeline)
    for row, span in rows_apart(timeline.spans):
        start_us = round(span.start_s * 1e6)
        yield {
            "name": span.name,
            "cat": span.lane.value,
            "ph": "X",
            "pid": numbers[span.session],
            "tid": _thread(span.lane, row),
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


def _numbers(timeline: Timeline) -> dict[str, int]:
    return {session: number for number, session in enumerate(timeline.sessions, start=1)}


def _thread(lane: Lane, row: int) -> int:
    return 1 + _LANES[lane] * _ROWS_MAX + min(row, _ROWS_MAX - 1)
