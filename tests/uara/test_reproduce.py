"""The paper's own training: its rewards, feasible actions, the network's arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec_uara import reproduce
from edgespec_uara.cost import PaperCost
from edgespec_uara.methods import PAIR_ACTIONS, Actor, best_gain, pair_features, papers_tma_masac
from tests.uara.small import snapshot, terms

torch = pytest.importorskip("torch")


def test_an_episode_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec_uara.masac import paper_rollout
    from edgespec_uara.masac.learner import TorchActor
    from edgespec_uara.masac.paper_rollout import SLOTS

    monkeypatch.setattr(paper_rollout, "DEVICES", (12,))
    monkeypatch.setattr(paper_rollout, "SERVERS", (3,))
    torch.manual_seed(1)
    episode = paper_rollout.PaperRollout(PaperCost(), 5).episode(TorchActor())
    assert len(episode) == SLOTS
    for index, one in enumerate(episode):
        assert one.scene.features.shape == (36, 6)
        assert one.pairs.shape == (36, 2)
        assert len(set(one.rewards.tolist())) == 1, "all are paid alike"
        assert one.rewards[0] > 0.0
        last = index == SLOTS - 1
        assert one.next_agent.tolist() == ([-1] * 3 if last else [0, 1, 2])
    rewards = [one.rewards[0] for one in episode]
    assert max(rewards) > 1.5 * min(rewards), "neither bounded nor a logarithm"


def test_numpy_pools_all_devices_as_torch_does() -> None:
    from edgespec_uara.masac.learner import Layout, TorchActor

    torch.manual_seed(3)
    network = TorchActor()
    actor = Actor({name: tensor.double().numpy() for name, tensor in network.state_dict().items()})
    features = pair_features(terms())
    devices, servers = features.shape[:2]
    pairs, whole = actor.actions_before_matching(features)
    rows = torch.from_numpy(features.transpose(1, 0, 2).reshape(servers * devices, -1)).float()
    layout = Layout(
        torch.arange(servers).repeat_interleave(devices), torch.zeros(servers, dtype=torch.long), 1
    )
    with torch.no_grad():
        heads, server_heads = network.heads(rows, layout)
    wanted = torch.tanh(heads[:, :PAIR_ACTIONS]).numpy().reshape(servers, devices, 2)
    assert pairs == pytest.approx(wanted.transpose(1, 0, 2), abs=1e-5)
    assert whole == pytest.approx(torch.tanh(server_heads[:, :1]).numpy(), abs=1e-5)


def test_its_decision_is_feasible_and_keeps_the_numbers_at_each_server() -> None:
    now = snapshot(3)
    given, start = PaperCost().terms(now), best_gain(now.gains)
    decision = papers_tma_masac(Actor.shipped(), given, start)
    decision.check(given.servers)
    counts = [
        np.bincount(association, minlength=given.servers).tolist()
        for association in (start, decision.association)
    ]
    assert counts[0] == counts[1]


def test_a_short_training_gives_the_same_arrays_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec_uara.masac import paper_rollout

    monkeypatch.setattr(paper_rollout, "DEVICES", (8,))
    monkeypatch.setattr(paper_rollout, "SERVERS", (2,))
    monkeypatch.setattr(reproduce, "WARM_UP", 1)
    first, second = reproduce.train(4, 2), reproduce.train(4, 2)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert all(np.isfinite(array).all() for array in first.values())
