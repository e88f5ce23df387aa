"""A recording: the tokens that a device's generations committed, in one private file. It exists
only if ``record`` is set.

Theory of operation. The file is an SQLite database of one table with a row for each generation: the
end of its prompt, and the committed tokens behind it. SQLite's lock separates processes that write
at the same time, and its journal keeps the file whole if one is killed. Deleted content is
overwritten. The oldest rows are deleted when the file has reached its limit; a generation that is
recorded again becomes the newest row.

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

from edgespec import operating_system

if TYPE_CHECKING:
    import sqlite3

PROMPT_TOKENS: Final = 256
"""Number of prompt tokens that are kept, counted from its end. Training uses half of ``length`` for
the prompt, and a ``length`` of 512 is large."""
_MAGIC: Final = b"SQLite format 3\0"
_APPLICATION_ID: Final = 0x65647370
"""Mark that distinguishes a recording from other SQLite databases (``PRAGMA application_id``)."""
_APPLICATION_ID_AT, _WORD_BYTES = 68, 4
_HEAD_BYTES: Final = _APPLICATION_ID_AT + _WORD_BYTES
_LOCK_WAIT_S: Final = 5.0  # wait for another process's write
_BEGIN: Final = (
    "PRAGMA secure_delete = ON",
    "BEGIN IMMEDIATE",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    "CREATE TABLE IF NOT EXISTS texts (id INTEGER PRIMARY KEY, digest BLOB UNIQUE,"
    " vocabulary TEXT, start INTEGER, tokens BLOB)",
)
Execute = Callable[..., "sqlite3.Cursor"]
"""A function that executes a statement with its values."""


class RecordingError(ValueError):
    """A recording cannot be read or written. The message names the file and the reason."""


class RecordedText(NamedTuple):
    """A recorded row: the tokens from ``start`` on were committed, the others end the prompt."""

    tokens: array[int]
    start: int


class Recording:
    """The recording at ``path``, created if it does not exist. It grows to ``max_bytes`` plus one
    row at most. Raises ``RecordingError``, also if the file is not a recording."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._most_bytes = path, max_bytes
        with self._transaction():
            pass

    def add(self, vocabulary: str, prompt: Sequence[int], committed: Sequence[int]) -> None:
        """Add a generation, in token ids of the tokenizer with this fingerprint. A generation
        larger than half the limit is left out. May wait for the disk and for other processes.
        Raises ``RecordingError``; then the recording is unchanged."""
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
        """Open a transaction. The file is created first if it does not exist, also if it was
        removed since."""
        import sqlite3

        path = self._path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(path)
            with closing(sqlite3.connect(path, _LOCK_WAIT_S, isolation_level=None)) as database:
                for statement in _BEGIN:
                    database.execute(statement)
                yield lambda statement, *values: database.execute(statement, values)
                database.execute("COMMIT")
        except OSError as error:
            raise RecordingError(f"{error.filename or path}: {error.strerror or error}") from error
        except sqlite3.Error as error:
            raise RecordingError(f"{path}: {error}") from error


def _make_private(path: Path) -> None:
    """Create the file at ``path`` if it does not exist, readable by its owner alone. The checks and
    the change of permissions use one descriptor, so no other file can be put in its place in
    between. Raises ``OSError``, and ``RecordingError`` if the file is not a recording."""
    flags = os.O_RDWR | os.O_CREAT | operating_system.OPEN_AT_ONCE
    descriptor = os.open(path, flags, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RecordingError(f"{path}: is no regular file; name another")
        if status.st_size and not _begins_as_recording(os.read(descriptor, _HEAD_BYTES)):
            raise RecordingError(f"{path}: is there, but is no recording; name another file")
        operating_system.set_file_mode(descriptor, path, 0o600)
    finally:
        os.close(descriptor)


def is_recording(path: Path) -> bool:
    """Return whether ``path`` is a regular file with the head of a recording. Raises
    ``OSError``."""
    if not path.is_file():  # reading would consume the data of a pipe
        return False
    with path.open("rb") as file:
        return _begins_as_recording(file.read(_HEAD_BYTES))


def _begins_as_recording(head: bytes) -> bool:
    return head.startswith(_MAGIC) and head[_APPLICATION_ID_AT:] == _APPLICATION_ID.to_bytes(
        _WORD_BYTES, "big"
    )


def read_recording(path: Path, vocabulary: str) -> list[RecordedText]:
    """Return the rows of this vocabulary, oldest first. Raises ``RecordingError``."""
    import sqlite3

    chosen = "SELECT tokens, start FROM texts WHERE vocabulary = ? ORDER BY id"
    try:
        with closing(sqlite3.connect(path, _LOCK_WAIT_S)) as database:
            rows = database.execute(chosen, (vocabulary,))
            return [RecordedText(array("i", tokens), start) for tokens, start in rows]
    except sqlite3.Error as error:
        raise RecordingError(f"{path}: {error}") from error
