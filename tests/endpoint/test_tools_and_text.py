"""Tests of tool calls, chat templates, ``/v1/responses``, structured output, and text whose
characters and stop strings straddle tokens.

Oracle: the whole text. However it is cut, the result must be the same, and a stream must equal the
response without streaming. Further oracles are Python's ``json``, the schemas, the reader of tool
calls, and ``transformers``, which renders the same templates with the same messages. The templates
are ours; each uses the features of one family: Llama 3, Qwen, Mistral, Gemma, Phi.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from edgespec.core.protocol.checks import REPLACEMENT
from edgespec.core.protocol.constraint import Constraint
from edgespec.core.protocol.messages import FinishReason
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.prober import VerifierMonitor
from edgespec.endpoint.output_parser import join_parts
from edgespec.endpoint.tool_calls import (
    CallPart,
    ToolCall,
    ToolFormat,
    ToolReader,
    forced_call_grammar,
    tool_format,
)
from edgespec.models.tokenizer import (
    ChatTemplate,
    ChatTemplateError,
    TextTokenizer,
    TokenBytes,
    TokenizerError,
    read_chat_templates,
)
from tests.core.test_constraints import EOS
from tests.endpoint.live_endpoint import (
    Live,
    ScriptedAgent,
    ask,
    events_of,
    over_letters,
    over_script,
    over_toy,
    start_endpoint,
)
from tests.kit.letters import LETTERS, READER, LettersTokenizer, text_of
from tests.kit.scripted_verifier import QUICK, connect_loopback, stream_output
from tests.kit.tiny_checkpoints import write_tokenizer
from tests.present import require

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("weather", "time")
]
HERMES = "{{ tools|tojson }}<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
KOELN = ("weather", {"city": "Köln"})


def calls_in(found: Sequence[CallPart]) -> list[tuple[str, Any]]:
    calls = [one for one in found if isinstance(one, ToolCall)]
    return [(one.name, json.loads(one.arguments)) for one in calls]


def text_in(found: Sequence[CallPart]) -> str:
    return "".join(one for one in found if isinstance(one, str))


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
            "",
            (("weather", {"city": "Köln"}),),
        ),
        (
            "hermes",
            (
                'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": '
                '"Köln"}}\n</tool_call>\n<tool_call>\n{"name": "weather", "arguments": '
                '{"city": "Köln"}}\n</tool_call>\n'
            ),
            "I look.",
            (("weather", {"city": "Köln"}), ("weather", {"city": "Köln"})),
        ),
        (
            "hermes",
            (
                '<tool_call>\n{"name": "weather", "arguments": {"city": '
                '"Köln"}}\n</tool_call> and more '
            ),
            "and more ",
            (("weather", {"city": "Köln"}),),
        ),
        ("hermes", "a < b <tool> c ", "a < b <tool> c ", ()),
        ("hermes", "<tool_call>nonsense</tool_call>!", "<tool_call>nonsense</tool_call>!", ()),
        (
            "hermes",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n',
            "",
            (("weather", {"city": "Köln"}),),
        ),
        ("hermes", '<tool_call>{"name": "we', '<tool_call>{"name": "we', ()),
        ("hermes", '<tool_call>{"name": "time"}</tool_call>', "", (("time", {}),)),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}', None, ()),
        (
            "hermes",
            '<tool_call>{"name": "time", "arguments": {"at": "ü\\ud83d"}}</tool_call>',
            "",
            (("time", {"at": "ü\ud83d"}),),
        ),
        (
            "hermes",
            '<tool_call>{"name": "time", "arguments": "{\\"at\\": \\"ü\\ud83d\\"}"}</tool_call>',
            "",
            (("time", {"at": "ü\ud83d"}),),
        ),
        (
            "hermes",
            '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
            (),
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln"}}]',
            "",
            (("weather", {"city": "Köln"}),),
        ),
        (
            "mistral",
            'I look. [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln"}}]',
            "I look.",
            (("weather", {"city": "Köln"}),),
        ),
        (
            "mistral",
            '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}',
            "",
            (("weather", {"city": "Köln"}),),
        ),
        (
            "mistral",
            '[TOOL_CALLS]time{}[TOOL_CALLS]weather{"city": "Köln"}',
            "",
            (("time", {}), ("weather", {"city": "Köln"})),
        ),
        ("mistral", "[TOOL_CALLS]oh", "[TOOL_CALLS]oh", ()),
        ("mistral", "a [TOOL", "a [TOOL", ()),
        (
            "llama",
            '{"name": "weather", "parameters": {"city": "Köln"}}',
            "",
            (("weather", {"city": "Köln"}),),
        ),
        (
            "llama",
            (
                '<|python_tag|>{"name": "weather", "parameters": {"city": "Köln"}}; '
                '{"name": "weather", "parameters": {"city": "Köln"}}'
            ),
            "",
            (("weather", {"city": "Köln"}), ("weather", {"city": "Köln"})),
        ),
        ("llama", '{"name": "unknown", "parameters": {}}', None, ()),
        ("llama", '{"answer": 42}', None, ()),
        ("llama", 'It is {"name": "weather", "parameters": {"city": "Köln"}}', None, ()),
        ("llama", "  ", None, ()),
    ],
)
@settings(max_examples=12)
@given(data=st.data())
def test_calls_are_found_however_the_text_is_cut(
    form: str, text: str, said: str | None, calls: list[Any], data: st.DataObject
) -> None:
    reader = ToolReader(ToolFormat(form), ["weather", "time"])
    found: list[CallPart] = []
    rest = text
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        found += reader.push(rest[:count])
        rest = rest[count:]
    found += reader.flush()
    assert all(found)
    whole: list[Any] = join_parts(found)
    assert calls_in(whole) == [*calls]
    assert text_in(whole) == (text if said is None else said)
    assert all(one.arguments.encode() for one in whole if isinstance(one, ToolCall))


def test_a_template_says_which_format_it_teaches() -> None:
    assert tool_format(HERMES) is ToolFormat.HERMES
    assert tool_format("{{ '[TOOL_CALLS]' }}") is ToolFormat.MISTRAL
    assert tool_format("{{ '[TOOL_CALLS]' + '[ARGS]' }}") is ToolFormat.MISTRAL_NAMED
    assert tool_format("'ipython' ... \"parameters\"") is ToolFormat.LLAMA
    assert tool_format("{{ messages }}") is None


def chat_tokenizer(folder: Path, template: str, special: Sequence[str] = ()) -> TextTokenizer:
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    if special:
        inner = Tokenizer.from_file(str(path))
        inner.add_special_tokens([AddedToken(one, special=True) for one in special])
        inner.save(str(path))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return TextTokenizer(folder)


def request(stream: bool = False, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"messages": messages, "tools": TOOLS, "stream": stream, **more}


async def test_tool_calls_at_once_and_streamed(tmp_path: Path) -> None:
    text = f"I look.\n{CALL}{CALL}"
    agent = ScriptedAgent([text[at : at + 3] for at in range(0, len(text), 3)])
    async with over_script(agent, chat_tokenizer(tmp_path, HERMES)) as found:
        (choice,) = (await ask(found, CHAT, request())).json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I look."
        called = [one["function"] for one in choice["message"]["tool_calls"]]
        assert [(one["name"], json.loads(one["arguments"])) for one in called] == [KOELN, KOELN]
        events = events_of((await ask(found, CHAT, request(stream=True))).body)
        deltas = [one["choices"][0] for one in events if isinstance(one, dict)]
        assert "".join(one["delta"].get("content", "") for one in deltas) == "I look."
        streamed = [call for one in deltas for call in one["delta"].get("tool_calls", ())]
        assert [one["index"] for one in streamed if "id" in one] == [0, 1]
        for place, function in enumerate(called):
            pieces = [one["function"] for one in streamed if one["index"] == place]
            assert pieces[0]["name"] == function["name"]
            assert "".join(one["arguments"] for one in pieces) == function["arguments"]
        assert deltas[-1]["finish_reason"] == "tool_calls"
        one_only = await ask(found, CHAT, request(parallel_tool_calls=False))
        assert len(one_only.json["choices"][0]["message"]["tool_calls"]) == 1
        plain = await ask(found, CHAT, request(tool_choice="none"))
        assert plain.json["choices"][0]["message"]["content"] == text
    assert "weather" in TextTokenizer(tmp_path).decode(agent.prompts[0])
    assert "weather" not in TextTokenizer(tmp_path).decode(agent.prompts[-1])


SPOKEN = f"I look.\n{CALL}\n{CALL}!"
CUT = CALL[: CALL.index("}\n")]


@pytest.mark.parametrize("sizes", [(1,), (3,), (64,)])
@pytest.mark.parametrize(
    ("stop", "said", "calls"),
    [
        (("}\n?", "k.\nYou"), "I look.!", 2),
        (("}\n!",), "I look.", 2),
        (("}\n\n",), "I look.", 1),
        (("k.\n\n",), "I loo", 0),
        (("\n\n\n",), "I look.", 1),
        (("!?",), "I look.!", 2),
    ],
)
async def test_marks_stand_where_they_were_said_whatever_a_stop_string_holds_back(
    tmp_path: Path, stop: list[str], said: str, calls: int, sizes: Sequence[int]
) -> None:
    tokenizer = chat_tokenizer(tmp_path, HERMES, ["<tool_call>", "</tool_call>"])
    async with over_text(tokenizer, SPOKEN, sizes) as found:
        (choice,) = (await ask(found, CHAT, request(stop=stop))).json["choices"]
        streamed = await ask(found, CHAT, request(stream=True, stop=stop))
    message = choice["message"]
    deltas = [one["choices"][0]["delta"] for one in events_of(streamed.body) if one != "[DONE]"]
    assert message["content"] == said
    assert "".join(one.get("content") or "" for one in deltas) == said
    assert len(message.get("tool_calls") or ()) == calls
    pieces = [call for one in deltas for call in one.get("tool_calls", ())]
    assert sum("id" in one for one in pieces) == calls
    for place, call in enumerate(message.get("tool_calls") or ()):
        arguments = [one["function"]["arguments"] for one in pieces if one["index"] == place]
        assert "".join(arguments) == call["function"]["arguments"] == '{"city": "Köln"}'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ tools }}{{ raise_exception('no') }}", "refuses the messages: no"),
    ],
)
async def test_tools_that_cannot_be(tmp_path: Path, template: str, message: str) -> None:
    async with over_script(ScriptedAgent(), chat_tokenizer(tmp_path, template)) as found:
        reply = await ask(found, CHAT, request())
    assert reply.status == 400
    assert message in reply.error["message"]


async def test_without_a_template_there_are_completions(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    async with over_script(ScriptedAgent(["a"]), TextTokenizer(tmp_path)) as found:
        reply = await ask(found, CHAT, {"messages": [{"role": "user", "content": "a"}]})
        assert (reply.status, reply.error["code"]) == (400, "no_chat_template")
        assert "/v1/completions" in reply.error["message"]
        assert (await ask(found, "/v1/completions", {"prompt": "a"})).status == 200


TEXT = "naïve 漢字 👩‍🚀 Ω and the end"


@asynccontextmanager
async def over_text(
    tokenizer: TextTokenizer, text: str, sizes: Sequence[int]
) -> AsyncIterator[Live]:
    """Start an endpoint over a real agent whose verifier commits this text in parts of these
    sizes."""
    tokens = tokenizer.encode(text)
    transport = connect_loopback(stream_output(tokens, sizes, FinishReason.STOP))
    options = AgentOptions(reconnect=QUICK)
    async with Agent(transport, None, tokenizer.encode, tokenizer.stream, options) as agent:
        async with start_endpoint(agent, tokenizer, VerifierMonitor({})) as found:
            yield found


@pytest.mark.parametrize("sizes", [(1,), (2, 1), (3,), (64,)])
@pytest.mark.parametrize("stop", [None, "字 👩", "🚀 Ω a", "never"])
async def test_characters_and_stop_strings_over_tokens(
    tmp_path: Path, sizes: Sequence[int], stop: str | None
) -> None:
    expected = TEXT if stop in (None, "never") else TEXT[: TEXT.index(str(stop))]
    async with over_text(TextTokenizer(write_tokenizer(tmp_path)), TEXT, sizes) as found:
        asked = {"prompt": "a", "max_tokens": 200, "stop": stop}
        done = (await ask(found, "/v1/completions", asked)).json["choices"][0]
        streamed = await ask(found, "/v1/completions", {**asked, "stream": True})
    parts = [one["choices"][0]["text"] for one in events_of(streamed.body)[:-1]]
    assert done["text"] == "".join(parts) == expected
    assert done["finish_reason"] == "stop"
    assert not any(REPLACEMENT in part for part in parts)


SAMPLED: Any = {"model": "toy", "temperature": 0.9, "extra_body": {"seed": 5}}
TALK: Any = [
    {"role": "user", "content": [{"type": "input_text", "text": "once"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "upon"}]},
    {"role": "user", "content": "a time"},
]


@pytest.mark.parametrize("spoken", ["once upon", TALK])
async def test_a_response_is_the_chats_answer(spoken: Any) -> None:
    async with over_toy() as live, live.client() as client:
        plain = [{"role": "user", "content": "once"}, {"role": "assistant", "content": "upon"}]
        plain.append({"role": "user", "content": "a time"})
        asked: Any = plain if spoken is TALK else [{"role": "user", "content": spoken}]
        messages = [{"role": "system", "content": "be brief"}, *asked]
        chat = await client.chat.completions.create(messages=messages, max_tokens=24, **SAMPLED)
        given: Any = {"input": spoken, "instructions": "be brief", "max_output_tokens": 24}
        done = await client.responses.create(**given, **SAMPLED)
        assert done.output_text == chat.choices[0].message.content
        assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (done.usage.output_tokens, done.usage.input_tokens) == (24, chat.usage.prompt_tokens)
        parts: list[str] = []
        last: Any = None
        async for event in await client.responses.create(stream=True, **given, **SAMPLED):
            last = event
            if event.type == "response.output_text.delta":
                parts.append(event.delta)
        assert "".join(parts) == done.output_text
        assert last.type == "response.incomplete"
        assert last.response.output_text == done.output_text


async def test_a_call_comes_at_once_and_streamed(tmp_path: Path) -> None:
    given: list[Any] = [*TOOLS]
    tools = [{"type": "function", **one["function"]} for one in given]
    turn = [{"role": "user", "content": "Hi"}]
    asked = {"input": turn, "tools": tools, "tool_choice": "auto"}
    agent = ScriptedAgent(list(f"Look: {CALL}"))
    async with over_script(agent, chat_tokenizer(tmp_path, HERMES)) as live:
        whole = (await ask(live, RESPONSES, asked)).json
        streamed = (await ask(live, RESPONSES, {**asked, "stream": True})).body.decode()
        called = {"call_id": whole["output"][1]["call_id"], "output": "rain"}
        again = [*turn, {"type": "reasoning", "summary": []}, *whole["output"]]
        again.append({"type": "function_call_output", **called})
        assert (await ask(live, RESPONSES, {**asked, "input": again})).status == 200
    text, call = whole["output"]
    assert (text["content"][0]["text"], text["status"]) == ("Look:", "completed")
    assert (call["type"], call["name"]) == ("function_call", "weather")
    assert json.loads(call["arguments"]) == {"city": "Köln"}
    lines = [line for line in streamed.splitlines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    said = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    assert said == "Look:"
    (done,) = (e for e in events if e["type"] == "response.function_call_arguments.done")
    assert (done["name"], done["arguments"]) == (call["name"], call["arguments"])
    assert [one["type"] for one in events[-1]["response"]["output"]] == ["message", "function_call"]


async def test_a_stream_that_fails_ends_in_an_error() -> None:
    async def between(place: int) -> None:
        if place:
            raise RuntimeError("broken")

    async with over_script(ScriptedAgent(["a", "b"], between=between)) as live:
        async with live.client() as client:
            events = await client.responses.create(input="a", model="", stream=True)
            *_, last = [event async for event in events]
    assert last.type == "error"
    assert "broken" in last.message


# --- structured output, by OpenAI's own client ----------------------------------------------------


GREETING: Any = [{"role": "user", "content": "hi"}]
ASKED: Any = {"model": "toy", "messages": GREETING, "temperature": 0.9, "seed": 4}
WORD = {"type": "string", "pattern": "^[a-z]{1,5}$"}
CAT = {
    "type": "object",
    "properties": {"name": WORD, "lives": {"enum": [1, 7, 9]}},
    "required": ["name", "lives"],
    "additionalProperties": False,
}


def schema_format(**schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "cat", **schema}}


FORMAT = schema_format(schema=CAT, strict=True)


def tool(name: str, parameters: Any = CAT, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


FEED_AND_WASH: Any = [tool("feed", strict=True), tool("wash", {"type": "object", "properties": {}})]
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
        done = await client.chat.completions.create(
            tools=FEED_AND_WASH, tool_choice=choose, **ASKED
        )
        (choice,) = done.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        assert call.function.name == "feed"
        assert is_cat(call.function.arguments)
        stream = await client.chat.completions.create(
            tools=FEED_AND_WASH, tool_choice=choose, stream=True, **ASKED
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
        streamed = [one.function for delta in deltas for one in delta.tool_calls or ()]
        assert "".join(one.arguments for one in streamed) == call.function.arguments
        some = [tool("feed"), WASH_NOTHING]
        done = await client.chat.completions.create(tools=some, tool_choice="required", **ASKED)
        calls = done.choices[0].message.tool_calls
        assert 1 <= len(calls) <= 8
        assert {one.function.name for one in calls} <= {"feed", "wash"}


# The formats whose arguments are JSON, so that a text drawn by chance comes to its end. Every
# format has its round trips in test_call_formats.py.
JSON_FORMATS = (
    ToolFormat.HERMES,
    ToolFormat.MISTRAL,
    ToolFormat.MISTRAL_NAMED,
    ToolFormat.LLAMA,
    ToolFormat.GRANITE,
    ToolFormat.PHI,
)


@pytest.mark.parametrize("form", JSON_FORMATS)
@pytest.mark.parametrize("one", [True, False])
def test_what_is_forced_is_what_the_reader_reads(form: ToolFormat, one: bool) -> None:
    tools = [tool("feed"), WASH_NOTHING]
    constraint = forced_call_grammar(form, tools, LettersTokenizer(), single=one)
    for seed in range(3):
        text = random_text(READER(constraint), seed)
        reader = ToolReader(form, ["feed", "wash"])
        found = join_parts([*reader.push(text), *reader.flush()])
        calls = [call for call in found if isinstance(call, ToolCall)]
        assert len(calls) == len(found) > 0
        assert len(calls) == 1 or not one
        for call in calls:
            assert is_cat(call.arguments) if call.name == "feed" else call.arguments == "{}"


class Named:
    """``TokenNames`` of added tokens that decoded text shows."""

    def __init__(self, added: dict[str, int]) -> None:
        self.added = added

    def special_id(self, text: str) -> int | None:
        return None


def test_a_mark_that_is_a_token_is_asked_for_by_its_id() -> None:
    names = Named({"<tool_call>": 7, "</tool_call>": 9})
    constraint = forced_call_grammar(ToolFormat.HERMES, [WASH_NOTHING], names, single=True)
    matcher = require(READER(constraint).matcher)
    begun = matcher()
    assert begun.mask()[0] == 1 << 7
    assert begun.consume((LETTERS.index("<"),)) == 0
    assert begun.consume((7,)) == 1


def random_text(constraint: Constraint, seed: int) -> str:
    """Return a text of the grammar, each token drawn from all that may come."""
    import random

    from edgespec.core.protocol.constraint import ConstrainedText, allows

    dice, output = random.Random(seed), list[int]()
    text = ConstrainedText(constraint, (EOS,))
    while output[-1:] != [EOS]:
        text.follow(output)
        mask = require(text.mask())
        output.append(dice.choice([one for one in range(len(LETTERS)) if allows(mask, one)]))
    return text_of(output)


# --- chat templates -------------------------------------------------------------------------------


NOW = datetime(2026, 3, 14, 15, 9)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
FOLDER = Path(__file__).parent / "templates"
FAMILIES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
USER = {"role": "user", "content": "  <b>é</b> & \"ça\" 'x'\n"}
ASSISTANT = {"role": "assistant", "content": "<think>hm</think>\nyes"}
SYSTEM = {"role": "system", "content": "be brief"}
SUNNY = {"name": "weather", "arguments": {"city": "Köln <3", "days": [1, 2.5, None]}}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": SUNNY}],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"rain": true}'}
FORECAST = {
    "name": "weather",
    "description": "Says 'rain' or \"sun\" <or> both",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FORECASTS = [{"type": "function", "function": FORECAST}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER],
    [USER, CALLS, RESULT],
    [USER, CALLS, RESULT, ASSISTANT, USER],
    [USER, USER],
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tools", [None, FORECASTS], ids=["plain", "tools"])
def test_what_transformers_renders(family: str, tools: Any) -> None:
    """If one of the two refuses, both must refuse."""
    oracle: Any = render_jinja_template
    template, rendered = ChatTemplate(FAMILIES[family], TOKENS), 0
    for messages in CONVERSATIONS:
        for prompted in (True, False):
            for variables in ({}, {"enable_thinking": False, "date_string": "today"}):
                try:
                    given = {"chat_template": FAMILIES[family], **TOKENS, **variables}
                    (expected,), *_ = oracle(
                        [messages], tools=tools, add_generation_prompt=prompted, **given
                    )
                except Exception:
                    with pytest.raises(ChatTemplateError):
                        template.render(messages, tools=tools, variables=variables)
                    continue
                found = template.render(
                    messages, tools=tools, add_generation_prompt=prompted, variables=variables
                )
                assert found == expected
                rendered += 1
    assert rendered >= 8


def test_the_time_is_the_callers() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}")
    with patch("edgespec.models.tokenizer.datetime", now=lambda: NOW):
        assert template.render([USER]) == "14 Mar 2026"
    assert template.render([USER]) == datetime.now().strftime("%d %b %Y")


def test_whether_a_template_knows_tools() -> None:
    assert len(FAMILIES) == 5
    known = {name: ChatTemplate(source).knows_tools for name, source in FAMILIES.items()}
    assert known == {"llama": True, "qwen": True, "mistral": True, "gemma": False, "phi": False}


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(a=1) }}",
        "{% set x = namespace() %}{{ x.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ('{0.__class__.__init__}').format(messages) }}",
        "{{ (''|attr('format'))|attr('__self__') }}",
        "{{ strftime_now.__globals__ }}",
        "{{ raise_exception.__closure__[0] }}",
        "{% for a in range(10**9) %}x{% endfor %}",
        "{{ 'a' * messages }}",
        "{% include 'x' %}",
        "{% if %}",
    ],
)
def test_a_hostile_template_fails_and_does_nothing(source: str) -> None:
    """A value that the sandbox withholds is undefined, which renders as nothing or raises an
    error."""
    messages = [dict(USER)]
    try:
        shown_value = ChatTemplate(source).render(messages)
    except ChatTemplateError:
        shown_value = ""
    assert shown_value == ""
    assert messages == [USER]


def test_half_a_surrogate_pair_is_no_prompt(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = {"chat_template": "{{ tools[0].a }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = TextTokenizer(tmp_path).chat_template()
    assert found is not None
    with pytest.raises(TokenizerError, match="half of a surrogate pair"):
        found.render([USER], tools=[{"a": "\ud800"}])
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(ChatTemplateError, match="half of a surrogate pair"):
        template.render([{"role": "user", "content": "\ud800"}])


def test_where_templates_are_found(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "a"},
        {"name": "tool_use", "template": "b{{ tools }}"},
        {"name": "broken"},
    ]
    config, tokens = {"chat_template": named}, {"bos_token": "<s>"}
    found = read_chat_templates(tmp_path, config, tokens)
    assert {name: one.source for name, one in found.items()} == {
        "default": "a",
        "tool_use": "b{{ tools }}",
    }
    assert found["default"].tokens == {"bos_token": "<s>"}
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    found = read_chat_templates(tmp_path, config, tokens)
    assert (found["default"].source, found["rag"].source) == ("file", "rag")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: not readable"):
        read_chat_templates(tmp_path, config, tokens)


def test_the_bytes_of_tokens_join_to_the_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    text = "naïve 漢字 👩‍🚀 Ω"
    tokens = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(one) for one in tokens).decode() == text
    assert tokenizer.token_bytes(1 << 20) == b""


def test_the_bytes_of_byte_fallback_and_sentencepiece() -> None:
    from tokenizers import decoders, models

    words = {"<unk>": 0, "\N{LOWER ONE EIGHTH BLOCK}a": 1, "<0xE2>": 2}
    inner = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()])
    found = TokenBytes(inner)
    assert [found(one) for one in (0, 1, 2, 3)] == [b"<unk>", b" a", b"\xe2", b""]
