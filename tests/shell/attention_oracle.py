"""Attention as the definition has it, row by row in float32, and random passes to compare it on.

The reference reads the pool through the same tables and makes no use of any library's attention.
Every slot of the pool that no row may see holds NaN, so a backend that reads one is found out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.canonical_mode import HeadShape
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE, NULL_SLOT, KvPool
from edgespec.verifier.targets.pass_batch import Indices
from edgespec.verifier.targets.pass_plan import (
    AttentionBackend,
    BatchRows,
    LayerAttention,
    LayerStates,
    lay_out,
    write_slots,
)

# Values are of the order of 1. A half-precision result carries its own rounding and the weights'.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_POOL_BLOCKS = 96
_CACHED_MAX = 150


class ReferenceAttention:
    """``AttentionBackend`` that nobody would serve with."""

    def lay_out(self, rows: BatchRows) -> ReferenceLayout:
        seen = [line for session in range(len(rows.requests)) for line in _seen_keys(rows, session)]
        return ReferenceLayout(seen)


@dataclass(frozen=True, slots=True)
class ReferenceLayout:
    """Of each row the slots that it sees, and how far behind it they are in the text."""

    seen: list[tuple[Indices, Indices]]

    def attend(self, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
        heads, rows, head_dim = states.query.shape
        kv_heads = states.key.shape[0]
        out = states.query.new_zeros((rows, heads, head_dim))
        for row, (slots, distances) in enumerate(self.seen):
            if layer.window is not None:
                slots = slots[distances < layer.window]
            where = torch.from_numpy(slots).to(states.keys.device)
            keys = states.keys[where].float().view(-1, kv_heads, head_dim)
            values = states.values[where].float().view(-1, kv_heads, head_dim)
            query = states.query[:, row].float().view(kv_heads, -1, head_dim)
            scores = torch.einsum("hsd,khd->hsk", query, keys) * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            if layer.sinks is not None:
                sinks = layer.sinks.float().view(kv_heads, -1, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(dim=-1)[..., : len(slots)]
            part = torch.einsum("hsk,khd->hsd", weights, values)
            out[row] = part.reshape(heads, head_dim).to(out.dtype)
        return out


def _seen_keys(rows: BatchRows, index: int) -> list[tuple[Indices, Indices]]:
    """For each row of a session: slots, and its own position less theirs."""
    session = rows.session(index)
    request, base = session.request, session.base
    positions = np.concatenate([np.arange(request.cache_length), session.positions])
    found = []
    for row in range(request.row_count):
        keys = list(range(min(base, request.cache_length + row + 1)))
        node = row - len(request.feed)
        while node >= 0:
            keys.append(base + node)
            node = request.parents[node]
        found.append((session.slots[keys], session.positions[row] - positions[keys]))
    return found


@dataclass(frozen=True, slots=True)
class RandomPass:
    """A pass over a pool of one layer, and what the layer's projections would have made of it."""

    rows: BatchRows
    states: LayerStates


def random_passes(
    shape: HeadShape, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[RandomPass]:
    """Endless ragged batches of one to six sessions; of each, chain, tree, prefill or none.

    A pass is to be used up before the next is drawn, since the pool is theirs in common.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool = KvPool(1, shape.kv_heads * shape.head_dim, _POOL_BLOCKS * BLOCK_SIZE, dtype, device)
    while True:
        batch = _random_batch(rng)
        for request in batch:
            pool.open(request.key, 1, SamplingParams())
        pool.reserve(batch)
        rows = lay_out(pool, batch)
        yield RandomPass(rows, _random_states(rows, shape, dtype, generator))
        for request in batch:
            pool.close(request.key)


def random_sinks(shape: HeadShape, device: torch.device) -> torch.Tensor:
    """float32 [heads], of the order of the largest scores."""
    generator = torch.Generator().manual_seed(shape.heads)
    return torch.randn(shape.heads, generator=generator).mul(2.0).to(device)


def disagreement(
    backend: AttentionBackend,
    shape: HeadShape,
    layers: Sequence[LayerAttention],
    dtype: torch.dtype,
    device: torch.device,
    *,
    passes: int = 4,
    seed: int = 1,
) -> str:
    """Why ``backend`` must not be used, or an empty string where it agrees with the reference."""
    reference, limit = ReferenceAttention(), TOLERANCE[dtype]
    source = random_passes(shape, dtype, device, seed)
    with torch.inference_mode():
        for _ in range(passes):
            drawn = next(source)
            layout, expected = backend.lay_out(drawn.rows), reference.lay_out(drawn.rows)
            for layer in layers:
                found = layout.attend(layer, drawn.states).float()
                wanted = expected.attend(layer, drawn.states).float()
                difference = float((found - wanted).abs().max())
                if not difference <= limit:  # NaN differs too
                    return (
                        f"attention differs from the reference by {difference:.1e}"
                        f" in {str(dtype).removeprefix('torch.')}, limit {limit:.0e} ({layer})"
                    )
    return ""


def _random_batch(rng: random.Random) -> list[PassRequest]:
    batch = []
    for index in range(rng.randrange(1, 7)):
        cached = rng.choice([0, 1, BLOCK_SIZE, rng.randrange(_CACHED_MAX)])
        feed = rng.choice([1, 1, 1, 2, rng.randrange(1, 40)])
        nodes = rng.choice([0, 0, 1, rng.randrange(12)])
        reach = rng.choice([1, 2, 12])
        parents = tuple([rng.randrange(max(-1, node - reach), node) for node in range(nodes)])
        tokens = (1,) * nodes
        batch.append(PassRequest(f"s{index}", cached, (1,) * feed, tokens, parents))
    return batch


def _random_states(
    rows: BatchRows, shape: HeadShape, dtype: torch.dtype, generator: torch.Generator
) -> LayerStates:
    device = rows.pool.device

    def random_rows(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype).to(device)

    width = shape.kv_heads * shape.head_dim
    slot_count = rows.pool.data.shape[2]
    keys, values = (
        torch.full((slot_count, width), torch.nan, dtype=dtype, device=device) for _ in range(2)
    )
    keys[NULL_SLOT:BLOCK_SIZE] = values[NULL_SLOT:BLOCK_SIZE] = 0
    for index in range(len(rows.requests)):
        slots = torch.from_numpy(rows.session(index).slots).to(device)
        keys[slots], values[slots] = random_rows(len(slots), width), random_rows(len(slots), width)
    own = torch.from_numpy(write_slots(rows)).to(device)
    by_head = (rows.row_count, shape.kv_heads, shape.head_dim)
    # Laid out as a model's projections are: rows first, then heads.
    return LayerStates(
        query=random_rows(rows.row_count, shape.heads, shape.head_dim).transpose(0, 1),
        key=keys[own].view(by_head).transpose(0, 1),
        value=values[own].view(by_head).transpose(0, 1),
        keys=keys,
        values=values,
    )
