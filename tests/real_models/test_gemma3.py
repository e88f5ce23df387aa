"""Gemma 3 270M, a base model whose layers look back 512 tokens, but for three that see everything.

Oracles: transformers' model of the same weights, whose likeliest token is compared at each place of
a text; the output without drafts.
"""

from __future__ import annotations

import pytest

from edgespec.config import DraftSection
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.model_source import Purpose, resolve_source
from tests.kit.real_models import PROMPTS, Judgement, RealModel, generate, report, served

pytestmark = pytest.mark.slow

LENGTH = 96
WINDOW = 512
NO_DRAFT = DraftSection(model="none")


def ids_of(model: RealModel, text: str) -> list[int]:
    tokenizer = resolve_source(str(model.folder), Purpose.TEXTS).load_tokenizer()
    return tokenizer.encode(text)


async def test_greedy_texts_are_those_of_transformers(gemma3: RealModel) -> None:
    prompts = [ids_of(gemma3, text) for text in PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH)
    async with served(gemma3) as address:
        outputs = await generate(address, gemma3, [(one, greedy) for one in prompts], NO_DRAFT)
    judgement = Judgement()
    for prompt, output in zip(prompts, outputs, strict=True):
        judgement.judge(gemma3.reference, prompt, output.tokens)
        ended = output.tokens[-1] in gemma3.target.info.eos_token_ids
        assert output.finish is (FinishReason.STOP if ended else FinishReason.LENGTH)
    report(f"\nGemma 3 beside transformers: {judgement}")
    assert judgement.texts >= 24
    assert judgement.wrong == []


def long_prompt(model: RealModel, length: int) -> list[int]:
    """Return a text whose lines differ, of ``length`` tokens."""
    lines = [
        f"Day {day}: {PROMPTS[day % len(PROMPTS)]} The weather was {7 * day % 31} degrees."
        for day in range(1, 80)
    ]
    found = ids_of(model, "\n".join(lines))
    assert len(found) >= length
    return found[:length]


async def test_long_texts_cross_the_window_with_and_without_drafts(gemma3: RealModel) -> None:
    """One prompt ends shortly before the window is full, so the output crosses it."""
    prompts = [long_prompt(gemma3, length) for length in (WINDOW - 10, WINDOW + 150, 1100)]
    cases = [
        (one, SamplingParams(temperature=temperature, seed=5, max_tokens=16))
        for one in prompts
        for temperature in (0.0, 0.8)
    ]
    async with served(gemma3) as address:
        plain = await generate(address, gemma3, cases, NO_DRAFT)
        drafted = await generate(address, gemma3, cases, DraftSection(model=str(gemma3.folder)))
    judgement = Judgement()
    for (prompt, sampling), output in zip(cases, plain, strict=True):
        if sampling.temperature == 0.0:
            judgement.judge(gemma3.reference, prompt, output.tokens)
    report(f"\nGemma 3 past its window: {judgement}")
    assert judgement.wrong == []
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert sum(one.accepted for one in drafted) > 0
