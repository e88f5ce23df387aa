"""A device's conditions in a world. Oracles: the guard's own bounds on the course
that was stated; the target's text; a world without conditions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec.config.loading import ConfigError
from edgespec.telemetry.trace import TraceFile
from edgespec_sim.planning.mean_field import check_mean_field
from edgespec_sim.report.timeline import DeviceSpans, Mark
from edgespec_sim.scenario.network import LinkSection
from edgespec_sim.scenario.sections import (
    ConditionSection,
    ConditionsSection,
    DeviceSection,
    Scenario,
    WorkloadSection,
    load_scenario,
)
from edgespec_sim.traces.network_trace import TraceError
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.governors import LESS_MEMORY, MORE_MEMORY, read_course
from edgespec_sim.world.run import Job, jobs_of, play, summarise
from tests.sim.random_worlds import GOVERNED_FROM, draw_options
from tests.sim.random_worlds import play as play_world

Row = ConditionSection


def world(
    conditions: ConditionsSection | None, duration_s: float = 12.0, think_s: float = 1.0
) -> Scenario:
    workload = WorkloadSection(
        prompt_tokens=16, output_tokens=32, think_s=think_s, start_within_s=0.1
    )
    device = DeviceSection(path=("wan",), workload=workload, conditions=conditions)
    return Scenario(
        name="conditions",
        duration_s=duration_s,
        arms=(Arm.TARGET_ONLY, Arm.VANILLA, Arm.EDGESPEC),
        links={"wan": LinkSection(rtt_ms=30.0)},
        devices={"phone": device},
    )


def played(conditions: ConditionsSection | None, arm: Arm = Arm.EDGESPEC) -> WorldOutcome:
    return play(Job(world(conditions), arm, 0, 1, Path()))


def counts(outcome: WorldOutcome) -> tuple[int, int]:
    whole = outcome.meters.whole()
    assert whole.mismatches == 0
    assert whole.requests > 3
    return whole.memory_tightened, whole.memory_loosened


def happened(outcome: WorldOutcome) -> list[tuple[float, str]]:
    assert outcome.watched is not None
    return [(one.start_s, one.what) for one in outcome.watched.interruptions]


WELL = Row(0.0, resident_mib=100.0)


def test_conditions_that_are_well_change_nothing() -> None:
    plain = played(None)
    well = played(ConditionsSection((WELL,), budget_mib=900.0))
    assert counts(well) == (0, 0)
    assert well.meters.rows() == plain.meters.rows()
    assert happened(well) == []


def test_a_budget_restricts_the_draft_and_lets_it_go() -> None:
    course = (WELL, Row(3.0, resident_mib=600.0), Row(20.0, resident_mib=100.0))
    section = ConditionsSection(course, budget_mib=500.0, window=512)
    scenario = world(section, duration_s=150.0, think_s=4.0)
    outcome = play(Job(scenario, Arm.EDGESPEC, 0, 1, Path()))
    less, more = counts(outcome)
    assert less >= 1
    assert more >= 2  # nothing at first, then some, then all again
    kinds = [what for _, what in happened(outcome)]
    assert kinds == [LESS_MEMORY] * less + [MORE_MEMORY] * more
    by_start = outcome.meters.rows()
    resting = [row for row in by_start if 20.0 < row.started_s < 45.0]
    assert resting
    assert all(row.acceptance is None for row in resting)
    assert [row for row in by_start if row.tokens][-1].acceptance is not None


def test_a_window_that_slides_costs_time_and_no_token() -> None:
    roomy = ConditionsSection((WELL,), budget_mib=900.0, window=512)
    plain, small = played(roomy), played(replace(roomy, window=64))
    assert counts(small) == counts(plain) == (0, 0)
    section = world(roomy).devices["phone"]
    longer = replace(section.workload, output_tokens=128)
    dear = replace(section, draft=replace(section.draft, row_ms=4.0), workload=longer)

    def mean_tpot_s(window: int) -> float:
        phone = replace(dear, conditions=replace(roomy, window=window))
        scenario = replace(world(roomy), devices={"phone": phone})
        tpot = play(Job(scenario, Arm.EDGESPEC, 0, 1, Path())).meters.whole().tpot_s
        assert tpot is not None
        return tpot.mean

    assert mean_tpot_s(64) > mean_tpot_s(512)  # tokens are fed again, 4 ms each


def test_other_arms_are_slowed_down_and_have_no_governor() -> None:
    hot = ConditionsSection((replace(WELL, resident_mib=900.0, slowdown=4.0),), budget_mib=500.0)
    for arm in (Arm.TARGET_ONLY, Arm.VANILLA):
        assert counts(played(hot, arm)) == (0, 0)
    assert played(hot, Arm.TARGET_ONLY).meters.rows() == played(None, Arm.TARGET_ONLY).meters.rows()
    slow, plain = (played(one, Arm.VANILLA).meters.whole().tpot_s for one in (hot, None))
    assert slow is not None
    assert plain is not None
    assert slow.mean > plain.mean


def test_devices_of_a_group_may_meet_it_one_after_another() -> None:
    section = ConditionsSection(
        (WELL, Row(2.0, resident_mib=900.0)), spread_s=5.0, budget_mib=500.0
    )
    scenario = world(section)
    scenario = replace(scenario, devices={"phone": replace(scenario.devices["phone"], count=2)})
    outcome = play(Job(scenario, Arm.EDGESPEC, 0, 1, Path()))
    streaming = {
        name: min(
            row.started_s
            for row in outcome.meters.rows()
            if row.device == name and row.acceptance is None
        )
        for name in ("phone-1", "phone-2")
    }
    assert 2.0 <= streaming["phone-1"] < 7.0 <= streaming["phone-2"]


def test_the_trace_and_the_page_show_each_change(tmp_path: Path) -> None:
    course = (replace(WELL, resident_mib=900.0),)
    scenario = replace(world(ConditionsSection(course, budget_mib=500.0)), duration_s=2.0)
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


def test_the_summary_counts_changes_of_all_seeds(tmp_path: Path) -> None:
    scenario = world(ConditionsSection((WELL, Row(3.0, resident_mib=900.0)), budget_mib=500.0))
    outcomes = [
        (job.arm, play(job)) for seed in (1, 2) for job in jobs_of(scenario, seed, tmp_path)
    ]
    each = [counts(outcome)[0] for arm, outcome in outcomes if arm is Arm.EDGESPEC]
    summary = summarise(scenario, (1, 2), tmp_path, outcomes)
    found = {arm.arm: arm.all.memory_tightened for arm in summary.arms}
    assert min(each) >= 1
    assert found == {"target-only": 0, "vanilla": 0, "edgespec": sum(each)}


def test_random_worlds_with_governors_keep_every_token() -> None:
    seeds = range(GOVERNED_FROM, GOVERNED_FROM + 40)
    options = [draw_options(seed) for seed in seeds]
    assert sum(one.resident_bytes is not None for one in options) > 1
    for seed in seeds:
        play_world(seed)


# --- files and mistakes -------------------------------------------------------------------------


def test_a_recorded_course_is_read(tmp_path: Path) -> None:
    path = tmp_path / "phone.csv"
    path.write_text("at_s,resident_mib,slowdown\n0,40,1\n2.5,,2\n4,900,\n")
    assert read_course(path) == (
        Row(0.0, resident_mib=40.0, slowdown=1.0),
        Row(2.5, slowdown=2.0),
        Row(4.0, resident_mib=900.0),
    )
    scenario = world(ConditionsSection(file="phone.csv", budget_mib=500.0))
    outcome = play(Job(scenario, Arm.EDGESPEC, 0, 1, tmp_path))
    assert counts(outcome)[0] >= 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "columns are , but must be at_s"),
        ("at_s,warmth\n0,1\n", "columns are at_s, warmth, but must be at_s and some of at_s, res"),
        ("at_s,slowdown\n", "no conditions in it"),
        ("at_s,slowdown\n1,40\n", "course begins at 1 s, but must begin at 0"),
        ("at_s,slowdown\n0,40\n0,41\n", "course has 0 s behind 0 s"),
        ("at_s,slowdown\n0,400\n", "row 1: slowdown is 400.0, but must be in [0.01, 100.0]"),
        ("at_s,slowdown\n0,40,3\n", "row 1: 3 cells, but the header has 2"),
        ("at_s,slowdown\n0,warm\n", "row 1: could not convert string to float: 'warm'"),
        ("at_s,slowdown\n,40\n", "row 1: "),
    ],
)
def test_a_file_that_is_wrong_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "course.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_course(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    with pytest.raises(TraceError, match="No such file"):
        read_course(tmp_path / "nowhere.csv")


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ("{}", "conditions take either course or file, but neither is given"),
        ("{file: x.csv, course: [{at_s: 0}]}", "but both are given"),
        ("{course: [{at_s: 3}]}", "course begins at 3 s, but must begin at 0"),
        ("{course: [{at_s: 0, slowdown: 500}]}", "slowdown is 500.0, but must be in [0.01, 100.0]"),
        ("{course: [{slowdown: 50}]}", "key 'at_s' is missing"),
        ("{course: [{at_s: 0}], budget_mib: 0}", "budget_mib is 0.0, but must be in [1.0,"),
        ("{course: [{at_s: 0}], window: 8}", "window is 8, but must be in [64,"),
    ],
)
def test_mistakes_are_named(conditions: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(f"name: x\ndevices: {{phone: {{conditions: {conditions}}}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_scenario(str(path))
    assert said in str(caught.value)


def test_a_mean_field_refuses_them() -> None:
    with pytest.raises(ValueError, match=r"devices\.phone\.conditions change over time"):
        check_mean_field(world(ConditionsSection((WELL,))))
