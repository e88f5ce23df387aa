"""Tests of a verifier's metrics and log lines. Oracles: the counts and tokens of its devices, over
real gRPC and HTTP; a reader that expects one JSON object per line; and words that occur nowhere
else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edgespec.cli.verifier import MetricsServer, ready_line
from edgespec.config import PacingSection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core.device.events import DraftCounters
from edgespec.core.ports import PassRequest, PassResult, ReadPictures, TargetModel
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.messages import Commit, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier import engine_events as ee
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent, connect
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.telemetry.agent_status import VerifierStatus
from edgespec.telemetry.logs import JsonFormatter, TextFormatter
from edgespec.telemetry.trace import TraceFile
from edgespec.telemetry.verifier_counts import (
    METRICS,
    PREFIX,
    StreamMeter,
    StreamRecord,
    TrafficCounts,
)
from edgespec.verifier.build import build_verifier, load_target
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.toy import ToyTarget
from edgespec.wire.pb import speculation_pb2 as pb
from tests.api.test_end_to_end import GREEDY, PROMPT, SAMPLED, collect, make_config, tokens_of
from tests.api.test_end_to_end import IDS as PROMPT_IDS
from tests.endpoint.live_endpoint import ask, over_toy
from tests.kit.live_verifier import start, start_daemon, wait_until
from tests.present import require
from tests.sources import ROOT
from tests.verifier.fake_vllm import CACHE_ROWS, fake_target

QUIET = VerifierConfig(model="toy", server_drafts=False)


class Scrape:
    """The samples of one fetch, by name (without the prefix) and labels (without the model's
    name)."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: dict[tuple[str, str], float] = {}
        self.models: set[str] = set()
        for family in self.families.values():
            if not family.name.startswith(PREFIX):
                continue
            for sample in family.samples:
                labels = dict(sample.labels)
                self.models.add(labels.pop("model_name"))
                (label,) = labels.values() or ("",)
                self.samples[sample.name.removeprefix(PREFIX), label] = sample.value

    def value(self, name: str, label: str = "") -> float:
        return self.samples[name, label]

    def labels(self, name: str) -> dict[str, float]:
        """Return the values of a metric by its label, without zeros."""
        found = {label: value for (one, label), value in self.samples.items() if one == name}
        assert found, name
        return {label: value for label, value in found.items() if value}


@dataclass(frozen=True)
class Watched:
    address: str
    verifier: Verifier
    url: str

    async def scrape(self) -> Scrape:
        return Scrape(await asyncio.to_thread(fetch, f"{self.url}/metrics"))


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


@contextlib.asynccontextmanager
async def start_watched(
    config: VerifierConfig | None = None, target: TargetModel | None = None
) -> AsyncIterator[Watched]:
    """Start a toy verifier over real gRPC, with metrics on a free port. Unless ``config`` is given,
    it drafts nothing by itself."""
    config = replace(config or QUIET, port=0, metrics_port=0)
    with contextlib.closing(MetricsServer(config)) as found:
        verifier, server = build_verifier(config, target=target, watch=found.watch)
        await server.start()
        found.start(verifier)
        try:
            url = f"http://127.0.0.1:{found.metrics_port}"
            yield Watched(f"127.0.0.1:{server.port}", verifier, url)
        finally:
            await verifier.stop()
            await server.stop(0.0)


IDS = tuple(PROMPT_IDS)
DRAFTS = "spec_decode_num_drafts_total"
NODES = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


async def generate(agent: Agent, params: SamplingParams) -> tuple[int, DraftCounters]:
    count = len(tokens_of(await collect(agent, params)))
    return count, require(agent.stats).counters


async def test_the_cache_of_a_target_that_assigns_its_own_blocks_is_shown() -> None:
    """Oracle: the rows of the stand-in for vLLM."""
    target = fake_target()
    async with start_watched(target=target) as found:
        for share, text in ((3, (1, 2, 3)), (8, (1, 2, 3, 4, 5))):
            key = f"session {share}"
            target.open(key, len(text), GREEDY, text)
            target.forward([PassRequest(key, 0, text)])
            used = (await found.scrape()).value("kv_cache_usage_perc")
            assert used == share / CACHE_ROWS
        for key in ("session 3", "session 8"):
            target.close(key)
        assert (await found.scrape()).value("kv_cache_usage_perc") == 0.0


async def test_the_counts_are_those_of_the_devices() -> None:
    async with start_watched() as found:
        # so that there are drafts to count
        settings = make_config(found.address, run_ahead=m.RunAhead.NEVER)
        async with build_agent(settings) as one, build_agent(settings) as two:
            results = await asyncio.gather(generate(one, GREEDY), generate(two, SAMPLED))
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
    """Metrics and ``Info`` must attribute drafts to their source. An emulated draft step is cheap
    compared with a pass, so the verifier drafts."""
    paces = PacingSection(pass_ms=20.0, draft_ms=1.0)
    async with start_watched(settings := replace(QUIET, draft="toy", pacing=paces)) as found:
        async with build_agent(make_config(found.address)) as agent:
            count, counters = await generate(agent, GREEDY)
        async with build_agent(make_config(found.address, draft="none")) as agent:
            count += (await generate(agent, GREEDY))[0]
        transport = connect(found.address)
        info = await transport.info()
        await transport.close()
        seen = await found.scrape()
    assert "drafts itself with toy" in ready_line(settings, 1, load_target(settings), info)
    status = VerifierStatus("").with_info(info)
    drafts = require(status.drafts)
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


async def scrape_when_idle(found: Watched) -> Scrape:
    """Fetch the metrics once the verifier has released every stream and session."""
    await wait_until(lambda: not (found.verifier.engine.sessions or found.verifier._streams))
    return await found.scrape()


async def test_a_resumed_stream_is_not_counted_again() -> None:
    """The second stream already holds the first one's tokens. The third holds nothing, so it
    receives every token again."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    async with start_watched() as found:
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
        await wait_until(lambda: not found.verifier._streams)
        seen = await found.scrape()
    assert seen.value("time_to_first_token_seconds_count") == 1
    assert seen.value("prompt_tokens_total") == len(IDS)
    # One pass may have ended between two streams, when no stream was there to receive its token.
    assert 11 <= seen.value("generation_tokens_total") <= 12 == len(held)
    finished = seen.labels("requests_finished_total")
    assert sum(finished.values()) == 3
    assert finished["length"] >= 2


async def test_nothing_that_devices_send_makes_a_new_series() -> None:
    async with start_watched() as found:
        before = await found.scrape()
        transport = connect(found.address)
        for number in range(20):
            stream = await transport.connect()
            name, session = f'evil"{{}}\\n{number}', f"session-{number}"
            await stream.send(m.Open(session, name if number % 2 else "", f"v{number}", IDS))
            assert isinstance(await stream.receive(), m.Fault)
        await transport.close()
        async with build_agent(make_config(found.address)) as agent:
            await collect(agent, SAMPLED)
        after = await scrape_when_idle(found)
    assert after.samples.keys() == before.samples.keys()
    assert after.models == before.models
    assert sum(after.labels("requests_rejected_total").values()) == 20


async def test_every_metric_is_exposed_and_told_in_the_docs() -> None:
    async with start_watched() as found:
        seen = await found.scrape()
    exposed = {(name, family.type) for name, family in seen.families.items() if "edgespec" in name}
    assert exposed == {
        (PREFIX + one.name.removesuffix("_total" if one.kind == "counter" else ""), one.kind)
        for one in METRICS
    }
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(edgespec_(?!agent_)\w+)` \|", page, re.MULTILINE)
    assert sorted(documented) == sorted(PREFIX + one.name for one in METRICS)


async def test_the_port_is_let_go_of() -> None:
    async with start_watched() as found:
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
            MetricsServer(VerifierConfig(metrics_port=port))


OPENED = (1, 2, 3)


class Scene:
    """One stream and its meter."""

    def __init__(self, committed: tuple[int, ...] = ()) -> None:
        self.records: list[StreamRecord] = []
        self.meter = StreamMeter(self.records.append)
        opened = ee.StreamOpened(7, m.Open("s", "", "", OPENED, committed), "peer")
        actions = (
            ee.OpenSequence("s", len(OPENED), SamplingParams()),
            ee.SendTo(7, m.Opened(m.Limits(), "toy", len(OPENED))),
        )
        self.meter.observe(opened, actions, 10.0)

    def commit(self, at: float, commit: m.Commit, pass_s: float = 0.5) -> None:
        batch = ee.RunBatch((PassRequest("s", 0, OPENED, (4,), (-1,)),))
        self.meter.observe(ee.Poll(), (batch,), at - pass_s)
        self.meter.observe(ee.BatchDone(()), (ee.SendTo(7, commit),), at)


def test_every_kind_of_message_is_counted_and_named_on_the_page() -> None:
    """Oracle: the kinds that the wire has."""
    counts, page = TrafficCounts(), (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for wire, messages, sizes, name in (
        (pb.DeviceMessage, counts.received_messages, counts.received_bytes, "received_bytes"),
        (pb.VerifierMessage, counts.sent_messages, counts.sent_bytes, "sent_bytes"),
    ):
        kinds = {one.replace("_", "") for one in wire.DESCRIPTOR.fields_by_name}
        assert set(messages) == set(sizes) == kinds
        (row,) = [one for one in page.splitlines() if one.startswith(f"| `edgespec_{name}_total")]
        assert set(re.findall(r"`([a-z]+)`", row)) - {"kind"} == kinds


def test_prompt_tokens_include_those_of_pictures() -> None:
    meter = StreamMeter()
    opening = ee.OpenSequence(
        "s", len(OPENED), SamplingParams(), pictures=ReadPictures(extra_tokens=8)
    )
    meter.observe(ee.StreamOpened(7, m.Open("s", "", "", OPENED), "peer"), (opening,), 10.0)
    assert meter.prompt_tokens == len(OPENED) + 8


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
    meter.end_stream(7, 16.0)
    meter.record_fault(7, m.Fault(m.FaultCode.INTERNAL, ""))
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
    faulted.meter.record_fault(7, m.Fault(m.FaultCode.OVERLOADED, ""))
    for scene, reason in ((cancelled, "cancelled"), (lost, "lost"), (faulted, "overloaded")):
        scene.meter.end_stream(7, 12.0)
        assert [record.reason for record in scene.records] == [reason]
        assert {key for key, count in scene.meter.finished.items() if count} == {reason}


def test_a_failed_pass_has_no_length() -> None:
    scene = Scene()
    batch = ee.RunBatch((PassRequest("s", 0, OPENED),))
    scene.meter.observe(ee.Poll(), (batch,), 11.0)
    scene.meter.observe(ee.BatchFailed("no"), (batch,), 12.0)
    scene.meter.observe(ee.BatchDone(()), (), 15.0)
    assert (sum(scene.meter.pass_s.counts), scene.meter.pass_s.total) == (1, 3.0)
    assert scene.meter.failed_passes == 1


# --- log lines, which hold nothing of requests and outputs ----------------------------------------


WITHIN_S = 120


class Lines(logging.Handler):
    """Log handler that parses every line as JSON."""

    logger, level = "edgespec", logging.INFO

    def __init__(self) -> None:
        super().__init__(self.level)
        self.setFormatter(JsonFormatter())
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.texts]

    @property
    def streams(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == "stream"]


@contextlib.contextmanager
def attach_handler(handler: Lines) -> Iterator[Lines]:
    logger = logging.getLogger(handler.logger)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def log() -> Iterator[Lines]:
    with attach_handler(Lines()) as found:
        yield found


def _record(message: str, **extra: object) -> logging.LogRecord:
    return logging.getLogger("edgespec.x").makeRecord(
        "edgespec.x", logging.WARNING, "x.py", 1, message, (), None, extra=extra
    )


def test_a_json_line_is_one_object_whatever_the_message_holds() -> None:
    hostile = 'two\nlines "and" {braces} \x1b[31m \u2028 é'
    text = JsonFormatter().format(_record(hostile, fields={"tokens": 3, "level": "forged"}))
    assert "\n" not in text
    assert "\x1b" not in text
    line = json.loads(text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {"level": "warning", "logger": "edgespec.x", "message": hostile, "tokens": 3}


async def test_every_stream_has_one_line_that_says_what_it_got(log: Lines) -> None:
    async with start_watched() as found:
        async with (
            build_agent(make_config(found.address)) as one,
            build_agent(make_config(found.address)) as two,
        ):
            chunks = await asyncio.gather(collect(one, GREEDY), collect(two, SAMPLED))
            stats = [agent.stats for agent in (one, two)]
    assert sorted(line["tokens"] for line in log.streams) == sorted(
        len(tokens_of(c)) for c in chunks
    )
    accepted = [one.counters.accepted for one in stats if one is not None]
    assert sorted(line["accepted"] for line in log.streams) == sorted(accepted)
    assert len({line["request"] for line in log.streams}) == 2
    for line in log.streams:
        assert (line["reason"], line["level"], line["served"]) == ("length", "info", True)
        assert line["peer"] in line["message"]
        assert 0 < line["ttft_s"] <= line["duration_s"]
        assert line["tpot_s"] > 0


def test_all_that_a_daemon_and_a_device_say_is_json() -> None:
    form = ("--set", "log_format=json")
    with start_daemon(*form, "--set", "log_level=info", "--metrics-port", "0") as (
        address,
        verifier,
    ):
        where = ("--verifier", address, "--draft", "toy", "--stats")
        with start("generate", PROMPT, *where, "-n", "8", *form) as device:
            _, errors = device.communicate(timeout=WITHIN_S)
        verifier.send_signal(signal.SIGTERM)
        _, said = verifier.communicate(timeout=WITHIN_S)
    lines = [json.loads(line) for line in said.splitlines()]
    assert {"loading toy ...", "stopping"} <= {x["message"] for x in lines}
    (stream,) = [line for line in lines if line.get("event") == "stream"]
    assert (stream["tokens"], stream["reason"]) == (8, "length")
    assert "8 tokens in" in json.loads(errors.splitlines()[-1])["message"]
    assert device.returncode == verifier.returncode == 0


FULL = Path("/dev/full")


@pytest.fixture
def full() -> Path:
    """Return a path on a disk that is full."""
    if not FULL.exists():
        pytest.skip(f"this system has no {FULL}")
    return FULL


def test_a_full_disk_is_told_once_and_ends_the_trace(
    full: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), TraceFile(full) as trace:
        for position in range(2000):
            trace.record(1.0, "device", "s", "event", Commit(position, (1, 2, 3)))
    (record,) = caplog.records
    assert record.message == f"the trace {full} ends here: No space left on device"


def test_a_secret_is_not_traced(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as trace:
        trace.record(1.0, "device", "s", "event", Open("s", "", "", (1,), session_secret=b"hush"))
    (line,) = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["prompt"] == [1]
    assert "hush" not in line
    assert "session_secret" not in line


WORD = "Xylophonquark"
SCHEMA = {"type": "object", "properties": {WORD: {"type": "string"}}}


class Everything(Lines):
    """All lines of all loggers at any level, in both formats."""

    logger, level = "", logging.DEBUG

    def emit(self, record: logging.LogRecord) -> None:
        self.texts += [one.format(record) for one in (JsonFormatter(), TextFormatter())]


@pytest.fixture
def all_lines() -> Iterator[Lines]:
    with attach_handler(Everything()) as found:
        yield found


class Failing(ToyTarget):
    """A target that fails once, in a pass."""

    failing = False

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        if self.failing:
            self.failing = False
            raise RuntimeError("a pass was chosen to fail")
        return super().forward(batch)


ASKED: tuple[dict[str, Any], ...] = (
    {"prompt": WORD, "max_tokens": 4},
    {"prompt": WORD, "max_tokens": 4, "stream": True, "stop": [WORD]},
    {"prompt": WORD, "max_tokens": 4, "regex": f"({WORD}"},
    {"prompt": WORD, "max_tokens": 4, "grammar": f"start: {WORD}"},
    {"prompt": WORD, "max_tokens": WORD},
    {"prompt": [WORD, 1], "max_tokens": 4},
    {"prompt": [1, 1 << 40], "max_tokens": 4},
    {"prompt": WORD, WORD: 1},
    {"prompt": WORD, "prompt_cache_key": WORD, "max_tokens": 4},
    {"messages": [{"role": "user", "content": WORD}], "max_tokens": 4},
    {"messages": [{"role": WORD, "content": WORD}]},
    {
        "messages": [{"role": "user", "content": WORD}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "max_tokens": 4,
    },
)


async def test_no_request_leaves_its_words_in_a_log(all_lines: Lines) -> None:
    target = load_target(VerifierConfig(model="toy"))
    assert isinstance(target, ToyTarget)
    failing = Failing(TOY_MODEL, name="toy", vocabulary=target.info.vocabulary)
    statuses = set[int]()
    async with over_toy(failing) as live:
        for asked in ASKED:
            path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
            statuses.add((await ask(live, path, asked)).status)
        failing.failing = True
        # repeat until a request has met the failing pass, however busy this machine is
        while failing.failing or 200 not in statuses:
            statuses.add((await ask(live, "/v1/completions", ASKED[0])).status)
        logging.getLogger("edgespec").info("the last line")
    assert {200, 400} <= statuses
    text = "\n".join(all_lines.texts)
    assert "a pass was chosen to fail" in text  # the log names the failure, but not the request
    assert "the last line" in text
    assert WORD not in text
    assert ", ".join(map(str, ToyTokenizer().encode(WORD)[:6])) not in text


async def test_a_bug_while_a_request_is_answered_leaves_none_either(
    all_lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with over_toy() as live:
        monkeypatch.setattr(live.endpoint.agent, "_make_session", raise_bug)
        monkeypatch.setattr(live.endpoint.tokenizer, "chat_template", raise_bug)
        for asked in (ASKED[0], ASKED[9]):
            path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
            assert (await ask(live, path, asked)).status == 500
        await asyncio.sleep(0)
    text = "\n".join(all_lines.texts)
    assert "a bug" in text
    assert WORD not in text


def raise_bug(*arguments: object, **more: object) -> object:
    raise ZeroDivisionError("a bug")
