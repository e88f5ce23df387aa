"""Does an attention backend compute what the reference computes, here and now?

Random ragged passes with trees run over a pool whose every slot that no row may see holds NaN, so
that a backend which reads one is found out. The same function serves at start-up and in tests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.attention_backend import (
    AttentionBackend,
    LayerAttention,
    LayerStates,
)
from edgespec.verifier.targets.batch_rows import BatchRows, lay_out, write_slots
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE, NULL_SLOT, KvPool
from edgespec.verifier.targets.reference_attention import ReferenceAttention

# Values are of the order of 1. A half-precision result carries its own rounding and the weights'.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_POOL_BLOCKS = 96
_CACHED_MAX = 150


@dataclass(frozen=True, slots=True)
class HeadShape:
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int


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
                        f"{backend.name} attention differs from the reference by {difference:.1e}"
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
    keys[-BLOCK_SIZE:] = values[-BLOCK_SIZE:] = 0  # the block of padding
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
