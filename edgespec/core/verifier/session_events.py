"""Events, actions and states of a ``VerifySession``."""

from __future__ import annotations

from enum import Enum
from typing import Final

from edgespec.core.protocol.messages import Cancel, Downlink, Draft, Open, Received
from edgespec.core.protocol.work import NodeScore, PassRequest, TokenScore
from edgespec.core.statically_frozen import statically_frozen
from edgespec.core.verifier.draft_round import Chain, ChainStart


@statically_frozen
class Attach:
    """A stream of this session opened: the first one, or one after a broken link."""

    request: Open


@statically_frozen
class Detach:
    """The session's stream is gone."""


@statically_frozen
class Offer:
    """An offer of ``max_rows`` rows in a pass that would start now."""

    max_rows: int
    pass_s: float
    least_chance: float = 0.0
    """The price of a row: draft nodes less likely to be accepted do not pay for their row."""
    runs_anyway: bool = False
    """True if others take part in the pass, so that it starts now even if this session declines."""
    began_at: float | None = None
    """Time when the server model began to draft before this pass; None if it did not."""
    least_lookup_chance: float | None = None
    """The price of a row for the verifier's own nodes; None means ``least_chance``."""


@statically_frozen
class DraftOffer:
    """An offer to let the server model draft for the session before it has this ``Offer``."""

    offer: Offer
    is_alone: bool = False
    """True if no other session would have a part in the round or waits for its end."""


@statically_frozen
class Drafted:
    """The result of a round of the server model for the session."""

    chain: Chain


@statically_frozen
class PassDone:
    """The session's part of a pass has ended; ``targets`` are the target's tokens."""

    targets: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()
    """Scores of the committed tokens; all fields but ``row_price`` are as in ``PassResult``."""
    row_price: int = 0
    """The price of a row now, in thousandths (``Commit.row_price``); 0 if there is none to
    report."""
    guesses: tuple[int, ...] = ()
    node_scores: tuple[NodeScore, ...] = ()


@statically_frozen
class PassFailed:
    """The pass could not be run; nothing was cached or sampled."""


@statically_frozen
class Cached:
    """The target's cache holds the first ``length`` committed tokens, fewer than all.

    The length is above 0 if another session has computed them, and 0 if the session was evicted.
    This event only comes between passes.
    """

    length: int


@statically_frozen
class Stalled:
    """The device has owed an acknowledgement for ``waited_s`` seconds, which is too long."""

    waited_s: float


@statically_frozen
class SendKeepalive:
    """The device was sent nothing for a while because its session waits for room."""


StreamEvent = Attach | Detach | Draft | Received | Cancel | Stalled | SendKeepalive
PassEvent = Offer | DraftOffer | Drafted | PassDone | PassFailed | Cached
VerifyEvent = StreamEvent | PassEvent


@statically_frozen
class Send:
    """Send this message on the session's stream."""

    message: Downlink


@statically_frozen
class RunPass:
    """Take part in the pass that starts now; answers an ``Offer``."""

    request: PassRequest


@statically_frozen
class WantChain:
    """Take part in a round of the server model; answers a ``DraftOffer``."""

    start: ChainStart


@statically_frozen
class Keep:
    """Keep these nodes of the finished pass, which are committed; its other nodes can be freed."""

    nodes: tuple[int, ...]


@statically_frozen
class Hangup:
    """Close the stream; the session stays for its lease."""


VerifyAction = Send | RunPass | WantChain | Keep | Hangup


class VerifyState(Enum):
    READY = "ready"
    PASSING = "passing"
    FINISHED = "finished"

    # Members are looked up in every pass, and hashing their names would be a call in Python.
    __hash__ = object.__hash__


READY, PASSING, FINISHED = VerifyState


@statically_frozen
class RunningPass:
    """The session's part of the pass that runs."""

    request: PassRequest
    started_at: float
    queue_s: float
    """Seconds that the oldest of its nodes had waited."""


VERIFY_MOVES: Final[dict[tuple[VerifyState, VerifyState], str]] = {
    (READY, PASSING): "`Offer`, when a draft waits, the prompt is not cached or run-ahead says so",
    (PASSING, READY): "`PassDone` or `PassFailed`",
    (PASSING, FINISHED): (
        "`PassDone` with a stop id or a full output, `Cancel`, or a message refused for good"
    ),
    (READY, FINISHED): (
        "`Cancel`, a message refused for good, or `Attach` by a device that holds a full output"
    ),
}
