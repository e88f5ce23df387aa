"""The scores of one session's tokens, from the pass that made them to the device that asked.

Theory of operation. A pass scores its rows; the rows on the accepted path are those of the
committed tokens. They are kept until the device has acknowledged them, so that one that comes back
after a broken link is told them again: no more than flow control lets be outstanding. A session
that did not ask has none, and nothing happens here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from edgespec.core.protocol.scores import TokenScore


class ScoreKeeper:
    def __init__(self) -> None:
        self._kept: deque[TokenScore] = deque()
        self._position = 0
        """Of the first score that is kept; each of the others is for the next position."""

    def commit(
        self, position: int, rows: Sequence[TokenScore], nodes: Sequence[int], count: int
    ) -> None:
        """A pass committed ``count`` tokens from ``position`` on; ``rows`` are as in
        ``PassResult.scores``, ``nodes`` the accepted ones."""
        if not rows:
            return
        if position != self._position + len(self._kept):
            self._kept.clear()
        if not self._kept:
            self._position = position
        self._kept += [rows[row] for row in (0, *(1 + node for node in nodes))[:count]]

    def acknowledged(self, position: int) -> None:
        """The device holds all tokens before ``position``."""
        while self._kept and self._position < position:
            self._kept.popleft()
            self._position += 1

    def of(self, position: int, count: int) -> tuple[TokenScore, ...]:
        """Of so many tokens from ``position`` on; empty unless all of them are kept."""
        first = position - self._position
        if not count or first < 0 or first + count > len(self._kept):
            return ()
        return tuple(self._kept)[first : first + count]
