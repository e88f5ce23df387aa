"""How long a prompt or an answer is."""

from __future__ import annotations

import math
import random

MAX_TOKENS = 32_000


def drawn_length(typical: int, spread: float, dice: random.Random) -> int:
    """Log-normal around ``typical`` with this relative standard deviation; nothing is drawn where
    all are alike."""
    if spread == 0.0 or typical == 0:
        return typical
    sigma = math.sqrt(math.log1p(spread * spread))
    return max(1, min(round(typical * dice.lognormvariate(0.0, sigma)), MAX_TOKENS))
