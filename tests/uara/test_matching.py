"""Searches over associations: each step helps, the quick arithmetic is exact, the slip shows."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from edgespec_uara.cost import CostModel, Weights, objective, uniform, weighted
from edgespec_uara.methods import (
    Steps,
    SwapTest,
    best_gain,
    two_phase_matching,
)
from tests.uara.small import COSTS, snapshot, terms

SEEDS = range(4)
each_cost = pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)


def _weights(seed: int, devices: int = 24, servers: int = 4) -> Weights:
    rng = np.random.default_rng(seed)
    v, q = np.exp(rng.normal(size=(2, devices, servers)))
    return Weights(v, q, rng.uniform(0.3, 1.0, servers))


@each_cost
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", Steps)
def test_matching_never_raises_the_cost(cost: CostModel, seed: int, steps: Steps) -> None:
    given, weights = terms(seed, cost), _weights(seed)
    start = np.random.default_rng(seed).integers(4, size=24)
    before = objective(given, weighted(weights, start))
    matched = two_phase_matching(given, weights, start, steps)
    after = objective(given, weighted(weights, matched.association))
    # The sums say what the formula says.
    assert matched.cost == pytest.approx(after, rel=1e-9)
    assert after < before
    assert matched.changes > 0


@each_cost
def test_no_single_change_is_left_that_helps(cost: CostModel) -> None:
    """Every move and every swap, tried one by one with the whole formula."""
    given, weights = cost.terms(snapshot(1, devices=9, servers=3)), _weights(1, 9, 3)
    start = best_gain(snapshot(1, devices=9, servers=3).gains)
    matched = two_phase_matching(given, weights, start)
    at, least = matched.association, matched.cost * (1 - 1e-6)
    for device, server in product(range(9), range(3)):
        moved = at.copy()
        moved[device] = server
        assert objective(given, weighted(weights, moved)) >= least
    for first, second in product(range(9), repeat=2):
        swapped = at.copy()
        swapped[first], swapped[second] = at[second], at[first]
        assert objective(given, weighted(weights, swapped)) >= least


def test_swaps_keep_how_many_each_server_has() -> None:
    given, start = terms(2), best_gain(snapshot(2).gains)
    matched = two_phase_matching(given, Weights.even(given), start, Steps.SWAPS)
    assert np.array_equal(
        np.bincount(matched.association, minlength=4), np.bincount(start, minlength=4)
    )


@each_cost
@pytest.mark.parametrize("seed", SEEDS)
def test_the_papers_inequality_makes_it_worse(cost: CostModel, seed: int) -> None:
    given, start = terms(seed, cost), best_gain(snapshot(seed).gains)
    even = Weights.even(given)
    right = two_phase_matching(given, even, start, Steps.SWAPS)
    printed = two_phase_matching(given, even, start, Steps.SWAPS, SwapTest.AS_PRINTED)
    before = objective(given, uniform(given, start))
    assert right.cost <= before < printed.cost
