"""``edgespec export``: a Hugging Face checkpoint to a draft folder for devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from edgespec.cli.running import FAILED, fail, reported, run, say
from edgespec.config import ConfigError
from edgespec.config.setup_error import needs
from edgespec.core.device.memory import KvType
from edgespec.device.drafters.manifest import MAX_CONTEXT_LENGTH
from edgespec.device.export.export_cache import WORK_PREFIX
from edgespec.device.export.kinds import KINDS, OWN
from edgespec.device.export.work_folder import work_folder
from edgespec.models.folders import (
    ModelFolderError,
    Role,
    check_checkpoint,
    model_info,
    resolve_model,
    token_count,
    trained_length,
)

DEFAULT_BITS = 4
_SHOWN = 100
"""Characters of a program's words."""


def export(
    source: Annotated[str, typer.Argument(help="Hugging Face folder or Hub id")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not hold anything yet")],
    bits: Annotated[int, typer.Option("--bits", help="Of the weights: 4, 8 or 32")] = DEFAULT_BITS,
    table_bits: Annotated[
        int, typer.Option("--table-bits", help="Of embedding and head; 0: as --bits")
    ] = 0,
    context_length: Annotated[
        int, typer.Option("--context-length", help="0: the model's own, at most 16384")
    ] = 0,
    kv_type: Annotated[
        KvType, typer.Option("--kv-type", help="Of cached keys and values")
    ] = KvType.FLOAT32,
    layers: Annotated[
        int,
        typer.Option("--layers", metavar="N", help="Only the first N: an early exit; 0: all"),
    ] = 0,
    keep_vocabulary: Annotated[
        Path | None,
        typer.Option(
            "--keep-vocabulary",
            metavar="FILE",
            help="Propose only these token ids, or the tokens of this text",
        ),
    ] = None,
    trained: Annotated[
        int,
        typer.Option(
            "--trained-length",
            metavar="TOKENS",
            min=0,
            max=MAX_CONTEXT_LENGTH,
            help="How long the texts were that it was trained on, if that is less than its context:"
            " it then looks at so many tokens. 0: what config.json says, else the whole context",
        ),
    ] = 0,
    exporter: Annotated[
        str, typer.Option("--exporter", help="edgespec, or for other families: " + ", ".join(KINDS))
    ] = OWN,
    exporter_python: Annotated[
        Path | None,
        typer.Option(
            "--exporter-python",
            metavar="PATH",
            help="Python that has what the exporter needs (default: an environment is made, once)",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Compare the graph with the checkpoint"),
    ] = True,
) -> None:
    """Write the ONNX draft model of a checkpoint, with its tokenizer.

    What was written is decoded in several ways and compared with the checkpoint; if it differs by
    more than rounding, nothing is left and the difference is told.

    [dim]edgespec export ./my-small-model ./draft --bits 4[/]

    [dim]edgespec export Qwen/Qwen3-0.6B ./draft --layers 14 --keep-vocabulary corpus.txt[/]

    [dim]edgespec export ./olmo ./draft --exporter optimum --exporter-python ./env/bin/python[/]
    """
    with reported():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            fail(f"{out} is not an empty folder; choose another", FAILED)
        own = (table_bits, context_length, layers, keep_vocabulary, kv_type, trained)
        if exporter != OWN:
            _check_own(default=own == (0, 0, 0, None, KvType.FLOAT32, 0))
            run(_export_by_another(exporter, exporter_python, source, out, bits, check))
            return
        if exporter_python is not None:
            raise ConfigError("--exporter-python goes with --exporter " + "|".join(KINDS))
        with needs("onnx", "edgespec[export]"):
            from edgespec.device.export.export import export_draft
            from edgespec.device.export.parity import check_parity
            from edgespec.models.kept_vocabulary import read_kept_ids

            folder = resolve_model(source, Role.TARGET)
            check_checkpoint(folder)
            kept = read_kept_ids(keep_vocabulary, folder) if keep_vocabulary else ()
            difference: float | None = None
            with _placed(out) as work, _bar() as progress:
                manifest = export_draft(
                    folder,
                    work,
                    model_info(folder),
                    bits=bits,
                    table_bits=table_bits,
                    context_length=context_length,
                    token_count=token_count(folder),
                    kv_type=kv_type,
                    layers=layers,
                    kept=kept,
                    trained_length=trained or trained_length(folder),
                    progress=progress,
                )
                if check:
                    difference = check_parity(folder, work, manifest, kept)
        if difference is not None:
            say(
                "checked against the checkpoint in one pass, in chunks and after rollbacks: logits"
                f" differ by {difference:.2g} standard deviations at most"
            )
        size_mb = _graph_bytes(out) / 1e6
        ids = manifest.model.vocabulary_size
        proposes = f", proposes {manifest.kept_count} of {ids} ids" if manifest.kept_count else ""
        typer.echo(
            f"{out}: {manifest.layers} layers, {manifest.bits} bits, {size_mb:.1f} MB, vocabulary"
            f" {manifest.model.vocabulary}{proposes}\nuse it: edgespec generate ... --draft {out}"
        )


def _check_own(*, default: bool) -> None:
    """Raises ``ConfigError`` unless what our own exporter alone knows is as it is by default."""
    if not default:
        raise ConfigError(
            "--table-bits, --context-length, --layers, --keep-vocabulary, --kv-type and"
            f" --trained-length are of --exporter {OWN} only"
        )


async def _export_by_another(
    name: str, python: Path | None, source: str, out: Path, bits: int, check: bool
) -> None:
    from edgespec.device.export.run import export_by  # numpy is late

    if (kind := KINDS.get(name)) is None:
        known = ", ".join((OWN, *KINDS))
        raise ConfigError(f"--exporter is {name!r}, but must be one of: {known}")
    folder = resolve_model(source, Role.TARGET)
    if not (folder / "tokenizer.json").is_file():
        raise ModelFolderError(f"{folder / 'tokenizer.json'}: no such file")
    with _placed(out) as work, _line() as hear:
        found = await export_by(
            kind, folder, work, bits, python=python, check=check, say=say, hear=hear
        )
    if found.difference is not None:
        say(
            "checked against the checkpoint in one pass, in chunks and after rollbacks: logits"
            f" differ by {found.difference:.2g} standard deviations at most"
        )
    size_mb = _graph_bytes(out) / 1e6
    typer.echo(
        f"{out}: {found.layers} layers by {name}, {bits} bits, {size_mb:.1f} MB, vocabulary"
        f" {found.vocabulary}\nuse it: edgespec generate ... --draft {out}"
    )


def _graph_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.onnx*"))


@contextmanager
def _placed(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes ``out`` only if all went well."""
    with work_folder(out.parent, WORK_PREFIX) as work:
        work.chmod(0o755)  # as a folder made by anybody, not as a secret one
        yield work
        if out.is_dir():
            out.rmdir()  # it is empty
        work.rename(out)


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("layers", total=None)

        def show(done: int, layers: int) -> None:
            bar.update(task, completed=done, total=layers)
            if done == layers:
                bar.update(task, description="writing, checking")

        yield show


@contextmanager
def _line() -> Iterator[Callable[[str], None]]:
    """A line on stderr, on a terminal, that shows the last words of a program at work."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda words: bar.update(task, description=words[:_SHOWN])
