"""The seam of attention: how the rows of a pass attend to keys in the pool.

A backend lays a pass out once (which keys each row sees, in the shapes that its arithmetic wants),
and the layout is then asked once a layer. All backends compute the same function,

    out[row] = sum_k w_k value[k],   w = softmax over the seen k of cap(scale * query[row] . key[k])

with cap(x) = soft_cap * tanh(x / soft_cap) where the layer has a soft cap (Gemma 2,
arXiv 2408.00118, section 2), else x. A row sees the keys of its ancestors and its own; in a layer
with a window w only those whose positions lie behind its own position less w. A sink is one more
score of each head, which takes its share of the softmax and brings no value (gpt-oss,
arXiv 2508.10925, section 2; the idea is in arXiv 2309.17453, section 3.3).

Which there are: ``grouped_attention.py`` (several sessions in one call of torch's attention) and
``canonical_attention.py`` (the same bits under every schedule).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from edgespec.verifier.targets.batch_rows import BatchRows


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What a layer asks of attention."""

    scale: float
    window: int | None = None
    """In tokens, the row itself included; None: the whole text."""
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    """[heads], in the units of the scaled scores."""

    def capped(self, scores: torch.Tensor, unit: float = 1.0) -> torch.Tensor:
        """Scaled ``scores`` (times ``unit``) after the soft cap; changes them in place."""
        if self.soft_cap is None:
            return scores
        cap = self.soft_cap * unit
        return scores.div_(cap).tanh_().mul_(cap)

    def sink_scores(self, kv_heads: int, unit: float = 1.0) -> torch.Tensor | None:
        """float32 [kv_heads, heads per key head, 1, 1], times ``unit``; None without sinks."""
        if self.sinks is None:
            return None
        return self.sinks.float().mul(unit).view(kv_heads, -1, 1, 1)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """What a layer's projections made of the rows, and what is cached of the layer."""

    query: torch.Tensor
    """[heads, rows, head_dim], padding included."""
    key: torch.Tensor
    """[key-value heads, rows, head_dim]."""
    value: torch.Tensor
    """[key-value heads, rows, head_dim]."""
    keys: torch.Tensor
    """[slots, key-value heads * head_dim]: the pool's, those of this pass among them."""
    values: torch.Tensor
    """[slots, key-value heads * head_dim]."""


class AttentionLayout(Protocol):
    """One pass, laid out."""

    def attend(self, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
        """[rows, heads, head_dim] in the type of the query; what rows of padding hold is of no
        meaning, but finite."""
        ...


class AttentionBackend(Protocol):
    """A way of computing attention; it may keep buffers, so it serves one pass at a time."""

    def lay_out(self, rows: BatchRows) -> AttentionLayout:
        """The layout of one pass. Layers with different windows may ask it in any order."""
        ...
