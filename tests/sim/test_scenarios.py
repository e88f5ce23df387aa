"""Scenarios: their worlds, their parsing, and the effect of each section on its world.

Oracles: the target's own text, arithmetic by hand, and the same seed played again; an error names
the key, the value and the right form; the product's own ranking for the verifier that a device
uses; a memory guard's own bounds for a stated course; a world without the section; joules are
neither created nor lost, shares by hand, the states of a radio integrated in small steps; the
communication formula of arXiv 2511.11733 and pipeline arithmetic by hand.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.arms import Arm
from edgespec.config.loading import dump_config, load_config
from edgespec.core.association.policies import VerifierView
from edgespec.core.device.goodput_policy import PolicyName
from edgespec.core.protocol.messages import Fault, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits, SendTo, StreamOpened
from edgespec.core.verifier.prefix_store import PREFIX_BLOCK
from edgespec.telemetry.trace import TraceFile
from edgespec_sim.commands.play import show
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.report.page import render
from edgespec_sim.report.sweep_page import render_sweep
from edgespec_sim.report.tables import drafts_rows
from edgespec_sim.report.timeline import build_timeline
from edgespec_sim.run_summary import RunSummary
from edgespec_sim.scenario import sections as sc
from edgespec_sim.scenario.sections import CostSection, Scenario, bundled_scenarios, load_scenario
from edgespec_sim.scenario.verifiers import (
    GPU_POWERS,
    RADIOS,
    Operation,
    RadioMeter,
    RadioPower,
    describe_cost_source,
    law_of,
    roofline_law,
)
from edgespec_sim.token_sources.source import ToySource
from edgespec_sim.world.assembly import World, WorldOutcome
from edgespec_sim.world.run import Job, make_jobs, make_token_source, play, summarise
from edgespec_sim.world.site import LinkView, WorldSetup
from tests.kit.live_verifier import run_python
from tests.present import require
from tests.sources import ROOT

HERE = Path()
WORLDS = ROOT / "tests/sim/worlds"
SMALL = load_scenario(str(WORLDS / "small.yaml"))
WORK = SMALL.devices["laptop"].workload
ROUGH = load_scenario(str(WORLDS / "rough.yaml"))


def run(scenario: sc.Scenario, seed: int = 1) -> RunSummary:
    outcomes = [(job.arm, play(job)) for job in make_jobs(scenario, seed, HERE)]
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
    """Prompts are longer than one feed of the server's draft model, and its work is counted."""
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
    """A server draft with another acceptance rate than the devices' changes no text, and has its
    configured rate."""
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
    """The sessions of a step pay for it: the joules of all requests add up to the joules of
    the machine."""
    verifiers = {"server": replace(SERVED.verifiers["server"], busy_w=100.0)}
    for arm in run(replace(SERVED, verifiers=verifiers)).arms:
        joules = require(arm.verifiers[0].energy_j)
        assert arm.all.verifier_j_per_token == pytest.approx(joules / arm.all.tokens, rel=0.02)


def test_a_scenario_says_by_what_its_devices_draft() -> None:
    """On a tape, texts have the drafts' own confidences."""
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
    """One device takes 25 ms per token. The first token also takes the request's trip to the
    verifier, the pass over the prompt and the trip back. The very first request pays for connecting
    as well."""
    link = sc.LinkSection(rtt_ms=100.0)
    device = sc.DeviceSection(path=("wan",), workload=replace(WORK, start_within_s=0.0))
    scenario = replace(
        SMALL, links={"wan": link}, devices={"one": device}, arms=(Arm.TARGET_ONLY,), message_ms=0.0
    )
    (arm,) = run(scenario).arms
    assert require(arm.all.tpot_s).median == pytest.approx(0.025, rel=1e-6)
    assert require(arm.all.ttft_s).median == pytest.approx(0.050 + 0.025 + 0.050, rel=1e-6)
    assert arm.all.tokens_per_pass == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("event", "connected", "extra_trips"),
    [
        ("", False, [2, 0, 0]),
        ("", True, [0, 0, 0]),
        ("restart", False, [2, 2, 0]),
        ("restart", True, [0, 2, 0]),
        ("new address", False, [2, 2, 0]),
        ("new address", True, [0, 2, 0]),
    ],
)
def test_a_connection_is_paid_for_once(event: str, connected: bool, extra_trips: list[int]) -> None:
    """A request pays a round trip of 100 ms and a pass of 25 ms. One that has to connect pays two
    more round trips (TCP and TLS). The event that ends a connection, here 4 s
    after the start and between two requests, makes the next request connect again."""
    link = sc.LinkSection(rtt_ms=100.0)
    if event == "new address":
        link = replace(link, handover=sc.HandoverSection(every_s=1e5, gap_ms=0.0, breaks=True))
    work = replace(WORK, start_within_s=0.0, output_tokens=1, requests=3, think_s=1e-9)
    scenario = replace(
        SMALL,
        links={"wan": link},
        devices={"one": sc.DeviceSection(path=("wan",), workload=work)},
        arms=(Arm.TARGET_ONLY,),
        message_ms=0.0,
        connected=connected,
        duration_s=30.0,
    )
    around = WorldSetup(make_token_source(scenario, 1, HERE), HERE)
    world = World(scenario, Arm.TARGET_ONLY, "1", around)
    # The pause covers the time between the first answer and the next request.
    world.users[0]._pause_s = lambda: 4.0  # type: ignore[method-assign]
    if event == "restart":
        world.queue.at(4.0, lambda: world.sites[0].restart(0.0))
    elif event:
        world.queue.at(4.0, lambda: world.network._break_connections(0))
    records = world.run().meters.records
    took_s = [require(one.ttft_s) for one in records]
    assert took_s == pytest.approx([0.125 + 0.1 * trips for trips in extra_trips], rel=1e-6)
    without_tls = World(replace(scenario, connect_trips=1), Arm.TARGET_ONLY, "1", around)
    first_s = require(without_tls.run().meters.records[0].ttft_s)
    assert first_s == pytest.approx(0.125 + (0.0 if connected else 0.1), rel=1e-6)


def test_equal_seeds_give_equal_results_and_others_do_not() -> None:
    scenario = replace(ROUGH, arms=(Arm.EDGESPEC,))
    once, again, other = run(scenario, 3), run(scenario, 3), run(scenario, 4)
    assert once == again
    assert once.arms != other.arms


def test_energy_is_reported_where_all_of_it_is_known() -> None:
    device = replace(SMALL.devices["laptop"], draft_w=10.0, radio_power="wifi")
    arms = {arm.arm: arm.all for arm in run(replace(SMALL, devices={"laptop": device})).arms}
    ours, plain = (require(arms[name].energy_j_per_token) for name in ("edgespec", "target-only"))
    # A radio that receives a token every pass never sleeps: 0.403 W except in pauses, for two
    # devices.
    tokens = arms["target-only"].tokens
    assert 0.3 * 0.403 * 12.0 / tokens < plain <= 0.403 * 12.0 / tokens
    # At least one step of 8 ms at 10 W precedes every hit; no device works all the time twice.
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
    parts = [play(job).meters.whole() for job in make_jobs(scenario, 1, HERE)]
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
    assert describe_cost_source(section) == "assumed (25 ms)"


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


def test_a_computed_pass_has_host_time_for_each_session() -> None:
    """Oracle: the periods of a real verifier with passes of 25 ms, which were 25.6 ms with one
    session, 28.0 with 64 and 30.6 with 128 (``docs/measurements/server.md``)."""
    law, half = roofline_law("llama-3.1-8b-bf16@a100-80g"), roofline_law("qwen3-32b-fp8@h200", 0.5)
    for sessions, measured_ms in ((64, 28.0 - 25.6), (128, 30.6 - 25.6)):
        more_s = law.seconds(sessions, sessions=sessions) - law.seconds(sessions)
        assert 1e3 * more_s == pytest.approx(measured_ms, rel=0.05)
        of_half_s = half.seconds(sessions, sessions=sessions) - half.seconds(sessions)
        assert of_half_s == pytest.approx(more_s / 2)


def test_a_round_is_link_pass_and_messages() -> None:
    """A full verifier refuses, with the reason."""
    gpu = sc.VerifierSection(pass_time=sc.CostSection(ms=20.0, row_ms=2.5), max_sessions=1)
    scenario = replace(SMALL, verifiers={"gpu": gpu})
    source = make_token_source(scenario, 1, HERE)
    site, *_ = World(scenario, Arm.EDGESPEC, "1", WorldSetup(source, HERE)).sites
    offered = site.describe_to(LinkView(0.010, up_bits_per_s=96_000.0, down_bits_per_s=96_000.0))
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


def load_tiny() -> Scenario:
    return load_scenario("city", TINY)


def run_to_json(scenario: Scenario) -> str:
    """Return the report of a run without the machine that it ran on."""
    return run(scenario).to_json()


def test_hashing_of_strings_does_not_matter() -> None:
    program = (
        "from tests.sim.test_scenarios import load_tiny, run_to_json; "
        "print(run_to_json(load_tiny()), end='')"
    )
    said = {run_python("-c", program, env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert said == {run_to_json(load_tiny())}


def test_late_times_keep_their_order() -> None:
    """After eleven virtual days (more microseconds than 32 bits hold), one microsecond still
    counts."""
    queue = EventQueue()
    seen: list[int] = []
    day_s = 1e6
    for number in range(3):
        queue.at(day_s, partial(seen.append, number))
    queue.at(day_s + 1e-6, lambda: seen.append(-1))
    queue.run(day_s)
    assert seen == [0, 1, 2]
    queue.run(day_s + 1.0)
    assert seen == [0, 1, 2, -1]


# --- conditions of devices ------------------------------------------------------------------------


Row = sc.ConditionSection
CONDITIONS = load_scenario(str(WORLDS / "conditions.yaml"))


def make_world(
    conditions: sc.ConditionsSection | None, duration_s: float = 12.0, think_s: float = 1.0
) -> sc.Scenario:
    phone = CONDITIONS.devices["phone"]
    workload = replace(phone.workload, think_s=think_s)
    device = replace(phone, workload=workload, conditions=conditions)
    return replace(CONDITIONS, duration_s=duration_s, devices={"phone": device})


def play_conditions(
    conditions: sc.ConditionsSection | None, arm: Arm = Arm.EDGESPEC
) -> WorldOutcome:
    return play(Job(make_world(conditions), arm, 0, 1, Path()))


def count_guard_moves(outcome: WorldOutcome) -> tuple[int, int]:
    whole = outcome.meters.whole()
    assert whole.mismatches == 0
    assert whole.requests > 3
    return whole.memory_tightened, whole.memory_loosened


WELL = Row(0.0, resident_mib=100.0)


def test_conditions_that_are_well_change_nothing() -> None:
    plain = play_conditions(None)
    well = play_conditions(sc.ConditionsSection((WELL,), budget_mib=900.0))
    assert count_guard_moves(well) == (0, 0)
    assert well.meters.rows() == plain.meters.rows()


def test_a_budget_restricts_the_draft_and_lets_it_go() -> None:
    course = (WELL, Row(3.0, resident_mib=600.0), Row(20.0, resident_mib=100.0))
    section = sc.ConditionsSection(course, budget_mib=500.0, window=512)
    scenario = make_world(section, duration_s=150.0, think_s=4.0)
    outcome = play(Job(scenario, Arm.EDGESPEC, 0, 1, Path()))
    less, more = count_guard_moves(outcome)
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
        assert count_guard_moves(play_conditions(hot, arm)) == (0, 0)
    assert (
        play_conditions(hot, Arm.TARGET_ONLY).meters.rows()
        == play_conditions(None, Arm.TARGET_ONLY).meters.rows()
    )
    slow, plain = (play_conditions(one, Arm.VANILLA).meters.whole().tpot_s for one in (hot, None))
    assert require(slow).mean > require(plain).mean


def test_the_trace_and_the_page_show_each_change(tmp_path: Path) -> None:
    course = (replace(WELL, resident_mib=900.0),)
    scenario = replace(make_world(sc.ConditionsSection(course, budget_mib=500.0)), duration_s=2.0)
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as tracer:
        play(Job(scenario, Arm.EDGESPEC, 0, 1, Path()), tracer)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    told = [line for line in lines if line["name"] == "DraftRestricted"]
    assert told[-1]["window"] == 0
    marks = build_timeline(told).marks
    assert [mark.name for mark in marks] == ["draft's memory"] * len(told)


# --- the shares of the energy of verifiers and radios ---------------------------------------------


WORLD = load_scenario(str(WORLDS / "powered.yaml"))


def play_world(world: sc.Scenario, arm: Arm = Arm.EDGESPEC) -> WorldOutcome:
    return play(Job(world, arm, 0, 1, Path()))


# Two agents with five turns each. A turn adds as long a text as the output before (20), and 100.
AGENTS = replace(
    SMALL,
    duration_s=120.0,
    arms=(Arm.TARGET_ONLY, Arm.EDGESPEC),
    devices={
        "laptop": replace(
            SMALL.devices["laptop"],
            count=2,
            workload=replace(
                WORK,
                prompt_tokens=3_000,
                output_tokens=20,
                length_spread=0.0,
                turns=5,
                turn_tokens=100,
                tool_s=1.0,
                requests=10,
            ),
        )
    },
    verifiers={
        "server": sc.VerifierSection(
            pass_time=CostSection(ms=20.0, row_ms=0.2), cached_tokens=16_000
        )
    },
)


@pytest.mark.parametrize("source", [sc.TokensFrom.PROCESS, sc.TokensFrom.TOY])
def test_a_further_turn_computes_only_what_is_new(source: sc.TokensFrom) -> None:
    """Prompts have 3,000, 3,120, ... 3,480 tokens: of ten in two conversations 80 % and more are
    cached, and only the first turns wait for a whole prompt. A further turn sends its new tokens,
    and at most a block before them, in one to three bytes each and at most 200 beside them."""
    summary = run(replace(AGENTS, tokens=sc.TokensSection(source=source)))
    for arm in summary.arms:
        assert (arm.all.requests, arm.all.mismatches) == (20, 0)
        (verifier,) = arm.verifiers
        assert 0.7 < require(verifier.cached_share) < 0.8
        conversation_bytes = 5 * require(arm.all.request_bytes)
        assert 3_000 + 4 * 120 < conversation_bytes
        assert conversation_bytes < 3 * (3_000 + 4 * (120 + PREFIX_BLOCK)) + 5 * 200
        ttfts_s = sorted(row.ttft_s or 0.0 for row in arm.rows)
        assert ttfts_s[-4] > 3_000 * 0.2e-3
        assert ttfts_s[-5] < 0.4
    uncached = replace(AGENTS.verifiers["server"], cached_tokens=None)
    whole = run(replace(AGENTS, verifiers={"server": uncached}))
    for arm in whole.arms:
        assert require(arm.all.ttft_s).median > 3_000 * 0.2e-3
        assert arm.verifiers[0].cached_share is None


def test_the_draft_of_a_further_turn_reads_only_what_is_new() -> None:
    """A row of the draft takes 1 ms, so the whole prompt would take 3 s."""
    device = replace(AGENTS.devices["laptop"], draft=CostSection(ms=5.0, row_ms=1.0))
    scenario = replace(AGENTS, devices={"laptop": device}, arms=(Arm.EDGESPEC,))
    (job,) = make_jobs(scenario, 1, HERE)
    world = World(scenario, job.arm, "1/0", WorldSetup(make_token_source(scenario, 1, HERE), HERE))
    world.run()
    for user in world.users:
        # Two prompts of 3 s each, eight turns of 120 tokens, and steps of 5 ms.
        assert 6.0 < user.drafting_s < 6.0 + 8 * 0.12 + 5.0


def test_turns_need_a_source_with_turns_and_a_cache_has_to_fit() -> None:
    with pytest.raises(ValueError, match="turns is 5, but a tape"):
        replace(AGENTS, tokens=sc.TokensSection(source=sc.TokensFrom.TAPE))
    machine = sc.VerifierSection(
        pass_time=CostSection(roofline="qwen3-32b-fp8@h200"), cached_tokens=400_000
    )
    with pytest.raises(ValueError, match=r"cached_tokens is 400000, but .* holds 3"):
        replace(AGENTS, verifiers={"server": machine})
    fits = replace(machine, cached_tokens=350_000)
    scenario = replace(AGENTS, verifiers={"server": fits})
    assert "KV cache holds 350000 tokens" in scenario.memory_note("server")


def test_no_joule_is_made_or_lost() -> None:
    outcome = play_world(WORLD)
    used, spare = outcome.verifiers
    records = outcome.meters.records
    assert used.energy_j is not None
    assert used.idle_j is not None
    assert used.idle_s is not None
    assert used.energy_j == pytest.approx(300.0 * used.utilisation * 3.0)
    assert used.idle_s == pytest.approx((1.0 - used.utilisation) * 3.0)
    assert used.idle_j == pytest.approx(50.0 * used.idle_s)
    assert sum(one.verifier_idle_j or 0.0 for one in records) == pytest.approx(used.idle_j)
    # Counted requests continue after the window; requests that start after it bear nothing here.
    borne_j = sum(one.verifier_j or 0.0 for one in records)
    assert borne_j >= 0.9 * used.energy_j
    assert all(one.verifier_j for one in records if one.tokens)
    # No request used it, and it was on all the time.
    assert (spare.energy_j, spare.idle_s, spare.idle_j) == (0.0, 3.0, 150.0)


@pytest.mark.parametrize(
    ("section", "known", "idle_known"),
    [
        ({"gpu_power": "h200"}, True, True),
        ({"gpu_power": "h100"}, True, False),
        ({"busy_w": 700.0}, True, False),
        ({}, False, False),
    ],
)
def test_what_is_not_known_is_not_told(
    section: dict[str, Any], known: bool, idle_known: bool
) -> None:
    world = replace(
        WORLD, verifiers={"server": sc.VerifierSection(**section)}, arms=(Arm.EDGESPEC,)
    )
    outcome = play_world(world)
    found = summarise(world, (1,), Path(), [(Arm.EDGESPEC, outcome)])
    whole = found.arms[0].all
    assert (whole.verifier_j_per_token is not None) is known
    assert (whole.verifier_idle_j_per_token is not None) is idle_known
    assert any("on and idle" in note for note in found.notes) is idle_known


def test_published_powers_and_ones_of_your_own() -> None:
    given = sc.VerifierSection(gpu_power="h200", busy_w=500.0, idle_w=0.0)
    assert (given.power_busy_w, given.power_idle_w) == (500.0, 0.0)
    published = sc.VerifierSection(gpu_power="h200")
    assert (published.power_busy_w, published.power_idle_w) == (
        GPU_POWERS["h200"].busy_w,
        GPU_POWERS["h200"].idle_w,
    )


STEP_S = 1e-3


def stepped_j(power: RadioPower, packets_s: list[float], end_s: float) -> float:
    """Integrate the power in steps of a millisecond, with a promotion at each packet that finds the
    radio idle."""
    total_j, last_s = 0.0, -1e9
    awake_s = power.connected_s + power.tail_s
    for step in range(round(end_s / STEP_S)):
        now_s = (step + 0.5) * STEP_S
        for packet_s in packets_s:
            if now_s - STEP_S / 2 <= packet_s < now_s + STEP_S / 2:
                total_j += power.promotion_s * power.promotion_w * (packet_s - last_s > awake_s)
                last_s = packet_s
        since_s = now_s - last_s
        if since_s < power.connected_s:
            total_j += power.connected_w * STEP_S
        elif since_s < awake_s:
            total_j += power.tail_w * STEP_S
        else:
            total_j += power.idle_w * STEP_S
    return total_j


@pytest.mark.parametrize("name", sorted(RADIOS))
def test_a_meter_integrates_the_states(name: str) -> None:
    power, dice = RADIOS[name], random.Random(3)
    packets_s = sorted(round(dice.uniform(0.0, 20.0), 3) + STEP_S / 2 for _ in range(30))
    packets_s = [time_s for time_s in packets_s if not 5.0 < time_s < 18.0]
    meter, taken_j = RadioMeter(power), 0.0
    for time_s in packets_s:
        meter.add_packet(time_s)
        taken_j += meter.collect_j(time_s + 0.0001)
    taken_j += meter.collect_j(40.0)
    assert taken_j == pytest.approx(stepped_j(power, packets_s, 40.0), rel=2e-3)
    assert meter.collect_j(40.0) == 0.0


# --- layers on several nodes, and the relaxed rule for them ---------------------------------------


COMPUTE_S = 0.020  # the pass of a node
SWARM = load_scenario(str(WORLDS / "swarm.yaml"))


def make_swarm(stages: sc.StagesSection | None, *arms: Arm, **changes: object) -> sc.Scenario:
    verifiers = {"swarm": replace(SWARM.verifiers["swarm"], stages=stages)}
    return replace(SWARM, verifiers=verifiers, arms=arms, **changes)  # type: ignore[arg-type]


def play_first_arm(scenario: sc.Scenario) -> WorldOutcome:
    return play(Job(scenario, scenario.arms[0], 0, 1, HERE))


def play_and_summarise(scenario: sc.Scenario) -> RunSummary:
    outcomes = [(job.arm, play(job)) for job in make_jobs(scenario, 1, HERE)]
    return summarise(scenario, (1,), HERE, outcomes)


def tpot_s(scenario: sc.Scenario) -> float:
    (record,) = play_first_arm(scenario).meters.records
    assert record.complete
    return require(record.tpot_s)


def test_a_row_takes_its_time_on_each_link() -> None:
    stages = sc.StagesSection(nodes=3, link_ms=10.0, link_mbps=10.0, hidden_bytes=12_500)
    expected_s = COMPUTE_S + 2 * (0.010 + 0.010)
    assert tpot_s(make_swarm(stages, Arm.TARGET_ONLY)) == pytest.approx(expected_s, rel=1e-6)
    assert stages.hop_s(3) == pytest.approx(0.040)


@pytest.mark.parametrize("arm", [Arm.TARGET_ONLY, Arm.EDGESPEC])
@pytest.mark.parametrize("spares", [0, 1])
def test_a_lost_node_loses_and_changes_no_token(arm: Arm, spares: int) -> None:
    stages = sc.StagesSection(
        nodes=4, link_ms=10.0, slots=2, lost_at_s=(0.503,), reroute_s=1.5, spares=spares
    )
    scenario = make_swarm(stages, arm)
    device = replace(scenario.devices["one"], count=3)
    result = play_first_arm(replace(scenario, devices={"one": device}))
    assert [record.mismatches for record in result.meters.records] == [0, 0, 0]
    assert all(one.complete and one.tokens == 400 for one in result.meters.records)
    assert all(not one.failed and one.counters.reconnects for one in result.meters.records)
    # No device receives anything until the ring is complete and a pass has gone around it.
    assert max(result.meters.gaps_s) > 1.5 + 0.05


MODEL = ToyModel(vocabulary_size=64, order=3, sharpness=2.0)


def make_lossy_swarm(threshold: float | None, temperature: float = 0.0) -> sc.Scenario:
    tokens = sc.TokensSection(
        source=sc.TokensFrom.TOY, noise=0.4, temperature=temperature, lossy_threshold=threshold
    )
    return make_swarm(sc.StagesSection(link_ms=15.0), Arm.TARGET_ONLY, Arm.VANILLA, tokens=tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_relaxed_rule_is_faster_lossy_and_says_so(temperature: float) -> None:
    exact, relaxed = (
        {arm.arm: arm for arm in play_and_summarise(make_lossy_swarm(threshold, temperature)).arms}
        for threshold in (None, 0.3)
    )
    strict, loose = exact["vanilla"], relaxed["vanilla"]
    assert strict.all.mismatches == 0
    assert loose.all.mismatches is None
    assert (loose.name, strict.name) == ("vanilla LOSSY", "vanilla")
    assert "LOSSY" in loose.label
    assert "LOSSY" not in strict.label + relaxed["target-only"].label + relaxed["target-only"].name
    assert relaxed["target-only"].all.mismatches == 0
    assert loose.all.tokens_per_pass > 1.1 * strict.all.tokens_per_pass
    (note,) = [note for note in play_and_summarise(make_lossy_swarm(0.3)).notes if "LOSSY" in note]
    assert "vanilla accepts drafts of at least 0.3" in note


def test_lossy_stands_beside_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """The label appears on the terminal, in a page's first line and wherever the page names the
    arm."""
    loose, strict = (
        play_and_summarise(make_lossy_swarm(0.3)),
        play_and_summarise(make_lossy_swarm(None)),
    )
    pages = render(loose), render_sweep([({"x": 1}, strict), ({"x": 2}, loose)])
    for page, first in zip(pages, ("<h1>LOSSY (vanilla): ", "<h1>LOSSY: "), strict=True):
        assert first in page
    show(loose)
    told = capsys.readouterr()
    assert "LOSSY (vanilla): " in told.out.splitlines()[0]
    assert "LOSSY: vanilla accepts" in told.err
    for text in (told.out, re.sub(r"<details>.*?</details>", "", pages[0], flags=re.DOTALL)):
        named = re.findall(r"vanilla(.{0,7})", text)
        assert named
        assert all(rest.startswith((" LOSSY", ")", " accept")) for rest in named), named
    show(strict)
    assert "LOSSY" not in render(strict) + "".join(capsys.readouterr())


def test_a_verifier_follows_its_rule_and_no_other() -> None:
    source = ToySource(MODEL, 0.3, SamplingParams(), 0.3)
    info = source.target().info
    engine = VerifyEngine(info, Limits(), EngineLimits(rules=(source.rule,)))
    exact = Open("exact", "", "", (1, 2, 3), sampling=SamplingParams())
    refusal, *_ = engine.handle(StreamOpened(1, exact), 0.0)
    assert isinstance(refusal, SendTo)
    assert isinstance(refusal.message, Fault)
    assert "offered: dsd:0.3" in refusal.message.message
    greeting, *_ = engine.handle(StreamOpened(2, replace(exact, rule="dsd:0.3")), 0.0)
    assert not (isinstance(greeting, SendTo) and isinstance(greeting.message, Fault))
    assert "LOSSY" in source.about
