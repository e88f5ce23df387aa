"""Tests of stored responses, of gaps between a prefix and a suffix, and of tasks that no model here
has.

Oracle: the whole conversation, sent at once. A request that continues a stored response must give
the model the same prompt.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.endpoint.infilling import infilling_prompt
from edgespec.endpoint.request_json import ApiError
from edgespec.endpoint.response_store import ResponseStore
from edgespec.models.tokenizer import ChatTemplate
from tests.endpoint.live_endpoint import ScriptedAgent, ask, exchange, over_script, request_bytes
from tests.kit.letters import LettersTokenizer, text_of

RESPONSES = "/v1/responses"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{% if m.reasoning_content %}({{ m.reasoning_content }})"
    "{% endif %}:{{ m.content }}]{% endfor %}{% set end = '</think>' %}"
)


async def test_a_request_continues_a_stored_response() -> None:
    agent = ScriptedAgent(["<think>", "hm", "</think>", "one"])
    async with over_script(agent, LettersTokenizer(TEMPLATE)) as live:
        first = (await ask(live, RESPONSES, {"input": "a", "instructions": "i"})).json
        more = {"previous_response_id": first["id"], "input": "b"}
        second = (await ask(live, RESPONSES, more)).json
        third = await ask(
            live, RESPONSES, {"previous_response_id": second["id"], "input": "c", "stream": True}
        )
        found = await ask(live, f"{RESPONSES}/{first['id']}")
        items = await ask(live, f"{RESPONSES}/{second['id']}/input_items")
        gone = await exchange(
            live.port, request_bytes(f"{RESPONSES}/{first['id']}", method="DELETE")
        )
        missing = await ask(live, f"{RESPONSES}/{first['id']}")
        refused = await ask(live, RESPONSES, more)
    assert [text_of(one) for one in agent.prompts] == [
        "[system:i][user:a]",
        "[user:a][assistant(hm):one][user:b]",
        "[user:a][assistant(hm):one][user:b][assistant(hm):one][user:c]",
    ]
    assert (first["store"], found.json) == (True, first)
    assert second["previous_response_id"] == first["id"]
    assert third.status == 200
    assert items.json["data"][0]["content"] == "b"
    assert gone.json == {"id": first["id"], "object": "response.deleted", "deleted": True}
    assert missing.status == 404
    assert (refused.status, refused.error["param"]) == (400, "previous_response_id")
    assert refused.error["code"] == "previous_response_not_found"


async def test_store_false_stores_nothing() -> None:
    async with over_script(ScriptedAgent(["x"]), LettersTokenizer(TEMPLATE)) as live:
        first = (await ask(live, RESPONSES, {"input": "a", "store": False})).json
        assert len(live.endpoint.responses) == 0
    assert first["store"] is False


def response(identity: str, text: str) -> dict[str, Any]:
    return {"id": identity, "output": [{"type": "message", "content": text}]}


def test_the_oldest_responses_make_room() -> None:
    store = ResponseStore(max_responses=2, max_bytes=1000)
    for name in "abc":
        store.add(response(name, name), [])
    assert [name for name in "abc" if _has(store, name)] == ["b", "c"]
    store.add(response("d", "x" * 400), [])
    assert [name for name in "bcd" if _has(store, name)] == ["d"] or store.held_bytes <= 1000
    store.add(response("e", "x" * 2000), [])
    assert not _has(store, "e")
    for name in "abcd":
        if _has(store, name):
            store.delete(name)
    assert (len(store), store.held_bytes) == (0, 0)


def _has(store: ResponseStore, name: str) -> bool:
    try:
        store.find(name)
    except ApiError:
        return False
    return True


# --- gaps, and other tasks ------------------------------------------------------------------------


def test_a_gap_is_asked_for_with_the_tokens_of_the_vocabulary() -> None:
    names: Any = SimpleNamespace(added={"<fim_middle>": 3, "<fim_prefix>": 1, "<fim_suffix>": 2})
    encode = LettersTokenizer().encode
    assert infilling_prompt(names, encode, "ab", "c") == [1, *encode("ab"), 2, *encode("c"), 3]


async def test_a_suffix_needs_such_tokens_and_text() -> None:
    async with over_script(ScriptedAgent(["x"]), LettersTokenizer(TEMPLATE)) as live:
        plain = await ask(live, "/v1/completions", {"prompt": "a", "suffix": "b"})
        ids = await ask(live, "/v1/completions", {"prompt": [1], "suffix": "b"})
        empty = await ask(live, "/v1/completions", {"prompt": "a", "suffix": ""})
    for reply in (plain, ids):
        assert (reply.status, reply.error["param"]) == (400, "suffix")
    assert empty.status == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/v1/rerank"])
async def test_other_tasks_are_refused_by_name(path: str) -> None:
    async with over_script(ScriptedAgent(["x"])) as live:
        reply = await ask(live, path, {"input": "a"})
    assert (reply.status, reply.error["code"]) == (404, "unsupported_endpoint")
    assert "generates text and has no " in reply.error["message"]


# --- earlier thoughts -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_an_earlier_thought_stands_where_the_template_reads_it(name: str) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m." + name + " is defined %}<{{ m." + name + " }}>{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
    ]
    assert template.render(messages) == "a<hm>bc"


def test_a_template_without_thoughts_shows_none() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    message = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    assert template.render([message]) == "b"
