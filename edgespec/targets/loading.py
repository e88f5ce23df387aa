"""Open a causal language model from a folder or a hub id, or refuse it by name.

Only what the packed pass computes correctly is let in: dense models in which every layer attends
to all earlier tokens, and rotary embeddings that depend on a token's position and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from edgespec.targets import packed_attention
from edgespec.targets.tensor_parallel_model import (
    Share,
    check_shareable,
    loading_options,
    share_layers,
)

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# "dynamic" and "longrope" change earlier positions' angles when a text grows: cached keys go stale.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message names what it has and what is supported."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any
    """A transformers causal language model in evaluation mode."""
    layer_count: int
    key_width: int
    """Key-value heads times head dimension, of this rank."""
    vocabulary_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    ranks: int = 1
    """Over how many processes heads and inner columns are shared, evenly."""


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    context_length: int | None = None,
    share: Share | None = None,
) -> LoadedModel:
    """Load ``path`` (folder or hub id; safetensors only, no code from the model's repository).

    ``dtype`` is float32, bfloat16, float16 or auto (float32 on a CPU, where the text is to equal
    any other float32 run of the model; else what the checkpoint says); ``device`` is cpu, cuda,
    cuda:N or auto. ``context_length`` limits prompt plus output below the model's own. With
    ``share`` only that rank's part is loaded.
    Raises ``UnsupportedModelError``, ``ValueError`` for a bad option, ``OSError`` when not found.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but must be auto, {', '.join(DTYPES)}")
    where = _device(device)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    served_length = check_supported(config, context_length)
    ranks = 1 if share is None else share.world_size
    check_shareable(config, ranks)
    packed_attention.register()
    model: Any = AutoModelForCausalLM.from_pretrained(
        path,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=_dtype(dtype, where),
        attn_implementation=packed_attention.IMPLEMENTATION,
        **({} if share is None else loading_options(share)),
    )
    if share is not None:
        share_layers(model, share)
    model = model.to(where).eval()
    _check_weights(path, model)
    heads = config.num_key_value_heads or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    return LoadedModel(
        model=model,
        layer_count=config.num_hidden_layers,
        key_width=heads * (head_dim or config.hidden_size // config.num_attention_heads) // ranks,
        vocabulary_size=config.vocab_size,
        context_length=served_length,
        eos_token_ids=_eos(model),
        dtype=model.dtype,
        device=where,
        ranks=ranks,
    )


def _check_weights(path: str, model: Any) -> None:
    """Raises ``UnsupportedModelError`` naming the first tensor that holds NaN or infinity."""
    for name, tensor in model.named_parameters():
        low, high = torch.aminmax(tensor.detach())  # both are NaN where any element is
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise UnsupportedModelError(
                f"{path}: the checkpoint is damaged: tensor {name} holds NaN or infinite values"
            )


def check_supported(config: Any, context_length: int | None = None) -> int:
    """The context length to serve, in tokens. Raises ``UnsupportedModelError``."""
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not supported; supported are "
            f"{', '.join(SUPPORTED_MODEL_TYPES)} (dense, full attention)"
        )
    limit = int(config.max_position_embeddings)
    length = limit if context_length is None else context_length
    if not 0 < length <= limit:
        raise ValueError(f"context_length is {length}, but must be in [1, {limit}]")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError("quantised checkpoints are not supported; use the dense one")
    _check_rope(config)
    _check_layers(config, length)
    return length


def _check_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope type {kind!r} depends on the length of the text and would spoil cached keys; "
            f"supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
        )


def _check_layers(config: Any, length: int) -> None:
    """A sliding window that is never shorter than the text does nothing and is let pass."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if other:
        raise UnsupportedModelError(
            f"layer types {', '.join(other)} are not supported; supported is full_attention"
        )
    slides = "sliding_attention" in kinds if kinds else window is not None
    if slides and (window is None or window < length):
        raise UnsupportedModelError(
            f"sliding-window attention is not supported: the window is {window} tokens and the "
            f"context {length}; set context_length to at most the window to use full attention"
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}, but must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but no CUDA device is available")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device.type == "cpu" else "auto"


def _eos(model: Any) -> tuple[int, ...]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
