"""Draft policies that exist for comparison with the default one (``goodput_policy.py``).

The bench and the simulator measure the default against them; none is recommended for use.

    fixed     draft gamma steps, send them, wait: split speculative decoding as published
    pearl     send when nothing is in flight: the first node after a rejection is sent at once
              (pre-verify) and drafting goes on behind what was sent (post-verify)
    windowed  send every step at once or gather for the next pass, and draft on where a node is
              most likely to count by its rank, as long as it saves more than its row in a pass
              costs, here and by the verifier's price

They draft for one position per step. All are settings of one machine, which makes the published
schemes honest baselines (PEARL: arXiv 2408.11850).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.policy import DraftView, is_full, sends_now
from edgespec.core.protocol.tree import ROOT

MAX_GAMMA = 32


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Stop and wait with draft length ``gamma``; None picks the best length for the estimates."""

    gamma: int | None = None
    width: int = 1
    min_candidate_chance: ClassVar[float] = 0.0
    drops_useless_draft: ClassVar[bool] = False

    def is_hopeless(self, estimates: DraftEstimates) -> bool:
        return False

    def choose_parent(self, view: DraftView) -> int | None:
        if view.in_flight or view.unsent >= self._nodes_per_round(view) or view.room < self.width:
            return None
        return view.chain_end()

    def choose_places(self, view: DraftView) -> int:
        return 1

    def should_send(self, view: DraftView) -> bool:
        return not view.in_flight and view.unsent >= self._nodes_per_round(view)

    def _nodes_per_round(self, view: DraftView) -> int:
        if self.gamma is not None:
            return self.gamma * self.width
        rate = min(view.estimates.acceptance.rate(0), 0.99)
        return best_gamma(rate, view.step_s, view.round_s) * self.width


def best_gamma(rate: float, step_s: float, round_s: float) -> int:
    """Return the draft length that gives the most tokens per second if each draft token is accepted
    with probability ``rate``, independently of the others.

    Formula: (1 - rate**(gamma + 1)) / (1 - rate) tokens every gamma * step_s + round_s seconds
    (Leviathan et al. 2211.17192, section 3.3, with the round trip added). At a rate of 0.8, steps
    of 10 ms and a round of 50 ms, gamma 4 gives 3.36 tokens in 90 ms and is the best."""
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
    min_candidate_chance: ClassVar[float] = 0.0
    drops_useless_draft: ClassVar[bool] = False

    def is_hopeless(self, estimates: DraftEstimates) -> bool:
        return False

    def choose_parent(self, view: DraftView) -> int | None:
        gamma = self.gamma or min(MAX_GAMMA, math.ceil(view.round_s / view.step_s))
        full = view.unsent >= gamma * self.width or view.room < self.width
        return None if full else view.chain_end()

    def choose_places(self, view: DraftView) -> int:
        return 1

    def should_send(self, view: DraftView) -> bool:
        return view.unsent > 0 and not view.in_flight


@dataclass(frozen=True, slots=True)
class WindowedPolicy:
    """Drafts where a node is most likely to count.

    The chance that a node counts is the product of the acceptance rates of the ranks on its path:
    with rates 0.7 and 0.1, the second candidate behind two first ones has 0.7 * 0.7 * 0.1 = 0.05.
    The next step runs behind the likeliest leaf (with width 1: at the chain's end), unless even
    that is less likely than a step there is worth.

    A row is paid for at its pass, when the tokens that were committed meanwhile are known to be
    right. So the verifier's price is compared with the chance that is left then: the product from
    ``DraftView.settled_position`` on. With first candidates right at 0.8 and two passes to begin
    before a draft arrives, the fourth node of a chain has 0.8 * 0.8 = 0.64 in its pass, though it
    has 0.41 now, and it is worth its row at a price of 0.5."""

    width: int = 1
    window: int | None = None
    """Bound on outstanding steps, as in ``GoodputPolicy``."""
    least_chance: float = 0.05
    """Least chance of a node being reached at which a step runs behind it."""
    step_price: float = 0.16
    """Cost of a step, as a share of the pass time that it may save. Where steps are short, one runs
    behind a less likely node as well, down to a chance of step_price * step_s / pass_s. A step of 2
    ms beside passes of 20 ms is worth it from 0.16 * 2 / 20 = 0.016 on."""
    gather_share: float | None = None
    """Share of a pass, as in ``GoodputPolicy``."""
    min_candidate_chance: ClassVar[float] = 0.0
    drops_useless_draft: ClassVar[bool] = False

    def is_hopeless(self, estimates: DraftEstimates) -> bool:
        return False

    def choose_parent(self, view: DraftView) -> int | None:
        step_s, tree = view.step_s, view.tree
        if is_full(view, self.width, self.window):
            return None
        rates = [view.estimates.acceptance.rate(rank) for rank in range(self.width)]
        # At a leaf less likely than this, not even the first candidate behind it is worth its row.
        priced = view.estimates.price.least_chance / rates[0]
        if priced > 1.0:
            return None
        if not tree.roots and tree.prefix.length < view.end:
            return ROOT
        last_rank, last_position = self.width - 1, view.end - 2
        best, best_chance = ROOT, self._least_chance(view, step_s, math.fsum(rates))
        settled = view.settled_position if priced else 0
        pending = [(1.0, 1.0, tree.roots)]
        while pending:
            before, in_pass, siblings = pending.pop()
            for node in siblings:
                rank = node.rank
                rate = rates[rank if rank < last_rank else last_rank]
                chance = before * rate
                pays = in_pass if node.position < settled else in_pass * rate
                if chance < best_chance or pays < priced:
                    continue  # and nothing behind it is likelier
                if node.children:
                    pending.append((chance, pays, node.children))
                elif node.position <= last_position:
                    # The oldest of equals.
                    if chance > best_chance or node.id < best:
                        best, best_chance = node.id, chance
        return best or None

    def choose_places(self, view: DraftView) -> int:
        return 1

    def should_send(self, view: DraftView) -> bool:
        return view.unsent > 0 and sends_now(view, self.gather_share, by_rank=True)

    def _least_chance(self, view: DraftView, step_s: float, hit_rate: float) -> float:
        """Return the least chance of a node at which a step behind it saves more than it costs: its
        own time, or the ``width`` rows that it adds to a pass.

        Formula for the rows: they cost width * row_s, and save token_s if the node is reached and
        one of them is right, so the least chance is width * row_s / (hit_rate * token_s). Two rows
        of 0.5 ms, right with 0.8 where a token takes 10 ms, need 2 * 0.5 / (0.8 * 10) = 0.125."""
        row_s = view.estimates.row_s.get()
        if row_s is None:
            return self.least_chance
        for_step = min(self.least_chance, self.step_price * step_s / view.pass_s)
        return max(for_step, self.width * row_s / (hit_rate * view.token_s))
