"""Tests of HTTP itself: invalid bodies, clients that leave, absent verifiers, limits, and
connections that hold a place without sending or reading.

Oracles: the status, the fields of the error, the state that the verifier still holds, closed
connections, and other requests answered meanwhile. No test reads a clock: a connection that is
never released makes its test hang. Admission is compared with a list of waiting requests, served
strictly in order, in random schedules.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.config import EndpointSection
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.protocol.messages import FinishReason
from edgespec.endpoint.admission import Admission
from edgespec.endpoint.request_json import ApiError
from edgespec.endpoint.requests import choice_seed
from edgespec.endpoint.server import connection_limit
from edgespec.models.toy import ToyTokenizer
from tests.endpoint.live_endpoint import (
    APIS,
    Api,
    Live,
    Reply,
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
from tests.kit.gate import Gate
from tests.kit.live_verifier import serve_toy, wait_until
from tests.present import require

WITHIN_S = 60
TEXT = ToyTokenizer()
PATH = "/v1/completions"
HELLO = {"prompt": "abc", "max_tokens": 4}
every_api = pytest.mark.parametrize("api", APIS, ids=[one.path for one in APIS])


def test_the_seed_of_a_choice_is_what_the_documentation_says() -> None:
    """The expected number is made of the first 16 digits of ``printf 5:1 | sha256sum``."""
    assert choice_seed(5, 0) == 5
    assert choice_seed(5, 1) == 0xA5886F21FCB5F028


async def test_a_body_beyond_the_limit_is_not_read() -> None:
    settings = EndpointSection(max_body_bytes=1024)
    async with over_script(ScriptedAgent(["a"]), settings=settings) as live:
        request = request_bytes(PATH, b"{}", headers={"Content-Length": "1025"})
        reply = await exchange(live.port, request)
        assert (reply.status, reply.error["code"]) == (413, "too_large")
        bound = "1025 bytes, but at most 1024 are read (endpoint.max_body_bytes)"
        assert bound in reply.error["message"]
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


@every_api
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_cancels_the_generation(api: Api, stream: bool) -> None:
    async with over_toy(draft="toy") as live:
        verifier = require(live.verifier)
        data = api.request(4000, stream=stream, ignore_eos=True)
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(request_bytes(api.path, json.dumps(data).encode()))
        await writer.drain()
        if stream:
            await reader.readuntil(api.first_bytes)
        await wait_until(lambda: verifier.info.sessions == 1)
        writer.transport.abort()
        await wait_until(lambda: live.endpoint.running_count == 0)
        await wait_until(lambda: verifier.info.sessions == 0)
        await wait_until(lambda: live.endpoint.counts.requests[api.path, "gone"] == 1)
        assert live.endpoint.counts.completion_tokens.total() < 4000
        assert live.endpoint.admission.running == 0
        assert (await ask(live, api.path, api.request())).status == 200


class Held:
    """A hook that holds a scripted agent back until ``gate`` is set."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.reached = asyncio.Event()

    async def __call__(self, place: int) -> None:
        if place == 1:
            self.reached.set()
            await self.gate.wait()


@every_api
async def test_a_full_queue_refuses_and_the_rest_is_served_in_order(api: Api) -> None:
    held = Held()
    settings = EndpointSection(max_concurrent=1, max_queue=1)
    agent = ScriptedAgent(["a", "b"], between=held)
    async with over_script(agent, settings=settings) as live:
        first = asyncio.create_task(ask(live, api.path, api.request()))
        await held.reached.wait()
        second = asyncio.create_task(ask(live, api.path, api.request(stream=True)))
        await wait_until(lambda: live.endpoint.admission.waiting == 1)
        third = await ask(live, api.path, api.request())
        assert third.status == api.overloaded
        assert third.headers["retry-after"] == "1"
        assert "1 requests wait" in api.error_message(third.json)
        await wait_until(lambda: live.endpoint.counts.requests[api.path, str(api.overloaded)] == 1)
        held.gate.set()
        for reply in (await first, await second):
            assert api.text(reply) == "ab"
        assert live.endpoint.admission.running == 0


async def test_a_full_queue_is_a_rate_limit_at_openai_and_an_overload_at_anthropic() -> None:
    held = Held()
    settings = EndpointSection(max_concurrent=1, max_queue=1)
    async with over_script(ScriptedAgent(["a", "b"], between=held), settings=settings) as live:
        running = [asyncio.create_task(ask(live, PATH, HELLO)) for _ in range(2)]
        await wait_until(lambda: live.endpoint.admission.waiting == 1)
        for api, kind in ((APIS[0], "rate_limit_error"), (APIS[3], "overloaded_error")):
            assert (await ask(live, api.path, api.request())).error["type"] == kind
        held.gate.set()
        assert [one.status for one in await asyncio.gather(*running)] == [200, 200]


@every_api
async def test_a_stream_that_waits_for_its_turn_is_kept_alive(api: Api) -> None:
    held = Held()
    settings = EndpointSection(max_concurrent=1, keep_alive_s=0.02)
    agent = ScriptedAgent(["a", "b"], between=held)
    async with over_script(agent, settings=settings) as live, asyncio.timeout(WITHIN_S):
        first = asyncio.create_task(ask(live, PATH, HELLO))
        await held.reached.wait()
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(request_bytes(api.path, json.dumps(api.request(stream=True)).encode()))
        raw = await reader.readuntil(api.keep_alive)
        raw += await reader.readuntil(api.keep_alive)
        assert live.endpoint.admission.waiting == 1
        held.gate.set()
        reply = parse_reply(raw + await reader.read())
        writer.close()
        assert (await first).status == 200
    assert api.text(reply) == "ab"


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
        async with serve_toy() as (address, _):
            gate.port = int(address.rpartition(":")[2])
            reply = parse_reply(raw + await reader.read())
            assert events_of(reply.body)[-1] == "[DONE]"
            done = await at_once
            assert done.status == 200
            await wait_until(lambda: live.watch.ready)
            health = await ask(live, "/health")
            assert (health.json["status"], health.json["model"]) == ("ok", "toy")
        writer.close()


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


@every_api
async def test_an_error_in_the_middle_has_the_shape_of_its_api(api: Api) -> None:
    async def fail(place: int) -> None:
        if place == 1:
            raise RuntimeError("broken")

    async with over_script(ScriptedAgent(["a", "b"], between=fail)) as live:
        reply = await ask(live, api.path, api.request(stream=True))
        last = reply.body.strip().splitlines()[-1].removeprefix(b"data: ")
        why = "the generation failed: RuntimeError: broken"
        if api.path == "/v1/responses":  # its errors in streams are events of their own
            assert json.loads(last)["message"] == why
        else:
            assert api.error_message(json.loads(last)) == why
        await wait_until(lambda: live.endpoint.counts.requests[api.path, "cut"] == 1)
        whole = await ask(live, api.path, api.request())
        assert (whole.status, api.error_message(whole.json)) == (500, why)


@every_api
@pytest.mark.parametrize("stream", [True, False])
async def test_every_api_streams_what_it_answers_whole(api: Api, stream: bool) -> None:
    """The oracle is the script. Metrics name the path, and so the API."""
    async with over_script(ScriptedAgent(["a", " b", "ü"])) as live:
        reply = await ask(live, api.path, api.request(stream=stream))
        metrics = (await ask(live, "/metrics")).body.decode()
    assert reply.status == 200
    assert api.text(reply) == "a bü"
    assert f'requests_total{{outcome="200",path="{api.path}"}} 1.0' in metrics


@every_api
@pytest.mark.parametrize(
    ("body", "status"),
    [(b"[]", 400), (b"{", 400), (b"\xff", 400), (b'{"model": 3}', 400)],
    ids=["list", "half", "bytes", "number"],
)
async def test_bad_bodies_are_refused_in_the_shape_of_the_api(
    api: Api, body: bytes, status: int
) -> None:
    async with over_script(ScriptedAgent(["a"])) as live:
        reply = await exchange(live.port, request_bytes(api.path, body))
    assert reply.status == status
    assert api.error_message(reply.json)


@every_api
async def test_every_api_asks_for_the_key(api: Api) -> None:
    async with over_script(ScriptedAgent(["a"]), key="the key") as live:
        for wrong in ({}, {"X-API-Key": "the kez"}, {"Authorization": "Bearer the kez"}):
            reply = await ask(live, api.path, api.request(), **wrong)
            assert reply.status == 401, wrong
            assert "key" in api.error_message(reply.json)
        for right in ({"X-API-Key": "the key"}, {"Authorization": "Bearer the key"}):
            assert (await ask(live, api.path, api.request(), **right)).status == 200, right


@every_api
async def test_no_verifier_is_a_503_in_the_shape_of_the_api(api: Api) -> None:
    async with over_nobody() as live:
        reply = await ask(live, api.path, api.request())
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")
    assert "verifier" in api.error_message(reply.json)


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
        long = await ask(live, "/tokenize", {"prompt": "a" * (16 << 20)})
        assert long.status == 413


# --- connections ----------------------------------------------------------------------------------


SOON = EndpointSection(body_within_s=0.1, write_within_s=0.1)


@asynccontextmanager
async def open_client(
    live: Live, buffer: int = 0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect a client that reads nothing by itself. The kernel holds about ``buffer`` bytes for
    it."""
    plain = socket.socket()
    if buffer:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", live.port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@every_api
@pytest.mark.parametrize("stream", [True, False])
async def test_who_reads_nothing_holds_no_connection(api: Api, stream: bool) -> None:
    agent = ScriptedAgent(["x" * 100_000] * 400)
    async with over_script(agent, settings=SOON) as live:
        async with open_client(live, 4096) as (_, writer):
            data = json.dumps(api.request(stream=stream)).encode()
            writer.write(request_bytes(api.path, data))
            await wait_until(lambda: agent.closed and not live.server.connections)


async def test_connections_that_say_nothing_keep_nobody_out() -> None:
    async with over_script(ScriptedAgent(["a"]), max_connections=3) as live:
        async with open_client(live), open_client(live), open_client(live), open_client(live):
            assert (await ask(live, PATH, HELLO)).status == 200


async def test_a_burst_holds_no_more_descriptors_than_there_is_room_for() -> None:
    """The system connects all clients before the endpoint accepts the first."""
    burst, most, beyond = 200, 16, 40
    peak, counts = 0, True

    def count() -> None:
        nonlocal peak
        peak = max(peak, len(os.listdir("/proc/self/fd")))
        if counts:
            loop.call_soon(count)  # once in every iteration of the loop

    loop = asyncio.get_running_loop()
    async with over_script(ScriptedAgent(["a"]), max_connections=most) as live:
        before = len(os.listdir("/proc/self/fd"))
        clients = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(burst)]
        count()
        with contextlib.ExitStack() as stack:
            for one in clients:
                stack.enter_context(one)
            assert (await ask(live, PATH, HELLO)).status == 200
            assert live.server.connections <= most + beyond
        assert peak - before - burst <= most + beyond
        counts = False


@pytest.mark.parametrize(
    ("limit", "most"), [(resource.RLIM_INFINITY, 512), (4096, 512), (600, 504), (64, 1)]
)
def test_a_low_limit_of_descriptors_leaves_room_for_fewer(
    limit: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert connection_limit() == most


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("key", "status"), [("", 413), ("wrong", 401)], ids=["too-large", "no-key"]
)
def test_who_sends_too_much_can_read_the_answer(key: str, status: int, chunked: bool) -> None:
    """Like most clients, this one reads only after its whole request was sent."""
    body = b"x" * (6 << 20)
    if chunked:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)

    async def sent() -> Reply:
        more = {"Transfer-Encoding": "chunked"} if chunked else {}
        settings = EndpointSection(max_body_bytes=4 << 20)
        async with over_script(ScriptedAgent(["a"]), settings=settings, key=key) as live:
            request = request_bytes(PATH, body, headers={"Authorization": "Bearer no", **more})
            return await asyncio.to_thread(send_then_read, live.port, request)

    assert asyncio.run(sent()).status == status


def send_then_read(port: int, request: bytes) -> Reply:
    with socket.create_connection(("127.0.0.1", port), WITHIN_S) as client:
        client.sendall(request)
        return parse_reply(b"".join(iter(lambda: client.recv(4096), b"")))


async def test_who_never_ends_to_send_is_let_go() -> None:
    async def send_on(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x" * 1000)
            await writer.drain()
            await asyncio.sleep(0)

    async with over_script(ScriptedAgent(["a"]), settings=SOON) as live:
        async with open_client(live) as (reader, writer), asyncio.timeout(WITHIN_S):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n")
            assert (await reader.read(12)) == b"HTTP/1.1 403"
            with pytest.raises(OSError):  # noqa: PT011 # reset, or a pipe that is broken
                await send_on(writer)


async def test_beyond_the_most_connections_who_is_answered_stays() -> None:
    gate = asyncio.Event()

    async def between(place: int) -> None:
        await gate.wait()

    agent = ScriptedAgent(["a"], FinishReason.STOP, between=between)
    async with over_script(agent, max_connections=2) as live:
        running = [asyncio.create_task(ask(live, PATH, HELLO)) for _ in range(2)]
        await wait_until(lambda: live.endpoint.running_count == 2)
        late = await ask(live, "/version")
        assert (late.status, late.error["code"]) == (503, "too_many_connections")
        assert late.headers["retry-after"] == "1"
        gate.set()
        assert [one.status for one in await asyncio.gather(*running)] == [200, 200]
        assert (await ask(live, PATH, HELLO)).status == 200


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent(["a"])


async def ask_status(live: Live, **headers: str) -> int:
    return (await ask(live, PATH, HELLO, **headers)).status


async def test_a_foreign_host_is_refused_on_loopback(agent: ScriptedAgent) -> None:
    async with over_script(agent, settings=EndpointSection(allow_hosts=("proxy",))) as live:
        for host in ("localhost", "localhost:7421", "127.0.0.1", "[::1]:9", "127.9.9.9", "proxy"):
            assert await ask_status(live, Host=host) == 200, host
        for host in ("evil.example", "localhost.evil.example", "1.2.3.4", "a/b", ""):
            assert await ask_status(live, Host=host) == 403, host
        assert (await ask(live, "/health", Host="evil.example")).status == 403
    assert len(agent.prompts) == 6


async def test_web_pages_ask_only_where_they_were_let_in(agent: ScriptedAgent) -> None:
    async with over_script(agent) as live:
        own = {"Host": f"127.0.0.1:{live.port}", "Origin": f"http://127.0.0.1:{live.port}"}
        assert await ask_status(live, **own) == 200
        for origin in ("http://evil.example", "null", "http://127.0.0.1.evil.example"):
            assert await ask_status(live, Origin=origin) == 403, origin
    page = "https://chat.example"
    async with over_script(agent, settings=EndpointSection(allow_origins=(page,))) as live:
        preflight = await ask(
            live,
            PATH,
            method="OPTIONS",
            Origin=page,
            Access_Control_Request_Method="POST",
            Access_Control_Request_Headers="authorization",
        )
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == page
        reply = await ask(live, PATH, HELLO, Origin=page)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, page)
        assert await ask_status(live, Origin="http://evil.example") == 403
    async with over_script(agent, settings=EndpointSection(allow_origins=("*",))) as live:
        assert await ask_status(live, Origin="http://any.example") == 200


async def test_a_key_is_asked_for_everywhere_but_health(agent: ScriptedAgent) -> None:
    async with over_script(agent, key="the key") as live:
        for path in ("/v1/models", "/metrics", "/version", "/nowhere"):
            reply = await ask(live, path)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), path
            assert reply.headers["www-authenticate"].startswith("Bearer")
        for shown_value in (
            "Bearer the kez",
            "Bearer ",
            "Basic the key",
            "the key",
            "Bearer thé key",
        ):
            assert await ask_status(live, Authorization=shown_value) == 401, shown_value
        assert await ask_status(live, Authorization="bearer the key") == 200
        assert (await ask(live, "/health")).json == {"status": "waiting", "needs_key": True}
        health = await ask(live, "/health", Authorization="Bearer the key")
        assert "verifiers" in health.json


async def test_a_request_of_two_lengths_is_none_and_nothing_behind_it_is_read(
    agent: ScriptedAgent,
) -> None:
    """Such a request could be smuggled past a proxy that obeys Content-Length."""
    body = json.dumps(HELLO).encode()
    hidden = request_bytes(PATH, body)
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) + hidden
    head = {"Transfer-Encoding": "chunked", "Content-Length": str(len(sent)), "Connection": "x"}
    async with over_script(agent) as live:
        reply = await exchange(live.port, request_bytes(PATH, sent, headers=head))
        assert reply.status == 400
        assert json.loads(reply.body)["error"]["code"] == "two_lengths"
    assert not agent.prompts


# --- the queue for turns --------------------------------------------------------------------------


CAPACITY, WAITING = 4, 5
Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "leave", "end"]), st.integers(1, CAPACITY)), max_size=40
)


class Client:
    """A client that holds its turn until ``end`` is called."""

    def __init__(self, admission: Admission) -> None:
        self.has_turn = False
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission: Admission) -> None:
        await admission.enter(1)
        self.has_turn = True
        try:
            await self._end.wait()
        finally:
            admission.leave()

    def end(self) -> None:
        self._end.set()


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def play(steps: list[Step]) -> None:
    admission = Admission(CAPACITY, WAITING)
    clients: list[Client] = []
    for kind, number in steps:
        waiting = [one for one in clients if not one.has_turn]
        if kind == "ask":
            client = Client(admission)
            await settle()
            if len(waiting) >= WAITING:
                with pytest.raises(ApiError, match=f"{WAITING} requests wait"):
                    await client.task
            else:
                clients.append(client)
        elif clients:
            client = clients[number % len(clients)]
            if kind == "leave":
                client.task.cancel()
            else:
                client.end()  # a waiting client will end when it gets its turn
            await settle()
        check(admission, clients)
    for client in clients:
        client.task.cancel()
    await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
    assert (admission.running, admission.waiting) == (0, 0)


def check(admission: Admission, clients: list[Client]) -> None:
    clients[:] = [one for one in clients if not one.task.done()]
    running = sum(one.has_turn for one in clients)
    waiting = [one for one in clients if not one.has_turn]
    assert admission.running == running <= CAPACITY
    assert admission.waiting == len(waiting) <= WAITING
    assert clients[len(clients) - len(waiting) :] == waiting, "nobody is overtaken"
    assert not waiting or running == CAPACITY


@settings(max_examples=40)
@given(steps=STEPS)
def test_turns_are_never_lost_and_never_too_many(steps: list[Step]) -> None:
    asyncio.run(play(steps))


async def test_a_turn_that_comes_with_the_cancellation_is_given_back() -> None:
    admission = Admission(1, 2)
    first = Client(admission)
    await settle()
    second, third = Client(admission), Client(admission)
    await settle()
    first.end()
    await first.task  # the second client has its turn now, but its task has not run yet
    second.task.cancel()
    await settle()
    assert third.has_turn
    third.end()
    await third.task
    assert admission.running == 0
