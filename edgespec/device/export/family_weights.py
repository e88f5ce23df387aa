"""A family's checkpoint as that of a plain decoder: what can be folded into weights, is.

* Phi-3 stores queries, keys and values as one matrix, gate and up as another: they are cut.
* Gemma's norms multiply by 1 + weight: the 1 is added.
* A factor on embeddings (Gemma, Granite) would need the table twice where the head shares it.
  Instead the whole stream is kept that many times too small: what is added to it is divided by the
  factor, and norms of the stream, which no factor changes, take an epsilon that is smaller by its
  square (``DecoderShape.stream_epsilon``).
* A factor on branches (Granite) goes into their last matrix, a divisor of logits into the last
  norm.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.device.export.checkpoint import Checkpoint, DecoderShape

_LAST_MATRICES = (".self_attn.o_proj.", ".mlp.down_proj.")
_BRANCH_NORMS = (".post_attention_layernorm.", ".post_feedforward_layernorm.")


class FamilyWeights:
    """``Checkpoint``, under the names and with the meaning that Llama's tensors have."""

    def __init__(self, checkpoint: Checkpoint, shape: DecoderShape) -> None:
        self._checkpoint, self._shape = checkpoint, shape

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint or self.joint_matrix(name)[0] in self._checkpoint

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """As ``Checkpoint.read``."""
        value = self._cut(name, shape)
        if len(shape) == 1 and "norm." in name:
            value = value + np.float32(self._shape.norm_offset)
        factor = self._factor(name)
        return value if factor == 1.0 else value * np.float32(factor)

    def joint_matrix(self, name: str) -> tuple[str, int, int]:
        """(the matrix that families fuse ``name`` into with others, its first row there, rows of
        that matrix); no name where it stands alone."""
        shape = self._shape
        heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        for fused, parts in (
            ("qkv_proj", {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}),
            ("gate_up_proj", {"gate_proj": shape.feed_forward, "up_proj": shape.feed_forward}),
        ):
            start = 0
            for part, rows in parts.items():
                if f".{part}." in name:
                    whole = name.replace(f".{part}.", f".{fused}.")
                    return whole, start, sum(parts.values())
                start += rows
        return "", 0, 0

    def _factor(self, name: str) -> float:
        shape = self._shape
        if name == "model.norm.weight":
            return 1.0 / shape.logits_divisor
        last = _BRANCH_NORMS if shape.normalises_branches else _LAST_MATRICES
        if any(part in name for part in last):
            return shape.branch_scale / shape.stream_scale
        return 1.0

    def _cut(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        whole, start, rows = self.joint_matrix(name)
        if name in self._checkpoint or whole not in self._checkpoint:
            return self._checkpoint.read(name, shape)
        return self._checkpoint.read(whole, (rows, *shape[1:]))[start : start + shape[0]]
