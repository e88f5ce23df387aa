"""``edgespec export``: a Hugging Face checkpoint to a draft folder for devices."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress

from edgespec.cli.main import FAILED
from edgespec.cli.options import option
from edgespec.cli.running import fail, reported, run, say
from edgespec.config import ConfigError
from edgespec.config.common import SetupError, needs
from edgespec.core.device.memory import KvType
from edgespec.device.export.export import COPIED_FILES, export_draft, work_folder
from edgespec.models import folders
from edgespec.models.draft_sources import find_draft

DEFAULT_BITS = 4


_CONTEXT = option("0: the model's own, at most 16384", "--context-length")
_OPTIMUM = option(
    "Let Optimum export a family that edgespec does not know, by a Python that has it",
    "--optimum",
    metavar="PYTHON",
)
_INSPECT = option("Write nothing, say what SOURCE is and how it would draft", "--inspect")


def export(
    source: Annotated[str, typer.Argument(help="Hugging Face folder or Hub id")],
    out: Annotated[
        Path | None, typer.Argument(help="Folder to write; must not hold anything yet")
    ] = None,
    bits: Annotated[int, option("Of the weights: 4, 8 or 32", "--bits")] = DEFAULT_BITS,
    context_length: Annotated[int, _CONTEXT] = 0,
    kv_type: Annotated[KvType, option("Of cached keys and values", "--kv-type")] = KvType.FLOAT32,
    optimum: Annotated[Path | None, _OPTIMUM] = None,
    inspect: Annotated[bool, _INSPECT] = False,
) -> None:
    """Write the ONNX draft model of a checkpoint, with its tokenizer.

    [dim]edgespec export ./my-small-model ./draft --bits 4[/]

    [dim]edgespec export ./olmo ./draft --optimum ./env/bin/python[/]

    [dim]edgespec export --inspect ./Qwen3-0.6B-ONNX[/]
    """
    with reported():
        if inspect:
            _inspect(source)
            return
        if out is None:
            raise ConfigError("OUT, the folder to write, is missing (only --inspect needs none)")
        check_free(out)
        if optimum is None:
            _export(source, out, bits, context_length, kv_type)
        elif (context_length, kv_type) != (0, KvType.FLOAT32):
            raise ConfigError("--optimum takes no --context-length and no --kv-type")
        else:
            run(_export_by_optimum(optimum, source, out, bits))


def _export(source: str, out: Path, bits: int, context_length: int, kv_type: KvType) -> None:
    with needs("onnx", "edgespec[export]"):
        folder = folders.resolve_model(source, folders.Role.TARGET)
        folders.check_checkpoint(folder)
        layers = Progress(disable=not sys.stderr.isatty(), console=Console(stderr=True))
        with placed(out) as work, layers:
            bar = layers.add_task("layers", total=None)
            manifest = export_draft(
                folder,
                work,
                bits=bits,
                context_length=context_length,
                kv_type=kv_type,
                progress=lambda done, all_: layers.update(bar, completed=done, total=all_),
            )
    _say_written(out, f"{manifest.layers} layers", manifest.bits, manifest.model.vocabulary)


def _say_written(out: Path, how: str, bits: int, vocabulary: str) -> None:
    size = sum(file.stat().st_size for file in out.rglob("*.onnx*"))
    typer.echo(
        f"{out}: {how}, {bits} bits, {size / 1e6:.1f} MB, vocabulary {vocabulary}"
        f"\nuse it: edgespec generate ... --draft {out}"
    )


def _inspect(reference: str) -> None:
    """What is behind a draft reference; each graph of others is loaded and tried."""
    from edgespec.device.model_drafter import inspected

    source = find_draft(reference)
    if not source.graphs:
        info = folders.model_info(source.folder)
        kind = (
            "a draft folder made by `edgespec export`"
            if (source.folder / folders.DRAFT_MANIFEST).is_file()
            else "a checkpoint: exported once, when it first drafts"
        )
        typer.echo(
            f"{source.folder}: {kind}; vocabulary {info.vocabulary} ({info.vocabulary_size} ids),"
            f" context {info.context_length}"
        )
    failed: ValueError | None = None
    with needs("onnxruntime", "edgespec[cpu]"):
        for name in source.graphs:
            try:
                typer.echo(inspected(source, name))
            except ValueError as error:
                failed = error
                say(f"{name}: cannot be used: {error}")
    if failed is not None:
        raise failed


def check_free(out: Path) -> None:
    """Leaves with a word where ``out`` holds something already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fail(f"{out} is not an empty folder; choose another", FAILED)


@contextmanager
def placed(out: Path, before: Path | None = None) -> Iterator[Path]:
    """A folder to write to, which becomes ``out`` only if all went well. What is there becomes
    ``before``, and what was ``before`` goes."""
    with work_folder(out.parent) as work:
        work.chmod(0o755)  # as a folder made by anybody, not as a secret one
        yield work
        if before is not None and out.is_dir() and any(out.iterdir()):
            if before.exists():
                shutil.rmtree(before)
            out.rename(before)
        elif out.is_dir():
            out.rmdir()  # it is empty
        work.rename(out)


# --- Optimum ---------------------------------------------------------------------------------
#
# It needs transformers 4, so it runs in a process and with a Python of its own, which somebody has
# made. What it writes is float32; its matrices are rounded here. The graph is loaded once at the
# end, which tries its cache.

INSTALL: Final = (
    "python -m venv optimum-env && optimum-env/bin/pip install optimum==2.1.0 optimum-onnx==0.1.0"
    " transformers==4.57.6 torch onnx onnxruntime"
)
"""What makes the Python that is asked for; versions as they were tried."""
_CONFIG: Final = "config.json"
# What the process must not take over from this one: it has packages of its own.
_NOT_PASSED_ON: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


async def _export_by_optimum(python: Path, source: str, out: Path, bits: int) -> None:
    """Optimum's words go to stderr. Raises ``SetupError`` with the line that installs it,
    ``ValueError`` naming the file or the value."""
    folder = folders.resolve_model(source, folders.Role.TARGET)
    if not (folder / "tokenizer.json").is_file():
        raise folders.ModelFolderError(f"{folder / 'tokenizer.json'}: no such file")
    if bits not in (known := (4, 8, 32)):
        raise ValueError(f"bits is {bits}, but must be one of {known}")
    with placed(out) as work:
        with _readable_by_transformers_4(folder) as readable:
            exporter = (str(python), "-m", "optimum.exporters.onnx", "--model", str(readable))
            await _run((*exporter, "--task", "text-generation-with-past", str(work)))
        path = _written(folder, work)
        with needs("onnx and onnxruntime", "edgespec[export,cpu]"):
            from edgespec.device.export.quantize import round_graph
            from edgespec.device.model_drafter import foreign_drafter

            if bits != 32:
                await asyncio.to_thread(round_graph, path, bits)
            found = find_draft(str(work))
            tried = await asyncio.to_thread(foreign_drafter, found, lambda text: None)
        tried.close()
    _say_written(out, "by Optimum", bits, tried.info.vocabulary)


def _written(source: Path, target: Path) -> Path:
    """The one graph in ``target``, with the texts that a device needs beside it."""
    for name in COPIED_FILES:
        # Exporters write the tokenizer as their library knows it, which may add tokens to it.
        ours = "config" not in name or name == "tokenizer_config.json"
        if (source / name).is_file() and (ours or not (target / name).exists()):
            shutil.copyfile(source / name, target / name)
    graphs = find_draft(str(target)).graphs
    if len(graphs) != 1:
        found = ", ".join(sorted(file.name for file in target.iterdir())) or "nothing"
        raise folders.ModelFolderError(f"Optimum wrote no single decoder graph, but: {found}")
    return next(iter(graphs.values()))


@contextmanager
def _readable_by_transformers_4(source: Path) -> Iterator[Path]:
    """``source``, or a folder of links to its files with a config of its own: transformers 5 writes
    ``rope_parameters``, which transformers 4 passes over without a word, and then rotates by base
    10,000. Raises ``ModelFolderError`` for rotations that have no older words."""
    config = folders.read_json(source / _CONFIG)
    if "rope_parameters" not in config or "rope_theta" in config:
        yield source
        return
    scaling = dict(config["rope_parameters"])
    theta = scaling.pop("rope_theta", None)
    if not isinstance(theta, int | float):
        raise folders.ModelFolderError(
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
