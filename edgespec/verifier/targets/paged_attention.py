"""Attention that reads the pool in place, by block tables on the device: a Triton kernel for CUDA.

Theory of operation. A pass is cut into tiles of rows of one session. What the kernel needs beside
the pool goes to the device in one copy a pass: tiles, sessions, and for each row its key index, its
position and which nodes of its tree it sees. Of the text no mask is made, since a row sees all of
it that lies before its own. No key or value is copied. Where tiles and heads are too few to fill
the device, the keys are cut into shares that are added up afterwards (``paged_kernel.py``).
``static_pass.py`` lays the same things out at fixed places, for recorded passes.

Without Triton, or where ``backend_self_test.py`` finds that the kernel disagrees with the
reference, ``attention_choice.py`` takes ``grouped_attention.py`` instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edgespec.sampling.torch_device_copies import to_device
from edgespec.verifier.targets.attention_backend import LayerAttention, LayerStates
from edgespec.verifier.targets.batch_rows import BatchRows
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE
from edgespec.verifier.targets.pass_batch import Indices

# Matrix units want 16 rows at least; more than 64 would not fit beside the keys.
_TILE_ROWS_MIN, _TILE_ROWS_MAX = 16, 64
_KEYS = 64
_SPLITS_MAX = 32
# Programs for each multiprocessor, at most so many shares are made to get there.
_WAVES = 2
_MULTIPROCESSORS_ASSUMED = 16


class PagedAttention:
    """``AttentionBackend`` on Triton. Raises ``ImportError`` where that is not installed, unless a
    test brings a ``kernel`` of its own."""

    def __init__(
        self, head_count: int, kv_head_count: int, device: torch.device, kernel: Any = None
    ) -> None:
        if kernel is None:
            from edgespec.verifier.targets import paged_kernel as kernel
        self.kernel = kernel
        self.share = head_count // kv_head_count
        """Query heads of a key head."""
        self._kv_head_count = kv_head_count
        self._multiprocessors = _MULTIPROCESSORS_ASSUMED
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._multiprocessors = properties.multi_processor_count

    @property
    def name(self) -> str:
        return "paged (Triton)"

    def lay_out(self, rows: BatchRows) -> PagedLayout:
        lanes = self.lanes(rows)
        tiles = make_tiles(rows, lanes // self.share)
        sessions = np.stack([rows.tables, rows.first_rows, rows.bases, rows.lengths], axis=1)
        lines = np.zeros((rows.row_count, largest_tree(rows)), dtype=np.int32)
        put_lines(rows, lines)
        parts = (tiles, sessions, rows.own_keys, rows.positions, lines)
        packed = np.concatenate([part.ravel() for part in parts], dtype=np.int32, casting="unsafe")
        moved = to_device(packed, rows.pool.device).split([p.size for p in parts])
        return PagedLayout(
            kernel=self.kernel,
            tables=rows.pool.tables.on_device(),
            tiles=moved[0],
            sessions=moved[1],
            own_keys=moved[2],
            positions=moved[3],
            lines=moved[4],
            line_width=lines.shape[1],
            tile_count=len(tiles),
            lanes=lanes,
            splits=self.splits(len(tiles), int(rows.lengths.max())),
        )

    def lanes(self, rows: BatchRows) -> int:
        """Of a tile: as many as the session with the most rows can use."""
        most = int(rows.counts.max()) * self.share
        lanes = max(_TILE_ROWS_MIN, min(_TILE_ROWS_MAX, 1 << (most - 1).bit_length()))
        return max(lanes, 1 << (self.share - 1).bit_length())

    def splits(self, tile_count: int, key_count: int) -> int:
        """Into how many shares the keys are cut, a power of two; the longest session has
        ``key_count``."""
        programs = tile_count * self._kv_head_count
        wanted = -(-_WAVES * self._multiprocessors // programs)
        chunks = -(-key_count // _KEYS)
        return 1 << (max(1, min(wanted, chunks, _SPLITS_MAX)).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """One pass; tensors are int32 on the pool's device."""

    kernel: Any
    tables: torch.Tensor
    """[table rows, blocks]."""
    tiles: torch.Tensor
    """[tiles * 3]: session, first packed row, rows."""
    sessions: torch.Tensor
    """[sessions * 4]: row of ``tables``, first packed row, key index of the first node, keys."""
    own_keys: torch.Tensor
    """[rows]."""
    positions: torch.Tensor
    """[rows]."""
    lines: torch.Tensor
    """[rows * line_width]: 1 where a node sees the session's node of that number."""
    line_width: int
    tile_count: int
    lanes: int
    """Rows of a tile times the query heads that share a key head, a power of two."""
    splits: int

    def attend(self, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
        heads, rows, head_dim = states.query.shape
        kv_heads = states.key.shape[0]
        query = states.query
        if query.stride(-1) != 1:
            query = query.contiguous()
        device = query.device
        partial = torch.empty(
            (self.splits, rows, heads, head_dim), dtype=torch.float32, device=device
        )
        best = torch.empty((2, self.splits, rows, heads), dtype=torch.float32, device=device)
        dim = max(16, 1 << (head_dim - 1).bit_length())
        self.kernel.attend[self.tile_count, kv_heads, self.splits](
            query,
            states.keys,
            states.values,
            partial,
            best[0],
            best[1],
            self.tables,
            self.tiles,
            self.sessions,
            self.own_keys,
            self.positions,
            self.lines,
            self.tables.shape[1],
            self.line_width,
            states.keys.shape[1],
            query.stride(1),
            query.stride(0),
            rows,
            heads,
            layer.scale,
            layer.soft_cap or 1.0,
            layer.window or 0,
            HAS_CAP=layer.soft_cap is not None,
            HAS_WINDOW=layer.window is not None,
            SHARE=heads // kv_heads,
            HEAD_DIM=head_dim,
            DIM=dim,
            BLOCK_SIZE=BLOCK_SIZE,
            ROWS=self.lanes,
            KEYS=_KEYS,
            SPLITS=self.splits,
        )
        out = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=device)
        count = rows * heads
        self.kernel.combine[(count,)](
            partial,
            best[0],
            best[1],
            partial if layer.sinks is None else layer.sinks,
            out,
            count,
            heads,
            HAS_SINKS=layer.sinks is not None,
            HEAD_DIM=head_dim,
            DIM=dim,
            SPLITS=self.splits,
        )
        return out


def make_tiles(rows: BatchRows, row_limit: int) -> Indices:
    """[tiles, 3]: session, first packed row, rows; each session in pieces of ``row_limit``."""
    if rows.single:
        place = np.arange(rows.row_count)
        return np.stack([place, place, np.ones_like(place)], axis=1)
    per_session = -(-rows.counts // row_limit)
    session = np.repeat(np.arange(len(per_session)), per_session)
    piece = np.arange(len(session)) - np.repeat(np.cumsum(per_session) - per_session, per_session)
    first = rows.first_rows[session] + piece * row_limit
    end = rows.first_rows[session] + rows.counts[session]
    return np.stack([session, first, np.minimum(end - first, row_limit)], axis=1)


def largest_tree(rows: BatchRows) -> int:
    """Nodes of it."""
    return max([len(tree.depths) for tree in rows.trees if tree is not None], default=0)


def put_lines(rows: BatchRows, lines: npt.NDArray[np.int32]) -> None:
    """Write to ``lines``, zeros [rows, nodes of the largest tree or more], which nodes of its tree
    a row sees."""
    for session, tree in enumerate(rows.trees):
        if tree is not None:
            count = len(tree.depths)
            end = int(rows.first_rows[session] + rows.counts[session])
            lines[end - count : end, :count] = tree.line
