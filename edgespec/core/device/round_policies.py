"""Draft policies that draft one chain, send it and wait: how long shall the chain be?

Theory of operation. Both are stop-and-wait as ``policy.FixedPolicy`` is, and decide its one
question by something that was observed:

    specdec++  draft on until one of the nodes is likely to be wrong, by the draft's own confidences
    bandit     the draft length that brought most tokens a second, tried often enough to know

They see nothing but the view: what they learn from is kept in ``estimates.learned``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

from edgespec.core.device.draft_view import DraftView

STOP_AT: Final = 0.7
LENGTHS: Final = (1, 2, 3, 4, 6, 8, 11, 16)
"""What the bandit chooses from: the tokens a second of neighbours differ by a few hundredths."""
LONGEST: Final = 32


@dataclass(frozen=True, slots=True)
class ConfidencePolicy:
    """Stop drafting when the chance that a node of the chain is wrong passes ``stop_at``.

    Formula: 1 - product of the chances of the chain's nodes, each as often right as first choices
    of such a confidence were (``ConfidenceEstimator``). Two nodes of 0.7 and 0.6 make 1 - 0.42 =
    0.58, and a third of 0.7 makes 0.71. SpecDec++ (arXiv 2405.19715, section 3) shows that the best
    rule is a threshold on this chance, and takes 0.7 for it.
    """

    width: int = 1
    stop_at: float = STOP_AT
    least_choice: ClassVar[float] = 0.0

    def extend(self, view: DraftView) -> int | None:
        if view.in_flight or view.room < self.width or self._stops(view):
            return None
        return view.tip()

    def flush(self, view: DraftView) -> bool:
        return view.unsent > 0 and not view.in_flight and self._stops(view)

    def _stops(self, view: DraftView) -> bool:
        chance, length, children = 1.0, 0, view.tree.roots
        believed = view.estimates.learned.confidence.chance
        while children:
            first = children[0]
            chance *= believed(first.logprob)
            length, children = length + 1, first.children
        return length >= LONGEST or 1.0 - chance > self.stop_at


@dataclass(frozen=True, slots=True)
class BanditPolicy:
    """Draft as many tokens as brought most a second, and now and then others to find out.

    Formula: the length with the largest s / s_best + exploration * sqrt(ln(N) / n), where s are the
    tokens a second of its rounds of late, n their number and N that of all (UCB1, Auer et al. 2002;
    for the draft length over a link UCB-SpecStop, arXiv 2606.20591). With 100 rounds, a length that
    is a tenth slower and had 10 of them has 0.9 + 0.15 * sqrt(4.6 / 10) = 1.0, and the best one,
    with 60, has 1.04. Lengths that were never tried come first, from short to long.
    """

    width: int = 1
    exploration: float = 0.15
    lengths: tuple[int, ...] = LENGTHS
    least_choice: ClassVar[float] = 0.0

    def extend(self, view: DraftView) -> int | None:
        if view.in_flight or view.room < self.width or view.unsent >= self._nodes(view):
            return None
        return view.tip()

    def flush(self, view: DraftView) -> bool:
        return not view.in_flight and view.unsent >= self._nodes(view)

    def _nodes(self, view: DraftView) -> int:
        return self.width * self.choose(view)

    def choose(self, view: DraftView) -> int:
        """The draft length of the round that is under way."""
        outcomes = view.estimates.learned.lengths
        rounds = {length: outcomes.rounds(self.width * length) for length in self.lengths}
        new = next((length for length, count in rounds.items() if count == 0.0), None)
        if new is not None:
            return new
        speeds = {length: outcomes.tokens_per_s(self.width * length) for length in self.lengths}
        best = max(*speeds.values(), 1e-9)
        trials = math.log(max(sum(rounds.values()), 1.0))

        def index(length: int) -> float:
            return speeds[length] / best + self.exploration * math.sqrt(trials / rounds[length])

        return max(self.lengths, key=index)
