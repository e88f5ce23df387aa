"""``edgespec draft inspect``: what is behind a draft reference, and how it would be used here."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.cli.running import EXIT_CODES, reported, say
from edgespec.config.setup_error import needs
from edgespec.device.foreign_drafts import Inspection, inspect_graph
from edgespec.models.draft_sources import AUTO, DraftSource, find_draft
from edgespec.models.folders import DRAFT_MANIFEST, model_info

draft = typer.Typer(
    name="draft",
    help="Look at draft models.",
    no_args_is_help=True,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@draft.callback(epilog=EXIT_CODES)
def _group() -> None:
    """Look at draft models.

    [dim]edgespec draft inspect ./Qwen3-0.6B-ONNX[/]
    """


@draft.command(epilog=EXIT_CODES)
def inspect(
    reference: Annotated[str, typer.Argument(help="A folder, an .onnx file or a Hub id")],
    variant: Annotated[
        str, typer.Option("--draft-variant", metavar="NAME", help="Only this one: q4, fp16, ...")
    ] = AUTO,
) -> None:
    """Say what a draft is, and of a graph that others exported what was found in it.

    Each graph is loaded and tried: cache, rollback, feeds of several tokens, time of a step.

    [dim]edgespec draft inspect ./Qwen3-0.6B-ONNX --draft-variant q4[/]
    """
    with reported():
        source = find_draft(reference, variant)
        if not source.graphs:
            typer.echo(_ours(source))
            return
        with needs("onnxruntime", "edgespec[cpu]"):
            failed: ValueError | None = None
            for name in source.graphs:
                try:
                    typer.echo(_shown(inspect_graph(source, name)))
                except ValueError as error:
                    if len(source.graphs) == 1:
                        raise
                    failed = error
                    say(f"{name}: cannot be used: {error}")
        if failed:
            raise failed


def _ours(source: DraftSource) -> str:
    info = model_info(source.folder)
    kind = (
        "a draft folder made by `edgespec export`"
        if (source.folder / DRAFT_MANIFEST).is_file()
        else "a checkpoint: exported once, when it first drafts"
    )
    return (
        f"{source.folder}: {kind}; vocabulary {info.vocabulary} ({info.vocabulary_size} ids),"
        f" context {info.context_length}"
    )


def _shown(found: Inspection) -> str:
    graph, behaviour, info = found.graph, found.behaviour, found.info
    cache = graph.caches[0]
    layout = "tokens, heads" if cache.tokens_first else "heads, tokens"
    rollback = (
        "sets a length, copies nothing"
        if behaviour.in_place
        else f"copies what is kept, {graph.cache_bytes_per_token} bytes a token"
        f" ({behaviour.reason})"
    )
    feeds = "several tokens" if behaviour.chunks else "one token at a time behind the first feed"
    inputs = ", ".join(f"{port.name} {port.dtype}" for port in graph.roles.values())
    rows = "every token fed" if found.all_rows else "the last token"
    return "\n".join(
        (
            f"{found.variant}: {found.path} ({found.weights_bytes / 1e6:.1f} MB)",
            f"  vocabulary   {info.vocabulary} ({info.vocabulary_size} ids)",
            f"  context      {info.context_length} tokens, end {list(info.eos_token_ids)}",
            f"  inputs       {inputs}",
            f"  cache        {graph.layers} layers of {cache.heads} heads of {cache.head_size},"
            f" {cache.dtype}, [1, {layout}, head size], {cache.past} ...",
            f"  logits       {graph.logits.dtype}, of {rows}",
            f"  rollback     {rollback}",
            f"  feeds        {feeds}",
            f"  a step       {found.step_s * 1e3:.1f} ms here",
        )
    )
