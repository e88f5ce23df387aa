"""Policies that learn in random worlds, with broken links and a verifier that restarts.

Oracle: ``run_world`` holds each delivered token against the target's own stream.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec.core.device.goodput_policy import PolicyName, named_policy
from edgespec.core.protocol.messages import RunAhead
from edgespec_sim.run_summary import ArmSummary
from edgespec_sim.scenario.sections import (
    DeviceSection,
    LinkSection,
    Scenario,
    TokensFrom,
    TokensSection,
    WorkloadSection,
)
from edgespec_sim.world.run import jobs_of, play, summarise
from tests.sim.faults.worlds import WorldOptions, run_world


@pytest.mark.parametrize("name", PolicyName)
@pytest.mark.parametrize("run_ahead", [RunAhead.AUTO, RunAhead.NEVER])
def test_every_policy_gives_the_target_text(name: PolicyName, run_ahead: RunAhead) -> None:
    policy = named_policy(name)
    options = WorldOptions(policies=(policy,) * 2, run_ahead=run_ahead, cuts=1, restarts=1)
    for seed in range(3):
        result = run_world(options, seed)
        assert all(device.expected for device in result.devices)


# --- in scenarios and benches --------------------------------------------------------------------

FAR = Scenario(
    name="far",
    duration_s=3.0,
    tokens=TokensSection(source=TokensFrom.TAPE),
    links={"wan": LinkSection(rtt_ms=50.0)},
    devices={
        "laptop": DeviceSection(
            path=("wan",), workload=WorkloadSection(prompt_tokens=0, output_tokens=60, think_s=0.1)
        )
    },
    arms=(Arm.EDGESPEC, Arm.WINDOWED),
)


def _arms(section: DeviceSection) -> tuple[ArmSummary, ...]:
    scenario = replace(FAR, devices={"laptop": section})
    outcomes = [(job.arm, play(job)) for job in jobs_of(scenario, 1, Path())]
    return summarise(scenario, (1,), Path(), outcomes).arms


def test_a_scenario_says_by_what_its_devices_draft() -> None:
    section = FAR.devices["laptop"]
    found = [_arms(replace(section, policy=name))[0].all for name in PolicyName]
    assert len({one.wasted_per_token for one in found}) == len(PolicyName)
    assert not any(one.mismatches for one in found)
