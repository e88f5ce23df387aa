"""Tests of the real processes: how they begin, serve, stop, are killed and replaced. They also
cover closed streams, readers that leave, arguments that are not text, Ctrl-C during the imports,
and a parent that is killed.

Oracles: the documented exit code, no line of a traceback, and the toy's text.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
import pytest

from edgespec.cli.demo import REPETITION_PENALTY
from edgespec.cli.running import StopRequest, stopping_at_once
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.toy import ToyTokenizer
from tests.kit.live_verifier import child_environment, run_python, start, start_daemon, toy_text
from tests.present import require
from tests.sources import ROOT

WITHIN_S = 200


def run_script(script: str, *arguments: str | bytes) -> tuple[int, str]:
    """Run ``script``, in which "$@" is the command; return its exit code and all output that got
    through."""
    command = [sys.executable, "-m", "edgespec", *arguments]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command],
        cwd=ROOT,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=WITHIN_S,
        check=False,
    )
    output = (done.stdout + done.stderr).decode(errors="replace")
    assert "Traceback" not in output
    assert "ignored" not in output  # the interpreter prints this for errors at its own exit
    return done.returncode, output


@pytest.mark.parametrize(
    ("streams", "arguments", "code", "said"),
    [
        (">&-", ("--version",), 0, ""),
        (">&-", ("generate", "x", "--verifier", "127.0.0.1:1"), 1, "no verifier answers"),
        ("2>&-", ("generate", "x", "--verifier", "127.0.0.1:1"), 1, ""),
        ("<&-", ("generate", "-"), 2, "the prompt is empty"),
        ("<&- >&- 2>&-", ("export", "--inspect", "bundled"), 0, ""),
    ],
)
def test_closed_streams_are_empty_ones(
    streams: str, arguments: tuple[str, ...], code: int, said: str
) -> None:
    found, output = run_script(f'"$@" {streams}', *arguments)
    assert found == code
    assert said in output


@pytest.mark.parametrize("words", ["--help", "plan --help", "export --inspect bundled"])
def test_a_reader_that_leaves_ends_a_command_silently(words: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)  # the reader has left before the command writes anything
    done = subprocess.run(
        [sys.executable, "-m", "edgespec", *words.split()],
        cwd=ROOT,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
        timeout=WITHIN_S,
        check=False,
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_named() -> None:
    code, output = run_script('"$@" > /dev/full', "--version")
    assert (code, output) == (1, "error: [Errno 28] No space left on device\n")
    assert run_script('"$@" > /dev/full 2>&1', "--version") == (1, "")


def test_an_argument_that_is_not_utf8_is_named() -> None:
    code, output = run_script('"$@"', "generate", b"\xff\xfe", "--draft", "toy")
    assert (code, output) == (2, "error: argument 2 is b'\\xff\\xfe', but must be UTF-8\n")
    code, output = run_script("""EDGESPEC_MODEL=$(printf '\\377') "$@" """, "verifier")
    assert (code, output) == (2, "error: EDGESPEC_MODEL is b'\\xff', but must be UTF-8\n")


@pytest.mark.parametrize(
    ("library", "arguments"), [("typer", ["--version"]), ("yaml", ["generate", "--help"])]
)
def test_a_ctrl_c_during_the_imports_says_nothing(
    tmp_path: Path, library: str, arguments: list[str]
) -> None:
    """The Ctrl-C hits the command line's own imports, or the called command's imports."""
    (tmp_path / f"{library}.py").write_text("print('importing', flush=True)\ninput()\n")
    path = os.pathsep.join((str(tmp_path), child_environment()["PYTHONPATH"]))
    with subprocess.Popen(
        [sys.executable, "-m", "edgespec", *arguments],
        env={**child_environment(), "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert require(process.stdout).readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, errors) == (-signal.SIGINT, "")


LOADING = """
import ctypes
from edgespec.cli import running

async def load():
    with running.stopping_at_once():
        lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(mutex)
        print("loading", flush=True)
        lock(mutex)  # holds the interpreter too: no handler in Python would be called

running.run(load())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_loading_is_stopped_at_once(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOADING],
        cwd=ROOT,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert require(process.stdout).readline() == "loading\n"
        process.send_signal(number)
        output, errors = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, output, errors) == (-number, "", "")
    before = signal.getsignal(number)
    with stopping_at_once():
        assert signal.getsignal(number) is signal.SIG_DFL
    assert signal.getsignal(number) is before


def test_a_simulation_whose_whole_group_is_told_to_end_ends_with_its_workers(
    tmp_path: Path,
) -> None:
    """``timeout`` signals a whole group like this. A worker that dies of the signal may hold a lock
    that its pool waits for."""
    command = "from edgespec.__main__ import simulator; simulator()"
    arguments = ("run", "full-verifier", "--seeds", "8", "--out", str(tmp_path / "out"))
    with subprocess.Popen(
        [sys.executable, "-c", command, *arguments],
        env=child_environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        workers: list[psutil.Process] = []
        while not workers:
            with suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it ended with {process.wait(0.05)}")
            for child in psutil.Process(process.pid).children():
                with suppress(ProcessLookupError):
                    if os.getpgid(child.pid) == child.pid:
                        workers.append(child)
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(worker.is_running() for worker in workers)


AS_THE_FIRST = """
import os, signal
from edgespec.cli import running

own, os.getpid = os.getpid(), lambda: 1
with running.stopping_at_once():
    os.kill(own, signal.SIGTERM)
    print("heard nothing")
"""


def test_the_first_process_of_a_container_is_stopped_while_it_loads() -> None:
    """Linux ignores the default action of signals for process 1, so the command needs its own
    handler."""
    done = run_python("-c", AS_THE_FIRST)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "")


def test_a_demo_that_is_killed_takes_its_verifier_with_it() -> None:
    with start("demo", "--model", "toy", "--draft", "toy") as demo:
        port = None
        while port is None:
            line = require(demo.stdout).readline()
            assert line, "the demo ended before it had a verifier"
            port = re.search(r"verifier on 127.0.0.1:(\d+)", line)
        with socket.create_connection(("127.0.0.1", int(port[1])), WITHIN_S) as probe:
            demo.kill()
            try:
                while probe.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    with pytest.raises(ConnectionRefusedError):
        _connect_again_and_again(int(port[1]))


def _connect_again_and_again(port: int) -> None:
    """Connect repeatedly, because a process that ends closes its sockets one after the other."""
    deadline_s = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline_s:
        with suppress(ConnectionResetError):  # its listener closed during this connect
            socket.create_connection(("127.0.0.1", port), WITHIN_S).close()


def test_a_verifier_stops_in_order_once_and_at_once_before_and_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    end = StopRequest(is_graceful=False)
    with pytest.raises(SystemExit) as left:
        end.request(signal.SIGTERM)  # the model is still being loaded
    assert left.value.code == 143
    assert not end.requested.is_set()
    end.is_graceful = True
    end.request(signal.SIGTERM)
    assert end.requested.is_set()
    with pytest.raises(SystemExit) as left:
        end.request(signal.SIGINT)
    assert left.value.code == 130


PROMPT = "once upon a time"
LONG = 200
TEXT = ToyTokenizer()


def start_generating(address: str, count: int = LONG) -> subprocess.Popen[str]:
    where = ("--verifier", address, "--draft", "toy")
    return start(
        "generate", PROMPT, *where, "-n", str(count), "--set", "sampling.ignore_eos=true", "--json"
    )


def first_line(process: subprocess.Popen[str]) -> str:
    return require(process.stdout).readline()


def read_rest(pipe: IO[str] | None) -> str:
    return "" if pipe is None else pipe.read()


def read_rest_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Read all remaining output. ``communicate`` would lose what ``readline`` has read ahead."""
    out, err = read_rest(process.stdout), read_rest(process.stderr)
    process.wait(WITHIN_S)
    return out, err


def test_a_stopped_device_leaves_the_daemon_serving() -> None:
    with start_daemon("--pass-ms", "10") as (address, verifier):
        for number in (signal.SIGTERM, signal.SIGINT):
            with start_generating(address, 3000) as device:
                assert first_line(device)
                device.send_signal(number)
                device.communicate(timeout=WITHIN_S)
                assert device.returncode == 128 + number
        with start_generating(address, 8) as device:
            out, _ = device.communicate(timeout=WITHIN_S)
        assert _tokens(out.splitlines()) == _expected_tokens(8)
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
    assert re.search(r"verifier on 127.0.0.1:\d+", out)
    assert not list_marked(mark)


def list_marked(mark: str) -> list[int]:
    """Return the other processes that were started with this mark in their environment."""
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


def _expected_tokens(count: int = LONG) -> list[int]:
    return toy_text(TEXT.encode(PROMPT), SamplingParams(max_tokens=count, ignore_eos=True))
