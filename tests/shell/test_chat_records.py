"""Conversations as files. Oracles: what was written, and who may read it."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.cli.talk import record
from edgespec.cli.talk.record import ConversationError, Record


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "edgespec"


TALK = Record(
    "m",
    "be brief",
    [{"role": "user", "content": "hä?\n"}, {"role": "assistant", "content": ""}],
    "2026-01-31T12:00:00+00:00",
)


def test_a_conversation_reads_back_and_is_for_its_owner_alone(home: Path) -> None:
    path = record.new_path()
    record.write(path, TALK)
    assert record.read(path) == TALK
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == [path.name]
    assert path.is_relative_to(home)
    assert TALK.asked[0] == {"role": "system", "content": "be brief"}
    assert len(TALK.asked) == 3


def test_a_write_that_fails_leaves_the_file_as_it_was(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record.new_path()
    record.write(path, TALK)

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConversationError, match="No space left"):
        record.write(path, replace(TALK, system=""))
    monkeypatch.undo()
    assert record.read(path) == TALK
    assert os.listdir(path.parent) == [path.name]


def test_the_newest_is_found_and_the_oldest_forgotten(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert record.newest() is None
    monkeypatch.setattr(record, "MAX_KEPT", 2)
    paths = [record.conversations_folder() / f"{name}.json" for name in "cab"]
    for second, path in enumerate(paths):
        record.write(path, TALK)
        os.utime(path, (second, second))
    assert record.newest() == paths[-1]
    record.forget_oldest()
    assert sorted(paths[1:]) == sorted(record.conversations_folder().glob("*.json"))


def test_a_file_that_is_no_conversation_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(ConversationError, match="is no conversation; it stays as it is"):
        record.write_new(path, TALK)
    assert path.read_text() == "years of work"
    record.write_new(tmp_path / "talk.json", TALK)
    record.write_new(tmp_path / "talk.json", replace(TALK, system=""))
    assert record.read(tmp_path / "talk.json").system == ""


GOOD = json.loads(TALK.as_json())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "its format is not"),
        ({**GOOD, "version": 9}, "its version is 9, but must be 1"),
        ({**GOOD, "messages": 3}, "messages must be a list"),
        (
            {**GOOD, "messages": [{"role": "root", "content": ""}]},
            r"messages\[0\] must have a role",
        ),
        ({**GOOD, "messages": [{"role": "user"}]}, r"messages\[0\] must have a content"),
        ({**GOOD, "system": 3}, "system is 3, but must be text"),
        ({**GOOD, "system": "\ud800"}, "system is .* but must be text"),
        (
            {**GOOD, "messages": [{"role": "user", "content": "\ud800"}]},
            r"messages\[0\] must have a content, which is text",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(data: object, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConversationError, match=said) as error:
        record.read(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_too_large_or_missing_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConversationError, match="No such file"):
        record.read(tmp_path / "x.json")
    (tmp_path / "y.json").write_text("[" * 100)
    with pytest.raises(ConversationError):
        record.read(tmp_path / "y.json")
    monkeypatch.setattr(record, "MAX_BYTES", 10)
    for endless in (tmp_path / "y.json", Path("/dev/zero")):
        with pytest.raises(ConversationError, match="more than 10 bytes"):
            record.read(endless)


def test_two_chats_that_go_on_with_one_conversation_lose_nothing(home: Path) -> None:
    path = record.new_path()
    record.write(path, TALK)
    one, other = record.KeptFile(path), record.KeptFile(path)
    assert not one.write(replace(TALK, system="one"))
    assert not one.write(replace(TALK, system="one again"))
    assert other.write(replace(TALK, system="other"))
    assert other.path != path
    assert not one.write(replace(TALK, system="one at last"))
    assert not other.write(replace(TALK, system="other at last"))
    assert record.read(one.path).system == "one at last"
    assert record.read(other.path).system == "other at last"
    one.path.unlink()  # by hand, or as one of the oldest
    assert not one.write(TALK)
    assert record.read(path) == TALK
