"""Several sessions in one call of torch's attention, their keys gathered into a kept buffer.

Theory of operation. Sessions of like row count are put side by side in groups, as many as have
their keys in ``_GROUP_BYTES``: small models then need few calls, and with large ones what was
gathered is still in the processor's cache. A fresh buffer would cost a CPU more in page faults than
the copy. A session alone in its group whose blocks follow each other is read in place.

The query heads that share a key head are stacked as rows of it: torch then takes its fused kernel,
whereas with ``enable_gqa`` and a mask it expands the keys (bfloat16, one row: five times slower).
With many rows the heads take turns instead, so that the mask is not repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from edgespec.sampling.tensors import to_device
from edgespec.verifier.targets.pass_batch import Indices
from edgespec.verifier.targets.pass_plan import BatchRows, LayerAttention, LayerStates

_GROUP_BYTES = 1 << 20
# A GPU's caches matter less than its launches.
_GROUP_BYTES_CUDA = 1 << 28
# Larger gathers get memory of their own, so that one long text does not hold it for ever.
_BUFFER_BYTES_MAX = 1 << 26
_STACKED_ROWS_MAX = 64
# A session joins a group whose padding then stays below this share.
_PADDING_MAX = 0.25


class GroupedAttention:
    """``AttentionBackend`` of plain mode."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def lay_out(self, rows: BatchRows) -> GroupedLayout:
        data = rows.pool.data
        limit = _GROUP_BYTES_CUDA if data.device.type == "cuda" else _GROUP_BYTES
        key_bytes = data.shape[-1] * data.element_size()
        groups = _groups(rows, limit // key_bytes)
        largest = max([0 if group.key_slots is None else len(group.key_slots) for group in groups])
        return GroupedLayout(groups, self._buffers_of(largest, data))

    def _buffers_of(self, slots: int, data: torch.Tensor) -> list[torch.Tensor]:
        """Two of [slots or more, row width], for keys and values."""
        if self._buffers and self._buffers[0].shape[0] >= slots:
            return self._buffers
        fresh = [data.new_empty((slots, data.shape[-1])) for _ in range(2)]
        if fresh[0].nbytes <= _BUFFER_BYTES_MAX:
            self._buffers = fresh
        return fresh


@dataclass(slots=True)
class AttentionGroup:
    """Sessions side by side, each padded to the most rows and keys among them."""

    rows: torch.Tensor | slice
    """int64 [sessions * rows] into the packed rows, padding repeats a session's first row; a slice
    where they lie one after the other."""
    shape: tuple[int, int, int]
    """Sessions, rows and keys of each."""
    key_slots: torch.Tensor | None
    """int32 [sessions * keys]; None where the keys lie at ``first_slot`` and behind."""
    first_slot: int
    real: torch.Tensor | None
    """int64: of the sessions' rows those that are not padding; None for all."""
    goal: torch.Tensor | None
    """int64: their packed rows."""
    last: Indices
    """[sessions, rows]: the last key of the text that the row sees; a node sees its line too."""
    batch: BatchRows
    sessions: list[int]
    """Of ``batch``, in the group's order."""
    packed: Indices
    """[sessions, rows] into the packed rows."""
    masks: dict[tuple[int | None, int], torch.Tensor | None] = field(default_factory=dict)
    """By window and how often the rows are stacked."""

    def mask(self, window: int | None, share: int, like: torch.Tensor) -> torch.Tensor | None:
        """[sessions, 1, share * rows, keys] in the type of ``like``: 0 or -inf."""
        key = window, share
        if key not in self.masks:
            self.masks[key] = self._make_mask(window, share, like)
        return self.masks[key]

    def seen(self, window: int | None = None) -> npt.NDArray[np.bool_] | None:
        """[sessions, rows, keys]: True where the row sees the key; None where all see all."""
        keys = self.shape[2]
        near = None if window is None else self._near(window)
        if near is None and self.shape[1] == 1 and int(self.last.min()) == keys - 1:
            return None
        seen = np.arange(keys) <= self.last[:, :, None]
        for place, session in enumerate(self.sessions if self.shape[1] > 1 else ()):
            tree = self.batch.trees[session]
            if tree is not None:
                count, base = len(tree.depths), int(self.batch.bases[session])
                first = int(self.batch.counts[session]) - count
                seen[place, first : first + count, base : base + count] |= tree.line
        return seen if near is None else seen & near

    def _near(self, window: int) -> npt.NDArray[np.bool_] | None:
        """[sessions, rows, keys]: True where the key lies within the window; None for all."""
        own = self.batch.positions[self.packed]
        if int(own.max()) < window:
            return None
        near = own[:, :, None] - _key_positions(self.batch, self.sessions, self.shape[2])[:, None]
        return near < window

    def _make_mask(self, window: int | None, share: int, like: torch.Tensor) -> torch.Tensor | None:
        seen = self.seen(window)
        if seen is None:
            return None
        hidden = to_device(~seen, like.device)
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(hidden, -torch.inf)
        return mask.repeat(1, share, 1)[:, None]


@dataclass(frozen=True, slots=True)
class GroupedLayout:
    groups: list[AttentionGroup]
    buffers: list[torch.Tensor]
    """For gathered keys and values, [slots, row width]; used again by the next layer and pass."""

    def attend(self, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
        heads, rows, head_dim = states.query.shape
        query = states.query.transpose(0, 1)
        out = query.new_empty((rows, heads, head_dim))
        for group in self.groups:
            part = self._attend_group(group, layer, states, query)
            if isinstance(group.rows, slice):
                out[group.rows] = part
            elif group.goal is not None:
                out[group.goal] = part if group.real is None else part[group.real]
        return out

    def _attend_group(
        self, group: AttentionGroup, layer: LayerAttention, states: LayerStates, query: torch.Tensor
    ) -> torch.Tensor:
        """[sessions * rows, heads, head_dim], padding included."""
        sessions, rows, keys = group.shape
        kv_heads, _, head_dim = states.key.shape
        share = query.shape[1] // kv_heads
        shape = (sessions, keys, kv_heads, head_dim)
        k = self._gathered(group, states.keys, 0).view(shape).transpose(1, 2)
        v = self._gathered(group, states.values, 1).view(shape).transpose(1, 2)
        picked = query[group.rows].view(sessions, rows, kv_heads, share, head_dim)
        # [sessions, key-value heads, share, rows, head_dim]
        q = picked.permute(0, 2, 3, 1, 4)
        sinks = layer.sink_scores(kv_heads)
        if share * rows <= _STACKED_ROWS_MAX:
            stacked = q.reshape(sessions, kv_heads, share * rows, head_dim)
            mask = group.mask(layer.window, share, query)
            if sinks is not None:
                sinks = sinks.expand(-1, -1, rows, -1).reshape(kv_heads, share * rows, 1)
            found = _attention(stacked, k, v, mask, layer, sinks).view(q.shape)
        else:
            mask = group.mask(layer.window, 1, query)
            turns = [
                _attention(
                    q[:, :, one], k, v, mask, layer, None if sinks is None else sinks[:, one]
                )
                for one in range(share)
            ]
            found = torch.stack(turns, dim=2)
        return found.permute(0, 3, 1, 2, 4).reshape(sessions * rows, -1, head_dim)

    def _gathered(self, group: AttentionGroup, pool: torch.Tensor, which: int) -> torch.Tensor:
        sessions, _, keys = group.shape
        if group.key_slots is None:
            return pool[group.first_slot : group.first_slot + keys]
        out = self.buffers[which][: sessions * keys]
        return torch.index_select(pool, 0, group.key_slots, out=out)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    layer: LayerAttention,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As ``scaled_dot_product_attention``, [sessions, key-value heads, rows, head_dim]; ``sinks``
    float32 [key-value heads, rows or 1, 1]."""
    if layer.soft_cap is None and sinks is None:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
    scores = layer.capped(q.float().mul(layer.scale) @ k.float().transpose(2, 3))
    if mask is not None:
        scores += mask
    best = scores.amax(dim=-1, keepdim=True)
    if sinks is not None:
        best = torch.maximum(best, sinks)
    weights = (scores - best).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += (sinks - best).exp_()
    return (weights @ v.float() / total).to(q.dtype)


def _cut(lengths: list[int], key_limit: int) -> list[tuple[int, int]]:
    """Where groups of sessions begin and end whose ``lengths`` ascend: with their padding they have
    at most ``key_limit`` keys, and little padding. A session with more is alone."""
    sums = [0, *accumulate(lengths)]
    groups, first = [], 0
    while first < len(lengths):
        end = min(len(lengths), first + max(1, key_limit // lengths[first]))
        while end > first + 1:
            padded = lengths[end - 1] * (end - first)
            if padded > key_limit:
                end = max(first + 1, min(end - 1, first + key_limit // lengths[end - 1]))
            elif padded - (sums[end] - sums[first]) > _PADDING_MAX * padded:
                end -= (end - first) // 2
            else:
                break
        groups.append((first, end))
        first = end
    return groups


def _groups(rows: BatchRows, key_limit: int) -> list[AttentionGroup]:
    """Sessions with like row counts (same power of two) go side by side."""
    if rows.single:
        return _side_by_side(rows, np.argsort(rows.lengths, kind="stable"), key_limit)
    _, kinds = np.frexp(rows.counts)  # bits
    order = np.lexsort((rows.lengths, kinds))
    starts = np.flatnonzero(np.diff(kinds[order], prepend=-1)).tolist()
    parts = (order[start:stop] for start, stop in pairwise([*starts, len(order)]))
    return [group for part in parts for group in _side_by_side(rows, part, key_limit)]


def _side_by_side(rows: BatchRows, order: Indices, key_limit: int) -> list[AttentionGroup]:
    """Groups of the sessions in ``order``, whose lengths ascend; what can be is made for all groups
    at once."""
    lengths = rows.lengths[order].tolist()
    cuts = _cut(lengths, key_limit)
    if len(cuts) == 1:
        order = np.sort(order)  # then their rows may lie one after the other
    counts, first_rows = rows.counts[order], rows.first_rows[order, None]
    sessions, row_counts = order.tolist(), counts.tolist()
    place, real = np.arange(max(row_counts)), None
    if min(row_counts) < len(place):
        real = place < counts[:, None]
        place = np.where(real, place, 0)
    packed = first_rows + place
    # A fed row sees the text up to itself; a node all of the text, and then its line.
    last = np.minimum(rows.own_keys[packed], rows.bases[order, None] - 1)
    if real is not None:
        last[~real] = 0  # a row that sees nothing would be NaN
    groups = []
    for first, end in cuts:
        members, key_count = slice(first, end), lengths[end - 1]
        row_limit = max(row_counts[members])
        own = packed[members, :row_limit]
        picked = (
            _picked(own, sessions[members], rows.pool.device)
            if min(row_counts[members]) == row_limit
            else _picked_of(own, np.arange(row_limit) < counts[members, None], rows.pool.device)
        )
        key_slots, first_slot = _key_slots(rows, order[members], key_count)
        groups.append(
            AttentionGroup(
                rows=picked[0],
                shape=(end - first, row_limit, key_count),
                key_slots=key_slots,
                first_slot=first_slot,
                real=picked[1],
                goal=picked[2],
                last=last[members, :row_limit],
                batch=rows,
                sessions=sessions[members],
                packed=own,
            )
        )
    return groups


_Picked = tuple[torch.Tensor | slice, torch.Tensor | None, torch.Tensor | None]


def _picked(packed: Indices, sessions: list[int], device: torch.device) -> _Picked:
    """Where no row is padding."""
    first = sessions[0]
    if sessions == list(range(first, first + len(sessions))):
        return slice(int(packed[0, 0]), int(packed[-1, -1]) + 1), None, None
    rows = to_device(packed.ravel(), device)
    return rows, None, rows


def _picked_of(packed: Indices, real: npt.NDArray[np.bool_], device: torch.device) -> _Picked:
    """Where the rows that are not ``real`` are padding."""
    places = to_device(np.flatnonzero(real), device)
    goal = to_device(packed[real], device)
    return to_device(packed.ravel(), device), places, goal


def _key_slots(
    rows: BatchRows, sessions: Indices, key_limit: int
) -> tuple[torch.Tensor | None, int]:
    slots = rows.key_slots(sessions, key_limit)
    if len(sessions) == 1:
        first = int(slots[0, 0])
        if bool((slots[0] == np.arange(first, first + key_limit)).all()):
            return None, first
    return to_device(slots.ravel(), rows.pool.device), 0


def _key_positions(rows: BatchRows, sessions: list[int], key_limit: int) -> Indices:
    """[sessions, keys]; of no meaning behind a session's end."""
    positions = np.tile(np.arange(key_limit), (len(sessions), 1))
    for place, session in enumerate(sessions):
        tree = rows.trees[session]
        if tree is not None:
            base = int(rows.bases[session])
            positions[place, base : base + len(tree.depths)] = base - 1 + tree.depths
    return positions
