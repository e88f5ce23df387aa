"""Files of ``draft.corpus``: what lies in its folders, and what is left out.

Left out of a folder are hidden names and what a ``.gitignore`` names (in the folder, in the folders
below it, and in those above it up to the root of its repository), without a word. Links, what is no
regular file, and files that are large, binary or unreadable are left out too, and counted by the
reason. A file that is named itself is always taken. If there are more files or bytes than a corpus
holds, the ones that changed last are taken, since they are being worked on.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgespec.config.files import read_bytes

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_CORPUS_BYTES: Final = 32 << 20
"""Most bytes of text in a corpus."""
MAX_FILE_BYTES: Final = 1 << 20
"""Most bytes of a file in a folder. Larger ones are data or made by a program, as a rule."""
MAX_FILES: Final = 1 << 14
"""Most files in a corpus. They are looked at again while the device runs."""
_MAX_SEEN: Final = 1 << 17
"""Most names in all folders that are looked at."""
_MAX_DEPTH: Final = 64
_IGNORE_FILE: Final = ".gitignore"
_MAX_IGNORE_BYTES: Final = 1 << 18
_MAX_KNOWN: Final = 1 << 16

LARGE: Final = f"over {MAX_FILE_BYTES >> 20} MiB"
BINARY: Final = "binary"
LINK: Final = "links"
NO_FILE: Final = "no regular files"
UNREADABLE: Final = "unreadable"
VANISHED: Final = "vanished"
TOO_MANY: Final = f"beyond {MAX_FILES} files"
DEEP: Final = f"deeper than {_MAX_DEPTH} folders"


@dataclass(frozen=True, slots=True)
class Stamp:
    """Signs of a change of a file that are seen without reading it."""

    size_bytes: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(slots=True)
class FoundFiles:
    """The files of a corpus, in the order of their names."""

    stamps: dict[Path, Stamp] = field(default_factory=dict)
    named: set[Path] = field(default_factory=set)
    """The files that were named themselves, not by their folder."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of files that are left out, by the reason."""


class CorpusFolders:
    """Files and folders that a user named, which are looked through again and again.

    ``max_bytes``: most bytes of text that are taken."""

    def __init__(self, names: Sequence[str], max_bytes: int = MAX_CORPUS_BYTES) -> None:
        self.paths = [Path(name).expanduser().absolute() for name in names]
        self._most_bytes = max_bytes
        self._rules = _IgnoreRules()

    def find_files(self, *, all_named: bool = False) -> FoundFiles:
        """Look through the folders. Raises ``OSError`` with ``all_named`` if a named path is not
        there; else it is counted."""
        found, in_folders = FoundFiles(), dict[Path, Stamp]()
        self._rules.begin()
        for path in self.paths:
            try:
                status = path.stat()
            except OSError as error:
                if all_named:
                    raise
                found.skipped[_reason_of(error)] += 1
                continue
            if stat.S_ISDIR(status.st_mode):
                in_folders |= self._walk(path, found.skipped)
            else:
                found.stamps[path] = Stamp.of(status)
                found.named.add(path)
        room = self._most_bytes - sum(one.size_bytes for one in found.stamps.values())
        count = len(found.stamps)
        latest = sorted(in_folders.items(), key=lambda one: one[1].modified_ns, reverse=True)
        for path, stamp in latest:
            if path in found.stamps:
                continue
            if count == MAX_FILES:
                found.skipped[TOO_MANY] += 1
            elif stamp.size_bytes > room:
                found.skipped[f"over {self._most_bytes / (1 << 20):.3g} MiB together"] += 1
            else:
                found.stamps[path] = stamp
                room -= stamp.size_bytes
                count += 1
        found.stamps = dict(sorted(found.stamps.items()))
        return found

    def _walk(self, top: Path, skipped: Counter[str]) -> dict[Path, Stamp]:
        """Return the files below ``top``. What cannot be looked at is counted."""
        found, seen = dict[Path, Stamp](), 0
        folders = [(top, 0)]
        while folders:
            folder, depth = folders.pop()
            try:
                with os.scandir(folder) as entries:
                    names = sorted(entries, key=lambda one: one.name)
            except OSError as error:
                skipped[_reason_of(error)] += 1
                continue
            self._rules.enter(folder, is_top=folder == top)
            for entry in names:
                if entry.name.startswith("."):
                    continue
                if (seen := seen + 1) > _MAX_SEEN:
                    skipped[TOO_MANY] += 1
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError as error:
                    skipped[_reason_of(error)] += 1
                    continue
                is_folder, path = stat.S_ISDIR(status.st_mode), Path(entry.path)
                if self._rules.ignores(path, is_folder=is_folder):
                    continue
                if is_folder:
                    if depth == _MAX_DEPTH:
                        skipped[DEEP] += 1
                    else:
                        folders.append((path, depth + 1))
                elif stat.S_ISLNK(status.st_mode):
                    skipped[LINK] += 1
                elif not stat.S_ISREG(status.st_mode):
                    skipped[NO_FILE] += 1
                elif status.st_size > MAX_FILE_BYTES:
                    skipped[LARGE] += 1
                else:
                    found[path] = Stamp.of(status)
        return found


def _reason_of(error: OSError) -> str:
    return VANISHED if isinstance(error, FileNotFoundError) else UNREADABLE


class SkippedFileError(Exception):
    """A file is left out. The message is the reason, as it is counted."""


def read_file(path: Path) -> bytes:
    """Return the content of a file in a folder, which is UTF-8 text without a zero byte.

    Raises ``SkippedFileError``, also if the file vanished or grew since it was found."""
    try:
        content = read_bytes(path, MAX_FILE_BYTES)
    except OSError as error:
        raise SkippedFileError(_reason_of(error)) from None
    except ValueError:
        raise SkippedFileError(LARGE) from None
    if not is_text(content):
        raise SkippedFileError(BINARY)
    return content


def is_text(content: bytes) -> bool:
    """Return whether ``content`` is UTF-8 text. Text has no zero byte."""
    if b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def describe_files(count: int, skipped: Counter[str]) -> str:
    """Return the number of files, and how many are left out for which reason, such as
    ``153 files, 4 skipped: binary 3, over 1 MiB 1``."""
    files = f"{count} file{'s' if count != 1 else ''}"
    if not (total := skipped.total()):
        return files
    reasons = ", ".join(f"{reason} {number}" for reason, number in skipped.most_common() if number)
    return f"{files}, {total} skipped: {reasons}"


# --- .gitignore -----------------------------------------------------------------------------------


class _IgnoreRules:
    """The ``.gitignore`` files of the folders that are walked, each read again when it has changed.
    Decisions are kept until then, since matching takes longer than looking at a file."""

    def __init__(self) -> None:
        self._specs: dict[Path, tuple[Stamp, GitIgnoreSpec]] = {}
        self._seen: set[Path] = set()
        """Folders whose rules were looked for since ``begin``."""
        self._known: dict[Path, bool] = {}

    def begin(self) -> None:
        """Begin to look through the folders once more."""
        for gone in [one for one in self._specs if one not in self._seen]:
            del self._specs[gone]
            self._known.clear()
        self._seen.clear()

    def enter(self, folder: Path, *, is_top: bool) -> None:
        """Read the rules of a folder, and with ``is_top`` the ones above it in its repository."""
        if is_top:
            for parent in _list_folders_of_repository(folder):
                self._look_for(parent)
        self._look_for(folder)

    def ignores(self, path: Path, *, is_folder: bool) -> bool:
        """Return whether git leaves out this path. The rules of the deepest folder come first."""
        decision = self._known.get(path)
        if decision is None:
            decision = self._decide(path, is_folder)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[path] = decision
        return decision

    def _decide(self, path: Path, is_folder: bool) -> bool:
        if self._specs:
            for parent in path.parents:
                if (rules := self._specs.get(parent)) is not None:
                    name = path.relative_to(parent).as_posix() + "/" * is_folder
                    if (include := rules[1].check_file(name).include) is not None:
                        return include
        return False

    def _look_for(self, folder: Path) -> None:
        if folder in self._seen:
            return
        self._seen.add(folder)
        path, before = folder / _IGNORE_FILE, self._specs.get(folder)
        try:
            stamp = Stamp.of(path.stat())
            if before is not None and before[0] == stamp:
                return
            content = read_bytes(path, _MAX_IGNORE_BYTES)
        except (OSError, ValueError):  # There is none, or it cannot be read.
            if self._specs.pop(folder, None) is not None:
                self._known.clear()
            return
        from pathspec import GitIgnoreSpec

        self._specs[folder] = stamp, _read_rules(content, GitIgnoreSpec)
        self._known.clear()


def _read_rules(content: bytes, spec: type[GitIgnoreSpec]) -> GitIgnoreSpec:
    """Return the rules in a file. Lines that are no rules are left out, as git does."""
    rules = []
    for line in content.decode(errors="replace").splitlines():
        try:
            spec.from_lines([line])
        except ValueError:
            continue
        rules.append(line)
    return spec.from_lines(rules)


def _list_folders_of_repository(folder: Path) -> Iterator[Path]:
    """Yield the folders above ``folder`` up to the root of its repository, if it is in one."""
    above = [*folder.parents]
    root = next((one for one in (folder, *above) if (one / ".git").exists()), None)
    if root is not None and root != folder:
        yield from above[: above.index(root) + 1]
