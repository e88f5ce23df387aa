"""Teach ``LearnedAssociation`` what greedy search with optimal shares would do.

Imitation, device after device: the teacher's association of a world is walked through in order,
each server counting those of the teacher's devices that came before, and the network's scores are
pushed (softmax cross-entropy) towards the teacher's server. It sees only what an agent would.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgespec.core.association.network import FEATURES, Layer, LearnedAssociation, pair_features
from edgespec_uara.cost import CostModel
from edgespec_uara.local_search import greedy_with_search
from edgespec_uara.masac.learner import one_thread
from edgespec_uara.planning import views
from edgespec_uara.world import Floats, Ints, UaraSettings, UaraWorld

WIDTH = 24
DEVICES, SERVERS = (20, 181), (3, 21)
LEARNING_RATE, PASSES, BATCH = 3e-3, 60, 256


@dataclass(frozen=True, slots=True)
class Lesson:
    """Features (M, E, F) of each device's choice, and the teacher's choice (M,)."""

    features: Floats
    chosen: Ints


def lesson(seed: int, cost: CostModel) -> Lesson:
    rng = np.random.default_rng(seed)
    settings = UaraSettings(
        devices=int(rng.integers(*DEVICES)), servers=int(rng.integers(*SERVERS))
    )
    now = UaraWorld(settings, int(rng.integers(2**31))).snapshot
    chosen = greedy_with_search(cost.terms(now)).association
    seen, counts = views(now), [0] * settings.servers
    features = []
    for device, row, server in zip(seen.devices, seen.links, chosen.tolist(), strict=True):
        pairs = zip(seen.verifiers, row, counts, strict=True)
        features.append([pair_features(device, *pair) for pair in pairs])
        counts[server] += 1
    return Lesson(np.array(features), chosen)


def distil(worlds: int, seed: int, cost: CostModel) -> tuple[LearnedAssociation, float]:
    """The network, and how often it names the teacher's server."""
    one_thread()
    torch.manual_seed(seed)
    features, mask, chosen = _stacked([lesson(seed + index, cost) for index in range(worlds)])
    network = nn.Sequential(
        nn.Linear(len(FEATURES), WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, 1),
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
