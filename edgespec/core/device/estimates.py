"""What a device measures and learns: its link, its steps, the verifier's passes, its draft.

What it learns of its draft and of a verifier outlives a generation (``Learned``,
``VerifierEstimates``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Final

from edgespec.core.protocol.estimators import (
    AcceptanceEstimator,
    CalibratedChances,
    DecayedRate,
    MovingAverage,
    SlopeEstimator,
)
from edgespec.core.protocol.messages import MAX_PRICE, Commit
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_guesses import MEMORY, PRIOR_WEIGHT, TextChances
from edgespec.core.protocol.tree import NO_CELL, UNRANKED, Node

USUAL_FEED: Final = 2
"""Tokens that a usual draft step feeds at most: a corrected token and the one behind it. Feeding
more is prefill or catching up."""
KEPT: Final = 2
"""Samples of a verifier that what earlier texts measured counts for in the next."""
MOST_MODELS: Final = 64
"""Models beside the usual one of which something is kept."""


USEFUL_RATE: Final = 0.03
"""A draft model whose choices are right less often than this is of no use to anybody: each of its
steps saves at most this part of a pass. ``plan link`` calls a gain of 3 % the least that is worth
the effort as well."""
_DEVIATIONS: Final = 3.0
"""Standard deviations by which a draft has to miss ``USEFUL_RATE``: a draft that is as good as that
is given up once in 700 times."""


@dataclass(slots=True)
class DraftEvidence:
    """How often a draft model's choices were the target's token, over the life of a process.

    Only positions count at which the model had made its choices, and a hit of any of them counts.
    ``DraftChances`` forget old trials, so that they follow a text; this forgets nothing."""

    tried: int = 0
    """Positions that were decided."""
    hits: int = 0
    """Decided positions at which one of the choices was the target's token."""

    def add(self, *, hit: bool) -> None:
        """Count a position that was decided."""
        self.tried += 1
        self.hits += hit

    @property
    def is_useless(self) -> bool:
        """Whether the model is surely right less often than ``USEFUL_RATE``.

        Formula: Wilson's upper end at three standard deviations is below ``USEFUL_RATE``. Without a
        hit that takes 292 trials; with one hit, 355."""
        n, z = self.tried, _DEVIATIONS
        if self.hits >= USEFUL_RATE * n:
            return False
        share = self.hits / n
        spread = z * math.sqrt(share * (1.0 - share) / n + z * z / (4.0 * n * n))
        return (share + z * z / (2.0 * n) + spread) / (1.0 + z * z / n) < USEFUL_RATE


class DraftChances:
    """How likely guesses in a device's tree are right, by who made them. It depends on the two
    models and on whether they sample, and outlives a generation."""

    def __init__(self) -> None:
        self.alone = CalibratedChances()
        """Of the draft's choices that the text did not name."""
        self.confirmed = CalibratedChances()
        """Of those that it named too."""
        self.text = TextChances()
        """Of what the text names, whatever the draft says of it."""
        self.acceptance = AcceptanceEstimator()
        """Of the draft's choices by their rank alone."""
        self._opposed = [DecayedRate(MEMORY, PRIOR_WEIGHT) for _ in self.text.by_cell]

    def opposed(self, cell: int) -> float:
        """The chance of a guess of the text's where the draft has named other tokens: a quarter of
        what it has else, until there are observations."""
        return self._opposed[cell].rate(self.text.by_cell[cell] / 4.0)

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
            self._opposed[guess.lookup_cell].add(hit)
        else:
            found = self.alone if guess.lookup_cell == NO_CELL else self.confirmed
            found.add(guess.rank, guess.logprob, hit=hit)


@dataclass(slots=True)
class Learned:
    """What is kept between generations: hand the same one to the next ``DraftSession``."""

    greedy: DraftChances = field(default_factory=DraftChances)
    sampled: DraftChances = field(default_factory=DraftChances)
    step_s: MovingAverage = field(default_factory=MovingAverage)
    """Seconds that a usual draft step takes. It depends on the device alone, so that drafts for all
    models share it."""
    evidence: DraftEvidence = field(default_factory=DraftEvidence)
    """How often the draft model was right for this model at all, greedy and sampled texts
    together."""

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
        found = self._others.pop(name, None) or Learned(step_s=self._usual.step_s)
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
    """Seconds that a draft step takes that feeds one or two tokens."""
    row_s: SlopeEstimator = field(default_factory=SlopeEstimator)
    """What one more draft node adds to a pass."""
    guesses: DraftChances = field(default_factory=DraftChances)
    """How often guesses of a rank and a confidence are right."""
    evidence: DraftEvidence = field(default_factory=DraftEvidence)
    """Whether the draft model is of any use."""
    greeting_s: float = math.inf
    """How long this stream's verifier took to greet, in seconds: a round trip takes no longer."""

    @classmethod
    def of(
        cls, verifier: VerifierEstimates, learned: Learned, sampling: SamplingParams
    ) -> DraftEstimates:
        """Begin a text with what earlier texts have found out of the verifier and of the draft.

        Both go on learning here. The next text may have another verifier, or another network, or
        find the same one busy, or the device in another state of its battery, so each average
        counts for at most ``KEPT`` samples."""
        known = {one.name: getattr(verifier, one.name) for one in fields(verifier)}
        for value in (*known.values(), learned.step_s):
            if isinstance(value, MovingAverage):
                value.doubt(KEPT)
        return cls(
            **known,
            step_s=learned.step_s,
            guesses=learned.guesses(sampling),
            evidence=learned.evidence,
        )

    def note_step(self, fed: int, took_s: float) -> None:
        """Measure ``step_s`` by a step that fed so many tokens.

        A step that feeds more than ``USUAL_FEED`` tokens says little about a usual one, but it
        bounds it: a usual one takes no longer. While the policy rests its probes feed many tokens,
        and without the bound a step that was slow once would be taken for slow for ever. No bound
        stands for a step that was never timed: that of a long prompt would be far from it."""
        if fed <= USUAL_FEED or (self.step_s.count and took_s < self.step_s.get(0.0)):
            self.step_s.add(took_s)

    @property
    def acceptance(self) -> AcceptanceEstimator:
        return self.guesses.acceptance
