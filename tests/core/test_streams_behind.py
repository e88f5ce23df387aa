"""What cannot leave holds its own session up, nobody else's, and never for longer than it waits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import Commit, Received
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import (
    EngineAction,
    RunBatch,
    SendTo,
    StreamCaughtUp,
    StreamLost,
    StreamMessage,
    StreamOpened,
)
from tests.core.engine_scenes import batch, done, named, new_engine
from tests.core.fixed_text import PROMPT, TEXT

WHOLE = TEXT[len(PROMPT) : len(PROMPT) + 9]


def _keys(requests: tuple[PassRequest, ...]) -> list[str]:
    return [request.key for request in requests]


def _two() -> tuple[VerifyEngine, tuple[PassRequest, ...]]:
    """Sessions "a" on stream 1 and "b" on stream 2, and the pass that both of them are in."""
    engine = new_engine(contain=False)
    alone = batch(engine.handle(StreamOpened(1, named("a")), 0.0))
    engine.handle(StreamOpened(2, named("b")), 0.0)
    return engine, batch(engine.handle(done(alone), 0.1))


def test_who_is_behind_waits_and_the_others_go_on() -> None:
    engine, both = _two()
    assert sorted(_keys(both)) == ["a", "b"]
    actions = engine.handle(replace(done(both), behind=(1,)), 0.2)
    said = [action.stream for action in actions if isinstance(action, SendTo)]
    assert sorted(said) == [1, 2]  # what the pass brought is said to both all the same
    assert _keys(batch(actions)) == ["b"]
    actions = engine.handle(done(batch(actions)), 0.3)
    assert _keys(batch(actions)) == ["b"]
    assert engine.handle(StreamCaughtUp(1), 0.35) == ()  # a pass runs: it takes part in the next
    assert sorted(_keys(batch(engine.handle(done(batch(actions)), 0.4)))) == ["a", "b"]


def test_who_catches_up_while_nothing_runs_has_a_pass_at_once() -> None:
    engine, both = _two()
    actions = engine.handle(replace(done(both), behind=(2, 1)), 0.2)
    assert not engine.running
    assert not any(isinstance(action, RunBatch) for action in actions)
    assert _keys(batch(engine.handle(StreamCaughtUp(2), 0.3))) == ["b"]


def test_a_stream_that_is_gone_or_unknown_is_nobodys() -> None:
    engine, both = _two()
    engine.handle(StreamLost(1), 0.15)
    actions = engine.handle(replace(done(both), behind=(1, 77)), 0.2)
    assert _keys(batch(actions)) == ["b"]
    engine.handle(StreamCaughtUp(1), 0.25)
    assert engine.handle(StreamCaughtUp(77), 0.25) == ()


def test_a_device_that_comes_back_is_not_behind() -> None:
    engine, both = _two()
    actions = engine.handle(replace(done(both), behind=(1,)), 0.2)
    running = batch(actions)
    engine.handle(StreamLost(1), 0.25)
    engine.handle(StreamOpened(3, named("a")), 0.3)
    assert sorted(_keys(batch(engine.handle(done(running), 0.4)))) == ["a", "b"]


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
