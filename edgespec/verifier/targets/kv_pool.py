"""Keys and values of all sequences, in blocks of one pool.

Theory of operation. A sequence's table lists its blocks of ``BLOCK_SIZE`` slots. Tables come with
the requests of each pass: the engine's ledger decides who holds which block
(``core/verifier/block_ledger.py``), the pool only holds the memory. During a pass the tree's nodes
lie behind the fed tokens; ``keep`` copies the kept ones to their positions and forgets the rest.
The copies of all sessions are made at once, when ``data`` is next looked at. Block 0 belongs to
nobody and stays zero: masked keys point at it, and stale memory may hold NaN. For requests without
tables (tools, the self-test) the pool keeps a ledger of its own.

Invariant. ``length`` tokens of a sequence are committed and their keys are in the pool; the nodes
of its last pass lie behind them until ``keep`` or the next ``reserve``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from edgespec.core.ports import CapacityError, PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.sampling.tensors import is_plain, to_device
from edgespec.verifier.targets.pass_batch import Indices, PassBatch
from edgespec.verifier.targets.pass_requests import SequenceText

BLOCK_SIZE = 16
Blocks = npt.NDArray[np.int64]
KeySlots = npt.NDArray[np.int32]
_LEAST_ROWS, _LEAST_COLUMNS = 8, 16


class BlockTables:
    """The sessions' block tables as one array, and beside it the *slots* of each session's keys, 0
    behind its last: what attention gathers by. Of a table only what differs from the last pass is
    written, and a pass adds its own slots, so a long text costs no more than a short one."""

    def __init__(self) -> None:
        self._host = np.zeros((_LEAST_ROWS, _LEAST_COLUMNS), dtype=np.int64)
        self._slots = np.zeros((_LEAST_ROWS, _LEAST_COLUMNS * BLOCK_SIZE), dtype=np.int32)
        self._filled = np.zeros(_LEAST_ROWS, dtype=np.int64)
        """[rows]: how many slots stand in each row of ``_slots``; behind them are zeros."""
        self._tables: list[tuple[int, ...]] = []
        self._free: list[int] = []

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self._tables.append(())
        if len(self._tables) > self._host.shape[0]:
            self._grow(2 * self._host.shape[0], self._host.shape[1])
        return len(self._tables) - 1

    def give_back(self, row: int) -> None:
        self._tables[row] = ()
        self._forget(row, 0)
        self._free.append(row)

    def write(self, row: int, blocks: tuple[int, ...]) -> None:
        """From now on ``row`` lists ``blocks``."""
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

    def extend(self, rows: Blocks, ends: Blocks) -> None:
        """Each of ``rows``, all different, has as many keys as ``ends`` says."""
        filled = self._filled[rows]
        more = ends - filled
        if int(more.min()) < 0:
            for place in np.flatnonzero(more < 0).tolist():
                self._forget(int(rows[place]), int(ends[place]))
            more = np.maximum(more, 0)
        row = np.repeat(rows, more)
        # Of each row the keys from ``filled`` on.
        key = np.arange(len(row)) + np.repeat(ends - np.cumsum(more), more)
        self._slots[row, key] = self.slots_of(row, key)
        self._filled[rows] = ends

    def slots_of(self, rows: Blocks, keys: Blocks) -> Blocks:
        """[any]: where key ``keys[i]`` of row ``rows[i]`` lies."""
        return self._host[rows, keys // BLOCK_SIZE] * BLOCK_SIZE + keys % BLOCK_SIZE

    def key_slots(self, rows: Blocks, count: int) -> KeySlots:
        """[len(rows), count]: the slots of the first ``count`` keys, as of the last ``extend``; 0
        behind a row's last key."""
        return self._slots[:, :count].take(rows, axis=0)

    def _forget(self, row: int, first: int) -> None:
        """The row has no keys from ``first`` on."""
        filled = int(self._filled[row])
        if first < filled:
            self._slots[row, first:filled] = 0
            self._filled[row] = first

    def _grow(self, rows: int, columns: int) -> None:
        height, width = self._host.shape
        grown = np.zeros((rows, columns), dtype=np.int64)
        grown[:height, :width] = self._host
        slots = np.zeros((rows, columns * BLOCK_SIZE), dtype=np.int32)
        slots[:height, : width * BLOCK_SIZE] = self._slots
        filled = np.zeros(rows, dtype=np.int64)
        filled[:height] = self._filled
        self._host, self._slots, self._filled = grown, slots, filled


NULL_SLOT = 0
Slots = npt.NDArray[np.int64]


@dataclass(slots=True)
class CachedSequence(SequenceText):
    table: int = 0
    """Its row of ``KvPool.tables``."""
    blocks: tuple[int, ...] = ()
    """Its table in the last pass."""
    bare: bool = False
    """Whether that came from the pool's own ledger."""


class KvPool:
    """``max_tokens`` (rounded up to whole blocks) key and value rows for every layer.

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
        slot_count = (self.block_count + 1) * BLOCK_SIZE
        shape = (2, layer_count, slot_count, row_width)
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self._moves: list[tuple[int, int, int]] = []
        """Keys to copy: row of ``tables``, from which place and to which."""
        self._placed: list[Slots] = []
        """[2, keys] each: the same by slots, of tables that have changed since."""
        self.tables = BlockTables()
        self._own = BlockLedger(CacheShape(self.block_count, BLOCK_SIZE))
        self.sequences: dict[str, CachedSequence] = {}
        self.special: set[str] = set()
        """Sequences whose tokens are not just the largest logits."""

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def data(self) -> torch.Tensor:
        """Keys and values, with every kept node at its position."""
        if self._moves:
            self._place_moves()
        if self._placed:
            source, goal = to_device(np.concatenate(self._placed, axis=1), self.device)
            self._data.index_copy_(2, goal, self._data.index_select(2, source))
            self._placed.clear()
        return self._data

    @property
    def free_tokens(self) -> int:
        """Room, in tokens (whole blocks), that requests without tables have left."""
        return self._own.free_count * BLOCK_SIZE

    @property
    def token_bytes(self) -> int:
        sides, layers, _, width = self._data.shape
        return sides * layers * width * self._data.element_size()

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        """Start a sequence; it holds no block before its first pass. Raises ``ValueError`` when
        the key is in use."""
        table = self.tables.take()
        self.sequences[key] = CachedSequence(prompt_length, sampling, text, table=table)
        if not is_plain(sampling):
            self.special.add(key)

    def close(self, key: str) -> None:
        sequence = self.sequences.pop(key, None)
        if sequence is not None:
            self.tables.give_back(sequence.table)
            self._own.release(key)
            self.special.discard(key)

    def sequence(self, key: str) -> CachedSequence:
        """Raises ``ValueError`` for a key that is not open."""
        if key not in self.sequences:
            raise ValueError(f"sequence {key!r} is not open")
        return self.sequences[key]

    def cached_length(self, request: PassRequest) -> int:
        """How many tokens the request may find cached, of its session's passes or in its blocks.
        Raises as ``sequence`` does."""
        sequence = self.sequence(request.key)
        shared = len(sequence.text) if request.blocks else 0
        return max(len(sequence.tokens), shared)

    def missing_tokens(self, batch: Sequence[PassRequest]) -> int:
        """By how many tokens the free room is too small for requests that bring no table."""
        wanted = sum(
            self._own.missing(request.key, request.cache_length + request.row_count)
            for request in batch
            if not request.blocks
        )
        return max(0, wanted - self._own.free_count) * BLOCK_SIZE

    def reserve(self, batch: Sequence[PassRequest]) -> None:
        """Bring every sequence to its ``cache_length`` and take over its table. Raises before
        anything has changed: ``ValueError`` for a table that is too short or names a block that is
        not there, ``CapacityError`` when requests without tables find no room."""
        batch = PassBatch.of(batch)
        sequences = [self.sequence(key) for key in batch.keys]
        held = [sequence.blocks for sequence in sequences]
        # The usual pass: every table is as it was. Lists compare in C.
        changed = (
            []
            if all(batch.tables) and held == list(batch.tables)
            else [i for i, new in enumerate(batch.tables) if not new or new != held[i]]
        )
        room = np.fromiter(map(len, batch.tables), np.int64, len(batch)) * BLOCK_SIZE
        short = np.flatnonzero(room < batch.ends).tolist()
        bare = [batch[i] for i in {*changed, *short} if not self._check_table(batch[i])]
        missing = self.missing_tokens(bare)
        if missing:
            raise CapacityError(
                f"the pass needs {missing} more cached tokens than the {self.free_tokens} free of "
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
            sequence, given = sequences[i], batch.tables[i]
            sequence.blocks, sequence.bare = given or self._own_table(batch[i]), not given
            self.tables.write(sequence.table, sequence.blocks)

    def commit(self, request: PassRequest) -> None:
        self.commit_all(PassBatch.of([request]))

    def commit_all(self, batch: PassBatch) -> None:
        """The pass has run: its fed tokens are cached, its nodes wait for ``keep``."""
        for key, feed in zip(batch.keys, batch.feeds, strict=True):
            self.sequences[key].tokens += feed
        if batch.has_nodes:
            for request in batch:
                if request.tokens:
                    sequence = self.sequences[request.key]
                    sequence.nodes, sequence.parents = request.tokens, request.parents

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        """Commit ``nodes`` (a path from the root) of the last pass and free the others.

        Raises ``ValueError`` when they are not such a path.
        """
        sequence = self.sequence(key)
        if sequence.nodes or nodes:
            first = len(sequence.tokens)
            sequence.keep(key, nodes)
            for place, node in enumerate(nodes):
                if node != place:
                    self._moves.append((sequence.table, first + node, first + place))
        if sequence.bare:
            self._own.trim(key, len(sequence.tokens))

    def table_rows(self, batch: PassBatch) -> Indices:
        sequences = self.sequences
        return np.array([sequences[key].table for key in batch.keys])

    def cached_lengths(self, batch: PassBatch) -> Indices:
        """[sessions]: tokens that the passes of each session have cached. Raises as ``sequence``
        does."""
        try:
            found = [len(self.sequences[key].tokens) for key in batch.keys]
        except KeyError as error:
            raise ValueError(f"sequence {error.args[0]!r} is not open") from None
        return np.array(found)

    def _place_moves(self) -> None:
        rows, sources, goals = np.array(self._moves).T
        placed = [self.tables.slots_of(rows, keys) for keys in (sources, goals)]
        self._placed.append(np.stack(placed))
        self._moves.clear()

    def _check_table(self, request: PassRequest) -> bool:
        """Whether the request brings a table; raises ``ValueError`` for one that is wrong."""
        blocks = request.blocks
        sequence = self.sequence(request.key)
        if not blocks:
            return False
        room = len(blocks) * BLOCK_SIZE
        rows = request.cache_length + request.row_count
        if rows > room:
            raise ValueError(f"{request.key!r}: {rows} rows, but its blocks hold {room}")
        if blocks == sequence.blocks:  # as in its last pass
            return True
        low, high = min(blocks), max(blocks)
        if low < 1 or high > self.block_count:
            raise ValueError(f"{request.key!r}: blocks {low} to {high}, limit {self.block_count}")
        return True

    def _own_table(self, request: PassRequest) -> tuple[int, ...]:
        length = request.cache_length + request.row_count
        self._own.trim(request.key, length)
        self._own.reserve(request.key, length)
        return self._own.table(request.key)
