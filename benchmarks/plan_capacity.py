"""Is ``edgespec plan capacity`` right? Beside it, a full search by events without a mean field.

    python benchmarks/plan_capacity.py --users 200 --ttft-p95 1000 --tpot-p95 40

The full search plays every arm on 1, 2, 3, ... verifiers, each time all of them with all users and
several seeds, until the objectives are met. Both answers stand side by side with the time they
took, in seconds by the clock and of the processors, and the p95 that either expects there. Exits 1
if the numbers of verifiers are more than 10 % apart.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from edgespec.benchmark.arms import Arm
from edgespec.cli.sim.pool import Task, Workers, default_processes
from edgespec_sim.planning.capacity import CapacityPlanner
from edgespec_sim.planning.capacity_events import confirm, judged
from edgespec_sim.planning.capacity_values import CapacityPlan, CapacityQuestion, Observed
from edgespec_sim.scenario.arrival_sections import SloSection
from edgespec_sim.scenario.loading import load_scenario, scenario_path
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job

_CYCLE_S = 5.0
_WITHIN = 0.10


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--ttft-p95", type=float, default=1000.0)
    parser.add_argument("--tpot-p95", type=float, default=40.0)
    parser.add_argument("--arms", default="target-only,edgespec")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--window", type=float, default=40.0, help="Seconds that count, a seed")
    parser.add_argument("--most", type=int, default=8, help="Verifiers, at most")
    parser.add_argument("--processes", type=int, default=default_processes())
    return parser.parse_args()


class Clock:
    """Seconds since it was made: by the clock, and of all processes that have ended or are ours."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.monotonic(), self._used_s()

    @staticmethod
    def _used_s() -> float:
        used = os.times()
        return used.user + used.system + used.children_user + used.children_system

    def __str__(self) -> str:
        wall_s, cpu_s = time.monotonic() - self._wall_s, self._used_s() - self._cpu_s
        return f"{wall_s:.0f} s, {cpu_s:.0f} s of processors"


def player(workers: Workers, doing: str, jobs: Sequence[Job]) -> list[WorldOutcome]:
    outcomes = dict(workers.play([Task(doing, job) for job in jobs], doing))
    return [outcomes[index] for index in range(len(jobs))]


def full(question: CapacityQuestion, arguments: argparse.Namespace) -> dict[Arm, Observed]:
    """The first number of verifiers of each arm at which all is well; every world is told."""
    found: dict[Arm, Observed] = {}
    with Workers(arguments.processes) as workers:
        for number in range(1, arguments.most + 1):
            left = [arm for arm in question.arms if arm not in found]
            jobs = [
                Job(
                    question.world(arm, number, number, arguments.window, _CYCLE_S),
                    arm,
                    0,
                    question.seed + 100 + seed,
                    question.folder,
                )
                for arm in left
                for seed in range(arguments.seeds)
            ]
            outcomes = player(workers, f"{number} verifiers", jobs)
            for index, arm in enumerate(left):
                mine = slice(index * arguments.seeds, (index + 1) * arguments.seeds)
                one = judged(question.slo, number, jobs[mine][0].scenario, outcomes[mine])
                print(f"full search: {arm.value:12} {told(one)}", flush=True)
                if one.meets.by_value:
                    found[arm] = one
            if len(found) == len(question.arms):
                break
    return found


def told(one: Observed) -> str:
    ttft, tpot = ([1e3 * value for value in triple] for triple in (one.ttft_p95_s, one.tpot_p95_s))
    return (
        f"{one.verifiers} verifiers: TTFT p95 {ttft[0]:.0f} ({ttft[1]:.0f} to {ttft[2]:.0f}) ms,"
        f" TPOT p95 {tpot[0]:.1f} ({tpot[1]:.1f} to {tpot[2]:.1f}) ms, {one.utilisation:.0%} busy,"
        f" {one.requests} requests, {one.seeds} seeds: meets them {one.meets.value}"
    )


def plan(question: CapacityQuestion, processes: int) -> CapacityPlan:
    with Workers(processes) as workers:

        def play(doing: str, jobs: Sequence[Job]) -> list[WorldOutcome]:
            return player(workers, doing, jobs)

        planner = CapacityPlanner(question, play)
        arms = planner.by_mean_field()
        for one in arms:
            if one.predicted is not None:
                print(
                    f"mean field:  {one.arm.value:12} {one.verifiers} verifiers: TTFT p95"
                    f" {1e3 * one.predicted.ttft_p95_s:.0f} ms, TPOT p95"
                    f" {1e3 * one.predicted.tpot_p95_s:.1f} ms,"
                    f" {one.predicted.utilisation:.0%} busy",
                    flush=True,
                )
        return confirm(planner, question, arms, play, lambda rounds: rounds < 2, at_once=processes)


def main() -> int:
    arguments = parsed()
    scenario = load_scenario("laptop-floor", {"devices.laptop.count": arguments.users})
    question = CapacityQuestion(
        scenario,
        SloSection(arguments.ttft_p95, arguments.tpot_p95),
        tuple(Arm(name) for name in arguments.arms.split(",")),
        scenario_path("laptop-floor").parent,
    )
    clock = Clock()
    answer = plan(question, arguments.processes)
    for one in answer.observed.values():
        print(f"plan's events: {answer.arm.value if answer.arm else '-':10} {told(one)}")
    named = answer.arm.value if answer.arm else "nothing"
    print(f"plan:        {named} on {answer.verifiers}, {answer.interval}, in {clock}", flush=True)
    clock = Clock()
    found = full(question, arguments)
    best = min(found, key=lambda arm: (found[arm].verifiers, found[arm].tpot_p95_s), default=None)
    if best is None or answer.arm is None:
        print(f"full search: nothing up to {arguments.most} verifiers, in {clock}")
        return int(best is not answer.arm)
    print(f"full search: {best.value} on {found[best].verifiers}, in {clock}")
    off = abs(answer.verifiers - found[best].verifiers) / found[best].verifiers
    print(f"apart by {off:.0%} of the verifiers")
    return int(off > _WITHIN or best is not answer.arm)


if __name__ == "__main__":
    sys.exit(main())
