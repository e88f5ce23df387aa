"""How fast one verifier serves n sessions at a time, measured on small event-driven worlds.

Theory of operation. A world of one verifier and n users who hardly think holds the number of active
sessions just below n. What each user gets there (time of a whole request, TTFT, TPOT) and how busy
the verifier is are points of a curve over the active ones; between them the curve is linear. Groups
of devices are mixed as they are among the active ones of the whole scenario. The mean field
(``mean_field.py``) is all arithmetic on such curves.

A moment of thought there has to be: without it a question follows the last commit by the same time
always, so it meets the passes at the same phase always, and the TTFT is off by a part of a pass.
Requests count that are asked after the first ones have ended: at the start all prompts would stand
in one queue. The world goes on for a request's time behind the window, and what is not over then
counts with its time per token so far: of those that ended alone, short answers would weigh too
much, and waiting for the longest would take as long again as all the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from edgespec.bench.arms import Arm
from edgespec_sim.scenario.sections import DeviceSection, Scenario
from edgespec_sim.world.assembly import World, WorldOutcome
from edgespec_sim.world.meters import RequestRecord
from edgespec_sim.world.surrounding import Surrounding

# Some hundred requests: texts differ, so a mean over them is good to 2 % or so.
SESSION_SECONDS = 240.0
_LEAST_CYCLES = 1.5
# First questions come within so many requests' times: within one, their prompts would stand in a
# queue that takes two more to go.
_START_CYCLES, _WARM_UP_CYCLES = 1.5, 2.0
# Long beside a pass, short beside a request.
_THINK_S = 0.1
_QUANTILES = (np.arange(50) + 0.5) / 50
P95_QUANTILE = 47
"""Place of the p95 in a row of a curve's table."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GroupCurve:
    """What one group of devices gets from a verifier with ``sizes`` active sessions."""

    sizes: Floats
    cycle_s: Floats
    """A whole request, from asking to the last token."""
    ttft_s: Floats
    """(size, quantile), as ``tpot_s``; quantiles are evenly spaced."""
    tpot_s: Floats

    def cycle_at(self, active: Floats) -> Floats:
        return np.interp(active, self.sizes, self.cycle_s)

    def spread_at(self, table: Floats, active: Floats) -> Floats:
        """Quantiles of ``table`` (``ttft_s`` or ``tpot_s``) at each number: (number, quantile)."""
        columns = [np.interp(active, self.sizes, column) for column in table.T]
        return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True)
class ServiceCurve:
    """Of one kind of verifier under one arm."""

    groups: Mapping[str, GroupCurve]
    sizes: Floats
    """From 0 on."""
    busy: Floats
    """Share of time in which a pass runs."""
    largest: int
    """Users of the largest world it was measured on."""

    def busy_at(self, active: Floats) -> Floats:
        return np.interp(active, self.sizes, self.busy)


@dataclass(frozen=True, slots=True)
class Point:
    """One world: its groups' records, and what the whole took."""

    counts: Mapping[str, int]
    outcome: WorldOutcome
    tokens: Mapping[str, float]
    """Of a mean answer."""

    def records(self, group: str) -> list[RequestRecord]:
        return [one for one in self.outcome.meters.records if one.group == group]

    def cycle_s(self, group: str) -> float:
        """Of a whole request with an answer of mean length: those that were played have another
        mean by chance. Infinite where none began."""
        begun = [one for one in self.records(group) if one.ttft_s is not None and not one.failed]
        if not begun:
            return math.inf
        ttft_s = fmean(one.ttft_s for one in begun if one.ttft_s is not None)
        steps = sum(one.tokens - 1 for one in begun)
        spans_s = sum((one.pace_s or 0.0) * (one.tokens - 1) for one in begun)
        return ttft_s + (self.tokens[group] - 1.0) * spans_s / max(1, steps)

    @property
    def active(self) -> float:
        """Sessions, on average."""
        return sum(
            count / (1.0 + _THINK_S / self.cycle_s(group)) for group, count in self.counts.items()
        )


def point_world(
    scenario: Scenario, arm: Arm, kind: str, counts: Mapping[str, int], session_seconds: float
) -> Scenario:
    """One verifier and so many users of each group who hardly think."""
    total = sum(counts.values())
    cycle_s = max(_guessed_cycle_s(scenario.devices[group]) for group in counts)
    return replace(
        scenario,
        shards=1,
        arms=(arm,),
        arrivals=None,
        warm_up_s=_WARM_UP_CYCLES * cycle_s,
        duration_s=_WARM_UP_CYCLES * cycle_s
        + max(session_seconds / total, _LEAST_CYCLES * cycle_s),
        drain_s=cycle_s,
        devices={
            group: _restless(scenario.devices[group], count, _START_CYCLES * cycle_s)
            for group, count in counts.items()
        },
        verifiers={kind: replace(scenario.verifiers[kind], count=1)},
        distances_ms={
            group: row for group, row in scenario.distances_ms.items() if group in counts
        },
    )


def point_of(scenario: Scenario, counts: Mapping[str, int], outcome: WorldOutcome) -> Point:
    """What ``point_world`` came to."""
    return Point(counts, outcome, {group: mean_tokens(scenario.devices[group]) for group in counts})


def mixed_counts(weights: Mapping[str, float], size: int) -> list[dict[str, int]]:
    """The worlds that stand for ``size`` sessions: a mixed one; of one session, one a group."""
    return [{group: 1} for group in weights] if size == 1 else [dealt(weights, size)]


def curve_of(points: Mapping[int, Sequence[Point]], weights: Mapping[str, float]) -> ServiceCurve:
    """``points`` by size; ``weights``: devices of each group times the share of time for which they
    are active (any unit)."""
    ordered = [points[size] for size in sorted(points)]
    active = [0.0, *(_mean_of(weights, one, lambda point: point.active) for one in ordered)]
    busy = [0.0, *(_mean_of(weights, one, _busy) for one in ordered)]
    groups = {group: _group(group, ordered) for group in weights}
    return ServiceCurve(groups, np.array(active), np.array(busy), max(points))


def _group(group: str, points: Sequence[Sequence[Point]]) -> GroupCurve:
    found = [point for same in points for point in same if point.counts.get(group)]
    return GroupCurve(
        np.array([point.active for point in found]),
        np.array([point.cycle_s(group) for point in found]),
        np.stack([_spread([one.ttft_s for one in point.records(group)]) for point in found]),
        np.stack([_spread([one.pace_s for one in point.records(group)]) for point in found]),
    )


class CurveMeter:
    """Measures points as they are wanted and keeps them."""

    def __init__(
        self,
        scenario: Scenario,
        arm: Arm,
        kind: str,
        surrounding: Surrounding,
        seed: int,
        session_seconds: float,
    ) -> None:
        self._scenario, self._arm, self._kind, self._seed = scenario, arm, kind, seed
        self._session_seconds = session_seconds
        self._surrounding = replace(surrounding, checks=False)
        self._points: dict[int, list[Point]] = {}

    def curve(self, weights: Mapping[str, float], largest: int) -> ServiceCurve:
        """Points at 1, 2, 4, ... up to ``largest`` or above; ``weights`` as in ``curve_of``."""
        for doublings in range((largest - 1).bit_length() + 1):
            size = 1 << doublings
            if size not in self._points:
                self._points[size] = [self._play(one) for one in mixed_counts(weights, size)]
        return curve_of(self._points, weights)

    def _play(self, counts: Mapping[str, int]) -> Point:
        world = point_world(self._scenario, self._arm, self._kind, counts, self._session_seconds)
        seed = f"{self._seed}/curve/{sum(counts.values())}"
        outcome = World(world, self._arm, seed, self._surrounding).run()
        return point_of(self._scenario, counts, outcome)


def _busy(point: Point) -> float:
    return point.outcome.verifiers[0].utilisation


def _mean_of(
    weights: Mapping[str, float], points: Sequence[Point], value: Callable[[Point], float]
) -> float:
    """Over the worlds of one size, each as heavy as its groups."""
    shares = [sum(weights[group] for group in point.counts) for point in points]
    return float(np.average([value(point) for point in points], weights=shares))


def mean_tokens(section: DeviceSection) -> float:
    """Of an answer: the log-normal spread leaves the median where it is and moves the mean."""
    load = section.workload
    return load.output_tokens * math.sqrt(1.0 + load.length_spread**2)


def dealt(weights: Mapping[str, float], size: int) -> dict[str, int]:
    """``size`` devices in the proportion of ``weights`` (largest remainders), empty groups out."""
    total = sum(weights.values())
    exact = {group: size * weight / total for group, weight in weights.items()}
    counts = {group: int(share) for group, share in exact.items()}
    by_rest = sorted(exact, key=lambda group: counts[group] - exact[group])
    for group in by_rest[: size - sum(counts.values())]:
        counts[group] += 1
    return {group: count for group, count in counts.items() if count}


def _restless(section: DeviceSection, count: int, within_s: float) -> DeviceSection:
    load = replace(
        section.workload,
        think_s=_THINK_S,
        requests=0,
        start_within_s=within_s,
        start_thinking=False,
    )
    return replace(section, count=count, workload=load, battery_j=None)


def _guessed_cycle_s(section: DeviceSection) -> float:
    """Only to choose how long to look: a token takes 20 ms or so."""
    return 0.5 + 0.02 * mean_tokens(section)


def _spread(values: list[float | None]) -> Floats:
    known = [value for value in values if value is not None]
    return np.quantile(known, _QUANTILES) if known else np.full(len(_QUANTILES), np.nan)
