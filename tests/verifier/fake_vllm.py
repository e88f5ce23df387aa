"""A stand-in for vLLM in the suite: the toy model behind ``StepEngine``, with vLLM's
irregularities.

A step may omit sessions, compute a text in part or further than was requested, and drop a cache, as
vLLM does when it is short of room. Tokens come from the scalar specification, so texts equal those
of ``toy_text``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edgespec.core.protocol.sampling import MinTokensMask, SamplingParams, choose
from edgespec.core.protocol.work import ModelInfo, score_token
from edgespec.core.toy_model import ToyModel
from edgespec.models.toy import TOY_MODEL
from edgespec.verifier.vllm.target import ExpandedPrompt, StepRequest, StepResult, VllmTarget

CONTEXT_LENGTH = 4096
CACHE_ROWS = 1024
"""Rows that count as a full cache; the stand-in does not enforce it."""


@dataclass(slots=True)
class FakeText:
    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams
    computed: int = 0
    """Rows in the cache; a picture has several."""
    adapter: str = ""
    pictures: ExpandedPrompt | None = None

    @property
    def rows(self) -> int:
        """Rows of the whole text."""
        count = len(self.tokens)
        return count if self.pictures is None else self.pictures.count_rows(count)


class FakeVllm:
    """The stand-in engine.

    ``whims`` is how often (0 to 1) a step does less or more than requested. ``right`` is how often
    a proposed token is right. An adapter makes another toy model of it.
    """

    pictures = None
    """It has no processor of pictures; tests give it what one would make."""

    def __init__(
        self, whims: float = 0.0, seed: int = 0, model: ToyModel = TOY_MODEL, right: float = 0.7
    ) -> None:
        self.model = model
        self.right = right
        self.adapters: dict[str, ToyModel] = {}
        self.texts: dict[str, FakeText] = {}
        self.steps: list[dict[str, StepRequest]] = []
        self.failing: set[str] = set()
        """Sessions whose logits are not numbers."""
        self._whims, self._random = whims, random.Random(seed)

    @property
    def cache_share(self) -> float:
        return sum(text.computed for text in self.texts.values()) / CACHE_ROWS

    def add(
        self,
        key: str,
        text: Sequence[int],
        prompt_length: int,
        sampling: SamplingParams,
        adapter: str = "",
        pictures: ExpandedPrompt | None = None,
    ) -> None:
        assert key not in self.texts
        self.texts[key] = FakeText(
            list(text), prompt_length, sampling, adapter=adapter, pictures=pictures
        )

    def drop(self, key: str) -> None:
        del self.texts[key]

    def reset(self) -> None:
        self.texts.clear()

    def step(
        self, wanted: Mapping[str, StepRequest], draft_steps: int = 0
    ) -> Mapping[str, StepResult]:
        self.steps.append(dict(wanted))
        found = {
            key: self.run(key, self.texts[key], one)
            for key, one in wanted.items()
            if not self._whim()
        }
        return {
            key: replace(one, guesses=self.propose(self.texts[key], draft_steps * bool(one.tokens)))
            for key, one in found.items()
        }

    def propose(self, text: FakeText, count: int) -> tuple[int, ...]:
        chain: list[int] = []
        while len(chain) < count:
            token = self.choose(text, chain)
            wrong = self._random.random() >= self.right
            chain.append((token + wrong) % self.model.vocabulary_size)
        return tuple(chain)

    def run(self, key: str, text: FakeText, wanted: StepRequest) -> StepResult:
        if self._whim():
            text.computed = 0  # preempted, and not computed again in this step
            return StepResult(0)
        missing = text.rows - text.computed
        rows = missing if self._whim() else min(missing, max(1, wanted.rows))
        text.computed += rows
        if rows < missing:
            return StepResult(text.computed)
        if key in self.failing:
            return StepResult(text.computed, failure="the largest logit is nan")
        drafts = wanted.drafts if missing == 1 else ()
        targets = self.targets(text, drafts)
        right = 0
        while right < len(drafts) and drafts[right] == targets[right]:
            right += 1
        scores = tuple(
            score_token(self.logits(text, drafts[:row]), token, wanted.logprobs)
            for row, token in enumerate(targets)
            if wanted.logprobs
        )
        text.tokens += targets[: right + 1]
        text.computed += right
        return StepResult(text.computed, targets[: right + 1], targets, scores)

    def targets(self, text: FakeText, drafts: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.choose(text, drafts[:row]) for row in range(len(drafts) + 1))

    def choose(self, text: FakeText, path: Sequence[int]) -> int:
        tokens = [*text.tokens, *path]
        prompt, output = tokens[: text.prompt_length], tokens[text.prompt_length :]
        eos = () if self.model.eos_token is None else (self.model.eos_token,)
        mask = MinTokensMask(text.sampling, self.model.vocabulary_size, eos).mask(None, len(output))
        return choose(self.logits(text, path), text.sampling, len(tokens), prompt, output, mask)

    def logits(self, text: FakeText, path: Sequence[int]) -> list[float]:
        model = self.adapters[text.adapter] if text.adapter else self.model
        if text.pictures is not None:
            model = model.perturbed(0.5, sum(text.pictures.features))
        return model.logits([*text.tokens, *path])

    def _whim(self) -> bool:
        return self._random.random() < self._whims


def fake_target(
    engine: FakeVllm | None = None,
    max_sessions: int = 64,
    mark: str = "toy",
    speculator_tokens: int = 0,
    speculator_blocks: bool = False,
) -> VllmTarget:
    """Make a target on the stand-in; ``mark`` is a part of its fingerprints."""
    engine = engine or FakeVllm()
    size, eos = engine.model.vocabulary_size, engine.model.eos_token
    info = ModelInfo(
        "toy", f"toy-{size}", size, CONTEXT_LENGTH, () if eos is None else (eos,), mark
    )
    adapters = [
        replace(info, name=name, fingerprint=f"{name}-on-{mark}") for name in engine.adapters
    ]
    return VllmTarget(
        engine,
        info,
        max_sessions,
        adapters=adapters,
        speculator_tokens=speculator_tokens,
        speculator_blocks=speculator_blocks,
    )


def adapted_toy(adapters: Mapping[str, ToyModel], mark: str = "toy") -> VllmTarget:
    engine = FakeVllm(whims=0.1)
    engine.adapters.update(adapters)
    return fake_target(engine, mark=mark)
