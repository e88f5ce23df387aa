"""Both sides learn here while they run: times as moving averages, acceptance as counted shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

GUESSED_PASS_S: Final = 0.02
"""A verifier's pass is taken to be so long until one was timed: a model of a few billion
parameters on a server's GPU, or of a few million on a CPU."""

# A slope is believed from so many samples on, and when x has varied by one or so.
_LEAST_SAMPLES, _LEAST_VARIANCE = 8, 0.5


class MovingAverage:
    """The mean of what was added, in which older samples count less and less.

    Formula: mean += share * (sample - mean), with share = max(weight, 1 / count), so the first
    samples count equally and there is no start-up bias. With weight 0.15, ten samples of 20 ms and
    then one of 40 ms give 20 + 0.15 * 20 = 23 ms.
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
    """How much y grows when x grows by one: the slope of the least-squares line through samples
    that are forgotten as in a moving average.

    Formula: covariance(x, y) / variance(x), both as moving averages. Passes of 0 and 10 draft rows
    that take 20 and 25 ms, in turn, give 0.5 ms a row.
    """

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

    def value(self, x: float) -> float | None:
        """What y is at ``x``, by the line; None while its slope is not known."""
        slope = self.get()
        return None if slope is None else self._y + slope * (x - self._x)


@dataclass(slots=True)
class AcceptanceEstimator:
    """How often the draft's choice of each rank is the target's token.

    Formula: rate = (hits + prior * prior_weight) / (trials + prior_weight), where hits and trials
    lose a share 1 - ``memory`` at each position, so a change of topic shows within a few dozen
    tokens. With the prior of 0.7, worth 12 positions, 8 hits in the first 8 positions count as
    about 7.5 in 7.5 and give (7.5 + 8.4) / (7.5 + 12) = 0.81.
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
