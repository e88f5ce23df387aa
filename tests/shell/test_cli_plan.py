"""``edgespec plan link``: what it prints; the figures are ``tests/sim/test_planner.py``'s."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from edgespec.cli.main import app


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "link", "--tokens", "120", "--seed", "0", *arguments])


def test_a_table_a_recommendation_and_its_reason() -> None:
    result = call()
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line for line in result.stdout.splitlines() if line]
    assert lines[0].split()[-6:] == ["ms/token", "speed", "passes", "wasted", "kbit/s", "bound"]
    assert all(len(line) <= 80 for line in lines)
    names = ("draft model alone *", "cloud streaming", "split, stop-and-wait", "split, PEARL")
    for name in (*names, "split, windowed", "split + run-ahead, width 1", "* not the target's"):
        assert any(line.startswith(name) for line in lines), name
    (take,) = [line for line in lines if line.startswith("take: ")]
    assert lines[lines.index(take) + 1].startswith(take.removeprefix("take: "))
    assert "Stop-and-wait is as fast as cloud streaming at a round trip of" in result.stdout


def test_json_says_the_same() -> None:
    found = json.loads(call("--json", "--draft-ms", "60", "--rtt-ms", "120").stdout)
    assert found["settings"]["rtt_ms"] == 120.0
    assert found["take"] == "cloud streaming"
    assert "a draft step (60 ms) takes no less than a pass" in found["reason"]
    assert (found["drafting_can_pay"], found["drafting_pays_below_ms"]) == (False, None)
    by_name = {mode["name"]: mode for mode in found["modes"]}
    assert by_name["cloud streaming"]["tpot_ms"] == 25.0
    assert by_name["draft model alone"]["bound_ms"] is None
    assert by_name["draft model alone"]["exact"] is False


def test_several_seeds_give_intervals() -> None:
    result = call("--seeds", "2", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["seeds"] == 2
    for mode in found["modes"]:
        interval = mode["speed_up_interval"]
        if mode["name"] in ("cloud streaming", "draft model alone"):
            assert interval is None
        else:
            assert interval[0] <= mode["speed_up"] <= interval[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--acceptance", "1.5"), "error: acceptance is 1.5, but must be in [0.01, 0.99]"),
        (("--rtt-ms", "-3"), "error: rtt_ms is -3.0, but must be in [0.0, 10000.0]"),
        (("--tokens", "3"), "error: tokens is 3, but must be in [100, 10000]"),
    ],
)
def test_mistakes_are_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", message + "\n")
