"""What a device measures and learns: its link, its steps, the verifier's passes, its draft.

Theory of operation. A draft says how likely it holds each of its guesses to be (the probability
under its own distribution). That is rarely the chance that the target says the same: a small model
is often too sure, and with sampling noise that both share a guess of low probability may be right
as often as not. So confidences are put into cells, and in each it is counted how often the guess
was the target's token. SpecDec++ (Huang, Guo and Wang, arXiv 2405.19715) trains a head of
the draft model for that question; this needs no training, and works with any draft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from edgespec.core.protocol.estimators import (
    AcceptanceEstimator,
    DecayedRate,
    MovingAverage,
    SlopeEstimator,
)
from edgespec.core.protocol.messages import MAX_PRICE, Commit
from edgespec.core.protocol.sampling import SamplingParams

CELLS: Final = 10
MOST_MODELS: Final = 64
"""Models beside the usual one of which something is kept."""
# What a rank's own rate counts for, in positions, until there are observations.
_PRIOR_WEIGHT: Final = 6.0
_MEMORY: Final = 0.995
_RANKS: Final = 3
"""Further choices share the last one's cells."""
_LAST: Final = _RANKS - 1
_PER_HALVING: Final = -1.0 / math.log(2.0)


class GuessChances:
    """The chance that a guess of any rank is right, by what the draft thought of it. It depends on
    the two models and on whether they sample, and outlives a generation."""

    def __init__(self) -> None:
        self._rates = [
            [DecayedRate(_MEMORY, _PRIOR_WEIGHT) for _ in range(CELLS)] for _ in range(_RANKS)
        ]

    def add(self, rank: int, logprob: float, *, hit: bool) -> None:
        """A position was decided at which the choice of this rank had this log-probability."""
        self._rates[min(rank, _LAST)][_cell(rank, logprob)].add(hit)

    def chance(self, rank: int, logprob: float, rate: float) -> float:
        """Formula: (hits + 6 * rate) / (trials + 6) of the guesses of this rank in the same cell,
        with ``rate`` how often choices of the rank are right, whatever the draft thought of them.
        Cells are tenths for first choices, halvings for others. Where 60 second choices held for
        0.01 were tried and none was right, and second choices are right at 0.1: 0.6 / 66 = 0.009.
        """
        row = rank if rank < _LAST else _LAST
        return self._rates[row][_cell(rank, logprob)].rate(rate)


def _cell(rank: int, logprob: float) -> int:
    """Of a first choice its tenth; of others 0 for a probability above a half, 1 above a quarter,
    and so on. Certain guesses, and what is no number, count as most likely."""
    if rank:
        halvings = logprob * _PER_HALVING if logprob < 0.0 else 0.0
        return int(halvings) if halvings < CELLS else CELLS - 1
    cell = int(CELLS * math.exp(logprob)) if logprob < 0.0 else CELLS
    return cell if cell < CELLS else CELLS - 1


@dataclass(slots=True)
class Learned:
    """What is kept between generations: hand the same one to the next ``DraftSession``."""

    greedy: GuessChances = field(default_factory=GuessChances)
    sampled: GuessChances = field(default_factory=GuessChances)

    def guesses(self, sampling: SamplingParams) -> GuessChances:
        """Of texts like this one: noise that draft and target share changes what a probability
        says."""
        return self.sampled if sampling.temperature > 0.0 else self.greedy


class LearnedByModel:
    """What was learned of each model that is asked for by name. ``usual`` is of the model called
    ``name``; what was learned of the one asked for longest ago is forgotten."""

    def __init__(self, name: str, usual: Learned) -> None:
        self._name, self._usual = name, usual
        self._others: dict[str, Learned] = {}

    def of(self, name: str) -> Learned:
        """Hand it to the next session of this model."""
        if name == self._name:
            return self._usual
        found = self._others.pop(name, None) or Learned()
        self._others[name] = found
        if len(self._others) > MOST_MODELS:
            del self._others[next(iter(self._others))]
        return found


@dataclass(slots=True)
class RowPrice:
    """What the verifier last said that a draft node costs. It outlives a generation: hand the same
    one to the next ``DraftSession`` with this verifier."""

    least_chance: float = 0.0
    """A node that is less likely to be right does not pay for its row."""
    credit: int | None = None
    """Nodes that may be outstanding; None: as many as the limits say."""

    def take(self, commit: Commit) -> None:
        """A commit of a pass came: what it leaves out costs nothing, or is unlimited."""
        self.least_chance = (commit.row_price or 0) / MAX_PRICE
        self.credit = commit.credit


@dataclass(slots=True)
class DraftEstimates:
    """The device's view of its world. All times are seconds, and unknown until first measured."""

    rtt_s: MovingAverage = field(default_factory=MovingAverage)
    step_s: MovingAverage = field(default_factory=MovingAverage)
    pass_s: MovingAverage = field(default_factory=MovingAverage)
    commit_s: MovingAverage = field(default_factory=MovingAverage)
    """From one commit to the next, as they arrive."""
    commit_tokens: MovingAverage = field(default_factory=MovingAverage)
    row_s: SlopeEstimator = field(default_factory=SlopeEstimator)
    """What one more draft node adds to a pass."""
    price: RowPrice = field(default_factory=RowPrice)
    acceptance: AcceptanceEstimator = field(default_factory=AcceptanceEstimator)
    guesses: GuessChances = field(default_factory=GuessChances)
    """How often guesses of a rank and a confidence are right."""
