"""The cost models, term by term and with what the corrections do; optimal shares, against a general
solver and in closed form; the matching, which lowers the cost until no change is left that does."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.optimize import minimize

from edgespec_uara import cost as co
from edgespec_uara.cost import (
    CorrectedCost,
    CostModel,
    PaperCost,
    Weights,
    device_costs,
    objective,
    rtt_s,
    sinr,
    uniform,
    weighted,
)
from edgespec_uara.methods import Steps, best_gain, two_phase_matching
from edgespec_uara.world import UaraSettings, UaraWorld
from tests.uara.small import COSTS, snapshot, terms


def test_the_printed_objective_is_the_papers_formula() -> None:
    """Worked out for each device in SI units, without the arrays of ``Terms``."""
    now, cost = snapshot(3), PaperCost()
    now = replace(now, queue_slots=np.linspace(0.0, 1.5, 4))
    decision = uniform(cost.terms(now), np.arange(24) % 4)
    found = device_costs(cost.terms(now), decision)
    for i in range(24):
        j, y, z = i % 4, 1 / 6, 1 / 6
        noise_w = 10 ** (-174 / 10 - 3) * 10e6 / 4
        snr = now.gains[i, j] * now.transmit_w[i] / noise_w
        rate = y * (10e6 / 4) * np.log2(1 + snr)
        d_md = now.draft_flop[i] / now.device_flops[i]
        d_es = now.queue_slots[j] * 2.0 + now.verify_flop[i] / (z * now.server_flops[j])
        gap_ms = 1e3 * (d_md - now.upload_bits[i] / rate)
        energy_mj = now.draft_flop[i] / 1e9 + 2.6 * y * 1e3 * now.transmit_w[i]
        wanted = 1e3 * (d_md + d_es) + 1e-2 * gap_ms**2
        wanted += 60.0 * energy_mj / now.battery_percent[i]
        assert found[i] == pytest.approx(wanted, rel=1e-9)


def test_the_corrected_cost_adds_what_the_paper_leaves_out() -> None:
    now = snapshot(1)
    printed, corrected = PaperCost().terms(now), CorrectedCost().terms(now)
    assert np.all(sinr(now) < now.snr)
    assert np.all(corrected.uplink > printed.uplink)
    once_ms = 1e3 * now.passes[:, None] * rtt_s(now)
    assert np.all(corrected.delay > printed.delay + once_ms)
    # Energy is power times time on air, in which the share cancels.
    assert not corrected.power.any()


def test_nothing_waits_for_the_uplink_in_the_printed_delay() -> None:
    given, everyone = terms(2), np.arange(24)
    decision = uniform(given, everyone % 4)
    late_ms = given.uplink[everyone, everyone % 4] * 6 - given.draft
    assert (late_ms > 0).any()
    assert (late_ms < 0).any()
    waited = co.delays(given, decision) - co.printed_delays(given, decision)
    assert waited == pytest.approx(np.maximum(late_ms, 0.0))


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)
def test_a_decision_that_gives_too_much_is_refused(cost: PaperCost) -> None:
    decision = uniform(cost.terms(snapshot()), np.arange(24) % 4)
    decision.check(4)
    for wrong, said in (
        (replace(decision, bandwidth=decision.bandwidth * 1.01), "gives 1.01"),
        (replace(decision, compute=decision.compute * 1.01), "of its compute"),
        (replace(decision, compute=decision.compute * 0.0), "above 0"),
        (replace(decision, association=decision.association + 1), "outside 0 to 3"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong.check(4)


def test_work_that_does_not_fit_waits() -> None:
    world = UaraWorld(UaraSettings(devices=60, servers=3), 0)
    before = world.snapshot
    after = world.advance(np.zeros(60, dtype=np.int64))
    wanted = before.verify_flop.sum() / before.server_flops[0] / 2.0 - 1.0
    assert after.queue_slots == pytest.approx([wanted, 0.0, 0.0])
    assert wanted > 0


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)
@pytest.mark.parametrize("seed", [0, 7])
def test_a_general_solver_finds_the_same(cost: co.CostModel, seed: int) -> None:
    """One server, few devices, scipy's SLSQP over both kinds of shares at once."""
    given = cost.terms(snapshot(seed, devices=5, servers=2))
    association = np.zeros(5, dtype=np.int64)

    scale = co.objective(given, co.uniform(given, association))

    def value(logs: np.ndarray) -> float:
        shares = np.exp(logs)
        return co.objective(given, co.Decision(association, shares[:5], shares[5:])) / scale

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
    decision = co.optimal(given, association)
    assert co.objective(given, decision) / scale == pytest.approx(found.fun, rel=1e-5)
    assert co.objective(given, decision) / scale <= found.fun + 1e-7


def test_compute_follows_the_square_root_rule() -> None:
    given = terms(4)
    association = np.zeros(24, dtype=np.int64)
    decision = co.optimal(given, association)
    assert decision.compute == pytest.approx(
        np.sqrt(given.work[:, 0]) / np.sqrt(given.work[:, 0]).sum()
    )


def test_every_price_clears_its_band() -> None:
    """Where the price is not zero the band is full; each device's marginal value is the price."""
    given = terms(5, COSTS[1])
    association = np.arange(24) % 4
    everyone = np.arange(24)
    shares, prices = co.bandwidth_shares(given, everyone, association, association, 4)
    used = np.bincount(association, shares, 4)
    assert np.all(used <= 1 + 1e-9)
    assert used[prices > 0] == pytest.approx(np.ones(int((prices > 0).sum())), abs=1e-6)

    def cost(bandwidth: np.ndarray) -> np.ndarray:
        return co.device_costs(given, co.Decision(association, bandwidth, np.ones(24)))

    slope = (cost(shares * (1 + 1e-6)) - cost(shares * (1 - 1e-6))) / (2e-6 * shares)
    assert -slope == pytest.approx(prices[association], rel=1e-3, abs=1e-2)


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
    after = objective(given, weighted(weights, matched))
    assert after < before


@each_cost
def test_no_single_change_is_left_that_helps(cost: CostModel) -> None:
    """Every move and every swap, tried one by one with the whole formula."""
    given, weights = cost.terms(snapshot(1, devices=9, servers=3)), _weights(1, 9, 3)
    start = best_gain(snapshot(1, devices=9, servers=3).gains)
    matched = two_phase_matching(given, weights, start)
    at, least = matched, objective(given, weighted(weights, matched)) * (1 - 1e-6)
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
    assert np.array_equal(np.bincount(matched, minlength=4), np.bincount(start, minlength=4))


@each_cost
@pytest.mark.parametrize("seed", SEEDS)
def test_the_papers_inequality_makes_it_worse(cost: CostModel, seed: int) -> None:
    given, start = terms(seed, cost), best_gain(snapshot(seed).gains)
    even = Weights.even(given)
    right = two_phase_matching(given, even, start, Steps.SWAPS)
    printed = two_phase_matching(given, even, start, Steps.SWAPS, sign=-1.0)
    least, before, most = (objective(given, uniform(given, at)) for at in (right, start, printed))
    assert least <= before < most
