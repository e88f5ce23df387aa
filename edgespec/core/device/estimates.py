"""What a device measures and learns: its link, its steps, the verifier's passes, its draft.

What it learns of its draft outlives a generation (``Learned``); all else is of one stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from edgespec.core.protocol.estimators import (
    AcceptanceEstimator,
    GuessChances,
    MovingAverage,
    SlopeEstimator,
)
from edgespec.core.protocol.messages import MAX_PRICE, Commit
from edgespec.core.protocol.sampling import SamplingParams

MOST_MODELS: Final = 64
"""Models beside the usual one of which something is kept."""


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
    own_tokens: MovingAverage = field(default_factory=MovingAverage)
    """Of a commit, those that the verifier had without this device's drafts: one, and what it
    guessed itself."""
    row_s: SlopeEstimator = field(default_factory=SlopeEstimator)
    """What one more draft node adds to a pass."""
    price: RowPrice = field(default_factory=RowPrice)
    acceptance: AcceptanceEstimator = field(default_factory=AcceptanceEstimator)
    guesses: GuessChances = field(default_factory=GuessChances)
    """How often guesses of a rank and a confidence are right."""
