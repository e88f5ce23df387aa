"""The Python of an exporter: one that the user names, or one made in the user's cache."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from edgespec.export_cache import cache_folder
from edgespec.exporters.child import ChildError, Hear, run_child
from edgespec.exporters.kinds import ExporterKind
from edgespec.setup_error import SetupError

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


async def exporter_python(kind: ExporterKind, given: Path | None, say: Say, hear: Hear) -> Path:
    """The interpreter that runs ``kind``. ``given`` is used if it has all that is needed; without
    one an environment is made once, which downloads. Raises ``SetupError`` saying what to do."""
    if given is not None:
        await _check(kind, given)
        return given
    folder = cache_folder() / _FOLDER / f"{kind.name}-{_key(kind)}"
    python = folder / "bin" / "python"
    if not (folder / _READY).is_file():
        say(
            f"making an environment for {kind.name}, once, in {folder}: it installs"
            f" {', '.join(kind.requirements)} (--exporter-python PATH uses one that is there)"
        )
        await _make(kind, folder, python, hear)
    return python


async def _make(kind: ExporterKind, folder: Path, python: Path, hear: Hear) -> None:
    # An environment cannot be moved, so one that was left half made is begun again.
    try:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        await run_child("making an environment", (sys.executable, "-m", "venv", str(folder)), hear)
        pip = (str(python), "-m", "pip", "install", "--no-input", *kind.requirements)
        await run_child(f"installing {kind.name}", pip, hear)
        (folder / _READY).touch()
    except BaseException as error:
        with suppress(OSError):
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise SetupError(f"{folder}: cannot be made: {error.strerror}") from error
        raise


async def _check(kind: ExporterKind, python: Path) -> None:
    """Raises ``SetupError`` naming what ``python`` does not have."""
    said: list[str] = []
    try:
        await run_child(str(python), (str(python), "-c", _PROBE, *kind.modules), said.append)
    except ChildError as error:
        raise SetupError(f"--exporter-python {python} is of no use: {error}") from error
    line = next((one for one in said if one.startswith("missing:")), None)
    if line is None:
        raise SetupError(f"--exporter-python {python} does not run Python programs")
    if missing := line.removeprefix("missing:").split():
        raise SetupError(
            f"--exporter-python {python} has no {', '.join(missing)}\n  run: {python} -m pip"
            f" install {' '.join(repr(one) for one in kind.requirements)}"
        )


def _key(kind: ExporterKind) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    text = " ".join((version, *kind.requirements))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
