"""Tests of which files of a folder a corpus takes. Oracles: git itself, for what is ignored; a list
by hand, for the rest."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from edgespec.device import corpus_files
from edgespec.device.corpus_files import (
    CorpusFolders,
    FoundFiles,
    SkippedFileError,
    describe_files,
    read_file,
)


def make(root: Path, *names: str, content: str = "text") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def find(*paths: Path, max_bytes: int = 1 << 20) -> FoundFiles:
    return CorpusFolders([str(path) for path in paths], max_bytes).find_files()


def names_in(found: FoundFiles, root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in found.stamps]


def list_by_git(root: Path) -> list[str]:
    """Return the files that git does not ignore and that have no hidden part, by name."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--others", "--exclude-standard"]
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    listed = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    names = [name.decode() for name in listed.split(b"\0") if name]
    return sorted(
        [one for one in names if not any(part.startswith(".") for part in one.split("/"))],
        key=lambda one: root / one,
    )


RULES = (
    *("*.log", "!keep.log", "/build", "build/", "src/*.py", "**/cache", "docs/**", "!docs/a.md"),
    *("a.?y", "[ab].txt", "# a comment", "", "  ", "\\#odd", "\\!odd", "deep/**/x.py", "!/src/"),
    *("node_modules", "tmp/*", "!tmp/keep.log", "*.py[co]", "[", "trailing\\ ", "/src/a.py"),
)
NAMES = (
    *("a.py", "keep.log", "b.log", "a.txt", "c.txt", "a.md", "x.py", "x.pyc", "#odd", "!odd"),
    *("build", "cache", "trailing "),
)
FOLDERS = ("", "src", "build", "docs", "deep/one", "deep/two/three", "tmp", "node_modules/m")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("seed", range(12))
def test_a_folder_gives_what_git_does_not_ignore(tmp_path: Path, seed: int) -> None:
    dice, root = random.Random(seed), tmp_path / "project"
    root.mkdir()
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for folder in FOLDERS:
        for name in dice.sample(NAMES, 6):
            if not (root / folder / name).exists():
                make(root / folder, name)
    for folder in ("", *dice.sample(FOLDERS[1:], 2)):
        make(root / folder, ".gitignore", content="\n".join(dice.sample(RULES, 6)) + "\n")
    wanted = list_by_git(root)
    assert names_in(find(root), root) == wanted
    below = root / "deep"  # Rules above a named folder count, up to the root of the repository.
    assert names_in(find(below), root) == [one for one in wanted if one.startswith("deep/")]


def test_rules_are_read_again_when_they_change(tmp_path: Path) -> None:
    make(tmp_path, "a.txt", "b.txt", "c/a.txt")
    folders = CorpusFolders([str(tmp_path)])
    assert names_in(folders.find_files(), tmp_path) == ["a.txt", "b.txt", "c/a.txt"]
    make(tmp_path, ".gitignore", content="a.txt\n")
    assert names_in(folders.find_files(), tmp_path) == ["b.txt"]
    make(tmp_path, "c/.gitignore", content="!a.txt\n")
    assert names_in(folders.find_files(), tmp_path) == ["b.txt", "c/a.txt"]
    (tmp_path / ".gitignore").unlink()
    make(tmp_path, "c/.gitignore", content="*\n# longer than before\n")
    assert names_in(folders.find_files(), tmp_path) == ["a.txt", "b.txt"]
    shutil.rmtree(tmp_path / "c")
    assert names_in(folders.find_files(), tmp_path) == ["a.txt", "b.txt"]


def test_what_is_left_out_is_counted_by_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_files, "_MAX_DEPTH", 3)
    make(
        tmp_path, "a.txt", ".hidden", ".git/b.txt", "one/b.txt", "one/2/3/c.txt", "one/2/3/4/d.txt"
    )
    (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    (tmp_path / "one" / "loop").symlink_to(tmp_path)
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    found = find(tmp_path)
    assert names_in(found, tmp_path) == ["a.txt", "one/2/3/c.txt", "one/b.txt"]
    assert found.skipped == {
        "links": 3,
        "no regular files": 1,
        "over 1 MiB": 1,
        corpus_files.DEEP: 1,
    }


def test_the_files_that_changed_last_are_taken_if_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("d", "c", "b", "a", "named")):
        make(tmp_path, name, content="x" * 10)
        os.utime(tmp_path / name, (1_000_000 + number, 1_000_000 + number))
    found = find(tmp_path, tmp_path / "d", max_bytes=35)
    assert names_in(found, tmp_path) == ["a", "d", "named"]
    assert [*found.skipped.values()] == [2]
    assert found.named == {tmp_path / "d"}
    monkeypatch.setattr(corpus_files, "MAX_FILES", 2)
    found = find(tmp_path)
    assert names_in(found, tmp_path) == ["a", "named"]
    assert found.skipped == {corpus_files.TOO_MANY: 3}
    monkeypatch.setattr(corpus_files, "_MAX_SEEN", 1)
    assert len(find(tmp_path).stamps) == 1


def test_a_hidden_or_ignored_file_is_taken_if_it_is_named(tmp_path: Path) -> None:
    make(tmp_path, "a.log", ".env", ".gitignore", content="*.log\n")
    found = find(tmp_path / "a.log", tmp_path / ".env")
    assert names_in(found, tmp_path) == [".env", "a.log"]


def test_a_path_that_is_gone_is_an_error_only_at_the_start(tmp_path: Path) -> None:
    folders = CorpusFolders([str(tmp_path / "none")])
    with pytest.raises(FileNotFoundError):
        folders.find_files(all_named=True)
    assert folders.find_files() == FoundFiles(skipped=folders.find_files().skipped)
    assert folders.find_files().skipped == {"vanished": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xd8\xff", "binary"),
        (b"text\0more", "binary"),
        ("caf\xe9".encode("latin-1"), "binary"),
        (b"x" * ((1 << 20) + 1), "over 1 MiB"),
        (None, "vanished"),
        ("caf\xe9 \N{SNOWMAN}".encode(), ""),
        (b"", ""),
    ],
)
def test_a_file_is_read_if_it_is_text(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    if reason:
        with pytest.raises(SkippedFileError, match=f"^{reason}$"):
            read_file(path)
    else:
        assert read_file(path) == content


def test_what_may_not_be_read_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's refusals are made up, since the tests may run as root."""
    make(tmp_path, "a.txt", "secret/b.txt", "c.txt")

    def refuse(path: Path, *_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    real = os.scandir
    monkeypatch.setattr(
        os, "scandir", lambda path: refuse(path) if path.name == "secret" else real(path)
    )
    found = find(tmp_path)
    assert names_in(found, tmp_path) == ["a.txt", "c.txt"]
    assert found.skipped == {"unreadable": 1}
    monkeypatch.setattr(corpus_files, "read_bytes", refuse)
    with pytest.raises(SkippedFileError, match="unreadable"):
        read_file(tmp_path / "c.txt")


def test_files_are_described_in_one_line() -> None:
    skipped = FoundFiles().skipped
    assert describe_files(1, skipped) == "1 file"
    skipped.update({"binary": 3, "over 1 MiB": 1})
    assert describe_files(153, skipped) == "153 files, 4 skipped: binary 3, over 1 MiB 1"
