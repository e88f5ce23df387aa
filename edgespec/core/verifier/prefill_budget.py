"""How many prompt rows a pass may carry while other sessions decode in it.

Theory of operation. A pass ends for all its sessions at once, so a long prompt in it makes
everybody wait: 1,024 prompt rows on a CPU take a second, in which no text moves. While any session
decodes, a pass therefore carries only so many prompt rows that it becomes about a quarter as long
again (chunked prefill under a budget of time, as in Sarathi-Serve, arXiv 2403.02310): a burst of
long prompts stretches the time between tokens to 1.25 of the quiet one at most, or to 1.3 where
drafts are right. When nobody decodes, prompts have the whole pass.

A burst is served late, but prompts that keep coming have to be served as fast as they come, or
their line would grow without end. ``PromptLoad`` measures what arrives all the time; the budget is
thrice that if it is more, up to three fifths of the verifier's time.

Formula: rows = share * base_s / row_s with share pace * ``SHARE`` up to ``BURST_SHARE``, or pace *
``SPARE`` * arriving rows a pass up to the share pace * ``MOST_SHARE``, at least ``LEAST_ROWS``. A
pass with n prompt rows is taken to last base_s + n * row_s: a line through the passes of late, less
their drafts' rows. With passes of 24 ms and prompt rows of 0.5 ms that is 0.25 * 24 / 0.5 = 12,
hence 16 rows; on a GPU, with rows of 0.02 ms, 300. Where prompts of 200 rows arrive 8 times a
second all the time, and passes last 30 ms, it is at least 3 * 8 * 200 * 0.03 = 144.

The pace is how many tokens a session has of a pass. Where drafts make it more than one, passes may
be as much longer, and have to be, or drafts would be paid for by those who wait with a prompt: a
pass that is not full computes some rows for nothing (64 beside those of 23 ms, on an H200). Drafts
take their place, so prompt rows cost more and fewer of them are fed, just when a line begins.

Every other pass carries half of the budget. So the line can always be drawn, also on a verifier
that is never without prompts. A base measured once, without them, would be too short when more
sessions come; the difference would be booked on the rows, and the budget would shrink to nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from edgespec.core.protocol.estimators import SlopeEstimator

BURST_SHARE: Final = 0.3
"""Whatever the pace: a stream's gaps are asked to be at most 1.3 of the quiet ones."""
SHARE: Final = 0.25
"""At 0.5 ten long prompts stretched the gaps of a running stream to 1.5; they are fed 1.6 times as
fast with it, in 27 % of the time instead of 16 %."""
MOST_SHARE: Final = 1.5
SPARE: Final = 3.0
"""Prompts come in clusters: at twice the median they waited half as long again."""
LEAST_ROWS: Final = 16
"""Fewer are not cheaper: CPUs compute tiles of 16 rows (``targets/row_tiles.py``)."""
FIRST_ROWS: Final = 32
"""Before the first prompt was timed beside decoding sessions."""
MOST_ROWS: Final = 1 << 20
SLOT_S: Final = 1.0
SLOTS: Final = 8


class PrefillBudget:
    """Learns from finished passes; ``rows`` is the budget of the next one."""

    def __init__(self) -> None:
        self._took_s = SlopeEstimator()
        self._budget = FIRST_ROWS
        self._halve = False

    def note(
        self, prompt_rows: int, took_s: float, arriving: float = 0.0, pace: float = 1.0
    ) -> None:
        """A pass that sampled is over; ``prompt_rows`` of its rows were prompts, and so many
        ``arriving`` rows come in the time that a pass takes. ``took_s`` is without the rows of
        drafts; a session has ``pace`` tokens of a pass."""
        self._took_s.add(prompt_rows, took_s)
        if prompt_rows:
            self._halve = not self._halve
            # A pass that was late for another reason must not let a whole prompt in at once.
            affordable = self._affordable(arriving, pace)
            self._budget = max(LEAST_ROWS, min(affordable, 2 * self._budget))

    @property
    def rows(self) -> int:
        """Prompt rows that a pass may carry beside decoding sessions."""
        return self._budget // 2 if self._halve else self._budget

    def _affordable(self, arriving: float, pace: float) -> int:
        row_s, base_s = self._took_s.get(), self._took_s.value(0.0)
        if row_s is None or base_s is None:
            return self._budget
        if row_s <= 0.0:
            return MOST_ROWS
        base_rows = max(0.0, base_s) / row_s
        burst = min(pace * SHARE, BURST_SHARE) * base_rows
        lasting = pace * min(SPARE * arriving, MOST_SHARE * base_rows)
        return min(MOST_ROWS, int(max(burst, lasting)))


class PromptLoad:
    """Prompt rows that arrive a second, all the time.

    Formula: the lower median of the rows that came in the last ``SLOTS`` slots of ``SLOT_S``. What
    came in fewer than half of them is a burst and does not count: ten prompts of 4,000 rows in one
    slot leave it at 0, prompts of 400 rows in each slot make it 200 a second. Of the credentials
    whose prompts come in a slot, none counts for more than all others together: who sends long
    prompts in a loop would else make everybody's passes longer.
    """

    def __init__(self) -> None:
        self._slots: deque[int] = deque([0] * SLOTS, SLOTS)
        self._counts: Counter[str] = Counter()
        self._slot_ends_at: float | None = None
        self._median = 0

    def add(self, rows: int, now: float, credential: str = "") -> None:
        """A prompt with so many rows to compute came, of the credential of that name."""
        self._turn(now)
        self._counts[credential] += rows

    def rows_per_s(self, now: float) -> float:
        """The load as of now."""
        self._turn(now)
        return self._median / SLOT_S

    def _turn(self, now: float) -> None:
        """Close the slots that are over."""
        if self._slot_ends_at is None or now >= self._slot_ends_at + SLOTS * SLOT_S:
            self._slots.extend([0] * SLOTS)
            self._counts.clear()
            self._slot_ends_at, self._median = now + SLOT_S, 0
        while now >= self._slot_ends_at:
            most = max(self._counts.values(), default=0)
            others = sum(self._counts.values()) - most
            self._slots.append(others + min(most, others) if others else most)
            self._counts.clear()
            self._slot_ends_at += SLOT_S
            self._median = sorted(self._slots)[(SLOTS - 1) // 2]
