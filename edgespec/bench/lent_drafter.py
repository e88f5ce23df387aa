"""One drafter for many agents: each of them closes what it holds, but this one is only lent."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.ports import (
    Cancelled,
    Candidate,
    Drafter,
    ModelInfo,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams


class LentDrafter:
    """``Drafter`` that passes everything on but ``close``; agents must use it one at a time."""

    def __init__(self, owned: Drafter) -> None:
        self._owned = owned

    @property
    def info(self) -> ModelInfo:
        return self._owned.info

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._owned.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        return self._owned.step(keep_length, feed, width, cancelled)

    def close(self) -> None:
        """Nothing: the owner closes it."""
