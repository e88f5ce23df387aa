"""What a device measures and learns: its link, its steps, the verifier's passes, its draft.

What it learns of its draft and of a verifier outlives a generation (``Learned``,
``VerifierEstimates``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final

from edgespec.core.protocol.estimators import (
    AcceptanceEstimator,
    DecayedRate,
    GuessChances,
    MovingAverage,
    SlopeEstimator,
)
from edgespec.core.protocol.messages import MAX_PRICE, Commit
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_guesses import MEMORY, PRIOR_WEIGHT, TextChances
from edgespec.core.protocol.tree import NOT_NAMED, UNRANKED, Node

KEPT: Final = 2
"""Samples of a verifier that what earlier texts measured counts for in the next."""
MOST_MODELS: Final = 64
"""Models beside the usual one of which something is kept."""


class DraftChances:
    """How likely guesses in a device's tree are right, by who made them. It depends on the two
    models and on whether they sample, and outlives a generation."""

    def __init__(self) -> None:
        self.alone = GuessChances()
        """Of the draft's choices that the text did not name."""
        self.confirmed = GuessChances()
        """Of those that it named too."""
        self.text = TextChances()
        """Of what the text names, whatever the draft says of it."""
        self.acceptance = AcceptanceEstimator()
        """Of the draft's choices by their rank alone."""
        self._opposed = [DecayedRate(MEMORY, PRIOR_WEIGHT) for _ in self.text.of]

    def opposed(self, cell: int) -> float:
        """The chance of a guess of the text's where the draft has named other tokens: a quarter of
        what it has else, until there are observations."""
        return self._opposed[cell].rate(self.text.of[cell] / 4.0)

    def drafted(
        self, rank: int, logprob: float, rate: float, of_text: float | None = None
    ) -> float:
        """The chance of the draft's choice of this rank. ``rate`` is that of the rank, ``of_text``
        that of the text's guess of the same token; None: it has named none."""
        chance = self.alone.chance(rank, logprob, rate)
        if of_text is None:
            return chance
        least = 0.0 if rank else of_text  # of another choice the draft has named a better one
        return max(self.confirmed.chance(rank, logprob, max(chance, least)), least)

    def add(self, guess: Node, *, hit: bool) -> None:
        """A position was decided at which the draft had made its choices, and this was a guess."""
        if guess.rank == UNRANKED:
            self._opposed[guess.named_by].add(hit)
        else:
            found = self.alone if guess.named_by == NOT_NAMED else self.confirmed
            found.add(guess.rank, guess.logprob, hit=hit)


@dataclass(slots=True)
class Learned:
    """What is kept between generations: hand the same one to the next ``DraftSession``."""

    greedy: DraftChances = field(default_factory=DraftChances)
    sampled: DraftChances = field(default_factory=DraftChances)

    def guesses(self, sampling: SamplingParams) -> DraftChances:
        """Of texts like this one: shared noise changes what a probability says."""
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
    """What the verifier last said that a draft node costs."""

    least_chance: float = 0.0
    """A node that is less likely to be right does not pay for its row."""
    credit: int | None = None
    """Nodes that may be outstanding; None: as many as the limits say."""

    def take(self, commit: Commit) -> None:
        """A commit of a pass came: what it leaves out costs nothing, or is unlimited."""
        self.least_chance = (commit.row_price or 0) / MAX_PRICE
        self.credit = commit.credit


@dataclass(slots=True)
class VerifierEstimates:
    """One verifier and the way to it. It outlives a generation: hand the same one to the next
    ``DraftSession`` with this verifier. All times are seconds, and unknown until first measured."""

    price: RowPrice = field(default_factory=RowPrice)
    rtt_s: MovingAverage = field(default_factory=MovingAverage)
    pass_s: MovingAverage = field(default_factory=MovingAverage)
    commit_s: MovingAverage = field(default_factory=MovingAverage)
    """From one commit to the next, as they arrive."""
    commit_tokens: MovingAverage = field(default_factory=MovingAverage)
    own_tokens: MovingAverage = field(default_factory=MovingAverage)
    """Of a commit, what the verifier had without this device: a token and its own guesses."""


@dataclass(slots=True)
class DraftEstimates(VerifierEstimates):
    """The device's view of its world."""

    step_s: MovingAverage = field(default_factory=MovingAverage)
    row_s: SlopeEstimator = field(default_factory=SlopeEstimator)
    """What one more draft node adds to a pass."""
    guesses: DraftChances = field(default_factory=DraftChances)
    """How often guesses of a rank and a confidence are right."""

    @classmethod
    def of(cls, verifier: VerifierEstimates, guesses: DraftChances) -> DraftEstimates:
        """Learning goes on in both. The next text may have another verifier, or another network,
        or find the same one busy, so what is known counts for ``KEPT`` samples."""
        known = {one.name: getattr(verifier, one.name) for one in fields(verifier)}
        for value in known.values():
            if isinstance(value, MovingAverage):
                value.doubt(KEPT)
        return cls(**known, guesses=guesses)

    @property
    def acceptance(self) -> AcceptanceEstimator:
        return self.guesses.acceptance
