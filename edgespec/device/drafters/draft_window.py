"""Which tokens of a growing text a draft model holds keys and values of: the last ones.

Rows are counted from the window's first token on, so a position inside the model is never beyond
the window's size, however long the text is. A text that outgrows the window slides it: the second
half of what may be held is fed again from row 0 (its keys were rotated for other positions), and
as many tokens fit until the next time. A token so costs one more token of prefill on average.
"""

from __future__ import annotations


class DraftWindow:
    """The rows of one sequence: row ``i`` is the token at position ``first + i``; ``held`` rows are
    valid. ``size`` is the most there may be."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.first = self.held = 0

    def clear(self) -> None:
        """Nothing is held, of a text that begins."""
        self.first = self.held = 0

    def place(self, keep_length: int, length: int) -> int:
        """The text agrees in its first ``keep_length`` tokens with what was held, and is ``length``
        long: the position from which on it has to be fed. Everything before that, from ``first``
        on, is held."""
        self.held = min(self.held, max(0, keep_length - self.first), self.size)
        if length <= self.size and keep_length < self.first:
            self.clear()  # it fits again as a whole
        elif keep_length < self.first or length - self.first > self.size:
            self.first, self.held = max(0, length - max(1, self.size // 2)), 0
        return self.first + self.held
