"""Traces drawn from the laws of ``generator_laws.py``: same seed, same trace.

Theory of operation (a Gaussian copula). A process z(t) with standard normal values says how good
the moment is; the law's quantiles turn it into a round-trip time, so the distribution is the
published one whatever the dependence. z is the root-weighted sum of independent parts: slow and
fast ones with exponential correlation, one value an epoch, the hour of the day, and noise a row. A
stretch of bad moments is thus a burst of delays, as in recordings, not a coin a row.

A trace shorter than a day holds a whole day's congestion in miniature. Long traces get wider rows,
at most ``MAX_GENERATED_ROWS`` of them.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

import numpy as np

from edgespec_sim.traces.generator_laws import (
    LAWS,
    WIFI_BASE_S,
    WIFI_JITTER_S,
    WIFI_STEP_S,
    CapacityLaw,
    LossLaw,
    NetworkLaw,
    OutageLaw,
)
from edgespec_sim.traces.network_trace import NetworkTrace, TraceError
from edgespec_sim.traces.statistics import Array

KINDS: Final = ("wifi", *LAWS)
MAX_GENERATED_ROWS: Final = 500_000
_DAY_S: Final = 86_400.0


def generate(kind: str, seed: int, duration_s: float) -> NetworkTrace:
    """A trace of one of ``KINDS``; raises ``TraceError`` for another or a duration of nothing."""
    if kind not in KINDS:
        raise TraceError(f"no generator {kind!r}; known are {', '.join(KINDS)}")
    if not 0.0 < duration_s < math.inf:
        raise TraceError(f"{kind}: duration_s is {duration_s}, but must be finite and above 0")
    if seed < 0:
        raise TraceError(f"{kind}: seed is {seed}, but must be at least 0")
    chance = np.random.default_rng((KINDS.index(kind), seed))
    source = f"generator {kind}, seed {seed}"
    if kind == "wifi":
        return _wifi(chance, source, duration_s)
    law = LAWS[kind]
    # Each column has a stream of its own, so that changing one leaves the others alone.
    delays, losses, gaps, up, down = chance.spawn(5)
    step_s = max(law.step_s, duration_s / MAX_GENERATED_ROWS)
    times_s = _rows(step_s, duration_s)
    return NetworkTrace(
        name=kind,
        source=source,
        time_s=_floats(times_s),
        rtt_s=_floats(_rtt_s(delays, law, times_s, step_s, duration_s)),
        duration_s=duration_s,
        loss=None if law.loss is None else _floats(_loss(losses, law.loss, times_s)),
        up_bits_per_s=_capacity(up, law.up, len(times_s), step_s),
        down_bits_per_s=_capacity(down, law.down, len(times_s), step_s),
        outages_s=_outages(gaps, law.outages, duration_s),
    )


def _rows(step_s: float, duration_s: float) -> Array:
    times_s = np.arange(max(math.ceil(duration_s / step_s), 1), dtype=np.float64)
    times_s *= step_s
    return times_s[times_s < duration_s]


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(values.tolist())


def _rtt_s(
    chance: np.random.Generator, law: NetworkLaw, times_s: Array, step_s: float, duration_s: float
) -> Array:
    count = len(times_s)
    left = 1.0 - law.epoch_share - law.daily_share - sum(share for share, _ in law.parts)
    process = math.sqrt(left) * chance.standard_normal(count)
    for share, correlation_s in law.parts:
        process += math.sqrt(share) * _correlated(chance, count, step_s / correlation_s)
    if law.epoch_share:
        process += math.sqrt(law.epoch_share) * _epochs(chance, times_s, law.epoch_s)
    if law.daily_share:
        process += math.sqrt(law.daily_share) * _daily(times_s, min(_DAY_S, duration_s), law)
    normal = NormalDist()
    points = [normal.inv_cdf(probability) for probability, _ in law.quantiles_ms]
    logs = [math.log(rtt_ms / 1000.0) for _, rtt_ms in law.quantiles_ms]
    return np.exp(np.interp(process, points, logs))


def _correlated(chance: np.random.Generator, count: int, step: float) -> Array:
    """Standard normal, correlation exp(-distance); ``step`` is the distance from row to row."""
    keep = math.exp(-step)
    fresh = math.sqrt(1.0 - keep * keep)
    noise = chance.standard_normal(count)
    noise[1:] *= fresh
    values = noise.tolist()
    for row in range(1, count):
        values[row] += keep * values[row - 1]
    return np.array(values)


def _epochs(chance: np.random.Generator, times_s: Array, epoch_s: float) -> Array:
    """A value an epoch, from one to the next on a line: a dish reports means over as long as an
    epoch. Scaled back to variance 1 everywhere."""
    place = times_s / epoch_s + chance.random()
    epoch = place.astype(np.int64)
    share = place - epoch
    levels = chance.standard_normal(int(epoch[-1]) + 2)
    mixed = (1.0 - share) * levels[epoch] + share * levels[epoch + 1]
    return np.asarray(mixed / np.hypot(1.0 - share, share))


def _daily(times_s: Array, day_s: float, law: NetworkLaw) -> Array:
    """Standard normal over a day, highest at the peak hour."""
    normal = NormalDist()
    table = np.array([normal.inv_cdf((rank + 0.5) / 1000) for rank in range(1000)])
    hours = (times_s % day_s) / day_s * 24.0
    distance = np.abs((hours - law.peak_hour + 12.0) % 24.0 - 12.0)
    rank = ((1.0 - distance / 12.0) * 1000).astype(np.int64)
    return np.asarray(table[np.clip(rank, 0, 999)])


def _loss(chance: np.random.Generator, law: LossLaw, times_s: Array) -> Array:
    window = (times_s / law.window_s).astype(np.int64)
    lossy = chance.random(int(window[-1]) + 1) < law.share
    # Spread over a factor of 3 with the law's mean: losses come few or many at a time.
    amount = law.loss * chance.uniform(0.5, 1.5, size=len(lossy))
    return np.asarray(np.where(lossy, amount, 0.0)[window])


def _capacity(
    chance: np.random.Generator, law: CapacityLaw | None, count: int, step_s: float
) -> tuple[float, ...] | None:
    if law is None:
        return None
    level = _correlated(chance, count, step_s / law.correlation_s)
    return _floats(law.median_mbps * 1e6 * np.exp(law.log_spread * level))


def _outages(
    chance: np.random.Generator, laws: tuple[OutageLaw, ...], duration_s: float
) -> tuple[tuple[float, float], ...]:
    found: list[tuple[float, float]] = []
    for law in laws:
        start_s = 0.0
        while True:
            start_s += chance.exponential(3600.0 / law.per_hour)
            length_s = 0.0
            while length_s < law.least_s:
                length_s = law.median_s * math.exp(law.log_spread * chance.standard_normal())
            if start_s + length_s >= duration_s:
                break
            found.append((start_s, start_s + length_s))
    apart: list[tuple[float, float]] = []
    for start_s, end_s in sorted(found):
        if not apart or start_s >= apart[-1][1]:
            apart.append((start_s, end_s))
    return tuple(apart)


def _wifi(chance: np.random.Generator, source: str, duration_s: float) -> NetworkTrace:
    step_s = max(WIFI_STEP_S, duration_s / MAX_GENERATED_ROWS)
    times_s = _rows(step_s, duration_s)
    count = len(times_s)
    late_s = 0.001 * chance.poisson(1.0, count)
    share = (WIFI_JITTER_S - 0.001) / 0.090
    stalled = chance.random(count) < share
    late_s += np.where(stalled, 0.0075 * chance.poisson(12.0, count), 0.0)
    # In order: nothing arrives before what was sent earlier.
    arrival_s = np.maximum.accumulate(times_s + late_s)
    rtt_s = WIFI_BASE_S + arrival_s - times_s
    return NetworkTrace("wifi", source, _floats(times_s), _floats(rtt_s), duration_s)
