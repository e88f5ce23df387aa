"""A token source whose sessions ask for a relaxed rule, for comparison. LOSSY.

The rule is the product's own: DSD's threshold (``core/verifier/relaxed_rules.py``). At 1 only the
target's likeliest token itself is tolerated, which greedy decoding would have chosen anyway.
Engines of such a world offer this rule alone: a request for exact tokens is refused, never relaxed.
"""

from __future__ import annotations

from functools import cached_property

from edgespec.core.protocol.messages import EXACT_RULE
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec_sim.token_sources.source import TokenSource, ToySource


class LossySource(ToySource):
    """Over a toy model; what ``expected`` tells is the exact text, which this source's need not
    be. ``threshold`` in [0, 1]."""

    def __init__(
        self, model: ToyModel, noise: float, sampling: SamplingParams, threshold: float
    ) -> None:
        super().__init__(model, noise, sampling)
        self.rule = f"dsd:{threshold}"

    @cached_property
    def about(self) -> str:
        exact = ToySource(self._model, self._noise, self._sampling).about
        share = self.rule.partition(":")[2]
        return f"{exact}; LOSSY from {share} of the best token on"


def rule_of(source: TokenSource) -> str:
    """The name under which sessions on this source ask for their rule."""
    return source.rule if isinstance(source, LossySource) else EXACT_RULE
