"""Soft actor-critic (Haarnoja et al., 2018) for many agents with one shared actor.

Twin centralised critics, the smaller of the two counts; target critics follow slowly; the entropy
temperature is tuned to a target entropy. The discount is low: shares settle within their slot, and
only the association carries over to the next one, through the queues.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgespec_uara.cost import CostModel, Terms, Weights, device_costs, uniform, weighted
from edgespec_uara.methods import (
    FEATURES,
    PAIR_ACTIONS,
    SERVER_ACTIONS,
    USED_SPAN,
    WEIGHT_SPAN,
    action_weights,
    best_gain,
    greedy_with_search,
    pair_features,
    two_phase_matching,
    views,
)
from edgespec_uara.network import FEATURES as VIEW_FEATURES
from edgespec_uara.network import Layer, LearnedAssociation
from edgespec_uara.network import pair_features as view_features
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
    """The shared actor. ``policy.Actor`` computes the same means from the same arrays."""

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
# scenes (one slot, as the agents saw it) and the worlds that they come from.
# Training worlds vary in everything that the sweep varies and more: devices per server, band per
# server, transmit power, w. Associations vary too (matched, by gain, at random, disturbed), so
# that the shares learned do not rest on one way of associating.
# The paper's reward is the cost of a reference over ours. In training it is taken an agent at a
# time, as a bounded logarithm (which tames ratios of a thousand), without the constants that no
# share can change, and over the *same* association with even shares: a random association is a
# reference too noisy to learn a percent from, and none of this moves the best action.


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


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """Of one training."""

    actor_rate: float = 3e-4
    critic_rate: float = 1e-3
    temperature_rate: float = 1e-3
    discount: float = 0.1
    follow: float = 0.01
    """How far the target critics move towards the critics, an update."""
    batch: int = 24
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
        """The actor as ``policy.Actor`` takes it."""
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


# --- teach ``LearnedAssociation`` what greedy search with optimal shares would do --------------
# Imitation, device after device: the teacher's association of a world is walked through in order,
# each server counting those of the teacher's devices that came before, and the network's scores
# are pushed (softmax cross-entropy) towards the teacher's server. It sees only what an agent
# would.


HIDDEN_WIDTH = 24
LESSON_DEVICES, LESSON_SERVERS = (20, 181), (3, 21)
LEARNING_RATE, PASSES, BATCH = 3e-3, 60, 256


@dataclass(frozen=True, slots=True)
class Lesson:
    """Features (M, E, F) of each device's choice, and the teacher's choice (M,)."""

    features: Floats
    chosen: Ints


def lesson(seed: int, cost: CostModel) -> Lesson:
    rng = np.random.default_rng(seed)
    settings = UaraSettings(
        devices=int(rng.integers(*LESSON_DEVICES)), servers=int(rng.integers(*LESSON_SERVERS))
    )
    now = UaraWorld(settings, int(rng.integers(2**31))).snapshot
    chosen = greedy_with_search(cost.terms(now)).association
    seen, counts = views(now), [0] * settings.servers
    features = []
    for device, row, server in zip(seen.devices, seen.links, chosen.tolist(), strict=True):
        pairs = zip(seen.verifiers, row, counts, strict=True)
        features.append([view_features(device, *pair) for pair in pairs])
        counts[server] += 1
    return Lesson(np.array(features), chosen)


def distil(worlds: int, seed: int, cost: CostModel) -> tuple[LearnedAssociation, float]:
    """The network, and how often it names the teacher's server."""
    one_thread()
    torch.manual_seed(seed)
    features, mask, chosen = _stacked([lesson(seed + index, cost) for index in range(worlds)])
    network = nn.Sequential(
        nn.Linear(len(VIEW_FEATURES), HIDDEN_WIDTH), nn.ReLU(),
        nn.Linear(HIDDEN_WIDTH, HIDDEN_WIDTH), nn.ReLU(),
        nn.Linear(HIDDEN_WIDTH, 1),
    )  # fmt: skip
    optimiser = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, PASSES)
    for _ in range(PASSES):
        for rows in torch.randperm(len(chosen)).split(BATCH):
            scores = network(features[rows])[..., 0].masked_fill(mask[rows], -1e9)
            loss = F.cross_entropy(scores, chosen[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        schedule.step()
    with torch.no_grad():
        guesses = network(features)[..., 0].masked_fill(mask, -1e9).argmax(dim=1)
    agreement = float((guesses == chosen).float().mean())
    return LearnedAssociation(_layers(network)), agreement


def _stacked(lessons: list[Lesson]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of all devices, padded to the most servers; the mask is True on padding."""
    most = max(one.features.shape[1] for one in lessons)
    features, mask = [], []
    for one in lessons:
        missing = most - one.features.shape[1]
        features.append(np.pad(one.features, ((0, 0), (0, missing), (0, 0))))
        mask.append(np.broadcast_to(np.arange(most) >= most - missing, (len(one.chosen), most)))
    joined = torch.from_numpy(np.concatenate(features).astype(np.float32))
    chosen = torch.from_numpy(np.concatenate([one.chosen for one in lessons]))
    return joined, torch.from_numpy(np.concatenate(mask)), chosen


def _layers(network: nn.Sequential) -> list[Layer]:
    layers = []
    for module in network:
        if isinstance(module, nn.Linear):
            rows = module.weight.detach().double().numpy().round(5).tolist()
            bias = module.bias.detach().double().numpy().round(5).tolist()
            layers.append(Layer(tuple(map(tuple, rows)), tuple(bias)))
    return layers
