"""How likely a guess of the verifier's own drafters is right, counted by where it came from.

Theory of operation. A guess is of a *kind*: how long the match was in which prompt lookup found it,
or which table named it. Among the guesses for one position it has a *rank*, 0 for the first that
was named. And its place is the end of the text, where the last pass stopped because nobody knew how
to go on, or behind a guess that was right, where the next one mostly is right too. Kind, rank and
place together are a *cell*. Wherever the text came by, the guesses for the next token are compared
with it, also those that were not worth their row, and their cells count.

Formula: chance = (hits + prior * ``PRIOR_WEIGHT``) / (trials + ``PRIOR_WEIGHT``), where hits and
trials lose a share 1 - ``MEMORY`` at each trial of the cell. A prior of 0.5 worth 2 trials, and 6
hits in the first 6 trials, give about (5.7 + 1) / (5.7 + 2) = 0.87. The chance of a node is the
product along its path: two guesses at 0.8 one behind the other have 0.64.
"""

from __future__ import annotations

from typing import Final

MEMORY: Final = 0.98
PRIOR_WEIGHT: Final = 2.0
RANKS: Final = 2
"""Guesses for one position; no more are made."""

# First cell of each kind. Prompt lookup has one for matches of 2, 3, 4 to 5, 6 to 9 and more.
MATCH_CELLS: Final = tuple(kind * RANKS for kind in (0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4))
NGRAM_CELL: Final = 5 * RANKS
RECYCLED_CELL: Final = 6 * RANKS
BEHIND: Final = 7 * RANKS
"""Added to a cell for a place behind a guess."""

# What the bundled target's texts gave on code and summaries (docs/measurements.md): first guesses
# by kind, and what is left for the second.
_PRIORS: Final = (
    ((0.5, 0.6, 0.75, 0.8, 0.9, 0.3, 0.3), (1.0, 0.5)),
    ((0.6, 0.7, 0.8, 0.85, 0.95, 0.25, 0.3), (1.0, 0.25)),
)


_FIRST: Final = tuple(
    rate * share for rates, shares in _PRIORS for rate in rates for share in shares
)


class GuessChances:
    """``of[cell]`` is the estimated chance of a guess. It begins at that of ``everybodys``, where
    what is noted here counts too; without them, at what the bundled target's texts gave."""

    def __init__(self, everybodys: GuessChances | None = None) -> None:
        self._everybodys = everybodys
        self.of: list[float] = list(_FIRST if everybodys is None else everybodys.of)
        self._prior_hits = [prior * PRIOR_WEIGHT for prior in self.of]
        self._hits = [0.0] * len(self.of)
        self._trials = [0.0] * len(self.of)

    def note(self, cell: int, hit: bool) -> None:
        """A guess of this cell was compared with the text."""
        self._trials[cell] = trials = self._trials[cell] * MEMORY + 1.0
        self._hits[cell] = hits = self._hits[cell] * MEMORY + hit
        self.of[cell] = (hits + self._prior_hits[cell]) / (trials + PRIOR_WEIGHT)
        if self._everybodys is not None:
            self._everybodys.note(cell, hit)
