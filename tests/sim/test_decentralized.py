"""A target whose layers lie on several nodes, and the relaxed rule that goes with it.

Oracles: the communication formula of arXiv 2511.11733, pipeline arithmetic by hand, and the
target's own text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec.core.protocol.messages import Fault, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits, SendTo, StreamOpened
from edgespec_sim.commands.play import show
from edgespec_sim.report.page import render
from edgespec_sim.report.sweep_page import render_sweep
from edgespec_sim.run_summary import RunSummary
from edgespec_sim.scenario import sections as sc
from edgespec_sim.token_sources.relaxed_rule import LossySource, rule_of
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job, jobs_of, play, summarise
from tests.present import present

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
