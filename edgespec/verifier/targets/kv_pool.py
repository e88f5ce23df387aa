"""Keys and values of all sequences, in blocks of one pool.

Theory of operation. A sequence's table lists its blocks of ``BLOCK_SIZE`` slots. Tables come with
the requests of each pass: the engine's ledger (``core/verifier/block_ledger.py``) decides which
sequence holds which block, and the pool only holds the memory. During a pass the tree's nodes lie
behind the fed tokens. ``keep`` copies the kept ones to their positions and forgets the rest. The
copies of all sessions are made at once, when ``data`` is next read. Block 0 belongs to no sequence:
masked keys point at it, rows of padding write to it, and it never holds NaN, as stale memory may.
For requests without tables (tools, the self-test) the pool keeps its own ledger.

Invariant. ``length`` tokens of a sequence are committed and their keys are in the pool; the nodes
of its last pass lie behind them until ``keep`` or the next ``reserve``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from edgespec.core.ports import CapacityError, PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.sampling.tensors import TextOccurrences, is_plain, to_device
from edgespec.verifier.targets.pass_batch import Indices, PassBatch
from edgespec.verifier.targets.pass_requests import SequenceText, check_table

BLOCK_SIZE = 16
KeySlots = npt.NDArray[np.int32]

_LEAST_ROWS, _LEAST_COLUMNS = 8, 16


class BlockTables:
    """The block tables of all sessions as one array, and the slots of their keys as another.

    Each session has one row in both arrays. Attention gathers keys by their slots; behind a
    session's last key they are 0. A pass writes only the part of a table that differs from the last
    pass, and its own slots, so a long text costs no more than a short one."""

    def __init__(self) -> None:
        self._host = np.zeros((_LEAST_ROWS, _LEAST_COLUMNS), dtype=np.int64)
        self._slots = np.zeros((_LEAST_ROWS, _LEAST_COLUMNS * BLOCK_SIZE), dtype=np.int32)
        self._filled = np.zeros(_LEAST_ROWS, dtype=np.int64)
        """[rows]: how many slots stand in each row of ``_slots``; behind them are zeros."""
        self._tables: list[tuple[int, ...]] = []
        self._free: list[int] = []

    def allocate(self) -> int:
        """Return a row that no session uses."""
        if self._free:
            return self._free.pop()
        self._tables.append(())
        if len(self._tables) > self._host.shape[0]:
            self._grow(2 * self._host.shape[0], self._host.shape[1])
        return len(self._tables) - 1

    def release(self, row: int) -> None:
        """Free the row of a session that has ended."""
        self._tables[row] = ()
        self._forget(row, 0)
        self._free.append(row)

    def write(self, row: int, blocks: tuple[int, ...]) -> None:
        """Make ``row`` list ``blocks``."""
        before = self._tables[row]
        if blocks == before:
            return
        width = self._host.shape[1]
        if len(blocks) > width:
            self._grow(self._host.shape[0], max(2 * width, len(blocks)))
        same = len(before)
        if blocks[:same] != before:
            pairs = enumerate(zip(blocks, before, strict=False))
            same = next((i for i, (new, old) in pairs if new != old), min(len(blocks), same))
            self._forget(row, same * BLOCK_SIZE)
        self._host[row, same : len(blocks)] = blocks[same:]
        self._tables[row] = blocks

    def extend(self, rows: Indices, ends: Indices) -> None:
        """Set the number of keys of each of ``rows``, which are all different, to ``ends``."""
        more = ends - self._filled[rows]
        if int(more.min()) < 0:
            for place in np.flatnonzero(more < 0).tolist():
                self._forget(int(rows[place]), int(ends[place]))
            more = np.maximum(more, 0)
        # One entry for each new key: its row, and its index, which begins at the row's ``_filled``.
        row = np.repeat(rows, more)
        key = np.arange(len(row)) + np.repeat(ends - np.cumsum(more), more)
        self._slots[row, key] = self.slots_of(row, key)
        self._filled[rows] = ends

    def slots_of(self, rows: Indices, keys: Indices) -> Indices:
        """Return [any]: the slot of key ``keys[i]`` of row ``rows[i]``."""
        return self._host[rows, keys // BLOCK_SIZE] * BLOCK_SIZE + keys % BLOCK_SIZE

    def blocks_of(self, rows: Indices, count: int) -> Indices:
        """Return [len(rows), count or fewer]: the first blocks of each row. Entries behind a row's
        last block have no meaning."""
        return self._host[:, :count].take(rows, axis=0)

    def key_slots(self, rows: Indices, count: int) -> KeySlots:
        """Return [len(rows), count or fewer]: slots of the first keys as of the last ``extend``,
        and 0 behind a row's last key."""
        return self._slots[:, :count].take(rows, axis=0)

    def _forget(self, row: int, first: int) -> None:
        """Set the slots of the row's keys from ``first`` on to 0."""
        filled = int(self._filled[row])
        if first < filled:
            self._slots[row, first:filled] = 0
            self._filled[row] = first

    def _grow(self, rows: int, columns: int) -> None:
        height, width = self._host.shape
        below, right = (0, rows - height), columns - width
        self._host = np.pad(self._host, (below, (0, right)))
        self._slots = np.pad(self._slots, (below, (0, right * BLOCK_SIZE)))
        self._filled = np.pad(self._filled, below)


NULL_SLOT = 0
"""Slot of block 0, at which masked keys point."""


@dataclass(slots=True)
class CachedSequence(SequenceText):
    table: int = 0
    """The sequence's row of ``KvPool.tables``."""
    blocks: tuple[int, ...] = ()
    """The sequence's table in the last pass."""
    counts: TextOccurrences | None = None
    """Token counts of the sequence, where its sampling has penalties."""


def _make_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros. On a CPU a page of it takes memory when it is first written to,
    which torch does at once for all pages."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


class KvPool:
    """Memory for ``max_tokens`` (rounded up to whole blocks) key and value rows of every layer.

    ``data[0, layer]`` holds the keys and ``data[1, layer]`` the values, [slots, heads * head_dim].
    """

    def __init__(
        self,
        layer_count: int,
        row_width: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if max_tokens < BLOCK_SIZE:
            raise ValueError(f"max_cached_tokens is {max_tokens}, but must be >= {BLOCK_SIZE}")
        self.block_count = -(-max_tokens // BLOCK_SIZE)
        shape = (2, layer_count, (self.block_count + 1) * BLOCK_SIZE, row_width)
        self._data = _make_zeros(shape, dtype, device)
        self.device, self.dtype = self._data.device, dtype
        self.token_bytes = 2 * layer_count * row_width * self._data.element_size()
        self._moves: list[tuple[int, int, int]] = []
        """Keys to copy: the row of ``tables``, the key index to copy from, and the one to copy
        to."""
        self._placed: list[Indices] = []
        """[2, keys] each: moves as slots, because their tables have changed since."""
        self.tables = BlockTables()
        self._own_ledger = BlockLedger(CacheShape(self.block_count, BLOCK_SIZE))
        self.sequences: dict[str, CachedSequence] = {}
        self.sampled_keys: set[str] = set()
        """Keys of sequences whose tokens are not simply those with the largest logits."""

    @property
    def data(self) -> torch.Tensor:
        """Keys and values, with every kept node at its position."""
        self.settle()
        return self._data

    def settle(self) -> None:
        """Copy kept nodes to their positions."""
        if self._moves:
            self._place_moves()
        if self._placed:
            source, goal = to_device(np.concatenate(self._placed, axis=1), self.device)
            self._data.index_copy_(2, goal, self._data.index_select(2, source))
            self._placed.clear()

    @property
    def free_tokens(self) -> int:
        """Tokens, in whole blocks, that requests without tables may still reserve."""
        return self._own_ledger.free_count * BLOCK_SIZE

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        """Start a sequence; it holds no block before its first pass. The key is not in use."""
        table = self.tables.allocate()
        self.sequences[key] = CachedSequence(prompt_length, sampling, text, table=table)
        if not is_plain(sampling):
            self.sampled_keys.add(key)

    def close(self, key: str) -> None:
        sequence = self.sequences.pop(key, None)
        if sequence is not None:
            self.tables.release(sequence.table)
            self._own_ledger.release(key)
            self.sampled_keys.discard(key)

    def sequence(self, key: str) -> CachedSequence:
        """Return the sequence with that key. Raises ``ValueError`` if it is not open."""
        if key not in self.sequences:
            raise ValueError(f"sequence {key!r} is not open")
        return self.sequences[key]

    def cached_length(self, request: PassRequest) -> int:
        """Return how many tokens the request may find cached. Raises as ``sequence`` does."""
        return self.sequence(request.key).reach(request)

    def reserve(self, batch: Sequence[PassRequest]) -> None:
        """Bring every sequence to its ``cache_length`` and adopt its table.

        Raises before anything has changed: ``ValueError`` for a table that is too short or names a
        block that does not exist, ``CapacityError`` when requests without tables find no room."""
        batch = PassBatch.of(batch)
        sequences = [self.sequence(key) for key in batch.keys]
        held = [sequence.blocks for sequence in sequences]
        # In the usual pass every table is as it was, and lists compare in C.
        changed = (
            []
            if all(batch.tables) and held == list(batch.tables)
            else [i for i, new in enumerate(batch.tables) if not new or new != held[i]]
        )
        room = np.fromiter(map(len, batch.tables), np.int64, len(batch)) * BLOCK_SIZE
        short = np.flatnonzero(room < batch.ends).tolist()
        without_table: list[PassRequest] = []
        for i in {*changed, *short}:
            if batch.tables[i]:
                check_table(batch[i], self.block_count, BLOCK_SIZE)
            else:
                without_table.append(batch[i])
        missing = sum(
            self._own_ledger.missing_count(request.key, request.cache_length + request.row_count)
            for request in without_table
        )
        if missing > self._own_ledger.free_count:
            more = (missing - self._own_ledger.free_count) * BLOCK_SIZE
            raise CapacityError(
                f"the pass needs {more} more cached tokens than the {self.free_tokens} free of "
                f"{self.block_count * BLOCK_SIZE} (max_cached_tokens)"
            )
        if changed and self._moves:
            self._place_moves()
        for sequence, cached in zip(sequences, batch.cached.tolist(), strict=True):
            if len(sequence.tokens) != cached:
                sequence.cut(cached)
            if sequence.nodes:
                sequence.nodes = sequence.parents = ()
        for i in changed:
            sequence = sequences[i]
            sequence.blocks = batch.tables[i] or self._own_table(batch[i])
            self.tables.write(sequence.table, sequence.blocks)

    def commit(self, request: PassRequest) -> None:
        """Record one request of a pass that has run, as ``commit_all``."""
        self.commit_all(PassBatch.of([request]))

    def commit_all(self, batch: PassBatch) -> None:
        """Record that the pass has run: its fed tokens are cached, and its nodes wait for
        ``keep``."""
        for key, feed in zip(batch.keys, batch.feeds, strict=True):
            self.sequences[key].tokens += feed
        if batch.has_nodes:
            for request in batch:
                if request.tokens:
                    sequence = self.sequences[request.key]
                    sequence.nodes, sequence.parents = request.tokens, request.parents

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        """Commit ``nodes`` (a path from the root) of the last pass and free the others.

        Raises ``ValueError`` when they are not such a path."""
        sequence = self.sequence(key)
        if sequence.nodes or nodes:
            first = len(sequence.tokens)
            sequence.keep(key, nodes)
            for place, node in enumerate(nodes):
                if node != place:
                    self._moves.append((sequence.table, first + node, first + place))
        self._own_ledger.trim(key, len(sequence.tokens))

    def cached_lengths(self, batch: PassBatch) -> Indices:
        """Return [sessions]: tokens that passes have cached. Raises as ``sequence`` does."""
        try:
            found = [len(self.sequences[key].tokens) for key in batch.keys]
        except KeyError as error:
            raise ValueError(f"sequence {error.args[0]!r} is not open") from None
        return np.array(found)

    def _place_moves(self) -> None:
        """Turn the moves from key indices into slots, before a table changes."""
        rows, sources, goals = np.array(self._moves).T
        placed = [self.tables.slots_of(rows, keys) for keys in (sources, goals)]
        self._placed.append(np.stack(placed))
        self._moves.clear()

    def _own_table(self, request: PassRequest) -> tuple[int, ...]:
        """Return a table from the pool's own ledger, for a request that brings none."""
        length = request.cache_length + request.row_count
        self._own_ledger.trim(request.key, length)
        self._own_ledger.reserve(request.key, length)
        return self._own_ledger.table(request.key)
