"""A small run of ``benchmarks/service_drill.py``: oracle and findings are the script's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shell.live_verifier import environment
from tests.sources import ROOT

DRILLS = ["calm", "rotation", "revocation", "wrong-keys", "flood", "restart", "two", "drain"]


@pytest.mark.slow
def test_no_drill_costs_a_device_its_text(tmp_path: Path) -> None:
    report = tmp_path / "drill.json"
    options = ("--devices", "10", "--seconds", "4", "--seed", "2", "--json", str(report))
    done = subprocess.run(
        [sys.executable, "benchmarks/service_drill.py", *options],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    found = json.loads(report.read_text())
    # How fast a revocation is on a machine that runs other tests is for the bench to judge.
    findings = [one for one in found["findings"] if not one.startswith("revocation: 6 of 6 ended")]
    assert findings == [], done.stdout + done.stderr
    rows = {row["name"]: row for row in found["drills"]}
    assert list(rows) == DRILLS
    assert all(row["tokens"] > 0 for row in rows.values())
    assert rows["revocation"]["notes"]["ended"] == 6
    assert rows["wrong-keys"]["notes"]["UNAUTHENTICATED"] > 0
    assert rows["flood"]["notes"]["streams"] > 0
