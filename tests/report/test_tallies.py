"""What requests add up to, and halves of spans brought together, from hand-written lines: the cases
that a run over a quiet link does not have; what was lost, sent again, overtaken, or never sent.
Oracles: sums done by hand, and the times written here.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edgespec.core.device.events import DraftCounters
from edgespec.core.protocol.messages import Commit, Draft, Received
from edgespec_sim.report.summarise import summarise
from edgespec_sim.report.timeline import Clocks, Lane, Line, build_timeline
from edgespec_sim.run_summary import GroupSummary
from edgespec_sim.sessions import message_bytes

OPEN = {"name": "Open", "session_id": "a", "model": "", "vocabulary": "", "prompt": [1, 2, 3]}


def line(at_s: float, name: str, **fields: Any) -> Line:
    return {"at_s": at_s, "side": "device", "session": "a", "kind": "", "name": name, **fields}


def commit(at_s: float, position: int, tokens: list[int], **more: Any) -> list[Line]:
    """The event and the delivery of tokens that were not held before."""
    numbers = ("accepted", "stale", "queue_us", "verify_us", "rows", "echo", "held_us")
    fields = {**dict.fromkeys(numbers, 0), "verify_us": 9, "finish": None, **more}
    kinds = ["accepted"] * fields["accepted"]
    kinds += ["decoded"] * (len(tokens) - len(kinds))
    return [
        line(at_s, "Commit", position=position, tokens=tokens, **fields),
        line(at_s, "Deliver", position=position, tokens=tokens, kinds=kinds),
    ]


def request(*lines: Line) -> GroupSummary:
    begin = [
        line(0.0, "Start"),
        line(0.0, "Connect"),
        line(0.5, "Connected"),
        line(0.5, "Transmit", message={**OPEN, "committed": []}),
    ]
    return summarise([*begin, *lines]).arms[0].all


def counters(at_s: float, **counted: int) -> Line:
    return line(at_s, "DraftCounters", **{**asdict(DraftCounters()), **counted})


def test_what_the_device_counted_is_taken_from_it() -> None:
    found = request(
        *commit(1.0, 3, [7]),
        *commit(2.0, 4, [8, 9], finish="length"),
        line(2.0, "Finish", reason="length"),
        counters(2.0, committed=3, passes=2, tried=4, hits=3, sent=7, accepted=1, reconnects=1),
    )
    assert (found.reconnects, found.tokens, found.tokens_per_pass) == (1, 3, 1.5)
    assert (found.acceptance, found.wasted_per_token) == (0.75, 2.0)


def test_a_trace_that_ends_before_the_request_knows_its_tokens() -> None:
    found = request(*commit(1.0, 3, [8, 5, 6]))
    assert (found.requests, found.failed) == (0, 1)
    assert (found.tokens, found.acceptance) == (3, None)


def test_bytes_are_those_of_drafts_acknowledgements_and_commits() -> None:
    draft = {"name": "Draft", "first_node_id": 1, "parents": [0, 0], "tokens": [7, 900]}
    found = request(
        line(0.6, "Transmit", message={**draft, "base_position": 3, "base_hash": 77}),
        line(0.6, "Opened", model="toy", position=3, limits={}),
        *commit(1.0, 3, [7, 300], accepted=1, rows=2),
        line(1.0, "Transmit", message={"name": "Received", "position": 5, "echo": 5}),
    )
    up_bytes = message_bytes(Draft(1, (0, 0), (7, 900), 3, 77)) + message_bytes(Received(5, 5))
    down_bytes = message_bytes(Commit(3, (7, 300), accepted=1, verify_us=9, rows=2))
    assert found.up_bytes_per_token == up_bytes / 2
    assert found.down_bytes_per_token == down_bytes / 2


def test_a_failed_request_says_why() -> None:
    lines = [
        line(0.0, "Start"),
        line(0.0, "Connect"),
        line(9.0, "Fail", why="gave up", code=None),
        line(9.1, "Commit", position=3, tokens=[1]),
    ]
    arm = summarise(lines).arms[0]
    assert (arm.all.requests, arm.all.failed) == (0, 1)
    assert [row.failed for row in arm.rows] == ["gave up"]


def verifier(at_s: float, name: str, **fields: Any) -> Line:
    return {"at_s": at_s, "side": "verifier", "session": "v", "kind": "", "name": name, **fields}


def draft(first: int, size: int) -> Line:
    return {"name": "Draft", "first_node_id": first, "tokens": [5] * size, "parents": [0] * size}


def opened(at_s: float, stream: int) -> Line:
    return verifier(at_s, "StreamOpened", stream=stream, request={"session_id": "a"})


def spans(lines: list[Line], lane: Lane) -> list[tuple[float, float]]:
    origin = line(0.0, "Connected")  # a mark at 0, or times would be from the first span on
    timeline = build_timeline([origin, *lines], Clocks.SHARED)
    return [(span.start_s, span.end_s) for span in timeline.spans if span.lane is lane]


def test_a_draft_sent_again_is_matched_to_the_copy_that_came() -> None:
    lines = [
        line(0.0, "Start"),
        line(1.0, "Transmit", message=draft(1, 2)),
        line(3.0, "Transmit", message=draft(1, 2)),
        opened(3.2, 1),
        verifier(3.5, "StreamMessage", stream=1, message=draft(1, 2)),
    ]
    assert spans(lines, Lane.UPLINK) == [(3.0, 3.5)]


def test_what_arrives_from_nowhere_has_no_span() -> None:
    lines = [
        opened(0.0, 1),
        verifier(1.0, "StreamMessage", stream=1, message=draft(1, 2)),
        verifier(1.0, "StreamMessage", stream=9, message=draft(1, 2)),
        line(2.0, "Start"),
        line(2.5, "Transmit", message=draft(1, 2)),
    ]
    assert spans(lines, Lane.UPLINK) == []


def test_a_stall_is_cut_by_commits_and_ends_with_the_generation() -> None:
    commit = {"position": 3, "tokens": [1]}
    lines = [
        line(0.0, "Start"),
        line(0.0, "StartStep", feed=[1], keep_length=0),
        line(1.0, "StepDone", candidates=[{}, {}]),
        line(2.0, "Commit", **commit),
        line(5.0, "Commit", **commit),
        line(5.0, "StartStep", feed=[1], keep_length=0),
        line(6.0, "StepFailed", why="no memory"),
        line(8.0, "Finish", reason="length"),
        line(9.0, "Commit", **commit),
    ]
    assert spans(lines, Lane.STALL) == [(1.0, 2.0), (2.0, 5.0), (6.0, 8.0)]
    assert spans(lines, Lane.DRAFT) == [(0.0, 1.0), (5.0, 6.0)]
