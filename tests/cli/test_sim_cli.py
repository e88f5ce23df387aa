"""Tests of ``edgespec-sim`` as a user runs it. Oracles: the files that are written, errors of one
line, a sweep that continues without repeating runs, sums over seeds played alone, and a run that is
not overwritten."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgespec_sim.commands import play as player
from edgespec_sim.commands.main import app
from edgespec_sim.playing import ScenarioPoint, SeedPlan, Workers, play_seeds
from edgespec_sim.replication import MIN_SEEDS
from edgespec_sim.run_summary import read_summary
from edgespec_sim.scenario.sections import load_scenario
from tests.present import require
from tests.sources import ROOT

SHORT = ("--set", "duration_s=3", "--seeds", "1")
# The same brevity, once as a scenario's own settings and once as command-line options.
BRIEF = {
    "arms": ["target-only", "edgespec"],
    "duration_s": 2,
    "devices.laptop.workload.output_tokens": 20,
}
TWO_ARMS = [word for key, value in BRIEF.items() for word in ("--set", f"{key}={value}")]
runner = CliRunner()


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(player, "default_processes", lambda: 1)


def sim(*arguments: str) -> str:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_leaves_a_summary_a_trace_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "run"
    text = sim("run", "single-device", "--seed", "3", "--out", str(out), *SHORT)
    assert "edgespec" in text
    summary = read_summary(out / "summary.json")
    assert summary.arms[0].arm == "target-only"
    assert summary.seed == 3
    assert summary.simulated
    assert (out / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert json.loads((out / "timeline.json").read_text(encoding="utf-8"))["traceEvents"]
    assert (out / "arms.csv").is_file()
    assert (out / "trace.jsonl").stat().st_size > 1000


def test_two_processes_say_what_one_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = ("--set", "arms=[target-only, edgespec]", "--set", "duration_s=2", "--seeds", "2")
    sim("run", "household", "--out", str(tmp_path / "1"), *arms)
    monkeypatch.setattr(player, "default_processes", lambda: 2)
    sim("run", "household", "--out", str(tmp_path / "2"), *arms)
    one, two = (read_summary(tmp_path / name / "summary.json") for name in ("1", "2"))
    assert one.arms == two.arms


def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    vary = ("--vary", "links.internet.rtt_ms=10,80", "--set", "arms=[target-only, edgespec]")
    arguments = ("sweep", "single-device", *vary, *SHORT, "--out", str(out))
    sim(*arguments)
    points = sorted((out / "points").glob("*/summary.json"))
    assert len(points) == 2
    before = points[1].stat().st_mtime_ns
    points[0].unlink()
    (points[1].parent / "summary.json.part").write_text("{", encoding="utf-8")
    text = sim(*arguments)
    assert "1 of 2 points exist already" in text
    assert points[0].is_file()
    assert points[1].stat().st_mtime_ns == before
    rows = (out / "sweep.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + 2 * 2
    assert (out / "sweep.html").is_file()


def test_a_trace_is_shown_and_translated(tmp_path: Path) -> None:
    plain = tmp_path / "lte.csv"
    assert "median" in sim("trace", "generate:lte", "--out", str(plain))
    assert "600" in sim("trace", str(plain))


def test_a_scenario_is_printed_with_all_its_keys() -> None:
    text = sim("scenario", "household", "--set", "links.access.rtt_ms=33")
    assert "rtt_ms: 33" in text
    assert "lease_s: 30.0" in text


def test_the_page_of_the_simulator_names_every_command() -> None:
    page = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    help_text = sim("--help")
    commands = set(re.findall(r"^│ ([a-z][a-z-]+) ", help_text, re.MULTILINE))
    assert {"run", "sweep", "plan", "report", "trace"} <= commands
    for command in commands:
        assert f"`{command} " in page or f"`{command}`" in page, command


def test_a_run_plays_seeds_until_the_speed_up_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SeedPlan, "from_options", lambda *given: SeedPlan(1, None, 0.6, 3600.0))
    said = sim("run", "single-device", "--out", str(tmp_path), *TWO_ARMS)
    summary = read_summary(tmp_path / "summary.json")
    assert summary.seeds >= MIN_SEEDS
    ours = summary.arms[1]
    low, high = require(ours.speedup_interval)
    assert ours.speedup is not None
    assert low < ours.speedup < high
    assert (high - low) / 2 <= 0.6 * ours.speedup * 1.1
    assert f"seeds 1 to {summary.seeds}" in said
    assert "95 % intervals" in said
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"(95 % interval {low:.2f} to {high:.2f})" in page
    assert ours.pace is not None
    assert len(ours.pace.low) == len(ours.pace.values)


def test_time_is_a_limit_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: on this clock every world takes ten seconds, so 25 s have room for two seeds."""
    clock = [0.0]
    played = Workers.play

    def slow(self: Workers, tasks, doing=""):  # type: ignore[no-untyped-def] # as Workers.play
        for one in played(self, tasks, doing):
            clock[0] += 5.0
            yield one

    monkeypatch.setattr(Workers, "play", slow)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    scenario = load_scenario("single-device", BRIEF)
    point = ScenarioPoint("one", scenario, Path())
    play_seeds([point], SeedPlan(1, None, 0.0001, 25.0), Workers(1))
    assert point.seeds == 2
    assert "as 25 s of time were the limit" in point.notes[0]
    alone = ScenarioPoint("one", scenario, Path())
    clock[0] = 0.0
    play_seeds([alone], SeedPlan(1, None, 0.05, 5.0), Workers(1))
    assert alone.seeds == 1
    assert "their certainty is unknown" in alone.notes[0]


def test_a_world_too_short_for_a_request_says_so() -> None:
    short = load_scenario("single-device", {**BRIEF, "duration_s": 0.3})
    point = ScenarioPoint("one", short, Path())
    play_seeds([point], SeedPlan(1, 2), Workers(1))
    assert "no complete request" in point.notes[0]


def test_seeds_are_added_up_one_by_one(tmp_path: Path) -> None:
    """Oracle: each seed played alone."""
    both = tmp_path / "both"
    sim("run", "single-device", "--seed", "4", "--seeds", "2", "--out", str(both), *TWO_ARMS)
    alone = []
    for seed in ("4", "5"):
        out = tmp_path / seed
        sim("run", "single-device", "--seed", seed, "--out", str(out), *TWO_ARMS)
        alone.append(read_summary(out / "summary.json"))
    whole = read_summary(both / "summary.json")
    assert (whole.seed, whole.seeds) == (4, 2)
    for arm, first, second in zip(whole.arms, *(one.arms for one in alone), strict=True):
        assert arm.all.tokens == first.all.tokens + second.all.tokens
        assert arm.all.requests == first.all.requests + second.all.requests
        mean = (first.all.tokens_per_second + second.all.tokens_per_second) / 2
        assert arm.all.tokens_per_second == pytest.approx(mean)
        busy = [one.verifiers[0].utilisation for one in (arm, first, second)]
        assert busy[0] == pytest.approx((busy[1] + busy[2]) / 2)
    assert alone[0].arms[1].speedup_interval is None


def test_the_report_of_a_trace_does_not_replace_a_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sim("run", "single-device", "--seed", "1", "--out", str(run), *TWO_ARMS)
    files = ("report.html", "arms.csv", "requests.csv", "summary.json", "timeline.json")
    before = {name: (run / name).read_bytes() for name in files}
    said = sim("report", str(run / "trace.jsonl"))
    assert {name: (run / name).read_bytes() for name in files} == before
    assert str(run / "trace-report" / "report.html") in said.replace("\n", "")
    other = tmp_path / "other"
    sim("run", "single-device", "--seed", "2", "--out", str(other), *TWO_ARMS)
    for arguments in (
        (str(run / "trace.jsonl"), "--out", str(other)),
        (str(run), "--out", str(other)),
        (str(run / "summary.json"), "--out", str(other)),
    ):
        result = runner.invoke(app, ["report", *arguments])
        assert result.exit_code == 1
        assert "holds another run (single-device, seed 2 and on: 1 played)" in result.output
    kept = json.loads((other / "summary.json").read_text(encoding="utf-8"))
    assert kept["seed"] == 2
    sim("report", str(other))


def test_a_run_does_not_overwrite_another_one(tmp_path: Path) -> None:
    out = tmp_path / "run"
    again = ("run", "single-device", "--out", str(out), *TWO_ARMS)
    sim(*again, "--seed", "1")
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    result = runner.invoke(app, (*again, "--seed", "2"))
    assert result.exit_code == 1
    assert "holds another run (single-device, seed 1 and on: 1 played)" in result.output
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
