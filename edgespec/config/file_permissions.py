"""Permissions of settings, which others must not write, and of secrets, which only owners read."""

from __future__ import annotations

import logging
import os
import shlex
import stat
from functools import cache, partial
from pathlib import Path

from edgespec.config.loading import ConfigError
from edgespec.operating_system import HAS_FILE_MODES

_LOG = logging.getLogger(__name__)


def check_file_permissions(path: Path, *, secret: bool) -> None:
    """Raise ``ConfigError`` for a file that others can write.

    Log a warning, once, for a ``secret`` file that others can read. A missing file is left to its
    reader. "Others" are users who are neither the owner nor in the group: a container's secrets are
    mounted for a group (0440, 0640), and many users have a group of their own (umask 002). A link
    is judged by its target. On Windows the mode does not describe others."""
    try:
        found = os.stat(path).st_mode
    except OSError:
        return
    # The mode of a pipe or a device does not show who writes into it.
    if not HAS_FILE_MODES or not stat.S_ISREG(found):
        return
    mode = stat.S_IMODE(found)
    name = shlex.quote(str(path))
    if mode & stat.S_IWOTH:
        advice = f"chmod {'600' if secret else 'o-w'} {name}"
        raise ConfigError(f"{path}: others can write this file (mode {mode:04o}); run: {advice}")
    if secret and mode & stat.S_IROTH:
        _warn_once(f"{path}: others can read this secret (mode {mode:04o}); run: chmod 600 {name}")


_warn_once = cache(partial(_LOG.warning, "%s"))


def checked_path(name: str, *, secret: bool = False) -> Path:
    """Return the path of ``name``, in which ``~`` is a home, after ``check_file_permissions``."""
    path = Path(os.path.expanduser(name))
    check_file_permissions(path, secret=secret)
    return path
