"""A device measures its link, its own steps and the verifier's passes, and keeps the means here."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.core.device.confidence import GuessChances
from edgespec.core.device.learned import Learned
from edgespec.core.protocol.estimators import AcceptanceEstimator, MovingAverage, SlopeEstimator
from edgespec.core.protocol.messages import MAX_PRICE, Commit


@dataclass(slots=True)
class RowPrice:
    """What the verifier last said that a draft node costs. It outlives a generation: hand the same
    one to the next ``DraftSession`` with this verifier."""

    least_chance: float = 0.0
    """A node that is less likely to be right does not pay for its row."""
    credit: int | None = None
    """Nodes that may be outstanding; None: as many as the limits say."""

    def hear(self, commit: Commit) -> None:
        """A commit of a pass came: what it leaves out costs nothing, or is unlimited."""
        self.least_chance = (commit.row_price or 0) / MAX_PRICE
        self.credit = commit.credit


@dataclass(slots=True)
class DraftEstimates:
    """The device's view of its world. All times are seconds, and unknown until first measured."""

    rtt_s: MovingAverage = field(default_factory=MovingAverage)
    step_s: MovingAverage = field(default_factory=MovingAverage)
    learned: Learned = field(default_factory=Learned)
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

    def chance(self, rank: int, logprob: float) -> float:
        """That a guess of this rank, held by the draft for so likely, is the target's token."""
        return self.guesses.chance(rank, logprob, self.acceptance.rate(rank))
