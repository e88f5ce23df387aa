"""The verifier's session: which ``Open`` it takes, its passes and endings; and the tables of state
moves of both sessions.

Oracles: one request for every bound, just inside and just past it (a refusal names the value and
the limit); a fixed text, so every answer can be written down; and the moves seen in random worlds
and a few scripted endings, which are exactly those in the tables: any other is an assertion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest

from edgespec.core.device import events as de
from edgespec.core.device import link_keeper
from edgespec.core.device.link_keeper import ReconnectPolicy
from edgespec.core.device.policy import WindowedPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.checks import State, transition
from edgespec.core.protocol.messages import (
    EXACT_RULE,
    Cancel,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Limits,
    Open,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo
from edgespec.core.verifier import session as verify_session
from edgespec.core.verifier import session_events as se
from edgespec.core.verifier.admission import refuse_open
from edgespec.core.verifier.drafts import AlwaysRunAhead, ExactRule
from edgespec.core.verifier.session import VerifySession
from tests.core.scenes import (
    LIMITS,
    MODEL,
    REQUEST,
    TEXT,
    chain,
    commit_in,
    new_session,
    offer,
    run_pass,
)
from tests.sim.random_worlds import play


def test_what_is_too_unlikely_for_its_row_waits_for_a_better_pass() -> None:
    """Until more is known first choices are right with 0.7 and second ones with 0.1."""
    session = new_session()
    run_pass(session)
    # 0.7, its children 0.49 and 0.07, and 0.1 with a child of 0.07.
    nodes = (0, 1, 1, 0, 4), (11, 12, 40, 41, 42)
    session.handle(Draft(1, *nodes, 3, session.prefix.hash_at(3)), 1.0)
    for least_chance, tokens, parents in (
        (0.2, (11, 12), (-1, 0)),
        (0.09, (11, 12, 41), (-1, 0, -1)),
        (0.0, (11, 12, 40, 41, 42), (-1, 0, 0, -1, 3)),
    ):
        (action,) = session.handle(se.Offer(64, 0.02, least_chance), 1.0)
        assert isinstance(action, se.RunPass)
        assert (action.request.tokens, action.request.parents) == (tokens, parents)
        session.handle(se.PassFailed(), 1.0)


@pytest.mark.parametrize("depth", range(6))
@pytest.mark.parametrize("kind", ["eos", "stop id"])
def test_a_stop_id_ends_the_text_at_every_depth(depth: int, kind: str) -> None:
    stop = TEXT[3 + depth]
    model = replace(MODEL, eos_token_ids=(stop,)) if kind == "eos" else MODEL
    stops = () if kind == "eos" else (stop,)
    sampling = SamplingParams(max_tokens=9, stop_token_ids=stops)
    session = new_session(replace(REQUEST, sampling=sampling), model=model)
    run_pass(session)
    session.handle(chain(session, *TEXT[3:8]), 1.0)
    actions = run_pass(session)
    commit = commit_in(actions)
    assert commit.tokens == TEXT[3 : 4 + depth]
    assert commit.accepted == min(depth + 1, 5)
    assert (commit.finish, session.state) == (FinishReason.STOP, se.VerifyState.FINISHED)
    assert session.handle(se.Offer(64, 0.02), 1.0) == ()


@pytest.mark.parametrize("most", range(1, 9))
@pytest.mark.parametrize("bound", ["max_tokens", "context"])
def test_max_tokens_and_the_context_end_it_at_every_depth(most: int, bound: str) -> None:
    limits = replace(LIMITS, context_length=2 + most) if bound == "context" else LIMITS
    wanted = most if bound == "max_tokens" else 100
    request = replace(REQUEST, sampling=SamplingParams(max_tokens=wanted))
    session = new_session(request, limits)
    tokens = commit_in(run_pass(session)).tokens
    while session.finish is None:
        length = session.prefix.length
        session.handle(chain(session, *TEXT[length:][:4], first=10 * length), 1.0)
        tokens += commit_in(run_pass(session)).tokens
    assert tokens == TEXT[2 : 2 + most]
    assert session.finish is FinishReason.LENGTH


def test_a_session_asks_a_target_without_trees_for_a_chain() -> None:
    for trees, tokens, parents in (
        (True, (1, 2, 3, 4, 3), (-1, -1, 0, 0, 1)),
        (False, (1, 3), (-1, 0)),
    ):
        session = VerifySession(
            REQUEST, MODEL, Limits(64), ExactRule(), AlwaysRunAhead(), 0.0, trees=trees
        )
        session.handle(se.Attach(REQUEST), 0.0)
        draft = Draft(1, (0, 0, 1, 1, 2), (1, 2, 3, 4, 3), 2, session.prefix.hash_at(2))
        session.handle(draft, 0.0)
        request = offer(session)
        assert (request.tokens, request.parents) == (tokens, parents)


def test_a_result_without_a_pass_is_a_bug_but_behind_a_cancel() -> None:
    with pytest.raises(AssertionError):
        new_session().handle(se.PassDone((10,)), 1.0)
    session = new_session()
    offer(session)
    session.handle(Cancel(), 1.0)
    assert session.handle(se.PassDone((10,)), 1.0) == ()
    assert session.prefix.output == []


SMALL = ModelInfo("big", "words-1", 100, 64)
TIGHT = Limits(context_length=8)
ASKED = Open("s", "big", "words-1", (1, 2, 3), sampling=SamplingParams(max_tokens=4))


@pytest.mark.parametrize(
    "request_",
    [
        ASKED,
        replace(ASKED, model=""),
        replace(ASKED, vocabulary=""),
        replace(ASKED, prompt=(99,) * 7),
        replace(ASKED, committed=(0, 99, 1, 2)),
        replace(ASKED, prompt=(1,) * 5, committed=(1, 2, 3)),
    ],
)
def test_taken(request_: Open) -> None:
    assert refuse_open(request_, SMALL, TIGHT, frozenset({EXACT_RULE})) is None


INVALID = FaultCode.INVALID


def sampled(**fields: Any) -> Open:
    return replace(ASKED, sampling=SamplingParams(max_tokens=4, **fields))


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (replace(ASKED, version=2), INVALID, "version 2 is not 1"),
        (replace(ASKED, rule="lossy"), INVALID, "'lossy'; known: exact"),
        (replace(ASKED, model="small"), FaultCode.UNKNOWN_MODEL, "'small'.*'big'"),
        (replace(ASKED, vocabulary="w2"), FaultCode.VOCABULARY_MISMATCH, "w2.*words-1"),
        (replace(ASKED, session_id=""), INVALID, "session id is empty"),
        (replace(ASKED, prompt=()), INVALID, "prompt is empty"),
        (replace(ASKED, prompt=(1,) * 8), FaultCode.CONTEXT_TOO_LONG, "8 tokens .* of 8"),
        (replace(ASKED, prompt=(1,) * 6, committed=(1,) * 3), FaultCode.CONTEXT_TOO_LONG, "9"),
        (replace(ASKED, committed=(1,) * 5), INVALID, "5 .* max_tokens 4"),
        (replace(ASKED, prompt=(100,)), INVALID, "token 100 .* vocabulary of 100"),
        (replace(ASKED, committed=(-1,)), INVALID, "token -1"),
        (
            sampled(stop_token_ids=(99, 100)),
            FaultCode.INVALID,
            "token 100 of stop_token_ids .* vocabulary of 100",
        ),
        (sampled(logit_bias={100: 1.0}), INVALID, "token 100 of logit_bias .* vocabulary of 100"),
        (replace(ASKED, logprobs=-1), INVALID, r"logprobs is -1, .* in \[0, 20\]"),
        (replace(ASKED, logprobs=21), INVALID, r"logprobs is 21, .* in \[0, 20\]"),
    ],
)
def test_refused(request_: Open, code: FaultCode, words: str) -> None:
    fault = refuse_open(request_, SMALL, TIGHT, frozenset({EXACT_RULE}))
    assert fault is not None
    assert fault.code is code
    assert re.search(words, fault.message), fault.message


Move = tuple[Enum, Enum]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[Move]:
    moves: set[Move] = set()

    def watched(table: Mapping[tuple[State, State], str], source: State, target: State) -> State:
        moves.add((source, target))
        return transition(table, source, target)

    monkeypatch.setattr(link_keeper, "transition", watched)
    monkeypatch.setattr(verify_session, "transition", watched)
    return moves


def _device(*events: de.DraftEvent) -> None:
    request = Open("s", "", "", (1,))
    session = DraftSession(request, WindowedPolicy(), ReconnectPolicy(give_up_first_s=1.0), 100)
    for index, event in enumerate(events):
        session.handle(event, float(index))


def _endings() -> None:
    start, connected, down = de.Start(), de.Connected(), de.LinkDown("gone")
    _device(de.Stop())
    _device(start, de.Stop())
    _device(start, connected, de.Stop())
    _device(start, down, de.Stop())
    _device(start, connected, Fault(INVALID, "no"))
    run_pass(session := new_session())
    session.handle(Cancel(), 1.0)
    session = new_session()
    session.handle(se.Offer(64, 0.02), 1.0)
    session.handle(Cancel(), 1.0)
    new_session(replace(REQUEST, sampling=SamplingParams(max_tokens=1), committed=(10,)))


def test_the_tables_hold_exactly_what_happens(seen: set[Move]) -> None:
    for seed in range(120):
        play(seed)
    _endings()
    changes = {(source, target) for source, target in seen if source is not target}
    assert changes == {*de.DRAFT_MOVES, *se.VERIFY_MOVES}
    ends = de.LinkState.DONE, se.VerifyState.FINISHED
    assert not [move for move in changes if move[0] in ends]
