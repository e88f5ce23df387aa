"""All sessions of a verifier, beside the scripts: bugs and random worlds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import Commit, FaultCode, Received
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.drafts import ExactRule, Walk
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import (
    BatchDone,
    CloseSequence,
    CloseStream,
    EngineAction,
    EngineLimits,
    ReportFailure,
    RunBatch,
    SendTo,
    StreamCaughtUp,
    StreamMessage,
    StreamOpened,
)
from tests.core.engine_scenes import batch, done, faults, named, new_engine
from tests.core.fixed_text import LIMITS, MODEL, PROMPT, TEXT


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


WHOLE = TEXT[len(PROMPT) : len(PROMPT) + 9]


def _keys(requests: tuple[PassRequest, ...]) -> list[str]:
    return [request.key for request in requests]


def _two() -> tuple[VerifyEngine, tuple[PassRequest, ...]]:
    """Sessions "a" on stream 1 and "b" on stream 2, and the pass that both of them are in."""
    engine = new_engine(contain=False)
    alone = batch(engine.handle(StreamOpened(1, named("a")), 0.0))
    engine.handle(StreamOpened(2, named("b")), 0.0)
    return engine, batch(engine.handle(done(alone), 0.1))


@pytest.mark.parametrize("seed", range(20))
def test_random_worlds_end_with_every_text_whole(seed: int) -> None:
    """Streams fall behind and catch up at random. Nobody who is behind is in a pass, and all texts
    are the target's own when the last has caught up."""
    dice = random.Random(seed)
    engine, names = new_engine(contain=False), "abcde"
    texts: dict[int, list[int]] = {}
    behind: set[int] = set()
    running: tuple[PassRequest, ...] = ()
    now = 0.0

    def take(actions: tuple[EngineAction, ...]) -> None:
        nonlocal running
        for action in actions:
            if isinstance(action, SendTo) and isinstance(action.message, Commit):
                texts[action.stream] += action.message.tokens
        if any(isinstance(action, RunBatch) for action in actions):
            running = batch(actions)
            assert not {names[stream] for stream in behind} & set(_keys(running))

    for stream, name in enumerate(names):
        texts[stream] = []
        take(engine.handle(StreamOpened(stream, named(name)), now))
    for _ in range(400):
        now += 0.01
        if behind and (not running or dice.random() < 0.4):
            stream = dice.choice(sorted(behind))
            behind.discard(stream)
            take(engine.handle(StreamCaughtUp(stream), now))
        elif running:
            ended, running = running, ()
            fallen = tuple(stream for stream in texts if dice.random() < 0.5)
            behind.update(fallen)
            take(engine.handle(replace(done(ended), behind=fallen), now))
    assert not running
    assert all(tuple(text) == WHOLE for text in texts.values())
    for stream in texts:
        engine.handle(StreamMessage(stream, Received(len(PROMPT) + len(WHOLE), 0)), now)
    assert not engine.sessions
