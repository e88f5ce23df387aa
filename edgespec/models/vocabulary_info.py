"""What a drafter without a model has to know of the target: its vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgespec.core.ports import ModelInfo
from edgespec.models.folders import DRAFT_MANIFEST, model_info, token_count
from edgespec.models.vocabulary import vocabulary_fingerprint


def vocabulary_info(folder: Path, context_length: int) -> ModelInfo:
    """The vocabulary of a model's folder, or of one that holds a ``tokenizer.json`` and no more,
    with a context of this length. Raises ``ModelFolderError`` or ``VocabularyError``, naming the
    file."""
    if any((folder / name).is_file() for name in (DRAFT_MANIFEST, "config.json")):
        return replace(model_info(folder), context_length=context_length)
    vocabulary = vocabulary_fingerprint(folder / "tokenizer.json")
    return ModelInfo(folder.name, vocabulary, token_count(folder), context_length)
