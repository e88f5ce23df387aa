"""The law for entering the cache: shares of credentials, the order, and the session that loses its
blocks.

Oracle: scenes by hand, with the number of passes that a first token may take; and random schedules
against the promises of the law: sessions within their shares enter at once, every session advances,
and no two sessions take blocks from each other in turns. (``EntryCheck`` of the random worlds
judges each refusal.)
"""

from __future__ import annotations

import random

import pytest

from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier.block_ledger import SharePrefixes
from edgespec.core.verifier.engine_events import EngineLimits
from tests.core.scenes import DECODE_S, PacedEngine

CROWD, VICTIM, LONG = Credential("crowd"), Credential("victim"), Credential("long")
ROW_S = 0.001
BLOCK = 16


def new_paced_engine(blocks: int, rows: int = 1024, row_s: float = ROW_S) -> PacedEngine:
    limits = EngineLimits(
        cache=CacheShape(blocks, BLOCK),
        max_sessions=512,
        max_rows_per_pass=rows,
        share_prefixes=SharePrefixes.NONE,  # all prompts of these scenes are alike
    )
    return PacedEngine(row_s, limits)


def passes_until_a_token(engine: PacedEngine, name: str, most: int) -> int:
    for count in range(1, most + 1):
        engine.run_pass()
        if engine.tokens[name]:
            return count
    pytest.fail(f"{name}: no token in {most} passes")


def is_inside(engine: PacedEngine, name: str) -> bool:
    ledger = engine.engine.cache_scheduler.ledger
    assert ledger is not None
    return ledger.held_count(name) > 0


def test_prompts_of_one_key_with_room_for_all_delay_no_other_key() -> None:
    engine = new_paced_engine(4_096)
    engine.open("talks", credential=VICTIM)
    engine.run_until(1.0)
    for number in range(40):
        engine.open(f"crowd {number}", 1_000, CROWD)
    for number in range(20):
        engine.run_pass()
        engine.open(f"short {number}", 4, VICTIM)
        began_at = engine.now
        passes_until_a_token(engine, f"short {number}", 6)
        assert engine.now - began_at <= 0.3
        engine.close(f"short {number}")


def test_prompts_of_one_key_alone_in_their_pass_are_over_soon_for_another_key() -> None:
    """No session decodes, so prompts have the whole pass, but never 1,024 rows of them at once."""
    engine = new_paced_engine(4_096)
    engine.open("warm", credential=VICTIM)
    for number in range(40):
        engine.open(f"crowd {number}", 1_000, CROWD)
    engine.run_until(1.0)
    engine.close("warm")
    for number in range(10):
        engine.run_pass()
        engine.open(f"short {number}", 4, VICTIM)
        began_at = engine.now
        passes_until_a_token(engine, f"short {number}", 6)
        assert engine.now - began_at <= 0.3
        engine.close(f"short {number}")


def test_one_key_alone_has_the_whole_pass_for_its_prompts() -> None:
    engine = new_paced_engine(4_096)
    engine.open("long", 2_000, CROWD)
    rows = [engine.run_pass()["long"] for _ in range(3)]
    assert rows == [512, 512, 512]  # one session each; a pass has 1,024 rows


def test_a_newcomer_within_its_share_takes_room_from_the_newest_of_a_key_above_its_share() -> None:
    engine = new_paced_engine(544, row_s=0.0)
    for number in range(8):
        engine.open(f"crowd {number}", 38 * BLOCK, CROWD)
    engine.open("crowd 8", 197 * BLOCK, CROWD)
    ledger = engine.engine.cache_scheduler.ledger
    assert ledger is not None
    while not all(engine.tokens.values()) or ledger.free_count >= 6:
        engine.run_pass()
    before = engine.engine.cache_scheduler.evictions
    assert before == 0
    engine.open("victim", 6 * BLOCK, VICTIM)
    passes_until_a_token(engine, "victim", 3)
    assert engine.engine.cache_scheduler.evictions == 1
    assert not is_inside(engine, "crowd 8")
    for _ in range(5):
        engine.run_pass()
    assert is_inside(engine, "victim")  # and no session takes the room back
    assert engine.engine.cache_scheduler.evictions == 1


def test_a_prompt_above_its_share_waits_for_older_sessions_and_for_no_newer_ones() -> None:
    """A key opens a short session whenever one ends; the long prompt needs nine tenths of the
    cache."""
    engine = new_paced_engine(520)
    shorts = [f"short {number}" for number in range(8)]
    for name in shorts:
        engine.open(name, 40 * BLOCK, CROWD)
    engine.run_until(1.0)
    engine.open("long", 470 * BLOCK, LONG)
    for number in range(8, 400):
        if engine.tokens["long"]:
            break
        for _ in range(4):
            engine.run_pass()
        engine.close(shorts.pop(0))
        shorts.append(f"short {number}")
        engine.open(shorts[-1], 40 * BLOCK, CROWD)
    # The eight older sessions end after eight turns; then the 7,520 rows are fed.
    assert engine.tokens["long"]
    assert number <= 8 + 8 + 7_520 / 60


def test_sessions_over_their_rate_keep_nobody_out() -> None:
    slow = Credential("slow", tokens_per_s=1.0)
    engine = new_paced_engine(512)
    engine.open("first", credential=slow)
    while engine.engine.running:
        engine.run_pass()
    for number in range(20):
        engine.open(f"slow {number}", 400 * BLOCK, slow)
    engine.open("other", 400 * BLOCK, CROWD)
    assert is_inside(engine, "other")


def test_two_keys_whose_sessions_grow_together_do_not_evict_each_other_in_turns() -> None:
    engine = new_paced_engine(512)
    for number in range(4):
        for credential in (CROWD, VICTIM):
            engine.open(f"{credential.name} {number}", 60 * BLOCK, credential)
    engine.run_until(40.0)  # each session would grow by about 100 blocks
    assert engine.engine.cache_scheduler.evictions <= 8
    assert min(engine.tokens["crowd 0"], engine.tokens["victim 0"]) > 1_000


@pytest.mark.parametrize("seed", range(8))
def test_in_random_schedules_shares_are_kept_and_nobody_starves(seed: int) -> None:
    """Oracle: a session within its share has a token as soon as its prompt can be computed, and
    every session has one before long, whatever comes after it."""
    rng = random.Random(seed)
    blocks = rng.choice((512, 600, 1_024))
    keys = [Credential(f"key {number}") for number in range(rng.choice((2, 3, 5)))]
    engine = new_paced_engine(blocks, row_s=0.0001)
    opened_at: dict[str, float] = {}
    modest = Credential("modest")
    waited: dict[str, float] = {}
    for step in range(300):
        for _ in range(rng.randrange(3)):
            if engine.engine.running:
                engine.run_pass()
        for name, at in opened_at.items():
            if name not in waited and engine.tokens[name]:
                waited[name] = engine.now - at
        there = sorted(engine._stream_of)
        if len(there) >= 24 or (there and rng.random() < 0.3):
            done = [name for name in there if engine.tokens[name] >= 3]
            if done:
                engine.close(rng.choice(done))
        elif step % 5 == 0:
            name, credential = f"modest {step}", modest
            for other in [one for one in there if one.startswith("modest")]:
                engine.close(other)
            engine.open(name, rng.choice((1, 8, 64)), credential)
            opened_at[name] = engine.now
        else:
            name = f"s {step}"
            engine.open(name, rng.choice((1, 40, 700, 3_000, 8_000)), rng.choice(keys))
            opened_at[name] = engine.now
    while missing := [name for name in engine._stream_of if not engine.tokens[name]]:
        engine.run_pass()
        done = [name for name in engine._stream_of if engine.tokens[name] >= 3]
        if done:
            engine.close(done[0])
        assert engine.now < 600.0, missing
    served = [wait for name, wait in waited.items() if name.startswith("modest")]
    assert served
    assert max(served) <= 20 * DECODE_S
