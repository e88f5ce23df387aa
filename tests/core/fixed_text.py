"""A verifier's session driven by hand, and a target that says a fixed text: the token at position p
is ``TEXT[p]``, so every answer can be written down."""

from __future__ import annotations

from edgespec.core.protocol.messages import (
    Commit,
    Draft,
    Fault,
    Limits,
    Open,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo, PassRequest
from edgespec.core.verifier.drafts import ExactRule, run_ahead_policy
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import (
    Attach,
    Hangup,
    Offer,
    PassDone,
    RunPass,
    Send,
    VerifyAction,
)

PROMPT = (1, 1)
TEXT = (*PROMPT, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19)
MODEL = ModelInfo("big", "", 50, 4096)
REQUEST = Open("s", "", "", PROMPT, sampling=SamplingParams(max_tokens=9))
LIMITS = Limits(lease_s=10.0)


def new_session(
    request: Open = REQUEST, limits: Limits = LIMITS, model: ModelInfo = MODEL
) -> VerifySession:
    rule, run_ahead = ExactRule(), run_ahead_policy(request.run_ahead)
    session = VerifySession(request, model, limits, rule, run_ahead, 0.0)
    session.handle(Attach(request), 0.0)
    return session


def targets_of(request: PassRequest) -> tuple[int, ...]:
    """What the fixed text's target answers: after a node of depth d, the token d further on."""
    first = request.cache_length + len(request.feed)
    depths: list[int] = []
    for parent in request.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return tuple(TEXT[first + depth] for depth in (0, *depths))


def offer(session: VerifySession, rows: int = 64, now: float = 1.0) -> PassRequest:
    (action,) = session.handle(Offer(rows, 0.02), now)
    assert isinstance(action, RunPass)
    return action.request


def run_pass(session: VerifySession, now: float = 1.0) -> tuple[VerifyAction, ...]:
    request = offer(session, now=now)
    return session.handle(PassDone(targets_of(request)), now)


def chain(session: VerifySession, *tokens: int, first: int = 1) -> Draft:
    length = session.prefix.length
    parents = (0, *range(first, first + len(tokens) - 1))
    return Draft(first, parents, tokens, length, session.prefix.hash_at(length))


def commit_in(actions: tuple[VerifyAction, ...]) -> Commit:
    (send,) = [a for a in actions if isinstance(a, Send)]
    assert isinstance(send.message, Commit)
    return send.message


def fault_in(actions: tuple[VerifyAction, ...]) -> Fault:
    send, hangup = actions
    assert hangup == Hangup()
    assert isinstance(send, Send)
    assert isinstance(send.message, Fault)
    return send.message
