"""Attention on a GPU: it reads the pool in place, all sessions in one launch, always the same bits.

Theory of operation. Rows that share one line of ancestors (``canonical_attention.py``) are cut into
*tiles*; a line lists where the keys of its positions lie: in the blocks of its session's text, then
at the nodes of its path. A row sees the keys before its own position, and its own. What the kernel
needs goes to the device in one copy a pass; no key, no value and no mask is made. The shapes of
what is copied can be given (``Shape``), so that a pass may be repeated from a recording.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edgespec.sampling.tensors import to_device
from edgespec.verifier.targets.canonical_attention import tree_lines
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE
from edgespec.verifier.targets.pass_plan import BatchRows, LayerAttention, LayerStates, write_slots

_TILE_LANES = 32
"""Rows of a tile times the query heads that share a key head. A product of a GPU's matrix units has
at least 16."""

Attend = Callable[["PagedLayout", LayerAttention, LayerStates], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shapes of the arrays that go to the device. ``rows`` counts the rows of the pass with
    their padding."""

    rows: int
    tiles: int
    lines: int
    blocks: int
    nodes: int
    """Nodes of the longest path."""
    tile_rows: int

    @property
    def sizes(self) -> tuple[int, ...]:
        tile_width = 2 + self.tile_rows
        tables, paths = self.lines * self.blocks, self.lines * self.nodes
        return (self.tiles * tile_width, self.lines, tables, paths, self.rows, self.rows)


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The layout of one pass. Tensors are int32 on the pool's device."""

    kernel: Attend
    most_keys: int
    """The most keys that a row sees before its own."""
    tiles: torch.Tensor
    """[tiles, 2 + rows of a tile]: line, how many rows, and which."""
    bases: torch.Tensor
    """[lines]: the length of the text, behind which the path follows."""
    tables: torch.Tensor
    """[lines, blocks]: the blocks of the text."""
    paths: torch.Tensor
    """[lines, nodes]: the slots of each path's nodes."""
    positions: torch.Tensor
    """[rows]."""
    own_slots: torch.Tensor
    """[rows]: where each row's own key lies."""

    @classmethod
    def of(cls, kernel: Attend, data: torch.Tensor, shape: Shape, most_keys: int) -> PagedLayout:
        tiles, bases, tables, paths, positions, own_slots = data.split(shape.sizes)
        return cls(
            kernel,
            most_keys,
            tiles.view(shape.tiles, -1),
            bases,
            tables.view(shape.lines, shape.blocks),
            paths.view(shape.lines, shape.nodes),
            positions,
            own_slots,
        )

    def attend(self, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
        return self.kernel(self, layer, states)


class PagedAttention:
    """An ``AttentionBackend`` for models with ``share`` query heads for each key head. ``kernel``
    is ``paged_kernel.attend``."""

    def __init__(self, share: int, kernel: Attend) -> None:
        self.kernel = kernel
        self.tile_rows = max(1, _TILE_LANES // share)

    def lay_out(self, rows: BatchRows) -> PagedLayout:
        found = find_lines(rows, self.tile_rows)
        shape = found.shape
        data = to_device(found.packed(shape), rows.pool.device)
        return PagedLayout.of(self.kernel, data, shape, int(rows.positions.max()))


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of ancestors of a pass, and the tiles into which the rows of each line are cut."""

    rows: BatchRows
    tile_rows: int
    sessions: list[int]
    """Session of each line, as an index into the pass."""
    paths: list[npt.NDArray[np.int64]]
    """Inner nodes on each line, from the root on."""
    tiles: list[tuple[int, npt.NDArray[np.int64]]]
    """Line of each tile, and its packed rows. The rows are left out if every session has one."""

    @property
    def shape(self) -> Shape:
        return Shape(
            rows=self.rows.row_count,
            tiles=len(self.tiles),
            lines=len(self.sessions),
            blocks=max(1, -(-int(self.rows.bases.max()) // BLOCK_SIZE)),
            nodes=max(1, *map(len, self.paths)),
            tile_rows=self.tile_rows,
        )

    def packed(self, shape: Shape) -> npt.NDArray[np.int32]:
        """Return all arrays of ``PagedLayout``, one behind the other, each padded to ``shape`` with
        zeros. A zero stands for a tile without rows, or for a row that sees nothing and writes to
        block 0."""
        data = np.zeros(sum(shape.sizes), dtype=np.int32)
        ends = np.cumsum(shape.sizes)[:-1]
        tiles, bases, tables, paths, positions, own_slots = np.split(data, ends)
        by_tile = tiles.reshape(shape.tiles, -1)
        if self.rows.single:
            places = np.arange(len(self.tiles))
            by_tile[: len(self.tiles), :3] = np.stack([places, np.ones_like(places), places], 1)
        else:
            for place, (line, members) in enumerate(self.tiles):
                by_tile[place, :2] = line, len(members)
                by_tile[place, 2 : 2 + len(members)] = members
        rows, sessions = self.rows, np.array(self.sessions)
        bases[: len(sessions)] = rows.bases[sessions]
        blocks = rows.pool.tables.blocks_of(rows.tables[sessions], shape.blocks)
        tables.reshape(shape.lines, -1)[: len(blocks), : blocks.shape[1]] = blocks
        by_line = paths.reshape(shape.lines, -1)
        own = write_slots(rows)
        for place, path in enumerate(self.paths):
            if len(path):
                session = self.sessions[place]
                first = int(rows.first_rows[session] + rows.counts[session])
                first -= len(rows.requests[session].tokens)
                by_line[place, : len(path)] = own[first + path]
        positions[: rows.row_count] = rows.positions
        own_slots[: rows.row_count] = own
        return data


def find_lines(rows: BatchRows, tile_rows: int) -> Lines:
    """Return the lines of a pass, and tiles of at most ``tile_rows`` rows."""
    found = Lines(rows, tile_rows, [], [], [])
    empty: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    if rows.single:
        found.sessions.extend(range(rows.row_count))
        found.paths.extend([empty] * rows.row_count)
        found.tiles.extend([(index, empty) for index in range(rows.row_count)])
        return found
    for session, request in enumerate(rows.requests):
        first, fed = int(rows.first_rows[session]), len(request.feed)
        for number, (path, nodes) in enumerate(tree_lines(request.parents)):
            members = first + fed + nodes
            if number == 0:
                members = np.concatenate([np.arange(first, first + fed), members])
            line = len(found.sessions)
            found.sessions.append(session)
            found.paths.append(path)
            for start in range(0, len(members), tile_rows):
                found.tiles.append((line, members[start : start + tile_rows]))
    return found


def stage_copy(array: npt.NDArray[Any], goal: torch.Tensor) -> None:
    """Copy ``array`` to ``goal`` without making the host wait for a GPU."""
    tensor = torch.from_numpy(array)
    goal.copy_(tensor.pin_memory() if goal.device.type == "cuda" else tensor, non_blocking=True)
