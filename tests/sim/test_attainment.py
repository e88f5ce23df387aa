"""Intervals of shares and quantiles hold the truth as often as they say, clusters or not.

Oracles: made-up studies whose truth is known; independent requests against the binomial; clusters
whose requests are all alike, which are as few as the clusters are.
"""

from __future__ import annotations

import math
import random
import statistics

import pytest

from edgespec_sim.replication import quantile_interval, share_interval


def studies(clusters: int, each: int, mixture: float) -> tuple[int, int]:
    """How many of 300 studies have the truth in their interval: of the p95, and of the share below
    it. ``mixture``: how much of a value is its cluster's own."""
    dice = random.Random(f"{clusters}/{each}/{mixture}")
    limit = statistics.NormalDist().inv_cdf(0.95)
    quantiles = shares = 0
    for _ in range(300):
        study = []
        for _ in range(clusters):
            own = dice.gauss(0.0, 1.0)
            study.append(
                [
                    math.sqrt(mixture) * own + math.sqrt(1.0 - mixture) * dice.gauss(0.0, 1.0)
                    for _ in range(each)
                ]
            )
        found = quantile_interval(study, 0.95)
        assert found is not None
        quantiles += found[1] <= limit <= found[2]
        _, (low, high) = share_interval(
            [(sum(value <= limit for value in one), len(one)) for one in study]
        )
        shares += low <= 0.95 <= high
    return quantiles, shares


@pytest.mark.parametrize("mixture", [0.0, 0.3])
def test_intervals_hold_the_truth(mixture: float) -> None:
    for found in studies(8, 60, mixture):
        assert found >= 0.88 * 300


def test_requests_that_go_together_are_fewer_than_they_look() -> None:
    apart = share_interval([(57, 60), (57, 60), (57, 60), (57, 60)])
    together = share_interval([(60, 60), (60, 60), (60, 60), (48, 60)])
    assert apart[0] == together[0] == pytest.approx(0.95)
    assert apart[1][1] - apart[1][0] < together[1][1] - together[1][0]


def test_what_never_came_is_beyond_all() -> None:
    found = quantile_interval([[1.0, 2.0, math.inf], [1.0, math.inf, math.inf]], 0.95)
    assert found is not None
    assert found[0] == found[2] == math.inf
    assert quantile_interval([[], []], 0.95) is None
