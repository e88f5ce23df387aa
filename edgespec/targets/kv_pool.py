"""Keys and values of all sequences, in blocks of one pool, and the account of who holds what.

Theory of operation. The pool has ``block_size`` slots a block; a sequence owns a list of blocks,
and position p lives in slot ``blocks[p // block_size] * block_size + p % block_size``. During a
pass the tree's nodes lie behind the fed tokens, in the order of the request; ``keep`` copies the
kept ones to their positions and forgets the rest. Nothing else moves, so truncation is a number.
Block 0 belongs to nobody and stays zero: masked keys point at it, and zero times zero weight is
zero, whereas stale memory may hold NaN.

Invariants. A block is free or owned by one sequence. ``length`` tokens of a sequence are
committed and their keys are in the pool; ``pending`` nodes of the last pass lie behind them until
``keep`` or the next ``reserve``. A sequence never falls below the blocks its prompt needs, so an
opened prompt always fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from edgespec.core.sampling import SamplingParams
from edgespec.ports import CapacityError, PassRequest

BLOCK_SIZE = 16
NULL_SLOT = 0
Slots = npt.NDArray[np.int64]


@dataclass(slots=True)
class CachedSequence:
    """One sequence's share of the pool."""

    prompt_length: int
    sampling: SamplingParams
    blocks: list[int]
    reserved_blocks: int
    """For the prompt; held from open to close."""
    tokens: list[int] = field(default_factory=list)
    """Committed tokens whose keys are cached."""
    nodes: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self.tokens)

    def slots(self, stop: int) -> Slots:
        """Slots of positions 0 .. ``stop - 1``, int64."""
        count = -(-stop // BLOCK_SIZE)
        starts = np.asarray(self.blocks[:count], dtype=np.int64) * BLOCK_SIZE
        return (starts[:, None] + np.arange(BLOCK_SIZE)).reshape(-1)[:stop]


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
        self.data = torch.zeros((2, layer_count, slot_count, row_width), dtype=dtype, device=device)
        self._free = list(range(self.block_count, 0, -1))
        self._sequences: dict[str, CachedSequence] = {}

    @property
    def free_tokens(self) -> int:
        return len(self._free) * BLOCK_SIZE

    @property
    def session_count(self) -> int:
        return len(self._sequences)

    def open(self, key: str, prompt_length: int, sampling: SamplingParams) -> None:
        """Reserve the blocks of a prompt. Raises ``CapacityError``, ``ValueError`` (key in use)."""
        if key in self._sequences:
            raise ValueError(f"sequence {key!r} is already open")
        count = _blocks(prompt_length)
        if count > len(self._free):
            raise CapacityError(
                f"a prompt of {prompt_length} tokens does not fit: {self.free_tokens} of "
                f"{self.block_count * BLOCK_SIZE} cached tokens (max_cached_tokens) are free"
            )
        blocks = [self._free.pop() for _ in range(count)]
        self._sequences[key] = CachedSequence(prompt_length, sampling, blocks, count)

    def close(self, key: str) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._free.extend(reversed(sequence.blocks))

    def sequence(self, key: str) -> CachedSequence:
        """Raises ``ValueError`` for a key that is not open."""
        if key not in self._sequences:
            raise ValueError(f"sequence {key!r} is not open")
        return self._sequences[key]

    def missing_tokens(self, batch: Sequence[PassRequest]) -> int:
        """By how many tokens (in blocks) the free room is too small for ``batch``; 0 if it fits."""
        return max(0, self._wanted(batch) - len(self._free)) * BLOCK_SIZE

    def reserve(self, batch: Sequence[PassRequest]) -> None:
        """Truncate every sequence to its ``cache_length`` and give it blocks for all its rows.

        All or nothing: raises ``CapacityError`` before anything has changed.
        """
        missing = self.missing_tokens(batch)
        if missing:
            raise CapacityError(
                f"the pass needs {missing} more cached tokens than the {self.free_tokens} free of "
                f"{self.block_count * BLOCK_SIZE} (max_cached_tokens)"
            )
        for request in batch:  # free first, so that one's surplus can be another's gain
            sequence = self.sequence(request.key)
            del sequence.tokens[request.cache_length :]
            sequence.nodes = sequence.parents = ()
            self._trim(sequence, request.cache_length + request.row_count)
        for request in batch:
            sequence = self.sequence(request.key)
            count = _blocks(request.cache_length + request.row_count)
            while len(sequence.blocks) < count:
                sequence.blocks.append(self._free.pop())

    def commit(self, request: PassRequest) -> None:
        """The pass has run: its fed tokens are cached, its nodes wait for ``keep``."""
        sequence = self.sequence(request.key)
        sequence.tokens.extend(request.feed)
        sequence.nodes, sequence.parents = request.tokens, request.parents

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        """Commit ``nodes`` (a path from the root) of the last pass and free the others.

        Raises ``ValueError`` when they are not such a path.
        """
        sequence = self.sequence(key)
        parent = -1
        for node in nodes:
            if not 0 <= node < len(sequence.nodes) or sequence.parents[node] != parent:
                raise ValueError(f"nodes {list(nodes)} of {key!r} are not a path from the root")
            parent = node
        moved = [(node, place) for place, node in enumerate(nodes) if node != place]
        if moved:
            first = sequence.length
            slots = sequence.slots(first + len(sequence.nodes))[first:]
            source, goal = torch.from_numpy(slots[np.array(moved).T]).to(self.data.device)
            self.data[:, :, goal] = self.data[:, :, source]
        sequence.tokens.extend(sequence.nodes[node] for node in nodes)
        sequence.nodes = sequence.parents = ()
        self._trim(sequence, sequence.length)

    def _wanted(self, batch: Sequence[PassRequest]) -> int:
        wanted = 0
        for request in batch:
            sequence = self.sequence(request.key)
            count = _blocks(request.cache_length + request.row_count)
            wanted += max(count, sequence.reserved_blocks) - len(sequence.blocks)
        return wanted

    def _trim(self, sequence: CachedSequence, length: int) -> None:
        keep = max(_blocks(length), sequence.reserved_blocks)
        surplus = sequence.blocks[keep:]
        del sequence.blocks[keep:]
        self._free.extend(reversed(surplus))


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
