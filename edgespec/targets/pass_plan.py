"""One packed pass: its tokens and positions, where keys go, and which rows are sampled.

Rows (``batch_rows.py``) are padded at the end to a multiple of ``RowTiles.row_multiple`` in
canonical mode. How they attend to keys is laid out by an ``AttentionBackend``
(``attention_backend.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from edgespec.ports import PassRequest
from edgespec.targets.attention_backend import AttentionBackend, AttentionLayout
from edgespec.targets.batch_rows import BatchRows, Indices, lay_out, write_slots
from edgespec.targets.kv_pool import KvPool
from edgespec.targets.row_tiles import RowTiles


@dataclass(frozen=True, slots=True)
class PassPlan:
    pool: KvPool
    row_count: int
    """Rows that are not padding."""
    tokens: torch.Tensor
    """int64 [1, padded]."""
    positions: torch.Tensor
    """int64 [1, padded]."""
    write_slots: torch.Tensor
    """int64 [row_count]."""
    sampled_rows: torch.Tensor
    """int64 [padded]: rows whose logits are wanted."""
    sampled_count: int
    attention: AttentionLayout


def plan_pass(
    pool: KvPool,
    batch: Sequence[PassRequest],
    backend: AttentionBackend,
    *,
    tiles: RowTiles | None = None,
) -> PassPlan:
    """Lay out a pass over ``batch``, whose blocks are reserved; with ``tiles`` in canonical mode,
    whose padding and way of attending they prescribe."""
    rows = lay_out(pool, batch)
    tokens = np.fromiter(
        chain.from_iterable([part for r in batch for part in (r.feed, r.tokens)]), dtype=np.int64
    )
    positions, sampled = rows.positions, _sampled(rows)
    sampled_count = len(sampled)
    if tiles is not None:
        padding = -rows.row_count % tiles.row_multiple
        tokens = np.pad(tokens, (0, padding))
        positions = np.pad(positions, (0, padding))
        if sampled_count:
            sampled = np.pad(sampled, (0, -sampled_count % tiles.row_multiple), mode="edge")
    one_copy = torch.from_numpy(np.concatenate([tokens, positions, write_slots(rows), sampled]))
    parts = one_copy.to(pool.device).split(
        [len(tokens), len(positions), rows.row_count, len(sampled)]
    )
    return PassPlan(
        pool=pool,
        row_count=rows.row_count,
        tokens=parts[0][None],
        positions=parts[1][None],
        write_slots=parts[2],
        sampled_rows=parts[3],
        sampled_count=sampled_count,
        attention=backend.lay_out(rows),
    )


def _sampled(rows: BatchRows) -> Indices:
    """Of every request that samples the last fed row and its nodes."""
    first = np.where([request.sample for request in rows.requests], rows.bases - 1, rows.lengths)
    return np.flatnonzero(rows.own_keys >= np.repeat(first, rows.counts))
