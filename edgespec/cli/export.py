"""``edgespec export``: make a draft folder for devices of a Hugging Face checkpoint."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress

from edgespec.cli.options import option
from edgespec.cli.running import fail, reporting_errors, run, say
from edgespec.config import ConfigError
from edgespec.config.common import SetupError, require_library
from edgespec.core.device.memory import KvType
from edgespec.device.drafters.manifest import MODEL_FILE
from edgespec.device.export.export import COPIED_FILES, export_draft, work_folder
from edgespec.models import folders
from edgespec.models.model_source import Purpose, SourceKind, resolve_source
from edgespec.operating_system import kill_session, move_path, own_session

DEFAULT_BITS = 4


_SOURCE = typer.Argument(
    metavar="SOURCE",
    help="Checkpoint: a Hugging Face folder, a .gguf file, a Hub id, ollama:NAME or"
    " hf.co/USER/REPO:QUANT",
)
_OUT = typer.Argument(metavar="OUT", help="Folder to write, which must be empty or not exist")
_BITS = option("Bits of each weight: 4 (smallest and fastest), 8 or 32", "--bits")
_CONTEXT = option(
    "Longest context in tokens; 0 takes the model's own, at most 16384", "--context-length"
)
_KV_TYPE = option("Type of cached keys and values; the smaller ones need less memory", "--kv-type")
_OPTIMUM = option(
    "Python with Optimum installed, to export a model family that edgespec does not know",
    "--optimum",
    metavar="PYTHON",
)
_INSPECT = option("Only report what SOURCE is and how it would draft; write nothing", "--inspect")


def export(
    source: Annotated[str, _SOURCE],
    out: Annotated[Path | None, _OUT] = None,
    bits: Annotated[int, _BITS] = DEFAULT_BITS,
    context_length: Annotated[int, _CONTEXT] = 0,
    kv_type: Annotated[KvType, _KV_TYPE] = KvType.FLOAT32,
    optimum: Annotated[Path | None, _OPTIMUM] = None,
    inspect: Annotated[bool, _INSPECT] = False,
) -> None:
    """Export a checkpoint as an ONNX draft model, with its tokenizer.

    `--draft` also takes a checkpoint, and exports it on first use; this command does it beforehand.

    [dim]edgespec export ./my-small-model ./draft --bits 4[/]

    [dim]edgespec export ./olmo ./draft --optimum ./env/bin/python[/]

    [dim]edgespec export --inspect ./Qwen3-0.6B-ONNX[/]
    """
    with reporting_errors():
        if inspect:
            _inspect(source)
            return
        if out is None:
            raise ConfigError("OUT, the folder to write, is missing (only --inspect needs none)")
        check_is_empty(out)
        if optimum is None:
            _export(source, out, bits, context_length, kv_type)
        elif (context_length, kv_type) != (0, KvType.FLOAT32):
            raise ConfigError(
                "--optimum is given with --context-length or --kv-type, which Optimum does not"
                " take: leave them out"
            )
        else:
            _export_by_optimum(optimum, source, out, bits)


def _export(source: str, out: Path, bits: int, context_length: int, kv_type: KvType) -> None:
    with require_library("onnx", "edgespec[export]"):
        folder = resolve_source(source, Purpose.TARGET).folder
        folders.check_checkpoint(folder)
        layers = Progress(disable=not sys.stderr.isatty(), console=Console(stderr=True))
        with output_folder(out) as work, layers:
            bar = layers.add_task("layers", total=None)
            manifest = export_draft(
                folder,
                work,
                bits=bits,
                context_length=context_length,
                kv_type=kv_type,
                progress=lambda done, all_: layers.update(bar, completed=done, total=all_),
                report_loss=lambda loss: say(str(loss)),
            )
    _say_written(out, f"{manifest.layers} layers", manifest.bits, manifest.model.vocabulary)


def _say_written(out: Path, how: str, bits: int, vocabulary: str) -> None:
    size = sum(file.stat().st_size for file in out.rglob("*.onnx*"))
    typer.echo(
        f"{out}: {how}, {bits} bits, {size / 1e6:.1f} MB, vocabulary {vocabulary}"
        f"\nuse it: edgespec generate PROMPT --draft {out}"
        f"\ntry how often it is right: edgespec bench --quick --arms edgespec --model TARGET"
        f" --draft {out}"
    )


def _inspect(reference: str) -> None:
    """Print what a draft reference is. Each graph that others exported is loaded and tried."""
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
    with require_library("onnxruntime", "edgespec[cpu]"):
        for name in source.graphs:
            try:
                typer.echo(describe_graph(source, name))
            except ValueError as error:
                failed = error
                say(f"{name}: cannot be used: {error}")
    if failed is not None:
        raise failed


def check_is_empty(out: Path) -> None:
    """End the command with an error if ``out`` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fail(f"{out} is not an empty folder; choose another")


@contextmanager
def output_folder(out: Path, before: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder to write to, which becomes ``out`` only if the block succeeds.

    If ``before`` is given, the folder that was ``out`` is kept under that name, in place of an
    older one."""
    with work_folder(out.parent) as work:
        work.chmod(0o755)  # the usual mode of a folder; a temporary one is private
        yield work
        if before is not None and out.is_dir() and any(out.iterdir()):
            if before.exists():
                shutil.rmtree(before)
            move_path(out, before)
        elif out.is_dir():
            out.rmdir()  # an empty folder
        move_path(work, out)


INSTALL: Final = (
    "python -m venv optimum-env && optimum-env/bin/pip install optimum==2.1.0 optimum-onnx==0.1.0"
    " transformers==4.57.6 torch onnx onnxruntime"
)
"""Command that makes a Python environment with Optimum, in the versions that were tried."""


def _export_by_optimum(python: Path, source: str, out: Path, bits: int) -> None:
    """Export a model by Optimum, in a child process.

    Optimum needs transformers 4, so it runs in a Python environment of its own. It writes float32,
    which is rounded here; then the graph is tried like any graph that others exported. Raises
    ``SetupError`` with the command that installs Optimum, or ``ValueError`` that names the file or
    the value."""
    folder = resolve_source(source, Purpose.TARGET).folder
    config = folders.read_config(folder)
    if "rope_parameters" in config and "rope_theta" not in config:
        raise folders.ModelFolderError(
            f"{folder / 'config.json'}: has rope_parameters without rope_theta: transformers 4"
            " would rotate by base 10,000; add rope_theta and rope_scaling to the file"
        )
    with (
        require_library("onnx and onnxruntime", "edgespec[export,cpu]"),
        output_folder(out) as work,
    ):
        from edgespec.device.export.export_graph import BITS
        from edgespec.device.export.quantize import round_graph
        from edgespec.device.model_drafter import load_foreign_drafter

        if bits not in BITS:
            raise ValueError(f"bits is {bits}, but must be one of {BITS}")
        run(_run_optimum(python, folder, work, *([] if bits == 32 else ["--no-post-process"])))
        for name in COPIED_FILES:  # the tokenizer that Optimum saves may have additional tokens
            if (folder / name).is_file() and "token" in name:
                shutil.copyfile(folder / name, work / name)
        if bits != 32:
            round_graph(work / MODEL_FILE, bits)
        tried = load_foreign_drafter(resolve_source(str(work / MODEL_FILE), Purpose.DRAFT), say)
        tried.close()
    _say_written(out, "by Optimum", bits, tried.info.vocabulary)


async def _run_optimum(python: Path, source: Path, target: Path, *options: str) -> None:
    """Run Optimum, whose output goes to stderr. A cancellation (Ctrl-C, SIGTERM) ends it first,
    with all processes that it has started. Raises ``SetupError``."""
    arguments = ["-E", "-m", "optimum.exporters.onnx", "--task", "text-generation-with-past"]
    arguments += [*options, "--model", str(source), str(target)]
    try:
        process = await asyncio.create_subprocess_exec(
            python, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=2, **own_session()
        )
    except OSError as error:
        raise SetupError(f"{python}: {error.strerror}") from error
    try:
        code = await process.wait()
    finally:
        kill_session(process.pid)
        await process.wait()
    if code or not (target / MODEL_FILE).is_file():
        raise SetupError(
            f"Optimum wrote no {MODEL_FILE} (exit code {code}); its messages are above. If it is"
            f" not installed,\n  run: {INSTALL}\n  and give --optimum optimum-env/bin/python"
        )
