"""``edgespec plan link``: what it prints, what it advises, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from edgespec.bench.arms import Arm
from edgespec.cli.main import app
from edgespec.config.loading import ConfigError
from edgespec_sim.bounds import Costs
from edgespec_sim.commands import plan_link
from edgespec_sim.commands.plan_link import FLAGS, LinkAdvice, advise, link_scenario
from edgespec_sim.commands.play import Ask, Point, play_seeds, summary_of
from edgespec_sim.replication import Total
from edgespec_sim.run_summary import ArmSummary, RunSummary


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_link, "default_processes", lambda: 1)
    monkeypatch.setattr(plan_link, "_COUNT", 1)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "link", *arguments])


@cache
def plan(*arguments: str) -> dict[str, Any]:
    result = call("--json", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_table_a_recommendation_its_reason_and_the_flags_to_copy() -> None:
    result = call("--rtt-ms", "5")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    (take,) = (line for line in lines if line.startswith("take: "))
    arm = take.removeprefix("take: ")
    assert lines[lines.index(take) + 1].startswith(f"{arm} is ")
    assert any(line.startswith("flags: ") for line in lines)
    assert "Stop-and-wait is as fast as plain streaming at a round trip of" in result.stdout


def test_run_ahead_wins_at_usual_round_trips() -> None:
    found = plan()
    assert (found["take"], found["flags"]) == ("edgespec", "")
    assert found["arms"]["edgespec"]["speed_up"] > 1.25
    assert found["arms"]["vanilla"]["speed_up"] < 1.0


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        (("--draft-ms", "60"), "a draft step (60 ms) takes no less than a pass (25 ms)"),
        (
            ("--rtt-ms", "2000", "--acceptance", "0.3"),
            "the round trip of 2000 ms is beyond the",
        ),
        (("--acceptance", "0.05", "--draft-ms", "24.5"), "it would not even without a round trip"),
    ],
)
def test_where_drafting_does_not_pay_streaming_is_advised(
    arguments: tuple[str, ...], because: str
) -> None:
    found = plan(*arguments)
    assert (found["take"], found["flags"]) == ("target-only", "--draft none")
    assert because in found["reason"]


def test_a_mistake_is_one_clear_line() -> None:
    result = call("--acceptance", "1.5")
    message = "error: acceptance is 1.5, but must be in [0.01, 0.99]\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", message)


# --- the advice ------------------------------------------------------------------------------


@cache
def _summary() -> RunSummary:
    scenario = link_scenario(5.0, 8.0, 25.0, 0.8)
    point = Point("link", replace(scenario, duration_s=5.0), Path())
    play_seeds([point], ask := Ask(1, 1), 1, quiet=True)
    return summary_of(point, ask)


def advice(**arms: tuple[tuple[float, ...], float]) -> LinkAdvice:
    """``arms``: seconds a token of each world, and wasted nodes a token."""
    base = {"target-only": ((0.025,) * 3, 0.0), **arms}
    summaries: list[ArmSummary] = []
    for name, (seconds, wasted) in base.items():
        arm = _summary().arms[0]
        value = sum(base["target-only"][0]) / sum(seconds)
        whole = replace(arm.all, wasted_per_token=wasted)
        summaries.append(replace(arm, arm=name, all=whole, speedup=value))
    totals = {Arm(name): [Total(one, 1) for one in mine[0]] for name, mine in base.items()}
    costs = Costs(0.005, 0.008, 0.025)
    return advise(replace(_summary(), arms=tuple(summaries)), totals, costs, (0.1, 0.2))


def test_of_arms_that_take_as_long_the_one_with_fewer_wasted_nodes_is_taken() -> None:
    """What is quicker by chance alone is no reason to send more."""
    noisy = advice(edgespec=((0.010, 0.013, 0.010), 3.0), pearl=((0.011, 0.012, 0.0105), 0.2))
    assert noisy.take is Arm.PEARL
    assert "edgespec (2.27) is not faster by more than chance, and sends 3.00" in noisy.reason
    clear = advice(edgespec=((0.010, 0.0101, 0.010), 3.0), pearl=((0.012, 0.0121, 0.012), 0.2))
    assert clear.take is Arm.EDGESPEC
    assert "chance" not in clear.reason


def test_flags_are_an_agents() -> None:
    assert set(FLAGS) == set(Arm)
    with pytest.raises((ValueError, ConfigError), match="rtt_ms is -1"):
        link_scenario(-1.0, 8.0, 25.0, 0.8)
