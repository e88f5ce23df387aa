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
from functools import cached_property

import numpy as np

from edgespec.core.ports import PassRequest
from edgespec.verifier.targets.block_tables import KeySlots
from edgespec.verifier.targets.kv_pool import KvPool, Slots
from edgespec.verifier.targets.pass_batch import Indices, PassBatch
from edgespec.verifier.targets.tree_shape import TreeShape


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


@dataclass(frozen=True)
class BatchRows:
    """All sessions of a pass, laid out; arrays are int64."""

    pool: KvPool
    requests: PassBatch
    tables: Indices
    """[sessions]: each session's row of ``pool.tables``."""
    counts: Indices
    """[sessions]: rows."""
    first_rows: Indices
    """[sessions]."""
    bases: Indices
    """[sessions]: key index of the first node, which is the length of the text with the feed."""
    lengths: Indices
    """[sessions]: keys in all."""
    row_count: int
    own_keys: Indices
    """[rows]: key index of the row itself."""
    positions: Indices
    """[rows]."""

    @property
    def trees(self) -> tuple[TreeShape | None, ...]:
        """[sessions]: None for a request without nodes."""
        return self.requests.trees

    @cached_property
    def single(self) -> bool:
        """Whether every session has one row."""
        return self.row_count == len(self.requests)

    def key_slots(self, sessions: Indices, count: int) -> KeySlots:
        """[len(sessions), count]: slots of the first ``count`` keys; 0 behind a session's end.
        Asked before the next pass is laid out."""
        return self.pool.tables.key_slots(self.tables[sessions], count)

    def session(self, index: int) -> SessionRows:
        """One session by itself."""
        first, length = int(self.first_rows[index]), int(self.lengths[index])
        positions = self.positions[first : first + int(self.counts[index])]
        slots = self.pool.tables.slots_of(self.tables[index : index + 1], np.arange(length))
        return SessionRows(self.requests[index], first, positions, slots)


def lay_out(pool: KvPool, requests: Sequence[PassRequest]) -> BatchRows:
    """All rows of reserved requests."""
    batch = PassBatch.of(requests)
    tables = pool.table_rows(batch)
    pool.tables.extend(tables, batch.ends)
    counts = batch.fed + batch.node_counts
    ends = np.cumsum(counts)
    first_rows = ends - counts
    row_count = int(ends[-1])
    bases = batch.cached + batch.fed
    if row_count == len(counts):
        own_keys = batch.cached
    else:
        own_keys = np.arange(row_count) + np.repeat(batch.cached - first_rows, counts)
    positions = own_keys
    if batch.has_nodes:
        depths = [tree.depths for tree in batch.trees if tree is not None]
        positions = own_keys.copy()
        is_node = own_keys >= np.repeat(bases, counts)
        positions[is_node] = np.repeat(bases - 1, batch.node_counts) + np.concatenate(depths)
    return BatchRows(
        pool=pool,
        requests=batch,
        tables=tables,
        counts=counts,
        first_rows=first_rows,
        bases=bases,
        lengths=batch.ends,
        row_count=row_count,
        own_keys=own_keys,
        positions=positions,
    )


def write_slots(rows: BatchRows) -> Slots:
    """[rows]: where each row's key and value go."""
    tables = rows.tables if rows.single else np.repeat(rows.tables, rows.counts)
    return rows.pool.tables.slots_of(tables, rows.own_keys)
