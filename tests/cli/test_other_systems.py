"""Tests of a device on a system that lacks what Unix alone has (Windows), end to end: each command
in a process from which that was taken away (``tests/kit/without_unix``), against a verifier in a
process that has it. Paths have spaces and letters beyond ASCII, and streams are in cp1252.

Oracles: the toy's text, the files that a command leaves, exit codes, and no line of a traceback.
This file runs on Windows and macOS too (``.github/workflows/ci.yml``), where little is taken away.
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
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec import operating_system
from edgespec.cli import doctor
from edgespec.config.files import read_bytes, replace_file, write_output
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.manifest import MODEL_FILE, find_damage, read_manifest
from edgespec.models.limited_process import OVER_LIMIT
from edgespec.models.toy import ToyTokenizer
from edgespec.operating_system import VERIFIER_SYSTEMS
from tests.kit.live_verifier import child_environment, toy_text, wait_until_ready
from tests.present import require
from tests.sources import ROOT

BLOCK = ROOT / "tests/kit/without_unix"
WITHIN_S = 200
COUNT = 24
PROMPT = "Größe – naïve 😀"
ENCODING = "cp1252"
TEXT = ToyTokenizer()
VERIFIER = """
import asyncio, sys, edgespec
from edgespec.config import PacingSection, VerifierConfig

async def serve():
    config = VerifierConfig(model="toy", port=0, pacing=PacingSection(pass_ms=float(sys.argv[1])))
    async with edgespec.run_verifier(config=config) as server:
        print(f"ready on {server.address}: toy", flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(serve())
"""
if sys.platform == "win32":
    STOP, STOPPED = signal.CTRL_BREAK_EVENT, 128 + signal.SIGBREAK
    NEW_GROUP = subprocess.CREATE_NEW_PROCESS_GROUP
else:
    STOP, STOPPED, NEW_GROUP = signal.SIGINT, 128 + signal.SIGINT, 0


def run_verifier(pass_ms: float) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", VERIFIER, str(pass_ms)],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with wait_until_ready(process) as (address, _):
        yield address


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    yield from run_verifier(0.0)


@pytest.fixture(scope="module")
def slow_address() -> Iterator[str]:
    yield from run_verifier(50.0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("Müller's Daten")


def block_environment(home: Path, encoding: str = ENCODING) -> dict[str, str]:
    """Return the environment of a process in which the block holds."""
    found = child_environment()
    found["PYTHONPATH"] = os.pathsep.join((str(BLOCK), found["PYTHONPATH"]))
    for name in ("HOME", "USERPROFILE", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        found[name] = str(home)
    return found | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "TERM": "xterm-256color"}


def start(home: Path, *arguments: object, entry: str = "main") -> subprocess.Popen[bytes]:
    code = f"from edgespec.__main__ import {entry}; {entry}()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=home,
        env=block_environment(home),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        creationflags=NEW_GROUP,
    )


def run(
    home: Path, *arguments: object, stdin: bytes = b"", entry: str = "main", code: int = 0
) -> tuple[str, str]:
    """Run a command to its end, and return what it printed on stdout and stderr."""
    with start(home, *arguments, entry=entry) as process:
        output, errors = process.communicate(stdin, timeout=WITHIN_S)
    shown = errors.decode(ENCODING, "replace")
    assert process.returncode == code, shown
    assert "Traceback" not in shown
    assert b"\x1b" not in output + errors, "no colours where no terminal is"
    return output.decode(ENCODING).replace("\r\n", "\n"), shown


def in_pipe(text: str) -> str:
    """Return ``text`` as a pipe in cp1252 holds it."""
    return text.encode(ENCODING, "backslashreplace").decode(ENCODING)


def reply(prompt: str, count: int = COUNT) -> str:
    return TEXT.decode(toy_text(TEXT.encode(prompt), SamplingParams(max_tokens=count)))


def test_the_block_holds(home: Path) -> None:
    """The attributes are gone, our own code cannot import the modules, and libraries can."""
    code = (
        "import asyncio, os, signal, socket\n"
        "print(*[hasattr(one, name) for one, name in ((signal, 'SIGHUP'), (signal, 'SIGKILL'),"
        " (os, 'fork'), (os, 'O_NONBLOCK'), (socket, 'AF_UNIX'))])\n"
        "try: import fcntl\nexcept ModuleNotFoundError as error: print(error.name)\n"
        "async def handle(): asyncio.get_running_loop().add_signal_handler(2, print)\n"
        "try: asyncio.run(handle())\nexcept NotImplementedError: print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=block_environment(home),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False"] * 5 + ["fcntl", "refused"]


def test_generate(home: Path, address: str) -> None:
    where = ("--verifier", address, "--draft", "toy", "-n", COUNT)
    output, _ = run(home, "generate", PROMPT, *where, "--stats")
    assert output == in_pipe(reply(PROMPT)) + "\n"
    output, _ = run(home, "generate", "-", *where, stdin=PROMPT.encode())
    assert output == in_pipe(reply(PROMPT)) + "\n"
    file = home / "eine Vorhersage.txt"
    file.write_text(reply(PROMPT), encoding="utf-8")
    output, _ = run(
        home, "generate", PROMPT, *where, "--prediction", file, "--record", home / "ö.db"
    )
    assert output == in_pipe(reply(PROMPT)) + "\n"
    assert (home / "ö.db").stat().st_size > 0


def test_json_lines_are_ascii_in_a_pipe_that_has_no_unicode(home: Path, address: str) -> None:
    output, _ = run(
        home, "generate", PROMPT, "--verifier", address, "--draft", "toy", "-n", COUNT, "--json"
    )
    lines = [json.loads(line) for line in output.splitlines()]
    assert "".join(line["text"] for line in lines) == reply(PROMPT)


def test_chat_through_a_pipe(home: Path, address: str) -> None:
    """The first reply has no chat template, and the second follows from the whole conversation. The
    messages are saved to a file whose name has a space."""
    saved = home / "ein Gespräch.json"
    lines = f"hello\nagain\n/save {saved}\n/quit\n".encode(ENCODING)
    where = ("--verifier", address, "--draft", "toy", "-n", COUNT)
    output, _ = run(home, "chat", *where, stdin=lines)
    first = reply("hello ")
    second = reply(f"hello {first} again ")
    assert output.replace("> ", "") == f"{in_pipe(first)}\n{in_pipe(second)}\n"
    messages = json.loads(saved.read_text(encoding="utf-8"))["messages"]
    assert [one["content"] for one in messages] == ["hello", first, "again", second]


def post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
        return json.loads(answer.read())


def test_serve_and_its_end_by_ctrl_c(home: Path, address: str) -> None:
    with start(home, "serve", "--verifier", address, "--draft", "toy", "--port", "0") as process:
        line = require(process.stdout).readline().decode(ENCODING)
        found = re.search(r"ready on (http://\S+)/v1", line)
        assert found is not None, line + require(process.stderr).read().decode(ENCODING)
        body = {"model": "edgespec", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
        answer = post(f"{found[1]}/v1/completions", body)
        assert answer["choices"][0]["text"] == reply(PROMPT)
        process.send_signal(STOP)
        _, errors = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, b"Traceback" in errors) == (0, False)


def test_a_ctrl_c_ends_a_generation(home: Path, slow_address: str) -> None:
    """The event loop has no signal handlers, so the handler of the process stops its work."""
    where = ("--verifier", slow_address, "--draft", "none", "-n", 2000, "--json")
    with start(home, "generate", PROMPT, *where, "--set", "sampling.ignore_eos=true") as process:
        assert require(process.stdout).readline()
        process.send_signal(STOP)
        _, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == STOPPED
    assert b"Traceback" not in errors


def test_doctor_says_what_this_system_lacks(home: Path, address: str) -> None:
    output, _ = run(home, "doctor", "--verifier", address, "--draft", "toy")
    assert re.search(r"note system: .*: without .*SIGHUP; Unix sockets", output)
    assert VERIFIER_SYSTEMS in output
    assert f"verifier at {address}: serves toy" in output
    assert re.search(r"ok +draft step: works", output)


def test_export_of_the_bundled_model(home: Path) -> None:
    """The draft lies in a folder with a space in its name, and is read back."""
    out = home / "ein Entwurf"
    run(home, "export", ROOT / "edgespec/models/bundled/draft", out)
    manifest = read_manifest(out)
    assert find_damage(out, manifest) == ""
    assert (out / MODEL_FILE).is_file()
    output, _ = run(home, "plan", "memory", out, "--memory-budget", "400MiB")
    assert "4 bits, float32 keys and values" in output


def test_plan_and_models(home: Path) -> None:
    output, _ = run(home, "plan", "link", "--rtt-ms", 50, "--acceptance", 0.7, "--seeds", 1)
    assert "50" in output
    output, _ = run(home, "models")
    assert "smollm2-135m" in output
    _, errors = run(home, "pull", "nobody/knows", code=2)
    assert "nobody/knows" in errors


def test_the_simulator_plays_in_several_processes(home: Path) -> None:
    out = home / "eine Messung"
    run(home, "run", "single-device", "--seed", 1, "--out", out, entry="simulator")
    assert json.loads(next(out.rglob("summary.json")).read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", [("verifier",), ("demo",), ("bench", "--limit", "1")])
def test_a_command_that_needs_a_verifier_here_says_where_they_run(
    home: Path, command: tuple[str, ...]
) -> None:
    _, errors = run(home, *command, code=1)
    assert errors.splitlines()[-1] == f"error: {VERIFIER_SYSTEMS}"


# --- limits of child processes --------------------------------------------------------------------

GREEDY = """
def main(bounds, what):
    bounds.allow_cpu(1)
    print("begun", flush=True)
    if what == "memory":
        kept = []
        while True:
            kept.append(bytearray(1 << 20))
    while what == "time":
        pass
"""


@pytest.mark.parametrize(("what", "code"), [("memory", OVER_LIMIT), ("time", OVER_LIMIT), ("", 0)])
def test_a_child_without_limits_of_the_system_watches_itself(
    home: Path, what: str, code: int
) -> None:
    script = home / "greedy.py"
    script.write_text(GREEDY, encoding="utf-8")
    limited = ROOT / "edgespec/models/limited_process.py"
    done = subprocess.run(
        [sys.executable, limited, script, str(128 << 20), "0", what],
        env=block_environment(home),
        capture_output=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (code, [b"begun"]), done.stderr


# --- files ----------------------------------------------------------------------------------------


def test_files_are_written_and_read_where_the_block_holds(home: Path) -> None:
    """The functions of ``config/files.py`` in a process that lacks the flags of ``os.open``."""
    code = f"""
from pathlib import Path
from edgespec.config import files
folder = Path({str(home)!r})
files.replace_file(folder / "a b", "eins\\r\\nzwei\\x1a")
assert files.read_bytes(folder / "a b", 100) == b"eins\\r\\nzwei\\x1a"
files.write_output(folder / "ö" / "c", "drei")
assert files.read_text(folder / "ö" / "c", 100) == "drei"
with files.open_to_read(folder / "a b") as opened:
    assert opened.read() == "eins\\r\\nzwei\\x1a"
try: files.read_bytes(folder, 100)
except IsADirectoryError as error: print(error.filename)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=block_environment(home, "utf-8"),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.stderr, done.stdout.strip()) == ("", str(home))


class BusyFile:
    """``os.replace`` of a file that another program has open for the first ``failures`` tries."""

    def __init__(self, failures: int) -> None:
        self.failures, self.tries = failures, 0

    def replace(self, source: object, target: object) -> None:
        self.tries += 1
        if self.tries <= self.failures:
            raise PermissionError(13, "The process cannot access the file", str(target))


@pytest.mark.parametrize(
    ("is_windows", "failures", "tries"),
    [
        pytest.param(True, 3, 4, id="busy for a moment"),
        pytest.param(True, 10**6, None, id="busy for ever"),
        pytest.param(False, 10**6, 1, id="not permitted on Unix"),
    ],
)
def test_a_file_in_use_is_replaced_a_little_later(
    is_windows: bool, failures: int, tries: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, busy = [0.0], BusyFile(failures)
    monkeypatch.setattr(operating_system, "IS_WINDOWS", is_windows)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda s: clock.__setitem__(0, clock[0] + s))
    monkeypatch.setattr(os, "replace", busy.replace)
    if failures < 10:
        operating_system.move_path("a", "b")
    else:
        with pytest.raises(PermissionError):
            operating_system.move_path("a", "b")
    assert tries is None or busy.tries == tries
    assert busy.tries < 100
    assert clock[0] <= 2.1


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept"
    write_output(path, "before")
    monkeypatch.setattr(os, "replace", BusyFile(10**6).replace)
    with pytest.raises(PermissionError):
        replace_file(path, "after")
    assert read_bytes(path, 100) == b"before"
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


class FakeSocket:
    def __init__(self) -> None:
        self.options: list[int] = []

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self.options.append(option)


def test_a_port_is_claimed_as_the_system_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows the option that lets a server start again on Unix would let a second program take
    its port."""
    usual, windows, exclusive = FakeSocket(), FakeSocket(), -5
    if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
        exclusive = socket.SO_EXCLUSIVEADDRUSE
        monkeypatch.delattr(socket, "SO_EXCLUSIVEADDRUSE")
    operating_system.claim_port(usual)  # type: ignore[arg-type]
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", exclusive, raising=False)
    operating_system.claim_port(windows)  # type: ignore[arg-type]
    assert usual.options == [socket.SO_REUSEADDR]
    assert windows.options == [exclusive]


@pytest.mark.parametrize(
    ("is_windows", "terminal", "can"),
    [
        pytest.param(False, None, False, id="Unix, no terminal named"),
        pytest.param(False, "xterm", True, id="Unix"),
        pytest.param(False, "dumb", False, id="an editor's shell"),
        pytest.param(True, None, True, id="Windows names none"),
    ],
)
def test_a_console_of_windows_can_move_its_cursor(
    is_windows: bool, terminal: str | None, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operating_system, "IS_WINDOWS", is_windows)
    monkeypatch.delenv("TERM", raising=False)
    if terminal is not None:
        monkeypatch.setenv("TERM", terminal)
    assert operating_system.can_move_cursor() is can


def test_a_coarse_clock_is_said_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "clock_step_s", lambda: 0.0156)
    found = doctor.check_system()
    assert found.state is doctor.State.NOTE
    assert "steps of 15.6 ms" in found.finding
    assert "Python 3.13" in found.finding
