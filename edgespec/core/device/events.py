"""These events can happen to a ``DraftSession``; it answers with these actions, and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from edgespec.core.protocol.messages import Commit, Fault, FaultCode, FinishReason, Opened, Uplink
from edgespec.core.protocol.work import Candidate, TokenScore
from edgespec.core.statically_frozen import statically_frozen


class LinkState(Enum):
    """Where a ``DraftSession`` is; the moves stand in ``DRAFT_MOVES``."""

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
"""Every move of a ``DraftSession``, with its causes."""


class TokenKind(Enum):
    """How a delivered token came about."""

    ACCEPTED = "accepted"
    """Drafted here, verified there."""
    REPLACED = "replaced"
    """Drafted here, and taken there by a relaxed rule in place of the target's own: LOSSY."""
    CORRECTED = "corrected"
    """A draft was sent for this position, and the target said otherwise."""
    DECODED = "decoded"
    """The target's own: a bonus after a run of accepted ones, or run-ahead."""


# --- events ---------------------------------------------------------------------------------


@statically_frozen
class Start:
    """The generation begins: connect, and draft on the prompt meanwhile."""


@statically_frozen
class Connected:
    """The stream that ``Connect`` asked for is there."""


@statically_frozen
class LinkDown:
    """The stream ended or could not be had. ``retryable`` False: no other one would fare better.

    ``again_s`` 0: try at once, there is another verifier; more: not before so many seconds; None:
    after the usual wait."""

    why: str
    retryable: bool = True
    again_s: float | None = None


@statically_frozen
class StepDone:
    """The draft step is over, and these are its guesses, best first."""

    candidates: tuple[Candidate, ...]


@statically_frozen
class StepFailed:
    """The drafter cannot go on; the session can."""

    why: str


@statically_frozen
class Stop:
    """The user has enough, or a stop string was found."""

    reason: FinishReason = FinishReason.CANCELLED


@statically_frozen
class Tick:
    """The deadline has come."""


DraftEvent = (
    Start | Connected | LinkDown | StepDone | StepFailed | Stop | Tick | Opened | Commit | Fault
)


# --- actions --------------------------------------------------------------------------------


@statically_frozen
class Connect:
    """Open a stream; answer with ``Connected`` or ``LinkDown``."""


@statically_frozen
class Disconnect:
    """Let the stream go. Nothing that it still says may reach the session."""


@statically_frozen
class Transmit:
    """Hand this message to the stream, in order."""

    message: Uplink


@statically_frozen
class StartStep:
    """Run the drafter (``ports.Drafter.step``); answer with ``StepDone`` or ``StepFailed``."""

    keep_length: int
    feed: tuple[int, ...]
    width: int


@statically_frozen
class Deliver:
    """Committed tokens for the user, once and in order."""

    position: int
    tokens: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    logprobs: tuple[TokenScore, ...] = ()
    """One a token, or none where the verifier told none."""


@statically_frozen
class Finish:
    """The generation is complete."""

    reason: FinishReason


@statically_frozen
class Fail:
    """The generation cannot be completed; what was delivered stays valid."""

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
    """What a session has counted so far, over all its streams."""

    steps: int = 0
    """Draft steps that ended well."""
    sent: int = 0
    """Nodes sent, those sent again on a new stream included."""
    committed: int = 0
    """Tokens the user was given."""
    accepted: int = 0
    """Of them, those drafted here and verified there."""
    replaced: int = 0
    """Of these, those that a relaxed rule took in place of the target's own."""
    corrected: int = 0
    """Of them, those that came where a draft was sent and was wrong."""
    passes: int = 0
    """The verifier's passes for this session, as far as it told."""
    rows: int = 0
    """Draft nodes in those passes."""
    tried: int = 0
    """Positions decided while the drafter had a guess there."""
    hits: int = 0
    """Of them, those that its first choice won."""
    prompt_read: int = 0
    """Tokens of the text that the verifier said it has read; 0: it did not say."""
    rested: int = 0
    """Tokens that came while nothing was drafted and no sent node was undecided, though there is a
    draft: it would not have paid."""
    stale: int = 0
    """Nodes the verifier dropped: their parent was dead, unknown or did not agree."""
    reconnects: int = 0
    draft_failure: str = ""
    """Why drafting ended before the text did: what the drafter raised. Empty: it did not."""
    queue_s: float = 0.0
    """How long sent drafts waited at the verifier for the passes that took them, all together."""
    verify_s: float = 0.0
    """The length of all passes that brought tokens, all together."""

    @property
    def acceptance(self) -> float | None:
        """The acceptance rate, hits / tried; None before a draft was judged."""
        return self.hits / self.tried if self.tried else None

    @property
    def wasted(self) -> int:
        """Nodes sent that did not become tokens by being verified."""
        return self.sent - self.accepted

    def take_back(self, kinds: Sequence[TokenKind]) -> None:
        """Tokens of these kinds were committed but not given to the user: they stood behind a stop
        string, and how many do depends on the drafts."""
        self.committed -= len(kinds)
        replaced = kinds.count(TokenKind.REPLACED)
        self.replaced -= replaced
        self.accepted -= kinds.count(TokenKind.ACCEPTED) + replaced
        self.corrected -= kinds.count(TokenKind.CORRECTED)
