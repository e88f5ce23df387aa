"""What the sections of a scenario do to its world: conditions of devices, powers, stages, rules.

Oracles: a memory guard's own bounds on the course that was stated; a world without the section; the
target's text; joules are neither made nor lost, shares by hand, the states of a radio integrated in
small steps; the communication formula of arXiv 2511.11733 and pipeline arithmetic by hand.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.arms import Arm
from edgespec.core.association.policies import Association
from edgespec.core.protocol.messages import Fault, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits, SendTo, StreamOpened
from edgespec.telemetry.trace import TraceFile
from edgespec_sim.commands.play import show
from edgespec_sim.report.page import render
from edgespec_sim.report.sweep_page import render_sweep
from edgespec_sim.report.timeline import DeviceSpans, Mark
from edgespec_sim.run_summary import RunSummary
from edgespec_sim.scenario import sections as sc
from edgespec_sim.scenario.verifiers import GPU_POWERS, RADIOS, RadioMeter, RadioPower
from edgespec_sim.token_sources.relaxed_rule import LossySource, rule_of
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job, jobs_of, play, summarise
from tests.present import present
from tests.tables import tabled

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


# --- who bears what verifiers and radios draw -----------------------------------------------------


WORK = sc.WorkloadSection(prompt_tokens=8, output_tokens=12, think_s=0.4, start_within_s=0.5)
GPU = sc.VerifierSection(pass_time=sc.CostSection(ms=20.0), busy_w=300.0, idle_w=50.0)
WORLD = sc.Scenario(
    name="powered",
    duration_s=3.0,
    drain_s=20.0,
    tokens=sc.TokensSection(source=sc.TokensFrom.TOY),
    association=Association.LISTED,
    devices={"laptop": sc.DeviceSection(count=3, workload=WORK)},
    verifiers={"used": GPU, "spare": GPU},
)


def run(world: sc.Scenario, arm: Arm = Arm.EDGESPEC) -> WorldOutcome:
    return play(Job(world, arm, 0, 1, Path()))


def test_no_joule_is_made_or_lost() -> None:
    outcome = run(WORLD)
    used, spare = outcome.verifiers
    records = outcome.meters.records
    assert used.energy_j is not None
    assert used.idle_j is not None
    assert used.idle_s is not None
    assert used.energy_j == pytest.approx(300.0 * used.utilisation * 3.0)
    assert used.idle_s == pytest.approx((1.0 - used.utilisation) * 3.0)
    assert used.idle_j == pytest.approx(50.0 * used.idle_s)
    assert sum(one.verifier_idle_j or 0.0 for one in records) == pytest.approx(used.idle_j)
    # Requests that count run on behind the window; those behind it are borne by nobody here.
    borne_j = sum(one.verifier_j or 0.0 for one in records)
    assert borne_j >= 0.9 * used.energy_j
    assert all(one.verifier_j for one in records if one.tokens)
    # Nobody used it, and it was on all the time.
    assert (spare.energy_j, spare.idle_s, spare.idle_j) == (0.0, 3.0, 150.0)


@tabled
def test_what_is_not_known_is_not_told(
    section: dict[str, Any], known: bool, idle_known: bool
) -> None:
    world = replace(
        WORLD, verifiers={"server": sc.VerifierSection(**section)}, arms=(Arm.EDGESPEC,)
    )
    outcome = run(world)
    found = summarise(world, (1,), Path(), [(Arm.EDGESPEC, outcome)])
    whole = found.arms[0].all
    assert (whole.verifier_j_per_token is not None) is known
    assert (whole.verifier_idle_j_per_token is not None) is idle_known
    assert any("powered and idle" in note for note in found.notes) is idle_known


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
    """Power by power, each millisecond, and a promotion at each packet that finds it idle."""
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
        meter.packet(time_s)
        taken_j += meter.take(time_s + 0.0001)
    taken_j += meter.take(40.0)
    assert taken_j == pytest.approx(stepped_j(power, packets_s, 40.0), rel=2e-3)
    assert meter.take(40.0) == 0.0


# --- layers on several nodes, and the relaxed rule that goes with them ----------------------------


HERE = Path()
COMPUTE_S = 0.020
ONE_LONG = sc.WorkloadSection(prompt_tokens=8, output_tokens=400, requests=1, start_within_s=0.0)


def swarm(stages: sc.StagesSection | None, arm: Arm, **changes: object) -> sc.Scenario:
    """One device beside the first node, one long text."""
    verifier = sc.VerifierSection(pass_time=sc.CostSection(ms=1e3 * COMPUTE_S), stages=stages)
    scenario = sc.Scenario(
        name="swarm",
        duration_s=120.0,
        tokens=sc.TokensSection(acceptance=0.85),
        devices={"one": sc.DeviceSection(draft=sc.CostSection(ms=1.0), workload=ONE_LONG)},
        verifiers={"swarm": verifier},
        arms=(arm,),
        message_ms=0.0,
        gamma=4,
    )
    return replace(scenario, **changes)  # type: ignore[arg-type]


def outcome(scenario: sc.Scenario) -> WorldOutcome:
    return play(Job(scenario, scenario.arms[0], 0, 1, HERE))


def summary(scenario: sc.Scenario) -> RunSummary:
    outcomes = [(job.arm, play(job)) for job in jobs_of(scenario, 1, HERE)]
    return summarise(scenario, (1,), HERE, outcomes)


def tpot_s(scenario: sc.Scenario) -> float:
    (record,) = outcome(scenario).meters.records
    assert record.complete
    return present(record.tpot_s)


def test_a_row_takes_its_time_on_each_link() -> None:
    stages = sc.StagesSection(nodes=3, link_ms=10.0, link_mbps=10.0, hidden_bytes=12_500)
    expected_s = COMPUTE_S + 2 * (0.010 + 0.010)
    assert tpot_s(swarm(stages, Arm.TARGET_ONLY)) == pytest.approx(expected_s, rel=1e-6)
    assert stages.hop_s(3) == pytest.approx(0.040)


@pytest.mark.parametrize("arm", [Arm.TARGET_ONLY, Arm.EDGESPEC])
@pytest.mark.parametrize("spares", [0, 1])
def test_a_lost_node_loses_and_changes_no_token(arm: Arm, spares: int) -> None:
    stages = sc.StagesSection(
        nodes=4, link_ms=10.0, slots=2, lost_at_s=(0.503,), reroute_s=1.5, spares=spares
    )
    scenario = swarm(stages, arm)
    device = replace(scenario.devices["one"], count=3)
    result = outcome(replace(scenario, devices={"one": device}))
    assert [record.mismatches for record in result.meters.records] == [0, 0, 0]
    assert all(one.complete and one.tokens == 400 for one in result.meters.records)
    assert all(not one.failed and one.counters.reconnects for one in result.meters.records)
    # Nobody hears anything until the way around stands and a pass has gone it.
    assert max(result.meters.gaps_s) > 1.5 + 0.05


MODEL = ToyModel(vocabulary_size=64, order=3, sharpness=2.0)


def lossy(threshold: float | None, temperature: float = 0.0) -> sc.Scenario:
    tokens = sc.TokensSection(
        source=sc.TokensFrom.TOY, noise=0.4, temperature=temperature, lossy_threshold=threshold
    )
    arms = (Arm.TARGET_ONLY, Arm.VANILLA)
    return swarm(sc.StagesSection(link_ms=15.0), Arm.VANILLA, tokens=tokens, arms=arms)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_relaxed_rule_is_faster_lossy_and_says_so(temperature: float) -> None:
    exact, relaxed = (
        {arm.arm: arm for arm in summary(lossy(threshold, temperature)).arms}
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
    (note,) = [note for note in summary(lossy(0.3)).notes if "LOSSY" in note]
    assert "vanilla tolerates drafts from 0.3" in note


def test_lossy_stands_beside_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """On the terminal, and in a page's first line and wherever it names the arm."""
    loose, strict = summary(lossy(0.3)), summary(lossy(None))
    pages = render(loose), render_sweep([({"x": 1}, strict), ({"x": 2}, loose)])
    for page, first in zip(pages, ("<h1>LOSSY (vanilla): ", "<h1>LOSSY: "), strict=True):
        assert first in page
    show(loose)
    told = capsys.readouterr()
    assert "LOSSY (vanilla): " in told.out.splitlines()[0]
    assert "LOSSY: vanilla tolerates" in told.err
    for text in (told.out, re.sub(r"<details>.*?</details>", "", pages[0], flags=re.DOTALL)):
        named = re.findall(r"vanilla(.{0,7})", text)
        assert named
        assert all(rest.startswith((" LOSSY", ")", " tolera")) for rest in named), named
    show(strict)
    assert "LOSSY" not in render(strict) + "".join(capsys.readouterr())


def test_a_verifier_follows_its_rule_and_no_other() -> None:
    source = LossySource(MODEL, 0.3, SamplingParams(), 0.3)
    info = source.target().info
    engine = VerifyEngine(info, Limits(), EngineLimits(rules=(rule_of(source),)))
    exact = Open("exact", "", "", (1, 2, 3), sampling=SamplingParams())
    refusal, *_ = engine.handle(StreamOpened(1, exact), 0.0)
    assert isinstance(refusal, SendTo)
    assert isinstance(refusal.message, Fault)
    assert "offered: dsd:0.3" in refusal.message.message
    greeting, *_ = engine.handle(StreamOpened(2, replace(exact, rule="dsd:0.3")), 0.0)
    assert not (isinstance(greeting, SendTo) and isinstance(greeting.message, Fault))
    assert "LOSSY" in source.about
