"""The methods on paired worlds, the sweep, and the paper's own training: its environment, its
reward, its network."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import typer
from pettingzoo.test import parallel_api_test
from typer.testing import CliRunner

from edgespec_uara import methods, reproduce, sweep
from edgespec_uara.cost import CostModel, PaperCost
from edgespec_uara.sweep import Cell, Effort, compare
from edgespec_uara.world import UaraSettings
from tests.uara.small import COSTS, snapshot, terms

torch = pytest.importorskip("torch")
masac = pytest.importorskip("edgespec_uara.masac")
SETTINGS = UaraSettings(devices=12, servers=3)


# --- methods ----------------------------------------------------------------------------------


def test_methods_are_compared_on_the_same_worlds_each_time() -> None:
    one, two = (
        list(compare(Cell(20, 3), PaperCost(), methods.METHODS, Effort(1, 2), seed=3))
        for _ in range(2)
    )
    assert one == two
    assert [result.method for result in one] == [*methods.METHODS, methods.NO_SPECULATION]
    by_name = {result.method: result.cost_ms for result in one}
    assert all(
        by_name[methods.WITH_MOVES] < by_name[baseline] for baseline in methods.PAPER_BASELINES
    )


@pytest.mark.parametrize(
    ("name", "kept"), [(methods.PAPERS_MATCHING, True), (methods.WITH_MOVES, False)]
)
def test_the_papers_matching_swaps_devices_and_moves_none(name: str, kept: bool) -> None:
    """A swap leaves every server with as many devices as the first phase gave it."""
    now = snapshot(0)
    decision = methods.METHODS[name](
        methods.Situation(now, PaperCost().terms(now), np.random.default_rng(0))
    )
    counts, first = (
        np.bincount(association, minlength=now.settings.servers).tolist()
        for association in (decision.association, methods.best_gain(now.gains))
    )
    assert (counts == first) is kept


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)
@pytest.mark.parametrize(("devices", "servers"), [(30, 4), (90, 12), (40, 20)])
def test_every_method_keeps_the_limits(cost: CostModel, devices: int, servers: int) -> None:
    now = snapshot(2, devices, servers)
    for method in methods.METHODS.values():
        decision = method(methods.Situation(now, cost.terms(now), np.random.default_rng(0)))
        decision.check(servers)


def test_the_sweep_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "cells", lambda quick: (Cell(12, 3), Cell(16, 12)))
    app = typer.Typer()
    app.command()(sweep.main)
    done = CliRunner().invoke(app, ["--out", str(tmp_path), "--quick"])
    assert done.exit_code == 0, done.output
    assert "23.7%" in done.output
    for name in ("paper", "corrected"):
        data = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        for ours in (methods.PAPERS_MATCHING, methods.WITH_OPTIMAL, methods.WITH_MOVES):
            assert {gain["baseline"] for gain in data["gains"][ours]} >= {"random", "max-SINR"}


# --- the paper's training ---------------------------------------------------------------------


def test_the_environment_is_pettingzoos() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        parallel_api_test(masac.ServersEnv(SETTINGS), num_cycles=3 * masac.SLOTS)
    with pytest.raises(RuntimeError, match="reset"):
        masac.ServersEnv(SETTINGS).step({})


def test_a_higher_reward_is_a_lower_cost() -> None:
    """Even shares after matching beat random association; absurd ones are punished."""
    even = np.zeros((3, 25))
    even[:, -1] = 1.0
    absurd = np.random.default_rng(0).choice([-1.0, 1.0], (3, 25))
    costs, rewards = [], []
    for joint in (even, absurd):
        env = masac.ServersEnv(SETTINGS)
        env.reset(seed=3)
        _, paid, _, _, infos = env.step(dict(zip(env.agents, joint, strict=True)))
        rewards.append(paid["server_0"])
        costs.append(infos["server_0"]["cost"])
    assert costs[0] < costs[1]
    assert rewards[0] > 1.0
    assert rewards[0] * costs[0] == pytest.approx(rewards[1] * costs[1]), "one reference"


def test_an_episode_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masac, "DEVICES", (12,))
    monkeypatch.setattr(masac, "SERVERS", (3,))
    torch.manual_seed(1)
    episode = masac.PaperRollout(PaperCost(), 5).episode(masac.Actor())
    assert len(episode) == masac.SLOTS
    for index, one in enumerate(episode):
        assert one.features.shape == (3, 12, 6)
        assert one.pairs.shape == (3, 12, 2)
        assert len(set(one.rewards.tolist())) == 1, "all are paid alike"
        assert one.rewards[0] > 0.0
        assert one.over == (index == masac.SLOTS - 1)
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
    decision = method(methods.Situation(now, given, np.random.default_rng(0)))
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
    first, second = (masac.train(4, 2).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(tensor.isfinite().all() for tensor in first.values())
