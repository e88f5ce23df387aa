"""Tests of the scripted target behind a real endpoint and a real verifier, over gRPC.

Oracles: the instruction in each request; JSON schemas, by a look at the values; the same texts
whether the device drafts or not.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from edgespec.config import AgentConfig, DraftSection, VerifierConfig
from edgespec.device.build import build_agent, connect
from edgespec.device.prober import VerifierMonitor
from edgespec.models import folders
from edgespec.models.tokenizer import TextTokenizer
from tests.clients import scripted_model as model
from tests.clients.table import ASK
from tests.endpoint.live_endpoint import Live, ask, start_endpoint
from tests.kit.live_verifier import serve_toy

SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "string"},
        "description": {"type": "string"},
        "timeout": {"type": "number"},
    },
    "required": ["command", "description"],
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model.write_model(tmp_path_factory.mktemp("models") / model.NAME)


@asynccontextmanager
async def serve(folder: Path, draft: str = "none") -> AsyncIterator[Live]:
    """Serve the scripted target behind an endpoint."""
    vocabulary = folders.vocabulary_fingerprint(folder / "tokenizer.json")
    target = model.ScriptedTarget(vocabulary)
    async with serve_toy(target, config=VerifierConfig(model=str(folder), port=0)) as (where, _):
        watch = VerifierMonitor({where: connect(where)})
        await watch.refresh()
        settings = AgentConfig(
            verifier=where, draft=DraftSection(model=draft), tokenizer=str(folder)
        )
        async with build_agent(settings) as agent:
            async with start_endpoint(agent, TextTokenizer(folder), watch) as live:
                yield live


def tool(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def chat(live: Live, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the message that answers ``messages``."""
    data = {"model": "edgespec", "messages": messages, "max_tokens": 500, **more}
    reply = await ask(live, "/v1/chat/completions", data)
    assert reply.status == 200, reply.body
    message: dict[str, Any] = reply.json["choices"][0]["message"]
    return message


@pytest.mark.parametrize("draft", ["none", "lookup"])
async def test_a_task_is_three_calls_and_a_text(folder: Path, draft: str) -> None:
    tools = [tool("look", {"type": "object", "properties": {}}), tool("bash", SHELL)]
    messages, commands = [user(ASK["task"])], list[str]()
    async with serve(folder, draft) as live:
        while calls := (message := await chat(live, *messages, tools=tools)).get("tool_calls"):
            (call,) = calls
            assert call["function"]["name"] == "bash"
            commands.append(json.loads(call["function"]["arguments"])["command"])
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"{len(commands)}"}
            messages += [message, result]
    assert commands == ["echo one > notes.txt", "echo two >> notes.txt", "cat notes.txt"]
    assert message["content"] == f"{model.RESULT}3"


async def test_a_task_in_messages_and_for_a_shell_that_takes_a_list(folder: Path) -> None:
    schema = {"type": "object", "properties": {"cmd": {"type": "array"}}, "required": ["cmd"]}
    request = {
        "model": "edgespec",
        "max_tokens": 500,
        "messages": [user(ASK["task"]), {"role": "system", "content": "Now."}],
        "tools": [{"name": "exec", "input_schema": schema}],
    }
    async with serve(folder) as live:
        content = (await ask(live, "/v1/messages", request)).json["content"]
    assert content[0]["input"] == {"cmd": ["bash", "-c", "echo one > notes.txt"]}


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        pytest.param(ASK["plain"], model.ANSWER, id="a question"),
        pytest.param(
            'In a.txt replace "x y" by "z".',
            "a.txt\n```\n<<<<<<< SEARCH\nx y\n=======\nz\n>>>>>>> REPLACE\n```\n",
            id="an edit",
        ),
        pytest.param(
            json.dumps({"title": ASK["task"] + ASK["tools"]}), model.ANSWER, id="a quoted task"
        ),
        pytest.param(
            "Respond with `[[ ## why ## ]]`, then `[[ ## answer ## ]]`, and then"
            " `[[ ## completed ## ]]`.",
            f"[[ ## why ## ]]\n{model.ANSWER}\n\n[[ ## answer ## ]]\n{model.ANSWER}\n\n"
            "[[ ## completed ## ]]",
            id="sections",
        ),
    ],
)
async def test_a_text_follows_its_instruction(folder: Path, question: str, answer: str) -> None:
    async with serve(folder) as live:
        assert (await chat(live, user(question)))["content"] == answer


async def test_a_thought_comes_apart(folder: Path) -> None:
    async with serve(folder) as live:
        message = await chat(live, user(ASK["thoughts"]))
    assert (message["reasoning_content"], message["content"]) == (model.THOUGHT, model.ANSWER)


FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


async def test_json_fits_the_schema_also_beside_tools(folder: Path) -> None:
    weather = tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}})
    async with serve(folder) as live:
        alone = await chat(live, user("Which city?"), response_format=FORM)
        call = await chat(live, user(ASK["tools"]), response_format=FORM, tools=[weather])
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "warm"}
        last = await chat(
            live, user(ASK["tools"]), call, result, response_format=FORM, tools=[weather]
        )
    assert json.loads(alone["content"]) == json.loads(last["content"])
    assert json.loads(alone["content"]) == {"city": "Paris", "size": 1}


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param("required", id="any"),
        pytest.param({"type": "function", "function": {"name": "second"}}, id="by name"),
    ],
)
async def test_a_forced_call_has_arguments_that_fit(folder: Path, choice: Any) -> None:
    tools = [tool("second", CITY), tool("first", CITY)]
    async with serve(folder) as live:
        message = await chat(live, user("Hello."), tools=tools, tool_choice=choice)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "second"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "size": 1}


async def test_what_no_candidate_fits_is_written_shortest(folder: Path) -> None:
    async with serve(folder) as live:
        message = await chat(live, user("Hello."), regex='[{]"a": [0-9]{3}[}]')
    assert message["content"] == '{"a": 111}'


async def test_a_plain_text_goes_on_and_is_scored(folder: Path) -> None:
    data = {"model": "edgespec", "prompt": "Q:", "max_tokens": 64, "logprobs": 1, "echo": True}
    async with serve(folder) as live:
        (choice,) = (await ask(live, "/v1/completions", data)).json["choices"]
    assert choice["text"] == f"Q: {model.ANSWER}"
    assert choice["logprobs"]["token_logprobs"][-1] == pytest.approx(0.0, abs=1e-6)
