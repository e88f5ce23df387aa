"""Oracles: the target's own text, arithmetic by hand, and the same seed played again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec.telemetry.trace import TraceFile
from edgespec_sim.run_summary import PACE, RunSummary, Series, read_summary
from edgespec_sim.scenario.network import HandoverSection, LinkSection, OutageSection
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    Scenario,
    StagesSection,
    TokensFrom,
    TokensSection,
    VerifierSection,
    WorkloadSection,
)
from edgespec_sim.world.run import Job, jobs_of, play, summarise

HERE = Path()
WORK = WorkloadSection(prompt_tokens=16, output_tokens=40, think_s=0.3, length_spread=0.3)
SMALL = Scenario(
    name="small",
    duration_s=6.0,
    tokens=TokensSection(acceptance=0.8),
    links={"wan": LinkSection(rtt_ms=40.0, jitter_ms=0.5, up_mbps=5.0, down_mbps=20.0)},
    devices={"laptop": DeviceSection(count=2, path=("wan",), workload=WORK)},
)
ROUGH = replace(
    SMALL,
    links={
        "wan": LinkSection(
            rtt_ms=40.0,
            loss=0.02,
            up_mbps=0.5,
            down_mbps=2.0,
            shared=True,
            cross_up=0.4,
            cross_down=0.4,
            outages=(OutageSection(at_s=1.0, for_s=0.4),),
            handover=HandoverSection(every_s=1.5, gap_ms=60.0, breaks=True),
        ),
        "lte": LinkSection(trace="generate:lte", trace_spread_s=5.0),
    },
    devices={"laptop": DeviceSection(count=3, path=("lte", "wan"), workload=WORK)},
    verifiers={"server": VerifierSection(count=2)},
)


def run(scenario: Scenario, seed: int = 1) -> RunSummary:
    outcomes = [(job.arm, play(job)) for job in jobs_of(scenario, seed, HERE)]
    return summarise(scenario, (seed,), HERE, outcomes)


@pytest.mark.parametrize("scenario", [SMALL, ROUGH], ids=["small", "rough"])
def test_every_arm_delivers_the_targets_own_text(scenario: Scenario) -> None:
    for arm in run(scenario).arms:
        assert arm.all.tokens > 50, arm.arm
        assert arm.all.mismatches == 0, arm.arm


@pytest.mark.parametrize(
    "tokens", [TokensSection(source=TokensFrom.TAPE), TokensSection(source=TokensFrom.TOY)]
)
def test_other_sources_of_tokens(tokens: TokensSection) -> None:
    summary = run(replace(SMALL, tokens=tokens, arms=(Arm.VANILLA, Arm.EDGESPEC), duration_s=4.0))
    assert all(arm.all.tokens > 50 and arm.all.mismatches == 0 for arm in summary.arms)
    assert ("tape" if tokens.source is TokensFrom.TAPE else "toy") in summary.tokens_from


def test_plain_streaming_is_as_fast_as_passes_come() -> None:
    """One device: 25 ms a token; the first one after the request's way there, the pass over the
    prompt and the way back. The first request of all pays a round trip to connect as well."""
    link = LinkSection(rtt_ms=100.0)
    device = DeviceSection(path=("wan",), workload=replace(WORK, start_within_s=0.0))
    scenario = replace(
        SMALL, links={"wan": link}, devices={"one": device}, arms=(Arm.TARGET_ONLY,), message_ms=0.0
    )
    (arm,) = run(scenario).arms
    assert arm.all.tpot_s is not None
    assert arm.all.ttft_s is not None
    assert arm.all.tpot_s.median == pytest.approx(0.025, rel=1e-6)
    assert arm.all.ttft_s.median == pytest.approx(0.050 + 0.025 + 0.050, rel=1e-6)
    assert arm.all.tokens_per_pass == pytest.approx(1.0)


def test_results_are_above_their_bounds() -> None:
    device = DeviceSection(path=("wan",), workload=WORK)
    for arm in run(replace(SMALL, devices={"one": device})).arms:
        assert arm.bounds
        assert arm.all.tpot_s is not None
        for name, bound_s in arm.bounds.items():
            assert arm.all.tpot_s.mean >= 0.98 * bound_s, (arm.arm, name)


def test_equal_seeds_give_equal_results_and_others_do_not() -> None:
    scenario = replace(ROUGH, arms=(Arm.EDGESPEC,))
    once, again, other = run(scenario, 3), run(scenario, 3), run(scenario, 4)
    assert once == again
    assert once.arms != other.arms


def test_all_arms_are_asked_the_same_questions_at_first() -> None:
    first = {
        arm.arm: [(row.device, row.started_s) for row in arm.rows if row.started_s < 1.0][:2]
        for arm in run(SMALL).arms
    }
    assert len({tuple(sorted(rows)) for rows in first.values()}) == 1


def test_one_more_device_changes_nothing_for_the_others_but_its_load() -> None:
    """Plain streaming on a flat pass time: nobody feels a third session."""
    two = replace(SMALL, arms=(Arm.TARGET_ONLY,), duration_s=3.0)
    device = SMALL.devices["laptop"]
    three = replace(two, devices={"laptop": replace(device, count=3)})

    def mine(scenario: Scenario) -> list[tuple[float, int]]:
        rows = run(scenario).arms[0].rows
        return [(row.started_s, row.tokens) for row in rows if row.device == "laptop-1"]

    assert mine(two)[0] == pytest.approx(mine(three)[0])


def test_energy_is_reported_where_all_of_it_is_known() -> None:
    device = replace(SMALL.devices["laptop"], draft_w=10.0, radio_power="wifi")
    arms = {arm.arm: arm.all for arm in run(replace(SMALL, devices={"laptop": device})).arms}
    ours, plain = arms["edgespec"].energy_j_per_token, arms["target-only"].energy_j_per_token
    assert ours is not None
    assert plain is not None
    # A radio that hears a token every pass never sleeps: 0.403 W, but for pauses, of two devices.
    tokens = arms["target-only"].tokens
    assert 0.3 * 0.403 * 12.0 / tokens < plain <= 0.403 * 12.0 / tokens
    # At least one step of 8 ms at 10 W stands behind every hit; no device works all the time twice.
    most = (10.0 + 0.403) * 2 * 6.0 / arms["edgespec"].tokens * 1.05
    assert 0.5 * 0.08 < ours < most
    for less in (replace(device, radio_power=""), replace(device, draft_w=0.0)):
        partly = run(replace(SMALL, devices={"laptop": less}, arms=(Arm.EDGESPEC,)))
        assert partly.arms[0].all.energy_j_per_token is None
        assert any("not reported" in note for note in partly.notes)


def test_layers_on_several_nodes_cost_their_links() -> None:
    stages = StagesSection(nodes=4, link_ms=10.0)
    verifier = VerifierSection(pass_time=CostSection(ms=20.0), stages=stages)
    device = replace(SMALL.devices["laptop"], count=1)
    scenario = replace(
        SMALL, verifiers={"swarm": verifier}, devices={"one": device}, arms=(Arm.TARGET_ONLY,)
    )
    (arm,) = run(scenario).arms
    assert arm.all.tpot_s is not None
    assert arm.all.tpot_s.median == pytest.approx(0.020 + 3 * 0.010, rel=1e-3)


def test_shards_add_up() -> None:
    device = replace(SMALL.devices["laptop"], count=4)
    scenario = replace(
        SMALL,
        shards=2,
        devices={"laptop": device},
        verifiers={"server": VerifierSection(count=2)},
        arms=(Arm.EDGESPEC,),
    )
    summary = run(scenario)
    (arm,) = summary.arms
    parts = [play(job).meters.whole() for job in jobs_of(scenario, 1, HERE)]
    assert arm.all.tokens == sum(part.tokens for part in parts)
    assert len(arm.verifiers) == 2


def test_a_summary_survives_its_file(tmp_path: Path) -> None:
    summary = run(replace(SMALL, duration_s=3.0))
    path = tmp_path / "summary.json"
    path.write_text(summary.to_json(), encoding="utf-8")
    assert read_summary(path) == summary


def test_the_trace_holds_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as tracer:
        play(Job(replace(SMALL, duration_s=2.0), Arm.EDGESPEC, 0, 1, HERE), tracer)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {line["side"] for line in lines} == {"device", "verifier"}
    assert [line["at_s"] for line in lines] == sorted(line["at_s"] for line in lines)
    assert {"StartStep", "StepDone", "Commit", "Deliver", "RunBatch"} <= {
        line["name"] for line in lines
    }


def test_progress_reaches_the_end() -> None:
    told: list[float] = []
    play(Job(replace(SMALL, duration_s=2.0), Arm.TARGET_ONLY, 0, 1, HERE), None, told.append)
    assert told == sorted(told)
    assert told[-1] == pytest.approx(2.0)


def test_requests_under_way_add_up_to_the_time_they_took() -> None:
    (arm,) = run(replace(SMALL, arms=(Arm.TARGET_ONLY,))).arms
    pace, tokens, under_way = arm.series
    assert pace.name == PACE
    assert _sum(tokens) * tokens.step_s == pytest.approx(arm.all.tokens)
    # Two devices, one request each at a time.
    assert max(value or 0.0 for value in under_way.values) <= 2.0 + 1e-9
    assert _sum(under_way) * under_way.step_s > 2 * 6.0 * 0.5


def _sum(series: Series) -> float:
    return sum(value or 0.0 for value in series.values)
