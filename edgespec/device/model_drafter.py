"""A drafter on a model: a draft folder of ours, a checkpoint exported now, or a graph of others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from edgespec.config import DraftSection, PolicySection
from edgespec.config.setup_error import SetupError, needs
from edgespec.core.device.memory import KvType
from edgespec.core.ports import Drafter
from edgespec.device.drafters.manifest import MODEL_FILE
from edgespec.device.provider_choice import PlacedDrafter, load_where_asked, load_where_quickest
from edgespec.device.thread_choice import load_with_best_threads
from edgespec.models.draft_sources import DraftSource, find_draft, resolve_texts
from edgespec.models.folders import DRAFT_MANIFEST, model_info
from edgespec.telemetry.process_memory import machine_memory

Say = Callable[[str], None]
AUTO, CPU = "auto", "cpu"
_OPENVINO = "openvino"
# It takes 4-bit weights apart: 375 MB of a draft of 0.6B became 5.5 GB while it was loaded.
_OPENVINO_PER_STORED = 16


def model_drafter(draft: DraftSection, tokenizer: str, policy: PolicySection, say: Say) -> Drafter:
    """What ``draft.model`` leads to, loaded. ``tokenizer`` names the one that is used with it, for
    a graph that has none of its own; empty: the draft's. ``policy`` says how many guesses of a step
    are wanted, which a memory budget may cut down. ``say`` hears what takes long. Raises
    ``SetupError``, or ``ValueError`` naming the file."""
    say = _once(say)
    source = find_draft(draft.model, draft.variant)
    if source.graphs:
        _refuse_for_graphs(draft)
        with needs("onnxruntime", "edgespec[cpu]"):
            return _foreign(source, draft, resolve_texts(tokenizer) if tokenizer else None, say)
    if draft.memory_budget:
        if draft.provider != "cpu":
            raise SetupError(
                f"draft.provider is {draft.provider}, but a memory budget is planned for cpu only"
            )
        from edgespec.device.draft_memory import planned_drafter

        return planned_drafter(draft, policy.width, say)
    folder = _draft_folder(source.folder, draft, say)
    with needs("onnxruntime", "edgespec[cpu]"):
        from edgespec.device.drafters.onnx_drafter import is_small

        names = _candidates(draft)
        small = is_small(folder)

    def load(name: str) -> PlacedDrafter:
        loaded = _loader(folder, draft, name)
        if draft.threads or name != CPU:
            return loaded(draft.threads)
        return load_with_best_threads(loaded, folder / MODEL_FILE, say, tried=not small)

    return _placed(load, names, draft, folder / MODEL_FILE, say)


def _foreign(source: DraftSource, draft: DraftSection, texts: Path | None, say: Say) -> Drafter:
    from edgespec.device.foreign_drafts import ForeignOptions, foreign_drafter, quickest_variant

    names = _candidates(draft)
    options = ForeignOptions(texts, draft.threads, draft.context_length)
    # Variants differ by more than providers may: one is chosen first, where it is likely to run.
    source = quickest_variant(source, say, options, names[-1] if draft.provider != AUTO else CPU)

    def load(name: str) -> PlacedDrafter:
        return foreign_drafter(source, say, options, name, try_threads=True)

    (graph,) = source.graphs.values()
    return _placed(load, names, draft, graph, say)


def _placed(
    load: Callable[[str], PlacedDrafter],
    names: tuple[str, ...],
    draft: DraftSection,
    graph: Path,
    say: Say,
) -> Drafter:
    """``load`` called with that of ``names`` on which the draft is to run."""
    loads = {name: partial(load, name) for name in names}
    if draft.provider == AUTO:
        if _OPENVINO in loads and (why := _no_room(graph)):
            say(f"{_OPENVINO} is not tried: {why}")
            del loads[_OPENVINO]
        return load_where_quickest(loads, graph, say)
    return load(CPU) if draft.provider == CPU else load_where_asked(names[-1], loads, graph, say)


def _no_room(graph: Path) -> str:
    """Why the draft at ``graph`` is too large to be tried where it may take many times its size;
    empty: it is not. Whoever asks for that by name is not stopped."""
    from edgespec.device.drafters.runtime_session import weights_bytes

    needed, free = _OPENVINO_PER_STORED * weights_bytes(graph), machine_memory().available
    if needed <= free:
        return ""
    return f"it may take {needed >> 20} MiB to load this draft, and {free >> 20} MiB are free"


def _loader(folder: Path, draft: DraftSection, provider: str) -> Callable[[int], PlacedDrafter]:
    """Loads the draft folder of ours with so many threads, 0 by its size."""
    from edgespec.device.drafters.onnx_drafter import OnnxDrafter
    from edgespec.device.drafters.providers import execution_providers

    providers = execution_providers(provider)

    def plain(threads: int) -> PlacedDrafter:
        return OnnxDrafter(
            folder,
            threads=threads,
            context_length=draft.context_length,
            window=draft.window,
            providers=providers,
        )

    return plain


def _candidates(draft: DraftSection) -> tuple[str, ...]:
    """What the draft is to be tried on. Raises ``SetupError`` naming what there is."""
    from edgespec.device.drafters.manifest import DraftModelError
    from edgespec.device.drafters.providers import candidates

    try:
        return candidates(draft.provider)
    except DraftModelError as error:
        raise SetupError(str(error)) from error


def _once(say: Say) -> Say:
    """``say``, which hears a line once: a draft is loaded several times to be tried."""
    said = set[str]()

    def first(text: str) -> None:
        if text not in said:
            said.add(text)
            say(text)

    return first


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
    from edgespec.device.export.export_cache import exported

    with needs("onnx", "edgespec[export]"):
        return exported(folder, draft.bits, say, draft.kv_type or KvType.FLOAT32)
