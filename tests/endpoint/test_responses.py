"""``/v1/responses`` with OpenAI's own client, unchanged. Oracle: the chat's answer to the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.endpoint.live_endpoint import ScriptedAgent, ask, over_script, over_toy
from tests.endpoint.test_tools_and_text import CALL, HERMES, TOOLS, chat_tokenizer

PATH = "/v1/responses"
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
        whole = (await ask(live, PATH, asked)).json
        streamed = (await ask(live, PATH, {**asked, "stream": True})).body.decode()
        called = {"call_id": whole["output"][1]["call_id"], "output": "rain"}
        again = [*turn, {"type": "reasoning", "summary": []}, *whole["output"]]
        again.append({"type": "function_call_output", **called})
        assert (await ask(live, PATH, {**asked, "input": again})).status == 200
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
            told = await client.responses.create(input="a", model="", stream=True)
            *_, last = [event async for event in told]
    assert last.type == "error"
    assert "broken" in last.message
