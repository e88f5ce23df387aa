"""Each text names its model, by the Python API.

Oracle: an adapter is another toy model, so its text is that one's, by the scalar specification.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import edgespec
from edgespec.core.protocol.messages import FaultCode
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from tests.shell.fake_vllm import adapted_toy
from tests.shell.live_verifier import nobody, serving, toy_text

TEXT = ToyTokenizer()
SQL = replace(TOY_MODEL, order=2)
PROMPT = "once upon a time"
PARAMS = SamplingParams(max_tokens=32, ignore_eos=True)
IDS = TEXT.encode(PROMPT)
OWN, IN_SQL = TEXT.decode(toy_text(IDS, PARAMS)), TEXT.decode(toy_text(IDS, PARAMS, SQL))
WITHIN_S = 120.0


async def text(agent: Agent, model: str = "") -> str:
    return "".join([chunk.text async for chunk in agent.generate(PROMPT, PARAMS, model=model)])


async def test_one_agent_takes_a_model_for_each_text() -> None:
    async with serving(adapted_toy({"sql": SQL})) as (address, _):
        async with edgespec.connect(address, draft="toy") as agent:
            assert [one.name for one in await agent.models()] == ["toy", "sql"]
            names = ["", "sql", "toy", "sql", ""]
            found = await asyncio.gather(*(text(agent, name) for name in names))
            assert found == [IN_SQL if name == "sql" else OWN for name in names]
            with pytest.raises(edgespec.GenerationError, match="serves 'toy', 'sql'") as caught:
                await text(agent, "sequel")
            assert caught.value.code is FaultCode.UNKNOWN_MODEL
            with pytest.raises(ValueError, match=r"model is 'xxxx.*at most 256 bytes"):
                await text(agent, "x" * 257)
            with pytest.raises(TypeError, match="model is int, but must be text"):
                await text(agent, 7)  # type: ignore[arg-type] # the test
        async with edgespec.connect(address, draft="none", model="sql") as agent:
            assert [await text(agent), await text(agent, "toy")] == [IN_SQL, OWN]


async def test_who_serves_what_is_told_by_those_that_answer() -> None:
    with nobody() as away:
        async with serving(adapted_toy({"sql": SQL})) as (address, _):
            async with edgespec.connect([away, address], draft="toy") as agent:
                assert [one.name for one in await agent.models()] == ["toy", "sql"]
        for addresses in (away, [away, away.replace("127.0.0.1", "localhost")]):
            async with edgespec.connect(addresses, draft="toy") as agent:
                with pytest.raises(edgespec.GenerationError, match="no verifier answers: "):
                    await agent.models()
