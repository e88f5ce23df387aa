"""From committed tokens to text for the user, with stop strings.

Text that might be the beginning of a stop string is held back until it is known not to be; a stop
string itself is never shown, and neither is anything behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextDecoder(Protocol):
    """Incremental detokenizer of one text (``models.tokenizer.TextStream``)."""

    def push(self, tokens: Sequence[int]) -> str:
        """Text that is certain after these further tokens."""

    def flush(self) -> str:
        """The rest, when no token will follow."""


class StopFinder:
    """Feeds text through; ``found`` once a stop string was seen."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    @property
    def held(self) -> int:
        """Characters that may begin a stop string."""
        return len(self._held)

    def push(self, text: str) -> str:
        """The part of what was held and ``text`` that can be shown now."""
        if self.found:
            return ""
        self._held += text
        starts = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if starts:
            self.found = True
            shown, self._held = self._held[: min(starts)], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        shown, self._held = self._held, ""
        return "" if self.found else shown

    def _overlap(self, stop: str) -> int:
        """The longest end of the held text that begins ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if stop.startswith(self._held[-n:])), 0)
