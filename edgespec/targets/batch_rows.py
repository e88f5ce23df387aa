"""The rows of a pass: which session's, at which position, with which key.

Theory of operation. Rows are the sessions' fed tokens and nodes, one session after the other.
Everything that is the same arithmetic for each row is done for all rows at once; a session costs a
few look-ups.

A *key index* counts a session's keys in the order of their slots: the text first, then the nodes
of this pass. Of the text it equals the position; nodes beside each other have the same position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.ports import PassRequest
from edgespec.targets.kv_pool import BLOCK_SIZE, KvPool, Slots
from edgespec.targets.tree_shape import TreeShape, tree_shape

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SessionRows:
    """One request, laid out."""

    request: PassRequest
    first_row: int
    positions: Indices
    slots: Slots
    """Of the cache, the feed and the nodes, in that order."""

    @property
    def base(self) -> int:
        """Keys before the first node."""
        return self.request.cache_length + len(self.request.feed)


@dataclass(frozen=True, slots=True)
class BatchRows:
    """All sessions of a pass, laid out; arrays are int64."""

    pool: KvPool
    requests: Sequence[PassRequest]
    trees: tuple[TreeShape | None, ...]
    """None for a request without nodes."""
    tables: list[int]
    """Each session's row of ``pool.tables``."""
    counts: Indices
    """[sessions]: rows."""
    first_rows: Indices
    """[sessions]."""
    bases: Indices
    """[sessions]: key index of the first node, which is the length of the text with the feed."""
    lengths: Indices
    """[sessions]: keys in all."""
    own_keys: Indices
    """[rows]: key index of the row itself."""
    positions: Indices
    """[rows]."""

    @property
    def row_count(self) -> int:
        return len(self.positions)

    def key_slots(self, sessions: list[int], count: int) -> Slots:
        """[len(sessions), count]: slots of the first ``count`` keys; 0 behind a session's end."""
        tables = [self.tables[session] for session in sessions]
        blocks = self.pool.tables.rows(tables, -(-count // BLOCK_SIZE))
        slots = blocks[:, :, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
        keys = slots.reshape(len(sessions), -1)[:, :count]
        keys *= np.arange(count) < self.lengths[sessions, None]
        return keys

    def session(self, index: int) -> SessionRows:
        """One session by itself."""
        first, length = int(self.first_rows[index]), int(self.lengths[index])
        positions = self.positions[first : first + int(self.counts[index])]
        slots = self.key_slots([index], length)[0]
        return SessionRows(self.requests[index], first, positions, slots)


def lay_out(pool: KvPool, batch: Sequence[PassRequest]) -> BatchRows:
    """All rows of reserved requests."""
    trees = tuple([tree_shape(r.parents) if r.parents else None for r in batch])
    cached = np.array([request.cache_length for request in batch])
    fed = np.array([len(request.feed) for request in batch])
    nodes = np.array([len(request.tokens) for request in batch])
    counts = fed + nodes
    first_rows = np.cumsum(counts) - counts
    bases = cached + fed
    own_keys = np.arange(int(counts.sum())) + np.repeat(cached - first_rows, counts)
    positions = own_keys
    depths = [tree.depths for tree in trees if tree is not None]
    if depths:
        positions = own_keys.copy()
        is_node = own_keys >= np.repeat(bases, counts)
        positions[is_node] = np.repeat(bases - 1, nodes) + np.concatenate(depths)
    return BatchRows(
        pool=pool,
        requests=batch,
        trees=trees,
        tables=[pool.sequence(request.key).table for request in batch],
        counts=counts,
        first_rows=first_rows,
        bases=bases,
        lengths=bases + nodes,
        own_keys=own_keys,
        positions=positions,
    )


def write_slots(rows: BatchRows) -> Slots:
    """[rows]: where each row's key and value go."""
    block_count = -(-int(rows.lengths.max()) // BLOCK_SIZE)
    blocks = rows.pool.tables.rows(rows.tables, block_count)
    session = np.repeat(np.arange(len(rows.counts)), rows.counts)
    block, place = np.divmod(rows.own_keys, BLOCK_SIZE)
    return blocks[session, block] * BLOCK_SIZE + place
