"""The vectorised shared noise. Oracle: the scalar ``core/protocol/sampling.py``."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.protocol import sampling as scalar
from edgespec.sampling import arrays as noise

SEEDS = st.integers(0, (1 << 64) - 1)
POSITIONS = st.integers(0, 1 << 40)


@given(SEEDS, POSITIONS, st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=20))
def test_integers_agree_bit_for_bit(seed: int, position: int, tokens: list[int]) -> None:
    got = noise.noise_bits(seed, position, np.array(tokens, dtype=np.int64))
    assert got.tolist() == [scalar.noise_bits(seed, position, token) for token in tokens]


@given(SEEDS, POSITIONS)
def test_a_row_is_the_noise_of_all_ids(seed: int, position: int) -> None:
    row = noise.gumbel_row(seed, position, 50)
    assert row.dtype == np.float32
    np.testing.assert_array_equal(row, noise.gumbel_noise(seed, position, np.arange(50)))
    expected = [scalar.gumbel(scalar.noise_bits(seed, position, token)) for token in range(50)]
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [0, 1, 511, 512, 1 << 31, (1 << 32) - 512, (1 << 32) - 1])
def test_the_ends_of_the_range_are_finite(bits: int) -> None:
    got = float(noise.gumbel(np.array([bits], dtype=np.uint32))[0])
    assert math.isfinite(got)
    assert got == pytest.approx(scalar.gumbel(bits), rel=1e-5)
    assert got <= noise.LARGEST_NOISE


def test_the_mean_is_that_of_a_gumbel_variate() -> None:
    row = noise.gumbel_row(7, 3, 100_000)
    assert float(row.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(row.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)
