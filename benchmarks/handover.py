"""What should become of a running session whose phone changes its cell?

    python benchmarks/handover.py [--seeds 6] [--phones 20] [--speed 15] [--duration 30]

Plays the scenario ``mec`` with phones in cars, once for each way (``radio.handover.sessions``) and
backhaul. Each way is compared with staying, arm by arm, on the same seeds: the ratio of mean times
per token, with its 95 % interval over seeds.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from edgespec.benchmark.arms import Arm
from edgespec.cli.sim.pool import Task, default_processes, play_all
from edgespec_sim.planning.replication import speedup
from edgespec_sim.scenario.handover_sections import Sessions
from edgespec_sim.scenario.loading import load_scenario
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job

ARMS = (Arm.TARGET_ONLY, Arm.VANILLA, Arm.EDGESPEC)
BACKHAULS_MS = (4.0, 60.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--phones", type=int, default=20)
    parser.add_argument("--speed", type=float, default=15.0, help="metres a second")
    parser.add_argument("--duration", type=float, default=30.0, help="seconds")
    asked = parser.parse_args()
    cases = list(itertools.product(BACKHAULS_MS, Sessions, ARMS, range(1, asked.seeds + 1)))
    tasks = [Task(case[1].value, _job(asked, *case)) for case in cases]
    outcomes = dict(play_all(tasks, default_processes(), quiet=True))
    found: dict[tuple[float, Sessions, Arm], list[WorldOutcome]] = {}
    for index, (backhaul_ms, sessions, arm, _) in enumerate(cases):
        found.setdefault((backhaul_ms, sessions, arm), []).append(outcomes[index])
    print("backhaul, sessions, arm, TPOT ms, stay / this (95 %), handovers, recomputed, with KV")
    for (backhaul_ms, sessions, arm), worlds in found.items():
        print(_row(backhaul_ms, sessions, arm, worlds, found[backhaul_ms, Sessions.STAY, arm]))


def _job(
    asked: argparse.Namespace, backhaul_ms: float, sessions: Sessions, arm: Arm, seed: int
) -> Job:
    settings = {
        "duration_s": asked.duration,
        "devices.phone.count": asked.phones,
        "radio.speed_m_per_s": asked.speed,
        "radio.handover.sessions": sessions.value,
        "radio.handover.backhaul.rtt_ms": backhaul_ms,
    }
    return Job(load_scenario("mec", settings), arm, 0, seed, Path())


def _row(
    backhaul_ms: float,
    sessions: Sessions,
    arm: Arm,
    worlds: list[WorldOutcome],
    stay: list[WorldOutcome],
) -> str:
    totals = [one.meters.tpot for one in worlds]
    ratio, ends = speedup([one.meters.tpot for one in stay], totals)
    mean_ms = 1e3 * sum(one.seconds for one in totals) / sum(one.requests for one in totals)
    told = "–"
    if ratio is not None and ends is not None:
        told = f"{ratio:.3f} ({ends.low:.3f} to {ends.high:.3f})"
    whole = [one.meters.whole() for one in worlds]
    assert not sum(one.mismatches or 0 for one in whole)
    assert not sum(one.failed for one in whole)
    counts = (
        sum(one.handovers for one in whole),
        sum(one.moves_recomputed for one in whole),
        sum(one.moves_with_kv for one in whole),
    )
    return (
        f"{backhaul_ms:5.0f} ms  {sessions.value:<9}  {arm.value:<11}  {mean_ms:7.2f}  {told:<22}"
        + "".join(f"  {count:9d}" for count in counts)
    )


if __name__ == "__main__":
    main()
