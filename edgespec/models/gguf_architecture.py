"""Names in a checkpoint of transformers for the metadata and tensors of a GGUF model.

llama.cpp converts checkpoints with a few changes, which are undone here:

* query and key matrices of the Llama family have their rotary dimensions interleaved;
* norms of the Gemma family have 1 added to their weights;
* the experts of a layer are one tensor;
* the factors of Llama 3's rotary scaling are a tensor instead of four numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgespec.models.gguf_file import GgufError, GgufFile, GgufTensor, type_name, values_of

Array = NDArray[Any]

_PLAIN: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED: Final = {**_IN_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_FOUR_NORMS: Final = {
    **_IN_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS: Final = {**_IN_LAYER, "ffn_gate_inp": "mlp.gate"}
_EXPERT_PARTS: Final = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_LAYER: Final = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_ROPE_FACTORS: Final = "rope_freqs.weight"
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT: Final = 8192
_WITHOUT_ROPE_EVERY: Final = 4
"""SmolLM3 leaves the rotary embedding out of every fourth layer; GGUF does not say so."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family of models."""

    model_type: str
    """The name of the family in transformers."""
    names: Mapping[str, str] = field(default_factory=lambda: _IN_LAYER, repr=False)
    """Parts of a layer: their names in GGUF and in a checkpoint."""
    is_interleaved: bool = False
    """Query and key matrices have interleaved rotary dimensions."""
    has_one_added: bool = False
    """Norms have 1 added."""
    own: Callable[[GgufFile, str], dict[str, Any]] = lambda file, prefix: {}
    """Returns the configuration that only this family has."""


def _read_gemma(file: GgufFile, prefix: str) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _list_layer_types(layers: int, full_every: int) -> list[str]:
    return [
        "sliding_attention" if (layer + 1) % full_every else "full_attention"
        for layer in range(layers)
    ]


def _read_gemma2(file: GgufFile, prefix: str) -> dict[str, Any]:
    layers = file.needed(f"{prefix}.block_count", int)
    # The 27B model scales by hidden size / heads, the others by the size of a head.
    scale = 144 if layers == 46 else file.needed(f"{prefix}.attention.key_length", int)
    return {
        **_read_gemma(file, prefix),
        "query_pre_attn_scalar": scale,
        "sliding_window": file.value(f"{prefix}.attention.sliding_window", int, 4096),
        "layer_types": _list_layer_types(layers, 2),
        "attn_logit_softcapping": file.value(f"{prefix}.attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": file.value(f"{prefix}.final_logit_softcapping", float, 30.0),
    }


def _read_gemma3(file: GgufFile, prefix: str) -> dict[str, Any]:
    layers = file.needed(f"{prefix}.block_count", int)
    theta = file.value(f"{prefix}.rope.freq_base", float, 1e6)
    whole: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if (factor := file.value(f"{prefix}.rope.scaling.factor", float, 1.0)) != 1.0:
        whole |= {"rope_type": "linear", "factor": factor}
    local = file.value(f"{prefix}.rope.freq_base_swa", float, 10_000.0)
    scale = 168 if layers == 62 else file.needed(f"{prefix}.attention.key_length", int)
    return {
        **_read_gemma(file, prefix),
        "query_pre_attn_scalar": scale,
        "sliding_window": file.needed(f"{prefix}.attention.sliding_window", int),
        "layer_types": _list_layer_types(layers, 6),
        "rope_parameters": {
            "full_attention": whole,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _read_granite(file: GgufFile, prefix: str) -> dict[str, Any]:
    return {
        "embedding_multiplier": file.value(f"{prefix}.embedding_scale", float, 1.0),
        "attention_multiplier": file.value(f"{prefix}.attention.scale", float, 1.0),
        "residual_multiplier": file.value(f"{prefix}.residual_scale", float, 1.0),
        "logits_scaling": file.value(f"{prefix}.logit_scale", float, 1.0),
    }


def _read_phi3(file: GgufFile, prefix: str) -> dict[str, Any]:
    if "rope_factors_long.weight" in file.tensors:
        raise GgufError(f"{file.path}: the long-context variant of Phi-3 (longrope) is not served")
    return {"sliding_window": file.value(f"{prefix}.attention.sliding_window", int)}


def _read_qwen3moe(file: GgufFile, prefix: str) -> dict[str, Any]:
    return {
        "num_experts": file.needed(f"{prefix}.expert_count", int),
        "num_experts_per_tok": file.needed(f"{prefix}.expert_used_count", int),
        "moe_intermediate_size": file.needed(f"{prefix}.expert_feed_forward_length", int),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _read_smollm3(file: GgufFile, prefix: str) -> dict[str, Any]:
    layers = file.needed(f"{prefix}.block_count", int)
    return {
        "no_rope_layers": [int((one + 1) % _WITHOUT_ROPE_EVERY != 0) for one in range(layers)],
        "no_rope_layer_interval": _WITHOUT_ROPE_EVERY,
    }


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama", is_interleaved=True),
    "mistral3": Architecture("mistral", is_interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _EXPERTS, own=_read_qwen3moe),
    "gemma": Architecture("gemma", has_one_added=True, own=_read_gemma),
    "gemma2": Architecture("gemma2", _FOUR_NORMS, has_one_added=True, own=_read_gemma2),
    "gemma3": Architecture("gemma3_text", _FOUR_NORMS, has_one_added=True, own=_read_gemma3),
    "phi3": Architecture("phi3", _FUSED, own=_read_phi3),
    "granite": Architecture("granite", is_interleaved=True, own=_read_granite),
    "smollm3": Architecture("smollm3", is_interleaved=True, own=_read_smollm3),
}
"""Families by the name that GGUF gives them (``general.architecture``)."""


def architecture_of(file: GgufFile) -> Architecture:
    """Return the family of a model. Raises ``GgufError`` for one that is not served."""
    name = file.needed("general.architecture", str)
    if (found := ARCHITECTURES.get(name)) is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise GgufError(f"{file.path}: architecture {name!r} is not served; served are {known}")
    return found


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the ``config.json`` of a model, without its end tokens. Raises ``GgufError``."""
    found, prefix = architecture_of(file), file.needed("general.architecture", str)
    heads = file.needed(f"{prefix}.attention.head_count", int)
    hidden = file.needed(f"{prefix}.embedding_length", int)
    head_length = file.value(f"{prefix}.attention.key_length", int)
    if head_length is None:
        if not heads or hidden % heads:
            raise GgufError(f"{file.path}: {heads} heads do not divide {hidden} values")
        head_length = hidden // heads
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise GgufError(f"{file.path}: has no tensor token_embd.weight")
    config: dict[str, Any] = {
        "model_type": found.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.needed(f"{prefix}.feed_forward_length", int),
        "num_hidden_layers": file.needed(f"{prefix}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": file.value(f"{prefix}.attention.head_count_kv", int, heads),
        "head_dim": head_length,
        "hidden_act": "silu",
        "max_position_embeddings": file.needed(f"{prefix}.context_length", int),
        "rms_norm_eps": file.value(f"{prefix}.attention.layer_norm_rms_epsilon", float, 1e-5),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": _read_rope(file, prefix),
    }
    own = found.own(file, prefix)
    return config | {key: value for key, value in own.items() if value is not None}


def _read_rope(file: GgufFile, prefix: str) -> dict[str, Any]:
    """Return the rotary embedding's parameters."""
    theta = file.value(f"{prefix}.rope.freq_base", float, 10_000.0)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if (factors := file.tensors.get(_ROPE_FACTORS)) is not None:
        found |= _read_llama3_scaling(file, factors, theta)
    kind = file.value(f"{prefix}.rope.scaling.type", str, "none")
    factor = file.value(f"{prefix}.rope.scaling.factor", float, 1.0)
    if kind == "linear" and factor != 1.0:
        found |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear") and factor != 1.0:
        raise GgufError(f"{file.path}: rotary scaling {kind!r} is not served")
    return found


def _read_llama3_scaling(file: GgufFile, tensor: GgufTensor, theta: float) -> dict[str, Any]:
    """Return the numbers of Llama 3's scaling that make the factors in ``tensor``. Raises
    ``GgufError`` where none do."""
    given = np.asarray(values_of(tensor), np.float64).ravel()
    scaling = {"factor": float(given.max()), **_LLAMA3}
    length = 2.0 * math.pi * theta ** (np.arange(given.size) / given.size)
    low = _LLAMA3_CONTEXT / _LLAMA3["low_freq_factor"]
    high = _LLAMA3_CONTEXT / _LLAMA3["high_freq_factor"]
    smooth = (_LLAMA3_CONTEXT / length - 1.0) / (_LLAMA3["high_freq_factor"] - 1.0)
    between = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    made = np.where(length < high, 1.0, np.where(length > low, scaling["factor"], between))
    if not np.allclose(made, given, rtol=1e-3):
        raise GgufError(f"{file.path}: {_ROPE_FACTORS} holds factors that are not Llama 3's")
    return {
        "rope_type": "llama3",
        **scaling,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def weights_of(file: GgufFile, config: Mapping[str, Any]) -> Iterator[tuple[str, GgufTensor, Any]]:
    """Yield each tensor of a checkpoint: its name there, the tensor that it comes from, and a
    function of the tensor's values that returns its own. Raises ``GgufError`` for a tensor that
    has no place in the family."""
    found = architecture_of(file)
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        if (plain := _PLAIN.get(name)) is not None:
            yield (
                plain,
                tensor,
                _subtract_one if found.has_one_added and "norm" in name else _keep_values,
            )
            continue
        match = _LAYER.fullmatch(name)
        part = None if match is None else match["part"]
        if match is None or (part not in found.names and part not in _EXPERT_PARTS):
            raise GgufError(f"{file.path}: tensor {name[:80]!r} is not known in this family")
        assert part is not None
        layer = f"model.layers.{match['layer']}"
        if part in _EXPERT_PARTS:
            for expert in range(tensor.shape[0]):
                own = f"{layer}.mlp.experts.{expert}.{_EXPERT_PARTS[part]}.weight"
                yield own, tensor, _take_expert(expert)
            continue
        change: Callable[[Array], Array] = _keep_values
        if found.is_interleaved and part in ("attn_q", "attn_k"):
            key = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
            change = _unpair_heads(int(config[key]))
        elif found.has_one_added and part.endswith("norm"):
            change = _subtract_one
        yield f"{layer}.{found.names[part]}.{match['kind']}", tensor, change


def _keep_values(values: Array) -> Array:
    return values


def _subtract_one(values: Array) -> Array:
    return np.asarray(values - 1, values.dtype)


def _take_expert(expert: int) -> Callable[[Array], Array]:
    return lambda values: values[expert]


def _unpair_heads(heads: int) -> Callable[[Array], Array]:
    """Return a function that puts rotary dimensions from pairs into halves, for each head."""

    def part(values: Array) -> Array:
        rest = values.shape[1:]
        paired = values.reshape(heads, values.shape[0] // heads // 2, 2, *rest)
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)

    return part


def list_matrix_types(file: GgufFile) -> str:
    """Return the types of the matrices in words, such as ``Q4_K, Q6_K``."""
    kinds = {type_name(tensor) for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return ", ".join(sorted(kinds))
