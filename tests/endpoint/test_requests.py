"""Tests of requests from any client.

Oracle: any JSON gives either a runnable request or a 4xx error with a message, and known neutral
values pass. For requests that are small to send and large to read, sizes are checked before the
contents, and other requests are answered meanwhile. An adapter of the toy target is another toy
model, so its text is that model's, by the scalar specification.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import NotFoundError

from edgespec.config import EndpointSection
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import Limits, VerifierInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo
from edgespec.core.toy_model import ToyModel
from edgespec.device.prober import VerifierMonitor
from edgespec.endpoint.request_json import MAX_VALUES, ApiError, read_object
from edgespec.endpoint.requests import (
    CHAT,
    COMPLETION,
    IGNORED,
    MAX_GENERATIONS,
    UNSUPPORTED,
    chat_request,
    completion_request,
)
from edgespec.endpoint.service import (
    MAX_MODEL_NAMES,
    OTHER_MODEL,
    Endpoint,
    EndpointCounts,
    ModelChoice,
    PreparedRequest,
    ServedModels,
)
from edgespec.models.tokenizer import MAX_MESSAGES
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.telemetry.agent_status import VerifierState, VerifierStatus
from tests.endpoint.live_endpoint import (
    Live,
    ScriptedAgent,
    ask,
    events_of,
    exchange,
    over_letters,
    over_script,
    over_toy,
    over_verifiers,
    request_bytes,
)
from tests.kit.live_verifier import GatedTarget, serve_toy, toy_text, wait_until
from tests.verifier.failing_verifiers import PATIENT, run_behind_gates
from tests.verifier.fake_vllm import adapted_toy

MESSAGES = [{"role": "user", "content": "hi"}]
WORDS = st.sampled_from(["user", "system", "tool", "auto", "function", "text", "a", "", "\ud800"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5)

KEYS = st.sampled_from(
    "role content type text function name arguments parameters tool_calls id strict 5 -1 x".split()
)

VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4)
)

OTHERS = [
    *sorted(IGNORED | set(UNSUPPORTED)),
    *("guided_json", "guided_choice", "guided_regex", "structured_outputs", "reasoning_effort"),
    *("json_schema", "repeat_penalty", "other"),
]


def requests(names: frozenset[str], needed: str, usual: Any) -> st.SearchStrategy[Any]:
    """Generate requests, mostly with names that matter, so that they get beyond the first check."""
    known = st.sampled_from(sorted(names - {needed}))
    named = st.dictionaries(known, VALUES, max_size=4)
    others = st.dictionaries(st.sampled_from(OTHERS), VALUES, max_size=1)
    given = st.fixed_dictionaries({needed: st.just(usual) | VALUES})
    return st.builds(lambda *parts: dict(ChainMap(*parts)), given, named, others)


def endpoint() -> Endpoint:
    agent: Any = ScriptedAgent()
    return Endpoint(agent, ToyTokenizer(), VerifierMonitor({}), EndpointSection())


@settings(max_examples=60)
@given(chat=requests(CHAT, "messages", MESSAGES), text=requests(COMPLETION, "prompt", "a"))
def test_any_request_is_an_answer_or_a_refusal(chat: Any, text: Any) -> None:
    asked = endpoint()
    for found in asyncio.run(
        catch_refusals(asked.prepare_chat(chat), asked.prepare_completion(text))
    ):
        if isinstance(found, ApiError):
            assert 400 <= found.status < 500
            assert found.message
        else:
            assert 1 <= len(found.choices) <= MAX_GENERATIONS
            assert all(choice.prompt for choice in found.choices)


async def catch_refusals(
    *works: Coroutine[Any, Any, PreparedRequest],
) -> list[PreparedRequest | ApiError]:
    return [await catch_refusal(work) for work in works]


async def catch_refusal(work: Coroutine[Any, Any, PreparedRequest]) -> PreparedRequest | ApiError:
    try:
        return await work
    except ApiError as error:
        return error


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_asks_for_nothing_passes_and_what_asks_is_named(name: str) -> None:
    for value in (None, *UNSUPPORTED[name]):
        chat_request({"messages": MESSAGES, name: value}, SamplingParams())
    with pytest.raises(ApiError, match="not supported") as caught:
        chat_request({"messages": MESSAGES, name: "something"}, SamplingParams())
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        (
            {"response_format": {"type": "text"}, "guided_json": {"type": "object"}},
            {"json_schema": '{"type":"object"}'},
        ),
        (
            {"guided_json": {"type": "object"}, "response_format": {"type": "text"}},
            {"json_schema": '{"type":"object"}'},
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "array"}}},
            {"json_schema": '{"type":"array"}'},
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {"type": "array"}}},
            {"json_schema": '{"type":"array"}'},
        ),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        (
            {
                "structured_outputs": {
                    "json": None,
                    "json_object": True,
                    "disable_any_whitespace": False,
                }
            },
            {"json_schema": '{"type": "object"}'},
        ),
        ({"guided_json": {"type": "object"}}, {"json_schema": '{"type":"object"}'}),
        ({"guided_json": '{"type": "object"}'}, {"json_schema": '{"type":"object"}'}),
        ({"json_schema": {"type": "object"}}, {"json_schema": '{"type":"object"}'}),
        (
            {"structured_outputs": {"json": {"type": "object"}}},
            {"json_schema": '{"type":"object"}'},
        ),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ("a b", "c.d")}, {"regex": "a b|c\\.d"}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
    ],
)
def test_other_servers_names_are_understood(
    given: dict[str, Any], sampling: dict[str, Any]
) -> None:
    ((name, value),), given = sampling.items(), json.loads(json.dumps(given))
    if name != "repetition_penalty":
        sampling = {"constraint": Constraint(ConstraintKind(name), value)}
    for asked in (
        chat_request({"messages": MESSAGES, **given, "seed": 0}, SamplingParams()),
        completion_request({"prompt": "a", **given, "seed": 0}, SamplingParams()),
    ):
        assert asked.sampling == SamplingParams(**sampling)
        assert asked.ignored_fields == ()


def test_what_nobody_knows_is_ignored_and_told() -> None:
    habits = {"num_ctx": 4096, "keep_alive": "5m", "min_keep": 3, "user": "x", "nothing": None}
    asked = completion_request({"prompt": "a", **habits}, SamplingParams())
    assert asked.ignored_fields == ("num_ctx", "keep_alive", "min_keep")
    chat = chat_request({"messages": MESSAGES, "reasoning_effort": "low"}, SamplingParams())
    assert (chat.variables, chat.ignored_fields) == ({"reasoning_effort": "low"}, ())


def expand_repeats(value: Any) -> Any:
    """Replace ``@a*9`` by nine letters, and so on."""
    if isinstance(value, str):
        return re.sub(r"@(.)\*(\d+)", lambda found: found[1] * int(found[2]), value)
    if isinstance(value, list):
        return [expand_repeats(one) for one in value]
    if isinstance(value, dict):
        return {name: expand_repeats(one) for name, one in value.items()}
    return value


REFUSALS = yaml.safe_load((Path(__file__).parent / "refusals.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("server", REFUSALS)
async def test_what_cannot_be_is_named(server: str) -> None:
    """All requests go to one endpoint, one after the other."""
    usual = {CHAT_PATH: {"messages": MESSAGES}}
    serving = over_letters() if server == "letters" else over_toy(draft="none")
    async with serving as live:
        for path, cases in REFUSALS[server].items():
            for case in cases:
                body = expand_repeats(case["body"])
                if isinstance(body, str):
                    data = body.encode("latin-1")
                else:
                    data = json.dumps({**usual.get(path, {}), **body}).encode()
                reply = await exchange(live.port, request_bytes(path, data))
                assert reply.status == 400, case
                error = reply.error
                assert (error["type"], error["param"]) == ("invalid_request_error", case["param"])
                assert re.search(case.get("words", ""), error["message"]), (case, error)


def test_defaults_are_the_devices() -> None:
    own = SamplingParams(temperature=0.7, top_p=0.9, stop=("x",), seed=3)
    asked = completion_request({"prompt": "a", "top_p": None}, own)
    assert (asked.sampling.temperature, asked.sampling.top_p) == (0.7, 0.9)
    assert asked.sampling.stop == ("x",)
    other = completion_request({"prompt": "a", "temperature": 0, "seed": -2}, own)
    assert (other.sampling.temperature, other.sampling.seed) == (0.0, (1 << 64) - 2)
    assert asked.max_tokens is None


CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: object) -> dict[str, object]:
    return {"role": "user", "content": text}


async def conversations_of(path: str, *asked: dict[str, Any]) -> list[str]:
    agent = ScriptedAgent(["a"])
    async with over_script(agent) as live:
        for one in asked:
            assert (await ask(live, path, one)).status == 200
    return agent.conversations


async def test_the_turns_of_a_chat_are_one_conversation() -> None:
    answer = {"role": "assistant", "content": "a"}
    first, later, other_system, other = await conversations_of(
        CHAT_PATH,
        {"messages": [SYSTEM, user("Hi")]},
        {"messages": [SYSTEM, user([{"type": "text", "text": "Hi"}]), answer, user("And?")]},
        {"messages": [user("Hi")]},
        {"messages": [SYSTEM, user("Ho")]},
    )
    assert first == later
    assert len({first, other_system, other}) == 3
    assert len(first) == 16


WITHIN_S = 60


def message(read: Callable[[], object]) -> str:
    with pytest.raises(ApiError) as caught:
        read()
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize(
    ("read", "given", "why"),
    [
        (chat_request, {"messages": [{}] * 4097}, "messages holds 4097 objects, but at most 4096"),
        (chat_request, {"messages": MESSAGES, "tools": [{}] * 129}, "tools holds 129 objects"),
        (completion_request, {"prompt": [""] * 1025}, "1025 prompts with n 1 are 1025 texts"),
        (completion_request, {"prompt": "a", "stop": [1] * 257}, "stop holds 257 texts"),
        (
            completion_request,
            {"prompt": "a", "logit_bias": {f"x{n}": 1 for n in range(1025)}},
            "logit_bias has 1025 keys",
        ),
    ],
)
def test_what_is_too_many_is_refused_before_any_of_it_is_read(
    read: Callable[..., object], given: dict[str, Any], why: str
) -> None:
    """None of these lists holds a readable item, so an error about an item would show that it was
    read."""
    assert why in message(lambda: read(given, SamplingParams()))


def test_many_small_values_are_counted_before_they_are_read() -> None:
    lists = b'{"x": [' + b"[]," * MAX_VALUES + b"0]}"
    assert "has 131075 lists, objects and texts, but at most 131072" in message(
        lambda: read_object(lists)
    )
    names = b"{" + b",".join(b'"%d":0' % n for n in range(MAX_VALUES + 1)) + b"}"
    assert "the request has 131073 lists" in message(lambda: read_object(names))
    text = r"a \" [[::{{ \\" * MAX_VALUES  # escaped brackets are text, whatever they look like
    for one in (text, text + '"', text + "\\", text + '\\"'):
        assert read_object(json.dumps({"prompt": one}).encode()) == {"prompt": one}
    ids = {"prompt": [7] * (4 * MAX_VALUES)}
    assert read_object(json.dumps(ids).encode()) == ids
    unfinished = b'{"' + b"[" * (MAX_VALUES + 1)
    assert "is no JSON" in message(lambda: read_object(unfinished))
    chat = {"messages": [{"role": "user", "content": "a"}] * MAX_MESSAGES}
    assert read_object(json.dumps(chat).encode()) == chat


@pytest.mark.parametrize(
    "around",
    [
        '{"prompt": "a", "temperature": DEEP}',
        (
            '{"prompt": "a", "response_format": {"type": "json_schema", '
            '"json_schema": {"schema": {"a": DEEP}}}}'
        ),
        '{"prompt": "a", "metadata": DEEP}',
    ],
)
async def test_what_is_nested_deep_is_no_failure_of_ours(around: str) -> None:
    """Some depth between readable and unreadable values can be read but not written again."""
    async with over_script(ScriptedAgent(["a"])) as live:
        for depth in (*range(700, 1000, 10), *range(960, 1000)):
            body = around.replace("DEEP", "[" * depth + "]" * depth).encode()
            reply = await exchange(live.port, request_bytes(COMPLETION_PATH, body))
            assert reply.status in (200, 400), (depth, reply.body)


async def test_half_a_surrogate_pair_in_a_name_is_a_mistake_of_the_client() -> None:
    async with over_script(ScriptedAgent(["a"])) as live:
        reply = await exchange(
            live.port, request_bytes(COMPLETION_PATH, b'{"prompt": "a", "\\ud800": 1}')
        )
        assert (reply.status, reply.headers["x-edgespec-ignored"]) == (200, "?")
        broken = b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}'
        reply = await exchange(live.port, request_bytes(COMPLETION_PATH, broken))
        assert (reply.status, reply.error["param"]) == (400, "logit_bias")
        async with asyncio.timeout(WITHIN_S):
            while not live.endpoint.counts.requests[COMPLETION_PATH, "400"]:  # noqa: ASYNC110
                await asyncio.sleep(0)


class _Pieces(ToyTokenizer):
    """A tokenizer that records the length of each text it gets."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.read.append(len(text))
        return super().encode(text)


async def test_of_a_text_far_beyond_the_context_only_a_piece_is_tokenized() -> None:
    async with over_toy() as live:
        context = live.endpoint.models.listed[0].context_length
        text = "a" * 4_000_000
        message = {"role": "user", "content": text}
        for path, param, data in (
            (COMPLETION_PATH, "prompt", {"prompt": text}),
            (COMPLETION_PATH, "prompt", {"prompt": ["a", text]}),
            (CHAT_PATH, "messages", {"messages": [message]}),
        ):
            live.endpoint.tokenizer = pieces = _Pieces()
            reply = await ask(live, path, data)
            assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
            assert reply.error["param"] == param
            assert f"the context of {context} tokens" in reply.error["message"]
            assert sum(pieces.read) < 2 * context + 2 * (1 << 16)


# --- models and their adapters by name ------------------------------------------------------------


TEXT = ToyTokenizer()
SQL, POETRY = replace(TOY_MODEL, order=2), replace(TOY_MODEL, seed=5)
PROMPT = "the quick brown fox"
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
PATH = "/v1/completions"
ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}
ADAPTERS = {"sql": SQL, "poetry": POETRY}


def text_of(model: ToyModel, prompt: str = PROMPT) -> str:
    return TEXT.decode(toy_text(TEXT.encode(prompt), PARAMS, model))


OWN, IN_SQL = text_of(TOY_MODEL), text_of(SQL)

assert len({OWN, IN_SQL, text_of(POETRY)}) == 3


async def request_text(live: Live, model: str) -> str:
    """Return the text of a request that must be served."""
    reply = await ask(live, PATH, {**ASKED, "model": model})
    assert reply.status == 200, reply.body
    answer = reply.json
    assert answer["model"] == model
    return str(answer["choices"][0]["text"])


@contextlib.asynccontextmanager
async def over_adapters(target: Any = None, **more: Any) -> AsyncIterator[Live]:
    async with serve_toy(target or adapted_toy(ADAPTERS)) as (address, _):
        async with over_verifiers(address, **more) as live:
            yield live


async def test_the_model_and_its_adapters_are_listed() -> None:
    async with over_adapters() as live, live.client() as client:
        listed = [one async for one in client.models.list()]
        assert [(one.id, one.model_extra and one.model_extra["parent"]) for one in listed] == [
            ("toy", None),
            ("sql", "toy"),
            ("poetry", "toy"),
        ]
        assert all(one.model_extra and one.model_extra["max_model_len"] == 4096 for one in listed)
        assert (await client.models.retrieve("sql")).id == "sql"
        assert (await client.models.retrieve("edgespec")).id == "toy"
        with pytest.raises(NotFoundError) as caught:
            await client.models.retrieve("sequel")
        assert caught.value.code == "model_not_found"
        health = (await ask(live, "/health")).json
    assert (health["model"], health["verifiers"][0]["adapters"]) == ("toy", ["sql", "poetry"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_unknown_name_is_the_error_that_clients_know(path: str) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else ASKED
    async with over_adapters() as live:
        for name in ("sequel", "sql ", "x" * 300, "\u00e9" * 200):
            reply = await ask(live, path, {**asked, "model": name})
            assert reply.status == 404
            error = reply.error
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert error["type"] == "not_found_error"
            assert error["message"].endswith("here; there are 'toy', 'sql', 'poetry'")


def test_names_in_metrics_are_bounded() -> None:
    counts = EndpointCounts()
    for number in range(2 * MAX_MODEL_NAMES):
        counts.add_answer(f"adapter-{number}", 3, ())
    assert len(counts.answers) == MAX_MODEL_NAMES + 1
    assert counts.prompt_tokens[OTHER_MODEL] == 3 * MAX_MODEL_NAMES


BASE = ModelInfo("base", "words", 100, 4096, (), "fp-base")
ADAPTER = replace(BASE, name="sql", fingerprint="fp-sql")


def models(*infos: VerifierInfo | None, only: str = "") -> ServedModels:
    watch = VerifierMonitor({})
    watch.statuses = tuple(
        VerifierStatus(str(place), VerifierState.READY if info else VerifierState.AWAY)
        for place, info in enumerate(infos)
    )
    watch.infos = {str(place): info for place, info in enumerate(infos) if info is not None}
    return ServedModels(watch, only)


def info_of(model: ModelInfo, *adapters: ModelInfo) -> VerifierInfo:
    return VerifierInfo(model, Limits(context_length=0), 0, 8, 0, adapters)


def test_one_model_by_two_names_is_asked_for_by_none() -> None:
    """Leaving the name out lets a generation go on where the model has another name. A name of
    another model, or of one without fingerprint, must be kept."""
    twin = replace(BASE, name="twin")
    found = models(info_of(BASE), info_of(twin))
    assert [found.choose(one).requested_name for one in ("base", "twin")] == ["", ""]
    other = replace(twin, fingerprint="fp-other")
    assert models(info_of(BASE), info_of(other)).choose("twin").requested_name == "twin"
    nameless = replace(BASE, fingerprint=""), replace(twin, fingerprint="")
    assert models(*map(info_of, nameless)).choose("twin").requested_name == "twin"
    assert (
        models(info_of(BASE, ADAPTER), info_of(twin, ADAPTER)).choose("sql").requested_name == "sql"
    )


def test_an_endpoint_held_to_one_name_answers_by_no_other() -> None:
    found = models(info_of(BASE, ADAPTER), only="sql")
    assert [one.name for one in found.listed] == ["sql"]
    assert [found.choose(one).requested_name for one in ("", "edgespec", "sql")] == ["sql"] * 3
    for one in (found, models(only="sql")):
        with pytest.raises(ApiError, match="'base' does not exist here; this is 'sql'"):
            one.choose("base")
    assert models(only="sql").choose("sql") == ModelChoice("sql", None)


def test_what_has_another_vocabulary_cannot_be_asked_for() -> None:
    found = models(info_of(BASE, replace(ADAPTER, vocabulary="more words")))
    assert [one.name for one in found.listed] == ["base"]


def test_a_long_list_of_names_is_cut_in_a_message() -> None:
    many = [replace(ADAPTER, name=f"a{number}") for number in range(40)]
    with pytest.raises(ApiError, match=r"there are 'base', 'a0', .*'a14' and 25 more$"):
        models(info_of(BASE, *many)).choose("sequel")


async def wait_until_held(live: Live, target: GatedTarget) -> None:
    """Wait until ``target`` holds a generation back whose first token the device has. Without a
    token the generation would rightly begin anew elsewhere."""
    assert await asyncio.to_thread(target.reached.wait, 60.0)
    activity = live.endpoint.agent.activity
    await wait_until(
        lambda: any(one.first_token_at is not None for one in activity.running.values())
    )


async def test_no_text_goes_on_with_other_weights_of_the_same_name() -> None:
    """The verifier came back with a newer adapter, whose tokens must not continue a generation of
    the old one."""
    held = GatedTarget(adapted_toy({"sql": SQL}), 10)
    both = held, adapted_toy({"sql": POETRY}, "newer")
    few = replace(PATIENT, max_streams_without_token=3)
    async with (
        run_behind_gates(2, both) as ((gate, _), (_, newer)),
        over_verifiers(gate.address, reconnect=few) as live,
    ):
        asked = {**ASKED, "model": "sql", "stream": True}
        task = asyncio.create_task(ask(live, PATH, asked))
        await wait_until_held(live, held)
        gate.kill()
        gate.port = newer
        held.gate.set()
        *events, last = events_of((await task).body)
        assert await request_text(live, "sql") == text_of(POETRY)
    said = "".join(event["choices"][0]["text"] for event in events)
    assert said
    assert IN_SQL.startswith(said)
    why = "'sql' (sql-on-newer) now, but the generation began on 'sql' (sql-on-toy)"
    assert f"the verifier serves {why}" in last["error"]["message"]
