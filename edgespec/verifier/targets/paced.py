"""Models of the verifier whose passes and steps take the time of bigger ones.

Whatever is measured with them must be labelled as emulated. A call of ``inner`` that takes longer
than its emulated time is not slowed further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from edgespec.core.ports import ReadPictures, ServerDrafter, TargetModel
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import (
    CacheShape,
    Candidate,
    DraftStep,
    ModelInfo,
    PassRequest,
    PassResult,
    PassShape,
)


class _Pace:
    """The emulated time of a call: ``base_ms + per_row_ms * rows`` in all, or ``per_row_ms * rows``
    for one that samples nothing, because such a call is compute-bound."""

    def __init__(
        self,
        base_ms: float,
        per_row_ms: float,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._base_s, self._per_row_s = base_ms / 1e3, per_row_ms / 1e3
        self._sleep, self._clock = sleep, clock

    @contextmanager
    def keep(self, rows: int, *, samples: bool) -> Iterator[None]:
        """Sleep behind the block until the time of a call of ``rows`` rows is over."""
        end_s = self._clock() + self._per_row_s * rows + (self._base_s if samples else 0.0)
        yield
        while (left_s := end_s - self._clock()) > 0.0:
            self._sleep(left_s)


class PacedTarget:
    """The target ``inner`` at the pace of a bigger one. ``base_ms`` and ``per_row_ms`` are the time
    of a pass, ``sleep`` and ``clock`` count in seconds."""

    def __init__(
        self,
        inner: TargetModel,
        base_ms: float,
        per_row_ms: float,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self.inner = inner
        self._pace = _Pace(base_ms, per_row_ms, sleep, clock)

    @property
    def info(self) -> ModelInfo:
        return self.inner.info

    @property
    def mode(self) -> str:
        return f"{self.inner.mode}, emulated pass time"

    @property
    def cache(self) -> CacheShape | None:
        return self.inner.cache

    @property
    def pass_shape(self) -> PassShape:
        return self.inner.pass_shape

    @property
    def adapters(self) -> tuple[ModelInfo, ...]:
        return self.inner.adapters

    @property
    def cache_share(self) -> float:
        return self.inner.cache_share

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self.inner.open(key, prompt_length, sampling, text)

    def read_pictures(
        self, prompt: Sequence[int], pictures: Sequence[bytes], positions: Sequence[int]
    ) -> ReadPictures:
        return self.inner.read_pictures(prompt, pictures, positions)

    def use_pictures(self, key: str, pictures: ReadPictures) -> None:
        self.inner.use_pictures(key, pictures)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        rows = sum(request.row_count for request in batch)
        with self._pace.keep(rows, samples=any(request.sample for request in batch)):
            return self.inner.forward(batch)

    def use_adapter(self, key: str, name: str) -> None:
        self.inner.use_adapter(key, name)

    def set_draft_steps(self, count: int) -> None:
        self.inner.set_draft_steps(count)

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self.inner.keep(key, nodes)

    def close(self, key: str) -> None:
        self.inner.close(key)


class PacedServerDrafter:
    """The server model ``inner`` at the pace of a bigger one; arguments as for ``PacedTarget``."""

    def __init__(
        self,
        inner: ServerDrafter,
        base_ms: float,
        per_row_ms: float,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._inner = inner
        self._pace = _Pace(base_ms, per_row_ms, sleep, clock)

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._inner.open(key, prompt_length, sampling, text)

    def step(self, batch: Sequence[DraftStep]) -> list[tuple[Candidate, ...]]:
        rows = sum(len(step.feed) for step in batch)
        with self._pace.keep(rows, samples=any(step.guess for step in batch)):
            return self._inner.step(batch)

    def close(self, key: str) -> None:
        self._inner.close(key)
