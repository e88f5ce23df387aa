"""A drafter on a model: a draft folder of ours, a checkpoint exported now, or a graph of others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.config import DraftSection, PolicySection
from edgespec.config.common import SetupError, needs
from edgespec.core.device.memory import KvType
from edgespec.core.ports import Drafter
from edgespec.models.draft_sources import DraftSource, find_draft, read_foreign_info, resolve_texts
from edgespec.models.folders import DRAFT_MANIFEST, model_info

if TYPE_CHECKING:
    from edgespec.device.drafters.onnx_drafter import ForeignDrafter
    from edgespec.device.drafters.runtime_session import Placement

Say = Callable[[str], None]
CPU = "cpu"
_DEFAULT = DraftSection()


def model_drafter(draft: DraftSection, tokenizer: str, policy: PolicySection, say: Say) -> Drafter:
    """What ``draft.model`` leads to, loaded. ``tokenizer`` names the one that is used with it, for
    a graph that has none of its own; empty: the draft's. ``policy`` says how many guesses of a step
    are wanted, which a memory budget may cut down. ``say`` hears what takes long, and of what an
    accelerator runs. Raises ``SetupError``, or ``ValueError`` naming the file."""
    source = find_draft(draft.model, draft.variant)
    if source.graphs:
        _refuse_for_graphs(draft)
        texts = resolve_texts(tokenizer) if tokenizer else None
        with needs("onnxruntime", "edgespec[cpu]"):
            foreign = foreign_drafter(source, say, draft, texts)
        return _checked(foreign, foreign.placement, draft.provider, say)
    if draft.memory_budget:
        if draft.provider != CPU:
            raise SetupError(
                f"draft.provider is {draft.provider}, but a memory budget is planned for cpu only"
            )
        from edgespec.device.draft_memory import planned_drafter

        return planned_drafter(draft, policy.width, say)
    folder = _draft_folder(source.folder, draft, say)
    with needs("onnxruntime", "edgespec[cpu]"):
        from edgespec.device.drafters.onnx_drafter import OnnxDrafter
        from edgespec.device.drafters.runtime_session import EXECUTION
    own = OnnxDrafter(
        folder,
        threads=draft.threads,
        context_length=draft.context_length,
        window=draft.window,
        providers=EXECUTION[draft.provider],
    )
    return _checked(own, own.placement, draft.provider, say)


def foreign_drafter(
    source: DraftSource, say: Say, draft: DraftSection = _DEFAULT, tokenizer: Path | None = None
) -> ForeignDrafter:
    """A drafter on the first graph of ``source`` that can be used; ``say`` hears why others cannot.
    ``tokenizer`` is a folder whose tokenizer goes with a graph that has none. Raises ``ValueError``
    naming the first file where none can."""
    from edgespec.device.drafters.decoder_graph import HeadHint
    from edgespec.device.drafters.onnx_drafter import ForeignDrafter
    from edgespec.device.drafters.runtime_session import EXECUTION

    found = read_foreign_info(source.folder, source.name, tokenizer)
    first_error: ValueError | None = None
    for variant, path in source.graphs.items():
        try:
            return ForeignDrafter(
                path,
                found.model,
                hint=HeadHint(found.kv_heads, found.head_size),
                threads=draft.threads,
                context_length=draft.context_length,
                token_count=found.token_count,
                providers=EXECUTION[draft.provider],
            )
        except ValueError as error:
            if len(source.graphs) > 1:
                say(f"{variant} is left out: {error}")
            first_error = first_error or error
    raise first_error or ValueError(f"{source.folder}: no graph")


def inspected(source: DraftSource, variant: str) -> str:
    """What is found in one graph of ``source``, which is loaded and tried, in lines for people.
    Raises ``ValueError`` naming the file."""
    path = source.graphs[variant]
    drafter = foreign_drafter(replace(source, graphs={variant: path}), lambda text: None)
    try:
        graph, behaviour, info = drafter.graph, drafter.behaviour, drafter.info
        size_mb = drafter.weights_bytes / 1e6
    finally:
        drafter.close()
    cache = graph.caches[0]
    layout = "tokens, heads" if cache.tokens_first else "heads, tokens"
    rollback = (
        "sets a length, copies nothing"
        if behaviour.in_place
        else f"copies what is kept, {sum(one.row_bytes for one in graph.caches)} bytes a token"
    )
    feeds = "several tokens" if behaviour.chunks else "one token at a time behind the first feed"
    inputs = ", ".join(f"{port.name} {port.dtype}" for port in graph.roles.values())
    rows = "every token fed" if behaviour.all_rows else "the last token"
    return "\n".join(
        (
            f"{variant}: {path} ({size_mb:.1f} MB)",
            f"  vocabulary   {info.vocabulary} ({info.vocabulary_size} ids)",
            f"  context      {info.context_length} tokens, end {list(info.eos_token_ids)}",
            f"  inputs       {inputs}",
            f"  cache        {len(graph.caches) // 2} layers of {cache.heads} heads of"
            f" {cache.head_size}, {cache.dtype}, [1, {layout}, head size], {cache.past} ...",
            f"  logits       {graph.logits.dtype}, of {rows}",
            f"  rollback     {rollback}",
            f"  feeds        {feeds}",
        )
    )


def _checked(drafter: Drafter, placement: Placement | None, provider: str, say: Say) -> Drafter:
    """``drafter``, of which an accelerator runs something. Raises ``SetupError`` otherwise."""
    if provider == CPU:
        return drafter
    if placement is not None and not placement.taken:
        with suppress(Exception):
            drafter.close()
        raise SetupError(f"provider {provider} runs no node of this draft's graph")
    say(f"the draft runs on {provider}" + (f": {placement}" if placement else ""))
    return drafter


def _refuse_for_graphs(draft: DraftSection) -> None:
    """What is planned for exports of our own only. Raises ``SetupError``."""
    asked = {
        "memory_budget": draft.memory_budget,
        "kv_type": draft.kv_type,
        "window": draft.window,
    }
    for name, value in asked.items():
        if value:
            raise SetupError(
                f"draft.{name} is {value}, but {draft.model} is a graph that others exported:"
                " only drafts that `edgespec export` writes can be bounded"
            )


def _draft_folder(folder: Path, draft: DraftSection, say: Say) -> Path:
    if (folder / DRAFT_MANIFEST).is_file():
        model_info(folder)  # refuses a folder whose tokenizer is not the draft's any more
        return folder
    from edgespec.device.export.export import exported

    with needs("onnx", "edgespec[export]"):
        return exported(folder, draft.bits, say, draft.kv_type or KvType.FLOAT32)
