"""One packed pass: its tokens and positions, where keys go, and which rows are sampled.

Rows (``batch_rows.py``) are padded at the end to a multiple of ``RowTiles.row_multiple`` in
canonical mode. How they attend to keys is laid out by an ``AttentionBackend``
(``attention_backend.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edgespec.core.ports import PassRequest
from edgespec.sampling.tensors import to_device
from edgespec.verifier.targets.attention_backend import AttentionBackend, AttentionLayout
from edgespec.verifier.targets.batch_rows import BatchRows, lay_out, write_slots
from edgespec.verifier.targets.kv_pool import KvPool
from edgespec.verifier.targets.pass_batch import Indices
from edgespec.verifier.targets.row_tiles import RowTiles


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
    """Lay out a pass over ``batch``, whose blocks are reserved, as ``plan_rows`` does."""
    return plan_rows(lay_out(pool, batch), backend, tiles=tiles)


def plan_rows(
    rows: BatchRows, backend: AttentionBackend, *, tiles: RowTiles | None = None
) -> PassPlan:
    """The plan of a pass over ``rows``; with ``tiles`` in canonical mode, whose padding and way of
    attending they prescribe."""
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
    """Those whose logits are wanted: of a request that samples its last fed row and its nodes."""
    if rows.single:
        return np.flatnonzero(rows.requests.samples)
    first = np.where(rows.requests.samples, rows.bases - 1, rows.lengths)
    return np.flatnonzero(rows.own_keys >= np.repeat(first, rows.counts))
