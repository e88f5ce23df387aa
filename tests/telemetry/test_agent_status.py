"""Tests of an agent's status and its page, over HTTP and in headless Chromium, which must report no
error. Oracles: the agent's own counters, and the known treatment of its verifier."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.config import AgentConfig, DraftSection, PacingSection, PolicySection, VerifierConfig
from edgespec.core.device.comparison_policies import FixedPolicy, WindowedPolicy
from edgespec.core.device.estimates import DraftEstimates, RowPrice
from edgespec.core.device.events import DraftCounters, Transmit
from edgespec.core.device.streaming_speed import StreamingSpeed
from edgespec.core.protocol.messages import Draft, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.activity import Activity
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent, connect
from edgespec.device.prober import VerifierMonitor
from edgespec.device.status import StatusSource, assess_drafting, explain_long_text
from edgespec.endpoint.pages import rendered_page, status_routes
from edgespec.telemetry.agent_status import (
    AGENT_METRICS,
    MAX_EVENTS,
    METRICS_PREFIX,
    AgentStatus,
    AgentTotals,
    DraftingStatus,
    EventKind,
    TimelineEvent,
    VerifierState,
)
from edgespec.telemetry.metric_table import Table, make_registry
from edgespec.verifier.build import load_target
from tests.cli.test_chat import STATUS
from tests.core.draft_scripts import REQUEST, new_session
from tests.kit.live_verifier import GatedTarget, serve_toy
from tests.present import require
from tests.report.test_pages import BROWSER, DARK
from tests.sources import ROOT

SECRET = "zebra quartz vixen"
COUNT = 40
PARAMS = SamplingParams(max_tokens=COUNT, ignore_eos=True)


def agent_for(address: str | tuple[str, ...], **changes: object) -> Agent:
    config = AgentConfig(verifier=address, draft=DraftSection("toy"))
    return build_agent(replace(config, **changes))  # type: ignore[arg-type]


async def count_generated(agent: Agent) -> int:
    return sum([len(chunk.tokens) async for chunk in agent.generate(SECRET, PARAMS)])


async def test_counts_are_those_of_the_generations() -> None:
    # The verifier waits for drafts, so that there are drafts to count and to judge.
    waits = PolicySection(run_ahead=RunAhead.NEVER)
    async with serve_toy() as (address, _), agent_for(address, policy=waits) as agent:
        source = StatusSource(agent, (address,))
        counters = []
        for _ in range(2):
            assert await count_generated(agent) == COUNT
            assert agent.stats is not None
            counters.append(agent.stats.counters)
        found = source.snapshot()
        stats = require(agent.stats)
        verdict = assess_drafting(
            agent.options.policy,
            agent.verifier.price,
            stats.estimates,
            stats.counters,
            require(agent.activity.last).speed,
        )
    totals = found.totals
    assert (totals.generations, totals.finished, totals.failed, totals.cancelled) == (2, 2, 0, 0)
    assert totals.tokens == 2 * COUNT == sum(one.committed for one in counters)
    assert totals.prompt_tokens == 2 * len(SECRET)
    for name in ("accepted", "corrected", "steps", "sent", "passes", "rows", "tried", "hits"):
        assert getattr(totals, name) == sum(getattr(one, name) for one in counters), name
    assert (found.running, found.generations) == (0, ())
    assert found.drafting == verdict
    assert verdict.worth is not None  # its value follows from the price, which depends on time
    assert found.tokens_per_s > 0
    shown = json.dumps(found.as_json())
    assert "prompt_tokens" in shown
    assert not any(word in shown for word in SECRET.split()), "no text is in it"


def test_the_ring_is_bounded_and_says_what_it_lost() -> None:
    activity = Activity()
    for number in range(3 * MAX_EVENTS):
        activity.note(float(number), 1, EventKind.SEND, 1)
    events, lost = activity.events_after(0)
    assert (len(events), lost) == (MAX_EVENTS, 2 * MAX_EVENTS)
    assert events[-1].number == activity.last_event == 3 * MAX_EVENTS
    assert len(activity.events_after(3 * MAX_EVENTS - 5)[0]) == 5
    assert activity.events_after(MAX_EVENTS)[1] == MAX_EVENTS
    assert activity.events_after(3 * MAX_EVENTS + 5) == ((), 0)


def test_a_poll_a_second_loses_nothing_of_5700_events_a_second_and_no_pause_is_made() -> None:
    """Steps of two generations follow one another without a pause and are polled once a second."""
    activity, step_s = Activity(), 4 / 5700
    polls: list[tuple[TimelineEvent, ...]] = []
    last, second = 0, 1.0
    for step in range(1, int(10 / step_s)):
        at_s = step * step_s
        activity.note(at_s, step % 2, EventKind.DRAFT, 2, took_s=step_s)
        activity.note(at_s, step % 2, EventKind.SEND, 1)
        activity.note(at_s, step % 2, EventKind.PASS, 1, took_s=step_s)
        activity.note(at_s, step % 2, EventKind.COMMIT, 3, accepted=1)
        if at_s >= second:
            found, lost = activity.events_after(last)
            assert lost == 0
            polls.append(found)
            last, second = found[-1].number, second + 1.0
    polls.append(activity.events_after(last)[0])
    seen = [event for poll in polls for event in poll]
    assert [event.number for event in seen] == list(range(1, len(seen) + 1))
    assert max(map(len, polls)) <= 450
    for kind, each in ((EventKind.DRAFT, 2), (EventKind.SEND, 1), (EventKind.COMMIT, 3)):
        assert sum(one.events for one in seen if one.kind is kind) == step
        assert sum(one.count for one in seen if one.kind is kind) == each * step
    assert sum(one.accepted for one in seen) == step
    drafts = [one for one in seen if one.kind is EventKind.DRAFT]
    for before, after in pairwise(drafts):
        assert after.at_s - after.took_s == pytest.approx(before.at_s)


async def test_of_several_verifiers_each_has_a_state(dead: str) -> None:
    async with serve_toy() as (here, _), agent_for((dead, here)) as agent:
        watch = VerifierMonitor({dead: connect(dead), here: connect(here)})
        source = StatusSource(agent, (dead, here), watch=watch)
        assert [one.address for one in source.snapshot().verifiers] == [dead, here]
        await count_generated(agent)
        async with asyncio.timeout(60.0):
            while not watch.ready:
                await watch.refresh()
        states = {one.address: one.state for one in source.snapshot().verifiers}
        assert states == {dead: VerifierState.AWAY, here: VerifierState.READY}
        await watch.close()


def judge(**changes: object) -> tuple[bool | None, str]:
    counters = DraftCounters(tried=10, hits=8, committed=20, passes=10)
    price = RowPrice()
    for name, value in changes.items():
        setattr(price if hasattr(price, name) else counters, name, value)
    found = assess_drafting(WindowedPolicy(), price, DraftEstimates(price=price), counters)
    return found.worth, found.why


def test_drafting_is_judged_by_the_verifiers_price() -> None:
    assert judge() == (
        True,
        "80% of the draft's first choices were right; a pass brings 2.0 tokens",
    )
    assert judge(least_chance=0.3)[0] is True
    worth, why = judge(least_chance=0.8)
    assert worth is False
    assert "0.80" in why
    busy = "the verifier's passes are busy: it takes no drafts now"  # all slots may still be free
    assert judge(credit=0) == (False, busy)
    priced = f"{busy}, a row is worth its price from a chance of 0.80 on"
    assert judge(credit=0, least_chance=0.8) == (False, priced)
    worth, why = judge(draft_failure="RuntimeError: no memory")
    assert worth is False
    assert "no memory" in why
    assert assess_drafting(WindowedPolicy(), RowPrice(), None, None).worth is None
    fresh = assess_drafting(WindowedPolicy(), RowPrice(), DraftEstimates(), DraftCounters())
    assert (fresh.worth, fresh.acceptance) == (None, None), "the estimate's prior is no measurement"
    half = DraftCounters(tried=10, hits=5)
    assert assess_drafting(FixedPolicy(), RowPrice(), DraftEstimates(), half).acceptance == 0.5
    dear = RowPrice(least_chance=0.8)
    counters = DraftCounters(tried=1)
    found = assess_drafting(FixedPolicy(), dear, DraftEstimates(price=dear), counters)
    assert found.worth is True, "this policy does not look at prices"


def test_drafting_is_worth_what_it_saves() -> None:
    """Four tokens every 20 ms, by passes of 20 ms, are four times plain streaming."""

    def judge_speed(interval_s: float) -> tuple[bool | None, str]:
        speed = StreamingSpeed()
        for number in range(9):
            speed.add(number * interval_s, 4, 0.02, 3)
        counters = DraftCounters(tried=10, hits=8, committed=36, passes=9)
        found = assess_drafting(WindowedPolicy(), RowPrice(), DraftEstimates(), counters, speed)
        return found.worth, found.why

    assert judge_speed(0.02) == (
        True,
        "drafts saved 75% of the time of the last answer: 200.0 tokens a second against an"
        " estimated 50.0 without this device",
    )
    assert judge_speed(0.1) == (
        False,
        "the last answer took 25% longer than without drafts: 40.0 tokens a second against an"
        " estimated 50.0 without this device",
    )


def time_device(token_ms: float, step_ms: float, rtt_ms: float, rate: float) -> DraftEstimates:
    """Return estimates of a device that has timed this much, with this acceptance rate."""
    estimates = DraftEstimates()
    for _ in range(9):
        estimates.pass_s.add(token_ms / 1e3)
        estimates.step_s.add(step_ms / 1e3)
        estimates.rtt_s.add(rtt_ms / 1e3)
        estimates.own_speed.add(token_ms / 1e3, 1)
    estimates.acceptance.rates[0] = rate
    return estimates


@pytest.mark.parametrize(
    ("device", "worth", "why", "lead"),
    [
        pytest.param(
            (25, 8, 20, 0.87),
            True,
            "80% of the draft's first choices were right; a pass brings 2.0 tokens",
            "Yes: the draft model has to be 1.2 tokens ahead (a round trip of 20 ms / (25 ms a"
            " token of the verifier - 8 ms a drafted token)). The chance of that is 0.85,",
            id="yes",
        ),
        pytest.param(
            (11, 8, 20, 0.87),
            True,
            "80% of the draft's first choices were right; a pass brings 2.0 tokens",
            "A little: the draft model has to be 6.7 tokens ahead",
            id="a-little",
        ),
        pytest.param(
            (3, 2.5, 20, 0.87),
            False,
            "the draft model would have to be 40.0 tokens ahead of the verifier, and the chance of"
            " that is 0.00",
            "Hardly: the draft model has to be 40.0 tokens ahead",
            id="hardly",
        ),
        pytest.param(
            (6.8, 8, 20, 0.87),
            False,
            "a drafted token takes 8 ms here, and the verifier makes one in 6.8 ms by itself, so"
            " the draft model cannot get ahead of it",
            "No: the device drafts a token in 8 ms and the verifier makes one in 6.8 ms by itself,"
            " so the draft model is never ahead.",
            id="never",
        ),
    ],
)
@pytest.mark.parametrize("policy", [WindowedPolicy(), FixedPolicy()], ids=["windowed", "fixed"])
def test_without_a_measured_speed_the_lead_decides(
    device: tuple[float, float, float, float],
    worth: bool,
    why: str,
    lead: str,
    policy: WindowedPolicy | FixedPolicy,
) -> None:
    """Oracle: the sentences of the lead (``tests/core/test_lead.py``), of which the status shows
    the verdict and the reason."""
    counters = DraftCounters(tried=10, hits=8, committed=20, passes=10)
    found = assess_drafting(policy, RowPrice(), time_device(*device), counters)
    assert (found.worth, found.why) == (worth, why)
    assert found.lead.startswith(lead)


def test_a_measured_speed_is_compared_with_the_verifiers_own_drafts() -> None:
    """Four tokens every 20 ms are four times plain streaming, but a verifier that makes a token in
    4 ms by its own drafts is faster."""
    speed = StreamingSpeed()
    for number in range(9):
        speed.add(number * 0.02, 4, 0.02, 3)
    counters = DraftCounters(tried=10, hits=8, committed=36, passes=9)
    estimates = time_device(4, 1, 20, 0.8)
    found = assess_drafting(FixedPolicy(), RowPrice(), estimates, counters, speed)
    assert (found.worth, found.why) == (
        False,
        "the last answer took 25% longer than without drafts: 200.0 tokens a second against an"
        " estimated 250.0 without this device",
    )
    slower = time_device(6.25, 1, 20, 0.8)
    found = assess_drafting(FixedPolicy(), RowPrice(), slower, counters, speed)
    assert found.worth is True
    assert "200.0 tokens a second against an estimated 160.0 without" in found.why


def test_a_failed_draft_and_one_that_was_not_judged_keep_their_lead() -> None:
    """The lead is shown as soon as it is known; the verdict waits for a judged draft."""
    fresh = assess_drafting(
        FixedPolicy(), RowPrice(), time_device(25, 8, 20, 0.87), DraftCounters()
    )
    assert (fresh.worth, fresh.why) == (None, "nothing was drafted yet")
    assert fresh.lead.startswith("Yes: ")
    broken = DraftCounters(tried=10, hits=8, draft_failure="OSError: gone\nby now")
    failed = assess_drafting(FixedPolicy(), RowPrice(), time_device(25, 8, 20, 0.87), broken)
    assert (failed.worth, failed.why) == (False, "the draft model failed: OSError: gone by now")
    assert failed.lead.startswith("Yes: ")


@pytest.mark.parametrize("lookup", [True, False])
def test_a_text_beyond_the_drafts_context_is_named_with_both_lengths(lookup: bool) -> None:
    session = new_session(request=replace(REQUEST, prompt=(1,) * 900, drafting=lookup))
    status = DraftingStatus(True, "drafts saved 10% of the time of the last answer")
    found = explain_long_text(status, session, 512)
    where = "the text has 900 tokens, and the draft model's context holds 512: "
    assert found.why.startswith(where)
    assert (found.worth, "only lookup drafts" in found.why) == (lookup, lookup)
    assert "draft.window" in found.why or lookup


def test_the_rate_is_that_of_the_last_seconds() -> None:
    activity = Activity()
    assert activity.tokens_per_s(100.0) == 0.0
    for tenth in range(1000, 1100):  # ten seconds with twenty commits a second
        activity.note(tenth / 10, 1, EventKind.SEND, 9)
        activity.note(tenth / 10, 1, EventKind.COMMIT, 2)
    assert activity.tokens_per_s(110.0) == pytest.approx(20.0, rel=0.15)
    assert activity.tokens_per_s(200.0) == 0.0
    activity.note(300.0, 1, EventKind.COMMIT, 5)
    assert activity.tokens_per_s(300.5) == pytest.approx(5.0)


NAMES = {METRICS_PREFIX + one.name for one in AGENT_METRICS}


def samples(status: AgentStatus) -> dict[tuple[str, str], float]:
    """Return every sample by its name and the value of its label."""
    registry = make_registry(Table(METRICS_PREFIX, AGENT_METRICS, lambda: status))
    text = generate_latest(registry).decode()
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name.startswith(METRICS_PREFIX)
    }


def test_the_values_are_those_of_the_status() -> None:
    totals = AgentTotals(generations=3, finished=1, failed=2, tokens=50, accepted=30, sent=40)
    found = samples(replace(STATUS, totals=totals))
    assert {name for name, _ in found} <= NAMES
    assert found["edgespec_agent_requests_finished_total", "failed"] == 2
    assert found["edgespec_agent_generation_tokens_total", ""] == 50
    assert found["edgespec_agent_spec_decode_num_accepted_tokens_total", ""] == 30
    assert found["edgespec_agent_rtt_seconds", "gpu-box:7420"] == 0.0514
    assert found["edgespec_agent_verifier_up", "gpu-box:7420"] == 1
    assert found["edgespec_agent_memory_budget_bytes", ""] == 600 << 20


def test_the_manual_has_each_of_them() -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(edgespec_agent_\w+)`", text)) == NAMES


# --- the status page ------------------------------------------------------------------------------


def require_key(app: ASGIApp, key: str) -> ASGIApp:
    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        shown = Headers(scope=scope).get("authorization")
        fine = scope["path"] in ("/status", "/health") or shown == f"Bearer {key}"
        await (app if fine else Response(status_code=401))(scope, receive, send)

    return guard


@contextlib.asynccontextmanager
async def status_page(source: StatusSource, key: str = "") -> AsyncIterator[str]:
    """Yield the address of the page, with a slash at its end. If ``key`` is set, only requests that
    show it get the numbers."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    app: ASGIApp = Starlette(routes=[*status_routes(source), Route("/health", health)])
    if key:
        app = require_key(app, key)
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

SHORT = SamplingParams(max_tokens=40, ignore_eos=True)

WITHIN_S = 120.0

browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on the path to look at pages with"
)


async def fetch(url: str) -> tuple[dict[str, str], str]:
    def read() -> tuple[dict[str, str], str]:
        with urllib.request.urlopen(url, timeout=WITHIN_S) as answer:
            return dict(answer.headers), answer.read().decode()

    return await asyncio.to_thread(read)


async def status(url: str) -> Any:
    return json.loads((await fetch(url))[1])


async def render_page(url: str, folder: Path, *options: str) -> tuple[str, list[str]]:
    """Return the page after a few polls, and the lines that it wrote to the console."""
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
    """The target's first pass waits for a draft, so that the timeline holds one."""
    target = GatedTarget(load_target(VerifierConfig(model="toy")), free_passes=0)
    async with serve_toy(target) as (address, _), contextlib.AsyncExitStack() as stack:
        stack.callback(target.gate.set)
        config = AgentConfig(verifier=address, draft=DraftSection("toy"))
        async with build_agent(config, tracer=FirstDraft(target.gate)) as agent:
            async with status_page(StatusSource(agent, (address,), "9.9")) as url:
                async with asyncio.timeout(WITHIN_S):
                    async for _chunk in agent.generate(PROMPT, SHORT):
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


async def test_the_page_comes_with_its_policy() -> None:
    page, policy = rendered_page("status")
    async with serve_toy() as (address, _):
        async with build_agent(AgentConfig(verifier=address, draft=DraftSection("toy"))) as agent:
            async with status_page(StatusSource(agent, (address,))) as url:
                headers, body = await fetch(url + "status")
    assert headers["content-security-policy"] == policy
    assert headers["x-content-type-options"] == "nosniff"
    assert body == page.decode()


@browser
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), (DARK,)], ids=["light", "dark"])
async def test_a_browser_shows_it(tmp_path: Path, options: tuple[str, ...]) -> None:
    pacing = PacingSection(pass_ms=400.0)  # the generation takes longer than a browser's start
    slow = VerifierConfig(model="toy", port=0, pacing=pacing)
    async with serve_toy(config=slow) as (address, _):
        async with build_agent(AgentConfig(verifier=address, draft=DraftSection("toy"))) as agent:
            source = StatusSource(agent, (address,), "9.9")
            async with status_page(source) as url:
                chunks = agent.generate(PROMPT, replace(SHORT, max_tokens=3000))
                await anext(chunks)
                dom, said = await render_page(url + "status", tmp_path, *options)
                await chunks.aclose()
    assert said == []
    assert int(re.findall(r'data-polled="(\d+)"', dom)[0]) >= 2
    assert f"serving: {address}" in dom
    assert "<td>#1</td><td>toy</td><td>streaming</td>" in dom
    assert 'id="trouble" class="trouble" role="alert" hidden' in dom
