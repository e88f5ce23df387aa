"""What does uplink power control do to signals, rates, energy and time a token?

    python benchmarks/power_control.py [--phones 40] [--steps 60] [--seconds 20] [--seeds 4]

First the air of the scenario ``mec`` alone: phones walk, others fill half of every cell's airtime,
and each phone's uplink to the station that it hears best is told as mean and 5th percentile over
phones and steps, with the power it sends with. Then the scenario itself, with phones that send at
full power and with 3GPP's open-loop control: time to the first token, time per token and joules
radiated a token, paired by seed with 95 % intervals.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgespec.benchmark.arms import Arm
from edgespec.cli.sim.pool import Task, default_processes, play_all
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.planning.replication import Total, speedup
from edgespec_sim.scenario.loading import load_scenario
from edgespec_sim.scenario.network_sections import PowerControlSection
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.radio_network import RadioNetwork
from edgespec_sim.world.run import Job

CONTROLS: dict[str, PowerControlSection | None] = {
    "full power": None,
    "P0 -80, alpha 0.8": PowerControlSection(),
    "P0 -90, alpha 0.8": PowerControlSection(p0_dbm=-90.0),
    "P0 -100, alpha 1": PowerControlSection(p0_dbm=-100.0, alpha=1.0),
}
ARMS = (Arm.TARGET_ONLY, Arm.EDGESPEC)


def scenario_of(control: PowerControlSection | None, phones: int, seconds: float) -> Scenario:
    settings = {"devices.phone.count": phones, "duration_s": seconds}
    scenario = load_scenario("mec", settings)
    assert scenario.radio is not None
    return replace(scenario, radio=replace(scenario.radio, power_control=control))


def air(scenario: Scenario, steps: int) -> str:
    """Of each phone at the station it hears best."""
    assert scenario.radio is not None
    stations = sum(section.count for section in scenario.verifiers.values())
    phones = scenario.devices["phone"].count
    queue = EventQueue()
    network = RadioNetwork(queue, scenario.radio, phones, stations, "1/radio", Path())
    rows = []
    for step in range(1, steps + 1):
        queue.run((step + 0.5) * scenario.radio.step_s)
        for phone in range(phones):
            signals = [network.signal(phone, station) for station in range(stations)]
            best = max(signals, key=lambda one: one.snr_db)
            rows.append((best.up_snr_db, best.up_bits_per_s / 1e6, best.sends_dbm))
    snr_db, mbps, dbm = np.array(rows).T
    milliwatts = 10.0 ** (dbm / 10.0)
    return (
        f"SINR {snr_db.mean():5.1f} dB (p5 {np.quantile(snr_db, 0.05):5.1f}), uplink"
        f" {mbps.mean():5.2f} Mbit/s (p5 {np.quantile(mbps, 0.05):5.2f}), sends"
        f" {dbm.mean():5.1f} dBm ({milliwatts.mean():5.1f} mW in the mean)"
    )


def compared(
    name: str, arm: Arm, base: Sequence[WorldOutcome], mine: Sequence[WorldOutcome]
) -> str:
    def ratio(of: str) -> str:
        sides = [[_total(one, of) for one in worlds] for worlds in (mine, base)]
        value, ends = speedup(*sides)
        if value is None or ends is None:
            return "–"
        return f"{value:.3f} ({ends.low:.3f} to {ends.high:.3f})"

    joules = sum(_total(one, "radiated_j").seconds for one in mine)
    tokens = sum(one.meters.whole().tokens for one in mine)
    return (
        f"{name:18} {arm.value:12} radiated {1e3 * joules / tokens:7.4f} mJ a token; over full"
        f" power: TTFT {ratio('ttft_s')}, TPOT {ratio('tpot_s')}, radiated a request"
        f" {ratio('radiated_j')}"
    )


def _total(outcome: WorldOutcome, of: str) -> Total:
    values = [value for one in outcome.meters.records if (value := getattr(one, of)) is not None]
    return Total(sum(values), len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--phones", type=int, default=40)
    parser.add_argument("--steps", type=int, default=60, help="of the air alone")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the scenario")
    parser.add_argument("--seeds", type=int, default=4)
    asked = parser.parse_args()
    scenarios = {
        name: scenario_of(control, asked.phones, asked.seconds)
        for name, control in CONTROLS.items()
    }
    for name, scenario in scenarios.items():
        print(f"{name:18} {air(scenario, asked.steps)}", flush=True)
    cases = [
        (name, arm, seed) for name in CONTROLS for arm in ARMS for seed in range(1, asked.seeds + 1)
    ]
    tasks = [Task(name, Job(scenarios[name], arm, 0, seed, Path())) for name, arm, seed in cases]
    outcomes = dict(play_all(tasks, default_processes(), quiet=True))
    worlds: dict[tuple[str, Arm], list[WorldOutcome]] = {}
    for index, (name, arm, _) in enumerate(cases):
        worlds.setdefault((name, arm), []).append(outcomes[index])
    for (name, arm), mine in worlds.items():
        print(compared(name, arm, worlds["full power", arm], mine), flush=True)
    print(f"load: {os.getloadavg()}")


if __name__ == "__main__":
    main()
