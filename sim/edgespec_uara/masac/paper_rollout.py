"""Experience in the paper's own setting: its environment, its state, its reward.

The PettingZoo environment is played as it stands: each agent, a server, sees every device and acts
on all of them before anybody is matched; swaps follow; all are paid alike, by the cost of random
association with even shares over theirs, neither bounded nor taken apart. Compare ``rollout.py``,
whose reward is made for learning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from edgespec_uara.cost import CostModel, PaperCost, objective, uniform, weighted
from edgespec_uara.masac.learner import Scene, TorchActor, Transition, layout_of
from edgespec_uara.methods import (
    FEATURES,
    Steps,
    action_weights,
    best_gain,
    pair_features,
    two_phase_matching,
)
from edgespec_uara.world import Floats, UaraSettings, UaraWorld

# --- the slot game as a PettingZoo environment, an agent a server ------------------------------
# A step is a slot: actions become weights of bandwidth and compute (``policy.action_weights``),
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
