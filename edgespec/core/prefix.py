"""The committed prefix: prompt and the target's own tokens, with a hash of every beginning.

Positions are absolute indices; ``length`` is the position of the next token. The rolling hash
lets either side notice that the other holds different tokens, which lengths alone do not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgespec.core.noise import GOLDEN, MASK_32, mix

_EMPTY_HASH = 0x65646765


class CommittedPrefix:
    """Append-only token sequence. ``hash_at(n)`` is the 32-bit hash of its first n tokens."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self.prompt_length = len(prompt)
        self.length = 0
        self.tokens: list[int] = []
        self._hashes: list[int] = [_EMPTY_HASH]
        self.extend(prompt)
        self.extend(output)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self._hashes.append(mix(self._hashes[-1] * GOLDEN + token & MASK_32))
        self.length = len(self.tokens)

    def hash_at(self, length: int) -> int:
        return self._hashes[length]

    def starts_with(self, tokens: Sequence[int]) -> bool:
        return self.tokens[: len(tokens)] == list(tokens)
