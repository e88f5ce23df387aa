"""Tests of the origins that may use the endpoint. Oracles: the origins that browsers and
applications send; the rules of Fetch and of Chrome's private network access for a preflight; both
loopback addresses."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from pathlib import Path

import pytest

from edgespec.cli import running
from edgespec.cli.serve import _answering_waiting
from edgespec.config import AgentConfig, EndpointSection
from edgespec.config.common import SetupError, host_names
from edgespec.core.ports import LinkError
from edgespec.device.build import connect
from edgespec.endpoint.app import waiting_app
from edgespec.endpoint.server import EndpointServer
from tests.endpoint.live_endpoint import Live, ScriptedAgent, ask, over_script
from tests.kit.live_verifier import run_command, serve_toy

PATH, HELLO = "/v1/completions", {"prompt": "a"}
has_ipv6 = pytest.mark.skipif(len(host_names("localhost")) == 1, reason="needs IPv6")
OWN = (
    *("http://localhost", "http://localhost:3000", "https://localhost:8443", "http://[::1]:5173"),
    *("http://127.0.0.1:1", "app://obsidian.md", "tauri://localhost", "capacitor://localhost"),
    *("ionic://localhost", "vscode-webview://0a1b2c", "vscode-file://vscode-app", "file://"),
)
FOREIGN = (
    *(
        "https://evil.example",
        "http://localhost.evil.example",
        "http://localhost:3000.evil.example",
    ),
    *("http://127.0.0.1.evil.example", "http://evil.example:80", "null", "http://localhost@evil"),
    *(
        "chrome-extension://abc",
        "https://tauri.localhost.evil",
        "http://10.0.0.7:3000",
        "localhost",
    ),
)


async def send_preflight(live: Live, origin: str, **more: str) -> dict[str, str]:
    """Return the headers of the answer, with its status."""
    reply = await ask(
        live,
        PATH,
        method="OPTIONS",
        Origin=origin,
        Access_Control_Request_Method="POST",
        Access_Control_Request_Headers="authorization,content-type",
        **more,
    )
    return {**reply.headers, "status": str(reply.status), "body": reply.body.decode()}


async def test_pages_and_applications_of_this_machine_may_ask() -> None:
    async with over_script(ScriptedAgent(["a"])) as live:
        for origin in OWN:
            answer = await send_preflight(live, origin)
            assert (answer["status"], answer["access-control-allow-origin"]) == ("200", origin)
            reply = await ask(live, PATH, HELLO, Origin=origin)
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, origin)
            for name in ("x-request-id", "x-edgespec-ignored", "retry-after"):
                assert name in reply.headers["access-control-expose-headers"].lower()
        for origin in FOREIGN:
            answer = await send_preflight(live, origin)
            assert answer["status"] == "403", origin
            assert "access-control-allow-origin" not in answer
            assert "--allow-origin" in answer["body"]
            reply = await ask(live, PATH, HELLO, Origin=origin)
            assert (reply.status, reply.error["code"]) == (403, "foreign_origin")
            assert "--allow-origin" in reply.error["message"]
            assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("given", "let_in", "kept_out"),
    [
        (
            "https://*.chat.example",
            ("https://a.chat.example", "https://a.b.chat.example"),
            ("https://chat.example", "https://achat.example", "https://a.chat.example:444"),
        ),
        ("http://*:8080", ("http://a.example:8080",), ("http://a.example", "http://b:80801")),
        ("http://dev:*", ("http://dev", "http://dev:1"), ("http://dev.evil", "http://dev:x")),
        ("HTTPS://Chat.Example:443", ("https://chat.example",), ("https://chatxexample",)),
        ("chrome-extension://*", ("chrome-extension://abc",), ("moz-extension://abc",)),
        ("http://[fd00::7]:*", ("http://[fd00::7]:9",), ("http://[fd00::8]:9",)),
        ("*", ("https://any.example", "null"), ()),
    ],
)
async def test_patterns_let_in_what_they_name(
    given: str, let_in: tuple[str, ...], kept_out: tuple[str, ...]
) -> None:
    settings = EndpointSection(allow_origins=(given,))
    async with over_script(ScriptedAgent(["a"]), settings=settings) as live:
        for origin in let_in:
            assert (await ask(live, PATH, HELLO, Origin=origin)).status == 200, origin
            assert (await send_preflight(live, origin))["status"] == "200"
        for origin in kept_out:
            assert (await ask(live, PATH, HELLO, Origin=origin)).status == 403, origin


async def test_beyond_this_machine_only_named_pages_may_ask() -> None:
    settings = EndpointSection(host="0.0.0.0", insecure=True, allow_origins=("https://a.example",))
    async with over_script(ScriptedAgent(["a"]), settings=settings) as live:
        assert (await ask(live, PATH, HELLO, Origin="https://a.example")).status == 200
        for origin in OWN:
            assert (await ask(live, PATH, HELLO, Origin=origin)).status == 403


async def test_a_page_may_reach_into_the_private_network_and_read_why_it_may_not() -> None:
    settings = EndpointSection(allow_origins=("https://a.example",))
    async with over_script(ScriptedAgent(["a"]), settings=settings, key="sesame") as live:
        private = {"Access_Control_Request_Private_Network": "true"}
        answer = await send_preflight(live, "https://a.example", **private)
        assert (answer["status"], answer["access-control-allow-private-network"]) == ("200", "true")
        without_key = await ask(live, PATH, HELLO, Origin="https://a.example")
        rebound = await ask(live, PATH, HELLO, Origin="https://a.example", Host="evil.example")
        for reply, status in ((without_key, 401), (rebound, 403)):
            assert reply.status == status
            assert reply.headers["access-control-allow-origin"] == "https://a.example"


@has_ipv6
async def test_both_loopback_addresses_answer() -> None:
    async with over_script(ScriptedAgent(["a"])) as live:
        for where in ("127.0.0.1", "[::1]", "localhost"):
            url = f"http://{where}:{live.port}/health"
            answer = await asyncio.to_thread(urllib.request.urlopen, url)
            assert json.loads(answer.read())["status"] == "waiting"
    async with serve_toy() as (address, _):
        port = address.rpartition(":")[2]
        for where in ("127.0.0.1", "[::1]", "localhost"):
            transport = connect(f"{where}:{port}")
            try:
                assert (await transport.info()).model.name == "toy"
            finally:
                await transport.close()


@has_ipv6
def test_a_port_that_another_program_has_at_either_address_is_refused() -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=rf"cannot listen on \[::1\]:{port}"):
            with running.listen("127.0.0.1", port):
                pass
    with running.listen("localhost", port) as found:
        assert [one.getsockname()[:2] for one in found] == [("127.0.0.1", port), ("::1", port)]
    with running.listen("127.0.0.2", 0) as found:
        assert len(found) == 1


async def test_an_endpoint_that_waits_for_a_tokenizer_says_so() -> None:
    config = AgentConfig()
    with running.listen("127.0.0.1", 0) as listeners:
        live = Live(None, None, None)  # type: ignore[arg-type] # only asked
        port = listeners[0].getsockname()[1]
        live.server = type("Port", (), {"port": port})  # type: ignore[assignment]
        async with _answering_waiting(config, "sesame", listeners):
            health = await ask(live, "/health")
            waiting = {"status": "waiting", "needs_key": True}
            assert (health.status, health.json) == (200, waiting)
            assert b"New conversation" in (await ask(live, "/")).body, "the page waits as well"
            assert (await ask(live, PATH, HELLO)).status == 401
            key = {"Authorization": "Bearer sesame"}
            for method, data in (("POST", HELLO), ("GET", None)):
                reply = await ask(live, PATH, data, method=method, **key)
                assert (reply.status, reply.error["code"]) == (503, "verifier_unavailable")
                assert "lend its tokenizer" in reply.error["message"]
                assert reply.headers["retry-after"]
            assert (await ask(live, "/health", Host="evil.example")).status == 403
        # The sockets go on listening for the endpoint that follows.
        settings = EndpointSection()
        server = EndpointServer(None, waiting_app("", settings), listeners, settings)
        await server.start()
        assert (await ask(live, PATH, HELLO)).status == 503
        await server.stop()


def test_a_prompt_on_stdin_that_is_no_utf8_is_called_so(tmp_path: Path) -> None:
    result = run_command("generate", "-", "--verifier", "127.0.0.1:1", stdin=b"ab\xff")
    assert result.exit_code == 2
    assert "stdin: is not UTF-8: byte 0xff at position 2" in result.stderr


async def test_a_verifier_behind_a_closed_port_is_still_a_link_error() -> None:
    with running.listen("127.0.0.1", 0) as found:
        port = found[0].getsockname()[1]
    transport = connect(f"127.0.0.1:{port}")
    try:
        with pytest.raises(LinkError, match=f"127.0.0.1:{port}"):
            await transport.info()
    finally:
        await transport.close()
