"""Events that a ``DraftSession`` handles, the actions that it returns, and its counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from edgespec.core.protocol.messages import (
    Commit,
    Fault,
    FaultCode,
    FinishReason,
    Opened,
    PicturesMissing,
    PrefixMissing,
    Uplink,
)
from edgespec.core.protocol.work import Candidate, TokenScore
from edgespec.core.statically_frozen import statically_frozen


class LinkState(Enum):
    """State of a ``DraftSession``; ``DRAFT_MOVES`` lists the transitions."""

    IDLE = "idle"
    CONNECTING = "connecting"
    STREAMING = "streaming"
    BACKING_OFF = "backing_off"
    DONE = "done"


IDLE, CONNECTING, STREAMING, BACKING_OFF, DONE = LinkState

DRAFT_MOVES: Final[dict[tuple[LinkState, LinkState], str]] = {
    (IDLE, CONNECTING): "`Start`",
    (CONNECTING, STREAMING): "`Connected`",
    (CONNECTING, BACKING_OFF): "`LinkDown`, or `Tick` when nobody answers in time",
    (STREAMING, BACKING_OFF): (
        "`LinkDown`, a retryable `Fault`, a `Commit` that does not continue, or `Tick` when the "
        "verifier does not greet in time or has fallen silent"
    ),
    (BACKING_OFF, CONNECTING): "`Tick` after the back-off",
    (IDLE, DONE): "`Stop`",
    (CONNECTING, DONE): "`Stop`, or giving up",
    (STREAMING, DONE): (
        "a `Commit` with a finish or beyond the bounds, `Stop`, a final `Fault`, `Tick` when no "
        "token comes, or giving up"
    ),
    (BACKING_OFF, DONE): "`Stop`",
}
"""All transitions of a ``DraftSession``, with their causes."""


class TokenKind(Enum):
    """Origin of a delivered token."""

    ACCEPTED = "accepted"
    """The device drafted the token and the target chose the same one."""
    REPLACED = "replaced"
    """The device drafted the token, and a relaxed rule accepted it in place of the target's own:
    LOSSY."""
    CORRECTED = "corrected"
    """The device had sent a draft for this position, and the target chose another token."""
    DECODED = "decoded"
    """The target's own token where no draft was: a bonus after a run of accepted ones, or
    run-ahead."""
    LOCAL = "local"
    """A model of the device wrote the token by itself, because no verifier could be reached. The
    target has not seen it."""


# --- events ---------------------------------------------------------------------------------


@statically_frozen
class Start:
    """The generation begins: connect, and draft on the prompt meanwhile."""


@statically_frozen
class Connected:
    """The stream that ``Connect`` requested is open. ``verifier`` is the name of its other end.
    What that end keeps of earlier texts is noted under it."""

    verifier: str = ""


@statically_frozen
class LinkDown:
    """The stream ended or could not be opened. ``retryable`` False: no other stream would fare
    better.

    ``again_s`` is when to try again. 0: at once, because there is another verifier; a positive
    number: not before that many seconds; None: after the usual wait."""

    why: str
    retryable: bool = True
    again_s: float | None = None


@statically_frozen
class StepDone:
    """The draft step finished with these candidates, best first."""

    candidates: tuple[Candidate, ...]
    further: tuple[tuple[Candidate, ...], ...] = ()
    """Candidates of the positions behind the next one, place by place, if the step was to offer
    some."""


@statically_frozen
class StepFailed:
    """The drafter failed and cannot go on; the session goes on without drafts."""

    why: str


@statically_frozen
class Stop:
    """The user needs no more tokens, or a stop string was found."""

    reason: FinishReason = FinishReason.CANCELLED


@statically_frozen
class Tick:
    """The deadline was reached."""


DraftEvent = (
    Start
    | Connected
    | LinkDown
    | StepDone
    | StepFailed
    | Stop
    | Tick
    | Opened
    | Commit
    | Fault
    | PrefixMissing
    | PicturesMissing
)


# --- actions --------------------------------------------------------------------------------


@statically_frozen
class Connect:
    """Open a stream. The driver answers with ``Connected`` or ``LinkDown``."""


@statically_frozen
class Disconnect:
    """Close the stream. No later message of it may reach the session."""


@statically_frozen
class Transmit:
    """Send this message on the stream, in order."""

    message: Uplink


@statically_frozen
class StartStep:
    """Run the drafter (``ports.Drafter.step``). The driver answers with ``StepDone`` or
    ``StepFailed``."""

    keep_length: int
    feed: tuple[int, ...]
    width: int
    places: int = 1
    """Consecutive positions to draft for; more than 1 for a parallel draft only
    (``ports.ParallelDrafter``)."""


@statically_frozen
class Deliver:
    """Committed tokens for the user. Each token is delivered once, in order."""

    position: int
    tokens: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    logprobs: tuple[TokenScore, ...] = ()
    """Scores, one for each token, or none if the verifier sent none."""
    predicted: tuple[int, ...] = ()
    """Indices in ``tokens`` of accepted draft nodes that the prediction had offered."""


@statically_frozen
class Finish:
    """The generation is complete."""

    reason: FinishReason


@statically_frozen
class Fail:
    """The generation cannot be completed. Tokens that were delivered stay valid."""

    why: str
    code: FaultCode | None = None
    """The fault that the verifier sent last, or None if it sent none."""
    retry_after_s: float = 0.0
    """Seconds after which that fault asked to try again."""
    is_disconnected: bool = False
    """The verifier could not be reached, or the connection to it was lost."""


DraftAction = Connect | Disconnect | Transmit | StartStep | Deliver | Finish | Fail


@dataclass(slots=True)
class DraftCounters:
    """Counters of a session, over all its streams."""

    steps: int = 0
    """Draft steps that finished without failure."""
    sent: int = 0
    """Nodes sent; a node that is sent again on a new stream counts again."""
    committed: int = 0
    """Committed tokens that were delivered to the user."""
    accepted: int = 0
    """Committed tokens that the device had drafted."""
    replaced: int = 0
    """Committed tokens that a relaxed rule accepted in place of the target's own."""
    predicted_sent: int = 0
    """Nodes sent that the prediction had offered; a node that is sent again does not count again.
    """
    predicted_right: int = 0
    """Nodes of ``predicted_sent`` whose token was committed, in time or not."""
    predicted_accepted: int = 0
    """Tokens of ``accepted`` that the prediction had offered."""
    corrected: int = 0
    """Committed tokens at positions where a sent draft was wrong."""
    passes: int = 0
    """Passes that the verifier ran for this session, as far as it reported them."""
    rows: int = 0
    """Draft nodes in those passes."""
    tried: int = 0
    """Positions that were decided while the tree had a candidate there."""
    hits: int = 0
    """Decided positions at which the first candidate was right."""
    prompt_read: int = 0
    """Prompt tokens that the verifier reported as computed; 0: not reported."""
    rested: int = 0
    """Tokens that arrived while a draft model was there but nothing was drafted and no sent node
    was undecided, because drafting would not have paid."""
    stale: int = 0
    """Nodes that the verifier dropped: their parent was dead or unknown, or they did not agree."""
    reconnects: int = 0
    named_tokens: int = 0
    """Ids of prompts and outputs that were not sent, because the verifier had them
    (``kept_prefixes.py``)."""
    picture_tokens: int = 0
    """Tokens that the pictures of the prompt take in the target's context, less their placeholders.
    0 until the verifier has read them, and always with one that does not report it."""
    picture_misses: int = 0
    """Pictures that a verifier did not have, so that they were sent."""
    picture_bytes: int = 0
    """Bytes of pictures that were sent."""
    prefix_misses: int = 0
    """Beginnings that the verifier did not have, so that their ids were sent a round trip later."""
    draft_failure: str = ""
    """The drafter's error that ended drafting before the generation did; empty if there was
    none."""
    queue_s: float = 0.0
    """Total time that sent drafts waited at the verifier for the passes that took them."""
    verify_s: float = 0.0
    """Total duration of the passes that brought tokens."""

    @property
    def acceptance(self) -> float | None:
        """The acceptance rate, hits / tried; None before a draft was judged."""
        return self.hits / self.tried if self.tried else None

    @property
    def wasted(self) -> int:
        """Sent nodes that did not become tokens by being verified. A verifier may accept one sent
        token at several places (``core/verifier/kept_drafts.py``), but never wastes less than 0."""
        return max(0, self.sent - self.accepted)

    @property
    def predicted_wrong(self) -> int:
        """Nodes of the prediction that were sent and whose token was not committed at their place,
        or not yet."""
        return self.predicted_sent - self.predicted_right

    def subtract_undelivered(self, kinds: Sequence[TokenKind], predicted: int = 0) -> None:
        """Remove committed tokens of these kinds from the counters because the user did not get
        them. The prediction had offered ``predicted`` tokens among them.

        They came behind a stop string, and how many do depends on the drafts."""
        self.predicted_accepted -= predicted
        self.committed -= len(kinds)
        replaced = kinds.count(TokenKind.REPLACED)
        self.replaced -= replaced
        self.accepted -= kinds.count(TokenKind.ACCEPTED) + replaced
        self.corrected -= kinds.count(TokenKind.CORRECTED)
