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

from edgespec.device.export.checkpoint import DecoderShape
from edgespec.device.export.rope import rope_tables

Array = NDArray[np.float32]


class Weights(Protocol):
    """Tensors by their names in the checkpoint."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, shape: tuple[int, ...]) -> Array: ...


def reference_logits(shape: DecoderShape, weights: Weights, tokens: Sequence[int]) -> Array:
    """Logits behind every token, [T, V]."""
    table = weights.read("model.embed_tokens.weight", (shape.vocabulary_size, shape.hidden))
    stream = table[np.asarray(tokens)]
    for layer in range(shape.layers):
        stream = _layer(shape, weights, layer, stream)
    stream = _normed(weights, "model.norm", stream, shape.stream_epsilon)
    if not shape.tied and "lm_head.weight" in weights:
        table = weights.read("lm_head.weight", (shape.vocabulary_size, shape.hidden))
    return _capped(stream @ table.T, shape.logits_cap)


def _layer(shape: DecoderShape, weights: Weights, layer: int, stream: Array) -> Array:
    name = f"model.layers.{layer}"
    normed = _normed(weights, f"{name}.input_layernorm", stream, shape.stream_epsilon)
    branch = _attention(shape, weights, layer, normed)
    before, after = "post_attention_layernorm", ""
    if shape.normalises_branches:
        branch = _normed(weights, f"{name}.{before}", branch, shape.norm_epsilon)
        before, after = "pre_feedforward_layernorm", "post_feedforward_layernorm"
    stream = stream + branch
    normed = _normed(weights, f"{name}.{before}", stream, shape.stream_epsilon)
    branch = _feed_forward(shape, weights, f"{name}.mlp", normed)
    if after:
        branch = _normed(weights, f"{name}.{after}", branch, shape.norm_epsilon)
    return stream + branch


def _capped(value: Array, cap: float) -> Array:
    if not cap:
        return value
    bent: Array = np.float32(cap) * np.tanh(value / np.float32(cap))
    return bent


def _normed(weights: Weights, name: str, value: Array, epsilon: float) -> Array:
    weight = weights.read(f"{name}.weight", (value.shape[-1],))
    return _root_mean_square_norm(value, epsilon) * weight


def _root_mean_square_norm(value: Array, epsilon: float) -> Array:
    mean = np.mean(value * value, axis=-1, keepdims=True)
    normed: Array = value / np.sqrt(mean + np.float32(epsilon))
    return normed


def _linear(weights: Weights, name: str, value: Array, rows: int) -> Array:
    product = value @ weights.read(f"{name}.weight", (rows, value.shape[-1])).T
    if f"{name}.bias" in weights:
        product = product + weights.read(f"{name}.bias", (rows,))
    return product


def _attention(shape: DecoderShape, weights: Weights, layer: int, value: Array) -> Array:
    name, rope = f"model.layers.{layer}.self_attn", shape.rope_of(layer)
    length, dim = len(value), shape.head_dim
    parts: dict[str, Array] = {}
    for part, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
        rows = _linear(weights, f"{name}.{part}_proj", value, heads * dim)
        parts[part] = rows.reshape(length, heads, dim)
    for part in ("q", "k"):
        if shape.normalises_heads:
            norm = f"{name}.{part}_norm"
            parts[part] = _normed(weights, norm, parts[part], shape.norm_epsilon)
        if rope:
            parts[part] = _rotated(parts[part], *rope_tables(rope, dim, length))
    group = shape.heads // shape.kv_heads
    key, mixed = np.repeat(parts["k"], group, axis=1), np.repeat(parts["v"], group, axis=1)
    scores = np.einsum("qhd,khd->hqk", parts["q"], key) * np.float32(shape.attention_scale)
    scores = _capped(scores, shape.attention_cap)
    visible = _visible(length, shape.window if shape.slides(layer) else 0)
    scores = np.where(visible, scores, np.float32(-np.inf))
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
