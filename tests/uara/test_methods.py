"""The cost models, term by term and with their corrections; optimal shares, against a general
solver and in closed form; the matching, which lowers the cost until no change lowers it further;
the methods on paired worlds; the sweep; and the paper's own training: its reward and its network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import typer
from scipy.optimize import minimize
from typer.testing import CliRunner, Result

from edgespec_uara import cost as co
from edgespec_uara import methods, reproduce, sweep
from edgespec_uara.cost import (
    CorrectedCost,
    PaperCost,
    Terms,
    Weights,
    decide_by_weights,
    decide_evenly,
    device_costs,
    rtt_s,
    sinr,
    sum_objective,
)
from edgespec_uara.methods import Steps, best_gain, two_phase_matching
from edgespec_uara.sweep import Choices
from edgespec_uara.world import Snapshot, UaraSettings, UaraWorld

COSTS: tuple[PaperCost, ...] = (PaperCost(), CorrectedCost())


def snapshot(seed: int = 0, devices: int = 24, servers: int = 4) -> Snapshot:
    return UaraWorld(UaraSettings(devices=devices, servers=servers), seed).snapshot


def terms(seed: int = 0, cost: PaperCost = COSTS[0]) -> Terms:
    return cost.terms(snapshot(seed))


def test_the_printed_objective_is_the_papers_formula() -> None:
    """The expected cost is computed for each device in SI units, without the arrays of
    ``Terms``."""
    now, cost = snapshot(3), PaperCost()
    now = replace(now, queue_slots=np.linspace(0.0, 1.5, 4))
    decision = decide_evenly(cost.terms(now), np.arange(24) % 4)
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
    decision = decide_evenly(given, everyone % 4)
    late_ms = given.uplink[everyone, everyone % 4] * 6 - given.draft
    assert (late_ms > 0).any()
    assert (late_ms < 0).any()
    waited = co.delays(given, decision) - co.printed_delays(given, decision)
    assert waited == pytest.approx(np.maximum(late_ms, 0.0))


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)
def test_a_decision_that_gives_too_much_is_refused(cost: PaperCost) -> None:
    decision = decide_evenly(cost.terms(snapshot()), np.arange(24) % 4)
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
def test_a_general_solver_finds_the_same(cost: PaperCost, seed: int) -> None:
    """Oracle for one server and few devices: scipy's SLSQP over both kinds of shares at once."""
    given = cost.terms(snapshot(seed, devices=5, servers=2))
    association = np.zeros(5, dtype=np.int64)

    scale = co.sum_objective(given, co.decide_evenly(given, association))

    def value(logs: np.ndarray) -> float:
        shares = np.exp(logs)
        return co.sum_objective(given, co.Decision(association, shares[:5], shares[5:])) / scale

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
    decision = co.decide_optimally(given, association)
    assert co.sum_objective(given, decision) / scale == pytest.approx(found.fun, rel=1e-5)
    assert co.sum_objective(given, decision) / scale <= found.fun + 1e-7


def test_every_price_clears_its_band() -> None:
    """The devices of a server have one marginal value, its price; if that is not 0, the band is
    full."""
    given = terms(5, COSTS[1])
    association = np.arange(24) % 4
    shares = co.optimal_bandwidth(given, association)
    used = np.bincount(association, shares, 4)
    assert np.all(used <= 1 + 1e-9)

    def cost(bandwidth: np.ndarray) -> np.ndarray:
        return co.device_costs(given, co.Decision(association, bandwidth, np.ones(24)))

    slope = (cost(shares * (1 + 1e-6)) - cost(shares * (1 - 1e-6))) / (2e-6 * shares)
    prices = -slope[:4]
    assert -slope == pytest.approx(prices[association], rel=1e-3, abs=2e-2)
    full = prices > 2e-2
    assert full.any()
    assert used[full] == pytest.approx(np.ones(full.sum()), abs=1e-6)


SEEDS = range(4)
each_cost = pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)


def _weights(seed: int, devices: int = 24, servers: int = 4) -> Weights:
    rng = np.random.default_rng(seed)
    v, q = np.exp(rng.normal(size=(2, devices, servers)))
    return Weights(v, q, rng.uniform(0.3, 1.0, servers))


@each_cost
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", Steps)
def test_matching_never_raises_the_cost(cost: PaperCost, seed: int, steps: Steps) -> None:
    given, weights = terms(seed, cost), _weights(seed)
    start = np.random.default_rng(seed).integers(4, size=24)
    before = sum_objective(given, decide_by_weights(weights, start))
    matched = two_phase_matching(given, weights, start, steps)
    after = sum_objective(given, decide_by_weights(weights, matched))
    assert after < before


@each_cost
def test_no_single_change_is_left_that_helps(cost: PaperCost) -> None:
    """Every move and every swap is tried, one by one, with the whole formula."""
    given, weights = cost.terms(snapshot(1, devices=9, servers=3)), _weights(1, 9, 3)
    start = best_gain(snapshot(1, devices=9, servers=3).gains)
    matched = two_phase_matching(given, weights, start)
    at, least = matched, sum_objective(given, decide_by_weights(weights, matched)) * (1 - 1e-6)
    for device, server in product(range(9), range(3)):
        moved = at.copy()
        moved[device] = server
        assert sum_objective(given, decide_by_weights(weights, moved)) >= least
    for first, second in product(range(9), repeat=2):
        swapped = at.copy()
        swapped[first], swapped[second] = at[second], at[first]
        assert sum_objective(given, decide_by_weights(weights, swapped)) >= least


@each_cost
@pytest.mark.parametrize("seed", SEEDS)
def test_the_papers_inequality_makes_it_worse(cost: PaperCost, seed: int) -> None:
    given, start = terms(seed, cost), best_gain(snapshot(seed).gains)
    even = Weights.even(given)
    right = two_phase_matching(given, even, start, Steps.SWAPS)
    printed = two_phase_matching(given, even, start, Steps.SWAPS, sign=-1.0)
    least, before, most = (
        sum_objective(given, decide_evenly(given, at)) for at in (right, start, printed)
    )
    assert least <= before < most


torch = pytest.importorskip("torch")
masac = pytest.importorskip("edgespec_uara.masac")
SETTINGS = UaraSettings(devices=12, servers=3)


def situation(cost: PaperCost, now: Snapshot) -> methods.Situation:
    return methods.Situation(now, cost.terms(now), np.random.default_rng(0))


def test_methods_are_compared_on_the_same_worlds_each_time() -> None:
    choices, every = Choices(devices=20, servers=3, slots=2), methods.make_methods("spread")
    one, two = (sweep.play(choices, every, 2, seed=3) for _ in range(2))
    assert list(one) == list(every)
    for name, ms in one.items():
        assert np.array_equal(ms, two[name])
        # A method that plays beside another changes nothing of its worlds.
        assert np.array_equal(ms, sweep.play(choices, {name: every[name]}, 2, seed=3)[name])
    assert all(
        one[methods.WITH_MOVES].mean() < one[baseline].mean()
        for baseline in methods.PAPER_BASELINES
    )


@pytest.mark.parametrize(
    ("name", "kept"), [(methods.PAPERS_MATCHING, True), (methods.WITH_MOVES, False)]
)
def test_the_papers_matching_swaps_devices_and_moves_none(name: str, kept: bool) -> None:
    """A swap leaves every server with as many devices as the first phase gave it."""
    now = snapshot(0)
    matched = methods.make_methods("spread")[name].associate(situation(PaperCost(), now))
    counts, first = (
        np.bincount(association, minlength=now.settings.servers).tolist()
        for association in (matched, methods.best_gain(now.gains))
    )
    assert (counts == first) is kept


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)
@pytest.mark.parametrize(("devices", "servers"), [(30, 4), (90, 12), (40, 20)])
def test_every_method_keeps_the_limits(cost: PaperCost, devices: int, servers: int) -> None:
    given = situation(cost, snapshot(2, devices, servers))
    for method in methods.make_methods("one").values():
        method.share(given.terms, method.associate(given)).check(servers)


def test_max_compute_is_what_its_words_say() -> None:
    """The literal reading: no device uses a server while a faster one exists; only ties are broken
    otherwise."""
    now = snapshot(1, devices=24, servers=7)
    found = {name: reading(now) for name, reading in methods.MAX_COMPUTE.items()}
    fastest = np.flatnonzero(now.server_flops == now.server_flops.max())
    assert len(fastest) == 2
    for name in ("one", "best-heard"):
        assert set(found[name]) <= set(fastest), name
    assert len(set(found["one"])) == 1
    for device, server in enumerate(found["best-heard"]):
        assert now.gains[device, server] == now.gains[device, fastest].max()
    # Our reading: no device has more compute at another server after a move there.
    counts = np.bincount(found["spread"], minlength=7)
    given = (now.server_flops / np.maximum(counts, 1))[found["spread"]].min()
    assert given >= (now.server_flops / (counts + 1)).max()


@pytest.mark.parametrize("name", sweep.ESTIMATORS)
def test_an_interval_covers_the_known_saving(name: str) -> None:
    """Delays differ widely between worlds, and ours is 0.8 times a lognormal's. Of 400 intervals
    over 30 worlds 95 % should cover the truth, within four deviations of that count (17)."""
    rng = np.random.default_rng(7)
    truth = 1.0 - 0.8 * (1.0 if name == "median" else np.exp(0.3**2 / 2))
    covered = 0
    for _ in range(400):
        theirs = np.exp(rng.normal(5.0, 0.5, (1, 30)))
        ours = theirs * 0.8 * np.exp(rng.normal(0.0, 0.3, (1, 30)))
        saved = sweep.ESTIMATORS[name](ours, theirs)
        assert saved.low <= saved.value <= saved.high
        covered += saved.low <= truth <= saved.high
    assert 363 <= covered <= 397


def test_an_outlier_moves_the_mean_and_not_the_median() -> None:
    theirs = np.full((1, 9), 100.0)
    ours = np.full((1, 9), 70.0)
    ours[0, 4] = 10_000.0
    assert sweep.mean_of_worlds(ours, theirs).value < -10.0
    assert sweep.median_of_worlds(ours, theirs).value == pytest.approx(0.3)


def test_a_saving_is_the_mean_over_the_baselines() -> None:
    played = {name: np.full(4, ms) for name, ms in zip("abc", (50.0, 100.0, 200.0), strict=True)}
    played |= {name: np.full(4, 80.0) for name in methods.PAPER_BASELINES}
    played["max-SINR"] = np.full(4, 60.0)
    assert sweep.measure_saving([played], "a", ("b", "c"), "mean").value == pytest.approx(0.625)
    assert sweep.measure_saving([played], "a", ("best",), "ratio").value == pytest.approx(1 / 6)


def run(command: Callable[..., None], *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments)


QUICK = ("--quick", "--set", "devices=12")


def test_the_sweep_writes_its_results(tmp_path: Path) -> None:
    rows = ("servers=3", "speed_m_s=1..2", "estimator=mean,median", "servers=4")
    done = run(
        sweep.main,
        *QUICK,
        "--out",
        str(tmp_path),
        *(part for row in rows for part in ("--vary", row)),
    )
    assert done.exit_code == 0, done.output
    assert "5/5 servers=4: " in done.output, "progress, off a terminal as well"
    data = json.loads((tmp_path / "choices.json").read_text(encoding="utf-8"))
    assert data["base"]["devices"] == 12
    assert {name: [one["value"] for one in row] for name, row in data["rows"].items()} == {
        "servers": ["3", "4"],
        "speed_m_s": ["1..2"],
        "estimator": ["mean", "median"],
    }
    for one in data["rows"]["servers"]:
        claim = one["saved"][sweep.CLAIM]
        assert claim["low"] <= claim["value"] <= claim["high"]
        ours = np.array(one["played"][methods.PAPERS_MATCHING])
        theirs = [np.array(one["played"][name]) for name in methods.PAPER_BASELINES]
        assert claim["value"] == pytest.approx(np.mean([1 - ours / other for other in theirs]))
    page = (tmp_path / "choices.html").read_text(encoding="utf-8")
    usual = data["usual"]["played"]
    means = {name: np.mean(ms) for name, ms in usual.items() if name != methods.NO_SPECULATION}
    winner, second = sorted(means, key=lambda name: float(means[name]))[:2]
    over = sweep.mean_of_worlds(*(np.array([usual[name]]) for name in (winner, second)))
    first_screen = unescape(page.split("<main>")[1].split("<table>")[0])
    said = f"{winner} won: a device waits {means[winner]:.3g} ms on average, {sweep.percent(over)} "
    assert said in first_screen
    assert said in " ".join(done.output.split())
    assert f"less than with {second} ({means[second]:.3g} ms)" in first_screen.replace(
        ", which may be chance,", ""
    )
    assert re.search(
        r"saves \S+ % \(\S+ to \S+\) over these three, which (falls short|agrees|is)", first_screen
    )
    assert "Over the 5 points that were tried" in first_screen
    assert page.count('"range":[-100,100]') == 3, "no outlier sets a scale"
    assert page.count('"error_y"') == 9


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("sid_m=200", "side_m"),
        ("side_m=", "NAME=VALUE"),
        ("side_m=-5", "[1.0, 100000.0]"),
        ("side_m=nan", "[1.0, 100000.0]"),
        ("devices=1.5", "1.5"),
        ("speed_m_s=3", "LOW..HIGH"),
        ("max_compute=most", "best-heard"),
        ("slots=0", "[1, 1000]"),
        ("servers_at=hex", "grid"),
    ],
)
def test_a_choice_that_is_none_is_refused(tmp_path: Path, row: str, said: str) -> None:
    done = run(sweep.main, *QUICK, "--out", str(tmp_path), "--vary", row)
    assert done.exit_code == 2
    assert said in done.output
    assert not list(tmp_path.iterdir())


def test_a_higher_reward_is_a_lower_cost() -> None:
    """Even shares after matching beat random association; absurd shares are punished."""
    rollout, dice = masac.PaperRollout(SETTINGS, PaperCost(), 0), np.random.default_rng(0)
    even = masac.Actions(torch.zeros(3, 12, 2), torch.ones(3, 1), torch.zeros(3))
    absurd = torch.from_numpy(dice.choice([-1.0, 1.0], (3, 12, 2)))
    rewards = [
        rollout._play(UaraWorld(SETTINGS, 3), actions, np.random.default_rng(3))
        for actions in (even, replace(even, pairs=absurd))
    ]
    assert rewards[0] > 1.0
    assert rewards[0] > rewards[1]


def test_an_episode_is_a_world_slot_after_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masac, "DEVICES", (12,))
    monkeypatch.setattr(masac, "SERVERS", (3,))
    torch.manual_seed(1)
    episode = masac.PaperRollout(SETTINGS, PaperCost(), 5).episode(masac.Actor())
    assert len(episode) == masac.SLOTS
    for index, one in enumerate(episode):
        assert (one.features.shape, one.pairs.shape) == ((3, 12, 6), (3, 12, 2))
        assert len(set(one.rewards.tolist())) == 1, "all are paid alike"
        assert one.rewards[0] > 0.0
        assert one.is_last == (index == masac.SLOTS - 1)
    rewards = [one.rewards[0] for one in episode]
    assert max(rewards) > 1.5 * min(rewards), "neither bounded nor a logarithm"


def test_the_order_of_devices_does_not_matter() -> None:
    features = methods.pair_features(terms())
    torch.manual_seed(3)
    actor = masac.Actor()
    order = np.random.default_rng(0).permutation(len(features))
    given, shuffled = actor.weights(features), actor.weights(features[order])
    assert shuffled.bandwidth == pytest.approx(given.bandwidth[order], rel=1e-4)
    assert shuffled.used == pytest.approx(given.used, rel=1e-4)


def test_a_trained_decision_is_feasible_and_keeps_the_numbers_at_each_server() -> None:
    now = snapshot(3)
    given, start = PaperCost().terms(now), methods.best_gain(now.gains)
    torch.manual_seed(5)
    method = reproduce.papers_method(masac.Actor())
    decision = method.share(given, method.associate(situation(PaperCost(), now)))
    decision.check(given.servers)
    before, after = (
        np.bincount(association, minlength=given.servers).tolist()
        for association in (start, decision.association)
    )
    assert before == after


def test_a_short_training_gives_the_same_actor_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masac, "DEVICES", (8,))
    monkeypatch.setattr(masac, "SERVERS", (2,))
    monkeypatch.setattr(masac, "WARM_UP", 1)
    first, second = (masac.train(SETTINGS, 4, 2).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(tensor.isfinite().all() for tensor in first.values())


def test_a_policy_is_trained_once_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masac, "DEVICES", (8,))
    monkeypatch.setattr(masac, "SERVERS", (2,))
    monkeypatch.setattr(masac, "WARM_UP", 1)
    monkeypatch.setattr(sweep, "SIZES", ("devices=8", "servers=2"))
    asked = ["--quick", "--seeds", "2", "--updates", "1", "--set", "side_m=400"]
    for _ in range(2):
        done = run(reproduce.main, "--out", str(tmp_path), *asked)
        assert done.exit_code == 0, done.output
        assert "mean of 2 trainings" in done.output
        monkeypatch.setattr(masac, "train", None)
    data = json.loads((tmp_path / "reproduce.json").read_text(encoding="utf-8"))
    assert (data["base"]["side_m"], len(data["saved"])) == (400, 3)
