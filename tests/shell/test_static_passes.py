"""Passes at fixed places: padding changes nothing, and what travels arrives.

Oracle: the reference attention, and the tables and slots of the host. Slots that no row may see
hold NaN.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.sampling import torch_device_copies as device_copies
from edgespec.sampling.torch_device_copies import StagedBytes
from edgespec.verifier.targets import static_pass
from edgespec.verifier.targets.attention_backend import LayerAttention
from edgespec.verifier.targets.backend_self_test import (
    HeadShape,
    disagreement,
    random_passes,
    random_sinks,
)
from edgespec.verifier.targets.block_tables import BlockTables
from edgespec.verifier.targets.graph_self_test import StaticPaged
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE, KvPool
from edgespec.verifier.targets.paged_attention import PagedAttention
from edgespec.verifier.targets.static_pass import StaticPass, bucket_of
from tests.shell.backend_schedules import Serving
from tests.shell.taped_passes import (
    TorchKernel,
    TritonKernel,
    taped,
)
from tests.shell.tiny_checkpoints import write_checkpoint

CPU = torch.device("cpu")
SHAPES = (HeadShape(4, 2, 16), HeadShape(3, 1, 24), HeadShape(2, 2, 8))
GREEDY = SamplingParams()


def _layers(shape: HeadShape) -> list[LayerAttention]:
    return [
        LayerAttention(0.25),
        LayerAttention(0.25, window=7, soft_cap=3.0, sinks=random_sinks(shape, CPU)),
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_layouts_compute_what_the_reference_does(
    shape: HeadShape, dtype: torch.dtype
) -> None:
    paged = PagedAttention(shape.heads, shape.kv_heads, CPU, TorchKernel())
    for backend in (paged, StaticPaged(paged)):
        assert disagreement(backend, shape, _layers(shape), dtype, CPU, passes=8, seed=4) == ""


def _ask_for_interpreter() -> None:
    """On a CPU the paged kernel runs in Triton's interpreter, which has to be asked for before."""
    pytest.importorskip("triton", reason="the optional package triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on a CPU the paged kernel runs with TRITON_INTERPRET=1 alone")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_paged_kernel_computes_padded_layouts(shape: HeadShape) -> None:
    _ask_for_interpreter()
    static = StaticPaged(PagedAttention(shape.heads, shape.kv_heads, CPU))
    assert disagreement(static, shape, _layers(shape), torch.float32, CPU, passes=2) == ""


def test_with_the_paged_kernel_serving_gives_the_logits_of_the_reference(tmp_path: Path) -> None:
    _ask_for_interpreter()
    serving = Serving(write_checkpoint(tmp_path / "tiny"), seed=9)
    graphs = taped(serving.targets[0], kernel=TritonKernel())
    graphs.eager_first = False
    while graphs.replayed < 3:
        serving.step()
    assert graphs.why_not == ""


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_a_pass_fits_its_bucket_and_padding_touches_nothing(seed: int) -> None:
    shape = SHAPES[0]
    rows = next(random_passes(shape, torch.float32, CPU, seed)).rows
    attention = PagedAttention(shape.heads, shape.kv_heads, CPU, TorchKernel())
    bucket = bucket_of(rows, attention)
    if bucket is None:
        assert rows.row_count > static_pass.SIZES[-1]
        return
    static = StaticPass(bucket, rows.pool, attention)
    plan, layout, count = static.plan, static.plan.attention, rows.row_count
    assert static.send(rows) == sum(
        1 + len(request.tokens) for request in rows.requests if request.sample
    )
    assert plan.tokens[0, :count].tolist() == rows.requests.tokens.tolist()
    true = plan.write_slots[:count].tolist()
    padding = plan.write_slots[count:].tolist()
    assert len(set(true)) == count
    assert {slot // BLOCK_SIZE for slot in padding} <= {rows.pool.scratch_block}
    assert rows.pool.scratch_block * BLOCK_SIZE not in true
    tiles = layout.tiles.view(-1, 3).tolist()  # type: ignore[attr-defined]
    covered = [row for _, first, some in tiles for row in range(first, first + some)]
    assert sorted(covered) == list(range(bucket.rows))
    for session, first, some in tiles[: -1 if tiles[-1][2] == 0 else None]:
        of_padding = session == len(rows.requests)
        assert (first >= count) == of_padding or some == 0
    assert int(plan.sampled_rows.max()) < count


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_tables_on_the_device_are_those_on_the_host(data: st.DataObject) -> None:
    tables = BlockTables(CPU)
    tables.expect(10, 40)
    rows = [tables.take() for _ in range(5)]
    held: dict[int, tuple[int, ...]] = dict.fromkeys(rows, ())
    before = tables.on_device()
    for _ in range(data.draw(st.integers(1, 12))):
        row = data.draw(st.sampled_from(rows))
        if data.draw(st.booleans()):
            tables.give_back(row)
            assert tables.take() == row
            held[row] = ()
        kept = held[row][: data.draw(st.integers(0, 40))]
        fresh = data.draw(st.lists(st.integers(1, 99), max_size=40 - len(kept)))
        held[row] = (*kept, *fresh)
        tables.write(row, held[row])
        if data.draw(st.booleans()):
            assert tables.on_device() is before
            for one, blocks in held.items():
                assert tables.device_copy is not None
                assert tables.device_copy[one, : len(blocks)].tolist() == list(blocks)
            assert not tables.lacking


def test_a_kept_node_reaches_its_position_though_tables_change_first() -> None:
    pool = KvPool(1, 4, 160, torch.float32, CPU)
    for key in "ab":
        pool.open(key, 1, GREEDY)
    batch = [PassRequest("a", 0, (1,), (2, 3), (-1, -1), blocks=(2,))]
    pool.reserve(batch)
    pool.data[0, 0, 2 * BLOCK_SIZE + 2] = 7.0
    pool.commit(batch[0])
    pool.keep("a", [1])
    pool.reserve([PassRequest("a", 2, (4,), blocks=(2, 3)), PassRequest("b", 0, (1,), blocks=(5,))])
    assert pool.moves().tolist() == [[2 * BLOCK_SIZE + 2], [2 * BLOCK_SIZE + 1]]
    assert pool.data[0, 0, 2 * BLOCK_SIZE + 1].tolist() == [7.0] * 4
    assert not pool.has_moves


def test_staged_bytes_send_what_was_asked_for() -> None:
    staged = StagedBytes(16, CPU)
    staged.begin()
    staged.host[:] = np.arange(16)
    staged.send(8)
    assert staged.device.tolist() == [*range(8), *[0] * 8]
    with device_copies.current_device(CPU):
        assert device_copies.to_device(np.arange(3), CPU).tolist() == [0, 1, 2]
