"""A draft within a memory budget.

Theory of operation. The memory guard is consulted before steps, and restricts the draft. A
measurement takes part of a millisecond, so it is made when time has passed or the step adds much.
It happens in the drafter's own thread, where the drafter may be changed, so no watching thread is
needed that could fail. If a measurement fails, the last one counts, plus all growth since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

from edgespec.core.device.memory import DraftAllowance, MemoryGuard
from edgespec.core.ports import (
    Cancelled,
    Candidate,
    Drafter,
    Resuming,
    count_places,
    draft_places,
    make_twin,
    never_cancelled,
)

MEASURE_EVERY_S: Final = 0.5
_LARGE_GROWTH_BYTES: Final = 1 << 20


@runtime_checkable
class Restrictable(Drafter, Protocol):
    """A drafter that can be bounded while it runs."""

    @property
    def held_tokens(self) -> int:
        """Number of rows that are resident."""

    def growth_bytes(self, length: int) -> int:
        """Return the bytes that a step may add to the resident memory.

        ``length`` is the length of the sequence after the step."""

    def restrict(self, window: int, width: int) -> None:
        """Hold at most ``window`` rows and give at most ``width`` candidates. A window of 0
        rests."""


class CacheGroup:
    """The caches of one draft, which one memory guard bounds together.

    A row that the guard takes away is taken from every cache. ``measure`` returns the resident
    bytes of the process, ``max_caches`` is the largest number of caches, and ``budget_bytes`` is
    for display. ``on_restricted`` is called with the resident bytes and the new allowance before
    the draft is restricted, ``on_measure_failed`` with the error when ``measure`` first raises."""

    def __init__(
        self,
        guard: MemoryGuard,
        measure: Callable[[], int],
        clock: Callable[[], float],
        max_caches: int = 1,
        budget_bytes: int = 0,
        on_restricted: Callable[[int, DraftAllowance], None] = lambda resident, allowance: None,
        on_measure_failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._on_restricted, self._on_measure_failed = on_restricted, on_measure_failed
        self.members: list[Restrictable] = []
        self.max_caches, self.budget_bytes = max_caches, budget_bytes
        self.guard, self._measure, self._clock = guard, measure, clock
        self._measured_at = -MEASURE_EVERY_S
        self._resident = 0
        self._has_failed = False

    def check(self, growth: int) -> None:
        """Measure, if it is time, before a step that may add ``growth`` bytes, and restrict the
        draft."""
        now = self._clock()
        if growth < _LARGE_GROWTH_BYTES and now - self._measured_at < MEASURE_EVERY_S:
            return
        self._measured_at = now
        try:
            self._resident = self._measure()
        except Exception as error:  # Systems differ in the errors that they raise here.
            self._resident += growth
            if not self._has_failed:
                self._has_failed = True
                self._on_measure_failed(error)
        held = max(member.held_tokens for member in self.members)
        restriction = self.guard.observe(self._resident, growth, held, now)
        if restriction is None:
            return
        window, width = restriction.window, restriction.width
        self._on_restricted(self._resident, restriction)
        for member in self.members:
            member.restrict(window, width)


class GuardedDrafter:
    """The drafter ``inner`` as a member of ``caches``."""

    def __init__(self, inner: Restrictable, caches: CacheGroup) -> None:
        self.inner, self.info, self.caches = inner, inner.info, caches
        self.begin, self.close = inner.begin, inner.close
        self.max_places = count_places(inner)
        caches.members.append(inner)

    @property
    def resumes_feeds(self) -> bool:
        return isinstance(self.inner, Resuming) and self.inner.resumes_feeds

    def twin(self) -> GuardedDrafter:
        """Return a twin in the same caches. Raises ``MemoryError`` if there is no room."""
        if len(self.caches.members) >= self.caches.max_caches:
            raise MemoryError(f"the memory budget was planned with {self.caches.max_caches} caches")
        inner = make_twin(self.inner)
        assert isinstance(inner, Restrictable)
        return GuardedDrafter(inner, self.caches)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        self.caches.check(self.inner.growth_bytes(keep_length + len(feed)))
        return self.inner.step(keep_length, feed, width, cancelled)

    def step_places(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        places: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[tuple[Candidate, ...], ...]:
        self.caches.check(self.inner.growth_bytes(keep_length + len(feed) + places - 1))
        return draft_places(self.inner, keep_length, feed, width, places, cancelled)
