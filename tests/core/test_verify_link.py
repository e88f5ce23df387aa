"""The verifier's session and its link: leases, resuming, flow control, drafts that do not fit.

Oracle: a fixed text (``fixed_text``), so every answer can be written down.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    Draft,
    FaultCode,
    FinishReason,
    Open,
    Opened,
    Received,
    RunAhead,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.session import same_generation
from edgespec.core.verifier.session_events import (
    Attach,
    Detach,
    Hangup,
    Keep,
    Offer,
    PassDone,
    Send,
    Stalled,
)
from tests.core.fixed_text import (
    LIMITS,
    PROMPT,
    REQUEST,
    TEXT,
    chain,
    commit_in,
    fault_in,
    new_session,
    offer,
    run_pass,
    targets_of,
)

# --- the link ---------------------------------------------------------------------------------


def test_the_lease_runs_from_the_broken_link() -> None:
    session = new_session()
    session.handle(Detach(), 5.0)
    assert session.deadline == 15.0
    session.handle(Detach(), 7.0)
    assert (session.over(14.9), session.over(15.0)) == (False, True)
    session.handle(Attach(REQUEST), 8.0)
    assert session.attached
    assert not session.over(99.0)
    assert offer(session, now=99.0).feed == PROMPT


def test_detached_it_starts_no_pass_but_ends_the_running_one() -> None:
    session = new_session()
    request = offer(session)
    session.handle(Detach(), 1.0)
    assert session.handle(PassDone(targets_of(request)), 1.0) == (Keep(()),)
    assert session.handle(Offer(64, 0.02), 1.0) == ()
    assert session.prefix.output == [10]


@pytest.mark.parametrize("held", range(4))
def test_resume_sends_what_the_device_lacks(held: int) -> None:
    session = new_session(replace(REQUEST, run_ahead=RunAhead.ALWAYS))
    for _ in range(3):
        run_pass(session)
    again = replace(session.request, committed=TEXT[2 : 2 + held])
    assert same_generation(session.request, again, session.prefix)
    actions = session.handle(Attach(again), 2.0)
    assert actions[0] == Send(Opened(LIMITS, "big", 2 + held))
    missing = (Send(Commit(2 + held, TEXT[2 + held : 5])),) if held < 3 else ()
    assert actions[1:] == missing


def test_resume_of_a_finished_session_sends_its_end() -> None:
    request = replace(REQUEST, sampling=SamplingParams(max_tokens=1))
    session = new_session(request)
    run_pass(session)
    session.handle(Detach(), 2.0)
    greeting, send = session.handle(Attach(request), 3.0)
    assert send == Send(Commit(2, (10,), finish=FinishReason.LENGTH))
    everything = replace(request, committed=(10,))
    greeting, send = session.handle(Attach(everything), 3.0)
    assert greeting == Send(Opened(LIMITS, "big", 3))
    assert send == Send(Commit(3, (), finish=FinishReason.LENGTH))
    assert session.over(3.0)


def test_a_finished_stream_ends_well_though_its_end_was_not_acknowledged() -> None:
    request = replace(REQUEST, sampling=SamplingParams(max_tokens=1))
    session = new_session(request)
    run_pass(session)
    assert session.handle(Stalled(5.0), 6.0) == (Hangup(),)
    assert not session.over(15.9)  # the device may come back for what it has missed
    _, send = session.handle(Attach(request), 10.0)
    assert send == Send(Commit(2, (10,), finish=FinishReason.LENGTH))


def test_a_device_that_cancels_hears_the_end_once() -> None:
    session = new_session()
    run_pass(session)
    assert commit_in(session.handle(Cancel(), 2.0)) == Commit(3, (), finish=FinishReason.CANCELLED)
    assert session.over(2.0)
    assert session.handle(Cancel(), 2.0) == ()
    finished = new_session(replace(REQUEST, sampling=SamplingParams(max_tokens=1)))
    run_pass(finished)
    assert finished.handle(Cancel(), 2.0) == ()  # it has heard of another end


@pytest.mark.parametrize(
    ("stops", "held", "reason"),
    [((), 9, FinishReason.LENGTH), ((12,), 3, FinishReason.STOP), ((19,), 3, None)],
)
def test_a_new_session_may_be_at_its_end_already(
    stops: tuple[int, ...], held: int, reason: FinishReason | None
) -> None:
    sampling = SamplingParams(max_tokens=9, stop_token_ids=stops)
    request = replace(REQUEST, sampling=sampling, committed=TEXT[2 : 2 + held])
    assert new_session(request).finish is reason


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, prompt=(1, 2)),
        replace(REQUEST, sampling=SamplingParams(max_tokens=9, seed=1)),
        replace(REQUEST, committed=(11,)),
        replace(REQUEST, committed=(10, 11)),
        replace(REQUEST, rule="lossy"),
        replace(REQUEST, run_ahead=RunAhead.NEVER),
    ],
)
def test_another_text_is_no_resume(other: Open) -> None:
    session = new_session()
    run_pass(session)
    assert not same_generation(session.request, other, session.prefix)


def test_attach_forgets_the_tree_and_its_ids() -> None:
    session = new_session()
    run_pass(session)
    session.handle(chain(session, 11, 12), 1.0)
    session.handle(Attach(replace(REQUEST, committed=(10,))), 2.0)
    assert len(session.inbox.tree.nodes) == 0
    session.handle(chain(session, 11), 2.0)
    assert offer(session).tokens == (11,)


def test_the_verifier_pauses_until_tokens_are_received() -> None:
    request = replace(REQUEST, run_ahead=RunAhead.ALWAYS)
    session = new_session(request, replace(LIMITS, max_unreceived=2))
    for _ in range(3):
        run_pass(session)
    assert session.handle(Offer(64, 0.02), 1.0) == ()
    session.handle(Received(2, 0), 1.0)
    assert session.handle(Offer(64, 0.02), 1.0) == ()
    session.handle(Received(3, 0), 1.0)
    assert offer(session).feed == (12,)


def test_echo_comes_back_once_with_the_time_it_was_held() -> None:
    session = new_session(replace(REQUEST, run_ahead=RunAhead.ALWAYS))
    run_pass(session)
    session.handle(Received(3, 77), 2.0)
    commit = commit_in(run_pass(session, now=2.5))
    assert (commit.echo, commit.held_us) == (77, 500_000)
    assert commit_in(run_pass(session, now=3.0)).echo == 0


# --- drafts that do not fit -------------------------------------------------------------------


def test_resync_when_the_base_is_ahead_or_the_hash_differs() -> None:
    session = new_session()
    run_pass(session)
    ahead = fault_in(session.handle(Draft(1, (0,), (11,), 4, 0), 1.0))
    assert (ahead.code, session.attached) == (FaultCode.RESYNC, False)
    assert "position 4, but only 3" in ahead.message
    session = new_session()
    other = fault_in(session.handle(Draft(1, (0,), (11,), 2, 12345), 1.0))
    assert other.code is FaultCode.RESYNC
    assert "first 2 tokens differ" in other.message
    received = fault_in(new_session().handle(Received(3, 0), 1.0))
    assert received.code is FaultCode.RESYNC
    assert "position 3 is beyond the 2 known" in received.message


@pytest.mark.parametrize("token", [-1, 50])
def test_a_node_outside_the_vocabulary_is_wasted_with_all_behind_it(token: int) -> None:
    """A draft whose vocabulary is padded beyond the target's may propose such an id."""
    session = new_session()
    run_pass(session)
    chain_of_three = replace(chain(session, 40, 41, 42), tokens=(40, token, 42))
    assert session.handle(chain_of_three, 1.0) == ()
    request = offer(session)
    assert request.tokens == (40,)
    assert session.inbox.take_stale() == 2


def test_nodes_behind_unknown_or_dead_parents_are_counted() -> None:
    session = new_session()
    run_pass(session)
    session.handle(chain(session, 40, 41), 1.0)
    assert commit_in(run_pass(session)).stale == 0
    session.handle(Draft(3, (2, 3, 99), (12, 13, 14)), 1.0)
    session.handle(chain(session, 12, first=6), 1.0)
    session.handle(chain(session, 12, first=6), 1.0)
    assert commit_in(run_pass(session)).stale == 4
    assert session.counters.stale == 4


def test_nodes_beyond_the_limit_are_dropped_and_may_come_again() -> None:
    session = new_session(limits=replace(LIMITS, max_nodes_outstanding=2))
    run_pass(session)
    session.handle(chain(session, 11, 12, 13, 14), 1.0)
    assert (len(session.inbox.tree.nodes), session.inbox.overflow) == (2, 2)
    run_pass(session)
    session.handle(Draft(3, (2, 3), (13, 14)), 1.0)
    assert offer(session).tokens == (14,)
