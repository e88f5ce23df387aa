"""The cache: the account of blocks, who gives them up, and who uses another's.

Oracle: a ledger that lists the owner of each block (a plain dict), under random growth, trimming
and release; for the rule of eviction the order of its text, scene by scene; for sharing, blocks of
4 rows and a target that says token 5 whatever it is asked, so that every request of a pass can be
written down.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import Cancel, Draft, Open, Opened, Received, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import CacheShape, PassRequest, PassResult
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.block_ledger import BlockLedger, BlockNames, SharePrefixes
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.drafts import ExactRule, run_ahead_policy
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import Attach, Detach, Offer, PassDone, RunPass
from tests.core.scenes import LIMITS, REQUEST, TEXT
from tests.core.scenes import MODEL as FIXED

SIZE, TOKEN = 4, 5
SYSTEM = (1, 2, 3, 4, 6, 7, 8, 9)
"""Two blocks."""
MODEL = replace(FIXED, fingerprint="fixed")
SQL = replace(MODEL, name="sql", fingerprint="sql-on-fixed")
POETRY = replace(MODEL, name="poetry", fingerprint="poetry-on-fixed")


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


class Serving:
    """An engine, what its last event made it do, and the pass that runs."""

    def __init__(self, rows: int = 64, share: SharePrefixes = SharePrefixes.ALL) -> None:
        cache, limits = CacheShape(40, SIZE), replace(LIMITS, context_length=40 * SIZE)
        bounds = ee.EngineLimits(
            cache=cache, max_rows_per_session=rows, max_rows_per_pass=64, share_prefixes=share
        )
        self.engine = VerifyEngine(MODEL, limits, bounds, contain=False, adapters=(SQL, POETRY))
        self.batch: tuple[PassRequest, ...] = ()
        self.actions: tuple[ee.EngineAction, ...] = ()

    def handle(self, event: ee.EngineEvent) -> None:
        self.actions = self.engine.handle(event, 0.0)
        for action in self.actions:
            if isinstance(action, ee.RunBatch):
                self.batch = action.requests

    def open(
        self,
        key: str,
        prompt: tuple[int, ...],
        *,
        max_tokens: int = 3,
        credential: Credential = ANYBODY,
        run_ahead: RunAhead = RunAhead.ALWAYS,
        model: str = "",
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Open(key, model, "", prompt, sampling=sampling, run_ahead=run_ahead)
        self.handle(ee.StreamOpened(ord(key[0]), request, credential=credential))

    def done(self) -> None:
        """The pass goes well."""
        batch, self.batch = self.batch, ()
        said = [(r.key, (TOKEN,) * (1 + len(r.tokens)) if r.sample else ()) for r in batch]
        self.handle(ee.BatchDone(tuple(PassResult(key, targets) for key, targets in said)))

    def finish(self) -> None:
        """Passes until nobody wants one any more; all devices acknowledge everything."""
        while self.batch:
            self.done()
            for key, session in tuple(self.engine.sessions.items()):
                self.handle(ee.StreamMessage(ord(key[0]), Received(session.prefix.length, 0)))

    def starts(self) -> dict[str, int]:
        """How many rows each session of the running pass has found cached."""
        return {request.key: request.cache_length for request in self.batch}

    @property
    def ledger(self) -> BlockLedger:
        assert self.engine.keeper.ledger is not None
        return self.engine.keeper.ledger


def test_a_second_session_starts_behind_the_common_blocks() -> None:
    serving = Serving()
    serving.open("a", (*SYSTEM, 10, 11))
    serving.finish()
    assert serving.ledger.free_count == serving.ledger.block_count
    serving.open("b", (*SYSTEM, 12, 13, 14))
    [request] = serving.batch
    assert (request.cache_length, request.feed) == (8, (12, 13, 14))
    assert len(request.blocks) == 3
    [opened] = [action for action in serving.actions if isinstance(action, ee.OpenSequence)]
    assert opened.text == (*SYSTEM, 12, 13, 14)
    keeper = serving.engine.keeper
    assert (keeper.prefix_query_tokens, keeper.prefix_hit_tokens) == (10 + 11, 8)
    serving.finish()
    serving.open("c", SYSTEM)  # one token at least is fed
    assert [(r.cache_length, r.feed) for r in serving.batch] == [(4, SYSTEM[4:])]
    serving.finish()
    serving.open("d", SYSTEM[:4])
    assert serving.starts() == {"d": 0}


def test_two_sessions_hold_a_block_at_once() -> None:
    serving = Serving()
    serving.open("a", (*SYSTEM, 10), max_tokens=30)
    serving.open("b", (*SYSTEM, 11), max_tokens=30)
    serving.done()
    assert serving.starts() == {"a": 9, "b": 8}
    tables = {request.key: request.blocks for request in serving.batch}
    assert tables["a"][:2] == tables["b"][:2]
    assert tables["a"][2] != tables["b"][2]
    assert serving.ledger.block_count - serving.ledger.free_count == 4
    serving.handle(ee.StreamMessage(ord("a"), Cancel()))
    serving.done()
    assert serving.ledger.block_count - serving.ledger.free_count == 3


def test_an_accepted_node_is_found_after_the_next_pass() -> None:
    """The target moves its row between the passes, and that may fail."""
    serving, prompt = Serving(), (*SYSTEM, 10, 11)
    serving.open("a", prompt, max_tokens=9, run_ahead=RunAhead.NEVER)
    draft = Draft(1, (0, 1), (TOKEN, TOKEN), 10, CommittedPrefix(prompt).hash_at(10))
    serving.handle(ee.StreamMessage(ord("a"), draft))
    serving.done()  # the prompt; the first node is now a committed token
    [request] = serving.batch
    assert (request.cache_length, request.feed, request.tokens) == (10, (TOKEN,), (TOKEN,))
    serving.done()
    known = (*prompt, *(TOKEN,) * 3)
    assert tuple(serving.engine.sessions["a"].prefix.tokens) == known
    assert serving.engine.sessions["a"].cache_length == 12  # three blocks, but the node's row ...
    serving.open("b", (*known, 20))
    assert serving.starts() == {"b": 8}


@pytest.mark.parametrize(
    "failure", [ee.SequenceFailed("a", "not kept"), ee.BatchFailed("not a number", culprit="a")]
)
def test_a_session_that_fails_leaves_nothing_behind(failure: ee.EngineEvent) -> None:
    serving = Serving()
    serving.open("a", (*SYSTEM, 10), max_tokens=30)
    serving.done()
    serving.handle(failure)
    if isinstance(failure, ee.SequenceFailed):
        serving.handle(ee.BatchDone(()))
    serving.open("b", (*SYSTEM, 11), max_tokens=30)
    assert serving.starts() == {"b": 0}
    serving.done()
    serving.handle(ee.BatchFailed("out of range"))
    assert any(isinstance(action, ee.RunProbe) for action in serving.actions)
    serving.open("c", (*SYSTEM, 12))
    serving.handle(ee.StreamMessage(ord("b"), Received(10, 0)))
    assert not serving.ledger._idle


@pytest.mark.parametrize(
    ("share", "mine", "others"),
    [(SharePrefixes.ALL, 8, 8), (SharePrefixes.CREDENTIAL, 8, 0), (SharePrefixes.NONE, 0, 0)],
)
def test_who_shares_with_whom(share: SharePrefixes, mine: int, others: int) -> None:
    serving = Serving(share=share)
    for key, whose, cached in (("a", "ours", 0), ("b", "ours", mine), ("c", "theirs", others)):
        serving.open(key, (*SYSTEM, ord(key) % 40), credential=Credential(whose))
        assert serving.starts() == {key: cached}
        serving.finish()
    assert serving.engine.keeper.prefix_hit_tokens == mine + others


@pytest.mark.parametrize("share", [SharePrefixes.ALL, SharePrefixes.CREDENTIAL])
def test_what_one_adapter_has_computed_is_nothing_to_another(share: SharePrefixes) -> None:
    serving = Serving(share=share)
    adapters = {"a": ("", 0), "b": ("sql", 0), "c": ("poetry", 0), "d": ("sql", 8), "e": ("", 8)}
    for key, (name, cached) in adapters.items():
        serving.open(key, (*SYSTEM, 10), model=name)
        assert serving.starts() == {key: cached}
        serving.finish()


def test_the_other_generation_of_an_id_inherits_nothing() -> None:
    serving = Serving()
    first = Open("a", "", "", (*SYSTEM, 10), run_ahead=RunAhead.ALWAYS, session_secret=b"s" * 16)
    serving.handle(ee.StreamOpened(1, first))
    serving.done()
    second = replace(first, prompt=(*SYSTEM[:4], *range(20, 29)))
    serving.handle(ee.StreamOpened(2, second))
    assert any(isinstance(action, ee.CloseSequence) for action in serving.actions)
    serving.handle(ee.BatchDone((PassResult("a", (TOKEN,)),)))  # of the session that is over
    [request] = serving.batch
    assert (request.cache_length, request.feed) == (4, tuple(range(20, 29)))
    # By another adapter it is begun anew too, and not continued by the other model.
    serving.handle(ee.StreamOpened(3, replace(second, model="poetry")))
    said = [one.message for one in serving.actions if isinstance(one, ee.SendTo)]
    assert [one.model for one in said if isinstance(one, Opened)] == ["poetry"]
    assert serving.engine.sessions["a"].request.model == "poetry"


def test_a_long_prompt_is_computed_once_for_two_who_come_together() -> None:
    """Passes of 8 rows a session: while a feeds them, b sits out, and it catches up."""
    serving, long = Serving(rows=8), tuple(range(10, 36))
    serving.open("z", (1,), max_tokens=1)  # a pass runs while both open
    serving.open("a", (*long, 1))
    serving.open("b", (*long, 2))
    serving.done()
    fed: list[dict[str, int]] = []
    while serving.batch and len(fed) < 5:
        fed.append({r.key: len(r.feed) for r in serving.batch if len(r.feed) > 1})
        serving.done()
    assert sum(rows for part in fed for rows in part.values()) < 27 + 27 - 16
    assert fed[0] == {"a": 8}
    keeper = serving.engine.keeper
    assert keeper.prefix_hit_tokens >= 16
    assert keeper.prefix_query_tokens == 1 + 27 + 27


def test_a_shared_block_cannot_be_written_and_one_with_two_holders_not_published() -> None:
    serving = Serving()
    serving.open("a", (*SYSTEM, 10), max_tokens=30)
    serving.done()
    serving.engine.sessions["a"].cache_length = 7  # behind what is published
    with pytest.raises(AssertionError, match="a shared block would be written"):
        serving.engine.keeper.reserve("a", 12)
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
