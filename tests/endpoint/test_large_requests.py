"""Requests that are small to send and large to read. Oracles: that others are answered meanwhile,
that counts are looked at before what is counted, and that nothing comes out as an error 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.endpoint.request_json import MAX_VALUES, ApiError, read_object
from edgespec.endpoint.requests import chat_request, completion_request
from edgespec.models.tokenizer import MAX_MESSAGES
from edgespec.models.toy import ToyTokenizer
from tests.endpoint.live_endpoint import (
    ScriptedAgent,
    ask,
    exchange,
    over_script,
    over_toy,
    request_bytes,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WITHIN_S = 60
USER = {"role": "user", "content": "hi"}


def message(read: Callable[[], object]) -> str:
    with pytest.raises(ApiError) as caught:
        read()
    assert caught.value.status == 400
    return caught.value.message


def test_what_is_too_many_is_refused_before_any_of_it_is_read() -> None:
    """None of these holds one that could be read."""
    own = SamplingParams()
    many: list[Any] = [{}] * (MAX_MESSAGES + 1)
    assert message(lambda: chat_request({"messages": many}, own, 8)) == (
        "messages holds 4097 objects, but at most 4096"
    )
    assert "tools holds 129 objects" in message(
        lambda: chat_request({"messages": [USER], "tools": [{}] * 129}, own, 8)
    )
    assert "9 prompts with n 1 are 9 texts" in message(
        lambda: completion_request({"prompt": [""] * 9}, own, 8)
    )
    assert "logit_bias has 1025 keys" in message(
        lambda: completion_request(
            {"prompt": "a", "logit_bias": {f"x{n}": 1 for n in range(1025)}}, own, 8
        )
    )
    assert "stop holds 17 texts" in message(
        lambda: completion_request({"prompt": "a", "stop": [1] * 17}, own, 8)
    )


def test_many_small_values_are_counted_before_they_are_read() -> None:
    lists = b'{"x": [' + b"[]," * MAX_VALUES + b"0]}"
    assert "has 131075 lists, objects and texts, but at most 131072" in message(
        lambda: read_object(lists)
    )
    names = b"{" + b",".join(b'"%d":0' % n for n in range(MAX_VALUES + 1)) + b"}"
    assert "the request has 131073 lists" in message(lambda: read_object(names))
    text = r"a \" [[::{{ \\" * MAX_VALUES  # which is text, however it looks
    for one in (text, text + '"', text + "\\", text + '\\"'):
        assert read_object(json.dumps({"prompt": one}).encode()) == {"prompt": one}
    ids = {"prompt": [7] * (4 * MAX_VALUES)}
    assert read_object(json.dumps(ids).encode()) == ids
    unfinished = b'{"' + b"[" * (MAX_VALUES + 1)
    assert "is no JSON" in message(lambda: read_object(unfinished))
    chat = {"messages": [{"role": "user", "content": "a"}] * MAX_MESSAGES}
    assert read_object(json.dumps(chat).encode()) == chat


@pytest.mark.parametrize(
    "around",
    [
        b'{"prompt": "a", "temperature": %s}',
        b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema":'
        b' {"schema": {"a": %s}}}}',
        b'{"prompt": "a", "metadata": %s}',
    ],
)
async def test_what_is_nested_deep_is_no_failure_of_ours(around: bytes) -> None:
    """Somewhere between what is read with ease and what cannot be read lies what can be read and
    not be written again."""
    async with over_script(ScriptedAgent(["a"])) as live:
        for depth in (*range(700, 1000, 10), *range(960, 1000)):
            body = around % (b"[" * depth + b"]" * depth)
            reply = await exchange(live.port, request_bytes(TEXT, body))
            assert reply.status in (200, 400), (depth, reply.body)


async def test_half_a_surrogate_pair_in_a_name_is_a_mistake_of_the_client() -> None:
    async with over_script(ScriptedAgent(["a"])) as live:
        reply = await exchange(live.port, request_bytes(TEXT, b'{"prompt": "a", "\\ud800": 1}'))
        assert (reply.status, reply.headers["x-edgespec-ignored"]) == (200, "?")
        broken = b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}'
        reply = await exchange(live.port, request_bytes(TEXT, broken))
        assert (reply.status, reply.error["param"]) == (400, "logit_bias")
        async with asyncio.timeout(WITHIN_S):
            while not live.endpoint.counts.requests[TEXT, "400"]:  # noqa: ASYNC110
                await asyncio.sleep(0)


class _Pieces(ToyTokenizer):
    """Notes how much it is given at once."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.read.append(len(text))
        return super().encode(text)


async def test_of_a_text_far_beyond_the_context_only_a_piece_is_tokenized() -> None:
    async with over_toy() as live:
        context = live.endpoint.models.listed[0].context_length
        text = "a" * 4_000_000
        message = {"role": "user", "content": text}
        for path, param, data in (
            (TEXT, "prompt", {"prompt": text}),
            (TEXT, "prompt", {"prompt": ["a", text]}),
            (CHAT, "messages", {"messages": [message]}),
        ):
            live.endpoint.tokenizer = pieces = _Pieces()
            reply = await ask(live, path, data)
            assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
            assert reply.error["param"] == param
            assert f"the context of {context} tokens" in reply.error["message"]
            assert sum(pieces.read) < 2 * context + 2 * (1 << 16)
