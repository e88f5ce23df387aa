"""A drafter on a model: a draft folder of ours, a checkpoint exported now, or a graph of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgespec.config import DraftSection, PolicySection
from edgespec.core.device.kv_type import KvType
from edgespec.drafters.manifest import MODEL_FILE
from edgespec.models.draft_sources import find_draft, resolve_texts
from edgespec.models.folders import DRAFT_MANIFEST, model_info
from edgespec.ports import Drafter
from edgespec.setup_error import SetupError, needs
from edgespec.thread_choice import load_with_best_threads

Say = Callable[[str], None]
_CPU = ("CPUExecutionProvider",)


def model_drafter(draft: DraftSection, tokenizer: str, policy: PolicySection, say: Say) -> Drafter:
    """What ``draft.model`` leads to, loaded. ``tokenizer`` names the one that is used with it, for
    a graph that has none of its own; empty: the draft's. ``policy`` says how many guesses of a step
    are wanted, which a memory budget may cut down, and behind how many leaves. ``say`` hears what
    takes long, and why a step has one leaf. Raises ``SetupError``, or ``ValueError`` naming the
    file."""
    source = find_draft(draft.model, draft.variant)
    leaves = _leaves(draft, policy.leaves, graph=bool(source.graphs), say=say)
    if source.graphs:
        _refuse_for_graphs(draft)
        from edgespec.foreign_drafts import foreign_drafter

        texts = resolve_texts(tokenizer) if tokenizer else None
        with needs("onnxruntime", "edgespec[cpu]"):
            return foreign_drafter(
                source,
                say,
                tokenizer=texts,
                threads=draft.threads,
                context_length=draft.context_length,
                providers=_providers(draft, say),
                try_threads=True,
            )
    if draft.memory_budget:
        if draft.provider != "cpu":
            raise SetupError(
                f"draft.provider is {draft.provider}, but a memory budget is planned for cpu only"
            )
        from edgespec.draft_memory import planned_drafter

        return planned_drafter(draft, policy.width, say)
    folder = _draft_folder(source.folder, draft, say)
    with needs("onnxruntime", "edgespec[cpu]"):
        from edgespec.drafters.onnx_drafter import is_small

        providers = _providers(draft, say)
    load = _loader(folder, draft, leaves, providers, say)
    if draft.threads:
        return load(draft.threads)
    tried = providers == _CPU and not is_small(folder)
    return load_with_best_threads(load, folder / MODEL_FILE, say, tried=tried)


def _loader(
    folder: Path, draft: DraftSection, leaves: int, providers: tuple[str, ...], say: Say
) -> Callable[[int], Drafter]:
    """Loads the draft folder of ours with so many threads, 0 by its size; with one leaf a step,
    and ``say`` hears why, where the graph takes no more."""
    from edgespec.drafters.onnx_drafter import OnnxDrafter

    def plain(threads: int) -> Drafter:
        return OnnxDrafter(
            folder,
            threads=threads,
            context_length=draft.context_length,
            window=draft.window,
            providers=providers,
        )

    def with_leaves(threads: int) -> Drafter:
        from edgespec.drafters.onnx_tree_drafter import OnnxTreeDrafter
        from edgespec.drafters.tree_graph import TreeGraphError

        try:
            return OnnxTreeDrafter(
                folder,
                leaves,
                threads=threads,
                context_length=draft.context_length,
                providers=providers,
            )
        except TreeGraphError as error:
            say(f"one leaf a draft step: {error}")
            return plain(threads)

    return plain if leaves == 1 else with_leaves


def _providers(draft: DraftSection, say: Say) -> tuple[str, ...]:
    """What the draft's session may run on. Raises ``SetupError`` naming what there is."""
    from edgespec.drafters.manifest import DraftModelError
    from edgespec.drafters.providers import execution_providers, told

    try:
        found = execution_providers(draft.provider)
    except DraftModelError as error:
        raise SetupError(str(error)) from error
    if draft.provider == "auto":
        say(f"the draft runs on {told(found)}")
    return found


def _leaves(draft: DraftSection, wanted: int, *, graph: bool, say: Say) -> int:
    """Leaves a step; 1, and ``say`` hears why, where the draft takes no more."""
    if wanted == 1:
        return 1
    reasons = {
        "graphs that others exported take no tree": graph,
        "a draft within a memory budget gives rows back to the system": draft.memory_budget,
        "a sliding window holds one text": draft.window,
        "guesses from the text follow one branch": draft.lookup,
    }
    found = [why for why, holds in reasons.items() if holds]
    if found:
        say(f"one leaf a draft step: {found[0]}")
    return 1 if found else wanted


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
    from edgespec.export_cache import exported

    with needs("onnx", "edgespec[export]"):
        return exported(folder, draft.bits, say, draft.kv_type or KvType.FLOAT32)
