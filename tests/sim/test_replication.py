"""How often an interval holds what it should, on made-up worlds whose speed-up is known."""

from __future__ import annotations

import math
import random

import pytest

from edgespec_sim.replication import (
    FIRST,
    MOST_SEEDS,
    Interval,
    Total,
    mean_interval,
    seeds_wanted,
    speedup,
)

BASE_S, ARM_S = 0.025, 0.016
LUCK, SCATTER = 0.15, 0.1
"""Deviation of a world's difficulty and of its requests, in logarithms."""


def world(dice: random.Random) -> tuple[Total, Total]:
    """One seed: both arms feel its difficulty, and complete different numbers of requests."""
    luck = dice.gauss(0.0, LUCK)
    base_s, arm_s = BASE_S * math.exp(luck / 2), ARM_S * math.exp(luck)
    totals = []
    for mean_s in (base_s, arm_s):
        count = dice.randint(20, 40)
        times_s = [mean_s * math.exp(dice.gauss(0.0, SCATTER)) for _ in range(count)]
        totals.append(Total(sum(times_s), count))
    return totals[0], totals[1]


TRUTH = BASE_S * math.exp((LUCK / 2) ** 2 / 2) / (ARM_S * math.exp(LUCK**2 / 2))


def interval(worlds: list[tuple[Total, Total]]) -> Interval:
    _, found = speedup([base for base, _ in worlds], [arm for _, arm in worlds])
    assert found is not None
    return found


def holds(found: Interval) -> bool:
    return found.low <= TRUTH <= found.high


@pytest.mark.parametrize("count", [4, 8, 16])
def test_of_a_fixed_number_of_seeds_95_percent_hold_the_truth(count: int) -> None:
    dice = random.Random(count)
    held = sum(holds(interval([world(dice) for _ in range(count)])) for _ in range(600))
    assert 0.92 <= held / 600 <= 0.975


def test_looking_before_deciding_costs_little() -> None:
    """Seeds are added until the interval is narrow: at least 90 of 100 hold, and it is narrow."""
    dice, held = random.Random(1), 0
    for _ in range(200):
        worlds = [world(dice) for _ in range(FIRST)]
        while (wanted := seeds_wanted(len(worlds), interval(worlds).half_width, 0.05)) > len(
            worlds
        ):
            worlds += [world(dice) for _ in range(wanted - len(worlds))]
        assert interval(worlds).half_width <= 0.05
        held += holds(interval(worlds))
    assert held / 200 >= 0.9


def test_a_mean_interval_is_the_textbooks() -> None:
    low, high = mean_interval([1.0, 2.0, 3.0])
    assert (low + high) / 2 == pytest.approx(2.0)
    assert high - 2.0 == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert mean_interval([5.0]) == (5.0, 5.0)


def test_more_seeds_are_asked_for_until_it_is_narrow_or_enough() -> None:
    assert seeds_wanted(1, None, 0.05) == FIRST
    assert seeds_wanted(FIRST, 0.04, 0.05) == FIRST
    assert seeds_wanted(FIRST, 0.10, 0.05) == 4 * FIRST, "at most four times as many at once"
    assert seeds_wanted(20, 0.06, 0.05) == math.ceil(1.1 * 20 * 1.44)
    assert seeds_wanted(20, None, 0.05) == 20, "nothing can be compared, so nothing is waited for"
    assert seeds_wanted(200, 0.5, 0.05) == MOST_SEEDS
    assert seeds_wanted(MOST_SEEDS, 0.5, 0.05) == MOST_SEEDS
