"""Tests of values that clients send by habit. Oracles: the scalar specification over the toy model,
transformers' own chat templates, and the counts at ``/metrics``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from edgespec.config import EndpointSection
from edgespec.core.protocol.sampling import MAX_TOKENS, SamplingParams
from edgespec.endpoint.request_json import ApiError
from edgespec.endpoint.requests import chat_request, completion_request
from edgespec.models.folders import BUNDLED_FOLDER
from edgespec.models.tokenizer import ChatTemplate, ChatTemplateError, TextTokenizer
from edgespec.models.toy import TOY_CONTEXT_LENGTH, ToyTokenizer
from tests.endpoint.live_endpoint import (
    ScriptedAgent,
    ask,
    events_of,
    over_letters,
    over_script,
    over_toy,
)
from tests.kit.live_verifier import toy_text, wait_until

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
TEXT = ToyTokenizer()
USER = {"role": "user", "content": "Hi"}


def toy_answer(prompt: str, **sampling: Any) -> str:
    return TEXT.decode(toy_text(TEXT.encode(prompt), SamplingParams(**sampling)))


def read(data: dict[str, Any]) -> Any:
    return completion_request({"prompt": "a", **data}, SamplingParams())


# --- outcomes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_was_read_to_its_end_counts_as_200(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete answer is no evidence of trouble with the verifiers, so they are not probed
    again."""
    async with over_toy() as live:
        asked_anew: list[None] = []
        monkeypatch.setattr(live.watch, "refresh_soon", lambda: asked_anew.append(None))
        for _ in range(3):
            reply = await ask(live, TEXTS, {"prompt": "abc", "max_tokens": 8, "stream": stream})
            assert reply.status == 200
        counts = live.endpoint.counts.requests
        await wait_until(lambda: counts.total() == 3)
        metrics = (await ask(live, "/metrics")).body.decode()
        assert f'edgespec_endpoint_requests_total{{outcome="200",path="{TEXTS}"}} 3.0' in metrics
        assert 'outcome="gone"' not in metrics
        assert not asked_anew


async def test_every_response_names_its_request() -> None:
    async with over_script(ScriptedAgent(["a"])) as live:
        ids = [
            (await ask(live, TEXTS, data)).headers["x-request-id"]
            for data in ({"prompt": "a"}, {"prompt": "a", "stream": True}, {"prompt": 3}, None)
        ]
        assert len(set(ids)) == 4
        assert all(one.startswith("req_") for one in ids)
        for given, kept in (("trace-7:a", True), ("a b", False), ("x" * 129, False)):
            reply = await ask(live, TEXTS, {"prompt": "a"}, X_Request_Id=given)
            assert (reply.headers["x-request-id"] == given) is kept
        async with live.client() as client:
            answer = await client.completions.create(model="edgespec", prompt="a")
            assert str(answer._request_id).startswith("req_")


async def test_places_are_found_without_v1_and_named_where_there_are_none() -> None:
    async with over_script(ScriptedAgent(["a"])) as live:
        for base in ("", "/v1"):
            assert (await ask(live, f"{base}/completions", {"prompt": "a"})).status == 200
            assert (await ask(live, f"{base}/responses", {"input": "a"})).status == 200
            chat = await ask(live, f"{base}/chat/completions", {"messages": [USER]})
            assert chat.json["choices"][0]["message"]["content"] == "a"
            assert (await ask(live, f"{base}/tokenize", {"prompt": "a"})).json["count"] == 1
            for path in ("models", "models/"):
                assert (await ask(live, f"{base}/{path}")).json["object"] == "list"
        nowhere = (await ask(live, "/v1/letters", {})).error["message"]
        for path in (CHAT, TEXTS, "/v1/responses", "/v1/models"):
            assert path in nowhere
        assert "does not take GET" in (await ask(live, TEXTS)).error["message"]


# --- lengths, stops and numbers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({"max_tokens": -1}, MAX_TOKENS),
        ({"n_predict": -1}, MAX_TOKENS),
        ({"max_tokens": 100_000_000}, MAX_TOKENS),
        ({"max_tokens": (1 << 53) - 1}, MAX_TOKENS),
        ({"max_tokens": 7.0}, 7),
        ({"max_tokens": None}, None),
    ],
    ids=str,
)
def test_a_length_beyond_all_room_asks_for_the_room(
    given: dict[str, Any], length: int | None
) -> None:
    assert read(given).max_tokens == length
    if "n_predict" not in given:
        chat = {"messages": [USER], "max_completion_tokens": given["max_tokens"]}
        assert chat_request(chat, SamplingParams()).max_tokens == length


async def test_a_text_without_limit_ends_where_the_context_does() -> None:
    agent = ScriptedAgent(["a"])
    async with over_toy(draft="none") as live:
        live.endpoint.generator = agent  # type: ignore[assignment] # says what it was asked for
        await ask(live, TEXTS, {"prompt": "abc", "max_tokens": -1})
        await ask(live, CHAT, {"messages": [USER], "max_tokens": -1})
    assert [one.max_tokens for one in agent.samplings] == [
        TOY_CONTEXT_LENGTH - 3,
        TOY_CONTEXT_LENGTH - len("Hi "),
    ]


def test_stop_texts_seeds_and_windows_as_others_send_them() -> None:
    assert read({"stop": ["", "a", ""]}).sampling.stop == ("a",)
    assert read({"stop": ""}).sampling.stop == ()
    many = [f"stop{n}" for n in range(200)]
    assert read({"stop": many}).sampling.stop == tuple(many)
    assert read({"seed": -1}).sampling.seed != read({"seed": -1}).sampling.seed
    neutral = {"repeat_last_n": 64, "repeat_penalty": 1.0, "stream_options": {}}
    assert read(neutral).ignored_fields == ()
    assert read({"repeat_last_n": -1, "repeat_penalty": 1.1}).sampling.repetition_penalty == 1.1


async def test_many_texts_of_one_request_take_turns() -> None:
    prompts = [f"prompt {n}" for n in range(20)]
    async with over_toy() as live:
        assert live.endpoint.admission.capacity < len(prompts)
        data = {"prompt": prompts, "n": 2, "max_tokens": 12, "seed": 5}
        reply = await ask(live, TEXTS, data)
        choices = reply.json["choices"]
        assert [one["index"] for one in choices] == list(range(40))
        for place, prompt in enumerate(prompts):
            assert choices[2 * place]["text"] == toy_answer(prompt, max_tokens=12, seed=5)
        streamed = events_of((await ask(live, TEXTS, {**data, "stream": True})).body)
        texts = [""] * 40
        for event in streamed[:-1]:
            for one in event["choices"]:
                texts[one["index"]] += one["text"]
        assert texts == [one["text"] for one in choices]
        assert (live.endpoint.admission.running, live.endpoint.admission.waiting) == (0, 0)


async def test_a_request_with_many_texts_leaves_turns_to_others() -> None:
    """With one turn at a time, a later request must be served before the last of the many
    generations."""
    gates = [asyncio.Event() for _ in range(4)]
    begun: list[int] = []

    async def between(place: int) -> None:
        begun.append(len(begun))
        await gates[begun[-1]].wait()

    agent = ScriptedAgent(["a"], between=between)
    async with over_script(agent, settings=EndpointSection(max_concurrent=1)) as live:
        many = asyncio.create_task(ask(live, TEXTS, {"prompt": ["a", "a", "a"]}))
        await wait_until(lambda: len(begun) == 1)
        one = asyncio.create_task(ask(live, TEXTS, {"prompt": "bb"}))
        # The second of the many generations waits already.
        await wait_until(lambda: live.endpoint.admission.waiting == 2)
        for gate in gates:
            gate.set()
        assert (await one).status == (await many).status == 200
    assert [len(prompt) for prompt in agent.prompts] == [1, 1, 2, 1]


async def test_a_hundred_requests_at_once_are_all_served() -> None:
    async with over_script(
        ScriptedAgent(["a"]), settings=EndpointSection(max_concurrent=1)
    ) as live:
        replies = await asyncio.gather(*(ask(live, TEXTS, {"prompt": "a"}) for _ in range(100)))
        assert {one.status for one in replies} == {200}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"queue_within_s": 0.1}, "no slot became free within 0.1 s"),
        ({"max_queue_tokens": 5}, "prompts of 3 tokens wait, and 3 more are above the limit of 5"),
    ],
    ids=["time", "memory"],
)
async def test_a_queue_is_bounded_by_memory_and_by_time(settings: dict[str, Any], why: str) -> None:
    gate, begun = asyncio.Event(), asyncio.Event()

    async def between(place: int) -> None:
        begun.set()
        await gate.wait()

    agent, bounds = ScriptedAgent(["a"], between=between), {"max_concurrent": 1, **settings}
    async with over_script(agent, settings=EndpointSection(**bounds)) as live:
        first = asyncio.create_task(ask(live, TEXTS, {"prompt": "abc"}))
        await begun.wait()
        second = asyncio.create_task(ask(live, TEXTS, {"prompt": "abc"}))
        if "max_queue_tokens" in settings:
            await wait_until(lambda: live.endpoint.admission.waiting == 1)
            refused = await ask(live, TEXTS, {"prompt": "abc"})
        else:
            refused = await second
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert why in refused.error["message"]
        gate.set()
        assert (await first).status == 200
        await second
        assert (live.endpoint.admission.running, live.endpoint.admission.waiting) == (0, 0)


# --- the least length -----------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["toy", "none"])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
async def test_a_text_has_its_least_length_whatever_is_drafted(
    draft: str, temperature: float
) -> None:
    law: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 60}
    # Half of all letters end the text, so that it is short without a least length.
    stops = list(range(0, 64, 2))
    short = toy_text(TEXT.encode("abc"), SamplingParams(**law, stop_token_ids=tuple(stops)))
    assert len(short) < 20
    async with over_toy(draft=draft) as live:
        data = {"prompt": "abc", **law, "stop_token_ids": stops, "min_tokens": 40}
        reply = await ask(live, TEXTS, data)
        expected = toy_text(
            TEXT.encode("abc"), SamplingParams(**law, min_tokens=40, stop_token_ids=tuple(stops))
        )
        assert len(expected) > 40
        assert reply.json["choices"][0]["text"] == TEXT.decode(expected)
        assert reply.json["usage"]["completion_tokens"] == len(expected)
        assert "x-edgespec-ignored" not in reply.headers


async def test_a_stop_text_within_the_least_length_stops_nothing() -> None:
    free = toy_answer("abc", max_tokens=40, ignore_eos=True)
    early, later = free[3:5], free[30:32]
    assert free.count(early) == 1, "else this shows nothing"
    async with over_toy() as live:
        usual = {"prompt": "abc", "ignore_eos": True, "max_tokens": 40, "stop": [early, later]}
        stopped = await ask(live, TEXTS, usual)
        assert stopped.json["choices"][0]["text"] == free[:3]
        # A stop string that begins within the least length and ends behind it does stop the text.
        for least, shown_value in ((4, 3), (5, free.index(later)), (6, free.index(later))):
            reply = await ask(live, TEXTS, {**usual, "min_tokens": least})
            assert reply.json["choices"][0]["text"] == free[:shown_value], least


async def test_a_least_length_beyond_the_usual_one_is_kept() -> None:
    agent = ScriptedAgent(["a"])
    async with over_script(agent) as live:
        await ask(live, TEXTS, {"prompt": "a", "min_tokens": 300})
    assert [(one.min_tokens, one.max_tokens) for one in agent.samplings] == [(300, 300)]


async def test_a_schema_beside_json_object_is_kept() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"enum": [7]}},
        "required": ["a"],
    }
    schema["additionalProperties"] = False
    async with over_letters() as live:
        form = {"type": "json_object", "schema": schema}
        reply = await ask(live, CHAT, {"messages": [USER], "response_format": form})
        assert json.loads(reply.json["choices"][0]["message"]["content"]) == {"a": 7}


# --- the last message -----------------------------------------------------------------------------

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRIPPED = TURNS.replace("m.content", "m.content | trim")
ONLY_USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("source", [TURNS, STRIPPED], ids=["as it is", "stripped"])
@pytest.mark.parametrize("begun", ["The answer is", "The answer is ", "  Hi", "a\nb", "Hi"])
def test_a_message_is_continued_as_by_transformers(source: str, begun: str) -> None:
    oracle = PreTrainedTokenizerFast.from_pretrained(BUNDLED_FOLDER / "draft")
    messages = [USER, {"role": "assistant", "content": "Hi"}, USER]
    messages.append({"role": "assistant", "content": begun})
    wanted = oracle.apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True
    )
    found = ChatTemplate(source).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert found == wanted


def test_a_message_that_the_template_does_not_show_cannot_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "a"}]
    with pytest.raises(ChatTemplateError, match="does not show its content"):
        ChatTemplate(ONLY_USERS).render(messages, continue_final_message=True)


class TurnsTokenizer(ToyTokenizer):
    def __init__(self) -> None:
        self.read: list[str] = []

    def chat_template(self, *, tools: bool = False) -> ChatTemplate:
        return ChatTemplate(TURNS)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.read.append(text)
        return super().encode(text)


BEGUN = {"role": "assistant", "content": "It is"}
CALLED = {"role": "assistant", "content": "It is", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("messages", "said", "end"),
    [
        ([USER, BEGUN], {}, "<|assistant|>It is"),
        ([USER, BEGUN], {"continue_final_message": True}, "<|assistant|>It is"),
        (
            [USER, BEGUN],
            {"continue_final_message": True, "add_generation_prompt": False},
            "<|assistant|>It is",
        ),
        ([USER, BEGUN], {"add_generation_prompt": True}, "It is<|end|>\n<|assistant|>"),
        ([USER, BEGUN], {"continue_final_message": False}, "It is<|end|>\n<|assistant|>"),
        ([USER, BEGUN], {"add_generation_prompt": False}, "It is<|end|>\n"),
        ([USER, CALLED], {}, "}\n</tool_call><|end|>\n<|assistant|>"),
        ([USER], {}, "Hi<|end|>\n<|assistant|>"),
        ([USER], {"continue_final_message": True}, "<|user|>Hi"),
    ],
)
async def test_a_last_message_is_continued_or_answered(
    messages: Sequence[Any], said: dict[str, Any], end: str
) -> None:
    tokenizer = TurnsTokenizer()
    async with over_script(ScriptedAgent(["a"]), tokenizer) as live:
        for path in (CHAT, "/tokenize"):
            assert (await ask(live, path, {"messages": messages, **said})).status == 200
            assert tokenizer.read[-1].endswith(end)


# --- the form in which a prompt is shown ----------------------------------------------------------


async def test_an_echo_shows_no_tokens_that_the_tokenizer_added(tmp_path: Path) -> None:
    bundled = Tokenizer.from_file(str(BUNDLED_FOLDER / "draft" / "tokenizer.json"))
    bundled.add_special_tokens(["<bos>"])
    bos = bundled.token_to_id("<bos>")
    bundled.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    bundled.save(str(tmp_path / "tokenizer.json"))
    tokenizer, agent = TextTokenizer(tmp_path), ScriptedAgent([" b"])
    ids = tokenizer.encode("The capital")
    assert ids[0] == bos
    async with over_script(agent, tokenizer) as live:
        for stream in (True, False):
            for prompt in ("The capital", ids, ["The capital", "The capital"]):
                data = {"prompt": prompt, "echo": True, "stream": stream}
                reply = await ask(live, TEXTS, data)
                events = events_of(reply.body)[:-1] if stream else [reply.json]
                parts = [one for event in events for one in event["choices"]]
                assert "".join(p["text"] for p in parts if p["index"] == 0) == "The capital b"
        assert agent.prompts[0] == tuple(ids)
        await ask(live, TEXTS, {"prompt": "The capital", "add_special_tokens": False})
        assert agent.prompts[-1] == tuple(ids[1:])


async def test_variables_that_the_template_does_not_read_are_named() -> None:
    async with over_script(ScriptedAgent(["a"]), TurnsTokenizer()) as live:
        more = {"reasoning_effort": "low", "verbosity": "high"}
        data = {"messages": [USER], **more, "chat_template_kwargs": {"enable_thinking": False}}
        reply = await ask(live, CHAT, data)
        named = set(reply.headers["x-edgespec-ignored"].split(", "))
        assert named == {*more, "chat_template_kwargs.enable_thinking"}


def test_ids_are_checked_against_the_model_once_it_is_known() -> None:
    """Before that, ids are checked against the range of the wire."""
    with pytest.raises(ApiError, match=r"holds 16777216, but token ids are in \[0, 16777215\]"):
        read({"stop_token_ids": [1 << 24]})
    assert read({"stop_token_ids": [(1 << 24) - 1]}).sampling.stop_token_ids
