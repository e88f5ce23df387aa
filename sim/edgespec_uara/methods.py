"""Every method by name: from a snapshot and a cost model to a decision.

The paper's three baselines associate by a rule and share evenly. The others tell apart what the
association is worth and what the shares are worth, and what is left to gain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from edgespec_uara.cost import CostModel, Decision, Terms
from edgespec_uara.local_search import greedy, greedy_with_search, local_search
from edgespec_uara.matching import Steps, best_gain, two_phase_matching
from edgespec_uara.policy import Actor, masac_shares, tma_masac
from edgespec_uara.shares import Weights, optimal, uniform
from edgespec_uara.world import Ints, Snapshot

TMA_MASAC = "TMA-MASAC"
"""The paper's method: matching by swaps alone, shares by the trained policy."""
TMA_MASAC_MOVES = "TMA-MASAC, moves too"
"""The same with moves of single devices in the matching, which is ours."""
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


def _by_turns(actor: Actor, situation: Situation, steps: Steps) -> Decision:
    return tma_masac(actor, situation.terms, best_gain(situation.snapshot.gains), steps)


def methods(actor: Actor) -> Mapping[str, Method]:
    return {
        "random": lambda s: uniform(s.terms, s.chance),
        "max-SINR": lambda s: uniform(s.terms, best_gain(s.snapshot.gains)),
        "max-compute": lambda s: uniform(s.terms, max_compute(s.snapshot)),
        "random + MASAC": lambda s: masac_shares(actor, s.terms, s.chance),
        "max-SINR + optimal shares": lambda s: optimal(s.terms, best_gain(s.snapshot.gains)),
        "TMA (swaps) + uniform": lambda s: uniform(s.terms, two_phase(s, Steps.SWAPS)),
        "TMA + uniform": lambda s: uniform(s.terms, two_phase(s)),
        TMA_MASAC: lambda s: _by_turns(actor, s, Steps.SWAPS),
        TMA_MASAC_MOVES: lambda s: _by_turns(actor, s, Steps.SWAPS_AND_MOVES),
        "TMA + optimal shares": lambda s: optimal(s.terms, two_phase(s)),
        "greedy + optimal shares": lambda s: greedy(s.terms),
        "greedy + search + optimal shares": lambda s: greedy_with_search(s.terms),
    }


def without_speculation(snapshot: Snapshot, cost: CostModel) -> tuple[Terms, Decision]:
    """The server decodes alone: its own terms, association by search, optimal shares."""
    terms = cost.plain_terms(snapshot)
    return terms, local_search(terms, max_compute(snapshot))
