"""Optimal shares: against a general solver, against chance, and in closed form."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from edgespec_uara.cost import (
    CostModel,
    Decision,
    bandwidth_shares,
    device_costs,
    objective,
    optimal,
    uniform,
)
from tests.uara.small import COSTS, snapshot, terms


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)
@pytest.mark.parametrize("seed", [0, 7])
def test_a_general_solver_finds_the_same(cost: CostModel, seed: int) -> None:
    """One server, few devices, scipy's SLSQP over both kinds of shares at once."""
    given = cost.terms(snapshot(seed, devices=5, servers=2))
    association = np.zeros(5, dtype=np.int64)

    scale = objective(given, uniform(given, association))

    def value(logs: np.ndarray) -> float:
        shares = np.exp(logs)
        return objective(given, Decision(association, shares[:5], shares[5:])) / scale

    found = minimize(
        value,
        np.full(10, np.log(0.15)),
        method="SLSQP",
        bounds=[(-9.0, 0.0)] * 10,
        constraints=[
            {"type": "ineq", "fun": lambda logs: 1 - np.exp(logs[:5]).sum()},
            {"type": "ineq", "fun": lambda logs: 1 - np.exp(logs[5:]).sum()},
        ],
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert found.success, found.message
    decision = optimal(given, association)
    assert objective(given, decision) / scale == pytest.approx(found.fun, rel=1e-5)
    assert objective(given, decision) / scale <= found.fun + 1e-7


def test_compute_follows_the_square_root_rule() -> None:
    given = terms(4)
    association = np.zeros(24, dtype=np.int64)
    decision = optimal(given, association)
    assert decision.compute == pytest.approx(
        np.sqrt(given.work[:, 0]) / np.sqrt(given.work[:, 0]).sum()
    )


def test_every_price_clears_its_band() -> None:
    """Where the price is not zero the band is full; each device's marginal value is the price."""
    given = terms(5, COSTS[1])
    association = np.arange(24) % 4
    everyone = np.arange(24)
    shares, prices = bandwidth_shares(given, everyone, association, association, 4)
    used = np.bincount(association, shares, 4)
    assert np.all(used <= 1 + 1e-9)
    assert used[prices > 0] == pytest.approx(np.ones(int((prices > 0).sum())), abs=1e-6)

    def cost(bandwidth: np.ndarray) -> np.ndarray:
        return device_costs(given, Decision(association, bandwidth, np.ones(24)))

    slope = (cost(shares * (1 + 1e-6)) - cost(shares * (1 - 1e-6))) / (2e-6 * shares)
    assert -slope == pytest.approx(prices[association], rel=1e-3, abs=1e-2)
