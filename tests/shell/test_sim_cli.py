"""``edgespec-sim`` as a user runs it: files written, errors in one line, sweeps that go on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgespec_sim.commands import run
from edgespec_sim.commands.main import app
from edgespec_sim.run_summary import read_summary
from tests.sources import ROOT

SHORT = ("--set", "duration_s=3", "--seeds", "1")
runner = CliRunner()


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "default_processes", lambda: 1)


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
    monkeypatch.setattr(run, "default_processes", lambda: 2)
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
    assert "1 of 2 points are there already" in text
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


def test_a_key_can_be_set_to_null() -> None:
    text = sim("scenario", "single-device", "--set", "tokens.acceptance=null")
    assert "acceptance: null" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "nowhere"), "no scenario 'nowhere'"),
        (("run", "household", "--set", "links.wifi.rtt_ms=-1"), "links.wifi.rtt_ms is -1"),
        (("run", "household", "--set", "duration_s"), "must be KEY=VALUE"),
        (("run", "household", "--set", "links.wifi.trace=no.csv", *SHORT), "no.csv"),
        (("run", "replay", "--set", "tokens.tape=no.jsonl"), "no.jsonl"),
        (("trace", "no.csv"), "no such file"),
        (("trace", "generate:carrier-pigeon"), "carrier-pigeon"),
        (("report", "nowhere"), "nowhere"),
    ],
)
def test_mistakes_are_one_clear_line(arguments: tuple[str, ...], said: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code in (1, 2)
    lines = [line for line in result.output.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert said in lines[0]


def test_the_page_of_the_simulator_names_every_command() -> None:
    page = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    help_text = sim("--help")
    commands = set(re.findall(r"^│ ([a-z][a-z-]+) ", help_text, re.MULTILINE))
    assert {"run", "sweep", "plan", "report", "trace"} <= commands
    for command in commands:
        assert f"`{command} " in page or f"`{command}`" in page, command
