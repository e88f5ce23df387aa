"""Who may hold a session, and who has to give it up. Oracle: devices that read keep their sessions,
those that do not lose them to others, and a session is its own device's alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from edgespec.core.protocol.messages import Commit, FaultCode, Open, Received
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.admission import PATIENCE_S
from edgespec.core.verifier.engine import SWEEP_S, VerifyEngine
from edgespec.core.verifier.engine_events import (
    CloseSequence,
    CloseStream,
    EngineAction,
    EngineLimits,
    OpenSequence,
    Poll,
    RunBatch,
    SendTo,
    StreamLost,
    StreamMessage,
    StreamOpened,
)
from tests.core.engine_scenes import RUNNING, batch, done, faults, named, new_engine
from tests.core.fixed_text import LIMITS, MODEL

SECRET = replace(RUNNING, session_secret=b"known to one device")
SILENT = replace(LIMITS, max_unreceived=0)


def _full_of_readers_that_stopped(count: int) -> VerifyEngine:
    """Each was sent one token and acknowledged none."""
    engine = VerifyEngine(MODEL, SILENT, EngineLimits(max_sessions=count, stall_s=20.0))
    actions: tuple[EngineAction, ...] = ()
    for stream in range(count):
        actions += engine.handle(StreamOpened(stream, named(f"s{stream}")), 0.0)
    while any(isinstance(action, RunBatch) for action in actions):
        actions = engine.handle(done(batch(actions)), 0.1)
    return engine


def test_who_reads_nothing_gives_its_slot_to_a_newcomer() -> None:
    engine = _full_of_readers_that_stopped(2)
    early = engine.handle(StreamOpened(8, named("new")), 0.2)
    assert faults(early) == [(8, FaultCode.OVERLOADED)]
    engine.handle(StreamMessage(0, Received(3, 0)), 0.3)
    actions = engine.handle(StreamOpened(9, named("new")), 0.1 + PATIENCE_S)
    assert faults(actions) == [(1, FaultCode.OVERLOADED)]
    assert CloseStream(1) in actions
    assert set(engine.sessions) == {"s0", "new"}


def test_who_left_goes_before_who_reads_nothing_if_it_left_earlier() -> None:
    engine = _full_of_readers_that_stopped(3)
    engine.handle(StreamLost(2), 0.05)
    engine.handle(StreamOpened(9, named("new")), 5.0)
    assert "s2" not in engine.sessions


def test_a_stalled_device_counts_as_gone_after_a_while() -> None:
    engine = _full_of_readers_that_stopped(1)
    heard: list[tuple[int, FaultCode]] = []
    now, actions = 0.0, engine.handle(Poll(), 0.2)
    while engine.sessions and (deadline := engine.deadline) is not None:
        now = deadline
        actions = engine.handle(Poll(), now)
        if faults(actions):
            assert 20.0 <= now <= 20.2 + SWEEP_S
            assert CloseStream(0) in actions
        heard += faults(actions)
    assert heard == [(0, FaultCode.OVERLOADED)]
    assert LIMITS.lease_s < now - 20.0 <= LIMITS.lease_s + 2 * SWEEP_S
    assert CloseSequence("s0") in actions


def test_a_device_that_waits_hears_that_its_session_is_alive() -> None:
    engine = new_engine(EngineLimits(silence_s=10.0))
    engine.handle(StreamOpened(1, RUNNING), 0.0)  # its pass takes for ever
    said: list[float] = []
    while (deadline := engine.deadline) is not None and deadline < 40.0:
        for action in engine.handle(Poll(), deadline):
            assert action == SendTo(1, Commit(2, ()))
            said.append(deadline)
    assert len(said) == 3
    assert all(later - earlier >= 10.0 for earlier, later in pairwise(said))


def test_one_peer_has_only_its_share() -> None:
    engine = new_engine(EngineLimits(max_sessions=4, max_sessions_per_peer=2))
    for stream in range(2):
        engine.handle(StreamOpened(stream, named(f"s{stream}"), "greedy"), 0.0)
    actions = engine.handle(StreamOpened(2, named("s2"), "greedy"), 0.0)
    assert faults(actions) == [(2, FaultCode.OVERLOADED)]
    assert not faults(engine.handle(StreamOpened(3, named("s3"), "other"), 0.0))
    engine.handle(StreamLost(0), 1.0)
    assert not faults(engine.handle(StreamOpened(4, named("s4"), "greedy"), 1.0))
    assert set(engine.sessions) == {"s1", "s3", "s4"}


@pytest.mark.parametrize(
    "thief",
    [
        replace(SECRET, session_secret=b""),
        replace(SECRET, session_secret=b"guessed"),
        replace(SECRET, session_secret=b"guessed", prompt=(5, 5)),
        replace(SECRET, session_secret=b"", sampling=SamplingParams(seed=5)),
    ],
)
def test_a_session_cannot_be_taken_over_or_ended_by_who_knows_its_id(thief: Open) -> None:
    engine = new_engine()
    running = batch(engine.handle(StreamOpened(1, SECRET), 0.0))
    actions = engine.handle(StreamOpened(2, thief), 0.1)
    assert faults(actions) == [(2, FaultCode.INVALID)]
    assert actions[1:] == (CloseStream(2),)
    assert engine.sessions["s"].attached
    assert SendTo(1, Commit(2, (10,), verify_us=200_000)) in engine.handle(done(running), 0.2)


def test_a_session_without_a_secret_is_not_opened_anew_by_another() -> None:
    engine = new_engine()
    engine.handle(StreamOpened(1, RUNNING), 0.0)
    actions = engine.handle(StreamOpened(2, replace(RUNNING, prompt=(5, 5, 5))), 0.1)
    assert faults(actions) == [(2, FaultCode.INVALID)]
    assert engine.sessions["s"].attached


def test_its_own_device_may_begin_another_generation_in_it() -> None:
    engine = new_engine()
    running = batch(engine.handle(StreamOpened(1, SECRET), 0.0))
    actions = engine.handle(StreamOpened(2, replace(SECRET, prompt=(5, 5, 5))), 0.1)
    assert faults(actions) == [(1, FaultCode.INVALID)]
    assert [type(action) for action in actions[1:4]] == [CloseStream, CloseSequence, OpenSequence]
    requests = batch(engine.handle(done(running), 0.2))
    assert [request.feed for request in requests] == [(5, 5, 5)]
    assert engine.sessions["s"].prefix.output == []
