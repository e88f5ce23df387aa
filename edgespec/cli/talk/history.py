"""What a user typed into chats, kept in a file of their own, newest last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from prompt_toolkit.history import FileHistory

from edgespec.cli.talk.record import private_folder, state_folder
from edgespec.config.whole_file import PRIVATE, replace_file

_MOST_ENTRIES: Final = 1000
_MOST_BYTES: Final = 4 << 20
_BETWEEN: Final = b"\n# "
"""Each entry begins with a comment that tells when."""


class TypedHistory(FileHistory):
    """A history that goes without its file where that cannot be written: no message is lost to a
    full disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._trouble: OSError | None = None
        self._told = False

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError as error:
            self._trouble = error

    def trouble(self) -> str:
        """Why what was typed is not kept, in words, the first time this is asked; else empty."""
        if self._trouble is None or self._told:
            return ""
        self._told = True
        why = self._trouble.strerror or str(self._trouble)
        return f"{os.fspath(self.filename)!s}: what you type is not kept: {why}"


def history_file() -> Path | None:
    """The file of what was typed before, its oldest entries dropped; None where none can be."""
    try:
        path = state_folder() / "chat_history"
        private_folder(path.parent)
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE)
        with os.fdopen(number, "rb") as file:
            os.fchmod(number, PRIVATE)
            size = os.fstat(number).st_size
            file.seek(max(0, size - _MOST_BYTES))
            text = file.read()
        entries = text.split(_BETWEEN)
        if size > _MOST_BYTES or len(entries) > _MOST_ENTRIES:
            newest = entries[1:][-_MOST_ENTRIES // 2 :]  # the first may have lost its beginning
            replace_file(path, b"".join(_BETWEEN + entry for entry in newest))
    except OSError:
        return None
    return path
