"""A useless drafter for tests: a generation must be the same with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from edgespec.core.ports import Cancelled, Candidate, Drafter, ModelInfo, never_cancelled
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.toy import random_ids


class WrappedDrafter:
    """A ``Drafter`` that forwards every call to its inner drafter."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

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
        return self.inner.step(keep_length, feed, width, cancelled)

    def close(self) -> None:
        self.inner.close()


class AdversarialDrafter(WrappedDrafter):
    """A ``Drafter`` that proposes random ids which its inner drafter does not propose.

    With the target's own law inside, every draft is a miss if ``width`` is below the vocabulary
    size. If no other id exists, it proposes nothing.
    """

    def __init__(self, inner: Drafter, seed: int = 0) -> None:
        super().__init__(inner)
        self._seed = seed

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        guesses = super().step(keep_length, feed, width, cancelled)
        good = {candidate.token for candidate in guesses}
        size = self.info.vocabulary_size
        ids = random_ids(self._seed, keep_length + len(feed), size, width + len(good))
        bad = islice((token for token in ids if token not in good), width)
        return tuple(Candidate(token, -math.log(size)) for token in bad)
