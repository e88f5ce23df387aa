"""Prompt lookup: what followed the last time these tokens stood in this text?

Theory of operation. Prompt and output of one session are indexed by their pairs of neighbouring
tokens: where did a token last stand behind a pair? The *match* of a text is a place in it before
which the text's own last tokens stand too; its length is how many of them, at least two and counted
up to ``LONGEST``. A match goes on as long as the text goes on as it did there, so a new token costs
a comparison and an entry, and a search only when it breaks. What stands at the match is the guess
for the next token, what stands behind that the guess for the one after it (prompt lookup decoding,
Saxena 2023). Code repeats its names and summaries their source: long matches are mostly right.

Bound: ``most_pairs`` entries of about 170 bytes. A text with more begins its index anew.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_PAIRS = 8192
LONGEST = 12
"""Longer matches are not told apart."""


def pair_of(before: int, last: int) -> int:
    """Two neighbouring tokens as one key."""
    return before << 32 | last


class PromptLookup:
    """The index of one text, which only grows. ``position`` is where its match goes on, and
    ``length`` the match's length; 0: there is none."""

    def __init__(self, most_pairs: int = MOST_PAIRS) -> None:
        self.known = 0
        """How many tokens of the text are indexed."""
        self.position = self.length = 0
        self._most_pairs = most_pairs
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def place(self, pair: int) -> int:
        """Where a token last stood behind the pair; -1: nowhere."""
        return self._places.get(pair, -1)

    def load(self, tokens: Sequence[int], end: int) -> None:
        """Index the text up to ``end`` and find its match."""
        self._index(tokens, max(self.known, end - self._most_pairs), end)
        self.known = end
        self._search(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Index the next token of the text and move its match on."""
        at = self.known
        if at >= 2:
            if len(self._places) >= self._most_pairs:
                self._places.clear()
            self._places[tokens[at - 2] << 32 | tokens[at - 1]] = at
        self.known = at + 1
        if self.length and tokens[self.position] == tokens[at]:
            self.position += 1
            if self.length < LONGEST:
                self.length += 1
        else:
            self._search(tokens)

    def _index(self, tokens: Sequence[int], start: int, end: int) -> None:
        places = self._places
        if len(places) + end - start > self._most_pairs:
            places.clear()
        for at in range(max(2, start), end):
            places[tokens[at - 2] << 32 | tokens[at - 1]] = at

    def _search(self, tokens: Sequence[int]) -> None:
        end, self.length = self.known, 0
        if end < 2:
            return
        position = self.place(pair_of(tokens[end - 2], tokens[end - 1]))
        if position < 0:
            return
        length, most = 2, min(LONGEST, position)
        while length < most and tokens[position - 1 - length] == tokens[end - 1 - length]:
            length += 1
        self.position, self.length = position, length
