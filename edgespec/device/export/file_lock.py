"""One process at a time, by a lock on a file that ends with its process, however that ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

if sys.platform != "win32":  # there, two that install at once are on their own
    import fcntl


class FileLock:
    """``take`` until it is True; let go at the end of the ``with`` block. The file stays, as others
    may wait on it. Raises ``OSError`` where it cannot be made."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def take(self) -> bool:
        """Is it ours now? Does not wait."""
        if sys.platform != "win32":
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._file)
