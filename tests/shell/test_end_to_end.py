"""Agent and verifier over real gRPC on this machine.

Oracle: the toy model's text by the scalar specification, one token after the other. Whatever
drafts, whatever the policy, the link or a fault do, the stream is that text.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from edgespec.config import (
    AgentConfig,
    DraftSection,
    LimitsSection,
    LinkSection,
    PolicyName,
    PolicySection,
    VerifierConfig,
)
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.protocol.messages import FaultCode, FinishReason, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions, Chunk, GenerationError
from edgespec.device.build import build_agent, build_policy, connect
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.verifier.build import load_target
from tests.adversarial import AdversarialDrafter
from tests.shell.live_verifier import GatedTarget, nobody, own_port, serving, toy_text

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


async def test_a_drafter_that_is_always_wrong_changes_nothing() -> None:
    drafter = AdversarialDrafter(ToyDrafter(TOY_MODEL, load_target(TOY).info))
    text = ToyTokenizer()
    async with serving() as (address, _):
        options = AgentOptions(policy=build_policy("windowed", width=2))
        async with Agent(connect(address), drafter, text.encode, text.stream, options) as agent:
            assert tokens(await collect(agent, SAMPLED)) == toy_text(IDS, SAMPLED)
            assert agent.stats is not None
            assert agent.stats.counters.hits == 0


async def test_a_slow_and_lossy_link_changes_nothing() -> None:
    async with serving() as (address, _):
        link = LinkSection(rtt_ms=4.0, jitter_ms=1.0, mbps=5.0, loss=0.01)
        async with build_agent(replace(config(address), link=link)) as agent:
            assert tokens(await collect(agent, SAMPLED)) == toy_text(IDS, SAMPLED)


async def test_generations_beside_each_other_keep_apart() -> None:
    other = replace(SAMPLED, seed=12)
    async with serving() as (address, _):
        async with build_agent(config(address)) as one, build_agent(config(address)) as two:
            found = await asyncio.gather(
                collect(one, SAMPLED), collect(two, other), collect(one, GREEDY, "another prompt")
            )
    assert tokens(found[0]) == toy_text(IDS, SAMPLED)
    assert tokens(found[1]) == toy_text(IDS, other)
    assert tokens(found[2]) == toy_text(ToyTokenizer().encode("another prompt"), GREEDY)


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
    assert agent.stats is not None
    assert agent.stats.counters.reconnects > 0


async def _into(received: list[Chunk], agent: Agent) -> None:
    async for chunk in agent.generate(PROMPT, LONG):
        received.append(chunk)


async def test_stop_strings_end_the_text_before_them() -> None:
    whole = ToyTokenizer().decode(toy_text(IDS, GREEDY))
    stop = whole[10:13]
    async with serving() as (address, _), build_agent(config(address)) as agent:
        chunks = await collect(agent, replace(GREEDY, stop=(stop, "never there")))
    assert "".join(chunk.text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].finish is FinishReason.STOP


async def test_leaving_the_loop_cancels_and_frees_the_agent() -> None:
    async with serving() as (address, _), build_agent(config(address)) as agent:
        chunks = agent.generate(PROMPT, LONG)
        assert (await anext(chunks)).tokens
        await chunks.aclose()
        assert tokens(await collect(agent, GREEDY)) == toy_text(IDS, GREEDY)


async def test_a_verifier_that_is_not_there_is_given_up() -> None:
    with nobody() as address:
        async with build_agent(config(address)) as agent:
            with pytest.raises(GenerationError, match=f"gave up on the verifier.*{address}"):
                await collect(agent, GREEDY)


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


@pytest.mark.parametrize(("draft", "error"), [("none", GenerationError), ("toy", ValueError)])
async def test_an_id_beyond_the_vocabulary_is_refused(draft: str, error: type[Exception]) -> None:
    """By the verifier, or by the device when it knows the vocabulary."""
    async with serving() as (address, _), build_agent(config(address, draft)) as agent:
        with pytest.raises(error, match=str(1 << 20)):
            await anext(agent.generate([1 << 20], GREEDY))


async def test_a_prompt_beyond_the_drafts_context_is_served_without_drafting() -> None:
    text = ToyTokenizer()
    async with serving() as (address, _):
        short = replace(load_target(TOY).info, context_length=len(IDS))
        drafter = ToyDrafter(TOY_MODEL, short)
        async with Agent(connect(address), drafter, text.encode, text.stream) as agent:
            assert tokens(await collect(agent, GREEDY)) == toy_text(IDS, GREEDY)
            assert agent.stats is not None
            assert agent.stats.counters.sent == 0


async def test_more_sessions_than_allowed_wait_their_turn_or_are_told() -> None:
    limits = LimitsSection(max_sessions=1)
    one_only = VerifierConfig(model="toy", port=0, limits=limits)
    gated = GatedTarget(load_target(one_only), free_passes=2)
    async with serving(gated, config=one_only) as (address, _):
        async with build_agent(config(address)) as first, build_agent(config(address)) as second:
            task = asyncio.create_task(collect(first, GREEDY))
            await asyncio.to_thread(gated.reached.wait)
            link = connect(address)
            told = await link.info()
            await link.close()
            assert (told.model, told.sessions, told.max_sessions) == (gated.info, 1, 1)
            assert told.limits.context_length == gated.info.context_length
            with pytest.raises(GenerationError, match="1"):
                await collect(second, GREEDY)
            gated.gate.set()
            assert tokens(await task) == toy_text(IDS, GREEDY)


TOY = VerifierConfig(model="toy", port=0)
LONG = SamplingParams(max_tokens=120)
