"""Tests of a model on the device that answers while no verifier can be reached.

Oracles: the scalar specification of sampling over the toy's draft model, which is the fallback
here, and over its target; the places in which an answer must name its model; the refusals by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from edgespec.config import AgentConfig, ConfigError, DraftSection, load_config
from edgespec.core.protocol.errors import ConnectError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import build
from edgespec.device.prober import VerifierMonitor
from edgespec.endpoint.requests import choice_seed
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.telemetry.agent_status import VerifierState
from tests.endpoint.live_endpoint import (
    APIS,
    QUICK,
    Api,
    Live,
    Reply,
    ScriptedAgent,
    ask,
    events_of,
    start_endpoint,
)
from tests.kit.live_verifier import run_command, serve_toy, toy_text

DRAFT = TOY_MODEL.perturbed(build._TOY_DRAFT_NOISE)
HEADER = "x-edgespec-answered-by"
NAME = "draft toy"
PROMPT = "abc"


@contextlib.asynccontextmanager
async def over_fallback(
    address: str = "127.0.0.1:1", *, caches: int = 4, agent: Any = None
) -> AsyncIterator[tuple[Live, list[str]]]:
    """Start an endpoint with a fallback, and yield the lines that it reports. ``agent`` replaces
    the one that reaches the verifier."""
    lines: list[str] = []
    watch = VerifierMonitor({address: build.connect(address)}, away_every_s=0.05)
    config = AgentConfig(
        verifier=address,
        draft=DraftSection(model="toy", caches=caches),
        tokenizer="toy",
        fallback="draft",
        reconnect=QUICK,
    )
    await watch.refresh()
    loaded = build.load_fallback(config, lines.append)
    assert loaded is not None
    async with build.build_agent(config, beside=loaded) as own:
        local = build.local_model(loaded, own)
        async with start_endpoint(agent or own, ToyTokenizer(), watch) as live:
            live.endpoint.use_fallback(local, SamplingParams())
            live.endpoint.report = lines.append
            yield live, lines
        local.close()


def texts(max_tokens: int, **sampling: Any) -> tuple[str, str]:
    """Return the texts of the draft and of the target for the prompt."""
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    tokenizer = ToyTokenizer()
    prompt = tokenizer.encode(PROMPT)
    return tuple(tokenizer.decode(toy_text(prompt, params, one)) for one in (DRAFT, TOY_MODEL))  # type: ignore[return-value]


def measurements(api: Api, reply: Reply) -> dict[str, Any]:
    """Return edgespec's section of the usage, in a whole response or at the end of a stream."""
    if api.path.startswith("/api/"):
        found: Any = json.loads(reply.body.splitlines()[-1])
    elif reply.headers["content-type"] == "application/json":
        found = reply.json["usage"]
    elif api.path in ("/v1/responses", "/v1/messages"):
        data = [json.loads(one) for one in re.findall(rb"data: (.*)", reply.body)]
        found = (
            next(one["usage"] for one in data[::-1] if "usage" in one or "response" in one)
            if (api.path == "/v1/messages")
            else data[-1]["response"]["usage"]
        )
    else:
        found = events_of(reply.body)[-2]["usage"]
    section: dict[str, Any] = found["edgespec"]
    return section


@pytest.mark.parametrize("api", APIS, ids=lambda one: one.path)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_every_api_answers_and_names_the_model(api: Api, stream: bool) -> None:
    usage = {"stream_options": {"include_usage": True}} if "completions" in api.path else {}
    request = api.request(12, stream=stream, **(usage if stream else {}))
    async with over_fallback() as (live, lines):
        reply = await ask(live, api.path, request)
        assert (reply.status, reply.headers[HEADER]) == (200, NAME)
        own, targets = texts(12)
        assert own != targets
        assert measurements(api, reply)["answered_by"] == NAME
        assert measurements(api, reply)["lossy"] is True
        assert live.endpoint.counts.fallback_answers == {NAME: 1}
        again = await ask(live, api.path, api.request(12, stream=stream))
        whole = await ask(live, api.path, api.request(12))
        assert api.text(again) == api.text(whole)
        if api.path == "/v1/completions":
            assert api.text(again) == own
    (line,) = lines
    assert NAME in line
    assert "no verifier" in line


async def test_a_fallback_has_no_drafts_to_show_or_to_switch_off() -> None:
    data = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 12,
        "token_sources": True,
        "drafts": False,
    }
    async with over_fallback() as (live, _):
        reply = await ask(live, "/v1/chat/completions", data)
    assert (reply.status, reply.headers[HEADER]) == (200, NAME)
    assert "tokens_by_source" not in reply.json["usage"]["edgespec"]


async def test_a_verifier_that_is_back_gets_the_next_request() -> None:
    async with serve_toy() as (address, _):
        port = int(address.rpartition(":")[2])
    request = {"prompt": PROMPT, "max_tokens": 12}
    own, targets = texts(12)
    async with over_fallback(address) as (live, lines):
        reply = await ask(live, "/v1/completions", request)
        assert (reply.json["choices"][0]["text"], reply.json["model"]) == (own, "toy")
        async with serve_toy(port=port):
            async with asyncio.timeout(60.0):
                while not live.watch.ready:
                    await live.watch.refresh()
            reply = await ask(live, "/v1/completions", request)
            assert reply.json["choices"][0]["text"] == targets
            assert HEADER not in reply.headers
            assert "answered_by" not in reply.json["usage"]["edgespec"]
        assert live.watch.ready  # nothing has noticed yet that the verifier is away again
        for stream in (False, True):
            reply = await ask(live, "/v1/completions", {**request, "stream": stream})
            assert reply.headers[HEADER] == NAME
    assert [NAME in one for one in lines] == [True, True, True]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_text_that_has_begun_is_not_continued(stream: bool, tokens: int) -> None:
    """The verifier goes away behind this number of tokens."""

    async def lose(place: int) -> None:
        if place == tokens:
            raise ConnectError("the connection was lost")

    agent = ScriptedAgent(["x"] * 8, between=lose)
    async with over_fallback(agent=agent) as (live, _):
        (status,) = live.watch.statuses
        live.watch.statuses = (replace(status, state=VerifierState.READY),)
        request = {"prompt": PROMPT, "max_tokens": 12, "stream": stream}
        reply = await ask(live, "/v1/completions", request)
        assert len(agent.prompts) == 1
        if not tokens:
            assert reply.headers[HEADER] == NAME
            return
        assert HEADER not in reply.headers
        if stream:
            assert "error" in events_of(reply.body)[-1]
        else:
            assert reply.status == 503
        assert live.endpoint.counts.fallback_answers == {}


async def test_sampling_is_the_requests_own() -> None:
    wanted = {"temperature": 0.9, "top_p": 0.8, "seed": 5}
    async with over_fallback(caches=1) as (live, _):
        request = {"prompt": PROMPT, "max_tokens": 16, "n": 3, **wanted}
        reply = await ask(live, "/v1/completions", request)
    expected = [
        texts(16, temperature=0.9, top_p=0.8, seed=choice_seed(5, number))[0] for number in range(3)
    ]
    assert [one["text"] for one in reply.json["choices"]] == expected
    assert len(set(expected)) > 1


async def test_stops_and_constraints_apply() -> None:
    own = texts(40)[0]
    stop = own[5:7]
    async with over_fallback() as (live, _):
        request = {"prompt": PROMPT, "max_tokens": 40, "stop": [stop]}
        choice = (await ask(live, "/v1/completions", request)).json["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (own[: own.index(stop)], "stop")
        request = {"prompt": PROMPT, "max_tokens": 40, "regex": "[ab]{7}"}
        choice = (await ask(live, "/v1/completions", request)).json["choices"][0]
        assert re.fullmatch("[ab]{7}", choice["text"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"logprobs": 1}, "logprobs"),
        ("/v1/completions", {"echo": True, "logprobs": 0}, "logprobs"),
        ("/v1/completions", {"rule": "typical"}, "rule"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/completions", {"regex": "("}, "regex"),
    ],
    ids=str,
)
async def test_what_it_cannot_do_is_refused_by_name(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with over_fallback() as (live, _):
        reply = await ask(live, path, {"prompt": PROMPT, "max_tokens": 4, **fields})
    assert (reply.status, reply.error["param"]) == (503, param)
    assert reply.error["code"] == "fallback_cannot_serve"
    assert NAME in reply.error["message"]
    assert "retry-after" in reply.headers


async def test_requests_wait_for_a_cache() -> None:
    async with over_fallback(caches=1) as (live, _):
        request = {"prompt": PROMPT, "max_tokens": 12}
        replies = await asyncio.gather(*(ask(live, "/v1/completions", request) for _ in range(6)))
    assert {one.json["choices"][0]["text"] for one in replies} == {texts(12)[0]}


async def test_metrics_count_the_answers() -> None:
    async with over_fallback() as (live, _):
        await ask(live, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
        reply = await ask(live, "/metrics")
    line = f'edgespec_endpoint_fallback_answers_total{{answered_by="{NAME}"}} 1.0'
    assert line in reply.body.decode()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fallback": "draft", "draft.model": "none"}, "writes no text"),
        ({"fallback": "draft", "draft.model": "lookup"}, "writes no text"),
        ({"fallback": "random"}, "writes no text"),
    ],
    ids=str,
)
def test_a_fallback_must_be_a_model(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(AgentConfig, None, settings, overrides_from="test")


def test_generate_names_the_model_of_its_text() -> None:
    """Oracle: the same text by the specification."""
    here = ("--draft", "toy", "--set", "tokenizer=toy", "--verifier", "127.0.0.1:1")
    wanted = ("generate", PROMPT, *here, "--fallback", "draft", "-n", 12)
    plain = run_command(*wanted)
    assert (plain.exit_code, plain.stdout) == (0, texts(12)[0] + "\n")
    assert NAME in plain.stderr
    last = json.loads(run_command(*wanted, "--json").stdout.splitlines()[-1])
    assert (last["answered_by"], last["lossy"]) == (NAME, True)
    scored = run_command(*wanted, "--logprobs", 1)
    assert scored.exit_code == 2
    assert "computes no scores" in scored.stderr
    without = run_command("generate", PROMPT, *here)
    assert (without.exit_code, without.stdout) == (1, "")
