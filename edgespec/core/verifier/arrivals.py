"""When the next draft of a session is likely to arrive, learned from those that did."""

from __future__ import annotations

from edgespec.core.protocol.estimators import MovingAverage


class ArrivalEstimator:
    """The verifier estimates here when the next useful draft of a session arrives.

    Drafts come in two rhythms. After a miss the device must first hear of it and draft anew: the
    *response*, about a round trip and a draft step. Otherwise they come at the device's own pace:
    the *gap*. Both are moving averages, and the estimate is the last event plus its rhythm. With a
    response of 60 ms, a miss at 1.000 s lets the next draft be expected at 1.060 s.
    """

    def __init__(self) -> None:
        self._response_s = MovingAverage(0.25)
        self._gap_s = MovingAverage(0.25)
        self._missed_at: float | None = None
        self._arrived_at: float | None = None

    def on_miss(self, now: float) -> None:
        """A commit killed the tree, or left it without a node: the device must hear of it."""
        if self._missed_at is None:
            self._missed_at = now

    def on_useful_draft(self, now: float) -> None:
        if self._missed_at is not None:
            self._response_s.add(now - self._missed_at)
        elif self._arrived_at is not None:
            self._gap_s.add(now - self._arrived_at)
        self._missed_at, self._arrived_at = None, now

    def expected_at(self) -> float | None:
        """None when nothing is known yet."""
        if self._missed_at is not None:
            response_s = self._response_s.get(-1.0)
            return self._missed_at + response_s if response_s >= 0 else None
        if self._arrived_at is None or self._gap_s.count == 0:
            return None
        return self._arrived_at + self._gap_s.get(0.0)
