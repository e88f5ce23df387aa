"""One row of logits to one token: parameters, truncation, penalties, and the law of the draws."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.protocol.sampling import (
    MASK_32,
    SamplingParams,
    choose,
    gumbel,
    noise_bits,
    warp,
)

ROWS = st.lists(st.floats(-20, 20), min_size=1, max_size=24)


def _kept(scores: list[float]) -> set[int]:
    return {token for token, score in enumerate(scores) if score > -math.inf}


def _probabilities(scores: list[float]) -> list[float]:
    weights = [math.exp(s - max(scores)) for s in scores]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature is -0.1"),
        ("temperature", math.nan, "temperature is nan"),
        ("top_k", -1, "top_k is -1"),
        ("top_p", 0.0, "top_p is 0.0"),
        ("top_p", 1.5, "top_p is 1.5"),
        ("min_p", 1.1, "min_p is 1.1"),
        ("repetition_penalty", 0.0, "repetition_penalty is 0.0"),
        ("repetition_penalty", 0.009, r"repetition_penalty is 0.009, but must be in \[0.01, 100"),
        ("presence_penalty", 101.0, "presence_penalty is 101.0"),
        ("frequency_penalty", -101.0, "frequency_penalty is -101.0"),
        ("seed", 1 << 64, "seed is 18446744073709551616"),
        ("max_tokens", 0, "max_tokens is 0"),
        ("stop_token_ids", tuple(range(65)), "number of stop_token_ids is 65"),
        ("stop", ("",), "stop must not hold an empty string"),
        ("stop", "ab", "stop is 'ab', but must be a tuple of texts"),
        ("logit_bias", {3: 2e4}, r"logit_bias\[3\] is 20000.0"),
    ],
)
def test_a_parameter_out_of_bounds_is_named(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 9.9e-7])
def test_a_temperature_below_the_least_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, seed=4)
    assert params.greedy
    assert not SamplingParams(temperature=1e-6).greedy
    for logits in ([1.0, 3.0, 3.0, 2.0], [1e30, 2e30, 2e30, 0.0]):
        assert [choose(logits, params, position) for position in range(9)] == [1] * 9


@given(ROWS, st.floats(0.01, 1.0))
def test_top_p_reaches_its_mass_and_no_smaller_set_does(row: list[float], p: float) -> None:
    kept = _kept(warp(row, SamplingParams(temperature=1.0, top_p=p)))
    probabilities = _probabilities(row)
    mass = sum(probabilities[token] for token in kept)
    assert mass >= p - 1e-9
    assert mass - min(probabilities[token] for token in kept) < p + 1e-9


@given(ROWS, st.integers(1, 30))
def test_top_k_keeps_k_tokens_and_ties(row: list[float], k: int) -> None:
    kept = _kept(warp(row, SamplingParams(temperature=1.0, top_k=k)))
    assert len(kept) >= min(k, len(row))
    assert min(row[t] for t in kept) >= max([row[t] for t in set(range(len(row))) - kept] or [-99])


def test_min_p_is_a_share_of_the_best() -> None:
    logits = [math.log(p) for p in (0.6, 0.25, 0.1, 0.05)]
    assert _kept(warp(logits, SamplingParams(temperature=1.0, min_p=0.2))) == {0, 1}


def test_temperature_comes_before_truncation() -> None:
    logits = [math.log(p) for p in (0.6, 0.3, 0.1)]
    assert _kept(warp(logits, SamplingParams(temperature=1.0, top_p=0.7))) == {0, 1}
    assert _kept(warp(logits, SamplingParams(temperature=0.5, top_p=0.7))) == {0}


def test_repetition_counts_prompt_and_output_the_others_output_only() -> None:
    row = [2.0, -2.0, 2.0, -2.0]
    repetition = SamplingParams(repetition_penalty=2.0)
    assert warp(row, repetition, [0], [1, 1]) == [1.0, -4.0, 2.0, -2.0]
    additive = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert warp(row, additive, [0], [1, 1, 2]) == [2.0, -3.0, 1.25, -2.0]


def test_bias_comes_first_and_ignores_ids_outside_the_vocabulary() -> None:
    params = SamplingParams(logit_bias={1: 5.0, 99: 5.0}, repetition_penalty=2.0)
    assert warp([1.0, 1.0], params, [1]) == [1.0, 3.0]
    assert choose([1.0, 0.0], params, 0) == 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
    ],
)
def test_draws_follow_the_warped_softmax(params: SamplingParams) -> None:
    row = [1.5, 0.2, -0.3, 2.0, 0.9, 0.0, 1.1, -1.0]
    seeds, positions = range(10), range(1000)
    counts = Counter(
        choose(row, replace(params, seed=seed), position)
        for seed in seeds
        for position in positions
    )
    draws = len(seeds) * len(positions)
    expected = [draws * p for p in _probabilities(warp(row, params))]
    assert set(counts) <= {token for token, mean in enumerate(expected) if mean > 0}
    cells = [(counts[token] - mean) ** 2 / mean for token, mean in enumerate(expected) if mean]
    # Mean k - 1, variance 2 (k - 1): five deviations out, with fixed seeds.
    assert sum(cells) < len(cells) - 1 + 5 * math.sqrt(2 * len(cells))


GOLDEN_SMALL = [477780777, 792694223, 1930745897]

GOLDEN_LARGE = 3153832169


def test_golden_bits() -> None:
    """Both sides of a link must agree on these for ever: a change is a new protocol version."""
    assert [noise_bits(0, 0, 0), noise_bits(0, 0, 1), noise_bits(0, 1, 0)] == GOLDEN_SMALL
    assert noise_bits((1 << 64) - 1, 1 << 20, 151_935) == GOLDEN_LARGE


@pytest.mark.parametrize("high", [0, 1])
def test_both_halves_of_the_seed_count(high: int) -> None:
    seeds = [low + (high << 32) for low in range(50)] + [h << 32 for h in range(2, 50)]
    assert len({noise_bits(seed, 3, 5) for seed in seeds}) == len(seeds)


def test_gumbel_is_finite_at_both_ends() -> None:
    low, high = gumbel(0), gumbel(MASK_32)
    assert low == pytest.approx(-math.log(math.log(2.0**24)))
    assert 16.0 < high < 17.0


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
