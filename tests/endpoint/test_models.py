"""A model and its adapters behind one endpoint, chosen by the name in each request, also at
verifiers that come and go.

Oracle: an adapter is another toy model, so its text is that one's, by the scalar specification.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from openai import NotFoundError

from edgespec.core.protocol.messages import Limits, VerifierInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo
from edgespec.core.toy_model import ToyModel
from edgespec.device.prober import VerifierWatch
from edgespec.endpoint.request_json import ApiError
from edgespec.endpoint.service import MOST_NAMES, OTHER, Chosen, EndpointCounts, ServedModels
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.telemetry.agent_status import VerifierState, VerifierStatus
from tests.endpoint.live_endpoint import Live, ask, events_of, over_verifiers
from tests.shell.failing_verifiers import PATIENT, gates
from tests.shell.fake_vllm import adapted_toy
from tests.shell.live_verifier import GatedTarget, serving, toy_text, until

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


async def text(live: Live, model: str) -> str:
    """The text of a request that has to be served."""
    reply = await ask(live, PATH, {**ASKED, "model": model})
    assert reply.status == 200, reply.body
    answer = reply.json
    assert answer["model"] == model
    return str(answer["choices"][0]["text"])


@contextlib.asynccontextmanager
async def over_adapters(target: Any = None, **more: Any) -> AsyncIterator[Live]:
    async with serving(target or adapted_toy(ADAPTERS)) as (address, _):
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
    for number in range(2 * MOST_NAMES):
        counts.add_answer(f"adapter-{number}", 3, ())
    assert len(counts.answers) == MOST_NAMES + 1
    assert counts.prompt_tokens[OTHER] == 3 * MOST_NAMES


BASE = ModelInfo("base", "words", 100, 4096, (), "fp-base")
ADAPTER = replace(BASE, name="sql", fingerprint="fp-sql")


def models(*infos: VerifierInfo | None, only: str = "") -> ServedModels:
    watch = VerifierWatch({})
    watch.statuses = tuple(
        VerifierStatus(str(place), VerifierState.READY if info else VerifierState.AWAY)
        for place, info in enumerate(infos)
    )
    watch.infos = {str(place): info for place, info in enumerate(infos) if info is not None}
    return ServedModels(watch, only)


def told(model: ModelInfo, *adapters: ModelInfo) -> VerifierInfo:
    return VerifierInfo(model, Limits(context_length=0), 0, 8, 0, adapters)


def test_one_model_by_two_names_is_asked_for_by_none() -> None:
    """So that a text can go on where it is called otherwise; not where it is another model."""
    twin = replace(BASE, name="twin")
    found = models(told(BASE), told(twin))
    assert [found.choose(one).asked for one in ("base", "twin")] == ["", ""]
    other = replace(twin, fingerprint="fp-other")
    assert models(told(BASE), told(other)).choose("twin").asked == "twin"
    nameless = replace(BASE, fingerprint=""), replace(twin, fingerprint="")
    assert models(*map(told, nameless)).choose("twin").asked == "twin"
    assert models(told(BASE, ADAPTER), told(twin, ADAPTER)).choose("sql").asked == "sql"


def test_an_endpoint_held_to_one_name_answers_by_no_other() -> None:
    found = models(told(BASE, ADAPTER), only="sql")
    assert [one.name for one in found.listed] == ["sql"]
    assert [found.choose(one).asked for one in ("", "edgespec", "sql")] == ["sql"] * 3
    for one in (found, models(only="sql")):
        with pytest.raises(ApiError, match="'base' does not exist here; this is 'sql'"):
            one.choose("base")
    assert models(only="sql").choose("sql") == Chosen("sql", None)


def test_what_has_another_vocabulary_cannot_be_asked_for() -> None:
    found = models(told(BASE, replace(ADAPTER, vocabulary="more words")))
    assert [one.name for one in found.listed] == ["base"]


def test_a_long_list_of_names_is_cut_in_a_message() -> None:
    many = [replace(ADAPTER, name=f"a{number}") for number in range(40)]
    with pytest.raises(ApiError, match=r"there are 'base', 'a0', .*'a14' and 25 more$"):
        models(told(BASE, *many)).choose("sequel")


async def held_up(live: Live, target: GatedTarget) -> None:
    """``target`` holds a text up whose first token the device has: without one, the text would
    rightly begin anew elsewhere."""
    assert await asyncio.to_thread(target.reached.wait, 60.0)
    activity = live.endpoint.agent.activity
    await until(lambda: any(one.first_token_at is not None for one in activity.running.values()))


async def test_no_text_goes_on_with_other_weights_of_the_same_name() -> None:
    """The verifier came back with a newer adapter: what was begun is not mixed with it."""
    held = GatedTarget(adapted_toy({"sql": SQL}), 10)
    both = held, adapted_toy({"sql": POETRY}, "newer")
    few = replace(PATIENT, max_streams_without_token=3)
    async with (
        gates(2, both) as ((gate, _), (_, newer)),
        over_verifiers(gate.address, reconnect=few) as live,
    ):
        asked = {**ASKED, "model": "sql", "stream": True}
        task = asyncio.create_task(ask(live, PATH, asked))
        await held_up(live, held)
        gate.kill()
        gate.port = newer
        held.gate.set()
        *events, last = events_of((await task).body)
        assert await text(live, "sql") == text_of(POETRY)
    said = "".join(event["choices"][0]["text"] for event in events)
    assert said
    assert IN_SQL.startswith(said)
    why = "'sql' (sql-on-newer) now, but the text was begun by 'sql' (sql-on-toy)"
    assert f"the verifier serves {why}" in last["error"]["message"]
