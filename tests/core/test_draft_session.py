"""The device's session, event by event. Oracle: the answers written down by hand; of its back-off,
doubling delays, shortened by at most a half, until a deadline."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace

import pytest

from edgespec.core.device import events as ev
from edgespec.core.device.events import DraftCounters, LinkDown, LinkState
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.link_keeper import LinkKeeper, ReconnectPolicy
from edgespec.core.device.policy import FixedPolicy, PearlPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import Commit, Draft, Fault, FaultCode, FinishReason, Limits
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import Candidate
from edgespec.verifier.constraint_desk import WITHIN_S
from tests.core.draft_scripts import (
    ACCEPTED,
    CORRECTED,
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

SILENT = replace(REQUEST, drafting=False)
NEVER = replace(REQUEST, run_ahead=m.RunAhead.NEVER)
REGEX = replace(REQUEST, sampling=SamplingParams(constraint=Constraint(ConstraintKind.REGEX, "a")))


def reopened(
    session: DraftSession, greeting: m.Opened = GREETING
) -> tuple[float, tuple[object, ...]]:
    """Let the back-off pass and a new stream come up, which the verifier greets; the time then, and
    what the session does."""
    now = session.deadline
    assert now is not None
    assert session.handle(ev.Tick(), now)[0] == ev.Connect()
    session.handle(ev.Connected(), now)
    return now, session.handle(greeting, now)


def test_it_connects_and_drafts_at_once() -> None:
    session = new_session()
    assert session.handle(ev.Start(), 0.0) == (ev.Connect(), ev.StartStep(0, PROMPT, 1))
    assert session.deadline == 10.0
    assert messages(session.handle(guess(5), 0.1)) == []
    opening, draft = messages(session.handle(ev.Connected(), 1.0))
    assert opening == REQUEST
    assert draft == Draft(1, (0,), (5,), 2, CommittedPrefix(PROMPT).hash_at(2))
    session.handle(GREETING, 2.0)
    assert session.state is LinkState.STREAMING
    assert session.handle(ev.Tick(), 31.9) == ()


def test_a_verifier_with_a_grammar_to_read_has_longer_to_greet() -> None:
    """It may try the grammar for longer than it takes to greet: as long as its desk lets it. The
    next stream has its own time."""
    grammar = Constraint(ConstraintKind.GRAMMAR, 'start: "a"')
    session = new_session(request=replace(REQUEST, sampling=SamplingParams(constraint=grammar)))
    session.handle(ev.Start(), 0.0)
    assert session.deadline == 10.0  # nobody needs longer for a connection
    session.handle(ev.Connected(), 1.0)
    assert session.handle(ev.Tick(), 10.0) == ()
    ends_s = session.deadline
    assert ends_s is not None
    assert ends_s == 10.0 + RECONNECT.grammar_s > 10.0 + WITHIN_S
    assert session.handle(ev.Tick(), ends_s - 0.1) == ()
    assert ev.Disconnect() in session.handle(ev.Tick(), ends_s)
    again_s = session.deadline
    assert again_s is not None
    session.handle(ev.Tick(), again_s)
    assert session.deadline == again_s + 10.0


@pytest.mark.parametrize("keeps", [True, False])
def test_a_device_hangs_up_on_a_verifier_that_does_not_know_constraints(keeps: bool) -> None:
    session = new_session(request=REGEX)
    session.handle(ev.Start(), 0.0)
    session.handle(ev.Connected(), 1.0)
    actions = session.handle(replace(GREETING, constrained=keeps), 2.0)
    why = "the verifier is too old to hold a text to a regex: it did not say that it does"
    assert (ev.Transmit(m.Cancel()) in actions) is not keeps
    assert (ev.Fail(why, FaultCode.INVALID) in actions) is not keeps


def test_it_comes_back_with_what_it_holds_and_sends_what_is_alive() -> None:
    session = streaming()
    session.handle(guess(10), 0.1)
    session.handle(guess(6), 0.2)
    session.handle(Commit(2, (10,)), 1.0)
    session.handle(ev.LinkDown("gone"), 2.0)
    deadline = session.deadline
    assert deadline is not None
    assert 2.5 <= deadline <= 3.0
    for late in (GREETING, Commit(2, (10,)), Fault(FaultCode.INTERNAL, "late")):
        assert session.handle(late, 2.1) == ()
    assert (session.state, session.deadline) == (LinkState.BACKING_OFF, deadline)
    assert session.prefix.output == [10]
    assert session.handle(ev.Tick(), deadline - 0.01) == ()
    assert ev.Connect() in session.handle(ev.Tick(), deadline)
    opening, draft = messages(session.handle(ev.Connected(), deadline))
    assert opening == replace(REQUEST, committed=(10,))
    assert draft == Draft(2, (0,), (6,), 3, CommittedPrefix(PROMPT, (10,)).hash_at(3))


@pytest.mark.parametrize(
    ("event", "first", "earliest", "latest"),
    [
        (ev.LinkDown("gone"), None, 1.5, 2.0),
        (Fault(FaultCode.OVERLOADED, "full", retry_after_s=7.0), ev.Disconnect(), 8.0, 8.5),
        (ev.LinkDown("drained", again_s=0.0), None, 1.0, 1.0),  # it knows of another verifier
        (ev.LinkDown("all are full", again_s=7.0), None, 8.0, 8.5),
    ],
)
def test_it_waits_as_long_as_it_was_asked_to(
    event: ev.DraftEvent, first: object, earliest: float, latest: float
) -> None:
    session = streaming()
    actions = session.handle(event, 1.0)
    assert first is None or actions[0] == first
    assert session.state is LinkState.BACKING_OFF
    assert session.deadline is not None
    assert earliest <= session.deadline <= latest


@pytest.mark.parametrize(
    ("event", "fail"),
    [
        (ev.LinkDown("no such host", False), ev.Fail("no such host")),
        (Fault(FaultCode.UNKNOWN_MODEL, "no 'x'"), ev.Fail("no 'x'", FaultCode.UNKNOWN_MODEL)),
    ],
)
def test_what_cannot_be_retried_fails_at_once(event: ev.DraftEvent, fail: ev.Fail) -> None:
    assert streaming().handle(event, 1.0)[-1] == fail


def test_it_gives_up_in_the_end() -> None:
    session = new_session()
    session.handle(ev.Start(), 0.0)
    now, actions = 1.0, session.handle(ev.LinkDown("refused"), 1.0)
    while session.deadline is not None:
        now = session.deadline
        assert session.handle(ev.Tick(), now)[0] == ev.Connect()
        actions = session.handle(ev.LinkDown("refused"), now)
    assert actions[-1] == ev.Fail("gave up on the verifier: refused", FaultCode.OVERLOADED)
    assert 2.0 < now <= 6.0
    assert session.handle(ev.Connected(), 7.0) == ()


@pytest.mark.parametrize("connected", [True, False])
def test_stop(connected: bool) -> None:
    session = streaming() if connected else new_session()
    actions = session.handle(ev.Stop(FinishReason.STOP), 1.0)
    assert messages(actions) == ([m.Cancel()] if connected else [])
    assert actions[-2:] == (ev.Disconnect(), ev.Finish(FinishReason.STOP))
    assert session.handle(guess(5), 1.1) == ()


def test_a_verifier_that_falls_silent_is_a_broken_link() -> None:
    session = streaming()
    session.handle(Commit(2, (10,)), 5.0)
    assert session.handle(ev.Tick(), 34.9) == ()
    assert session.handle(ev.Tick(), 35.0)[0] == ev.Disconnect()
    assert session.state is LinkState.BACKING_OFF


def test_an_empty_commit_is_a_sign_of_life_but_not_for_ever() -> None:
    session = streaming()
    for now in range(10, 100, 10):
        session.handle(ev.Tick(), now)
        session.handle(Commit(2, ()), now)
        assert session.state is LinkState.STREAMING
    why = "no new token from the verifier for 100 s"
    assert session.handle(ev.Tick(), 100.0)[-1] == ev.Fail(why)


@pytest.mark.parametrize(
    "nothing",
    [
        ev.LinkDown("hung up"),
        Fault(FaultCode.RESYNC, "hung up"),
        Fault(FaultCode.INTERNAL, "hung up"),
        Fault(FaultCode.OVERLOADED, "hung up"),
        Commit(9, (10,)),
    ],
    ids=lambda event: type(event).__name__,
)
def test_streams_that_bring_nothing_are_counted(nothing: ev.DraftEvent) -> None:
    session, now = streaming(), 0.0
    for _ in range(7):
        session.handle(nothing, now)
        assert session.state is LinkState.BACKING_OFF
        now, _ = reopened(session)
    last = session.handle(nothing, now)[-1]
    assert isinstance(last, ev.Fail)
    assert last.why.startswith("gave up on the verifier after 8 streams without a new token: ")


@pytest.mark.parametrize(
    ("tokens", "delivered", "context", "message"),
    [
        (range(8192), range(20), 4096, "up to position 8194.* max_tokens 20 end at 22"),
        ((10, 11, 5000, 12), (10, 11), 4096, "token id 5000 is beyond the vocabulary of 1000"),
        ((1010,), (), 4096, "token id 1010 is beyond"),
        ((10, 11, 12, 13), (10, 11, 12), 5, "the context it announced end at 5"),
    ],
)
def test_tokens_beyond_the_bounds_are_never_delivered(
    tokens: tuple[int, ...], delivered: tuple[int, ...], context: int, message: str
) -> None:
    session = streaming(limits=Limits(context_length=context))
    actions = session.handle(Commit(2, tuple(tokens)), 1.0)
    given = [token for a in actions if isinstance(a, ev.Deliver) for token in a.tokens]
    assert given == list(delivered)
    assert isinstance(actions[-1], ev.Fail)
    assert re.search(f"the verifier broke the protocol: .*{message}", actions[-1].why)
    assert session.state is LinkState.DONE


@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (4, "context")])
def test_a_full_context_is_told_from_a_full_output(max_tokens: int, reason: str) -> None:
    request = replace(REQUEST, sampling=SamplingParams(max_tokens=max_tokens))
    session = streaming(request=request, limits=Limits(context_length=5))
    actions = session.handle(Commit(2, (10, 11, 12), finish=FinishReason.LENGTH), 1.0)
    assert actions[-1] == ev.Finish(FinishReason(reason))


def test_what_a_verifier_says_is_made_harmless() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\nno"
    for event in (Fault(FaultCode.INVALID, evil), ev.LinkDown(evil, retryable=False)):
        last = streaming().handle(event, 1.0)[-1]
        assert isinstance(last, ev.Fail)
        assert last.why == "?]0;owned??[2J no".replace("?", "\N{REPLACEMENT CHARACTER}")


def test_how_each_token_came_about() -> None:
    session = streaming()
    for token in (10, 11, 40):
        session.handle(guess(token), 0.1)
    (deliver, *_) = session.handle(Commit(2, (10, 11, 12), accepted=2), 1.0)
    assert deliver == ev.Deliver(2, (10, 11, 12), (ACCEPTED, ACCEPTED, CORRECTED))
    (deliver, *_) = session.handle(Commit(5, (13,)), 1.0)
    assert deliver == ev.Deliver(5, (13,), (DECODED,))
    counters = session.counters
    assert (counters.tried, counters.hits, counters.corrected, counters.accepted) == (3, 2, 1, 2)


@pytest.mark.parametrize("overlap", range(4))
def test_what_is_held_already_is_not_delivered_again(overlap: int) -> None:
    session = streaming()
    session.handle(Commit(2, (10, 11, 12)), 1.0)
    position = 5 - overlap
    tokens = (10, 11, 12, 13)[position - 2 :]
    (deliver, *_) = session.handle(Commit(position, tokens), 1.0)
    assert deliver == ev.Deliver(5, (13,), (DECODED,))
    again = session.handle(Commit(position, tokens), 1.0)
    assert not any(isinstance(action, ev.Deliver) for action in again)
    assert session.prefix.output == [10, 11, 12, 13]


@pytest.mark.parametrize("commit", [Commit(4, (12,)), Commit(2, (99, 11)), Commit(2, (99,))])
def test_a_commit_that_does_not_continue_is_a_reason_to_come_back(commit: Commit) -> None:
    session = streaming()
    session.handle(Commit(2, (10,)), 1.0)
    assert session.handle(commit, 1.0)[0] == ev.Disconnect()
    assert session.state is LinkState.BACKING_OFF
    assert session.prefix.output == [10]


@pytest.mark.parametrize(("most", "every"), [(256, 8), (8, 8), (3, 3), (1, 1), (0, 1)])
def test_it_acknowledges_before_the_verifier_pauses(most: int, every: int) -> None:
    session = streaming(request=SILENT, limits=Limits(max_unreceived=most))
    answers = [messages(session.handle(Commit(2 + i, (10,)), 1.0)) for i in range(every)]
    assert answers == [[]] * (every - 1) + [[m.Received(2 + every, 2 + every)]]


def test_a_round_trip_is_measured_without_the_time_it_was_held() -> None:
    session = streaming(request=SILENT, limits=Limits(max_unreceived=1))
    session.handle(Commit(2, (10,)), 1.0)
    session.handle(Commit(3, (11,), echo=3, held_us=200_000), 1.5)
    assert session.estimates.rtt_s.get(0.0) == pytest.approx(0.3)


FIRST = replace(GREETING, fingerprint="fp-1")
OTHER = replace(GREETING, fingerprint="fp-2", limits=Limits(context_length=7))


def test_a_text_does_not_go_on_with_another_model_but_when_its_own_is_back() -> None:
    session = streaming(greeting=FIRST)
    session.handle(Commit(2, (10,)), 1.0)
    session.handle(ev.Tick(), 40.0)
    _, actions = reopened(session, OTHER)
    assert actions[:2] == (ev.Transmit(m.Cancel()), ev.Disconnect())
    assert session.limits.context_length != 7
    now, actions = reopened(session, FIRST)
    assert ev.Disconnect() not in actions
    session.handle(Commit(3, (11,)), now + 1.0)
    assert session.prefix.tokens[-2:] == [10, 11]


def test_a_text_whose_model_never_comes_back_fails_and_says_why() -> None:
    session = streaming(greeting=FIRST)
    session.handle(Commit(2, (10,)), 1.0)
    session.handle(ev.Tick(), 40.0)
    for _ in range(7):
        assert ev.Fail not in map(type, reopened(session, OTHER)[1])
    (fail,) = [one for one in reopened(session, OTHER)[1] if isinstance(one, ev.Fail)]
    assert fail.why == (
        "gave up on the verifier after 8 streams without a new token: the verifier serves"
        " 'big' (fp-2) now, but the text was begun by 'big' (fp-1)"
    )
    without_a_token = streaming(greeting=FIRST)
    without_a_token.handle(ev.Tick(), 40.0)
    assert ev.Disconnect() not in reopened(without_a_token, OTHER)[1]


def test_a_step_that_a_commit_overtook_is_matched_against_it() -> None:
    session = streaming(FixedPolicy(9, width=2))
    session.handle(Commit(2, (10, 11)), 0.1)
    session.handle(guess(10, 40), 0.2)
    assert len(session.tree.nodes) == 0
    assert (session.counters.tried, session.counters.hits) == (1, 1)
    session.handle(Commit(4, (12,)), 0.3)
    session.handle(guess(40, 12), 0.4)
    assert session.estimates.acceptance.hits[1] == 1.0


def test_a_drafter_with_nothing_to_say_rests_until_the_text_goes_on() -> None:
    session = streaming(request=NEVER)
    assert session.handle(ev.StepDone(()), 0.1) == (ev.Transmit(Draft(1, (), ())),)
    assert session.handle(Commit(2, (10,)), 0.2)[-1] == ev.StartStep(2, (10,), 1)


def test_a_drafter_that_failed_leaves_a_plain_stream() -> None:
    session = streaming(request=NEVER)
    assert session.handle(ev.StepFailed("no memory"), 0.1) == (ev.Transmit(Draft(1, (), ())),)
    assert not session.drafting
    (deliver, go_on) = session.handle(Commit(2, (10,)), 0.2)
    assert deliver == ev.Deliver(2, (10,), (DECODED,))
    assert go_on == ev.Transmit(Draft(1, (), ()))
    session.handle(ev.LinkDown("gone"), 1.0)
    session.handle(ev.Tick(), 9.0)
    (opening, *_) = messages(session.handle(ev.Connected(), 9.0))
    assert opening == replace(NEVER, committed=(10,), drafting=False)


def test_what_a_small_verifier_dropped_is_sent_again_when_there_is_room() -> None:
    session = new_session(PearlPolicy(9))
    session.handle(ev.Start(), 0.0)
    for token in (10, 11, 12, 13):
        session.handle(guess(token), 0.1)
    (_, draft) = messages(session.handle(ev.Connected(), 0.2))
    assert isinstance(draft, Draft)
    assert draft.tokens == (10, 11, 12, 13)
    small = replace(GREETING, limits=Limits(max_nodes_outstanding=2))
    assert messages(session.handle(small, 0.3)) == []
    (again,) = messages(session.handle(Commit(2, (10, 11, 12), accepted=2), 0.4))
    assert again == Draft(4, (0,), (13,), 5, CommittedPrefix(PROMPT, (10, 11, 12)).hash_at(5))


@pytest.mark.parametrize("event", [guess(5), ev.Connected()])
def test_answers_without_a_question_are_bugs(event: ev.DraftEvent) -> None:
    with pytest.raises(AssertionError):
        new_session().handle(event, 0.0)


def test_nothing_happens_after_the_end() -> None:
    session = streaming()
    actions = session.handle(Commit(2, (10,), finish=FinishReason.STOP), 1.0)
    assert messages(actions) == [m.Received(3, 3)]  # the last commit is acknowledged
    assert actions[-2:] == (ev.Disconnect(), ev.Finish(FinishReason.STOP))
    late: list[ev.DraftEvent] = [
        ev.Start(),
        ev.Connected(),
        ev.LinkDown("x"),
        ev.Tick(),
        guess(5),
        GREETING,
        ev.Stop(),
    ]
    late += [Commit(3, (11,)), Fault(FaultCode.INTERNAL, "x")]
    for event in late:
        assert session.handle(event, 2.0) == ()
    assert (session.state, session.prefix.output) == (LinkState.DONE, [10])


HARDLY, OFTEN = math.log(0.001), math.log(0.2)


def test_choices_that_are_hardly_ever_right_are_kept_now_and_then() -> None:
    """Second choices of 0.001 were never right in 400 trials, those of 0.2 half the time. Step 16
    is the first at which all are kept."""
    session = streaming(policy=GoodputPolicy(2))
    for trial in range(400):
        session.estimates.guesses.add(1, HARDLY, hit=False)
        session.estimates.guesses.add(1, OFTEN, hit=trial % 2 == 0)
    kept = []
    for number in range(1, 18):
        logprob = OFTEN if number == 5 else HARDLY
        choices = (Candidate(100 + number, -0.1), Candidate(200 + number, logprob))
        before = len(session.tree.nodes)
        session.handle(ev.StepDone(choices), number * 0.01)
        kept.append(len(session.tree.nodes) - before)
    assert [number for number, count in enumerate(kept, 1) if count == 2] == [5, 16]
    assert set(kept) == {1, 2}


POLICY = ReconnectPolicy(
    first_s=0.1, longest_s=1.0, give_up_first_s=5.0, give_up_s=20.0, answer_s=1.0
)


def _delays(seed: int, had_a_stream: bool = False) -> list[float]:
    """Until it gives up, when every attempt fails at once."""
    link = LinkKeeper(POLICY, seed, DraftCounters())
    link.connect(0.0)
    if had_a_stream:
        link.connected(REQUEST)
        link.opened(REQUEST, GREETING, 0.0)
    delays, now = list[float](), 0.0
    while link.down(LinkDown("no"), now) == []:
        assert link.deadline is not None
        delays.append(link.deadline - now)
        now = link.deadline
        link.tick(now)
    return delays


@pytest.mark.parametrize("seed", range(5))
def test_delays_double_with_jitter_and_are_bounded(seed: int) -> None:
    delays = _delays(seed)
    for attempt, delay_s in enumerate(delays):
        longest_s = min(0.1 * 2**attempt, 1.0)
        assert longest_s / 2 - 1e-9 <= delay_s <= longest_s + 1e-9
    assert 4.0 <= sum(delays) <= 5.0
    assert 19.0 <= sum(_delays(seed, had_a_stream=True)) <= 20.0


def test_devices_do_not_come_back_together() -> None:
    assert len({_delays(seed)[0] for seed in range(50)}) == 50


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_times_are_bounded_and_in_order(value: float) -> None:
    for field in fields(ReconnectPolicy):
        with pytest.raises(ValueError, match=rf"^{field.name} is {value}, but must be in \["):
            replace(POLICY, **{field.name: value})  # type: ignore[arg-type] # one is a count
    with pytest.raises(ValueError, match=r"first_s is 2.0, .* at most longest_s, which is 1.0"):
        replace(POLICY, first_s=2.0)
    with pytest.raises(ValueError, match=r"silence_s is 301.0, .* at most progress_s"):
        replace(POLICY, silence_s=301.0)
