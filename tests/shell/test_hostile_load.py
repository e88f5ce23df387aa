"""Small runs of the scripts in ``benchmarks/`` that load a verifier: oracles and findings are their
own; here, that they count what was played. Times are for a quiet machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.wire import codec
from edgespec.wire.codec import WireLimits
from tests.shell import fuzz_messages as messages
from tests.shell.live_verifier import python


def test_hostile_streams_end_cleanly_beside_an_honest_device() -> None:
    done = python("benchmarks/fuzz.py", "--messages", "2000", "--streams", "120", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings" in done.stdout
    assert "stream: INVALID_ARGUMENT" in done.stdout


def test_a_fault_of_the_codec_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert messages.fuzz_codec(500, 3)[1] == []

    def careless(wire: object, limits: WireLimits) -> object:
        raise IndexError("no such token")

    monkeypatch.setattr(codec, "_decode_draft", careless)
    findings = messages.fuzz_codec(500, 3)[1]
    assert findings
    assert "IndexError" in findings[0]


@pytest.mark.slow
def test_hostile_clients_change_no_text_and_leave_nothing_behind(tmp_path: Path) -> None:
    report = tmp_path / "load.json"
    options = ["--any-latency", "--devices", "12", "--seconds", "3", "--phase", "1.5"]
    options += ["--lease-s", "0.5", "--seed", "3", "--json", str(report)]
    done = python("benchmarks/hostile_load.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings" in done.stdout
    found = json.loads(report.read_text())
    assert found["texts"] > 0
    sent = found["rows"][0]["pairs"][0]["sent"]
    assert all(sent[kind] for kind in sent), sent  # every kind of client has played
    assert found["rest"]["full"]["sessions"] > 0 == found["rest"]["after"]["sessions"]


@pytest.mark.slow
def test_the_load_is_what_it_says(tmp_path: Path) -> None:
    """Every token is compared with the target's own text."""
    report = tmp_path / "load.json"
    options = ("--sessions", "4", "--messages", "1,2", "--repeats", "1", "--seconds", "2")
    done = python("benchmarks/daemon_load.py", *options, "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    points = json.loads(report.read_text())["points"]
    assert [point["messages"] for point in points] == [1, 2]
    for point in points:
        assert point["passes"] > 0
        assert point["wrong"] == point["ended"] == 0
        # A commit a pass, give or take the passes between the looks at one side and the other.
        assert point["messages_down"] == pytest.approx(1.0, abs=0.5)
        assert point["tokens"] > point["messages_down"]  # drafts count
        assert 0.0 < point["loop_us"] < point["process_us"]
