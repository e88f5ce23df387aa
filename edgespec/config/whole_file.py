"""Files that are there as a whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from pathlib import Path

PRIVATE = 0o600
_PERMISSIONS = 0o777


def replace_file(
    path: Path, content: bytes | str, mode: int = PRIVATE, *, keeps_owner: bool = False
) -> None:
    """Put ``content`` at ``path``, with these permissions, in one step; text as UTF-8.

    What was there stays until then, and on the disk until the new content is there. Raises
    ``OSError``, and ``UnicodeEncodeError`` for text that has no UTF-8; then ``path`` is as it was,
    and nothing is left beside it. ``keeps_owner``: a file that is there keeps its permissions, and
    its owner and group where this process may give files away.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if keeps_owner:
                mode = _given_away(handle, path, mode)
            # By its descriptor: who owns the folder could put something else under its name.
            os.chmod(handle if os.chmod in os.supports_fd else draft, mode)
            os.fsync(handle)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _given_away(handle: int, path: Path, mode: int) -> int:
    """The mode for the file behind ``handle``, which now belongs to whom ``path`` does, if that is
    there and this process may; ``mode`` where it is not."""
    try:
        before = os.stat(path)
    except FileNotFoundError:
        return mode
    kept = stat.S_IMODE(before.st_mode) & _PERMISSIONS
    if sys.platform == "win32":
        return kept
    for owner in (before.st_uid, -1):
        with contextlib.suppress(OSError):  # not permitted, or unknown to a container
            os.chown(handle, owner, before.st_gid)
            return kept
    return kept & ~stat.S_IRWXG  # it has another group, which was granted nothing
