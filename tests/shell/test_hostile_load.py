"""Small runs of the scripts in ``benchmarks/`` that load a verifier: oracles and findings are their
own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.shell.live_verifier import python


def test_hostile_streams_end_cleanly_beside_an_honest_device() -> None:
    done = python("benchmarks/fuzz.py", "--messages", "2000", "--streams", "120", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings" in done.stdout
    assert "stream: INVALID_ARGUMENT" in done.stdout


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
def test_whatever_both_ends_draft_no_text_differs() -> None:
    done = python("benchmarks/both_ends.py", "--texts", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "160 texts, none differs" in done.stdout
