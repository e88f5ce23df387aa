"""Every attention backend, and packed weights, against attention as the definition has it.

Oracle: a reference that goes row by row in float32, reads the pool through the same tables and
makes no use of any library's attention. Every slot of the pool that no row may see holds NaN, so a
backend that reads one is found out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets import linear_layers
from edgespec.verifier.targets.canonical_attention import CanonicalAttention
from edgespec.verifier.targets.canonical_mode import HeadShape
from edgespec.verifier.targets.grouped_attention import GroupedAttention
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE, NULL_SLOT, KvPool
from edgespec.verifier.targets.linear_layers import PackedLinear
from edgespec.verifier.targets.pass_batch import Indices
from edgespec.verifier.targets.pass_plan import (
    AttentionBackend,
    BatchRows,
    LayerAttention,
    LayerStates,
    lay_out,
    write_slots,
)
from edgespec.verifier.targets.row_tiles import RowTiles
from tests.shell.tiny_checkpoints import tiny_config, write_checkpoint
from tests.shell.torch_schedules import Recorder, Serving

CPU = torch.device("cpu")
# Values are of the order of 1. A half-precision result carries its own rounding and the weights'.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
SHAPES = (HeadShape(4, 2, 16), HeadShape(3, 1, 24), HeadShape(2, 2, 8))
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "grouped": GroupedAttention,
    "canonical": lambda: CanonicalAttention(RowTiles()),
}


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


def _random_passes(
    shape: HeadShape, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[BatchRows, LayerStates]]:
    """Ragged batches of one to six sessions over a pool of one layer, with what the layer's
    projections would have made of each; one is to be used up before the next is drawn."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    pool = KvPool(1, shape.kv_heads * shape.head_dim, 96 * BLOCK_SIZE, dtype, device)
    for _ in range(6):
        batch = _random_batch(rng)
        for request in batch:
            pool.open(request.key, 1, SamplingParams())
        pool.reserve(batch)
        rows = lay_out(pool, batch)
        yield rows, _random_states(rows, shape, dtype, generator)
        for request in batch:
            pool.close(request.key)


def _random_batch(rng: random.Random) -> list[PassRequest]:
    """Of each session a chain, a tree, a prefill or none."""
    batch = []
    for index in range(rng.randrange(1, 7)):
        cached = rng.choice([0, 1, BLOCK_SIZE, rng.randrange(150)])
        feed = rng.choice([1, 1, 1, 2, rng.randrange(1, 40)])
        nodes = rng.choice([0, 0, 1, rng.randrange(12)])
        reach = rng.choice([1, 2, 12])
        parents = tuple([rng.randrange(max(-1, node - reach), node) for node in range(nodes)])
        batch.append(PassRequest(f"s{index}", cached, (1,) * feed, (1,) * nodes, parents))
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


def _check(
    backend: AttentionBackend, shape: HeadShape, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(shape.heads)
    sinks = torch.randn(shape.heads, generator=generator).mul(2.0).to(device)
    layers = (
        LayerAttention(0.25),
        LayerAttention(0.25, window=7),
        LayerAttention(0.25, window=100_000),
        LayerAttention(0.4, soft_cap=2.0),
        LayerAttention(0.25, window=40, soft_cap=5.0),
        LayerAttention(0.25, sinks=sinks),
        LayerAttention(0.25, window=7, soft_cap=3.0, sinks=sinks.to(torch.bfloat16)),
    )
    reference = ReferenceAttention()
    with torch.inference_mode():
        for rows, states in _random_passes(shape, dtype, device):
            layout, expected = backend.lay_out(rows), reference.lay_out(rows)
            for layer in layers:
                found, wanted = layout.attend(layer, states), expected.attend(layer, states)
                difference = float((found.float() - wanted.float()).abs().max())
                assert difference <= TOLERANCE[dtype], layer  # NaN differs too


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backend_computes_what_the_reference_does(
    name: str, shape: HeadShape, dtype: torch.dtype
) -> None:
    _check(BACKENDS[name](), shape, dtype, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, HeadShape(32, 8, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_attention_computes_what_the_reference_does(
    shape: HeadShape, dtype: torch.dtype
) -> None:
    _check(GroupedAttention(), shape, dtype, torch.device("cuda"))


@pytest.mark.parametrize("packed", [False, True])
def test_random_serving_has_the_tokens_and_logits_of_the_reference(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged passes, trees, rollbacks, prefix hits, evictions; with plain weights in the second."""
    monkeypatch.setattr(linear_layers, "LEAST_WEIGHTS", 1)
    folder = write_checkpoint(tmp_path, tiny_config(tie_word_embeddings=not packed))
    one, two = (Recorder(folder, canonical=False, packed=pack) for pack in (packed, False))
    packs = [
        sum(isinstance(part, PackedLinear) for part in each.target._model.modules())
        for each in (one, two)
    ]
    assert packs == [15 if packed else 0, 0]
    assert one.target.mode.endswith(", packed weights") == packed
    two.target._attention = ReferenceAttention()

    def check() -> None:
        """Of the row's largest logit, or of 1: float32 sums are no more exact than that."""
        difference = (one.logits - two.logits).abs().amax(dim=-1)
        share = difference / two.logits.abs().amax(dim=-1).clamp(min=1.0)
        assert float(share.max()) <= 1e-5

    Serving(one.target, two.target, check, seed=3).run(300)
