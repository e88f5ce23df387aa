"""Who bears what verifiers and radios draw. Oracles: joules are neither made nor lost, shares by
hand, the states of a radio integrated in small steps from their definition."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec.core.association.policies import Association
from edgespec_sim.scenario import sections as sc
from edgespec_sim.scenario.verifiers import GPU_POWERS, RADIOS, RadioMeter, RadioPower
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job, play, summarise

WORK = sc.WorkloadSection(prompt_tokens=8, output_tokens=12, think_s=0.4, start_within_s=0.5)
GPU = sc.VerifierSection(pass_time=sc.CostSection(ms=20.0), busy_w=300.0, idle_w=50.0)
WORLD = sc.Scenario(
    name="powered",
    duration_s=3.0,
    drain_s=20.0,
    tokens=sc.TokensSection(source=sc.TokensFrom.TOY),
    association=Association.LISTED,
    devices={"laptop": sc.DeviceSection(count=3, workload=WORK)},
    verifiers={"used": GPU, "spare": GPU},
)


def run(world: sc.Scenario, arm: Arm = Arm.EDGESPEC) -> WorldOutcome:
    return play(Job(world, arm, 0, 1, Path()))


def test_no_joule_is_made_or_lost() -> None:
    outcome = run(WORLD)
    used, spare = outcome.verifiers
    records = outcome.meters.records
    assert used.energy_j is not None
    assert used.idle_j is not None
    assert used.idle_s is not None
    assert used.energy_j == pytest.approx(300.0 * used.utilisation * 3.0)
    assert used.idle_s == pytest.approx((1.0 - used.utilisation) * 3.0)
    assert used.idle_j == pytest.approx(50.0 * used.idle_s)
    assert sum(one.verifier_idle_j or 0.0 for one in records) == pytest.approx(used.idle_j)
    # Requests that count run on behind the window; those behind it are borne by nobody here.
    borne_j = sum(one.verifier_j or 0.0 for one in records)
    assert borne_j >= 0.9 * used.energy_j
    assert all(one.verifier_j for one in records if one.tokens)
    # Nobody used it, and it was on all the time.
    assert (spare.energy_j, spare.idle_s, spare.idle_j) == (0.0, 3.0, 150.0)


@pytest.mark.parametrize(
    ("section", "known", "idle_known"),
    [
        (sc.VerifierSection(gpu_power="h200"), True, True),
        (sc.VerifierSection(gpu_power="h100"), True, False),
        (sc.VerifierSection(busy_w=700.0), True, False),
        (sc.VerifierSection(), False, False),
    ],
)
def test_what_is_not_known_is_not_told(
    section: sc.VerifierSection, known: bool, idle_known: bool
) -> None:
    world = replace(WORLD, verifiers={"server": section}, arms=(Arm.EDGESPEC,))
    outcome = run(world)
    found = summarise(world, (1,), Path(), [(Arm.EDGESPEC, outcome)])
    whole = found.arms[0].all
    assert (whole.verifier_j_per_token is not None) is known
    assert (whole.verifier_idle_j_per_token is not None) is idle_known
    assert any("powered and idle" in note for note in found.notes) is idle_known


def test_published_powers_and_ones_of_your_own() -> None:
    given = sc.VerifierSection(gpu_power="h200", busy_w=500.0, idle_w=0.0)
    assert (given.power_busy_w, given.power_idle_w) == (500.0, 0.0)
    published = sc.VerifierSection(gpu_power="h200")
    assert (published.power_busy_w, published.power_idle_w) == (
        GPU_POWERS["h200"].busy_w,
        GPU_POWERS["h200"].idle_w,
    )


STEP_S = 1e-3


def stepped_j(power: RadioPower, packets_s: list[float], end_s: float) -> float:
    """Power by power, each millisecond, and a promotion at each packet that finds it idle."""
    total_j, last_s = 0.0, -1e9
    awake_s = power.connected_s + power.tail_s
    for step in range(round(end_s / STEP_S)):
        now_s = (step + 0.5) * STEP_S
        for packet_s in packets_s:
            if now_s - STEP_S / 2 <= packet_s < now_s + STEP_S / 2:
                total_j += power.promotion_s * power.promotion_w * (packet_s - last_s > awake_s)
                last_s = packet_s
        since_s = now_s - last_s
        if since_s < power.connected_s:
            total_j += power.connected_w * STEP_S
        elif since_s < awake_s:
            total_j += power.tail_w * STEP_S
        else:
            total_j += power.idle_w * STEP_S
    return total_j


@pytest.mark.parametrize("name", sorted(RADIOS))
def test_a_meter_integrates_the_states(name: str) -> None:
    power, dice = RADIOS[name], random.Random(3)
    packets_s = sorted(round(dice.uniform(0.0, 20.0), 3) + STEP_S / 2 for _ in range(30))
    packets_s = [time_s for time_s in packets_s if not 5.0 < time_s < 18.0]
    meter, taken_j = RadioMeter(power), 0.0
    for time_s in packets_s:
        meter.packet(time_s)
        taken_j += meter.take(time_s + 0.0001)
    taken_j += meter.take(40.0)
    assert taken_j == pytest.approx(stepped_j(power, packets_s, 40.0), rel=2e-3)
    assert meter.take(40.0) == 0.0
