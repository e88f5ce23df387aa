"""The text of an answer with the marks of special tokens, which decoded text does not show.

A mark stands where its token came. Text before it may still be held back, for it may begin a stop
string; then the mark waits for it. Where the stop string is completed, that text never comes, and
the mark within it stays away as what is behind the end does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from edgespec.device.reply import Piece


class MarkedText:
    """Of one answer; ``marks`` are texts by token id."""

    def __init__(self, marks: Mapping[int, str]) -> None:
        self._marks = marks
        self._length = 0
        """Of the text so far, without marks."""
        self._waiting: deque[tuple[int, str]] = deque()
        """Marks whose place, counted as ``_length`` is, the text has not reached."""

    def push(self, token: int | None, piece: Piece) -> str:
        """The text of ``piece`` and all marks that stand in it; ``token`` None: it has none."""
        if token is not None and (mark := self._marks.get(token, "")):
            self._waiting.append((self._length + piece.held, mark))
        begin, self._length = self._length, self._length + len(piece.text)
        parts, done = [], 0
        while self._waiting and self._waiting[0][0] <= self._length:
            place, mark = self._waiting.popleft()
            parts += [piece.text[done : place - begin], mark]
            done = place - begin
        return "".join((*parts, piece.text[done:]))
