"""What can happen to a ``DraftSession``, what it can ask for, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edgespec.core.messages import Commit, Fault, FaultCode, FinishReason, Opened, Uplink
from edgespec.core.value import value
from edgespec.core.work import Candidate


class LinkState(Enum):
    """Where a ``DraftSession`` is; the moves stand in ``core/transitions.py``."""

    IDLE = "idle"
    CONNECTING = "connecting"
    STREAMING = "streaming"
    BACKING_OFF = "backing_off"
    DONE = "done"


IDLE, CONNECTING, STREAMING, BACKING_OFF, DONE = LinkState


class TokenKind(Enum):
    """How a delivered token came about."""

    ACCEPTED = "accepted"
    """Drafted here, verified there."""
    CORRECTED = "corrected"
    """A draft was sent for this position, and the target said otherwise."""
    DECODED = "decoded"
    """The target's own: a bonus after a run of accepted ones, or run-ahead."""


# --- events ---------------------------------------------------------------------------------


@value
class Start:
    """Begin: connect, and draft on the prompt meanwhile."""


@value
class Connected:
    """The stream that ``Connect`` asked for is there."""


@value
class LinkDown:
    """The stream ended or could not be had."""

    why: str
    retryable: bool = True


@value
class StepDone:
    """The draft step is over; its guesses, best first."""

    candidates: tuple[Candidate, ...]


@value
class StepFailed:
    """The drafter cannot go on; the session can."""

    why: str


@value
class Stop:
    """The user has enough, or a stop string was found."""

    reason: FinishReason = FinishReason.CANCELLED


@value
class Tick:
    """The deadline has come."""


DraftEvent = (
    Start | Connected | LinkDown | StepDone | StepFailed | Stop | Tick | Opened | Commit | Fault
)


# --- actions --------------------------------------------------------------------------------


@value
class Connect:
    """Open a stream; answer with ``Connected`` or ``LinkDown``."""


@value
class Disconnect:
    """Let the stream go; no ``LinkDown`` need follow."""


@value
class Transmit:
    """Hand this message to the stream, in order."""

    message: Uplink


@value
class StartStep:
    """Run the drafter (``ports.Drafter.step``); answer with ``StepDone`` or ``StepFailed``."""

    keep_length: int
    feed: tuple[int, ...]
    width: int


@value
class Deliver:
    """Committed tokens for the user, once and in order."""

    position: int
    tokens: tuple[int, ...]
    kinds: tuple[TokenKind, ...]


@value
class Finish:
    """The generation is complete."""

    reason: FinishReason


@value
class Fail:
    """The generation cannot be completed; what was delivered stays valid."""

    why: str
    code: FaultCode | None = None


DraftAction = Connect | Disconnect | Transmit | StartStep | Deliver | Finish | Fail


@dataclass(slots=True)
class DraftCounters:
    """Over the session. ``tried`` counts positions decided while the drafter had a guess there,
    ``hits`` those its first choice won: hits / tried is the acceptance rate."""

    steps: int = 0
    sent: int = 0
    committed: int = 0
    accepted: int = 0
    corrected: int = 0
    passes: int = 0
    rows: int = 0
    tried: int = 0
    hits: int = 0
    stale: int = 0
    reconnects: int = 0
    queue_s: float = 0.0
    verify_s: float = 0.0

    @property
    def acceptance(self) -> float:
        return self.hits / self.tried if self.tried else 0.0

    @property
    def wasted(self) -> int:
        """Nodes sent that did not become tokens by being verified."""
        return self.sent - self.accepted
