"""Whether the verifier's own guesses pay in one session, measured, with hysteresis.

Theory of operation. Guesses are tried for ``TRIAL_PASSES`` passes, and their gain is taken:

    gain = (tokens that were accepted - what their rows cost) / passes

where a row costs what the scheduler asks of it (``Offer.least_chance``), in tokens. With 20
accepted tokens of 60 rows at 0.1 in 32 passes it is (20 - 6) / 32 = 0.44 tokens a pass. Below
``KEEP`` the session rests: it asks no drafter, learns nothing and spends no time on it. A rest is
twice as long as the one before it, up to ``LONGEST_REST_PASSES``, and a trial after a rest must
reach ``RESUME``, so that a session at the border does not go on and off. A price that rises shows
at once in which guesses are made (``served_drafts.py``); this is for texts that cannot be guessed.
"""

from __future__ import annotations

from typing import Final

TRIAL_PASSES: Final = 32
KEEP: Final = 0.01
RESUME: Final = 0.02
SHORTEST_REST_PASSES: Final = 8
LONGEST_REST_PASSES: Final = 256


class ServedWorth:
    """``asks`` before a pass that could carry guesses, ``count`` after it."""

    def __init__(self) -> None:
        self.resting = 0
        """Passes for which no drafter is asked; 0: they are."""
        self._rest = SHORTEST_REST_PASSES
        self._least_gain = KEEP
        self._passes = 0
        self._gain = 0.0

    def asks(self) -> bool:
        """Whether the drafters are to be asked for this pass."""
        if self.resting:
            self.resting -= 1
            return False
        return True

    def count(self, rows: int, accepted: int, row_price: float) -> None:
        """A pass for which they were asked is over; ``row_price`` is in tokens."""
        self._passes += 1
        self._gain += accepted - rows * row_price
        if self._passes < TRIAL_PASSES:
            return
        if self._gain >= self._least_gain * TRIAL_PASSES:
            self._rest, self._least_gain = SHORTEST_REST_PASSES, KEEP
        else:
            self.resting, self._least_gain = self._rest, RESUME
            self._rest = min(2 * self._rest, LONGEST_REST_PASSES)
        self._passes, self._gain = 0, 0.0
