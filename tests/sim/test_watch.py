"""The device that a page tells of: it has a request that counts, and is the same in every arm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec_sim.scenario.sections import (
    ArrivalsSection,
    CostSection,
    DeviceSection,
    Scenario,
    TokensFrom,
    TokensSection,
    VerifierSection,
    WorkloadSection,
)
from edgespec_sim.world.run import jobs_of, play, summarise

# Thirty devices, and time for few questions: most devices have none.
WORK = WorkloadSection(
    prompt_tokens=8, output_tokens=6, think_s=20.0, start_within_s=20.0, start_thinking=True
)
WORLD = Scenario(
    name="rare",
    duration_s=2.5,
    drain_s=10.0,
    tokens=TokensSection(source=TokensFrom.TOY),
    arms=(Arm.TARGET_ONLY, Arm.EDGESPEC),
    devices={"laptop": DeviceSection(count=30, workload=WORK)},
    verifiers={"gpu": VerifierSection(pass_time=CostSection(ms=20.0))},
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"warm_up_s": 1.5},
        {"arrivals": ArrivalsSection(rate=1.5)},
        {"arrivals": ArrivalsSection(rate=1.5), "warm_up_s": 1.0},
    ],
)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_device_with_a_request_is_told_of(changes: dict[str, object], seed: int) -> None:
    world = replace(WORLD, **changes)  # type: ignore[arg-type] # fields of the scenario
    outcomes = [(job.arm, play(job)) for job in jobs_of(world, seed, Path())]
    counted = [one.meters.records for _, one in outcomes]
    found = [arm.watched for arm in summarise(world, (seed,), Path(), outcomes).arms]
    assert len({one.device for one in found if one is not None}) == 1
    for records, one in zip(counted, found, strict=True):
        assert one is not None
        assert bool(one.requests) is bool(records)
        assert all(request.started_s >= world.warm_up_s for request in one.requests)
