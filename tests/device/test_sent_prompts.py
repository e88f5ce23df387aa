"""Prompts as agents send them: one of several generations sends it and the others name it, and a
verifier of a version without names gets it whole.

Oracle: the output of a generation alone, and the ids in the ``Open`` messages that arrive.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from edgespec.core.ports import LinkError, VerifierStream
from edgespec.core.protocol.errors import InvalidRequest
from edgespec.core.protocol.messages import Fault, FaultCode, Limits, Open, Uplink
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.device.agent import Agent
from edgespec.device.same_prompts import LEAST_TOKENS
from edgespec.models.toy import TOY_ALPHABET, TOY_MODEL, ToyTokenizer, toy_info
from edgespec.testing import LoopbackTransport
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.toy import ToyTarget
from tests.device.test_failover import make_pool
from tests.present import require

DICE = random.Random(4)
PROMPT = [DICE.randrange(1, len(TOY_ALPHABET)) for _ in range(LEAST_TOKENS)]
WITHIN_S = 30.0


class Watched:
    """A verifier that keeps the first message of every stream. While ``is_old`` is set, it refuses
    a prompt that is named, as a version does that does not know names."""

    is_old = False

    def __init__(self, context_length: int) -> None:
        target = ToyTarget(TOY_MODEL, vocabulary=toy_info().vocabulary)
        limits = Limits(context_length=context_length)
        self.verifier = Verifier(target, limits, EngineLimits(prefix_bytes=1 << 20))
        self.opens: list[Open] = []

    async def serve(self, stream: VerifierStream) -> None:
        receive = stream.receive

        async def noted() -> Uplink:
            message = await receive()
            if isinstance(message, Open):
                self.opens.append(message)
                if self.is_old and message.prefix is not None:
                    why = "Open.prompt has 0 entries, but must have 1 to 4096"
                    await stream.send(Fault(FaultCode.INVALID, why))
                    raise LinkError(why, retryable=False)
            return message

        stream.receive = noted  # type: ignore[method-assign]
        await self.verifier.serve(stream)


@asynccontextmanager
async def make_pair(
    context_length: int = 4096, *, pooled: bool = False
) -> AsyncIterator[tuple[Agent, Watched]]:
    watched, text = Watched(context_length), ToyTokenizer()
    link = LoopbackTransport(watched.serve, lambda: watched.verifier.info)
    transport = make_pool(link) if pooled else link
    agent = Agent(transport, None, text.encode, text.stream)
    try:
        async with asyncio.timeout(WITHIN_S):
            yield agent, watched
    finally:
        await agent.close()
        await watched.verifier.stop()


async def generate(agent: Agent, seed: int, prompt: list[int] = PROMPT) -> list[int]:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)
    return [one async for chunk in agent.generate(prompt, sampling) for one in chunk.tokens]


async def test_choices_of_a_prompt_send_it_once() -> None:
    async with make_pair() as (agent, watched):
        outputs = await asyncio.gather(*(generate(agent, seed) for seed in range(4)))
        named = [0 if one.prefix is None else one.prefix.length for one in watched.opens]
        assert sorted(named) == [0, *[LEAST_TOKENS] * 3]
    async with make_pair() as (agent, _):
        assert outputs == [await generate(agent, seed) for seed in range(4)]


async def test_short_and_other_prompts_do_not_wait() -> None:
    other, short = [*PROMPT[:-1], PROMPT[0]], PROMPT[:-1]
    async with make_pair() as (agent, watched):
        prompts = (PROMPT, other, short, short)
        await asyncio.gather(*(generate(agent, 1, prompt) for prompt in prompts))
        assert [one.prefix for one in watched.opens] == [None] * 4


async def test_the_others_go_on_if_the_first_is_refused() -> None:
    async with make_pair(context_length=LEAST_TOKENS) as (agent, watched):
        runs = [generate(agent, seed) for seed in range(3)]
        failures = await asyncio.gather(*runs, return_exceptions=True)
        assert [type(one) for one in failures] == [InvalidRequest] * 3
        assert len(watched.opens) == 3


async def test_the_others_go_on_if_the_first_is_cancelled() -> None:
    async with make_pair() as (agent, _):
        alone = await generate(agent, 7, PROMPT[::-1])
    async with make_pair() as (agent, _):
        first = asyncio.create_task(generate(agent, 1, PROMPT[::-1]))
        await asyncio.sleep(0)
        second = asyncio.create_task(generate(agent, 7, PROMPT[::-1]))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second == alone


async def test_a_first_one_that_is_left_early_is_forgotten() -> None:
    async with make_pair() as (agent, _):
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        async with aclosing(agent.generate(PROMPT, sampling)) as chunks:
            await anext(chunks)
            assert agent._same_prompts._first
        assert not agent._same_prompts._first


@pytest.mark.parametrize("pooled", [False, True], ids=["one verifier", "a pool"])
async def test_an_older_machine_behind_the_same_address_gets_the_whole_prompt(pooled: bool) -> None:
    async with make_pair(pooled=pooled) as (agent, watched):
        named, outputs = list[bool](), []
        for is_old in (False, False, True):
            watched.is_old = is_old
            outputs.append(await generate(agent, 1))
            named += [one.prefix is not None for one in watched.opens]
            watched.opens.clear()
        assert named == [False, True, True, False]
        assert require(agent.stats).counters.named_tokens == 0
    async with make_pair() as (agent, _):
        assert outputs[-1] == await generate(agent, 1)
