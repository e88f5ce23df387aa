"""A relaxed rule, for comparison: likely enough drafts replace the target's own tokens. LOSSY.

A drafted token that is not the target's own is tolerated if its probability is at least a threshold
times that of the target's best one (after DSD, arXiv 2511.11733): where the target is sure of
itself nothing comes that near; at 1 only the best token itself is tolerated, which greedy decoding
would have chosen anyway.

A pass reports targets, so the wrapped target answers with the tolerated child wherever its own
token was not drafted, and the walk from the root is the exact rule's. Engines of such a world know
this rule alone, under its own name: a request for exact tokens is refused, never relaxed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from edgespec.core.ports import CacheShape, Drafter, ModelInfo, PassRequest, PassResult
from edgespec.core.protocol.messages import EXACT_RULE
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.drafts import AcceptanceRule, ExactRule
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.token_sources.source import Request, TokenSource, ToySource

LOSSY_RULE = "dsd-threshold"


class ThresholdTarget:
    """``ports.TargetModel`` over a toy target; ``threshold`` in [0, 1]. Penalties and truncation of
    the sampling play no part in what is tolerated."""

    def __init__(self, target: ToyTarget, threshold: float) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold is {threshold}, but must be in [0, 1]")
        self._target, self._threshold = target, threshold
        self._temperature: dict[str, float] = {}

    @property
    def info(self) -> ModelInfo:
        return self._target.info

    @property
    def cache(self) -> CacheShape | None:
        return self._target.cache

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._target.open(key, prompt_length, sampling, text)
        # Greedy decoding has no temperature; the model's own law is the one at 1.
        self._temperature[key] = sampling.temperature or 1.0

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        results = self._target.forward(batch)
        return [
            self._relaxed(request, result) if request.tokens else result
            for request, result in zip(batch, results, strict=True)
        ]

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self._target.keep(key, nodes)

    def close(self, key: str) -> None:
        self._target.close(key)
        self._temperature.pop(key, None)

    def _relaxed(self, request: PassRequest, result: PassResult) -> PassResult:
        order = self._target.model.order
        base = self._target.cached(request.key)[-order:] if order else ()
        paths: list[tuple[int, ...]] = [base]
        children: list[list[int]] = [[] for _ in range(len(request.tokens) + 1)]
        for token, parent in zip(request.tokens, request.parents, strict=True):
            paths.append((*paths[parent + 1], token))
            children[parent + 1].append(token)
        targets = tuple(
            self._choice(request.key, own, drafted, path)
            for own, drafted, path in zip(result.targets, children, paths, strict=True)
        )
        return replace(result, targets=targets)

    def _choice(self, key: str, own: int, drafted: Sequence[int], path: tuple[int, ...]) -> int:
        """The target's own token, or the likeliest drafted one that is tolerated in its place."""
        if not drafted or own in drafted:
            return own
        logits = self._target.model.logits(path)
        token = max(drafted, key=logits.__getitem__)
        ratio = math.exp((logits[token] - max(logits)) / self._temperature[key])
        return token if ratio >= self._threshold else own


class LossySource:
    """A ``TokenSource`` over a toy model whose verifiers follow the relaxed rule."""

    def __init__(
        self, model: ToyModel, noise: float, sampling: SamplingParams, threshold: float
    ) -> None:
        self._model, self._threshold = model, threshold
        self._exact = ToySource(model, noise, sampling)

    @property
    def about(self) -> str:
        return f"{self._exact.about}; LOSSY from {self._threshold:g} of the best token on"

    def target(self) -> ThresholdTarget:
        return ThresholdTarget(self._exact.target(), self._threshold)

    def drafter(self) -> Drafter:
        return self._exact.drafter()

    def request(self, number: int, prompt_length: int, max_tokens: int) -> Request:
        return self._exact.request(number, prompt_length, max_tokens)

    def expected(self, request: Request, count: int) -> Sequence[int]:
        """The exact text, which this source's need not be."""
        return self._exact.expected(request, count)

    def changed(self, request: Request, tokens: Sequence[int]) -> int:
        """How many tokens of a text are not the target's own choice after what precedes them."""
        text = [*request.prompt]
        changed = 0
        for token in tokens:
            own = choose(self._model.logits(text), request.sampling, len(text))
            changed += own != token
            text.append(token)
        return changed


def rule_of(source: TokenSource) -> str:
    """The name under which sessions on this source ask for their rule."""
    return LOSSY_RULE if isinstance(source, LossySource) else EXACT_RULE


def rules_of(source: TokenSource) -> dict[str, AcceptanceRule]:
    """What the engines of a world know: the rule of its source, and no other."""
    return {rule_of(source): ExactRule()}
