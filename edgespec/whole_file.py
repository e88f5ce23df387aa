"""Files that are there as a whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

PRIVATE = 0o600


def replace_file(path: Path, content: bytes | str, mode: int = PRIVATE) -> None:
    """Put ``content`` at ``path``, with these permissions, in one step; text as UTF-8.

    What was there stays until then, and on the disk until the new content is there. Raises
    ``OSError``, and ``UnicodeEncodeError`` for text that has no UTF-8; then ``path`` is as it was,
    and nothing is left beside it.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, mode)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
