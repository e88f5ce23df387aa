"""The table holds every move of a ``DraftSession`` between its states, with its causes."""

from __future__ import annotations

from typing import Final

from edgespec.core.device.events import LinkState

_L = LinkState

DRAFT_MOVES: Final[dict[tuple[LinkState, LinkState], str]] = {
    (_L.IDLE, _L.CONNECTING): "`Start`",
    (_L.CONNECTING, _L.STREAMING): "`Connected`",
    (_L.CONNECTING, _L.BACKING_OFF): "`LinkDown`, or `Tick` when nobody answers in time",
    (_L.STREAMING, _L.BACKING_OFF): (
        "`LinkDown`, a retryable `Fault`, a `Commit` that does not continue, or `Tick` when the "
        "verifier does not greet in time or has fallen silent"
    ),
    (_L.BACKING_OFF, _L.CONNECTING): "`Tick` after the back-off",
    (_L.IDLE, _L.DONE): "`Stop`",
    (_L.CONNECTING, _L.DONE): "`Stop`, or giving up",
    (_L.STREAMING, _L.DONE): (
        "a `Commit` with a finish or beyond the bounds, `Stop`, a final `Fault`, `Tick` when no "
        "token comes, or giving up"
    ),
    (_L.BACKING_OFF, _L.DONE): "`Stop`",
}
