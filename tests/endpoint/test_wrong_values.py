"""Tests of requests in which one value is wrong, for the APIs that are converted into chats.

Oracle: whatever stands at any place of a request, it is read, or refused with an ``ApiError`` that
the API can write. No other exception leaves the converter or the parser behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.endpoint import messages, ollama
from edgespec.endpoint.messages import convert_message_request
from edgespec.endpoint.ollama import convert_ollama_chat, convert_ollama_generate
from edgespec.endpoint.request_json import ApiError, compact_json
from edgespec.endpoint.requests import ChatConversion, chat_request, completion_request
from edgespec.endpoint.responses import convert_to_chat

TEXT = {"type": "text", "text": "Hi"}
FUNCTION = {"name": "w", "parameters": {"type": "object"}}
MESSAGE: dict[str, Any] = {
    "model": "a",
    "max_tokens": 5,
    "system": [TEXT],
    "stop_sequences": ["a"],
    "tools": [
        {"name": "w", "description": "d", "input_schema": {"type": "object"}, "strict": True},
        {"type": "web_search_20250305", "name": "x"},
    ],
    "tool_choice": {"type": "tool", "name": "w", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "output_format": None,
    "metadata": {"user_id": "me"},
    "temperature": 1,
    "top_k": 3,
    "stream": True,
    "mcp_servers": [],
    "messages": [
        {
            "role": "user",
            "content": [
                {**TEXT, "cache_control": {"type": "ephemeral"}},
                {"type": "tool_result", "tool_use_id": "t", "content": [TEXT], "is_error": True},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "tool_use", "id": "t", "name": "w", "input": {}},
                TEXT,
            ],
        },
    ],
}
OLLAMA: dict[str, Any] = {
    "model": "a",
    "stream": False,
    "format": {"type": "object"},
    "think": "low",
    "options": {
        "num_predict": 3,
        "temperature": 0,
        "seed": 3,
        "stop": ["a"],
        "repeat_penalty": 1.1,
        "repeat_last_n": -1,
        "mirostat": 0,
    },
    "keep_alive": "5m",
    "logprobs": True,
    "top_logprobs": 2,
}
OLLAMA_CHAT: dict[str, Any] = {
    **OLLAMA,
    "tools": [{"type": "function", "function": FUNCTION}],
    "messages": [
        {"role": "user", "content": "Hi", "images": []},
        {
            "role": "assistant",
            "content": "",
            "thinking": "Hm.",
            "tool_calls": [{"id": "t", "function": {"name": "w", "arguments": {}}}],
        },
        {"role": "tool", "tool_name": "w", "content": "x"},
    ],
}
OLLAMA_GENERATE: dict[str, Any] = {
    **OLLAMA,
    **{"prompt": "Hi", "system": "s", "suffix": "", "template": "", "raw": False},
    **{"context": [], "images": None},
}
RESPONSE: dict[str, Any] = {
    "model": "a",
    "instructions": "s",
    "max_output_tokens": 5,
    "tools": [{"type": "function", **FUNCTION}, {"type": "namespace", "name": "n", "tools": []}],
    "tool_choice": {"type": "function", "name": "w"},
    "reasoning": {"effort": "low"},
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "t", "name": "w", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t", "output": "x"},
    ],
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 1e300, 10**40, "", "x", "\ud800", "json", "auto"),
    *([], [None], [1], ["x"], [[]], [{}], [{"type": "text", "text": None}]),
    *([{"role": "user", "content": "x"}], {}, {"type": "text"}, {"type": 3}, {"a": None}),
)
Path = tuple[str | int, ...]


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of each value inside ``value``."""
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for name, one in inner:
        yield (*path, name)
        yield from paths(one, (*path, name))


def with_value(data: Any, path: Path, value: Any) -> Any:
    """Return a copy of ``data`` with another value at a path."""
    if not path:
        return value
    copy = data.copy()
    copy[path[0]] = with_value(data[path[0]], path[1:], value)
    return copy


@pytest.mark.parametrize(
    ("request_data", "convert", "write_error"),
    [
        pytest.param(MESSAGE, convert_message_request, messages.error_reply, id="messages"),
        pytest.param(OLLAMA_CHAT, convert_ollama_chat, ollama.error_reply, id="ollama chat"),
        pytest.param(
            OLLAMA_GENERATE, convert_ollama_generate, ollama.error_reply, id="ollama generate"
        ),
        pytest.param(
            RESPONSE, convert_to_chat, lambda error: (error.status, error.body), id="responses"
        ),
    ],
)
def test_a_wrong_value_anywhere_is_read_or_refused(
    request_data: dict[str, Any],
    convert: Callable[[Mapping[str, Any]], ChatConversion],
    write_error: Callable[[ApiError], tuple[int, Any]],
) -> None:
    read, refused = 0, 0
    convert(request_data)
    for path in paths(request_data):
        for value in VALUES:
            try:
                conversion = convert(with_value(request_data, path, value))
                parse = chat_request if "messages" in conversion.chat else completion_request
                parse(conversion.chat, SamplingParams(), names=conversion.names)
                read += 1
            except ApiError as error:
                status, body = write_error(error)
                assert status == 400, (path, value)
                compact_json(body).encode()
                refused += 1
    assert read
    assert refused
