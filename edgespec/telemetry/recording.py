"""A recording: what a device's texts committed, in one private file, off unless ``record`` asks.

Theory of operation. It is an SQLite database of one table, a row a text: the end of its prompt, and
the tokens that were committed behind it. SQLite's lock keeps processes out of each other's way, its
journal keeps the file whole when one is killed; what is deleted is overwritten. The oldest texts
leave when the file has reached its bound; one that comes again is the newest.

    tokens: 4 bytes each in the machine's order; those before ``start`` are the prompt's
"""

from __future__ import annotations

import hashlib
import os
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import sqlite3

PROMPT_TOKENS: Final = 256
"""Of a prompt, its last ones; a text learns from half of ``length``, and 512 is a long one."""
_MAGIC: Final = b"SQLite format 3\0"
_MARK: Final = 0x65647370
"""What tells a recording from other databases of SQLite (``PRAGMA application_id``)."""
_MARK_AT, _WORD = 68, 4
_HEAD_BYTES: Final = _MARK_AT + _WORD
_WAIT_S: Final = 5.0  # for another process that writes
_BEGIN: Final = (
    "PRAGMA secure_delete = ON",
    "BEGIN IMMEDIATE",
    f"PRAGMA application_id = {_MARK}",
    "CREATE TABLE IF NOT EXISTS texts (id INTEGER PRIMARY KEY, digest BLOB UNIQUE,"
    " vocabulary TEXT, start INTEGER, tokens BLOB)",
)
Execute = Callable[..., "sqlite3.Cursor"]
"""Of a statement and its values."""


class RecordingError(ValueError):
    """A recording cannot be read or written; the message names the file and why."""


class RecordedText(NamedTuple):
    """``tokens`` of which those from ``start`` on were committed; the others end the prompt."""

    tokens: array[int]
    start: int


class Recording:
    """The file at ``path``, of ``most_bytes`` and one text at most; made if it is not there.
    Raises ``RecordingError``, also for a file that is something else."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._most_bytes = path, most_bytes
        with self._transaction():
            pass

    def add(self, vocabulary: str, prompt: Sequence[int], committed: Sequence[int]) -> None:
        """Another text, in ids of the tokenizer with this fingerprint; one of more than half the
        bound is left out. May wait for the disk and for other processes. Raises
        ``RecordingError``; then the recording is as it was."""
        start = min(len(prompt), PROMPT_TOKENS)
        tokens = array("i", [*prompt[len(prompt) - start :], *committed]).tobytes()
        if 2 * len(tokens) > self._most_bytes:
            return
        digest = hashlib.sha256(f"{vocabulary} {start} ".encode() + tokens).digest()[:16]
        with self._transaction() as execute:
            execute(
                "REPLACE INTO texts VALUES (NULL, ?, ?, ?, ?)", digest, vocabulary, start, tokens
            )
            names = ("page_size", "page_count", "freelist_count")
            while True:
                size, count, free = (int(execute(f"PRAGMA {n}").fetchone()[0]) for n in names)
                if size * (count - free) <= self._most_bytes:
                    break
                execute("DELETE FROM texts WHERE id = (SELECT min(id) FROM texts)")

    @contextmanager
    def _transaction(self) -> Iterator[Execute]:
        """The file is made first if it is not there, also where somebody removed it meanwhile."""
        import sqlite3

        path = self._path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(path)
            with closing(sqlite3.connect(path, _WAIT_S, isolation_level=None)) as database:
                for statement in _BEGIN:
                    database.execute(statement)
                yield lambda statement, *values: database.execute(statement, values)
                database.execute("COMMIT")
        except OSError as error:
            raise RecordingError(f"{error.filename or path}: {error.strerror or error}") from error
        except sqlite3.Error as error:
            raise RecordingError(f"{path}: {error}") from error


def _make_private(path: Path) -> None:
    """Make the recording at ``path`` if nothing is there, readable for its owner alone. Nothing
    else is touched: by its descriptor, so that no other file can take the place of the one that was
    looked at. Raises ``OSError``, and ``RecordingError`` for something else."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise RecordingError(f"{path}: is no regular file; name another")
        if found.st_size and not _begins_as_recording(os.pread(handle, _HEAD_BYTES, 0)):
            raise RecordingError(f"{path}: is there, but is no recording; name another file")
        os.fchmod(handle, 0o600)
    finally:
        os.close(handle)


def is_recording(path: Path) -> bool:
    """Whether ``path`` is a regular file that begins as a recording does. Raises ``OSError``."""
    if not path.is_file():  # what is read from a pipe is gone
        return False
    with path.open("rb") as file:
        return _begins_as_recording(file.read(_HEAD_BYTES))


def _begins_as_recording(head: bytes) -> bool:
    return head.startswith(_MAGIC) and head[_MARK_AT:] == _MARK.to_bytes(_WORD, "big")


def read_recording(path: Path, vocabulary: str) -> list[RecordedText]:
    """The texts of this vocabulary, oldest first. Raises ``RecordingError``."""
    import sqlite3

    chosen = "SELECT tokens, start FROM texts WHERE vocabulary = ? ORDER BY id"
    try:
        with closing(sqlite3.connect(path, _WAIT_S)) as database:
            rows = database.execute(chosen, (vocabulary,))
            return [RecordedText(array("i", tokens), start) for tokens, start in rows]
    except sqlite3.Error as error:
        raise RecordingError(f"{path}: {error}") from error
