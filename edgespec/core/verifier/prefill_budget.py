"""How many prompt rows a pass may carry while other sessions decode in it.

Theory of operation. A pass ends for all its sessions at once, so a long prompt in it makes
everybody wait: 1,024 prompt rows on a CPU take a second, in which no text moves. While any session
decodes, a pass therefore carries only so many prompt rows that it becomes about half as long again
(chunked prefill under a budget of time, as in Sarathi-Serve, arXiv 2403.02310). Decoding then keeps
two thirds of the target, and prompts share one third; they have all of it when nobody decodes.

Formula: rows = share * base_s / row_s, at least ``LEAST_ROWS``, where a pass with n prompt rows is
taken to last base_s + n * row_s: a line through the passes of late. With passes of 24 ms and prompt
rows of 0.5 ms that is 0.5 * 24 / 0.5 = 24 rows; on a GPU, with rows of 0.02 ms, 600.

Every other pass carries half of the budget. So the line can always be drawn, also on a verifier
that is never without prompts. A base measured once, without them, would be too short when more
sessions come; the difference would be booked on the rows, and the budget would shrink to nothing.
"""

from __future__ import annotations

from typing import Final

from edgespec.core.protocol.estimators import SlopeEstimator

SHARE: Final = 0.5
LEAST_ROWS: Final = 16
"""Fewer are not cheaper: CPUs compute tiles of 16 rows (``targets/row_tiles.py``)."""
FIRST_ROWS: Final = 32
"""Before the first prompt was timed beside decoding sessions."""
MOST_ROWS: Final = 1 << 20


class PrefillBudget:
    """Learns from finished passes; ``rows`` is the budget of the next one."""

    def __init__(self) -> None:
        self._took_s = SlopeEstimator()
        self._budget = FIRST_ROWS
        self._halve = False

    def note(self, prompt_rows: int, took_s: float) -> None:
        """A pass that sampled is over; ``prompt_rows`` of its rows were prompts."""
        self._took_s.add(prompt_rows, took_s)
        if prompt_rows:
            self._halve = not self._halve
            # A pass that was late for another reason must not let a whole prompt in at once.
            self._budget = max(LEAST_ROWS, min(self._affordable(), 2 * self._budget))

    @property
    def rows(self) -> int:
        """Prompt rows that a pass may carry beside decoding sessions."""
        return self._budget // 2 if self._halve else self._budget

    def _affordable(self) -> int:
        row_s, base_s = self._took_s.get(), self._took_s.value(0.0)
        if row_s is None or base_s is None:
            return self._budget
        if row_s <= 0.0:
            return MOST_ROWS
        return min(MOST_ROWS, int(SHARE * max(0.0, base_s) / row_s))
