"""Structured output over HTTP, by OpenAI's own client. Oracles: Python's ``json``, the schema's own
words, and the reader of tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.core.protocol.constraint import Constraint
from edgespec.endpoint.tool_calls import ToolCall, ToolFormat, ToolReader, forced_call
from tests.core.token_grammars import EOS
from tests.endpoint.live_endpoint import over_letters
from tests.present import present
from tests.shell.letters import LETTERS, READER, text_of

MESSAGES: Any = [{"role": "user", "content": "hi"}]
ASKED: Any = {"model": "toy", "messages": MESSAGES, "temperature": 0.9, "seed": 4}
WORD = {"type": "string", "pattern": "^[a-z]{1,5}$"}
CAT = {
    "type": "object",
    "properties": {"name": WORD, "lives": {"enum": [1, 7, 9]}},
    "required": ["name", "lives"],
    "additionalProperties": False,
}


def formatted(**schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "cat", **schema}}


FORMAT = formatted(schema=CAT, strict=True)


def tool(name: str, parameters: Any = CAT, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS: Any = [tool("feed", strict=True), tool("wash", {"type": "object", "properties": {}})]
WASH_NOTHING = tool("wash", {"type": "object", "additionalProperties": False})


def is_cat(text: str) -> bool:
    value = json.loads(text)
    word, lives = value["name"], value["lives"]
    return list(value) == ["name", "lives"] and word.islower() and lives in (1, 7, 9)


async def test_json_by_schema_at_once_and_streamed() -> None:
    async with over_letters() as found, found.client() as client:
        done = await client.chat.completions.create(response_format=FORMAT, **ASKED)
        (choice,) = done.choices
        assert choice.finish_reason == "stop"
        assert is_cat(choice.message.content)
        stream = await client.chat.completions.create(response_format=FORMAT, stream=True, **ASKED)
        chunks = [chunk async for chunk in stream]
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert said == choice.message.content
        many = await client.chat.completions.create(response_format=FORMAT, n=3, **ASKED)
        texts = [one.message.content for one in many.choices]
        assert texts[0] == said
        assert all(map(is_cat, texts))


async def test_grammars_and_regexes() -> None:
    async with over_letters() as found, found.client() as client:
        for more in ({"regex": "[ab]{3}-[0-9]"}, {"grammar": 'start: /[ab]{3}/ "-" /[0-9]/'}):
            done = await client.chat.completions.create(extra_body=more, **ASKED)
            said = done.choices[0].message.content
            assert said[3] == "-"
            assert set(said[:3]) <= {"a", "b"}
            assert said[4:].isdigit()
        asked: Any = {key: value for key, value in ASKED.items() if key != "messages"}
        done = await client.completions.create(
            prompt="hi", extra_body={"regex": "(yes|no)"}, **asked
        )
        assert done.choices[0].text in ("yes", "no")


async def test_a_call_that_must_be() -> None:
    choose: Any = {"type": "function", "function": {"name": "feed"}}
    async with over_letters() as found, found.client() as client:
        done = await client.chat.completions.create(tools=TOOLS, tool_choice=choose, **ASKED)
        (choice,) = done.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        assert call.function.name == "feed"
        assert is_cat(call.function.arguments)
        stream = await client.chat.completions.create(
            tools=TOOLS, tool_choice=choose, stream=True, **ASKED
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
        (streamed,) = [one for delta in deltas for one in delta.tool_calls or ()]
        assert streamed.function.arguments == call.function.arguments
        some = [tool("feed"), WASH_NOTHING]
        done = await client.chat.completions.create(tools=some, tool_choice="required", **ASKED)
        calls = done.choices[0].message.tool_calls
        assert 1 <= len(calls) <= 8
        assert {one.function.name for one in calls} <= {"feed", "wash"}


@pytest.mark.parametrize(
    ("form", "template"),
    [
        (ToolFormat.HERMES, "<tool_call>"),
        (ToolFormat.MISTRAL, "[TOOL_CALLS]"),
        (ToolFormat.MISTRAL, "[TOOL_CALLS] [ARGS]"),
        (ToolFormat.LLAMA, "python_tag"),
    ],
)
@pytest.mark.parametrize("one", [True, False])
def test_what_is_forced_is_what_the_reader_reads(
    form: ToolFormat, template: str, one: bool
) -> None:
    tools = [tool("feed"), WASH_NOTHING]
    constraint = forced_call(template, tools, lambda text: None, one=one)
    for seed in range(3):
        text = random_text(READER.read(constraint), seed)
        reader = ToolReader(form, ["feed", "wash"])
        found = [*reader.push(text), *reader.flush()]
        calls = [call for call in found if isinstance(call, ToolCall)]
        assert len(calls) == len(found) > 0
        assert len(calls) == 1 or not one
        for call in calls:
            assert is_cat(call.arguments) if call.name == "feed" else call.arguments == "{}"


def test_a_mark_that_is_a_token_is_asked_for_by_its_id() -> None:
    ids = {"<tool_call>": 7, "</tool_call>": 9}
    constraint = forced_call("<tool_call>", [WASH_NOTHING], ids.get, one=True)
    matcher = present(READER.read(constraint).matcher)
    begun = matcher()
    assert begun.mask()[0] == 1 << 7
    assert begun.consume((LETTERS.index("<"),)) == 0
    assert begun.consume((7,)) == 1


def random_text(constraint: Constraint, seed: int) -> str:
    """A text of the grammar, each token drawn from all that may come."""
    import random

    from edgespec.core.protocol.constraint import ConstrainedText, allows

    dice, output = random.Random(seed), list[int]()
    text = ConstrainedText(constraint, (EOS,))
    while output[-1:] != [EOS]:
        text.follow(output)
        mask = present(text.mask())
        output.append(dice.choice([one for one in range(len(LETTERS)) if allows(mask, one)]))
    return text_of(output)
