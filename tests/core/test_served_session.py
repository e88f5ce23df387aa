"""A session whose passes carry the verifier's own guesses. Oracle: a target that says after each
token the next of a circle, so that every answer can be written down."""

from __future__ import annotations

from dataclasses import replace

from edgespec.core.protocol.messages import Open, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_guesses import TextTables
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.drafts import AlwaysRunAhead, ExactRule
from edgespec.core.verifier.served_drafts import ServedDrafts
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import (
    Attach,
    Keep,
    Offer,
    PassDone,
    RunPass,
    VerifyAction,
)
from tests.core.fixed_text import LIMITS, MODEL, chain, commit_in

PROMPT = (1, 2, 3, 4) * 5
REQUEST = Open(
    "s", "", "", PROMPT, sampling=SamplingParams(max_tokens=40), run_ahead=RunAhead.ALWAYS
)


def _session(request: Open = REQUEST) -> VerifySession:
    served = ServedDrafts(TextTables(ngrams=False))
    session = VerifySession(request, MODEL, LIMITS, ExactRule(), AlwaysRunAhead(), 0.0, served)
    session.handle(Attach(request), 0.0)
    return session


def _offer(session: VerifySession, least_chance: float = 0.1) -> PassRequest:
    (action,) = session.handle(Offer(64, 0.02, least_chance), 1.0)
    assert isinstance(action, RunPass)
    return action.request


def _answers(request: PassRequest) -> tuple[int, ...]:
    return tuple(token % 4 + 1 for token in (request.feed[-1], *request.tokens))


def _run(session: VerifySession) -> tuple[VerifyAction, ...]:
    return session.handle(PassDone(_answers(_offer(session))), 1.0)


def test_a_pass_without_a_draft_commits_several_tokens() -> None:
    session = _session()
    request = _offer(session)
    assert request.served == len(request.tokens) > 3
    assert request.drafted == 0
    actions = session.handle(PassDone(_answers(request)), 1.0)
    commit = commit_in(actions)
    assert commit.tokens == tuple((1, 2, 3, 4) * 9)[: len(commit.tokens)]
    (keep,) = [action for action in actions if isinstance(action, Keep)]
    assert len(keep.nodes) == len(commit.tokens) - 1 > 2
    assert session.cache_length == session.prefix.length - 1


def test_guesses_are_not_counted_as_the_devices() -> None:
    session = _session()
    commit = commit_in(_run(session))
    assert (commit.accepted, commit.rows, commit.stale) == (0, 0, 0)
    assert session.server_accepted == len(commit.tokens) - 1


def test_a_draft_of_the_device_goes_before_guesses() -> None:
    session = _session()
    _run(session)
    following = session.prefix.tokens[-1] % 4 + 1
    session.handle(chain(session, following), 1.0)
    request = _offer(session)
    assert (request.tokens, request.served, request.drafted) == ((following,), 0, 1)
    before = session.server_accepted
    commit = commit_in(session.handle(PassDone(_answers(request)), 1.0))
    assert (commit.accepted, commit.rows) == (1, 1)
    assert session.server_accepted == before


def test_a_draft_that_arrives_meanwhile_is_fast_forwarded() -> None:
    """Its first nodes agree with what the guesses committed; the others are alive behind them."""
    session = _session(replace(REQUEST, sampling=SamplingParams(max_tokens=80)))
    _run(session)
    request = _offer(session)
    ahead = [session.prefix.tokens[-1] % 4 + 1]
    while len(ahead) < 24:
        ahead.append(ahead[-1] % 4 + 1)
    session.handle(chain(session, *ahead), 1.0)
    commit = commit_in(session.handle(PassDone(_answers(request)), 1.0))
    alive = session.inbox.tree.nodes
    assert (commit.accepted, commit.stale) == (0, 0)
    assert len(alive) == 24 - len(commit.tokens)
    assert _offer(session, least_chance=0.0).drafted == len(alive) > 0


def test_the_last_tokens_are_not_guessed_past_the_end() -> None:
    session = _session(replace(REQUEST, sampling=SamplingParams(max_tokens=3)))
    request = _offer(session)
    assert request.tokens == (1, 2)
    assert commit_in(session.handle(PassDone(_answers(request)), 1.0)).tokens == (1, 2, 3)
