"""The draft's sampler. Oracle: the scalar law, ``core/protocol/sampling.choose`` and ``warp``.

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

from edgespec.core.protocol.sampling import SamplingParams, choose, gumbel, noise_bits, warp
from edgespec.sampling.arrays import MAX_WIDTH, best_candidates
from edgespec.sampling.token_counts import TokenCounts

VOCABULARY_SIZE = 40
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


def row(values: list[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


@given(ROWS, PARAMS, st.integers(0, 10**6), st.lists(IDS, max_size=9), st.lists(IDS, max_size=9))
def test_the_first_guess_is_the_scalar_choice(
    values: list[float],
    params: SamplingParams,
    position: int,
    prompt: list[int],
    output: list[int],
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


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = row([1.0, 3.0, 3.0, 2.0, 3.0])
    found = best_candidates(logits, SamplingParams(), 0, 4)
    assert [candidate.token for candidate in found] == [1, 2, 4, 3]


@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 9e-7])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.1, seed=3)
    found = best_candidates(row([0.0, 1.0, 2.0]), params, 0, 2)
    assert found == best_candidates(row([0.0, 1.0, 2.0]), SamplingParams(), 0, 2)
    assert [candidate.token for candidate in found] == [2, 1]


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


def test_tokens_without_a_finite_logit_are_not_offered() -> None:
    logits = row([-math.inf, 1.0, -math.inf])
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        assert [c.token for c in best_candidates(logits, params, 0, 3)] == [1]


@pytest.mark.parametrize("width", [0, -1, MAX_WIDTH + 1])
def test_a_width_out_of_bounds_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"width is {width}"):
        best_candidates(row([0.0]), SamplingParams(), 0, width)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=rf"no finite scores: the largest is {bad}"):
        best_candidates(row([0.0, bad]), SamplingParams(), 4, 1)
