"""Tests of the arguments of tool calls that are returned as they grow.

Oracles: ``json.dumps`` of the same value, which is the form of arguments that come whole, and the
reader itself with the text in one piece, since no cut may matter.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.device.events import TokenKind
from edgespec.core.protocol.messages import FinishReason
from edgespec.device.agent import Piece
from edgespec.endpoint.json_pieces import JsonPieces
from edgespec.endpoint.output_parser import Part, join_parts
from edgespec.endpoint.tool_calls import CallArguments, ToolCall, ToolFormat
from tests.endpoint.live_endpoint import HERMES, ScriptedAgent, ask, events_of, over_script
from tests.endpoint.test_call_formats import KOELN, ROME, Names, form_of, written
from tests.kit.letters import LettersTokenizer
from tests.present import require

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["😀", "é\u2028", "\x00\x1f\x7f", '"\\/', "</x>"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)
FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *("{", "}", "[", "]", ",", ":", '"', "\\", " ", "\n", "-", "1", "0.50", "1e5", "e"),
            *('"a"', '"a":', "true", "null", "NaN", "x", "\\u12", "\\ud83d", "\\ude00", "\\n", "é"),
        ]
    ),
    max_size=14,
).map("".join)
STREAMED = [
    *("hermes", "mistral", "mistral_named", "llama", "granite", "phi", "deepseek", "deepseek_v31"),
    "harmony",
]


def cut(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]


def read_json(pieces: Sequence[str]) -> tuple[str, bool]:
    """Return what is written for the pieces, with what is behind the object, and whether the object
    is whole."""
    reader, found, rest = JsonPieces(), "", ""
    for piece in pieces:
        text = rest + piece
        written, length = reader.push(text)
        found, rest = found + written, text[length:]
    if not reader.is_complete:
        found += reader.flush()
    return found + rest, reader.is_complete


@given(value=OBJECTS, data=st.data())
def test_pieces_are_the_text_of_the_whole(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(
        value,
        ensure_ascii=data.draw(st.booleans()),
        indent=data.draw(st.sampled_from([None, 2])),
        separators=data.draw(st.sampled_from([None, (",", ":"), (" , ", " :\t")])),
    )
    expected = json.dumps(json.loads(text), ensure_ascii=False)
    assert read_json(cut(text, data)) == (expected, True)
    assert read_json([*text]) == (expected, True)


@settings(max_examples=300)
@given(text=FRAGMENTS, data=st.data())
def test_no_cut_matters_in_broken_json(text: str, data: st.DataObject) -> None:
    whole = read_json(["{" + text])
    assert read_json(cut("{" + text, data)) == whole
    assert read_json([*"{", *text]) == whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ('{"a": "\\ud83d\\ude00 \\ud83d \\ude00"}', '{"a": "😀 \\ud83d \\ude00"}'),
        ('{"a": "x\ny"}', '{"a": "x\\ny"}'),
        ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 5000 + "}"),
        ('{"a" 1}', '{"a"1}'),
        ('{"a": 1,}', '{"a": 1, }'),
        ("{" + '"a":{' * 600, None),
    ],
    ids=["two members", "surrogates", "line break", "long number", "colon", "comma", "deep"],
)
def test_peculiar_json(text: str, expected: str | None) -> None:
    found, _ = read_json([text])
    assert found == read_json([*text])[0]
    assert expected is None or found == expected


def push_letters(form: ToolFormat, text: str) -> list[Part]:
    parser = require(form_of(form).make_parser(Names([], is_shown=True)))
    found = [part for one in text for part in parser.push(99, Piece(one, TokenKind.DECODED))]
    return [*found, *parser.flush()]


@pytest.mark.parametrize("form", ToolFormat, ids=lambda one: one.value)
def test_arguments_leave_as_they_grow(form: ToolFormat) -> None:
    """JSON leaves with each letter, all other arguments with the whole call."""
    for calls in ([KOELN], [ROME, KOELN]):
        parts = push_letters(form, written(form, *calls))
        whole = join_parts(parts)
        found = [one for one in whole if isinstance(one, ToolCall)]
        expected = [json.dumps(value, ensure_ascii=False) for _, value in calls]
        assert [one.arguments for one in found] == expected
        more = [one for one in parts if isinstance(one, CallArguments)]
        letters = sum(map(len, expected))
        assert len(more) >= letters // 2 if form.value in STREAMED else not more


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Köln","days": 1.50}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {
    "model": "edgespec",
    "messages": [{"role": "user", "content": "?"}],
    "tools": [TOOL],
}
MESSAGE = {**CHAT, "max_tokens": 99, "tools": [{"name": "weather", "input_schema": {}}]}
RESPONSE = {
    "model": "edgespec",
    "input": "?",
    "tools": [{"type": "function", "name": "weather", "parameters": {}}],
}


async def stream(path: str, body: dict[str, Any], text: str, finish: FinishReason) -> bytes:
    agent = ScriptedAgent([*text], finish)
    async with over_script(agent, LettersTokenizer(HERMES)) as live:
        return (await ask(live, path, {**body, "stream": True})).body


CUT = CALL[: CALL.index(".50")]
BROKEN = CALL.replace('"Köln"', "Köln")
CASES = [
    (CALL, FinishReason.STOP, '{"city": "Köln", "days": 1.5}', "tool_calls"),
    (CUT, FinishReason.LENGTH, '{"city": "Köln", "days": 1', "length"),
    (BROKEN, FinishReason.STOP, '{"city": Köln,"days": 1.50}}\n', "tool_calls"),
]
IDS = ["whole", "cut", "broken"]


@pytest.mark.parametrize(("text", "finish", "expected", "reason"), CASES, ids=IDS)
async def test_chat_streams_arguments(
    text: str, finish: FinishReason, expected: str, reason: str
) -> None:
    events = events_of(await stream("/v1/chat/completions", CHAT, text, finish))
    choices = [one["choices"][0] for one in events if isinstance(one, dict)]
    calls = [call for one in choices for call in one["delta"].get("tool_calls", ())]
    assert calls[0]["function"] == {"name": "weather", "arguments": "{"}
    assert calls[0]["type"] == "function"
    assert all(set(one) == {"index", "function"} for one in calls[1:])
    assert len(calls) > 10
    assert "".join(one["function"]["arguments"] for one in calls) == expected
    assert choices[-1]["finish_reason"] == reason
    agent = ScriptedAgent([text], finish)
    async with over_script(agent, LettersTokenizer(HERMES)) as live:
        whole = (await ask(live, "/v1/chat/completions", CHAT)).json["choices"][0]
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == expected
    assert whole["finish_reason"] == reason


@pytest.mark.parametrize(("text", "finish", "expected", "reason"), CASES, ids=IDS)
async def test_messages_stream_arguments(
    text: str, finish: FinishReason, expected: str, reason: str
) -> None:
    body = (await stream("/v1/messages", MESSAGE, text, finish)).decode()
    events = [json.loads(one[6:]) for one in body.splitlines() if one.startswith("data: ")]
    assert [one["type"] for one in events][:2] == ["message_start", "content_block_start"]
    deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
    assert {one["type"] for one in deltas} == {"input_json_delta"}
    assert len(deltas) > 10
    assert "".join(one["partial_json"] for one in deltas) == expected
    stop = {"tool_calls": "tool_use", "length": "model_context_window_exceeded"}[reason]
    assert events[-2]["delta"]["stop_reason"] == stop


@pytest.mark.parametrize(("text", "finish", "expected", "reason"), CASES, ids=IDS)
async def test_responses_stream_arguments(
    text: str, finish: FinishReason, expected: str, reason: str
) -> None:
    body = (await stream("/v1/responses", RESPONSE, text, finish)).decode()
    events = [json.loads(one[6:]) for one in body.splitlines() if one.startswith("data: ")]
    kind = "response.function_call_arguments"
    deltas = [one["delta"] for one in events if one["type"] == f"{kind}.delta"]
    (done,) = [one for one in events if one["type"] == f"{kind}.done"]
    assert len(deltas) > 10
    assert "".join(deltas) == done["arguments"] == expected
    (item,) = events[-1]["response"]["output"]
    assert item["arguments"] == expected
    assert item["status"] == ("incomplete" if reason == "length" else "completed")


async def test_ollama_sends_whole_calls() -> None:
    body = await stream("/api/chat", CHAT, CALL, FinishReason.STOP)
    lines = [json.loads(one) for one in body.splitlines()]
    (message,) = [one["message"] for one in lines if "tool_calls" in one["message"]]
    assert message["tool_calls"][0]["function"]["arguments"] == {"city": "Köln", "days": 1.5}
    for text in (CUT, BROKEN):
        body = await stream("/api/chat", CHAT, text, FinishReason.LENGTH)
        assert b"tool_calls" not in body


async def test_a_custom_tool_comes_whole() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"input": "a\\nb"}}</tool_call>'
    body = {**CHAT, "tools": [{"type": "custom", "custom": {"name": "weather"}}]}
    events = events_of(await stream("/v1/chat/completions", body, text, FinishReason.STOP))
    choices = [one["choices"][0] for one in events if isinstance(one, dict)]
    (call,) = [call for one in choices for call in one["delta"].get("tool_calls", ())]
    assert call["custom"] == {"name": "weather", "input": "a\nb"}
