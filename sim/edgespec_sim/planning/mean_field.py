"""A scenario of any size as a closed queueing network: seconds for ten million devices.

Theory of operation. Each kind of verifier is a station of a product-form network (``stations.py``);
how fast it serves so many sessions is measured on small worlds (``service_curves.py``).

A scenario starts with nobody active. ``transient`` follows the mean of that over the scenario's
duration; without it, what is told is the law in the long run.

Assumptions, and so where it breaks. Verifiers of a kind are alike, and none restarts. Devices are
connected: their first requests pay no round trip for that. A link that
all devices share is shared here by the sessions of one verifier only. Users stay with the nearest
kind of verifier, however full. A session takes as long as it would if the number of active ones
stayed as it is: bursts shorter than a request are averaged too hard, and near ``max_sessions``,
where refused devices come back later, there is no queue like it (``ValueError``). Batteries last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from edgespec.bench.arms import Arm
from edgespec_sim.association import LowestDelay, MostCompute, RandomAssociation
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.run_summary import QUANTILES, Spread
from edgespec_sim.scenario.sections import DeviceSection, Scenario, TokensFrom
from edgespec_sim.scenario.verifiers import Operation, law_of
from edgespec_sim.world.assembly import World, WorldOutcome
from edgespec_sim.world.meters import RequestRecord
from edgespec_sim.world.network import Network
from edgespec_sim.world.surrounding import Surrounding

# --- how fast one verifier serves n sessions at a time, measured on small event-driven worlds ---
# A world of one verifier and n users who hardly think holds the number of active sessions just
# below n. What each user gets there (time of a whole request, TTFT, TPOT) and how busy the
# verifier is are points of a curve over the active ones; between them the curve is linear. Groups
# of devices are mixed as they are among the active ones of the whole scenario. The mean field
# (``mean_field.py``) is all arithmetic on such curves.
# A moment of thought there has to be: without it a question follows the last commit by the same
# time always, so it meets the passes at the same phase always, and the TTFT is off by a part of a
# pass. Requests count that are asked after the first ones have ended: at the start all prompts
# would stand in one queue. The world goes on for a request's time behind the window, and what is
# not over then counts with its time per token so far: of those that ended alone, short answers
# would weigh too much, and waiting for the longest would take as long again as all the others.


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
    return replace(section, count=count, workload=load)


def _guessed_cycle_s(section: DeviceSection) -> float:
    """Only to choose how long to look: a token takes 20 ms or so."""
    return 0.5 + 0.02 * mean_tokens(section)


def _spread(values: list[float | None]) -> Floats:
    known = [value for value in values if value is not None]
    return np.quantile(known, _QUANTILES) if known else np.full(len(_QUANTILES), np.nan)


# --- verifiers as stations of a closed queueing network ----------------------------------------
# how many sessions they hold, how often.
# Each user either thinks (mean ``think_s``) or is being served; a verifier with n active sessions
# serves all of them at once, each at a rate that depends on n alone. Such a network of delay
# stations and processor-sharing stations has a product-form stationary law in which only the
# means of think and service times count, not their distributions (Baskett, Chandy, Muntz and
# Palacios 1975; Kelly, Reversibility and Stochastic Networks, 1979, chapter 3; for one verifier
# it is the machine-repairman model). The service rates come from ``service_curves.py``.
#     balanced  policies that go where it is fastest keep equal verifiers equally full: all of one
#               are one station, and its sessions are dealt out evenly
#     random    each verifier is a station of its own; the others are there only as their mean
# A scenario starts with nobody active. ``transient`` follows the mean of that over the scenario's
# duration (the fluid limit: Kurtz 1970), with Poisson numbers around it; without it, what is told
# is the law in the long run.


_STEP_S = 0.1

# Numbers of sessions this many standard deviations from the mean are as good as impossible.
_DEVIATIONS = 6.0
_MOST_STATES = 400
_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class Users:
    """Those of one group who use one kind of verifier."""

    group: str
    count: float
    think_s: float
    start_within_s: float


@dataclass(frozen=True, slots=True)
class Law:
    """States of the verifiers of one kind."""

    active: Floats
    """Sessions at one verifier."""
    time: Floats
    """Share of time in that state; sum 1."""
    ending: Mapping[str, Floats]
    """Requests of each group that end per second, over all verifiers, while in that state."""


@dataclass(frozen=True, slots=True)
class Station:
    """The verifiers of one kind and who uses them. ``pooled``: how many of them act as one."""

    count: int
    pooled: int
    users: tuple[Users, ...]
    curve: ServiceCurve

    def _cycle_s(self, active: float) -> Floats:
        at = np.array([active])
        return np.array([self.curve.groups[one.group].cycle_at(at)[0] for one in self.users])

    def shares(self, active: float) -> Floats:
        """Users of each group who are being served in the long run, if each verifier had
        ``active`` sessions; in sessions a verifier."""
        cycle_s = self._cycle_s(active)
        think_s = np.array([one.think_s for one in self.users])
        counts = np.array([one.count for one in self.users])
        shares: Floats = counts * cycle_s / (think_s + cycle_s) / self.count
        return shares

    def mean_active(self) -> float:
        """The number of sessions that keeps itself up: users served, if it is as full as that."""
        low, high = 0.0, sum(one.count for one in self.users) / self.count
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.shares(middle).sum() > middle else (low, middle)
        return low

    def stationary(self) -> Law:
        """The product form over the sessions of ``pooled`` verifiers, on a window around its
        mean."""
        mean = self.mean_active()
        mix = self.shares(mean) / self.shares(mean).sum()
        states, weights = self._chain(mean, mix)
        for _ in range(3):  # what the others hold on average is what this one does
            mean = float(states @ weights) / self.pooled
            states, weights = self._chain(mean, mix)
        bins = max(1, math.ceil(len(states) / _MOST_STATES))
        starts = np.arange(0, len(states), bins)
        time = np.add.reduceat(weights, starts)
        total = np.maximum(time, 1e-300)
        active = np.add.reduceat(states * weights, starts) / total / self.pooled
        return Law(active, time, self._ending(active, mix))

    def _chain(self, mean: float, mix: Floats) -> tuple[Floats, Floats]:
        counts = np.array([one.count for one in self.users])
        think_s = np.array([one.think_s for one in self.users])
        centre = mean * self.pooled
        reach = _DEVIATIONS * math.sqrt(centre + 1.0) + 2.0
        low = max(0, int(centre - reach))
        states = np.arange(low, min(int(centre + reach), int(counts.sum())) + 1, dtype=float)
        elsewhere = (self.count - self.pooled) * mean
        thinking = counts - np.outer(states + elsewhere, mix)
        share = self.pooled / self.count
        begin = (np.maximum(thinking, 0.0) / think_s).sum(axis=1) * share
        ending = self._ending(states / self.pooled, mix)
        end = np.sum(list(ending.values()), axis=0) * share
        steps = np.log(np.maximum(begin[:-1], 1e-300)) - np.log(np.maximum(end[1:], 1e-300))
        logs = np.concatenate([[0.0], np.cumsum(steps)])
        weights = np.exp(logs - logs.max())
        return states, weights / weights.sum()

    def _ending(self, active: Floats, mix: Floats) -> dict[str, Floats]:
        return {
            one.group: self.count * active * part / self.curve.groups[one.group].cycle_at(active)
            for one, part in zip(self.users, mix, strict=True)
        }

    def transient(self, duration_s: float) -> Law:
        """From nobody active to the end of the scenario."""
        steps = max(1, round(duration_s / _STEP_S))
        step_s = duration_s / steps
        counts = np.array([one.count for one in self.users])
        think_s = np.array([one.think_s for one in self.users])
        start_s = np.array([max(one.start_within_s, step_s) for one in self.users])
        thinking, active = np.zeros(len(counts)), np.zeros(len(counts))
        laws: list[Law] = []
        for step in range(steps):
            # The part of this step in which first questions still come.
            fresh_s = np.clip(start_s - step * step_s, 0.0, step_s)
            asking = counts / start_s * fresh_s + thinking * -np.expm1(-step_s / think_s)
            thinking -= thinking * -np.expm1(-step_s / think_s)
            active += asking
            law = self._around(active)
            laws.append(law)
            ending = np.array([float(law.ending[one.group] @ law.time) for one in self.users])
            left = np.minimum(active, ending * step_s)
            active -= left
            thinking += left
        return Law(
            np.concatenate([law.active for law in laws]),
            np.concatenate([law.time for law in laws]) / steps,
            {
                one.group: np.concatenate([law.ending[one.group] for law in laws])
                for one in self.users
            },
        )

    def _around(self, active: Floats) -> Law:
        """Poisson numbers of sessions about their mean, at one moment."""
        total = float(active.sum())
        mean = total * self.pooled / self.count
        reach = _DEVIATIONS * math.sqrt(mean) + 1.0
        low, high = max(0, int(mean - reach)), int(mean + reach) + 1
        states = np.unique(np.linspace(low, high, 25).round())
        logs = states * math.log(max(mean, 1e-300)) - mean - _log_factorial(states)
        # A state stands for all numbers nearer to it than to its neighbours.
        widths = np.gradient(states) if len(states) > 1 else np.ones(1)
        weights = np.exp(logs) * widths
        mix = active / total if total else np.full(len(active), 1.0 / len(active))
        at = states / self.pooled
        return Law(at, weights / weights.sum(), self._ending(at, mix))


def _log_factorial(numbers: Floats) -> Floats:
    return np.array([math.lgamma(number + 1.0) for number in numbers])


_BALANCED = (LowestDelay.name, MostCompute.name)
LEAST_THINK_S = 1e-3


@dataclass(frozen=True, slots=True)
class MeanField:
    """What a scenario comes to under one arm; spreads have no count."""

    arm: Arm
    devices: int
    verifiers: int
    active: float
    """Sessions at a verifier, mean over time and verifiers."""
    utilisation: float
    tokens_per_second: float
    requests_per_second: float
    ttft_s: Spread
    tpot_s: Spread


class MeanFieldModel:
    """Solves one scenario for any arm and size; what was measured once is kept.

    Raises ``ValueError`` for what a mean field cannot say, naming key, value and limit.
    """

    def __init__(
        self,
        scenario: Scenario,
        surrounding: Surrounding,
        *,
        seed: int = 1,
        session_seconds: float = SESSION_SECONDS,
    ) -> None:
        """``session_seconds``: how much each small world plays; its square root is precision."""
        check_mean_field(scenario)
        self._scenario, self._surrounding = scenario, surrounding
        self._seed, self._session_seconds = seed, session_seconds
        self._meters: dict[tuple[Arm, str], CurveMeter] = {}

    def solve(self, arm: Arm, *, scale: float = 1.0, transient: bool = True) -> MeanField:
        """``scale`` multiplies devices and verifiers."""
        scenario = self._scenario
        counts = {kind: round(scale * one.count) for kind, one in scenario.verifiers.items()}
        pooled = pools(scenario)
        solved: list[tuple[Station, Law]] = []
        for kind, users in _users(scenario, self._surrounding, scale).items():
            curve = _wide_enough(scenario, kind, counts[kind], users, self._meter(arm, kind))
            station = Station(counts[kind], counts[kind] if pooled else 1, users, curve)
            law = station.transient(scenario.duration_s) if transient else station.stationary()
            solved.append((station, law))
        return _summary(scenario, arm, scale, sum(counts.values()), solved)

    def _meter(self, arm: Arm, kind: str) -> CurveMeter:
        if (arm, kind) not in self._meters:
            self._meters[arm, kind] = CurveMeter(
                self._scenario, arm, kind, self._surrounding, self._seed, self._session_seconds
            )
        return self._meters[arm, kind]


def pools(scenario: Scenario) -> bool:
    """Whether its association keeps equal verifiers equally full."""
    return scenario.association in _BALANCED


def check_mean_field(scenario: Scenario) -> None:
    """Raises ``ValueError`` for what a mean field cannot say, naming key, value and limit."""
    if scenario.association not in (*_BALANCED, RandomAssociation.name):
        known = ", ".join((*_BALANCED, RandomAssociation.name))
        raise ValueError(
            f"association is {scenario.association!r}, but a mean field is known of {known}"
        )
    if scenario.tokens.source is TokensFrom.TAPE:
        raise ValueError(
            "tokens.source is tape, whose texts end by themselves, but a mean field "
            "needs lengths that the workload gives: process or toy"
        )
    if scenario.arrivals is not None:
        raise ValueError(
            f"arrivals are {scenario.arrivals.kind.value}, but users of a mean field think: "
            "edgespec plan capacity --rate answers for an open loop"
        )
    for name, section in scenario.devices.items():
        if section.workload.requests:
            raise ValueError(
                f"devices.{name}.workload.requests is {section.workload.requests}, but users of a "
                "mean field go on: 0"
            )
        if section.conditions is not None:
            raise ValueError(
                f"devices.{name}.conditions change over time, but a mean field has one law for all"
                " of it: null"
            )


def _users(
    scenario: Scenario, surrounding: Surrounding, scale: float
) -> dict[str, tuple[Users, ...]]:
    """By kind of verifier; kinds that nobody uses are left out."""
    found: dict[str, list[Users]] = {}
    for group, section in scenario.devices.items():
        kinds = _nearest(scenario, surrounding, group)
        total = sum(scenario.verifiers[kind].count for kind in kinds)
        for kind in kinds:
            users = Users(
                group,
                scale * section.count * scenario.verifiers[kind].count / total,
                max(section.workload.think_s, LEAST_THINK_S),
                section.workload.start_within_s,
            )
            found.setdefault(kind, []).append(users)
    return {kind: tuple(users) for kind, users in found.items()}


def _nearest(scenario: Scenario, surrounding: Surrounding, group: str) -> list[str]:
    """The kinds of verifiers that a group uses."""
    kinds = list(scenario.verifiers)
    if len(kinds) == 1 or scenario.association == RandomAssociation.name:
        return kinds
    network = Network(EventQueue(), scenario, "mean field", surrounding.folder)
    nearest_s = scenario.association == LowestDelay.name
    rounds_s = {}
    for kind in kinds:
        law = law_of(scenario.verifiers[kind].pass_time, Operation.TARGET_PASS, surrounding.folder)
        link_s = network.view(group, 0, kind).rtt_s if nearest_s else 0.0
        rounds_s[kind] = law.seconds(1) + link_s
    least_s = min(rounds_s.values())
    return [kind for kind in kinds if rounds_s[kind] <= least_s * (1 + 1e-9)]


def _wide_enough(
    scenario: Scenario, kind: str, count: int, users: Sequence[Users], meter: CurveMeter
) -> ServiceCurve:
    """The curve of a kind, as far as its number of sessions may go."""
    limit = scenario.verifiers[kind].max_sessions
    curve = meter.curve({one.group: one.count for one in users}, 1)
    while True:
        station = Station(count, 1, tuple(users), curve)
        mean = station.mean_active()
        # A scenario's start may bring twice the sessions of the long run.
        wanted = 2.0 * mean + 2.0 * math.sqrt(mean) + 1.0
        if mean + 2.0 * math.sqrt(mean) > limit:
            raise ValueError(
                f"verifiers.{kind}: {mean:.0f} sessions on average, but max_sessions is {limit}: "
                "a mean field says nothing of refused sessions"
            )
        if curve.largest >= min(wanted, limit):
            return curve
        weights = dict(zip((one.group for one in users), station.shares(mean), strict=True))
        curve = meter.curve(weights, 2 * curve.largest)


def _summary(
    scenario: Scenario,
    arm: Arm,
    scale: float,
    verifiers: int,
    solved: Sequence[tuple[Station, Law]],
) -> MeanField:
    def over_verifiers(values: Sequence[Floats]) -> float:
        parts = zip(values, solved, strict=True)
        return sum(s.count * float(one @ law.time) for one, (s, law) in parts) / verifiers

    ended = [
        (group, float(rate @ law.time)) for _, law in solved for group, rate in law.ending.items()
    ]
    tokens = {group: mean_tokens(section) for group, section in scenario.devices.items()}
    return MeanField(
        arm=arm,
        devices=round(scale * sum(section.count for section in scenario.devices.values())),
        verifiers=verifiers,
        active=over_verifiers([law.active for _, law in solved]),
        utilisation=over_verifiers([s.curve.busy_at(law.active) for s, law in solved]),
        tokens_per_second=sum(tokens[group] * rate for group, rate in ended),
        requests_per_second=sum(rate for _, rate in ended),
        ttft_s=weighted_spread([mixed(s, law, lambda curve: curve.ttft_s) for s, law in solved]),
        tpot_s=weighted_spread([mixed(s, law, lambda curve: curve.tpot_s) for s, law in solved]),
    )


def mixed(
    station: Station, law: Law, table: Callable[[GroupCurve], Floats]
) -> tuple[Floats, Floats]:
    """Values and weights over requests."""
    values, weights = [], []
    for group, rate in law.ending.items():
        curve = station.curve.groups[group]
        found = curve.spread_at(table(curve), law.active)
        values.append(found.ravel())
        weights.append(np.repeat(rate * law.time, found.shape[1]))
    return np.concatenate(values), np.concatenate(weights)


def weighted_spread(parts: Sequence[tuple[Floats, Floats]]) -> Spread:
    values = np.concatenate([one for one, _ in parts])
    weights = np.concatenate([one for _, one in parts])
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    reached = np.cumsum(weights) - weights / 2
    quantiles = np.interp(np.array(QUANTILES) * weights.sum(), reached, values)
    return Spread(0, float(np.average(values, weights=weights)), tuple(map(float, quantiles)))
