"""Experience: scenes (one slot, as the agents saw it) and the worlds that they come from.

Training worlds vary in everything that the sweep varies and more: devices per server, band per
server, transmit power, w. Associations vary too (matched, by gain, at random, disturbed), so that
the shares learned do not rest on one way of associating.

The paper's reward is the cost of a reference over ours. In training it is taken an agent at a
time, as a bounded logarithm (which tames ratios of a thousand), without the constants that no share
can change, and over the *same* association with even shares: a random association is a reference
too noisy to learn a percent from, and none of this moves the best action.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from edgespec_uara.cost import CostModel, Terms, device_costs
from edgespec_uara.masac.networks import Layout, TorchActor
from edgespec_uara.matching import best_gain, two_phase_matching
from edgespec_uara.policy import action_weights, pair_features
from edgespec_uara.shares import Weights, uniform, weighted
from edgespec_uara.world import Floats, Ints, UaraSettings, UaraWorld

EPISODE_SLOTS = 5
SERVERS, DEVICES_PER_SERVER = (2, 7), (1.5, 45.0)
DEVICES_MAX = 120
REWARD_SCALE, REWARD_LIMIT = 5.0, 6.0
PAPER_SERVERS = (4, 20)


@dataclass(frozen=True, slots=True)
class Scene:
    """Devices at their servers: features (M, F), association (M,), number of servers. Servers
    without devices are left out, the others numbered anew."""

    features: Floats
    association: Ints
    servers: int


@dataclass(frozen=True, slots=True)
class Transition:
    """What the agents did in a scene, what it earned, and what they saw next.

    An agent is a server with devices. ``next_agent`` is its number in the next scene, or -1 when
    it has no device there or the episode ended.
    """

    scene: Scene
    pairs: Floats
    server_actions: Floats
    rewards: Floats
    next_scene: Scene
    next_agent: Ints


class Replay:
    """The last transitions, drawn uniformly."""

    def __init__(self, capacity: int, rng: np.random.Generator) -> None:
        self._kept: deque[Transition] = deque(maxlen=capacity)
        self._rng = rng

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, transition: Transition) -> None:
        self._kept.append(transition)

    def draw(self, count: int) -> list[Transition]:
        return [self._kept[index] for index in self._rng.integers(len(self._kept), size=count)]


def random_settings(rng: np.random.Generator) -> UaraSettings:
    """A world of few servers whose bands are those of the paper's 4 to 20."""
    servers = int(rng.integers(*SERVERS, endpoint=True))
    low, high = np.log(DEVICES_PER_SERVER)
    wanted = servers * np.exp(rng.uniform(low, high))
    share = servers / rng.uniform(*PAPER_SERVERS)
    return UaraSettings(
        devices=int(np.clip(wanted, 2, DEVICES_MAX)),
        servers=servers,
        bandwidth_hz=10e6 * share,
        energy_weight=float(rng.uniform(20.0, 100.0)),
    )


def layout_of(scenes: list[Scene]) -> tuple[torch.Tensor, Layout]:
    """Features of all rows, and who belongs where."""
    offsets = np.cumsum([0, *(scene.servers for scene in scenes)])
    rows = [scene.association + first for scene, first in zip(scenes, offsets[:-1], strict=True)]
    owners = np.repeat(np.arange(len(scenes)), [scene.servers for scene in scenes])
    features = np.concatenate([scene.features for scene in scenes])
    layout = Layout(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(owners), len(scenes))
    return torch.from_numpy(features.astype(np.float32)), layout


class Rollout:
    """Plays episodes without end."""

    def __init__(self, costs: tuple[CostModel, ...], seed: int) -> None:
        self._costs = costs
        self._rng = np.random.default_rng(seed)
        self._dice = torch.Generator().manual_seed(seed)

    def episode(self, actor: TorchActor) -> list[Transition]:
        """Transitions of one world."""
        world = UaraWorld(random_settings(self._rng), int(self._rng.integers(2**31)))
        cost = self._costs[self._rng.integers(len(self._costs))]
        slots = [self._slot(world, cost, actor) for _ in range(EPISODE_SLOTS)]
        transitions = []
        for index, (scene, agents, pairs, servers, rewards) in enumerate(slots):
            last = index + 1 == len(slots)
            following, next_agents = slots[index if last else index + 1][:2]
            there = np.full(agents.max() + 1 if last else world.settings.servers, -1)
            if not last:
                there[next_agents] = np.arange(len(next_agents))
            found = np.full(len(agents), -1) if last else there[agents]
            transitions.append(Transition(scene, pairs, servers, rewards, following, found))
        return transitions

    def _slot(
        self, world: UaraWorld, cost: CostModel, actor: TorchActor
    ) -> tuple[Scene, Ints, Floats, Floats, Floats]:
        """Scene, the agents' servers, actions of pairs and servers, rewards."""
        terms = cost.terms(world.snapshot)
        association = self._associate(terms, world.snapshot.gains)
        agents, renumbered = np.unique(association, return_inverse=True)
        features = pair_features(terms)[np.arange(terms.devices), association]
        scene = Scene(features, renumbered, len(agents))
        pairs, servers = self._act(scene, actor)
        own = action_weights(pairs, servers)
        ones = np.ones_like(terms.constant)
        used = np.ones(terms.servers)
        used[agents] = own.used
        decision = weighted(
            Weights(ones * own.bandwidth[:, None], ones * own.compute[:, None], used), association
        )
        fixed = terms.constant[np.arange(terms.devices), association]
        ours = np.bincount(renumbered, device_costs(terms, decision) - fixed)
        even = np.bincount(renumbered, device_costs(terms, uniform(terms, association)) - fixed)
        world.advance(association)
        rewards = np.clip(REWARD_SCALE * np.log(even / ours), -REWARD_LIMIT, REWARD_LIMIT)
        return scene, agents, pairs, servers, rewards

    def _act(self, scene: Scene, actor: TorchActor) -> tuple[Floats, Floats]:
        with torch.no_grad():
            actions = actor.sample(*layout_of([scene]), self._dice)
        return actions.pairs.double().numpy(), actions.servers.double().numpy()

    def _associate(self, terms: Terms, gains: Floats) -> Ints:
        way = self._rng.random()
        chance = self._rng.integers(terms.servers, size=terms.devices)
        if way < 0.15:
            return chance
        association = best_gain(gains)
        if way < 0.3:
            return association
        association = two_phase_matching(terms, Weights.even(terms), association).association
        disturbed = self._rng.random(terms.devices) < self._rng.choice([0.0, 0.0, 0.1])
        return np.where(disturbed, chance, association)
