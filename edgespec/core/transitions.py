"""Every move of the two sessions between their states, with its causes.

The sessions ask ``moved`` for each change of state, so a move that is not in the table is an
assertion, and the tables in ``docs/session-states.md`` are drawn from here.
"""

from __future__ import annotations

from typing import Final, TypeVar

from edgespec.core.draft_events import LinkState
from edgespec.core.verify_events import VerifyState

State = TypeVar("State", LinkState, VerifyState)

_L, _V = LinkState, VerifyState

DRAFT_MOVES: Final[dict[tuple[LinkState, LinkState], str]] = {
    (_L.IDLE, _L.CONNECTING): "`Start`",
    (_L.CONNECTING, _L.STREAMING): "`Connected`",
    (_L.CONNECTING, _L.BACKING_OFF): "`LinkDown`, or `Tick` when nobody answers in time",
    (_L.STREAMING, _L.BACKING_OFF): (
        "`LinkDown`, a retryable `Fault`, a `Commit` that does not continue, or `Tick` when the "
        "verifier does not greet in time"
    ),
    (_L.BACKING_OFF, _L.CONNECTING): "`Tick` after the back-off",
    (_L.IDLE, _L.DONE): "`Stop`",
    (_L.CONNECTING, _L.DONE): "`Stop`, or giving up",
    (_L.STREAMING, _L.DONE): "a `Commit` with a finish, `Stop`, a final `Fault`, or giving up",
    (_L.BACKING_OFF, _L.DONE): "`Stop`",
}

VERIFY_MOVES: Final[dict[tuple[VerifyState, VerifyState], str]] = {
    (
        _V.READY,
        _V.PASSING,
    ): "`Offer`, when a draft waits, the prompt is not cached or run-ahead says so",
    (_V.PASSING, _V.READY): "`PassDone` or `PassFailed`",
    (_V.PASSING, _V.FINISHED): "`PassDone` with a stop id or a full output, or `Cancel`",
    (_V.READY, _V.FINISHED): "`Cancel`, or `Attach` by a device that holds a full output",
}


_MOVES: Final[frozenset[tuple[object, object]]] = frozenset((*DRAFT_MOVES, *VERIFY_MOVES))


def moved(source: State, target: State) -> State:
    """``target``, after checking that the move is in a table; staying is always allowed."""
    assert source is target or (source, target) in _MOVES, f"{source} -> {target}"
    return target
