"""Open a causal language model from a folder or a hub id, or refuse it by name.

``families.py`` says which models the packed pass computes correctly, ``strict_weights.py`` that
a checkpoint must fill its model to the last tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from edgespec.targets import packed_attention
from edgespec.targets.families import UnsupportedModelError, check_family
from edgespec.targets.strict_weights import check_loading, check_numbers

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any
    """A transformers causal language model in evaluation mode."""
    layer_count: int
    key_width: int
    """Key-value heads times head dimension."""
    vocabulary_size: int
    context_length: int
    window: int | None
    """Of the layers with sliding attention, in tokens; None where all see the whole text."""
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def load_model(
    path: str, *, dtype: str = "auto", device: str = "auto", context_length: int | None = None
) -> LoadedModel:
    """Load ``path`` (folder or hub id; safetensors only, no code from the model's repository).

    ``dtype`` is float32, bfloat16, float16 or auto (float32 on a CPU, where the text is to equal
    any other float32 run of the model; else what the checkpoint says); ``device`` is cpu, cuda,
    cuda:N or auto. ``context_length`` limits prompt plus output below the model's own.
    Raises ``UnsupportedModelError``, ``ValueError`` for a bad option, ``OSError`` when not found.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but must be auto, {', '.join(DTYPES)}")
    where = _device(device)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    shape = check_family(config, context_length)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError("quantised checkpoints are not supported; use the dense one")
    packed_attention.register()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=_dtype(dtype, where),
        attn_implementation=packed_attention.IMPLEMENTATION,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are named with all other faults instead
    )
    model, info = loaded
    check_loading(path, info)
    model = model.to(where).eval()
    check_numbers(path, model)
    heads = config.num_key_value_heads or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    return LoadedModel(
        model=model,
        layer_count=config.num_hidden_layers,
        key_width=heads * (head_dim or config.hidden_size // config.num_attention_heads),
        vocabulary_size=config.vocab_size,
        context_length=shape.context_length,
        window=shape.window,
        eos_token_ids=_eos(model),
        dtype=model.dtype,
        device=where,
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
