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
"""Room for the self-test's longest schedule: a prompt and siblings in whole blocks, and another
session."""

KeySlots = npt.NDArray[np.int32]

_LEAST_ROWS, _LEAST_COLUMNS = 8, 16


class BlockTables:
    """The sessions' block tables as one array, and the *slots* of each session's keys as another,
    by which attention gathers. Slots behind a session's last key are 0. Only the part of a table
    that differs from the last pass is written, and a pass adds its own slots, so a long text costs
    no more than a short one."""

    def __init__(self) -> None:
        self._host = np.zeros((_LEAST_ROWS, _LEAST_COLUMNS), dtype=np.int64)
        self._slots = np.zeros((_LEAST_ROWS, _LEAST_COLUMNS * BLOCK_SIZE), dtype=np.int32)
        self._filled = np.zeros(_LEAST_ROWS, dtype=np.int64)
        """[rows]: how many slots stand in each row of ``_slots``; behind them are zeros."""
        self._tables: list[tuple[int, ...]] = []
        self._free: list[int] = []

    def allocate(self) -> int:
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
        row = np.repeat(rows, more)
        # The keys of each row from ``filled`` on.
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
    """The sequence's row of ``KvPool.tables``."""
    blocks: tuple[int, ...] = ()
    """The sequence's table in the last pass."""
    counts: TextOccurrences | None = None
    """Token counts of the sequence, where its sampling has penalties."""


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
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self.device, self.dtype = self._data.device, dtype
        self.token_bytes = 2 * layer_count * row_width * self._data.element_size()
        self._moves: list[tuple[int, int, int]] = []
        """Keys to copy: the row of ``tables``, the key index to copy from, and the one to copy
        to."""
        self._placed: list[Indices] = []
        """[2, keys] each: moves as slots, because their tables have changed since."""
        self.tables = BlockTables()
        self._own = BlockLedger(CacheShape(self.block_count, BLOCK_SIZE))
        self.sequences: dict[str, CachedSequence] = {}
        self.special: set[str] = set()
        """Keys of sequences whose tokens are not simply the largest logits."""

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
        return self._own.free_count * BLOCK_SIZE

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        """Start a sequence; it holds no block before its first pass. The key is not in use."""
        table = self.tables.allocate()
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
        self._own.trim(key, len(sequence.tokens))

    def cached_lengths(self, batch: PassBatch) -> Indices:
        """Return [sessions]: tokens that passes have cached. Raises as ``sequence`` does."""
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
# A verifier with a memory budget instead of a number of tokens loads its weights, measures the peak
# memory of its largest pass, and uses what is left for the pool, less a copy of one layer's keys
# and values. A share of a GPU includes what other programs have there. A draft model that is loaded
# afterwards gets a pool of as many tokens out of the same memory.

SESSION_ROWS = 16
"""Rows of each session in the measured pass: a fed token and a chain of nodes."""

# The measured pass has at most this many rows on a CPU, and its memory is scaled up: a larger one
# would take a minute.
_MOST_CPU_ROWS = 256
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Memory of a draft model beside the target, in bytes."""

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
    """Memory for keys and values that the operator grants. Exactly one of ``kv`` and ``gpu_share``
    is given."""

    kv: MemoryBudget | None
    """The budget of the pool alone. A share counts the machine's or the GPU's memory."""
    gpu_share: float | None
    """The share of a GPU's memory for everything on it: weights, pool, passes, other programs."""
    rows: int
    """Rows of the largest pass."""
    draft: DraftMemory = DraftMemory()
    """Memory of the draft model that will be loaded beside the target."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory figures that are known before the pool is made, in bytes."""

    total: int
    free: int
    """Free memory with the weights loaded, between passes."""
    activations: int
    """Peak memory of the largest pass."""
    rows: int
    """Rows of the largest pass."""
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
    """Return how many tokens the pool may hold, in whole blocks.

    With a share of a GPU, or ``auto``, they are at most ``most_tokens``, which all sessions
    together can fill. Raises ``UnsupportedModelError`` with all figures where the pool would be too
    small to serve, or larger than what is free."""
    # A pass makes a copy of one layer's keys and values, so one more layer is counted.
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
    """Raise ``UnsupportedModelError`` with all figures when a draft model with a pool of ``tokens``
    does not fit beside what is loaded."""
    free, _ = _free_and_total(device)
    needed = draft.weights + tokens * draft.token_bytes
    if needed > free:
        raise UnsupportedModelError(
            f"the draft model takes {_gib(needed)} with {tokens} cached tokens, as many as the "
            f"target has, but {_gib(free)} are free beside the target ({draft}); give a smaller "
            "draft, or fewer limits.max_cached_tokens"
        )


def starting_tokens(budget: PoolBudget, device: torch.device) -> int:
    """Return the tokens that the self-test and the measured pass need. Raises ``ValueError`` for a
    share of a GPU on another device."""
    if budget.gpu_share is not None and device.type != "cuda":
        raise ValueError(
            f"gpu_memory_utilization is {budget.gpu_share:g}, but the model is on {device}; give "
            "--kv-budget instead"
        )
    rows = measured_rows(budget.rows, device)
    return max(TOKENS_NEEDED, -(-rows // SESSION_ROWS) * SESSION_ROWS)


def measured_rows(rows: int, device: torch.device) -> int:
    """Return how many rows the measured pass has when the largest has ``rows``."""
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
