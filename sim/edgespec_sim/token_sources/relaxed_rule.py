"""A relaxed rule, for comparison: likely enough drafts replace the target's own tokens. LOSSY.

Theory of operation. A drafted token that is not the target's own is tolerated if its probability is
at least a threshold times that of the target's best one. The *fixed* threshold needs the target
alone, as a device sends tokens and no probabilities: where the target is sure of itself nothing
comes that near; at 1 only the best token itself is tolerated, which greedy decoding would have
chosen anyway. DSD (arXiv 2511.11733, adaptive speculative verification) lowers the threshold for
tokens that matter little and stays strict for the others. With ``draft``, the model that the drafts
are from, thresholds rise with a token's importance (``token_importance.py``: our reading) from
``threshold`` up to 1; that takes both laws in one place, which no product of ours has.

A pass reports targets, so the wrapped target answers with the tolerated child wherever its own
token was not drafted, and the walk from the root is the exact rule's. Engines of such a world know
this rule alone, under its own name: a request for exact tokens is refused, never relaxed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.core.ports import CacheShape, Drafter, ModelInfo, PassRequest, PassResult
from edgespec.core.protocol.messages import EXACT_RULE
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.drafts import AcceptanceRule, ExactRule
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.token_sources.source import Request, TokenSource, ToySource

# --- how much a token matters, as the laws of target and draft tell it -------------------------
# a reading of DSD. LOSSY.
# DSD's adaptive verification (arXiv 2511.11733) holds both models' laws side by side: a cross-
# entropy contrast, statistics of matching tokens and an agreement of the distributions say how
# much a token matters, and a relaxation falls to 0 for those that matter most. How the three are
# measured and put together was not open to us. Our reading, each in [0, 1] and 1 for much:
# * contrast: 1 - exp(-c), where c, in nats, is the cross-entropy of the draft's law under the
#   target's, less the target's own entropy;
# * disagreement: the total variation distance of the two laws;
# * surprise: the share of this text's earlier positions where the best tokens of the two differed.
#   Of the position itself it says nothing, since a token is only judged where they differ.
# A token's importance is their mean. The threshold for it lies between that for a token of none
# and 1, which is the exact rule but for ties; the relaxation of the paper is 1 less the
# threshold.


_LEAST = 1e-12
"""A law's smallest share, where another one's is not zero."""


@dataclass(slots=True)
class Matches:
    """Of one text: how often the best tokens of both laws were the same. Before anything is known
    half of them are."""

    same: int = 1
    positions: int = 2

    def note(self, same: bool) -> None:
        self.same += same
        self.positions += 1

    @property
    def share(self) -> float:
        return self.same / self.positions


def law(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    """The shares of all tokens."""
    best = max(logits)
    weights = [math.exp((logit - best) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def importance(target: Sequence[float], draft: Sequence[float], matches: Matches) -> float:
    """In [0, 1]; ``target`` and ``draft`` are laws over the same tokens."""
    contrast = disagreement = 0.0
    for own, other in zip(target, draft, strict=True):
        if own > 0.0:
            contrast += own * math.log(own / max(other, _LEAST))
        disagreement += abs(own - other)
    surprise = 1.0 - matches.share
    return (1.0 - math.exp(-max(0.0, contrast)) + min(1.0, disagreement / 2.0) + surprise) / 3.0


def threshold_of(least: float, how_important: float) -> float:
    """How likely a draft must be, relative to the target's best token: ``least`` for one of no
    importance, 1 for one of the greatest."""
    return least + (1.0 - least) * how_important


LOSSY_RULE = "dsd-threshold"


class ThresholdTarget:
    """``ports.TargetModel`` over a toy target; ``threshold`` in [0, 1]. Penalties and truncation of
    the sampling play no part in what is tolerated."""

    def __init__(self, target: ToyTarget, threshold: float, draft: ToyModel | None = None) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold is {threshold}, but must be in [0, 1]")
        self._target, self._threshold, self._draft = target, threshold, draft
        self._temperature: dict[str, float] = {}
        self._matches: dict[str, Matches] = {}

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
        self._matches[key] = Matches()

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
        self._matches.pop(key, None)

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
        if not drafted:
            return own
        threshold = self._threshold_at(key, path)
        if own in drafted:
            return own
        logits = self._target.model.logits(path)
        token = max(drafted, key=logits.__getitem__)
        ratio = math.exp((logits[token] - max(logits)) / self._temperature[key])
        return token if ratio >= threshold else own

    def _threshold_at(self, key: str, path: tuple[int, ...]) -> float:
        """Behind ``path``, which counts as one more position of the text from then on."""
        if self._draft is None:
            return self._threshold
        temperature, matches = self._temperature[key], self._matches[key]
        ours = law(self._target.model.logits(path), temperature)
        theirs = law(self._draft.logits(path), temperature)
        threshold = threshold_of(self._threshold, importance(ours, theirs, matches))
        matches.note(ours.index(max(ours)) == theirs.index(max(theirs)))
        return threshold


class LossySource:
    """A ``TokenSource`` over a toy model whose verifiers follow the relaxed rule."""

    def __init__(
        self,
        model: ToyModel,
        noise: float,
        sampling: SamplingParams,
        threshold: float,
        *,
        by_importance: bool = False,
    ) -> None:
        self._model, self._threshold = model, threshold
        self._draft = model.perturbed(noise) if by_importance else None
        self._exact = ToySource(model, noise, sampling)

    @property
    def about(self) -> str:
        words = f"LOSSY from {self._threshold:g} of the best token on"
        return f"{self._exact.about}; {words}" + (", by importance" if self._draft else "")

    def target(self) -> ThresholdTarget:
        return ThresholdTarget(self._exact.target(), self._threshold, self._draft)

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
