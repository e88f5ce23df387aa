"""Scenarios: what they play and how they are read. Oracles: the target's own text, arithmetic by
hand, and the same seed played again; a mistake has to be named: the key, the value, what would be
right; which verifier a device uses is held against the product's own ranking."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec.config.loading import dump_config, load_config
from edgespec.core.association.policies import VerifierView
from edgespec.core.device.goodput_policy import PolicyName
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.report.tables import drafts_rows
from edgespec_sim.run_summary import RunSummary
from edgespec_sim.scenario import sections as sc
from edgespec_sim.scenario.sections import CostSection, Scenario, bundled_scenarios, load_scenario
from edgespec_sim.scenario.verifiers import Operation, law_of, measured, roofline_law
from edgespec_sim.world.assembly import World
from edgespec_sim.world.run import jobs_of, play, summarise, token_source
from edgespec_sim.world.site import LinkView, Surrounding
from tests.present import present
from tests.shell.live_verifier import python

HERE = Path()
WORK = sc.WorkloadSection(prompt_tokens=16, output_tokens=40, think_s=0.3, length_spread=0.3)
SMALL = sc.Scenario(
    name="small",
    duration_s=6.0,
    tokens=sc.TokensSection(acceptance=0.8),
    links={"wan": sc.LinkSection(rtt_ms=40.0, jitter_ms=0.5, up_mbps=5.0, down_mbps=20.0)},
    devices={"laptop": sc.DeviceSection(count=2, path=("wan",), workload=WORK)},
)
ROUGH = replace(
    SMALL,
    links={
        "wan": sc.LinkSection(
            rtt_ms=40.0,
            loss=0.02,
            up_mbps=0.5,
            down_mbps=2.0,
            shared=True,
            cross_up=0.4,
            cross_down=0.4,
            outages=(sc.OutageSection(at_s=1.0, for_s=0.4),),
            handover=sc.HandoverSection(every_s=1.5, gap_ms=60.0, breaks=True),
        ),
        "lte": sc.LinkSection(trace="generate:lte", trace_spread_s=5.0),
    },
    devices={"laptop": sc.DeviceSection(count=3, path=("lte", "wan"), workload=WORK)},
    verifiers={"server": sc.VerifierSection(count=2)},
)


def run(scenario: sc.Scenario, seed: int = 1) -> RunSummary:
    outcomes = [(job.arm, play(job)) for job in jobs_of(scenario, seed, HERE)]
    return summarise(scenario, (seed,), HERE, outcomes)


@pytest.mark.parametrize("scenario", [SMALL, ROUGH], ids=["small", "rough"])
def test_every_arm_delivers_the_targets_own_text(scenario: sc.Scenario) -> None:
    for arm in run(scenario).arms:
        assert arm.all.tokens > 50, arm.arm
        assert arm.all.mismatches == 0, arm.arm


DRAFTING = sc.VerifierSection(server_draft=sc.ServerDraftSection(ms=2.5))
SERVED = replace(
    SMALL,
    duration_s=20.0,
    arms=(Arm.TARGET_ONLY, Arm.SERVER_DRAFT, Arm.BOTH),
    verifiers={"server": DRAFTING},
)


@pytest.mark.parametrize(
    "tokens",
    [
        sc.TokensSection(acceptance=0.8),
        sc.TokensSection(source=sc.TokensFrom.TAPE),
        sc.TokensSection(source=sc.TokensFrom.TOY),
    ],
    ids=lambda tokens: str(tokens.source.value),
)
def test_a_server_that_drafts(tokens: sc.TokensSection) -> None:
    """Prompts are longer than what its draft is fed at once, and it is counted what it did."""
    work = replace(WORK, prompt_tokens=700)
    devices = {"laptop": replace(SMALL.devices["laptop"], workload=work)}
    summary = run(replace(SERVED, tokens=tokens, devices=devices))
    plain, server, both = summary.arms
    assert [row[0] for row in drafts_rows(summary)] == ["target-only", "server-draft", "both"]
    assert drafts_rows(replace(summary, arms=(plain,))) == []
    assert all(arm.all.tokens > 50 and arm.all.mismatches == 0 for arm in (plain, server, both))
    assert plain.draft_ms_per_token == plain.verifiers[0].guessed == 0
    for arm in (server, both):
        (verifier,) = arm.verifiers
        assert 0 < verifier.accepted < verifier.guessed
        assert 0.0 < arm.draft_ms_per_token < arm.target_ms_per_token < plain.target_ms_per_token
        assert arm.target_ms_per_token + arm.draft_ms_per_token < plain.target_ms_per_token
    assert server.all.guessed == server.all.accepted == 0 < both.all.accepted < both.all.guessed


def test_a_servers_draft_errs_where_it_likes() -> None:
    """Of another acceptance than the devices' it changes no text, and is right as often as told."""
    shares = []
    for acceptance in (0.3, 0.9):
        draft = sc.ServerDraftSection(acceptance=acceptance)
        verifiers = {"server": sc.VerifierSection(server_draft=draft)}
        arms = (Arm.SERVER_DRAFT,)
        (arm,) = run(replace(SERVED, arms=arms, verifiers=verifiers, duration_s=20.0)).arms
        assert arm.all.mismatches == 0
        shares.append(arm.verifiers[0].accepted / arm.verifiers[0].guessed)
    assert shares[0] + 0.2 < shares[1]


def test_steps_of_a_servers_draft_are_paid_for() -> None:
    """By the sessions that they are for: joules of requests add up to those of the machine."""
    verifiers = {"server": replace(SERVED.verifiers["server"], busy_w=100.0)}
    for arm in run(replace(SERVED, verifiers=verifiers)).arms:
        joules = present(arm.verifiers[0].energy_j)
        assert arm.all.verifier_j_per_token == pytest.approx(joules / arm.all.tokens, rel=0.02)


def test_a_scenario_says_by_what_its_devices_draft() -> None:
    """On a tape, whose texts have the drafts' own confidences."""
    tape = sc.TokensSection(source=sc.TokensFrom.TAPE)
    work = sc.WorkloadSection(prompt_tokens=0, output_tokens=60, think_s=0.1)
    found = []
    for name in PolicyName:
        device = sc.DeviceSection(path=("wan",), workload=work, policy=name)
        scenario = replace(SMALL, duration_s=3.0, tokens=tape, devices={"laptop": device})
        found.append(run(replace(scenario, arms=(Arm.EDGESPEC, Arm.WINDOWED))).arms[0].all)
    assert len({one.wasted_per_token for one in found}) == len(PolicyName)
    assert not any(one.mismatches for one in found)


def test_plain_streaming_is_as_fast_as_passes_come() -> None:
    """One device: 25 ms a token; the first one after the request's way there, the pass over the
    prompt and the way back. The first request of all pays a round trip to connect as well."""
    link = sc.LinkSection(rtt_ms=100.0)
    device = sc.DeviceSection(path=("wan",), workload=replace(WORK, start_within_s=0.0))
    scenario = replace(
        SMALL, links={"wan": link}, devices={"one": device}, arms=(Arm.TARGET_ONLY,), message_ms=0.0
    )
    (arm,) = run(scenario).arms
    assert present(arm.all.tpot_s).median == pytest.approx(0.025, rel=1e-6)
    assert present(arm.all.ttft_s).median == pytest.approx(0.050 + 0.025 + 0.050, rel=1e-6)
    assert arm.all.tokens_per_pass == pytest.approx(1.0)


def test_equal_seeds_give_equal_results_and_others_do_not() -> None:
    scenario = replace(ROUGH, arms=(Arm.EDGESPEC,))
    once, again, other = run(scenario, 3), run(scenario, 3), run(scenario, 4)
    assert once == again
    assert once.arms != other.arms


def test_energy_is_reported_where_all_of_it_is_known() -> None:
    device = replace(SMALL.devices["laptop"], draft_w=10.0, radio_power="wifi")
    arms = {arm.arm: arm.all for arm in run(replace(SMALL, devices={"laptop": device})).arms}
    ours, plain = (present(arms[name].energy_j_per_token) for name in ("edgespec", "target-only"))
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
        verifiers={"server": sc.VerifierSection(count=2)},
        arms=(Arm.EDGESPEC,),
    )
    summary = run(scenario)
    (arm,) = summary.arms
    parts = [play(job).meters.whole() for job in jobs_of(scenario, 1, HERE)]
    assert arm.all.tokens == sum(part.tokens for part in parts)
    assert len(arm.verifiers) == 2


@pytest.mark.parametrize("name", sorted(bundled_scenarios()))
def test_bundled_scenarios_load_and_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.about
    path = tmp_path / "again.yaml"
    path.write_text(dump_config(scenario), encoding="utf-8")
    assert load_config(Scenario, path) == scenario


def test_given_times_grow_with_rows_and_context() -> None:
    section = CostSection(ms=25.0, row_ms=0.5, context_us=2.0)
    law = law_of(section, Operation.TARGET_PASS, Path())
    assert law.seconds(1) == pytest.approx(0.025)
    assert law.seconds(11) == pytest.approx(0.030)
    assert law.seconds(1, 1000) == pytest.approx(0.027)
    assert measured(section) == "assumed (25 ms)"


def test_a_relative_spread_keeps_the_mean() -> None:
    law = law_of(CostSection(ms=10.0, jitter=0.3), Operation.DRAFT_STEP, Path())
    times_s = [law.seconds(1, 0, (i + 0.5) / 1000) for i in range(1000)]
    assert sum(times_s) / 1000 == pytest.approx(0.010, rel=0.02)
    assert max(times_s) > 1.4 * min(times_s)


def test_a_pass_of_few_rows_is_bound_by_memory_and_one_of_many_by_arithmetic() -> None:
    law = roofline_law("llama-3.1-70b-fp8@h200")
    few, some, many = law.seconds(1), law.seconds(64), law.seconds(4096)
    assert few == pytest.approx(some, rel=0.01)
    assert 0.015 < few < 0.03  # 70.6 GB at 4.8 TB/s is 14.7 ms
    assert many > 10 * few
    assert law.seconds(1, 100_000) > 1.2 * few


def test_a_round_is_link_pass_and_messages() -> None:
    """And a full verifier says so."""
    gpu = sc.VerifierSection(pass_time=sc.CostSection(ms=20.0, row_ms=2.5), max_sessions=1)
    scenario = replace(SMALL, verifiers={"gpu": gpu})
    source = token_source(scenario, 1, HERE)
    (site, _), *_ = World(scenario, Arm.EDGESPEC, "1", Surrounding(source, HERE)).sites
    offered = site.offered(LinkView(0.010, up_bits_per_s=96_000.0, down_bits_per_s=96_000.0))
    assert offered == VerifierView("gpu", offered.round_s, 0, False)
    assert offered.round_s == pytest.approx(0.010 + 0.020 + 2 * 0.010)


TINY: dict[str, object] = {
    "devices.phone.count": 6,
    "devices.laptop.count": 4,
    "shards": 2,
    "verifiers.gpu.count": 2,
    "duration_s": 4,
    "devices.phone.workload.start_within_s": 1,
    "devices.laptop.workload.start_within_s": 1,
}


def tiny() -> Scenario:
    return load_scenario("city", TINY)


def results(scenario: Scenario) -> str:
    """What a run says of itself, without the machine it ran on."""
    return run(scenario).to_json()


def test_hashing_of_strings_does_not_matter() -> None:
    program = "from tests.sim.test_scenarios import results, tiny; print(results(tiny()), end='')"
    said = {python("-c", program, env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert said == {results(tiny())}


def test_late_times_keep_their_order() -> None:
    """After eleven virtual days (more microseconds than 32 bits hold) one still counts."""
    queue = EventQueue()
    seen: list[int] = []
    day_s = 1e6
    for number in range(3):
        queue.at(day_s, partial(seen.append, number))
    queue.at(day_s + 1e-6, lambda: seen.append(-1))
    assert queue.run(day_s) == 3
    assert queue.run(day_s + 1.0) == 1
    assert seen == [0, 1, 2, -1]
