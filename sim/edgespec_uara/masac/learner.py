"""Soft actor-critic (Haarnoja et al., 2018) for many agents with one shared actor.

Twin centralised critics, the smaller of the two counts; target critics follow slowly; the entropy
temperature is tuned to a target entropy. The discount is low: shares settle within their slot, and
only the association carries over to the next one, through the queues.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from edgespec_uara.masac.networks import Critic, Layout, TorchActor
from edgespec_uara.masac.rollout import Transition, layout_of
from edgespec_uara.world import Floats


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
