"""Tests that a command ended by a signal leaves no folder and no child behind.

Oracle: the list of files in its own folders, the processes that it had started, and the exit code
that ``--help`` documents (128 plus the signal's number). The terminal of a chat is tested in
``test_chat.py``.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from edgespec.cli.running import StopRequest, on_stopping_signals
from edgespec.config.files import temporary_folder
from tests.kit.live_verifier import child_environment
from tests.models.test_grammar import wait_until
from tests.present import require
from tests.sources import ROOT

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WITHIN_S = 200
BUNDLED = ROOT / "edgespec/models/bundled"
by_signal = pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)

# An export that has begun to write and never ends.
EXPORT = """
import sys
from edgespec.device.export import export

def write_for_ever(source, target, **_):
    (target / "model.onnx").write_bytes(b"half")
    print("writing", flush=True)
    input()

export.export_draft = write_for_ever
from edgespec.__main__ import main
main()
"""
NESTED = """
import asyncio, sys
from pathlib import Path
from edgespec.cli import running
from edgespec.config.files import temporary_folder

async def none():
    pass

with temporary_folder(Path(sys.argv[1])) as outer, temporary_folder(outer.parent):
    running.run(none())  # an event loop answers signals in between, and leaves them as they were
    print("writing", flush=True)
    input()
"""


def run_until_written(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start Python with this code, and wait until its output says that it writes."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert require(process.stdout).readline() == "writing\n", process.communicate()[1]
    return process


@by_signal
@pytest.mark.parametrize(
    "code", [pytest.param(EXPORT, id="export"), pytest.param(NESTED, id="nested folders")]
)
def test_a_folder_that_is_written_goes(tmp_path: Path, number: signal.Signals, code: str) -> None:
    arguments = ("export", BUNDLED / "draft", tmp_path / "out") if code == EXPORT else (tmp_path,)
    with run_until_written(code, *arguments) as process:
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        _, errors = process.communicate(timeout=WITHIN_S)
    assert list(tmp_path.iterdir()) == []
    if code == EXPORT:
        assert (process.returncode, errors) == (128 + number, "")


def test_a_second_signal_takes_the_folders_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second signal ends the process at once, so the folders are removed in the handler."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    stopping = StopRequest()
    with temporary_folder(tmp_path):
        stopping.request(signal.SIGTERM)
        assert list(tmp_path.iterdir())
        stopping.request(signal.SIGTERM)
        assert list(tmp_path.iterdir()) == []
    assert codes == [128 + signal.SIGTERM]


def test_who_answers_a_signal_already_goes_on_to(tmp_path: Path) -> None:
    """Only a handler that would end the process at once is replaced, and only while the folder
    exists."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with temporary_folder(tmp_path):
        # Python's own handler, which unwinds the stack
        assert signal.getsignal(signal.SIGINT) is before[0]
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


TEXTS = "--texts", str(ROOT / "README.md")
COMMANDS = {
    "demo": ("edgespec", "demo"),
    "bench": ("edgespec", "bench", "--limit", "1"),
    "profile": ("edgespec", "profile", "--quick", "--model", "toy", "--draft", "toy"),
    "simulator": ("edgespec_sim", "run", "household"),
    "distill": ("edgespec", "distill", *TEXTS, "--length", "32", "--out", "out"),
}
BUSY = {"simulator": r": [1-9]\d* of \d+ virtual s", "distill": "to learn from"}
"""Output that a command prints in the middle of its work. The other commands have started a child
by then."""
START = "import sys; sys.argv[0:1] = []; from edgespec.__main__ import main, simulator; "


@pytest.mark.slow
@by_signal
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_leaves_nothing_running(
    tmp_path: Path, name: str, number: signal.Signals
) -> None:
    which, *words = COMMANDS[name]
    for folder in ("tmp", "work", "home"):
        (tmp_path / folder).mkdir()
    own = {"TMPDIR": tmp_path / "tmp", "HOME": tmp_path / "home"}
    call = "main()" if which == "edgespec" else "simulator()"
    with subprocess.Popen(
        [sys.executable, "-c", START + call, which, *words],
        cwd=tmp_path / "work",
        env={**child_environment(), **{key: str(value) for key, value in own.items()}},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        running = psutil.Process(process.pid)
        if name in BUSY:
            lines = iter(require(process.stderr).readline, "")
            assert any(re.search(BUSY[name], line) for line in lines)
        else:
            wait_until(lambda: running.children() or process.poll() is not None)
        children = running.children(recursive=True)
        process.send_signal(number)
        output, errors = process.communicate(timeout=WITHIN_S)
    # A command that has nothing to tidy up yet is ended by the signal itself. A shell shows the
    # same exit code for both.
    assert process.returncode in (128 + number, -number), errors
    assert "Traceback" not in output + errors
    _, alive = psutil.wait_procs(children, timeout=WITHIN_S)
    assert alive == []
    left = [path.name for folder in ("tmp", "work") for path in (tmp_path / folder).iterdir()]
    # The next run of distill continues from this folder, if anything was written by then.
    assert set(left) <= ({"out.training"} if name == "distill" else set())


def test_a_loop_without_signal_handlers_is_told_and_gives_the_signal_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Event loops of Windows have no signal handlers."""

    def refuse(*_: object) -> None:
        raise NotImplementedError

    seen = list[str]()
    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", refuse)
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("the handler from before"))

    async def work() -> None:
        came = asyncio.Event()
        assert on_stopping_signals(lambda _: came.set(), (signal.SIGTERM,)) == []
        signal.raise_signal(signal.SIGTERM)
        await came.wait()
        seen.append("the loop")

    try:
        asyncio.run(work())
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == ["the loop", "the handler from before", "the handler from before"]
