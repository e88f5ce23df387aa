"""A target and a draft model whose passes take the time of bigger ones: emulated time, real tokens.
Anything measured with them must be labelled as emulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from edgespec.core.ports import PassRequest, PassResult, ServerDrafter, TargetModel
from edgespec.core.protocol.work import Candidate, DraftStep

# A coarse sleep may oversleep by a scheduler tick, so the last stretch is slept in small steps.
_COARSE_MARGIN_S = 1e-3
_FINE_STEP_S = 1e-4


class _Pace:
    """``base_ms + per_row_ms * rows``, of which what really was at work counts."""

    def __init__(
        self,
        base_ms: float,
        per_row_ms: float,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        for name, value in (("base_ms", base_ms), ("per_row_ms", per_row_ms)):
            if not 0.0 <= value <= 60_000.0:  # also catches NaN
                raise ValueError(f"{name} is {value}, but must be in [0, 60000]")
        self._base_s = base_ms / 1e3
        self._per_row_s = per_row_ms / 1e3
        self._sleep = sleep
        self.clock = clock

    def duration_s(self, rows: int, *, base: bool) -> float:
        """``base`` False: without ``base_ms``."""
        return (self._base_s if base else 0.0) + self._per_row_s * rows

    def wait_until(self, end_s: float) -> None:
        left_s = end_s - self.clock()
        if left_s > _COARSE_MARGIN_S:
            self._sleep(left_s - _COARSE_MARGIN_S)
        while (left_s := end_s - self.clock()) > 0.0:
            self._sleep(min(left_s, _FINE_STEP_S))


class PacedTarget:
    """``inner`` with a pass that takes ``base_ms + per_row_ms * rows`` in all; one in which every
    request is prefill takes ``per_row_ms * rows``, because it is compute-bound. A pass of the
    wrapped target that takes longer stays as long as it is."""

    def __init__(
        self,
        inner: TargetModel,
        base_ms: float,
        per_row_ms: float,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = inner
        self._pace = _Pace(base_ms, per_row_ms, sleep, clock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        end_s = self._pace.clock() + self.pass_s(batch)
        results = self.inner.forward(batch)
        self._pace.wait_until(end_s)
        return results

    def pass_s(self, batch: Sequence[PassRequest]) -> float:
        rows = sum(request.row_count for request in batch)
        return self._pace.duration_s(rows, base=any(request.sample for request in batch))


class PacedServerDrafter:
    """``inner`` with steps that take ``base_ms + per_row_ms * rows``; one without a guess, which
    feeds prompts, ``per_row_ms * rows``."""

    def __init__(
        self,
        inner: ServerDrafter,
        base_ms: float,
        per_row_ms: float,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner, self.open, self.close = inner, inner.open, inner.close
        self._pace = _Pace(base_ms, per_row_ms, sleep, clock)

    def step(self, batch: Sequence[DraftStep]) -> list[tuple[Candidate, ...]]:
        rows = sum(len(step.feed) for step in batch)
        seconds = self._pace.duration_s(rows, base=any(step.guess for step in batch))
        end_s = self._pace.clock() + seconds
        found = self.inner.step(batch)
        self._pace.wait_until(end_s)
        return found
