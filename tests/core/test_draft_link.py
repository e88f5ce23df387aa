"""The device's session and its link, event by event. Oracle: the answers written down by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from edgespec.core.device.events import (
    Connect,
    Connected,
    Deliver,
    Disconnect,
    DraftEvent,
    Fail,
    Finish,
    LinkDown,
    LinkState,
    Start,
    StartStep,
    Stop,
    Tick,
    Transmit,
)
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Limits,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.verifier.constraint_desk import WITHIN_S
from tests.core.draft_scripts import (
    DECODED,
    GREETING,
    PROMPT,
    RECONNECT,
    REQUEST,
    guess,
    messages,
    new_session,
    streaming,
)

# --- the link ---------------------------------------------------------------------------------


def test_it_connects_and_drafts_at_once() -> None:
    session = new_session()
    assert session.handle(Start(), 0.0) == (Connect(), StartStep(0, PROMPT, 1))
    assert session.deadline == 10.0
    assert session.handle(Connected(), 1.0) == (Transmit(REQUEST),)
    session.handle(GREETING, 2.0)
    assert session.state is LinkState.STREAMING
    assert session.handle(Tick(), 31.9) == ()


def test_what_was_drafted_before_the_greeting_is_sent_with_the_opening() -> None:
    session = new_session()
    session.handle(Start(), 0.0)
    assert messages(session.handle(guess(5), 0.1)) == []
    opening, draft = messages(session.handle(Connected(), 0.2))
    assert opening == REQUEST
    base = CommittedPrefix(PROMPT)
    assert draft == Draft(1, (0,), (5,), 2, base.hash_at(2))


@pytest.mark.parametrize("event", [Connected(), GREETING])
def test_no_answer_in_time_is_a_broken_link(event: DraftEvent) -> None:
    session = new_session()
    session.handle(Start(), 0.0)
    assert session.handle(Tick(), 9.9) == ()
    actions = session.handle(Tick(), 10.0)
    assert Disconnect() in actions
    assert session.state is not LinkState.STREAMING


def test_a_verifier_with_a_grammar_to_read_has_longer_to_greet() -> None:
    """It may try the grammar for longer than it takes to greet: as long as its desk lets it."""
    grammar = Constraint(ConstraintKind.GRAMMAR, 'start: "a"')
    session = new_session(request=replace(REQUEST, sampling=SamplingParams(constraint=grammar)))
    session.handle(Start(), 0.0)
    assert session.deadline == 10.0  # nobody needs longer for a connection
    session.handle(Connected(), 1.0)
    assert session.handle(Tick(), 10.0) == ()
    ends_s = session.deadline
    assert ends_s is not None
    assert ends_s == 10.0 + RECONNECT.grammar_s > 10.0 + WITHIN_S
    assert session.handle(Tick(), ends_s - 0.1) == ()
    assert Disconnect() in session.handle(Tick(), ends_s)
    assert session.state is LinkState.BACKING_OFF


def test_a_grammar_that_was_waited_for_leaves_the_next_stream_its_own_time() -> None:
    grammar = Constraint(ConstraintKind.GRAMMAR, 'start: "a"')
    session = new_session(request=replace(REQUEST, sampling=SamplingParams(constraint=grammar)))
    session.handle(Start(), 0.0)
    session.handle(Connected(), 0.0)
    session.handle(LinkDown("gone"), 50.0)
    again_s = session.deadline
    assert again_s is not None
    session.handle(Tick(), again_s)
    assert session.deadline == again_s + 10.0


def test_it_comes_back_with_what_it_holds() -> None:
    session = streaming()
    session.handle(Commit(2, (10, 11)), 1.0)
    session.handle(LinkDown("gone"), 2.0)
    assert session.state is LinkState.BACKING_OFF
    at = session.deadline
    assert at is not None
    assert 2.5 <= at <= 3.0
    assert session.handle(Tick(), at - 0.01) == ()
    assert Connect() in session.handle(Tick(), at)
    (opening,) = messages(session.handle(Connected(), at))
    assert opening == replace(REQUEST, committed=(10, 11))


def test_alive_nodes_are_sent_again_on_a_new_stream() -> None:
    session = streaming()
    session.handle(guess(5), 0.1)
    session.handle(guess(6), 0.2)
    session.handle(Commit(2, (5,)), 1.0)
    session.handle(LinkDown("gone"), 2.0)
    session.handle(Tick(), 9.0)
    told = messages(session.handle(Connected(), 9.0))
    hash_there = CommittedPrefix(PROMPT, (5,)).hash_at(3)
    assert told[1:] == [Draft(2, (0,), (6,), 3, hash_there)]


def test_it_gives_up_in_the_end() -> None:
    session = new_session()
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
    session = streaming()
    assert session.handle(LinkDown("no such host", False), 1.0)[-1] == Fail("no such host")
    session = streaming()
    fault = Fault(FaultCode.UNKNOWN_MODEL, "unknown model 'x'")
    assert session.handle(fault, 1.0)[-1] == Fail("unknown model 'x'", FaultCode.UNKNOWN_MODEL)


def test_a_retryable_fault_waits_as_long_as_it_was_asked_to() -> None:
    session = streaming()
    actions = session.handle(Fault(FaultCode.OVERLOADED, "full", retry_after_s=7.0), 1.0)
    assert actions[0] == Disconnect()
    assert session.state is LinkState.BACKING_OFF
    assert session.deadline is not None
    assert 8.0 <= session.deadline <= 8.5


def test_what_a_lost_link_still_says_is_ignored() -> None:
    session = streaming()
    session.handle(LinkDown("gone"), 1.0)
    deadline = session.deadline
    for late in (GREETING, Commit(2, (10,)), Fault(FaultCode.INTERNAL, "late")):
        assert session.handle(late, 1.1) == ()
    assert (session.state, session.deadline) == (LinkState.BACKING_OFF, deadline)
    assert session.prefix.output == []


@pytest.mark.parametrize("connected", [True, False])
def test_stop(connected: bool) -> None:
    session = streaming() if connected else new_session()
    actions = session.handle(Stop(FinishReason.STOP), 1.0)
    assert messages(actions) == ([Cancel()] if connected else [])
    assert actions[-2:] == (Disconnect(), Finish(FinishReason.STOP))
    assert session.handle(guess(5), 1.1) == ()


# --- verifiers that are sick or hostile -------------------------------------------------------


def _reopened(session: DraftSession) -> float:
    """Let the back-off pass and a new stream come up, which the verifier greets; the time then."""
    now = session.deadline
    assert now is not None
    assert session.handle(Tick(), now)[0] == Connect()
    session.handle(Connected(), now)
    session.handle(GREETING, now)
    return now


def test_a_verifier_that_falls_silent_is_a_broken_link() -> None:
    session = streaming()
    session.handle(Commit(2, (10,)), 5.0)
    assert session.handle(Tick(), 34.9) == ()
    assert session.handle(Tick(), 35.0)[0] == Disconnect()
    assert session.state is LinkState.BACKING_OFF


def test_an_empty_commit_is_a_sign_of_life_but_not_for_ever() -> None:
    session, now = streaming(), 0.0
    while now + 10.0 < 100.0:
        now += 10.0
        session.handle(Tick(), now)
        session.handle(Commit(2, ()), now)
        assert session.state is LinkState.STREAMING
    why = "no new token from the verifier for 100 s"
    assert session.handle(Tick(), 100.0)[-1] == Fail(why)


def test_the_time_without_a_token_counts_over_all_streams_but_not_between_them() -> None:
    session = streaming()
    session.handle(Commit(2, ()), 25.0)
    session.handle(Commit(2, ()), 50.0)
    session.handle(LinkDown("gone"), 60.0)
    now = _reopened(session)
    assert now > 60.0
    session.handle(Commit(2, ()), now + 29.0)
    assert session.deadline == pytest.approx(now + 40.0)
    session.handle(Commit(2, (10,)), now + 30.0)
    assert session.deadline == pytest.approx(now + 60.0)


@pytest.mark.parametrize(
    "nothing",
    [
        LinkDown("hung up"),
        Fault(FaultCode.RESYNC, "hung up"),
        Fault(FaultCode.INTERNAL, "hung up"),
        Fault(FaultCode.OVERLOADED, "hung up"),
        Commit(9, (10,)),
    ],
    ids=lambda event: type(event).__name__,
)
def test_streams_that_bring_nothing_are_counted(nothing: DraftEvent) -> None:
    session, now = streaming(), 0.0
    for _ in range(7):
        session.handle(nothing, now)
        assert session.state is LinkState.BACKING_OFF
        now = _reopened(session)
    last = session.handle(nothing, now)[-1]
    assert isinstance(last, Fail)
    assert last.why.startswith("gave up on the verifier after 8 streams without a new token: ")


def test_a_token_starts_the_count_over() -> None:
    session, now = streaming(), 0.0
    for index in range(15):
        session.handle(Commit(2 + index, (10,)), now)
        session.handle(Fault(FaultCode.INTERNAL, "again"), now)
        assert session.state is LinkState.BACKING_OFF
        now = _reopened(session)


def test_a_verifier_that_refuses_as_busy_is_asked_until_the_time_is_over() -> None:
    session = new_session()
    session.handle(Start(), 0.0)
    session.handle(Connected(), 0.0)
    now, last = 0.0, session.handle(full := Fault(FaultCode.OVERLOADED, "full"), 0.0)
    while session.deadline is not None:
        now = session.deadline
        session.handle(Tick(), now)
        session.handle(Connected(), now)
        last = session.handle(full, now)
    assert last[-1] == Fail("gave up on the verifier: full", FaultCode.OVERLOADED)
    assert 4.0 < now <= 5.0


@pytest.mark.parametrize(
    ("tokens", "delivered", "message"),
    [
        (tuple(range(8192)), tuple(range(20)), "up to position 8194.* max_tokens 20 end at 22"),
        ((10, 11, 5000, 12), (10, 11), "token id 5000 is beyond the vocabulary of 1000"),
        ((1010,), (), "token id 1010 is beyond"),
    ],
)
def test_tokens_beyond_the_bounds_are_never_delivered(
    tokens: tuple[int, ...], delivered: tuple[int, ...], message: str
) -> None:
    session = streaming()
    actions = session.handle(Commit(2, tokens), 1.0)
    given = [token for a in actions if isinstance(a, Deliver) for token in a.tokens]
    assert tuple(given) == delivered
    assert isinstance(actions[-1], Fail)
    assert re.search(f"the verifier broke the protocol: .*{message}", actions[-1].why)
    assert session.state is LinkState.DONE


def test_the_context_it_announced_binds_the_verifier() -> None:
    session = streaming(limits=Limits(context_length=5))
    deliver, *_, fail = session.handle(Commit(2, (10, 11, 12, 13)), 1.0)
    assert deliver == Deliver(2, (10, 11, 12), (DECODED, DECODED, DECODED))
    assert isinstance(fail, Fail)
    assert "the context it announced end at 5" in fail.why


@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (4, "context")])
def test_a_full_context_is_told_from_a_full_output(max_tokens: int, reason: str) -> None:
    request = replace(REQUEST, sampling=SamplingParams(max_tokens=max_tokens))
    session = streaming(request=request, limits=Limits(context_length=5))
    actions = session.handle(Commit(2, (10, 11, 12), finish=FinishReason.LENGTH), 1.0)
    assert actions[-1] == Finish(FinishReason(reason))


def test_what_a_verifier_says_is_made_harmless() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\nno"
    for event in (Fault(FaultCode.INVALID, evil), LinkDown(evil, retryable=False)):
        last = streaming().handle(event, 1.0)[-1]
        assert isinstance(last, Fail)
        assert last.why == "\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}" + (
            "\N{REPLACEMENT CHARACTER}[2J no"
        )
        assert last.why.isprintable()


def test_the_session_never_waits_without_a_deadline() -> None:
    session = new_session()
    session.handle(Start(), 0.0)
    for event in (Connected(), GREETING, Commit(2, (10,)), LinkDown("gone"), guess(5)):
        session.handle(event, 1.0)
        assert session.deadline is not None
    session.handle(Stop(), 2.0)
    assert session.deadline is None


def test_a_link_that_knows_of_another_verifier_is_opened_again_at_once() -> None:
    session = streaming()
    session.handle(LinkDown("drained", again_s=0.0), 2.0)
    assert (session.state, session.deadline) == (LinkState.BACKING_OFF, 2.0)
    assert Connect() in session.handle(Tick(), 2.0)


def test_a_link_that_knows_when_somebody_is_there_again_waits_so_long() -> None:
    session = streaming()
    session.handle(LinkDown("all are full", again_s=7.0), 2.0)
    assert session.deadline is not None
    assert 9.0 <= session.deadline <= 9.5
