"""A drafter below a memory budget: a governor is asked before steps, and the draft restricted.

Measuring takes part of a millisecond, so it is done when time has passed or the step adds much.
It happens in the drafter's own thread, where the drafter may be changed; nothing runs beside it
that could die. A measurement that fails is taken for the last one plus what was added since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

from edgespec.core.device.memory import MemoryGuard, Observation, Restriction
from edgespec.core.ports import Cancelled, Candidate, Drafter, never_cancelled
from edgespec.device.drafters.token_cache import twin_of

MEASURE_EVERY_S: Final = 0.5
_MUCH_BYTES: Final = 1 << 20
_log = logging.getLogger(__name__)


@runtime_checkable
class Restrictable(Drafter, Protocol):
    """A drafter that can be bounded while it runs."""

    @property
    def held_tokens(self) -> int:
        """Rows that are resident."""

    def growth_bytes(self, length: int) -> int:
        """What a step that makes the text ``length`` long may add to what is resident."""

    def restrict(self, window: int, width: int) -> None:
        """Hold at most ``window`` rows, give at most ``width`` guesses; 0 rests."""


class CacheGroup:
    """The caches of one draft: they are bounded together. ``most``: so many may there be;
    ``budget_bytes``: what the process is kept below, for whoever shows it."""

    def __init__(self, first: Restrictable, most: int = 1, budget_bytes: int = 0) -> None:
        self.members: list[Restrictable] = [first]
        self.budget_bytes = budget_bytes
        self.restriction: Restriction | None = None
        """The last one that the governor laid on; None: none yet."""
        self.most = most

    @property
    def held_tokens(self) -> int:
        """Rows that the fullest one holds: a governor bounds them all alike."""
        return max(member.held_tokens for member in self.members)

    def restrict(self, restriction: Restriction) -> None:
        self.restriction = restriction
        for member in self.members:
            member.restrict(restriction.window, restriction.width)


class GuardedDrafter:
    """``inner`` with a ``governor`` on it; ``measure`` gives the process's resident bytes.

    ``caches``: those that share the governor, this drafter's among them. The governor is to know
    that a row it takes away goes in each of them."""

    def __init__(
        self,
        inner: Restrictable,
        governor: MemoryGuard,
        measure: Callable[[], int],
        clock: Callable[[], float],
        caches: CacheGroup | None = None,
    ) -> None:
        self.inner, self.info = inner, inner.info
        self.begin, self.close = inner.begin, inner.close
        self.caches = caches or CacheGroup(inner)
        self._governor = governor
        self._measure, self._clock = measure, clock
        self._measured_at = -MEASURE_EVERY_S
        self._resident = 0
        self._failed = False

    def twin(self) -> GuardedDrafter:
        """Another cache under the same governor. Raises ``MemoryError`` when there is no room."""
        if len(self.caches.members) >= self.caches.most:
            raise MemoryError(f"the memory budget was planned with {self.caches.most} caches")
        inner = twin_of(self.inner)
        assert isinstance(inner, Restrictable)
        self.caches.members.append(inner)
        return GuardedDrafter(inner, self._governor, self._measure, self._clock, self.caches)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        growth = self.inner.growth_bytes(keep_length + len(feed))
        now = self._clock()
        if growth >= _MUCH_BYTES or now - self._measured_at >= MEASURE_EVERY_S:
            self._look(growth, now)
        return self.inner.step(keep_length, feed, width, cancelled)

    def _look(self, growth: int, now: float) -> None:
        self._measured_at = now
        try:
            self._resident = self._measure()
        except Exception as error:  # whatever a system says about itself, or does not
            self._resident += growth
            if not self._failed:
                self._failed = True
                _log.warning("this process's memory cannot be measured any more: %s", error)
        seen = Observation(self._resident, growth, self.caches.held_tokens)
        restriction = self._governor.observe(seen, now)
        if restriction is None:
            return
        _log.info(
            "%d MiB resident: the draft may hold %d tokens and give %d guesses a step",
            self._resident >> 20,
            restriction.window,
            restriction.width,
        )
        self.caches.restrict(restriction)
