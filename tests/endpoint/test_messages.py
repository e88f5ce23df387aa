"""Tests of Anthropic's Messages API. Oracles: the same conversation in OpenAI's form, the script of
the agent, the toy's text without stops, and the order of events that the API documents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.core.device.events import TokenKind
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Piece
from edgespec.endpoint.choices import Choice, Delta
from edgespec.endpoint.messages import MessageEnvelope, convert_message_request
from edgespec.endpoint.output_parser import OutputForm, OutputParser
from edgespec.endpoint.request_json import ApiError
from edgespec.endpoint.requests import chat_request
from edgespec.endpoint.tool_calls import ToolFormat
from tests.endpoint.live_endpoint import (
    HERMES,
    Reply,
    ScriptedAgent,
    ask,
    over_letters,
    over_script,
    over_toy,
)
from tests.kit.letters import LettersTokenizer

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER: dict[str, Any] = {"role": "user", "content": "Weather?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"name": "weather", "description": "It", "input_schema": SCHEMA}
HELLO = {"model": "edgespec", "max_tokens": 9, "messages": [USER]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CACHED = {"cache_control": {"type": "ephemeral"}}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def converted(**data: Any) -> dict[str, Any]:
    chat = convert_message_request({**HELLO, **data}).chat
    chat_request(chat, SamplingParams())  # it is a valid request
    return chat


def events(reply: Reply) -> list[dict[str, Any]]:
    """Return the events of a stream. Each has its type in the line ``event``, too."""
    found = []
    for block in reply.body.decode().strip().split("\n\n"):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        found.append(event)
    return found


@pytest.mark.parametrize(
    ("sent", "messages"),
    [
        pytest.param(
            {"system": "Be kind.", "messages": [USER]},
            [{"role": "system", "content": "Be kind."}, USER],
            id="a system text",
        ),
        pytest.param(
            {"system": [text("One.", **CACHED), text("Two.")], "messages": [USER]},
            [{"role": "system", "content": "One.\nTwo."}, USER],
            id="system blocks",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [text("a", **CACHED), text("b")]}]},
            [{"role": "user", "content": "a\nb"}],
            id="text blocks",
        ),
        pytest.param(
            {"messages": [USER, {"role": "system", "content": [text("Now.")]}, USER]},
            [USER, {"role": "system", "content": "Now."}, USER],
            id="a message of the system in the middle",
        ),
        pytest.param(
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                            {"type": "redacted_thinking", "data": "x"},
                            text("I look. "),
                            text("Wait."),
                            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": 1}},
                            {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t1", "content": [text("20")]},
                            {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                            text("So?"),
                        ],
                    },
                ]
            },
            [
                USER,
                {
                    "role": "assistant",
                    "content": "I look. Wait.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [
                        {
                            "id": name,
                            "type": "function",
                            "function": {"name": "weather", "arguments": arguments},
                        }
                        for name, arguments in (("t1", {"a": 1}), ("t2", {}))
                    ],
                },
                {"role": "tool", "tool_call_id": "t1", "content": "20"},
                {"role": "tool", "tool_call_id": "t2", "content": "error"},
                {"role": "user", "content": "So?"},
            ],
            id="thoughts, calls and results",
        ),
    ],
)
def test_a_conversation_becomes_a_chat(
    sent: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    assert converted(**sent)["messages"] == messages


@pytest.mark.parametrize(
    ("sent", "field", "value"),
    [
        ({"stop_sequences": ["a"]}, "stop", ["a"]),
        ({"top_k": 5, "top_p": 0.5, "temperature": 0.7}, "top_k", 5),
        ({"tool_choice": {"type": "auto"}}, "tool_choice", "auto"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "required"),
        ({"tool_choice": {"type": "none"}}, "tool_choice", "none"),
        (
            {"tool_choice": {"type": "tool", "name": "weather"}},
            "tool_choice",
            {"type": "function", "function": {"name": "weather"}},
        ),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "parallel_tool_calls",
            False,
        ),
        ({"thinking": {"type": "disabled"}}, "chat_template_kwargs", {"enable_thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "chat_template_kwargs",
            {"enable_thinking": True},
        ),
        ({"thinking": {"type": "adaptive"}}, "chat_template_kwargs", None),
        ({"output_config": {"effort": "low"}}, "reasoning_effort", "low"),
        ({"output_config": {"effort": "max"}}, "reasoning_effort", "high"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        ),
        ({"metadata": {"user_id": "me"}, **CACHED}, "cache_control", None),
    ],
    ids=str,
)
def test_a_parameter_becomes_one_of_a_chat(sent: dict[str, Any], field: str, value: Any) -> None:
    assert converted(tools=[TOOL], **sent).get(field) == value


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        pytest.param({"max_tokens": None}, "max_tokens is missing", id="no length"),
        pytest.param({"messages": []}, "messages must hold at least one message", id="none"),
        pytest.param(
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages[0].role is 'tool', but must be 'user' or 'assistant'",
            id="role",
        ),
        pytest.param(
            {"messages": [USER, {"role": "user"}]}, "messages[1].content is missing", id="content"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [text("a"), {"type": "image"}]}]},
            "messages[0].content[1].source.type is None, but must be 'base64' or 'url'",
            id="an image without source",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].type is 'document', but is read as text, and pictures in",
            id="a document",
        ),
        pytest.param(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": [{"type": "document"}],
                            }
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].type is 'document', but is read as text, and",
            id="a document in a result",
        ),
        pytest.param(
            {"system": "a", "messages": [{"role": "user", "content": ["a"]}]},
            "messages[0].content[0] is 'a', but must be an object",
            id="a block that is no object",
        ),
        pytest.param(
            {"system": "a", "messages": [USER, {"role": "assistant", "content": "\ud800"}]},
            "messages[1].content holds half of a surrogate pair, which is no text",
            id="a surrogate",
        ),
        pytest.param(
            {"tools": [{"name": "a"}]}, "tools[0].input_schema is missing", id="no schema"
        ),
        pytest.param(
            {"tools": [{"type": "web_search_20250305"}, {**TOOL, "input_schema": 3}]},
            "tools[1].input_schema is 3, but must be an object",
            id="a schema that is none",
        ),
        pytest.param(
            {"tool_choice": {"type": "all"}},
            "tool_choice.type is 'all', but must be 'auto', 'any', 'tool' or 'none'",
            id="a choice",
        ),
        pytest.param(
            {"thinking": {"type": "often"}},
            "thinking.type is 'often', but must be one of 'enabled', 'disabled', 'adaptive',"
            " 'between_tools'",
            id="thinking",
        ),
        pytest.param(
            {"thinking": {"type": "adaptive", "display": "half"}},
            "thinking.display is 'half', but must be one of 'summarized', 'omitted'",
            id="display",
        ),
        pytest.param({"thread": {"id": "x"}}, "thread is given, but", id="thread"),
        pytest.param(
            {"stop_sequences": [3]},
            "stop_sequences is [3], but must be text, or a list of texts",
            id="stops",
        ),
        pytest.param(
            {"mcp_servers": [{"url": "https://a.example"}]},
            "mcp_servers are given, but nothing here connects to them",
            id="servers of tools",
        ),
        pytest.param({"temperature": "hot"}, "temperature is 'hot', but must be", id="a number"),
    ],
)
async def test_an_error_names_what_the_client_sent(sent: dict[str, Any], message: str) -> None:
    async with over_script(ScriptedAgent(["a"])) as live:
        reply = await ask(live, PATH, {**HELLO, **sent})
    assert reply.status == 400
    assert reply.error["message"].startswith(message)
    assert reply.error["type"] == "invalid_request_error"
    assert reply.json["request_id"] == reply.headers["request-id"]


def test_a_length_is_not_needed_to_count() -> None:
    data = {"model": "a", "messages": [USER]}
    assert convert_message_request(data, needs_length=False).chat["messages"] == [USER]
    with pytest.raises(ApiError, match="max_tokens is missing"):
        convert_message_request(data)


async def test_what_other_services_run_is_left_out_and_named() -> None:
    sent = {
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "server_tool_use"}, text("a")]},
            USER,
        ],
        "context_management": {"edits": []},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    async with over_script(ScriptedAgent(["a"])) as live:
        reply = await ask(live, PATH, {**HELLO, **sent})
    assert reply.status == 200
    ignored = set(reply.headers["x-edgespec-ignored"].split(", "))
    assert ignored >= {
        "tools.web_search_20250305",
        "messages.server_tool_use",
        "context_management",
        "thinking",
    }


async def test_the_events_of_a_stream_come_in_the_order_of_the_api() -> None:
    """Text, a call, and text again: three blocks with indices from 0."""
    pieces = ["I ", "look.", CALL, " Done."]
    async with over_script(ScriptedAgent(pieces), LettersTokenizer(HERMES)) as live:
        data = {**HELLO, "tools": [TOOL]}
        streamed = events(await ask(live, f"{PATH}?beta=true", {**data, "stream": True}))
        whole = (await ask(live, PATH, data)).json
    kinds = [one["type"] for one in streamed]
    begin, change, end = (f"content_block_{one}" for one in ("start", "delta", "stop"))
    texts = [begin, change, end]
    expected = ["message_start", begin, change, change, end, *texts, *texts]
    assert kinds == [*expected, "message_delta", "message_stop"]
    assert [one["index"] for one in streamed if one["type"] == begin] == [0, 1, 2]
    assert [one["index"] for one in streamed if one["type"] == end] == [0, 1, 2]
    opening = streamed[0]["message"]
    assert (opening["content"], opening["stop_reason"]) == ([], None)
    assert opening["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > 0
    deltas = [one["delta"] for one in streamed if one["type"] == change]
    assert "".join(one.get("text", "") for one in deltas) == "I look.Done."
    (arguments,) = [one for one in deltas if one["type"] == "input_json_delta"]
    assert json.loads(arguments["partial_json"]) == {"city": "Rome"}
    call = streamed[5]["content_block"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {})
    last = streamed[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == len(pieces)
    kinds_of_blocks = [one["type"] for one in whole["content"]]
    assert kinds_of_blocks == ["text", "tool_use", "text"]
    assert whole["content"][1]["input"] == {"city": "Rome"}
    assert (whole["role"], whole["type"], whole["stop_reason"]) == (
        *("assistant", "message"),
        "tool_use",
    )


THINKS = "{{ messages[0].content }}{% set end = '</think>' %}"


async def test_a_thought_is_a_block_of_its_own() -> None:
    pieces = ["<think>", "Hm", " so.", "</think>", "Hi"]
    async with over_script(ScriptedAgent(pieces), LettersTokenizer(THINKS)) as live:
        streamed = events(await ask(live, PATH, {**HELLO, "stream": True}))
        whole = (await ask(live, PATH, HELLO)).json
    thought, answer = whole["content"]
    assert thought == {"type": "thinking", "thinking": "Hm so.", "signature": thought["signature"]}
    assert answer == {"type": "text", "text": "Hi"}
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] == 4
    changes = [one for one in streamed if one["type"] == "content_block_delta"]
    in_first = [one["delta"] for one in changes if one["index"] == 0]
    assert "".join(one.get("thinking", "") for one in in_first) == "Hm so."
    assert in_first[-1] == {"type": "signature_delta", "signature": thought["signature"]}
    assert [one["delta"]["text"] for one in changes if one["index"] == 1] == ["Hi"]


async def test_a_thought_that_is_omitted_is_an_empty_block() -> None:
    pieces = ["<think>", "Hm", " so.", "</think>", "Hi"]
    wanted = {**HELLO, "thinking": {"type": "enabled", "display": "omitted"}}
    async with over_script(ScriptedAgent(pieces), LettersTokenizer(THINKS)) as live:
        streamed = events(await ask(live, PATH, {**wanted, "stream": True}))
        whole = (await ask(live, PATH, wanted)).json
    thought, answer = whole["content"]
    assert thought == {"type": "thinking", "thinking": "", "signature": thought["signature"]}
    assert answer == {"type": "text", "text": "Hi"}
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] == 4
    changes = [one for one in streamed if one["type"] == "content_block_delta"]
    (in_first,) = [one["delta"] for one in changes if one["index"] == 0]
    assert in_first == {"type": "signature_delta", "signature": thought["signature"]}
    assert [one["delta"]["text"] for one in changes if one["index"] == 1] == ["Hi"]


@pytest.mark.parametrize("cut", range(1, len(CALL)))
def test_arguments_are_the_same_wherever_a_call_is_cut(cut: int) -> None:
    """Events are written for a call that comes in two pieces, with another one behind it."""
    form = OutputForm(calls=ToolFormat.HERMES, schemas={"weather": {}})
    parser, envelope, choice = OutputParser(form), MessageEnvelope("toy"), Choice.__new__(Choice)
    written = b""
    for text in (CALL[:cut], CALL[cut:], "\n" + CALL):
        parts = tuple(parser.push(None, Piece(text, TokenKind.DECODED)))
        written += envelope.delta(choice, Delta(parts))
    written += envelope.delta(choice, Delta(tuple(parser.flush()))) + envelope.closing(choice)
    found = events(Reply(200, {}, written))
    begins = [one for one in found if one["type"] == "content_block_start"]
    assert [one["content_block"]["name"] for one in begins] == ["weather", "weather"]
    for index in (0, 1):
        texts = [
            one["delta"]["partial_json"]
            for one in found
            if one["type"] == "content_block_delta" and one["index"] == index
        ]
        assert json.loads("".join(texts)) == {"city": "Rome"}
    assert [one["index"] for one in found if one["type"] == "content_block_stop"] == [0, 1]


@pytest.mark.parametrize(
    ("finish", "max_tokens", "reason"),
    [
        (FinishReason.STOP, 9, "end_turn"),
        (FinishReason.LENGTH, 2, "max_tokens"),
        (FinishReason.CONTEXT, 9, "model_context_window_exceeded"),
    ],
)
async def test_the_reason_for_the_end(finish: FinishReason, max_tokens: int, reason: str) -> None:
    async with over_script(ScriptedAgent(["a", "b"], finish)) as live:
        data = {**HELLO, "max_tokens": max_tokens}
        whole = (await ask(live, PATH, data)).json
        streamed = events(await ask(live, PATH, {**data, "stream": True}))
    assert whole["stop_reason"] == streamed[-2]["delta"]["stop_reason"] == reason


async def test_a_stop_sequence_is_named() -> None:
    """The oracle is the toy's own text without stops."""
    async with over_toy() as live:
        plain = {**HELLO, "max_tokens": 40, "ignore_eos": True}
        output = (await ask(live, PATH, plain)).json["content"][0]["text"]
        stop = output[10:13]
        stops = {"stop_sequences": ["no such text", stop]}
        reply = (await ask(live, PATH, {**plain, **stops})).json
        streamed = events(await ask(live, PATH, {**plain, **stops, "stream": True}))
    assert reply["content"][0]["text"] == output[: output.index(stop)]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", stop)
    assert streamed[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


async def test_a_forced_call_is_one_and_fits_its_schema() -> None:
    async with over_letters() as live:
        choice = {"type": "tool", "name": "weather"}
        data = {**HELLO, "max_tokens": 200, "tools": [TOOL], "tool_choice": choice}
        reply = (await ask(live, PATH, data)).json
    (block,) = reply["content"]
    assert (block["type"], block["name"], reply["stop_reason"]) == (
        *("tool_use", "weather"),
        "tool_use",
    )
    assert isinstance(block["input"]["city"], str)


async def test_tokens_are_counted_as_they_are_generated_for() -> None:
    async with over_toy() as live:
        whole = (await ask(live, PATH, {**HELLO, "system": "Be kind."})).json
        data = {"model": "edgespec", "messages": [USER], "system": "Be kind."}
        count = await ask(live, COUNT, data)
        long = {**HELLO, "messages": [{"role": "user", "content": "a" * 5000}]}
        full = await ask(live, PATH, long)
        unknown = await ask(live, COUNT, {**data, "model": "claude"})
    assert count.json == {"input_tokens": whole["usage"]["input_tokens"]}
    assert full.status == 400
    assert full.error["message"].startswith("prompt is too long: the prompt has 5001 tokens")
    assert (unknown.status, unknown.error["type"]) == (404, "not_found_error")


async def test_models_and_places_that_are_not_have_the_form_of_the_client() -> None:
    """Anthropic's clients send the version of their API."""
    version = {"anthropic-version": "2023-06-01"}
    async with over_toy() as live:
        plain = (await ask(live, "/v1/models")).json
        page = (await ask(live, "/v1/models", **version)).json
        one = (await ask(live, "/v1/models/toy", **version)).json
        nowhere = await ask(live, "/v1/files", **version)
        wrong_method = await ask(live, PATH)
    assert set(plain) == {"object", "data"}
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("toy", "toy", False)
    assert page["data"] == [one]
    assert (one["type"], one["id"], one["display_name"]) == ("model", "toy", "toy")
    assert (nowhere.status, nowhere.error["type"]) == (404, "not_found_error")
    assert (wrong_method.status, wrong_method.error["type"]) == (405, "invalid_request_error")
