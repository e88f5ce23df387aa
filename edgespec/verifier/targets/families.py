"""Which models the packed pass computes correctly, read off their configuration.

Let in are decoders whose layers attend to all earlier tokens or to a window of them, with soft
caps and sinks where they have them, dense or with experts; and rotary embeddings that depend on a
token's position and nothing else. Each family is held against the library's own ``generate``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

FAMILIES: Final = {
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gpt_oss": "gpt-oss",
    "granite": "Granite",
    "llama": "Llama 2 and 3",
    "mistral": "Mistral",
    "phi3": "Phi-3 and Phi-4",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
}
"""Model types of ``config.json``, and what people call them."""
# "dynamic" changes earlier positions' angles when a text grows: cached keys go stale. So does
# "longrope" where a text grows beyond the original context, and only there.
SUPPORTED_ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
_LONGROPE: Final = "longrope"
_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message names what it has and what is supported."""


def check_family(config: Any, context_length: int | None = None) -> int:
    """The context length, prompt plus output in tokens, that a model with this transformers
    ``config`` is served with.

    Raises ``UnsupportedModelError`` naming what is not supported, ``ValueError`` for a bad
    ``context_length``.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(_unknown_type(config))
    limit = int(config.max_position_embeddings)
    length = limit if context_length is None else context_length
    if not 0 < length <= limit:
        raise ValueError(f"context_length is {length}, but must be in [1, {limit}]")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(
            "the model attends in both directions (use_bidirectional_attention); supported are "
            "causal models"
        )
    for rope in _ropes(config):
        _check_rope(rope, length)
    _check_layers(config)
    return length


def _unknown_type(config: Any) -> str:
    supported = ", ".join(f"{kind} ({name})" for kind, name in FAMILIES.items())
    hint = ""
    if getattr(config, "text_config", None) is not None:
        hint = " (a model of text and other media; serve a checkpoint of its text model alone)"
    return f"model type {config.model_type!r} is not supported{hint}; supported are {supported}"


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary parameters of the model, or of each of its kinds of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    if _LAYER_TYPES.isdisjoint(rope):
        yield rope
    else:
        yield from (part for kind, part in rope.items() if kind in _LAYER_TYPES)


def _check_rope(rope: dict[str, Any], length: int) -> None:
    kind = rope.get("rope_type", "default")
    if kind in SUPPORTED_ROPE_TYPES:
        return
    if kind != _LONGROPE:
        raise UnsupportedModelError(
            f"rope type {kind!r} depends on the length of the text and would spoil cached keys; "
            f"supported are {', '.join(SUPPORTED_ROPE_TYPES)}, {_LONGROPE} up to its original "
            "context"
        )
    original = rope.get("original_max_position_embeddings") or 0
    if length > original:
        raise UnsupportedModelError(
            f"rope type {kind!r} changes all angles in texts of more than {original} tokens and "
            f"would spoil cached keys, but the context is {length}; limit it with "
            f"--max-model-len {original}"
        )


def _check_layers(config: Any) -> None:
    """A layer's window itself comes with its calls of attention."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    other = sorted(kinds - _LAYER_TYPES)
    if other:
        raise UnsupportedModelError(
            f"layer types {', '.join(other)} are not supported; supported are "
            f"{', '.join(sorted(_LAYER_TYPES))}"
        )
    slides = "sliding_attention" in kinds if kinds else window is not None
    if slides and (window is None or window < 1):
        raise UnsupportedModelError(
            f"layers have sliding attention, but sliding_window is {window}; must be at least 1"
        )
