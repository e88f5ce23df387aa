"""Whether the verifier's own guesses pay in one session, measured, with hysteresis.

Theory of operation. Guesses are tried for ``TRIAL_PASSES`` passes, and their gain is taken:

    gain = (tokens that were accepted - what their rows cost) / passes

where a row costs what the scheduler asks of it (``Offer.least_chance``), in tokens. With 20
accepted tokens of 60 rows at 0.1 in 32 passes it is (20 - 6) / 32 = 0.44 tokens a pass. Below
``KEEP`` the session rests: it asks no drafter, learns nothing and spends no time on it. A rest is
twice as long as the one before it, up to ``LONGEST_REST_PASSES``, and a trial after a rest must
reach ``RESUME``, so that a session at the border does not go on and off. A price that rises shows
at once in which guesses are made (``served_drafts.py``); this is for texts that cannot be guessed.

Rows at risk. Whatever the chances say, what a session's guesses have lost is bounded: it has a
*balance* of tokens, which begins at ``FIRST_BALANCE``, grows by ``EXPLORED`` at each pass and by
each accepted token, falls by what each row costs, and ends at ``MOST_BALANCE``. A proposal has at
most as many rows as the balance pays, and one. So a text of n passes loses at most FIRST_BALANCE +
n * ``EXPLORED`` tokens and a row: of 128 tokens whose rows cost 0.24 each, 0.5 + 1.28 + 0.24 = 2.0
in the worst case, and 0.7 where nothing is guessed again after the first misses. With a text that
can be guessed it grows fast: two guesses of rows at 0.24 that come true pay for seven rows more.
"""

from __future__ import annotations

from typing import Final

TRIAL_PASSES: Final = 32
KEEP: Final = 0.01
RESUME: Final = 0.02
SHORTEST_REST_PASSES: Final = 8
LONGEST_REST_PASSES: Final = 256
FIRST_BALANCE: Final = 0.5
MOST_BALANCE: Final = 4.0
EXPLORED: Final = 0.01


class ServedWorth:
    """``asks`` before a pass that could carry guesses, ``count`` after it."""

    def __init__(self) -> None:
        self.resting = 0
        """Passes for which no drafter is asked; 0: they are."""
        self._rest = SHORTEST_REST_PASSES
        self._least_gain = KEEP
        self._passes = 0
        self._gain = 0.0
        self._balance = FIRST_BALANCE

    def rows(self, row_price: float) -> int | None:
        """How many rows the next guesses may have, at this price in tokens; None: any number."""
        if row_price <= 0.0:
            return None
        return 0 if self._balance < 0.0 else 1 + int(self._balance / row_price)

    def asks(self) -> bool:
        """Whether the drafters are to be asked for this pass."""
        self._balance = min(MOST_BALANCE, self._balance + EXPLORED)
        if self.resting:
            self.resting -= 1
            return False
        return True

    def count(self, rows: int, accepted: int, row_price: float) -> None:
        """A pass for which they were asked is over; ``row_price`` is in tokens."""
        self._passes += 1
        gain = accepted - rows * row_price
        self._gain += gain
        self._balance = min(MOST_BALANCE, self._balance + gain)
        if self._passes < TRIAL_PASSES:
            return
        if self._gain >= self._least_gain * TRIAL_PASSES:
            self._rest, self._least_gain = SHORTEST_REST_PASSES, KEEP
        else:
            self.resting, self._least_gain = self._rest, RESUME
            self._rest = min(2 * self._rest, LONGEST_REST_PASSES)
        self._passes, self._gain = 0, 0.0
