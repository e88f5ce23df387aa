"""Files that are written as a whole or not at all, and read up to a limit.

A device or a pipe has no size that could be looked at before, and perhaps no end."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tempfile
from pathlib import Path

PRIVATE = 0o600
_PERMISSIONS = 0o777


def replace_file(
    path: Path, content: bytes | str, mode: int = PRIVATE, *, keeps_owner: bool = False
) -> None:
    """Put ``content`` at ``path``, with these permissions, in one step; text as UTF-8. What was
    there stays until then, and on the disk until the new content is there. Raises ``OSError``, and
    ``UnicodeEncodeError`` for text that has no UTF-8; then ``path`` is as it was, and nothing is
    left beside it. ``keeps_owner``: a file that is there keeps its permissions, and its owner and
    group where this process may give files away."""
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
    for owner in (before.st_uid, -1):
        with contextlib.suppress(OSError):  # not permitted, or unknown to a container
            os.chown(handle, owner, before.st_gid)
            return kept
    return kept & ~stat.S_IRWXG  # it has another group, which was granted nothing


def user_folder(variable: str, usual: str, advice: str) -> Path:
    """edgespec's folder in the one that the environment's ``variable`` names, by default in
    ``usual`` in the user's home. Raises ``OSError``, with ``advice``, where this user has none."""
    if base := os.environ.get(variable):
        return Path(base) / "edgespec"
    try:
        return Path.home() / usual / "edgespec"
    except RuntimeError as error:
        raise OSError(f"this user has no home folder: set HOME or {variable}{advice}") from error


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
