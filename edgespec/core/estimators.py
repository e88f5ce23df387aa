"""What both sides learn while they run: times as moving averages, acceptance as counted shares."""

from __future__ import annotations

from dataclasses import dataclass, field

# A slope is believed from so many samples on, and when x has varied by one or so.
_LEAST_SAMPLES, _LEAST_VARIANCE = 8, 0.5


class MovingAverage:
    """Exponentially weighted mean; ``weight`` is the share of the newest sample.

    The first samples count fully (weight 1, 1/2, 1/3, ...), so there is no start-up bias.
    """

    def __init__(self, weight: float = 0.15) -> None:
        self.weight = weight
        self.count = 0
        self._mean = 0.0

    def add(self, sample: float) -> None:
        self.count += 1
        share = 1.0 / self.count
        if share < self.weight:
            share = self.weight
        self._mean += share * (sample - self._mean)

    def get(self, default: float) -> float:
        return self._mean if self.count else default


class SlopeEstimator:
    """How y grows with x: least squares over samples that are forgotten as in a moving average."""

    def __init__(self, weight: float = 0.05) -> None:
        self.weight = weight
        self.count = 0
        self._x = self._y = self._variance = self._covariance = 0.0

    def add(self, x: float, y: float) -> None:
        self.count += 1
        share = max(self.weight, 1.0 / self.count)
        from_x, from_y = x - self._x, y - self._y
        self._x += share * from_x
        self._y += share * from_y
        self._variance = (1.0 - share) * (self._variance + share * from_x * from_x)
        self._covariance = (1.0 - share) * (self._covariance + share * from_x * from_y)

    def get(self) -> float | None:
        """None while there are few samples, or x has hardly varied."""
        if self.count < _LEAST_SAMPLES or self._variance < _LEAST_VARIANCE:
            return None
        return self._covariance / self._variance


@dataclass(slots=True)
class AcceptanceEstimator:
    """Share of positions at which the draft's choice of each rank was the target's token.

    Starts from a prior worth ``prior_weight`` positions and forgets slowly, so a change of topic
    shows within a few dozen tokens.
    """

    prior: tuple[float, ...] = (0.7, 0.1, 0.04)
    prior_weight: float = 12.0
    memory: float = 0.98
    hits: list[float] = field(default_factory=list)
    trials: float = 0.0

    def add(self, rank: int | None) -> None:
        """One position was decided: by the sibling of this rank, or by none."""
        memory, hits = self.memory, self.hits or [0.0] * len(self.prior)
        self.trials = self.trials * memory + 1.0
        self.hits = hits = [hit * memory for hit in hits]
        if rank is not None and rank < len(hits):
            hits[rank] += 1.0

    def rate(self, rank: int) -> float:
        """Estimated probability that the choice of this rank is the target's token."""
        if rank >= len(self.prior):
            return self.prior[-1] / 2
        hits = self.hits[rank] if self.hits else 0.0
        return (hits + self.prior[rank] * self.prior_weight) / (self.trials + self.prior_weight)


@dataclass(slots=True)
class DraftEstimates:
    """The device's view of its world; seconds."""

    rtt_s: MovingAverage = field(default_factory=MovingAverage)
    step_s: MovingAverage = field(default_factory=MovingAverage)
    pass_s: MovingAverage = field(default_factory=MovingAverage)
    commit_s: MovingAverage = field(default_factory=MovingAverage)
    """From one commit to the next, as they arrive."""
    commit_tokens: MovingAverage = field(default_factory=MovingAverage)
    row_s: SlopeEstimator = field(default_factory=SlopeEstimator)
    """What one more draft node adds to a pass."""
    acceptance: AcceptanceEstimator = field(default_factory=AcceptanceEstimator)


class ArrivalEstimator:
    """The verifier's guess of when the next useful draft of a session arrives.

    Two rhythms: after a miss the device needs about a round trip and a draft step (*response*);
    otherwise drafts come at the device's own pace (*gap*).
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
