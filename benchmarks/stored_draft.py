"""The weights of an exported 4-bit draft, as they lie in its file, for other runtimes and models.

``q4_0_blocks`` lays a matrix out as llama.cpp's Q4_0 does: a block of 32 weights is a float16 scale
and 16 bytes, of which byte j holds entries j and j + 16, where ours holds 2 j and 2 j + 1. Both
mean (integer - 8) * scale, so the same integers and scales are the same weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgespec.drafters.checkpoint import DecoderShape
from edgespec.drafters.manifest import MODEL_FILE
from edgespec.drafters.quantize import QuantizedMatrix, dequantize_matrix

_GGUF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


class StoredDraft:
    """``reference_model.Weights`` over the graph in ``folder``: what a kernel with exact arithmetic
    would compute with."""

    def __init__(self, folder: Path, shape: DecoderShape) -> None:
        model = onnx.load(folder / MODEL_FILE)
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._shape = shape

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if len(shape) == 1:
            vector: NDArray[np.float32] = self._array(name)
            return vector
        return dequantize_matrix(self.matrix(name.removesuffix(".weight"), shape[1]))

    def matrix(self, name: str, columns: int) -> QuantizedMatrix:
        """The integers and scales of a matrix, also of one that is stored behind others."""
        stored, rows = name, slice(None)
        layer, _, part = name.rpartition(".")
        if f"{name}.packed" not in self._tensors:
            queries = self._shape.heads * self._shape.head_dim
            keys = self._shape.kv_heads * self._shape.head_dim
            starts = {"q_proj": (0, queries), "k_proj": (queries, keys)}
            start, count = starts.get(part, (queries + keys, keys))
            stored, rows = f"{layer}.qkv_proj", slice(start, start + count)
        packed, scales = self._array(f"{stored}.packed"), self._array(f"{stored}.scales")
        return QuantizedMatrix(packed[rows], scales[rows], 4, columns)

    def _array(self, name: str) -> NDArray[np.generic]:
        array: NDArray[np.generic] = numpy_helper.to_array(self._tensors[name])
        return array


def q4_0_blocks(matrix: QuantizedMatrix) -> NDArray[np.uint8]:
    """[N, 18 B] for B blocks a row. Raises ``ValueError`` for scales that float16 cannot hold."""
    scales = matrix.scales.astype(np.float16)
    if not np.array_equal(scales.astype(np.float32), matrix.scales):
        raise ValueError("scales of a block do not fit float16: they would be other weights")
    pairs = np.stack((matrix.packed & 0x0F, matrix.packed >> 4), axis=-1)
    entries = pairs.reshape(*matrix.packed.shape[:2], 32)
    halves = entries[..., :16] | (entries[..., 16:] << np.uint8(4))
    blocks = np.concatenate((scales[..., None].view(np.uint8), halves), axis=-1)
    return blocks.reshape(len(blocks), -1)


def write_tensors(draft: StoredDraft, shape: DecoderShape, context: int, target: Path) -> None:
    """What ``llama_cpp_process.py write`` reads: a Qwen3 whose matrices are all Q4_0, the tied
    table too, and that has no tokenizer."""
    sizes = {
        "q_proj": (shape.heads * shape.head_dim, shape.hidden),
        "k_proj": (shape.kv_heads * shape.head_dim, shape.hidden),
        "v_proj": (shape.kv_heads * shape.head_dim, shape.hidden),
        "o_proj": (shape.hidden, shape.heads * shape.head_dim),
        "gate_proj": (shape.feed_forward, shape.hidden),
        "up_proj": (shape.feed_forward, shape.hidden),
        "down_proj": (shape.hidden, shape.feed_forward),
    }
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    for layer in range(shape.layers):
        for ours, theirs in _GGUF_LAYER.items():
            names[f"model.layers.{layer}.{ours}"] = f"blk.{layer}.{theirs}"
    target.mkdir(parents=True, exist_ok=True)
    for ours, theirs in names.items():
        part = ours.rpartition(".")[2]
        if "norm" in part:
            size = shape.head_dim if part in ("q_norm", "k_norm") else shape.hidden
            np.save(target / f"{theirs}.weight.npy", draft.read(f"{ours}.weight", (size,)))
        else:
            columns = sizes.get(part, (0, shape.hidden))[1]
            np.save(target / f"{theirs}.weight.npy", q4_0_blocks(draft.matrix(ours, columns)))
    model = {
        "architecture": "qwen3",
        "keys": _keys(shape, context),
        "tensors": [f"{name}.weight" for name in names.values()],
    }
    (target / "model.json").write_text(json.dumps(model))


def _keys(shape: DecoderShape, context: int) -> dict[str, int | float | str]:
    return {
        "general.file_type": 2,  # mostly Q4_0
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "none",
        "qwen3.vocab_size": shape.vocabulary_size,
        "qwen3.context_length": context,
        "qwen3.embedding_length": shape.hidden,
        "qwen3.block_count": shape.layers,
        "qwen3.feed_forward_length": shape.feed_forward,
        "qwen3.attention.head_count": shape.heads,
        "qwen3.attention.head_count_kv": shape.kv_heads,
        "qwen3.attention.key_length": shape.head_dim,
        "qwen3.attention.value_length": shape.head_dim,
        "qwen3.attention.layer_norm_rms_epsilon": float(shape.norm_epsilon),
        "qwen3.rope.freq_base": float(shape.rope["rope_theta"]),
    }
