"""The cache: who gives blocks up, and what their names depend on.

Oracle: for the rule of eviction the order of its text, scene by scene. Who uses another's blocks
stands in a script (``engine_scripts/sharing``). Of the account of blocks: a plain dict that lists
the owner of each, under random growth, trimming and release.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier.block_ledger import BlockLedger, BlockNames
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.drafts import ExactRule, run_ahead_policy
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import Attach, Detach, Offer, PassDone, RunPass
from tests.core.scenes import LIMITS, REQUEST, TEXT
from tests.core.scenes import MODEL as FIXED

SIZE = 4
SYSTEM = (1, 2, 3, 4, 6, 7, 8, 9)
"""Two blocks."""


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
) -> tuple[CacheKeeper, BlockLedger, dict[str, VerifySession]]:
    """Sessions a, b, ... with prompts of so many tokens, all the same one, opened in this order,
    and after a pass of each that has room."""
    sessions: dict[str, VerifySession] = {}
    wanted = replace(REQUEST, sampling=SamplingParams(max_tokens=50), run_ahead=RunAhead.ALWAYS)
    ledger = BlockLedger(CacheShape(blocks, SIZE))
    keeper = CacheKeeper(ledger, sessions, (lambda key: "") if share else None)
    for key, length in zip("abcdef", prompts, strict=False):
        request = replace(wanted, session_id=key, prompt=(1,) * length)
        run_ahead = run_ahead_policy(RunAhead.ALWAYS)
        sessions[key] = VerifySession(request, FIXED, LIMITS, ExactRule(), run_ahead, 0.0)
        sessions[key].handle(Attach(request), 0.0)
    for key, session in sessions.items():
        if rows := keeper.rows_for(key, 100, (), 0, 0.0):
            [run] = session.handle(Offer(rows, 0.02), 0.0)
            assert isinstance(run, RunPass)
            keeper.reserve(key, session.prefix.length)
            session.handle(PassDone((TEXT[5],)), 0.0)
            keeper.settle(run.request, session.prefix.length)
    return keeper, ledger, sessions


def test_nobody_enters_before_one_who_came_earlier() -> None:
    keeper, _, sessions = _world(4, 16, 1, blocks=4)
    assert sessions["a"].cache_length
    assert keeper.rows_for("b", 100, (), 0, 0.0) == 0
    assert keeper.rows_for("c", 100, (), 0, 0.0) == 0  # would fit, but b waits
    sessions["b"].handle(Detach(), 1.0)
    assert keeper.rows_for("c", 100, (), 0, 1.0) > 0


def test_the_gone_lose_their_blocks_first_then_those_who_wait_then_the_newest() -> None:
    keeper, _, sessions = _world(4, 4, 4, 4, 4, blocks=5)
    sessions["b"].device.unread_since = 0.5
    sessions["c"].handle(Detach(), 2.0)
    sessions["d"].handle(Detach(), 1.0)
    for length in (4, 8, 12, 16):  # at each step the oldest needs one more block
        sessions["a"].cache_length = length
        assert keeper.rows_for("a", 1, (), 0, 3.0) == 1
        keeper.reserve("a", length + 1)
    assert keeper.evicted == ["d", "c", "b", "e"]
    assert [sessions[key].cache_length for key in "bcde"] == [0, 0, 0, 0]
    sessions["a"].cache_length = 20
    assert keeper.rows_for("a", 1, (), 0, 3.0) == 0  # nobody is left


def test_guesses_cost_nobody_a_block() -> None:
    keeper, _, _ = _world(4, 4, blocks=4)
    assert keeper.rows_for("a", 100, (), 0, 1.0) == 8  # the two free blocks
    assert keeper.rows_for("a", 100, (), 1, 1.0) == 4  # one is left to who may still join
    assert keeper.evictions == 0


def test_an_eviction_frees_only_what_nobody_else_holds() -> None:
    keeper, ledger, sessions = _world(9, 9, 9, blocks=6, share=True)
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


def test_a_shared_block_cannot_be_written_and_one_with_two_holders_not_published() -> None:
    keeper, _, sessions = _world(9, blocks=6, share=True)
    sessions["a"].cache_length = 7  # behind what is published
    with pytest.raises(AssertionError, match="a shared block would be written"):
        keeper.reserve("a", 12)
    ledger = BlockLedger(CacheShape(4, SIZE))
    assert ledger.reserve("a", 8)
    ledger.publish("a", 0, b"0")
    ledger.adopt("b", 0, ledger.table("a")[:1])
    ledger.withdraw("a")
    with pytest.raises(AssertionError, match="2 holders"):
        ledger.publish("b", 0, b"0")


def test_names_depend_on_owner_and_on_every_token_before() -> None:
    def names(*tokens: int, owner: str = "") -> list[bytes]:
        made = BlockNames(CommittedPrefix(tokens), SIZE, owner)
        return [made.name(place) for place in range(len(tokens) // SIZE)]

    first = names(*SYSTEM)
    assert names(*SYSTEM, 10) == first
    assert len({*first, *names(*SYSTEM, owner="x"), *names(*SYSTEM, owner="y")}) == 6
    for place in range(8):
        changed = list(SYSTEM)
        changed[place] += 1
        same = [a == b for a, b in zip(names(*changed), first, strict=True)]
        assert same == [place >= SIZE, False]
    grown = CommittedPrefix(SYSTEM[:5])
    lazy = BlockNames(grown, SIZE, "")
    assert lazy.name(0) == first[0]
    grown.extend(SYSTEM[5:])
    assert lazy.name(1) == first[1]
