"""A device's conditions in a world. Oracles: the guard's own bounds on the course
that was stated; the target's text; a world without conditions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from edgespec.bench.arms import Arm
from edgespec.telemetry.trace import TraceFile
from edgespec_sim.report.timeline import DeviceSpans, Mark
from edgespec_sim.scenario import sections as sc
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job, play
from tests.present import present

Row = sc.ConditionSection


def world(
    conditions: sc.ConditionsSection | None, duration_s: float = 12.0, think_s: float = 1.0
) -> sc.Scenario:
    workload = sc.WorkloadSection(
        prompt_tokens=16, output_tokens=32, think_s=think_s, start_within_s=0.1
    )
    device = sc.DeviceSection(path=("wan",), workload=workload, conditions=conditions)
    return sc.Scenario(
        name="conditions",
        duration_s=duration_s,
        arms=(Arm.TARGET_ONLY, Arm.VANILLA, Arm.EDGESPEC),
        links={"wan": sc.LinkSection(rtt_ms=30.0)},
        devices={"phone": device},
    )


def played(conditions: sc.ConditionsSection | None, arm: Arm = Arm.EDGESPEC) -> WorldOutcome:
    return play(Job(world(conditions), arm, 0, 1, Path()))


def counts(outcome: WorldOutcome) -> tuple[int, int]:
    whole = outcome.meters.whole()
    assert whole.mismatches == 0
    assert whole.requests > 3
    return whole.memory_tightened, whole.memory_loosened


WELL = Row(0.0, resident_mib=100.0)


def test_conditions_that_are_well_change_nothing() -> None:
    plain = played(None)
    well = played(sc.ConditionsSection((WELL,), budget_mib=900.0))
    assert counts(well) == (0, 0)
    assert well.meters.rows() == plain.meters.rows()


def test_a_budget_restricts_the_draft_and_lets_it_go() -> None:
    course = (WELL, Row(3.0, resident_mib=600.0), Row(20.0, resident_mib=100.0))
    section = sc.ConditionsSection(course, budget_mib=500.0, window=512)
    scenario = world(section, duration_s=150.0, think_s=4.0)
    outcome = play(Job(scenario, Arm.EDGESPEC, 0, 1, Path()))
    less, more = counts(outcome)
    assert less >= 1
    assert more >= 2  # nothing at first, then some, then all again
    by_start = outcome.meters.rows()
    resting = [row for row in by_start if 20.0 < row.started_s < 45.0]
    assert resting
    assert all(row.acceptance is None for row in resting)
    assert [row for row in by_start if row.tokens][-1].acceptance is not None


def test_other_arms_are_slowed_down_and_have_no_governor() -> None:
    hot = sc.ConditionsSection((replace(WELL, resident_mib=900.0, slowdown=4.0),), budget_mib=500.0)
    for arm in (Arm.TARGET_ONLY, Arm.VANILLA):
        assert counts(played(hot, arm)) == (0, 0)
    assert played(hot, Arm.TARGET_ONLY).meters.rows() == played(None, Arm.TARGET_ONLY).meters.rows()
    slow, plain = (played(one, Arm.VANILLA).meters.whole().tpot_s for one in (hot, None))
    assert present(slow).mean > present(plain).mean


def test_the_trace_and_the_page_show_each_change(tmp_path: Path) -> None:
    course = (replace(WELL, resident_mib=900.0),)
    scenario = replace(world(sc.ConditionsSection(course, budget_mib=500.0)), duration_s=2.0)
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as tracer:
        play(Job(scenario, Arm.EDGESPEC, 0, 1, Path()), tracer)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    told = [line for line in lines if line["name"] == "DraftRestricted"]
    assert told[-1]["window"] == 0
    marks: list[tuple[bool, Mark]] = []
    spans = DeviceSpans(marks)
    for line in told:
        spans.read(line)
    assert [mark.name for _, mark in marks] == ["draft's memory"] * len(told)
