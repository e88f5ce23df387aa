"""Estimators that both ends use while they run: times as moving averages, acceptance as shares.

A draft model reports how likely it holds each of its candidates to be, which is the probability
under its own distribution. That is rarely the chance that the target chooses the same token: a
small model is often too sure, and with sampling noise that both ends share a candidate of low
probability may be right as often as not. So confidences are divided into cells, and each cell
counts how often its candidates were the target's token (``CalibratedChances``). SpecDec++ (Huang,
Guo and Wang, arXiv 2405.19715) trains a head of the draft model for that question. Counting needs
no training and works with any draft model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

ASSUMED_PASS_S: Final = 0.02
"""Duration of a verifier's pass that is assumed until one was timed: a model of a few billion
parameters on a server's GPU, or of a few million on a CPU. The first commit measures it, so nothing
depends on this value for longer than one pass."""
ASSUMED_RTT_S: Final = 0.03
"""Round trip that is assumed until one was timed: a regional link. One is timed within eight
tokens, and the assumption never exceeds the time that opening the stream took."""
ASSUMED_STEP_SHARE: Final = 0.1
"""Duration of a draft step that is assumed until one was timed, as a share of a pass. It is short
so that drafting is tried: only then is a step timed. A value in seconds would prevent drafting
where passes are short (10 ms did, for passes below 10.3 ms)."""
MOST_TIMES: Final = 8.0
"""Durations count as at most this many times as long as is usual. A machine that stood still for a
second (sleep, swapping, a stopped process) would otherwise seem too slow to draft, and then no step
would be left to correct it."""

# A slope counts as known from this many samples on, if x has varied by about one.
_MIN_SAMPLES, _MIN_VARIANCE = 8, 0.5
# Two causes are separable if at least this share of the variance of each is not explained by the
# other.
_MIN_UNEXPLAINED = 0.1


@dataclass(slots=True, eq=False)
class MovingAverage:
    """Mean of the samples, in which older ones weigh less and less.

    Formula: mean += share * (sample - mean), with share = max(weight, 1 / count), so the first
    samples count equally and there is no start-up bias. With weight 0.15, ten samples of 20 ms and
    then one of 40 ms give 20 + 0.15 * 20 = 23 ms.

    A sample counts as at most ``most_times`` the mean before it. A machine that stands still for a
    minute makes one sample that is thousands of times too large. With 8 it makes the mean twice as
    large, and a change by a factor of 100 that lasts is found in about ten samples."""

    weight: float = 0.15
    most_times: float = math.inf
    count: int = field(default=0, init=False)
    _mean: float = field(default=0.0, init=False)

    def add(self, sample: float) -> None:
        self.count += 1
        share = 1.0 / self.count
        if share < self.weight:
            share = self.weight
        if sample > (most := self.most_times * self._mean) > 0.0:
            sample = most
        self._mean += share * (sample - self._mean)

    def limit_weight(self, samples: int) -> None:
        """Let all samples so far weigh at most as much as ``samples`` new ones."""
        self.count = min(self.count, samples)

    def get(self, default: float) -> float:
        return self._mean if self.count else default


@dataclass(slots=True, eq=False)
class SlopeEstimator:
    """Estimate of how much y grows when x grows by one.

    Formula: covariance(x, y) / variance(x), both as moving averages. Passes that alternate between
    0 and 10 draft rows and take 20 and 25 ms give 0.5 ms a row."""

    weight: float = 0.05
    count: int = field(default=0, init=False)
    _x: float = field(default=0.0, init=False)
    _y: float = field(default=0.0, init=False)
    _variance: float = field(default=0.0, init=False)
    _covariance: float = field(default=0.0, init=False)

    def add(self, x: float, y: float) -> None:
        self.count += 1
        share = 1.0 / self.count
        if share < self.weight:
            share = self.weight
        from_x, from_y = x - self._x, y - self._y
        self._x += share * from_x
        self._y += share * from_y
        self._variance = (1.0 - share) * (self._variance + share * from_x * from_x)
        self._covariance = (1.0 - share) * (self._covariance + share * from_x * from_y)

    @property
    def mean(self) -> tuple[float, float]:
        """Moving averages of x and of y."""
        return self._x, self._y

    def longest(self, x: float) -> float:
        """Return the largest y that may be usual at ``x`` if y is a time: ``MOST_TIMES`` the mean,
        and in proportion more where ``x`` is above its mean. Infinite while there are few
        samples."""
        if self.count < _MIN_SAMPLES or self._y <= 0.0:
            return math.inf
        return MOST_TIMES * self._y * max(1.0, x / max(1.0, self._x))

    def get(self) -> float | None:
        """Return the slope; None while there are few samples or x has hardly varied."""
        if self.count < _MIN_SAMPLES or self._variance < _MIN_VARIANCE:
            return None
        return self._covariance / self._variance

    def value(self, x: float) -> float | None:
        """Return y at ``x`` on the fitted line; None while its slope is not known."""
        slope = self.get()
        return None if slope is None else self._y + slope * (x - self._x)


class PlaneEstimator:
    """Estimate of how much y grows with x and with z.

    The slopes are those of the least-squares plane, with covariances as moving averages. If x and z
    hardly vary independently, both get the slope of x + z. Passes that alternate between (1, 0),
    (2, 0) and (2, 10) sessions and draft rows and take 21, 22 and 27 ms give 1 ms a session and 0.5
    ms a row."""

    def __init__(self, weight: float = 0.05) -> None:
        self.weight = weight
        self.count = 0
        self._x = self._z = self._y = 0.0
        self._xx = self._zz = self._xz = self._xy = self._zy = 0.0
        self.slopes: tuple[float, float] | None = None
        """Slopes in x and in z. None while there are few samples, or x and z have hardly varied.
        Known slopes stay until x and z vary again."""

    def add(self, x: float, z: float, y: float) -> None:
        self.count += 1
        share = max(self.weight, 1.0 / self.count)
        keep = 1.0 - share
        from_x, from_z, from_y = x - self._x, z - self._z, y - self._y
        self._x += share * from_x
        self._z += share * from_z
        self._y += share * from_y
        self._xx = keep * (self._xx + share * from_x * from_x)
        self._zz = keep * (self._zz + share * from_z * from_z)
        self._xz = keep * (self._xz + share * from_x * from_z)
        self._xy = keep * (self._xy + share * from_x * from_y)
        self._zy = keep * (self._zy + share * from_z * from_y)
        if self.count >= _MIN_SAMPLES:
            self.slopes = self._fit_slopes()

    def value(self, x: float, z: float) -> float | None:
        """Return y at (x, z) on the fitted plane; None while its slopes are not known."""
        if self.slopes is None:
            return None
        of_x, of_z = self.slopes
        return self._y + of_x * (x - self._x) + of_z * (z - self._z)

    def _fit_slopes(self) -> tuple[float, float] | None:
        xx, zz, xz = self._xx, self._zz, self._xz
        determinant = xx * zz - xz * xz
        if min(xx, zz) >= _MIN_VARIANCE and determinant >= _MIN_UNEXPLAINED * xx * zz:
            of_x = (self._xy * zz - self._zy * xz) / determinant
            of_z = (self._zy * xx - self._xy * xz) / determinant
            return of_x, of_z
        together = xx + zz + 2.0 * xz
        if together < _MIN_VARIANCE:
            return self.slopes
        slope = (self._xy + self._zy) / together
        return slope, slope


MIN_PRIOR_WEIGHT: Final = 0.05
"""Minimum weight of a prior, in trials. Trials fade, so a prior that did not fade with them would
stay a large part of an estimate for ever: with a weight of 12 beside 50 trials, a draft that is
never right was estimated at 0.14. The remaining weight keeps an estimate above 0."""


class DecayedRate:
    """Recent share of successes.

    Formula: (hits + prior * weight) / (trials + weight), where hits, trials and weight lose a share
    1 - ``memory`` at each trial, the weight down to ``MIN_PRIOR_WEIGHT``. With a prior of 0.8 that
    counts for 4 trials, 2 hits in 4 give about (2 + 3.2) / (4 + 4) = 0.65."""

    __slots__ = ("_hits", "_memory", "_trials", "_weight")

    def __init__(self, memory: float, weight: float) -> None:
        self._hits = self._trials = 0.0
        self._memory, self._weight = memory, weight

    def add(self, hit: bool) -> None:
        self._trials = self._trials * self._memory + 1.0
        self._hits = self._hits * self._memory + hit
        self._weight = max(MIN_PRIOR_WEIGHT, self._weight * self._memory)

    def rate(self, prior: float) -> float:
        return (self._hits + prior * self._weight) / (self._trials + self._weight)


@dataclass(slots=True)
class AcceptanceEstimator:
    """Share of positions at which the draft model's candidate of each rank is the target's token.

    Formula: rate = (hits + prior * weight) / (trials + weight), where hits and trials lose a share
    1 - ``memory`` at each position, and the weight, ``prior_weight`` at first, at each trial, down
    to ``MIN_PRIOR_WEIGHT``. With the prior of 0.7, worth 12 positions, 8 hits in the first 8
    positions give about (7.5 + 7.1) / (7.5 + 10.2) = 0.83."""

    prior: tuple[float, ...] = (0.7, 0.1, 0.04)
    prior_weight: float = 12.0
    memory: float = 0.98
    hits: list[float] = field(init=False)
    trials: list[float] = field(init=False)
    weights: list[float] = field(init=False)
    """Weight of each rank's prior, in trials."""
    rates: list[float] = field(init=False)
    """Rate of each rank that has a prior, then one rate for all ranks behind them. The last one
    does not change."""

    def __post_init__(self) -> None:
        self.hits, self.trials = [0.0] * len(self.prior), [0.0] * len(self.prior)
        self.weights = [self.prior_weight] * len(self.prior)
        self.rates = [*self.prior, self.prior[-1] / 2]

    def add(self, rank: int | None, offered: int = 1 << 30) -> None:
        """Record one decided position.

        ``rank`` is the rank of the candidate that was right, None if none was. Only the ``offered``
        first ranks had a candidate; the others do not count as tried."""
        memory, hits, trials, weights = self.memory, self.hits, self.trials, self.weights
        for tried, prior in enumerate(self.prior):
            hits[tried] = right = hits[tried] * memory + (tried == rank)
            trials[tried] = known = trials[tried] * memory + (tried < offered)
            weight = weights[tried]
            if tried < offered and weight > MIN_PRIOR_WEIGHT:
                weights[tried] = weight = max(MIN_PRIOR_WEIGHT, weight * memory)
            self.rates[tried] = (right + prior * weight) / (known + weight)

    def rate(self, rank: int) -> float:
        return self.rates[rank if rank < len(self.prior) else -1]

    def first_rates(self, count: int) -> list[float]:
        """Return the rates of the first ``count`` ranks."""
        return self.rates[:count] + self.rates[-1:] * (count - len(self.rates))


CELLS: Final = 10
# Weight of a rank's own rate, in positions, beside the cell's observations.
_PRIOR_WEIGHT: Final = 6.0
_MEMORY: Final = 0.995
_RANKS: Final = 3
"""Ranks that have cells of their own; later ranks share the last one's cells."""
_LAST: Final = _RANKS - 1
_PER_HALVING: Final = -1.0 / math.log(2.0)


class CalibratedChances:
    """The chance that a candidate is right, given its rank and the draft model's confidence in it.

    It depends on the two models and on whether they sample, and outlives a generation."""

    def __init__(self) -> None:
        # The formula of ``DecayedRate``, in two lists for all cells, because each device has such
        # an object.
        self._hits = [0.0] * (CELLS * _RANKS)
        self._trials = [0.0] * (CELLS * _RANKS)

    def add(self, rank: int, logprob: float, *, hit: bool) -> None:
        """Record a decided position at which the candidate of this rank had this
        log-probability."""
        cell = _cell_of(rank, logprob)
        self._trials[cell] = self._trials[cell] * _MEMORY + 1.0
        self._hits[cell] = self._hits[cell] * _MEMORY + hit

    def chance(self, rank: int, logprob: float, rate: float) -> float:
        """Return the chance that a candidate of this rank and log-probability is right.

        Formula: (hits + 6 * rate) / (trials + 6) over the candidates of the same cell, where
        ``rate`` is how often candidates of the rank are right, whatever their confidence. Cells are
        tenths for first candidates and halvings for others. If 60 second candidates with a
        confidence of 0.01 were tried and none was right, and second candidates are right at 0.1:
        0.6 / 66 = 0.009."""
        cell = _cell_of(rank, logprob)
        return (self._hits[cell] + rate * _PRIOR_WEIGHT) / (self._trials[cell] + _PRIOR_WEIGHT)


def _cell_of(rank: int, logprob: float) -> int:
    """Return the cell of a candidate.

    A first candidate's cell is its tenth of the probability. The cells of later ranks follow, rank
    by rank: 0 for a probability above a half, 1 above a quarter, and so on. Certain candidates, and
    confidences that are not a number, count as most likely."""
    if rank:
        halvings = logprob * _PER_HALVING if logprob < 0.0 else 0.0
        cell = int(halvings) if halvings < CELLS else CELLS - 1
        return cell + CELLS * (rank if rank < _LAST else _LAST)
    cell = int(CELLS * math.exp(logprob)) if logprob < 0.0 else CELLS
    return cell if cell < CELLS else CELLS - 1
