"""All methods by name: each has a rule that associates, and a rule that divides each server.

The paper's three baselines associate by a rule and divide evenly. The other methods separate the
benefit of the association from that of the shares, and show what remains to be gained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import numpy as np

from edgespec_uara.cost import Decision, Terms, Weights, decide_evenly, decide_optimally
from edgespec_uara.world import Floats, Ints, Snapshot

# --- two-phase matching ------------------------------------------------------------------------
# Each device first gets the server with its best gain; then swaps and moves follow while the cost
# falls. With shares in proportion to weights (``cost.Weights``; uniform shares are weights of 1), a
# server's cost consists of a few sums over its devices. With V = sum v, and u the share of the band
# in use, it is
#     sum constant + (u / V) sum power v + balance ((V / u)^2 sum (uplink / v)^2
#         - 2 (V / u) sum draft uplink / v + sum draft^2) + Q sum work / q
# So the effect of a move or a swap is exact, and is computed for all moves and all swaps at once
# from sums with one device removed or added. Each iteration applies the best change, after which
# only the two affected servers are computed again. The cost strictly falls and there are finitely
# many associations, so the search ends; a limit guards against rounding.

TOLERANCE = 1e-7
"""Least improvement relative to the present cost; a smaller one is rounding."""


class Steps(Enum):
    SWAPS = auto()
    """Only swaps, as in the paper: each server keeps its number of devices."""
    SWAPS_AND_MOVES = auto()


def best_gain(gains: Floats) -> Ints:
    """Return, for each device, the server with the best gain (the first phase)."""
    return np.asarray(gains.argmax(axis=1))


def two_phase_matching(
    terms: Terms,
    weights: Weights,
    start: Ints,
    steps: Steps = Steps.SWAPS_AND_MOVES,
    sign: float = 1.0,
) -> Ints:
    """Run the second phase from ``start``, and return the association (M,). Shares follow
    ``weights`` throughout. A ``sign`` of -1 is the paper's inequality as printed, which maximises
    the cost."""
    search = _Search(terms, weights, start)
    for _ in range(20 * terms.devices):
        if not search.improve(steps, sign):
            break
    return search.association


class _Search:
    """An association with the sums of every server under it."""

    def __init__(self, terms: Terms, weights: Weights, start: Ints) -> None:
        self.association = start.copy()
        self._balance, self._used = terms.balance, weights.used
        v, q = weights.bandwidth, weights.compute
        ones = np.ones_like(v)
        sending_ms = terms.uplink / v
        # Shape (sums, M, E): the addend of each device to each sum of each server.
        self._parts = np.stack(
            [
                terms.constant,
                v,
                terms.power[:, None] * v,
                sending_ms**2,
                terms.draft[:, None] * sending_ms,
                terms.draft[:, None] ** 2 * ones,
                q,
                terms.work / q,
            ]
        )
        self._all_devices = np.arange(terms.devices)
        own = self._parts[:, self._all_devices, start]
        sums = [np.bincount(start, part, terms.servers) for part in own]
        self._sums: Floats = np.stack(sums).astype(np.float64)
        self.costs = self._cost(self._sums, self._used)
        # The change of a device's own server's cost when the device leaves (M,), and when another
        # one replaces it (M, M): row i, column k is i's server after i left and k joined.
        self._leaving = np.empty(terms.devices)
        self._replacing = np.empty((terms.devices, terms.devices))
        self._update_changes(self._all_devices)

    def _cost(self, sums: Floats, used: Floats) -> Floats:
        """Return the costs of servers with these sums (axis 0 is the sum). Empty servers cost
        nothing."""
        constant, v, power, squares, cross, drafts, q, work = sums
        wide = v / used
        safe = np.where(wide > 0, wide, 1.0)
        gap = wide**2 * squares - 2.0 * wide * cross + drafts
        return np.asarray(constant + power / safe + self._balance * gap + q * work)

    def improve(self, steps: Steps, sign: float) -> bool:
        """Apply the best change. Returns False if none improves the cost by more than rounding."""
        at = self.association
        swap_i, swap_k, swap = self._best_swap(sign)
        threshold = -TOLERANCE * abs(float(self.costs.sum()))
        if steps is Steps.SWAPS_AND_MOVES:
            device, server, move = self._best_move(sign)
            if move <= swap and move < threshold:
                self._reassign(device, server)
                return True
        if swap < threshold:
            self._reassign(swap_i, int(at[swap_k]), swap_k, int(at[swap_i]))
            return True
        return False

    def _best_move(self, sign: float) -> tuple[int, int, float]:
        joined = self._cost(self._sums[:, None, :] + self._parts, self._used) - self.costs
        delta = sign * (self._leaving[:, None] + joined)
        delta[self._all_devices, self.association] = np.inf
        device, server = divmod(int(delta.argmin()), delta.shape[1])
        return device, server, float(delta[device, server])

    def _best_swap(self, sign: float) -> tuple[int, int, float]:
        """Find the best swap, which is the sum of two replacements."""
        at = self.association
        delta = sign * (self._replacing + self._replacing.T)
        delta[at[:, None] == at[None, :]] = np.inf
        first, second = divmod(int(delta.argmin()), len(at))
        return first, second, float(delta[first, second])

    def _reassign(self, *changes: int) -> None:
        """Reassign devices, given as pairs of a device and its new server."""
        devices, servers = list(changes[::2]), list(changes[1::2])
        touched = np.unique([*self.association[devices], *servers])
        self.association[devices] = servers
        for server in touched:
            members = np.flatnonzero(self.association == server)
            # The sums are computed again, since repeated addition and subtraction would drift.
            self._sums[:, server] = self._parts[:, members, server].sum(axis=1)
        self.costs = self._cost(self._sums, self._used)
        self._update_changes(np.flatnonzero(np.isin(self.association, touched)))

    def _update_changes(self, devices: Ints) -> None:
        """Update the changes of cost at the servers of these devices."""
        at = self.association[devices]
        less = self._sums[:, at] - self._parts[:, devices, at]
        self._leaving[devices] = self._cost(less, self._used[at]) - self.costs[at]
        # parts[:, k, server of i] as (sums, i, k).
        coming = self._parts[:, :, at].transpose(0, 2, 1)
        changed = self._cost(less[:, :, None] + coming, self._used[at][:, None])
        self._replacing[devices] = changed - self.costs[at][:, None]


# --- inputs and outputs of a learned allocation of resources -----------------------------------
# Actions lie in (-1, 1). The two actions of a pair become weights exp(4 a). The action of a server
# becomes the share of the band in use, exp(1.5 (a - 1)), from 5 % to all of it.

FEATURES = 6
PAIR_ACTIONS, SERVER_ACTIONS = 2, 1
WEIGHT_SPAN, USED_SPAN = 4.0, 1.5


def pair_features(terms: Terms) -> Floats:
    """Return features (M, E, features), each of order 1: logarithms of the five terms, and the
    constant."""

    def log(milliseconds: Floats, middle: float) -> Floats:
        return np.asarray(np.log(np.maximum(milliseconds, 1e-3) / middle) / 2.0)

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
    """Convert actions (M, E, 2) and (E, 1), in [-1, 1], to weights."""
    return Weights(
        bandwidth=np.exp(WEIGHT_SPAN * pair_actions[..., 0]),
        compute=np.exp(WEIGHT_SPAN * pair_actions[..., 1]),
        used=np.exp(USED_SPAN * (server_actions[..., 0] - 1.0)),
    )


PAPER_BASELINES = ("random", "max-SINR", "max-compute")
PAPERS_MATCHING = "paper's TMA, even shares"
"""Only swaps, and nothing learned."""
WITH_OPTIMAL = "paper's TMA, convex shares"
"""Swaps, with our shares of least cost."""
WITH_MOVES = "ours: TMA and moves, even shares"
"""Swaps and, as our addition, moves of single devices."""
WITH_MOVES_OPTIMAL = "ours: TMA and moves, convex shares"
NO_SPECULATION = "no speculation"


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of a method."""

    snapshot: Snapshot
    terms: Terms
    rng: np.random.Generator


@dataclass(frozen=True, slots=True)
class Method:
    associate: Callable[[Situation], Ints]
    share: Callable[[Terms, Ints], Decision] = decide_evenly
    speculates: bool = True
    """False: the situation's terms are those of the server alone."""


def _spread_over_compute(snapshot: Snapshot) -> Ints:
    """Assign devices in order, each to the server with the most compute left for one more."""
    association = np.zeros(len(snapshot.tokens), dtype=np.int64)
    counts = np.zeros(snapshot.settings.servers)
    for device in range(len(association)):
        server = int((snapshot.server_flops / (counts + 1.0)).argmax())
        association[device] = server
        counts[server] += 1.0
    return association


def _best_gain_among_fastest(snapshot: Snapshot) -> Ints:
    """Assign each device to the server of the fastest class with the best gain."""
    fastest = snapshot.server_flops == snapshot.server_flops.max()
    return best_gain(np.where(fastest, snapshot.gains, -1.0))


MAX_COMPUTE: Mapping[str, Callable[[Snapshot], Ints]] = {
    "spread": _spread_over_compute,
    "one": lambda snapshot: np.full(len(snapshot.tokens), snapshot.server_flops.argmax()),
    "best-heard": _best_gain_among_fastest,
}
"""Readings of the paper's baseline: ours, then its words with two ways to break ties."""


def _two_phase(s: Situation, steps: Steps) -> Ints:
    """Return the association of two-phase matching under even shares."""
    even, start = Weights.even(s.terms), best_gain(s.snapshot.gains)
    return two_phase_matching(s.terms, even, start, steps)


_SWAPS = partial(_two_phase, steps=Steps.SWAPS)
_MOVES = partial(_two_phase, steps=Steps.SWAPS_AND_MOVES)


def make_methods(max_compute: str) -> dict[str, Method]:
    """Return all methods, with the given reading of max-compute."""
    reading = MAX_COMPUTE[max_compute]
    return {
        "random": Method(lambda s: s.rng.integers(s.terms.servers, size=s.terms.devices)),
        "max-SINR": Method(lambda s: best_gain(s.snapshot.gains)),
        "max-compute": Method(lambda s: reading(s.snapshot)),
        PAPERS_MATCHING: Method(_SWAPS),
        WITH_OPTIMAL: Method(_SWAPS, decide_optimally),
        WITH_MOVES: Method(_MOVES),
        WITH_MOVES_OPTIMAL: Method(_MOVES, decide_optimally),
        NO_SPECULATION: Method(
            lambda s: _spread_over_compute(s.snapshot), decide_optimally, speculates=False
        ),
    }
