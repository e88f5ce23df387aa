"""Digests of large files, which are kept in the cache so that a file is read once.

A digest is kept under the file's path, size, times and inode. A file that changed in the last
seconds is read each time, because another change could leave size and times as they are.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from edgespec.config.files import replace_file

_KEPT_FROM_BYTES: Final = 16 << 20
"""Smaller files are read each time, which takes hundredths of a second."""
_SETTLED_AFTER_S: Final = 2.0
"""Coarsest step of a file system's times (FAT)."""
_MAX_KEPT: Final = 64
_DIGEST_BYTES: Final = 32


def compute_file_digest(path: Path, cache: Path) -> bytes:
    """Return the digest of a file's content (BLAKE2b, 32 bytes), which is kept below ``cache``.

    The digest is computed where the cache cannot be read or written. Raises ``OSError`` for the
    file itself."""
    status = path.stat()
    if status.st_size < _KEPT_FROM_BYTES or _was_changed_lately(status):
        return _read_digest(path)
    name = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    key = hashlib.blake2b(f"{name} {status.st_ino}".encode(), digest_size=16).hexdigest()
    kept = cache / "digests" / key
    with suppress(OSError):
        if len(found := kept.read_bytes()) == _DIGEST_BYTES:
            return found
    found = _read_digest(path)
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_file(kept, found)
        _remove_oldest(kept.parent)
    return found


def _was_changed_lately(status: os.stat_result) -> bool:
    return time.time() - max(status.st_mtime, status.st_ctime) < _SETTLED_AFTER_S


def _read_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)
        ).digest()


def _remove_oldest(folder: Path) -> None:
    """Delete the digests that were kept first, beyond ``_MAX_KEPT``."""
    kept = sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime)
    for old in kept[: max(0, len(kept) - _MAX_KEPT)]:
        old.unlink(missing_ok=True)
