"""How likely the target held a token: log-probabilities of its raw distribution.

Raw means before temperature, truncation, penalties and bias: the softmax of the logits as the model
gave them. Scores say something about a text and never change it; they are computed for sessions
that ask and for nobody else. This is the scalar specification; ``targets`` hold the fast forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgespec.core.statically_frozen import statically_frozen

MAX_LOGPROBS = 20
"""Top tokens that a session may ask for, a position."""
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for (OpenAI's number)."""


@statically_frozen
class TokenScore:
    """Natural logarithms, at most 0 up to rounding, at least ``LEAST_LOGPROB``."""

    logprob: float
    """Of the committed token."""
    margin: float
    """Between the two likeliest tokens: near 0 another rounding could have chosen the other."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their log-probabilities, likeliest first."""


def score_token(logits: Sequence[float], token: int, count: int) -> TokenScore:
    """The score of ``token`` with the ``count`` likeliest tokens.

    Worked number: of the logits (0, log 3) the second has the probability 3 / 4, so its score is
    log 0.75 = -0.288, with a margin of log 3 = 1.099.
    """
    largest = max(logits)
    norm = largest + math.log(math.fsum([math.exp(logit - largest) for logit in logits]))
    order = sorted(range(len(logits)), key=lambda one: (-logits[one], one))
    top = tuple([(one, _bounded(logits[one] - norm)) for one in order[:count]])
    margin = logits[order[0]] - logits[order[1]] if len(order) > 1 else -LEAST_LOGPROB
    return TokenScore(_bounded(logits[token] - norm), min(margin, -LEAST_LOGPROB), top)


def _bounded(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
