"""Oracle: the codec's own bytes."""

from __future__ import annotations

import random

import pytest

from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Limits,
    Message,
    Open,
    Opened,
    Received,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.wire.codec import payload_bytes
from edgespec_sim.wire_size import message_bytes


def hot_messages(seed: int) -> list[Message]:
    dice = random.Random(seed)

    def number() -> int:
        return dice.choice((0, 1, 127, 128, 16_383, 16_384, dice.randrange(1 << 28)))

    count = dice.randrange(0, 9)
    first = dice.randrange(1, 40_000)
    parents = tuple(dice.choice((0, first + i - 1, first + i - 1)) for i in range(count))
    if count and dice.random() < 0.3:  # a chain behind the node before it
        parents = tuple(first + i - 1 for i in range(count))
    tokens = tuple(dice.randrange(1 << dice.randrange(1, 17)) for _ in range(count))
    based = 0 in parents
    draft = Draft(
        first if count else 0,
        parents,
        tokens,
        dice.randrange(1, 5000) if based else 0,
        dice.randrange(1 << 32) if based else 0,
    )
    commit = Commit(
        position=dice.randrange(4000),
        tokens=tokens,
        accepted=dice.randrange(count + 1),
        stale=number(),
        queue_us=number(),
        verify_us=number(),
        rows=number(),
        echo=number(),
        held_us=number(),
        finish=dice.choice((None, FinishReason.STOP)),
        row_price=dice.choice((None, 0, 1, 127, 128, 1000)),
        credit=dice.choice((None, 0, 127, 128)),
    )
    return [draft, commit, Received(number(), number()), Cancel()]


@pytest.mark.parametrize("seed", range(200))
def test_what_travels_all_the_time_is_exact(seed: int) -> None:
    for message in hot_messages(seed):
        assert message_bytes(message) == payload_bytes(message), message


@pytest.mark.parametrize(
    "message",
    [
        Open("a" * 32, "model", "v" * 64, tuple(range(1, 3000)), (5, 6), SamplingParams(seed=9)),
        Open("s", "", "", (1,), sampling=SamplingParams(temperature=0.7, top_p=0.9)),
        Opened(Limits(), "toy", 12),
        Fault(FaultCode.OVERLOADED, "all 64 sessions are taken", 1.0),
    ],
)
def test_what_travels_once_is_close(message: Message) -> None:
    size = payload_bytes(message)
    assert abs(message_bytes(message) - size) <= max(32, 0.02 * size)


def test_a_session_secret_is_counted() -> None:
    plain = Open("session", "", "", (1, 2, 3))
    secret = Open("session", "", "", (1, 2, 3), session_secret=b"x" * 32)
    assert message_bytes(secret) - message_bytes(plain) == payload_bytes(secret) - payload_bytes(
        plain
    )
