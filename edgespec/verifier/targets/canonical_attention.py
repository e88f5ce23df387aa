"""Computes attention whose bits depend neither on how a text was cut into passes, nor on what
shares the pass.

Layout. A *line* is a path of ancestors: the text, and then the inner nodes of one branch, so that
the key index equals the position. A *group* has rows of one session that share a line. A row sees
the keys of the line before its own position; its own key is added apart. All nodes whose ancestors
lie on the main chain share one line, which is cut and padded to groups whose row counts are among
``RowTiles.attention_sizes``; only a second branch with inner nodes needs another line. So the
arithmetic sees the same numbers at the same places, whether ancestors were cached one by one, in a
chunk, or are nodes of the same pass.

Arithmetic, in float32. The keys of the line are taken in tiles of ``KEY_TILE``, one after the
other. With S the scores of a tile, s_own that of the row's own key, and m the largest score,

    out = (sum over tiles of exp(S - m) V  +  exp(s_own - m) v_own) / (sum of the same exps)

exp is taken as exp2 of scores that carry a factor log2(e), which is several times faster on CPUs.
Only the own key's weight uses exp: its few elements do not fill vectors, and exp2's scalar tail is
another function to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from edgespec.verifier.targets import cpu_threads
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
# Rows from which on a group takes longer than waking up a thread, some 0.1 ms.
_WIDE_ROWS = 32


@dataclass(slots=True)
class CanonicalGroups:
    """Groups with equally many rows and key tiles, computed in one call. Keys lie at their
    positions."""

    rows: torch.Tensor
    """int64 [groups * padded]: indices into the packed rows; the padding of a group repeats its
    last row."""
    real: torch.Tensor
    """int64 [real rows]: the places in ``rows`` that are not padding."""
    key_slots: tuple[torch.Tensor, ...]
    """int64 [groups, KEY_TILE] each."""
    masks: tuple[torch.Tensor, ...]
    """float32 [groups, padded, KEY_TILE] each: 0 where the row sees the key, else -inf."""
    positions: torch.Tensor | None = None
    """int64 [groups, padded], for layers with a window."""
    least_position: int = 0
    is_identity: bool = False
    """Whether ``rows`` are 0, 1, 2, .. without padding."""
    goals: torch.Tensor | None = None
    """int64 [real rows]: the packed rows that the results belong to."""
    _places: tuple[int, list[torch.Tensor]] | None = None

    @property
    def count(self) -> int:
        return self.masks[0].shape[0]

    @property
    def padded(self) -> int:
        """Rows of each group, padding included."""
        return self.masks[0].shape[1]

    def places(self, kv_heads: int) -> list[torch.Tensor]:
        """Return, for each tile, int64 [groups * kv_heads * KEY_TILE]: a key head's part of each
        slot is a row of its own, so that one copy brings it into place."""
        if self._places and self._places[0] == kv_heads:
            return self._places[1]
        heads = torch.arange(kv_heads, device=self.rows.device)[:, None]
        found = [(one[:, None] * kv_heads + heads).view(-1) for one in self.key_slots]
        self._places = kv_heads, found
        return found

    def windowed(self, window: int) -> CanonicalGroups:
        """Return the same rows, which see no key that is ``window`` positions or more behind them.
        Tiles in which no row sees a key would add exact zeros, so they are left out."""
        assert self.positions is not None
        last_unseen = self.positions[:, :, None] - window
        keys = torch.arange(KEY_TILE, device=last_unseen.device)
        first = max(0, self.least_position - window + 1) // KEY_TILE
        masks = tuple(
            mask.masked_fill(keys + (first + index) * KEY_TILE <= last_unseen, -torch.inf)
            for index, mask in enumerate(self.masks[first:])
        )
        return replace(self, key_slots=self.key_slots[first:], masks=masks, _places=None)


class CanonicalAttention:
    """An ``AttentionBackend`` for the row counts of ``tiles``."""

    def __init__(self, tiles: RowTiles) -> None:
        self._sizes, self._batch = tiles.attention_sizes, tiles.attention_batch

    def lay_out(self, rows: BatchRows) -> CanonicalLayout:
        paths = np.array([_one_path(parents) for parents in rows.requests.parents])
        size = self._sizes[0]
        easy = (paths >= 0) & (rows.counts <= size)
        one_each = np.flatnonzero(easy)
        counts = rows.counts[one_each]
        place = np.minimum(np.arange(size), counts[:, None] - 1)
        picked = rows.first_rows[one_each, None] + place
        ends = rows.bases[one_each] + paths[one_each]
        groups = _make_groups(rows, one_each, picked, counts, ends, batch=self._batch)
        for session in np.flatnonzero(~easy).tolist():
            groups += _groups_of(rows, session, self._sizes)
        return CanonicalLayout(tuple(groups), int(rows.positions.max()))


@dataclass(slots=True)
class CanonicalLayout:
    """The groups of one pass."""

    groups: tuple[CanonicalGroups, ...]
    last_position: int
    _windowed: tuple[int, tuple[CanonicalGroups, ...]] | None = None

    def attend(self, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
        heads, rows, head_dim = states.query.shape
        groups = self._groups(layer.window)
        if len(groups) == 1 and groups[0].is_identity and len(groups[0].rows) == rows:
            return canonical_attention(states, groups[0], layer)
        out = states.query.new_zeros((rows, heads, head_dim))

        def attend_one(groups: CanonicalGroups) -> None:
            assert groups.goals is not None
            out.index_copy_(0, groups.goals, canonical_attention(states, groups, layer))

        is_wide = states.query.device.type == "cpu" and _is_wide(groups)
        if is_wide:
            cpu_threads.map_all(attend_one, groups)
        else:
            for one in groups:
                attend_one(one)
        return out

    def _groups(self, window: int | None) -> tuple[CanonicalGroups, ...]:
        """Return the groups under a window, which are the same where the window hides nothing."""
        if window is None or window > self.last_position:
            return self.groups
        if self._windowed is None or self._windowed[0] != window:
            self._windowed = window, tuple(group.windowed(window) for group in self.groups)
        return self._windowed[1]


def _is_wide(groups: Sequence[CanonicalGroups]) -> bool:
    """Return whether each group gets a thread of its own. A prompt's groups do; groups of single
    tokens are computed before another thread wakes up."""
    return len(groups) > 1 and max(one.padded for one in groups) >= _WIDE_ROWS


def canonical_attention(
    states: LayerStates, groups: CanonicalGroups, layer: LayerAttention
) -> torch.Tensor:
    """Compute the attention of some groups, whose masks have ``layer.window`` already.

    Returns [real rows, heads, head_dim] in the type of the query, in the order of
    ``groups.real``."""
    heads, _, head_dim = states.query.shape
    kv_heads = states.key.shape[0]
    count, rows, share = groups.count, groups.padded, heads // kv_heads
    query, own_key, own_value = states.query, states.key, states.value
    if not groups.is_identity or len(groups.rows) != query.shape[1]:
        query, own_key, own_value = (
            part.index_select(1, groups.rows) for part in (query, own_key, own_value)
        )
    # The query becomes [groups, key heads, share, rows, head_dim], the own keys and values become
    # [groups, key heads, 1, rows, head_dim]. All scores carry the factor log2(e).
    query = query.float() * (layer.scale * _LOG2_E)
    query = query.reshape(kv_heads, share, count, rows, head_dim).permute(2, 0, 1, 3, 4)
    query = query.contiguous()
    # Query heads of one key head are stacked as rows: fewer, larger products, no repeated keys.
    stacked_query = query.view(count * kv_heads, share * rows, head_dim)
    own_key, own_value = (
        part.float()
        .reshape(kv_heads, count, rows, head_dim)
        .transpose(0, 1)
        .unsqueeze(2)
        .contiguous()
        for part in (own_key, own_value)
    )
    # [groups, key heads, share, rows, 1]
    own_score = (query * own_key).sum(dim=-1, keepdim=True)
    if layer.soft_cap is not None:
        copies = own_score.expand(-1, -1, -1, -1, _VECTOR_ELEMENTS).contiguous()
        own_score = layer.capped(copies, _LOG2_E)[..., :1]
    places = groups.places(kv_heads)
    tile_shape = (count * kv_heads, KEY_TILE, head_dim)
    # First all scores, and the largest score of each row. Then the weights and their sums.
    scores = []
    best = own_score
    for place, mask in zip(places, groups.masks, strict=True):
        tile = states.keys.view(-1, head_dim).index_select(0, place).float().view(tile_shape)
        product = torch.bmm(stacked_query, tile.transpose(1, 2))
        score = layer.capped(product.view(count, kv_heads, share, rows, KEY_TILE), _LOG2_E)
        score += mask[:, None, None]
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
    for place, score in zip(places, scores, strict=True):
        weights = score.sub_(best).exp2_()
        total += weights.sum(dim=-1, keepdim=True)
        tile = states.values.view(-1, head_dim).index_select(0, place).float().view(tile_shape)
        product = torch.bmm(weights.view(count * kv_heads, share * rows, KEY_TILE), tile)
        out += product.view(out.shape)
    out /= total
    out = out.permute(0, 3, 1, 2, 4).reshape(count * rows, heads, head_dim)
    out = out if groups.is_identity else out.index_select(0, groups.real)
    return out.to(states.query.dtype)


@lru_cache(maxsize=2048)
def _one_path(parents: tuple[int, ...]) -> int:
    """Return how many inner nodes a tree has if they are its first nodes, one after the other, so
    that the keys of their line lie side by side; else -1."""
    (path, _), *others = tree_lines(parents)
    return -1 if others or path.tolist() != list(range(len(path))) else len(path)


def _make_groups(
    rows: BatchRows,
    sessions: Indices,
    picked: Indices,
    counts: Indices,
    line_ends: Indices,
    path: Indices | None = None,
    batch: int = 1,
) -> list[CanonicalGroups]:
    """Make one group for each of ``sessions``.

    ``picked`` [groups, padded] are the rows of the groups, of which the first ``counts`` [groups]
    are no padding. The line of a group is the first ``line_ends`` [groups] keys of its session.
    With ``path``, which is given for one session alone, the line is the text and then these nodes.
    Up to ``batch`` groups with equally many tiles are computed in one call."""
    if not len(sessions):
        return []
    device, size = rows.pool.device, picked.shape[1]
    positions = rows.positions[picked]
    # Tiles behind the last position would add exact zeros, so they are left out, but for one.
    tiles = np.maximum(1, -(-positions.max(axis=1) // KEY_TILE))
    found = []
    for tile_count in np.unique(tiles).tolist():
        alike = np.flatnonzero(tiles == tile_count)
        for which in np.split(alike, range(batch, len(alike), batch)):
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
            seen = (own[None] - starts[:, None, None]).clamp_(0, KEY_TILE)
            masks = _mask_rows(device).index_select(0, seen.view(-1))
            real = np.flatnonzero(np.arange(size) < counts[which, None])
            places = picked[which].reshape(-1)
            found.append(
                CanonicalGroups(
                    rows=torch.from_numpy(places).to(device),
                    real=torch.from_numpy(real).to(device),
                    goals=torch.from_numpy(places[real]).to(device),
                    is_identity=np.array_equal(places[real], np.arange(len(places))),
                    key_slots=torch.from_numpy(keys).to(device).split(KEY_TILE, dim=1),
                    masks=masks.view(tile_count, len(which), size, KEY_TILE).unbind(),
                    positions=own,
                    least_position=int(positions[which].min()),
                )
            )
    return found


@lru_cache(maxsize=4)
def _mask_rows(device: torch.device) -> torch.Tensor:
    """Return float32 [KEY_TILE + 1, KEY_TILE], whose row n shows the first n keys."""
    places = torch.arange(KEY_TILE, device=device)
    hidden = places >= torch.arange(KEY_TILE + 1, device=device)[:, None]
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)


def _groups_of(rows: BatchRows, session: int, sizes: tuple[int, ...]) -> list[CanonicalGroups]:
    """Return the groups of one session, whatever its tree."""
    request, first = rows.requests[session], int(rows.first_rows[session])
    fed, which = len(request.feed), np.array([session])
    groups: list[CanonicalGroups] = []
    for path, nodes in tree_lines(request.parents):
        members = nodes + fed if groups else np.concatenate([np.arange(fed), nodes + fed])
        line_end, start = rows.bases[which] + len(path), 0
        for size in cut(len(members), sizes):
            tile = members[start : start + size]
            padded = np.pad(tile, (0, size - len(tile)), mode="edge")
            count = np.array([len(tile)])
            groups += _make_groups(rows, which, first + padded[None], count, line_end, path)
            start += size
    return groups


@lru_cache(maxsize=2048)
def tree_lines(parents: tuple[int, ...]) -> tuple[tuple[Indices, Indices], ...]:
    """Cut a tree into lines of ancestors. Return for each line the path of its inner nodes, and the
    nodes whose ancestors lie on that path. The first line is there even for an empty tree.

    Example: in the tree with the parents (-1, 0, 0, 1) node 3 is behind node 1, and node 2 has no
    child. One line has the path [0, 1] and the nodes [0, 1, 2, 3]."""
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
