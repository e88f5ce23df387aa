"""Is an exported draft the model that it was made from? Asked before anybody uses it.

Two questions, so that rounding does not hide a mistake. Every matrix as it lies in the graph is
compared with the checkpoint's, within what its bits allow. Then the graph is run, in one pass, in
chunks and after rollbacks, against ``reference_model`` on the *stored* weights, so that what is
left is rounding of activations. An answer of no names the largest difference and where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.manifest import MODEL_FILE, DraftManifest, DraftModelError
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.checkpoint import Checkpoint, DecoderShape, FamilyWeights, read_shape
from edgespec.device.export.export_graph import (
    padded_head_dim,
    rope_tables,
    unpad_inputs,
    unpad_outputs,
)
from edgespec.device.export.quantize import QuantizedMatrix, dequantize_matrix

if TYPE_CHECKING:
    import onnx


Array = NDArray[np.float32]

# --------------------------------------------------------------------------------------------
# The decoder in plain numpy, one full pass without a cache: an exported graph is held against it.
#
# Written from the models' papers and independent of the graph builder: no fused operators, no
# padding of heads, no cache, every row of logits. Float32 throughout.


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


CHECKED_TOKENS = 48
LARGEST_WEIGHT_ERROR = {4: 0.25, 8: 0.02, 32: 0.0}
"""Root mean square of what rounding a matrix changes, over that of the matrix, by bits. Four bits
on normal weights in blocks of 32 lose about 0.1."""

LARGEST_DIFFERENCE = {4: 0.2, 8: 0.2, 32: 0.005}
"""Root mean square of a difference of logits over their standard deviation, by bits: activations of
quantised products are rounded to 8 bits."""

LARGEST_CACHE_DIFFERENCE = {"float32": 0.0, "float16": 0.02, "int8": 0.2}
"""Likewise, of rounding keys and values. The bundled target gave 0.0004 and 0.014."""
WAYS = {
    "in one pass": ((0, CHECKED_TOKENS),),
    "in chunks": ((0, 17), (17, 18), (18, 41), (41, CHECKED_TOKENS)),
    "after rollbacks": ((0, 33), (29, 30), (12, 44), (12, 13), (13, CHECKED_TOKENS)),
}

"""(tokens kept, tokens then fed up to), one after the other."""


def check_parity(source: Path, target: Path, manifest: DraftManifest) -> float:
    """The largest relative difference found. Raises ``DraftModelError`` naming the file, the
    difference and its place when it is too large; ``CheckpointError`` as ``export_draft`` does."""
    import onnx

    shape = read_shape(source)
    known = slice(manifest.proposable)  # the drafter hides the padding
    model = onnx.load(target / MODEL_FILE)
    weights = _StoredWeights(
        target / MODEL_FILE, model, FamilyWeights(Checkpoint(source), shape), shape
    )
    length = min(CHECKED_TOKENS, manifest.model.context_length)
    tokens = np.random.default_rng(0).integers(0, manifest.proposable, length).tolist()
    expected = reference_logits(shape, weights, tokens)
    del model, weights
    drafter = OnnxDrafter(target)
    largest = 0.0
    bound = max(
        LARGEST_DIFFERENCE[manifest.bits],
        LARGEST_CACHE_DIFFERENCE[manifest.kv_type],
    )
    try:
        for way, steps in WAYS.items():
            drafter.begin(1, SamplingParams())
            for keep, end in steps:
                if end > length:
                    break
                drafter.step(keep, tokens[keep:end], 1)
                got, wanted = drafter.logits[known], expected[end - 1, known]
                difference = relative(got, wanted)
                if not difference <= bound:
                    at = int(np.argmax(np.abs(got - wanted)))
                    raise DraftModelError(
                        f"{target / MODEL_FILE}: decoded {way}, the logits behind token {end} of"
                        f" {length} differ from those of {source} by {difference:.3g} standard"
                        f" deviations, at most {bound} is rounding; most at token id {at}:"
                        f" {got[at]:.4g} instead of {wanted[at]:.4g}"
                    )
                largest = max(largest, difference)
    finally:
        drafter.close()
    return largest


class _StoredWeights:
    """Matrices from the graph, checked against the checkpoint's as they are read; everything else
    from the checkpoint."""

    def __init__(
        self,
        path: Path,
        model: onnx.ModelProto,
        checkpoint: FamilyWeights,
        shape: DecoderShape,
    ) -> None:
        self._path, self._checkpoint, self._shape = path, checkpoint, shape
        self._stored = {tensor.name: tensor for tensor in model.graph.initializer}

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        original = self._checkpoint.read(name, shape)
        if len(shape) == 1:
            return original
        stored, bits = self._matrix(name.removesuffix(".weight"), shape)
        if stored.shape != original.shape:
            raise DraftModelError(
                f"{self._path}: matrix {name} has shape {stored.shape}, not {original.shape}"
            )
        scale = max(float(np.sqrt(np.mean(original**2))), 1e-12)
        error = float(np.sqrt(np.mean((stored - original) ** 2))) / scale
        if not error <= LARGEST_WEIGHT_ERROR[bits]:
            row, column = np.unravel_index(np.argmax(np.abs(stored - original)), original.shape)
            raise DraftModelError(
                f"{self._path}: matrix {name} differs from the checkpoint's by {error:.3g} of its"
                f" size, at most {LARGEST_WEIGHT_ERROR[bits]} is rounding to {bits} bits; most at"
                f" [{row}, {column}]: {stored[row, column]:.4g} instead of"
                f" {original[row, column]:.4g}"
            )
        return stored

    def _matrix(self, name: str, shape: tuple[int, ...]) -> tuple[Array, int]:
        """(float32 [N, K], bits); queries, keys and values lie in one matrix of the graph."""
        dim, rows = self._shape.head_dim, shape[0]
        if name.endswith(".o_proj"):
            stored, bits = self._plain(name, self._shape.heads * padded_head_dim(dim))
            return unpad_inputs(stored, dim), bits
        joint, first, _ = self._checkpoint.joint_matrix(f"{name}.weight")
        if not joint.endswith(".qkv_proj.weight"):
            return self._plain(name, shape[1])
        size = padded_head_dim(dim)
        heads = slice(first // dim * size, (first + rows) // dim * size)
        stored, bits = self._plain(joint.removesuffix(".weight"), shape[1], heads)
        return unpad_outputs(stored, dim), bits

    def _plain(self, name: str, columns: int, rows: slice = slice(None)) -> tuple[Array, int]:
        """(``rows`` of float32 [N, K], bits)."""
        from onnx import numpy_helper

        if f"{name}.packed" in self._stored:
            packed = numpy_helper.to_array(self._stored[f"{name}.packed"])[rows]
            scales = numpy_helper.to_array(self._stored[f"{name}.scales"])[rows]
            bits = packed.shape[2] * 8 // 32
            return dequantize_matrix(QuantizedMatrix(packed, scales, bits, columns)), bits
        if f"{name}.weight" not in self._stored:
            raise DraftModelError(f"{self._path}: matrix {name} is missing")
        weight = numpy_helper.to_array(self._stored[f"{name}.weight"])
        return (weight if name == "model.embed_tokens" else weight.T)[rows], 32


def relative(got: Array, wanted: Array) -> float:
    """Root mean square of the difference over the standard deviation of ``wanted``."""
    return float(np.sqrt(np.mean((got - wanted) ** 2))) / max(float(wanted.std()), 1e-12)
