"""``edgespec plan capacity`` and objectives of ``run``: what is printed; the search itself is
``tests/sim/test_capacity.py``'s."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from edgespec.cli.main import app
from edgespec.cli.sim.main import app as sim
from edgespec.telemetry.run_summary import read_summary

# One user who asks for a word or two: small worlds.
SMALL = (
    *("--users", "1", "--arms", "target-only", "--processes", "1"),
    *("--set", "devices.laptop.workload.output_tokens=4"),
    *("--set", "devices.laptop.workload.think_s=1"),
    *("--set", "tokens.source=toy", "--set", "tokens.acceptance=null"),
)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "capacity", *arguments])


def test_an_answer_with_its_cost() -> None:
    result = call(*SMALL, "--ttft-p95", "500", "--tpot-p95", "60", "--cost-per-hour", "2.5")
    assert result.exit_code == 0, result.output
    assert "take: target-only on 1 H200 (95 %: 1), $2.50 an hour" in result.stdout
    assert "mean field" in result.stdout
    assert "events, " in result.stdout
    assert "--cost-per-hour" in result.stdout
    assert "answered in" in result.stderr


def test_json_says_what_forbids_an_objective() -> None:
    result = call(*SMALL, "--tpot-p95", "5", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["take"], found["verifiers"], found["cost_per_hour"]) == (None, None, None)
    (arm,) = found["arms"]
    assert "the bound 'one pass a token' alone is 23.0 ms" in arm["why"]
    assert found["price"]["source"].endswith("2026-08-26")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --users or --rate: neither of them is given"),
        (("--users", "3", "--rate", "2"), "give --users or --rate: both of them is given"),
        (("--users", "3"), "no objective is given: a plan needs --ttft-p95 or --tpot-p95"),
        (("--users", "3", "--gpu", "h300"), "gpu is 'h300', but must be one of h200,"),
        (("--users", "3", "--model", "gpt"), "model is 'gpt', but must be one of llama"),
        (("--users", "3", "--gpu", "rtx-4090"), "the weights of llama-3.1-70b-fp8 take 71 GB"),
        (("--users", "3", "--arms", "best"), "arms has 'best', but must be of target-only,"),
        (("--users", "3", "--tpot-p95", "0"), "tpot_p95_ms is 0.0, but must be in [0.1,"),
        (("--users", "3", "--link", "5h"), "5h"),
        (("--users", "3", "--set", "tokens.source=tape", "--set", "tokens.acceptance=null",
          "--tpot-p95", "9"), "tokens.source is tape"),
    ],
)  # fmt: skip
def test_mistakes_are_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_objectives_of_a_run(tmp_path: Path) -> None:
    arguments = (
        *("run", "single-device", "--seed", "1", "--processes", "1", "--out", str(tmp_path)),
        *("--slo-ttft-p95", "400", "--slo-tpot-p95", "30", "--set", "duration_s=4"),
        *("--set", "arms=[target-only]", "--set", "arrivals={rate: 0.5}"),
    )
    result = CliRunner().invoke(sim, arguments)
    assert result.exit_code == 0, result.output
    assert "attained" in result.output
    assert "objective 400" in result.output
    (arm,) = read_summary(tmp_path / "summary.json").arms
    assert arm.attainment is not None
    assert (arm.attainment.slo_ttft_s, arm.attainment.slo_tpot_s) == (0.4, 0.03)
    assert arm.attainment.asked == arm.all.requests + arm.all.unfinished > 0
