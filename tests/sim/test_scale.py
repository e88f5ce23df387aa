"""What a simulated event costs does not grow with the world, and equal seeds give equal results.

Work is counted, not timed: calls of Python functions. Oracle of the second part: the summary as
JSON, bit for bit, whoever played it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.scenario.sections import Scenario, load_scenario
from edgespec_sim.token_sources.acceptance_process import fit
from edgespec_sim.token_sources.source import ProcessSource, tape_named
from edgespec_sim.world.assembly import World
from edgespec_sim.world.run import jobs_of, play, summarise
from edgespec_sim.world.site import Surrounding

PER_VERIFIER = 50


def city(devices: int, **changes: object) -> Scenario:
    counts = {
        "devices.phone.count": devices * 3 // 5,
        "devices.laptop.count": devices * 2 // 5,
        "verifiers.gpu.count": max(1, devices // PER_VERIFIER),
        "shards": 1,
    }
    return load_scenario("city", {**counts, **changes})


def calls_an_event(scenario: Scenario) -> float:
    source = ProcessSource(fit(tape_named("bundled-greedy")).at(0.8), 1)
    world = World(scenario, Arm.EDGESPEC, "1/0", Surrounding(source, Path(), checks=False))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        outcome = world.run()
    finally:
        sys.setprofile(None)
    return calls / outcome.meters.events


@pytest.mark.slow
def test_cost_of_an_event_is_flat() -> None:
    """Of the same minute's first seconds, so that each device does the same in both worlds."""
    small, large = (
        calls_an_event(
            city(
                devices,
                duration_s=2,
                **{f"devices.{name}.workload.start_within_s": 5 for name in ("phone", "laptop")},
            )
        )
        for devices in (50, 400)
    )
    assert large == pytest.approx(small, rel=0.15)


TINY: dict[str, object] = {
    "shards": 2,
    "verifiers.gpu.count": 2,
    "duration_s": 4,
    "devices.phone.workload.start_within_s": 1,
    "devices.laptop.workload.start_within_s": 1,
}


def tiny() -> Scenario:
    return city(10, **TINY)


def results(scenario: Scenario) -> str:
    """What a run says of itself, without the machine it ran on."""
    outcomes = [(job.arm, play(job)) for job in jobs_of(scenario, 1, Path())]
    return summarise(scenario, (1,), Path(), outcomes).to_json()


def test_hashing_of_strings_does_not_matter() -> None:
    program = "from tests.sim.test_scale import results, tiny; print(results(tiny()), end='')"
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert said == {results(tiny())}


def test_late_times_keep_their_order() -> None:
    """After eleven virtual days (more microseconds than 32 bits hold) one still counts."""
    queue = EventQueue()
    seen: list[int] = []
    day_s = 1e6
    for number in range(3):
        queue.at(day_s, partial(seen.append, number))
    queue.at(day_s + 1e-6, lambda: seen.append(-1))
    assert queue.run(day_s) == 3
    assert queue.run(day_s + 1.0) == 1
    assert seen == [0, 1, 2, -1]
