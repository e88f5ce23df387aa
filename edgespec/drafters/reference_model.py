"""The decoder in plain numpy, one full pass without a cache: an exported graph is held against it.

Written from the models' papers and independent of the graph builder: no fused operators, no padding
of heads, no cache, every row of logits. Float32 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.checkpoint import DecoderShape
from edgespec.drafters.rope import rope_tables

Array = NDArray[np.float32]


class Weights(Protocol):
    """Tensors by their names in the checkpoint."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, shape: tuple[int, ...]) -> Array: ...


def reference_logits(shape: DecoderShape, weights: Weights, tokens: Sequence[int]) -> Array:
    """Logits behind every token, [T, V]."""
    table = weights.read("model.embed_tokens.weight", (shape.vocabulary_size, shape.hidden))
    stream = table[np.asarray(tokens)]
    tables = rope_tables(shape.rope, shape.head_dim, len(tokens))
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        normed = _normed(shape, weights, f"{name}.input_layernorm", stream)
        stream = stream + _attention(shape, weights, f"{name}.self_attn", normed, tables)
        normed = _normed(shape, weights, f"{name}.post_attention_layernorm", stream)
        stream = stream + _feed_forward(shape, weights, f"{name}.mlp", normed)
    stream = _normed(shape, weights, "model.norm", stream)
    if not shape.tied and "lm_head.weight" in weights:
        table = weights.read("lm_head.weight", (shape.vocabulary_size, shape.hidden))
    return stream @ table.T


def _normed(shape: DecoderShape, weights: Weights, name: str, value: Array) -> Array:
    weight = weights.read(f"{name}.weight", (value.shape[-1],))
    return _root_mean_square_norm(value, shape.norm_epsilon) * weight


def _root_mean_square_norm(value: Array, epsilon: float) -> Array:
    mean = np.mean(value * value, axis=-1, keepdims=True)
    normed: Array = value / np.sqrt(mean + np.float32(epsilon))
    return normed


def _linear(weights: Weights, name: str, value: Array, rows: int) -> Array:
    product = value @ weights.read(f"{name}.weight", (rows, value.shape[-1])).T
    if f"{name}.bias" in weights:
        product = product + weights.read(f"{name}.bias", (rows,))
    return product


def _attention(
    shape: DecoderShape, weights: Weights, name: str, value: Array, tables: tuple[Array, Array]
) -> Array:
    length, dim = len(value), shape.head_dim
    sizes = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
    parts = {
        part: _linear(weights, f"{name}.{part}_proj", value, heads * dim).reshape(
            length, heads, dim
        )
        for part, heads in sizes.items()
    }
    for part in ("q", "k"):
        if shape.normalises_heads:
            parts[part] = _normed(shape, weights, f"{name}.{part}_norm", parts[part])
        parts[part] = _rotated(parts[part], *tables)
    group = shape.heads // shape.kv_heads
    key, mixed = np.repeat(parts["k"], group, axis=1), np.repeat(parts["v"], group, axis=1)
    scores = np.einsum("qhd,khd->hqk", parts["q"], key) / np.float32(math.sqrt(dim))
    scores = np.where(_visible(length, shape.window), scores, np.float32(-np.inf))
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    joined = np.einsum("hqk,khd->qhd", scores, mixed).reshape(length, -1)
    return _linear(weights, f"{name}.o_proj", joined, shape.hidden)


def _visible(length: int, window: int) -> NDArray[np.bool_]:
    """[query, key]: a token sees itself and those before it, within the window."""
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    seen: NDArray[np.bool_] = key <= query
    return seen & (query - key < window) if window else seen


def _rotated(value: Array, cos: Array, sin: Array) -> Array:
    """Rotary positions: entry i is paired with entry i + half the head, [T, heads, d]."""
    half = value.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None]
    first, second = value[..., :half], value[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _feed_forward(shape: DecoderShape, weights: Weights, name: str, value: Array) -> Array:
    gate = _linear(weights, f"{name}.gate_proj", value, shape.feed_forward)
    up = _linear(weights, f"{name}.up_proj", value, shape.feed_forward)
    return _linear(weights, f"{name}.down_proj", _active(shape.activation, gate) * up, shape.hidden)


def _active(activation: str, value: Array) -> Array:
    match activation:
        case "silu":
            active: Array = value / (1 + np.exp(-value))
        case "gelu":
            error = np.array([math.erf(x) for x in (value / math.sqrt(2)).ravel()], np.float32)
            active = np.float32(0.5) * value * (1 + error.reshape(value.shape))
        case _:  # its tanh approximation
            inner = np.float32(math.sqrt(2 / math.pi)) * (value + np.float32(0.044715) * value**3)
            active = np.float32(0.5) * value * (1 + np.tanh(inner))
    return active
