"""The noise is a pure function with the statistics of independent Gumbel variates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.protocol.sampling import MASK_32, gumbel, mix, noise_bits, position_keys

WORDS = st.integers(0, MASK_32)
EULER_GAMMA = 0.5772156649
GOLDEN_SMALL = [477780777, 792694223, 1930745897]
GOLDEN_LARGE = 3153832169


def test_golden_bits() -> None:
    """Both sides of a link must agree on these for ever: a change is a new protocol version."""
    assert [noise_bits(0, 0, 0), noise_bits(0, 0, 1), noise_bits(0, 1, 0)] == GOLDEN_SMALL
    assert noise_bits((1 << 64) - 1, 1 << 20, 151_935) == GOLDEN_LARGE


@given(WORDS)
def test_mix_is_invertible(value: int) -> None:
    def unshift(x: int, by: int) -> int:
        y = x
        for _ in range(32 // by + 1):
            y = x ^ (y >> by)
        return y

    inverse = unshift(mix(value), 16)
    inverse = inverse * pow(0xC2B2AE35, -1, 1 << 32) & MASK_32
    inverse = unshift(inverse, 13)
    inverse = inverse * pow(0x85EBCA6B, -1, 1 << 32) & MASK_32
    assert unshift(inverse, 16) == value


@given(WORDS, st.integers(0, 31))
def test_mix_spreads_every_bit(value: int, bit: int) -> None:
    changed = (mix(value) ^ mix(value ^ (1 << bit))).bit_count()
    assert 2 <= changed <= 30


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 21))
def test_seed_is_taken_modulo_64_bits(seed: int, position: int) -> None:
    assert position_keys(seed, position) == position_keys(seed + (1 << 64), position)


@pytest.mark.parametrize("high", [0, 1])
def test_both_halves_of_the_seed_count(high: int) -> None:
    seeds = [low + (high << 32) for low in range(50)] + [h << 32 for h in range(2, 50)]
    assert len({noise_bits(seed, 3, 5) for seed in seeds}) == len(seeds)


def test_gumbel_is_finite_at_both_ends() -> None:
    low, high = gumbel(0), gumbel(MASK_32)
    assert low == pytest.approx(-math.log(math.log(2.0**24)))
    assert 16.0 < high < 17.0


def test_variates_have_the_mean_and_variance_of_the_gumbel_law() -> None:
    sample = [gumbel(noise_bits(11, p, t)) for p in range(200) for t in range(100)]
    mean = sum(sample) / len(sample)
    variance = sum((x - mean) ** 2 for x in sample) / len(sample)
    assert mean == pytest.approx(EULER_GAMMA, abs=4 * 1.2825 / math.sqrt(len(sample)))
    assert variance == pytest.approx(math.pi**2 / 6, rel=0.06)


@pytest.mark.parametrize("shift", [1, 2, 7])
def test_positions_are_not_shifted_copies_of_each_other(shift: int) -> None:
    size = 4000
    here = [noise_bits(5, 10, t) for t in range(size)]
    there = [noise_bits(5, 10 + shift, t) for t in range(size)]
    assert not set(here) & set(there) or len(set(here) & set(there)) < 5
    x = [b / 2**32 - 0.5 for b in here]
    for lag in (0, 1, shift):
        y = [b / 2**32 - 0.5 for b in there[lag:]]
        correlation = 12 * sum(a * b for a, b in zip(x, y, strict=False)) / len(y)
        assert abs(correlation) < 4 / math.sqrt(len(y))
