"""A Hugging Face checkpoint of a Llama-like decoder, read without torch.

``DecoderShape`` has the values of ``config.json`` that the exporter needs; unsupported ones are
refused by name. ``Checkpoint`` reads tensors of ``*.safetensors`` one at a time, as float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgespec.models.folders import (
    DRAFT_MODEL_TYPES,
    KeptIds,
    ModelFolderError,
    check_sizes,
    read_flag,
    read_json,
    read_kept_ids,
    read_number,
    read_section,
    read_whole_number,
)

_GEMMA = ("gemma2", "gemma3_text")
_WINDOWED = ("mistral", "phi3", *_GEMMA)
_ROPE_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# Values that a family's configuration may leave out, if the default differs between families.
_FAMILY_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "phi3": {"rms_norm_eps": 1e-5},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "gemma2": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
}
ROPE_TYPES = ("default", *_ROPE_FIELDS)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Supported values of ``hidden_act``, and the function that each stands for."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    model_type: str
    vocabulary_size: int
    """Number of rows of the tables."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    norm_epsilon: float
    activation: str
    """Activation of the MLP's gate: silu, gelu or gelu_tanh."""
    tied: bool
    window: int
    """Sliding attention window in tokens, including the current one. 0 is full attention."""
    rope: dict[str, Any]
    """``rope_theta``, ``rope_type`` and its factors, as in transformers 5's rope_parameters."""
    attention_scale: float
    """Factor on the products of queries and keys."""
    stream_scale: float = 1.0
    """Factor on embeddings."""
    branch_scale: float = 1.0
    """Factor on the results of attention and MLP before they are added to the stream."""
    logits_divisor: float = 1.0
    norm_offset: float = 0.0
    """Constant that is added to the weights of norms (Gemma stores them less 1)."""
    sliding: tuple[bool, ...] = ()
    """Whether each layer slides. Empty if ``window`` applies to all layers."""
    local_rope: dict[str, Any] | None = None
    """Rotary parameters of sliding layers, if they differ from the others."""
    unrotated: tuple[int, ...] = ()
    """Layers without positions."""
    attention_cap: float = 0.0
    """Cap of attention scores, which become cap * tanh(score / cap). 0 for no cap."""
    logits_cap: float = 0.0
    biased: tuple[str, ...] = ()
    """Names of the matrices of a layer that have a bias, such as ``q_proj``."""
    kept: KeptIds | None = None
    """The target's ids that the rows of the tables stand for. None: row and id are the same."""

    @property
    def normalises_heads(self) -> bool:
        return self.model_type in ("qwen3", "gemma3_text")

    @property
    def normalises_branches(self) -> bool:
        """Whether there is also a norm after attention and after the MLP."""
        return self.model_type in _GEMMA

    @property
    def stream_epsilon(self) -> float:
        """Epsilon for norms of a stream that is kept ``stream_scale`` times too small."""
        return self.norm_epsilon / self.stream_scale**2

    def slides(self, layer: int) -> bool:
        return self.window > 0 and (not self.sliding or self.sliding[layer])

    def rope_of(self, layer: int) -> dict[str, Any] | None:
        """Return the rotary parameters of a layer, or None for a layer without positions."""
        if layer in self.unrotated:
            return None
        return self.local_rope if self.local_rope and self.slides(layer) else self.rope


def read_shape(folder: Path) -> DecoderShape:
    """Return the values of a folder's ``config.json`` that the exporter needs.

    Raises ``ModelFolderError`` naming the file, the key and the value for anything unsupported."""
    path = folder / "config.json"
    config = read_json(path)
    model_type = config.get("model_type")
    if model_type not in DRAFT_MODEL_TYPES:
        raise ModelFolderError(
            f"{path}: model_type {model_type!r} is not one of {DRAFT_MODEL_TYPES}"
        )
    config = {**_FAMILY_DEFAULTS.get(model_type, {}), **config}
    check_sizes(path, config)
    whole, real = partial(read_whole_number, path, config), partial(read_number, path, config)
    gemma = model_type in _GEMMA
    default = "gelu_pytorch_tanh" if gemma else "silu"
    act = config.get("hidden_activation") or config.get("hidden_act") or default
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise ModelFolderError(f"{path}: hidden_act {act!r} is not one of {sorted(ACTIVATIONS)}")
    hidden, heads = whole("hidden_size"), whole("num_attention_heads")
    head_dim = whole("head_dim", absent=256 if gemma else hidden // heads)
    if head_dim % 2:
        raise ModelFolderError(f"{path}: head size {head_dim} is odd, but positions rotate pairs")
    return DecoderShape(
        model_type=model_type,
        vocabulary_size=whole("vocab_size"),
        hidden=hidden,
        layers=whole("num_hidden_layers"),
        heads=heads,
        kv_heads=whole("num_key_value_heads", absent=heads),
        head_dim=head_dim,
        feed_forward=whole("intermediate_size"),
        norm_epsilon=real("rms_norm_eps", 1e-6, minimum=0.0),
        activation=ACTIVATIONS[act],
        tied=read_flag(path, config, "tie_word_embeddings"),
        window=_read_window(path, config),
        rope=_read_rope(path, config),
        biased=_read_biased(path, config),
        kept=read_kept_ids(path, config),
        **_read_family_fields(path, config, hidden, head_dim),
    )


_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")


def _read_biased(path: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """Return the matrices of a layer that have a bias in this family and configuration."""
    kind = config["model_type"]
    attention, mlp = (read_flag(path, config, name) for name in ("attention_bias", "mlp_bias"))
    if kind in ("mistral", "phi3"):
        return ()
    if kind == "qwen2":
        return _ATTENTION[:3]
    has_mlp = mlp and kind in ("llama", "granite", "smollm3")
    return (_ATTENTION if attention else ()) + (_MLP if has_mlp else ())


def _read_layer_types(path: Path, config: dict[str, Any]) -> list[str]:
    """Return the kinds of a model's layers from ``layer_types``, or an empty list without that
    key."""
    kinds = config.get("layer_types")
    if kinds is None:
        return []
    layers = read_whole_number(path, config, "num_hidden_layers")
    supported = ("full_attention", "sliding_attention")
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(k not in supported for k in kinds)
    ):
        raise ModelFolderError(
            f"{path}: layer_types is {kinds!r}, but must have one of {supported} for each of"
            f" {layers} layers"
        )
    return kinds


def _read_window(path: Path, config: dict[str, Any]) -> int:
    kinds = set(_read_layer_types(path, config))
    if len(kinds) > 1 and config["model_type"] not in _GEMMA:
        raise ModelFolderError(f"{path}: layer_types mixes {sorted(kinds)}, which is not supported")
    if config["model_type"] not in _WINDOWED:
        if config.get("use_sliding_window"):
            raise ModelFolderError(f"{path}: use_sliding_window is not supported")
        return 0
    return read_whole_number(path, config, "sliding_window", minimum=0, absent=0)


def _read_family_fields(
    path: Path, config: dict[str, Any], hidden: int, head_dim: int
) -> dict[str, Any]:
    """Return the fields that only some families have, with the families' own defaults."""
    real = partial(read_number, path, config)
    match config["model_type"]:
        case "granite":
            return {
                "attention_scale": real("attention_multiplier", 1.0),
                "stream_scale": real("embedding_multiplier", 1.0, above=0.0),
                "branch_scale": real("residual_multiplier", 1.0),
                "logits_divisor": real("logits_scaling", 1.0, above=0.0),
            }
        case "gemma2" | "gemma3_text":
            return _read_gemma(path, config, hidden)
        case "smollm3":
            layers = range(read_whole_number(path, config, "num_hidden_layers"))
            interval = read_whole_number(path, config, "no_rope_layer_interval", absent=4)
            # The list names the layers that do rotate, in spite of its name.
            rotated = config.get("no_rope_layers") or [(layer + 1) % interval for layer in layers]
            if not isinstance(rotated, list) or len(rotated) != len(layers):
                raise ModelFolderError(
                    f"{path}: no_rope_layers is {rotated!r}, but must have an entry for each of"
                    f" {len(layers)} layers"
                )
            unrotated = tuple(layer for layer in layers if not rotated[layer])
            return {"attention_scale": head_dim**-0.5, "unrotated": unrotated}
        case _:
            return {"attention_scale": head_dim**-0.5}


def _read_gemma(path: Path, config: dict[str, Any], hidden: int) -> dict[str, Any]:
    second = config["model_type"] == "gemma2"
    if config.get("use_bidirectional_attention"):
        raise ModelFolderError(f"{path}: use_bidirectional_attention is not supported")
    interval = 2 if second else read_whole_number(path, config, "sliding_window_pattern", absent=6)
    kinds = _read_layer_types(path, config) or [
        "sliding_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(read_whole_number(path, config, "num_hidden_layers"))
    ]
    real = partial(read_number, path, config)
    fields: dict[str, Any] = {
        "attention_scale": real("query_pre_attn_scalar", 256.0, above=0.0) ** -0.5,
        "stream_scale": float(hidden) ** 0.5,
        "norm_offset": 1.0,
        "sliding": tuple(kind == "sliding_attention" for kind in kinds),
        "attention_cap": real("attn_logit_softcapping", 0.0, minimum=0.0),
        "logits_cap": real("final_logit_softcapping", 0.0, minimum=0.0),
    }
    if not second:
        local = read_section(
            path, read_section(path, config, "rope_parameters"), "sliding_attention"
        ) or {"rope_theta": real("rope_local_base_freq", 10_000.0, above=0.0)}
        fields["local_rope"] = _read_rope(path, {"rope_parameters": local})
    return fields


def _read_rope(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of a configuration.

    Both spellings are read: ``rope_parameters`` (transformers 5), and ``rope_theta`` with
    ``rope_scaling``."""
    default = 1_000_000.0 if config.get("model_type") == "gemma3_text" else 10_000.0
    rope = {"rope_theta": config.get("rope_theta", default)}
    rope |= read_section(path, config, "rope_scaling")
    parameters = read_section(path, config, "rope_parameters")
    # This configuration has rotary parameters for each kind of layer.
    if "full_attention" in parameters:
        parameters = read_section(path, parameters, "full_attention")
    rope |= parameters
    rope["rope_theta"] = read_number(path, rope, "rope_theta", default, above=0.0)
    rope["rope_type"] = kind = rope.get("rope_type") or rope.pop("type", None) or "default"
    if kind not in ROPE_TYPES:
        raise ModelFolderError(f"{path}: rope_type {kind!r} is not one of {ROPE_TYPES}")
    if kind == "yarn" and not rope.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = config.get("max_position_embeddings")
    for name in _ROPE_FIELDS.get(kind, ()):
        if rope.get(name) is None:
            raise ModelFolderError(f"{path}: rope_type {kind!r} needs {name}, which is None")
        rope[name] = read_number(path, rope, name, 1.0, above=0.0)
    for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
        read_number(path, rope, name, 0.0)
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ModelFolderError(
            f"{path}: low_freq_factor is {rope['low_freq_factor']}, but must be below"
            f" high_freq_factor, {rope['high_freq_factor']}"
        )
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise ModelFolderError(f"{path}: partial_rotary_factor {share} is not supported")
    return rope


_LAST_MATRICES = (".self_attn.o_proj.", ".mlp.down_proj.")
_BRANCH_NORMS = (".post_attention_layernorm.", ".post_feedforward_layernorm.")


class Checkpoint:
    """Tensors of a folder, under Llama's names and with Llama's meaning.

    They are read on demand. Files are opened for each read, and nothing is kept.

    * Phi-3 stores queries, keys and values as one matrix, and gate and up as another. They are cut.
    * Gemma's norms multiply by 1 + weight. The 1 is added to the weight.
    * A factor on embeddings (Gemma, Granite) would need the table twice where the head shares it.
      Instead the whole stream is kept that many times too small: everything that is added to it is
      divided by the factor. The norms of the stream, which no factor changes, take an epsilon that
      is smaller by its square (``DecoderShape.stream_epsilon``).
    * A factor on branches (Granite) goes into their last matrix, and a divisor of logits into the
      last norm.
    """

    def __init__(self, folder: Path, shape: DecoderShape) -> None:
        self._files = _list_tensor_files(folder)
        self._folder, self._shape = folder, shape

    def __contains__(self, name: str) -> bool:
        return name in self._files or self._find_fused(name)[0] in self._files

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return a float32 copy. Raises ``ModelFolderError`` if it is missing or has another
        shape."""
        whole, start, rows = self._find_fused(name)
        if name in self._files or whole not in self._files:
            value = self._read_stored(name, shape)
        else:
            value = self._read_stored(whole, (rows, *shape[1:]))[start : start + shape[0]]
        if len(shape) == 1 and "norm." in name:
            value = value + np.float32(self._shape.norm_offset)
        factor = self._find_factor(name)
        return value if factor == 1.0 else value * np.float32(factor)

    def _read_stored(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        from safetensors import safe_open

        path = self._files.get(name)
        if path is None:
            raise ModelFolderError(f"{self._folder}: tensor {name} is in no *.safetensors file")
        with safe_open(path, framework="numpy") as tensors:
            value = np.asarray(tensors.get_tensor(name))
        if value.shape != shape:
            raise ModelFolderError(f"{path}: tensor {name} has shape {value.shape}, not {shape}")
        return value.astype(np.float32, copy=False)

    def _find_fused(self, name: str) -> tuple[str, int, int]:
        """Return where ``name`` is in a matrix that some families fuse with others.

        The result is (name of the fused matrix, first row there, rows of that matrix), and an empty
        name if ``name`` is never fused."""
        shape = self._shape
        heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        for fused, parts in (
            ("qkv_proj", {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}),
            ("gate_up_proj", {"gate_proj": shape.feed_forward, "up_proj": shape.feed_forward}),
        ):
            start = 0
            for part, rows in parts.items():
                if f".{part}." in name:
                    return name.replace(f".{part}.", f".{fused}."), start, sum(parts.values())
                start += rows
        return "", 0, 0

    def _find_factor(self, name: str) -> float:
        shape = self._shape
        if name == "model.norm.weight":
            return 1.0 / shape.logits_divisor
        last = _BRANCH_NORMS if shape.normalises_branches else _LAST_MATRICES
        divided = any(part in name for part in last)
        return shape.branch_scale / shape.stream_scale if divided else 1.0


def _list_tensor_files(folder: Path) -> dict[str, Path]:
    import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
    from safetensors import SafetensorError, safe_open

    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelFolderError(f"{folder}: no *.safetensors file")
    files: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as tensors:
                files |= dict.fromkeys(tensors.keys(), path)
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(f"{path}: not a readable safetensors file: {error}") from error
    return files
