"""Intervals of speed-ups over independent worlds, and the number of worlds that they need.

Theory of operation. A world is played by every arm on the same random numbers, so worlds are
independent and the arms within a world are paired. A speed-up is a ratio of two means over
requests, and each mean is a sum divided by a count. So the speed-up is (Sx / Nx) / (Sy / Ny) of
totals over all worlds. By the delta method its logarithm varies like the mean over worlds of

    Sx_i / mean Sx - Nx_i / mean Nx - Sy_i / mean Sy + Ny_i / mean Ny

whose covariances preserve the benefit of pairing (Cochran, "Sampling Techniques", 1977, 6.3: ratio
estimates of clusters). The interval is that of this mean, with Student's t for n - 1 degrees of
freedom, transformed back by the exponential. Worlds are added until the interval is narrow enough.
Looking before deciding makes intervals slightly too narrow, so nothing is decided on fewer than
``MIN_SEEDS`` worlds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

TARGET_HALF_WIDTH: Final = 0.05
"""Target for half of an interval's width relative to its value, if there is time."""
MIN_SEEDS: Final = 8
"""Least number of seeds before their spread is used."""
MAX_SEEDS: Final = 256
_CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class TpotTotal:
    """The TPOTs of one arm's requests in one world."""

    seconds: float
    requests: int


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the 95 % interval around it."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width, relative to the value."""
        return max(self.high - self.value, self.value - self.low) / self.value


def measure_speedup(
    base: Sequence[TpotTotal], arm: Sequence[TpotTotal]
) -> tuple[float | None, Interval | None]:
    """Return the speed-up of ``arm`` over ``base`` with its interval; both list the same worlds in
    the same order. The interval is None with fewer than two worlds, and both are None if either arm
    has no request."""
    sums = [
        [one.seconds for one in base],
        [float(one.requests) for one in base],
        [one.seconds for one in arm],
        [float(one.requests) for one in arm],
    ]
    means = [statistics.fmean(column) for column in sums]
    if min(means) <= 0.0:
        return None, None
    value = means[0] / means[1] / (means[2] / means[3])
    if len(base) < 2:
        return value, None
    signs = (1.0, -1.0, -1.0, 1.0)
    parts = [
        math.fsum(sign * one / mean for sign, one, mean in zip(signs, world, means, strict=True))
        for world in zip(*sums, strict=True)
    ]
    deviation = statistics.stdev(parts) / math.sqrt(len(parts))
    factor = math.exp(student_t(len(parts) - 1) * deviation)
    return value, Interval(value, value / factor, value * factor)


def share_interval(clusters: Sequence[tuple[int, int]]) -> tuple[float, tuple[float, float]]:
    """Return a share and its 95 % interval from clusters of (hits, trials). It is a ratio estimate
    (Cochran, 6.3), and never narrower than the interval of independent requests (Wilson, JASA
    1927)."""
    hits, asked = (sum(column) for column in zip(*clusters, strict=True))
    if not asked:
        return math.nan, (0.0, 1.0)
    return hits / asked, _share_ends(clusters, hits / asked, asked)


def quantile_interval(
    clusters: Sequence[Sequence[float]], share: float
) -> tuple[float, float, float] | None:
    """Return a quantile and its 95 % interval. The interval's ends are the quantiles at the ends of
    the interval of the share of values below (Woodruff, JASA 1952), with clusters as in
    ``share_interval``. None without values."""
    ordered = sorted(value for cluster in clusters for value in cluster)
    if not ordered:
        return None
    found = quantile(ordered, share)
    below = [(sum(value <= found for value in cluster), len(cluster)) for cluster in clusters]
    low, high = _share_ends(below, share, len(ordered))
    return found, quantile(ordered, low), quantile(ordered, high)


def _share_ends(
    clusters: Sequence[tuple[int, int]], share: float, asked: int
) -> tuple[float, float]:
    """Return the wider of two 95 % intervals: Wilson's, and the one from the clusters' deviations
    from the share."""
    z = statistics.NormalDist().inv_cdf((1.0 + _CONFIDENCE) / 2.0)
    centre = (share + z * z / (2.0 * asked)) / (1.0 + z * z / asked)
    wilson = z * math.sqrt(share * (1.0 - share) / asked + (z / (2.0 * asked)) ** 2)
    wilson /= 1.0 + z * z / asked
    count, half = len(clusters), 0.0
    if count > 1:
        square = math.fsum((hits - share * one) ** 2 for hits, one in clusters)
        half = student_t(count - 1) * math.sqrt(count / (count - 1) * square) / asked
    return (
        max(0.0, min(centre - wilson, share - half)),
        min(1.0, max(centre + wilson, share + half)),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of values in ascending order, by linear interpolation."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:  # Both may be infinite.
        return ordered[low]
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def ratio_interval(parts: Sequence[tuple[float, float]]) -> Interval | None:
    """Return a sum divided by a count, with its interval, from the totals of each world: (seconds,
    tokens) or (seconds, requests). The interval is linear, unlike that of a speed-up, and never
    below 0. With one world both ends are the value. None if the count is 0."""
    seconds, counts = (math.fsum(column) for column in zip(*parts, strict=True))
    if counts <= 0.0:
        return None
    value = seconds / counts
    worlds = len(parts)
    if worlds < 2:
        return Interval(value, value, value)
    squares = math.fsum((one - value * count) ** 2 for one, count in parts)
    square = squares * worlds / (worlds - 1)
    half = student_t(worlds - 1) * math.sqrt(square) / counts
    return Interval(value, max(0.0, value - half), value + half)


def count_seeds_needed(done: int, widest: float | None, within: float) -> int:
    """Return the number of seeds to reach in all, after ``done`` seeds with ``widest`` as the
    widest relative half-width so far (None: no interval yet). ``done`` means that no more are
    needed."""
    if done < MIN_SEEDS:
        return MIN_SEEDS
    if widest is None or widest <= within:
        return done
    # The width falls with the square root of the number. A tenth is added, since otherwise the last
    # step would have to be repeated in half of the cases.
    needed = math.ceil(1.1 * done * (widest / within) ** 2)
    return min(max(needed, done + 2), 4 * done, MAX_SEEDS) if done < MAX_SEEDS else done


@lru_cache(maxsize=1024)
def student_t(freedom: int) -> float:
    """Return the t within whose +/- lie 95 % of Student's distribution. It is exact: bisection in
    the distribution function for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 4)."""
    low, high = 0.0, 13.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        if _central_probability(middle, freedom) < _CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _central_probability(t: float, freedom: int) -> float:
    """Return the probability of the range from -t to t."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    if freedom == 1:
        return 2.0 * angle / math.pi
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    return 2.0 / math.pi * (angle + sine * total) if odd else sine * total
