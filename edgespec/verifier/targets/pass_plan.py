"""The plan of one packed pass: everything that the model's layers need beside their weights.

A plan has the tokens and positions of the rows, the slots to which their keys and values are
written, the rows whose logits are wanted, and how the rows attend to keys, which an
``AttentionBackend`` lays out. In canonical mode rows are padded at the end to a multiple of
``RowTiles.row_multiple``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AttentionInterface

from edgespec.core.ports import PassRequest
from edgespec.sampling.tensors import to_device
from edgespec.verifier.targets.kv_pool import KeySlots, KvPool
from edgespec.verifier.targets.pass_batch import Indices, PassBatch
from edgespec.verifier.targets.row_tiles import RowTiles


class BatchRows:
    """The rows of a pass: each session's fed tokens and nodes, one session after the other.

    Arrays are int64. A *key index* counts a session's keys in the order of their slots: first the
    text, where it equals the position, then the nodes of this pass."""

    def __init__(self, pool: KvPool, requests: Sequence[PassRequest]) -> None:
        """Lay out ``requests``, whose blocks must be reserved in ``pool``."""
        batch = PassBatch.of(requests)
        self.pool, self.requests = pool, batch
        self.tables = np.array([pool.sequences[key].table for key in batch.keys])
        """[sessions]: each session's row of ``pool.tables``."""
        pool.tables.extend(self.tables, batch.ends)
        self.counts = batch.fed + batch.node_counts
        """[sessions]: rows."""
        ends = np.cumsum(self.counts)
        self.first_rows = ends - self.counts
        self.row_count = int(ends[-1])
        self.bases = batch.cached + batch.fed
        """[sessions]: key index of the first node: the length of the text with the feed."""
        self.lengths = batch.ends
        """[sessions]: keys in all."""
        self.single = self.row_count == len(batch)
        """Whether every session has one row."""
        self.own_keys = batch.cached
        """[rows]: key index of the row itself."""
        if not self.single:
            before = np.repeat(batch.cached - self.first_rows, self.counts)
            self.own_keys = np.arange(self.row_count) + before
        self.positions = self.own_keys
        if batch.has_nodes:
            depths = [one for one in batch.depths if one is not None]
            self.positions = self.own_keys.copy()
            is_node = self.own_keys >= np.repeat(self.bases, self.counts)
            roots = np.repeat(self.bases - 1, batch.node_counts)
            self.positions[is_node] = roots + np.concatenate(depths)

    def key_slots(self, sessions: Indices, count: int) -> KeySlots:
        """Return [len(sessions), count]: slots of the first ``count`` keys of ``sessions``, and 0
        behind a session's end. Call it before the next pass is laid out."""
        return self.pool.tables.key_slots(self.tables[sessions], count)

    def node_slots(self, session: int, nodes: Indices) -> Indices:
        """Return [len(nodes)]: the slots of ``nodes`` of a session."""
        table, keys = self.tables[session : session + 1], self.bases[session] + nodes
        return self.pool.tables.slots_of(table, keys)


def write_slots(rows: BatchRows) -> Indices:
    """Return [rows]: the slot of each row's key and value."""
    tables = rows.tables if rows.single else np.repeat(rows.tables, rows.counts)
    return rows.pool.tables.slots_of(tables, rows.own_keys)


# Attention. A backend (``canonical_attention.py``, ``paged_attention.py``) lays a pass out once,
# and then computes each layer by that layout. All backends compute the same function,
#
#   out[row] = sum_k w_k value[k],   w = softmax over the seen k of cap(scale * query[row] . key[k])
#
# with cap(x) = soft_cap * tanh(x / soft_cap) in layers with a soft cap (Gemma 2, arXiv 2408.00118).
# A row sees the keys of its ancestors and its own key, within the layer's window. A sink is one
# more score of each head, which brings no value (gpt-oss, arXiv 2508.10925).


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The parameters of a layer's attention."""

    scale: float
    window: int | None = None
    """Tokens that a row sees, the row itself included; None means the whole text."""
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    """[heads], in the units of the scaled scores."""

    def capped(self, scores: torch.Tensor, unit: float) -> torch.Tensor:
        """Apply the soft cap to ``scores`` in place, and return them. They are scaled, and
        multiplied by ``unit``."""
        if self.soft_cap is None:
            return scores
        cap = self.soft_cap * unit
        return scores.div_(cap).tanh_().mul_(cap)

    def sink_scores(self, kv_heads: int, unit: float) -> torch.Tensor | None:
        """Return the sinks as scores, float32 [kv_heads, heads per key head, 1, 1], multiplied by
        ``unit``; None without sinks."""
        if self.sinks is None:
            return None
        return self.sinks.float().mul(unit).view(kv_heads, -1, 1, 1)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """Queries, keys and values of a pass's rows in one layer, and the layer's cached ones."""

    query: torch.Tensor
    """[heads, rows, head_dim], padding included."""
    key: torch.Tensor
    """[key-value heads, rows, head_dim]."""
    value: torch.Tensor
    """[key-value heads, rows, head_dim]."""
    keys: torch.Tensor
    """[slots, key-value heads * head_dim]: the keys of the pool, this pass's keys included."""
    values: torch.Tensor
    """[slots, key-value heads * head_dim]."""


class AttentionLayout(Protocol):
    """How the rows of one pass attend to keys."""

    def attend(self, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
        """Return the attention of one layer, [rows, heads, head_dim] in the type of the query. Rows
        of padding have finite numbers."""
        ...


class AttentionBackend(Protocol):
    """A way of computing attention; it may keep buffers, so it serves one pass at a time."""

    def lay_out(self, rows: BatchRows) -> AttentionLayout:
        """Return the layout of one pass. Layers with different windows may use it in any order."""
        ...


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The plan of one pass. Tensors are int64, on the device of ``pool``."""

    pool: KvPool
    row_count: int
    """Rows that are not padding."""
    tokens: torch.Tensor
    """int64 [1, padded rows]."""
    positions: torch.Tensor
    """int64 [1, padded rows]."""
    write_slots: torch.Tensor
    """int64 [row_count]: the slot of each row's key and value."""
    sampled_rows: torch.Tensor
    """int64 [padded]: rows whose logits are wanted."""
    sampled_count: int
    attention: AttentionLayout


def plan_pass(
    rows: BatchRows, backend: AttentionBackend, *, tiles: RowTiles | None = None
) -> PassPlan:
    """Return the plan of a pass over ``rows``. ``tiles`` prescribe the padding of canonical
    mode."""
    count, sampled = rows.row_count, sampled_rows(rows)
    padded, sampled_padded = count, len(sampled)
    if tiles is not None:
        padded += -count % tiles.row_multiple
        sampled_padded += -sampled_padded % tiles.row_multiple
    # Tokens, positions, slots to write, sampled rows: one copy to the device.
    buffer = np.zeros(2 * padded + count + sampled_padded, dtype=np.int64)
    buffer[:count] = rows.requests.tokens
    buffer[padded : padded + count] = rows.positions
    buffer[2 * padded : 2 * padded + count] = write_slots(rows)
    if sampled_padded:
        first = 2 * padded + count
        buffer[first : first + len(sampled)] = sampled
        buffer[first + len(sampled) :] = sampled[-1]
    moved = to_device(buffer, rows.pool.device)
    tokens, positions, slots, wanted = moved.split([padded, padded, count, sampled_padded])
    return PassPlan(
        pool=rows.pool,
        row_count=count,
        tokens=tokens[None],
        positions=positions[None],
        write_slots=slots,
        sampled_rows=wanted,
        sampled_count=len(sampled),
        attention=backend.lay_out(rows),
    )


def sampled_rows(rows: BatchRows) -> Indices:
    """Return the rows whose logits are wanted: the last fed row and the nodes of each request that
    samples."""
    if rows.single:
        return np.flatnonzero(rows.requests.samples)
    first = np.where(rows.requests.samples, rows.bases - 1, rows.lengths)
    return np.flatnonzero(rows.own_keys >= np.repeat(first, rows.counts))


# Without a mask function registered beside it transformers makes no mask, and does not look for
# packed sequences, which would make it wait for a GPU in every pass.
ATTENTION = "edgespec_packed"


def register_attention() -> None:
    """Make ``attn_implementation="edgespec_packed"`` known to transformers; repeatable."""
    AttentionInterface.register(ATTENTION, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    edgespec_pass: PassPlan | None = None,
    **_ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Write the pass's keys and values to the pool, then attend.

    The signature is transformers'. ``query`` is [1, heads, rows, head_dim], and ``s_aux`` [heads]
    are the sinks. Returns [1, rows, heads, head_dim]."""
    assert edgespec_pass is not None, "the model was called without a pass plan"
    layer = module.layer_idx
    assert isinstance(layer, int)
    plan = edgespec_pass
    data = plan.pool.data
    keys, values = data[0, layer], data[1, layer]
    keys.index_copy_(0, plan.write_slots, _as_rows(key, plan.row_count))
    values.index_copy_(0, plan.write_slots, _as_rows(value, plan.row_count))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = plan.attention.attend(
        LayerAttention(scale, sliding_window, softcap, s_aux),
        LayerStates(query[0], key[0], value[0], keys, values),
    )
    return out.unsqueeze(0), None


def _as_rows(states: torch.Tensor, count: int) -> torch.Tensor:
    return states[0, :, :count].transpose(0, 1).reshape(count, -1)
