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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.bench.arms import Arm
from edgespec.core.association.policies import LowestDelay, MostCompute, RandomAssociation
from edgespec.telemetry.run_summary import QUANTILES, Spread
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.planning.service_curves import (
    SESSION_SECONDS,
    CurveMeter,
    Floats,
    GroupCurve,
    ServiceCurve,
    mean_tokens,
)
from edgespec_sim.planning.stations import Law, Station, Users
from edgespec_sim.scenario.costs import Operation, law_of
from edgespec_sim.scenario.sections import Scenario, TokensFrom
from edgespec_sim.world.network import Network
from edgespec_sim.world.surrounding import Surrounding

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
