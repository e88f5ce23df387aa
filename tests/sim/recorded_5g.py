"""The 5G air of a link (``links/grants_5g.py``) beside recorded round trips.

The recordings are CICV5G's: a car sends a message to a server near its road every 30 to 55 ms and
receives it back; the times are whole milliseconds. Each recorded message is sent again over the
modelled air, up and down, with the settings of a link's ``radio_5g: {}``. One number is fitted: the
constant rest of the round trip (the network behind the cell and both programs), on the first half
of each recording. The second half is compared, quantile by quantile and by the greatest difference
of the two distribution functions (Kolmogorov-Smirnov). For comparison, a link without grants:
a constant and an exponential jitter, both fitted to the first half.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from edgespec_sim.links.grants_5g import DeviceAir
from edgespec_sim.replication import quantile
from edgespec_sim.scenario.radio_5g import Radio5gSection

RECORDINGS: Final = (
    "urban_n78_v0_run01",
    "urban_n78_v20_run01",
    "urban_n78_v30_run01",
    "30ms_n78_v2v_info-01",
    "arterial_n78_v50_run02",
    "urban_n8_v20_run01",
)
"""Recordings with a good signal: n78 is a public network, n8 a private one."""
SHARES: Final = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
MESSAGE_BYTES: Final = 200
"""Assumed size of a message with a position. It fits into the first grant, as 300 bytes do."""
_REST_STEP_MS: Final = 0.25
_MAX_REST_MS: Final = 40.0


@dataclass(frozen=True, slots=True)
class Compared:
    """One recording beside a model of it. Times are in milliseconds."""

    recording: str
    model: str
    rest_ms: float
    """The fitted constant part."""
    messages: int
    recorded_ms: tuple[float, ...]
    """Quantiles at ``SHARES``."""
    modelled_ms: tuple[float, ...]
    distance: float
    """Greatest difference of the distribution functions."""


def read_recording(path: Path) -> list[tuple[float, int]]:
    """Return pairs of sending time in seconds and round trip in milliseconds."""
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return [(int(row[0]) / 1e3, int(row[2])) for row in rows if len(row) > 2]


def play_air(times_s: Sequence[float], section: Radio5gSection, seed: int = 1) -> list[float]:
    """Return the milliseconds that each message takes on the air, up and down."""
    air, begin_s = DeviceAir(section, seed), times_s[0]
    sent_s = [time_s - begin_s for time_s in times_s]
    # Messages meet the air in the order of their times, as on an event queue.
    events = [(at_s, 0, number) for number, at_s in enumerate(sent_s)]
    heapq.heapify(events)
    took_ms = [0.0] * len(sent_s)
    while events:
        now_s, way, number = heapq.heappop(events)
        if way == 0:
            heapq.heappush(events, (air.up.arrival(now_s, MESSAGE_BYTES), 1, number))
        else:
            took_ms[number] = 1e3 * (air.down.arrival(now_s, MESSAGE_BYTES) - sent_s[number])
    return took_ms


def find_distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the greatest difference of two empirical distribution functions."""
    one, other = sorted(left), sorted(right)
    return max(
        abs(bisect.bisect_right(one, at) / len(one) - bisect.bisect_right(other, at) / len(other))
        for at in {*one, *other}
    )


def fit_rest_ms(recorded: Sequence[int], modelled: Sequence[float]) -> float:
    """Return the constant that brings the modelled times nearest to the recorded ones."""
    steps = range(int(_MAX_REST_MS / _REST_STEP_MS))
    return min(
        (step * _REST_STEP_MS for step in steps),
        key=lambda rest_ms: find_distance(recorded, round_ms(modelled, rest_ms)),
    )


def round_ms(modelled: Sequence[float], rest_ms: float) -> list[float]:
    """Return whole milliseconds, as the recordings have them."""
    return [float(math.floor(one + rest_ms + 0.5)) for one in modelled]


def make_jitter(recorded: Sequence[int], count: int) -> Callable[[], list[float]]:
    """Return a maker of exponential delays each way whose mean is the recorded one above the
    least."""
    mean_ms = (statistics.fmean(recorded) - min(recorded)) / 2.0
    dice = random.Random(1)
    return lambda: [
        dice.expovariate(1.0 / mean_ms) + dice.expovariate(1.0 / mean_ms) for _ in range(count)
    ]


def compare(name: str, rows: Sequence[tuple[float, int]]) -> list[Compared]:
    """Fit the rest to the first half of a recording, and compare the second."""
    half = len(rows) // 2
    first, second = [rtt for _, rtt in rows[:half]], [rtt for _, rtt in rows[half:]]
    times_s = [time_s for time_s, _ in rows]
    usual = Radio5gSection()
    models = {
        "radio_5g: {}": play_air(times_s, usual),
        "sr_period_ms: 10": play_air(times_s, replace(usual, sr_period_ms=10.0)),
        "bler: 0": play_air(times_s, replace(usual, bler=0.0)),
        "constant and jitter": make_jitter(first, len(rows))(),
    }
    found = []
    for model, took_ms in models.items():
        rest_ms = fit_rest_ms(first, took_ms[:half])
        modelled = round_ms(took_ms[half:], rest_ms)
        found.append(
            Compared(
                name,
                model,
                rest_ms,
                len(second),
                tuple(quantile(sorted(map(float, second)), share) for share in SHARES),
                tuple(quantile(sorted(modelled), share) for share in SHARES),
                find_distance(second, modelled),
            )
        )
    return found
