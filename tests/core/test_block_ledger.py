"""The account of blocks and the rule of who gives them up.

Oracle: a ledger that lists the owner of each block (a plain dict), under random growth, trimming
and release, and one with names that looks at all tables and all that has happened; for the rule,
the order of the file's text, scene by scene.
"""

from __future__ import annotations

import random
from dataclasses import replace

from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.drafts import ExactRule, run_ahead_policy
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import Attach, Detach, Offer, PassDone, RunPass
from tests.core.scenes import LIMITS, MODEL, REQUEST, TEXT


def test_every_block_has_one_owner_and_none_is_lost() -> None:
    rng = random.Random(0)
    ledger = BlockLedger(CacheShape(12, 4))
    owner: dict[int, str] = {}
    lengths = {key: 0 for key in "abc"}
    for _ in range(3000):
        key = rng.choice("abc")
        length = rng.randrange(0, 30)
        mine = [block for block in ledger.table(key)]
        match rng.randrange(3):
            case 0:
                fits = -(-length // 4) - len(mine) <= 12 - len(owner)
                assert ledger.reserve(key, length) is fits
                if fits:
                    lengths[key] = max(length, lengths[key])
                    assert ledger.table(key)[: len(mine)] == tuple(mine)
            case 1:
                ledger.trim(key, length)
                lengths[key] = min(length, lengths[key])
                assert ledger.table(key) == tuple(mine[: -(-length // 4)])
            case _:
                assert ledger.release(key) == len(mine)
                lengths[key] = 0
        owner = {block: key for key in "abc" for block in ledger.table(key)}
        held = sum(ledger.held(key) for key in "abc")
        assert len(owner) == held == 12 - ledger.free_count
        assert set(owner) <= set(range(1, 13))
        assert all(ledger.held(key) * 4 >= lengths[key] for key in "abc")


def _world(
    *prompts: int, blocks: int, share: bool = False
) -> tuple[CacheKeeper, dict[str, VerifySession]]:
    """Sessions a, b, ... with prompts of so many tokens, all the same one, opened in this order."""
    sessions: dict[str, VerifySession] = {}
    for key, length in zip("abcdef", prompts, strict=False):
        request = replace(
            REQUEST,
            session_id=key,
            prompt=tuple([1] * length),
            sampling=SamplingParams(max_tokens=50),
            run_ahead=RunAhead.ALWAYS,
        )
        run_ahead = run_ahead_policy(request.run_ahead)
        sessions[key] = VerifySession(request, MODEL, LIMITS, ExactRule(), run_ahead, 0.0)
        sessions[key].handle(Attach(request), 0.0)
    owner_of = (lambda key: "") if share else None
    return CacheKeeper(BlockLedger(CacheShape(blocks, 4)), sessions, owner_of), sessions


def _run(keeper: CacheKeeper, session: VerifySession, now: float = 0.0) -> int:
    """One pass of the session alone, with all the rows it gets; how many those are."""
    key = session.request.session_id
    rows = keeper.rows_for(key, 100, (), 0, now)
    if rows:
        [run] = session.handle(Offer(rows, 0.02), now)
        assert isinstance(run, RunPass)
        keeper.reserve(key, session.prefix.length)
        session.handle(PassDone((TEXT[5],)), now)
        keeper.settle(run.request, session.prefix.length)
    return rows


def test_nobody_enters_before_one_who_came_earlier() -> None:
    keeper, sessions = _world(4, 16, 1, blocks=4)
    assert _run(keeper, sessions["a"])
    assert keeper.rows_for("b", 100, (), 0, 0.0) == 0
    assert keeper.rows_for("c", 100, (), 0, 0.0) == 0  # would fit, but b waits
    sessions["b"].handle(Detach(), 1.0)
    assert keeper.rows_for("c", 100, (), 0, 1.0) > 0


def test_the_gone_lose_their_blocks_first_then_those_who_wait_then_the_newest() -> None:
    keeper, sessions = _world(4, 4, 4, 4, 4, blocks=5)
    for session in sessions.values():
        assert _run(keeper, session)
    sessions["b"].device.unread_since = 0.5
    sessions["c"].handle(Detach(), 2.0)
    sessions["d"].handle(Detach(), 1.0)
    ledger = keeper.ledger
    assert ledger is not None
    for length in (4, 8, 12, 16):  # at each step the oldest needs one more block
        sessions["a"].cache_length = length
        assert keeper.rows_for("a", 1, (), 0, 3.0) == 1
        keeper.reserve("a", length + 1)
    assert keeper.evicted == ["d", "c", "b", "e"]
    assert [sessions[key].cache_length for key in "bcde"] == [0, 0, 0, 0]
    sessions["a"].cache_length = 20
    assert keeper.rows_for("a", 1, (), 0, 3.0) == 0  # nobody is left


def test_guesses_cost_nobody_a_block() -> None:
    keeper, sessions = _world(4, 4, blocks=4)
    for session in sessions.values():
        assert _run(keeper, session)
    assert keeper.rows_for("a", 100, (), 0, 1.0) == 8  # the two free blocks
    assert keeper.rows_for("a", 100, (), 1, 1.0) == 4  # one is left to who may still join
    assert keeper.evictions == 0


def test_an_eviction_frees_only_what_nobody_else_holds() -> None:
    keeper, sessions = _world(9, 9, 9, blocks=6, share=True)
    for session in sessions.values():
        assert _run(keeper, session)
    ledger = keeper.ledger
    assert ledger is not None
    assert [ledger.held(key) for key in "abc"] == [3, 3, 3]
    assert ledger.free_count == 1  # two blocks are everybody's
    sessions["a"].cache_length = 12
    assert keeper.rows_for("a", 8, (), 0, 1.0) == 4
    assert ledger.reserve("a", 16)
    ledger.trim("c", 8)
    assert ledger.reserve("a", 20)  # by what c has let go
    assert not keeper._make_room("a", 25, (), 1.0)  # two more are not to be had from anybody
    assert keeper.evicted == []
    assert keeper._make_room("a", 24, (), 1.0)
    assert keeper.evicted == ["b"]  # and not c, which is newer but has nothing of its own
    assert sessions["c"].cache_length > 0


def test_an_evicted_session_finds_its_own_blocks_again() -> None:
    keeper, sessions = _world(3, 13, blocks=5, share=True)
    for session in sessions.values():
        assert _run(keeper, session)
    sessions["a"].cache_length = 4
    assert keeper.rows_for("a", 1, (), 0, 1.0) == 1
    assert keeper.evicted == ["b"]
    keeper.reserve("a", 5)
    assert sessions["b"].cache_length == 0
    keeper.release("a")
    del sessions["a"]
    assert keeper.rows_for("b", 100, (), 0, 2.0) > 0
    assert sessions["b"].cache_length == 12
    assert keeper.prefix_hit_tokens == 12
