"""Drafters that are no help: the guard against acceptance rates that are tautologies.

``RandomDrafter`` guesses uniformly, so its acceptance is about ``width / V``;
``AdversarialDrafter`` never guesses what its inner drafter would. A stream must be the same with
either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from edgespec.core.ports import (
    Cancelled,
    Candidate,
    Drafter,
    ModelInfo,
    StepCancelledError,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams, noise_bits
from edgespec.device.drafters.token_cache import TokenCache


class RandomDrafter:
    """``Drafter`` of uniformly random ids, a pure function of (seed, position).

    The hash key is the complement of the session's, so the guesses do not follow its noise.
    """

    def __init__(self, info: ModelInfo, seed: int = 0) -> None:
        self._info = info
        self._seed = seed
        self._cache = TokenCache(info)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._cache.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        if cancelled():
            raise StepCancelledError("a random step was cancelled before it began")
        position = self._cache.advance(keep_length, feed)
        logprob = -math.log(self._info.vocabulary_size)
        ids = random_ids(self._seed, position, self._info.vocabulary_size)
        return tuple(Candidate(token, logprob) for token in islice(ids, width))

    def close(self) -> None:
        self._cache.forget(0)


class AdversarialDrafter:
    """``Drafter`` that proposes random ids among those its inner drafter does not propose.

    With the target's own law inside, every draft is a miss as long as ``width`` is below the
    vocabulary size; with nothing else to offer it proposes nothing.
    """

    def __init__(self, inner: Drafter, seed: int = 0) -> None:
        self._inner = inner
        self._seed = seed

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._inner.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        guesses = self._inner.step(keep_length, feed, width, cancelled)
        good = {candidate.token for candidate in guesses}
        size = self._inner.info.vocabulary_size
        ids = random_ids(self._seed, keep_length + len(feed), size)
        bad = islice((token for token in ids if token not in good), width)
        return tuple(Candidate(token, -math.log(size)) for token in bad)

    def close(self) -> None:
        self._inner.close()


def random_ids(seed: int, position: int, vocabulary_size: int) -> Iterator[int]:
    """Every id once, in an order that is a function of (seed, position).

    The first few come from the hash, the tail (a small vocabulary) in cyclic order.
    """
    seen: set[int] = set()
    token = 0
    for draw in range(min(64, 4 * vocabulary_size)):
        token = noise_bits(~seed, position, draw) % vocabulary_size
        if token not in seen:
            seen.add(token)
            yield token
    for offset in range(1, vocabulary_size):
        following = (token + offset) % vocabulary_size
        if following not in seen:
            yield following
