"""Drafters for tests and experiments: on the toy model, random, slowed down, or without candidates.

The drafter on the toy model uses exact scalar arithmetic, so equal laws draft equal tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from edgespec.core import ports
from edgespec.core.device.token_cache import TokenCache, draft_chain
from edgespec.core.protocol.sampling import SamplingParams, gumbel, mask_logits, noise_bits, warp
from edgespec.core.toy_model import ToyModel

DEFAULT_CONTEXT_LENGTH = 1 << 16


class SilentDrafter:
    """A ``Drafter`` without a model or a candidate. The session may still draft by lookup."""

    inner: ports.Drafter | None = None
    max_places = 1

    def __init__(self, info: ports.ModelInfo) -> None:
        self._cache, self.info = TokenCache(info), info

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._cache.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: ports.Cancelled = ports.never_cancelled,
    ) -> tuple[ports.Candidate, ...]:
        if cancelled():
            raise ports.StepCancelledError("the step was cancelled before it began")
        return self._candidates(self._cache.advance(keep_length, feed), width)

    def step_places(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        places: int,
        cancelled: ports.Cancelled = ports.never_cancelled,
    ) -> tuple[tuple[ports.Candidate, ...], ...]:
        if cancelled():
            raise ports.StepCancelledError("the step was cancelled before it began")
        position = self._cache.advance(keep_length, feed)
        last = min(places, self.max_places, 1 + self.info.context_length - position)
        return draft_chain(self._cache, last, lambda place: self._place(position, place, width))

    def _place(self, position: int, place: int, width: int) -> tuple[ports.Candidate, ...]:
        return self._candidates(position + place, width)

    def close(self) -> None:
        self._cache.truncate(0)

    def _candidates(self, position: int, width: int) -> tuple[ports.Candidate, ...]:
        return ()


class ToyDrafter(SilentDrafter):
    """A ``Drafter`` whose logits are ``model.logits``; pass ``target.perturbed(..)`` for a draft.

    It uses the standard library only. Like ``arrays.best_candidates`` it fills up ``width`` from
    outside a truncated support. ``step`` raises ``ValueError`` if the cache contract is broken.

    With ``max_places`` it is a parallel draft, whose guesses get worse with each place: the
    strength of the model's noise grows by ``place_noise``."""

    def __init__(
        self,
        model: ToyModel,
        info: ports.ModelInfo | None = None,
        max_places: int = 1,
        place_noise: float = 0.2,
    ) -> None:
        super().__init__(info or toy_info(model))
        self._models = [
            replace(model, noise_strength=model.noise_strength + place_noise * place)
            for place in range(max_places)
        ]
        self._model, self.max_places, self._place_noise = model, max_places, place_noise
        assert self.info.vocabulary_size == model.vocabulary_size

    def twin(self) -> ToyDrafter:
        """Return another sequence on the same model (``ports.Twinned``)."""
        return ToyDrafter(self._models[0], self.info, self.max_places, self._place_noise)

    def _place(self, position: int, place: int, width: int) -> tuple[ports.Candidate, ...]:
        self._model = self._models[place]
        try:
            return self._candidates(position + place, width)
        finally:
            self._model = self._models[0]

    def _candidates(self, position: int, width: int) -> tuple[ports.Candidate, ...]:
        cache, params = self._cache, self._cache.sampling
        logits = mask_logits(self._model.logits(cache.tokens), cache.allowed_mask())
        if max(logits) == -math.inf:
            return ()
        prompt, output = (cache.prompt, cache.output) if params.is_penalised else ((), ())
        candidates = rank_candidates(warp(logits, params, prompt, output), params, position, width)
        if len(candidates) == width or params.is_greedy:
            return candidates
        open_params = replace(params, top_k=0, top_p=1.0, min_p=0.0)
        others = rank_candidates(
            warp(logits, open_params, prompt, output), open_params, position, len(logits)
        )
        inside = {candidate.token for candidate in candidates}
        fill = [candidate for candidate in others if candidate.token not in inside]
        return candidates + tuple(fill[: width - len(candidates)])


def rank_candidates(
    scores: Sequence[float], params: SamplingParams, position: int, width: int
) -> tuple[ports.Candidate, ...]:
    """Return the best candidates of already warped scores, like ``arrays.best_candidates``.

    Only tokens with a finite score count, so fewer than ``width`` are returned if truncation left
    fewer."""
    if width < 1:
        raise ValueError(f"width is {width}, but must be at least 1")
    best = max(scores)
    log_total = best + math.log(math.fsum(math.exp(s - best) for s in scores))
    inside = [(s, token) for token, s in enumerate(scores) if s > -math.inf]
    if params.is_greedy:
        ranked = [(s, -token) for s, token in inside]
    else:
        seed = params.seed
        ranked = [(s + gumbel(noise_bits(seed, position, t)), -t) for s, t in inside]
    return tuple(
        ports.Candidate(-token, scores[-token] - log_total)
        for _, token in heapq.nlargest(width, ranked)
    )


def toy_info(model: ToyModel) -> ports.ModelInfo:
    """Return the model info of a toy drafter or target over ``model``, perturbed or not."""
    eos = () if model.eos_token is None else (model.eos_token,)
    return ports.ModelInfo(
        name="toy",
        vocabulary=f"toy-{model.vocabulary_size}",
        vocabulary_size=model.vocabulary_size,
        context_length=DEFAULT_CONTEXT_LENGTH,
        eos_token_ids=eos,
    )


class RandomDrafter(SilentDrafter):
    """A ``Drafter`` of uniformly random ids, a pure function of (seed, position).

    It guards against acceptance rates that are tautologies: its own must be about ``width / V``."""

    def __init__(self, info: ports.ModelInfo, seed: int = 0) -> None:
        super().__init__(info)
        self._seed = seed

    def _candidates(self, position: int, width: int) -> tuple[ports.Candidate, ...]:
        logprob = -math.log(self.info.vocabulary_size)
        ids = random_ids(self._seed, position, self.info.vocabulary_size, width)
        return tuple(ports.Candidate(token, logprob) for token in ids)


def random_ids(seed: int, position: int, vocabulary_size: int, count: int) -> list[int]:
    """Return ``count`` neighbouring ids, or all if there are fewer.

    The first id is a function of (seed, position). The hash key is the complement of the session's,
    so the ids do not follow its noise."""
    first = noise_bits(~seed, position, 0)
    return [(first + more) % vocabulary_size for more in range(min(count, vocabulary_size))]


# Longest seconds between two checks whether an emulated step was cancelled.
MAX_NAP_S = 0.05


ROW_SHARE = 0.2
"""Share of ``step_ms`` that each further row of a parallel draft's step takes, as measured at 0.6B
parameters in 4 bits with two threads."""
MAX_PACED_ROWS = 16
"""Fed tokens that count as rows. A longer feed is prefill, which is not emulated."""


class PacedDrafter:
    """A ``Drafter`` whose steps take ``step_ms``, to emulate a device on a faster machine.

    It sleeps for the rest of that time. A step of ``inner`` that takes longer is not slowed
    further. Each further row of a parallel draft's step takes a fifth of ``step_ms``."""

    def __init__(
        self,
        inner: ports.Drafter,
        step_ms: float,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self.info, self.begin, self.close = inner.info, inner.begin, inner.close
        self.inner, self._step_ms = inner, step_ms
        self.max_places = ports.count_places(inner)
        self._sleep, self._clock = sleep, clock

    def twin(self) -> PacedDrafter:
        """Return a twin of ``inner`` at the same pace. Raises ``TypeError`` if it has none."""
        return PacedDrafter(ports.make_twin(self.inner), self._step_ms, self._sleep, self._clock)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: ports.Cancelled = ports.never_cancelled,
    ) -> tuple[ports.Candidate, ...]:
        due_s = self._end_s(len(feed), 1)
        candidates = self.inner.step(keep_length, feed, width, cancelled)
        self._wait(due_s, cancelled)
        return candidates

    def step_places(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        places: int,
        cancelled: ports.Cancelled = ports.never_cancelled,
    ) -> tuple[tuple[ports.Candidate, ...], ...]:
        due_s = self._end_s(len(feed), places)
        found = ports.draft_places(self.inner, keep_length, feed, width, places, cancelled)
        self._wait(due_s, cancelled)
        return found

    def _end_s(self, fed: int, places: int) -> float:
        """Return the time at which a step that begins now is to end."""
        further = min(fed, MAX_PACED_ROWS) + places - 2 if self.max_places > 1 else 0
        return self._clock() + self._step_ms * (1.0 + ROW_SHARE * further) / 1e3

    def _wait(self, due_s: float, cancelled: ports.Cancelled) -> None:
        while (remaining_s := due_s - self._clock()) > 0:
            if cancelled():
                raise ports.StepCancelledError(
                    f"cancelled {remaining_s:.3f} s before its emulated end"
                )
            self._sleep(min(remaining_s, MAX_NAP_S))
