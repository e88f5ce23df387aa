"""The coverage of intervals, with clusters or without.

Oracle: made-up worlds with a known speed-up, and studies with known shares and quantiles.
Independent requests are compared with the binomial law. Clusters whose requests are all alike count
as one observation each.
"""

from __future__ import annotations

import math
import random
import statistics

import pytest

from edgespec_sim import replication
from edgespec_sim.replication import quantile_interval, share_interval
from tests.present import require

BASE_S, ARM_S = 0.025, 0.016
LUCK, SCATTER = 0.15, 0.1
"""Deviation of a world's difficulty and of its requests, in logarithms."""


def draw_world(dice: random.Random) -> tuple[replication.TpotTotal, replication.TpotTotal]:
    """Make one seed's world: its difficulty affects both arms, which complete different numbers of
    requests."""
    luck = dice.gauss(0.0, LUCK)
    base_s, arm_s = BASE_S * math.exp(luck / 2), ARM_S * math.exp(luck)
    totals = []
    for mean_s in (base_s, arm_s):
        count = dice.randint(20, 40)
        times_s = [mean_s * math.exp(dice.gauss(0.0, SCATTER)) for _ in range(count)]
        totals.append(replication.TpotTotal(sum(times_s), count))
    return totals[0], totals[1]


TRUTH = BASE_S * math.exp((LUCK / 2) ** 2 / 2) / (ARM_S * math.exp(LUCK**2 / 2))


def measure_interval(
    worlds: list[tuple[replication.TpotTotal, replication.TpotTotal]],
) -> replication.Interval:
    _, found = replication.measure_speedup([base for base, _ in worlds], [arm for _, arm in worlds])
    return require(found)


def covers_truth(found: replication.Interval) -> bool:
    return found.low <= TRUTH <= found.high


@pytest.mark.parametrize("count", [4, 8, 16])
def test_of_a_fixed_number_of_seeds_95_percent_hold_the_truth(count: int) -> None:
    dice = random.Random(count)
    held = sum(
        covers_truth(measure_interval([draw_world(dice) for _ in range(count)])) for _ in range(600)
    )
    assert 0.92 <= held / 600 <= 0.975


def test_looking_before_deciding_costs_little() -> None:
    """Seeds are added until the interval is narrow: at least 90 of 100 intervals cover the
    truth."""
    dice, held = random.Random(1), 0
    for _ in range(200):
        worlds = [draw_world(dice) for _ in range(replication.MIN_SEEDS)]
        while (
            wanted := replication.count_seeds_needed(
                len(worlds), measure_interval(worlds).half_width, 0.05
            )
        ) > len(worlds):
            worlds += [draw_world(dice) for _ in range(wanted - len(worlds))]
        assert measure_interval(worlds).half_width <= 0.05
        held += covers_truth(measure_interval(worlds))
    assert held / 200 >= 0.9


def test_the_t_is_the_textbooks() -> None:
    assert replication.student_t(2) == pytest.approx(4.3027, rel=1e-4)


def test_more_seeds_are_asked_for_until_it_is_narrow_or_enough() -> None:
    assert replication.count_seeds_needed(1, None, 0.05) == replication.MIN_SEEDS
    assert (
        replication.count_seeds_needed(replication.MIN_SEEDS, 0.04, 0.05) == replication.MIN_SEEDS
    )
    assert (
        replication.count_seeds_needed(replication.MIN_SEEDS, 0.10, 0.05)
        == 4 * replication.MIN_SEEDS
    ), "at most four times as many at once"
    assert replication.count_seeds_needed(20, 0.06, 0.05) == math.ceil(1.1 * 20 * 1.44)
    assert replication.count_seeds_needed(20, None, 0.05) == 20, (
        "nothing can be compared, so nothing is waited for"
    )
    assert replication.count_seeds_needed(200, 0.5, 0.05) == replication.MAX_SEEDS
    assert replication.count_seeds_needed(replication.MAX_SEEDS, 0.5, 0.05) == replication.MAX_SEEDS


def count_covering_studies(clusters: int, each: int, mixture: float) -> tuple[int, int]:
    """Count, of 300 studies, the intervals that cover the truth: of the p95, and of the share below
    it. ``mixture`` is the part of a value that its cluster determines."""
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
        found = require(quantile_interval(study, 0.95))
        quantiles += found[1] <= limit <= found[2]
        _, (low, high) = share_interval(
            [(sum(value <= limit for value in one), len(one)) for one in study]
        )
        shares += low <= 0.95 <= high
    return quantiles, shares


@pytest.mark.parametrize("mixture", [0.0, 0.3])
def test_intervals_hold_the_truth(mixture: float) -> None:
    for found in count_covering_studies(8, 60, mixture):
        assert found >= 0.88 * 300


def test_requests_that_go_together_are_fewer_than_they_look() -> None:
    apart = share_interval([(57, 60), (57, 60), (57, 60), (57, 60)])
    together = share_interval([(60, 60), (60, 60), (60, 60), (48, 60)])
    assert apart[0] == together[0] == pytest.approx(0.95)
    assert apart[1][1] - apart[1][0] < together[1][1] - together[1][0]


def test_what_never_came_is_beyond_all() -> None:
    found = require(quantile_interval([[1.0, 2.0, math.inf], [1.0, math.inf, math.inf]], 0.95))
    assert found[0] == found[2] == math.inf
    assert quantile_interval([[], []], 0.95) is None
