"""How much a token matters, as the laws of target and draft tell it: a reading of DSD. LOSSY.

Theory of operation. DSD's adaptive verification (arXiv 2511.11733) holds both models' laws side by
side: a cross-entropy contrast, statistics of matching tokens and an agreement of the distributions
say how much a token matters, and a relaxation falls to 0 for those that matter most. How the three
are measured and put together was not open to us. Our reading, each in [0, 1] and 1 for much:

* contrast: 1 - exp(-c), where c, in nats, is the cross-entropy of the draft's law under the
  target's, less the target's own entropy;
* disagreement: the total variation distance of the two laws;
* surprise: the share of this text's earlier positions where the best tokens of the two differed.
  Of the position itself it says nothing, since a token is only judged where they differ.

A token's importance is their mean. The threshold for it lies between that for a token of none and
1, which is the exact rule but for ties; the relaxation of the paper is 1 less the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST = 1e-12
"""A law's smallest share, where another one's is not zero."""


@dataclass(slots=True)
class Matches:
    """Of one text: how often the best tokens of both laws were the same. Before anything is known
    half of them are."""

    same: int = 1
    positions: int = 2

    def note(self, same: bool) -> None:
        self.same += same
        self.positions += 1

    @property
    def share(self) -> float:
        return self.same / self.positions


def law(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    """The shares of all tokens."""
    best = max(logits)
    weights = [math.exp((logit - best) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def importance(target: Sequence[float], draft: Sequence[float], matches: Matches) -> float:
    """In [0, 1]; ``target`` and ``draft`` are laws over the same tokens."""
    contrast = disagreement = 0.0
    for own, other in zip(target, draft, strict=True):
        if own > 0.0:
            contrast += own * math.log(own / max(other, _LEAST))
        disagreement += abs(own - other)
    surprise = 1.0 - matches.share
    return (1.0 - math.exp(-max(0.0, contrast)) + min(1.0, disagreement / 2.0) + surprise) / 3.0


def threshold_of(least: float, how_important: float) -> float:
    """How likely a draft must be, relative to the target's best token: ``least`` for one of no
    importance, 1 for one of the greatest."""
    return least + (1.0 - least) * how_important
