"""Multi-agent soft actor-critic (Haarnoja et al., 2018) on the paper's environment and reward.

One shared actor, an agent a server. Twin centralised critics, the smaller of the two counts; target
critics follow slowly; the entropy temperature is tuned to a target entropy. Torch is needed here
and nowhere else: what is learned runs in ``methods.Actor``.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from pettingzoo import ParallelEnv
from torch import Tensor, nn
from torch.nn import functional as F

from edgespec_uara.cost import CostModel, PaperCost, objective, uniform, weighted
from edgespec_uara.methods import (
    FEATURES,
    PAIR_ACTIONS,
    SERVER_ACTIONS,
    USED_SPAN,
    WEIGHT_SPAN,
    Steps,
    action_weights,
    best_gain,
    pair_features,
    two_phase_matching,
)
from edgespec_uara.world import Floats, Ints, UaraSettings, UaraWorld

# --- actor and critic over lists of devices of any length --------------------------------------
# Rows are (device, its server) pairs of many scenes, laid end to end; ``Layout`` says which
# server a row belongs to and which scene a server belongs to. Pooling is a mean over rows or
# servers, so the order of devices cannot matter and their number may change. The actor is
# decentralised (it sees its own server's devices); the critic is centralised (it sees all servers
# of its scene).


WIDTH = 64
LOG_STD_MIN, LOG_STD_MAX = -5.0, 0.5
LOG_STD_FIRST = -1.5
"""Training starts near even shares: weights that differ wildly are seldom worth knowing."""


@dataclass(frozen=True, slots=True)
class Layout:
    """R rows, S servers, N scenes."""

    server_of_row: Tensor
    scene_of_server: Tensor
    scenes: int

    @property
    def servers(self) -> int:
        return len(self.scene_of_server)

    def counts(self) -> Tensor:
        return torch.bincount(self.server_of_row, minlength=self.servers)

    def pool_rows(self, rows: Tensor) -> Tensor:
        return _mean(rows, self.server_of_row, self.servers)

    def pool_servers(self, rows: Tensor) -> Tensor:
        return _mean(rows, self.scene_of_server, self.scenes)


def _mean(rows: Tensor, group: Tensor, groups: int) -> Tensor:
    total = rows.new_zeros(groups, rows.shape[1]).index_add(0, group, rows)
    return total / torch.bincount(group, minlength=groups).clamp(min=1)[:, None]


@dataclass(frozen=True, slots=True)
class Actions:
    """In (-1, 1), with the logarithm of their density, summed over an agent's dimensions."""

    pairs: Tensor
    servers: Tensor
    log_density: Tensor
    """(S,): the mean over a server's devices, plus its own action's."""


class TorchActor(nn.Module):
    """The shared actor. ``methods.Actor`` computes the same means from the same arrays."""

    def __init__(self) -> None:
        super().__init__()
        crowd = WIDTH + 1
        self.embed0, self.embed1 = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pair0 = nn.Linear(WIDTH + crowd, WIDTH)
        self.pair1 = nn.Linear(WIDTH, 2 * PAIR_ACTIONS)
        self.server0, self.server1 = nn.Linear(crowd, WIDTH), nn.Linear(WIDTH, 2 * SERVER_ACTIONS)

    def heads(self, features: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Means and log deviations before squashing: of rows (R, 4) and of servers (S, 2)."""
        rows = F.relu(self.embed1(F.relu(self.embed0(features))))
        crowd = torch.cat([layout.pool_rows(rows), _crowding(layout)], dim=1)
        beside = torch.cat([rows, crowd[layout.server_of_row]], dim=1)
        pairs = self.pair1(F.relu(self.pair0(beside)))
        return pairs, self.server1(F.relu(self.server0(crowd)))

    def sample(self, features: Tensor, layout: Layout, dice: torch.Generator) -> Actions:
        pairs, servers = self.heads(features, layout)
        pair_actions, pair_density = _squashed(pairs, dice)
        server_actions, server_density = _squashed(servers, dice)
        density = layout.pool_rows(pair_density[:, None])[:, 0] + server_density
        return Actions(pair_actions, server_actions, density)


def _squashed(head: Tensor, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    mean, log_std = head.chunk(2, dim=1)
    log_std = (log_std + LOG_STD_FIRST).clamp(LOG_STD_MIN, LOG_STD_MAX)
    noise = torch.randn(mean.shape, generator=dice)
    raw = mean + log_std.exp() * noise
    # Density of tanh(raw), in the form that does not lose digits at the ends.
    squash = 2.0 * (0.6931471805599453 - raw - F.softplus(-2.0 * raw))
    log_density = -0.5 * noise**2 - log_std - 0.9189385332046727 - squash
    return torch.tanh(raw), log_density.sum(dim=1)


def _crowding(layout: Layout) -> Tensor:
    return (torch.log1p(layout.counts().float()) - 2.0)[:, None]


class Critic(nn.Module):
    """Value of each server's part of a joint action, seen with all servers of its scene."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = _two_layers(FEATURES + PAIR_ACTIONS, WIDTH)
        self.server = _two_layers(WIDTH + 1 + SERVER_ACTIONS, WIDTH)
        self.value = _two_layers(2 * WIDTH, 1)

    def forward(self, features: Tensor, layout: Layout, pairs: Tensor, servers: Tensor) -> Tensor:
        shares = _log_shares(layout, pairs, servers)
        rows = F.relu(self.embed(torch.cat([features, shares], dim=1)))
        pooled = torch.cat([layout.pool_rows(rows), _crowding(layout), servers], dim=1)
        each = F.relu(self.server(pooled))
        everyone = layout.pool_servers(each)[layout.scene_of_server]
        values: Tensor = self.value(torch.cat([each, everyone], dim=1))
        return values[:, 0]


def _log_shares(layout: Layout, pairs: Tensor, servers: Tensor) -> Tensor:
    """(R, 2): logarithms of the shares over even ones. The softmax is the world's, not a thing to
    be learned: actions that give the same shares must have the same value."""
    owner = layout.server_of_row
    logits = WEIGHT_SPAN * pairs
    total = logits.new_zeros(layout.servers, PAIR_ACTIONS).index_add(0, owner, logits.exp())
    shares = logits - torch.log(total / layout.counts().clamp(min=1)[:, None])[owner]
    used = USED_SPAN * (servers - 1.0)
    return shares + torch.cat([used, torch.zeros_like(used)], dim=1)[owner]


def _two_layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


# --- experience --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scene:
    """Devices at their servers: features (M, F), association (M,), number of servers."""

    features: Floats
    association: Ints
    servers: int


@dataclass(frozen=True, slots=True)
class Transition:
    """What the agents did in a scene, what it earned, and what they saw next. ``next_agent`` is
    each one's number in the next scene, or -1 when the episode ended."""

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


def layout_of(scenes: list[Scene]) -> tuple[torch.Tensor, Layout]:
    """Features of all rows, and who belongs where."""
    offsets = np.cumsum([0, *(scene.servers for scene in scenes)])
    rows = [scene.association + first for scene, first in zip(scenes, offsets[:-1], strict=True)]
    owners = np.repeat(np.arange(len(scenes)), [scene.servers for scene in scenes])
    features = np.concatenate([scene.features for scene in scenes])
    layout = Layout(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(owners), len(scenes))
    return torch.from_numpy(features.astype(np.float32)), layout


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """Of one training."""

    actor_rate: float = 3e-4
    critic_rate: float = 1e-3
    temperature_rate: float = 1e-3
    discount: float = 0.9
    """The paper gives none; with 0.9 a reward three slots ahead still counts three quarters."""
    follow: float = 0.01
    """How far the target critics move towards the critics, an update."""
    batch: int = 8
    """Scenes an update."""
    target_entropy: float = -9.0
    """Of an agent: two dimensions a device and one of its own, each narrow at the end."""
    first_temperature: float = 0.05


class Learner:
    """Networks and their optimisers; ``update`` makes one step of all of them."""

    def __init__(self, settings: LearnerSettings, seed: int) -> None:
        torch.manual_seed(seed)
        self.actor = TorchActor()
        self._settings = settings
        self._critics = (Critic(), Critic())
        self._targets = copy.deepcopy(self._critics)
        self._log_temperature = torch.tensor(np.log(settings.first_temperature), dtype=torch.float)
        self._log_temperature.requires_grad_()
        self._of_actor = torch.optim.Adam(self.actor.parameters(), settings.actor_rate)
        both = chain.from_iterable(critic.parameters() for critic in self._critics)
        self._of_critics = torch.optim.Adam(list(both), settings.critic_rate)
        self._of_temperature = torch.optim.Adam([self._log_temperature], settings.temperature_rate)
        self._dice = torch.Generator().manual_seed(seed)

    @property
    def temperature(self) -> float:
        return float(self._log_temperature.detach().exp())

    def slow_down(self, share: float) -> None:
        """Learning rates as shares of the first ones."""
        rates = (self._settings.actor_rate, self._settings.critic_rate)
        for optimiser, rate in zip((self._of_actor, self._of_critics), rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = share * rate

    def update(self, batch: list[Transition]) -> None:
        features, layout = layout_of([transition.scene for transition in batch])
        self._update_critics(batch, features, layout)
        actions = self.actor.sample(features, layout, self._dice)
        for critic in self._critics:
            critic.requires_grad_(False)
        values = torch.min(
            *(critic(features, layout, actions.pairs, actions.servers) for critic in self._critics)
        )
        loss = (self.temperature * actions.log_density - values).mean()
        _step(self._of_actor, loss)
        for critic in self._critics:
            critic.requires_grad_(True)
        excess = actions.log_density.detach().mean() + self._settings.target_entropy
        _step(self._of_temperature, -self._log_temperature * excess)
        self._follow()

    def _update_critics(self, batch: list[Transition], features: Tensor, layout: Layout) -> None:
        wanted = self._wanted(batch)
        pairs = _joined([transition.pairs for transition in batch])
        servers = _joined([transition.server_actions for transition in batch])
        loss = torch.stack(
            [
                F.smooth_l1_loss(critic(features, layout, pairs, servers), wanted)
                for critic in self._critics
            ]
        ).sum()
        _step(self._of_critics, loss)

    @torch.no_grad()
    def _wanted(self, batch: list[Transition]) -> Tensor:
        """Rewards plus the discounted soft value of the next scene, one an agent."""
        features, layout = layout_of([transition.next_scene for transition in batch])
        actions = self.actor.sample(features, layout, self._dice)
        values = torch.min(
            *(critic(features, layout, actions.pairs, actions.servers) for critic in self._targets)
        )
        soft = values - self.temperature * actions.log_density
        firsts = np.cumsum([0, *(transition.next_scene.servers for transition in batch)])
        numbers = [
            np.where(transition.next_agent < 0, -1, transition.next_agent + first)
            for transition, first in zip(batch, firsts[:-1], strict=True)
        ]
        number = torch.from_numpy(np.concatenate(numbers))
        later = torch.where(number < 0, 0.0, soft[number.clamp(min=0)])
        rewards = _joined([transition.rewards for transition in batch])
        return rewards + self._settings.discount * later

    def _follow(self) -> None:
        with torch.no_grad():
            for critic, target in zip(self._critics, self._targets, strict=True):
                for new, old in zip(critic.parameters(), target.parameters(), strict=True):
                    old.lerp_(new, self._settings.follow)

    def arrays(self) -> dict[str, Floats]:
        """The actor as ``methods.Actor`` takes it."""
        state = self.actor.state_dict()
        return {name: tensor.double().numpy().copy() for name, tensor in state.items()}


def one_thread() -> None:
    """Of torch, for the whole process: networks this small only lose by sharing work, and sums keep
    their order."""
    torch.set_num_threads(1)


def _joined(arrays: list[Floats]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.float32))


def _step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


# --- the slot game as a PettingZoo environment, an agent a server ------------------------------
# A step is a slot: actions become weights of bandwidth and compute (``methods.action_weights``),
# the two-phase matching associates devices under them, shares and cost follow, the world moves
# on.
# Reward, for all agents the same: cost of random association with uniform shares, divided by
# ours. Higher is better, 1 is no better than random. (The paper prints "divided by that of
# random", which would reward cost.) The observation holds the paper's state: positions, gains,
# task, battery, queue.
# Agents are servers, not devices: a share is a server's to give, so each agent's action is
# feasible by itself (a softmax over its devices), whereas devices would have to agree on a sum.


Observation = NDArray[np.float32]
SLOTS = 10
"""Of an episode."""
PAIR_COLUMNS, DEVICE_COLUMNS, SERVER_COLUMNS = 7, 5, 4
_LIMIT = 20.0
_SEEDS = 2**31


@dataclass(frozen=True, slots=True)
class Outcome:
    """One slot, played."""

    cost: float
    reference: float
    """Of random association and uniform shares."""

    @property
    def reward(self) -> float:
        return self.reference / self.cost


class SlotGame:
    """World, cost model and the dice of the reference."""

    def __init__(
        self,
        settings: UaraSettings,
        cost: CostModel,
        seed: int,
        steps: Steps = Steps.SWAPS_AND_MOVES,
    ) -> None:
        self._cost, self._steps = cost, steps
        self._dice = np.random.default_rng([seed, 1])
        self.world = UaraWorld(settings, seed)
        self.slot = 0

    def observe(self) -> Observation:
        """(E, M + 1, columns): for each server a row a device, then a row for itself."""
        now, terms = self.world.snapshot, self._cost.terms(self.world.snapshot)
        devices, servers = terms.constant.shape
        columns = PAIR_COLUMNS + DEVICE_COLUMNS
        seen = np.zeros((servers, devices + 1, columns))
        seen[:, :devices, :6] = pair_features(terms).transpose(1, 0, 2)
        seen[:, :devices, 6] = np.log10(np.maximum(now.gains.T, 1e-20)) / 10.0 + 1.0
        rows = seen[:, :devices, PAIR_COLUMNS:]
        rows[:, :, :2] = now.devices_m / now.settings.side_m
        rows[:, :, 2] = now.battery_percent / 100.0
        rows[:, :, 3] = np.log10(now.draft_flop) - 11.0
        rows[:, :, 4] = np.log10(now.upload_bits) - 4.0
        whole = seen[:, devices, :SERVER_COLUMNS]
        whole[:, :2] = now.servers_m / now.settings.side_m
        whole[:, 2] = np.log10(now.server_flops) - 13.0
        whole[:, 3] = now.queue_slots
        return np.clip(seen, -_LIMIT, _LIMIT).astype(np.float32)

    def play(self, actions: Floats) -> Outcome:
        """``actions`` (E, 2 M + 1): every device's bandwidth, every one's compute, band used."""
        now = self.world.snapshot
        terms = self._cost.terms(now)
        devices = terms.devices
        pairs = np.stack([actions[:, :devices].T, actions[:, devices:-1].T], axis=-1)
        weights = action_weights(pairs, actions[:, -1:])
        matched = two_phase_matching(terms, weights, best_gain(now.gains), self._steps)
        decision = weighted(weights, matched.association)
        chance = self._dice.integers(terms.servers, size=devices)
        reference = objective(terms, uniform(terms, chance))
        self.world.advance(decision.association)
        self.slot += 1
        return Outcome(objective(terms, decision), reference)


def observation_space(rows: int) -> spaces.Space[Any]:
    shape = (rows, PAIR_COLUMNS + DEVICE_COLUMNS)
    return spaces.Box(-_LIMIT, _LIMIT, shape, np.float32)


class ServersEnv(ParallelEnv):  # type: ignore[misc]  # No annotations there.
    """An agent a server, all acting at once, all rewarded alike. ``steps``: how devices are matched
    under the agents' weights; the paper's way is ``Steps.SWAPS``."""

    metadata: dict[str, Any] = {"name": "edgespec_uara_v0", "render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        settings: UaraSettings | None = None,
        cost: CostModel | None = None,
        steps: Steps = Steps.SWAPS_AND_MOVES,
    ) -> None:
        self._settings = settings or UaraSettings()
        self._cost, self._steps = cost or PaperCost(), steps
        self.possible_agents = [f"server_{index}" for index in range(self._settings.servers)]
        self.agents: list[str] = []
        self.render_mode = None
        seen = observation_space(self._settings.devices + 1)
        acts = spaces.Box(-1.0, 1.0, (2 * self._settings.devices + 1,), np.float32)
        self.observation_spaces = dict.fromkeys(self.possible_agents, seen)
        self.action_spaces = dict.fromkeys(self.possible_agents, acts)
        self._seeds = np.random.default_rng()
        self._game: SlotGame | None = None

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, dict[str, Any]]]:
        if seed is not None:
            self._seeds = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        seed = int(self._seeds.integers(_SEEDS))
        self._game = SlotGame(self._settings, self._cost, seed, self._steps)
        return self._observe(self._game), {agent: {} for agent in self.agents}

    def step(
        self, actions: dict[str, Observation]
    ) -> tuple[
        dict[str, Observation],
        dict[str, float],
        dict[str, bool],
        dict[str, bool],
        dict[str, dict[str, Any]],
    ]:
        if self._game is None:
            raise RuntimeError("reset() comes before step()")
        joint = np.stack([actions[agent] for agent in self.agents]).astype(np.float64)
        outcome = self._game.play(joint)
        agents, over = self.agents, self._game.slot >= SLOTS
        seen = self._observe(self._game)
        if over:
            self.agents = []
        return (
            seen,
            dict.fromkeys(agents, outcome.reward),
            dict.fromkeys(agents, False),
            dict.fromkeys(agents, over),
            {agent: {"cost": outcome.cost} for agent in agents},
        )

    def _observe(self, game: SlotGame) -> dict[str, Observation]:
        return dict(zip(self.possible_agents, game.observe(), strict=True))


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
