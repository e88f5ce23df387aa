"""Timeline of one generation, for a client that shows it: where each token came from, and what
happened when.

A timeline is recorded only for a generation whose caller requests it. ``GenerationNotes`` writes
it while events arrive, and its reader takes the events with each chunk.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from edgespec.core.device.streaming_speed import StreamingSpeed
from edgespec.core.device.token_origins import TokenOrigin
from edgespec.telemetry.agent_status import EventKind

MAX_UNREAD_EVENTS: Final = 4096
"""Events that are kept until they are taken. Beyond that number the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class TimelineMoment:
    """One event of a generation. ``EventKind`` explains ``count`` and ``took_s``."""

    kind: EventKind
    at_s: float
    """Seconds from the beginning of the timeline to the end of the event."""
    count: int
    took_s: float


@dataclass(slots=True)
class GenerationTimeline:
    """The timeline of one generation, which begins when it is created."""

    began_at_s: float = field(default_factory=time.monotonic)
    origins: list[TokenOrigin] = field(default_factory=list)
    """Origin of each committed token, in order. The output may end earlier."""
    speed: StreamingSpeed = field(default_factory=StreamingSpeed)
    dropped: int = 0
    """Events that were dropped because nothing took them."""
    _events: deque[TimelineMoment] = field(default_factory=deque)

    def add(self, kind: EventKind, at_s: float, count: int = 0, took_s: float = 0.0) -> None:
        """Add an event that ended at ``at_s`` on the monotonic clock."""
        if len(self._events) >= MAX_UNREAD_EVENTS:
            self._events.popleft()
            self.dropped += 1
        self._events.append(TimelineMoment(kind, at_s - self.began_at_s, count, took_s))

    def take_events(self) -> Sequence[TimelineMoment]:
        """Return the events since the last call, oldest first."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def origin(self, index: int) -> TokenOrigin:
        """Return the origin of the output's token ``index``, counted from 0."""
        return self.origins[index] if index < len(self.origins) else TokenOrigin.UNKNOWN
