"""A recording: what a device's texts committed, in one private file, off unless ``record`` asks.

Theory of operation. It is an SQLite database of one table, a row a text: the end of its prompt, and
the tokens that were committed behind it. SQLite's lock keeps processes out of each other's way, its
journal keeps the file whole when one is killed; what is deleted is overwritten. A text that is
there already moves to the end of the row. The oldest leave when the file has reached its bound.

    tokens: 4 bytes each in the machine's order; those before ``start`` are the prompt's
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from array import array
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

PROMPT_TOKENS: Final = 256
"""Of a prompt, its last ones; a text learns from half of ``length``, and 512 is a long one."""
_MAGIC: Final = b"SQLite format 3\0"
_MARK: Final = 0x65647370
"""What tells a recording from other databases of SQLite (``PRAGMA application_id``)."""
_MARK_AT, _WORD = 68, 4
_WAIT_S: Final = 5.0  # for another process that writes
_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS texts (id INTEGER PRIMARY KEY, digest BLOB UNIQUE,"
    " vocabulary TEXT, start INTEGER, tokens BLOB)"
)


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
        try:
            with closing(self._opened()):
                pass
        except (OSError, sqlite3.Error) as error:
            raise _told(path, error) from error

    def add(self, vocabulary: str, prompt: Sequence[int], committed: Sequence[int]) -> None:
        """Another text, in ids of the tokenizer with this fingerprint; one of more than half the
        bound is left out. May wait for the disk and for other processes. Raises
        ``RecordingError``; then the recording is as it was."""
        start = min(len(prompt), PROMPT_TOKENS)
        tokens = array("i", [*prompt[len(prompt) - start :], *committed]).tobytes()
        if 2 * len(tokens) > self._most_bytes:
            return
        digest = hashlib.sha256(f"{vocabulary} {start} ".encode() + tokens).digest()[:16]
        row = (digest, vocabulary, start, tokens)
        try:
            with closing(self._opened()) as database:
                database.execute("BEGIN IMMEDIATE")
                database.execute(
                    "REPLACE INTO texts (digest, vocabulary, start, tokens) VALUES (?, ?, ?, ?)",
                    row,
                )
                while _used_bytes(database) > self._most_bytes:
                    database.execute("DELETE FROM texts WHERE id = (SELECT min(id) FROM texts)")
                database.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            raise _told(self._path, error) from error

    def _opened(self) -> sqlite3.Connection:
        """Made first where the file is not there, also where somebody removed it meanwhile."""
        path = self._path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        if path.stat().st_size and not is_recording(path):
            raise RecordingError(f"{path}: is there, but is no recording; name another file")
        path.chmod(0o600)
        database = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
        database.execute("PRAGMA secure_delete = ON")
        if not path.stat().st_size:
            database.execute("BEGIN IMMEDIATE")
            database.execute(f"PRAGMA application_id = {_MARK}")
            database.execute(_TABLE)
            database.execute("COMMIT")
        return database


def is_recording(path: Path) -> bool:
    """Whether the file begins as a recording does. Raises ``OSError``."""
    if not path.is_file():  # what is read from a pipe is gone
        return False
    with path.open("rb") as file:
        head = file.read(_MARK_AT + _WORD)
    return head.startswith(_MAGIC) and head[_MARK_AT:] == _MARK.to_bytes(_WORD, "big")


def read_recording(path: Path, vocabulary: str) -> list[RecordedText]:
    """The texts of this vocabulary, oldest first. Raises ``RecordingError``."""
    try:
        with closing(sqlite3.connect(path, timeout=_WAIT_S)) as database:
            rows = database.execute(
                "SELECT tokens, start FROM texts WHERE vocabulary = ? ORDER BY id", (vocabulary,)
            )
            return [RecordedText(array("i", tokens), start) for tokens, start in rows]
    except (OSError, sqlite3.Error) as error:
        raise _told(path, error) from error


def _told(path: Path, error: OSError | sqlite3.Error) -> RecordingError:
    if isinstance(error, OSError):
        return RecordingError(f"{error.filename or path}: {error.strerror or error}")
    return RecordingError(f"{path}: {error}")


def _used_bytes(database: sqlite3.Connection) -> int:
    page, count, free = (
        database.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_size", "page_count", "freelist_count")
    )
    return int(page) * (int(count) - int(free))
