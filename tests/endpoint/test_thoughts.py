"""Tests of thoughts: their place in outputs, in every API, and in the history of a chat.

Oracle: the whole text. However it is cut, and whether its marks are letters, shown tokens or hidden
tokens, the thought and the answer must be the same, and a stream must equal the response without
streaming.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from edgespec.core.device.events import TokenKind
from edgespec.core.protocol.messages import FinishReason
from edgespec.device.agent import Piece
from edgespec.endpoint.marks import MarkToken
from edgespec.endpoint.output_parser import OutputForm, OutputParser, Part, join_parts
from edgespec.endpoint.thoughts import (
    THINK,
    Thought,
    ThoughtFormat,
    ends_in_thought,
    thought_format,
)
from edgespec.endpoint.tool_calls import ToolCall, ToolFormat
from tests.endpoint.live_endpoint import ScriptedAgent, ask, events_of, over_script
from tests.kit.letters import LettersTokenizer

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{% set end = '</think>' %}"
OPENS = THINKS + "<think>\n"
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}
CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


def format_of(template: str) -> ThoughtFormat:
    found = thought_format(template)
    assert found is not None
    return found


def read(form: OutputForm, pieces: Iterable[str], tokens: dict[int, MarkToken]) -> list[Any]:
    """Return the parts of an output. A piece that is the text of a mark token is that token."""
    ids = {one.text: token for token, one in tokens.items()}
    parser, found = OutputParser(form, tokens), list[Part]()
    for text in pieces:
        token = ids.get(text)
        is_hidden = token is not None and not tokens[token].is_shown
        found += parser.push(token or 99, Piece("" if is_hidden else text, TokenKind.DECODED))
    found += parser.flush()
    return [
        (one.name, one.arguments) if isinstance(one, ToolCall) else one for one in join_parts(found)
    ]


def cuts_of(text: str) -> Iterable[Sequence[str]]:
    """Yield the text in one piece, letter by letter, and cut at each two places."""
    yield [*text]
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        yield [text[:first], text[first:second], text[second:]]


@pytest.mark.parametrize(
    ("template", "text", "is_thinking", "expected"),
    [
        ("</think>", "<think>\na b\n</think>\n\nc ", False, [Thought("a b"), "c "]),
        ("</think>", "a</think>c", True, [Thought("a"), "c"]),
        ("</think>", "\n<think>a</think>c", True, [Thought("a"), "c"]),
        ("</think>", "<think>\n\n</think>\n\nc", False, ["c"]),
        ("</think>", "<think>a\n", False, [Thought("a")]),
        ("</think>", "a </thi", True, [Thought("a </thi")]),
        ("</think>", "", True, []),
        ("</think>", "c <think>a</think>", False, ["c <think>a</think>"]),
        ("</think>", "<thin", False, ["<thin"]),
        ("</think>", " \n c", False, [" \n c"]),
        ("</think>", "<think>a</think>", False, [Thought("a")]),
        ("</think>", "a <think> b</think>c</think>", True, [Thought("a <think> b"), "c</think>"]),
        ("[THINK]", "[THINK]a[/THINK]c", False, [Thought("a"), "c"]),
        ("<|channel>thought", "<|channel>thought\na\n<channel|>c", False, [Thought("a"), "c"]),
        (
            "Here is my thought process: Here is my response:",
            "Here is my thought process: a\n\nHere is my response: c",
            False,
            [Thought("a"), "c"],
        ),
        (
            "<think></think><response></response>",
            "<think>a</think><response>c</response>\n",
            False,
            [Thought("a"), "c"],
        ),
        (
            "<think></think><response></response>",
            "<think>a</think><response>c</response> d",
            False,
            [Thought("a"), "c</response> d"],
        ),
        ("<think></think><response></response>", "<think>a</think>c", False, [Thought("a"), "c"]),
    ],
)
def test_a_thought_is_read_however_the_text_is_cut(
    template: str, text: str, is_thinking: bool, expected: list[Part]
) -> None:
    form = OutputForm(format_of(template), is_thinking=is_thinking)
    for pieces in cuts_of(text):
        assert read(form, pieces, {}) == expected, pieces


@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize("form", [THINK, format_of("[THINK]"), format_of("<|channel>thought")])
def test_a_mark_that_is_a_token_is_the_only_mark(form: ThoughtFormat, is_shown: bool) -> None:
    tokens = {1: MarkToken(form.begin, is_shown), 2: MarkToken(form.end, is_shown)}
    spelled = f"{form.end[:3]}", form.end[3:]
    pieces = [form.begin, form.label, " a ", *spelled, "b ", form.end, "\n", "c", *spelled]
    expected = [Thought(f"a {form.end}b"), f"c{form.end}"]
    assert read(OutputForm(form), pieces, tokens) == expected


def test_calls_are_read_behind_the_thought_and_not_in_it() -> None:
    form = OutputForm(THINK, ToolFormat.HERMES, ["time"], is_thinking=True)
    for pieces in ([f"a {CALL} b</think>c\n{CALL}"], [*f"a {CALL} b</think>c\n{CALL}"]):
        assert read(form, pieces, {}) == [Thought(f"a {CALL} b"), "c", ("time", "{}")]


@pytest.mark.parametrize(
    ("prompt", "is_thinking"),
    [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("a", False)],
)
def test_a_prompt_may_open_the_thought(prompt: str, is_thinking: bool) -> None:
    assert ends_in_thought(THINK, prompt) == is_thinking
    assert not ends_in_thought(None, prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_has_its_thought_beside_the_content(stream: bool) -> None:
    agent = ScriptedAgent(["a", " b", "\n</th", "ink>", "\nc", " d"])
    async with over_script(agent, LettersTokenizer(OPENS)) as live:
        reply = await ask(live, CHAT, {**ASKED, "stream": stream, "stream_options": USAGE})
    if stream:
        events = [one for one in events_of(reply.body) if isinstance(one, dict)]
        deltas = [one["choices"][0]["delta"] for one in events if one["choices"]]
        thoughts = [one["reasoning_content"] for one in deltas if "reasoning_content" in one]
        assert thoughts == ["a", " b"]
        message = {
            name: "".join(one.get(name) or "" for one in deltas)
            for name in ("content", "reasoning_content")
        }
        usage = events[-1]["usage"]
    else:
        message, usage = reply.json["choices"][0]["message"], reply.json["usage"]
    assert (message["reasoning_content"], message["content"]) == ("a b", "c d")
    assert usage["completion_tokens"] == 6
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}


USAGE = {"include_usage": True}


async def test_a_thought_that_is_cut_off_leaves_no_content() -> None:
    agent = ScriptedAgent(["a", " b"], FinishReason.LENGTH)
    async with over_script(agent, LettersTokenizer(OPENS)) as live:
        chat = (await ask(live, CHAT, ASKED)).json["choices"][0]
        response = (await ask(live, RESPONSES, {"input": "Hi"})).json
    assert chat["finish_reason"] == "length"
    assert (chat["message"]["reasoning_content"], chat["message"]["content"]) == ("a b", "")
    assert response["status"] == "incomplete"
    assert [(one["type"], one["status"]) for one in response["output"]] == [
        ("reasoning", "incomplete")
    ]


async def test_a_response_has_a_reasoning_item_and_a_message() -> None:
    agent = ScriptedAgent(["<think>", "a", " b", "</think>", "\nc", " d"])
    async with over_script(agent, LettersTokenizer(THINKS)) as live:
        whole = (await ask(live, RESPONSES, {"input": "Hi"})).json
        reply = await ask(live, RESPONSES, {"input": "Hi", "stream": True})
    thought, message = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "a b"}]
    assert (thought["type"], message["type"]) == ("reasoning", "message")
    assert message["content"][0]["text"] == "c d"
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    events = [
        one.removeprefix("event: ").partition("\ndata: ")
        for one in reply.body.decode().split("\n\n")
    ]
    kinds = [kind.removeprefix("response.") for kind, _, _ in events if kind]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]


async def test_a_template_without_thoughts_has_none() -> None:
    agent = ScriptedAgent(["<think>a</think>", "c"])
    async with over_script(agent, LettersTokenizer("{{ messages[0].content }}")) as live:
        message = (await ask(live, CHAT, ASKED)).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>a</think>c", "refusal": None}
