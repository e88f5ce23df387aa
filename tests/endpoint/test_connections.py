"""Connections that hold a place and say, or read, nothing. Oracle: that they are closed, and that
others are answered meanwhile. No clock: whoever is not let go fails by never coming to its end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from edgespec.config import EndpointSection
from edgespec.core.protocol.messages import FinishReason
from tests.endpoint.live_endpoint import Live, ScriptedAgent, ask, over_script, request_bytes

WITHIN_S = 60
PATH = "/v1/completions"
HELLO = {"prompt": "abc", "max_tokens": 4}
SOON = EndpointSection(body_within_s=0.1, write_within_s=0.1)
ONCE = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


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


@pytest.mark.parametrize("said", [b"", b"GET /health HT", ONCE[:-2] + b"X-More: "])
@pytest.mark.parametrize("answered", [False, True])
async def test_who_asks_nothing_is_let_go(said: bytes, answered: bool) -> None:
    """Also behind an answer, where uvicorn's own patience ends with the first further byte."""
    async with over_script(ScriptedAgent(["a"]), settings=SOON) as live:
        async with connected(live) as (reader, writer), asyncio.timeout(WITHIN_S):
            if answered:
                writer.write(ONCE)
                await reader.readuntil(b"}")
            writer.write(said)
            while await reader.read(4096):
                pass
        assert (await ask(live, PATH, HELLO)).status == 200


async def test_an_answer_that_takes_its_time_is_no_silence() -> None:
    gate = asyncio.Event()

    async def between(place: int) -> None:
        if place == 1:
            await gate.wait()

    async with over_script(ScriptedAgent(["a", "b"], between=between), settings=SOON) as live:
        slow = asyncio.create_task(ask(live, PATH, HELLO))
        async with connected(live) as (reader, _), asyncio.timeout(WITHIN_S):
            await reader.read()  # let go: so long has passed
        gate.set()
        assert (await slow).json["choices"][0]["text"] == "ab"


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


async def test_who_asks_on_and_reads_nothing_is_let_go() -> None:
    async def ask_on(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1000)
            await writer.drain()

    async with over_script(ScriptedAgent(["a"]), settings=SOON) as live:
        async with connected(live, 4096) as (_, writer), asyncio.timeout(WITHIN_S):
            writer.transport.pause_reading()  # type: ignore[attr-defined] # it is a socket's
            with pytest.raises(OSError):  # noqa: PT011 # reset, or a pipe that is broken
                await ask_on(writer)


async def test_connections_that_say_nothing_keep_nobody_out() -> None:
    async with over_script(ScriptedAgent(["a"]), most_connections=3) as live:
        async with connected(live), connected(live), connected(live), connected(live):
            assert (await ask(live, PATH, HELLO)).status == 200


async def test_beyond_the_most_connections_who_is_answered_stays() -> None:
    gate = asyncio.Event()

    async def between(place: int) -> None:
        await gate.wait()

    agent = ScriptedAgent(["a"], FinishReason.STOP, between=between)
    async with over_script(agent, most_connections=2) as live:
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
