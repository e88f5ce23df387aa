"""A verifier's metrics. Oracle: what its devices counted and received, over real gRPC and HTTP."""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.error
from dataclasses import replace

import pytest

from edgespec.cli.verifier import Watching, ready_line
from edgespec.config import PacingSection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core.device.events import DraftCounters
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent, connect
from edgespec.telemetry.agent_status import VerifierStatus
from edgespec.telemetry.metric_table import Kind
from edgespec.telemetry.verifier_counts import METRICS, PREFIX, StreamMeter, StreamRecord
from edgespec.verifier.build import load_target
from tests.present import present
from tests.shell.live_verifier import until
from tests.shell.test_end_to_end import GREEDY, SAMPLED, collect, config, tokens
from tests.shell.test_end_to_end import IDS as PROMPT_IDS
from tests.shell.watched_verifier import QUIET, Scrape, Watched, fetch, watched
from tests.sources import ROOT

IDS = tuple(PROMPT_IDS)
DRAFTS = "spec_decode_num_drafts_total"
NODES = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


async def generated(agent: Agent, params: SamplingParams) -> tuple[int, DraftCounters]:
    count = len(tokens(await collect(agent, params)))
    return count, present(agent.stats).counters


async def test_the_counts_are_those_of_the_devices() -> None:
    async with watched() as found:
        settings = config(found.address, run_ahead=m.RunAhead.NEVER)  # for drafts to count
        async with build_agent(settings) as one, build_agent(settings) as two:
            results = await asyncio.gather(generated(one, GREEDY), generated(two, SAMPLED))
        seen = await found.scrape()
    counters = [counters for _, counters in results]
    assert seen.value("generation_tokens_total") == sum(count for count, _ in results)
    assert seen.value("prompt_tokens_total") == 2 * len(IDS)
    assert seen.value(NODES) == sum(one.rows for one in counters) > 0
    assert seen.value(ACCEPTED) == sum(one.accepted for one in counters) > 0
    assert seen.value("wasted_nodes_total") == seen.value(NODES) - seen.value(ACCEPTED)
    assert seen.value("stale_nodes_total") == sum(one.stale for one in counters)
    per_position = seen.labels(PER_POSITION)
    assert sum(per_position.values()) == seen.value(ACCEPTED)
    assert per_position["0"] <= seen.value(DRAFTS) <= sum(one.passes for one in counters)
    assert seen.labels("requests_finished_total") == {"length": 2}
    assert seen.labels("requests_rejected_total") == {}
    assert seen.models == {"toy"}


async def test_who_drafted_what_is_told() -> None:
    """By the metrics and by ``Info``; an emulated step is cheap beside a pass."""
    paces = PacingSection(pass_ms=20.0, draft_ms=1.0)
    async with watched(settings := replace(QUIET, draft="toy", pacing=paces)) as found:
        async with build_agent(config(found.address)) as agent:
            count, counters = await generated(agent, GREEDY)
        async with build_agent(config(found.address, draft="none")) as agent:
            count += (await generated(agent, GREEDY))[0]
        transport = connect(found.address)
        info = await transport.info()
        await transport.close()
        seen = await found.scrape()
    assert "drafts itself with toy" in ready_line(settings, 1, load_target(settings), info)
    status = VerifierStatus("").told(info)
    drafts = present(status.drafts)
    assert seen.value("source_nodes_total", "device") == counters.rows == drafts.device_nodes
    assert seen.value("source_accepted_total", "device") == counters.accepted
    assert 0 < seen.value("source_accepted_total", "model") == drafts.model_accepted
    assert seen.labels("source_accepted_total").keys() <= {"device", "model"}
    assert seen.value("server_drafted_tokens_total") == drafts.model_accepted
    assert count >= counters.accepted + drafts.model_accepted
    assert seen.value("server_draft_steps_total") == drafts.model_steps > 0
    took_s = seen.value("server_draft_seconds_total")
    assert took_s == pytest.approx(drafts.model_us / 1e6, abs=1e-6)
    assert took_s > 1e-3 * drafts.model_steps
    assert seen.value("server_draft_failures_total") == 0


async def _ended(found: Watched) -> Scrape:
    """Once the verifier has let go of every stream and session."""
    await until(lambda: not (found.verifier.engine.sessions or found.verifier._streams))
    return await found.scrape()


async def test_a_resumed_stream_is_not_counted_again() -> None:
    """The second stream holds what the first one got, the third nothing: it is sent all again."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    async with watched() as found:
        transport = connect(found.address)
        held: list[int] = []
        for stop_at, begin in ((4, False), (12, False), (12, True)):
            held = [] if begin else held
            stream = await transport.connect()
            await stream.send(
                m.Open("a", "", "", IDS, tuple(held), sampling=params, drafting=False)
            )
            while len(held) < stop_at:
                message = await stream.receive()
                assert not isinstance(message, m.Fault)
                if isinstance(message, m.Commit):
                    held += message.tokens
            await stream.close()
        await transport.close()
        await until(lambda: not found.verifier._streams)
        seen = await found.scrape()
    assert seen.value("time_to_first_token_seconds_count") == 1
    assert seen.value("prompt_tokens_total") == len(IDS)
    # One pass may have ended while no stream was there to hear of it.
    assert 11 <= seen.value("generation_tokens_total") <= 12 == len(held)
    finished = seen.labels("requests_finished_total")
    assert sum(finished.values()) == 3
    assert finished["length"] >= 2


async def test_nothing_that_devices_send_makes_a_new_series() -> None:
    async with watched() as found:
        before = await found.scrape()
        transport = connect(found.address)
        for number in range(20):
            stream = await transport.connect()
            name, session = f'evil"{{}}\\n{number}', f"session-{number}"
            await stream.send(m.Open(session, name if number % 2 else "", f"v{number}", IDS))
            assert isinstance(await stream.receive(), m.Fault)
        await transport.close()
        async with build_agent(config(found.address)) as agent:
            await collect(agent, SAMPLED)
        after = await _ended(found)
    assert after.samples.keys() == before.samples.keys()
    assert after.models == before.models
    assert sum(after.labels("requests_rejected_total").values()) == 20


async def test_every_metric_is_exposed_and_told_in_the_docs() -> None:
    async with watched() as found:
        seen = await found.scrape()
    exposed = {(name, family.type) for name, family in seen.families.items() if "edgespec" in name}
    counter = Kind.COUNTER
    assert exposed == {
        (PREFIX + one.name.removesuffix("_total" if one.kind is counter else ""), one.kind.value)
        for one in METRICS
    }
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(edgespec_(?!agent_)\w+)` \|", page, re.MULTILINE)
    assert sorted(told) == sorted(PREFIX + one.name for one in METRICS)


async def test_the_port_is_let_go_of() -> None:
    async with watched() as found:
        assert PREFIX in await asyncio.to_thread(fetch, f"{found.url}/metrics")
    with pytest.raises(urllib.error.URLError, match="refused"):
        await asyncio.to_thread(fetch, f"{found.url}/metrics")


async def test_a_taken_port_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = f"cannot serve metrics on 127.0.0.1:{port}: .*choose another with --metrics-port"
        with pytest.raises(SetupError, match=text):
            Watching(VerifierConfig(metrics_port=port))


PROMPT = (1, 2, 3)


class Scene:
    """One stream and its meter."""

    def __init__(self, committed: tuple[int, ...] = ()) -> None:
        self.records: list[StreamRecord] = []
        self.meter = StreamMeter(self.records.append)
        opened = ee.StreamOpened(7, m.Open("s", "", "", PROMPT, committed), "peer")
        actions = (
            ee.OpenSequence("s", len(PROMPT), SamplingParams()),
            ee.SendTo(7, m.Opened(m.Limits(), "toy", len(PROMPT))),
        )
        self.meter.observe(opened, actions, 10.0)

    def commit(self, at: float, commit: m.Commit, pass_s: float = 0.5) -> None:
        batch = ee.RunBatch((PassRequest("s", 0, PROMPT, (4,), (-1,)),))
        self.meter.observe(ee.Poll(), (batch,), at - pass_s)
        self.meter.observe(ee.BatchDone(()), (ee.SendTo(7, commit),), at)


def test_times_and_tokens_of_a_stream() -> None:
    scene, meter = Scene(), None
    meter = scene.meter
    scene.commit(11.0, m.Commit(3, (5,)))
    scene.commit(12.0, m.Commit(4, (6, 7), accepted=1, rows=3, stale=2))
    scene.commit(15.0, m.Commit(6, (8,), rows=1, finish=m.FinishReason.STOP))
    assert (sum(meter.ttft_s.counts), meter.ttft_s.total) == (1, 1.0)
    assert (sum(meter.itl_s.counts), meter.itl_s.total) == (3, 4.0)
    assert (sum(meter.pass_s.counts), meter.pass_s.total) == (3, 1.5)
    assert (sum(meter.pass_rows.counts), meter.pass_rows.total) == (3, 12)
    assert (meter.generation_tokens, meter.prompt_tokens, meter.run_ahead_tokens) == (4, 3, 1)
    assert (meter.drafts, meter.draft_nodes, meter.accepted, meter.wasted) == (2, 4, 1, 3)
    assert (meter.stale, meter.accepted_at[:2]) == (2, [1, 0])
    assert meter.finished["stop"] == 1
    (record,) = scene.records
    assert (record.tokens, record.accepted, record.nodes, record.reason) == (4, 1, 4, "stop")
    assert (record.ttft_s, record.ended_at, record.peer) == (1.0, 15.0, "peer")
    meter.gone(7, 16.0)
    meter.told(7, m.Fault(m.FaultCode.INTERNAL, ""))
    assert len(scene.records) == 1


def test_a_round_trip_is_that_of_the_commit_acknowledged() -> None:
    scene = Scene()
    for at, position in ((11.0, 3), (12.0, 4), (13.0, 5), (14.0, 6)):
        scene.commit(at, m.Commit(position, (5,)))
    for at, position in ((15.0, 5), (15.5, 5), (16.0, 99)):
        scene.meter.observe(ee.StreamMessage(7, m.Received(position, 0)), (), at)
    assert (sum(scene.meter.rtt_s.counts), scene.meter.rtt_s.total) == (1, 15.0 - 12.0)


def test_streams_end_once_for_one_reason() -> None:
    cancelled, lost, faulted = Scene(), Scene(), Scene()
    cancelled.meter.observe(ee.StreamMessage(7, m.Draft(1, (0,), (4,))), (), 10.5)
    cancelled.meter.observe(ee.StreamMessage(7, m.Cancel()), (), 11.0)
    faulted.meter.told(7, m.Fault(m.FaultCode.OVERLOADED, ""))
    for scene, reason in ((cancelled, "cancelled"), (lost, "lost"), (faulted, "overloaded")):
        scene.meter.gone(7, 12.0)
        assert [record.reason for record in scene.records] == [reason]
        assert {key for key, count in scene.meter.finished.items() if count} == {reason}


def test_a_failed_pass_has_no_length() -> None:
    scene = Scene()
    batch = ee.RunBatch((PassRequest("s", 0, PROMPT),))
    scene.meter.observe(ee.Poll(), (batch,), 11.0)
    scene.meter.observe(ee.BatchFailed("no"), (batch,), 12.0)
    scene.meter.observe(ee.BatchDone(()), (), 15.0)
    assert (sum(scene.meter.pass_s.counts), scene.meter.pass_s.total) == (1, 3.0)
    assert scene.meter.failed_passes == 1
