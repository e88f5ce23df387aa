"""Folders of processes that were killed are taken away, and of those that live are not.

Oracle: what lies in the folder afterwards.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.device.export import export as module
from edgespec.device.export.export import work_folder
from tests.shell.live_verifier import environment
from tests.sources import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")
PREFIX = ".edgespec-test-"
HOLDS = """
import sys
from pathlib import Path
from edgespec.device.export.export import work_folder
with work_folder(Path(sys.argv[1]), sys.argv[2]) as folder:
    (folder / "weights").write_text("half")
    print(folder, flush=True)
    sys.stdin.read()
"""


def holder(beside: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that writes into a folder until it is killed, or its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(beside), PREFIX],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_process_that_was_killed_is_taken_away(tmp_path: Path) -> None:
    killed, left = holder(tmp_path)
    live, used = holder(tmp_path)
    with killed, live:
        try:
            killed.kill()
            killed.wait()
            mine = tmp_path / f"{PREFIX}my-own-folder"
            mine.mkdir()
            link = tmp_path / f"{PREFIX}abcdefgh"
            link.symlink_to(mine)
            with work_folder(tmp_path, PREFIX) as folder:
                assert not left.exists()
                assert (used / "weights").read_text() == "half"
                with work_folder(tmp_path, PREFIX):
                    assert folder.is_dir()  # its own are of a process that lives
            live.communicate("")
            assert live.returncode == 0
            assert sorted(tmp_path.iterdir()) == sorted([mine, link])
        finally:
            killed.kill()
            live.kill()


def test_what_was_moved_to_its_place_stays(tmp_path: Path) -> None:
    beside = tmp_path / "new" / "folder"
    with work_folder(beside, PREFIX) as folder:
        (folder / "weights").write_text("whole")
        folder.rename(beside / "draft")
    with work_folder(beside, PREFIX):
        pass
    assert [path.name for path in beside.iterdir()] == ["draft"]
    assert (beside / "draft" / "weights").read_text() == "whole"


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> None:
        with work_folder(tmp_path, PREFIX) as folder:
            (folder / "weights").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_process_takes_away_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the moment between making it and locking it."""
    found: list[Path] = []
    take = module._take

    def raced(folder: Path) -> int | None:
        found.append(folder)
        if len(found) == 1:
            folder.rmdir()
        elif len(found) == 2:
            raise BlockingIOError
        return take(folder)

    monkeypatch.setattr(module, "_take", raced)
    with work_folder(tmp_path, PREFIX) as folder:
        assert folder == found[-1]
        assert folder.is_dir()
        assert len(found) == 3


def test_where_there_are_no_locks_nothing_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / f"{PREFIX}abcdefgh"
    left.mkdir()

    def refused(handle: int, how: int) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr("fcntl.flock", refused)
    with work_folder(tmp_path, PREFIX) as folder:
        assert folder.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [left.name]
