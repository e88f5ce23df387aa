"""Both sessions, in cases that would make long scripts (``device_scripts``, ``engine_scripts``).

The device's session: answers written by hand; for its back-off doubling delays, shortened by at
most a half, until a deadline. The verifier's session: one request for every bound, just inside and
just past it (a refusal names the value and the limit), and its passes on a fixed text, so every
answer can be written down. Random worlds test where texts end. Both: the state moves seen in random
worlds and a few scripted endings are exactly the moves in the tables; any other is an assertion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from enum import Enum

import pytest

from edgespec.core.device import events as de
from edgespec.core.device import events as ev
from edgespec.core.device import link_session
from edgespec.core.device.comparison_policies import FixedPolicy, WindowedPolicy
from edgespec.core.device.events import DraftCounters, LinkDown
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.link_session import LinkSession, ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.acceptance import ExactRule
from edgespec.core.protocol.checks import State, check_transition
from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.messages import Commit, Fault, FaultCode, Limits
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import TextTables
from edgespec.core.protocol.work import Candidate
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import session as verify_session
from edgespec.core.verifier import session_events as se
from edgespec.core.verifier.run_ahead import always_run_ahead
from edgespec.core.verifier.session import VerifySession
from edgespec.verifier.constraint_reader import GRAMMAR_WITHIN_S
from tests.core import scenes
from tests.core.draft_scripts import (
    GREETING,
    RECONNECT,
    REQUEST,
    finish_step,
    messages_in,
    new_session,
    new_streaming_session,
)
from tests.sim.random_worlds import play

SILENT = replace(REQUEST, drafting=False)


def test_beyond_the_drafts_context_only_lookup_drafts() -> None:
    """The draft model's last step is for the last position within its context."""
    request = replace(
        REQUEST, prompt=(7, 8, 9, 7, 8, 9, 7, 8), sampling=SamplingParams(max_tokens=99)
    )
    for context, is_within in ((9, True), (8, False)):
        session = DraftSession(
            request, GoodputPolicy(), RECONNECT, context, text=TextTables(ngrams=True)
        )
        actions = session.handle(ev.Start(), 0.0)
        assert any(isinstance(one, ev.StartStep) for one in actions) is is_within
        session.handle(ev.Connected(), 0.0)
        actions = session.handle(replace(GREETING, position=8), 0.0)
        (draft,) = [one for one in messages_in(actions) if isinstance(one, m.Draft)]
        assert draft.tokens[:3] == (9, 7, 8)


def test_what_a_verifier_says_is_made_harmless() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\nno"
    for event in (Fault(FaultCode.INVALID, evil), ev.LinkDown(evil, retryable=False)):
        last = new_streaming_session().handle(event, 1.0)[-1]
        assert isinstance(last, ev.Fail)
        assert last.why == "?]0;owned??[2J no".replace("?", "\N{REPLACEMENT CHARACTER}")


def test_a_round_trip_is_measured_without_the_time_it_was_held() -> None:
    session = new_streaming_session(request=SILENT, limits=Limits(max_unreceived=1))
    session.handle(Commit(2, (10,)), 1.0)
    session.handle(Commit(3, (11,), echo=3, held_us=200_000), 1.5)
    assert session.estimates.rtt_s.get(0.0) == pytest.approx(0.3)


def test_a_step_that_a_commit_overtook_is_matched_against_it() -> None:
    session = new_streaming_session(FixedPolicy(9, width=2))
    session.handle(Commit(2, (10, 11)), 0.1)
    session.handle(finish_step(10, 40), 0.2)
    assert len(session.tree.nodes) == 0
    assert (session.counters.tried, session.counters.hits) == (1, 1)
    session.handle(Commit(4, (12,)), 0.3)
    session.handle(finish_step(40, 12), 0.4)
    assert session.estimates.acceptance.hits[1] == 1.0


@pytest.mark.parametrize("event", [finish_step(5), ev.Connected()])
def test_answers_without_a_question_are_bugs(event: ev.DraftEvent) -> None:
    with pytest.raises(AssertionError):
        new_session().handle(event, 0.0)


HARDLY, OFTEN = math.log(0.001), math.log(0.2)


def test_choices_that_are_hardly_ever_right_are_kept_now_and_then() -> None:
    """Second choices of 0.001 were never right in 400 trials, and second choices of 0.2 half the
    time. Step 16 is the first one at which all are kept."""
    session = new_streaming_session(policy=GoodputPolicy(2))
    session.estimates.rtt_s.add(0.03)  # the window holds two round trips
    for trial in range(400):
        session.estimates.guesses.alone.add(1, HARDLY, hit=False)
        session.estimates.guesses.alone.add(1, OFTEN, hit=trial % 2 == 0)
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


def _collect_delays(seed: int, had_a_stream: bool = False) -> list[float]:
    """Return the delays until the session gives up, if every attempt fails at once."""
    link = LinkSession(POLICY, seed, DraftCounters())
    link.connect(0.0)
    if had_a_stream:
        link.on_connected(REQUEST)
        link.on_opened(REQUEST, GREETING, 0.0)
    delays, now = list[float](), 0.0
    while link.on_link_down(LinkDown("no"), now) == []:
        assert link.deadline is not None
        delays.append(link.deadline - now)
        now = link.deadline
        link.on_tick(now)
    return delays


@pytest.mark.parametrize("seed", range(5))
def test_delays_double_with_jitter_and_are_bounded(seed: int) -> None:
    delays = _collect_delays(seed)
    for attempt, delay_s in enumerate(delays):
        longest_s = min(0.1 * 2**attempt, 1.0)
        assert longest_s / 2 - 1e-9 <= delay_s <= longest_s + 1e-9
    assert 4.0 <= sum(delays) <= 5.0
    assert 19.0 <= sum(_collect_delays(seed, had_a_stream=True)) <= 20.0


def test_devices_do_not_come_back_together() -> None:
    assert len({_collect_delays(seed)[0] for seed in range(50)}) == 50


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_times_are_bounded_and_in_order(value: float) -> None:
    for field in fields(ReconnectPolicy):
        with pytest.raises(ValueError, match=rf"^{field.name} is {value}, but must be in \["):
            replace(POLICY, **{field.name: value})  # type: ignore[arg-type] # one is a count
    assert (
        POLICY.grammar_s > GRAMMAR_WITHIN_S
    )  # a verifier may try a grammar for this long before it greets
    with pytest.raises(ValueError, match=r"first_s is 2.0, .* at most longest_s, which is 1.0"):
        replace(POLICY, first_s=2.0)
    with pytest.raises(ValueError, match=r"silence_s is 301.0, .* at most progress_s"):
        replace(POLICY, silence_s=301.0)


def test_what_is_too_unlikely_for_its_row_waits_for_a_better_pass() -> None:
    """Before anything is measured, first choices are right with 0.7 and second ones with 0.1."""
    session = scenes.new_session()
    scenes.run_pass(session)
    # The nodes have 0.7, its children 0.49 and 0.07, and 0.1 with a child of 0.07.
    nodes = (0, 1, 1, 0, 4), (11, 12, 40, 41, 42)
    session.handle(m.Draft(1, *nodes, 3, session.prefix.hash_at(3)), 1.0)
    for least_chance, tokens, parents in (
        (0.2, (11, 12), (-1, 0)),
        (0.09, (11, 12, 41), (-1, 0, -1)),
        (0.0, (11, 12, 40, 41, 42), (-1, 0, 0, -1, 3)),
    ):
        (action,) = session.handle(se.Offer(64, 0.02, least_chance), 1.0)
        assert isinstance(action, se.RunPass)
        assert (action.request.tokens, action.request.parents) == (tokens, parents)
        session.handle(se.PassFailed(), 1.0)


def test_a_session_asks_a_target_without_trees_for_a_chain() -> None:
    for trees, tokens, parents in (
        (True, (1, 2, 3, 4, 3), (-1, -1, 0, 0, 1)),
        (False, (1, 3), (-1, 0)),
    ):
        session = VerifySession(
            scenes.REQUEST,
            scenes.MODEL,
            m.Limits(64),
            ExactRule(),
            always_run_ahead,
            0.0,
            trees=trees,
        )
        session.handle(se.Attach(scenes.REQUEST), 0.0)
        draft = m.Draft(1, (0, 0, 1, 1, 2), (1, 2, 3, 4, 3), 2, session.prefix.hash_at(2))
        session.handle(draft, 0.0)
        request = scenes.offer(session)
        assert (request.tokens, request.parents) == (tokens, parents)


def test_a_result_without_a_pass_is_a_bug_but_behind_a_cancel() -> None:
    with pytest.raises(AssertionError):
        scenes.new_session().handle(se.PassDone((10,)), 1.0)
    session = scenes.new_session()
    scenes.offer(session)
    session.handle(m.Cancel(), 1.0)
    assert session.handle(se.PassDone((10,)), 1.0) == ()
    assert session.handle(se.Offer(64, 0.02), 1.0) == ()  # no row remains to be computed
    assert session.prefix.output == []


Move = tuple[Enum, Enum]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[Move]:
    moves: set[Move] = set()

    def watched(table: Mapping[tuple[State, State], str], source: State, target: State) -> State:
        moves.add((source, target))
        return check_transition(table, source, target)

    monkeypatch.setattr(link_session, "check_transition", watched)
    monkeypatch.setattr(verify_session, "check_transition", watched)
    return moves


def _play_device(*events: de.DraftEvent) -> None:
    request = m.Open("s", "", "", (1,))
    session = DraftSession(request, WindowedPolicy(), ReconnectPolicy(give_up_first_s=1.0), 100)
    for index, event in enumerate(events):
        session.handle(event, float(index))


def _play_endings() -> None:
    start, connected, down = de.Start(), de.Connected(), de.LinkDown("gone")
    _play_device(de.Stop())
    _play_device(start, de.Stop())
    _play_device(start, connected, de.Stop())
    _play_device(start, down, de.Stop())
    _play_device(start, connected, m.Fault(FaultCode.INVALID, "no"))
    scenes.run_pass(session := scenes.new_session())
    session.handle(m.Cancel(), 1.0)
    session = scenes.new_session()
    session.handle(se.Offer(64, 0.02), 1.0)
    session.handle(m.Cancel(), 1.0)
    scenes.new_session(
        replace(scenes.REQUEST, sampling=SamplingParams(max_tokens=1), committed=(10,))
    )


def test_the_tables_hold_exactly_what_happens(seen: set[Move]) -> None:
    for seed in range(120):
        play(seed)
    _play_endings()
    changes = {(source, target) for source, target in seen if source is not target}
    assert changes == {*de.DRAFT_MOVES, *se.VERIFY_MOVES}
    ends = de.LinkState.DONE, se.VerifyState.FINISHED
    assert not [move for move in changes if move[0] in ends]


OWNERS = [ANYBODY, Credential("a"), Credential("b")]


@pytest.mark.parametrize("first_secret", [b"", b"x" * 16], ids=["no secret", "secret"])
@pytest.mark.parametrize("later_secret", [b"", b"x" * 16, b"y" * 16], ids=["none", "x", "y"])
@pytest.mark.parametrize("prompt", [scenes.PROMPT, (1, 2)], ids=["the same text", "another"])
@pytest.mark.parametrize("is_there", [True, False], ids=["attached", "gone"])
def test_a_session_is_for_its_own_credential_and_secret_alone(
    first_secret: bytes, later_secret: bytes, prompt: tuple[int, ...], is_there: bool
) -> None:
    """A peer with another credential or secret that names the session's id neither reads nor ends
    it, and its stream stays."""
    for owner in OWNERS:
        for other in OWNERS:
            engine = scenes.new_engine()
            request = replace(scenes.name_session("s"), session_secret=first_secret)
            engine.handle(ee.StreamOpened(1, request, credential=owner), 0.0)
            session = engine.sessions["s"]
            if not is_there:
                engine.handle(ee.StreamLost(1), 0.5)
            later = replace(request, session_secret=later_secret, prompt=prompt)
            said = engine.handle(ee.StreamOpened(2, later, credential=other), 1.0)
            proven = owner == other and first_secret == later_secret
            if proven and prompt == request.prompt:
                assert engine.sessions["s"] is session
                assert not scenes.faults_in(said)
            elif proven and first_secret:
                assert engine.sessions["s"] is not session
                assert scenes.faults_in(said) == ([(1, FaultCode.INVALID)] if is_there else [])
            else:
                assert engine.sessions["s"] is session
                assert scenes.faults_in(said) == [(2, FaultCode.INVALID)]
                assert session.attached is is_there
                engine.handle(ee.StreamMessage(2, m.Cancel()), 2.0)
                assert session.finish is None
