"""Folders that are written beside their place and moved there as a whole, or not at all.

A process that is killed leaves its folder behind. The next one that writes beside the same place
takes such folders away, and no others: whoever writes into one holds a lock on it, which ends with
its process, however that ends. Where there are no such locks nothing is taken away.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

# As ``tempfile`` makes names, so that nobody else's folder is taken for one of these.
_MADE = "[a-z0-9_]{8}"


@contextmanager
def work_folder(beside: Path, prefix: str) -> Iterator[Path]:
    """An empty folder in the folder ``beside``, for this user alone, to be moved from there; what
    is left of it in the end is deleted. ``prefix`` is of these folders only. Raises ``OSError``."""
    beside.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # it may be one that is not to be read
        for left in list(beside.iterdir()):
            if re.fullmatch(re.escape(prefix) + _MADE, left.name):
                _delete_if_left(left)
    folder, lock = _locked(beside, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(beside: Path, prefix: str) -> tuple[Path, int | None]:
    """A new folder and the file descriptor that locks it; None: there are no locks here."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=beside))
        try:
            lock = _take(folder)
        except BlockingIOError:
            continue  # another process has found it before it was locked, and deletes it
        except FileNotFoundError:
            continue  # and was done with that
        except OSError:
            return folder, None
        if lock is None or folder.is_dir():
            return folder, lock
        os.close(lock)


def _delete_if_left(folder: Path) -> None:
    """Unless its process lives, or it is not known whether it does."""
    try:
        if folder.is_symlink():
            return
        lock = _take(folder)
    except OSError:
        return
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _take(folder: Path) -> int | None:
    """A lock on the folder itself, which moves with it and leaves nothing in it; None: this system
    has none. Raises ``BlockingIOError`` where another process has it, ``OSError``."""
    if sys.platform == "win32":
        return None
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(handle)
        raise
    return handle
