"""Who bears what verifiers draw. Oracles: joules are neither made nor lost, shares by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    Scenario,
    TokensFrom,
    TokensSection,
    VerifierSection,
    WorkloadSection,
)
from edgespec_sim.scenario.verifiers import GPU_POWERS
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job, play, summarise

WORK = WorkloadSection(prompt_tokens=8, output_tokens=12, think_s=0.4, start_within_s=0.5)
GPU = VerifierSection(pass_time=CostSection(ms=20.0), busy_w=300.0, idle_w=50.0)
WORLD = Scenario(
    name="powered",
    duration_s=3.0,
    drain_s=20.0,
    tokens=TokensSection(source=TokensFrom.TOY),
    association="listed",
    devices={"laptop": DeviceSection(count=3, workload=WORK)},
    verifiers={"used": GPU, "spare": GPU},
)


def run(world: Scenario, arm: Arm = Arm.EDGESPEC) -> WorldOutcome:
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
        (VerifierSection(gpu_power="h200"), True, True),
        (VerifierSection(gpu_power="h100"), True, False),
        (VerifierSection(busy_w=700.0), True, False),
        (VerifierSection(), False, False),
    ],
)
def test_what_is_not_known_is_not_told(
    section: VerifierSection, known: bool, idle_known: bool
) -> None:
    world = replace(WORLD, verifiers={"server": section}, arms=(Arm.EDGESPEC,))
    outcome = run(world)
    found = summarise(world, (1,), Path(), [(Arm.EDGESPEC, outcome)])
    whole = found.arms[0].all
    assert (whole.verifier_j_per_token is not None) is known
    assert (whole.verifier_idle_j_per_token is not None) is idle_known
    assert any("powered and idle" in note for note in found.notes) is idle_known


def test_published_powers_and_ones_of_your_own() -> None:
    given = VerifierSection(gpu_power="h200", busy_w=500.0, idle_w=0.0)
    assert (given.power_busy_w, given.power_idle_w) == (500.0, 0.0)
    published = VerifierSection(gpu_power="h200")
    assert (published.power_busy_w, published.power_idle_w) == (
        GPU_POWERS["h200"].busy_w,
        GPU_POWERS["h200"].idle_w,
    )
    with pytest.raises(ValueError, match="gpu_power is 'h300', but must be one of h200, "):
        VerifierSection(gpu_power="h300")
