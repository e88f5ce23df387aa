"""The slot game as a PettingZoo environment, an agent a server.

A step is a slot: actions become weights of bandwidth and compute (``policy.action_weights``), the
two-phase matching associates devices under them, shares and cost follow, the world moves on.

Reward, for all agents the same: cost of random association with uniform shares, divided by ours.
Higher is better, 1 is no better than random. (The paper prints "divided by that of random", which
would reward cost.) The observation holds the paper's state: positions, gains, task, battery, queue.

Agents are servers, not devices: a share is a server's to give, so each agent's action is feasible
by itself (a softmax over its devices), whereas devices would have to agree on a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from edgespec_uara.cost import CostModel, objective
from edgespec_uara.matching import Steps, best_gain, two_phase_matching
from edgespec_uara.paper import PaperCost
from edgespec_uara.policy import action_weights, pair_features
from edgespec_uara.shares import uniform, weighted
from edgespec_uara.world import Floats, UaraSettings, UaraWorld

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
