"""Traces are best effort. Oracle: nothing is raised, one warning, and the run goes on."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from edgespec.core.protocol.messages import Commit, Open
from edgespec.telemetry.trace import TraceFile

FULL = Path("/dev/full")


@pytest.fixture
def full() -> Path:
    """A disk that takes nothing."""
    if not FULL.exists():
        pytest.skip(f"this system has no {FULL}")
    return FULL


def test_a_full_disk_is_told_once_and_ends_the_trace(
    full: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), TraceFile(full) as trace:
        for position in range(2000):
            trace.record(1.0, "device", "s", "event", Commit(position, (1, 2, 3)))
    (record,) = caplog.records
    assert record.message == f"the trace {full} ends here: No space left on device"


def test_a_secret_is_not_traced(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as trace:
        trace.record(1.0, "device", "s", "event", Open("s", "", "", (1,), session_secret=b"hush"))
    (line,) = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["prompt"] == [1]
    assert "hush" not in line
    assert "session_secret" not in line


class _Unspeakable:
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


def test_what_no_line_can_be_made_of_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.jsonl"
    with caplog.at_level(logging.WARNING), TraceFile(path) as trace:
        trace.record(1.0, "device", "s", "event", Commit(1, (1,)))
        trace.record(2.0, "device", "s", "event", _Unspeakable())
        trace.record(3.0, "device", "s", "event", Commit(3, (3,)))
    assert len(path.read_text(encoding="utf-8").splitlines()) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
