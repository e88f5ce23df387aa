"""The methods on paired worlds, the sweep, and the paper's own training: its environment, its
reward,
its network in numpy and in torch."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

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


def network(seed: int) -> methods.Actor:
    torch.manual_seed(seed)
    state = masac.TorchActor().state_dict()
    return methods.Actor({name: tensor.double().numpy() for name, tensor in state.items()})


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
    good, bad = (masac.SlotGame(SETTINGS, PaperCost(), 3).play(action) for action in (even, absurd))
    assert good.cost < bad.cost
    assert good.reward > 1.0
    assert good.reward > bad.reward
    assert good.reference == bad.reference


def test_an_episode_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masac, "DEVICES", (12,))
    monkeypatch.setattr(masac, "SERVERS", (3,))
    torch.manual_seed(1)
    episode = masac.PaperRollout(PaperCost(), 5).episode(masac.TorchActor())
    assert len(episode) == masac.SLOTS
    for index, one in enumerate(episode):
        assert one.scene.features.shape == (36, 6)
        assert one.pairs.shape == (36, 2)
        assert len(set(one.rewards.tolist())) == 1, "all are paid alike"
        assert one.rewards[0] > 0.0
        last = index == masac.SLOTS - 1
        assert one.next_agent.tolist() == ([-1] * 3 if last else [0, 1, 2])
    rewards = [one.rewards[0] for one in episode]
    assert max(rewards) > 1.5 * min(rewards), "neither bounded nor a logarithm"


def test_numpy_pools_all_devices_as_torch_does() -> None:
    features = methods.pair_features(terms())
    devices, servers = features.shape[:2]
    pairs, whole = network(3).actions(features)
    torch.manual_seed(3)
    rows = torch.from_numpy(features.transpose(1, 0, 2).reshape(servers * devices, -1)).float()
    owners = torch.arange(servers).repeat_interleave(devices)
    layout = masac.Layout(owners, torch.zeros(servers, dtype=torch.long), 1)
    with torch.no_grad():
        heads, server_heads = masac.TorchActor().heads(rows, layout)
    wanted = torch.tanh(heads[:, : methods.PAIR_ACTIONS]).numpy().reshape(servers, devices, 2)
    assert pairs == pytest.approx(wanted.transpose(1, 0, 2), abs=1e-5)
    assert whole == pytest.approx(torch.tanh(server_heads[:, :1]).numpy(), abs=1e-5)


def test_a_trained_decision_is_feasible_and_keeps_the_numbers_at_each_server(
    tmp_path: Path,
) -> None:
    now = snapshot(3)
    given, start = PaperCost().terms(now), methods.best_gain(now.gains)
    arrays: Any = network(5).arrays
    np.savez(tmp_path / "actor.npz", **arrays)
    decision = methods.tma_masac(methods.Actor.load(tmp_path / "actor.npz"), given, start)
    decision.check(given.servers)
    before, after = (
        np.bincount(association, minlength=given.servers).tolist()
        for association in (start, decision.association)
    )
    assert before == after
    with pytest.raises(ValueError, match="wanted"):
        methods.Actor({"embed0.weight": np.zeros((1, 1))})


def test_a_short_training_gives_the_same_arrays_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masac, "DEVICES", (8,))
    monkeypatch.setattr(masac, "SERVERS", (2,))
    monkeypatch.setattr(reproduce, "WARM_UP", 1)
    first, second = reproduce.train(4, 2), reproduce.train(4, 2)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert all(np.isfinite(array).all() for array in first.values())
