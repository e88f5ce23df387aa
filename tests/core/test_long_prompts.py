"""Long prompts in a small KV cache: two with room for one, one that is evicted while it is fed, and
one that is cancelled.

Oracle: the rows that the passes feed, counted, and the free blocks of the ledger.
"""

from __future__ import annotations

from collections import Counter

import pytest

from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier.block_ledger import BlockLedger, SharePrefixes
from edgespec.core.verifier.engine_events import EngineLimits
from tests.core import scenes
from tests.present import require

LENGTH = 6_000
BLOCK = 16


def open_engine(tokens: int, share: SharePrefixes = SharePrefixes.ALL) -> scenes.PacedEngine:
    limits = EngineLimits(cache=CacheShape(tokens // BLOCK, BLOCK), share_prefixes=share)
    return scenes.PacedEngine(0.0002, limits)


def ledger_of(world: scenes.PacedEngine) -> BlockLedger:
    return require(world.engine.cache_scheduler.ledger)


def feed(world: scenes.PacedEngine, *names: str) -> Counter[str]:
    """Run passes until each session has its first token. Return the rows of each session."""
    fed = Counter[str]()
    for _ in range(5_000):
        if all(world.tokens[name] for name in names):
            return fed
        fed.update(world.run_pass())
    raise AssertionError(f"no first token: {world.tokens}")


def test_two_long_prompts_with_room_for_one_are_fed_one_after_the_other() -> None:
    world = open_engine(9_600, SharePrefixes.NONE)
    world.open("first", LENGTH)
    world.open("second", LENGTH)
    fed = feed(world, "first")
    assert (fed["first"], fed["second"]) == (LENGTH, 0)
    world.run_until(world.now + 1.0)
    assert world.tokens["second"] == 0  # the first one decodes in its room
    world.close("first")
    fed = feed(world, "second")
    assert fed["second"] == LENGTH
    cache = world.engine.cache_scheduler
    assert (cache.evictions, cache.preemptions, world.faults) == (0, 0, [])


@pytest.mark.parametrize("share", [SharePrefixes.ALL, SharePrefixes.NONE])
def test_a_prompt_that_is_evicted_while_it_is_fed_is_fed_again(share: SharePrefixes) -> None:
    """The older session grows into the last block, so the newer one loses its room until the older
    one ends. Blocks that were not used meanwhile still hold its rows."""
    world = open_engine(8_192, share)
    world.open("older", 2_000)
    feed(world, "older")
    older = world.engine.sessions["older"]
    world.run_until(world.now + 0.02 * (BLOCK - older.prefix.length % BLOCK - 2))
    shared = 2_000 if share is SharePrefixes.ALL else 0  # all prompts here begin alike
    world.open("newer", BLOCK * ledger_of(world).free_count + shared - 1)
    fed, cache = Counter[str](), world.engine.cache_scheduler
    while not cache.evictions:
        fed.update(world.run_pass())
        assert world.tokens["newer"] == 0
    length = world.engine.sessions["newer"].prefix.length
    assert 0 < fed["newer"] < length
    assert cache.preemptions == 1
    world.close("older")
    again = feed(world, "newer")["newer"]
    if share is SharePrefixes.NONE:
        assert again == length
    else:
        left = length - shared - fed["newer"]
        assert left <= again <= left + 3 * BLOCK
    assert world.faults == []


def test_a_prompt_that_is_cancelled_frees_its_blocks_at_once() -> None:
    """A pass with its rows runs at that time. What it had fed serves the next turn."""
    world = open_engine(9_600)
    ledger = ledger_of(world)
    before = ledger.free_count
    world.open("long", LENGTH)
    world.run_pass()
    world.run_pass()
    assert ledger.free_count == before - LENGTH // BLOCK
    world.close("long")
    assert ledger.free_count == before
    world.run_pass()  # the pass that ran ends without it
    world.open("again", LENGTH)
    assert LENGTH - 1024 - BLOCK <= feed(world, "again")["again"] < LENGTH
