"""Who may ask: hosts, web pages, keys. Oracle: the status, and whether the agent was asked."""

from __future__ import annotations

import json

import pytest

from edgespec.config import EndpointSection
from tests.endpoint.live_endpoint import (
    Live,
    ScriptedAgent,
    ask,
    exchange,
    over_script,
    request_bytes,
)

PATH = "/v1/completions"
HELLO = {"prompt": "abc", "max_tokens": 4}


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
