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

MAX_STEP_MS = 60_000.0
# A cancelled step ends within so much time, however long the emulated one is.
_NAP_S = 0.05


class PacedDrafter:
    """``Drafter`` whose steps take ``step_ms`` of wall time, plus ``prefill_ms_per_token`` for
    each fed token after the first.

    The remainder is slept, not burnt; a step of ``inner`` that already took longer is not slowed
    further. ``emulated`` marks every result made with it. Raises ``ValueError`` naming the limit.
    """

    emulated = True

    def __init__(
        self,
        inner: Drafter,
        step_ms: float,
        prefill_ms_per_token: float = 0.0,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (
            ("step_ms", step_ms),
            ("prefill_ms_per_token", prefill_ms_per_token),
        ):
            if not 0.0 <= value <= MAX_STEP_MS:
                raise ValueError(f"{name} is {value}, but must be in [0, {MAX_STEP_MS}]")
        self._inner = inner
        self._step_ms = step_ms
        self._prefill_ms_per_token = prefill_ms_per_token
        self._sleep = sleep
        self._clock = clock

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def twin(self) -> PacedDrafter:
        """``inner``'s twin at the same pace. Raises ``TypeError`` where that has none."""
        return PacedDrafter(
            twin_of(self._inner),
            self._step_ms,
            self._prefill_ms_per_token,
            sleep=self._sleep,
            clock=self._clock,
        )

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._inner.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        due_s = self._clock() + self.step_s(len(feed))
        candidates = self._inner.step(keep_length, feed, width, cancelled)
        self._wait(due_s, cancelled)
        return candidates

    def _wait(self, due_s: float, cancelled: Cancelled) -> None:
        while (remaining_s := due_s - self._clock()) > 0:
            if cancelled():
                raise StepCancelledError(f"cancelled {remaining_s:.3f} s before its emulated end")
            self._sleep(min(remaining_s, _NAP_S))

    def step_s(self, feed_length: int) -> float:
        """How long a step with ``feed_length`` fed tokens is made to take."""
        return (self._step_ms + self._prefill_ms_per_token * (feed_length - 1)) / 1e3

    def close(self) -> None:
        self._inner.close()
