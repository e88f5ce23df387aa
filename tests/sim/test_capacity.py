"""How many verifiers: the search goes where events lead, and says what forbids an objective.

Oracles: a mean field and events that are made up, so that the right number is known; a verifier
whose passes take a fixed time however many are in them, on which any number of users find a time a
token that is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from edgespec.bench.arms import Arm
from edgespec_sim.planning.capacity import (
    GPUS,
    ArmPlan,
    CapacityPlanner,
    CapacityQuestion,
    Meets,
    Observed,
    Predicted,
    Search,
    best_arm,
    confirm,
    gpu_named,
    sessions_that_fit,
)
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    Scenario,
    SloSection,
    TokensFrom,
    TokensSection,
    VerifierSection,
    WorkloadSection,
)
from edgespec_sim.scenario.verifiers import MACHINES
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job, play

SCENARIO = Scenario(
    name="planned",
    tokens=TokensSection(source=TokensFrom.TOY),
    devices={
        "laptop": DeviceSection(
            count=4,
            workload=WorkloadSection(prompt_tokens=8, output_tokens=8, think_s=0.5),
        )
    },
    verifiers={"gpu": VerifierSection(pass_time=CostSection(ms=20.0))},
)


def question(**changes: object) -> CapacityQuestion:
    slo = SloSection(ttft_p95_ms=200.0, tpot_p95_ms=30.0)
    asked = CapacityQuestion(SCENARIO, slo, (Arm.TARGET_ONLY,), Path())
    return replace(asked, **changes)  # type: ignore[arg-type] # fields of the question


def predicted(verifiers: int, tpot_s: float) -> Predicted:
    return Predicted(verifiers, 0.1, tpot_s, 4.0, 0.5, 1.0, within=True)


@dataclass
class MadeUp:
    """A mean field whose TPOT falls with the number of verifiers: ``work`` ms over it."""

    work: float

    def predict(self, arm: Arm, verifiers: int) -> Predicted:
        return predicted(verifiers, self.work / verifiers / 1e3)

    def least(self, arm: Arm, ttft_factor: float = 1.0, tpot_factor: float = 1.0) -> int:
        return math.ceil(tpot_factor * self.work / 30.0)


def observed(verifiers: int, tpot_ms: float, half_ms: float) -> Observed:
    triple = (tpot_ms / 1e3, (tpot_ms - half_ms) / 1e3, (tpot_ms + half_ms) / 1e3)
    if tpot_ms <= 30.0:
        meets = Meets.YES if tpot_ms + half_ms <= 30.0 else Meets.LIKELY
    else:
        meets = Meets.NO if tpot_ms - half_ms > 30.0 else Meets.UNLIKELY
    return Observed(verifiers, verifiers, 1, 100, 0, (0.1, 0.1, 0.1), triple, 0.5, meets)


def searched(work_ms: float, truth_ms: float, half_ms: float = 0.01) -> Search:
    """By a mean field of ``work_ms`` where events say ``truth_ms`` over the number."""
    planner = MadeUp(work_ms)
    first = planner.least(Arm.TARGET_ONLY)
    search = Search(cast("CapacityPlanner", planner), question(), Arm.TARGET_ONLY, first)
    for _ in range(20):
        wanted = search.wanted()
        new = [one for one in wanted if one not in search.observed]
        if not new:
            break
        for number in new:
            search.observed[number] = observed(number, truth_ms / number, half_ms)
    return search


@pytest.mark.parametrize("truth_ms", [100.0, 170.0, 299.0, 301.0, 890.0])
def test_events_have_the_last_word(truth_ms: float) -> None:
    search = searched(300.0, truth_ms)
    right = math.ceil(truth_ms / 30.0)
    plan = search.plan(())
    assert (plan.verifiers, plan.interval, plan.confirmed) == (right, (right, right), True)
    assert len(search.observed) <= 6
    assert {right, right - 1} <= set(search.observed)


def test_without_time_nothing_is_confirmed() -> None:
    asked = question()
    planner = cast("CapacityPlanner", MadeUp(300.0))
    arms = (ArmPlan(Arm.TARGET_ONLY, 10, predicted(10, 0.03)),)
    plan = confirm(planner, asked, arms, lambda doing, jobs: [], lambda rounds: False)
    assert (plan.verifiers, plan.confirmed) == (10, False)
    assert "before 10 and 9 verifiers were played" in plan.why_not


def test_a_round_that_the_time_ends_is_not_used() -> None:
    """And what was found before stands."""
    asked = question(scenario=replace(SCENARIO, duration_s=1.0))
    planner = cast("CapacityPlanner", MadeUp(60.0))
    rounds: list[int] = []

    def play_once(doing: str, jobs: Sequence[Job]) -> list[WorldOutcome]:
        rounds.append(len(jobs))
        if len(rounds) > 1:
            raise TimeoutError
        return played(doing, jobs)

    arms = (ArmPlan(Arm.TARGET_ONLY, 9, predicted(9, 0.03)),)
    plan = confirm(planner, asked, arms, play_once, lambda rounds: True)
    assert len(rounds) == 2
    assert {number: one.seeds for number, one in plan.observed.items()} == {8: 1, 9: 1}
    assert "the time was up before" in plan.why_not


def test_a_round_has_as_many_worlds_as_there_are_cores() -> None:
    """Four at once: two numbers with two seeds each, no seed twice."""
    asked = question(scenario=replace(SCENARIO, duration_s=1.0))
    planner = cast("CapacityPlanner", MadeUp(60.0))
    rounds: list[list[tuple[int, int]]] = []

    def play_some(doing: str, jobs: Sequence[Job]) -> list[WorldOutcome]:
        rounds.append([(job.scenario.verifiers["gpu"].count, job.seed) for job in jobs])
        return played(doing, jobs)

    arms = (ArmPlan(Arm.TARGET_ONLY, 2, predicted(2, 0.03)),)
    plan = confirm(planner, asked, arms, play_some, lambda rounds: rounds < 1, at_once=4)
    assert rounds == [[(2, 1), (2, 2), (1, 1), (1, 2)]]
    assert [one.seeds for one in plan.observed.values()] == [2, 2]


def test_the_arm_with_fewest_verifiers_is_taken_then_the_quicker() -> None:
    def arm(which: Arm, verifiers: int | None, tpot_s: float) -> ArmPlan:
        return ArmPlan(which, verifiers, predicted(verifiers or 1, tpot_s))

    few = arm(Arm.EDGESPEC, 2, 0.03), arm(Arm.TARGET_ONLY, 3, 0.02)
    quick = arm(Arm.TARGET_ONLY, 2, 0.03), arm(Arm.EDGESPEC, 2, 0.02)
    found = [best_arm(few), best_arm(quick), best_arm((arm(Arm.PEARL, None, 0.1),))]
    assert [one and one.arm for one in found] == [Arm.EDGESPEC, Arm.EDGESPEC, None]


# --- with worlds ---------------------------------------------------------------------------


def played(doing: str, jobs: Sequence[Job]) -> list[WorldOutcome]:
    return [play(job) for job in jobs]


@pytest.mark.parametrize("rate", [None, 2.0])
def test_one_verifier_of_fixed_passes_serves_them_all(rate: float | None) -> None:
    asked = question(rate=rate)
    planner = CapacityPlanner(asked, played, session_seconds=4.0)
    (arm,) = planner.by_mean_field()
    assert arm.verifiers == 1
    assert arm.predicted is not None
    assert 0.020 <= arm.predicted.tpot_p95_s < 0.0201
    plan = confirm(planner, asked, (arm,), played, lambda rounds: rounds < 1)
    assert (plan.verifiers, plan.interval, plan.confirmed) == (1, (1, 1), True)
    assert plan.observed[1].tpot_p95_s[0] == pytest.approx(arm.predicted.tpot_p95_s, rel=0.05)
    assert plan.observed[1].unfinished == 0


def test_an_objective_below_a_pass_is_refused_with_the_term() -> None:
    asked = question(slo=SloSection(tpot_p95_ms=15.0))
    (arm,) = CapacityPlanner(asked, played, session_seconds=2.0).by_mean_field()
    assert arm.verifiers is None
    assert "TPOT p95 is to be 15.0 ms at most" in arm.why
    assert "the bound 'one pass a token' alone is 20.0 ms" in arm.why
    plan = confirm(
        cast("CapacityPlanner", None), asked, (arm,), lambda doing, jobs: [], lambda rounds: True
    )
    assert plan.arm is None


def test_prices_have_a_source_and_a_date() -> None:
    assert GPUS.keys() <= MACHINES.keys()
    for one in GPUS.values():
        assert one.price_per_hour > 0.0
        assert one.source
        assert one.date.startswith("2026-")


def test_memory_bounds_the_sessions() -> None:
    assert sessions_that_fit("llama-3.1-70b-fp8", "h200", 1000.0) == 171
    with pytest.raises(ValueError, match=r"weights of llama-3\.1-70b-fp8 take 71 GB"):
        sessions_that_fit("llama-3.1-70b-fp8", "rtx-4090", 100.0)
    with pytest.raises(ValueError, match="gpu is 'h300', but must be one of h200"):
        gpu_named("h300")
