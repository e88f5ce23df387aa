"""Connections that hold a place and say, or read, nothing. Oracle: that they are closed, and that
others are answered meanwhile. No clock: whoever is not let go fails by never coming to its end."""

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

from edgespec.config import EndpointSection
from edgespec.core.protocol.messages import FinishReason
from edgespec.endpoint.server import most_connections
from tests.endpoint.live_endpoint import (
    Live,
    Reply,
    ScriptedAgent,
    ask,
    exchange,
    over_script,
    parse_reply,
    request_bytes,
)

WITHIN_S = 60
PATH = "/v1/completions"
HELLO = {"prompt": "abc", "max_tokens": 4}
SOON = EndpointSection(body_within_s=0.1, write_within_s=0.1)


@asynccontextmanager
async def connected(
    live: Live, buffer: int = 0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """``buffer``: the kernel holds about so many bytes for a client that does not read."""
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


@pytest.mark.parametrize("stream", [True, False])
async def test_who_reads_nothing_holds_no_connection(stream: bool) -> None:
    agent = ScriptedAgent(["x" * 100_000] * 400)
    async with over_script(agent, settings=SOON) as live:
        async with connected(live, 4096) as (_, writer), asyncio.timeout(WITHIN_S):
            writer.write(request_bytes(PATH, json.dumps({**HELLO, "stream": stream}).encode()))
            while not agent.closed:  # noqa: ASYNC110 # of things that have no event
                await asyncio.sleep(0)
            while live.server.connections:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_connections_that_say_nothing_keep_nobody_out() -> None:
    async with over_script(ScriptedAgent(["a"]), most=3) as live:
        async with connected(live), connected(live), connected(live), connected(live):
            assert (await ask(live, PATH, HELLO)).status == 200


async def test_a_burst_holds_no_more_descriptors_than_there_is_room_for() -> None:
    """All clients are connected, by the system, before the endpoint accepts the first of them."""
    burst, most, beyond = 200, 16, 40
    peak, counts = 0, True

    def count() -> None:
        nonlocal peak
        peak = max(peak, len(os.listdir("/proc/self/fd")))
        if counts:
            loop.call_soon(count)  # once in every turn of the loop

    loop = asyncio.get_running_loop()
    async with over_script(ScriptedAgent(["a"]), most=most) as live:
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
    assert most_connections() == most


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("key", "status"), [("", 413), ("wrong", 401)], ids=["too-large", "no-key"]
)
def test_who_sends_too_much_can_read_the_answer(key: str, status: int, chunked: bool) -> None:
    """As most clients do, this one reads when all of its request has left."""
    body = b"x" * (6 << 20)
    if chunked:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)

    async def sent() -> Reply:
        more = {"Transfer-Encoding": "chunked"} if chunked else {}
        async with over_script(ScriptedAgent(["a"]), key=key) as live:
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
        async with connected(live) as (reader, writer), asyncio.timeout(WITHIN_S):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n")
            assert (await reader.read(12)) == b"HTTP/1.1 403"
            with pytest.raises(OSError):  # noqa: PT011 # reset, or a pipe that is broken
                await send_on(writer)


async def test_beyond_the_most_connections_who_is_answered_stays() -> None:
    gate = asyncio.Event()

    async def between(place: int) -> None:
        await gate.wait()

    agent = ScriptedAgent(["a"], FinishReason.STOP, between=between)
    async with over_script(agent, most=2) as live:
        running = [asyncio.create_task(ask(live, PATH, HELLO)) for _ in range(2)]
        async with asyncio.timeout(WITHIN_S):
            while live.endpoint.active < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        late = await ask(live, "/version")
        assert (late.status, late.error["code"]) == (503, "too_many_connections")
        assert late.headers["retry-after"] == "1"
        gate.set()
        assert [one.status for one in await asyncio.gather(*running)] == [200, 200]
        assert (await ask(live, PATH, HELLO)).status == 200


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent(["a"])


async def asked_by(live: Live, **headers: str) -> int:
    return (await ask(live, PATH, HELLO, **headers)).status


async def test_a_foreign_host_is_refused_on_loopback(agent: ScriptedAgent) -> None:
    async with over_script(agent, settings=EndpointSection(allow_hosts=("proxy",))) as live:
        for host in ("localhost", "localhost:7421", "127.0.0.1", "[::1]:9", "127.9.9.9", "proxy"):
            assert await asked_by(live, Host=host) == 200, host
        for host in ("evil.example", "localhost.evil.example", "1.2.3.4", "a/b", ""):
            assert await asked_by(live, Host=host) == 403, host
        assert (await ask(live, "/health", Host="evil.example")).status == 403
    assert len(agent.prompts) == 6


async def test_web_pages_ask_only_where_they_were_let_in(agent: ScriptedAgent) -> None:
    async with over_script(agent) as live:
        own = {"Host": f"127.0.0.1:{live.port}", "Origin": f"http://127.0.0.1:{live.port}"}
        assert await asked_by(live, **own) == 200
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
            assert await asked_by(live, Origin=origin) == 403, origin
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
        assert await asked_by(live, Origin="http://evil.example") == 403
    async with over_script(agent, settings=EndpointSection(allow_origins=("*",))) as live:
        assert await asked_by(live, Origin="http://any.example") == 200


async def test_a_key_is_asked_for_everywhere_but_health(agent: ScriptedAgent) -> None:
    async with over_script(agent, key="the key") as live:
        for path in ("/v1/models", "/metrics", "/version", "/nowhere"):
            reply = await ask(live, path)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), path
            assert reply.headers["www-authenticate"].startswith("Bearer")
        for shown in ("Bearer the kez", "Bearer ", "Basic the key", "the key", "Bearer thé key"):
            assert await asked_by(live, Authorization=shown) == 401, shown
        assert await asked_by(live, Authorization="bearer the key") == 200
        assert (await ask(live, "/health")).json == {"status": "waiting"}
        told = await ask(live, "/health", Authorization="Bearer the key")
        assert "verifiers" in told.json


async def test_a_request_of_two_lengths_is_none_and_nothing_behind_it_is_read(
    agent: ScriptedAgent,
) -> None:
    """What would be smuggled past a proxy that goes by Content-Length."""
    body = json.dumps(HELLO).encode()
    hidden = request_bytes(PATH, body)
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) + hidden
    head = {"Transfer-Encoding": "chunked", "Content-Length": str(len(sent)), "Connection": "x"}
    async with over_script(agent) as live:
        reply = await exchange(live.port, request_bytes(PATH, sent, headers=head))
        assert reply.status == 400
        assert json.loads(reply.body)["error"]["code"] == "two_lengths"
    assert not agent.prompts
