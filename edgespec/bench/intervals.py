"""Confidence intervals of means over prompts.

Prompts differ more than runs of the same prompt do. Intervals are 95 % by a bootstrap (Efron,
1979): the mean of as many prompts, drawn with replacement, 2,000 times. A ratio of two arms draws
the same prompts for both. Draws are seeded, so a result that is printed twice is the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import fmean

Interval = list[float]
"""Lower and upper bound."""

_DRAWS = 2000
_SHARE = 0.95


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the 95 % interval of the mean of at least one value. A single value is its own
    interval."""
    return _bootstrap(len(values), lambda drawn: fmean([values[index] for index in drawn]))


def ratio_interval(upper: Sequence[float], lower: Sequence[float]) -> Interval:
    """Return the 95 % interval of mean(upper) / mean(lower), whose values belong pairwise to the
    same prompts. The lower values must be above 0."""

    def ratio(drawn: Sequence[int]) -> float:
        return sum([upper[index] for index in drawn]) / sum([lower[index] for index in drawn])

    return _bootstrap(len(upper), ratio)


def _bootstrap(count: int, compute: Callable[[Sequence[int]], float]) -> Interval:
    """Return the interval of ``compute``, which gets the indices of ``count`` drawn prompts."""
    dice = random.Random(0)
    prompts = range(count)
    draws = _DRAWS if count > 1 else 1
    found = sorted(compute(dice.choices(prompts, k=count)) for _ in range(draws))
    outside = round(len(found) * (1.0 - _SHARE) / 2.0)
    return [found[outside], found[-1 - outside]]
