"""The environment of an exporter that the command makes by itself. Oracles: what lies in the cache;
what a stand-in for Python, which "installs" by touching a file, was asked to do."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec.config.setup_error import SetupError
from edgespec.device.export import environment
from edgespec.device.export.environment import LEAST_FREE_BYTES, TORCH_INDEX, exporter_python
from edgespec.device.export.kinds import ExporterKind

KIND = ExporterKind("some", ("some==1",), ("some",), (32,), lambda source, target, bits: ())
WITH_TORCH = replace(KIND, requirements=("some==1", "torch>=2.5"))
WITHIN = 3000
"""Turns of 20 ms, a minute."""
PYTHON = """#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip")
    echo "$@" >> "{folder}/asked"
    mkdir "$TMPDIR/pip-unpack-$$"
    echo "$TMPDIR" > "{folder}/tmpdir"
    echo "Collecting some"
    case "$(cat "{folder}/mode")" in
    full) echo "ERROR: Could not install: an OSError: [Errno 28] No space left on device"
          exit 1 ;;
    offline) echo "WARNING: Retrying: [Errno -3] Temporary failure in name resolution"
          echo "ERROR: No matching distribution found for some==1"
          exit 1 ;;
    hangs) sleep 1000 ;;
    esac
    touch "$0.installed" ;;
"-c "*) if [ -e "$0.installed" ]; then echo missing:; else echo missing: some; fi ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    python = tmp_path / "python"
    python.write_text(PYTHON.format(folder=tmp_path))
    python.chmod(0o755)
    set_mode(tmp_path, "good")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "_LOOK_S", 0.01)
    return tmp_path


def set_mode(folder: Path, mode: str) -> None:
    (folder / "mode").write_text(mode)


def asked(folder: Path) -> list[str]:
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []


def made(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "edgespec" / "exporters").glob("some-*[!k]"))


def unpacked_in(folder: Path) -> Path:
    """Where the last pip was told to unpack."""
    return Path((folder / "tmpdir").read_text().strip())


async def python_of(said: list[str] | None = None, heard: list[str] | None = None) -> Path:
    say = [] if said is None else said
    hear = [] if heard is None else heard
    return await exporter_python(KIND, None, say.append, hear.append)


async def until(done: Callable[[], bool]) -> None:
    for _ in range(WITHIN):
        if done():
            return
        await asyncio.to_thread(threading.Event().wait, 0.02)
    raise AssertionError("it never came")


async def test_it_is_made_once_and_found_again(folder: Path) -> None:
    said: list[str] = []
    heard: list[str] = []
    python = await python_of(said, heard)
    assert python.parent.parent in made(folder)
    assert len(said) == 1
    assert "making an environment for some, once, in" in said[0]
    assert "some==1" in said[0]
    assert "Collecting some" in heard
    assert not unpacked_in(folder).exists()
    said.clear()
    assert await python_of(said) == python
    assert (said, len(asked(folder))) == ([], 1)


@pytest.mark.parametrize("damage", ["half made", "no interpreter", "lost a package"])
async def test_one_that_is_not_whole_is_made_again(damage: str, folder: Path) -> None:
    python = await python_of()
    if damage == "half made":
        (python.parents[1] / "edgespec-ready").unlink()
        (python.parents[1] / "junk").write_text("left by a process that was killed")
    elif damage == "no interpreter":
        python.unlink()
    else:
        python.with_name("python.installed").unlink()
    said: list[str] = []
    assert await python_of(said) == python
    assert "some, anew, in" in said[0]
    assert not (python.parents[1] / "junk").exists()
    assert len(asked(folder)) == 2


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("full", "the disk is full\ninstalling some failed (exit code 1):"),
        ("offline", "no package index can be reached: is there a network?\ninstalling some"),
    ],
)
async def test_what_goes_wrong_is_told_and_leaves_nothing(
    mode: str, why: str, folder: Path
) -> None:
    set_mode(folder, mode)
    with pytest.raises(SetupError) as caught:
        await python_of()
    assert why in str(caught.value)
    assert made(folder) == []
    set_mode(folder, "good")
    assert (await python_of()).is_file()


async def test_too_small_a_disk_is_told_before_anything_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=LEAST_FREE_BYTES - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(SetupError, match=r"3071 MiB are free, but .* takes up to 3072 MiB"):
        await python_of()
    assert asked(folder) == []


async def test_who_is_cancelled_leaves_nothing_and_lets_the_next_one_in(folder: Path) -> None:
    set_mode(folder, "hangs")
    task = asyncio.create_task(python_of())
    await until(lambda: bool(asked(folder)))
    assert len(made(folder)) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made(folder) == []
    set_mode(folder, "good")
    assert (await python_of()).is_file()


async def test_two_at_once_make_it_once(folder: Path) -> None:
    said: tuple[list[str], list[str]] = ([], [])
    first, second = await asyncio.gather(python_of(said[0]), python_of(said[1]))
    assert first == second
    assert len(asked(folder)) == 1
    assert sorted(line.partition(" ")[0] for line in (*said[0], *said[1])) == ["another", "making"]


async def test_torch_comes_from_the_index_that_is_named_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(TORCH_INDEX, "file:///without-cuda")
    monkeypatch.setattr(sys, "platform", "linux")
    said: list[str] = []
    python = await exporter_python(WITH_TORCH, None, said.append, print)
    assert "CUDA" not in said[0]
    first, second = asked(folder)
    assert "--index-url file:///without-cuda torch>=2.5" in first
    assert "--no-deps" in first
    assert "some" not in first
    assert "--index-url" not in second
    assert second.endswith("some==1 torch>=2.5")
    shutil.rmtree(python.parents[1])
    monkeypatch.delenv(TORCH_INDEX)
    await exporter_python(WITH_TORCH, None, said.append, print)
    assert f"{TORCH_INDEX} names an index that has it without" in said[1]
    assert len(asked(folder)) == 3
    assert "--index-url" not in asked(folder)[2]


async def test_a_cache_that_cannot_be_written_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    with pytest.raises(SetupError, match=r"cannot be made: Not a directory"):
        await python_of()
