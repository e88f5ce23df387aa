"""The trained resource allocation, in numpy: features in, shares out. No torch here.

Each server is an agent; all share one set of parameters. An agent looks at a list of devices that
it may be any length of: every device is embedded by the same small network, the mean of its own
devices' embeddings says how crowded it is and with what, and from the two come the device's
weights of bandwidth and compute. So one policy serves any number of devices and servers.

Actions lie in (-1, 1). A pair's two become weights exp(4 a); a server's one becomes the share of
the band in use, exp(1.5 (a - 1)), from 5 % to all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from edgespec_uara.cost import Decision, Terms, objective
from edgespec_uara.matching import Steps, two_phase_matching
from edgespec_uara.shares import Weights, weighted
from edgespec_uara.world import Floats, Ints

FEATURES = 6
PAIR_ACTIONS, SERVER_ACTIONS = 2, 1
WEIGHT_SPAN, USED_SPAN = 4.0, 1.5
ROUNDS = 3
"""Of matching under the actor's weights, then weights for the new association."""
SHIPPED = "masac"
LAYERS = ("embed0", "embed1", "pair0", "pair1", "server0", "server1")


def pair_features(terms: Terms) -> Floats:
    """(M, E, features), each of order 1: logarithms of the five terms, and the constant."""

    def log(milliseconds: Floats, middle: float) -> Floats:
        scaled: Floats = np.log(np.maximum(milliseconds, 1e-3) / middle) / 2.0
        return scaled

    shape = terms.constant.shape
    columns = [
        log(terms.uplink, 5.0),
        np.broadcast_to(log(terms.draft, 50.0)[:, None], shape),
        log(terms.work, 50.0),
        np.broadcast_to(log(terms.power + 1.0, 300.0)[:, None], shape),
        log(terms.uplink / terms.draft[:, None], 0.1),
        log(terms.constant, 200.0),
    ]
    return np.stack(columns, axis=-1)


def action_weights(pair_actions: Floats, server_actions: Floats) -> Weights:
    """Actions (M, E, 2) and (E, 1), in [-1, 1], as weights."""
    return Weights(
        bandwidth=np.exp(WEIGHT_SPAN * pair_actions[..., 0]),
        compute=np.exp(WEIGHT_SPAN * pair_actions[..., 1]),
        used=np.exp(USED_SPAN * (server_actions[..., 0] - 1.0)),
    )


@dataclass(frozen=True, slots=True)
class Actor:
    """Arrays ``NAME.weight`` (out, in) and ``NAME.bias`` (out,) for each of ``LAYERS``."""

    arrays: Mapping[str, Floats]

    def __post_init__(self) -> None:
        wanted = {f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias")}
        if set(self.arrays) != wanted:
            raise ValueError(f"a policy of arrays {sorted(self.arrays)}: wanted {sorted(wanted)}")
        inputs = self.arrays["embed0.weight"].shape[1]
        if inputs != FEATURES:
            raise ValueError(f"a policy for {inputs} features; this version has {FEATURES}")

    @classmethod
    def load(cls, path: Path) -> Actor:
        with np.load(path, allow_pickle=False) as arrays:
            return cls({name: arrays[name].astype(np.float64) for name in arrays})

    @classmethod
    def shipped(cls) -> Actor:
        with resources.as_file(resources.files("edgespec_uara") / "policies") as folder:
            return cls.load(folder / f"{SHIPPED}.npz")

    def actions(self, features: Floats, association: Ints) -> tuple[Floats, Floats]:
        """Most likely actions: of all pairs (M, E, 2) and of all servers (E, 1).

        A pair that is not associated is judged as one more device of that server.
        """
        devices, servers = np.arange(len(association)), features.shape[1]
        embedded = self._two("embed", features, last=True)
        own = embedded[devices, association]
        counts = np.bincount(association, minlength=servers)
        pooled = np.zeros((servers, own.shape[1]))
        np.add.at(pooled, association, own)
        pooled /= np.maximum(counts, 1)[:, None]
        crowd = np.concatenate([pooled, crowding(counts)[:, None]], axis=1)
        beside = np.broadcast_to(crowd, (*features.shape[:2], crowd.shape[1]))
        pairs = self._two("pair", np.concatenate([embedded, beside], axis=-1))
        whole = self._two("server", crowd)
        return np.tanh(pairs[..., :PAIR_ACTIONS]), np.tanh(whole[..., :SERVER_ACTIONS])

    def actions_before_matching(self, features: Floats) -> tuple[Floats, Floats]:
        """The same while no device has a server yet: every server pools all devices."""
        devices, servers = features.shape[:2]
        embedded = self._two("embed", features, last=True)
        count = np.full((servers, 1), float(crowding(np.array(devices))))
        crowd = np.concatenate([embedded.mean(axis=0), count], axis=1)
        beside = np.broadcast_to(crowd, (devices, *crowd.shape))
        pairs = self._two("pair", np.concatenate([embedded, beside], axis=-1))
        whole = self._two("server", crowd)
        return np.tanh(pairs[..., :PAIR_ACTIONS]), np.tanh(whole[..., :SERVER_ACTIONS])

    def _two(self, name: str, rows: Floats, last: bool = False) -> Floats:
        hidden = np.maximum(self._linear(f"{name}0", rows), 0.0)
        out = self._linear(f"{name}1", hidden)
        return np.maximum(out, 0.0) if last else out

    def _linear(self, name: str, rows: Floats) -> Floats:
        product: Floats = rows @ self.arrays[f"{name}.weight"].T + self.arrays[f"{name}.bias"]
        return product

    def weights(self, features: Floats, association: Ints) -> Weights:
        return action_weights(*self.actions(features, association))


def crowding(counts: Ints) -> Floats:
    """How many devices a server has, as a feature of order 1."""
    crowded: Floats = np.log1p(counts.astype(np.float64)) - 2.0
    return crowded


def masac_shares(actor: Actor, terms: Terms, association: Ints) -> Decision:
    """The policy's shares for a fixed association."""
    return weighted(actor.weights(pair_features(terms), association), association)


def tma_masac(actor: Actor, terms: Terms, start: Ints, steps: Steps) -> Decision:
    """Matching and the policy's shares take turns; the best round's decision is returned.

    The paper matches by ``Steps.SWAPS``; with moves as well the method is ours, and far better.
    """
    features = pair_features(terms)
    association, best = start, masac_shares(actor, terms, start)
    for _ in range(ROUNDS):
        weights = actor.weights(features, association)
        association = two_phase_matching(terms, weights, association, steps).association
        decision = weighted(actor.weights(features, association), association)
        if objective(terms, decision) < objective(terms, best):
            best = decision
    return best


def papers_tma_masac(actor: Actor, terms: Terms, start: Ints) -> Decision:
    """The paper's order of things: weights first, for all pairs, then swaps under them."""
    weights = action_weights(*actor.actions_before_matching(pair_features(terms)))
    matched = two_phase_matching(terms, weights, start, Steps.SWAPS)
    return weighted(weights, matched.association)
