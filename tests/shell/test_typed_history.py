"""What is typed into chats is kept on disk: bounded, private, and never in the way.

Oracle: what prompt_toolkit's own reader finds, and the folder's list. Here too: files that are
replaced as a whole.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from prompt_toolkit.history import FileHistory

from edgespec.cli.talk import editor
from edgespec.cli.talk.editor import TypedHistory, history_file
from edgespec.config.files import replace_file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "edgespec"


def _entries(path: Path) -> list[str]:
    return list(FileHistory(str(path)).load_history_strings())[::-1]


def _typed(count: int) -> Path:
    path = history_file()
    assert path is not None
    for number in range(count):
        TypedHistory(path).store_string(f"message {number}\nof two lines")
    return path


def test_what_was_typed_is_found_again_by_its_owner_alone(home: Path) -> None:
    path = _typed(3)
    assert path == history_file() == home / "chat_history"
    assert _entries(path) == [f"message {number}\nof two lines" for number in range(3)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_of_too_many_entries_the_newest_stay(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editor, "_MOST_ENTRIES", 10)
    path = _typed(15)
    history_file()
    assert _entries(path) == [f"message {number}\nof two lines" for number in range(10, 15)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in home.iterdir()] == ["chat_history"]


def test_of_too_large_a_file_the_newest_whole_entries_stay(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _typed(50)
    monkeypatch.setattr(editor, "_MOST_BYTES", path.stat().st_size // 2 + 3)
    history_file()
    found = _entries(path)
    assert 20 <= len(found) <= 25
    assert found == [f"message {number}\nof two lines" for number in range(50)][-len(found) :]


def test_a_full_disk_costs_the_file_but_no_message(home: Path) -> None:
    full = TypedHistory(Path("/dev/full"))
    full.append_string("one")
    full.append_string("two")
    assert full.get_strings() == ["one", "two"]
    assert full.trouble() == f"/dev/full: what you type is not kept: {os.strerror(errno.ENOSPC)}"
    assert full.trouble() == ""  # once is enough


def test_who_has_no_home_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", _homeless)
    assert history_file() is None


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_file_that_cannot_be_replaced_stays_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    replace_file(path, "before", 0o644)
    assert path.stat().st_mode & 0o777 == 0o644

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"after")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "\udc00")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "before"
