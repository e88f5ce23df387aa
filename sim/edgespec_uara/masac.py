"""Multi-agent soft actor-critic (Haarnoja et al., 2018) on the paper's reward.

One shared actor, an agent a server. Twin centralised critics, the smaller of the two counts; target
critics follow slowly; the entropy temperature is tuned to a target entropy.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from torch.nn import functional as F

from edgespec_uara import methods
from edgespec_uara.cost import PaperCost, Weights, objective, uniform, weighted
from edgespec_uara.world import Floats, UaraSettings, UaraWorld

# --- actor and critic over any number of servers and devices -----------------------------------
# Features of a scene have the shape (E, M, features): every server sees all devices, as none has a
# server yet. Pooling is a mean over devices or servers, so their order cannot matter and their
# number may change. The actor is decentralised (it sees its own server's row); the critic is
# centralised (it sees all servers of its scene).

WIDTH = 64
LOG_STD_MIN, LOG_STD_MAX = -5.0, 0.5
LOG_STD_FIRST = -1.5
"""Training starts near even shares: weights that differ wildly are seldom worth knowing."""


@dataclass(frozen=True, slots=True)
class Actions:
    """In (-1, 1), with the logarithm of their density, summed over an agent's dimensions."""

    pairs: Tensor
    """(E, M, 2)."""
    servers: Tensor
    """(E, 1)."""
    log_density: Tensor
    """(E,): the mean over the devices, plus the server's own action's."""


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = _two_layers(methods.FEATURES, WIDTH)
        self.pair = _two_layers(2 * WIDTH + 1, 2 * methods.PAIR_ACTIONS)
        self.server = _two_layers(WIDTH + 1, 2 * methods.SERVER_ACTIONS)

    def heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log deviations before squashing: of pairs (E, M, 4), of servers (E, 2)."""
        rows = F.relu(self.embed(features))
        crowd = torch.cat([rows.mean(dim=1), _crowding(features)], dim=1)
        beside = crowd[:, None].expand(-1, features.shape[1], -1)
        return self.pair(torch.cat([rows, beside], dim=2)), self.server(crowd)

    def sample(self, features: Tensor) -> Actions:
        pairs, servers = self.heads(features)
        pair_actions, pair_density = _squashed(pairs)
        server_actions, server_density = _squashed(servers)
        return Actions(pair_actions, server_actions, pair_density.mean(dim=1) + server_density)

    @torch.no_grad()
    def weights(self, features: Floats) -> Weights:
        """The most likely ones, of features (M, E, F)."""
        pairs, servers = self.heads(torch.from_numpy(features).transpose(0, 1).float())
        likely = torch.tanh(pairs[..., : methods.PAIR_ACTIONS]).transpose(0, 1)
        own = torch.tanh(servers[:, : methods.SERVER_ACTIONS])
        return methods.action_weights(likely.double().numpy(), own.double().numpy())


def _squashed(head: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = head.chunk(2, dim=-1)
    std = (log_std + LOG_STD_FIRST).clamp(LOG_STD_MIN, LOG_STD_MAX).exp()
    law = TransformedDistribution(Normal(mean, std), TanhTransform(cache_size=1))
    action = law.rsample()
    return action, law.log_prob(action).sum(dim=-1)


def _crowding(features: Tensor) -> Tensor:
    servers, devices = features.shape[:2]
    return torch.full((servers, 1), math.log1p(devices) - 2.0)


class Critic(nn.Module):
    """Value of each server's part of a joint action, seen with all servers of its scene."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = _two_layers(methods.FEATURES + methods.PAIR_ACTIONS, WIDTH)
        self.server = _two_layers(WIDTH + 1 + methods.SERVER_ACTIONS, WIDTH)
        self.value = _two_layers(2 * WIDTH, 1)

    def forward(self, features: Tensor, pairs: Tensor, servers: Tensor) -> Tensor:
        rows = F.relu(self.embed(torch.cat([features, _log_shares(pairs, servers)], dim=2)))
        pooled = torch.cat([rows.mean(dim=1), _crowding(features), servers], dim=1)
        each = F.relu(self.server(pooled))
        everyone = each.mean(dim=0).expand_as(each)
        values: Tensor = self.value(torch.cat([each, everyone], dim=1))
        return values[:, 0]


def _log_shares(pairs: Tensor, servers: Tensor) -> Tensor:
    """(E, M, 2): logarithms of the shares over even ones. The softmax is the world's, not a thing
    to be learned: actions that give the same shares must have the same value."""
    shares = F.log_softmax(methods.WEIGHT_SPAN * pairs, dim=1) + math.log(pairs.shape[1])
    used = methods.USED_SPAN * (servers - 1.0)
    return shares + torch.cat([used, torch.zeros_like(used)], dim=1)[:, None]


def _two_layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


# --- experience --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transition:
    """What the agents saw (E, M, F) and did, what it earned (E,), and what they saw next."""

    features: Tensor
    pairs: Tensor
    servers: Tensor
    rewards: Tensor
    following: Tensor
    over: bool
    """The episode ended with it."""


ACTOR_RATE, CRITIC_RATE, TEMPERATURE_RATE = 3e-4, 1e-3, 1e-3
DISCOUNT = 0.9
"""The paper gives none; with 0.9 a reward three slots ahead still counts three quarters."""
FOLLOW = 0.01
"""How far the target critics move towards the critics, an update."""
TARGET_ENTROPY = -9.0
"""Of an agent: two dimensions a device and one of its own, each narrow at the end."""
FIRST_TEMPERATURE = 0.05


class Learner:
    """Networks and their optimisers; ``update`` makes one step of all of them. Seeds torch for the
    whole process, on one thread: so small networks lose by sharing, and sums keep their order."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.actor = Actor()
        self._critics = (Critic(), Critic())
        self._targets = copy.deepcopy(self._critics)
        self._log_temperature = torch.tensor(math.log(FIRST_TEMPERATURE))
        self._log_temperature.requires_grad_()
        self._of_actor = torch.optim.Adam(self.actor.parameters(), ACTOR_RATE)
        both = chain.from_iterable(critic.parameters() for critic in self._critics)
        self._of_critics = torch.optim.Adam(list(both), CRITIC_RATE)
        self._of_temperature = torch.optim.Adam([self._log_temperature], TEMPERATURE_RATE)

    @property
    def temperature(self) -> float:
        return float(self._log_temperature.detach().exp())

    def slow_down(self, share: float) -> None:
        """Learning rates as shares of the first ones."""
        for optimiser, rate in ((self._of_actor, ACTOR_RATE), (self._of_critics, CRITIC_RATE)):
            for group in optimiser.param_groups:
                group["lr"] = share * rate

    def update(self, batch: Sequence[Transition]) -> None:
        self._update_critics(batch)
        for critic in self._critics:
            critic.requires_grad_(False)
        values, density = self._valued([one.features for one in batch], self._critics)
        _step(self._of_actor, (self.temperature * density - values).mean())
        for critic in self._critics:
            critic.requires_grad_(True)
        excess = density.detach().mean() + TARGET_ENTROPY
        _step(self._of_temperature, -self._log_temperature * excess)
        self._follow()

    def _update_critics(self, batch: Sequence[Transition]) -> None:
        wanted = self._wanted(batch)
        loss = torch.zeros(())
        for critic in self._critics:
            found = torch.cat([critic(one.features, one.pairs, one.servers) for one in batch])
            loss = loss + F.smooth_l1_loss(found, wanted)
        _step(self._of_critics, loss)

    @torch.no_grad()
    def _wanted(self, batch: Sequence[Transition]) -> Tensor:
        """Rewards plus the discounted soft value of the next scene, one an agent."""
        values, density = self._valued([one.following for one in batch], self._targets)
        goes_on = torch.cat([torch.full_like(one.rewards, not one.over) for one in batch])
        later = goes_on * (values - self.temperature * density)
        return torch.cat([one.rewards for one in batch]) + DISCOUNT * later

    def _valued(
        self, scenes: Sequence[Tensor], critics: tuple[Critic, Critic]
    ) -> tuple[Tensor, Tensor]:
        """What the actor would do in each scene: the lesser value and the log density, of all
        agents one behind another."""
        values, densities = [], []
        for features in scenes:
            actions = self.actor.sample(features)
            both = (critic(features, actions.pairs, actions.servers) for critic in critics)
            values.append(torch.min(*both))
            densities.append(actions.log_density)
        return torch.cat(values), torch.cat(densities)

    def _follow(self) -> None:
        with torch.no_grad():
            for critic, target in zip(self._critics, self._targets, strict=True):
                for new, old in zip(critic.parameters(), target.parameters(), strict=True):
                    old.lerp_(new, FOLLOW)


def _step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


# --- the slot game, an agent a server ----------------------------------------------------------
# A step is a slot: actions become weights of bandwidth and compute (``methods.action_weights``),
# the paper's matching (swaps alone) associates devices under them, shares and cost follow, the
# world moves on.
# Reward, for all agents the same: cost of random association with uniform shares, divided by
# ours. Higher is better, 1 is no better than random. (The paper prints "divided by that of
# random", which would reward cost.)
# Agents are servers, not devices: a share is a server's to give, so each agent's action is
# feasible by itself (a softmax over its devices), whereas devices would have to agree on a sum.

SLOTS = 10
"""Of an episode."""
_LIMIT = 20.0
_SEEDS = 2**31
DEVICES: Final = (30, 60)
SERVERS: Final = (4, 8)
"""Of the paper's sweep those that a core can train on: rows are devices times servers."""


class PaperRollout:
    """Plays episodes without end, in worlds of ``base`` but for their size."""

    def __init__(self, base: UaraSettings, cost: PaperCost, seed: int) -> None:
        self._base, self._cost, self._rng = base, cost, np.random.default_rng(seed)

    def episode(self, actor: Actor) -> list[Transition]:
        """Transitions of one world."""
        devices, servers = int(self._rng.choice(DEVICES)), int(self._rng.choice(SERVERS))
        seeds = np.random.default_rng(int(self._rng.integers(_SEEDS)))
        seed = int(seeds.integers(_SEEDS))
        world = UaraWorld(replace(self._base, devices=devices, servers=servers), seed)
        dice, transitions = np.random.default_rng([seed, 1]), list[Transition]()
        features = self._features(world)
        for slot in range(SLOTS):
            with torch.no_grad():
                actions = actor.sample(features)
            reward = self._play(world, actions, dice)
            following, over = self._features(world), slot == SLOTS - 1
            paid = torch.full((servers,), reward, dtype=torch.float32)
            transitions.append(
                Transition(features, actions.pairs, actions.servers, paid, following, over)
            )
            features = following
        return transitions

    def _features(self, world: UaraWorld) -> Tensor:
        """(E, M, F): what the policy reads."""
        seen = methods.pair_features(self._cost.terms(world.snapshot)).transpose(1, 0, 2)
        return torch.from_numpy(np.clip(seen, -_LIMIT, _LIMIT).astype(np.float32))

    def _play(self, world: UaraWorld, actions: Actions, dice: np.random.Generator) -> float:
        """The reward of one slot."""
        terms = self._cost.terms(world.snapshot)
        pairs, servers = (one.double().numpy() for one in (actions.pairs, actions.servers))
        weights = methods.action_weights(pairs.transpose(1, 0, 2), servers)
        start = methods.best_gain(world.snapshot.gains)
        decision = weighted(
            weights, methods.two_phase_matching(terms, weights, start, methods.Steps.SWAPS)
        )
        chance = dice.integers(terms.servers, size=terms.devices)
        world.advance(decision.association)
        return objective(terms, uniform(terms, chance)) / objective(terms, decision)


CAPACITY, BATCH = 400, 8
"""Scenes that are kept, the last ones, and those of an update, drawn uniformly."""
WARM_UP, UPDATES_PER_EPISODE = 10, 10


def train(base: UaraSettings, seed: int, updates: int) -> Actor:
    """After so many updates: the last actor, not the best, which the sweep would choose."""
    learner, rollout = Learner(seed), PaperRollout(base, PaperCost(), seed)
    kept, rng = deque[Transition](maxlen=CAPACITY), np.random.default_rng(seed)
    for _ in range(WARM_UP):
        kept.extend(rollout.episode(learner.actor))
    done = 0
    while done < updates:
        kept.extend(rollout.episode(learner.actor))
        for _ in range(min(UPDATES_PER_EPISODE, updates - done)):
            learner.update([kept[index] for index in rng.integers(len(kept), size=BATCH)])
            done += 1
        learner.slow_down(max(0.05, 1.0 - done / updates))
    return learner.actor


def trained(file: Path, base: UaraSettings, seed: int, updates: int) -> Actor:
    """The actor in the file, which is made where it is missing."""
    if not file.is_file():
        torch.save(train(base, seed, updates).state_dict(), file)
    actor = Actor()
    actor.load_state_dict(torch.load(file, weights_only=True))
    return actor
