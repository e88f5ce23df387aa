"""Attention as the definition has it, row by row in float32: what other backends are tested by.

It reads the pool through the same tables and makes no use of any library's attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from edgespec.verifier.targets.attention_backend import LayerAttention, LayerStates
from edgespec.verifier.targets.batch_rows import BatchRows
from edgespec.verifier.targets.pass_batch import Indices


class ReferenceAttention:
    """``AttentionBackend`` that nobody would serve with."""

    @property
    def name(self) -> str:
        return "reference"

    def lay_out(self, rows: BatchRows) -> ReferenceLayout:
        seen = [line for session in range(len(rows.requests)) for line in _seen_keys(rows, session)]
        return ReferenceLayout(seen)


@dataclass(frozen=True, slots=True)
class ReferenceLayout:
    """Of each row the slots that it sees, and how far behind it they are in the text."""

    seen: list[tuple[Indices, Indices]]

    def attend(self, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
        heads, rows, head_dim = states.query.shape
        kv_heads = states.key.shape[0]
        out = states.query.new_zeros((rows, heads, head_dim))
        for row, (slots, distances) in enumerate(self.seen):
            if layer.window is not None:
                slots = slots[distances < layer.window]
            where = torch.from_numpy(slots).to(states.keys.device)
            keys = states.keys[where].float().view(-1, kv_heads, head_dim)
            values = states.values[where].float().view(-1, kv_heads, head_dim)
            query = states.query[:, row].float().view(kv_heads, -1, head_dim)
            scores = torch.einsum("hsd,khd->hsk", query, keys) * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            if layer.sinks is not None:
                sinks = layer.sinks.float().view(kv_heads, -1, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(dim=-1)[..., : len(slots)]
            part = torch.einsum("hsk,khd->hsd", weights, values)
            out[row] = part.reshape(heads, head_dim).to(out.dtype)
        return out


def _seen_keys(rows: BatchRows, index: int) -> list[tuple[Indices, Indices]]:
    """For each row of a session: slots, and its own position less theirs."""
    session = rows.session(index)
    request, base = session.request, session.base
    positions = np.concatenate([np.arange(request.cache_length), session.positions])
    found = []
    for row in range(request.row_count):
        keys = list(range(min(base, request.cache_length + row + 1)))
        node = row - len(request.feed)
        while node >= 0:
            keys.append(base + node)
            node = request.parents[node]
        found.append((session.slots[keys], session.positions[row] - positions[keys]))
    return found
