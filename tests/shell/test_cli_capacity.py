"""``edgespec plan capacity`` and objectives of ``run``: what is printed; the search itself is
``tests/sim/test_capacity.py``'s."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from edgespec.bench.arms import Arm
from edgespec.cli.main import app
from edgespec_sim.commands import pool
from edgespec_sim.commands.main import app as sim
from edgespec_sim.commands.plan_capacity import _search
from edgespec_sim.commands.pool import Task, Workers
from edgespec_sim.commands.simulate import parse_settings
from edgespec_sim.planning.capacity import CapacityQuestion
from edgespec_sim.run_summary import read_summary
from edgespec_sim.scenario.sections import SloSection, load_scenario, scenario_path
from edgespec_sim.world.run import Job

SCENARIO = load_scenario(
    "laptop-floor",
    parse_settings(
        (
            "shards=1",
            "devices.laptop.count=1",
            "devices.laptop.workload.output_tokens=4",
            "devices.laptop.workload.think_s=1",
            "tokens.source=toy",
            "tokens.acceptance=null",
        )
    ),
)
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


@pytest.mark.parametrize("processes", [1, 2])
def test_the_time_ends_a_round_of_events(processes: int) -> None:
    """What is known by then is the answer, and it says that it was not confirmed."""
    scenario = SCENARIO
    asked = CapacityQuestion(
        scenario, SloSection(500.0, 60.0), (Arm.TARGET_ONLY,), scenario_path("laptop-floor").parent
    )
    found = _search(asked, processes, time.monotonic() - 1000.0, 1.0)
    assert (found.arm, found.verifiers) == (Arm.TARGET_ONLY, 1)
    assert not found.confirmed
    assert found.observed == {}
    assert "the time was up before 1 and 0 verifiers were played" in found.why_not


# --- the players of worlds --------------------------------------------------------------------


class Played:
    """Stands for a world: time goes on by so many seconds with each word of it."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s
        self.steps = 0

    def clock(self) -> float:
        return self.now_s

    def __call__(self, job: Job, tracer: object, told: Callable[[float], None]) -> Any:
        for step in range(1, 6):
            self.steps += 1
            self.now_s += self.step_s
            told(job.scenario.duration_s * step / 5)
        return "played"


def task(name: str) -> Task:
    scenario = replace(SCENARIO, duration_s=10.0)
    return Task(name, Job(scenario, Arm.TARGET_ONLY, 0, 1, Path()))


def played(outcomes: Iterable[Any]) -> list[Any]:
    return list(outcomes)


def test_a_line_comes_with_each_round_and_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = Played(4.0)
    monkeypatch.setattr(pool, "play", world)
    with Workers(1, lines_every_s=10.0, clock=world.clock) as workers:
        for doing in ("first", "second"):
            assert played(workers.play([task("a")], doing)) == [(0, "played")]
    assert capsys.readouterr().err.splitlines() == [
        "first: 0 of 10 virtual s",
        "first: 6 of 10 virtual s",
        "second: 10 of 20 virtual s",
        "second: 16 of 20 virtual s",
    ]


def test_the_time_ends_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Played(4.0)
    monkeypatch.setattr(pool, "play", world)
    with Workers(1, quiet=True, clock=world.clock) as workers:
        playing = workers.play([task("a"), task("b")], "events", until_s=27.0)
        assert next(playing)[0] == 0
        with pytest.raises(TimeoutError, match="the time is up: events"):
            next(playing)
        assert world.steps == 7
        assert played(workers.play([task("c")])) == [(0, "played")]


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
