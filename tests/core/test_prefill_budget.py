"""Long prompts beside sessions that decode. Oracle: rows of the passes, and the formula by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.scheduler import (
    FIRST_ROWS,
    SLOTS,
    PromptLoad,
)
from tests.core.scenes import DECODE_S, PacedEngine


def test_long_prompts_make_the_passes_of_others_a_quarter_longer() -> None:
    world = PacedEngine(0.0001)
    world.open("victim", 1)
    for _ in range(20):
        assert world.run_pass() == {"victim": 1}
    for number in range(8):
        world.open(f"long {number}", 2_000)
    world.run_pass()
    for _ in range(3):  # the price of a row is learned
        assert sum(world.run_pass().values()) <= 1 + 2 * FIRST_ROWS
    for _ in range(100):
        rows = world.run_pass()
        assert rows.pop("victim") == 1
        assert 1 <= sum(rows.values()) <= 0.25 * DECODE_S / 0.0001 + 1


@pytest.mark.parametrize("row_s", [0.00002, 0.0001])
def test_ten_long_prompts_at_once_stretch_the_gaps_of_a_stream_by_less_than_a_third(
    row_s: float,
) -> None:
    """Emulated: a pass takes 20 ms and ``row_s`` for each prompt row."""
    world = PacedEngine(row_s)
    world.open("victim", 1)
    for _ in range(50):
        world.run_pass()
    names = [f"long {number}" for number in range(10)]
    for name in names:
        world.open(name, 4_000)
    gaps_s, fed_at_s = list[float](), list[float]()
    while len(fed_at_s) < len(names):
        before_s = world.now
        assert "victim" in world.run_pass()
        gaps_s.append(world.now - before_s)
        fed = [name for name in names if world.engine.sessions[name].prefix.length > 4_000]
        fed_at_s += [world.now] * (len(fed) - len(fed_at_s))
    assert max(gaps_s) <= 1.3 * DECODE_S
    alone_s = 4_000 * row_s
    # One after the other, in a bit less than a fifth of the time (1.25 and 1.125 passes, in turn).
    for place, at_s in enumerate(fed_at_s, 1):
        assert at_s - 50 * DECODE_S <= 7.5 * alone_s * place + 0.3


def test_no_prompt_starves_behind_short_ones_that_keep_coming() -> None:
    world = PacedEngine(0.0001)
    world.open("victim", 1)
    for _ in range(20):
        world.run_pass()
    world.open("long", 2_000)
    passes, longest = 0, 0
    while world.engine.sessions["long"].prefix.length == 2_000:
        passes += 1
        assert passes < 600
        name = f"short {passes}"
        world.open(name, 30)
        world.run_pass()
        while world.engine.sessions[name].prefix.length == 30:
            world.run_pass()
            passes += 1
            longest = max(longest, passes)
        world.close(name)
    assert longest < 600


def test_more_sessions_than_rows_leave_prompts_an_eighth_and_each_other_their_turns() -> None:
    world = PacedEngine(0.0, EngineLimits(max_rows_per_pass=16))
    for number in range(20):
        world.open(f"decoder {number}", 1)
    for _ in range(10):
        world.run_pass()
    world.open("long", 100)
    rows = [world.run_pass() for _ in range(60)]
    assert world.engine.sessions["long"].prefix.length > 100
    for number in range(20):
        turns = [index for index, one in enumerate(rows) if f"decoder {number}" in one]
        assert max(b - a for a, b in pairwise(turns)) <= 2


def test_no_credential_makes_the_load_more_than_twice_what_the_others_bring() -> None:
    load = PromptLoad()
    for slot in range(SLOTS):
        for number in range(10):
            load.add(30, slot + 0.5, f"device {number}")
        load.add(16_000, slot + 0.6, "flood")
    assert load.rows_per_s(SLOTS) == 600.0
    for slot in range(SLOTS, 2 * SLOTS):  # who is alone counts
        load.add(16_000, slot + 0.5, "fleet")
    assert load.rows_per_s(2 * SLOTS) == 16_000.0
