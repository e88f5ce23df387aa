"""Actor and critic over lists of devices of any length.

Rows are (device, its server) pairs of many scenes, laid end to end; ``Layout`` says which server a
row belongs to and which scene a server belongs to. Pooling is a mean over rows or servers, so the
order of devices cannot matter and their number may change. The actor is decentralised (it sees
its own server's devices); the critic is centralised (it sees all servers of its scene).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgespec_uara.policy import (
    FEATURES,
    PAIR_ACTIONS,
    SERVER_ACTIONS,
    USED_SPAN,
    WEIGHT_SPAN,
)

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
