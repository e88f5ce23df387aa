"""Tokens from an acceptance process: made-up texts with agreement as on a tape, as many as wanted.

Theory of operation. Text and ranks of request n are drawn from generators seeded by (seed, n), the
text's apart from the ranks', so that equal seeds give equal texts under any law. They are drawn
when the prompt is read, for all of ``max_tokens``, and kept for the other side of the same request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec_sim.token_sources.acceptance_process import AcceptanceLaw
from edgespec_sim.token_sources.scripted_models import (
    CONTEXT_LENGTH,
    Script,
    ScriptedDrafter,
    ScriptedTarget,
    coded_prompt,
    number_of,
)
from edgespec_sim.token_sources.source import Request

VOCABULARY_SIZE = 32_000
# A request's drafter and target read its prompt within a round trip; later readers draw it again.
_KEPT_SCRIPTS = 1024


class ProcessSource:
    """``tokens.TokenSource`` over an ``AcceptanceLaw``; texts never end before ``max_tokens``."""

    def __init__(self, law: AcceptanceLaw, seed: int = 0) -> None:
        self.law = law
        self._seed = seed
        self._info = ModelInfo("process", "process", VOCABULARY_SIZE, CONTEXT_LENGTH)
        self._kept: OrderedDict[tuple[int, int], Script] = OrderedDict()

    @property
    def about(self) -> str:
        return f"acceptance process {self.law.origin}: {self.law.acceptance():.1%} accepted"

    def target(self) -> ScriptedTarget:
        return ScriptedTarget(self._info, self._find)

    def drafter(self) -> ScriptedDrafter:
        return ScriptedDrafter(self._info, self._find, self.law.width)

    def request(self, number: int, prompt_length: int, max_tokens: int) -> Request:
        prompt = coded_prompt(number, prompt_length, VOCABULARY_SIZE)
        return Request(prompt, SamplingParams(max_tokens=max_tokens))

    def expected(self, request: Request, count: int) -> Sequence[int]:
        max_tokens = request.sampling.max_tokens
        return self._find(request.prompt, max_tokens).tokens[: min(count, max_tokens)]

    def ranks(self, request: Request, count: int) -> Sequence[int]:
        return self._find(request.prompt, request.sampling.max_tokens).ranks[:count]

    def _find(self, prompt: tuple[int, ...], max_tokens: int) -> Script:
        number = number_of(prompt, VOCABULARY_SIZE)
        key = number, max_tokens
        script = self._kept.get(key)
        if script is None:
            script = self._kept[key] = self._draw(number, max_tokens)
            if len(self._kept) > _KEPT_SCRIPTS:
                self._kept.popitem(last=False)
        return script

    def _draw(self, number: int, length: int) -> Script:
        text, agreement = (
            np.random.default_rng([self._seed, number, stream]) for stream in range(2)
        )
        tokens = (text.random(length) * VOCABULARY_SIZE).astype(int).tolist()
        return Script(tokens, self.law.ranks(length, agreement))
