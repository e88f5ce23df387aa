"""Agent and verifier over real gRPC on this machine.

Oracle: the toy model's text by the scalar specification, one token after the other. Whatever
drafts, whatever the policy, the link or a fault do, the stream is that text.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from edgespec.config import AgentConfig, DraftSection, PolicyName, PolicySection, VerifierConfig
from edgespec.core.device.link_keeper import ReconnectPolicy
from edgespec.core.protocol.messages import Fault, FaultCode, FinishReason, Open, Opened, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions, Chunk, GenerationError
from edgespec.device.build import build_agent, connect
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.verifier.build import load_target
from edgespec.wire.codec import encode_uplink
from tests.present import present
from tests.shell.live_verifier import GatedTarget, own_port, serving, toy_text

PROMPT = "the quick brown fox"
IDS = ToyTokenizer().encode(PROMPT)
GREEDY = SamplingParams(max_tokens=40)

SAMPLED = SamplingParams(
    max_tokens=40, temperature=0.9, top_k=20, top_p=0.95, seed=11, frequency_penalty=0.5
)

QUICK = ReconnectPolicy(first_s=0.01, longest_s=0.05, give_up_first_s=0.5, give_up_s=20.0)


def config(address: str, draft: str = "toy", **policy: object) -> AgentConfig:
    return AgentConfig(
        verifier=address,
        tokenizer="toy",
        draft=DraftSection(model=draft),
        policy=PolicySection(**policy),  # type: ignore[arg-type] # the tests' own keys
        reconnect=QUICK,
    )


async def collect(agent: Agent, params: SamplingParams, prompt: str = PROMPT) -> list[Chunk]:
    return [chunk async for chunk in agent.generate(prompt, params)]


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("run_ahead", list(RunAhead))
@pytest.mark.parametrize(
    ("name", "gamma", "width"),
    [
        (PolicyName.WINDOWED, None, 2),
        (PolicyName.PEARL, None, 1),
        (PolicyName.FIXED, 4, 1),
        (PolicyName.FIXED, 3, 2),
    ],
)
async def test_the_text_is_the_targets_own(
    name: PolicyName, gamma: int | None, width: int, run_ahead: RunAhead, params: SamplingParams
) -> None:
    expected = toy_text(IDS, params)
    async with serving() as (address, _):
        for draft in ("toy", "random", "none"):
            settings = config(
                address, draft, name=name, gamma=gamma, width=width, run_ahead=run_ahead
            )
            async with build_agent(settings) as agent:
                chunks = await collect(agent, params)
            assert tokens(chunks) == expected, draft
            assert chunks[-1].finish is FinishReason.LENGTH
            text = "".join(chunk.text for chunk in chunks)
            assert text == ToyTokenizer().decode(expected)


@pytest.mark.parametrize("draft", ["toy", "none"])
async def test_a_verifier_that_dies_and_is_replaced_is_not_noticed(draft: str) -> None:
    gated = GatedTarget(load_target(TOY), free_passes=5)
    received: list[Chunk] = []
    port = own_port()
    async with serving(gated, port) as (address, _):
        agent = build_agent(config(address, draft))
        task = asyncio.create_task(_into(received, agent))
        await asyncio.to_thread(gated.reached.wait)
        gated.gate.set()  # lets the dying one's thread end; its server is gone by then or not
    async with serving(port=port):
        await task
        await agent.close()
    assert tokens(received) == toy_text(IDS, LONG)
    assert present(agent.stats).counters.reconnects > 0


async def _into(received: list[Chunk], agent: Agent) -> None:
    async for chunk in agent.generate(PROMPT, LONG):
        received.append(chunk)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"model": "other"}, FaultCode.UNKNOWN_MODEL, "unknown model 'other'.*serves 'toy'"),
        ({"draft": None}, FaultCode.VOCABULARY_MISMATCH, "must share one tokenizer"),
        ({"prompt": "a" * 4096}, FaultCode.CONTEXT_TOO_LONG, "4096"),
    ],
)
async def test_a_refusal_says_why(
    change: dict[str, str | None], code: FaultCode, message: str
) -> None:
    text = ToyTokenizer()
    async with serving() as (address, _):
        info = load_target(TOY).info
        drafter = None
        if "draft" in change:
            drafter = ToyDrafter(TOY_MODEL, replace(info, vocabulary="another one"))
        options = AgentOptions(model=change.get("model") or "")
        async with Agent(connect(address), drafter, text.encode, text.stream, options) as agent:
            with pytest.raises(GenerationError, match=message) as caught:
                await collect(agent, GREEDY, change.get("prompt") or PROMPT)
            assert caught.value.code is code


async def test_a_prompt_beyond_the_drafts_context_is_served_without_drafting() -> None:
    text = ToyTokenizer()
    async with serving() as (address, _):
        short = replace(load_target(TOY).info, context_length=len(IDS))
        drafter = ToyDrafter(TOY_MODEL, short)
        async with Agent(connect(address), drafter, text.encode, text.stream) as agent:
            assert tokens(await collect(agent, GREEDY)) == toy_text(IDS, GREEDY)
            assert present(agent.stats).counters.sent == 0


TOY = VerifierConfig(model="toy", port=0)
LONG = SamplingParams(max_tokens=120)


async def test_a_half_closed_stream_that_is_refused_ends_with_the_status_of_the_fault() -> None:
    async with serving() as (address, _):
        channel = grpc.aio.insecure_channel(address)
        method: Any = channel.stream_stream("/edgespec.v1.Verifier/Speculate", None, None)
        call = method()
        await call.write(encode_uplink(Open("session", "another model", "", (1, 2))))
        await call.done_writing()
        assert b"unknown model" in await call.read()
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        await channel.close(None)


async def test_no_secret_and_no_whole_session_id_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="edgespec")
    session_id = "3f2c9a7e-of-which-the-rest-is-nobody's-business"
    async with serving() as (address, _):
        transport = connect(address)
        for prompt in ((1, 2), (1, 2), (3,)):
            stream = await transport.connect()
            await stream.send(Open(session_id, "", "", prompt, session_secret=b"hush" * 4))
            first = await stream.receive()
            assert isinstance(first, Opened | Fault)
            await stream.close()
        await transport.close()
    assert session_id not in caplog.text
    assert "hush" not in caplog.text
