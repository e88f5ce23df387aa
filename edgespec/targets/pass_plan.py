"""One packed pass: which row is which token, where its key goes, and which keys it sees.

Theory of operation. Rows are the sessions' fed tokens and nodes, one session after the other,
padded at the end to a multiple of ``RowTiles.row_multiple`` in canonical mode. For attention the
rows are cut into groups.

Plain mode: a group is one or several sessions side by side, keys in slot order under a mask.

Canonical mode: a group is rows of one session that share *one line of ancestors*, and key index
equals position. A row sees the keys of that line before its own position; its own key is not in
the line (``packed_attention.py`` adds it apart). So all nodes whose ancestors lie on the main
chain, with all their siblings, are one line, cut and padded to groups whose row counts are all
among ``RowTiles.attention_sizes``; only a second branch with inner nodes of its own needs another
line. What a row computes is then the same whether its ancestors were cached one by one, in a
chunk, or are nodes of the same pass: the arithmetic sees the same numbers at the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from edgespec.ports import PassRequest
from edgespec.targets.kv_pool import NULL_SLOT, KvPool, Slots
from edgespec.targets.request_checks import node_depths
from edgespec.targets.row_tiles import RowTiles, cut

# The key axis is worked off in tiles of this many; a row's sums then associate by position alone.
KEY_TILE = 256
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CanonicalGroup:
    """Rows of one session, keys at their positions."""

    rows: torch.Tensor
    """int64 [padded]: indices into the packed rows; the padding repeats the last one."""
    count: int
    """Rows that are not padding."""
    key_slots: tuple[torch.Tensor, ...]
    """int64 [KEY_TILE] each."""
    masks: tuple[torch.Tensor, ...]
    """float32 [padded, KEY_TILE] each: 0 where the row sees the key, else -inf."""
    window_masks: tuple[torch.Tensor | None, ...] = ()
    """The same of layers with a window; None where no row sees a key. Empty without a window."""


@dataclass(frozen=True, slots=True)
class PlainGroup:
    """Sessions side by side, each padded to the longest."""

    rows: torch.Tensor
    """int64 [sessions, rows]; padding repeats a session's first row."""
    key_slots: torch.Tensor
    """int64 [sessions, keys]."""
    mask: torch.Tensor
    """bool [sessions, 1, rows, keys]: True where the row sees the key."""
    real: torch.Tensor
    """int64: flat indices of the rows that are not padding."""
    window_mask: torch.Tensor | None = None
    """``mask`` of layers with a window; None without one."""


@dataclass(frozen=True, slots=True)
class PassPlan:
    pool: KvPool
    row_count: int
    """Rows that are not padding."""
    tokens: torch.Tensor
    """int64 [1, padded]."""
    positions: torch.Tensor
    """int64 [1, padded]."""
    write_slots: torch.Tensor
    """int64 [row_count]."""
    sampled_rows: torch.Tensor
    """int64 [padded]: rows whose logits are wanted."""
    sampled_count: int
    groups: tuple[CanonicalGroup, ...] | tuple[PlainGroup, ...]
    windowed: bool = False
    """Whether the groups have masks for layers with a window."""


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


def plan_pass(
    pool: KvPool,
    batch: Sequence[PassRequest],
    *,
    tiles: RowTiles | None,
    window: int | None = None,
) -> PassPlan:
    """Lay out a pass over ``batch``, whose blocks are reserved; without ``tiles`` in plain mode.

    ``window`` is that of the model's layers with sliding attention, in tokens.
    """
    device = pool.data.device
    sessions = _lay_out(pool, batch)
    tokens = [t for request in batch for t in (*request.feed, *request.tokens)]
    positions = np.concatenate([session.positions for session in sessions])
    writes = np.concatenate([s.slots[s.request.cache_length :] for s in sessions])
    sampled = np.concatenate([_sampled(session) for session in sessions])
    row_count, sampled_count = len(tokens), len(sampled)
    groups: tuple[CanonicalGroup, ...] | tuple[PlainGroup, ...]
    if tiles is not None:
        padding = -row_count % tiles.row_multiple
        tokens += [0] * padding
        positions = np.pad(positions, (0, padding))
        if sampled_count:
            sampled = np.pad(sampled, (0, -sampled_count % tiles.row_multiple), mode="edge")
        sizes = tiles.attention_sizes
        groups = tuple(g for s in sessions for g in _canonical_groups(s, sizes, window, device))
    else:
        buckets = _buckets(sessions) if device.type == "cuda" else [[s] for s in sessions]
        groups = tuple(_plain_group(bucket, window, device) for bucket in buckets)
    return PassPlan(
        pool=pool,
        row_count=row_count,
        tokens=torch.tensor([tokens], dtype=torch.int64).to(device),
        positions=_tensor(positions[None], device),
        write_slots=_tensor(writes, device),
        sampled_rows=_tensor(sampled, device),
        sampled_count=sampled_count,
        groups=groups,
        windowed=window is not None,
    )


def _lay_out(pool: KvPool, batch: Sequence[PassRequest]) -> list[SessionRows]:
    sessions, first_row = [], 0
    for request in batch:
        base = request.cache_length + len(request.feed)
        positions = np.arange(request.cache_length, base + len(request.tokens), dtype=np.int64)
        if request.tokens:
            positions[len(request.feed) :] = base - 1 + np.array(node_depths(request.parents))
        slots = pool.sequence(request.key).slots(base + len(request.tokens))
        sessions.append(SessionRows(request, first_row, positions, slots))
        first_row += request.row_count
    return sessions


def _sampled(session: SessionRows) -> Indices:
    if not session.request.sample:
        return np.empty(0, dtype=np.int64)
    first = session.first_row + len(session.request.feed) - 1
    return np.arange(first, first + 1 + len(session.request.tokens))


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


# --- canonical ------------------------------------------------------------------------------


def _canonical_groups(
    session: SessionRows, sizes: tuple[int, ...], window: int | None, device: torch.device
) -> list[CanonicalGroup]:
    feed_rows = np.arange(len(session.request.feed))
    groups: list[CanonicalGroup] = []
    for path, nodes in _lines(session.request.parents):
        rows = nodes + len(feed_rows)
        if not groups:
            rows = np.concatenate([feed_rows, rows])
        slots = np.concatenate([session.slots[: session.base], session.slots[session.base + path]])
        start = 0
        for size in cut(len(rows), sizes):
            tile = rows[start : start + size]
            groups.append(_canonical_group(session, tile, size, slots, window, device))
            start += size
    return groups


def _canonical_group(
    session: SessionRows,
    rows: Indices,
    size: int,
    slots: Slots,
    window: int | None,
    device: torch.device,
) -> CanonicalGroup:
    padded = np.pad(rows, (0, size - len(rows)), mode="edge")
    positions = session.positions[padded]
    # Tiles behind the last position would add exact zeros: left out. One is always there.
    tiles = max(1, -(-int(positions.max()) // KEY_TILE))
    keys = np.full(tiles * KEY_TILE, NULL_SLOT, dtype=np.int64)
    seen = min(len(slots), len(keys))
    keys[:seen] = slots[:seen]
    visible = np.arange(len(keys))[None] < positions[:, None]
    in_window = None
    if window is not None:
        in_window = visible & (np.arange(len(keys))[None] > positions[:, None] - window)
    key_slots = _tensor(keys, device)
    return CanonicalGroup(
        rows=_tensor(session.first_row + padded, device),
        count=len(rows),
        key_slots=key_slots.split(KEY_TILE),
        masks=tuple(_mask_tile(tile, device) for tile in _key_tiles(visible)),
        window_masks=tuple(
            _mask_tile(tile, device) if tile.any() else None for tile in _key_tiles(in_window)
        ),
    )


def _key_tiles(visible: npt.NDArray[np.bool_] | None) -> Iterator[npt.NDArray[np.bool_]]:
    """[rows, KEY_TILE] each; none for None."""
    if visible is not None:
        for start in range(0, visible.shape[1], KEY_TILE):
            yield visible[:, start : start + KEY_TILE]


def _mask_tile(visible: npt.NDArray[np.bool_], device: torch.device) -> torch.Tensor:
    return _tensor(np.where(visible, np.float32(0), np.float32(-np.inf)), device)


def _lines(parents: Sequence[int]) -> list[tuple[Indices, Indices]]:
    """Cut a tree into lines of ancestors: (path of inner nodes, nodes whose ancestors lie on it).

    The first line is there even for an empty tree. Every node is in exactly one.
    """
    inner = {parent for parent in parents if parent >= 0}
    ends = inner - {parents[node] for node in inner}
    line_of: dict[int, int] = {-1: 0}
    paths: list[list[int]] = []
    for line, end in enumerate(sorted(ends)):
        path, node = [], end
        while node >= 0:
            path.append(node)
            line_of.setdefault(node, line)
            node = parents[node]
        paths.append(path[::-1])
    members: list[list[int]] = [[] for _ in (paths or [[]])]
    for node, parent in enumerate(parents):
        members[line_of[parent]].append(node)
    return [
        (np.array(path, dtype=np.int64), np.array(nodes, dtype=np.int64))
        for path, nodes in zip(paths or [[]], members, strict=True)
    ]


# --- plain ----------------------------------------------------------------------------------


def _buckets(sessions: Sequence[SessionRows]) -> list[list[SessionRows]]:
    """Sessions of like row count (same power of two) go side by side, to bound the padding."""
    buckets: dict[int, list[SessionRows]] = {}
    for session in sessions:
        buckets.setdefault(session.request.row_count.bit_length(), []).append(session)
    return list(buckets.values())


def _plain_group(
    sessions: Sequence[SessionRows], window: int | None, device: torch.device
) -> PlainGroup:
    row_limit = max(session.request.row_count for session in sessions)
    key_limit = max(len(session.slots) for session in sessions)
    rows = np.empty((len(sessions), row_limit), dtype=np.int64)
    keys = np.full((len(sessions), key_limit), NULL_SLOT, dtype=np.int64)
    mask = np.zeros((len(sessions), 1, row_limit, key_limit), dtype=np.bool_)
    narrow = None if window is None else np.zeros_like(mask)
    real = np.zeros((len(sessions), row_limit), dtype=np.bool_)
    for index, session in enumerate(sessions):
        count = session.request.row_count
        rows[index] = session.first_row
        rows[index, :count] += np.arange(count)
        keys[index, : len(session.slots)] = session.slots
        mask[index, 0, :count, : len(session.slots)] = _plain_mask(session)
        if window is not None and narrow is not None:
            near = _plain_distance(session) < window
            narrow[index, 0, :count, : len(session.slots)] = near
            narrow[index, 0, count:, 0] = True
        mask[index, 0, count:, 0] = True  # a row that sees nothing would be NaN
        real[index, :count] = True
    return PlainGroup(
        rows=_tensor(rows, device),
        key_slots=_tensor(keys, device),
        mask=_tensor(mask, device),
        real=_tensor(np.flatnonzero(real), device),
        window_mask=None if narrow is None else _tensor(mask & narrow, device),
    )


def _plain_mask(session: SessionRows) -> npt.NDArray[np.bool_]:
    """bool [rows, keys], keys in slot order: cache, feed, nodes."""
    request, base = session.request, session.base
    feed = len(request.feed)
    mask = np.arange(len(session.slots))[None] <= session.positions[:, None]
    if request.tokens:
        mask[feed:, :base] = True
        mask[:feed, base:] = False
        mask[feed:, base:] = np.eye(len(request.tokens), dtype=np.bool_)
        for node, parent in enumerate(request.parents):
            if parent >= 0:
                mask[feed + node, base:] |= mask[feed + parent, base:]
    return mask


def _plain_distance(session: SessionRows) -> Indices:
    """int64 [rows, keys]: by how many positions a key lies before a row."""
    keys = np.concatenate([np.arange(session.request.cache_length), session.positions])
    return np.asarray(session.positions[:, None] - keys[None], dtype=np.int64)
