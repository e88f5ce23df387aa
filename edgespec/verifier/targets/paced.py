"""A target whose passes take the time of a bigger one: emulated pass time, real tokens. Anything
measured with it must be labelled as emulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edgespec.core.ports import (
    ModelInfo,
    PassRequest,
    PassResult,
    PassShape,
    TargetModel,
    adapters_of,
    pass_shape,
    use_adapter,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape

# A coarse sleep may oversleep by a scheduler tick, so the last stretch is slept in small steps.
_COARSE_MARGIN_S = 1e-3
_FINE_STEP_S = 1e-4


class PacedTarget:
    """``inner`` with a pass that takes ``base_ms + per_row_ms * rows`` in all; one in which every
    request is prefill takes ``per_row_ms * rows``, because it is compute-bound. A pass of the
    wrapped target that takes longer stays as long as it is."""

    emulated = True
    description = "emulated pass time"

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

    @property
    def info(self) -> ModelInfo:
        return self.inner.info

    @property
    def pass_shape(self) -> PassShape:
        return pass_shape(self.inner)

    @property
    def cache(self) -> CacheShape | None:
        return self.inner.cache

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self.inner.open(key, prompt_length, sampling, text)

    @property
    def adapters(self) -> tuple[ModelInfo, ...]:
        return adapters_of(self.inner)

    def use_adapter(self, key: str, name: str) -> None:
        use_adapter(self.inner, key, name)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        end_s = self._clock() + self.pass_s(batch)
        results = self.inner.forward(batch)
        self._wait_until(end_s)
        return results

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self.inner.keep(key, nodes)

    def close(self, key: str) -> None:
        self.inner.close(key)

    def pass_s(self, batch: Sequence[PassRequest]) -> float:
        """How long a pass over ``batch`` shall take."""
        rows = sum(request.row_count for request in batch)
        base_s = self._base_s if any(request.sample for request in batch) else 0.0
        return base_s + self._per_row_s * rows

    def _wait_until(self, end_s: float) -> None:
        left_s = end_s - self._clock()
        if left_s > _COARSE_MARGIN_S:
            self._sleep(left_s - _COARSE_MARGIN_S)
        while (left_s := end_s - self._clock()) > 0.0:
            self._sleep(min(left_s, _FINE_STEP_S))
