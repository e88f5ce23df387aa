"""Traces drawn from the laws of real networks: the same seed gives the same trace.

Theory of operation (a Gaussian copula). A process z(t) with standard normal values describes how
good each moment is. The law's quantiles turn it into a round-trip time, so the distribution is the
published one with any dependence in time. z is the root-weighted sum of independent parts: slow and
fast ones with exponential correlation, one value per epoch, the hour of the day, and noise in each
row. So a stretch of bad moments is a burst of delays, as in recordings, and not a coin flip per
row.

A trace shorter than a day contains a whole day's congestion, compressed. Long traces get wider
rows, so that there are at most ``MAX_GENERATED_ROWS``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from edgespec_sim.links.network_trace import Array, NetworkTrace, TraceError

# --- parameters of the generators, each with the data that it was fitted to, or marked as assumed
# ---
# A law gives the distribution of round-trip times (quantiles), their dependence in time (shares of
# a Gaussian process, see above), and how often packets and whole seconds are lost. Delay statistics
# were taken over the recorded traces of the class:
# lte        PAM 2025 multi-carrier driving study (NUWiNS, CC0-1.0): ping at 5 Hz on US highways,
#            three operators, two days; LTE and 5G mixed. 11 runs of losses in 9880 s: 7 of 1 to
#            2.8 s and 4 of at least 30 s, where the recordings end.
# 5g         CICV5G (CC-BY-4.0): application echo over public n78 and private n8, urban and arterial
#            runs of a car, to a server near the track. No outage of a second in 1473 s.
# starlink   FjordLink (CC-BY-4.0): a dish on a ship, dish to point of presence, 1 Hz. No second was
#            lost entirely in 6 h. Satellites are reassigned every 15 s (arXiv 2310.09242).
# wan        Jitterbug (MIT): one interdomain path over 10 days, congested from 13 to 19 h UTC.
# wifi       No permissive recording: steps of 1 ms, Poisson(1); for a share x of the packets
#            Poisson(12) steps of 7.5 ms more; released in order; x = (jitter - 1 ms) / 90 ms.
# broadband  No recording. Assumed: cable with an idle RTT of about 20 ms and a tail from other
#            traffic of the household. The FCC's Measuring Broadband America reports have a loss
#            below 0.4 % as their best class; 0.1 % is assumed.
# Values that the recordings cannot provide are assumed and listed here. Outages of 5g (1 per hour)
# and starlink (0.5 per hour, the upper limit that 6 h without any allow by the rule of three) with
# their lengths. Median capacities: starlink 117 Mbit/s down and 18 up (Ookla Speedtest, Maine, end
# of 2024), 5g 160 down (Ookla, Poland, first quarter of 2025). The others, and every spread and
# correlation of a capacity over time, are round figures. wifi and wan have no capacity.


@dataclass(frozen=True, slots=True)
class OutageLaw:
    """Outages that start as a Poisson process, with log-normal lengths."""

    per_hour: float
    median_s: float
    log_spread: float
    least_s: float = 1.0
    """Shorter outages are drawn again, because less than a second counts as loss."""


@dataclass(frozen=True, slots=True)
class CapacityLaw:
    """Log-normal capacity with exponential correlation."""

    median_mbps: float
    log_spread: float
    correlation_s: float = 20.0


@dataclass(frozen=True, slots=True)
class LossLaw:
    """Windows of time with losses and windows without."""

    window_s: float
    share: float
    """Share of the windows that have losses."""
    loss: float
    """Share of packets lost in such a window."""


@dataclass(frozen=True, slots=True)
class NetworkLaw:
    """The law of one kind of network.

    ``quantiles_ms`` holds pairs of (probability, RTT), increasing; between them the logarithm is
    linear in the normal quantile. ``parts`` holds pairs of (share of the variance, correlation time
    in s) of exponential processes. ``epoch_share`` is the share of a process with one value per
    epoch, blended into the next. ``daily_share`` is the share that follows the hour. The remaining
    share is independent from row to row."""

    step_s: float
    quantiles_ms: tuple[tuple[float, float], ...]
    parts: tuple[tuple[float, float], ...] = ()
    epoch_s: float = 0.0
    epoch_share: float = 0.0
    daily_share: float = 0.0
    peak_hour: float = 16.0
    loss: LossLaw | None = None
    outages: tuple[OutageLaw, ...] = ()
    up: CapacityLaw | None = None
    down: CapacityLaw | None = None


LAWS: Final[dict[str, NetworkLaw]] = {
    "lte": NetworkLaw(
        step_s=0.2,
        quantiles_ms=(
            (0.001, 15.3), (0.01, 26.2), (0.05, 32.8), (0.1, 38.2), (0.25, 46.6), (0.5, 55.9),
            (0.75, 68.3), (0.9, 87.7), (0.95, 121.0), (0.98, 197.0), (0.99, 271.5), (0.995, 446.0),
            (0.999, 1297.0), (0.9995, 1729.0),
        ),
        parts=((0.38, 28.0), (0.25, 1.1)),
        loss=LossLaw(5.0, 0.065, 0.05),
        outages=(OutageLaw(2.55, 1.7, 0.35), OutageLaw(1.46, 35.0, 0.3, least_s=20.0)),
        up=CapacityLaw(10.0, 0.7),
        down=CapacityLaw(30.0, 0.8),
    ),
    "5g": NetworkLaw(
        step_s=0.055,
        quantiles_ms=(
            (0.001, 12.0), (0.01, 12.6), (0.05, 13.2), (0.1, 13.8), (0.25, 14.9), (0.5, 16.0),
            (0.75, 18.0), (0.9, 21.0), (0.95, 23.0), (0.98, 26.0), (0.99, 28.0), (0.995, 36.0),
            (0.999, 227.0), (0.9995, 264.0),
        ),
        parts=((0.10, 0.5), (0.07, 5.0)),
        outages=(OutageLaw(1.0, 1.5, 0.3),),
        up=CapacityLaw(30.0, 0.5),
        down=CapacityLaw(160.0, 0.6),
    ),
    "starlink": NetworkLaw(
        step_s=1.0,
        quantiles_ms=(
            (0.001, 19.7), (0.01, 20.5), (0.05, 21.8), (0.1, 22.8), (0.25, 25.0), (0.5, 29.6),
            (0.75, 36.6), (0.9, 44.7), (0.95, 50.5), (0.98, 59.7), (0.99, 66.5), (0.995, 73.3),
            (0.999, 95.2), (0.9995, 106.2),
        ),
        parts=((0.25, 100.0),),
        epoch_s=15.0,
        epoch_share=0.74,
        loss=LossLaw(1.0, 0.03, 0.065),
        outages=(OutageLaw(0.5, 2.0, 0.5),),
        up=CapacityLaw(18.0, 0.4, 15.0),
        down=CapacityLaw(117.0, 0.4, 15.0),
    ),
    "broadband": NetworkLaw(
        step_s=0.2,
        quantiles_ms=(
            (0.001, 12.0), (0.05, 15.0), (0.25, 17.5), (0.5, 20.0), (0.75, 23.0), (0.9, 28.0),
            (0.95, 35.0), (0.99, 60.0), (0.999, 120.0),
        ),
        parts=((0.5, 60.0), (0.2, 2.0)),
        loss=LossLaw(5.0, 0.02, 0.05),
        up=CapacityLaw(20.0, 0.1, 300.0),
        down=CapacityLaw(300.0, 0.15, 300.0),
    ),
    "wan": NetworkLaw(
        step_s=15.0,
        quantiles_ms=(
            (0.001, 7.9), (0.01, 8.3), (0.05, 8.8), (0.1, 9.1), (0.25, 10.2), (0.5, 12.4),
            (0.65, 30.0), (0.75, 44.7), (0.9, 68.8), (0.95, 78.9), (0.98, 90.7), (0.99, 100.3),
            (0.995, 109.0), (0.999, 126.6),
        ),
        parts=((0.30, 600.0),),
        daily_share=0.65,
    ),
}  # fmt: skip
WIFI_STEP_S: Final = 0.02
WIFI_BASE_S: Final = 0.002
WIFI_JITTER_S: Final = 0.002
KINDS: Final = ("wifi", *LAWS)
MAX_GENERATED_ROWS: Final = 500_000
_DAY_S: Final = 86_400.0


def generate(kind: str, seed: int, duration_s: float) -> NetworkTrace:
    """Return a trace of one of ``KINDS``. Raises ``TraceError`` for another kind."""
    if kind not in KINDS:
        raise TraceError(f"no generator {kind!r}; known are {', '.join(KINDS)}")
    chance = np.random.default_rng((KINDS.index(kind), seed))
    source = f"generator {kind}, seed {seed}"
    if kind == "wifi":
        return _generate_wifi(chance, source, duration_s)
    law = LAWS[kind]
    # Each column has its own random stream, so that a change of one does not affect the others.
    delays, losses, gaps, up, down = chance.spawn(5)
    step_s = max(law.step_s, duration_s / MAX_GENERATED_ROWS)
    times_s = _make_rows(step_s, duration_s)
    return NetworkTrace(
        name=kind,
        source=source,
        time_s=_to_floats(times_s),
        rtt_s=_to_floats(_rtt_s(delays, law, times_s, step_s, duration_s)),
        duration_s=duration_s,
        loss=None if law.loss is None else _to_floats(_draw_loss(losses, law.loss, times_s)),
        up_bits_per_s=_draw_capacity(up, law.up, len(times_s), step_s),
        down_bits_per_s=_draw_capacity(down, law.down, len(times_s), step_s),
        outages_s=_draw_outages(gaps, law.outages, duration_s),
    )


def _make_rows(step_s: float, duration_s: float) -> Array:
    times_s = np.arange(max(math.ceil(duration_s / step_s), 1), dtype=np.float64)
    times_s *= step_s
    return times_s[times_s < duration_s]


def _to_floats(values: Array) -> tuple[float, ...]:
    return tuple(values.tolist())


def _rtt_s(
    chance: np.random.Generator, law: NetworkLaw, times_s: Array, step_s: float, duration_s: float
) -> Array:
    count = len(times_s)
    parts = math.fsum(share for share, _ in law.parts)
    left = 1.0 - law.epoch_share - law.daily_share - parts
    process = math.sqrt(left) * chance.standard_normal(count)
    for share, correlation_s in law.parts:
        process += math.sqrt(share) * _draw_correlated(chance, count, step_s / correlation_s)
    if law.epoch_share:
        process += math.sqrt(law.epoch_share) * _draw_epochs(chance, times_s, law.epoch_s)
    if law.daily_share:
        process += math.sqrt(law.daily_share) * _draw_daily(times_s, min(_DAY_S, duration_s), law)
    normal = NormalDist()
    points = [normal.inv_cdf(probability) for probability, _ in law.quantiles_ms]
    logs = [math.log(rtt_ms / 1000.0) for _, rtt_ms in law.quantiles_ms]
    return np.exp(np.interp(process, points, logs))


def _draw_correlated(chance: np.random.Generator, count: int, step: float) -> Array:
    """Return standard normal values with correlation exp(-distance). ``step`` is the distance
    between rows."""
    keep = math.exp(-step)
    fresh = math.sqrt(1.0 - keep * keep)
    noise = chance.standard_normal(count)
    noise[1:] *= fresh
    values = noise.tolist()
    for row in range(1, count):
        values[row] += keep * values[row - 1]
    return np.array(values)


def _draw_epochs(chance: np.random.Generator, times_s: Array, epoch_s: float) -> Array:
    """Return one value per epoch, interpolated linearly to the next, since a dish reports means
    over the length of an epoch. The result is scaled to variance 1 everywhere."""
    place = times_s / epoch_s + chance.random()
    epoch = place.astype(np.int64)
    share = place - epoch
    levels = chance.standard_normal(int(epoch[-1]) + 2)
    mixed = (1.0 - share) * levels[epoch] + share * levels[epoch + 1]
    return np.asarray(mixed / np.hypot(1.0 - share, share))


def _draw_daily(times_s: Array, day_s: float, law: NetworkLaw) -> Array:
    """Return standard normal values over a day, highest at the peak hour."""
    normal = NormalDist()
    table = np.array([normal.inv_cdf((rank + 0.5) / 1000) for rank in range(1000)])
    hours = (times_s % day_s) / day_s * 24.0
    distance = np.abs((hours - law.peak_hour + 12.0) % 24.0 - 12.0)
    rank = ((1.0 - distance / 12.0) * 1000).astype(np.int64)
    return np.asarray(table[np.clip(rank, 0, 999)])


def _draw_loss(chance: np.random.Generator, law: LossLaw, times_s: Array) -> Array:
    window = (times_s / law.window_s).astype(np.int64)
    lossy = chance.random(int(window[-1]) + 1) < law.share
    # The amount is spread over a factor of 3 around the law's mean, since losses vary in density.
    amount = law.loss * chance.uniform(0.5, 1.5, size=len(lossy))
    return np.asarray(np.where(lossy, amount, 0.0)[window])


def _draw_capacity(
    chance: np.random.Generator, law: CapacityLaw | None, count: int, step_s: float
) -> tuple[float, ...] | None:
    if law is None:
        return None
    level = _draw_correlated(chance, count, step_s / law.correlation_s)
    return _to_floats(law.median_mbps * 1e6 * np.exp(law.log_spread * level))


def _draw_outages(
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


def _generate_wifi(chance: np.random.Generator, source: str, duration_s: float) -> NetworkTrace:
    times_s = _make_rows(max(WIFI_STEP_S, duration_s / MAX_GENERATED_ROWS), duration_s)
    count = len(times_s)
    late_s = 0.001 * chance.poisson(1.0, count)
    share = (WIFI_JITTER_S - 0.001) / 0.090
    stalled = chance.random(count) < share
    late_s += np.where(stalled, 0.0075 * chance.poisson(12.0, count), 0.0)
    # Packets stay in order: none arrives before one that was sent earlier.
    arrival_s = np.maximum.accumulate(times_s + late_s)
    rtt_s = WIFI_BASE_S + arrival_s - times_s
    return NetworkTrace("wifi", source, _to_floats(times_s), _to_floats(rtt_s), duration_s)
