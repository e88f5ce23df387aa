"""What can happen to a ``VerifySession``, what it can ask for, and what it can be."""

from __future__ import annotations

from enum import Enum
from typing import Final

from edgespec.core.protocol.messages import Cancel, Downlink, Draft, Open, Received
from edgespec.core.protocol.work import NodeScore, PassRequest, TokenScore
from edgespec.core.statically_frozen import statically_frozen
from edgespec.core.verifier.own_drafts import Chain, ChainStart


@statically_frozen
class Attach:
    """A stream of this session opened (the first, or one after a broken link)."""

    request: Open


@statically_frozen
class Detach:
    """Its stream is gone."""


@statically_frozen
class Offer:
    """There is room for ``max_rows`` rows in a pass that would start now."""

    max_rows: int
    pass_s: float
    least_chance: float = 0.0
    """Draft nodes less likely to be right do not pay for their row."""
    runs_anyway: bool = False
    """Others take part in it: it starts now, whoever declines."""
    began_at: float | None = None
    """When the verifier's own model began to draft before this pass; None: it did not."""
    least_guess: float | None = None
    """The same as ``least_chance`` for the verifier's own guesses; None: it is that."""


@statically_frozen
class DraftOffer:
    """The verifier's own draft model may guess for the session before it has this offer."""

    offer: Offer


@statically_frozen
class Drafted:
    """What a round of the verifier's own draft model did for the session."""

    chain: Chain


@statically_frozen
class PassDone:
    targets: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()
    """Both as in ``PassResult``, and so are ``guesses`` and ``node_scores``."""
    row_price: int = 0
    """What a row costs now, in thousandths (``Commit.row_price``); 0: nothing to tell."""
    guesses: tuple[int, ...] = ()
    node_scores: tuple[NodeScore, ...] = ()


@statically_frozen
class PassFailed:
    """The pass could not be run; nothing was cached or sampled."""


@statically_frozen
class Cached:
    """The target's cache holds the first ``length`` committed tokens, fewer than all, since another
    session has computed them; 0: it was evicted. Only between passes."""

    length: int


@statically_frozen
class Stalled:
    """The device has not acknowledged for too long: ``waited_s`` seconds."""

    waited_s: float


@statically_frozen
class SayAlive:
    """The device has heard nothing for a while, because its session waits for room."""


StreamEvent = Attach | Detach | Draft | Received | Cancel | Stalled | SayAlive
PassEvent = Offer | DraftOffer | Drafted | PassDone | PassFailed | Cached
VerifyEvent = StreamEvent | PassEvent


@statically_frozen
class Send:
    """Hand this message to the session's stream."""

    message: Downlink


@statically_frozen
class RunPass:
    """Take part in the pass that starts now; answers an ``Offer``."""

    request: PassRequest


@statically_frozen
class WantChain:
    """Take part in a round; answers a ``DraftOffer``."""

    start: ChainStart


@statically_frozen
class Keep:
    """These nodes of the finished pass became committed; its other nodes can be freed."""

    nodes: tuple[int, ...]


@statically_frozen
class Hangup:
    """End the stream; the session stays for its lease."""


VerifyAction = Send | RunPass | WantChain | Keep | Hangup


class VerifyState(Enum):
    READY = "ready"
    PASSING = "passing"
    FINISHED = "finished"

    # Members are looked up at every pass; the hash of their names would be a call in Python.
    __hash__ = object.__hash__


READY, PASSING, FINISHED = VerifyState


@statically_frozen
class RunningPass:
    request: PassRequest
    started_at: float
    queue_s: float
    """How long the oldest of its nodes had waited."""


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
