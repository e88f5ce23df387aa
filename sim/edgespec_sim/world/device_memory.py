"""A device whose memory is short: its conditions over time, and a draft within a memory budget.

Theory of operation. A scenario may state how much memory other programs take on a device at each
time (``ConditionCourse``). The device's draft has a budget. ``GuardedDraft`` puts the product's own
``MemoryGuard`` in front of it, as an agent does: where memory is short, the guard restricts the
window and the width of the draft, or pauses it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.core.device.draft_window import DraftWindow
from edgespec.core.device.memory import DraftAllowance, MemoryGuard, margin_bytes
from edgespec.core.device.policy import DEFAULT_WIDTH
from edgespec.core.guarded_drafter import CacheGroup, GuardedDrafter
from edgespec.core.ports import (
    Cancelled,
    Candidate,
    Drafter,
    count_places,
    draft_places,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.telemetry.trace import Tracer
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.scenario.sections import ConditionSection, ConditionsSection


@dataclass(frozen=True, slots=True)
class DraftRestricted:
    """A trace record: the window and width that the memory guard grants from now on; window 0
    pauses drafting."""

    window: int
    width: int


class WindowedDrafter:
    """A drafter whose cache holds the last ``window`` rows of the text, each of ``row_bytes``, and
    which proposes at most ``width`` candidates.

    ``on_restricted`` is called with (window, width) after each change of either."""

    def __init__(
        self,
        inner: Drafter,
        window: int,
        width: int,
        row_bytes: int,
        on_restricted: Callable[[int, int], None] = lambda window, width: None,
    ) -> None:
        self.fed = self.kept = 0
        """Tokens that the last step fed, and rows that it found in the cache."""
        self.inner, self._row_bytes, self._on_restricted = inner, row_bytes, on_restricted
        self._window, self._width = DraftWindow(window, can_move=True), width
        self.info, self.close = inner.info, inner.close
        self.max_places = count_places(inner)
        self.held_tokens = 0
        """Rows for which the cache has taken memory."""

    def growth_bytes(self, length: int) -> int:
        """Return the memory that the cache would take in addition for a text of ``length``
        tokens."""
        rows = min(length, self._window.size) - self.held_tokens
        return max(0, rows) * self._row_bytes

    def restrict(self, window: int, width: int) -> None:
        """Set the window and the width from now on; a window of 0 pauses drafting."""
        self._window.resize(window)
        self._width = width if window else 0
        self.held_tokens = min(self.held_tokens, window)
        self._on_restricted(window, width)

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self.inner.begin(prompt_length, sampling)
        self._window.clear()

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        found = self.inner.step(keep_length, feed, width, cancelled)
        if not self._move_window(keep_length, len(feed), 0):
            return ()
        return found[: self._width]

    def step_places(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        places: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[tuple[Candidate, ...], ...]:
        found = draft_places(self.inner, keep_length, feed, width, places, cancelled)
        if not self._move_window(keep_length, len(feed), places - 1):
            return ()
        return tuple(one[: self._width] for one in found)

    def _move_window(self, keep_length: int, fed: int, masks: int) -> bool:
        """Move the window over a step that feeds ``fed`` tokens and ``masks`` mask tokens. Return
        False, and feed nothing, if drafting is paused."""
        length = keep_length + fed
        if not self._width:
            self._window.clear()
            self.fed = self.kept = 0
            return False
        self._window.move_to(keep_length, length)
        rows = length - self._window.skipped
        self.kept, self.fed = self._window.held_rows, rows - self._window.held_rows + masks
        self._window.held_rows = rows
        self.held_tokens = max(self.held_tokens, self._window.held_rows)
        return True


_MIB, _KIB = 1 << 20, 1 << 10


class ConditionCourse:
    """The conditions of a device over time. ``rows`` begin at 0 and are ordered by time."""

    def __init__(self, rows: Sequence[ConditionSection]) -> None:
        self._rows = tuple(_fill_gaps(rows))
        self._times_s = [row.at_s for row in self._rows]
        self.max_slowdown = max(row.slowdown or 1.0 for row in self._rows)

    def resident_bytes(self, now_s: float) -> int:
        """Return the memory that other programs take at a time."""
        return int((self._at(now_s).resident_mib or 0.0) * _MIB)

    def slowdown(self, now_s: float) -> float:
        """Return the factor on the duration of draft steps at a time."""
        return self._at(now_s).slowdown or 1.0

    def _at(self, now_s: float) -> ConditionSection:
        return self._rows[max(0, bisect.bisect_right(self._times_s, now_s) - 1)]


def _fill_gaps(rows: Sequence[ConditionSection]) -> Iterator[ConditionSection]:
    """Yield each row with the values that it lacks taken from the rows before it."""
    held: dict[str, Any] = {}
    for row in rows:
        held |= {name: value for name, value in asdict(row).items() if value is not None}
        yield ConditionSection(**held)


class GuardedDraft:
    """Keeps the draft of one device within ``section.budget_mib``. Its user drafts with ``drafter``
    in place of the drafter that was given."""

    def __init__(
        self,
        queue: EventQueue,
        section: ConditionsSection,
        course: ConditionCourse,
        drafter: Drafter,
    ) -> None:
        assert section.budget_mib is not None
        budget_bytes = int(section.budget_mib * _MIB)
        row_bytes = max(1, int(section.token_kib * _KIB))
        full = self._standing = DraftAllowance(section.window, DEFAULT_WIDTH)
        rows = WindowedDrafter(drafter, full.window, full.width, row_bytes, self._restricted)
        guard = MemoryGuard(budget_bytes, margin_bytes(budget_bytes) // 2, full, row_bytes)
        self.windowed = rows
        self.tightened = self.loosened = 0
        caches = CacheGroup(
            guard,
            lambda: course.resident_bytes(queue.now) + rows.held_tokens * row_bytes,
            lambda: queue.now,
        )
        self.drafter = GuardedDrafter(rows, caches)
        self._queue, self._key = queue, ""
        self._tracer: Tracer | None = None

    def begin(self, key: str, tracer: Tracer | None) -> None:
        """Start counting the restrictions of a new request with session id ``key``."""
        self.tightened = self.loosened = 0
        self._tracer, self._key = tracer, key

    def _restricted(self, window: int, width: int) -> None:
        less = (window, width) < (self._standing.window, self._standing.width)
        self._standing = DraftAllowance(window, width)
        self.tightened += less
        self.loosened += not less
        if self._tracer is not None:
            line = DraftRestricted(window, width)
            self._tracer.record(self._queue.now, "device", self._key, "event", line)
