"""The environment against its library's own checker, and the reward's sign."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from pettingzoo.test import parallel_api_test

from edgespec_uara.cost import PaperCost
from edgespec_uara.masac.paper_rollout import SLOTS, ServersEnv, SlotGame
from edgespec_uara.world import UaraSettings

SETTINGS = UaraSettings(devices=12, servers=3)


def test_the_servers_environment_is_pettingzoos() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        parallel_api_test(ServersEnv(SETTINGS), num_cycles=3 * SLOTS)


def test_an_episode_ends_by_its_length_and_all_agents_are_rewarded_alike() -> None:
    servers = ServersEnv(SETTINGS)
    with pytest.raises(RuntimeError, match="reset"):
        servers.step({})
    seen, _ = servers.reset(seed=4)
    assert list(seen) == ["server_0", "server_1", "server_2"]
    actions = {agent: np.zeros(25, dtype=np.float32) for agent in seen}
    for slot in range(SLOTS):
        _, rewards, ended, over, infos = servers.step(actions)
        assert len(set(rewards.values())) == 1
        assert all(info["cost"] > 0 for info in infos.values())
        assert (set(ended.values()), set(over.values())) == ({False}, {slot == SLOTS - 1})


def test_a_higher_reward_is_a_lower_cost() -> None:
    """Even shares after matching beat random association; absurd ones are punished."""
    even = np.zeros((3, 25))
    even[:, -1] = 1.0
    absurd = np.random.default_rng(0).choice([-1.0, 1.0], (3, 25))
    outcomes = [SlotGame(SETTINGS, PaperCost(), 3).play(action) for action in (even, absurd)]
    assert outcomes[0].cost < outcomes[1].cost
    assert outcomes[0].reward > 1.0 > 0
    assert outcomes[0].reward > outcomes[1].reward
    assert outcomes[0].reference == outcomes[1].reference
