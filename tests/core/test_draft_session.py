"""The device's session, event by event. Oracle: the answers written down by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.core.draft_events import (
    Connect,
    Connected,
    Deliver,
    Disconnect,
    DraftAction,
    DraftEvent,
    Fail,
    Finish,
    LinkDown,
    LinkState,
    Start,
    StartStep,
    StepDone,
    StepFailed,
    Stop,
    Tick,
    TokenKind,
    Transmit,
)
from edgespec.core.draft_policy import DraftPolicy, FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.draft_session import DraftSession
from edgespec.core.messages import (
    Cancel,
    Commit,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Limits,
    Open,
    Opened,
    Received,
    RunAhead,
)
from edgespec.core.prefix import CommittedPrefix
from edgespec.core.reconnect import ReconnectPolicy
from edgespec.core.sampling import SamplingParams
from edgespec.core.work import Candidate

PROMPT = (1, 1)
REQUEST = Open("s", "", "", PROMPT, sampling=SamplingParams(max_tokens=20))
GREETING = Opened(Limits(), "big", 2)
ACCEPTED, CORRECTED, DECODED = TokenKind.ACCEPTED, TokenKind.CORRECTED, TokenKind.DECODED


def _session(
    policy: DraftPolicy | None = None, request: Open = REQUEST, draft_context_length: int = 1000
) -> DraftSession:
    reconnect = ReconnectPolicy(first_s=1.0, give_up_first_s=5.0, give_up_s=60.0, answer_s=10.0)
    return DraftSession(request, policy or WindowedPolicy(), reconnect, draft_context_length)


def _streaming(
    policy: DraftPolicy | None = None, request: Open = REQUEST, limits: Limits | None = None
) -> DraftSession:
    session = _session(policy, request)
    session.handle(Start(), 0.0)
    session.handle(Connected(), 0.0)
    session.handle(replace(GREETING, limits=limits or Limits()), 0.0)
    return session


def _guess(*tokens: int) -> StepDone:
    return StepDone(tuple(Candidate(token, -1.0) for token in tokens))


def _messages(actions: tuple[DraftAction, ...]) -> list[object]:
    return [action.message for action in actions if isinstance(action, Transmit)]


# --- the link ---------------------------------------------------------------------------------


def test_it_connects_and_drafts_at_once() -> None:
    session = _session()
    assert session.handle(Start(), 0.0) == (Connect(), StartStep(0, PROMPT, 1))
    assert session.deadline == 10.0
    assert session.handle(Connected(), 1.0) == (Transmit(REQUEST),)
    session.handle(GREETING, 2.0)
    assert session.state is LinkState.STREAMING
    assert session.handle(Tick(), 99.0) == ()


def test_what_was_drafted_before_the_greeting_is_sent_with_the_opening() -> None:
    session = _session()
    session.handle(Start(), 0.0)
    assert _messages(session.handle(_guess(5), 0.1)) == []
    opening, draft = _messages(session.handle(Connected(), 0.2))
    assert opening == REQUEST
    base = CommittedPrefix(PROMPT)
    assert draft == Draft(1, (0,), (5,), 2, base.hash_at(2))


@pytest.mark.parametrize("event", [Connected(), GREETING])
def test_no_answer_in_time_is_a_broken_link(event: DraftEvent) -> None:
    session = _session()
    session.handle(Start(), 0.0)
    assert session.handle(Tick(), 9.9) == ()
    actions = session.handle(Tick(), 10.0)
    assert Disconnect() in actions
    assert session.state is not LinkState.STREAMING


def test_it_comes_back_with_what_it_holds() -> None:
    session = _streaming()
    session.handle(Commit(2, (10, 11)), 1.0)
    session.handle(LinkDown("gone"), 2.0)
    assert session.state is LinkState.BACKING_OFF
    at = session.deadline
    assert at is not None
    assert 2.5 <= at <= 3.0
    assert session.handle(Tick(), at - 0.01) == ()
    assert Connect() in session.handle(Tick(), at)
    (opening,) = _messages(session.handle(Connected(), at))
    assert opening == replace(REQUEST, committed=(10, 11))


def test_alive_nodes_are_sent_again_on_a_new_stream() -> None:
    session = _streaming()
    session.handle(_guess(5), 0.1)
    session.handle(_guess(6), 0.2)
    session.handle(Commit(2, (5,)), 1.0)
    session.handle(LinkDown("gone"), 2.0)
    session.handle(Tick(), 9.0)
    messages = _messages(session.handle(Connected(), 9.0))
    hash_there = CommittedPrefix(PROMPT, (5,)).hash_at(3)
    assert messages[1:] == [Draft(2, (0,), (6,), 3, hash_there)]


def test_it_gives_up_in_the_end() -> None:
    session = _session()
    session.handle(Start(), 0.0)
    now, actions = 1.0, session.handle(LinkDown("refused"), 1.0)
    while session.deadline is not None:
        now = session.deadline
        assert session.handle(Tick(), now)[0] == Connect()
        actions = session.handle(LinkDown("refused"), now)
    assert actions[-1] == Fail("gave up on the verifier: refused", FaultCode.OVERLOADED)
    assert 2.0 < now <= 6.0
    assert session.handle(Connected(), 7.0) == ()


def test_what_cannot_be_retried_fails_at_once() -> None:
    session = _streaming()
    assert session.handle(LinkDown("no such host", False), 1.0)[-1] == Fail("no such host")
    session = _streaming()
    fault = Fault(FaultCode.UNKNOWN_MODEL, "unknown model 'x'")
    assert session.handle(fault, 1.0)[-1] == Fail("unknown model 'x'", FaultCode.UNKNOWN_MODEL)


def test_a_retryable_fault_waits_as_long_as_it_was_asked_to() -> None:
    session = _streaming()
    actions = session.handle(Fault(FaultCode.OVERLOADED, "full", retry_after_s=7.0), 1.0)
    assert actions[0] == Disconnect()
    assert (session.state, session.deadline) == (LinkState.BACKING_OFF, 8.0)


def test_what_a_lost_link_still_says_is_ignored() -> None:
    session = _streaming()
    session.handle(LinkDown("gone"), 1.0)
    deadline = session.deadline
    for late in (GREETING, Commit(2, (10,)), Fault(FaultCode.INTERNAL, "late")):
        assert session.handle(late, 1.1) == ()
    assert (session.state, session.deadline) == (LinkState.BACKING_OFF, deadline)
    assert session.prefix.output == []


@pytest.mark.parametrize("connected", [True, False])
def test_stop(connected: bool) -> None:
    session = _streaming() if connected else _session()
    actions = session.handle(Stop(FinishReason.STOP), 1.0)
    assert _messages(actions) == ([Cancel()] if connected else [])
    assert actions[-2:] == (Disconnect(), Finish(FinishReason.STOP))
    assert session.handle(_guess(5), 1.1) == ()


# --- commits ----------------------------------------------------------------------------------


def test_how_each_token_came_about() -> None:
    session = _streaming()
    for token in (10, 11, 40):
        session.handle(_guess(token), 0.1)
    (deliver, *_) = session.handle(Commit(2, (10, 11, 12), accepted=2), 1.0)
    assert deliver == Deliver(2, (10, 11, 12), (ACCEPTED, ACCEPTED, CORRECTED))
    (deliver, *_) = session.handle(Commit(5, (13,)), 1.0)
    assert deliver == Deliver(5, (13,), (DECODED,))
    counters = session.counters
    assert (counters.tried, counters.hits, counters.corrected, counters.accepted) == (3, 2, 1, 2)


@pytest.mark.parametrize("overlap", range(4))
def test_what_is_held_already_is_not_delivered_again(overlap: int) -> None:
    session = _streaming()
    session.handle(Commit(2, (10, 11, 12)), 1.0)
    position = 5 - overlap
    tokens = (10, 11, 12, 13)[position - 2 :]
    (deliver, *_) = session.handle(Commit(position, tokens), 1.0)
    assert deliver == Deliver(5, (13,), (DECODED,))
    again = session.handle(Commit(position, tokens), 1.0)
    assert not any(isinstance(action, Deliver) for action in again)
    assert session.prefix.output == [10, 11, 12, 13]


@pytest.mark.parametrize("commit", [Commit(4, (12,)), Commit(2, (99, 11)), Commit(2, (99,))])
def test_a_commit_that_does_not_continue_is_a_reason_to_come_back(commit: Commit) -> None:
    session = _streaming()
    session.handle(Commit(2, (10,)), 1.0)
    assert session.handle(commit, 1.0)[0] == Disconnect()
    assert session.state is LinkState.BACKING_OFF
    assert session.prefix.output == [10]


def test_the_last_commit_is_acknowledged() -> None:
    session = _streaming()
    actions = session.handle(Commit(2, (10,), finish=FinishReason.LENGTH), 1.0)
    assert _messages(actions) == [Received(3, 3)]
    assert actions[-2:] == (Disconnect(), Finish(FinishReason.LENGTH))


@pytest.mark.parametrize(("most", "every"), [(256, 8), (8, 8), (3, 3), (1, 1), (0, 1)])
def test_it_acknowledges_before_the_verifier_pauses(most: int, every: int) -> None:
    session = _streaming(
        request=replace(REQUEST, drafting=False), limits=Limits(max_unreceived=most)
    )
    answers = [_messages(session.handle(Commit(2 + i, (10,)), 1.0)) for i in range(every)]
    assert answers == [[]] * (every - 1) + [[Received(2 + every, 2 + every)]]


def test_a_round_trip_is_measured_without_the_time_it_was_held() -> None:
    session = _streaming(request=replace(REQUEST, drafting=False), limits=Limits(max_unreceived=1))
    session.handle(Commit(2, (10,)), 1.0)
    session.handle(Commit(3, (11,), echo=3, held_us=200_000), 1.5)
    assert session.estimates.rtt_s.get(0.0) == pytest.approx(0.3)


# --- drafting ---------------------------------------------------------------------------------


def test_a_step_that_a_commit_overtook_is_matched_against_it() -> None:
    session = _streaming(FixedPolicy(9, width=2))
    session.handle(Commit(2, (10, 11)), 0.1)
    session.handle(_guess(10, 40), 0.2)
    assert len(session.tree.nodes) == 0
    counters = session.counters
    assert (counters.tried, counters.hits) == (1, 1)
    session.handle(Commit(4, (12,)), 0.3)
    session.handle(_guess(40, 12), 0.4)
    assert session.estimates.acceptance.hits[1] == 1.0


def test_only_the_missing_tokens_are_fed() -> None:
    session = _streaming()
    assert session.handle(_guess(10), 0.1)[-1] == StartStep(2, (10,), 1)
    assert session.handle(_guess(11), 0.2)[-1] == StartStep(3, (11,), 1)
    session.handle(Commit(2, (10, 40)), 0.3)
    assert session.handle(_guess(12), 0.4)[-1] == StartStep(3, (40,), 1)


def test_a_drafter_with_nothing_to_say_rests_until_the_text_goes_on() -> None:
    session = _streaming(request=replace(REQUEST, run_ahead=RunAhead.NEVER))
    actions = session.handle(StepDone(()), 0.1)
    assert actions == (Transmit(Draft(1, (), ())),)
    assert session.handle(Commit(2, (10,)), 0.2)[-1] == StartStep(2, (10,), 1)


def test_a_drafter_that_failed_leaves_a_plain_stream() -> None:
    session = _streaming(request=replace(REQUEST, run_ahead=RunAhead.NEVER))
    assert session.handle(StepFailed("no memory"), 0.1) == (Transmit(Draft(1, (), ())),)
    assert not session.drafting
    (deliver, go_on) = session.handle(Commit(2, (10,)), 0.2)
    assert deliver == Deliver(2, (10,), (DECODED,))
    assert go_on == Transmit(Draft(1, (), ()))
    session.handle(LinkDown("gone"), 1.0)
    session.handle(Tick(), 9.0)
    (opening, *_) = _messages(session.handle(Connected(), 9.0))
    assert opening == replace(REQUEST, run_ahead=RunAhead.NEVER, committed=(10,), drafting=False)


def test_nothing_is_drafted_where_it_cannot_count() -> None:
    short = replace(REQUEST, sampling=SamplingParams(max_tokens=3))
    session = _streaming(request=short)
    session.handle(_guess(10), 0.1)
    assert not any(isinstance(a, StartStep) for a in session.handle(_guess(11), 0.2))
    session = _session(draft_context_length=3)
    session.handle(Start(), 0.0)
    assert session.handle(_guess(10), 0.1) == ()


def test_what_a_small_verifier_dropped_is_sent_again_when_there_is_room() -> None:
    session = _session(PearlPolicy(9))
    session.handle(Start(), 0.0)
    for token in (10, 11, 12, 13):
        session.handle(_guess(token), 0.1)
    (_, draft) = _messages(session.handle(Connected(), 0.2))
    assert isinstance(draft, Draft)
    assert draft.tokens == (10, 11, 12, 13)
    assert (
        _messages(session.handle(replace(GREETING, limits=Limits(max_nodes_outstanding=2)), 0.3))
        == []
    )
    (again,) = _messages(session.handle(Commit(2, (10, 11, 12), accepted=2), 0.4))
    hash_there = CommittedPrefix(PROMPT, (10, 11, 12)).hash_at(5)
    assert again == Draft(4, (0,), (13,), 5, hash_there)


# --- what cannot happen -----------------------------------------------------------------------


@pytest.mark.parametrize("event", [_guess(5), Connected()])
def test_answers_without_a_question_are_bugs(event: DraftEvent) -> None:
    with pytest.raises(AssertionError):
        _session().handle(event, 0.0)


def test_nothing_happens_after_the_end() -> None:
    session = _streaming()
    session.handle(Commit(2, (10,), finish=FinishReason.STOP), 1.0)
    before = session.prefix.tokens[:]
    events: list[DraftEvent] = [Start(), Connected(), LinkDown("x"), Tick(), _guess(5), GREETING]
    for event in (*events, Commit(3, (11,)), Fault(FaultCode.INTERNAL, "x"), Stop()):
        assert session.handle(event, 2.0) == ()
    assert (session.state, session.prefix.tokens) == (LinkState.DONE, before)
