"""Tokens from the toy model: a real law of a few lines, sampled as any model is.

Theory of operation. Prompts are drawn from (seed of the sampling, number), and the sampling of
request n has a seed of its own, so that its noise is not another request's. Slower than a tape or
a process, and the only source in which wrong guesses have laws of their own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.protocol.tree import Ending
from edgespec.core.toy_model import ToyModel
from edgespec.device.drafters.toy import DEFAULT_CONTEXT_LENGTH, ToyDrafter, toy_info
from edgespec.telemetry.match_tape import ranks_along
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.token_sources.source import Request

# Enough to say the acceptance rate to a few per cent, in a fraction of a second.
_TRIAL_TOKENS = 256


class ToySource:
    """``tokens.TokenSource`` over a toy model and its perturbed draft."""

    def __init__(self, model: ToyModel, noise: float, sampling: SamplingParams) -> None:
        self._model, self._noise, self._sampling = model, noise, sampling

    @cached_property
    def about(self) -> str:
        request = self.request(0, 3, _TRIAL_TOKENS)
        tokens = self.expected(request, _TRIAL_TOKENS)
        drafter = self.drafter()
        drafter.begin(len(request.prompt), request.sampling)
        ranks = ranks_along(drafter.step, request.prompt, tokens, 1)
        return (
            f"toy model of {self._model.vocabulary_size} tokens, draft noise {self._noise:g},"
            f" temperature {self._sampling.temperature:g}:"
            f" {ranks.count(0) / len(ranks):.0%} accepted"
        )

    def target(self) -> ToyTarget:
        return ToyTarget(
            self._model,
            vocabulary=toy_info(self._model).vocabulary,
            context_length=DEFAULT_CONTEXT_LENGTH,
            max_sessions=1 << 20,
            max_cached_tokens=1 << 30,
        )

    def drafter(self) -> ToyDrafter:
        return ToyDrafter(self._model.perturbed(self._noise))

    def request(self, number: int, prompt_length: int, max_tokens: int) -> Request:
        seed = self._sampling.seed
        dice = random.Random(f"{seed}/{number}")
        size = self._model.vocabulary_size
        prompt = tuple(dice.randrange(size) for _ in range(prompt_length))
        mine = replace(self._sampling, seed=seed + number, max_tokens=max_tokens)
        return Request(prompt, mine)

    def expected(self, request: Request, count: int) -> Sequence[int]:
        length = min(count, request.sampling.max_tokens)
        mine = replace(request.sampling, max_tokens=length)
        return target_tokens(self._model, request.prompt, mine, DEFAULT_CONTEXT_LENGTH)[0]


def target_tokens(
    model: ToyModel, prompt: Sequence[int], sampling: SamplingParams, context_length: int
) -> tuple[tuple[int, ...], FinishReason]:
    """The target's own output, token by token from the law itself, and why it ends."""
    eos = () if model.eos_token is None else (model.eos_token,)
    ending = Ending.of(sampling, len(prompt), context_length, eos)
    tokens: list[int] = []
    while True:
        text = (*prompt, *tokens)
        token = choose(model.logits(text), sampling, len(text), prompt, tokens)
        tokens.append(token)
        if token in ending.stops:
            return tuple(tokens), FinishReason.STOP
        if len(text) + 1 >= ending.end:
            full = len(tokens) >= sampling.max_tokens
            return tuple(tokens), FinishReason.LENGTH if full else FinishReason.CONTEXT
