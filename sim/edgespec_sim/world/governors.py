"""The governor of a simulated device's memory, on a stated course.

The guard is the core's own, driven by the product's ``GuardedDrafter``, with the world's clock and
the course's memory. Nothing is drawn.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from edgespec.core.device.memory import MemoryGuard, Restriction, margin_bytes
from edgespec.core.device.policy import DEFAULT_WIDTH
from edgespec.core.ports import Cancelled, Candidate, Drafter, ModelInfo, never_cancelled
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.guarded import GuardedDrafter
from edgespec.device.drafters.token_cache import DraftWindow
from edgespec.telemetry.trace import Tracer
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.scenario.sections import (
    ConditionSection,
    ConditionsSection,
)
from edgespec_sim.sessions import SimulatedDevice


@dataclass(frozen=True, slots=True)
class DraftRestricted:
    """A line of the trace: what the guard leaves of the draft from now on; window 0 rests."""

    window: int
    width: int


# --- a simulated draft with keys and values that take memory -----------------------------------
# what the product's guard can restrict.
# The product's own window (``drafters/token_cache.py``) says which tokens are held and which a
# step has to feed again; guesses are those of the drafter inside, whose texts do not depend on
# how far it looks back. So a window costs time here, and acceptance it does not.


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


# --- a device's conditions over time -----------------------------------------------------------
# rows hold until the next one; what a row does not say is as the row before said.


_MIB_BYTES: Final = 1 << 20


class ConditionCourse:
    """``rows`` begin at 0, each later than the one before."""

    def __init__(self, rows: Sequence[ConditionSection]) -> None:
        self._rows = tuple(_carried(rows))
        self._times_s = [row.at_s for row in self._rows]

    @property
    def most_slowdown(self) -> float:
        return max(row.slowdown or 1.0 for row in self._rows)

    def resident_bytes(self, now_s: float) -> int:
        return int((self._at(now_s).resident_mib or 0.0) * _MIB_BYTES)

    def slowdown(self, now_s: float) -> float:
        return self._at(now_s).slowdown or 1.0

    def _at(self, now_s: float) -> ConditionSection:
        return self._rows[max(0, bisect.bisect_right(self._times_s, now_s) - 1)]


def _carried(rows: Sequence[ConditionSection]) -> Iterator[ConditionSection]:
    """Each with what the rows before it said and it does not."""
    held: dict[str, Any] = {}
    for row in rows:
        held |= {name: value for name, value in asdict(row).items() if value is not None}
        yield ConditionSection(**held)


_MIB, _KIB = 1 << 20, 1 << 10


@dataclass(slots=True)
class Walked:
    """What the governor did while one request ran."""

    tightened: int = 0
    """Restrictions of the draft's memory."""
    loosened: int = 0


class Governors:
    """Of one device. ``drafter`` is the one to draft with."""

    def __init__(
        self,
        queue: EventQueue,
        section: ConditionsSection,
        course: ConditionCourse,
        drafter: Drafter,
    ) -> None:
        self.walked = Walked()
        self._queue, self._course = queue, course
        self._tracer: Tracer | None = None
        self._key = ""
        self._rows: WindowedDrafter | None = None
        self._standing = Restriction(section.window, DEFAULT_WIDTH)
        self.drafter = drafter
        if section.budget_mib is not None:
            self.drafter = self._guarded(section, int(section.budget_mib * _MIB), drafter)

    def begin(
        self,
        device: SimulatedDevice,
        tracer: Tracer | None,
    ) -> None:
        """A request starts now on ``device``; its changes are counted from here on."""
        self.walked = Walked()
        self._tracer, self._key = tracer, device.session.request.session_id

    def ended(self) -> Walked:
        """What was done since ``begin``."""
        self._tracer = None
        return replace(self.walked)

    def step_of(self, kept: int, fed: int) -> tuple[int, int]:
        """Rows that the last step found and fed, where it was asked for these; none at rest."""
        rows = self._rows
        return (kept, fed) if rows is None else (rows.kept, rows.fed)

    def _guarded(
        self, section: ConditionsSection, budget_bytes: int, drafter: Drafter
    ) -> GuardedDrafter:
        row_bytes = max(1, int(section.token_kib * _KIB))
        full = self._standing
        rows = WindowedDrafter(drafter, full.window, full.width, row_bytes, self._restricted)
        self._rows = rows
        guard = MemoryGuard(budget_bytes, margin_bytes(budget_bytes) // 2, full, row_bytes)
        return GuardedDrafter(
            rows,
            rows,
            guard,
            lambda: self._course.resident_bytes(self._queue.now) + rows.held_bytes,
            lambda: self._queue.now,
        )

    def _restricted(self, window: int, width: int) -> None:
        now = Restriction(window, width)
        less = (now.window, now.width) < (self._standing.window, self._standing.width)
        self._standing = now
        if less:
            self.walked.tightened += 1
        else:
            self.walked.loosened += 1
        if self._tracer is not None:
            line = DraftRestricted(window, width)
            self._tracer.record(self._queue.now, "device", self._key, "event", line)
