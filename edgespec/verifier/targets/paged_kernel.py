"""The Triton kernels of ``paged_attention.py``; importing this file needs Triton.

``attend`` computes, for one tile of rows of one session, one key head and one share of the
keys, the weighted sum of the values with the running maximum and sum of the weights (online
softmax: Milakov and Gimelshein, arXiv 1805.02867). ``combine`` adds the shares up (as in
Flash-Decoding). Rows of a tile are ``SHARE`` query heads times rows of the session, so that a key
is read once for all heads that share it. Everything is summed in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _four(place):
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)


@triton.jit
def _cap(score, soft_cap):
    # tanh by exp of a negative number: it cannot overflow.
    bent = tl.exp(-2.0 * tl.abs(score) / soft_cap)
    return tl.where(score < 0, -1.0, 1.0) * soft_cap * (1.0 - bent) / (1.0 + bent)


@triton.jit
def _seen(key, exists, base, own, real, place_in_tree):
    # Of the text a fed row sees what is up to itself, a node everything; then its own line.
    looked_up = (exists & (key >= base))[None, :] & (real & (own >= base))[:, None]
    on_line = tl.load(place_in_tree, mask=looked_up, other=0) != 0
    text_end = tl.minimum(own + 1, base)
    return on_line | (exists[None, :] & (key[None, :] < text_end[:, None]))


@triton.jit
def _near(key, exists, base, position, key_position, window):
    is_node = exists & (key >= base)
    node_position = tl.load(key_position, mask=is_node, other=0)
    distance = position[:, None] - tl.where(is_node, node_position, key)[None, :]
    return distance < window


@triton.jit
def attend(
    query,
    keys,
    values,
    partial_out,
    partial_best,
    partial_sum,
    tables,
    tiles,
    sessions,
    own_keys,
    positions,
    lines,
    table_width,
    line_width,
    row_width,
    query_row_stride,
    query_head_stride,
    row_count,
    head_count,
    scale,
    soft_cap,
    window,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    tile = tiles + 3 * tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    session, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    table, first_row, base, length = _four(sessions + 4 * session)
    cached = tl.load(own_keys + first_row)  # the first row's key follows the cache

    lane = tl.arange(0, ROWS)
    real = lane < count * SHARE
    row = first + lane // SHARE
    head = kv_head * SHARE + lane % SHARE
    own = tl.load(own_keys + row, mask=real, other=0)
    position = tl.load(positions + row, mask=real, other=0)
    row_lines = lines + row[:, None] * line_width
    dim = tl.arange(0, DIM)
    in_dim = dim < HEAD_DIM
    wanted = real[:, None] & in_dim[None, :]
    at = row[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + at, mask=wanted, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    chunks = tl.cdiv(length, KEYS)
    each = tl.cdiv(chunks, SPLITS)
    begin = split * each
    end = tl.minimum(begin + each, chunks)
    if HAS_WINDOW:
        least = tl.min(tl.where(real, position, length))
        begin = tl.maximum(begin, tl.maximum(least - window + 1, 0) // KEYS)
    for chunk in range(begin, end):
        key = chunk * KEYS + tl.arange(0, KEYS)
        exists = key < length
        block = tl.load(tables + table * table_width + key // BLOCK_SIZE, mask=exists, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        place = slot[:, None] * row_width + kv_head * HEAD_DIM + dim[None, :]
        inside = exists[:, None] & in_dim[None, :]
        k = tl.load(keys + place, mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:
            score = _cap(score, soft_cap)
        place_in_tree = row_lines + (key - base)[None, :]
        key_position = positions + first_row + key - cached
        seen = _seen(key, exists, base, own, real, place_in_tree)
        if HAS_WINDOW:
            seen &= _near(key, exists, base, position, key_position, window)
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

    index = (split * row_count + row) * head_count + head
    tl.store(partial_best + index, best, mask=real)
    tl.store(partial_sum + index, total, mask=real)
    tl.store(partial_out + index[:, None] * HEAD_DIM + dim[None, :], out, mask=wanted)


@triton.jit
def combine(
    partial_out,
    partial_best,
    partial_sum,
    sinks,
    goal,
    count,
    head_count,
    HAS_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One row and head: the shares of the keys, brought to a common maximum and added; a sink
    counts as a share that brings no value."""
    index = tl.program_id(0)
    dim = tl.arange(0, DIM)
    in_dim = dim < HEAD_DIM
    best = tl.load(partial_best + index)
    for split in range(1, SPLITS):
        best = tl.maximum(best, tl.load(partial_best + split * count + index))
    total = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + index % head_count).to(tl.float32)
        best = tl.maximum(best, sink)
        total += tl.exp(sink - best)
    out = tl.zeros([DIM], tl.float32)
    for split in range(0, SPLITS):
        at = split * count + index
        fade = tl.exp(tl.load(partial_best + at) - best)
        total += fade * tl.load(partial_sum + at)
        out += fade * tl.load(partial_out + at * HEAD_DIM + dim, mask=in_dim, other=0.0)
    tl.store(goal + index * HEAD_DIM + dim, (out / total).to(goal.dtype.element_ty), mask=in_dim)
