"""Who was refused because the verifier is full: what it is told, and its place in line.

Theory of operation. A full verifier lets a session in when another one ends, about one every
``gap_s`` (a moving average of the time between those that got in). Who is refused is remembered
until it gets in, or has not asked again for ``FORGET_S``; those who were refused before it wait
before it. It is told how many they are, and to come back in

    retry_after_s = (waiting before it + 1) * gap_s, between ``LEAST_S`` and ``MOST_S``

With one let in every 2 s and three before it that is 8 s. The place is an estimate: nothing is
reserved, so that no place stays empty for a device that does not come back. At most ``MOST``
sessions are remembered.
"""

from __future__ import annotations

from edgespec.core.protocol.estimators import MovingAverage
from edgespec.core.protocol.messages import Fault, FaultCode

LEAST_S, MOST_S = 1.0, 10.0
FORGET_S = 2.0 * MOST_S
MOST = 1024


class RefusedLine:
    """Sessions are known by their keys."""

    def __init__(self) -> None:
        self._asked_at: dict[str, float] = {}
        """In the order of the first refusal."""
        self._gap_s = MovingAverage()
        self._entered_at: float | None = None

    def __len__(self) -> int:
        return len(self._asked_at)

    def refuse(self, key: str, max_sessions: int, now: float) -> Fault:
        """What the session is told that finds all places taken."""
        for other, at in tuple(self._asked_at.items()):
            if now - at > FORGET_S:
                del self._asked_at[other]
        if key in self._asked_at or len(self._asked_at) < MOST:
            self._asked_at[key] = now
        before = next((n for n, other in enumerate(self._asked_at) if other == key), MOST)
        why = f"all {max_sessions} sessions are taken; {before} wait before it"
        wait_s = (before + 1) * self._gap_s.get(0.0)
        return Fault(FaultCode.OVERLOADED, why, min(MOST_S, max(LEAST_S, wait_s)))

    def entered(self, key: str, now: float) -> None:
        """The session got a place."""
        self._asked_at.pop(key, None)
        if self._entered_at is not None:
            self._gap_s.add(min(MOST_S, now - self._entered_at))
        self._entered_at = now
