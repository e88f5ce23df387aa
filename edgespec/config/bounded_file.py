"""Files that a user names are read up to a limit, whatever they are: a device or a pipe has no size
that could be looked at before, and perhaps no end."""

from __future__ import annotations

import io
from pathlib import Path


class TooLargeError(ValueError):
    """A file holds more than is read; the message says how much, where that is known."""


def read_bytes(path: Path, most: int) -> bytes:
    """All that ``path`` holds, at most ``most`` bytes. Raises ``OSError``, ``TooLargeError``."""
    with path.open("rb") as file:
        data = file.read(most + 1)
        if len(data) > most:
            size = max(path.stat().st_size, len(data))
            raise TooLargeError(f"{size} bytes, but at most {most} are read")
    return data


def read_text(path: Path, most: int) -> str:
    """The same as UTF-8, every end of a line as a newline. Raises ``UnicodeDecodeError`` as well,
    as ``Path.read_text`` does."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), encoding="utf-8").read()
