"""The account of blocks and the rule of who gives them up.

Oracle: a ledger that lists the owner of each block (a plain dict), under random growth, trimming
and release, and one with names that looks at all tables and all that has happened; for the rule,
the order of the file's text, scene by scene.
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.drafts import ExactRule, run_ahead_policy
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


_KEYS = "abc"
_PLACES = st.integers(0, 5)
_OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(("reserve", "trim")), st.sampled_from(_KEYS), st.integers(0, 24)),
    st.tuples(st.sampled_from(("publish", "adopt")), st.sampled_from(_KEYS), _PLACES),
    st.tuples(st.sampled_from(("release", "withdraw")), st.sampled_from(_KEYS), _PLACES),
)


class NaiveLedger:
    """Every question is answered by looking at all tables and at all that has happened."""

    def __init__(self, block_count: int) -> None:
        self.blocks = range(1, block_count + 1)
        self.tables: dict[str, list[int]] = {key: [] for key in _KEYS}
        self.names: dict[int, bytes] = {}
        """What each block's rows are published as."""
        self.let_go: list[int] = []
        """Blocks in the order in which their last holders let go of them."""

    def holders(self, block: int) -> int:
        return sum(block in table for table in self.tables.values())

    @property
    def free(self) -> set[int]:
        return {block for block in self.blocks if not self.holders(block)}

    def drop(self, key: str, first: int) -> None:
        dropped = self.tables[key][first:]
        del self.tables[key][first:]
        self.let_go += [block for block in reversed(dropped) if not self.holders(block)]

    def oldest(self) -> int:
        """Of the free blocks with a name, the one let go longest ago."""
        last = {block: place for place, block in enumerate(self.let_go)}
        return min(self.free & set(self.names), key=last.__getitem__)

    def check_given(self, block: int) -> None:
        """The block was given to somebody: was it its turn? It has no name any more."""
        assert block in self.free
        if self.free - set(self.names):
            assert block not in self.names
        else:
            assert block == self.oldest()
        self.names.pop(block, None)


@given(st.lists(_OPERATIONS, min_size=20, max_size=60))
def test_a_naive_ledger_gives_the_same_answers(
    operations: list[tuple[str, str, int]],
) -> None:
    ledger, naive = BlockLedger(CacheShape(9, 4)), NaiveLedger(9)
    for operation, key, number in operations:
        table = naive.tables[key]
        match operation:
            case "reserve":
                missing = max(0, -(-number // 4) - len(table))
                assert ledger.reserve(key, number) is (missing <= len(naive.free))
                for block in ledger.table(key)[len(table) :]:
                    naive.check_given(block)
                    table.append(block)
            case "trim":
                ledger.trim(key, number)
                naive.drop(key, -(-number // 4))
            case "release":
                assert ledger.release(key) == len(table)
                naive.drop(key, 0)
            case "publish":
                for place, block in enumerate(table[: number + 1]):
                    if ledger.writable(block):
                        ledger.publish(key, place, bytes([place]))
                        if bytes([place]) not in naive.names.values():
                            naive.names[block] = bytes([place])
            case "adopt":
                _adopt_chain(ledger, naive, key, number % (len(table) + 1))
            case "withdraw":
                ledger.withdraw(key)
                naive.names = {b: name for b, name in naive.names.items() if b not in table}
        _check_same(ledger, naive)


def _adopt_chain(ledger: BlockLedger, naive: NaiveLedger, key: str, place: int) -> None:
    """From ``place`` on, take over all published blocks that stand at these places in texts."""
    table = naive.tables[key]
    block_of = {name: block for block, name in naive.names.items()}
    found: list[int] = []
    while (block := block_of.get(bytes([place + len(found)]))) is not None and block not in table:
        found.append(block)
    ledger.adopt(key, place, found)
    replaced = table[place : place + len(found)]
    table[place : place + len(found)] = found
    naive.let_go += [block for block in reversed(replaced) if not naive.holders(block)]


def _check_same(ledger: BlockLedger, naive: NaiveLedger) -> None:
    assert ledger.free_count == len(naive.free)
    assert ledger.idle_count == len(naive.free & set(naive.names))
    assert set(ledger.holders) >= {key for key, table in naive.tables.items() if table}
    for key, table in naive.tables.items():
        assert ledger.table(key) == tuple(table)
    for block in naive.blocks:
        count = naive.holders(block)
        assert ledger.holder_count(block) == count
        assert ledger.writable(block) is (count == 1 and block not in naive.names)
    found = {number: ledger.find(bytes([number])) for number in range(6)}
    names = {name[0]: block for block, name in naive.names.items()}
    assert {number: block for number, block in found.items() if block is not None} == names


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


def test_without_an_account_there_is_always_room() -> None:
    keeper = CacheKeeper(None, {})
    assert keeper.rows_for("nobody", 77, (), 3, 0.0) == 77
    assert keeper.reserve("nobody", 77) == ()
