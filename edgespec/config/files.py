"""Reading and writing of files that users name: writes are atomic, and reads have a limit.

A user may name anything. A device or a pipe has no size to check in advance and perhaps no end, and
opening a pipe waits for its other end, which may never come. So no function of this file waits for
another process for longer than ``PATIENCE_S``, and only regular files are replaced.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final, TextIO

from edgespec import operating_system
from edgespec.operating_system import STOPPING_SIGNALS

PRIVATE = 0o600
PATIENCE_S: Final = 30.0
"""Longest wait for the next byte from a pipe or a terminal."""
_PART_BYTES: Final = 1 << 20
_PERMISSIONS = 0o777


def replace_file(
    path: Path, content: bytes | bytearray | str, mode: int = PRIVATE, *, keeps_owner: bool = False
) -> None:
    """Write ``content`` to the file at ``path`` in one step.

    A reader sees the old content or the new one, never a part, even after a power failure. If
    ``path`` is a symbolic link, the file behind it is replaced.

    ``content``: bytes, or text that is written as UTF-8.
    ``mode``: permissions of the new file.
    ``keeps_owner``: an existing file keeps its permissions, and its owner and group where this
    process may give files away.

    Raises ``OSError``, also if ``path`` is a device, a pipe or a folder, and ``UnicodeEncodeError``
    for text that UTF-8 cannot hold. After an error ``path`` is unchanged, and no temporary file is
    left beside it."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    path = Path(os.path.realpath(path))
    if not _is_replaceable(path):
        raise OSError(errno.EINVAL, "is no regular file; name another", str(path))
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if keeps_owner:
                mode = _give_to_owner_of(handle, path, mode)
            operating_system.set_file_mode(handle, draft, mode)
            os.fsync(handle)
        operating_system.move_path(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _is_replaceable(path: Path) -> bool:
    """Return whether ``path`` is a regular file or does not exist."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return True


def write_output(path: Path, text: str) -> None:
    """Write a result to the file that a user named, and make its folder.

    A regular file is replaced in one step, so it is either complete or unchanged. Text for a device
    or a pipe (``/dev/stdout``) is written to it. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_replaceable(path):
        replace_file(path, text, 0o644, keeps_owner=True)
    else:
        with open_to_write(path) as file:
            file.write(text)


def open_to_write(path: Path) -> TextIO:
    """Open ``path`` for writing UTF-8 text, like ``open(path, "w")``, without waiting for the
    reader of a pipe. Raises ``OSError``."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | operating_system.OPEN_AT_ONCE
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            why = "is a pipe without a reader, or a socket"
            raise OSError(errno.ENXIO, why, str(path)) from None
        raise
    operating_system.set_blocking(handle)
    return open(handle, "w", encoding="utf-8")


def _give_to_owner_of(handle: int, path: Path, mode: int) -> int:
    """Give the open file to the owner and group of ``path``, as far as this process may, and return
    the permissions that it should get: the permissions of ``path``, or ``mode`` if ``path`` does
    not exist.
    """
    try:
        before = os.stat(path)
    except FileNotFoundError:
        return mode
    kept = stat.S_IMODE(before.st_mode) & _PERMISSIONS
    for owner in (before.st_uid, -1):
        if operating_system.give_file(handle, owner, before.st_gid):
            return kept
    return kept & ~stat.S_IRWXG  # the file's group is another one, which was granted nothing


_TEMPORARY: set[Path] = set()


@contextlib.contextmanager
def temporary_folder(beside: Path | None = None, prefix: str = "edgespec-") -> Iterator[Path]:
    """Make an empty folder for this block, and delete it at the end.

    A signal that would end this process deletes the folder first; so does
    ``remove_temporary_folders``. ``beside`` is the parent folder, by default the system's folder
    for temporary files. Raises ``OSError``."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=beside))
    _TEMPORARY.add(folder)
    replaced = []
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING_SIGNALS:
            # Any other handler unwinds the stack, and so reaches the ``finally`` below.
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _remove_and_exit)
                replaced.append(number)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _TEMPORARY.discard(folder)
        for number in replaced:
            if signal.getsignal(number) is _remove_and_exit:
                signal.signal(number, signal.SIG_DFL)


def remove_temporary_folders() -> None:
    """Delete every folder that ``temporary_folder`` made. Call it before an ``os._exit``."""
    for folder in list(_TEMPORARY):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_and_exit(number: int, frame: FrameType | None) -> None:
    remove_temporary_folders()
    os._exit(128 + number)


def user_folder(variable: str, usual: str, advice: str) -> Path:
    """Return edgespec's folder below the one that the environment's ``variable`` names, by default
    below ``usual`` in the user's home. Raises ``OSError``, with ``advice`` appended, if this user
    has no home folder."""
    if base := os.environ.get(variable):
        return Path(base) / "edgespec"
    try:
        return Path.home() / usual / "edgespec"
    except RuntimeError as error:
        raise OSError(f"this user has no home folder: set HOME or {variable}{advice}") from error


class TooLargeError(ValueError):
    """A file holds more than is read. The message names its size, as far as that is known."""


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of ``path``, at most ``most`` bytes.

    Raises ``TooLargeError`` for more, and ``OSError``, also for a pipe that delivers nothing for
    ``PATIENCE_S``."""
    handle = _open_at_once(path)
    try:
        data = bytearray()
        while len(data) <= most:
            _wait_for_data(handle, path)
            part = os.read(handle, min(most + 1 - len(data), _PART_BYTES))
            if not part:
                return bytes(data)
            data += part
        size = max(os.fstat(handle).st_size, len(data))
        raise TooLargeError(f"{size} bytes, but at most {most} are read")
    finally:
        os.close(handle)


def open_to_read(path: Path) -> TextIO:
    """Open ``path`` for reading UTF-8 text, with line ends as they are. Raises ``OSError``, also
    for a pipe that delivers nothing for ``PATIENCE_S``."""
    handle = _open_at_once(path)
    try:
        _wait_for_data(handle, path)
        operating_system.set_blocking(handle)
    except BaseException:
        os.close(handle)
        raise
    return open(handle, encoding="utf-8", newline="")


def _open_at_once(path: Path) -> int:
    """Open ``path`` without waiting for the other end of a pipe. Raises ``OSError``."""
    try:
        handle = os.open(path, os.O_RDONLY | operating_system.OPEN_AT_ONCE)
    except PermissionError:
        if path.is_dir():  # Windows opens no folder
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path)) from None
        raise
    if stat.S_ISDIR(os.fstat(handle).st_mode):
        os.close(handle)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return handle


def _wait_for_data(handle: int, path: Path) -> None:
    """Wait until a read finds data or the end of the file. Raises ``TimeoutError``, which is an
    ``OSError``, after ``PATIENCE_S``."""
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return
    if not operating_system.wait_for_data(handle, PATIENCE_S):
        why = f"is a pipe or a device that delivered nothing for {PATIENCE_S:g} s"
        raise TimeoutError(errno.ETIMEDOUT, why, str(path))


def read_text(path: Path, most: int) -> str:
    """Return the UTF-8 text in ``path``, at most ``most`` bytes, with every line end as a newline.

    Raises what ``read_bytes`` raises, and ``UnicodeDecodeError``."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), encoding="utf-8").read()
