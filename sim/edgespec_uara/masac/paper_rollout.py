"""Experience in the paper's own setting: its environment, its state, its reward.

The PettingZoo environment is played as it stands: each agent, a server, sees every device and acts
on all of them before anybody is matched; swaps follow; all are paid alike, by the cost of random
association with even shares over theirs, neither bounded nor taken apart. Compare ``rollout.py``,
whose reward is made for learning.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from edgespec_uara.cost import CostModel
from edgespec_uara.environment import Observation, ServersEnv
from edgespec_uara.masac.networks import TorchActor
from edgespec_uara.masac.rollout import Scene, Transition, layout_of
from edgespec_uara.matching import Steps
from edgespec_uara.policy import FEATURES
from edgespec_uara.world import Floats, UaraSettings

DEVICES: Final = (30, 60)
SERVERS: Final = (4, 8)
"""Of the paper's sweep those that a core can train on: rows are devices times servers."""


class PaperRollout:
    """Plays episodes of ``ServersEnv`` without end."""

    def __init__(self, cost: CostModel, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._dice = torch.Generator().manual_seed(seed)
        self._envs = {
            (devices, servers): ServersEnv(
                UaraSettings(devices=devices, servers=servers), cost, Steps.SWAPS
            )
            for devices in DEVICES
            for servers in SERVERS
        }

    def episode(self, actor: TorchActor) -> list[Transition]:
        """Transitions of one world."""
        size = int(self._rng.choice(DEVICES)), int(self._rng.choice(SERVERS))
        env = self._envs[size]
        seen, _ = env.reset(seed=int(self._rng.integers(2**31)))
        scene, transitions = _scene(seen), []
        while env.agents:
            pairs, servers = self._act(scene, actor)
            seen, rewards, _, over, _ = env.step(_joint(list(env.agents), pairs, servers))
            following = _scene(seen)
            last = all(over.values())
            agents = np.full(scene.servers, -1) if last else np.arange(scene.servers)
            paid = np.array(list(rewards.values()))
            transitions.append(Transition(scene, pairs, servers, paid, following, agents))
            scene = following
        return transitions

    def _act(self, scene: Scene, actor: TorchActor) -> tuple[Floats, Floats]:
        with torch.no_grad():
            actions = actor.sample(*layout_of([scene]), self._dice)
        return actions.pairs.double().numpy(), actions.servers.double().numpy()


def _scene(seen: dict[str, Observation]) -> Scene:
    """Rows server by server, all devices at each; what the policy reads of the observation."""
    rows = np.stack([one[:-1, :FEATURES] for one in seen.values()])
    servers, devices = rows.shape[:2]
    flat: Floats = rows.reshape(servers * devices, FEATURES).astype(np.float64)
    return Scene(flat, np.repeat(np.arange(servers), devices), servers)


def _joint(agents: list[str], pairs: Floats, servers: Floats) -> dict[str, Observation]:
    """Actions by agent: every device's bandwidth, every one's compute, the band used."""
    by_agent = pairs.reshape(len(agents), -1, 2).transpose(0, 2, 1).reshape(len(agents), -1)
    joint = np.concatenate([by_agent, servers], axis=1).astype(np.float32)
    return dict(zip(agents, joint, strict=True))
