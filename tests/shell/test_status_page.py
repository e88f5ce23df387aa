"""The status page: over HTTP, and in headless Chromium, which must have nothing to complain of."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.config import AgentConfig, DraftSection, PacingSection, VerifierConfig
from edgespec.core.device.events import Transmit
from edgespec.core.protocol.messages import Draft
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import build_agent
from edgespec.device.status import StatusSource
from edgespec.endpoint.app import rendered_page, status_routes
from edgespec.verifier.build import load_target
from tests.report.test_report_pages import BROWSER, DARK
from tests.shell.live_verifier import GatedTarget, serving


def _asking(app: ASGIApp, key: str) -> ASGIApp:
    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        shown = Headers(scope=scope).get("authorization")
        fine = scope["path"] == "/" or shown == f"Bearer {key}"
        await (app if fine else Response(status_code=401))(scope, receive, send)

    return guard


@contextlib.asynccontextmanager
async def status_page(source: StatusSource, key: str = "") -> AsyncIterator[str]:
    """Yields the address of the page, with a slash at its end; with a ``key`` its numbers are for
    those who show it."""
    app: ASGIApp = Starlette(routes=status_routes(source))
    if key:
        app = _asking(app, key)
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            assert not serving.done(), "the server did not start"
            await asyncio.sleep(0)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        await serving


PROMPT = "quixotic zephyr"

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)

WITHIN_S = 120.0

browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on the path to look at pages with"
)


async def fetched(url: str) -> tuple[dict[str, str], str]:
    def fetch() -> tuple[dict[str, str], str]:
        with urllib.request.urlopen(url, timeout=WITHIN_S) as answer:
            return dict(answer.headers), answer.read().decode()

    return await asyncio.to_thread(fetch)


async def status(url: str) -> Any:
    return json.loads((await fetched(url))[1])


async def looked_at(url: str, folder: Path, *options: str) -> tuple[str, list[str]]:
    """The page after a few polls, and what was said on the console."""
    assert BROWSER is not None
    chromium = await asyncio.create_subprocess_exec(
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
        *("--virtual-time-budget=5000", f"--user-data-dir={folder / 'profile'}", "--dump-dom"),
        *(*options, url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(400):
        out, err = await chromium.communicate()
    return out.decode(), [line for line in err.decode().splitlines() if "CONSOLE" in line]


class FirstDraft:
    """A tracer that opens a target's gate when the device has sent a draft."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        if isinstance(item, Transmit) and isinstance(item.message, Draft) and item.message.tokens:
            self._gate.set()


async def test_the_numbers_come_with_events_once_and_without_a_text() -> None:
    """The target waits with its first pass for a draft."""
    target = GatedTarget(load_target(VerifierConfig(model="toy")), free_passes=0)
    async with serving(target) as (address, _), contextlib.AsyncExitStack() as stack:
        stack.callback(target.gate.set)
        config = AgentConfig(verifier=address, draft=DraftSection("toy"))
        async with build_agent(config, tracer=FirstDraft(target.gate)) as agent:
            async with status_page(StatusSource(agent, (address,), "9.9")) as url:
                async with asyncio.timeout(WITHIN_S):
                    async for _chunk in agent.generate(PROMPT, PARAMS):
                        pass
                first = await status(url + "status.json")
                again = await status(f"{url}status.json?after={first['last_event']}")
                nonsense = await status(url + "status.json?after=-1e9")
    assert (first["format"], first["version"]) == ("edgespec-agent-status", "9.9")
    assert first["totals"]["tokens"] == 40
    assert first["verifiers"][0]["state"] == "ready"
    assert {event["kind"] for event in first["events"]} == {
        "draft",
        "send",
        "pass",
        "commit",
        "link",
    }
    assert again["events"] == []
    assert again["last_event"] == first["last_event"]
    assert len(nonsense["events"]) == len(first["events"])
    assert not any(word in json.dumps(first) for word in PROMPT.split())


async def test_the_page_runs_its_own_script_only() -> None:
    page, policy = rendered_page()
    assert "unsafe" not in policy
    text = page.decode()
    fetches = re.findall(r"(?:src|href)=\"([^\"]*)\"", text) + re.findall(r"url\(|@import", text)
    assert sorted(fetches) == ["data:,", "status.json"]
    assert not re.findall(r"\son\w+=|\sstyle=", text)
    async with serving() as (address, _):
        async with build_agent(AgentConfig(verifier=address, draft=DraftSection("toy"))) as agent:
            async with status_page(StatusSource(agent, (address,))) as url:
                headers, body = await fetched(url)
    assert headers["content-security-policy"] == policy
    assert headers["x-content-type-options"] == "nosniff"
    assert body == text


@browser
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), (DARK,)], ids=["light", "dark"])
async def test_a_browser_shows_it(tmp_path: Path, options: tuple[str, ...]) -> None:
    pacing = PacingSection(pass_ms=400.0)  # the text takes longer than a browser does
    slow = VerifierConfig(model="toy", port=0, pacing=pacing)
    async with serving(config=slow) as (address, _):
        async with build_agent(AgentConfig(verifier=address, draft=DraftSection("toy"))) as agent:
            source = StatusSource(agent, (address,), "9.9")
            async with status_page(source) as url:
                chunks = agent.generate(PROMPT, replace(PARAMS, max_tokens=3000))
                await anext(chunks)
                dom, said = await looked_at(url, tmp_path, *options)
                await chunks.aclose()
    assert said == []
    assert int(re.findall(r'data-polled="(\d+)"', dom)[0]) >= 2
    assert f"serving: {address}" in dom
    assert "<td>#1</td><td>toy</td><td>streaming</td>" in dom
    assert 'id="trouble" class="trouble" role="alert" hidden' in dom
