"""Tests with OpenAI's own client, unchanged, against a real server. Oracle: the toy's output by the
scalar specification, and for log probabilities the output of ``Agent.generate``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import openai
import pytest
import pytest_asyncio

from edgespec.api import connect
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.endpoint.requests import choice_seed
from edgespec.models.tokenizer import render_chat
from edgespec.models.toy import ToyTokenizer
from tests.endpoint.live_endpoint import Live, over_nobody, over_toy
from tests.kit.live_verifier import toy_text
from tests.present import require

TEXT = ToyTokenizer()
PROMPT = "once upon a time"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
SAMPLED = {"temperature": 0.9, "seed": 5, "max_tokens": 24}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Live]:
    async with over_toy() as live:
        yield live


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Live) -> AsyncIterator[Any]:
    async with served.client() as found:
        yield found


def expected_text(prompt: str, **sampling: Any) -> str:
    """Return the expected text."""
    return TEXT.decode(toy_text(TEXT.encode(prompt), SamplingParams(**sampling)))


def expected_chat(**sampling: Any) -> str:
    return TEXT.decode(
        toy_text(TEXT.encode(render_chat(TEXT, MESSAGES)), SamplingParams(**sampling))
    )


async def test_a_chat_as_a_stream_is_the_same_text(client: Any) -> None:
    options = {"include_usage": True}
    stream = await client.chat.completions.create(
        model="toy", messages=MESSAGES, stream=True, stream_options=options, **SAMPLED
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert deltas[0].delta.role == "assistant"
    assert "".join(one.delta.content or "" for one in deltas) == expected_chat(**SAMPLED)
    assert [one.finish_reason for one in deltas if one.finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert require(chunks[-1].usage).completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completions_of_several_prompts_and_n_both_ways(client: Any) -> None:
    asked = {"model": "toy", "n": 2, **SAMPLED}
    done = await client.completions.create(prompt=[PROMPT, "abc"], **asked)
    seeds = [5, choice_seed(5, 1)]
    expected = [
        expected_text(one, **{**SAMPLED, "seed": seed}) for one in (PROMPT, "abc") for seed in seeds
    ]
    assert [choice.text for choice in done.choices] == expected
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert len(set(expected)) == 4
    texts, reasons = dict.fromkeys(range(4), ""), list[str]()
    both: Any = [TEXT.encode(PROMPT), TEXT.encode("abc")]
    async for chunk in await client.completions.create(prompt=both, stream=True, **asked):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert list(texts.values()) == expected
    assert reasons == ["length"] * 4
    assert require(done.usage).prompt_tokens == len(PROMPT) + 3


@pytest.mark.parametrize(
    ("given", "extra", "sampling"),
    [
        ({"temperature": 0.5, "top_p": 0.6}, {}, {"temperature": 0.5, "top_p": 0.6}),
        ({"temperature": 2.0}, {"top_k": 3}, {"temperature": 2.0, "top_k": 3}),
        ({"temperature": 2.0}, {"top_k": -1}, {"temperature": 2.0}),
        ({"temperature": 1.0}, {"min_p": 0.2}, {"min_p": 0.2, "temperature": 1.0}),
        ({}, {"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": 2.0}, {}, {"presence_penalty": 2.0}),
        ({"frequency_penalty": 1.5}, {}, {"frequency_penalty": 1.5}),
        ({"logit_bias": {"7": 50}}, {}, {"logit_bias": {7: 50.0}}),
        ({}, {"stop_token_ids": (7, 8, 9, 10, 11)}, {"stop_token_ids": (7, 8, 9, 10, 11)}),
    ],
)
async def test_sampling_parameters_reach_the_target(
    client: Any, given: Mapping[str, Any], extra: Mapping[str, Any], sampling: Mapping[str, Any]
) -> None:
    done = await client.completions.create(
        model="toy", prompt=PROMPT, max_tokens=40, seed=3, extra_body=dict(extra), **given
    )
    expected = expected_text(PROMPT, max_tokens=40, seed=3, **sampling)
    assert done.choices[0].text == expected
    if "top_k" not in extra:
        assert expected != expected_text(PROMPT, max_tokens=40, seed=3)


async def test_logprobs_are_the_agents(served: Live, client: Any) -> None:
    scores = []
    async with connect(served.address, draft="toy") as agent:
        params = SamplingParams(max_tokens=12)
        async for chunk in agent.generate(
            TEXT.encode(render_chat(TEXT, MESSAGES)), params, logprobs=3
        ):
            scores += list(zip(chunk.tokens, chunk.logprobs, strict=True))
    asked: Any = {"model": "toy", "messages": MESSAGES, "max_tokens": 12}
    asked |= {"logprobs": True, "top_logprobs": 3}
    done = await client.chat.completions.create(**asked)
    streamed: list[Any] = []
    async for event in await client.chat.completions.create(stream=True, **asked):
        if event.choices[0].logprobs is not None:
            streamed += event.choices[0].logprobs.content or []
    found = require(done.choices[0].logprobs)
    for content in (found.content or [], streamed):
        assert [one.token for one in content] == [TEXT.decode([token]) for token, _ in scores]
        assert [one.logprob for one in content] == [score.logprob for _, score in scores]
        tops = [[(top.token, top.logprob) for top in one.top_logprobs] for one in content]
        assert tops == [
            [(TEXT.decode([token]), logprob) for token, logprob in score.top] for _, score in scores
        ]
        assert bytes(content[0].bytes or ()) == content[0].token.encode()


async def test_nobody_there_is_a_503_that_says_when_to_come_back() -> None:
    async with over_nobody() as live, live.client() as client:
        for stream in (False, True):
            with pytest.raises(
                openai.InternalServerError, match="gave up on the verifier"
            ) as error:
                await client.completions.create(model="any", prompt="a", stream=stream)
            assert error.value.status_code == 503
            assert error.value.response.headers["retry-after"] == "5"
