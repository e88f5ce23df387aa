"""A small run of ``benchmarks/fuzz.py``: oracle and findings are the script's own."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from edgespec.wire import codec
from edgespec.wire.codec import WireLimits
from tests.shell import fuzz_messages as messages
from tests.shell.live_verifier import environment
from tests.sources import ROOT


def fuzz(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/fuzz.py", *options],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_hostile_streams_end_cleanly_beside_an_honest_device() -> None:
    done = fuzz("--messages", "2000", "--streams", "120", "--seed", "7")
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


def test_hostile_messages_follow_from_their_seed() -> None:
    for make in (messages.hostile_uplink, messages.hostile_downlink):
        first, again = random.Random(5), random.Random(5)
        assert [make(first) for _ in range(50)] == [make(again) for _ in range(50)]
