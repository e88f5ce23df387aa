"""The verifier's session: passes, endings, waiting. Oracle: a fixed text (``fixed_text``), so every
answer can be written down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import (
    Cancel,
    Draft,
    FinishReason,
    Received,
    RunAhead,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import (
    Keep,
    Offer,
    PassDone,
    PassFailed,
    RunPass,
    VerifyState,
)
from tests.core.fixed_text import (
    LIMITS,
    MODEL,
    PROMPT,
    REQUEST,
    TEXT,
    chain,
    commit_in,
    new_session,
    offer,
    run_pass,
    targets_of,
)

# --- passes -----------------------------------------------------------------------------------


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


def test_the_verifier_learns_which_choice_is_right() -> None:
    session = new_session(replace(REQUEST, sampling=SamplingParams(max_tokens=10)))
    run_pass(session)
    for position in (3, 5, 7):  # the second choice, and the token behind it
        session.handle(_two_choices(session, 2 * position), 1.0)
        assert len(offer(session).tokens) == 2
        session.handle(PassDone((TEXT[position], 49, TEXT[position + 1])), 1.0)
    session.handle(_two_choices(session, 30), 1.0)
    (action,) = session.handle(Offer(64, 0.02, 0.25), 1.0)
    assert isinstance(action, RunPass)
    assert action.request.tokens == (40, TEXT[9])  # (3 + 0.1 * 12) / 15, little forgotten


def _two_choices(session: VerifySession, first: int) -> Draft:
    length = session.prefix.length
    return Draft(first, (0, 0), (40, TEXT[length]), length, session.prefix.hash_at(length))


def test_the_prompt_and_then_one_token_a_pass() -> None:
    session = new_session(replace(REQUEST, run_ahead=RunAhead.ALWAYS))
    first = offer(session)
    assert (first.cache_length, first.feed, first.tokens, first.sample) == (0, PROMPT, (), True)
    actions = session.handle(PassDone((10,)), 1.0)
    assert actions[0] == Keep(())
    assert (commit_in(actions).position, commit_in(actions).tokens) == (2, (10,))
    second = offer(session)
    assert (second.cache_length, second.feed) == (2, (10,))


def test_a_long_prompt_is_fed_in_pieces() -> None:
    session = new_session()
    piece = offer(session, rows=1)
    assert (piece.feed, piece.sample) == ((1,), False)
    assert session.handle(PassDone(()), 1.0) == (Keep(()),)
    assert (offer(session, rows=1).cache_length, session.counters.passes) == (1, 0)


@pytest.mark.parametrize("right", range(5))
def test_what_is_right_of_a_draft_is_accepted_and_one_token_more(right: int) -> None:
    session = new_session()
    run_pass(session)
    tokens = [TEXT[3 + i] if i < right else 40 for i in range(4)]
    session.handle(chain(session, *tokens), 1.0)
    actions = run_pass(session)
    commit = commit_in(actions)
    assert (commit.position, commit.tokens) == (3, TEXT[3 : 4 + right])
    assert (commit.accepted, commit.rows) == (right, 4)
    assert actions[0] == Keep(tuple(range(right)))
    assert session.cache_length == session.prefix.length - 1


def test_siblings_and_their_children_in_one_pass() -> None:
    session = new_session()
    run_pass(session)
    base = session.prefix.hash_at(3)
    session.handle(Draft(1, (0, 0, 1, 2, 2, 4), (40, 11, 12, 41, 12, 13), 3, base), 1.0)
    request = offer(session)
    assert request.parents == (-1, -1, 0, 1, 1, 3)
    targets = (11, 40, 12, 41, 41, 13, 14)
    actions = session.handle(PassDone(targets), 1.0)
    assert actions[0] == Keep((1, 4))
    assert commit_in(actions).tokens == (11, 12, 13)


def test_drafts_that_arrive_during_a_pass_are_for_the_next() -> None:
    session = new_session()
    run_pass(session)
    session.handle(chain(session, 11, 12), 1.0)
    running = offer(session)
    session.handle(Draft(3, (2, 3), (13, 14)), 1.0)
    assert session.handle(Offer(64, 0.02), 1.0) == ()
    session.handle(PassDone(targets_of(running)), 1.0)
    following = offer(session)
    assert (following.feed, following.tokens) == ((13,), (14,))


def test_a_pass_takes_the_oldest_nodes_it_has_room_for() -> None:
    session = new_session(limits=replace(LIMITS, max_nodes_per_pass=2))
    run_pass(session)
    session.handle(chain(session, 11, 12, 13), 1.0)
    assert offer(session).tokens == (11, 12)
    session.handle(PassFailed(), 1.0)
    assert offer(session, rows=2).tokens == (11,)


def test_a_failed_pass_is_as_if_it_had_not_been() -> None:
    session = new_session()
    run_pass(session)
    session.handle(chain(session, 11), 1.0)
    before = offer(session)
    assert session.handle(PassFailed(), 1.0) == ()
    assert session.state is VerifyState.READY
    assert offer(session) == before


# --- the end ----------------------------------------------------------------------------------


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


def test_the_end_token_can_be_ignored() -> None:
    model = replace(MODEL, eos_token_ids=(11,))
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    session = new_session(replace(REQUEST, sampling=sampling), model=model)
    run_pass(session)
    assert commit_in(run_pass(session)).finish is None


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


def test_a_session_is_over_when_its_last_token_is_acknowledged() -> None:
    session = new_session(replace(REQUEST, sampling=SamplingParams(max_tokens=1)))
    run_pass(session)
    assert not session.over(1.0)
    session.handle(Received(3, 0), 1.0)
    assert session.over(1.0)


def test_cancelled_is_over_whatever_runs() -> None:
    session = new_session()
    offer(session)
    assert commit_in(session.handle(Cancel(), 1.0)).finish is FinishReason.CANCELLED
    assert session.over(1.0)
    assert session.handle(PassDone((10,)), 1.0) == ()
    assert session.prefix.output == []


# --- run-ahead --------------------------------------------------------------------------------


def test_never_waits_for_a_draft_until_told_or_out_of_patience() -> None:
    session = new_session(replace(REQUEST, run_ahead=RunAhead.NEVER))
    run_pass(session, now=1.0)
    assert session.handle(Offer(64, 0.02), 1.0) == ()
    assert session.deadline == 3.0
    assert offer(session, now=3.0).tokens == ()
    session.handle(PassFailed(), 3.0)
    session.handle(Draft(1, (), ()), 3.0)
    assert offer(session, now=2.0).tokens == ()


def test_no_draft_is_waited_for_where_none_can_help() -> None:
    """World 20255: the device had sent nodes past a context that it did not know yet."""
    sampling = SamplingParams(max_tokens=2)
    session = new_session(replace(REQUEST, run_ahead=RunAhead.NEVER, sampling=sampling))
    run_pass(session)
    session.handle(chain(session, 40), 1.0)
    assert offer(session).tokens == ()


def test_who_does_not_draft_is_not_waited_for() -> None:
    session = new_session(replace(REQUEST, run_ahead=RunAhead.NEVER, drafting=False))
    for _ in range(3):
        run_pass(session)
    assert session.prefix.output == [10, 11, 12]


# --- what cannot happen -----------------------------------------------------------------------


def test_a_result_without_a_pass_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        new_session().handle(PassDone((10,)), 1.0)
