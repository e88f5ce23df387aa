"""Equal seeds give equal results. Oracle: the summary as JSON, bit for bit, whoever played it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from edgespec_sim.event_queue import EventQueue
from edgespec_sim.scenario.sections import Scenario, load_scenario
from edgespec_sim.world.run import jobs_of, play, summarise

TINY: dict[str, object] = {
    "devices.phone.count": 6,
    "devices.laptop.count": 4,
    "shards": 2,
    "verifiers.gpu.count": 2,
    "duration_s": 4,
    "devices.phone.workload.start_within_s": 1,
    "devices.laptop.workload.start_within_s": 1,
}


def tiny() -> Scenario:
    return load_scenario("city", TINY)


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
