"""The mean field against the event-driven world it stands for, and against laws known by formula.

Oracles: the event-driven run of the same scenario; Engset's closed form for a machine-repairman
system whose service time does not depend on the load.
"""

from __future__ import annotations

from functools import cache
from math import comb
from pathlib import Path

import numpy as np
import pytest

from edgespec.bench.arms import Arm
from edgespec_sim.association import association_policy
from edgespec_sim.planning.mean_field import (
    GroupCurve,
    MeanField,
    MeanFieldModel,
    ServiceCurve,
    Station,
    Users,
)
from edgespec_sim.scenario.sections import Scenario, load_scenario
from edgespec_sim.token_sources.acceptance_process import AcceptanceLaw
from edgespec_sim.token_sources.source import ProcessSource
from edgespec_sim.world.assembly import World
from edgespec_sim.world.surrounding import Surrounding

SMALL = {
    "devices.phone.count": 90,
    "devices.laptop.count": 60,
    "verifiers.gpu.count": 2,
    "shards": 1,
    "duration_s": 45,
}


def scenario(**changes: object) -> Scenario:
    return load_scenario("city", {**SMALL, **changes})


def surrounding(of: Scenario) -> Surrounding:
    policy = association_policy(of.association)
    return Surrounding(ProcessSource(AcceptanceLaw.of(0.8), 1), policy, Path(), checks=False)


@cache
def model() -> MeanFieldModel:
    of = scenario()
    return MeanFieldModel(of, surrounding(of), session_seconds=40.0)


def field(*, scale: float = 1.0, transient: bool = True) -> MeanField:
    return model().solve(Arm.TARGET_ONLY, scale=scale, transient=transient)


def connecting_s(world: World) -> float:
    """What devices' first requests to each verifier waited for connections: a round trip each."""
    groups = {user.name: (user.settings.group, user.number) for user in world.users}
    pairs = {(one.device, one.verifier) for one in world.meters.records if one.ttft_s is not None}
    return sum(world.network.view(*groups[device], name).rtt_s for device, name in pairs)


def test_agrees_with_events() -> None:
    """The mean field is of devices that have been there for long, and are connected."""
    of = scenario()
    world = World(of, Arm.TARGET_ONLY, "1/0", surrounding(of))
    whole = world.run().meters.whole()
    found = field()
    assert whole.tpot_s is not None
    assert whole.ttft_s is not None
    assert found.tpot_s.median == pytest.approx(whole.tpot_s.median, rel=0.02)
    connected_s = whole.ttft_s.mean - connecting_s(world) / whole.ttft_s.count
    assert found.ttft_s.mean == pytest.approx(connected_s, rel=0.1)
    assert found.tokens_per_second == pytest.approx(whole.tokens_per_second, rel=0.12)


def flat_curve(cycle_s: float) -> ServiceCurve:
    sizes, spread = np.array([1.0, 2.0]), np.ones((2, 1))
    group = GroupCurve(sizes, np.full(2, cycle_s), spread, spread)
    return ServiceCurve({"all": group}, np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 1.0]), 2)


@pytest.mark.parametrize("count", [4, 30])
def test_fixed_service_time_gives_engset(count: int) -> None:
    """Users who do not slow one another down are independent: a binomial number is served."""
    users = (Users("all", float(count), 9.0, 1.0),)
    law = Station(1, 1, users, flat_curve(3.0)).stationary()
    served = 3.0 / (9.0 + 3.0)
    expected = [
        comb(count, n) * served**n * (1 - served) ** (count - n) for n in range(len(law.time))
    ]
    assert law.active == pytest.approx(np.arange(len(law.time)))
    assert law.time == pytest.approx(expected, abs=1e-6)


def test_long_transient_settles_at_the_fixed_point() -> None:
    users = (Users("all", 50.0, 9.0, 1.0),)
    station = Station(1, 1, users, flat_curve(3.0))
    law = station.transient(400.0)
    assert station.mean_active() == pytest.approx(12.5)
    assert float(law.active @ law.time) == pytest.approx(12.5, rel=0.03)


def test_a_random_choice_of_verifiers_spreads_wider_than_a_balanced_one() -> None:
    users = (Users("all", 1000.0, 9.0, 1.0),)
    widths = []
    for pooled in (1, 100):
        law = Station(100, pooled, users, flat_curve(3.0)).stationary()
        mean = float(law.active @ law.time)
        assert mean == pytest.approx(2.5, rel=0.02)
        widths.append(float((law.active - mean) ** 2 @ law.time))
    assert widths[0] > 50 * widths[1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"association": "strongest-signal"}, "association is 'strongest-signal'"),
        ({"devices.phone.workload.requests": 3}, "devices.phone.workload.requests is 3"),
        ({"tokens": {"source": "tape"}}, "tokens.source is tape"),
        ({"verifiers.gpu.max_sessions": 2}, "max_sessions is 2"),
    ],
)
def test_refuses_what_it_cannot_say(changes: dict[str, object], says: str) -> None:
    of = scenario(**changes)
    with pytest.raises(ValueError, match=says):
        MeanFieldModel(of, surrounding(of), session_seconds=10.0).solve(Arm.TARGET_ONLY)
