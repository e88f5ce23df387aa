"""Sessions whose texts begin alike use the same blocks, and nobody else's.

Oracle: blocks of 4 rows and a target that says token 5 whatever it is asked, so that every request
of a pass can be written down.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import Cancel, Draft, Open, Received, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import CacheShape, PassRequest, PassResult
from edgespec.core.verifier.block_ledger import BlockLedger, BlockNames, SharePrefixes
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import (
    BatchDone,
    BatchFailed,
    CloseSequence,
    EngineAction,
    EngineEvent,
    EngineLimits,
    OpenSequence,
    RunBatch,
    RunProbe,
    SequenceFailed,
    StreamMessage,
    StreamOpened,
)
from tests.core.scenes import LIMITS, MODEL

SIZE = 4
TOKEN = 5
SYSTEM = (1, 2, 3, 4, 6, 7, 8, 9)
"""Two blocks."""


class Serving:
    """An engine, what its last event made it do, and the pass that runs."""

    def __init__(
        self, blocks: int = 40, rows: int = 64, share: SharePrefixes = SharePrefixes.ALL
    ) -> None:
        bounds = EngineLimits(
            cache=CacheShape(blocks, SIZE),
            max_rows_per_session=rows,
            max_rows_per_pass=64,
            share_prefixes=share,
        )
        model_limits = replace(LIMITS, context_length=blocks * SIZE)
        self.engine = VerifyEngine(MODEL, model_limits, bounds, contain=False)
        self.batch: tuple[PassRequest, ...] = ()
        self.actions: tuple[EngineAction, ...] = ()

    def handle(self, event: EngineEvent, now: float = 0.0) -> None:
        self.actions = self.engine.handle(event, now)
        for action in self.actions:
            if isinstance(action, RunBatch):
                self.batch = action.requests

    def open(
        self,
        key: str,
        prompt: tuple[int, ...],
        *,
        max_tokens: int = 3,
        credential: Credential = ANYBODY,
        run_ahead: RunAhead = RunAhead.ALWAYS,
        committed: tuple[int, ...] = (),
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Open(key, "", "", prompt, committed, sampling=sampling, run_ahead=run_ahead)
        self.handle(StreamOpened(ord(key[0]), request, credential=credential))

    def done(self) -> None:
        """The pass goes well."""
        batch, self.batch = self.batch, ()
        targets = {r.key: (TOKEN,) * (1 + len(r.tokens)) if r.sample else () for r in batch}
        self.handle(BatchDone(tuple(PassResult(*item) for item in targets.items())))

    def finish(self) -> None:
        """Passes until nobody wants one any more; all devices acknowledge everything."""
        while self.batch:
            self.done()
            for key, session in tuple(self.engine.sessions.items()):
                self.handle(StreamMessage(ord(key[0]), Received(session.prefix.length, 0)))

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
    [opened] = [action for action in serving.actions if isinstance(action, OpenSequence)]
    assert opened.text == (*SYSTEM, 12, 13, 14)
    keeper = serving.engine.keeper
    assert (keeper.prefix_query_tokens, keeper.prefix_hit_tokens) == (10 + 11, 8)


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
    serving.handle(StreamMessage(ord("a"), Cancel()))
    serving.done()
    assert serving.ledger.block_count - serving.ledger.free_count == 3


def test_one_token_at_least_is_fed() -> None:
    serving = Serving()
    serving.open("a", SYSTEM)
    serving.finish()
    serving.open("b", SYSTEM)
    assert [(r.cache_length, r.feed) for r in serving.batch] == [(4, SYSTEM[4:])]
    serving.finish()
    serving.open("c", SYSTEM[:4])
    assert serving.starts() == {"c": 0}


def test_equal_tokens_behind_another_text_are_another_block() -> None:
    serving = Serving()
    serving.open("a", (1, 1, 1, 1, 2, 2, 2, 2, 3))
    serving.finish()
    serving.open("b", (9, 9, 9, 9, 2, 2, 2, 2, 3))
    assert serving.starts() == {"b": 0}
    serving.finish()
    serving.open("c", (2, 2, 2, 2, 3))
    assert serving.starts() == {"c": 0}


def test_an_accepted_node_is_found_after_the_next_pass() -> None:
    """The target moves its row between the passes, and that may fail."""
    serving = Serving()
    prompt = (*SYSTEM, 10, 11)
    serving.open("a", prompt, max_tokens=9, run_ahead=RunAhead.NEVER)
    prefix = CommittedPrefix(prompt)
    draft = Draft(1, (0, 1), (TOKEN, TOKEN), 10, prefix.hash_at(10))
    serving.handle(StreamMessage(ord("a"), draft))
    serving.done()  # the prompt; the first node is now a committed token
    [request] = serving.batch
    assert (request.cache_length, request.feed, request.tokens) == (10, (TOKEN,), (TOKEN,))
    serving.done()
    known = (*prompt, *(TOKEN,) * 3)
    assert tuple(serving.engine.sessions["a"].prefix.tokens) == known
    assert serving.engine.sessions["a"].cache_length == 12  # three blocks, but the node's row ...
    serving.open("b", (*known, 20))
    assert serving.starts() == {"b": 8}


def test_a_failed_move_ends_the_session_and_is_not_found() -> None:
    serving = Serving()
    serving.open("a", (*SYSTEM, 10), max_tokens=30)
    serving.done()
    serving.handle(SequenceFailed("a", "its nodes could not be kept"))
    serving.handle(BatchDone(()))
    serving.open("b", (*SYSTEM, 10))
    assert serving.starts() == {"b": 0}


def test_a_session_that_fails_alone_leaves_nothing_behind() -> None:
    serving = Serving()
    serving.open("a", (*SYSTEM, 10), max_tokens=30)
    serving.done()
    serving.handle(BatchFailed("not a number", culprit="a"))
    serving.open("b", (*SYSTEM, 11), max_tokens=30)
    assert serving.starts() == {"b": 0}
    serving.done()
    serving.handle(BatchFailed("out of range"))
    assert any(isinstance(action, RunProbe) for action in serving.actions)
    serving.open("c", (*SYSTEM, 12))
    serving.handle(StreamMessage(ord("b"), Received(10, 0)))
    assert serving.ledger.idle_count == 0


@pytest.mark.parametrize(
    ("share", "mine", "others"),
    [
        (SharePrefixes.ALL, 8, 8),
        (SharePrefixes.CREDENTIAL, 8, 0),
        (SharePrefixes.NONE, 0, 0),
    ],
)
def test_who_shares_with_whom(share: SharePrefixes, mine: int, others: int) -> None:
    serving = Serving(share=share)
    serving.open("a", (*SYSTEM, 10), credential=Credential("ours"))
    serving.finish()
    serving.open("b", (*SYSTEM, 11), credential=Credential("ours"))
    assert serving.starts() == {"b": mine}
    serving.finish()
    serving.open("c", (*SYSTEM, 12), credential=Credential("theirs"))
    assert serving.starts() == {"c": others}
    assert serving.engine.keeper.prefix_hit_tokens == mine + others


def test_the_other_generation_of_an_id_inherits_nothing() -> None:
    serving = Serving()
    first = Open("a", "", "", (*SYSTEM, 10), run_ahead=RunAhead.ALWAYS, session_secret=b"s" * 16)
    serving.handle(StreamOpened(1, first))
    serving.done()
    serving.handle(StreamOpened(2, replace(first, prompt=(*SYSTEM[:4], *range(20, 29)))))
    assert any(isinstance(action, CloseSequence) for action in serving.actions)
    serving.handle(BatchDone((PassResult("a", (TOKEN,)),)))  # of the session that is over
    [request] = serving.batch
    assert (request.cache_length, request.feed) == (4, tuple(range(20, 29)))


# --- together -------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_once_for_two_who_come_together() -> None:
    """Passes of 8 rows a session: while a feeds them, b sits out, and it catches up."""
    serving = Serving(rows=8)
    long = tuple(range(10, 36))
    serving.open("z", (1,), max_tokens=1)  # a pass runs while both open
    serving.open("a", (*long, 1))
    serving.open("b", (*long, 2))
    serving.done()
    fed: list[dict[str, int]] = []
    while serving.batch and len(fed) < 5:
        fed.append({request.key: len(request.feed) for request in serving.batch})
        serving.done()
    prompts = [{key: rows for key, rows in part.items() if rows > 1} for part in fed]
    assert sum(rows for part in prompts for rows in part.values()) < 27 + 27 - 16
    assert prompts[0] == {"a": 8}
    keeper = serving.engine.keeper
    assert keeper.prefix_hit_tokens >= 16
    assert keeper.prefix_query_tokens == 1 + 27 + 27


# --- what a mistake would meet ---------------------------------------------------------------


def test_a_shared_block_cannot_be_written() -> None:
    serving = Serving()
    serving.open("a", (*SYSTEM, 10), max_tokens=30)
    serving.done()
    serving.engine.sessions["a"].cache_length = 7  # behind what is published
    with pytest.raises(AssertionError, match="a shared block would be written"):
        serving.engine.keeper.reserve("a", 12)


def test_a_block_with_two_holders_is_not_published() -> None:
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
