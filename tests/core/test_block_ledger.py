"""The account of blocks and the rule of who gives them up.

Oracle: a ledger that lists the owner of each block (a plain dict), under random growth, trimming
and release; for the rule, the order of the file's text, scene by scene.
"""

from __future__ import annotations

import random
from dataclasses import replace

from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier.acceptance import ExactRule
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.run_ahead import run_ahead_policy
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import Attach, Detach, Offer, PassDone, RunPass
from tests.core.fixed_text import LIMITS, MODEL, REQUEST, TEXT


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


def _world(*prompts: int, blocks: int) -> tuple[CacheKeeper, dict[str, VerifySession]]:
    """Sessions a, b, ... with prompts of so many tokens, opened in this order."""
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
    return CacheKeeper(BlockLedger(CacheShape(blocks, 4)), sessions), sessions


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


def test_a_session_enters_when_its_whole_prefix_fits() -> None:
    keeper, sessions = _world(8, 8, blocks=3)
    assert _run(keeper, sessions["a"]) == 12
    assert keeper.rows_for("b", 100, (), 0, 0.0) == 0
    assert keeper.ledger is not None
    assert keeper.ledger.held("b") == 0
    assert keeper.evictions == 0


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


def test_the_newest_gives_way_to_the_oldest_and_never_the_other_way() -> None:
    keeper, sessions = _world(4, 4, blocks=2)
    for session in sessions.values():
        assert _run(keeper, session)
    assert keeper.rows_for("b", 1, (), 0, 1.0) == 0
    assert keeper.rows_for("a", 1, ("b",), 0, 1.0) == 0  # b is in the pass already
    assert keeper.rows_for("a", 1, (), 0, 1.0) == 1
    assert keeper.evicted == ["b"]


def test_guesses_cost_nobody_a_block() -> None:
    keeper, sessions = _world(4, 4, blocks=4)
    for session in sessions.values():
        assert _run(keeper, session)
    assert keeper.rows_for("a", 100, (), 0, 1.0) == 8  # the two free blocks
    assert keeper.rows_for("a", 100, (), 1, 1.0) == 4  # one is left to who may still join
    assert keeper.evictions == 0


def test_without_an_account_there_is_always_room() -> None:
    keeper = CacheKeeper(None, {})
    assert keeper.rows_for("nobody", 77, (), 3, 0.0) == 77
    assert keeper.reserve("nobody", 77) == ()
