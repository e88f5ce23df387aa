"""How sure a mean over texts is: texts differ more than runs of the same text do.

Intervals are 95 % by a bootstrap (Efron, 1979): the mean of as many texts drawn with replacement,
2,000 times. A ratio of two arms draws the same texts for both, which ran them all. Draws are
seeded, so a result printed twice says the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import fmean

_DRAWS = 2000
_SHARE = 0.95

Interval = tuple[float, float]


def mean_interval(values: Sequence[float]) -> Interval:
    """Of the mean of at least one value; a single one is its own interval."""
    return _bootstrap(len(values), lambda drawn: fmean([values[index] for index in drawn]))


def ratio_interval(upper: Sequence[float], lower: Sequence[float]) -> Interval:
    """Of mean(upper) / mean(lower), value by value of the same texts; lower ones are above 0."""

    def ratio(drawn: Sequence[int]) -> float:
        return sum([upper[index] for index in drawn]) / sum([lower[index] for index in drawn])

    return _bootstrap(len(upper), ratio)


def _bootstrap(count: int, of: Callable[[Sequence[int]], float]) -> Interval:
    dice = random.Random(0)
    everyone = range(count)
    found = sorted(of(dice.choices(everyone, k=count)) for _ in range(_DRAWS if count > 1 else 1))
    outside = round(len(found) * (1.0 - _SHARE) / 2.0)
    return found[outside], found[-1 - outside]
