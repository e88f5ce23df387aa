"""Names in a checkpoint of transformers for the metadata and tensors of a GGUF model.

llama.cpp converts checkpoints with a few changes, which are undone here:

* query and key matrices of the Llama family have their rotary dimensions interleaved;
* norms of the Gemma family have 1 added to their weights;
* the experts of a layer are one tensor, and gpt-oss's are cut into gate and up;
* the factors of Llama 3's rotary scaling are a tensor instead of four numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgespec.models.gguf_file import (
    GgufError,
    GgufFile,
    GgufTensor,
    blocks_of,
    type_name,
    values_of,
)

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
_SINKS: Final = "attn_sinks"
_GPT_OSS: Final = {
    **{part: name for part, name in _IN_LAYER.items() if not part.startswith("ffn")},
    _SINKS: "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_MXFP4_VALUES: Final = 32
"""Values of a block of MXFP4, which has one byte for the scale and half a byte for each value."""
_LAYER: Final = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_ROPE_FACTORS: Final = "rope_freqs.weight"
_LONG_FACTORS: Final = "rope_factors_long.weight"
_SHORT_FACTORS: Final = "rope_factors_short.weight"
_IN_CONFIG: Final = (_ROPE_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)
"""Tensors that a checkpoint has in its configuration."""
_PARTLY_ROTATED: Final = ("phi3",)
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT: Final = 8192
_MAX_LAYERS: Final = 4096
_YARN: Final = "yarn"
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
    fuses_experts: bool = False
    """A checkpoint has one tensor for gate and up of all experts of a layer, and one for down."""
    own: Callable[[GgufFile, str], dict[str, Any]] = lambda file, prefix: {}
    """Returns the configuration that only this family has."""


def _count_layers(file: GgufFile, prefix: str) -> int:
    """Return the number of layers. Raises ``GgufError`` beyond ``_MAX_LAYERS``."""
    count = file.needed(f"{prefix}.block_count", int)
    if not 1 <= count <= _MAX_LAYERS:
        raise GgufError(
            f"{file.path}: {prefix}.block_count is {count}, but must be in [1, {_MAX_LAYERS}]"
        )
    return int(count)


def _read_gemma(file: GgufFile, prefix: str) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _list_layer_types(layers: int, full_every: int) -> list[str]:
    return [
        "sliding_attention" if (layer + 1) % full_every else "full_attention"
        for layer in range(layers)
    ]


def _read_gemma2(file: GgufFile, prefix: str) -> dict[str, Any]:
    layers = _count_layers(file, prefix)
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
    layers = _count_layers(file, prefix)
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
    own: dict[str, Any] = {"sliding_window": file.value(f"{prefix}.attention.sliding_window", int)}
    if (long := file.tensors.get(_LONG_FACTORS)) is None:
        return own
    if (short := file.tensors.get(_SHORT_FACTORS)) is None:
        raise GgufError(f"{file.path}: has {_LONG_FACTORS}, but no {_SHORT_FACTORS}")
    original = file.needed(f"{prefix}.rope.scaling.original_context_length", int)
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": file.value(f"{prefix}.rope.freq_base", float, 10_000.0),
        "long_factor": _read_factors(file, prefix, long),
        "short_factor": _read_factors(file, prefix, short),
        "original_max_position_embeddings": original,
    }
    if (factor := file.value(f"{prefix}.rope.scaling.attn_factor", float)) is not None:
        rope["attention_factor"] = factor
    return own | {"rope_parameters": rope, "original_max_position_embeddings": original}


def _read_factors(file: GgufFile, prefix: str, tensor: GgufTensor) -> list[float]:
    """Return the factors of rotary frequencies in ``tensor``, one for each pair of rotated
    dimensions. Raises ``GgufError`` where their number cannot be."""
    count = _count_rotated(file, prefix) // 2
    if tensor.shape != (count,):
        raise GgufError(
            f"{file.path}: {tensor.name} has the shape {tensor.shape}, but {count} frequencies are"
            " rotated"
        )
    return [float(value) for value in values_of(tensor)]


def _read_head_length(file: GgufFile, prefix: str) -> int:
    """Return the size of a head."""
    if (length := file.value(f"{prefix}.attention.key_length", int)) is not None:
        return int(length)
    heads = file.needed(f"{prefix}.attention.head_count", int)
    hidden = file.needed(f"{prefix}.embedding_length", int)
    if heads < 1 or hidden % heads:
        raise GgufError(f"{file.path}: {heads} heads do not divide {hidden} values")
    return int(hidden // heads)


def _count_rotated(file: GgufFile, prefix: str) -> int:
    """Return how many dimensions of a head have a rotary embedding."""
    whole = _read_head_length(file, prefix)
    return int(file.value(f"{prefix}.rope.dimension_count", int, whole))


def _read_qwen3moe(file: GgufFile, prefix: str) -> dict[str, Any]:
    return {
        "num_experts": file.needed(f"{prefix}.expert_count", int),
        "num_experts_per_tok": file.needed(f"{prefix}.expert_used_count", int),
        "moe_intermediate_size": file.needed(f"{prefix}.expert_feed_forward_length", int),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _read_gpt_oss(file: GgufFile, prefix: str) -> dict[str, Any]:
    own: dict[str, Any] = {
        "num_local_experts": file.needed(f"{prefix}.expert_count", int),
        "num_experts_per_tok": file.needed(f"{prefix}.expert_used_count", int),
        "intermediate_size": file.needed(f"{prefix}.expert_feed_forward_length", int),
        "sliding_window": file.needed(f"{prefix}.attention.sliding_window", int),
        "layer_types": _list_layer_types(_count_layers(file, prefix), 2),
    }
    rope = _read_rope(file, prefix)
    if rope["rope_type"] == _YARN:
        # The checkpoints say so, and GGUF has no key for it.
        own["rope_parameters"] = {**rope, "truncate": False}
    if packs_experts(file):
        plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
        own["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [*plain, "model.embed_tokens", "lm_head"],
        }
    return own


def _read_smollm3(file: GgufFile, prefix: str) -> dict[str, Any]:
    layers = _count_layers(file, prefix)
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
    "gpt-oss": Architecture("gpt_oss", _GPT_OSS, fuses_experts=True, own=_read_gpt_oss),
}
"""Families by the name that GGUF gives them (``general.architecture``)."""


def architecture_of(file: GgufFile) -> Architecture:
    """Return the family of a model. Raises ``GgufError`` for one that is not read."""
    name = file.needed("general.architecture", str)
    if (found := ARCHITECTURES.get(name)) is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise GgufError(
            f"{file.path}: architecture {name!r} is not read from GGUF; read are {known}"
        )
    return found


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the ``config.json`` of a model, without its end tokens. Raises ``GgufError``."""
    found, prefix = architecture_of(file), file.needed("general.architecture", str)
    heads = file.needed(f"{prefix}.attention.head_count", int)
    hidden = file.needed(f"{prefix}.embedding_length", int)
    head_length, rotated = _read_head_length(file, prefix), _count_rotated(file, prefix)
    if rotated != head_length and (name := found.model_type) not in _PARTLY_ROTATED:
        raise GgufError(
            f"{file.path}: {rotated} of {head_length} dimensions are rotated, which {name} does not"
            " do"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise GgufError(f"{file.path}: has no tensor token_embd.weight")
    config: dict[str, Any] = {
        "model_type": found.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.needed(f"{prefix}.feed_forward_length", int),
        "num_hidden_layers": _count_layers(file, prefix),
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
    config |= {key: value for key, value in own.items() if value is not None}
    if rotated != head_length:
        config["rope_parameters"]["partial_rotary_factor"] = rotated / head_length
    return config


def _read_rope(file: GgufFile, prefix: str) -> dict[str, Any]:
    """Return the rotary embedding's parameters."""
    theta = file.value(f"{prefix}.rope.freq_base", float, 10_000.0)
    if not 0.0 < theta < math.inf:
        raise GgufError(f"{file.path}: {prefix}.rope.freq_base is {theta}, but must be above 0")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if (factors := file.tensors.get(_ROPE_FACTORS)) is not None:
        found |= _read_llama3_scaling(file, factors, theta)
    kind = file.value(f"{prefix}.rope.scaling.type", str, "none")
    factor = file.value(f"{prefix}.rope.scaling.factor", float, 1.0)
    if kind == "linear" and factor != 1.0:
        found |= {"rope_type": "linear", "factor": factor}
    elif kind == _YARN and factor != 1.0:
        found |= _read_yarn(file, prefix, factor)
    elif kind not in ("none", "linear", _YARN) and factor != 1.0:
        raise GgufError(f"{file.path}: rotary scaling {kind!r} is not served")
    return found


def _read_yarn(file: GgufFile, prefix: str, factor: float) -> dict[str, Any]:
    """Return the numbers of YaRN's scaling. Raises ``GgufError`` for a sharpness of its own."""
    key = f"{prefix}.rope.scaling"
    sharpness = file.value(f"{key}.attn_factor", float, 1.0)
    if sharpness != 1.0:
        raise GgufError(f"{file.path}: {key}.attn_factor is {sharpness:g}, which is not served")
    return {
        "rope_type": _YARN,
        "factor": factor,
        "beta_fast": file.value(f"{key}.yarn_beta_fast", float, 32.0),
        "beta_slow": file.value(f"{key}.yarn_beta_slow", float, 1.0),
        "original_max_position_embeddings": file.needed(f"{key}.original_context_length", int),
    }


def _read_llama3_scaling(file: GgufFile, tensor: GgufTensor, theta: float) -> dict[str, Any]:
    """Return the numbers of Llama 3's scaling that make the factors in ``tensor``. Raises
    ``GgufError`` where none do."""
    given = np.asarray(_read_factors(file, file.needed("general.architecture", str), tensor))
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


Parts = Callable[[int], Iterator[Array]]
"""Yields the values of a tensor in parts of whole rows. A part has at most as many values as the
argument, or one row, or one matrix if its values change their places."""


@dataclass(frozen=True, slots=True)
class CheckpointWeight:
    """One tensor of a checkpoint, and the tensors of the file that it comes from."""

    name: str
    tensors: tuple[GgufTensor, ...]
    shape: tuple[int, ...]
    """The shape in the checkpoint."""
    read: Parts
    is_packed: bool = False
    """Whether its values are bytes that stay as they are: parts of blocks, no numbers."""


def weights_of(file: GgufFile, config: Mapping[str, Any]) -> Iterator[CheckpointWeight]:
    """Yield each tensor of a checkpoint. Raises ``GgufError`` for a tensor that has no place in the
    family, or whose shape does not fit the configuration."""
    found = architecture_of(file)
    for name, tensor in file.tensors.items():
        if name in _IN_CONFIG:
            continue
        if (plain := _PLAIN.get(name)) is not None:
            is_changed = found.has_one_added and "norm" in name
            yield _take_whole(plain, tensor, _subtract_one if is_changed else None)
            continue
        match = _LAYER.fullmatch(name)
        part = None if match is None else match["part"]
        if match is None or (part not in found.names and part not in _EXPERT_PARTS):
            raise GgufError(f"{file.path}: tensor {name[:80]!r} is not known in this family")
        assert part is not None
        layer = f"model.layers.{match['layer']}"
        if part in _EXPERT_PARTS:
            _check_experts(file, tensor, config)
            if found.fuses_experts:
                yield from _fuse_experts(file, config, f"{layer}.mlp.experts", match)
                continue
            for expert in range(tensor.shape[0]):
                own = f"{layer}.mlp.experts.{expert}.{_EXPERT_PARTS[part]}.weight"
                yield _take_expert(own, tensor, expert)
            continue
        change: Callable[[Array], Array] | None = None
        if found.is_interleaved and part in ("attn_q", "attn_k"):
            key = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
            change = _unpair_heads(file, tensor, int(config[key]))
        elif found.has_one_added and part.endswith("norm"):
            change = _subtract_one
        own = f"{layer}.{found.names[part]}"
        yield _take_whole(own if part == _SINKS else f"{own}.{match['kind']}", tensor, change)


def _take_whole(
    name: str, tensor: GgufTensor, change: Callable[[Array], Array] | None = None
) -> CheckpointWeight:
    """Return the weight that is one tensor, whose values ``change`` changes if it is given."""

    def read(values_at_once: int) -> Iterator[Array]:
        if change is not None:
            yield change(values_of(tensor))
            return
        rows = tensor.shape[0]
        step = max(1, values_at_once // math.prod(tensor.shape[1:]))
        for start in range(0, rows, step):
            yield values_of(tensor, start, min(rows, start + step))

    return CheckpointWeight(name, (tensor,), tensor.shape, read)


def _take_expert(name: str, tensor: GgufTensor, expert: int) -> CheckpointWeight:
    """Return the matrix of one expert. ``tensor`` holds the experts of a layer."""

    def read(values_at_once: int) -> Iterator[Array]:
        yield values_of(tensor, expert, expert + 1)[0]

    return CheckpointWeight(name, (tensor,), tensor.shape[1:], read)


def _fuse_experts(
    file: GgufFile, config: Mapping[str, Any], name: str, match: re.Match[str]
) -> Iterator[CheckpointWeight]:
    """Yield the experts of a layer as gpt-oss has them: each matrix is transposed, and the rows of
    gate and up take turns. Blocks of MXFP4 stay blocks. Raises ``GgufError``."""
    part, kind = match["part"], match["kind"]
    if part == "ffn_up_exps":  # it is a part of the gate's weight
        _find_expert_part(file, match, "ffn_gate_exps")
        return
    parts = ["ffn_gate_exps", "ffn_up_exps"] if part == "ffn_gate_exps" else [part]
    tensors = tuple([_find_expert_part(file, match, one) for one in parts])
    experts, hidden, wide = (
        int(config[key]) for key in ("num_local_experts", "hidden_size", "intermediate_size")
    )
    name = f"{name}.{'gate_up_proj' if len(parts) > 1 else 'down_proj'}"
    rows, columns = (wide, hidden) if len(parts) > 1 else (hidden, wide)
    wanted = (experts, rows) if kind == "bias" else (experts, rows, columns)
    for tensor in tensors:
        if tensor.shape != wanted:
            raise GgufError(
                f"{file.path}: tensor {tensor.name[:80]!r} has the shape {tensor.shape}, but must"
                f" have {wanted}"
            )
    whole = len(parts) * rows
    if kind == "bias":
        yield CheckpointWeight(
            f"{name}_bias", tensors, (experts, whole), partial(_read_biases, tensors)
        )
    elif packs_experts(file):
        shape = (experts, whole, columns // _MXFP4_VALUES)
        blocks, scales = (partial(_read_blocks, tensors, of_scales) for of_scales in (False, True))
        half = _MXFP4_VALUES // 2
        yield CheckpointWeight(f"{name}_blocks", tensors, (*shape, half), blocks, is_packed=True)
        yield CheckpointWeight(f"{name}_scales", tensors, shape, scales, is_packed=True)
    else:
        read = partial(_read_transposed, tensors)
        yield CheckpointWeight(name, tensors, (experts, columns, whole), read)


def _find_expert_part(file: GgufFile, match: re.Match[str], part: str) -> GgufTensor:
    """Return the tensor ``part`` of the layer and kind in ``match``. Raises ``GgufError``."""
    name = f"blk.{match['layer']}.{part}.{match['kind']}"
    if (found := file.tensors.get(name)) is None:
        raise GgufError(f"{file.path}: has {match[0][:80]!r}, but no {name!r}")
    return found


def _take_turns(parts: Sequence[Array]) -> Array:
    """Return an array whose rows are the first rows of all parts, then the second ones, and so
    on."""
    rows = sum(len(part) for part in parts)
    return np.stack(parts, axis=1).reshape(rows, *parts[0].shape[1:])


def _read_biases(tensors: Sequence[GgufTensor], values_at_once: int) -> Iterator[Array]:
    for expert in range(tensors[0].shape[0]):
        yield _take_turns([values_of(one, expert, expert + 1)[0] for one in tensors])[None]


def _read_transposed(tensors: Sequence[GgufTensor], values_at_once: int) -> Iterator[Array]:
    for expert in range(tensors[0].shape[0]):
        yield _take_turns([values_of(one, expert, expert + 1)[0] for one in tensors]).T[None]


def _read_blocks(
    tensors: Sequence[GgufTensor], of_scales: bool, values_at_once: int
) -> Iterator[Array]:
    """Yield the scales of MXFP4 blocks, or their 4-bit values.

    A block of GGUF has its scale first, then bytes whose low halves are the first 16 values. In a
    checkpoint the two halves of a byte are neighbours, the low one first."""
    for expert in range(tensors[0].shape[0]):
        blocks = _take_turns([blocks_of(one, expert, expert + 1)[0] for one in tensors])
        if of_scales:
            yield blocks[None, ..., 0]
            continue
        halves = blocks[..., 1:]
        values = np.concatenate((halves & 15, halves >> 4), axis=-1)
        yield (values[..., 0::2] | (values[..., 1::2] << 4))[None]


def packs_experts(file: GgufFile) -> bool:
    """Return whether the experts stay in 4 bits: the family allows it, and all of their matrices
    are MXFP4."""
    if not architecture_of(file).fuses_experts:
        return False
    matrices = [
        tensor
        for name, tensor in file.tensors.items()
        if (match := _LAYER.fullmatch(name)) is not None
        and match["part"] in _EXPERT_PARTS
        and match["kind"] == "weight"
    ]
    return all(type_name(tensor) == "MXFP4" for tensor in matrices)


def _check_experts(file: GgufFile, tensor: GgufTensor, config: Mapping[str, Any]) -> None:
    """Raise ``GgufError`` unless ``tensor`` holds a matrix, or a bias, for each expert of the
    model."""
    count = config.get("num_experts", config.get("num_local_experts"))
    if count is None:
        raise GgufError(f"{file.path}: tensor {tensor.name[:80]!r} is not known in this family")
    is_bias = tensor.name.endswith(".bias")
    if len(tensor.shape) != (2 if is_bias else 3) or tensor.shape[0] != count:
        raise GgufError(
            f"{file.path}: tensor {tensor.name[:80]!r} has the shape {tensor.shape}, but there are"
            f" {count} experts"
        )


def _subtract_one(values: Array) -> Array:
    return np.asarray(values - 1, values.dtype)


def _unpair_heads(file: GgufFile, tensor: GgufTensor, heads: int) -> Callable[[Array], Array]:
    """Return a function that puts rotary dimensions from pairs into halves, for each head. Raises
    ``GgufError`` if the rows of ``tensor`` cannot be divided so."""
    if heads < 1 or tensor.shape[0] % (2 * heads):
        raise GgufError(
            f"{file.path}: tensor {tensor.name[:80]!r} has {tensor.shape[0]} rows, which are no"
            f" pairs for each of {heads} heads"
        )

    def unpair(values: Array) -> Array:
        rest = values.shape[1:]
        paired = values.reshape(heads, values.shape[0] // heads // 2, 2, *rest)
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)

    return unpair
