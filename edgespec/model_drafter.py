"""A drafter on a model: a draft folder of ours, a checkpoint exported now, or a graph of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgespec.config import DraftSection
from edgespec.models.draft_sources import find_draft, resolve_texts
from edgespec.models.folders import DRAFT_MANIFEST, model_info
from edgespec.ports import Drafter
from edgespec.setup_error import needs

Say = Callable[[str], None]


def model_drafter(draft: DraftSection, tokenizer: str, say: Say) -> Drafter:
    """What ``draft.model`` leads to, loaded. ``tokenizer`` names the one that is used with it, for
    a graph that has none of its own; empty: the draft's. ``say`` hears what takes long. Raises
    ``SetupError``, or ``ValueError`` naming the file."""
    source = find_draft(draft.model, draft.variant)
    if source.graphs:
        from edgespec.foreign_drafts import foreign_drafter

        texts = resolve_texts(tokenizer) if tokenizer else None
        with needs("onnxruntime", "edgespec[cpu]"):
            return foreign_drafter(
                source,
                say,
                tokenizer=texts,
                threads=draft.threads,
                context_length=draft.context_length,
            )
    folder = _draft_folder(source.folder, draft.bits, say)
    with needs("onnxruntime", "edgespec[cpu]"):
        from edgespec.drafters.onnx_drafter import OnnxDrafter
    return OnnxDrafter(folder, threads=draft.threads, context_length=draft.context_length)


def _draft_folder(folder: Path, bits: int, say: Say) -> Path:
    if (folder / DRAFT_MANIFEST).is_file():
        model_info(folder)  # refuses a folder whose tokenizer is not the draft's any more
        return folder
    from edgespec.export_cache import exported

    with needs("onnx", "edgespec[export]"):
        return exported(folder, bits, say)
