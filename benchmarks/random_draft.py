"""Draft folders of real models' shapes with random weights, made in seconds.

Memory and speed depend on sizes alone, so nothing is trained and nothing fitted: quantised weights
are random bytes with scales that also fit float16. The texts of such a draft mean nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from edgespec.core.device.kv_type import KvType
from edgespec.drafters import export, export_graph
from edgespec.drafters.checkpoint import Checkpoint
from edgespec.drafters.manifest import DraftManifest
from edgespec.drafters.quantize import BLOCK_SIZE, QuantizedMatrix
from edgespec.ports import ModelInfo

# hidden, layers, heads, key/value heads, head size, feed forward, vocabulary, kind
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, str]] = {
    "1M": (192, 3, 3, 1, 64, 512, 4096, "llama"),
    "5M": (256, 6, 4, 2, 64, 704, 8192, "llama"),
    "25M": (448, 8, 7, 1, 64, 1216, 16384, "llama"),
    "135M": (576, 30, 9, 3, 64, 1536, 49152, "llama"),
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151936, "qwen3"),
}
"""As of the bundled draft, two between, SmolLM2-135M and Qwen3-0.6B."""


class _RandomCheckpoint(Checkpoint):
    """Every tensor that is asked for, of small random numbers; no biases."""

    def __init__(self, folder: Path) -> None:
        self._rng = np.random.default_rng(0)

    def __contains__(self, name: str) -> bool:
        return bool(name) and not name.endswith(".bias")

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if len(shape) == 1:
            return np.ones(shape, dtype=np.float32)
        row = self._rng.standard_normal(shape[1], dtype=np.float32) * np.float32(0.03)
        shifts = self._rng.standard_normal((shape[0], 1), dtype=np.float32)
        product: NDArray[np.float32] = row * shifts
        return product


def _random_matrix(weight: NDArray[np.float32], bits: int) -> QuantizedMatrix:
    """No two alike: the runtime keeps equal ones once."""
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK_SIZE)
    rng = np.random.default_rng(int(abs(weight[0, 0]) * 1e9))
    packed = rng.integers(0, 256, (rows, blocks, BLOCK_SIZE * bits // 8), dtype=np.uint8)
    sizes = rng.uniform(0.5, 1.5, (rows, blocks)) * rng.choice((-1.0, 1.0), (rows, blocks))
    scales = (sizes * 0.06 / (1 << bits)).astype(np.float16).astype(np.float32)
    return QuantizedMatrix(packed, scales, bits, columns)


def config_of(name: str, context_length: int) -> dict[str, Any]:
    """The ``config.json`` of a shape."""
    hidden, layers, heads, kv_heads, head_dim, wide, vocabulary, kind = SHAPES[name]
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
    }


def make_draft(
    folder: Path,
    name: str,
    *,
    bits: int = 4,
    context_length: int = 4096,
    kv_type: KvType = KvType.FLOAT32,
) -> DraftManifest:
    """Write the draft of shape ``name`` into ``folder``."""
    source = folder.parent / f"{folder.name}.source"
    source.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text(json.dumps(config_of(name, context_length)))
    info = ModelInfo(name, f"random-{name}", SHAPES[name][6], context_length)
    with (
        mock.patch.object(export, "Checkpoint", _RandomCheckpoint),
        mock.patch.object(export_graph, "quantize_matrix", _random_matrix),
    ):
        return export.export_draft(
            source, folder, info, bits=bits, context_length=context_length, kv_type=kv_type
        )
