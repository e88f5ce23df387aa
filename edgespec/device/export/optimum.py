"""An export by Optimum, for families that our exporter does not know.

Optimum's exporter needs transformers 4, so it runs in a process and with a Python of its own, which
somebody has made. What it writes is float32; its matrices are rounded here. The graph is loaded
once at the end, which tries its cache."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgespec.config.setup_error import SetupError, needs
from edgespec.models.draft_sources import find_draft
from edgespec.models.folders import ModelFolderError, read_json

Hear = Callable[[str], None]
BITS: Final = (4, 8, 32)
INSTALL: Final = (
    "python -m venv optimum-env && optimum-env/bin/pip install optimum==2.1.0 optimum-onnx==0.1.0"
    " transformers==4.57.6 torch onnx onnxruntime"
)
"""What makes the Python that is asked for; versions as they were tried."""
_CONFIG: Final = "config.json"
_KEPT_LINES: Final = 12
_MAX_LINE_BYTES: Final = 1 << 16
_PATIENCE_S: Final = 3.0
# What the process must not take over from this one: it has packages of its own.
_NOT_PASSED_ON: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class OptimumExport:
    """What was written."""

    path: Path
    layers: int
    vocabulary: str


async def export_by_optimum(
    source: Path, target: Path, bits: int, python: Path, hear: Hear
) -> OptimumExport:
    """Write the draft of ``source`` into ``target``, an empty folder. ``hear`` gets Optimum's words
    line by line. Raises ``SetupError`` with the line that installs it, or with its last words;
    ``ValueError`` naming the file or the value."""
    if bits not in BITS:
        raise ValueError(f"bits is {bits}, but must be one of {BITS}")
    try:
        await _run((str(python), "-c", "import optimum.exporters.onnx"), hear)
    except SetupError as error:
        raise SetupError(
            f"{python} has no Optimum: {error}\n  run: {INSTALL}\n  and give --exporter-python"
            " optimum-env/bin/python"
        ) from error
    with _readable_by_transformers_4(_absolute(source)) as readable:
        task = ("--task", "text-generation-with-past")
        command = ("-m", "optimum.exporters.onnx", "--model", str(readable), *task)
        await _run((str(python), *command, str(_absolute(target))), hear)
    path = _written(source, target)
    with needs("onnx and onnxruntime", "edgespec[export,cpu]"):
        if bits != 32:
            from edgespec.device.export.quantize import round_graph

            hear(f"rounding to {bits} bits")
            await asyncio.to_thread(round_graph, path, bits)
        return await asyncio.to_thread(_described, target, path)


def _absolute(path: Path) -> Path:
    return path.resolve()


def _written(source: Path, target: Path) -> Path:
    """The one graph in ``target``, with the texts that a device needs beside it."""
    from edgespec.device.export.export import COPIED_FILES

    for name in COPIED_FILES:
        # Exporters write the tokenizer as their library knows it, which may add tokens to it.
        ours = "config" not in name or name == "tokenizer_config.json"
        if (source / name).is_file() and (ours or not (target / name).exists()):
            shutil.copyfile(source / name, target / name)
    graphs = find_draft(str(target)).graphs
    if len(graphs) != 1:
        found = ", ".join(sorted(file.name for file in target.iterdir())) or "nothing"
        raise ModelFolderError(f"Optimum wrote no single decoder graph, but: {found}")
    return next(iter(graphs.values()))


def _described(target: Path, path: Path) -> OptimumExport:
    """Raises ``DraftModelError`` for a graph that cannot draft."""
    from edgespec.device.model_drafter import foreign_drafter

    drafter = foreign_drafter(find_draft(str(target)), lambda text: None)
    try:
        return OptimumExport(path, drafter.graph.layers, drafter.info.vocabulary)
    finally:
        drafter.close()


@contextmanager
def _readable_by_transformers_4(source: Path) -> Iterator[Path]:
    """``source``, or a folder of links to its files with a config of its own: transformers 5 writes
    ``rope_parameters``, which transformers 4 passes over without a word, and then rotates by base
    10,000. Raises ``ModelFolderError`` for rotations that have no older words."""
    config = read_json(source / _CONFIG)
    if "rope_parameters" not in config or "rope_theta" in config:
        yield source
        return
    older = {**config, **_older_rotations(config["rope_parameters"], source / _CONFIG)}
    with tempfile.TemporaryDirectory(prefix="edgespec-source-") as name:
        folder = Path(name)
        for file in source.iterdir():
            if file.name != _CONFIG:
                os.symlink(file.resolve(), folder / file.name)
        (folder / _CONFIG).write_text(json.dumps(older), encoding="utf-8")
        yield folder


def _older_rotations(found: Any, path: Path) -> dict[str, Any]:
    """``rope_theta``, and ``rope_scaling`` unless the rotations are the plain ones."""
    if not isinstance(found, dict) or not isinstance(found.get("rope_theta"), int | float):
        raise ModelFolderError(
            f"{path}: has rope_parameters without one rope_theta for all layers, which transformers"
            " 4 has other words for in each family: write them there, too"
        )
    scaling = {name: value for name, value in found.items() if name != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    return {"rope_theta": found["rope_theta"], "rope_scaling": None if plain else scaling}


# --- the process ----------------------------------------------------------------------------


async def _run(command: Sequence[str], hear: Hear) -> None:
    """Run ``command`` to its end. Whoever is cancelled meanwhile (Ctrl-C, SIGTERM) ends it first,
    with all that it has started. Raises ``SetupError`` with its last words."""
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_PASSED_ON}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    except OSError as error:
        raise SetupError(f"{command[0]}: {error.strerror}") from error
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    try:
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(_MAX_LINE_BYTES):
            # Progress bars go back to the start of their line: each is a line here.
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            rest = rest[-_MAX_LINE_BYTES:]
            for line in lines:
                _tell(line, last, hear)
        _tell(rest, last, hear)
        code = await process.wait()
    finally:
        await _end(process)
    if code:
        how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = "".join(f"\n  {line}" for line in last) or " without a word"
        raise SetupError(f"the exporter failed ({how}):{words}")


def _tell(line: bytes, last: deque[str], hear: Hear) -> None:
    text = line.decode("utf-8", errors="replace").strip()
    text = "".join(character for character in text if character.isprintable())
    if text:
        last.append(text)
        hear(text)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Leave nothing of the process's group behind."""
    if process.returncode is None:
        _signal(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await process.wait()
    _signal(process.pid, signal.SIGKILL)
    await process.wait()


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
