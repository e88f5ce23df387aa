"""Every method by name: from a snapshot and a cost model to a decision.

The paper's three baselines associate by a rule and share evenly. The others tell apart what the
association is worth and what the shares are worth, and what is left to gain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from edgespec_uara.cost import (
    CostModel,
    Decision,
    Terms,
    Weights,
    optimal,
    uniform,
    weighted,
)
from edgespec_uara.world import Floats, Ints, Snapshot

# --- two-phase matching ------------------------------------------------------------------------
# each device to its best gain, then swaps and moves while the cost falls.
# With shares in proportion to weights (``shares.Weights``; uniform shares are weights of 1) a
# server's cost is made of a few sums over its devices: with V = sum v and u the share of the band
# used,
#     sum constant + (u / V) sum power v + balance ((V / u)^2 sum (uplink / v)^2
#         - 2 (V / u) sum draft uplink / v + sum draft^2) + Q sum work / q
# so what a move or a swap would change is exact, and is computed for all moves and all swaps at
# once from sums with one device taken out or put in. Each iteration applies the best one. The
# cost strictly falls and associations are finite, so it ends; a limit guards against rounding.


TOLERANCE = 1e-7
"""Of the present cost: less is rounding."""


class SwapTest(Enum):
    LOWERS_COST = auto()
    AS_PRINTED = auto()
    """The paper's inequality, that of a maximiser: kept to show what it does."""


class Steps(Enum):
    SWAPS = auto()
    """As the paper has it: each server keeps as many devices as it starts with."""
    SWAPS_AND_MOVES = auto()


@dataclass(frozen=True, slots=True)
class Matched:
    """An association (M,), its cost and the number of changes that led to it."""

    association: Ints
    cost: float
    changes: int


def best_gain(gains: Floats) -> Ints:
    """First phase: for each device the server it hears best."""
    best: Ints = gains.argmax(axis=1)
    return best


def two_phase_matching(
    terms: Terms,
    weights: Weights,
    start: Ints,
    steps: Steps = Steps.SWAPS_AND_MOVES,
    test: SwapTest = SwapTest.LOWERS_COST,
) -> Matched:
    """Second phase, from ``start``. Shares are those of ``weights`` throughout."""
    sign = 1.0 if test is SwapTest.LOWERS_COST else -1.0
    search = _Search(terms, weights, start)
    limit = 20 * terms.devices
    changes = 0
    while changes < limit and search.improve(steps, sign):
        changes += 1
    return Matched(search.association, float(search.costs.sum()), changes)


class _Search:
    """An association and the sums of every server under it."""

    def __init__(self, terms: Terms, weights: Weights, start: Ints) -> None:
        self.association = start.copy()
        self._balance, self._used = terms.balance, weights.used
        v, q = weights.bandwidth, weights.compute
        ones = np.ones_like(v)
        reach = terms.uplink / v
        # (sums, M, E): what each device would add to each sum of each server.
        self._parts = np.stack(
            [
                terms.constant,
                v,
                terms.power[:, None] * v,
                reach**2,
                terms.draft[:, None] * reach,
                terms.draft[:, None] ** 2 * ones,
                q,
                terms.work / q,
            ]
        )
        self._everyone = np.arange(terms.devices)
        own = self._parts[:, self._everyone, start]
        sums = [np.bincount(start, part, terms.servers) for part in own]
        self._sums: Floats = np.stack(sums).astype(np.float64)
        self.costs = self._cost(self._sums, self._used)

    def _cost(self, sums: Floats, used: Floats) -> Floats:
        """Of servers with these sums; axis 0 is the sum. Empty servers cost nothing."""
        constant, v, power, squares, cross, drafts, q, work = sums
        wide = v / used
        safe = np.where(wide > 0, wide, 1.0)
        gap = wide**2 * squares - 2.0 * wide * cross + drafts
        cost: Floats = constant + power / safe + self._balance * gap + q * work
        return cost

    def improve(self, steps: Steps, sign: float) -> bool:
        """Apply the best change; False when none helps by more than rounding."""
        at = self.association
        own = self._parts[:, self._everyone, at]
        less = self._sums[:, at] - own
        swap_i, swap_k, swap = self._best_swap(less, sign)
        device, server, move = self._best_move(less, sign)
        threshold = -TOLERANCE * abs(float(self.costs.sum()))
        if steps is Steps.SWAPS_AND_MOVES and move <= swap and move < threshold:
            self._put(device, server)
        elif swap < threshold:
            first, second = int(at[swap_i]), int(at[swap_k])
            self._put(swap_i, second)
            self._put(swap_k, first)
        else:
            return False
        return True

    def _best_move(self, less: Floats, sign: float) -> tuple[int, int, float]:
        at = self.association
        left = self._cost(less, self._used[at]) - self.costs[at]
        more = self._sums[:, None, :] + self._parts
        joined = self._cost(more, self._used) - self.costs
        delta = sign * (left[:, None] + joined)
        delta[self._everyone, at] = np.inf
        best = int(delta.argmin())
        device, server = divmod(best, delta.shape[1])
        return device, server, float(delta[device, server])

    def _best_swap(self, less: Floats, sign: float) -> tuple[int, int, float]:
        """Row i, column k: i's server after i left and k came; a swap is that plus its mirror."""
        at = self.association
        # parts[:, k, server of i] as (sums, i, k).
        coming = self._parts[:, :, at].transpose(0, 2, 1)
        changed = self._cost(less[:, :, None] + coming, self._used[at][:, None])
        half = changed - self.costs[at][:, None]
        delta = sign * (half + half.T)
        delta[at[:, None] == at[None, :]] = np.inf
        best = int(delta.argmin())
        first, second = divmod(best, delta.shape[1])
        return first, second, float(delta[first, second])

    def _put(self, device: int, server: int) -> None:
        old = int(self.association[device])
        self.association[device] = server
        for changed in (old, server):
            members = np.flatnonzero(self.association == changed)
            # Summed anew: sums that are only added to and subtracted from would drift.
            self._sums[:, changed] = self._parts[:, members, changed].sum(axis=1)
        self.costs = self._cost(self._sums, self._used)


# --- what a learned allocation of resources reads and says -------------------------------------
# Actions lie in (-1, 1). A pair's two become weights exp(4 a); a server's one becomes the share of
# the band in use, exp(1.5 (a - 1)), from 5 % to all of it.


FEATURES = 6
PAIR_ACTIONS, SERVER_ACTIONS = 2, 1
WEIGHT_SPAN, USED_SPAN = 4.0, 1.5


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


def tma_masac(weights: Weights, terms: Terms, start: Ints) -> Decision:
    """The paper's order of things: weights first, for all pairs, then swaps under them."""
    matched = two_phase_matching(terms, weights, start, Steps.SWAPS)
    return weighted(weights, matched.association)


PAPERS_MATCHING = "TMA (swaps) + uniform"
"""The paper's matching, its shares left even."""
WITH_MOVES = "TMA, moves too + uniform"
"""With moves of single devices as well, which is ours."""
WITH_OPTIMAL = "TMA (swaps) + optimal shares"
"""The paper's matching, its shares of least cost (convex)."""
PAPER_BASELINES = ("random", "max-SINR", "max-compute")
NO_SPECULATION = "no speculation"


@dataclass(frozen=True, slots=True)
class Situation:
    """What a method is given."""

    snapshot: Snapshot
    terms: Terms
    rng: np.random.Generator

    @property
    def chance(self) -> Ints:
        return self.rng.integers(self.terms.servers, size=self.terms.devices)


Method = Callable[[Situation], Decision]


def max_compute(snapshot: Snapshot) -> Ints:
    """Devices in order, each to the server with most compute left for one more."""
    association = np.zeros(len(snapshot.tokens), dtype=np.int64)
    counts = np.zeros(snapshot.settings.servers)
    for device in range(len(association)):
        server = int((snapshot.server_flops / (counts + 1.0)).argmax())
        association[device] = server
        counts[server] += 1.0
    return association


def two_phase(situation: Situation, steps: Steps = Steps.SWAPS_AND_MOVES) -> Ints:
    """Two-phase matching under uniform shares."""
    terms, start = situation.terms, best_gain(situation.snapshot.gains)
    return two_phase_matching(terms, Weights.even(terms), start, steps).association


METHODS: Mapping[str, Method] = {
    "random": lambda s: uniform(s.terms, s.chance),
    "max-SINR": lambda s: uniform(s.terms, best_gain(s.snapshot.gains)),
    "max-compute": lambda s: uniform(s.terms, max_compute(s.snapshot)),
    "max-SINR + optimal shares": lambda s: optimal(s.terms, best_gain(s.snapshot.gains)),
    PAPERS_MATCHING: lambda s: uniform(s.terms, two_phase(s, Steps.SWAPS)),
    WITH_MOVES: lambda s: uniform(s.terms, two_phase(s)),
    WITH_OPTIMAL: lambda s: optimal(s.terms, two_phase(s, Steps.SWAPS)),
    "TMA, moves too + optimal shares": lambda s: optimal(s.terms, two_phase(s)),
}


def without_speculation(snapshot: Snapshot, cost: CostModel) -> tuple[Terms, Decision]:
    """The server decodes alone: its own terms, matched by swaps and moves, optimal shares."""
    terms = cost.plain_terms(snapshot)
    matched = two_phase_matching(terms, Weights.even(terms), max_compute(snapshot))
    return terms, optimal(terms, matched.association)
