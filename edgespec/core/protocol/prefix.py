"""The committed prefix: prompt and the target's own tokens, with a hash of every beginning.

Positions are absolute indices; ``length`` is the position of the next token. The rolling hash
lets either side notice that the other holds different tokens, which lengths alone do not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgespec.core.protocol.noise import GOLDEN, mix

_EMPTY_HASH = 0x65646765


class CommittedPrefix:
    """Append-only token sequence. ``hash_at(n)`` is the 32-bit hash of its first n tokens,
    computed when it is asked for."""

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
        self.tokens += tokens
        self.length = len(self.tokens)

    def hash_at(self, length: int) -> int:
        hashes = self._hashes
        for token in self.tokens[len(hashes) - 1 : length]:
            hashes.append(mix(hashes[-1] * GOLDEN + token))
        return hashes[length]

    def starts_with(self, tokens: Sequence[int]) -> bool:
        return self.tokens[: len(tokens)] == list(tokens)
