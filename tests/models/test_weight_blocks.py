"""Rounding of weights in blocks.

Oracle: the definition, block by block in float64: every factor and sign of the grid, and every
share of a block's range, with the least-squares scale.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.models import weight_blocks
from edgespec.models.weight_blocks import RoundingLoss, quantize_matrix, round_matrix

GRIDS = {4: weight_blocks._GRID_4, 8: weight_blocks._GRID_8}


def make_weight(rows: int, columns: int) -> NDArray[np.float32]:
    weight = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    weight[0] = 0.0
    weight[1] = np.abs(weight[1]) + 2.0  # a block whose middle is far from zero
    weight[2, 5] = 40.0
    return weight


def list_errors(block: NDArray[np.float64], bits: int, *, shifts: bool) -> Iterator[float]:
    """Yield the squared error of each way of rounding one block."""
    half, peak = 1 << (bits - 1), np.abs(block).max()
    for factor in GRIDS[bits]:
        for sign in (-1.0, 1.0):
            scale = sign * factor * peak / half if peak else 1.0
            yield measure_error(block, np.clip(np.rint(block / scale), -half, half - 1))
    for share in weight_blocks._RANGE_SHARES if shifts else ():
        low, high = min(block.min(), 0.0), max(block.max(), 0.0)
        step = max((high - low) * share / 15, 1e-30)
        zero = np.clip(np.rint(-(low + (high - low) * (1 - share) / 2) / step), 0, 15)
        yield measure_error(block, np.clip(np.rint(block / step) + zero, 0, 15) - zero)


def measure_error(block: NDArray[np.float64], integers: NDArray[np.float64]) -> float:
    scale = float(block @ integers) / max(1.0, float(integers @ integers))
    return float(np.square(block - scale * integers).sum())


@pytest.mark.parametrize("shifts", [False, True], ids=["symmetric", "with zero points"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 96, 80])
def test_each_block_has_the_least_error(bits: int, columns: int, shifts: bool) -> None:
    weight = make_weight(9, columns)
    found = round_matrix(weight, bits, shifts=shifts)
    left = (found.values() - weight).astype(np.float64)
    missing = -columns % 32
    blocks = np.pad(weight.astype(np.float64), ((0, 0), (0, missing))).reshape(-1, 32)
    errors = np.square(np.pad(left, ((0, 0), (0, missing)))).reshape(-1, 32).sum(axis=1)
    shifts = shifts and bits == 4
    best = [min(list_errors(block, bits, shifts=shifts)) for block in blocks]
    assert errors == pytest.approx(best, rel=1e-3, abs=1e-9)
    assert math.isclose(found.squares, float(np.square(blocks).sum()), rel_tol=1e-5)
    assert math.isclose(found.lost_squares, float(errors.sum()), rel_tol=1e-2, abs_tol=1e-3)


def test_threads_and_parts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight(40, 96)
    whole = round_matrix(weight, 4)
    monkeypatch.setattr(weight_blocks, "_BLOCKS_AT_ONCE", 7)
    for threads in (1, 3):
        monkeypatch.setattr(weight_blocks, "_MAX_THREADS", threads)
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        found = round_matrix(weight, 4)
        assert np.array_equal(found.integers, whole.integers)
        assert np.array_equal(found.scales, whole.scales)
        assert found.zero_points is not None
        assert whole.zero_points is not None
        assert np.array_equal(found.zero_points, whole.zero_points)


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="bits is 5, but must be 4 or 8"):
        quantize_matrix(make_weight(3, 32), 5)


def test_the_loss_is_named_by_kind_of_matrix() -> None:
    loss = RoundingLoss()
    assert loss.relative_error == 0.0
    for name, squares, lost in (
        ("model.embed_tokens", 100.0, 1.0),
        ("model.layers.0.self_attn.qkv_proj", 50.0, 0.5),
        ("layer.3.out", 50.0, 0.5),
        ("model.layers.0.mlp.down_proj", 400.0, 16.0),
        ("lm_head", 0.0, 0.0),
    ):
        loss.add(name, squares, lost)
    errors = {"embedding": 0.1, "attention": 0.1, "MLP": 0.2, "head": 0.0}
    assert loss.relative_errors() == pytest.approx(errors)
    assert str(loss) == (
        "rounding changed the weights by 17.3%"
        " (embedding 10.0%, attention 10.0%, MLP 20.0%, head 0.0%)"
    )
