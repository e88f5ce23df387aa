"""A timeline in the Chrome trace-event format, which ui.perfetto.dev and chrome://tracing open.

A session is a process, a lane a thread of it; spans that overlap in one lane (drafts in flight
behind each other) go to further threads. Source: Google, "Trace Event Format", complete ("X"),
instant ("i") and metadata ("M") events; ``ts`` and ``dur`` are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from edgespec_sim.report.spans import Lane, Span, rows_apart
from edgespec_sim.report.timeline import Timeline

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
        start_us, end_us = _microseconds(span)
        yield {
            "name": span.name,
            "cat": span.lane.value,
            "ph": "X",
            "pid": numbers[span.session],
            "tid": _thread(span.lane, row),
            "ts": start_us,
            "dur": end_us - start_us,
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


def _microseconds(span: Span) -> tuple[int, int]:
    return round(span.start_s * 1e6), round(span.end_s * 1e6)
