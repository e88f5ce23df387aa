"""How often each token occurs in a text that grows and is cut back. Standard library only, for the
simulator's drafters count too; who has NumPy reads the counts as arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class TokenCounts:
    """How often each token occurs in a prompt and in the output behind it, by id; what penalties
    ask for. A step pays for the tokens that came and went, not for the length of the text.

    Ids outside ``[0, vocabulary_size)`` are left out: no penalty can reach them.
    """

    def __init__(self, vocabulary_size: int) -> None:
        self.occurs = bytearray(vocabulary_size)
        """1 for each id that is there at all."""
        self.in_output = array("i", bytes(array("i").itemsize * vocabulary_size))
        self._everywhere = array("i", self.in_output)

    @staticmethod
    def of(vocabulary_size: int, prompt: Sequence[int], output: Sequence[int]) -> TokenCounts:
        counts = TokenCounts(vocabulary_size)
        counts.add(prompt, in_output=False)
        counts.add(output, in_output=True)
        return counts

    def add(self, tokens: Iterable[int], *, in_output: bool) -> None:
        self._change(tokens, 1, in_output)

    def remove(self, tokens: Iterable[int], *, in_output: bool) -> None:
        """Take back tokens that were added with the same ``in_output``."""
        self._change(tokens, -1, in_output)

    def _change(self, tokens: Iterable[int], by: int, in_output: bool) -> None:
        size = len(self.occurs)
        for token in tokens:
            if 0 <= token < size:
                self._everywhere[token] += by
                self.occurs[token] = self._everywhere[token] > 0
                if in_output:
                    self.in_output[token] += by
