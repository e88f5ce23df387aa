"""Tests of a model of the device that writes by itself.

Oracle: the scalar specification of sampling over the toy's draft model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from edgespec.core.device.events import TokenKind
from edgespec.core.ports import Cancelled, never_cancelled
from edgespec.core.protocol.constraint import Constraint, ConstraintError, ConstraintKind
from edgespec.core.protocol.errors import GenerationError, Overloaded
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import local_model
from edgespec.device.drafter_pool import DrafterLease, DrafterPool
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.device.generation_timeline import GenerationTimeline
from edgespec.device.local_model import LocalModel, with_own_context
from edgespec.models.shared_ids import SharedIds
from edgespec.models.toy import TOY_MODEL, ToyTokenizer, toy_info
from tests.kit.live_verifier import toy_text

PROMPT = (3, 1, 4)


class Broken(ToyDrafter):
    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> Any:
        raise RuntimeError("no power")


@contextlib.contextmanager
def open_model(drafter: Any = None, *, caches: int = 1, shared: SharedIds | None = None) -> Any:
    drafter = drafter or ToyDrafter(TOY_MODEL, toy_info())
    pool = DrafterPool(drafter, caches, shared)
    model = LocalModel(drafter.info, pool, ToyTokenizer(), owns_pool=True)
    try:
        yield model, pool
    finally:
        model.close()


async def read(model: LocalModel, **sampling: Any) -> tuple[list[int], Any]:
    tokens, finish = list[int](), None
    async with aclosing(model.generate(PROMPT, SamplingParams(**sampling))) as chunks:
        async for chunk in chunks:
            tokens += chunk.tokens
            finish = chunk.finish
            assert all(one.kind is TokenKind.LOCAL for one in chunk.pieces) or finish
    return tokens, finish


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 20},
        {"max_tokens": 20, "temperature": 0.8, "seed": 3, "top_p": 0.7},
        {"max_tokens": 20, "presence_penalty": 1.5, "temperature": 0.5},
    ],
    ids=str,
)
async def test_it_writes_what_the_law_says(sampling: dict[str, Any]) -> None:
    """Ids that the target lacks change nothing, because the model has its own."""
    shared = SharedIds(TOY_MODEL.vocabulary_size, 4, stand_in=0)
    with open_model(shared=shared) as (model, _):
        tokens, finish = await read(model, **sampling)
    assert tokens == toy_text(PROMPT, SamplingParams(**sampling))
    assert finish in (FinishReason.LENGTH, FinishReason.STOP)


async def test_end_tokens_and_the_context_end_it() -> None:
    whole = toy_text(PROMPT, SamplingParams(max_tokens=20))
    with open_model() as (model, _):
        tokens, finish = await read(model, max_tokens=20, stop_token_ids=(whole[4],))
        assert (tokens, finish) == (whole[: whole.index(whole[4]) + 1], FinishReason.STOP)
        assert (await read(model, max_tokens=3))[1] is FinishReason.LENGTH
    short = with_own_context(toy_info(), toy_info())
    assert short == toy_info()


async def test_a_text_that_is_left_frees_its_cache() -> None:
    with open_model() as (model, _):
        first = model.generate(PROMPT, SamplingParams(max_tokens=1000, ignore_eos=True))
        await anext(first)
        other = asyncio.create_task(read(model, max_tokens=4))
        await first.aclose()
        assert (await other)[0] == toy_text(PROMPT, SamplingParams(max_tokens=4))


async def test_a_session_that_keeps_its_cache_makes_it_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_model, "CACHE_TIMEOUT_S", 0.01)
    with open_model() as (model, pool):
        lease = DrafterLease(pool, len(PROMPT), SamplingParams())
        assert await pool.acquire(lease)
        with pytest.raises(Overloaded, match="became free"):
            await read(model, max_tokens=4)
        lease.end()
        monkeypatch.setattr(local_model, "CACHE_TIMEOUT_S", 60.0)
        assert (await read(model, max_tokens=4))[0]


async def test_failures_are_errors_of_the_generation() -> None:
    with open_model(Broken(TOY_MODEL, toy_info())) as (model, _):
        with pytest.raises(GenerationError, match="no power"):
            await read(model, max_tokens=4)
    with pytest.raises(GenerationError, match="closing"):
        await read(model, max_tokens=4)


async def test_what_it_cannot_do() -> None:
    with open_model() as (model, _):
        constraint = Constraint(ConstraintKind.REGEX, "a")
        with pytest.raises(ConstraintError, match="no grammar library"):
            await read(model, max_tokens=4, constraint=constraint)
        for wrong in ({"logprobs": 1}, {"rule": "typical"}):
            with pytest.raises(ValueError, match="is "):
                await anext(model.generate(PROMPT, **wrong))
        with pytest.raises(ValueError, match="scores no prompt"):
            await model.score(PROMPT, 1)


async def test_tokens_have_an_origin_of_their_own() -> None:
    timeline = GenerationTimeline()
    with open_model() as (model, _):
        sampling = SamplingParams(max_tokens=3)
        count = 0
        async with aclosing(model.generate(PROMPT, sampling, timeline=timeline)) as chunks:
            async for chunk in chunks:
                count += len(chunk.tokens)
    assert [one.value for one in timeline.origins] == ["local"] * count
