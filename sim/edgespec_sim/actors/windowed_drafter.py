"""A simulated draft with keys and values that take memory: what the product's guard can restrict.

The product's own window (``drafters/draft_window.py``) says which tokens are held and which a step
has to feed again; guesses are those of the drafter inside, whose texts do not depend on how far it
looks back. So a window costs time here, and acceptance it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.core.ports import Cancelled, Candidate, Drafter, ModelInfo, never_cancelled
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.draft_window import DraftWindow


class WindowedDrafter:
    """``inner`` with rows of ``row_bytes`` each; ``on_restricted`` hears of (window, width)."""

    def __init__(
        self,
        inner: Drafter,
        window: int,
        width: int,
        row_bytes: int,
        on_restricted: Callable[[int, int], None] = lambda window, width: None,
    ) -> None:
        self.fed = self.kept = 0
        """Of the last step: tokens that it fed, and rows that it found."""
        self._inner, self._row_bytes, self._on_restricted = inner, row_bytes, on_restricted
        self._window, self._width = DraftWindow(window), width
        self._touched = 0

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    @property
    def held_tokens(self) -> int:
        return self._touched

    @property
    def held_bytes(self) -> int:
        """What the rows that are held take."""
        return self._touched * self._row_bytes

    def growth_bytes(self, length: int) -> int:
        rows = min(length, self._window.size) - self._touched
        return max(0, rows) * self._row_bytes

    def restrict(self, window: int, width: int) -> None:
        if window > self._window.size:
            self._window.clear()
        self._window.size, self._width = window, width if window else 0
        self._touched = min(self._touched, window)
        self._on_restricted(window, width)

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._inner.begin(prompt_length, sampling)
        self._window.clear()

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        found = self._inner.step(keep_length, feed, width, cancelled)
        length = keep_length + len(feed)
        if not self._width:
            self._window.clear()
            self.fed = self.kept = 0
            return ()
        first = self._window.place(keep_length, length)
        self.kept, self.fed = first - self._window.first, length - first
        self._window.held = length - self._window.first
        self._touched = max(self._touched, self._window.held)
        return found[: self._width]

    def close(self) -> None:
        self._inner.close()
