"""What is on the wire: bodies that are none, clients that leave, verifiers that are away, limits.
Oracle: the status, the fields of the error and what the verifier still holds."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from edgespec.config import EndpointSection, PacingSection, VerifierConfig
from edgespec.core.device.link_keeper import ReconnectPolicy
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.endpoint.requests import seed_of
from edgespec.models.toy import ToyTokenizer
from tests.endpoint.live_endpoint import (
    ScriptedAgent,
    ask,
    events_of,
    exchange,
    over_nobody,
    over_script,
    over_toy,
    parse_reply,
    request_bytes,
)
from tests.shell.gate import Gate
from tests.shell.live_verifier import serving, toy_text

WITHIN_S = 30
TEXT = ToyTokenizer()
PATH = "/v1/completions"
HELLO = {"prompt": "abc", "max_tokens": 4}


def test_the_seed_of_a_choice_is_what_the_documentation_says() -> None:
    """Worked number: the first 16 digits of ``printf 5:1 | sha256sum``."""
    assert seed_of(5, 0) == 5
    assert seed_of(5, 1) == 0xA5886F21FCB5F028


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the request is no JSON: Expecting property name"),
        (b'{"prompt": NaN}', "NaN is no JSON"),
        (b"[1]", "a JSON list, not an object"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": [1, -1]}', r"prompt holds -1, but token ids are in"),
        (b'{"prompt": [999]}', "token 999 is outside the vocabulary of 64"),
        (b'{"prompt": "%s"}' % (b"a" * 5000), "5000 tokens, which leaves no room"),
        (b'{"prompt": ""}', "prompt is missing or empty"),
        (b'{"prompt": "a", "n": true}', "n is True, but must be a whole number"),
        (b'{"prompt": "a", "suffix": true}', "suffix is True, but suffix is not supported"),
        (b'{"prompt": "a", "best_of": true}', "best_of is True"),
        (b'{"prompt": "a", "stream_options": {}}', "stream is not true"),
        (b'{"prompt": "a", "logit_bias": [1]}', "logit_bias is .1., but must be an object"),
    ],
)
async def test_a_body_that_is_no_request(body: bytes, message: str) -> None:
    async with over_toy(draft="none") as live:
        reply = await exchange(live.port, request_bytes(PATH, body))
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] != "messages"  # a completion has none
    assert re.search(message, reply.error["message"]), reply.error["message"]


async def test_a_body_beyond_the_limit_is_not_read() -> None:
    settings = EndpointSection(max_body_bytes=1024)
    async with over_script(ScriptedAgent(["a"]), settings=settings) as live:
        told = request_bytes(PATH, b"{}", headers={"Content-Length": "1025"})
        reply = await exchange(live.port, told)
        assert (reply.status, reply.error["code"]) == (413, "too_large")
        parts = b"400\r\n" + b" " * 1024 + b"\r\n1\r\n \r\n0\r\n\r\n"
        reply = await exchange(
            live.port, request_bytes(PATH, parts, headers={"Transfer-Encoding": "chunked"})
        )
        assert (reply.status, reply.error["code"]) == (413, "too_large")
        assert (await ask(live, PATH, HELLO)).status == 200


async def test_a_body_that_does_not_come() -> None:
    settings = EndpointSection(body_within_s=0.1)
    async with over_script(ScriptedAgent(["a"]), settings=settings) as live:
        half = request_bytes(PATH, b"{", headers={"Content-Length": "2"})
        reply = await exchange(live.port, half)
        assert reply.status == 408
        assert "within 0.1 s" in reply.error["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_cancels_the_generation(stream: bool) -> None:
    async with over_toy(draft="toy") as live:
        verifier = live.verifier
        assert verifier is not None
        data = {"prompt": "abc", "max_tokens": 4000, "stream": stream, "ignore_eos": True}
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(request_bytes(PATH, json.dumps(data).encode()))
        await writer.drain()
        if stream:
            await reader.readuntil(b"data: ")
        await until(lambda: verifier.info.sessions == 1)
        writer.transport.abort()
        await until(lambda: live.endpoint.active == 0)
        await until(lambda: verifier.info.sessions == 0)
        await until(lambda: live.endpoint.counts.requests[PATH, "gone"] == 1)
        assert live.endpoint.counts.completion_tokens.total() < 4000
        assert live.endpoint.admission.running == 0
        assert (await ask(live, PATH, HELLO)).status == 200


async def until(condition: Any) -> None:
    """Turns the event loop until it holds."""
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 # of things that have no event
            await asyncio.sleep(0)


class Held:
    """Lets a script go on when it is told to."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.reached = asyncio.Event()

    async def __call__(self, place: int) -> None:
        if place == 1:
            self.reached.set()
            await self.gate.wait()


async def test_a_full_queue_is_a_429_and_the_rest_is_served_in_order() -> None:
    held = Held()
    settings = EndpointSection(max_concurrent=1, max_queue=1)
    agent = ScriptedAgent(["a", "b"], between=held)
    async with over_script(agent, settings=settings) as live:
        first = asyncio.create_task(ask(live, PATH, HELLO))
        await held.reached.wait()
        second = asyncio.create_task(ask(live, PATH, HELLO))
        await until(lambda: live.endpoint.admission.waiting == 1)
        third = await ask(live, PATH, HELLO)
        assert (third.status, third.error["code"]) == (429, "queue_full")
        assert third.headers["retry-after"] == "1"
        assert third.error["type"] == "rate_limit_error"
        held.gate.set()
        for reply in (await first, await second):
            assert reply.json["choices"][0]["text"] == "ab"
        assert live.endpoint.admission.running == 0


async def test_a_stream_that_waits_for_its_turn_is_kept_alive() -> None:
    held = Held()
    settings = EndpointSection(max_concurrent=1, keep_alive_s=0.02)
    agent = ScriptedAgent(["a", "b"], between=held)
    async with over_script(agent, settings=settings) as live, asyncio.timeout(WITHIN_S):
        first = asyncio.create_task(ask(live, PATH, HELLO))
        await held.reached.wait()
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(request_bytes(PATH, json.dumps({**HELLO, "stream": True}).encode()))
        raw = await reader.readuntil(b": keep-alive\n\n")
        raw += await reader.readuntil(b": keep-alive\n\n")
        assert live.endpoint.admission.waiting == 1
        held.gate.set()
        reply = parse_reply(raw + await reader.read())
        writer.close()
        assert (await first).status == 200
    events = events_of(reply.body)
    texts = [one["choices"][0]["text"] for one in events if isinstance(one, dict)]
    assert "".join(texts) == "ab"
    assert events[-1] == "[DONE]"


async def test_a_verifier_that_comes_later_is_waited_for() -> None:
    patient = ReconnectPolicy(first_s=0.01, longest_s=0.05, give_up_first_s=60.0)
    settings = EndpointSection(keep_alive_s=0.02)
    async with (
        Gate(None) as gate,
        over_nobody(gate.address, reconnect=patient, settings=settings) as live,
    ):
        live.watch.start()
        health = await ask(live, "/health")
        assert (health.status, health.json["status"]) == (200, "waiting")
        assert health.json["verifiers"][0]["state"] == "away"
        at_once = asyncio.create_task(ask(live, PATH, {**HELLO, "model": "toy"}))
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(request_bytes(PATH, json.dumps({**HELLO, "stream": True}).encode()))
        raw = await reader.readuntil(b": keep-alive\n\n")
        async with serving() as (address, _):
            gate.port = int(address.rpartition(":")[2])
            reply = parse_reply(raw + await reader.read())
            assert events_of(reply.body)[-1] == "[DONE]"
            done = await at_once
            assert done.status == 200
            await until(lambda: live.watch.ready)
            health = await ask(live, "/health")
            assert (health.json["status"], health.json["model"]) == ("ok", "toy")
        writer.close()


async def test_a_stream_goes_on_when_its_verifier_comes_back() -> None:
    patient = ReconnectPolicy(first_s=0.01, longest_s=0.05)
    settings = EndpointSection(keep_alive_s=0.02)
    config = VerifierConfig(model="toy", port=0, pacing=PacingSection(pass_ms=2.0))
    data = {"prompt": "abc", "max_tokens": 150, "stream": True, "ignore_eos": True}
    async with (
        serving(config=config) as (address, _),
        Gate(int(address.rpartition(":")[2])) as gate,
    ):
        async with over_nobody(gate.address, reconnect=patient, settings=settings) as live:
            reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
            writer.write(request_bytes(PATH, json.dumps(data).encode()))
            raw = await reader.readuntil(b"data: {")
            port, gate.port = gate.port, None
            gate.kill()
            raw += await reader.readuntil(b": keep-alive\n\n")
            gate.port = port
            events = events_of(parse_reply(raw + await reader.read()).body)
            writer.close()
    texts = [one["choices"][0]["text"] for one in events if isinstance(one, dict)]
    tokens = toy_text(TEXT.encode("abc"), SamplingParams(max_tokens=150, ignore_eos=True))
    assert "".join(texts) == TEXT.decode(tokens)
    assert events[-1] == "[DONE]"


async def test_what_fails_in_the_middle_is_told_in_the_stream() -> None:
    async def fail(place: int) -> None:
        if place == 1:
            raise RuntimeError("broken")

    agent = ScriptedAgent(["a", "b"], between=fail)
    async with over_script(agent) as live:
        reply = await ask(live, PATH, {**HELLO, "stream": True})
        events = events_of(reply.body)
        assert reply.status == 200
        assert events[0]["choices"][0]["text"] == "a"
        assert events[-1]["error"]["message"] == "the generation failed: RuntimeError: broken"
        assert events[-1]["error"]["type"] == "server_error"
        whole = await ask(live, PATH, HELLO)
        assert whole.status == 500
        assert live.endpoint.counts.requests[PATH, "cut"] == 1


async def test_a_generation_cancelled_on_the_device_is_no_answer() -> None:
    async with over_script(ScriptedAgent(["a"], finish=FinishReason.CANCELLED)) as live:
        reply = await ask(live, PATH, HELLO)
        assert (reply.status, reply.error["code"]) == (503, "cancelled")


async def test_metrics_version_and_places_that_are_not() -> None:
    async with over_script(ScriptedAgent(["a"])) as live:
        await ask(live, PATH, HELLO)
        await ask(live, PATH, {"prompt": ""})
        metrics = (await ask(live, "/metrics")).body.decode()
        assert f'edgespec_endpoint_requests_total{{outcome="200",path="{PATH}"}} 1.0' in metrics
        assert f'edgespec_endpoint_requests_total{{outcome="400",path="{PATH}"}} 1.0' in metrics
        assert 'edgespec_endpoint_completion_tokens_total{model="edgespec"} 1.0' in metrics
        assert 'edgespec_endpoint_time_to_first_token_seconds_bucket{le="+Inf"} 1.0' in metrics
        assert set((await ask(live, "/version")).json) == {"version"}
        nowhere = await ask(live, "/v1/embeddings", {})
        assert (nowhere.status, nowhere.error["type"]) == (404, "not_found_error")
        assert (await ask(live, PATH)).status == 405


async def test_the_page_its_numbers_and_the_agents_metrics() -> None:
    async with over_toy(shows_status=True, key="sesame") as live:
        page = await ask(live, "/")
        assert page.status == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert (await ask(live, "/status.json")).status == 401
        key = {"Authorization": "Bearer sesame"}
        assert (
            await ask(live, "/v1/completions", {"prompt": "abc", "max_tokens": 5}, **key)
        ).status == 200
        numbers = (await ask(live, "/status.json", **key)).json
        assert numbers["totals"]["tokens"] == 5
        assert numbers["verifiers"][0]["state"] == "ready"
        lines = (await ask(live, "/metrics", **key)).body.decode().splitlines()
    assert "edgespec_agent_generation_tokens_total 5.0" in lines
    assert 'edgespec_endpoint_completion_tokens_total{model="toy"} 5.0' in lines


@pytest.mark.parametrize("stream", [True, False])
async def test_what_was_ignored_stands_in_a_header(stream: bool) -> None:
    async with over_script(ScriptedAgent(["b"])) as live:
        more = {"num_ctx": 1, "a\r\nb": 2, "echo": True, "stream": stream}
        reply = await ask(live, "/v1/completions", {"prompt": "a", **more})
    assert reply.headers["x-edgespec-ignored"] == "num_ctx, a??b"
    bodies = events_of(reply.body)[:-1] if stream else [reply.json]
    assert "".join(one["choices"][0]["text"] for one in bodies) == "ab"


async def test_texts_are_tokenized_and_back() -> None:
    async with over_toy() as live:
        found = (await ask(live, "/tokenize", {"prompt": "abc"})).json
        assert (found["count"], found["max_model_len"]) == (3, 4096)
        assert (await ask(live, "/tokenize", {"content": "abc"})).json == found
        back = (await ask(live, "/detokenize", {"tokens": found["tokens"]})).json
        assert back["prompt"] == back["content"] == "abc"
        messages = [{"role": "user", "content": "abc"}]
        assert (await ask(live, "/tokenize", {"messages": messages})).json["count"] > 3
        for path, data in (
            ("/detokenize", {"tokens": [1 << 30]}),
            ("/detokenize", {"tokens": "abc"}),
            ("/tokenize", {"prompt": 3}),
            ("/tokenize", {"prompt": "a" * 1_000_000}),
            ("/tokenize", [3]),
        ):
            assert (await ask(live, path, data)).status == 400, (path, data)
        long = await ask(live, "/tokenize", {"prompt": "a" * (5 << 20)})
        assert long.status == 413
