"""Draft policies: what to draft next, and when to send what was drafted.

Theory of operation. After every event the session asks ``flush`` (send all unsent nodes now?) and,
when no draft step runs, ``extend`` (behind which node shall the next step run?). Both are pure
functions of a view. A policy is asked before a token is drafted and never un-drafts one on its
value, so drafting stays independent of what the noise came up with. Nodes *in flight* are sent and
neither committed nor killed yet.

    fixed     draft gamma tokens, send them, wait: split speculative decoding as published
    pearl     send when nothing is in flight: the first node after a miss goes out at once
              (pre-verify) and drafting goes on behind what was sent (post-verify)
    windowed  send every step at once, and draft on where a guess is most likely to count, as long
              as it saves more than its row in a pass costs

The three are settings of one machine, which makes the published schemes honest baselines
(PEARL: arXiv 2408.11850).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from edgespec.core.estimators import DraftEstimates
from edgespec.core.tree import ROOT, SpeculationTree
from edgespec.core.value import value

# Guesses until the first measurement: a laptop's draft, a server's pass, a regional link.
_STEP_S, _PASS_S, _RTT_S = 0.01, 0.03, 0.03
MAX_GAMMA = 32


@value
class DraftView:
    tree: SpeculationTree
    unsent: int
    """Alive nodes not sent yet."""
    in_flight: int
    """Alive nodes sent."""
    room: int
    """How many more nodes the verifier takes."""
    end: int
    """Nodes at this position or later cannot matter any more."""
    estimates: DraftEstimates

    @property
    def round_s(self) -> float:
        """From sending a node to hearing of its pass."""
        return self.estimates.rtt_s.get(_RTT_S) + self.pass_s

    @property
    def pass_s(self) -> float:
        return self.estimates.pass_s.get(_PASS_S)

    @property
    def step_s(self) -> float:
        return max(self.estimates.step_s.get(_STEP_S), 1e-6)

    @property
    def token_s(self) -> float:
        """Time for each token, of late."""
        estimates = self.estimates
        return max(estimates.commit_s.get(_PASS_S) / estimates.commit_tokens.get(1.0), 1e-6)

    def tip(self) -> int | None:
        """The end of the chain of first choices; None when the text ends there."""
        at, position, children = ROOT, self.tree.prefix.length, self.tree.roots
        while children:
            first = children[0]
            at, position, children = first.id, first.position + 1, first.children
        return at if position < self.end else None


class DraftPolicy(Protocol):
    @property
    def width(self) -> int:
        """How many of the draft's choices each step adds."""

    def extend(self, view: DraftView) -> int | None:
        """The node (or ``ROOT``) to draft behind, or None to rest until something happens."""

    def flush(self, view: DraftView) -> bool:
        """Whether to send the unsent nodes now."""


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Stop and wait with draft length ``gamma``; None picks the best one for the estimates."""

    gamma: int | None = None
    width: int = 1

    def extend(self, view: DraftView) -> int | None:
        if view.in_flight or view.unsent >= self._gamma(view) or view.room < self.width:
            return None
        return view.tip()

    def flush(self, view: DraftView) -> bool:
        return not view.in_flight and view.unsent >= self._gamma(view)

    def _gamma(self, view: DraftView) -> int:
        if self.gamma is not None:
            return self.gamma
        rate = min(view.estimates.acceptance.rate(0), 0.99)
        return best_gamma(rate, view.step_s, view.round_s)


def best_gamma(rate: float, step_s: float, round_s: float) -> int:
    """The draft length with the most tokens a second, for independent acceptances of ``rate``:
    (1 - rate**(gamma+1)) / (1 - rate) tokens every gamma * step_s + round_s (Leviathan et al.
    2211.17192, section 3.3, with the round trip added)."""
    speeds = {
        gamma: (1 - rate ** (gamma + 1)) / (gamma * step_s + round_s)
        for gamma in range(1, MAX_GAMMA + 1)
    }
    return max(speeds, key=lambda gamma: speeds[gamma])


@dataclass(frozen=True, slots=True)
class PearlPolicy:
    """Pre-verify and post-verify; ``gamma`` None adapts to what fits into one round."""

    gamma: int | None = None
    width: int = 1

    def extend(self, view: DraftView) -> int | None:
        gamma = self.gamma or min(MAX_GAMMA, math.ceil(view.round_s / view.step_s))
        return view.tip() if view.unsent < gamma and view.room >= self.width else None

    def flush(self, view: DraftView) -> bool:
        return view.unsent > 0 and not view.in_flight


@dataclass(frozen=True, slots=True)
class WindowedPolicy:
    """Stream on: each step's nodes leave at once; the next step runs where it is most likely to
    count, by the observed acceptance of each rank along the path (width 1: at the chain's end)."""

    width: int = 1
    window: int | None = None
    """Steps whose nodes may be outstanding; None: what two rounds can hold."""
    least_chance: float = 0.05
    """Rest rather than draft behind a node less likely than this to be reached."""
    step_price: float = 0.16
    """Lowers ``least_chance`` where a pass takes many steps: one behind a node of chance p is worth
    its energy while p passes take at least so many steps."""

    def extend(self, view: DraftView) -> int | None:
        step_s, tree = view.step_s, view.tree
        window = self.window or math.ceil(2 * view.round_s / step_s) + 4
        if len(tree.nodes) >= window * self.width or view.room < self.width:
            return None
        if not tree.roots and tree.prefix.length < view.end:
            return ROOT
        last_rank, last_position = self.width - 1, view.end - 2
        rates = [view.estimates.acceptance.rate(rank) for rank in range(self.width)]
        best, best_chance = ROOT, self._least_chance(view, step_s, sum(rates))
        pending = [(1.0, tree.roots)]
        while pending:
            before, siblings = pending.pop()
            for node in siblings:
                rank = node.rank
                chance = before * rates[rank if rank < last_rank else last_rank]
                if chance < best_chance:
                    continue  # nor is anything behind it likelier
                if node.children:
                    pending.append((chance, node.children))
                elif node.position <= last_position:
                    # The oldest of equals.
                    if chance > best_chance or node.id < best:
                        best, best_chance = node.id, chance
        return best or None

    def flush(self, view: DraftView) -> bool:
        return view.unsent > 0

    def _least_chance(self, view: DraftView, step_s: float, hit_rate: float) -> float:
        """Below it a step saves less than what it and the rows that it adds to a pass take."""
        row_s = view.estimates.row_s.get()
        if row_s is None:
            return self.least_chance
        for_step = min(self.least_chance, self.step_price * step_s / view.pass_s)
        return max(for_step, self.width * row_s / (hit_rate * view.token_s))
