"""What the files beside a graph of others say of it: names and sizes that are not in the graph.

``config.json`` (also with a ``text_config`` inside, and with the older names of sizes) and
``genai_config.json`` are read, whichever is there; ids that end a text come from
``generation_config.json`` first. The fingerprint is that of the folder's ``tokenizer.json``, so
such a draft is compared with the target as one of ours is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.core.ports import ModelInfo
from edgespec.models.draft_sources import GENAI_CONFIG, genai_model
from edgespec.models.folders import ModelFolderError, eos_ids, eos_token_ids, read_json, token_count
from edgespec.models.vocabulary import vocabulary_fingerprint

_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True)
class ForeignInfo:
    """``kv_heads`` and ``head_size`` are 0 where no file tells them."""

    model: ModelInfo
    token_count: int
    kv_heads: int = 0
    head_size: int = 0


def read_foreign_info(folder: Path, name: str, tokenizer: Path | None = None) -> ForeignInfo:
    """``tokenizer`` is the folder of another tokenizer to go with the graph, for a folder that has
    none. Raises ``ModelFolderError`` or ``VocabularyError`` naming the file and the field."""
    path = folder / "config.json"
    config = _text_config(read_json(path)) if path.is_file() else {}
    genai = genai_model(folder)
    if not config and not genai:
        raise ModelFolderError(f"{folder}: there is neither config.json nor {GENAI_CONFIG}")
    texts = folder if tokenizer is None or (folder / "tokenizer.json").is_file() else tokenizer
    decoder = genai.get("decoder")
    decoder = decoder if isinstance(decoder, dict) else {}
    context = _first(config, _CONTEXT) or _first(genai, ("context_length",))
    if not context:
        raise ModelFolderError(
            f"{folder}: neither config.json ({', '.join(_CONTEXT)}) nor {GENAI_CONFIG}"
            " (context_length) tells the context length as a positive integer"
        )
    heads = _first(config, _HEADS) or _first(decoder, _HEADS)
    hidden = _first(config, _HIDDEN) or _first(decoder, _HIDDEN)
    known = token_count(texts)
    return ForeignInfo(
        ModelInfo(
            name,
            vocabulary_fingerprint(texts / "tokenizer.json"),
            _first(config, ("vocab_size",)) or _first(genai, ("vocab_size",)) or known,
            context,
            _ends(folder, genai),
        ),
        known,
        _first(config, ("num_key_value_heads",))
        or _first(decoder, ("num_key_value_heads",))
        or heads,
        _first(config, ("head_dim",))
        or _first(decoder, ("head_size",))
        or (hidden // heads if heads else 0),
    )


def _text_config(config: dict[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first that is a positive integer, else 0."""
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _ends(folder: Path, genai: Mapping[str, Any]) -> tuple[int, ...]:
    if (folder / "config.json").is_file() and (found := eos_token_ids(folder)):
        return found
    if genai.get("eos_token_id") is None:
        return ()
    return eos_ids(folder / GENAI_CONFIG, genai["eos_token_id"])
