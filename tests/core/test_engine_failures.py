"""What fails stays where it belongs. Oracle: only the culprit's stream hears a fault, the others'
passes go on with the fixed text, and a broken target ends everything at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import Cancel, FaultCode
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.drafts import ExactRule, Walk
from edgespec.core.verifier.engine import SWEEP_S, VerifyEngine
from edgespec.core.verifier.engine_events import (
    BatchDone,
    BatchFailed,
    CloseSequence,
    CloseStream,
    EngineLimits,
    GiveUp,
    Poll,
    ProbeDone,
    ReportFailure,
    RunBatch,
    RunProbe,
    SequenceFailed,
    StreamMessage,
    StreamOpened,
)
from tests.core.engine_scenes import RUNNING, batch, done, faults, named, new_engine
from tests.core.fixed_text import LIMITS, MODEL


class _Broken:
    """Raises for the second session of a pass."""

    def __init__(self) -> None:
        self.walks = 0

    def walk(self, tokens: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> Walk:
        self.walks += 1
        if self.walks == 3:
            raise ZeroDivisionError("a bug")
        return ExactRule().walk(tokens, parents, targets)


def _three_sessions(engine: VerifyEngine) -> BatchDone:
    """Sessions a, b and c on streams 1, 2 and 3, in one pass that is about to end."""
    first = batch(engine.handle(StreamOpened(1, named("a")), 0.0))
    engine.handle(StreamOpened(2, named("b")), 0.0)
    engine.handle(StreamOpened(3, named("c")), 0.0)
    return done(batch(engine.handle(done(first), 0.1)))


def test_a_bug_in_one_session_ends_that_session() -> None:
    engine = VerifyEngine(MODEL, LIMITS, EngineLimits(), {"exact": _Broken()})
    actions = engine.handle(_three_sessions(engine), 0.2)
    ((stream, code),) = faults(actions)
    assert code is FaultCode.INTERNAL
    assert code.retryable
    (report,) = [action for action in actions if isinstance(action, ReportFailure)]
    assert "ZeroDivisionError: a bug" in report.details
    assert CloseSequence(report.key) in actions
    assert CloseStream(stream) in actions
    assert set(engine.sessions) == {"a", "b", "c"} - {report.key}
    assert {request.key for request in batch(actions)} == set(engine.sessions)


def test_tests_see_the_bug_itself() -> None:
    engine = VerifyEngine(MODEL, LIMITS, EngineLimits(), {"exact": _Broken()}, contain=False)
    event = _three_sessions(engine)
    with pytest.raises(ZeroDivisionError):
        engine.handle(event, 0.2)


def test_a_failed_sequence_misses_the_pass_and_nobody_else_does() -> None:
    engine = new_engine()
    event = _three_sessions(engine)
    actions = engine.handle(SequenceFailed("b", "keep failed"), 0.15)
    assert faults(actions) == [(2, FaultCode.INTERNAL)]
    without = BatchDone(tuple(result for result in event.results if result.key != "b"))
    actions = engine.handle(without, 0.2)
    assert not faults(actions)
    assert {request.key for request in batch(actions)} == {"a", "c"}


def test_a_session_that_the_target_forgot_is_ended_alone() -> None:
    engine = new_engine()
    event = _three_sessions(engine)
    actions = engine.handle(BatchDone(event.results[:2]), 0.2)
    assert [code for _, code in faults(actions)] == [FaultCode.INTERNAL]
    assert len(engine.sessions) == 2


def test_who_fails_alone_is_to_blame_if_the_target_still_works() -> None:
    engine = new_engine()
    engine.handle(StreamOpened(1, RUNNING), 0.0)
    (probe,) = engine.handle(BatchFailed("no such token"), 0.1)
    assert isinstance(probe, RunProbe)
    opened = engine.handle(StreamOpened(2, named("late")), 0.15)
    assert not any(isinstance(action, RunBatch) for action in opened)
    actions = engine.handle(ProbeDone(), 0.2)
    assert faults(actions) == [(1, FaultCode.INTERNAL)]
    assert [request.key for request in batch(actions)] == ["late"]


def test_whom_the_target_names_is_ended_and_the_others_share_the_next_pass() -> None:
    engine = new_engine()
    _three_sessions(engine)
    actions = engine.handle(BatchFailed("logits are not finite", culprit="b"), 0.2)
    assert faults(actions) == [(2, FaultCode.INTERNAL)]
    assert {request.key for request in batch(actions)} == {"a", "c"}


def test_who_asked_for_what_the_target_cannot_keep_need_not_come_back() -> None:
    engine = new_engine()
    _three_sessions(engine)
    failure = BatchFailed("'b': the regex asks for too much", culprit="b", requested=True)
    actions = engine.handle(failure, 0.2)
    assert faults(actions) == [(2, FaultCode.INVALID)]
    assert {request.key for request in batch(actions)} == {"a", "c"}


def test_a_finished_stream_that_nobody_acknowledges_ends_without_a_fault() -> None:
    engine = new_engine()
    short = replace(RUNNING, sampling=SamplingParams(max_tokens=1))
    requests = batch(engine.handle(StreamOpened(1, short), 0.0))
    actions = engine.handle(done(requests), 0.1)
    assert CloseStream(1) not in actions
    ended_at = None
    while CloseStream(1) not in actions:
        assert engine.deadline is not None
        ended_at = engine.deadline
        actions = engine.handle(Poll(), ended_at)
        assert not faults(actions)
    assert ended_at is not None
    assert 5.0 <= ended_at - 0.1 <= 5.0 + SWEEP_S
    assert "s" in engine.sessions  # its device may come back for what it has missed


def test_a_broken_target_ends_everything_and_everybody_may_come_back() -> None:
    engine = new_engine()
    engine.handle(StreamOpened(1, RUNNING), 0.0)
    engine.handle(StreamOpened(2, named("other")), 0.0)
    engine.handle(BatchFailed("CUDA error"), 0.1)
    actions = engine.handle(ProbeDone("CUDA error"), 0.2)
    assert sorted(faults(actions)) == [(1, FaultCode.SHUTTING_DOWN), (2, FaultCode.SHUTTING_DOWN)]
    (last,) = [action for action in actions if isinstance(action, GiveUp)]
    assert last.why == "CUDA error; then a probe failed: CUDA error"
    assert engine.deadline is None
    assert faults(engine.handle(StreamOpened(3, named("late")), 0.3)) == [
        (3, FaultCode.SHUTTING_DOWN)
    ]
    assert engine.handle(Poll(), 9.0) == ()


def test_no_room_is_not_a_broken_target() -> None:
    engine = new_engine()
    engine.handle(StreamOpened(1, RUNNING), 0.0)
    actions = engine.handle(BatchFailed("out of memory", full=True), 0.1)
    assert faults(actions) == [(1, FaultCode.OVERLOADED)]


def test_a_suspect_that_cancels_meanwhile_is_not_blamed_twice() -> None:
    engine = new_engine()
    engine.handle(StreamOpened(1, RUNNING), 0.0)
    engine.handle(BatchFailed("bad"), 0.1)
    engine.handle(StreamMessage(1, Cancel()), 0.15)
    assert not engine.sessions
    assert engine.handle(ProbeDone(), 0.2) == ()
    assert not engine.running


@pytest.mark.parametrize("probing", [False, True])
def test_a_pass_or_a_probe_that_never_ends_is_a_broken_target(probing: bool) -> None:
    engine = new_engine(EngineLimits(stuck_pass_s=60.0, silence_s=1000.0))
    engine.handle(StreamOpened(1, RUNNING), 0.0)
    if probing:
        engine.handle(BatchFailed("no answer"), 0.05)
    now, actions = 0.0, engine.handle(Poll(), 0.1)
    while (deadline := engine.deadline) is not None:
        now = deadline
        actions = engine.handle(Poll(), now)
    assert 60.0 <= now <= 63.0
    assert any(isinstance(action, GiveUp) for action in actions)
    assert faults(actions) == [(1, FaultCode.SHUTTING_DOWN)]
