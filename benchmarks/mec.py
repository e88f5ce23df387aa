"""Which verifier for which phone? Association policies and shares on the full simulator.

    python benchmarks/mec.py [--devices 40] [--duration 60] [--seed 1]

Plays the scenario ``mec``: moving phones, interference, shared air, batching verifiers, the
product's sessions. The first four rows are the policies that an agent can use, asked at the start
of each request. The others fix the association that ``lowest-delay`` finds for all phones at once
at the start: with batching and shared air as above, and with equal slices of compute, of the band
and of both, as the literature's resource allocation has it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.benchmark.arms import Arm
from edgespec.core.association.policies import POLICIES, DeviceView, association_policy
from edgespec_sim.scenario.loading import load_scenario
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.token_sources.source import TokenSource
from edgespec_sim.world.allocation import Allocation
from edgespec_sim.world.assembly import World, WorldOutcome
from edgespec_sim.world.run import token_source
from edgespec_sim.world.surrounding import Surrounding

ARMS = (Arm.TARGET_ONLY, Arm.VANILLA, Arm.EDGESPEC)


@dataclass(frozen=True, slots=True)
class Setup:
    """One row of the table."""

    name: str
    association: str
    allocation: Allocation | None = None


def decided_at_once(scenario: Scenario, source: TokenSource, seed: int) -> dict[str, str]:
    """A verifier for every phone, from what is known at the start."""
    surrounding = Surrounding(source, association_policy("lowest-delay"), Path())
    world = World(scenario, Arm.EDGESPEC, f"{seed}/0", surrounding)
    views = [site.view for site, _ in world.sites]
    devices = [DeviceView(user.name, user.settings.step.seconds(1)) for user in world.users]
    links = [
        [world.network.view(user.settings.group, user.number, view.name) for view in views]
        for user in world.users
    ]
    chosen = association_policy("lowest-delay").assign(devices, views, links)
    return {device.name: views[index].name for device, index in zip(devices, chosen, strict=True)}


def setups(scenario: Scenario, source: TokenSource, seed: int) -> Iterator[Setup]:
    for name in POLICIES:
        yield Setup(name, name)
    places = decided_at_once(scenario, source, seed)
    many = Counter(places.values())
    equal = {device: 1.0 / many[verifier] for device, verifier in places.items()}
    yield Setup("fixed: shared", "lowest-delay", Allocation(places))
    yield Setup("fixed: compute cut", "lowest-delay", Allocation(places, compute=equal))
    yield Setup("fixed: band cut", "lowest-delay", Allocation(places, bandwidth=equal))
    yield Setup("fixed: both cut", "lowest-delay", Allocation(places, equal, equal))


def play(scenario: Scenario, arm: Arm, source: TokenSource, setup: Setup, seed: int) -> str:
    surrounding = Surrounding(
        source, association_policy(setup.association), Path(), allocation=setup.allocation
    )
    return row_of(World(scenario, arm, f"{seed}/0", surrounding).run())


def row_of(outcome: WorldOutcome) -> str:
    whole = outcome.meters.whole()
    assert whole.mismatches == 0
    assert whole.tpot_s is not None
    assert whole.ttft_s is not None
    busy = " ".join(f"{100 * one.utilisation:3.0f}" for one in outcome.verifiers)
    return (
        f"{1e3 * whole.tpot_s.median:6.1f} {1e3 * whole.tpot_s.p95:6.1f}"
        f" {1e3 * whole.ttft_s.median:6.0f} {1e3 * whole.ttft_s.p95:6.0f}"
        f" {whole.tokens_per_second:6.0f}   {busy}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--devices", type=int, default=40)
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    scenario = load_scenario("mec")
    phones = replace(scenario.devices["phone"], count=options.devices)
    scenario = replace(scenario, devices={"phone": phones}, duration_s=options.duration)
    source = token_source(scenario, options.seed, Path())
    names = " ".join(
        scenario.verifier_name(kind, number)
        for kind, section in scenario.verifiers.items()
        for number in range(section.count)
    )
    print(f"{options.devices} phones, {options.duration:g} s, seed {options.seed}; {source.about}")
    print("TPOT p50 p95, TTFT p50 p95 in ms; tokens/s of all;")
    print(f"share of time in a pass, %: {names}")
    for arm in ARMS:
        print(f"\n{arm.value}")
        for setup in setups(scenario, source, options.seed):
            print(f"  {setup.name:19}{play(scenario, arm, source, setup, options.seed)}")


if __name__ == "__main__":
    main()
