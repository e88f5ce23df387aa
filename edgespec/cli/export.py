"""``edgespec export``: a Hugging Face checkpoint to a draft folder for devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from edgespec.cli.options import option
from edgespec.cli.running import FAILED, fail, reported, run, say
from edgespec.config import ConfigError
from edgespec.config.common import needs
from edgespec.core.device.memory import KvType
from edgespec.device.export.export import work_folder
from edgespec.models.draft_sources import find_draft
from edgespec.models.folders import (
    DRAFT_MANIFEST,
    ModelFolderError,
    Role,
    check_checkpoint,
    model_info,
    resolve_model,
    token_count,
    trained_length,
)

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
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            fail(f"{out} is not an empty folder; choose another", FAILED)
        if optimum is None:
            _export(source, out, bits, context_length, kv_type)
        elif (context_length, kv_type) != (0, KvType.FLOAT32):
            raise ConfigError("--optimum takes no --context-length and no --kv-type")
        else:
            run(_export_by_optimum(optimum, source, out, bits))


def _export(source: str, out: Path, bits: int, context_length: int, kv_type: KvType) -> None:
    with needs("onnx", "edgespec[export]"):
        from edgespec.device.export.export import export_draft

        folder = resolve_model(source, Role.TARGET)
        check_checkpoint(folder)
        layers = Progress(disable=not sys.stderr.isatty(), console=Console(stderr=True))
        with _placed(out) as work, layers:
            bar = layers.add_task("layers", total=None)
            manifest = export_draft(
                folder,
                work,
                model_info(folder),
                bits=bits,
                context_length=context_length,
                token_count=token_count(folder),
                kv_type=kv_type,
                trained_length=trained_length(folder),
                progress=lambda done, all_: layers.update(bar, completed=done, total=all_),
            )
    typer.echo(
        f"{out}: {manifest.layers} layers, {manifest.bits} bits, {_graph_bytes(out) / 1e6:.1f} MB,"
        f" vocabulary {manifest.model.vocabulary}\nuse it: edgespec generate ... --draft {out}"
    )


async def _export_by_optimum(python: Path, source: str, out: Path, bits: int) -> None:
    from edgespec.device.export.optimum import export_by_optimum  # numpy is late

    folder = resolve_model(source, Role.TARGET)
    if not (folder / "tokenizer.json").is_file():
        raise ModelFolderError(f"{folder / 'tokenizer.json'}: no such file")
    with _placed(out) as work:
        vocabulary = await export_by_optimum(folder, work, bits, python)
    typer.echo(
        f"{out}: by Optimum, {bits} bits, {_graph_bytes(out) / 1e6:.1f} MB, vocabulary"
        f" {vocabulary}\nuse it: edgespec generate ... --draft {out}"
    )


def _inspect(reference: str) -> None:
    """What is behind a draft reference; each graph of others is loaded and tried."""
    from edgespec.device.model_drafter import inspected

    source = find_draft(reference)
    if not source.graphs:
        info = model_info(source.folder)
        kind = (
            "a draft folder made by `edgespec export`"
            if (source.folder / DRAFT_MANIFEST).is_file()
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


def _graph_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.onnx*"))


@contextmanager
def _placed(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes ``out`` only if all went well."""
    with work_folder(out.parent) as work:
        work.chmod(0o755)  # as a folder made by anybody, not as a secret one
        yield work
        if out.is_dir():
            out.rmdir()  # it is empty
        work.rename(out)
