"""Tests of Ollama's API. Oracles: the chat or the sampling parameters that a request means, the
script of the agent, and the fields that the API documents."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from edgespec.core.device.events import TokenKind
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Piece
from edgespec.endpoint.choices import Choice, Delta
from edgespec.endpoint.ollama import (
    OllamaChatEnvelope,
    convert_ollama_chat,
    convert_ollama_generate,
)
from edgespec.endpoint.output_parser import OutputForm, OutputParser
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
from tests.endpoint.test_tools_and_text import chat_tokenizer
from tests.kit.letters import LettersTokenizer, text_of

CHAT, GENERATE = "/api/chat", "/api/generate"
USER: dict[str, Any] = {"role": "user", "content": "Weather?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
HELLO = {"model": "edgespec", "messages": [USER]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def lines(reply: Reply) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.splitlines()]


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        (
            {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7},
            {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7},
        ),
        ({"repeat_penalty": 1.1, "stop": "a"}, {"repetition_penalty": 1.1, "stop": ("a",)}),
        ({"presence_penalty": 0.5, "stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"mirostat": 0, "tfs_z": 1.0, "typical_p": 1, "num_ctx": 2048, "num_gpu": 1}, {}),
        ({"repeat_last_n": 64}, {}),
    ],
    ids=str,
)
def test_options_become_sampling_parameters(
    options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    conversion = convert_ollama_chat({**HELLO, "options": options})
    request = chat_request(conversion.chat, SamplingParams(), names=conversion.names)
    assert {name: vars_of(request.sampling)[name] for name in sampling} == sampling
    assert (request.ignored_fields, conversion.left_out) == ((), [])


def vars_of(sampling: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "stop")
    values = (
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.repetition_penalty,
        sampling.stop,
    )
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize(("sent", "length"), [(5, 5), (0, -1), (-1, -1), (-2, -1), (None, None)])
def test_a_length_that_is_not_positive_is_none(sent: int | None, length: int | None) -> None:
    chat = convert_ollama_chat({**HELLO, "options": {"num_predict": sent}}).chat
    assert chat["max_tokens"] == length


@pytest.mark.parametrize(
    ("sent", "field", "value"),
    [
        ({}, "stream", True),
        ({"stream": False}, "stream", False),
        ({"format": "json"}, "response_format", {"type": "json_object"}),
        (
            {"format": SCHEMA},
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        ),
        ({"format": ""}, "response_format", None),
        ({"think": True}, "chat_template_kwargs", {"enable_thinking": True}),
        ({"think": False}, "chat_template_kwargs", {"enable_thinking": False}),
        ({"think": "low"}, "reasoning_effort", "low"),
        ({"think": None}, "chat_template_kwargs", None),
        ({"keep_alive": "5m"}, "keep_alive", None),
    ],
    ids=str,
)
def test_a_parameter_becomes_one_of_a_chat(sent: dict[str, Any], field: str, value: Any) -> None:
    for convert in (convert_ollama_chat, convert_ollama_generate):
        assert convert({**HELLO, "prompt": "a", **sent}).chat.get(field) == value


def test_results_of_tools_get_the_ids_of_their_calls() -> None:
    calls: list[dict[str, Any]] = [
        {"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")
    ]
    results = [
        {"role": "tool", "tool_name": name, "content": text}
        for name, text in (("b", "1"), ("a", "2"), ("a", "3"))
    ]
    assistant = {"role": "assistant", "content": "", "tool_calls": calls, "thinking": "Hm."}
    chat = convert_ollama_chat({**HELLO, "messages": [USER, assistant, *results]}).chat
    first, second, third = (one["id"] for one in chat["messages"][1]["tool_calls"])
    assert [one["tool_call_id"] for one in chat["messages"][2:]] == [second, first, third]
    assert len({first, second, third}) == 3
    assert chat["messages"][1]["reasoning_content"] == "Hm."


def test_a_prompt_is_a_chat_unless_it_is_raw() -> None:
    data = {"model": "a", "prompt": "Hi", "system": "Be kind."}
    assert convert_ollama_generate(data).chat["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    raw = convert_ollama_generate({"model": "a", "prompt": "Hi", "raw": True}).chat
    assert (raw["prompt"], "messages" in raw) == ("Hi", False)


@pytest.mark.parametrize(
    ("path", "sent", "message"),
    [
        (CHAT, {"model": None}, "model is missing"),
        (CHAT, {"options": {"mirostat": 2}}, "options.mirostat is 2, but"),
        (CHAT, {"options": {"temperature": "hot"}}, "options.temperature is 'hot', but"),
        (CHAT, {"options": {"num_predict": "a"}}, "options.num_predict is 'a', but"),
        (CHAT, {"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        (
            CHAT,
            {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}},
            "options.repeat_last_n is 64, but",
        ),
        (CHAT, {"options": [1]}, "options is [1], but must be an object"),
        (CHAT, {"format": "xml"}, "format is 'xml', but must be 'json' or a JSON schema"),
        (CHAT, {"think": 3}, "think is 3, but must be true, false or an effort"),
        (
            CHAT,
            {"messages": [{**USER, "images": ["aGk="]}]},
            "messages[0].images[0] is no picture in a known format",
        ),
        (
            CHAT,
            {"messages": [{"role": "system", "content": "a", "images": ["aGk="]}]},
            "messages[0].images[0].type is 'image_url', but pictures stand in messages of users",
        ),
        (CHAT, {"messages": [{"role": "you"}]}, "messages[0].role is 'you', but must be one of"),
        (CHAT, {"stream": "yes"}, "stream is 'yes', but must be true or false"),
        (GENERATE, {"suffix": "b"}, "suffix is given, but"),
        (GENERATE, {"template": "b"}, "template is given, but"),
        (GENERATE, {"context": [1]}, "context is given, but"),
        (GENERATE, {"images": ["aGk="]}, "images[0] is no picture in a known format"),
        (GENERATE, {"images": ["=a"]}, "images[0] is no base64"),
        (GENERATE, {"images": 3}, "images is 3, but must be text, or a list of texts"),
        (GENERATE, {"raw": True, "images": ["aGk="]}, "images are given, but a raw prompt"),
        (GENERATE, {"raw": True, "system": "b"}, "system is given, but"),
        (GENERATE, {"suffix": "b", "system": "b"}, "system is given, but a prompt with a suffix"),
        (GENERATE, {"prompt": 3}, "prompt is 3, but must be text"),
    ],
    ids=str,
)
async def test_an_error_names_what_the_client_sent(
    path: str, sent: dict[str, Any], message: str
) -> None:
    async with over_script(ScriptedAgent(["a"])) as live:
        reply = await ask(live, path, {**HELLO, "prompt": "a", **sent})
    assert reply.status == 400
    assert set(reply.json) == {"error"}
    assert reply.json["error"].startswith(message)


@pytest.mark.parametrize("prompt", ["ab", ""])
async def test_a_suffix_is_a_gap_to_fill(tmp_path: Path, prompt: str) -> None:
    """Oracle: the order of the marks that such models were trained with."""
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    tokenizer = chat_tokenizer(tmp_path, HERMES, marks)
    agent = ScriptedAgent(["x"])
    async with over_script(agent, tokenizer) as live:
        body = {"model": "edgespec", "prompt": prompt, "suffix": "cd", "stream": False}
        reply = await ask(live, GENERATE, body)
    assert reply.json["response"] == "x"
    (tokens,) = agent.prompts
    written = f"{marks[0]}{prompt}{marks[1]}cd{marks[2]}"
    assert tokenizer.decode(tokens, skip_special_tokens=False).replace(" ", "") == written


async def test_a_stream_is_lines_that_end_with_counts_and_times() -> None:
    async with over_script(ScriptedAgent(["a", "b"], FinishReason.LENGTH)) as live:
        first, second, last = lines(await ask(live, CHAT, HELLO))
        parts = lines(await ask(live, GENERATE, {"model": "edgespec", "prompt": "a"}))
    assert [one["message"]["content"] for one in (first, second, last)] == ["a", "b", ""]
    assert [one["done"] for one in (first, second, last)] == [False, False, True]
    assert [one["response"] for one in parts] == ["a", "b", ""]
    for end in (last, parts[-1]):
        assert (end["done_reason"], end["eval_count"]) == ("length", 2)
        assert end["prompt_eval_count"] > 0
        rest = end["prompt_eval_duration"] + end["eval_duration"]
        assert abs(end["total_duration"] - rest) <= 1
        assert datetime.fromisoformat(end["created_at"]).utcoffset() is not None


async def test_a_call_is_an_object_with_its_arguments() -> None:
    agent = ScriptedAgent(["I look.", CALL, "\n", CALL])
    async with over_script(agent, LettersTokenizer(HERMES)) as live:
        data = {**HELLO, "tools": [TOOL]}
        streamed = lines(await ask(live, CHAT, data))
        whole = (await ask(live, CHAT, {**data, "stream": False})).json
    found = [call for one in streamed for call in one["message"].get("tool_calls", ())]
    for calls in (found, whole["message"]["tool_calls"]):
        assert [one["function"] for one in calls] == [
            {"index": place, "name": "weather", "arguments": {"city": "Rome"}} for place in (0, 1)
        ]
        assert len({one["id"] for one in calls}) == 2
    assert whole["message"]["content"] == "I look."
    assert (whole["done"], whole["done_reason"]) == (True, "stop")


async def test_a_thought_stands_beside_the_text() -> None:
    pieces = ["<think>", "Hm", " so.", "</think>", "Hi"]
    thinks = "{{ messages[0].content }}{% set end = '</think>' %}"
    async with over_script(ScriptedAgent(pieces), LettersTokenizer(thinks)) as live:
        streamed = lines(await ask(live, CHAT, HELLO))
        whole = (await ask(live, CHAT, {**HELLO, "stream": False})).json["message"]
        prompt = {"model": "edgespec", "prompt": "a", "stream": False}
        generated = (await ask(live, GENERATE, prompt)).json
        shown = (await ask(live, "/api/show", {"model": "edgespec"})).json
    assert (whole["thinking"], whole["content"]) == ("Hm so.", "Hi")
    assert (generated["thinking"], generated["response"]) == ("Hm so.", "Hi")
    for name in ("thinking", "content"):
        assert "".join(one["message"].get(name, "") for one in streamed) == whole[name]
    assert "thinking" in shown["capabilities"]


@pytest.mark.parametrize("cut", range(1, len(CALL)))
def test_a_call_is_whole_wherever_it_is_cut(cut: int) -> None:
    form = OutputForm(calls=ToolFormat.HERMES, schemas={"weather": {}})
    parser, envelope, choice = OutputParser(form), OllamaChatEnvelope("toy"), Choice.__new__(Choice)
    written = b""
    for text in (CALL[:cut], CALL[cut:], "\n" + CALL):
        parts = tuple(parser.push(None, Piece(text, TokenKind.DECODED)))
        written += envelope.delta(choice, Delta(parts))
    written += envelope.delta(choice, Delta(tuple(parser.flush()))) + envelope.closing(choice)
    found = [
        call for line in written.splitlines() for call in json.loads(line)["message"]["tool_calls"]
    ]
    assert [one["function"] for one in found] == [
        {"index": place, "name": "weather", "arguments": {"city": "Rome"}} for place in (0, 1)
    ]


async def test_an_output_fits_the_format() -> None:
    async with over_letters() as live:
        data = {**HELLO, "format": SCHEMA, "stream": False, "options": {"num_predict": 200}}
        reply = (await ask(live, CHAT, data)).json
    assert isinstance(json.loads(reply["message"]["content"])["city"], str)


async def test_a_raw_prompt_has_no_template_around_it() -> None:
    agent = ScriptedAgent(["a"])
    async with over_script(agent, LettersTokenizer("<{{ messages[0].content }}>")) as live:
        for raw in (True, False):
            data = {"model": "edgespec", "prompt": "hi", "raw": raw, "stream": False}
            assert (await ask(live, GENERATE, data)).json["response"] == "a"
    assert [text_of(one) for one in agent.prompts] == ["hi", "<hi>"]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_without_a_prompt_only_loads_the_model(path: str, stream: bool) -> None:
    agent = ScriptedAgent(["a"])
    async with over_script(agent) as live:
        reply = await ask(live, path, {"model": "edgespec", "stream": stream})
        (line,) = lines(reply) if stream else [reply.json]
    assert (line["done"], line["done_reason"]) == (True, "load")
    assert not agent.prompts


async def test_scores_stand_beside_the_text() -> None:
    """The oracle is OpenAI's form of the same scores."""
    scores = {"logprobs": True, "top_logprobs": 2}
    options = {"num_predict": 4, "temperature": 0}
    async with over_toy() as live:
        data = {**HELLO, **scores, "options": options}
        streamed = lines(await ask(live, CHAT, data))
        whole = (await ask(live, CHAT, {**data, "stream": False})).json
        chat = {**HELLO, **scores, "max_tokens": 4, "temperature": 0}
        expected = (await ask(live, "/v1/chat/completions", chat)).json
    assert whole["logprobs"] == expected["choices"][0]["logprobs"]["content"]
    assert [one for line in streamed for one in line.get("logprobs", ())] == whole["logprobs"]


async def test_models_are_listed_and_described() -> None:
    async with over_toy() as live:
        listed = (await ask(live, "/api/tags")).json["models"]
        loaded = (await ask(live, "/api/ps")).json["models"]
        shown = (await ask(live, "/api/show", {"model": "toy:latest"})).json
        by_old_name = (await ask(live, "/api/show", {"name": "toy"})).json
        chat = await ask(live, CHAT, {**HELLO, "model": "toy:latest", "stream": False})
        version = (await ask(live, "/api/version")).json["version"]
    assert [one["name"] for one in listed] == [one["model"] for one in loaded] == ["toy"]
    assert shown == by_old_name
    assert shown["model_info"]["edgespec.context_length"] == 4096
    assert shown["capabilities"][0] == "completion"
    assert (chat.status, chat.json["model"]) == (200, "toy")
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # VS Code demands it


@pytest.mark.parametrize(
    ("method", "path", "data", "status", "word"),
    [
        ("POST", "/api/pull", {"model": "toy", "stream": False}, 200, "success"),
        ("POST", "/api/pull", {"name": "toy"}, 200, "success"),
        ("POST", "/api/pull", {"model": "llama3"}, 404, "does not pull models"),
        ("POST", "/api/pull", {}, 400, "model is missing"),
        ("POST", "/api/show", {"model": "llama3"}, 404, "does not exist here"),
        ("POST", "/api/embed", {"model": "toy", "input": "a"}, 501, "no embeddings"),
        ("POST", "/api/embeddings", {"model": "toy"}, 501, "no embeddings"),
        ("POST", "/api/create", {"model": "a"}, 501, "belong to the verifiers"),
        ("DELETE", "/api/delete", {"model": "a"}, 501, "belong to the verifiers"),
        ("POST", "/api/nothing", {}, 404, "there is no POST /api/nothing here"),
        ("GET", "/api/chat", None, 405, "does not take GET"),
        ("POST", "/api/chat", {**HELLO, "model": "llama3"}, 404, "does not exist here"),
    ],
    ids=str,
)
async def test_other_paths_answer_in_their_own_shape(
    method: str, path: str, data: Any, status: int, word: str
) -> None:
    async with over_toy() as live:
        reply = await ask(live, path, data, method=method)
    assert reply.status == status
    assert word in (reply.json["error"] if status != 200 else reply.json["status"])
