"""What both sides learn. Oracle: the plain formulas, over lists."""

from __future__ import annotations

import pytest

from edgespec.core.protocol.estimators import AcceptanceEstimator, SlopeEstimator
from edgespec.core.verifier.drafts import ArrivalEstimator


def test_a_slope_is_that_of_least_squares() -> None:
    xs, ys = (0.0, 4.0, 1.0, 6.0, 3.0, 2.0, 5.0, 3.0), (9.0, 1.0, 8.0, 0.0, 2.0, 5.0, 2.0, 4.0)
    slope = SlopeEstimator()
    for x, y in zip(xs, ys, strict=True):
        assert slope.get() is None  # too few
        slope.add(x, y)
    mean_x, mean_y = sum(xs) / 8, sum(ys) / 8
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    assert slope.get() == pytest.approx(covariance / sum((x - mean_x) ** 2 for x in xs))


def test_what_does_not_vary_has_no_slope() -> None:
    slope = SlopeEstimator()
    for index in range(50):
        slope.add(4.0, float(index))
    assert slope.get() is None


def test_acceptance_starts_from_the_prior_and_goes_to_the_share() -> None:
    estimator = AcceptanceEstimator()
    assert [estimator.rate(rank) for rank in range(4)] == pytest.approx([0.7, 0.1, 0.04, 0.02])
    for _ in range(400):
        estimator.add(1)
    assert estimator.rate(0) < 0.2
    assert estimator.rate(1) > 0.75
    for _ in range(400):
        estimator.add(None)
    assert estimator.rate(1) < 0.1


def test_acceptance_is_a_weighted_count() -> None:
    estimator = AcceptanceEstimator(prior=(0.5,), prior_weight=4.0, memory=0.5)
    for rank in (0, None, 0):
        estimator.add(rank)
    hits, trials = 0.25 + 1.0, 0.25 + 0.5 + 1.0
    assert estimator.rate(0) == pytest.approx((hits + 2.0) / (trials + 4.0))


def test_two_rhythms() -> None:
    arrivals = ArrivalEstimator()
    arrivals.on_useful_draft(1.0)
    arrivals.on_useful_draft(1.5)
    assert arrivals.expected_at() == pytest.approx(2.0)
    arrivals.on_miss(3.0)
    assert arrivals.expected_at() is None
    arrivals.on_useful_draft(3.25)
    assert arrivals.expected_at() == pytest.approx(3.75)
    arrivals.on_miss(4.0)
    arrivals.on_miss(9.0)  # the first one counts: the device hears of that
    assert arrivals.expected_at() == pytest.approx(4.25)
