"""How the simulator's cost grows with the world, and where the mean field takes over.

    python benchmarks/scale.py [--quick]

First one laptop (the bundled ``single-device``) with each arm, then cities of 1 to 10,000 devices
with a verifier for every 200 (arm edgespec, one process each, 60 virtual seconds), then the bundled
city with both of its arms on all cores, then the mean field beside it and on to ten million
devices. Times are CPU seconds of the process that played, except for the whole city: those are by
the clock. ``--quick`` stops at 100 devices and compares the two on a city of 400.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from edgespec.benchmark.arms import Arm
from edgespec.cli.sim.pool import default_processes
from edgespec.cli.sim.simulate import simulate
from edgespec.core.association.policies import association_policy
from edgespec.telemetry.run_summary import RunSummary
from edgespec_sim.planning.mean_field import MeanField, MeanFieldModel
from edgespec_sim.scenario.loading import load_scenario
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.run import Job, play, token_source
from edgespec_sim.world.surrounding import Surrounding

HERE = Path()
SIZES = (1, 10, 100, 1_000, 10_000)
SCALES = (1.0, 10.0, 100.0, 1000.0)
DEVICES_PER_VERIFIER = 200


@dataclass(frozen=True, slots=True)
class Cost:
    events: int
    tokens: int
    cpu_s: float
    virtual_s: float
    peak_mib: float

    def row(self, name: str) -> str:
        return (
            f"{name:>14s} {self.events:>11,d} {1e6 * self.cpu_s / self.events:>9.1f} "
            f"{self.events / self.cpu_s:>10,.0f} {1e6 * self.cpu_s / self.tokens:>9.1f} "
            f"{self.virtual_s / self.cpu_s:>10.2f} {self.peak_mib:>9.0f}"
        )


HEAD = (
    f"{'devices':>14s} {'events':>11s} {'us/event':>9s} {'events/s':>10s} {'us/token':>9s} "
    f"{'x real':>10s} {'peak MiB':>9s}"
)


def city(devices: int, **changes: object) -> Scenario:
    """The bundled city, smaller or larger, as one world."""
    phones = max(1, devices * 3 // 5)
    counts: dict[str, object] = {
        "devices.phone.count": phones,
        "verifiers.gpu.count": max(1, devices // DEVICES_PER_VERIFIER),
        "shards": 1,
    }
    if devices > phones:
        counts["devices.laptop.count"] = devices - phones
    else:
        counts["devices"] = {"phone": {"count": 1, "path": ["mobile", "metro"]}}
        del counts["devices.phone.count"]
    return load_scenario("city", {**counts, **changes})


def measured(scenario: Scenario, arm: Arm = Arm.EDGESPEC) -> Cost:
    token_source(scenario, 1, HERE)  # fitting its law is done once a process
    started_s = time.process_time()
    meters = play(Job(scenario, arm, 0, 1, HERE)).meters
    cpu_s = time.process_time() - started_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tokens = meters.whole().tokens
    return Cost(meters.events, tokens, cpu_s, scenario.duration_s, peak_mib)


def alone(scenario: Scenario, arm: Arm = Arm.EDGESPEC) -> Cost:
    """In a process of its own, so that peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (scenario, arm))


def print_curve(sizes: tuple[int, ...]) -> None:
    print(HEAD)
    for arm in Arm:
        print(alone(load_scenario("single-device"), arm).row(arm.value), flush=True)
    for devices in sizes:
        print(alone(city(devices)).row(f"{devices:,d}"), flush=True)


def print_city(scenario: Scenario) -> RunSummary:
    processes = default_processes()
    started_s = time.monotonic()
    summary = simulate(scenario, 1, HERE, processes, quiet=True)
    took_s = time.monotonic() - started_s
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    devices = sum(section.count for section in scenario.devices.values())
    print(
        f"\nwhole city: {devices:,} devices, {scenario.duration_s:.0f} virtual s, both arms, "
        f"{processes} processes: {took_s:.0f} s, at most {peak_kib / 1024:.0f} MiB a process"
    )
    return summary


def print_mean_field(scenario: Scenario, summary: RunSummary, scales: tuple[float, ...]) -> None:
    surrounding = Surrounding(
        token_source(scenario, 1, HERE), association_policy(scenario.association), HERE, False
    )
    model = MeanFieldModel(scenario, surrounding)
    print(f"\n{'':28s} {'TTFT ms':>8s} {'TPOT ms':>8s} {'p95':>6s} {'tokens/s':>11s} {'busy':>6s}")
    for one in summary.arms:
        events = _of_events(summary, one.arm)
        print(_row(f"events, {one.arm}", events))
        for scale in scales:
            started_s = time.monotonic()
            found = model.solve(Arm(one.arm), scale=scale)
            took_s = time.monotonic() - started_s
            numbers = _of_field(found)
            print(_row(f"mean field, {found.devices:,d}", numbers), f"in {took_s:.1f} s")
            if scale == 1.0:
                print(_differences(events, numbers), flush=True)


def _of_events(summary: RunSummary, arm: str) -> tuple[float, ...]:
    one = next(one for one in summary.arms if one.arm == arm)
    assert one.all.ttft_s is not None
    assert one.all.tpot_s is not None
    busy = sum(site.utilisation for site in one.verifiers) / len(one.verifiers)
    ttft_s, tpot_s = one.all.ttft_s.median, one.all.tpot_s.median
    return ttft_s, tpot_s, one.all.tpot_s.p95, one.all.tokens_per_second, busy


def _of_field(found: MeanField) -> tuple[float, ...]:
    ttft_s, tpot_s = found.ttft_s.median, found.tpot_s.median
    return ttft_s, tpot_s, found.tpot_s.p95, found.tokens_per_second, found.utilisation


def _row(name: str, numbers: tuple[float, ...]) -> str:
    ttft_s, tpot_s, p95_s, rate, busy = numbers
    return (
        f"{name:28s} {1e3 * ttft_s:8.1f} {1e3 * tpot_s:8.2f} {1e3 * p95_s:6.2f} {rate:11,.0f} "
        f"{busy:6.1%}"
    )


def _differences(events: tuple[float, ...], field: tuple[float, ...]) -> str:
    cells = [f"{b / a - 1:+.1%}" for a, b in zip(events, field, strict=True)]
    widths = (8, 8, 6, 11, 6)
    return f"{'  difference':28s} " + " ".join(
        f"{cell:>{width}s}" for cell, width in zip(cells, widths, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    print_curve(tuple(size for size in SIZES if size <= 100) if quick else SIZES)
    scenario = city(400, duration_s=30) if quick else load_scenario("city")
    summary = print_city(scenario)
    print_mean_field(scenario, summary, SCALES)


if __name__ == "__main__":
    main()
