"""The Triton kernels of ``paged_attention.py``; importing this file needs Triton.

``attend_keys`` computes, for one tile of rows, one key head and one stretch of ``_STRETCH`` keys,
the weighted sum of the values with the maximum and sum of the weights (online softmax: Milakov and
Gimelshein, arXiv 1805.02867). ``add_up`` adds the stretches and each row's own key in a fixed order
(as in Flash-Decoding). Everything is summed in float32. Keys stand at their positions, and keys
that a row does not see add exact zeros, so a row's bits depend on nothing but its own text.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgespec.verifier.targets.kv_pool import BLOCK_SIZE
from edgespec.verifier.targets.paged_attention import PagedLayout
from edgespec.verifier.targets.pass_plan import LayerAttention, LayerStates

_STRETCH = 256
# Keys that are multiplied at once, by the size of a number: two such tiles fit beside each other.
_KEYS = {2: 64, 4: 32}
# Partial results of the stretches of one launch take at most this; more tiles take several
# launches.
_SCRATCH_BYTES = 1 << 28
_LEAST_LANES = 32


@triton.jit
def _cap_score(score, soft_cap):
    # tanh by exp of a negative number: it cannot overflow.
    bent = tl.exp(-2.0 * tl.abs(score) / soft_cap)
    return tl.where(score < 0, -1.0, 1.0) * soft_cap * (1.0 - bent) / (1.0 + bent)


# Triton would compile the kernel again, in the middle of a pass, for each kind of number and
# alignment that it specialises on.
_ANY_WIDTH = ("tile_width", "table_width", "path_width", "window")
_ANYWHERE = ("tiles", "bases", "tables", "paths", "positions", "own_slots")


@triton.jit(do_not_specialize=_ANY_WIDTH, do_not_specialize_on_alignment=_ANYWHERE)
def attend_keys(
    query,
    keys,
    values,
    partial,
    bests,
    sums,
    tiles,
    bases,
    tables,
    paths,
    positions,
    tile_width,
    table_width,
    path_width,
    row_width,
    query_row_stride,
    query_head_stride,
    scale,
    soft_cap,
    window,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    STRETCH: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    stretch = tl.program_id(2)
    line = tl.load(tiles + tile * tile_width)
    count = tl.load(tiles + tile * tile_width + 1)
    lane = tl.arange(0, LANES)
    real = lane < count * SHARE
    row = tl.load(tiles + tile * tile_width + 2 + lane // SHARE, mask=real, other=0)
    position = tl.load(positions + row, mask=real, other=0)
    limit = tl.max(position)
    first = stretch * STRETCH
    if first < limit:
        base = tl.load(bases + line)
        head = kv_head * SHARE + lane % SHARE
        dim = tl.arange(0, DIM)
        in_dim = dim < HEAD_DIM
        wanted = real[:, None] & in_dim[None, :]
        at = row[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :]
        q = tl.load(query + at, mask=wanted, other=0.0)
        best = tl.full([LANES], float("-inf"), tl.float32)
        total = tl.zeros([LANES], tl.float32)
        out = tl.zeros([LANES, DIM], tl.float32)
        begin = first
        if HAS_WINDOW:
            least = tl.min(tl.where(real, position, limit))
            begin = tl.maximum(begin, tl.maximum(least - window + 1, 0) // KEYS * KEYS)
        for start in range(begin, tl.minimum(first + STRETCH, limit), KEYS):
            key = start + tl.arange(0, KEYS)
            exists = key < limit
            text = key < base
            block = tl.load(tables + line * table_width + key // BLOCK, mask=exists & text, other=0)
            node = tl.load(
                paths + line * path_width + key - base, mask=exists & (key >= base), other=0
            )
            slot = tl.where(text, block * BLOCK + key % BLOCK, node).to(tl.int64)
            place = slot[:, None] * row_width + kv_head * HEAD_DIM + dim[None, :]
            inside = exists[:, None] & in_dim[None, :]
            k = tl.load(keys + place, mask=inside, other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if HAS_CAP:
                score = _cap_score(score, soft_cap)
            seen = exists[None, :] & (key[None, :] < position[:, None])
            if HAS_WINDOW:
                seen = seen & (position[:, None] - key[None, :] < window)
            score = tl.where(seen, score, float("-inf"))
            now = tl.maximum(best, tl.max(score, axis=1))
            # A row that has seen nothing yet: any number will do, its weights are all zero.
            calm = tl.where(now == float("-inf"), 0.0, now)
            weight = tl.exp(score - calm[:, None])
            fade = tl.exp(best - calm)
            total = total * fade + tl.sum(weight, axis=1)
            v = tl.load(values + place, mask=inside, other=0.0)
            out = out * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            best = now
        place = ((stretch * tl.num_programs(0) + tile) * tl.num_programs(1) + kv_head) * LANES
        place = place.to(tl.int64) + lane
        tl.store(bests + place, best)
        tl.store(sums + place, total)
        tl.store(partial + place[:, None] * DIM + dim[None, :], out)


@triton.jit(do_not_specialize=_ANY_WIDTH, do_not_specialize_on_alignment=_ANYWHERE)
def add_up(
    query,
    keys,
    values,
    partial,
    bests,
    sums,
    tiles,
    positions,
    own_slots,
    sinks,
    goal,
    tile_width,
    row_width,
    query_row_stride,
    query_head_stride,
    goal_row_stride,
    scale,
    soft_cap,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    STRETCH: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    count = tl.load(tiles + tile * tile_width + 1)
    lane = tl.arange(0, LANES)
    real = lane < count * SHARE
    row = tl.load(tiles + tile * tile_width + 2 + lane // SHARE, mask=real, other=0)
    position = tl.load(positions + row, mask=real, other=0)
    head = kv_head * SHARE + lane % SHARE
    dim = tl.arange(0, DIM)
    wanted = real[:, None] & (dim < HEAD_DIM)[None, :]
    at = row[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + at, mask=wanted, other=0.0).to(tl.float32)
    slot = tl.load(own_slots + row, mask=real, other=0).to(tl.int64)
    own = slot[:, None] * row_width + kv_head * HEAD_DIM + dim[None, :]
    k = tl.load(keys + own, mask=wanted, other=0.0).to(tl.float32)
    score = tl.sum(q * k, axis=1) * scale
    if HAS_CAP:
        score = _cap_score(score, soft_cap)
    step = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * LANES
    place = (tile * tl.num_programs(1) + kv_head) * LANES + lane
    stretches = tl.cdiv(tl.max(position), STRETCH)
    best = score
    sink = best
    for stretch in range(0, stretches):
        best = tl.maximum(best, tl.load(bests + place + stretch * step))
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        best = tl.maximum(best, sink)
    weight = tl.exp(score - best)
    total = weight
    if HAS_SINKS:
        total += tl.exp(sink - best)
    v = tl.load(values + own, mask=wanted, other=0.0).to(tl.float32)
    out = weight[:, None] * v
    for stretch in range(0, stretches):
        there = place + stretch * step
        fade = tl.exp(tl.load(bests + there) - best)
        total += fade * tl.load(sums + there)
        out += fade[:, None] * tl.load(partial + there[:, None] * DIM + dim[None, :])
    at = row[:, None] * goal_row_stride + head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(goal + at, (out / total[:, None]).to(goal.dtype.element_ty), mask=wanted)


def attend(layout: PagedLayout, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
    """Compute attention, as ``AttentionLayout.attend``."""
    with torch.cuda.device_of(states.query):  # where Triton launches
        return _attend(layout, layer, states)


def _attend(layout: PagedLayout, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
    query = states.query if states.query.stride(-1) == 1 else states.query.contiguous()
    heads, rows, head_dim = query.shape
    kv_heads = states.key.shape[0]
    share = heads // kv_heads
    width = layout.tiles.shape[1]
    lanes = max(_LEAST_LANES, triton.next_power_of_2((width - 2) * share))
    dim = max(16, triton.next_power_of_2(head_dim))
    out = query.new_zeros((rows, heads, head_dim))
    stretches = max(1, -(-layout.most_keys // _STRETCH))
    pool = query, states.keys, states.values
    strides = states.keys.shape[1], query.stride(1), query.stride(0)
    scale = layer.scale, layer.soft_cap or 1.0
    shape = {
        "HAS_CAP": layer.soft_cap is not None,
        "SHARE": share,
        "HEAD_DIM": head_dim,
        "DIM": dim,
        "LANES": lanes,
        "STRETCH": _STRETCH,
    }
    step = max(1, _SCRATCH_BYTES // (4 * stretches * kv_heads * lanes * dim))
    for tiles in layout.tiles.split(step):
        grid = len(tiles), kv_heads
        sizes = (stretches, *grid, lanes)
        partial = torch.empty((*sizes, dim), dtype=torch.float32, device=query.device)
        bests, sums = torch.empty((2, *sizes), dtype=torch.float32, device=query.device)
        found = partial, bests, sums
        lines = layout.bases, layout.tables, layout.paths, layout.positions
        widths = width, layout.tables.shape[1], layout.paths.shape[1]
        attend_keys[(*grid, stretches)](
            *pool,
            *found,
            tiles,
            *lines,
            *widths,
            *strides,
            *scale,
            layer.window or 0,
            HAS_WINDOW=layer.window is not None,
            BLOCK=BLOCK_SIZE,
            KEYS=_KEYS[query.element_size()],
            num_stages=2,
            **shape,
        )
        add_up[grid](
            *pool,
            *found,
            tiles,
            layout.positions,
            layout.own_slots,
            bests if layer.sinks is None else layer.sinks,
            out,
            width,
            *strides,
            heads * head_dim,
            *scale,
            HAS_SINKS=layer.sinks is not None,
            **shape,
        )
    return out
