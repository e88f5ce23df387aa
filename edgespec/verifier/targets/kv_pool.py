"""Keys and values of all sequences, in blocks of one pool.

Theory of operation. A sequence's table lists its blocks of ``BLOCK_SIZE`` slots. Tables come with
the requests of each pass: the engine's ledger decides who holds which block
(``core/verifier/block_ledger.py``), the pool only holds the memory. During a pass the tree's nodes
lie behind the fed tokens; ``keep`` copies the kept ones to their positions and forgets the rest.
The copies of all sessions are made at once, when ``data`` is next looked at. Block 0 belongs to
nobody: masked keys point at it, rows of padding write to it, and it never holds NaN, as stale
memory may. For requests without tables (tools, the self-test) the pool keeps its own ledger.

Invariant. ``length`` tokens of a sequence are committed and their keys are in the pool; the nodes
of its last pass lie behind them until ``keep`` or the next ``reserve``.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from edgespec.core.device.memory import AUTO, AUTO_SHARE, MemoryBudget
from edgespec.core.ports import CapacityError, PassRequest, UnsupportedModelError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.sampling.tensors import TextOccurrences, is_plain, to_device
from edgespec.telemetry.process_memory import machine_memory, resident_bytes
from edgespec.verifier.targets.pass_batch import Indices, PassBatch
from edgespec.verifier.targets.pass_requests import SequenceText, check_table

BLOCK_SIZE = 16
TOKENS_NEEDED = 160
"""Of the self-test's longest schedule: prompt and siblings in whole blocks, and another session."""

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

    def extend(self, rows: Indices, ends: Indices) -> None:
        """Each of ``rows``, all different, has as many keys as ``ends`` says."""
        more = ends - self._filled[rows]
        if int(more.min()) < 0:
            for place in np.flatnonzero(more < 0).tolist():
                self._forget(int(rows[place]), int(ends[place]))
            more = np.maximum(more, 0)
        row = np.repeat(rows, more)
        # Of each row the keys from ``filled`` on.
        key = np.arange(len(row)) + np.repeat(ends - np.cumsum(more), more)
        self._slots[row, key] = self.slots_of(row, key)
        self._filled[rows] = ends

    def slots_of(self, rows: Indices, keys: Indices) -> Indices:
        """[any]: where key ``keys[i]`` of row ``rows[i]`` lies."""
        return self._host[rows, keys // BLOCK_SIZE] * BLOCK_SIZE + keys % BLOCK_SIZE

    def blocks_of(self, rows: Indices, count: int) -> Indices:
        """[len(rows), count or fewer]: the first blocks of each row, and anything behind them."""
        return self._host[:, :count].take(rows, axis=0)

    def key_slots(self, rows: Indices, count: int) -> KeySlots:
        """[len(rows), count]: slots of the first keys, as of the last ``extend``; 0 behind them."""
        return self._slots[:, :count].take(rows, axis=0)

    def _forget(self, row: int, first: int) -> None:
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


@dataclass(slots=True)
class CachedSequence(SequenceText):
    table: int = 0
    """Its row of ``KvPool.tables``."""
    blocks: tuple[int, ...] = ()
    """Its table in the last pass."""
    counts: TextOccurrences | None = None
    """How often it has each token, where its sampling has penalties."""


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
        shape = (2, layer_count, (self.block_count + 1) * BLOCK_SIZE, row_width)
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self.device, self.dtype = self._data.device, dtype
        self.token_bytes = 2 * layer_count * row_width * self._data.element_size()
        self._moves: list[tuple[int, int, int]] = []
        """Keys to copy: row of ``tables``, from which place and to which."""
        self._placed: list[Indices] = []
        """[2, keys] each: the same by slots, of tables that have changed since."""
        self.tables = BlockTables()
        self._own = BlockLedger(CacheShape(self.block_count, BLOCK_SIZE))
        self.sequences: dict[str, CachedSequence] = {}
        self.special: set[str] = set()
        """Sequences whose tokens are not just the largest logits."""

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
        """Room, in tokens (whole blocks), that requests without tables have left."""
        return self._own.free_count * BLOCK_SIZE

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        """Start a sequence; it holds no block before its first pass. The key is not in use."""
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
        """How many tokens the request may find cached. Raises as ``sequence`` does."""
        return self.sequence(request.key).reach(request)

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
        bare = []
        for i in {*changed, *short}:
            if batch.tables[i]:
                check_table(batch[i], self.block_count, BLOCK_SIZE)
            else:
                bare.append(batch[i])
        missing = sum(
            self._own.missing_count(request.key, request.cache_length + request.row_count)
            for request in bare
        )
        if missing > self._own.free_count:
            more = (missing - self._own.free_count) * BLOCK_SIZE
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

        Raises ``ValueError`` when they are not such a path."""
        sequence = self.sequence(key)
        if sequence.nodes or nodes:
            first = len(sequence.tokens)
            sequence.keep(key, nodes)
            for place, node in enumerate(nodes):
                if node != place:
                    self._moves.append((sequence.table, first + node, first + place))
        self._own.trim(key, len(sequence.tokens))

    def cached_lengths(self, batch: PassBatch) -> Indices:
        """[sessions]: tokens that passes have cached. Raises as ``sequence`` does."""
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

    def _own_table(self, request: PassRequest) -> tuple[int, ...]:
        length = request.cache_length + request.row_count
        self._own.trim(request.key, length)
        self._own.reserve(request.key, length)
        return self._own.table(request.key)


# --- How many tokens fit beside the weights and the largest pass ---------------------------
#
# A verifier that is given memory instead of a number of tokens loads its weights, measures what its
# largest pass takes for a moment, and fills what is left, less a copy of one layer's keys and
# values. A share of a GPU holds all of it, what other programs have there included. A draft model
# that is loaded afterwards gets a pool of as many tokens out of the same memory.

SESSION_ROWS = 16
"""Rows of each session in the measured pass: a fed token and a chain of nodes."""

# A CPU is not kept busy for a minute at its start: what so many rows take is scaled up.
_MOST_CPU_ROWS = 256
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """What a draft model beside the target takes, in bytes."""

    weights: int = 0
    token_bytes: int = 0
    """Keys and values of a token, all layers."""

    def __str__(self) -> str:
        return (
            f"the draft model's weights take {_gib(self.weights)}, its keys and values "
            f"{self.token_bytes / 1024:.1f} KiB a token"
        )


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """Memory for keys and values, as the operator grants it; exactly one of the first two."""

    kv: MemoryBudget | None
    """Of the pool alone; a share is one of the machine's or the GPU's memory."""
    gpu_share: float | None
    """Of a GPU's memory, for all there is on it: weights, pool, passes, other programs."""
    rows: int
    """Of the largest pass."""
    draft: DraftMemory = DraftMemory()
    """Of the draft model that will be loaded beside the target."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """What is known before the pool is made, in bytes."""

    total: int
    free: int
    """With the weights loaded, between passes."""
    activations: int
    """What the largest pass takes for a moment."""
    rows: int
    """Of that pass."""
    token_bytes: int
    """Keys and values of a token, all layers."""
    layer_count: int

    def __str__(self) -> str:
        return (
            f"{_gib(self.total)} of memory, {_gib(self.free)} free beside the weights, a pass of "
            f"{self.rows} rows takes {_gib(self.activations)}, keys and values "
            f"{self.token_bytes / 1024:.1f} KiB a token"
        )


def pool_tokens(budget: PoolBudget, figures: MemoryFigures, most_tokens: int) -> int:
    """The tokens that the pool may hold, in whole blocks; of a share of a GPU and of ``auto`` at
    most ``most_tokens``, what all sessions can fill. Raises ``UnsupportedModelError`` with all
    figures where it would be too small to serve, or larger than what is free."""
    # One more layer for the copy of a layer that a pass makes.
    with_copy = figures.token_bytes * (figures.layer_count + 1) / figures.layer_count
    draft, said = budget.draft, str(figures)
    if draft.weights:
        said += f", {draft}"
    token_bytes, with_copy = figures.token_bytes + draft.token_bytes, with_copy + draft.token_bytes
    free = figures.free - draft.weights
    room = free - figures.activations
    if budget.kv is None:
        assert budget.gpu_share is not None
        named = f"gpu_memory_utilization is {budget.gpu_share:g}"
        left = budget.gpu_share * figures.total - (figures.total - free)
    else:
        named, left = f"kv_budget is {budget.kv.text}", AUTO_SHARE * free
    if budget.kv is None or budget.kv.text == AUTO:
        tokens = min((left - figures.activations) / with_copy, most_tokens)
    else:
        granted = budget.kv.bytes or int((budget.kv.share or 0.0) * figures.total)
        tokens = granted / token_bytes
    whole = int(max(0.0, tokens)) // BLOCK_SIZE * BLOCK_SIZE
    if whole < TOKENS_NEEDED:
        raise UnsupportedModelError(
            f"{named}: that leaves room for {whole} cached tokens, but at least {TOKENS_NEEDED} "
            f"are needed ({said})"
        )
    if whole * with_copy > room:
        fits = int(max(0.0, room) / with_copy) // BLOCK_SIZE * BLOCK_SIZE
        raise UnsupportedModelError(
            f"{named}: {whole} cached tokens take {_gib(whole * token_bytes)}, but there "
            f"is room for {fits} ({said})"
        )
    return whole


def check_draft_fits(draft: DraftMemory, tokens: int, device: torch.device) -> None:
    """Raises ``UnsupportedModelError`` with all figures when a draft model with a pool of so many
    tokens does not fit beside what is there."""
    free, _ = _free_and_total(device)
    needed = draft.weights + tokens * draft.token_bytes
    if needed > free:
        raise UnsupportedModelError(
            f"the draft model takes {_gib(needed)} with {tokens} cached tokens, as many as the "
            f"target has, but {_gib(free)} are free beside the target ({draft}); give a smaller "
            "draft, or fewer limits.max_cached_tokens"
        )


def starting_tokens(budget: PoolBudget, device: torch.device) -> int:
    """The pool that the self-test and the measured pass need, in tokens. Raises ``ValueError`` for
    a share of a GPU on another device."""
    if budget.gpu_share is not None and device.type != "cuda":
        raise ValueError(
            f"gpu_memory_utilization is {budget.gpu_share:g}, but the model is on {device}; give "
            "--kv-budget instead"
        )
    rows = measured_rows(budget.rows, device)
    return max(TOKENS_NEEDED, -(-rows // SESSION_ROWS) * SESSION_ROWS)


def measured_rows(rows: int, device: torch.device) -> int:
    """How many rows the measured pass has when the largest has ``rows``."""
    return rows if device.type == "cuda" else min(rows, _MOST_CPU_ROWS)


def memory_figures(
    budget: PoolBudget,
    run: Callable[[Sequence[PassRequest]], object],
    pool: KvPool,
    vocabulary_size: int,
) -> MemoryFigures:
    """Measure ``run``, a pass over ``pool`` of ``measured_rows`` rows (rounded up to whole
    sessions), each sampled, and the memory beside it."""
    device, layer_count = pool.device, pool.data.shape[1]
    rows = measured_rows(budget.rows, device)
    chain = tuple(range(-1, SESSION_ROWS - 2))
    tokens = (1 % vocabulary_size,) * len(chain)
    keys = [f"\0measured {index}" for index in range(-(-rows // SESSION_ROWS))]
    batch = [PassRequest(key, 0, (0,), tokens, chain) for key in keys]
    for key in keys:
        pool.open(key, 1, SamplingParams(temperature=1.0, top_p=0.9))
    try:
        measured = _cuda_peak if device.type == "cuda" else _resident_peak
        peak = measured(lambda: run(batch), device)
    finally:
        for key in keys:
            pool.close(key)
    free, total = _free_and_total(device)
    activations = int(peak * (budget.rows / rows))
    return MemoryFigures(total, free, activations, budget.rows, pool.token_bytes, layer_count)


def _free_and_total(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)
    machine = machine_memory()
    return machine.available, machine.total


def _cuda_peak(run: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _resident_peak(run: Callable[[], object], _: torch.device) -> int:
    """Bytes by which the process grows while ``run`` runs, or by its earlier peak if that stays."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    before = resident_bytes()
    run()
    try:
        status = Path("/proc/self/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return max(0, peak - before)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.2f} GiB"
