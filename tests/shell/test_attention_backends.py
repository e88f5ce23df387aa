"""Every attention backend against the reference, over random ragged passes with trees.

Oracle: ``attention_oracle.py``, which follows the definition row by row; and for that, the
definition written out once more with dense masks. Slots that no row may see hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from edgespec.verifier.targets import canonical_attention
from edgespec.verifier.targets.canonical_attention import CanonicalAttention
from edgespec.verifier.targets.canonical_mode import HeadShape
from edgespec.verifier.targets.grouped_attention import GroupedAttention
from edgespec.verifier.targets.pass_plan import (
    AttentionBackend,
    LayerAttention,
)
from edgespec.verifier.targets.row_tiles import RowTiles
from tests.shell.attention_oracle import (
    disagreement,
    random_passes,
    random_sinks,
)
from tests.shell.backend_schedules import Serving
from tests.shell.tiny_checkpoints import write_checkpoint

CPU = torch.device("cpu")
LAYERS = (
    LayerAttention(0.25),
    LayerAttention(0.25, window=7),
    LayerAttention(0.25, window=100_000),
    LayerAttention(0.4, soft_cap=2.0),
    LayerAttention(0.25, window=40, soft_cap=5.0),
)
SHAPES = (HeadShape(4, 2, 16), HeadShape(3, 1, 24), HeadShape(2, 2, 8))


def _layers(shape: HeadShape, device: torch.device = CPU) -> list[LayerAttention]:
    """``LAYERS`` without sinks, and two with."""
    sinks = random_sinks(shape, device)
    return [
        *LAYERS,
        LayerAttention(0.25, sinks=sinks),
        LayerAttention(0.25, window=7, soft_cap=3.0, sinks=sinks.to(torch.bfloat16)),
    ]


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "grouped": GroupedAttention,
    "canonical": lambda: CanonicalAttention(RowTiles()),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backend_computes_what_the_reference_does(
    name: str, shape: HeadShape, dtype: torch.dtype
) -> None:
    assert disagreement(BACKENDS[name](), shape, _layers(shape), dtype, CPU, passes=6) == ""


def test_groups_made_at_once_are_those_made_one_by_one() -> None:
    """Oracle: the layout that takes any tree, of each session by itself."""
    at_once = 0
    for seed in range(12):
        rows = next(random_passes(SHAPES[0], torch.float32, CPU, seed)).rows
        sizes = RowTiles().attention_sizes
        sessions = [rows.session(index) for index in range(len(rows.requests))]
        one_by_one = [
            g for s in sessions for g in canonical_attention._canonical_groups(s, sizes, CPU)
        ]
        found = CanonicalAttention(RowTiles()).lay_out(rows).groups
        assert len(found) == len(one_by_one)
        for ours, wanted in zip(
            sorted(found, key=lambda group: group.rows.tolist()),
            sorted(one_by_one, key=lambda group: group.rows.tolist()),
            strict=True,
        ):
            assert (ours.count, ours.least_position) == (wanted.count, wanted.least_position)
            assert torch.equal(ours.rows, wanted.rows)
            assert ours.positions is not None
            assert wanted.positions is not None
            assert torch.equal(ours.positions, wanted.positions)
            assert torch.equal(torch.cat(ours.key_slots), torch.cat(wanted.key_slots))
            assert torch.equal(torch.cat(ours.masks), torch.cat(wanted.masks))
        at_once += sum(canonical_attention._one_path(p) >= 0 for p in rows.requests.parents)
    assert at_once > 12


def test_serving_gives_the_logits_of_the_reference(tmp_path: Path) -> None:
    """Trees, rollbacks, prefix hits, evictions: ``python -m tests.shell.backend_schedules`` does
    it for 10,000 rows."""
    serving = Serving(write_checkpoint(tmp_path / "tiny"), seed=3)
    while serving.rows < 300:
        serving.step()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, HeadShape(32, 8, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_attention_computes_what_the_reference_does(
    shape: HeadShape, dtype: torch.dtype
) -> None:
    device = torch.device("cuda")
    layers = _layers(shape, device)
    assert disagreement(GroupedAttention(), shape, layers, dtype, device, passes=6) == ""
