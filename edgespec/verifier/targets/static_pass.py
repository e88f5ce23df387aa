"""A pass at fixed places: every tensor that the model and the paged kernel read keeps its address.

Theory of operation. A recorded pass (``graphed_passes.py``) repeats the same work on the same
memory. So its shapes are those of a ``Bucket``, and what is fewer is padded:

* rows of padding belong to one more session, behind the true ones, whose table is the pool's block
  of padding. They write there, and each sees the first key of it: their results are finite, and
  nobody reads them.
* tiles that are left over have no rows.
* the sampled rows are repeated, and their logits left out.

Everything lies in one stretch of bytes, which goes to the device in one copy a pass: 64-bit numbers
that torch indexes by, 32-bit ones for the kernel, and at the end, as long as they are this time,
what has changed in the block tables and where kept nodes go. Those last two are put in their places
before the pass, outside the recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edgespec.sampling.torch_device_copies import StagedBytes
from edgespec.verifier.targets.batch_rows import BatchRows, write_slots
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE, KvPool
from edgespec.verifier.targets.paged_attention import (
    PagedAttention,
    PagedLayout,
    largest_tree,
    make_tiles,
    put_lines,
)
from edgespec.verifier.targets.pass_plan import PassPlan, sampled_rows

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Of rows."""
# Coarse where more than is needed costs little, and another recording much: a tile without rows, or
# a share of the keys without keys, is over at once.
_TILES = (1, 4, 16, 64, 256)
_TREES = (0, 16, 64)
_SPLITS = (1, 4, 16)
_WIDE, _NARROW = 8, 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a pass: whatever the launches of its work depend on."""

    rows: int
    tiles: int
    lanes: int
    """Rows of a tile times the query heads that share a key head."""
    nodes: int
    """Of the largest tree."""
    splits: int


def bucket_of(rows: BatchRows, attention: PagedAttention) -> Bucket | None:
    """The smallest that ``rows`` fit into; None where there is none, or nothing is sampled."""
    row_count = _least(SIZES, rows.row_count)
    nodes = _least(_TREES, largest_tree(rows)) if rows.requests.has_nodes else 0
    if row_count is None or nodes is None or not any(rows.requests.samples):
        return None
    lanes = attention.lanes(rows)
    limit = lanes // attention.share
    tiles = int((-(-rows.counts // limit)).sum()) - (rows.row_count - row_count) // limit
    tile_count = _least(_TILES, tiles)
    if tile_count is None:
        return None
    splits = attention.splits(tile_count, int(rows.lengths.max()))
    return Bucket(row_count, tile_count, lanes, nodes, max(s for s in _SPLITS if s <= splits))


class StaticPass:
    """The tensors of one bucket. ``plan`` is that of the pass that was sent last."""

    def __init__(self, bucket: Bucket, pool: KvPool, attention: PagedAttention) -> None:
        rows, tiles = bucket.rows, bucket.tiles
        self.bucket, self._pool = bucket, pool
        self._scratch = (pool.scratch_table, pool.scratch_block * BLOCK_SIZE)
        self.tables = pool.tables.on_device()
        self._limit = bucket.lanes // attention.share
        wide = (rows,) * 4
        narrow = (3 * tiles, 4 * (tiles + 1), rows, rows, rows * bucket.nodes)
        fixed = _WIDE * (sum(wide) + -(-sum(narrow) * _NARROW // _WIDE))
        self._fixed = fixed
        self._more = 4 * rows + 64
        self._bytes = StagedBytes(fixed + _WIDE * self._more, pool.device)
        host, device = self._bytes.host, self._bytes.device
        middle = _WIDE * sum(wide)
        self._wide = _parts(host[:middle].view(np.int64), wide)
        self._narrow = _parts(host[middle : middle + _NARROW * sum(narrow)].view(np.int32), narrow)
        self._tail = host[fixed:].view(np.int64)
        self._device_tail = device[fixed:].view(torch.int64)
        tokens, positions, slots, sampled = device[:middle].view(torch.int64).split(wide)
        ours = device[middle : middle + _NARROW * sum(narrow)].view(torch.int32).split(narrow)
        self.plan = PassPlan(
            pool=pool,
            row_count=rows,
            tokens=tokens[None],
            positions=positions[None],
            write_slots=slots,
            sampled_rows=sampled,
            sampled_count=rows,
            attention=PagedLayout(
                kernel=attention.kernel,
                tables=self.tables,
                tiles=ours[0],
                sessions=ours[1],
                own_keys=ours[2],
                positions=ours[3],
                lines=ours[4],
                line_width=bucket.nodes,
                tile_count=tiles,
                lanes=bucket.lanes,
                splits=bucket.splits,
            ),
        )

    def send(self, rows: BatchRows) -> int:
        """Lay ``rows``, which are of this bucket, out on the device, with one copy, and bring the
        block tables and the pool up to date. Returns how many rows are sampled."""
        self._bytes.begin()
        sampled = self._fill(rows)
        pool, tables = self._pool, self._pool.tables
        parts = [part for part in (self._written(), self._moves()) if part is not None]
        used = sum([part.size for part in parts])
        if used <= self._more:
            if parts:
                self._tail[:used] = np.concatenate([part.ravel() for part in parts])
            self._bytes.send(self._fixed + _WIDE * used)
            ends = iter(self._device_tail[:used].split([part.size for part in parts]))
            if tables.lacking:
                tables.put(next(ends).view(2, -1))
            if pool.has_moves:
                pool.move(next(ends).view(2, -1))
        else:  # a long text has come in: what there is no room for goes by itself
            self._bytes.send(self._fixed)
        # Nothing, unless there was no room for it.
        assert tables.on_device() is self.tables, "the block tables have moved"
        assert pool.data is not None
        return sampled

    def _written(self) -> npt.NDArray[np.int64] | None:
        return self._pool.tables.written() if self._pool.tables.lacking else None

    def _moves(self) -> npt.NDArray[np.int64] | None:
        return self._pool.moves() if self._pool.has_moves else None

    def _fill(self, rows: BatchRows) -> int:
        count, padded = rows.row_count, self.bucket.rows
        tokens, positions, slots, sampled = self._wide
        tokens[:count], tokens[count:] = rows.requests.tokens, 0
        positions[:count], positions[count:] = rows.positions, 0
        slots[:count] = write_slots(rows)
        if count < padded:
            slots[count:] = self._scratch[1] + np.arange(padded - count) % BLOCK_SIZE
        wanted = sampled_rows(rows)
        sampled[: len(wanted)], sampled[len(wanted) :] = wanted, wanted[-1]

        tiles, sessions, own_keys, key_positions, lines = self._narrow
        own_keys[:count], own_keys[count:] = rows.own_keys, 0
        key_positions[:count], key_positions[count:] = rows.positions, 0
        true = len(rows.requests)
        by_session = sessions.reshape(-1, 4)
        for place, column in enumerate((rows.tables, rows.first_rows, rows.bases, rows.lengths)):
            by_session[:true, place] = column
        # Of padding: one key in all, which is text.
        by_session[true] = (self._scratch[0], min(count, padded - 1), 1, 1)
        made = make_tiles(rows, self._limit)
        by_tile = tiles.reshape(-1, 3)
        by_tile[: len(made)] = made
        by_tile[len(made) :] = (true, 0, 0)
        for place, first in enumerate(range(count, padded, self._limit), start=len(made)):
            by_tile[place, 1:] = (first, min(self._limit, padded - first))
        if self.bucket.nodes:
            lines.fill(0)
            put_lines(rows, lines.reshape(padded, -1))
        return len(wanted)


def _least(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of ``sizes`` that is not below ``count``."""
    return next((size for size in sizes if size >= count), None)


def _parts(array: npt.NDArray[Any], sizes: Sequence[int]) -> list[npt.NDArray[Any]]:
    """Views one behind another."""
    return np.split(array, np.cumsum(sizes[:-1]))
