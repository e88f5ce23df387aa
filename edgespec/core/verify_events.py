"""What can happen to a ``VerifySession``, what it can ask for, and what it can be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edgespec.core.messages import Cancel, Downlink, Draft, Open, Received
from edgespec.core.work import PassRequest


@dataclass(frozen=True, slots=True)
class Attach:
    """A stream of this session opened (the first, or one after a broken link)."""

    request: Open


@dataclass(frozen=True, slots=True)
class Detach:
    """Its stream is gone."""


@dataclass(frozen=True, slots=True)
class Offer:
    """There is room for ``max_rows`` rows in a pass that would start now."""

    max_rows: int
    pass_s: float
    """How long the pass is expected to take."""


@dataclass(frozen=True, slots=True)
class PassDone:
    targets: tuple[int, ...]
    """As in ``PassResult``."""


@dataclass(frozen=True, slots=True)
class PassFailed:
    """The pass could not be run; nothing was cached or sampled."""


VerifyEvent = Attach | Detach | Offer | PassDone | PassFailed | Draft | Received | Cancel


@dataclass(frozen=True, slots=True)
class Send:
    """Hand this message to the session's stream."""

    message: Downlink


@dataclass(frozen=True, slots=True)
class RunPass:
    """Take part in the pass that starts now; answers an ``Offer``."""

    request: PassRequest


@dataclass(frozen=True, slots=True)
class Keep:
    """These nodes of the finished pass became committed; its other nodes can be freed."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hangup:
    """End the stream; the session stays for its lease."""


VerifyAction = Send | RunPass | Keep | Hangup


class VerifyState(Enum):
    READY = "ready"
    PASSING = "passing"
    FINISHED = "finished"


@dataclass(slots=True)
class VerifyCounters:
    """Over the session: ``passes`` that sampled, ``rows`` of draft nodes they verified, nodes
    ``accepted``, dropped on arrival as ``stale``."""

    passes: int = 0
    rows: int = 0
    accepted: int = 0
    stale: int = 0
