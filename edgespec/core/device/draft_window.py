"""The window of a sequence that a draft model looks at, whose size bounds the draft's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SINKS: Final = 4
"""First tokens of a sequence that never leave the window. Large models put much of their attention
on them, whatever they are, and fail without them (StreamingLLM, Xiao et al. 2023, section 3)."""


class DraftWindow:
    """The tokens of a growing sequence whose keys and values a draft model holds.

    They are the first ones (``sinks``) and the last ones, as if they were one sequence. Row ``i``
    is token ``i`` for the sinks, and token ``i + skipped`` behind them. The first ``held_rows``
    rows are valid, at most ``size``.

    So a position inside the model is never beyond the window's size, however long the sequence is.
    When a sequence outgrows the window, a block of tokens behind the sinks leaves and the rows
    behind it move down: nothing is computed again. The end of the sequence is fed again if a
    correction is older than the window, or if more is fed than the window holds.

    If the rows cannot move (``can_move`` is False), there are no sinks either. The second half of
    the window is then fed again when a sequence outgrows it, so a token costs one more token of
    prefill on average."""

    def __init__(self, size: int, *, can_move: bool = False) -> None:
        self.can_move = can_move
        self.size = self.sinks = self.skipped = self.held_rows = 0
        self.resize(size)

    @property
    def block_rows(self) -> int:
        """Number of rows that leave at a time. Moving the others costs the same for one or for
        many."""
        return max(1, self.size // (8 if self.can_move else 2))

    def resize(self, size: int) -> None:
        """Hold at most ``size`` rows.

        Rows beyond it are lost, and a step that needs them feeds them again."""
        sinks = min(SINKS, size // 8) if self.can_move else 0
        if size > self.size or sinks != self.sinks:
            self.clear()
        self.size, self.sinks = size, sinks

    def clear(self) -> None:
        """Hold nothing, because another sequence begins."""
        self.skipped = self.held_rows = 0

    def move_to(self, keep_length: int, length: int) -> int:
        """Move the window to the end of the sequence and return how many rows behind the sinks
        leave.

        The sequence agrees with the held rows in its first ``keep_length`` tokens and is ``length``
        long. Afterwards ``held_rows`` rows are valid, and the rows from there to
        ``length - skipped`` have to be fed."""
        sinks, kept = min(self.sinks, self.held_rows, keep_length), keep_length - self.skipped
        if self.skipped and kept < self.sinks:  # The correction is from before the window.
            self._refill(sinks, length)
            return 0
        self.held_rows = min(self.held_rows, self.size, kept)
        excess = length - self.skipped - self.size
        if excess <= 0:
            return 0
        leaving = -(-excess // self.block_rows) * self.block_rows
        if not self.can_move or self.held_rows <= self.sinks + leaving:
            self._refill(sinks, length)
            return 0
        self.skipped += leaving
        self.held_rows -= leaving
        return leaving

    def tokens(self, text: Sequence[int], start: int, end: int) -> Sequence[int]:
        """Return the tokens of rows ``start`` to ``end``."""
        sinks, skipped = self.sinks, self.skipped
        last = text[max(start, sinks) + skipped : max(end, sinks) + skipped]
        return [*text[start : min(end, sinks)], *last]

    def _refill(self, held: int, length: int) -> None:
        room = self.size if length <= self.size else max(1, self.size - self.block_rows)
        self.skipped, self.held_rows = max(0, length - room), held
