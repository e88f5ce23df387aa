"""Multi-agent soft actor-critic (Haarnoja et al., 2018) on the paper's reward.

All agents, one per server, share one actor. There are two centralised critics, of which the smaller
value counts. Target critics follow slowly, and the entropy temperature is tuned to a target
entropy.
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
from edgespec_uara.cost import PaperCost, Weights, decide_by_weights, decide_evenly, sum_objective
from edgespec_uara.world import Floats, UaraSettings, UaraWorld

# --- actor and critic over any number of servers and devices -----------------------------------
# Features of a scene have the shape (E, M, features): every server sees all devices, as none has a
# server yet. Pooling is a mean over devices or servers, so their order cannot matter and their
# number may change. The actor is decentralised (it sees its own server's row). The critic is
# centralised (it sees all servers of its scene).

WIDTH = 64
LOG_STD_MIN, LOG_STD_MAX = -5.0, 0.5
LOG_STD_FIRST = -1.5
"""Initial offset of the log deviation. Training starts near even shares, since very uneven weights
are rarely useful."""


@dataclass(frozen=True, slots=True)
class Actions:
    """Actions in (-1, 1), with the logarithm of their density, summed over an agent's
    dimensions."""

    pairs: Tensor
    """Shape (E, M, 2)."""
    servers: Tensor
    """Shape (E, 1)."""
    log_density: Tensor
    """Shape (E,): the mean over the devices, plus that of the server's own action."""


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = _two_layers(methods.FEATURES, WIDTH)
        self.pair = _two_layers(2 * WIDTH + 1, 2 * methods.PAIR_ACTIONS)
        self.server = _two_layers(WIDTH + 1, 2 * methods.SERVER_ACTIONS)

    def heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and log deviations before squashing: of pairs (E, M, 4), of servers (E,
        2)."""
        rows = F.relu(self.embed(features))
        crowd = torch.cat([rows.mean(dim=1), _measure_crowding(features)], dim=1)
        beside = crowd[:, None].expand(-1, features.shape[1], -1)
        return self.pair(torch.cat([rows, beside], dim=2)), self.server(crowd)

    def sample(self, features: Tensor) -> Actions:
        pairs, servers = self.heads(features)
        pair_actions, pair_density = _sample_squashed(pairs)
        server_actions, server_density = _sample_squashed(servers)
        return Actions(pair_actions, server_actions, pair_density.mean(dim=1) + server_density)

    @torch.no_grad()
    def weights(self, features: Floats) -> Weights:
        """Return the most likely weights for features (M, E, F)."""
        pairs, servers = self.heads(torch.from_numpy(features).transpose(0, 1).float())
        likely = torch.tanh(pairs[..., : methods.PAIR_ACTIONS]).transpose(0, 1)
        own = torch.tanh(servers[:, : methods.SERVER_ACTIONS])
        return methods.action_weights(likely.double().numpy(), own.double().numpy())


def _sample_squashed(head: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = head.chunk(2, dim=-1)
    std = (log_std + LOG_STD_FIRST).clamp(LOG_STD_MIN, LOG_STD_MAX).exp()
    law = TransformedDistribution(Normal(mean, std), TanhTransform(cache_size=1))
    action = law.rsample()
    return action, law.log_prob(action).sum(dim=-1)


def _measure_crowding(features: Tensor) -> Tensor:
    servers, devices = features.shape[:2]
    return torch.full((servers, 1), math.log1p(devices) - 2.0)


class Critic(nn.Module):
    """The value of each server's part of a joint action, given all servers of its scene."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = _two_layers(methods.FEATURES + methods.PAIR_ACTIONS, WIDTH)
        self.server = _two_layers(WIDTH + 1 + methods.SERVER_ACTIONS, WIDTH)
        self.value = _two_layers(2 * WIDTH, 1)

    def forward(self, features: Tensor, pairs: Tensor, servers: Tensor) -> Tensor:
        rows = F.relu(self.embed(torch.cat([features, _log_shares(pairs, servers)], dim=2)))
        pooled = torch.cat([rows.mean(dim=1), _measure_crowding(features), servers], dim=1)
        each = F.relu(self.server(pooled))
        everyone = each.mean(dim=0).expand_as(each)
        values: Tensor = self.value(torch.cat([each, everyone], dim=1))
        return values[:, 0]


def _log_shares(pairs: Tensor, servers: Tensor) -> Tensor:
    """Return the logarithms (E, M, 2) of the shares relative to even ones. The softmax is part of
    the world and need not be learned: actions with the same shares must have the same value."""
    shares = F.log_softmax(methods.WEIGHT_SPAN * pairs, dim=1) + math.log(pairs.shape[1])
    used = methods.USED_SPAN * (servers - 1.0)
    return shares + torch.cat([used, torch.zeros_like(used)], dim=1)[:, None]


def _two_layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


# --- experience --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transition:
    """The agents' features (E, M, F) and actions, the rewards (E,), and the features after them."""

    features: Tensor
    pairs: Tensor
    servers: Tensor
    rewards: Tensor
    following: Tensor
    is_last: bool
    """Whether the episode ended with this transition."""


ACTOR_RATE, CRITIC_RATE, TEMPERATURE_RATE = 3e-4, 1e-3, 1e-3
DISCOUNT = 0.9
"""Discount factor, which the paper does not give. With 0.9 a reward three slots ahead still counts
three quarters."""
TARGET_RATE = 0.01
"""Step of the target critics towards the critics in each update."""
TARGET_ENTROPY = -9.0
"""Target entropy of an agent: two dimensions per device and one of its own, each narrow at the
end."""
FIRST_TEMPERATURE = 0.05


class Learner:
    """Networks and their optimisers; ``update`` makes one step of all of them. It seeds torch for
    the whole process, and uses one thread: small networks lose by sharing, and sums keep their
    order."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.actor = Actor()
        self._critics = (Critic(), Critic())
        self._targets = copy.deepcopy(self._critics)
        self._log_temperature = torch.tensor(math.log(FIRST_TEMPERATURE))
        self._log_temperature.requires_grad_()
        self._actor_optimiser = torch.optim.Adam(self.actor.parameters(), ACTOR_RATE)
        both = chain.from_iterable(critic.parameters() for critic in self._critics)
        self._critic_optimiser = torch.optim.Adam(list(both), CRITIC_RATE)
        self._temperature_optimiser = torch.optim.Adam([self._log_temperature], TEMPERATURE_RATE)

    @property
    def temperature(self) -> float:
        return float(self._log_temperature.detach().exp())

    def slow_down(self, share: float) -> None:
        """Set the learning rates to a share of the initial ones."""
        for optimiser, rate in (
            (self._actor_optimiser, ACTOR_RATE),
            (self._critic_optimiser, CRITIC_RATE),
        ):
            for group in optimiser.param_groups:
                group["lr"] = share * rate

    def update(self, batch: Sequence[Transition]) -> None:
        self._update_critics(batch)
        for critic in self._critics:
            critic.requires_grad_(False)
        values, density = self._evaluate([one.features for one in batch], self._critics)
        _step(self._actor_optimiser, (self.temperature * density - values).mean())
        for critic in self._critics:
            critic.requires_grad_(True)
        excess = density.detach().mean() + TARGET_ENTROPY
        _step(self._temperature_optimiser, -self._log_temperature * excess)
        self._update_targets()

    def _update_critics(self, batch: Sequence[Transition]) -> None:
        targets = self._target_values(batch)
        loss = torch.zeros(())
        for critic in self._critics:
            found = torch.cat([critic(one.features, one.pairs, one.servers) for one in batch])
            loss = loss + F.smooth_l1_loss(found, targets)
        _step(self._critic_optimiser, loss)

    @torch.no_grad()
    def _target_values(self, batch: Sequence[Transition]) -> Tensor:
        """Return rewards plus the discounted soft value of the next scene, one per agent."""
        values, density = self._evaluate([one.following for one in batch], self._targets)
        goes_on = torch.cat([torch.full_like(one.rewards, not one.is_last) for one in batch])
        later = goes_on * (values - self.temperature * density)
        return torch.cat([one.rewards for one in batch]) + DISCOUNT * later

    def _evaluate(
        self, scenes: Sequence[Tensor], critics: tuple[Critic, Critic]
    ) -> tuple[Tensor, Tensor]:
        """Sample the actor's actions in each scene. Returns the lesser value and the log density of
        all agents, concatenated."""
        values, densities = [], []
        for features in scenes:
            actions = self.actor.sample(features)
            both = (critic(features, actions.pairs, actions.servers) for critic in critics)
            values.append(torch.min(*both))
            densities.append(actions.log_density)
        return torch.cat(values), torch.cat(densities)

    def _update_targets(self) -> None:
        with torch.no_grad():
            for critic, target in zip(self._critics, self._targets, strict=True):
                for new, old in zip(critic.parameters(), target.parameters(), strict=True):
                    old.lerp_(new, TARGET_RATE)


def _step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


# --- the slot game, with an agent per server ----------------------------------------------------
# A step is a slot: actions become weights of bandwidth and compute (``methods.action_weights``),
# the paper's matching (only swaps) associates devices under them, shares and cost follow, and the
# world advances.
# The reward, equal for all agents, is the cost of random association with uniform shares divided by
# ours. Higher is better, and 1 is no better than random. (The paper prints "divided by that of
# random", which would reward cost.)
# Agents are servers, not devices: a server divides its own resources, so each agent's action is
# feasible by itself (a softmax over its devices), whereas devices would have to agree on a sum.

SLOTS = 10
"""Slots of an episode."""
_FEATURE_LIMIT = 20.0
_SEEDS = 2**31
DEVICES: Final = (30, 60)
SERVERS: Final = (4, 8)
"""Sizes of the paper's sweep that one core can train on: rows are devices times servers."""


class PaperRollout:
    """Plays episodes in worlds that differ from ``base`` only in their size."""

    def __init__(self, base: UaraSettings, cost: PaperCost, seed: int) -> None:
        self._base, self._cost, self._rng = base, cost, np.random.default_rng(seed)

    def episode(self, actor: Actor) -> list[Transition]:
        """Play one world, and return its transitions."""
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
            following, is_last = self._features(world), slot == SLOTS - 1
            paid = torch.full((servers,), reward, dtype=torch.float32)
            transitions.append(
                Transition(features, actions.pairs, actions.servers, paid, following, is_last)
            )
            features = following
        return transitions

    def _features(self, world: UaraWorld) -> Tensor:
        """Return the policy's input (E, M, F)."""
        seen = methods.pair_features(self._cost.terms(world.snapshot)).transpose(1, 0, 2)
        return torch.from_numpy(np.clip(seen, -_FEATURE_LIMIT, _FEATURE_LIMIT).astype(np.float32))

    def _play(self, world: UaraWorld, actions: Actions, dice: np.random.Generator) -> float:
        """Play one slot, and return its reward."""
        terms = self._cost.terms(world.snapshot)
        pairs, servers = (one.double().numpy() for one in (actions.pairs, actions.servers))
        weights = methods.action_weights(pairs.transpose(1, 0, 2), servers)
        start = methods.best_gain(world.snapshot.gains)
        decision = decide_by_weights(
            weights, methods.two_phase_matching(terms, weights, start, methods.Steps.SWAPS)
        )
        chance = dice.integers(terms.servers, size=terms.devices)
        world.advance(decision.association)
        return sum_objective(terms, decide_evenly(terms, chance)) / sum_objective(terms, decision)


CAPACITY, BATCH = 400, 8
"""Number of latest transitions that are kept, and number of an update, drawn uniformly."""
WARM_UP, UPDATES_PER_EPISODE = 10, 10


def train(base: UaraSettings, seed: int, updates: int) -> Actor:
    """Train for ``updates`` updates. Returns the last actor, not the best, which a sweep would
    select."""
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


def load_or_train(file: Path, base: UaraSettings, seed: int, updates: int) -> Actor:
    """Load the actor from a file, which is trained and written if it is missing."""
    if not file.is_file():
        torch.save(train(base, seed, updates).state_dict(), file)
    actor = Actor()
    actor.load_state_dict(torch.load(file, weights_only=True))
    return actor
