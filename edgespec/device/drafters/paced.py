"""A drafter slowed down to a device's pace, for emulation on a faster machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edgespec.core.ports import (
    Cancelled,
    Candidate,
    Drafter,
    ModelInfo,
    StepCancelledError,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.token_cache import twin_of

# A cancelled step ends within so much time, however long the emulated one is.
_NAP_S = 0.05


class PacedDrafter:
    """``Drafter`` whose steps take ``step_ms`` of wall time.

    The remainder is slept, not burnt; a step of ``inner`` that already took longer is not slowed
    further.
    """

    def __init__(
        self,
        inner: Drafter,
        step_ms: float,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner, self._step_ms = inner, step_ms
        self._sleep, self._clock = sleep, clock

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def twin(self) -> PacedDrafter:
        """``inner``'s twin at the same pace. Raises ``TypeError`` where that has none."""
        inner = twin_of(self._inner)
        return PacedDrafter(inner, self._step_ms, sleep=self._sleep, clock=self._clock)

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._inner.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        due_s = self._clock() + self._step_ms / 1e3
        candidates = self._inner.step(keep_length, feed, width, cancelled)
        while (remaining_s := due_s - self._clock()) > 0:
            if cancelled():
                raise StepCancelledError(f"cancelled {remaining_s:.3f} s before its emulated end")
            self._sleep(min(remaining_s, _NAP_S))
        return candidates

    def close(self) -> None:
        self._inner.close()
