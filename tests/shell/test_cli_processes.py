"""The real processes: start, serve, stop, be killed, be replaced. Oracle: the toy's text."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import uuid
from typing import IO

import psutil
import pytest

from edgespec.cli.demo import REPETITION_PENALTY
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.toy import ToyTokenizer
from tests.shell.live_verifier import daemon, own_port, start, toy_text

PROMPT = "once upon a time"
LONG = 200
WITHIN_S = 120
TEXT = ToyTokenizer()


def generating(address: str, count: int = LONG) -> subprocess.Popen[str]:
    where = ("--verifier", address, "--draft", "toy")
    return start(
        "generate", PROMPT, *where, "-n", str(count), "--set", "sampling.ignore_eos=true", "--json"
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def rest(pipe: IO[str] | None) -> str:
    return "" if pipe is None else pipe.read()


def rest_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """All that it still says. Not ``communicate``: that loses what ``readline`` has read ahead."""
    out, err = rest(process.stdout), rest(process.stderr)
    process.wait(WITHIN_S)
    return out, err


def test_sigterm_stops_the_daemon_and_a_replacement_continues_the_text() -> None:
    place = ("--port", str(own_port()))
    with daemon("--pass-ms", "10", "--set", "drain_s=0", *place) as (address, verifier):
        device = generating(address)
        lines = [first_line(device)]
        verifier.send_signal(signal.SIGTERM)
        assert verifier.wait(WITHIN_S) == 0
        assert "stopping; the devices are told" in rest(verifier.stderr)
    with daemon(*place) as _, device:
        out, err = rest_of(device)
    assert device.returncode == 0, err
    assert _tokens([*lines, *out.splitlines()]) == _expected()


def test_a_stopped_device_leaves_the_daemon_serving() -> None:
    with daemon("--pass-ms", "10") as (address, verifier):
        for number in (signal.SIGTERM, signal.SIGINT):
            with generating(address, 3000) as device:
                assert first_line(device)
                device.send_signal(number)
                device.communicate(timeout=WITHIN_S)
                assert device.returncode == 128 + number
        with generating(address, 8) as device:
            out, _ = device.communicate(timeout=WITHIN_S)
        assert _tokens(out.splitlines()) == _expected(8)
        assert verifier.poll() is None


def test_the_demo_runs_without_a_terminal_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEMO_OF_A_TEST", mark := uuid.uuid4().hex)
    models = ("--model", "toy", "--draft", "toy", "--prompt", PROMPT)
    with start("demo", *models, "--rtt-ms", "2") as demo:
        out, err = demo.communicate(timeout=WITHIN_S)
    assert demo.returncode == 0, err
    assert "token for token the same: yes (64 tokens)" in out
    assert "emulated pass time" in out
    assert "\x1b[" not in out
    sampling = SamplingParams(max_tokens=64, repetition_penalty=REPETITION_PENALTY)
    assert TEXT.decode(toy_text(TEXT.encode(PROMPT), sampling)) in out
    found = re.search(r"verifier on 127.0.0.1:(\d+)", out)
    assert found is not None
    assert not _marked(mark)


def _marked(mark: str) -> list[int]:
    """Processes, but this one, that were started with this mark in their environment."""
    found = psutil.process_iter(["pid", "environ"])
    return [
        one.pid
        for one in found
        if (one.info["environ"] or {}).get("DEMO_OF_A_TEST") == mark and one.pid != os.getpid()
    ]


def test_a_demo_without_its_model_says_so() -> None:
    with start("demo", "--model", "no-such-model", "--draft", "toy") as demo:
        out, err = demo.communicate(timeout=WITHIN_S)
    assert demo.returncode == 1
    assert "the verifier did not start" in err
    assert "'no-such-model' is neither 'bundled', nor a folder" in err
    assert "Traceback" not in out + err


def _tokens(lines: list[str]) -> list[int]:
    return [token for line in lines for token in json.loads(line)["tokens"]]


def _expected(count: int = LONG) -> list[int]:
    return toy_text(TEXT.encode(PROMPT), SamplingParams(max_tokens=count, ignore_eos=True))
