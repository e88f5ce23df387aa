"""Both sides learn here while they run: times as moving averages, acceptance as counted shares.

A draft says how likely it holds each of its guesses to be (the probability under its own
distribution). That is rarely the chance that the target says the same: a small model is often too
sure, and with sampling noise that both share a guess of low probability may be right as often as
not. So confidences are put into cells, and in each it is counted how often the guess was the
target's token (``GuessChances``). SpecDec++ (Huang, Guo and Wang, arXiv 2405.19715) trains a head
of the draft model for that question; this needs no training, and works with any draft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

GUESSED_PASS_S: Final = 0.02
"""A verifier's pass is taken to be so long until one was timed: a model of a few billion
parameters on a server's GPU, or of a few million on a CPU. The first commit measures it, so nothing
depends on it for longer than one pass."""
GUESSED_RTT_S: Final = 0.03
"""A round trip is taken to be so long until one was timed: a regional link. Eight tokens later one
is timed, and no guess is longer than the greeting of the stream took."""
GUESSED_STEP_SHARE: Final = 0.1
"""A draft step is taken to last this part of a pass until one was timed. It is short, so that a
draft is tried: only then is a step timed. In seconds it would stop drafts where passes are short
(10 ms did, below passes of 10.3 ms)."""

# A slope is believed from so many samples on, and when x has varied by one or so.
_LEAST_SAMPLES, _LEAST_VARIANCE = 8, 0.5
# Two causes are told apart when less than this part of the variance of either explains the other.
_LEAST_APART = 0.1


@dataclass(slots=True, eq=False)
class MovingAverage:
    """The mean of what was added, in which older samples count less and less.

    Formula: mean += share * (sample - mean), with share = max(weight, 1 / count), so the first
    samples count equally and there is no start-up bias. With weight 0.15, ten samples of 20 ms and
    then one of 40 ms give 20 + 0.15 * 20 = 23 ms."""

    weight: float = 0.15
    count: int = field(default=0, init=False)
    _mean: float = field(default=0.0, init=False)

    def add(self, sample: float) -> None:
        self.count += 1
        share = 1.0 / self.count
        if share < self.weight:
            share = self.weight
        self._mean += share * (sample - self._mean)

    def doubt(self, samples: int) -> None:
        """What was added counts as so many samples at most, beside those that follow."""
        self.count = min(self.count, samples)

    def get(self, default: float) -> float:
        return self._mean if self.count else default


@dataclass(slots=True, eq=False)
class SlopeEstimator:
    """How much y grows when x grows by one: covariance(x, y) / variance(x), as moving averages.
    Passes of 0 and 10 draft rows that take 20 and 25 ms, in turn, give 0.5 ms a row."""

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

    def get(self) -> float | None:
        """None while there are few samples, or x has hardly varied."""
        if self.count < _LEAST_SAMPLES or self._variance < _LEAST_VARIANCE:
            return None
        return self._covariance / self._variance

    def value(self, x: float) -> float | None:
        """What y is at ``x``, by the line; None while its slope is not known."""
        slope = self.get()
        return None if slope is None else self._y + slope * (x - self._x)


class PlaneEstimator:
    """How much y grows with x and with z: the slopes of the least-squares plane, with covariances
    as moving averages. Where x and z hardly vary apart from one another, both have the slope of
    x + z. Passes of (1, 0), (2, 0) and (2, 10) sessions and draft rows that take 21, 22 and 27 ms,
    in turn, give 1 ms a session and 0.5 ms a row."""

    def __init__(self, weight: float = 0.05) -> None:
        self.weight = weight
        self.count = 0
        self._x = self._z = self._y = 0.0
        self._xx = self._zz = self._xz = self._xy = self._zy = 0.0
        self.slopes: tuple[float, float] | None = None
        """Those of x and of z. None while there are few samples, or x and z have hardly varied;
        what was once known stays until they vary again."""

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
        if self.count >= _LEAST_SAMPLES:
            self.slopes = self._fitted()

    def value(self, x: float, z: float) -> float | None:
        """What y is at (x, z), by the plane; None while its slopes are not known."""
        if self.slopes is None:
            return None
        of_x, of_z = self.slopes
        return self._y + of_x * (x - self._x) + of_z * (z - self._z)

    def _fitted(self) -> tuple[float, float] | None:
        xx, zz, xz = self._xx, self._zz, self._xz
        determinant = xx * zz - xz * xz
        if min(xx, zz) >= _LEAST_VARIANCE and determinant >= _LEAST_APART * xx * zz:
            of_x = (self._xy * zz - self._zy * xz) / determinant
            of_z = (self._zy * xx - self._xy * xz) / determinant
            return of_x, of_z
        together = xx + zz + 2.0 * xz
        if together < _LEAST_VARIANCE:
            return self.slopes
        slope = (self._xy + self._zy) / together
        return slope, slope


LEAST_WEIGHT: Final = 0.05
"""Trials that a prior counts for at least. Trials fade, so a prior that did not fade with them
would for ever be a good part of an estimate: with 12 beside 50 trials, a draft that is never right
was taken to be right with 0.14. What is left keeps an estimate above 0."""


class DecayedRate:
    """How often something was right of late.

    Formula: (hits + prior * weight) / (trials + weight), where hits, trials and weight lose a share
    1 - ``memory`` at each trial, the weight down to ``LEAST_WEIGHT``. With a prior of 0.8 that
    counts for 4 trials, 2 hits in 4 give about (2 + 3.2) / (4 + 4) = 0.65."""

    __slots__ = ("_hits", "_memory", "_trials", "_weight")

    def __init__(self, memory: float, weight: float) -> None:
        self._hits = self._trials = 0.0
        self._memory, self._weight = memory, weight

    def add(self, hit: bool) -> None:
        self._trials = self._trials * self._memory + 1.0
        self._hits = self._hits * self._memory + hit
        self._weight = max(LEAST_WEIGHT, self._weight * self._memory)

    def rate(self, prior: float) -> float:
        return (self._hits + prior * self._weight) / (self._trials + self._weight)


@dataclass(slots=True)
class AcceptanceEstimator:
    """How often the draft's choice of each rank is the target's token.

    Formula: rate = (hits + prior * weight) / (trials + weight), where hits and trials lose a share
    1 - ``memory`` at each position, and the weight, ``prior_weight`` at first, at each trial, down
    to ``LEAST_WEIGHT``. With the prior of 0.7, worth 12 positions, 8 hits in the first 8 positions
    give about (7.5 + 7.1) / (7.5 + 10.2) = 0.83."""

    prior: tuple[float, ...] = (0.7, 0.1, 0.04)
    prior_weight: float = 12.0
    memory: float = 0.98
    hits: list[float] = field(init=False)
    trials: list[float] = field(init=False)
    weights: list[float] = field(init=False)
    """What the prior of each rank counts for, in trials."""
    rates: list[float] = field(init=False)
    """Of each rank that has a prior, and of all ranks behind them; seldom changed."""

    def __post_init__(self) -> None:
        self.hits, self.trials = [0.0] * len(self.prior), [0.0] * len(self.prior)
        self.weights = [self.prior_weight] * len(self.prior)
        self.rates = [*self.prior, self.prior[-1] / 2]

    def add(self, rank: int | None, offered: int = 1 << 30) -> None:
        """One position was decided: by the sibling of this rank, or by none of those ``offered``.
        Ranks that were not offered were not tried."""
        memory, hits, trials, weights = self.memory, self.hits, self.trials, self.weights
        for tried, prior in enumerate(self.prior):
            hits[tried] = right = hits[tried] * memory + (tried == rank)
            trials[tried] = known = trials[tried] * memory + (tried < offered)
            weight = weights[tried]
            if tried < offered and weight > LEAST_WEIGHT:
                weights[tried] = weight = max(LEAST_WEIGHT, weight * memory)
            self.rates[tried] = (right + prior * weight) / (known + weight)

    def rate(self, rank: int) -> float:
        return self.rates[rank if rank < len(self.prior) else -1]

    def first(self, count: int) -> list[float]:
        """The rates of so many ranks."""
        return self.rates[:count] + self.rates[-1:] * (count - len(self.rates))


CELLS: Final = 10
# What a rank's own rate counts for, in positions, until there are observations.
_PRIOR_WEIGHT: Final = 6.0
_MEMORY: Final = 0.995
_RANKS: Final = 3
"""Further choices share the last one's cells."""
_LAST: Final = _RANKS - 1
_PER_HALVING: Final = -1.0 / math.log(2.0)


class GuessChances:
    """The chance that a guess of any rank is right, by what the draft thought of it. It depends on
    the two models and on whether they sample, and outlives a generation."""

    def __init__(self) -> None:
        # As in ``DecayedRate``, but of all cells together: there is one of these for each device.
        self._hits = [0.0] * (CELLS * _RANKS)
        self._trials = [0.0] * (CELLS * _RANKS)

    def add(self, rank: int, logprob: float, *, hit: bool) -> None:
        """A position was decided at which the choice of this rank had this log-probability."""
        cell = _cell(rank, logprob)
        self._trials[cell] = self._trials[cell] * _MEMORY + 1.0
        self._hits[cell] = self._hits[cell] * _MEMORY + hit

    def chance(self, rank: int, logprob: float, rate: float) -> float:
        """Formula: (hits + 6 * rate) / (trials + 6) of the guesses of this rank in the same cell,
        with ``rate`` how often choices of the rank are right, whatever the draft thought of them.
        Cells are tenths for first choices, halvings for others. Where 60 second choices held for
        0.01 were tried and none was right, and second choices are right at 0.1: 0.6 / 66 = 0.009.
        """
        cell = _cell(rank, logprob)
        return (self._hits[cell] + rate * _PRIOR_WEIGHT) / (self._trials[cell] + _PRIOR_WEIGHT)


def _cell(rank: int, logprob: float) -> int:
    """Of a first choice its tenth; of others, behind these, 0 for a probability above a half, 1
    above a quarter, and so on, rank by rank. Certain guesses, and what is no number, count as most
    likely."""
    if rank:
        halvings = logprob * _PER_HALVING if logprob < 0.0 else 0.0
        cell = int(halvings) if halvings < CELLS else CELLS - 1
        return cell + CELLS * (rank if rank < _LAST else _LAST)
    cell = int(CELLS * math.exp(logprob)) if logprob < 0.0 else CELLS
    return cell if cell < CELLS else CELLS - 1
