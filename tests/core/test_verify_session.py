"""The verifier's session: passes, endings, waiting. Oracle: a fixed text (``fixed_text``), so every
answer can be written down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import (
    Cancel,
    Draft,
    FinishReason,
    Limits,
    Open,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo, PassRequest
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.drafts import AlwaysRunAhead, ExactRule
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import (
    Offer,
    PassDone,
    PassFailed,
    RunPass,
    VerifyState,
)
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


def test_what_is_too_unlikely_for_its_row_waits_for_a_better_pass() -> None:
    """Until more is known first choices are right with 0.7 and second ones with 0.1."""
    session = new_session()
    run_pass(session)
    base = session.prefix.hash_at(3)
    # 0.7, its children 0.49 and 0.07, and 0.1 with a child of 0.07.
    session.handle(Draft(1, (0, 1, 1, 0, 4), (11, 12, 40, 41, 42), 3, base), 1.0)
    (action,) = session.handle(Offer(64, 0.02, 0.2), 1.0)
    assert isinstance(action, RunPass)
    assert (action.request.tokens, action.request.parents) == ((11, 12), (-1, 0))
    session.handle(PassFailed(), 1.0)
    (action,) = session.handle(Offer(64, 0.02, 0.09), 1.0)
    assert isinstance(action, RunPass)
    assert action.request.tokens == (11, 12, 41)
    session.handle(PassFailed(), 1.0)
    assert offer(session).tokens == (11, 12, 40, 41, 42)


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
    assert (commit.finish, session.state) == (FinishReason.STOP, VerifyState.FINISHED)
    assert session.handle(Offer(64, 0.02), 1.0) == ()


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


def test_a_result_without_a_pass_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        new_session().handle(PassDone((10,)), 1.0)


def test_what_a_pass_says_behind_a_cancel_is_nobodys() -> None:
    session = new_session()
    offer(session)
    session.handle(Cancel(), 1.0)
    assert session.handle(PassDone((10,)), 1.0) == ()
    assert session.prefix.output == []


A, B, C, D = range(1, 5)


def test_a_session_asks_such_a_target_for_a_chain() -> None:
    model = ModelInfo("m", "v", 100, 64)
    request = Open("s", "", "", prompt=(A,))
    tree = Draft(1, (0, 0, 1, 1, 2), (A, B, C, D, C), base_position=1, base_hash=0)
    asked: dict[bool, PassRequest] = {}
    for trees in (True, False):
        session = VerifySession(
            request, model, Limits(64), ExactRule(), AlwaysRunAhead(), 0.0, trees=trees
        )
        session.handle(ev.Attach(request), 0.0)
        base_hash = session.prefix.hash_at(1)
        session.handle(Draft(1, tree.parents, tree.tokens, 1, base_hash), 0.0)
        (action,) = session.handle(ev.Offer(64, 0.01), 0.0)
        assert isinstance(action, ev.RunPass)
        asked[trees] = action.request
    assert asked[True].tokens == (A, B, C, D, C)
    assert (asked[False].tokens, asked[False].parents) == ((A, C), (-1, 0))
