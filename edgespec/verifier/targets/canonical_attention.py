"""Attention whose bits do not depend on how a text was cut into passes, nor on what runs beside it.

Layout: a group is rows of one session that share *one line of ancestors*, where key index equals
position. A row sees the keys of that line before its own position; its own key is apart. All nodes
whose ancestors lie on the main chain are one line, cut and padded to groups whose row counts are
among ``RowTiles.attention_sizes``; only a second branch with inner nodes needs another line. So the
arithmetic sees the same numbers at the same places, whether ancestors were cached one by one, in a
chunk, or are nodes of the same pass.

Arithmetic, in float32: scores of the line in tiles of ``KEY_TILE`` keys, added one after the other,

    out = (sum_tiles exp(S_tile - m) V_tile + exp(s_own - m) v_own) / (sums of the exps).

exp is taken as exp2 of scores that carry a factor log2(e), which is several times faster on CPUs.
Only the own key's weight uses exp: its few elements do not fill vectors, and exp2's scalar tail is
another function to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from edgespec.verifier.targets.kv_pool import NULL_SLOT
from edgespec.verifier.targets.pass_batch import Indices
from edgespec.verifier.targets.pass_plan import BatchRows, LayerAttention, LayerStates
from edgespec.verifier.targets.row_tiles import RowTiles, cut

# The key axis is worked off in tiles of this many; a row's sums then associate by position alone.
KEY_TILE = 256
_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
# Copies of each own score under a soft cap, so that whole vectors are filled.
_VECTOR_ELEMENTS = 64


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
    positions: torch.Tensor | None = None
    """int64 [padded], for layers with a window."""
    least_position: int = 0

    def windowed(self, window: int) -> CanonicalGroup:
        """The same rows, seeing no key ``window`` positions or more behind them. Tiles of which no
        row sees a key would add exact zeros: left out."""
        assert self.positions is not None
        last_unseen = self.positions[:, None] - window
        keys = torch.arange(KEY_TILE, device=last_unseen.device)
        first = max(0, self.least_position - window + 1) // KEY_TILE
        masks = tuple(
            mask.masked_fill(keys + (first + index) * KEY_TILE <= last_unseen, -torch.inf)
            for index, mask in enumerate(self.masks[first:])
        )
        return replace(self, key_slots=self.key_slots[first:], masks=masks)


class CanonicalAttention:
    """``AttentionBackend`` for the row counts of ``tiles``."""

    def __init__(self, tiles: RowTiles) -> None:
        self._sizes = tiles.attention_sizes

    def lay_out(self, rows: BatchRows) -> CanonicalLayout:
        paths = np.array([_one_path(parents) for parents in rows.requests.parents])
        size = self._sizes[0]
        easy = (paths >= 0) & (rows.counts <= size)
        one_each = np.flatnonzero(easy)
        counts = rows.counts[one_each]
        place = np.minimum(np.arange(size), counts[:, None] - 1)
        picked = rows.first_rows[one_each, None] + place
        groups = _groups(rows, one_each, picked, counts, rows.bases[one_each] + paths[one_each])
        for session in np.flatnonzero(~easy).tolist():
            groups += _groups_of(rows, session, self._sizes)
        return CanonicalLayout(tuple(groups), int(rows.positions.max()))


@dataclass(slots=True)
class CanonicalLayout:
    groups: tuple[CanonicalGroup, ...]
    last_position: int
    _windowed: tuple[int, tuple[CanonicalGroup, ...]] | None = None

    def attend(self, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
        heads, rows, head_dim = states.query.shape
        out = states.query.new_zeros((rows, heads, head_dim))
        for group in self._groups(layer.window):
            out[group.rows[: group.count]] = canonical_attention(states, group, layer)
        return out

    def _groups(self, window: int | None) -> tuple[CanonicalGroup, ...]:
        """A window that hides nothing changes nothing."""
        if window is None or window > self.last_position:
            return self.groups
        if self._windowed is None or self._windowed[0] != window:
            self._windowed = window, tuple(group.windowed(window) for group in self.groups)
        return self._windowed[1]


def canonical_attention(
    states: LayerStates, group: CanonicalGroup, layer: LayerAttention
) -> torch.Tensor:
    """Attention of one group: [group.count, heads, head_dim] in the type of the query. Its masks
    have ``layer.window`` already."""
    heads, _, head_dim = states.query.shape
    kv_heads = states.key.shape[0]
    rows, share = len(group.rows), heads // kv_heads
    # Query heads of one key head are stacked as rows: fewer, larger products, no repeated keys.
    q = states.query.index_select(1, group.rows).float().mul_(layer.scale * _LOG2_E)
    q_4d = q.view(kv_heads, share, rows, head_dim)
    q = q.view(kv_heads, share * rows, head_dim)
    own_key = states.key.index_select(1, group.rows).float().unsqueeze(1)
    own_value = states.value.index_select(1, group.rows).float().unsqueeze(1)
    own_score = (q_4d * own_key).sum(dim=-1, keepdim=True)
    if layer.soft_cap is not None:
        copies = own_score.expand(-1, -1, -1, _VECTOR_ELEMENTS).contiguous()
        own_score = layer.capped(copies, _LOG2_E)[..., :1]
    scores = []
    best = own_score
    for slots, mask in zip(group.key_slots, group.masks, strict=True):
        tile = states.keys.index_select(0, slots).float().view(-1, kv_heads, head_dim)
        score = torch.bmm(q, tile.permute(1, 2, 0)).view(kv_heads, share, rows, -1)
        score = layer.capped(score, _LOG2_E)
        score += mask
        scores.append(score)
        best = torch.maximum(best, score.amax(dim=-1, keepdim=True))
    sinks = layer.sink_scores(kv_heads, _LOG2_E)
    if sinks is not None:
        best = torch.maximum(best, sinks)
    weight = (own_score - best).mul_(_LN_2).exp_()
    total = weight.clone()
    if sinks is not None:
        total += (sinks - best).mul_(_LN_2).exp_()
    out = weight * own_value
    for slots, score in zip(group.key_slots, scores, strict=True):
        weights = (score - best).exp2_()
        total += weights.sum(dim=-1, keepdim=True)
        tile = states.values.index_select(0, slots).float().view(-1, kv_heads, head_dim)
        product = torch.bmm(weights.view(kv_heads, share * rows, -1), tile.transpose(0, 1))
        out += product.view(out.shape)
    out /= total
    out = out.view(heads, rows, head_dim)[:, : group.count].transpose(0, 1)
    return out.to(states.query.dtype)


@lru_cache(maxsize=2048)
def _one_path(parents: tuple[int, ...]) -> int:
    """The inner nodes of a tree that is one line of ancestors, if they are its first nodes, one
    after the other: then the keys of that line lie side by side. Else -1."""
    (path, _), *others = tree_lines(parents)
    return -1 if others or path.tolist() != list(range(len(path))) else len(path)


def _groups(
    rows: BatchRows,
    sessions: Indices,
    picked: Indices,
    counts: Indices,
    line_ends: Indices,
    path: Indices | None = None,
) -> list[CanonicalGroup]:
    """A group of each of ``sessions``: of its rows ``picked`` [groups, padded] the first ``counts``
    are no padding. Its line is its first ``line_ends`` keys; with ``path``, of one session, the
    text and these nodes. Groups of as many tiles are made at once."""
    if not len(sessions):
        return []
    device, size = rows.pool.device, picked.shape[1]
    positions = rows.positions[picked]
    # Tiles behind the last position would add exact zeros: left out. One is always there.
    tiles = np.maximum(1, -(-positions.max(axis=1) // KEY_TILE))
    found = []
    for tile_count in np.unique(tiles).tolist():
        which = np.flatnonzero(tiles == tile_count)
        keys = np.full((len(which), tile_count * KEY_TILE), NULL_SLOT, dtype=np.int64)
        slots = rows.key_slots(sessions[which], keys.shape[1])
        if path is not None:
            base = int(rows.bases[sessions[0]])
            inner = slots[:, base : base + len(path)]
            inner[:] = rows.node_slots(int(sessions[0]), path)[: inner.shape[1]]
        in_line = np.arange(slots.shape[1]) < line_ends[which, None]
        np.multiply(slots, in_line, out=keys[:, : slots.shape[1]])
        own = torch.from_numpy(positions[which]).to(device)
        starts = torch.arange(0, keys.shape[1], KEY_TILE, device=device)
        # A row sees the keys before its position: of each tile the first 0 to KEY_TILE.
        seen = (own[:, None, :] - starts[:, None]).clamp_(0, KEY_TILE)
        masks = _mask_rows(device).index_select(0, seen.view(-1))
        parts = zip(
            torch.from_numpy(picked[which]).to(device).unbind(),
            counts[which].tolist(),
            _tuples(torch.from_numpy(keys).to(device).view(-1, KEY_TILE).unbind(), tile_count),
            _tuples(masks.view(-1, size, KEY_TILE).unbind(), tile_count),
            own.unbind(),
            positions[which].min(axis=1).tolist(),
            strict=True,
        )
        found += [CanonicalGroup(*part) for part in parts]
    return found


def _tuples(tensors: Sequence[torch.Tensor], size: int) -> Iterable[tuple[torch.Tensor, ...]]:
    return zip(*[iter(tensors)] * size, strict=True)


@lru_cache(maxsize=4)
def _mask_rows(device: torch.device) -> torch.Tensor:
    """float32 [KEY_TILE + 1, KEY_TILE]: row n lets the first n keys be seen."""
    places = torch.arange(KEY_TILE, device=device)
    hidden = places >= torch.arange(KEY_TILE + 1, device=device)[:, None]
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)


def _groups_of(rows: BatchRows, session: int, sizes: tuple[int, ...]) -> list[CanonicalGroup]:
    """The groups of any session."""
    request, first = rows.requests[session], int(rows.first_rows[session])
    fed, which = len(request.feed), np.array([session])
    groups: list[CanonicalGroup] = []
    for path, nodes in tree_lines(request.parents):
        members = nodes + fed if groups else np.concatenate([np.arange(fed), nodes + fed])
        line_end, start = rows.bases[which] + len(path), 0
        for size in cut(len(members), sizes):
            tile = members[start : start + size]
            padded = np.pad(tile, (0, size - len(tile)), mode="edge")
            count = np.array([len(tile)])
            groups += _groups(rows, which, first + padded[None], count, line_end, path)
            start += size
    return groups


@lru_cache(maxsize=2048)
def tree_lines(parents: tuple[int, ...]) -> tuple[tuple[Indices, Indices], ...]:
    """Cut a tree into lines of ancestors: (path of inner nodes, nodes whose ancestors lie on it).
    The first line is there even for an empty tree."""
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
    return tuple(
        (np.array(path, dtype=np.int64), np.array(nodes, dtype=np.int64))
        for path, nodes in zip(paths or [[]], members, strict=True)
    )
