"""Tests of tools, history and items as clients send them. Oracles: transformers, which renders the
same template with messages in the form that its author intended; the error that a template raises
for unchanged messages; and OpenAI's own client, which parses the responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.endpoint.chat_prompt import write_chat_prompt
from edgespec.endpoint.requests import chat_request
from edgespec.models.tokenizer import ChatTemplate, ChatTemplateError, TextTokenizer
from tests.endpoint.live_endpoint import (
    ScriptedAgent,
    ask,
    events_of,
    over_letters,
    over_script,
    over_toy,
)
from tests.endpoint.test_tools_and_text import FAMILIES, HERMES, chat_tokenizer
from tests.kit.letters import READER
from tests.kit.tiny_checkpoints import write_tokenizer

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
IGNORED = "x-edgespec-ignored"
USER = {"role": "user", "content": "Weather?"}
TEXT = '{"city":  "Köln"}'
LOOP = "{% for m in messages %}{% if m.role == 'assistant' and CONDITION %}"
REST = "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
CALLS = "{% for c in m.tool_calls %}[CALL]{{ ARGUMENTS }}{% endfor %}"
FUNCTION = "c.function.name ~ ' ' ~ "


def template(condition: str, arguments: str) -> str:
    return (LOOP + CALLS + REST).replace("CONDITION", condition).replace("ARGUMENTS", arguments)


TEMPLATES: dict[str, tuple[str, Any, Any]] = {
    "object": (template("m.tool_calls", FUNCTION + "(c.function.arguments | tojson)"), {}, ""),
    "text": (template("m.tool_calls", "c.function.name + ' ' + c.function.arguments"), "", ""),
    "none": (template("m.content is none", "c.function.name + c.function.arguments"), "", None),
    "items": (
        template(
            "m.tool_calls",
            FUNCTION + "(c.function.arguments.items() | list | length)"
            " ~ c.function.arguments.probe_key ~ c.function.arguments.city",
        ),
        {},
        "",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", [None, ""])
def test_calls_have_the_form_that_a_template_reads(name: str, content: str | None) -> None:
    source, form, none = TEMPLATES[name]
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": TEXT}}
    asked = [USER, {"role": "assistant", "content": content, "tool_calls": [call]}]
    asked.append({"role": "tool", "tool_call_id": "a", "content": "rain"})
    read = chat_request({"messages": asked}, SamplingParams())
    found = ChatTemplate(source).render(read.messages)
    arguments = json.loads(TEXT) if form == {} else TEXT
    meant = json.loads(json.dumps(asked))
    meant[1]["content"] = none
    meant[1]["tool_calls"][0]["function"]["arguments"] = arguments
    if none is None:  # transformers drops None, but its older versions do not
        assert found == f"[user]Weather?[CALL]weather{TEXT}[tool]rain"
    else:
        oracle: Any = render_jinja_template
        (expected,), *_ = oracle([meant], chat_template=source, add_generation_prompt=True)
        assert found == expected


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def parse_turns(text: str) -> list[dict[str, Any]]:
    """Return messages from ``role:content`` parts with spaces between them."""
    pairs = [one.split(":") for one in text.split()]
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        (PLAIN, "user:a user:b system:c", "user:a user:b system:c"),
        (ONE_SYSTEM, "system:a system:b user:c", "system:a\n\nb user:c"),
        (ONE_SYSTEM, "user:a assistant:b system:c user:d", "system:c user:a assistant:b user:d"),
        (FAMILIES["gemma"], "user:a user:b", "user:a\n\nb"),
        (
            FAMILIES["gemma"],
            "system:a user:b assistant:c assistant:d user:e",
            "user:a\n\nb assistant:c\n\nd user:e",
        ),
        (FAMILIES["gemma"], "system:a", "user:a"),
    ],
)
def test_messages_that_a_template_refuses_are_joined(
    source: str, given: str, expected: str
) -> None:
    messages = parse_turns(given)
    pairs = [one.split(":", 1) for one in expected.split(" ")]
    joined = [{"role": role, "content": content} for role, content in pairs]
    oracle: Any = render_jinja_template
    if joined != messages:
        with pytest.raises(Exception, match=r"must|role"):
            oracle([messages], chat_template=source, bos_token="")
    (text,), *_ = oracle([joined], chat_template=source, add_generation_prompt=True, bos_token="")
    assert write_chat_prompt(ChatTemplate(source, {"bos_token": ""}), messages, ()).text == text


def test_what_is_refused_in_every_form_is_refused_in_the_first_words() -> None:
    refusing = ChatTemplate("{{ raise_exception('no ' ~ messages | length) }}")
    with pytest.raises(ChatTemplateError, match="no 3"):
        write_chat_prompt(refusing, parse_turns("system:a user:b user:c"), ())


WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOL: dict[str, Any] = {"type": "function", "function": WEATHER}
STRICT_TOOLS = {"type": "function", "function": {**WEATHER, "strict": True}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
DROPS_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("source", [PLAIN, ONE_SYSTEM, FAMILIES["gemma"], DROPS_SYSTEM])
def test_a_template_without_tools_gets_a_text_about_them(source: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": TEXT}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "hail"},
    ]
    text = write_chat_prompt(ChatTemplate(source, {"bos_token": ""}), messages, [TOOL]).text
    assert text.count(json.dumps(WEATHER, separators=(",", ":"))) == 1
    assert (
        'I look.\n<tool_call>\n{"name":"weather","arguments":{"city":"Köln"}}\n</tool_call>' in text
    )
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nhail\n</tool_response>"
    assert text.count(results) == 1
    assert text.count("Be brief.") == 1


async def test_tools_at_a_template_without_them_are_called(tmp_path: Path) -> None:
    agent = ScriptedAgent(["I look.\n", CALL])
    asked = {"messages": [USER], "tools": [TOOL]}
    async with over_script(agent, chat_tokenizer(tmp_path, PLAIN)) as live:
        (choice,) = (await ask(live, CHAT, asked)).json["choices"]
        forced = await ask(live, CHAT, {**asked, "tool_choice": "required"})
        none = await ask(live, CHAT, {**asked, "tool_choice": "none"})
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert (forced.status, none.status) == (200, 200)
    prompts = [TextTokenizer(tmp_path).decode(one) for one in agent.prompts]
    assert ["weather" in one for one in prompts] == [True, True, False]
    assert agent.samplings[1].constraint is not None


async def test_strict_tools_without_a_grammar_library_are_named() -> None:
    asked = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [STRICT_TOOLS],
        "max_tokens": 8,
    }
    for reads in (READER, None):
        async with over_letters(reads, None) as live:
            reply = await ask(live, CHAT, asked)
            stream = await ask(live, CHAT, {**asked, "stream": True})
        for one in (reply, stream):
            assert one.status == 200
            assert one.headers.get(IGNORED) == (None if reads else "tools.strict")


async def test_a_promise_too_large_to_keep_is_named() -> None:
    large = {
        **WEATHER,
        "strict": True,
        "description": "x",
        "parameters": {
            "type": "object",
            "properties": {
                f"p{n}": {"type": "string", "description": "y" * 300} for n in range(120)
            },
        },
    }
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with over_letters() as live:
        reply = await ask(live, CHAT, {**asked, "tools": [{"type": "function", "function": large}]})
    assert (reply.status, reply.headers.get(IGNORED)) == (200, "tools.strict")


PATCH = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
}
CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "strict": False, **WEATHER},
    {"type": "web_search"},
    PATCH,
    {
        "type": "namespace",
        "name": "mcp__box",
        "tools": [
            {"type": "function", "name": "open", "parameters": {"type": "object"}},
            {"type": "custom", "name": "write"},
        ],
    },
    {"type": "image_generation", "output_format": "png"},
]
SAID = [
    '<tool_call>{"name": "mcp__box__open", "arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"name": "open", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin\\n"}}</tool_call>',
    '<tool_call>{"name": "mcp__box__write", "arguments": {"input": "x"}}</tool_call>',
]


async def test_a_coding_agents_tools_come_back_as_it_calls_them(tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "d"}],
            },
            {"role": "user", "content": "go"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "k"}],
            },
            {
                "type": "function_call",
                "call_id": "1",
                "name": "open",
                "namespace": "mcp__box",
                "arguments": "{}",
            },
            {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "p"},
            {
                "type": "function_call_output",
                "call_id": "1",
                "output": [{"type": "input_text", "text": "o"}],
            },
            {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
            {"type": "web_search_call", "id": "w", "status": "completed"},
        ],
        "instructions": "Be brief.",
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "store": False,
        "max_output_tokens": 50,
    }
    source = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}<tool_call>{{ messages | tojson }}"
    )
    agent = ScriptedAgent(["Now.", *SAID])
    async with over_script(agent, chat_tokenizer(tmp_path, source)) as live:
        reply = await ask(live, RESPONSES, asked)
        streamed = await ask(live, RESPONSES, {**asked, "stream": True})
        async with live.client() as client:
            given: Any = {"model": "", "input": "go", "tools": CODEX_TOOLS, "stream": True}
            events_of_client: Any = await client.responses.create(**given)
            sdk = [one async for one in events_of_client]
    whole = reply.json
    left_out = "tools.web_search, tools.image_generation, input.web_search_call"
    assert reply.headers[IGNORED] == streamed.headers[IGNORED] == left_out
    calls = [
        {k: v for k, v in one.items() if k not in ("id", "call_id", "status")}
        for one in whole["output"][1:]
    ]
    assert calls == [
        {"type": "function_call", "name": "open", "namespace": "mcp__box", "arguments": '{"a": 1}'},
        {"type": "function_call", "name": "open", "namespace": "mcp__box", "arguments": "{}"},
        {"type": "custom_tool_call", "name": "patch", "input": "*** Begin\n"},
        {"type": "custom_tool_call", "name": "write", "namespace": "mcp__box", "input": "x"},
    ]
    returned = {
        name: whole[name]
        for name in (
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "instructions",
            "max_output_tokens",
            "store",
        )
    }
    assert returned == {name: asked[name] for name in returned}
    events = [
        json.loads(line[6:])
        for line in streamed.body.decode().splitlines()
        if line.startswith("data: ")
    ]
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    drop = ("id", "call_id")
    assert [{k: v for k, v in one.items() if k not in drop} for one in done] == [
        {k: v for k, v in one.items() if k not in drop} for one in whole["output"]
    ]
    inputs = [e["input"] for e in events if e["type"] == "response.custom_tool_call_input.done"]
    assert inputs == ["*** Begin\n", "x"]
    assert [one.type for one in sdk].count("response.custom_tool_call_input.done") == 2
    prompt = TextTokenizer(tmp_path).decode(agent.prompts[0])
    assert '"mcp__box__open"' in prompt
    assert "start: /x/" in prompt
    assert '"arguments": {"input": "p"}' in prompt
    assert "web_search" not in prompt


async def test_custom_tools_in_a_chat(tmp_path: Path) -> None:
    custom = {"type": "custom", "custom": {"name": "patch"}}
    earlier = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": "p"}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]
    asked = {"messages": messages, "tools": [custom]}
    async with over_script(ScriptedAgent([SAID[2]]), chat_tokenizer(tmp_path, HERMES)) as live:
        (choice,) = (await ask(live, CHAT, asked)).json["choices"]
        named = {"type": "custom", "custom": {"name": "patch"}}
        assert (await ask(live, CHAT, {**asked, "tool_choice": named})).status == 200
        events = events_of((await ask(live, CHAT, {**asked, "stream": True})).body)
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "*** Begin\n"})
    deltas = [one["choices"][0]["delta"] for one in events if one != "[DONE]"]
    (streamed,) = [call for one in deltas for call in one.get("tool_calls", ())]
    assert streamed["custom"] == call["custom"]


@pytest.mark.parametrize("name", ["server/tool", "mcp:a.b-c", "look up", "名前", "x" * 256])
async def test_tools_may_have_the_names_that_clients_give(tmp_path: Path, name: str) -> None:
    said = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False)
    tool = {"type": "function", "function": {"name": name}}
    agent = ScriptedAgent([f"<tool_call>{said}</tool_call>"])
    async with over_script(agent, chat_tokenizer(tmp_path, HERMES)) as live:
        (choice,) = (await ask(live, CHAT, {"messages": [USER], "tools": [tool]})).json["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == name


async def test_a_call_wins_over_a_schema_and_a_schema_leaves_calls() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [STRICT_TOOLS],
        "max_tokens": 400,
        "response_format": form,
        "temperature": 1.0,
    }
    kinds = set()
    async with over_letters() as live:
        forced = (await ask(live, CHAT, {**asked, "tool_choice": "required"})).json["choices"][0]
        for seed in range(12):
            (choice,) = (await ask(live, CHAT, {**asked, "seed": seed})).json["choices"]
            message = choice["message"]
            if choice["finish_reason"] == "length":
                continue
            kinds.add("call" if message.get("tool_calls") else json.loads(message["content"])["a"])
    assert forced["message"].get("tool_calls") or forced["message"]["content"].startswith(
        "<tool_call>"
    )
    assert kinds <= {"call", 1}
    assert kinds


async def test_a_message_that_is_cut_is_incomplete() -> None:
    agent = ScriptedAgent(["cut of"], FinishReason.LENGTH)
    async with over_script(agent) as live:
        whole = (await ask(live, RESPONSES, {"input": "a"})).json
        streamed = await ask(live, RESPONSES, {"input": "a", "stream": True})
    (item,) = whole["output"]
    assert (whole["status"], item["status"]) == ("incomplete", "incomplete")
    last = [
        json.loads(line[6:])
        for line in streamed.body.decode().splitlines()
        if line.startswith("data: ")
    ][-1]["response"]
    assert [one["status"] for one in (last, *last["output"])] == ["incomplete", "incomplete"]


async def test_a_text_about_tools_that_fills_the_context_is_left_out() -> None:
    many = [
        {"type": "function", "function": {"name": f"f{n}", "description": "x" * 200}}
        for n in range(40)
    ]
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": many, "max_tokens": 4}
    async with over_toy() as live:
        free = await ask(live, CHAT, asked)
        forced = await ask(live, CHAT, {**asked, "tool_choice": "required"})
    assert (free.status, free.headers[IGNORED]) == (200, "tools")
    assert (forced.status, forced.error["code"]) == (400, "context_length_exceeded")


def test_the_folder_of_a_model_decides_which_marks_are_tokens(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write_tokenizer(tmp_path))
    assert tokenizer.added["<|end|>"] == tokenizer.special_id("<|end|>")
    assert "<tool_call>" not in tokenizer.added
