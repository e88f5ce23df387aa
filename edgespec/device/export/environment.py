"""The Python of an exporter: one that the user names, or one made in the user's cache.

An environment is whole when its mark lies in it and it has what the exporter needs; anything else
in its place, such as what a killed process left behind, is thrown away and made again. Two
processes never make the same one: the second waits for the first.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from edgespec.config.setup_error import SetupError
from edgespec.device.export.child import ChildError, Hear, run_child
from edgespec.device.export.export_cache import cache_folder
from edgespec.device.export.file_lock import FileLock
from edgespec.device.export.kinds import ExporterKind

Say = Callable[[str], None]
_FOLDER, _READY = "exporters", "edgespec-ready"
_PROBE = (
    "import importlib.util, sys\n"
    "missing = []\n"
    "for name in sys.argv[1:]:\n"
    "    try:\n"
    "        found = importlib.util.find_spec(name)\n"
    "    except ImportError:\n"
    "        found = None\n"
    "    missing += [] if found else [name]\n"
    "print('missing: ' + ' '.join(missing))\n"
)
LEAST_FREE_BYTES: Final = 3 << 30
"""Of the disk, while an environment is made: torch without CUDA, unpacked, and its archive."""
TORCH_INDEX: Final = "EDGESPEC_TORCH_INDEX"
"""Names the index in the environment that has torch without CUDA."""
_LOOK_S: Final = 0.5
_KEPT_WORDS: Final = 200
_NO_NETWORK: Final = "no package index can be reached: is there a network?"
# What pip says on the way to its last words, which by themselves say less.
_CAUSES: Final = (
    ("No space left on device", "the disk is full"),
    ("Disk quota exceeded", "the disk is full"),
    ("name resolution", _NO_NETWORK),
    ("Name or service not known", _NO_NETWORK),
    ("Failed to establish a new connection", _NO_NETWORK),
    ("Network is unreachable", _NO_NETWORK),
    ("Read timed out", "the package index does not answer"),
)


async def exporter_python(kind: ExporterKind, given: Path | None, say: Say, hear: Hear) -> Path:
    """The interpreter that runs ``kind``. ``given`` is used if it has all that is needed; without
    one an environment is made once, which downloads. Raises ``SetupError`` saying what to do."""
    if given is not None:
        await _check(kind, given)
        return given
    folder = cache_folder() / _FOLDER / f"{kind.name}-{_key(kind)}"
    if await _is_whole(kind, folder):
        return _python(folder)
    async with _alone(folder, say):
        if not await _is_whole(kind, folder):  # nobody made it meanwhile
            await _make(kind, folder, say, hear)
    return _python(folder)


def _python(folder: Path) -> Path:
    parts = ("Scripts", "python.exe") if sys.platform == "win32" else ("bin", "python")
    return folder.joinpath(*parts)


async def _is_whole(kind: ExporterKind, folder: Path) -> bool:
    if not (folder / _READY).is_file():
        return False
    try:
        return not await _missing(kind, _python(folder))
    except SetupError:
        return False  # its interpreter is gone, say after an update of Python


@asynccontextmanager
async def _alone(folder: Path, say: Say) -> AsyncIterator[None]:
    """Nobody else is at work on ``folder`` meanwhile. Raises ``SetupError``."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    except OSError as error:
        raise _cannot(folder, error) from error
    with lock:
        if not lock.take():
            say(f"another process is making {folder}: waiting for it")
            while not lock.take():  # noqa: ASYNC110 # nobody tells when a lock is let go
                await asyncio.sleep(_LOOK_S)
        yield


async def _make(kind: ExporterKind, folder: Path, say: Say, hear: Hear) -> None:
    """Raises ``SetupError``; then, as when it is cancelled, nothing is left of it."""
    try:
        # An environment cannot be moved, so one that was left half made is begun again.
        again = await asyncio.to_thread(_cleared, folder)
        free = shutil.disk_usage(folder.parent).free
        if free < LEAST_FREE_BYTES:
            raise SetupError(
                f"{folder.parent}: {free >> 20} MiB are free, but an environment for {kind.name}"
                f" takes up to {LEAST_FREE_BYTES >> 20} MiB while it is made; set XDG_CACHE_HOME to"
                " another disk, or --exporter-python to an environment that is there"
            )
        say(
            f"making an environment for {kind.name}, {'anew' if again else 'once'}, in {folder}: it"
            f" installs {', '.join(kind.requirements)} (--exporter-python PATH uses one that is"
            f" there){_advice(kind)}"
        )
        await _install(kind, folder, hear)
        (folder / _READY).touch()
    except BaseException as error:
        # Gigabytes go in a thread, so that a second Ctrl-C is heard meanwhile.
        with suppress(OSError):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise _cannot(folder, error) from error
        raise


def _cleared(folder: Path) -> bool:
    """Nothing is there now; whether anything was."""
    there = folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    return there


async def _install(kind: ExporterKind, folder: Path, hear: Hear) -> None:
    said: deque[str] = deque(maxlen=_KEPT_WORDS)

    def note(words: str) -> None:
        said.append(words)
        hear(words)

    python = str(_python(folder))
    pip = (python, "-m", "pip", "install", "--no-input", "--progress-bar", "off")
    try:
        venv = (sys.executable, "-m", "venv", str(folder))
        await run_child("making an environment", venv, note)
        # A pip that is ended leaves what it has unpacked so far: here that goes with the rest.
        unpacked = folder / "unpacked"
        await asyncio.to_thread(unpacked.mkdir)
        places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(unpacked))
        if torch := _first_torch(kind):
            await run_child("installing torch", (*pip, *torch), note, places)
        await run_child(f"installing {kind.name}", (*pip, *kind.requirements), note, places)
        await asyncio.to_thread(shutil.rmtree, unpacked, ignore_errors=True)
    except ChildError as error:
        causes = (why for sign, why in _CAUSES if any(sign in words for words in said))
        why = next(causes, "")
        raise SetupError(f"{why}\n{error}" if why else str(error)) from error


def _first_torch(kind: ExporterKind) -> tuple[str, ...]:
    """For pip: torch from the index that the user names for it. Nothing where none is named or no
    torch is wanted: pip then takes torch from where it takes everything."""
    wanted = [one for one in kind.requirements if one.startswith("torch")]
    index = os.environ.get(TORCH_INDEX, "")
    if not wanted or not index:
        return ()
    # Alone: what torch needs comes with the rest, and one index is asked for one package.
    return ("--no-deps", "--retries", "2", "--index-url", index, *wanted)


def _advice(kind: ExporterKind) -> str:
    """Of gigabytes that no exporter needs: on Linux the usual index has torch with CUDA."""
    told = any(os.environ.get(name) for name in (TORCH_INDEX, "PIP_INDEX_URL", "PIP_NO_INDEX"))
    wants = any(one.startswith("torch") for one in kind.requirements)
    if told or not wants or not sys.platform.startswith("linux"):
        return ""
    return (
        f"; with CUDA, which it does not need, torch takes twice the disk and more: {TORCH_INDEX}"
        " names an index that has it without (PyTorch documents its own)"
    )


async def _check(kind: ExporterKind, python: Path) -> None:
    """Raises ``SetupError`` naming what ``python`` does not have."""
    try:
        missing = await _missing(kind, python)
    except ChildError as error:
        raise SetupError(f"--exporter-python {python} is of no use: {error}") from error
    if missing:
        raise SetupError(
            f"--exporter-python {python} has no {', '.join(missing)}\n  run: {python} -m pip"
            f" install {' '.join(repr(one) for one in kind.requirements)}"
        )


async def _missing(kind: ExporterKind, python: Path) -> list[str]:
    """Modules that ``python`` cannot import. Raises ``SetupError`` unless it runs programs."""
    said: list[str] = []
    await run_child(str(python), (str(python), "-c", _PROBE, *kind.modules), said.append)
    line = next((one for one in said if one.startswith("missing:")), None)
    if line is None:
        raise SetupError(f"--exporter-python {python} does not run Python programs")
    return line.removeprefix("missing:").split()


def _cannot(folder: Path, error: OSError) -> SetupError:
    return SetupError(f"{folder}: cannot be made: {error.strerror or error}")


def _key(kind: ExporterKind) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    text = " ".join((version, *kind.requirements))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
