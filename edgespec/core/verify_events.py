"""What can happen to a ``VerifySession``, what it can ask for, and what it can be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edgespec.core.messages import Cancel, Downlink, Draft, Open, Received
from edgespec.core.value import value
from edgespec.core.work import PassRequest


@value
class Attach:
    """A stream of this session opened (the first, or one after a broken link)."""

    request: Open


@value
class Detach:
    """Its stream is gone."""


@value
class Offer:
    """There is room for ``max_rows`` rows in a pass that would start now."""

    max_rows: int
    pass_s: float
    """How long the pass is expected to take."""
    least_chance: float = 0.0
    """Draft nodes less likely to be right do not pay for their row."""


@value
class PassDone:
    targets: tuple[int, ...]
    """As in ``PassResult``."""


@value
class PassFailed:
    """The pass could not be run; nothing was cached or sampled."""


VerifyEvent = Attach | Detach | Offer | PassDone | PassFailed | Draft | Received | Cancel


@value
class Send:
    """Hand this message to the session's stream."""

    message: Downlink


@value
class RunPass:
    """Take part in the pass that starts now; answers an ``Offer``."""

    request: PassRequest


@value
class Keep:
    """These nodes of the finished pass became committed; its other nodes can be freed."""

    nodes: tuple[int, ...]


@value
class Hangup:
    """End the stream; the session stays for its lease."""


VerifyAction = Send | RunPass | Keep | Hangup


class VerifyState(Enum):
    READY = "ready"
    PASSING = "passing"
    FINISHED = "finished"


READY, PASSING, FINISHED = VerifyState


@dataclass(slots=True)
class VerifyCounters:
    """Over the session: ``passes`` that sampled, ``rows`` of draft nodes they verified, nodes
    ``accepted``, dropped on arrival as ``stale``."""

    passes: int = 0
    rows: int = 0
    accepted: int = 0
    stale: int = 0
