"""The tables of state moves against what the sessions do.

Oracle: the moves seen in random worlds and a few scripted endings are exactly those in the tables;
any other move is an assertion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

import pytest

from edgespec.core.device import link_keeper
from edgespec.core.device.events import (
    DRAFT_MOVES,
    Connected,
    DraftEvent,
    LinkDown,
    LinkState,
    Start,
    Stop,
)
from edgespec.core.device.link_keeper import ReconnectPolicy
from edgespec.core.device.policy import WindowedPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.checks import State, transition
from edgespec.core.protocol.messages import Cancel, Fault, FaultCode, Open, Received
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import Candidate
from edgespec.core.verifier import session as verify_session
from edgespec.core.verifier.session_events import VERIFY_MOVES, Offer, VerifyState
from tests.core.scenes import REQUEST, new_session, run_pass
from tests.sim.random_worlds import play

WORLDS = 120

Move = tuple[Enum, Enum]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[Move]:
    moves: set[Move] = set()

    def watched(table: Mapping[tuple[State, State], str], source: State, target: State) -> State:
        moves.add((source, target))
        return transition(table, source, target)

    monkeypatch.setattr(link_keeper, "transition", watched)
    monkeypatch.setattr(verify_session, "transition", watched)
    return moves


def _device(*events: DraftEvent) -> None:
    request = Open("s", "", "", (1,))
    session = DraftSession(request, WindowedPolicy(), ReconnectPolicy(give_up_first_s=1.0), 100)
    for index, event in enumerate(events):
        session.handle(event, float(index))


def _endings() -> None:
    start, connected, down = Start(), Connected(), LinkDown("gone")
    _device(Stop())
    _device(start, Stop())
    _device(start, connected, Stop())
    _device(start, down, Stop())
    _device(start, connected, Fault(FaultCode.INVALID, "no"))
    run_pass(session := new_session())
    session.handle(Cancel(), 1.0)
    session = new_session()
    session.handle(Offer(64, 0.02), 1.0)
    session.handle(Cancel(), 1.0)
    new_session(replace(REQUEST, sampling=SamplingParams(max_tokens=1), committed=(10,)))


def test_the_tables_hold_exactly_what_happens(seen: set[Move]) -> None:
    for seed in range(WORLDS):
        play(seed)
    _endings()
    changes = {(source, target) for source, target in seen if source is not target}
    assert changes == {*DRAFT_MOVES, *VERIFY_MOVES}


@pytest.mark.parametrize("end", [LinkState.DONE, VerifyState.FINISHED])
def test_the_end_is_the_end(end: Enum) -> None:
    assert not [move for move in (*DRAFT_MOVES, *VERIFY_MOVES) if move[0] is end]


# --- what a ``value`` promises ----------------------------------------------------------------


def test_values_are_equal_by_their_fields_and_have_nothing_else() -> None:
    assert Received(3, 4) == Received(3, 4) != Received(4, 3)
    assert len({Received(3, 4), Received(3, 4), Candidate(3, 4.0)}) == 2
    assert not hasattr(Received(3, 4), "__dict__")


def test_the_type_checker_refuses_a_change() -> None:
    received = Received(3, 4)
    received.position = 5  # type: ignore[misc] # frozen for the type checker alone
    assert received == Received(5, 4)
