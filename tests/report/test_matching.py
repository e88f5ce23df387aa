"""Halves of spans brought together, from a few hand-written lines: what was lost, sent again,
overtaken, or never sent. Oracle: the times written here."""

from __future__ import annotations

from typing import Any

from edgespec_sim.report.timeline import Clocks, Lane, Line, build_timeline


def device(at_s: float, name: str, **fields: Any) -> Line:
    return {"at_s": at_s, "side": "device", "session": "a", "kind": "", "name": name, **fields}


def verifier(at_s: float, name: str, **fields: Any) -> Line:
    return {"at_s": at_s, "side": "verifier", "session": "v", "kind": "", "name": name, **fields}


def draft(first: int, size: int) -> Line:
    return {"name": "Draft", "first_node_id": first, "tokens": [5] * size, "parents": [0] * size}


def opened(at_s: float, stream: int) -> Line:
    return verifier(at_s, "StreamOpened", stream=stream, request={"session_id": "a"})


def spans(lines: list[Line], lane: Lane) -> list[tuple[float, float]]:
    origin = device(0.0, "Connected")  # a mark at 0, or times would be from the first span on
    timeline = build_timeline([origin, *lines], Clocks.SHARED)
    return [(span.start_s, span.end_s) for span in timeline.spans if span.lane is lane]


def test_a_draft_sent_again_is_matched_to_the_copy_that_came() -> None:
    lines = [
        device(0.0, "Start"),
        device(1.0, "Transmit", message=draft(1, 2)),
        device(3.0, "Transmit", message=draft(1, 2)),
        opened(3.2, 1),
        verifier(3.5, "StreamMessage", stream=1, message=draft(1, 2)),
    ]
    assert spans(lines, Lane.UPLINK) == [(3.0, 3.5)]


def test_what_arrives_from_nowhere_has_no_span() -> None:
    lines = [
        opened(0.0, 1),
        verifier(1.0, "StreamMessage", stream=1, message=draft(1, 2)),
        verifier(1.0, "StreamMessage", stream=9, message=draft(1, 2)),
        device(2.0, "Start"),
        device(2.5, "Transmit", message=draft(1, 2)),
    ]
    assert spans(lines, Lane.UPLINK) == []


def test_a_stall_is_cut_by_commits_and_ends_with_the_generation() -> None:
    commit = {"position": 3, "tokens": [1]}
    lines = [
        device(0.0, "Start"),
        device(0.0, "StartStep", feed=[1], keep_length=0),
        device(1.0, "StepDone", candidates=[{}, {}]),
        device(2.0, "Commit", **commit),
        device(5.0, "Commit", **commit),
        device(5.0, "StartStep", feed=[1], keep_length=0),
        device(6.0, "StepFailed", why="no memory"),
        device(8.0, "Finish", reason="length"),
        device(9.0, "Commit", **commit),
    ]
    assert spans(lines, Lane.STALL) == [(1.0, 2.0), (2.0, 5.0), (6.0, 8.0)]
    assert spans(lines, Lane.DRAFT) == [(0.0, 1.0), (5.0, 6.0)]
