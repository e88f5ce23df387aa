"""All sessions of a verifier: streams and packed passes. Oracle: the fixed text again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Open,
    Opened,
    Received,
    RunAhead,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.engine_events import (
    BatchFailed,
    CloseSequence,
    CloseStream,
    EngineAction,
    EngineLimits,
    OpenSequence,
    Poll,
    ProbeDone,
    RunBatch,
    SendTo,
    SequenceFailed,
    StreamLost,
    StreamMessage,
    StreamOpened,
)
from tests.core.engine_scenes import RUNNING, batch, done, faults, named, new_engine
from tests.core.fixed_text import LIMITS, PROMPT, REQUEST, TEXT


def test_a_stream_opens_a_session_and_starts_its_pass() -> None:
    actions = new_engine().handle(StreamOpened(1, RUNNING), 0.0)
    assert actions == (
        OpenSequence("s", 2, RUNNING.sampling, PROMPT),
        SendTo(1, Opened(LIMITS, "big", 2)),
        RunBatch((PassRequest("s", 0, PROMPT),)),
    )


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (replace(RUNNING, model="other"), FaultCode.UNKNOWN_MODEL),
        (replace(RUNNING, rule="lossy"), FaultCode.INVALID),
        (replace(RUNNING, prompt=(1,) * 5000), FaultCode.CONTEXT_TOO_LONG),
    ],
)
def test_a_refused_stream_leaves_no_trace(bad: Open, code: FaultCode) -> None:
    engine = new_engine()
    actions = engine.handle(StreamOpened(1, bad), 0.0)
    assert faults(actions) == [(1, code)]
    assert actions[1:] == (CloseStream(1),)
    assert not engine.sessions
    assert engine.handle(StreamMessage(1, Cancel()), 0.0) == ()
    assert engine.handle(StreamLost(1), 0.0) == ()


def test_only_so_many_sessions() -> None:
    engine = new_engine(EngineLimits(max_sessions=1))
    engine.handle(StreamOpened(1, named("a")), 0.0)
    (send, _) = engine.handle(StreamOpened(2, named("b")), 0.0)
    assert isinstance(send, SendTo)
    assert isinstance(send.message, Fault)
    assert "all 1 sessions are taken" in send.message.message
    assert send.message.code.retryable
    engine.handle(StreamLost(1), 1.0)
    assert faults(engine.handle(StreamOpened(3, named("a")), 2.0)) == []


def test_no_room_for_a_sequence_is_worth_another_try() -> None:
    engine = new_engine()
    engine.handle(StreamOpened(1, RUNNING), 0.0)
    actions = engine.handle(SequenceFailed("s", "16 sequences open, limit 16", full=True), 0.0)
    assert faults(actions) == [(1, FaultCode.OVERLOADED)]
    assert CloseStream(1) in actions
    assert not engine.sessions


def test_sessions_share_a_pass_and_new_ones_wait_for_the_next() -> None:
    engine = new_engine()
    first = batch(engine.handle(StreamOpened(1, named("a")), 0.0))
    assert engine.handle(StreamOpened(2, named("b")), 0.0)[2:] == ()
    assert engine.running
    second = batch(engine.handle(done(first), 0.1))
    assert {request.key for request in second} == {"a", "b"}


def test_a_pass_has_only_so_many_rows() -> None:
    engine = new_engine(EngineLimits(max_rows_per_pass=5, max_rows_per_session=3))
    running = batch(
        engine.handle(StreamOpened(1, named("a", replace(RUNNING, prompt=(1,) * 9))), 0.0)
    )
    engine.handle(StreamOpened(2, named("b", replace(RUNNING, prompt=(1,) * 9))), 0.0)
    assert [request.row_count for request in running] == [3]
    following = batch(engine.handle(done(running), 0.1))
    assert sorted(request.row_count for request in following) == [2, 3]


def test_a_failed_pass_is_tried_again_one_by_one_and_ends_only_the_culprit() -> None:
    engine = new_engine()
    requests = batch(engine.handle(StreamOpened(1, named("a")), 0.0))
    engine.handle(StreamOpened(2, named("bad")), 0.0)
    engine.handle(StreamOpened(3, named("c")), 0.0)
    requests = batch(engine.handle(done(requests), 0.1))
    assert len(requests) == 3
    actions = engine.handle(BatchFailed("bad row"), 0.2)
    ended: list[tuple[int, FaultCode]] = []
    for step in range(6):
        requests = batch(actions)
        if len(requests) > 1:
            break
        assert ended or len(requests) == 1
        if requests[0].key == "bad":
            engine.handle(BatchFailed("bad row"), 0.3 + step)
            actions = engine.handle(ProbeDone(), 0.3 + step)
        else:
            actions = engine.handle(done(requests), 0.3 + step)
        ended += faults(actions)
    assert ended == [(2, FaultCode.INTERNAL)]
    assert set(engine.sessions) == {"a", "c"}
    assert {request.key for request in requests} == {"a", "c"}


def test_a_second_stream_takes_the_session_over() -> None:
    engine = new_engine()
    running = batch(engine.handle(StreamOpened(1, RUNNING), 0.0))
    engine.handle(done(running), 0.1)
    actions = engine.handle(StreamOpened(2, replace(RUNNING, committed=(10,))), 0.2)
    assert actions[0] == CloseStream(1)
    assert not any(isinstance(action, OpenSequence) for action in actions)
    assert engine.handle(StreamMessage(1, Cancel()), 0.3) == ()
    assert engine.handle(StreamLost(1), 0.3) == ()
    assert engine.sessions["s"].attached


def test_a_lease_ends_when_nobody_comes_back() -> None:
    engine = new_engine()
    running = batch(engine.handle(StreamOpened(1, RUNNING), 0.0))
    engine.handle(StreamLost(1), 1.0)
    engine.handle(done(running), 1.1)
    assert engine.handle(Poll(), 10.9) == ()
    assert engine.deadline == 11.0
    assert engine.handle(Poll(), 11.0) == (CloseSequence("s"),)
    assert not engine.sessions


def test_a_resumed_session_outlives_its_old_lease() -> None:
    engine = new_engine()
    engine.handle(StreamOpened(1, RUNNING), 0.0)
    engine.handle(StreamLost(1), 1.0)
    engine.handle(StreamOpened(2, RUNNING), 5.0)
    engine.handle(Poll(), 11.0)
    assert engine.sessions["s"].attached


def test_a_finished_session_frees_its_cache_and_waits_for_the_last_word() -> None:
    engine = new_engine()
    request = replace(RUNNING, sampling=SamplingParams(max_tokens=1))
    running = batch(engine.handle(StreamOpened(1, request), 0.0))
    actions = engine.handle(done(running), 0.1)
    assert CloseSequence("s") in actions
    assert "s" in engine.sessions
    assert engine.handle(StreamMessage(1, Received(3, 0)), 0.2) == (CloseStream(1),)
    assert not engine.sessions


def test_cancelled_during_a_pass() -> None:
    engine = new_engine()
    running = batch(engine.handle(StreamOpened(1, RUNNING), 0.0))
    actions = engine.handle(StreamMessage(1, Cancel()), 0.1)
    cancelled = Commit(2, (), finish=FinishReason.CANCELLED)
    assert actions == (SendTo(1, cancelled), CloseStream(1), CloseSequence("s"))
    assert engine.handle(done(running), 0.2) == ()


def test_a_resync_ends_the_stream_but_not_the_session() -> None:
    engine = new_engine()
    engine.handle(StreamOpened(1, RUNNING), 0.0)
    actions = engine.handle(StreamMessage(1, Draft(1, (0,), (10,), 9, 0)), 0.1)
    assert faults(actions) == [(1, FaultCode.RESYNC)]
    assert CloseStream(1) in actions
    actions = engine.handle(StreamOpened(2, RUNNING), 0.2)
    assert actions == (SendTo(2, Opened(LIMITS, "big", 2)),)


def test_a_waiting_session_is_asked_again_at_its_deadline() -> None:
    engine = new_engine()
    waiting = replace(REQUEST, run_ahead=RunAhead.NEVER)
    running = batch(engine.handle(StreamOpened(1, waiting), 0.0))
    actions = engine.handle(done(running), 1.0)
    assert not any(isinstance(action, RunBatch) for action in actions)
    assert engine.deadline is not None
    assert engine.deadline <= 3.0
    assert engine.handle(Poll(), 2.9) == ()
    assert engine.deadline == 3.0
    assert batch(engine.handle(Poll(), 3.0)) == (PassRequest("s", 2, (10,)),)


def test_every_token_of_many_sessions_arrives_in_order() -> None:
    engine = new_engine(EngineLimits(max_rows_per_pass=4))
    actions: list[EngineAction] = []
    for stream in range(5):
        actions += engine.handle(StreamOpened(stream, named(f"s{stream}")), 0.0)
    streams: dict[int, list[int]] = {stream: [] for stream in range(5)}
    while batches := [action for action in actions if isinstance(action, RunBatch)]:
        actions = list(engine.handle(done(batches[0].requests), 1.0))
        for action in actions:
            if isinstance(action, SendTo) and isinstance(action.message, Commit):
                streams[action.stream] += action.message.tokens
    assert all(tokens == list(TEXT[2:11]) for tokens in streams.values())
