"""The sampler at full vocabulary size. Oracle: the same law with everything sorted and summed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.token_cache import TokenCache
from edgespec.sampling.arrays import (
    Workspace,
    best_candidates,
    gumbel,
    gumbel_row,
    least_bits,
)
from edgespec.sampling.token_counts import TokenCounts

VOCABULARY_SIZE = 151_936
Row = np.ndarray[Any, np.dtype[np.float32]]


def rows() -> dict[str, Row]:
    dice = np.random.default_rng(7)
    normal = dice.standard_normal(VOCABULARY_SIZE).astype(np.float32)
    peaked = normal * 2.5
    peaked[dice.integers(0, VOCABULARY_SIZE, 20)] += 12
    cut = normal * 2
    cut[dice.random(VOCABULARY_SIZE) < 0.6] = -np.inf
    cliff = normal * np.float32(1e-4)
    cliff[77] = 9.0
    return {
        "peaked": peaked,
        "broad": normal * 2,
        "flat": normal * np.float32(1e-3),
        "all equal": np.full(VOCABULARY_SIZE, 3.5, dtype=np.float32),
        "many ties": np.round(normal * 2),
        "some impossible": cut,
        "one peak over a plain": cliff,
    }


PARAMS = {
    "plain": SamplingParams(temperature=1.0, seed=5),
    "top-p": SamplingParams(temperature=0.9, top_p=0.9, seed=6),
    "small top-p": SamplingParams(temperature=1.0, top_p=0.2, seed=7),
    "nearly all": SamplingParams(temperature=1.0, top_p=0.9999, seed=7),
    "top-k and top-p": SamplingParams(temperature=0.7, top_k=2000, top_p=0.8, seed=8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05, top_p=0.95, seed=9),
    "few": SamplingParams(temperature=1.0, top_k=2, seed=10),
}


def expected(logits: Row, params: SamplingParams, position: int, width: int) -> list[int]:
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
    perturbed = scores + gumbel_row(params.seed, position, scores.size)
    outside = np.setdiff1d(ranked, inside)

    def best(ids: np.ndarray[Any, np.dtype[np.intp]]) -> list[int]:
        ids = np.sort(ids)
        found: list[int] = ids[np.argsort(-perturbed[ids], kind="stable")].tolist()
        return found

    return (best(inside) + best(outside))[:width]


@pytest.mark.parametrize("name", PARAMS)
def test_nothing_is_lost_by_looking_at_few_tokens(name: str) -> None:
    work = Workspace()
    for position, (kind, logits) in enumerate(rows().items()):
        found = best_candidates(logits, PARAMS[name], position, 4, None, work)
        tokens = [candidate.token for candidate in found]
        assert tokens == expected(logits, PARAMS[name], position, 4), kind
        [first] = best_candidates(logits, PARAMS[name], position, 1, None, work)
        assert first.token == tokens[0], kind


def test_bits_below_the_least_give_less_noise() -> None:
    bits = np.arange(0, 1 << 32, 9973, dtype=np.uint32)
    noise = gumbel(bits)
    for wanted in np.linspace(-4, 16.6, 200):
        assert noise[bits < least_bits(float(wanted))].max(initial=-9.0) < wanted
    assert (bits >= least_bits(3.0)).mean() == pytest.approx(0.0486, abs=1e-3)


def test_counts_follow_a_text_that_is_cut_back_and_goes_on() -> None:
    info = ModelInfo("m", "t", 50, 400)
    cache, dice = TokenCache(info), random.Random(3)
    cache.begin(20, SamplingParams(frequency_penalty=0.5))
    for _ in range(300):
        keep = dice.randrange(max(0, len(cache) - 5), len(cache) + 1)
        cache.advance(keep, [dice.randrange(50) for _ in range(dice.randint(1, 6))])
        if len(cache) > 390:
            cache.forget(3)
        wanted = TokenCounts.of(50, cache.prompt, cache.output)
        assert cache.counts is not None
        assert cache.counts.occurs == wanted.occurs
        assert cache.counts.in_output == wanted.in_output
