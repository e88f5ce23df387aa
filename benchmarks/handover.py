"""What should become of a running session whose phone changes its cell?

    python benchmarks/handover.py [--seeds 16] [--phones 12] [--speed 20] [--duration 40]

Plays the scenario ``mec`` with phones in cars, once for each way (``radio.handover.sessions``) and
backhaul. Phones move the same way, change their cells at the same instants, and are asked the same
questions at the same instants (an open loop) whatever becomes of sessions, so requests are paired
one by one. Each way is compared with staying, arm by arm: the ratio of mean times per token, with
its 95 % interval over seeds, of those requests that met a change of cell in any of the ways, and of
all requests. Above 1 the way is better than staying.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from edgespec.benchmark.arms import Arm
from edgespec.cli.sim.pool import Task, default_processes, play_all
from edgespec_sim.planning.replication import Total, speedup
from edgespec_sim.scenario.arrival_sections import ArrivalKind, ArrivalsSection
from edgespec_sim.scenario.handover_sections import Sessions
from edgespec_sim.scenario.loading import load_scenario
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.meters import RequestRecord
from edgespec_sim.world.run import Job

BACKHAULS_MS = (4.0, 60.0)
# Of each phone: an answer of 160 tokens takes some 4 s.
REQUESTS_A_SECOND = 0.12
Asked = tuple[str, float]
"""Which request it is: its device and when it was asked."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--phones", type=int, default=12)
    parser.add_argument("--speed", type=float, default=20.0, help="metres a second")
    parser.add_argument("--duration", type=float, default=40.0, help="seconds")
    parser.add_argument("--tokens", type=int, default=160, help="of a usual answer")
    parser.add_argument("--arms", default="target-only,edgespec")
    asked = parser.parse_args()
    arms = tuple(Arm(name) for name in asked.arms.split(","))
    cases = list(itertools.product(BACKHAULS_MS, Sessions, arms, range(1, asked.seeds + 1)))
    tasks = [Task(case[1].value, _job(asked, *case)) for case in cases]
    outcomes = dict(play_all(tasks, default_processes(), quiet=True))
    worlds: dict[tuple[float, Sessions, Arm], list[WorldOutcome]] = {}
    for index, (backhaul_ms, sessions, arm, _) in enumerate(cases):
        worlds.setdefault((backhaul_ms, sessions, arm), []).append(outcomes[index])
    print(f"load: {os.getloadavg()}")
    print("backhaul, sessions, arm, TPOT ms, stay / this (95 %) of requests that changed cells, ")
    print("of all; such requests, handovers, recomputed, with KV")
    for backhaul_ms, arm in itertools.product(BACKHAULS_MS, arms):
        ways = {sessions: worlds[backhaul_ms, sessions, arm] for sessions in Sessions}
        met = [_met(same) for same in zip(*ways.values(), strict=True)]
        for sessions in Sessions:
            print(f"{backhaul_ms:5.0f} ms  {sessions.value:<9}  {arm.value:<11}", end="")
            print(_row(ways, sessions, met))


def _job(
    asked: argparse.Namespace, backhaul_ms: float, sessions: Sessions, arm: Arm, seed: int
) -> Job:
    settings = {
        "duration_s": asked.duration,
        "devices.phone.count": asked.phones,
        "devices.phone.workload.output_tokens": asked.tokens,
        "radio.speed_m_per_s": asked.speed,
        "radio.handover.sessions": sessions.value,
        "radio.handover.backhaul.rtt_ms": backhaul_ms,
        "arrivals": {"kind": ArrivalKind.POISSON.value, "rate": REQUESTS_A_SECOND * asked.phones},
    }
    scenario = load_scenario("mec", settings)
    assert isinstance(scenario.arrivals, ArrivalsSection)
    return Job(scenario, arm, 0, seed, Path())


def _met(worlds: Sequence[WorldOutcome]) -> set[Asked]:
    """Requests that met a change of cell in any of these worlds of one seed: chosen by one way
    alone, they would be those that were slow there."""
    return {_asked(one) for world in worlds for one in world.meters.records if one.handed.handovers}


def _asked(record: RequestRecord) -> Asked:
    return record.device, record.started_s


def _total(world: WorldOutcome, of: Collection[Asked] | None) -> Total:
    times_s = [
        one.tpot_s
        for one in world.meters.records
        if one.tpot_s is not None and (of is None or _asked(one) in of)
    ]
    return Total(sum(times_s), len(times_s))


def _row(
    ways: Mapping[Sessions, Sequence[WorldOutcome]],
    sessions: Sessions,
    met: Sequence[Collection[Asked]],
) -> str:
    worlds, stay = ways[sessions], ways[Sessions.STAY]
    whole = [one.meters.whole() for one in worlds]
    assert not sum(one.mismatches or 0 for one in whole)
    assert not sum(one.failed for one in whole)
    mine = [_total(one, None) for one in worlds]
    mean_ms = 1e3 * sum(one.seconds for one in mine) / sum(one.requests for one in mine)
    counts = (
        sum(map(len, met)),
        sum(one.handovers for one in whole),
        sum(one.moves_recomputed for one in whole),
        sum(one.moves_with_kv for one in whole),
    )
    changed = _ratio(
        [_total(one, of) for one, of in zip(stay, met, strict=True)],
        [_total(one, of) for one, of in zip(worlds, met, strict=True)],
    )
    everyone = _ratio([_total(one, None) for one in stay], mine)
    numbers = "".join(f"  {count:5d}" for count in counts)
    return f"  {mean_ms:7.2f}  {changed:<22}  {everyone:<22}{numbers}"


def _ratio(stay: Sequence[Total], totals: Sequence[Total]) -> str:
    ratio, ends = speedup(stay, totals)
    if ratio is None or ends is None:
        return "–"
    return f"{ratio:.3f} ({ends.low:.3f} to {ends.high:.3f})"


if __name__ == "__main__":
    main()
