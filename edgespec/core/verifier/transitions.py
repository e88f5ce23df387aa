"""Every move of a ``VerifySession`` between its states, with its causes."""

from __future__ import annotations

from typing import Final

from edgespec.core.verifier.session_events import VerifyState

_V = VerifyState

VERIFY_MOVES: Final[dict[tuple[VerifyState, VerifyState], str]] = {
    (
        _V.READY,
        _V.PASSING,
    ): "`Offer`, when a draft waits, the prompt is not cached or run-ahead says so",
    (_V.PASSING, _V.READY): "`PassDone` or `PassFailed`",
    (_V.PASSING, _V.FINISHED): (
        "`PassDone` with a stop id or a full output, `Cancel`, or a message refused for good"
    ),
    (_V.READY, _V.FINISHED): (
        "`Cancel`, a message refused for good, or `Attach` by a device that holds a full output"
    ),
}
