"""The trace of a run holds no session secret. Oracle: the bytes of the file."""

from __future__ import annotations

import json
from pathlib import Path

from edgespec.core.protocol.messages import Open
from edgespec.core.verifier.engine_events import StreamOpened
from edgespec.telemetry.trace import TraceFile


def test_a_secret_does_not_reach_the_trace(tmp_path: Path) -> None:
    request = Open("session", "", "", (1,), session_secret=b"hush, a secret")
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as trace:
        trace.record(0.0, "verifier", "", "event", StreamOpened(1, request))
        trace.record(0.0, "device", "", "action", request)
    text = path.read_text()
    assert "hush" not in text
    assert "secret" not in text
    nested = json.loads(text.splitlines()[0])["request"]
    assert (nested["session_id"], nested["prompt"]) == ("session", [1])
