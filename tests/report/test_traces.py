"""Traces, summarised and drawn: of a real run (toy models, real gRPC, a shaped link), also with
hidden token ids, and from lines written by hand.

Oracles: the device's own counters for every number of the summary; the link's delay for the lanes
that cross it; the definition of each lane; for clocks, the same trace with one clock moved; for
hidden tokens, an open trace of the same run, line by line, and the reports of both; sums by hand.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.running import trace_to
from edgespec.config import AgentConfig, VerifierConfig
from edgespec.core.device.events import DraftCounters
from edgespec.core.protocol.messages import MAX_TOKEN_ID, Commit, Draft, Open, Received
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import build_agent
from edgespec.telemetry.trace import TOKEN_FIELDS, HiddenTokens, TraceFile, Tracer
from edgespec_sim.message_sizes import message_bytes
from edgespec_sim.report.page import report_on
from edgespec_sim.report.summarise import summarise
from edgespec_sim.report.timeline import (
    Lane,
    Span,
    Timeline,
    TraceLine,
    TraceLineError,
    assign_rows,
    build_timeline,
    perfetto_json,
    read_lines,
)
from edgespec_sim.run_summary import GroupSummary
from tests.kit.live_verifier import serve_toy
from tests.present import require
from tests.report.samples import SAMPLED, agent_config, traced_run

RTT_MS = 8.0
PROMPTS = ("the quick brown fox", "once upon a time")


@dataclass(frozen=True, slots=True)
class RealRun:
    """A real run: two generations, one after the other."""

    counters: tuple[DraftCounters, ...]
    device: Path
    verifier: Path

    @property
    def both(self) -> list[TraceLine]:
        return list(read_lines([self.device, self.verifier]))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    return asyncio.run(_run_really(tmp_path_factory.mktemp("real")))


async def _run_really(folder: Path) -> RealRun:
    counters = []
    async with traced_run(folder, RTT_MS) as agent:
        for prompt in PROMPTS:
            async for _ in agent.generate(prompt, SAMPLED):
                pass
            counters.append(require(agent.stats).counters)
    return RealRun(tuple(counters), folder / "device.jsonl", folder / "verifier.jsonl")


def test_the_summary_agrees_with_the_devices_own_counters(real: RealRun) -> None:
    total = Counter[str]()
    for counters in real.counters:
        total.update(asdict(counters))
    arm = summarise(real.both).arms[0]
    assert arm.all.requests == len(PROMPTS)
    assert arm.all.failed == 0
    assert arm.all.tokens == total["committed"] == 40 * len(PROMPTS)
    assert arm.all.tokens_per_pass == total["committed"] / total["passes"]
    assert arm.all.acceptance == total["hits"] / total["tried"]
    assert 0 < total["hits"] < total["tried"], "or the trials say nothing"
    wasted = total["sent"] - total["accepted"]
    assert arm.all.wasted_per_token == wasted / total["committed"]
    assert arm.all.reconnects == total["reconnects"] == 0
    for row, counters in zip(arm.rows, real.counters, strict=True):
        assert row.acceptance == counters.acceptance
        assert row.tokens_per_pass == counters.committed / counters.passes
        assert require(row.ttft_s) > 1.5 * RTT_MS / 1e3
    [load] = arm.verifiers
    assert 0.0 < load.utilisation < 1.0
    assert load.passes == total["passes"]
    assert load.queue_s is not None
    waited_s = load.queue_s.mean * load.queue_s.count
    assert waited_s == pytest.approx(total["queue_s"], abs=1e-9)


def test_a_device_alone_is_summed_up_with_a_note(real: RealRun) -> None:
    whole = summarise(real.both).arms[0].all
    device = summarise(read_lines([real.device]))
    assert device.arms[0].all.tpot_s == whole.tpot_s
    assert device.arms[0].verifiers == ()
    assert "load is unknown" in device.notes[0]
    with pytest.raises(ValueError, match="no request of a device"):
        summarise(read_lines([real.verifier]))


def test_every_lane_holds_what_it_is_defined_by(real: RealRun) -> None:
    timeline = build_timeline(real.both, one_clock=True)
    lanes = _by_lane(timeline)
    assert len(timeline.sessions) == len(PROMPTS)
    assert len(lanes[Lane.DRAFT]) == sum(counters.steps for counters in real.counters) + sum(
        one["kind"] == "event" and one["name"] == "StepDone" and late
        for one, late in _with_ending(real.both)
    )
    assert len(lanes[Lane.DOWNLINK]) == sum(counters.passes for counters in real.counters)
    sent = sum(int(span.args["tokens"]) for span in lanes[Lane.UPLINK])
    assert 0 < sent <= sum(counters.sent for counters in real.counters)
    for lane in (Lane.UPLINK, Lane.DOWNLINK):
        assert min(_length_s(span) for span in lanes[lane]) > 0.9 * RTT_MS / 2e3
    for span in lanes[Lane.PASS]:
        assert int(span.args["accepted"]) <= int(span.args["nodes"]) <= int(span.args["rows"])
    for session in timeline.sessions:
        _alternate(session, lanes[Lane.DRAFT], lanes[Lane.STALL])
    assert {"connected", "finished"} <= {mark.name for mark in timeline.marks}


def _with_ending(lines: list[TraceLine]) -> Iterator[tuple[TraceLine, bool]]:
    """Yield each line, and whether its device session had ended by then: later steps are not
    counted."""
    over: set[str] = set()
    for line in lines:
        yield line, line["session"] in over
        if line["name"] in ("Finish", "Fail"):
            over.add(line["session"])


def _alternate(session: str, drafts: list[Span], stalls: list[Span]) -> None:
    """Check that a device that waits does not draft, and one that drafts does not wait."""
    own = sorted(
        (span for span in drafts + stalls if span.session == session), key=lambda s: s.start_s
    )
    assert own
    for before, after in itertools.pairwise(own):
        assert before.end_s <= after.start_s + 1e-9


def test_a_moved_clock_is_found_and_put_right(real: RealRun) -> None:
    shift_s = 5000.0
    moved = [
        {**line, "at_s": line["at_s"] + shift_s} if line["side"] == "device" else line
        for line in real.both
    ]
    straight, mended = build_timeline(real.both), build_timeline(moved)
    shared = _by_lane(build_timeline(real.both, one_clock=True))
    for session, offset_s in mended.clock_offsets_s.items():
        # On one clock the error is at most half the difference of the quickest ways.
        longest_s = max(
            _length_s(span)
            for lane in (Lane.UPLINK, Lane.DOWNLINK)
            for span in shared[lane]
            if span.session == session
        )
        assert abs(straight.clock_offsets_s[session]) <= longest_s / 2 + 1e-5
        assert offset_s + shift_s == pytest.approx(straight.clock_offsets_s[session], abs=1e-5)
    assert len(mended.spans) == len(straight.spans)
    for one, other in zip(mended.spans, straight.spans, strict=True):
        assert one.start_s == pytest.approx(other.start_s, abs=1e-5)
    torn = _by_lane(build_timeline(moved, one_clock=True))
    assert Lane.UPLINK not in torn, "no draft arrives before it was sent"


def test_perfetto_events_keep_the_format(real: RealRun) -> None:
    timeline = build_timeline(real.both)
    document = json.loads(perfetto_json(timeline))
    events = document["traceEvents"]
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    ends: dict[tuple[int, int], int] = {}
    for event in events:
        assert {"name", "ph", "pid", "tid", "ts", "args"} <= set(event)
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            where = event["pid"], event["tid"]
            assert where in named
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
            assert event["ts"] >= ends.get(where, 0), "spans of one thread must not overlap"
            ends[where] = event["ts"] + event["dur"]
    kinds = Counter(event["ph"] for event in events)
    assert kinds["X"] == len(timeline.spans)
    assert kinds["i"] == len(timeline.marks)
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == list(timeline.sessions)


def test_two_traces_make_a_report(real: RealRun, tmp_path: Path) -> None:
    written = report_on([real.device, real.verifier], tmp_path / "out")
    names = [path.name for path in written]
    assert names == ["report.html", "arms.csv", "requests.csv", "timeline.json"]
    assert (tmp_path / "out" / "requests.csv").read_bytes().count(b"\r\n") == 1 + len(PROMPTS)


def test_a_cut_off_last_line_is_left_out(real: RealRun, tmp_path: Path) -> None:
    text = real.device.read_text(encoding="utf-8")
    cut = tmp_path / "device.jsonl"
    cut.write_text(text[:-30], encoding="utf-8")
    assert len(list(read_lines([cut, real.verifier]))) == len(real.both) - 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        # HUGE is an integer that no float holds.
        ("{}", "have 'at_s'"),
        ("{oops}", "not a line of a trace"),
        ('{"at_s":"soon","side":"device","session":"","kind":"event","name":"Start"}', "'soon'"),
        ('{"at_s":NaN,"side":"device","session":"","kind":"event","name":"Start"}', "nan"),
        ('{"at_s":HUGE,"side":"device","session":"","kind":"","name":"Start"}', "at_s 1"),
        ('{"at_s":1.0,"side":"device","session":7,"kind":"event","name":"Start"}', "session is 7"),
        ('{"at_s":1.0,"side":"moon","session":"","kind":"event","name":"Start"}', "'moon'"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    good = '{"at_s":1.0,"side":"device","session":"a","kind":"event","name":"Start"}\n'
    path.write_text(good + text.replace("HUGE", str(10**400)) + "\n", encoding="utf-8")
    with pytest.raises(TraceLineError, match=r"trace\.jsonl:2: .*" + why):
        list(read_lines([path]))


@pytest.mark.parametrize(
    ("side", "name", "field", "value"),
    [
        ("device", "Transmit", "message", {"name": "Draft", "parents": (float("inf"),)}),
        ("device", "Deliver", "kinds", 3),
        ("verifier", "StreamMessage", "message", (1,)),
        ("verifier", "SendTo", "message", {"name": "Commit", "tokens": 7}),
        ("verifier", "CloseStream", "stream", ()),
        ("verifier", "RunBatch", "requests", ((),)),
    ],
)
def test_a_line_that_breaks_its_promise_is_told_in_words(
    real: RealRun, tmp_path: Path, side: str, name: str, field: str, value: object
) -> None:
    for path in (real.device, real.verifier):
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            if line["side"] == side and line["name"] == name:
                line[field] = value
        (tmp_path / path.name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(TraceLineError, match="a line lacks a field of its kind"):
        report_on([tmp_path / real.device.name, tmp_path / real.verifier.name], tmp_path / "out")


def _by_lane(timeline: Timeline) -> dict[Lane, list[Span]]:
    lanes: dict[Lane, list[Span]] = {}
    for _, span in assign_rows(timeline.spans):
        assert span.start_s <= span.end_s
        lanes.setdefault(span.lane, []).append(span)
    return lanes


def _length_s(span: Span) -> float:
    return span.end_s - span.start_s


HIDDEN = HiddenTokens()
HIDDEN._key = bytes(16)  # with a random key, one id in 128 would keep its own name
PARAMS = SamplingParams(
    max_tokens=40,
    temperature=0.9,
    seed=11,
    stop=("a stop text",),
    stop_token_ids=(61,),
    logit_bias={60: -2.0},
    ignore_eos=True,
)
SECRET = "a prompt that nobody should read 123"


@dataclass(frozen=True)
class Both:
    """A tracer that forwards the same run to two tracers."""

    plain: Tracer
    hidden: Tracer

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        self.plain.record(at_s, side, session, kind, item)
        self.hidden.record(at_s, side, session, kind, item)


async def _trace_twice(folder: Path) -> None:
    with (
        TraceFile(folder / "plain.jsonl") as plain,
        TraceFile(folder / "hidden.jsonl", HIDDEN) as hidden,
    ):
        both = Both(plain, hidden)
        async with serve_toy() as (address, verifier):
            verifier._tracer = both
            async with build_agent(agent_config(address, 0.0), tracer=both) as agent:
                async for _ in agent.generate(SECRET, PARAMS, logprobs=3):
                    pass


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("traces")
    asyncio.run(_trace_twice(folder))
    return folder / "plain.jsonl", folder / "hidden.jsonl"


def fields_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all fields of a line with their names, nested ones too; a bias has none."""
    if isinstance(value, dict) and name != "logit_bias":
        for key, one in value.items():
            yield key, one
            yield from fields_of(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from fields_of(one, name)


def test_lines_differ_in_tokens_alone(traces: tuple[Path, Path]) -> None:
    plain, hidden = (list(read_lines([path])) for path in traces)
    assert {line["side"] for line in plain} == {"device", "verifier"}
    assert len(plain) == len(hidden)
    hide, changed = HIDDEN, set()
    for open_line, line in zip(plain, hidden, strict=True):
        pairs = zip(fields_of(open_line), fields_of(line), strict=True)
        for (name, before), (same, after) in pairs:
            assert name == same
            if before != after and not (isinstance(before, dict) and name != "logit_bias"):
                changed.add(name)
            if name in TOKEN_FIELDS and isinstance(before, list):
                assert after == [hide.substitute_token(one) for one in before]
            if name == "logit_bias":
                assert after == {str(hide.substitute_token(60)): -2.0}
    single = {"token", "base_hash", "top", "stop", "logit_bias"}
    assert {"tokens", "prompt", "feed", "targets", "stop_token_ids", *single} <= changed
    lists_of_lists = {"candidates", "results", "requests", "scores", "logprobs"}
    assert changed <= TOKEN_FIELDS | single | lists_of_lists


def test_names_are_as_many_and_as_long_as_the_tokens() -> None:
    hide, tokens = HiddenTokens(), [*range(300), *range(16_380, 16_390), MAX_TOKEN_ID]
    names = [hide.substitute_token(one) for one in tokens]
    assert len(set(names)) == len(tokens)
    assert [max(1, -(-one.bit_length() // 7)) for one in names] == [
        max(1, -(-one.bit_length() // 7)) for one in tokens
    ]
    assert [hide.substitute_token(one) for one in tokens] == names != tokens


def test_no_text_is_left_and_reports_are_the_same(traces: tuple[Path, Path]) -> None:
    assert ["a stop text" in path.read_text() for path in traces] == [True, False]
    plain, hidden = (summarise(read_lines([path])) for path in traces)
    assert plain == hidden


@pytest.mark.parametrize("config", [AgentConfig(), VerifierConfig()])
def test_the_command_line_hides_tokens_unless_told_not_to(
    config: AgentConfig | VerifierConfig, tmp_path: Path
) -> None:
    told = []
    for number, tokens in enumerate((config.trace_tokens, "plain")):
        path = tmp_path / f"{number}.jsonl"
        with trace_to(str(path), tokens) as tracer:
            opening = Open("s", "", "", tuple(range(1, 40)))
            require(tracer).record(0.0, "device", "s", "action", opening)
        told.append(json.loads(path.read_text())["prompt"])
    assert told[0] != told[1] == list(range(1, 40))


# --- hand-written lines: lost, repeated, overtaken or unsent messages ----------------------------


OPEN = {"name": "Open", "session_id": "a", "model": "", "vocabulary": "", "prompt": [1, 2, 3]}


def line(at_s: float, name: str, **fields: Any) -> TraceLine:
    return {"at_s": at_s, "side": "device", "session": "a", "kind": "", "name": name, **fields}


def commit(at_s: float, position: int, tokens: list[int], **more: Any) -> list[TraceLine]:
    """Return the event, and the delivery of tokens that were not held before."""
    numbers = ("accepted", "stale", "queue_us", "verify_us", "rows", "echo", "held_us")
    fields = {**dict.fromkeys(numbers, 0), "verify_us": 9, "finish": None, **more}
    kinds = ["accepted"] * fields["accepted"]
    kinds += ["decoded"] * (len(tokens) - len(kinds))
    return [
        line(at_s, "Commit", position=position, tokens=tokens, **fields),
        line(at_s, "Deliver", position=position, tokens=tokens, kinds=kinds),
    ]


def request(*lines: TraceLine) -> GroupSummary:
    begin = [
        line(0.0, "Start"),
        line(0.0, "Connect"),
        line(0.5, "Connected"),
        line(0.5, "Transmit", message={**OPEN, "committed": []}),
    ]
    return summarise([*begin, *lines]).arms[0].all


def counters(at_s: float, **counted: int) -> TraceLine:
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


def verifier(at_s: float, name: str, **fields: Any) -> TraceLine:
    return {"at_s": at_s, "side": "verifier", "session": "v", "kind": "", "name": name, **fields}


def draft(first: int, size: int) -> TraceLine:
    return {"name": "Draft", "first_node_id": first, "tokens": [5] * size, "parents": [0] * size}


def opened(at_s: float, stream: int) -> TraceLine:
    return verifier(at_s, "StreamOpened", stream=stream, request={"session_id": "a"})


def spans(lines: list[TraceLine], lane: Lane) -> list[tuple[float, float]]:
    origin = line(0.0, "Connected")  # a mark at 0, or times would count from the first span
    timeline = build_timeline([origin, *lines], one_clock=True)
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
