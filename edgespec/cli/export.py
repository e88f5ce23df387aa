"""``edgespec export``: a Hugging Face checkpoint to a draft folder for devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.running import FAILED, fail, reported
from edgespec.compose import needs
from edgespec.core.device.kv_type import KvType
from edgespec.models.folders import Role, check_folder, model_info, resolve_model, token_count

DEFAULT_BITS = 4


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
) -> None:
    """Write the ONNX draft model of a checkpoint, with its tokenizer.

    [dim]edgespec export ./my-small-model ./draft --bits 4[/]
    """
    with reported():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            fail(f"{out} is not an empty folder; choose another", FAILED)
        with needs("onnx", "edgespec[export]"):
            from edgespec.drafters.export import export_draft

            folder = resolve_model(source, Role.TARGET)
            check_folder(folder, Role.TARGET)
            manifest = export_draft(
                folder,
                out,
                model_info(folder),
                bits=bits,
                table_bits=table_bits,
                context_length=context_length,
                token_count=token_count(folder),
                kv_type=kv_type,
            )
        size_mb = sum(file.stat().st_size for file in out.glob("model.onnx*")) / 1e6
        typer.echo(
            f"{out}: {manifest.layers} layers, {manifest.bits} bits, {size_mb:.1f} MB, vocabulary"
            f" {manifest.model.vocabulary}\nuse it: edgespec generate ... --draft {out}"
        )
