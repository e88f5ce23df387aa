"""A device's session for tests, and short names for its events and actions."""

from __future__ import annotations

from dataclasses import replace

from edgespec.core.device import events as ev
from edgespec.core.device.comparison_policies import WindowedPolicy
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import Limits, Open, Opened
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import Candidate

PROMPT = (1, 1)
REQUEST = Open("s", "", "", PROMPT, sampling=SamplingParams(max_tokens=20))
GREETING = Opened(Limits(), "big", 2)
ACCEPTED, CORRECTED, DECODED = ev.TokenKind.ACCEPTED, ev.TokenKind.CORRECTED, ev.TokenKind.DECODED
RECONNECT = ReconnectPolicy(
    first_s=1.0,
    longest_s=1.0,
    give_up_first_s=5.0,
    give_up_s=60.0,
    answer_s=10.0,
    silence_s=30.0,
    progress_s=100.0,
    max_streams_without_token=8,
)


def new_session(
    policy: DraftPolicy | None = None, request: Open = REQUEST, draft_context_length: int = 1000
) -> DraftSession:
    policy = policy or WindowedPolicy()
    return DraftSession(request, policy, RECONNECT, draft_context_length, vocabulary_size=1000)


def new_streaming_session(
    policy: DraftPolicy | None = None,
    request: Open = REQUEST,
    limits: Limits | None = None,
    greeting: Opened = GREETING,
) -> DraftSession:
    session = new_session(policy, request)
    session.handle(ev.Start(), 0.0)
    session.handle(ev.Connected(), 0.0)
    session.handle(replace(greeting, limits=limits or Limits()), 0.0)
    return session


def finish_step(*tokens: int) -> ev.StepDone:
    return ev.StepDone(tuple(Candidate(token, -1.0) for token in tokens))


def messages_in(actions: tuple[ev.DraftAction, ...]) -> list[object]:
    return [action.message for action in actions if isinstance(action, ev.Transmit)]
