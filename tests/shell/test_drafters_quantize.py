"""Block-wise quantisation: what is lost, what is held exactly, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.device.export.quantize import BLOCK_SIZE, dequantize_matrix, quantize_matrix


@pytest.mark.parametrize(("bits", "limit"), [(4, 0.11), (8, 0.007)])
def test_quantisation_loses_little(bits: int, limit: float) -> None:
    weight = np.random.default_rng(2).standard_normal((100, 96)).astype(np.float32)
    matrix = quantize_matrix(weight, bits)
    assert matrix.packed.shape == (100, 3, BLOCK_SIZE * bits // 8)
    rounded = dequantize_matrix(matrix)
    assert rounded.shape == weight.shape
    assert np.sqrt(np.mean((rounded - weight) ** 2)) < limit


@pytest.mark.parametrize("bits", [4, 8])
def test_what_a_block_can_hold_is_held_exactly(bits: int) -> None:
    half = 1 << (bits - 1)
    values = np.linspace(-half, half - 1, BLOCK_SIZE).round().astype(np.float32)
    weight = np.stack([values * 0.25, -values * 0.25, np.zeros(BLOCK_SIZE, np.float32)])
    np.testing.assert_allclose(
        dequantize_matrix(quantize_matrix(weight, bits)), weight, rtol=1e-6, atol=0
    )


def test_the_fit_beats_the_plain_scale() -> None:
    weight = np.random.default_rng(3).standard_normal((64, 320)).astype(np.float32)
    blocks = weight.reshape(64, -1, BLOCK_SIZE)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / 7
    plain = (np.rint(blocks / scale) * scale).reshape(weight.shape)
    fitted = dequantize_matrix(quantize_matrix(weight, 4))
    assert np.mean((fitted - weight) ** 2) < 0.85 * np.mean((plain - weight) ** 2)


def test_refused_quantisations() -> None:
    with pytest.raises(ValueError, match="bits is 5"):
        quantize_matrix(np.zeros((2, 32), np.float32), 5)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_last_block_that_is_not_full_changes_nothing(bits: int) -> None:
    weight = np.random.default_rng(4).standard_normal((5, 41)).astype(np.float32)
    rounded = dequantize_matrix(quantize_matrix(weight, bits))
    assert rounded.shape == weight.shape
    filled = np.pad(weight, ((0, 0), (0, 23)))
    np.testing.assert_array_equal(dequantize_matrix(quantize_matrix(filled, bits))[:, :41], rounded)
