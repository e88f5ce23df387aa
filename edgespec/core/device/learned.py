"""A device keeps what it has learned about its draft and its link between generations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from edgespec.core.device.confidence import ConfidenceEstimator, GuessChances
from edgespec.core.device.draft_lengths import LengthOutcomes
from edgespec.core.protocol.sampling import SamplingParams

MOST_MODELS: Final = 64
"""Models beside the usual one of which something is kept."""


@dataclass(slots=True)
class Learned:
    """Hand the same one to the next ``DraftSession``: the sessions keep it up."""

    lengths: LengthOutcomes = field(default_factory=LengthOutcomes)
    confidence: ConfidenceEstimator = field(default_factory=ConfidenceEstimator)
    greedy: GuessChances = field(default_factory=GuessChances)
    sampled: GuessChances = field(default_factory=GuessChances)

    def guesses(self, sampling: SamplingParams) -> GuessChances:
        """Of texts like this one: noise that draft and target share changes what a probability
        says."""
        return self.sampled if sampling.temperature > 0.0 else self.greedy


class LearnedByModel:
    """What was learned of each model that is asked for by name. How often a draft is right depends
    on the model that judges it. ``usual`` is of the model
    called ``name``; what was learned of the one asked for longest ago is forgotten."""

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
