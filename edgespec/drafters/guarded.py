"""A drafter below a memory budget: a governor is asked before steps, and the draft restricted.

Measuring takes part of a millisecond, so it is done when time has passed or the step adds much.
It happens in the drafter's own thread, where the drafter may be changed; nothing runs beside it
that could die. A measurement that fails is taken for the last one plus what was added since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from edgespec.core.device.memory_guard import MemoryGovernor, Observation, Restriction
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.ports import Cancelled, Candidate, Drafter, ModelInfo, never_cancelled

MEASURE_EVERY_S: Final = 0.5
_MUCH_BYTES: Final = 1 << 20
_log = logging.getLogger(__name__)


class Restrictable(Protocol):
    """What a guarded drafter has to have beside ``Drafter``."""

    @property
    def held_tokens(self) -> int:
        """Rows that are resident."""

    def growth_bytes(self, length: int) -> int:
        """What a step that makes the text ``length`` long may add to what is resident."""

    def restrict(self, window: int, width: int) -> None:
        """Hold at most ``window`` rows, give at most ``width`` guesses; 0 rests."""


class GuardedDrafter:
    """``inner`` with a ``governor`` on it; ``measure`` gives the process's resident bytes, and
    ``budget_bytes`` is what they are kept below, for whoever shows it."""

    def __init__(
        self,
        inner: Drafter,
        restrictable: Restrictable,
        governor: MemoryGovernor,
        measure: Callable[[], int],
        clock: Callable[[], float],
        budget_bytes: int = 0,
    ) -> None:
        self.inner, self.budget_bytes = inner, budget_bytes
        self.restriction: Restriction | None = None
        """The last one that the governor laid on; None: none yet."""
        self._restrictable, self._governor = restrictable, governor
        self._measure, self._clock = measure, clock
        self._measured_at = -MEASURE_EVERY_S
        self._resident = 0
        self._failed = False

    @property
    def info(self) -> ModelInfo:
        return self.inner.info

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self.inner.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        growth = self._restrictable.growth_bytes(keep_length + len(feed))
        now = self._clock()
        if growth >= _MUCH_BYTES or now - self._measured_at >= MEASURE_EVERY_S:
            self._look(growth, now)
        return self.inner.step(keep_length, feed, width, cancelled)

    def close(self) -> None:
        self.inner.close()

    def _look(self, growth: int, now: float) -> None:
        self._measured_at = now
        try:
            self._resident = self._measure()
        except Exception as error:  # whatever a system says about itself, or does not
            self._resident += growth
            if not self._failed:
                self._failed = True
                _log.warning("this process's memory cannot be measured any more: %s", error)
        seen = Observation(self._resident, growth, self._restrictable.held_tokens)
        restriction = self._governor.observe(seen, now)
        if restriction is None:
            return
        _log.info(
            "%d MiB resident: the draft may hold %d tokens and give %d guesses a step",
            self._resident >> 20,
            restriction.window,
            restriction.width,
        )
        self.restriction = restriction
        self._restrictable.restrict(restriction.window, restriction.width)
