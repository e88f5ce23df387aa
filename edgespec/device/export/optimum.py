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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from edgespec.config.common import SetupError, needs
from edgespec.models.draft_sources import find_draft
from edgespec.models.folders import ModelFolderError, read_json

BITS: Final = (4, 8, 32)
INSTALL: Final = (
    "python -m venv optimum-env && optimum-env/bin/pip install optimum==2.1.0 optimum-onnx==0.1.0"
    " transformers==4.57.6 torch onnx onnxruntime"
)
"""What makes the Python that is asked for; versions as they were tried."""
_CONFIG: Final = "config.json"
# What the process must not take over from this one: it has packages of its own.
_NOT_PASSED_ON: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


async def export_by_optimum(source: Path, target: Path, bits: int, python: Path) -> str:
    """Write the draft of ``source`` into ``target``, an empty folder, and return the fingerprint of
    its vocabulary. Optimum's words go to stderr. Raises ``SetupError`` with the line that installs
    it, ``ValueError`` naming the file or the value."""
    if bits not in BITS:
        raise ValueError(f"bits is {bits}, but must be one of {BITS}")
    with _readable_by_transformers_4(source) as readable:
        exporter = (str(python), "-m", "optimum.exporters.onnx", "--model", str(readable))
        await _run((*exporter, "--task", "text-generation-with-past", str(target)))
    path = _written(source, target)
    with needs("onnx and onnxruntime", "edgespec[export,cpu]"):
        from edgespec.device.export.quantize import round_graph
        from edgespec.device.model_drafter import foreign_drafter

        if bits != 32:
            await asyncio.to_thread(round_graph, path, bits)
        tried = await asyncio.to_thread(foreign_drafter, find_draft(str(target)), lambda text: None)
    tried.close()
    return tried.info.vocabulary


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


@contextmanager
def _readable_by_transformers_4(source: Path) -> Iterator[Path]:
    """``source``, or a folder of links to its files with a config of its own: transformers 5 writes
    ``rope_parameters``, which transformers 4 passes over without a word, and then rotates by base
    10,000. Raises ``ModelFolderError`` for rotations that have no older words."""
    config = read_json(source / _CONFIG)
    if "rope_parameters" not in config or "rope_theta" in config:
        yield source
        return
    scaling = dict(config["rope_parameters"])
    theta = scaling.pop("rope_theta", None)
    if not isinstance(theta, int | float):
        raise ModelFolderError(
            f"{source / _CONFIG}: has rope_parameters without one rope_theta for all layers, which"
            " transformers 4 has other words for in each family: write them there, too"
        )
    plain = scaling.get("rope_type", "default") == "default"
    older = {**config, "rope_theta": theta, "rope_scaling": None if plain else scaling}
    with tempfile.TemporaryDirectory(prefix="edgespec-source-") as name:
        folder = Path(name)
        for file in source.iterdir():
            if file.name != _CONFIG:
                os.symlink(file.resolve(), folder / file.name)
        (folder / _CONFIG).write_text(json.dumps(older), encoding="utf-8")
        yield folder


async def _run(command: Sequence[str]) -> None:
    """Run ``command`` to its end. Whoever is cancelled meanwhile (Ctrl-C, SIGTERM) ends it first,
    with all that it has started. Raises ``SetupError``."""
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_PASSED_ON}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise SetupError(f"{command[0]}: {error.strerror}") from error
    try:
        code = await process.wait()
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if code:
        raise SetupError(
            f"Optimum failed (exit code {code}), as its words above say. Where it is missing,\n"
            f"  run: {INSTALL}\n  and give --optimum optimum-env/bin/python"
        )
