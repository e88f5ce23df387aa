"""A target whose passes take the time of a bigger one: emulated pass time, real tokens. Anything
measured with it must be labelled as emulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from edgespec.core.ports import PassRequest, PassResult, TargetModel

# A coarse sleep may oversleep by a scheduler tick, so the last stretch is slept in small steps.
_COARSE_MARGIN_S = 1e-3
_FINE_STEP_S = 1e-4


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
        for name, value in (("base_ms", base_ms), ("per_row_ms", per_row_ms)):
            if not 0.0 <= value <= 60_000.0:  # also catches NaN
                raise ValueError(f"{name} is {value}, but must be in [0, 60000]")
        self.inner = inner
        self._base_s = base_ms / 1e3
        self._per_row_s = per_row_ms / 1e3
        self._sleep = sleep
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        end_s = self._clock() + self.pass_s(batch)
        results = self.inner.forward(batch)
        self._wait_until(end_s)
        return results

    def pass_s(self, batch: Sequence[PassRequest]) -> float:
        rows = sum(request.row_count for request in batch)
        base_s = self._base_s if any(request.sample for request in batch) else 0.0
        return base_s + self._per_row_s * rows

    def _wait_until(self, end_s: float) -> None:
        left_s = end_s - self._clock()
        if left_s > _COARSE_MARGIN_S:
            self._sleep(left_s - _COARSE_MARGIN_S)
        while (left_s := end_s - self._clock()) > 0.0:
            self._sleep(min(left_s, _FINE_STEP_S))
