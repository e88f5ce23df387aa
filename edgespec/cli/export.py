"""``edgespec export``: a Hugging Face checkpoint to a draft folder for devices."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress

from edgespec.cli.options import option
from edgespec.cli.running import fail, reported, run, say
from edgespec.config import ConfigError
from edgespec.config.common import SetupError, needs
from edgespec.core.device.memory import KvType
from edgespec.device.drafters.manifest import MODEL_FILE
from edgespec.device.export.export import COPIED_FILES, export_draft, work_folder
from edgespec.models import folders
from edgespec.models.model_source import Purpose, SourceKind, resolve_source

DEFAULT_BITS = 4


_OUT = typer.Argument(help="Folder to write; must not hold anything yet")
_CONTEXT = option("0: the model's own, at most 16384", "--context-length")
_OPTIMUM = option(
    "Let Optimum export a family that edgespec does not know, by a Python that has it",
    "--optimum",
    metavar="PYTHON",
)
_INSPECT = option("Write nothing, say what SOURCE is and how it would draft", "--inspect")


def export(
    source: Annotated[str, typer.Argument(help="Hugging Face folder or Hub id")],
    out: Annotated[Path | None, _OUT] = None,
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
            _export_by_optimum(optimum, source, out, bits)


def _export(source: str, out: Path, bits: int, context_length: int, kv_type: KvType) -> None:
    with needs("onnx", "edgespec[export]"):
        folder = resolve_source(source, Purpose.TARGET).folder
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
    from edgespec.device.model_drafter import describe_graph

    source = resolve_source(reference, Purpose.DRAFT)
    if not source.graphs:
        info = source.info
        kind = "a checkpoint: exported once, when it first drafts"
        if source.kind is SourceKind.EXPORT:
            kind = "a draft folder made by `edgespec export`"
        typer.echo(
            f"{source.folder}: {kind}; vocabulary {info.vocabulary} ({info.vocabulary_size} ids),"
            f" context {info.context_length}"
        )
    failed: ValueError | None = None
    with needs("onnxruntime", "edgespec[cpu]"):
        for name in source.graphs:
            try:
                typer.echo(describe_graph(source, name))
            except ValueError as error:
                failed = error
                say(f"{name}: cannot be used: {error}")
    if failed is not None:
        raise failed


def check_free(out: Path) -> None:
    """Leaves with a word where ``out`` holds something already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fail(f"{out} is not an empty folder; choose another")


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


INSTALL: Final = (
    "python -m venv optimum-env && optimum-env/bin/pip install optimum==2.1.0 optimum-onnx==0.1.0"
    " transformers==4.57.6 torch onnx onnxruntime"
)
"""What makes the Python that is asked for; versions as they were tried."""


def _export_by_optimum(python: Path, source: str, out: Path, bits: int) -> None:
    """Optimum needs transformers 4, so it runs with a Python of its own. It writes float32, which
    is rounded here; then the graph is tried as any of others. Raises ``SetupError``, with the line
    that installs it, or ``ValueError``, naming the file or the value."""
    folder = resolve_source(source, Purpose.TARGET).folder
    config = folders.read_config(folder)
    if "rope_parameters" in config and "rope_theta" not in config:
        raise folders.ModelFolderError(
            f"{folder / 'config.json'}: has rope_parameters without rope_theta: transformers 4"
            " would rotate by base 10,000; write rope_theta and rope_scaling there, too"
        )
    with needs("onnx and onnxruntime", "edgespec[export,cpu]"), placed(out) as work:
        from edgespec.device.export.export_graph import BITS
        from edgespec.device.export.quantize import round_graph
        from edgespec.device.model_drafter import load_foreign_drafter

        if bits not in BITS:
            raise ValueError(f"bits is {bits}, but must be one of {BITS}")
        run(_optimum(python, folder, work, *([] if bits == 32 else ["--no-post-process"])))
        for name in COPIED_FILES:  # its tokenizer may have tokens that the model's own has not
            if (folder / name).is_file() and "token" in name:
                shutil.copyfile(folder / name, work / name)
        if bits != 32:
            round_graph(work / MODEL_FILE, bits)
        tried = load_foreign_drafter(resolve_source(str(work / MODEL_FILE), Purpose.DRAFT), say)
        tried.close()
    _say_written(out, "by Optimum", bits, tried.info.vocabulary)


async def _optimum(python: Path, source: Path, target: Path, *options: str) -> None:
    """Its words go to stderr. Whoever is cancelled meanwhile (Ctrl-C, SIGTERM) ends it first, with
    all that it has started. Raises ``SetupError``."""
    words = ["-E", "-m", "optimum.exporters.onnx", "--task", "text-generation-with-past"]
    words += [*options, "--model", str(source), str(target)]
    try:
        process = await asyncio.create_subprocess_exec(
            python, *words, stdin=asyncio.subprocess.DEVNULL, stdout=2, start_new_session=True
        )
    except OSError as error:
        raise SetupError(f"{python}: {error.strerror}") from error
    try:
        code = await process.wait()
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if code or not (target / MODEL_FILE).is_file():
        raise SetupError(
            f"Optimum wrote no {MODEL_FILE} (exit code {code}); its words are above. Where it is"
            f" missing,\n  run: {INSTALL}\n  and give --optimum optimum-env/bin/python"
        )
