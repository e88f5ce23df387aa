"""Oracle: a mistake in a scenario has to be named: the key, the value, what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.config.loading import ConfigError, dump_config, load_config
from edgespec_sim.scenario.sections import CostSection, Scenario, bundled_scenarios, load_scenario
from edgespec_sim.scenario.verifiers import (
    Operation,
    law_of,
    measured,
    roofline_law,
)

BASE = """
name: test
devices:
  laptop: {path: [wan]}
links:
  wan: {rtt_ms: 20}
"""


def load(tmp_path: Path, text: str) -> Scenario:
    path = tmp_path / "scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return load_scenario(str(path))


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    scenario = load(tmp_path, BASE)
    assert scenario.verifiers["verifier"].pass_time.ms == 25.0
    assert scenario.devices["laptop"].count == 1
    assert len(scenario.arms) == 5


@pytest.mark.parametrize("name", sorted(bundled_scenarios()))
def test_bundled_scenarios_load_and_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.about
    path = tmp_path / "again.yaml"
    path.write_text(dump_config(scenario), encoding="utf-8")
    assert load_config(Scenario, path) == scenario


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\n", "key 'devices' is missing"),
        (BASE + "duration_s: -3\n", "duration_s is -3.0, but must be in [0.1, 1000000.0]"),
        (BASE + "duraton_s: 3\n", "unknown key 'duraton_s'; did you mean 'duration_s'?"),
        (BASE.replace("[wan]", "[lan]"), "names link 'lan', but links has wan"),
        (BASE.replace("rtt_ms: 20", "rtt_ms: -1"), "rtt_ms is -1.0, but must be in [0.0,"),
        (BASE.replace("rtt_ms: 20", "loss: 2"), "loss is 2.0, but must be in [0.0, 0.9]"),
        (BASE.replace("rtt_ms: 20", "cross_up: 0.5"), "but the link's capacity has no limit"),
        (BASE + "tokens: {source: dice}\n", "'dice', but must be one of process, tape, toy"),
        (BASE + "tokens: {acceptance: 1.5}\n", "acceptance is 1.5, but must be in [0.01, 0.99]"),
        (BASE + "arms: [vanilla, vanilla]\n", "must name each wanted one once"),
        (BASE + "verifiers: {a: {count: 0}}\n", "count is 0, but must be in [1, 10000]"),
        (BASE + "verifiers: {a: {pass_time: {row_ms: 3}}}\n", "exactly one of ms, profile"),
        (BASE + "verifiers: {a: {pass_time: {ms: 1, profile: x}}}\n", "but names ms and profile"),
        (BASE + "shards: 2\n", "but must divide by shards, 2"),
        (BASE.replace("{path: [wan]}", "{workload: {prompt_tokens: 0}}"), "which only a tape"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)


# --- costs ------------------------------------------------------------------------------------


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
