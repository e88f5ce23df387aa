"""The device's session and its drafts, event by event. Oracle: the answers written down by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edgespec.core.device.events import (
    Connected,
    Deliver,
    Disconnect,
    DraftEvent,
    Finish,
    LinkDown,
    LinkState,
    Start,
    StartStep,
    StepDone,
    StepFailed,
    Stop,
    Tick,
    Transmit,
)
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.policy import FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.protocol.messages import (
    Commit,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Limits,
    Received,
    RunAhead,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import Candidate
from tests.core.draft_scripts import (
    ACCEPTED,
    CORRECTED,
    DECODED,
    GREETING,
    PROMPT,
    REQUEST,
    guess,
    messages,
    new_session,
    streaming,
)

# --- commits ----------------------------------------------------------------------------------


def test_how_each_token_came_about() -> None:
    session = streaming()
    for token in (10, 11, 40):
        session.handle(guess(token), 0.1)
    (deliver, *_) = session.handle(Commit(2, (10, 11, 12), accepted=2), 1.0)
    assert deliver == Deliver(2, (10, 11, 12), (ACCEPTED, ACCEPTED, CORRECTED))
    (deliver, *_) = session.handle(Commit(5, (13,)), 1.0)
    assert deliver == Deliver(5, (13,), (DECODED,))
    counters = session.counters
    assert (counters.tried, counters.hits, counters.corrected, counters.accepted) == (3, 2, 1, 2)


@pytest.mark.parametrize("overlap", range(4))
def test_what_is_held_already_is_not_delivered_again(overlap: int) -> None:
    session = streaming()
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
    session = streaming()
    session.handle(Commit(2, (10,)), 1.0)
    assert session.handle(commit, 1.0)[0] == Disconnect()
    assert session.state is LinkState.BACKING_OFF
    assert session.prefix.output == [10]


def test_the_last_commit_is_acknowledged() -> None:
    session = streaming()
    actions = session.handle(Commit(2, (10,), finish=FinishReason.STOP), 1.0)
    assert messages(actions) == [Received(3, 3)]
    assert actions[-2:] == (Disconnect(), Finish(FinishReason.STOP))


@pytest.mark.parametrize(("most", "every"), [(256, 8), (8, 8), (3, 3), (1, 1), (0, 1)])
def test_it_acknowledges_before_the_verifier_pauses(most: int, every: int) -> None:
    session = streaming(
        request=replace(REQUEST, drafting=False), limits=Limits(max_unreceived=most)
    )
    answers = [messages(session.handle(Commit(2 + i, (10,)), 1.0)) for i in range(every)]
    assert answers == [[]] * (every - 1) + [[Received(2 + every, 2 + every)]]


def test_a_round_trip_is_measured_without_the_time_it_was_held() -> None:
    session = streaming(request=replace(REQUEST, drafting=False), limits=Limits(max_unreceived=1))
    session.handle(Commit(2, (10,)), 1.0)
    session.handle(Commit(3, (11,), echo=3, held_us=200_000), 1.5)
    assert session.estimates.rtt_s.get(0.0) == pytest.approx(0.3)


# --- drafting ---------------------------------------------------------------------------------


def test_a_step_that_a_commit_overtook_is_matched_against_it() -> None:
    session = streaming(FixedPolicy(9, width=2))
    session.handle(Commit(2, (10, 11)), 0.1)
    session.handle(guess(10, 40), 0.2)
    assert len(session.tree.nodes) == 0
    counters = session.counters
    assert (counters.tried, counters.hits) == (1, 1)
    session.handle(Commit(4, (12,)), 0.3)
    session.handle(guess(40, 12), 0.4)
    assert session.estimates.acceptance.hits[1] == 1.0


def test_only_the_missing_tokens_are_fed() -> None:
    session = streaming()
    assert session.handle(guess(10), 0.1)[-1] == StartStep(2, (10,), 1)
    assert session.handle(guess(11), 0.2)[-1] == StartStep(3, (11,), 1)
    session.handle(Commit(2, (10, 40)), 0.3)
    assert session.handle(guess(12), 0.4)[-1] == StartStep(3, (40,), 1)


def test_a_drafter_with_nothing_to_say_rests_until_the_text_goes_on() -> None:
    session = streaming(request=replace(REQUEST, run_ahead=RunAhead.NEVER))
    actions = session.handle(StepDone(()), 0.1)
    assert actions == (Transmit(Draft(1, (), ())),)
    assert session.handle(Commit(2, (10,)), 0.2)[-1] == StartStep(2, (10,), 1)


def test_a_drafter_that_failed_leaves_a_plain_stream() -> None:
    session = streaming(request=replace(REQUEST, run_ahead=RunAhead.NEVER))
    assert session.handle(StepFailed("no memory"), 0.1) == (Transmit(Draft(1, (), ())),)
    assert not session.drafting
    (deliver, go_on) = session.handle(Commit(2, (10,)), 0.2)
    assert deliver == Deliver(2, (10,), (DECODED,))
    assert go_on == Transmit(Draft(1, (), ()))
    session.handle(LinkDown("gone"), 1.0)
    session.handle(Tick(), 9.0)
    (opening, *_) = messages(session.handle(Connected(), 9.0))
    assert opening == replace(REQUEST, run_ahead=RunAhead.NEVER, committed=(10,), drafting=False)


def test_nothing_is_drafted_where_it_cannot_count() -> None:
    short = replace(REQUEST, sampling=SamplingParams(max_tokens=3))
    session = streaming(request=short)
    session.handle(guess(10), 0.1)
    assert not any(isinstance(a, StartStep) for a in session.handle(guess(11), 0.2))
    session = new_session(draft_context_length=3)
    session.handle(Start(), 0.0)
    assert session.handle(guess(10), 0.1) == ()


def test_what_a_small_verifier_dropped_is_sent_again_when_there_is_room() -> None:
    session = new_session(PearlPolicy(9))
    session.handle(Start(), 0.0)
    for token in (10, 11, 12, 13):
        session.handle(guess(token), 0.1)
    (_, draft) = messages(session.handle(Connected(), 0.2))
    assert isinstance(draft, Draft)
    assert draft.tokens == (10, 11, 12, 13)
    assert (
        messages(session.handle(replace(GREETING, limits=Limits(max_nodes_outstanding=2)), 0.3))
        == []
    )
    (again,) = messages(session.handle(Commit(2, (10, 11, 12), accepted=2), 0.4))
    hash_there = CommittedPrefix(PROMPT, (10, 11, 12)).hash_at(5)
    assert again == Draft(4, (0,), (13,), 5, hash_there)


# --- what cannot happen -----------------------------------------------------------------------


@pytest.mark.parametrize("event", [guess(5), Connected()])
def test_answers_without_a_question_are_bugs(event: DraftEvent) -> None:
    with pytest.raises(AssertionError):
        new_session().handle(event, 0.0)


def test_nothing_happens_after_the_end() -> None:
    session = streaming()
    session.handle(Commit(2, (10,), finish=FinishReason.STOP), 1.0)
    before = session.prefix.tokens[:]
    events: list[DraftEvent] = [Start(), Connected(), LinkDown("x"), Tick(), guess(5), GREETING]
    for event in (*events, Commit(3, (11,)), Fault(FaultCode.INTERNAL, "x"), Stop()):
        assert session.handle(event, 2.0) == ()
    assert (session.state, session.prefix.tokens) == (LinkState.DONE, before)


# --- choices that are hardly ever right -------------------------------------------------------


def test_choices_that_are_hardly_ever_right_are_kept_now_and_then() -> None:
    """Second choices of 0.001 were never right in 400 trials, those of 0.2 half the time. Step 16
    is the first at which all are kept."""
    session = streaming(policy=GoodputPolicy(2))
    hardly, often = math.log(0.001), math.log(0.2)
    for trial in range(400):
        session.estimates.guesses.add(1, hardly, hit=False)
        session.estimates.guesses.add(1, often, hit=trial % 2 == 0)
    kept = []
    for number in range(1, 18):
        logprob = often if number == 5 else hardly
        choices = (Candidate(100 + number, -0.1), Candidate(200 + number, logprob))
        before = len(session.tree.nodes)
        session.handle(StepDone(choices), number * 0.01)
        kept.append(len(session.tree.nodes) - before)
    assert [number for number, count in enumerate(kept, 1) if count == 2] == [5, 16]
    assert set(kept) == {1, 2}


def test_all_choices_are_kept_where_the_policy_says_so() -> None:
    session = streaming(policy=WindowedPolicy(2))
    for _ in range(400):
        session.estimates.guesses.add(1, math.log(0.001), hit=False)
    session.handle(StepDone((Candidate(10, -0.1), Candidate(11, math.log(0.001)))), 0.1)
    assert [node.rank for node in session.tree.roots] == [0, 1]


def test_no_choice_is_kept_behind_one_that_is_not() -> None:
    """Acceptance is counted by ranks without gaps: a third choice beside no second one would be a
    hit of a rank that was never tried."""
    session = streaming(policy=GoodputPolicy(3))
    unlikely = math.log(0.001)
    for trial in range(400):
        session.estimates.guesses.add(1, unlikely, hit=False)
        session.estimates.guesses.add(2, unlikely, hit=trial % 2 == 0)
    session.handle(StepDone(tuple(Candidate(10 + n, n and unlikely) for n in range(3))), 0.1)
    assert [node.rank for node in session.tree.roots] == [0]
