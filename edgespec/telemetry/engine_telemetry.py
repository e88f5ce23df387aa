"""The seam at which a verifier is watched: what its driver tells, and nothing it asks for.

Like a ``Tracer`` it sees every event and action, but whole steps at a time, so that watching costs
one call a step; unlike it, it also hears what never reaches the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgespec.core.protocol.messages import Fault
from edgespec.core.verifier.engine_events import EngineAction, EngineEvent


class EngineTelemetry(Protocol):
    """Called on the event loop; must not raise and must be quick."""

    def observe(self, event: EngineEvent, actions: Sequence[EngineAction], now: float) -> None:
        """The engine handled ``event`` at ``now`` and asked for ``actions``."""

    def told(self, stream: int, fault: Fault) -> None:
        """The stream is ended with this fault, whoever said so."""

    def gone(self, stream: int, now: float) -> None:
        """The stream has ended, whoever ended it."""
