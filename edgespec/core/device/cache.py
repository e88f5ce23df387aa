"""The session knows what its drafter has cached, and the cheapest way from there to the next step.

A drafter only truncates and appends. Because the tokens it has seen are known here, rolling back
after a miss costs one integer, and nothing is fed twice.
"""

from __future__ import annotations

from edgespec.core.protocol.tree import CommittedPrefix


class DraftCache:
    """The tokens behind a drafter's cached rows."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._agreed = 0
        """Leading cached tokens known to equal the committed prefix."""

    @property
    def length(self) -> int:
        return len(self._tokens)

    def feed(self, prefix: CommittedPrefix, path: list[int]) -> tuple[int, tuple[int, ...]]:
        """Make the cache hold ``prefix`` and then ``path``: (tokens to keep, tokens to append).

        At least one token is appended, because its row of logits is what the step is for.
        """
        if self._agreed < prefix.length:
            self._catch_up(prefix)
        keep, length, cached = self._agreed, prefix.length, self._tokens
        if keep == length:
            drafted = cached[length : length + len(path)]
            if drafted == path[: len(drafted)]:  # as usual
                keep += len(drafted)
            else:
                while cached[keep] == path[keep - length]:
                    keep += 1
        keep = min(keep, length + len(path) - 1)
        appended = (*prefix.tokens[keep:], *path[max(0, keep - length) :])
        cached[keep:] = appended
        self._agreed = min(self._agreed, keep)
        return keep, appended

    def _catch_up(self, prefix: CommittedPrefix) -> None:
        while self._agreed < min(len(self._tokens), prefix.length):
            if self._tokens[self._agreed] != prefix.tokens[self._agreed]:
                del self._tokens[self._agreed :]
                return
            self._agreed += 1
