"""The sources of tokens in a response, and the switch for drafts, over HTTP. Oracles: the agent's
own counters, and that clients which ask for nothing see nothing."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.config import DraftSection, EndpointSection, PolicySection, VerifierConfig
from edgespec.core.device.token_origins import TokenOrigin
from edgespec.core.protocol.messages import RunAhead
from edgespec.endpoint.recent_failures import MAX_FAILURES, RecentFailures
from edgespec.endpoint.request_json import ApiError
from tests.endpoint.live_endpoint import (
    APIS,
    Api,
    Live,
    ScriptedAgent,
    ask,
    events_of,
    over_script,
    over_toy,
    over_verifiers,
)
from tests.kit.live_verifier import serve_toy

CHAT = "/v1/chat/completions"
DRAFTED = "prediction", "device model", "device lookup"


async def chat(live: Live, **more: Any) -> list[Any]:
    """Return the events of a streamed chat."""
    data = {
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 40,
        "seed": 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return [
        one for one in events_of((await ask(live, CHAT, data | more)).body) if isinstance(one, dict)
    ]


def text_of(events: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content", "") for event in events for choice in event["choices"]
    )


async def test_every_token_has_a_source_and_the_counts_agree() -> None:
    waits = PolicySection(run_ahead=RunAhead.NEVER)  # so that drafts are there to be accepted
    async with over_toy(policy=waits) as live:
        events = await chat(live, token_sources=True)
        plain = await chat(live)
    usage = events[-1]["usage"]
    own, shown = (
        usage["edgespec"],
        [
            choice["edgespec"]
            for event in events
            for choice in event["choices"]
            if "edgespec" in choice
        ],
    )
    tokens = [token for one in shown for token in one["tokens"]]
    assert len(tokens) == usage["completion_tokens"] == 40
    assert sum(token.get("content", 0) for token in tokens) == len(text_of(events))
    by_source = own["tokens_by_source"]
    assert sum(by_source.values()) == 40
    assert sum(by_source.get(one, 0) for one in DRAFTED) == own["accepted_tokens"] > 0
    moments = [moment for one in shown for moment in one["events"]]
    assert sum(one["count"] for one in moments if one["kind"] == "commit") == 40
    assert sum(one["kind"] == "pass" for one in moments) == own["verifier_passes"]
    assert sum(one["count"] for one in moments if one["kind"] == "send") == own["drafted_tokens"]
    assert shown[-1]["tokens_per_s"] == own["tokens_per_s"] > 0
    assert own["plain_tokens_per_s"] > 0
    # A client that does not ask sees nothing of it, and the same text.
    assert text_of(plain) == text_of(events)
    assert not any("edgespec" in choice for event in plain for choice in event["choices"])
    assert "tokens_by_source" not in plain[-1]["usage"]["edgespec"]


async def test_drafts_can_be_switched_off_and_the_text_is_the_same() -> None:
    async with over_toy() as live:
        off = await chat(live, drafts=False, token_sources=True)
        on = await chat(live, drafts=True)
    own = off[-1]["usage"]["edgespec"]
    assert own["drafted_tokens"] == 0
    assert own["tokens_by_source"] == {"target": 40}
    assert text_of(off) == text_of(on)


async def test_without_drafts_the_verifier_drafts_nothing_either() -> None:
    """The verifier has a draft model that is always right."""
    config = VerifierConfig(model="toy", draft="toy", port=0)
    async with serve_toy(config=config) as (address, _):
        async with over_verifiers(address, draft=DraftSection(model="none")) as live:
            on = await chat(live, token_sources=True)
            off = await chat(live, token_sources=True, drafts=False)
    assert on[-1]["usage"]["edgespec"]["tokens_by_source"]["server"] > 0
    own = off[-1]["usage"]["edgespec"]
    assert own["tokens_by_source"] == {"target": 40}
    assert own["verifier_passes"] == 40
    assert text_of(on) == text_of(off)


async def test_lengths_are_those_of_javascript() -> None:
    pieces, origins = ("a", "\U0001f600", "é"), (TokenOrigin.TARGET, TokenOrigin.SERVER)
    async with over_script(ScriptedAgent(pieces, origins=origins)) as live:
        events = await chat(live, token_sources=True)
    tokens = [
        token
        for event in events
        for choice in event["choices"]
        for token in choice.get("edgespec", {}).get("tokens", ())
    ]
    assert tokens == [
        {"source": "target", "content": 1},
        {"source": "server", "content": 2},
        {"source": "target", "content": 1},
    ]


@pytest.mark.parametrize("api", APIS, ids=[one.path for one in APIS])
async def test_no_api_shows_sources_unasked(api: Api) -> None:
    agent = ScriptedAgent(("a", "b"), origins=(TokenOrigin.TARGET,))
    async with over_script(agent) as live:
        reply = await ask(live, api.path, api.request(stream=True))
    assert b"tokens_by_source" not in reply.body
    assert b'"source"' not in reply.body


# --- failures -------------------------------------------------------------------------------------


async def test_failures_are_kept_without_what_the_client_wrote() -> None:
    async with over_script(ScriptedAgent(), key="k") as live:
        authorized = {"Authorization": "Bearer k"}
        wrong = {"messages": [{"role": "user", "content": {"zebra": "quartz"}}]}
        assert (await ask(live, CHAT, wrong, **authorized)).status == 400
        assert (await ask(live, CHAT, wrong)).status == 401
        assert (await ask(live, CHAT, wrong)).status == 401
        found = live.endpoint.failures.latest
    assert [(one["path"], one["status"], one["count"]) for one in found] == [
        (CHAT, 401, 2),
        (CHAT, 400, 1),
    ]
    assert "messages[0].content" in found[1]["why"]
    assert "zebra" not in str(found)
    assert found[0]["request_id"].startswith("req_")


def test_the_latest_failures_are_bounded() -> None:
    failures = RecentFailures()
    for number in range(3 * MAX_FAILURES):
        failures.add(f"/{number}" + "x" * 500, ApiError(503, "w" * 5000))
    latest = failures.latest
    assert len(latest) == MAX_FAILURES
    assert latest[0]["path"].startswith(f"/{3 * MAX_FAILURES - 1}x")
    assert all(len(one["path"]) <= 80 and len(one["why"]) <= 300 for one in latest)


# --- origins --------------------------------------------------------------------------------------

LOCAL = ("http://localhost:3000", "app://obsidian.md", "tauri://localhost", "vscode-webview://a1")
EXTENSIONS = ("chrome-extension://abc", "moz-extension://a-b", "safari-web-extension://A1")
FOREIGN = ("https://example.com", "null", "chrome-extension-x://abc", "http://localhost.evil.com")


@pytest.mark.parametrize("is_allowed", [False, True], ids=["default", "--allow-local-apps"])
async def test_one_switch_admits_extensions(is_allowed: bool) -> None:
    settings = EndpointSection(allow_local_apps=is_allowed)
    async with over_script(ScriptedAgent(), settings=settings) as live:
        for origin in (*LOCAL, *EXTENSIONS, *FOREIGN):
            preflight = await ask(
                live,
                CHAT,
                method="OPTIONS",
                Origin=origin,
                Access_Control_Request_Method="POST",
                Access_Control_Request_Private_Network="true",
            )
            wanted = origin in LOCAL or (is_allowed and origin in EXTENSIONS)
            assert (preflight.status == 200) == wanted, origin
            if wanted:
                assert preflight.headers["access-control-allow-private-network"] == "true"
            elif origin in EXTENSIONS:
                assert "--allow-local-apps" in preflight.error["message"]
        # The name of another machine that points here is refused all the same.
        rebound = await ask(live, "/v1/models", Host="evil.example", Origin="http://localhost:3000")
        assert rebound.status == 403


async def test_the_switch_counts_wherever_the_endpoint_listens() -> None:
    for is_allowed in (False, True):
        settings = EndpointSection(host="0.0.0.0", allow_local_apps=is_allowed)
        async with over_script(ScriptedAgent(), settings=settings) as live:
            status = (await ask(live, "/health", Origin="app://obsidian.md")).status
            assert (status == 200) == is_allowed
