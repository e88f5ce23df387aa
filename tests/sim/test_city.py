"""Oracles: the target's own text, arithmetic by hand, and the same seed played again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec_sim.run_summary import RunSummary, read_summary
from edgespec_sim.scenario.sections import (
    DeviceSection,
    HandoverSection,
    LinkSection,
    OutageSection,
    Scenario,
    TokensFrom,
    TokensSection,
    VerifierSection,
    WorkloadSection,
)
from edgespec_sim.world.run import jobs_of, play, summarise

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
