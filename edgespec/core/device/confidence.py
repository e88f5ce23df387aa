"""How far a draft's own confidence can be believed: counted, not assumed.

Theory of operation. A draft says how likely it holds each of its guesses to be (the probability
under its own distribution). That is rarely the chance that the target says the same: a small model
is often too sure, and with sampling noise that both share a guess of low probability may be right
as often as not. So confidences are put into cells, and in each it is counted how often the guess
was the target's token. SpecDec++ (Huang, Guo and Wang, arXiv 2405.19715) trains a head of
the draft model for that question; this needs no training, and works with any draft.
"""

from __future__ import annotations

import math
from typing import Final

CELLS: Final = 10
# What a cell's own middle, or a rank's own rate, counts for, in positions, until there are
# observations.
_PRIOR_WEIGHT: Final = 6.0
_MEMORY: Final = 0.995
_RANKS: Final = 3
"""Further choices share the last one's cells."""
_LAST: Final = _RANKS - 1
_PER_HALVING: Final = -1.0 / math.log(2.0)


class _Counts:
    """Hits and trials by cell; older ones count less and less."""

    __slots__ = ("_hits", "_trials")

    def __init__(self) -> None:
        self._hits, self._trials = [0.0] * CELLS, [0.0] * CELLS

    def add(self, cell: int, *, hit: bool) -> None:
        self._hits[cell] = self._hits[cell] * _MEMORY + hit
        self._trials[cell] = self._trials[cell] * _MEMORY + 1.0

    def rate(self, cell: int, prior: float) -> float:
        hits, trials = self._hits[cell], self._trials[cell]
        return (hits + _PRIOR_WEIGHT * prior) / (trials + _PRIOR_WEIGHT)


class ConfidenceEstimator:
    """The chance that a first choice is right, by what the draft thought of it. It depends on the
    two models, and outlives a generation."""

    def __init__(self) -> None:
        self._counts = _Counts()

    def add(self, logprob: float, *, hit: bool) -> None:
        """A position was decided at which the first choice had this log-probability."""
        self._counts.add(_tenth(logprob), hit=hit)

    def chance(self, logprob: float) -> float:
        """Formula: (hits + 6 * m) / (trials + 6), with m the middle of the confidence's tenth, the
        last as much as any. Of 14 guesses held for 0.65 to be right 7 were: (7 + 3.9) / 20 = 0.545.
        """
        cell = _tenth(logprob)
        return self._counts.rate(cell, (cell + 0.5) / CELLS)


class GuessChances:
    """The chance that a guess of any rank is right, by what the draft thought of it. It depends on
    the two models and on whether they sample, and outlives a generation."""

    def __init__(self) -> None:
        self._of_rank = [_Counts() for _ in range(_RANKS)]

    def add(self, rank: int, logprob: float, *, hit: bool) -> None:
        """A position was decided at which the choice of this rank had this log-probability."""
        cell = _halving(logprob) if rank else _tenth(logprob)
        self._of_rank[min(rank, _LAST)].add(cell, hit=hit)

    def chance(self, rank: int, logprob: float, rate: float) -> float:
        """Formula: (hits + 6 * rate) / (trials + 6) of the guesses of this rank in the same cell,
        with ``rate`` how often choices of the rank are right, whatever the draft thought of them.
        Cells are tenths for first choices, halvings for others. Where 60 second choices held for
        0.01 were tried and none was right, and second choices are right at 0.1: 0.6 / 66 = 0.009.
        """
        cell = _halving(logprob) if rank else _tenth(logprob)
        return self._of_rank[rank if rank < _LAST else _LAST].rate(cell, rate)


def _tenth(logprob: float) -> int:
    if logprob < 0.0:
        cell = int(CELLS * math.exp(logprob))
        return cell if cell < CELLS else CELLS - 1
    return CELLS - 1  # a certain guess, and what is no number


def _halving(logprob: float) -> int:
    """0 for a probability above a half, 1 above a quarter, and so on."""
    if logprob < 0.0:
        halvings = logprob * _PER_HALVING
        return int(halvings) if halvings < CELLS else CELLS - 1
    return 0
