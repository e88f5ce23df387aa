"""The sampling law and its noise on arrays. Oracles: the scalar law, ``core/protocol/sampling``;
for rows of a large vocabulary, the same with everything sorted and summed.

float32 against float64 may order two nearly equal scores differently; the examples draw logits on
a grid and noise from a hash, so such a tie would be found once and then be a fact of the test.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.protocol.sampling import (
    SamplingParams,
    TokenCounts,
    choose,
    gumbel,
    noise_bits,
    warp,
)
from edgespec.sampling.arrays import Workspace, best_candidates, gumbel_noise
from edgespec.sampling.arrays import noise_bits as array_noise_bits

VOCABULARY_SIZE = 40
Values = np.ndarray[Any, np.dtype[np.float32]]
ROWS = st.lists(
    st.integers(-200, 200).map(lambda n: n / 16), min_size=VOCABULARY_SIZE, max_size=VOCABULARY_SIZE
)
IDS = st.integers(0, VOCABULARY_SIZE - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 3, 20, 40, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.dictionaries(IDS | st.just(10**6), st.sampled_from([-3.0, 2.5]), max_size=3),
    seed=st.integers(0, (1 << 64) - 1),
)


def row(values: list[float]) -> Values:
    return np.array(values, dtype=np.float32)


@given(ROWS, PARAMS, st.integers(0, 10**6), st.lists(IDS, max_size=9), st.lists(IDS, max_size=9))
def test_the_first_guess_is_the_scalar_choice(
    values: list[float], params: SamplingParams, position: int, prompt: list[int], output: list[int]
) -> None:
    logits = row(values)
    counts = TokenCounts.of(VOCABULARY_SIZE, prompt, output)
    for width in (1, 3):
        found = best_candidates(logits, params, position, width, counts)
        assert found[0].token == choose(values, params, position, prompt, output)
        assert len({candidate.token for candidate in found}) == width
    assert logits.tolist() == values


@given(ROWS, PARAMS, st.integers(0, 10**6), st.integers(1, VOCABULARY_SIZE))
def test_siblings_are_the_best_perturbed_scores_in_order(
    values: list[float], params: SamplingParams, position: int, width: int
) -> None:
    scores = warp(values, params)
    inside = {token for token, score in enumerate(scores) if score > -math.inf}
    found = best_candidates(row(values), params, position, width)
    tokens = [candidate.token for candidate in found]
    count = min(width, len(inside))
    assert set(tokens[:count]) <= inside
    assert not set(tokens[count:]) & inside

    def perturbed(token: int) -> float:
        noise = 0.0 if params.greedy else gumbel(noise_bits(params.seed, position, token))
        return scores[token] + noise

    kept = [perturbed(token) for token in tokens[:count]]
    assert kept == sorted(kept, reverse=True)
    rest = max((perturbed(token) for token in inside - set(tokens)), default=-math.inf)
    assert kept[-1] >= rest - 1e-4


@given(ROWS, PARAMS, st.integers(0, 10**6))
def test_logprobs_are_those_of_the_warped_distribution(
    values: list[float], params: SamplingParams, position: int
) -> None:
    scores = warp(values, params)
    total = math.log(math.fsum(math.exp(score) for score in scores if score > -math.inf))
    found = best_candidates(row(values), params, position, 5)
    inside = [candidate for candidate in found if scores[candidate.token] > -math.inf]
    for candidate in inside:
        assert candidate.logprob == pytest.approx(scores[candidate.token] - total, abs=1e-4)
    for candidate in found[len(inside) :]:
        assert math.isfinite(candidate.logprob)
        assert candidate.logprob <= min(known.logprob for known in inside) + 1e-5


@pytest.mark.parametrize("min_p", [5e-324, 1e-60])
@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_tiny_shares_and_extreme_penalties_warn_of_nothing(min_p: float, penalty: float) -> None:
    """Warnings are errors in this suite."""
    params = SamplingParams(
        temperature=1e-6, min_p=min_p, top_p=5e-324, repetition_penalty=penalty, seed=3
    )
    logits = row([60.0, -70.0, 65.0, 0.0])
    [best] = best_candidates(logits, params, 4, 1, TokenCounts.of(3, (0, 1), (2,)))
    assert best.token == choose(logits.tolist(), params, 4, (0, 1), (2,))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=rf"no finite scores: the largest is {bad}"):
        best_candidates(row([0.0, bad]), SamplingParams(), 4, 1)


def expected(logits: Values, params: SamplingParams, position: int, width: int) -> list[int]:
    """Token ids, best first, by whole sorts; as ``warp`` says it."""
    scores = (logits - logits.max()) / np.float32(params.temperature)
    ranked = np.argsort(-scores, kind="stable")
    ranked = ranked[scores[ranked] > -np.inf]
    inside = ranked
    if 0 < params.top_k < inside.size:
        inside = inside[scores[inside] >= scores[inside[params.top_k - 1]]]
    if params.top_p < 1.0:
        mass = np.cumsum(np.exp(scores[inside]), dtype=np.float64)
        inside = inside[: int(np.searchsorted(mass, params.top_p * mass[-1])) + 1]
    if params.min_p > 0.0:
        inside = inside[scores[inside] >= np.float32(np.log(params.min_p))]
    perturbed = scores + gumbel_noise(params.seed, position, np.arange(scores.size))
    outside = np.setdiff1d(ranked, inside)

    def best(ids: np.ndarray[Any, np.dtype[np.intp]]) -> list[int]:
        ids = np.sort(ids)
        found: list[int] = ids[np.argsort(-perturbed[ids], kind="stable")].tolist()
        return found

    return (best(inside) + best(outside))[:width]


@pytest.mark.parametrize("seed", range(16))
def test_nothing_is_lost_of_any_row(seed: int) -> None:
    """Rows of sizes that no part, probe or block divides: a bulk, a few groups above it, ties, a
    peak over a plain, tokens that cannot be."""
    dice, work = np.random.default_rng(seed), Workspace()
    for position in range(8):
        size = int(dice.integers(3_000, 90_000))
        logits = dice.standard_normal(size) * 10.0 ** dice.uniform(-2, 1.5)
        for _ in range(dice.integers(0, 4)):
            group = dice.integers(0, size, dice.integers(1, 1 + size // 10))
            logits[group] += dice.uniform(-10, 30)
        if dice.random() < 0.3:
            logits = np.round(logits, int(dice.integers(0, 2)))
        if dice.random() < 0.3:
            logits = np.sort(logits)
        if dice.random() < 0.2:
            logits[77] = logits.max() + 9.0
        if dice.random() < 0.2:
            logits[dice.random(size) < dice.choice([0.6, 0.9999])] = -np.inf
            logits[:3] = 1.0
        logits = logits.astype(np.float32)
        params = SamplingParams(
            temperature=float(dice.choice([0.3, 0.7, 1.0, 1.9])),
            top_k=int(dice.choice([0, 0, 2, 2000])),
            top_p=float(dice.choice([0.05, 0.5, 0.9, 0.9999, 1.0])),
            min_p=float(dice.choice([0.0, 0.0, 0.05])),
            seed=int(dice.integers(1 << 62)),
        )
        for width in (1, 4):
            found = best_candidates(logits, params, position, width, None, work)
            assert [one.token for one in found] == expected(logits, params, position, width)


SEEDS = st.integers(0, (1 << 64) - 1)
POSITIONS = st.integers(0, 1 << 40)


@given(SEEDS, POSITIONS, st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=20))
def test_integers_agree_bit_for_bit(seed: int, position: int, tokens: list[int]) -> None:
    got = array_noise_bits(seed, position, np.array(tokens, dtype=np.int64))
    assert got.tolist() == [noise_bits(seed, position, token) for token in tokens]
