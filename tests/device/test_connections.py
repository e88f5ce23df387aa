"""Tests of a device's connections: what shares one, what leaves before an answer is there, and what
happens if a remembered answer is outdated.

Oracles: a link that holds what comes down (``held_link.py``), so that what reaches the verifier
needed no answer; the number of connections that a verifier accepts; the output of an agent that
remembers nothing; and clocks that the test sets.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import edgespec
from edgespec.cli import device as cli
from edgespec.config import AgentConfig, DraftSection
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.ports import LinkError, ModelInfo, VerifierStream
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.errors import ConnectError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import remembered_verifiers
from edgespec.device.agent import Agent
from edgespec.device.borrowed_tokenizer import BorrowingAgent, recall_target
from edgespec.device.build import build_agent, vocabulary_of
from edgespec.device.connections import Connections
from edgespec.device.prober import VerifierMonitor
from edgespec.device.remembered_verifiers import Greeting, recall_greeting, store_greeting
from edgespec.device.sleeping import SLEPT_S, Clocks
from edgespec.testing import play_output
from edgespec.verifier.build import packed_texts
from edgespec.wire.grpc_client import GrpcTransport
from edgespec.wire.grpc_server import GrpcServer
from edgespec.wire.pb import speculation_pb2 as pb
from edgespec.wire.tokenizer_lending import PART_BYTES, PackedTexts, TokenizerFetch
from tests.kit.echo_verifier import PATIENCE_S
from tests.kit.held_link import HeldLink
from tests.kit.live_verifier import run_command, serve_toy, start_daemon, wait_until
from tests.kit.tiny_checkpoints import write_checkpoint
from tests.present import require

PROMPT = "the quick brown"
PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own, and early connections on this machine too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(GrpcTransport, "_may_send_early", lambda self: True)
    return tmp_path / "edgespec"


class Lender:
    """A verifier that lends the texts in a folder, and answers every generation with its tokens."""

    def __init__(self, folder: Path, output: tuple[int, ...] = (5, 6, 7)) -> None:
        self.folder, self.output = folder, output
        self.opened: asyncio.Queue[m.Open] = asyncio.Queue()
        model = ModelInfo("tiny", vocabulary_of(str(folder)), 320, 512)
        self.info = m.VerifierInfo(model, m.Limits(), 0, 8)

    async def serve(self, stream: VerifierStream) -> None:
        opening = await stream.receive()
        assert isinstance(opening, m.Open)
        self.opened.put_nowait(opening)
        if opening.vocabulary not in ("", self.info.model.vocabulary):
            why = f"vocabulary {opening.vocabulary} is none here"
            await stream.send(m.Fault(m.FaultCode.VOCABULARY_MISMATCH, why))
            return
        await play_output(stream, opening, self.output)


@asynccontextmanager
async def behind_link(lender: Lender) -> AsyncIterator[HeldLink]:
    server = GrpcServer(
        "127.0.0.1:0", lender.serve, lambda: lender.info, texts=packed_texts(str(lender.folder))
    )
    await server.start()
    try:
        async with HeldLink(server.port) as link:
            try:
                yield link
            finally:
                link.release(upwards=False)
    finally:
        await server.stop()


def config_for(*addresses: str) -> AgentConfig:
    return AgentConfig(
        verifier=addresses[0] if len(addresses) == 1 else addresses, draft=DraftSection("none")
    )


async def output_of(agent: Agent, prompt: str = PROMPT) -> list[int]:
    chunks = [chunk async for chunk in agent.generate(prompt, PARAMS)]
    return [token for chunk in chunks for token in chunk.tokens]


async def test_the_prompt_of_a_new_process_leaves_with_its_greeting(model: Path) -> None:
    """The tokenizer is in the cache, so nothing from the verifier is needed before the prompt."""
    lender = Lender(model)
    async with behind_link(lender) as link:
        async with BorrowingAgent(config_for(link.address)) as agent:
            assert await output_of(agent) == [5, 6, 7]
        first = lender.opened.get_nowait()
        async with BorrowingAgent(config_for(link.address)) as agent:
            link.hold(upwards=False)
            generating = asyncio.create_task(output_of(agent))
            async with asyncio.timeout(PATIENCE_S):
                second = await lender.opened.get()
            assert not generating.done()
            link.release(upwards=False)
            assert await generating == [5, 6, 7]
        assert second.prompt == first.prompt


async def test_an_agent_that_waits_for_a_prompt_needs_one_round_trip(model: Path) -> None:
    lender = Lender(model)
    async with behind_link(lender) as link, edgespec.connect(link.address, draft="none") as agent:
        device = require(agent._device)
        assert isinstance(device, BorrowingAgent)
        await wait_until(lambda: device.reference)
        link.hold(upwards=False)
        generating = asyncio.create_task(agent.complete(PROMPT, max_tokens=4))
        async with asyncio.timeout(PATIENCE_S):
            await lender.opened.get()
        assert not generating.done()
        link.hold(upwards=True)
        link.release(upwards=False)
        async with asyncio.timeout(PATIENCE_S):
            assert (await generating).tokens == (5, 6, 7)
        link.release(upwards=True)


async def test_everything_of_a_command_goes_over_one_connection(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The greeting, the tokenizer's parts, generations and an endpoint's probes."""
    monkeypatch.setattr(GrpcTransport, "_may_send_early", lambda self: False)
    lender = Lender(model)
    async with behind_link(lender) as link:
        config = config_for(link.address)
        async with Connections(config, with_texts=True) as connections:
            chosen, info = await cli.choose_verifier(config, connections)
            async with build_agent(chosen, target=info, lease=connections.lease) as agent:
                assert await output_of(agent) == [5, 6, 7]
                watch = VerifierMonitor({link.address: connections.lease(link.address)})
                await watch.refresh()
                assert watch.ready
                await watch.close()
                assert await output_of(agent) == [5, 6, 7]
            assert link.accepted == 1
            assert await connections.lease(link.address).info() == lender.info
        assert link.accepted == 1


async def test_a_second_verifier_that_never_answers_holds_up_no_text(model: Path) -> None:
    lender, silent = Lender(model), Lender(model)
    async with behind_link(lender) as link, behind_link(silent) as held:
        config = config_for(held.address, link.address)
        async with BorrowingAgent(config_for(link.address)) as agent:  # which remembers it
            await output_of(agent)
        held.hold(upwards=True)
        held.hold(upwards=False)
        async with asyncio.timeout(PATIENCE_S):
            async with BorrowingAgent(config) as agent:
                assert await output_of(agent) == [5, 6, 7]
        held.release(upwards=True)
    assert silent.opened.empty()


@pytest.mark.parametrize("change", ["vocabulary", "template"])
async def test_a_text_by_outdated_files_is_never_shown(
    model: Path, tmp_path: Path, change: str
) -> None:
    """The verifier behind the address is another one now. Oracle: an agent with an empty cache."""
    folder = write_checkpoint(tmp_path / "other")
    tokenizer = folder / "tokenizer.json"
    if change == "vocabulary":
        tokenizer.write_text(tokenizer.read_text().replace("<|user|>", "<|human|>"))
    else:  # the same ids, but the prompt begins with another token
        texts = {"chat_template": "{{ messages[0].content }}", "bos_token": "<|user|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    old, new = Lender(model), Lender(folder, (8, 9))
    async with behind_link(old) as link, behind_link(new) as other:
        async with BorrowingAgent(config_for(link.address)) as agent:
            assert await output_of(agent) == [5, 6, 7]
        link.port = other.port
        link.cut()
        async with BorrowingAgent(config_for(link.address)) as agent:
            assert await output_of(agent) == [8, 9]
            found = [new.opened.get_nowait() for _ in range(new.opened.qsize())][-1]
        async with BorrowingAgent(config_for(other.address)) as fresh:
            assert await output_of(fresh) == [8, 9]
        assert new.opened.get_nowait().prompt == found.prompt
        assert require(recall_greeting(link.address)).info.models == new.info.models


async def test_remembered_texts_do_not_make_a_caller_wait_for_ever(
    model: Path, dead: str, cache: Path
) -> None:
    """An endpoint that starts without a verifier answers 503 after the usual time."""
    lender = Lender(model)
    async with behind_link(lender) as link:
        async with BorrowingAgent(config_for(link.address)) as agent:
            await output_of(agent)
    store_greeting(dead, require(recall_greeting(link.address)))
    hasty = ReconnectPolicy(give_up_first_s=0.1)
    async with BorrowingAgent(replace(config_for(dead), reconnect=hasty)) as agent:
        for _ in range(2):
            with pytest.raises(ConnectError, match=f"gave up on the verifier: .*{dead}"):
                await agent.take_texts()
        with pytest.raises(ConnectError, match="gave up"):
            await output_of(agent)


def test_a_verifier_that_is_gone_is_named_although_it_is_remembered() -> None:
    with start_daemon() as (where, _):
        first = run_command("generate", "x", "--verifier", where, "--draft=toy", "-n", 4)
    result = run_command("generate", "x", "--verifier", where, "--draft=toy", "-n", 4)
    assert (first.exit_code, result.exit_code) == (0, 1)
    assert f"no verifier answers at {where}" in result.stderr


def test_a_command_that_remembers_prints_the_same(cache: Path, address: str) -> None:
    said = [
        run_command("generate", PROMPT, "--verifier", address, "--draft", "toy", "-n", 8)
        for _ in range(3)
    ]
    assert {(one.exit_code, one.stdout) for one in said} == {(0, said[0].stdout)}
    (path,) = (cache / "verifiers").iterdir()
    assert path.stat().st_mode & 0o77 == 0
    path.write_text("{")  # damaged
    again = run_command("generate", PROMPT, "--verifier", address, "--draft", "toy", "-n", 8)
    assert again.stdout == said[0].stdout
    assert json.loads(path.read_text())["address"] == address


class SetClocks:
    """Clocks that stand still until a test moves them."""

    def __init__(self) -> None:
        self.now, self.wall = 100.0, 1e9
        self.waits: asyncio.Queue[tuple[float, asyncio.Future[None]]] = asyncio.Queue()

    async def wait(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waits.put_nowait((seconds, future))
        await future

    async def pass_wait(self) -> float:
        """Wait until a wait begins, let its time pass, and return its seconds."""
        seconds, future = await self.waits.get()
        self.now, self.wall = self.now + seconds, self.wall + seconds
        future.set_result(None)
        return seconds

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.now, lambda: self.wall, self.wait)


class Counted:
    """A connection that counts its calls."""

    is_idle = True

    def __init__(self) -> None:
        self.infos = self.renewals = 0

    async def connect(self) -> object:
        raise LinkError("only counted")

    async def info(self) -> m.VerifierInfo:
        self.infos += 1
        return m.VerifierInfo(ModelInfo("toy", "v1", 64, 4096), m.Limits(), 0, 8)

    async def call_unary(self, name: str, request: bytes) -> bytes:
        raise LinkError("none", retryable=False)

    def renew(self) -> None:
        self.renewals += 1

    async def close(self) -> None: ...


@asynccontextmanager
async def counted(
    monkeypatch: pytest.MonkeyPatch, keep_warm_s: float = 45.0
) -> AsyncIterator[tuple[Connections, Counted, SetClocks]]:
    link, clocks = Counted(), SetClocks()
    monkeypatch.setattr("edgespec.device.build.connect", lambda *_, **__: link)
    config = replace(config_for("box:7420"), keep_warm_s=keep_warm_s)
    async with Connections(config, with_texts=False, clocks=clocks.clocks) as connections:
        yield connections, link, clocks


async def test_only_an_unused_connection_is_kept_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    async with counted(monkeypatch, keep_warm_s=45.0) as (connections, link, clocks):
        connections.keep_warm()
        assert await clocks.pass_wait() == 45.0
        assert await clocks.pass_wait() == 45.0
        await wait_until(lambda: clocks.waits.qsize())
        assert link.infos == 2
        clocks.now += 30.0
        await connections.lease("box:7420").info()  # a use, after which 45 s have to pass
        _, future = await clocks.waits.get()
        clocks.now += 15.0
        future.set_result(None)
        assert await clocks.pass_wait() == 30.0
        assert link.infos == 3
        await wait_until(lambda: clocks.waits.qsize())
        assert link.infos == 4


async def test_nothing_is_kept_warm_if_that_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with counted(monkeypatch, keep_warm_s=0.0) as (connections, _, clocks):
        connections.keep_warm()
        await asyncio.sleep(0)
        assert clocks.waits.empty()


@pytest.mark.parametrize(
    ("slept_s", "renewals"), [(0.0, 0), (SLEPT_S - 1, 0), (SLEPT_S + 1, 1), (-3600.0, 0)]
)
async def test_a_machine_that_slept_connects_anew(
    slept_s: float, renewals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock goes on while a machine sleeps, the monotonic one does not."""
    async with counted(monkeypatch) as (connections, link, clocks):
        lease = connections.lease("box:7420")
        await lease.info()
        clocks.now, clocks.wall = clocks.now + 5.0, clocks.wall + 5.0 + slept_s
        for _ in range(2):
            await lease.info()
        assert link.renewals == renewals


async def test_a_greeting_that_failed_is_made_again(dead: str) -> None:
    async with Connections(config_for(dead), with_texts=False) as connections:
        connections.start()
        for _ in range(2):
            (answer,) = (await connections.answers()).values()
            assert not answer.info
            assert await connections.first_answer() is None
        with pytest.raises(LinkError, match=dead):
            await connections.greet(dead)


async def test_the_best_of_several_is_known_before_the_first_generation() -> None:
    """Warming up probes all, so the first generation need not race."""
    async with serve_toy() as (one, _), serve_toy() as (two, _):
        config = replace(config_for(one, two), tokenizer="toy")
        async with build_agent(config) as agent:
            await agent.warm_up()
            candidates = agent.transport.failover.candidates.listed  # type: ignore[union-attr]
            await wait_until(lambda: all(found.info for found in candidates.values()))


def test_an_answer_is_remembered_without_its_load(model: Path) -> None:
    info = replace(Lender(model).info, sessions=3, pass_us=700)
    packed = packed_texts(str(model))
    assert isinstance(packed, PackedTexts)
    lends, refuses = Greeting(info, packed.announced), Greeting(info, None, "it lends none")
    for greeting, other in ((lends, refuses), (refuses, lends)):
        store_greeting("box:7420", greeting)
        found = require(recall_greeting("box:7420"))
        assert found.is_same_as(greeting)
        assert not found.is_same_as(other)
        assert (found.info.sessions, found.refusal) == (0, greeting.refusal)
    assert recall_greeting("box:7421") is None


def test_only_the_latest_answers_are_kept(model: Path, cache: Path) -> None:
    greeting, limit = Greeting(Lender(model).info), remembered_verifiers.MAX_KEPT
    for number in range(limit + 3):
        store_greeting(f"box:{number}", greeting)
        path = max((cache / "verifiers").iterdir(), key=lambda one: one.stat().st_mtime_ns)
        os.utime(path, (number, number))
    assert len([*(cache / "verifiers").iterdir()]) == limit
    assert recall_greeting("box:0") is None
    assert recall_greeting(f"box:{limit + 2}") is not None


async def test_a_remembered_verifier_whose_files_are_gone_is_not_recalled(
    model: Path, cache: Path
) -> None:
    lender = Lender(model)
    async with behind_link(lender) as link:
        config = config_for(link.address)
        async with BorrowingAgent(config) as agent:
            await output_of(agent)
        async with Connections(config, with_texts=True) as connections:
            assert recall_target(config, connections, lambda text: None) is not None
            (folder,) = (cache / "tokenizers").iterdir()
            (folder / "tokenizer.json").unlink()
            assert recall_target(config, connections, lambda text: None) is None
            other = replace(config, model="another")
            assert recall_target(other, connections, lambda text: None) is None


@pytest.mark.parametrize("understands", [True, False], ids=["new verifier", "older verifier"])
async def test_a_first_contact_gets_the_tokenizer_with_the_greeting(
    model: Path, understands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that are requested by an archive's name need its announcement, so a round trip more."""
    later: list[bytes] = []
    answer = PackedTexts.answer

    def watch(self: PackedTexts, request: bytes) -> bytes:
        wire = pb.TokenizerRequest.FromString(request)
        if wire.sha256:
            later.append(wire.sha256)
        if not understands:
            wire.ClearField("part_of")
        return answer(self, wire.SerializeToString())

    monkeypatch.setattr(PackedTexts, "answer", watch)
    lender = Lender(model)
    async with behind_link(lender) as link:
        async with BorrowingAgent(config_for(link.address)) as agent:
            assert await output_of(agent) == [5, 6, 7]
    assert bool(later) is not understands


async def test_parts_come_early_only_where_no_tokenizer_is_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second verifier is a new address, and may lend what the first one lent."""
    wanted = list[pb.TokenizerRequest]()
    answer = PackedTexts.answer

    def watch(self: PackedTexts, request: bytes) -> bytes:
        wanted.append(pb.TokenizerRequest.FromString(request))
        return answer(self, request)

    monkeypatch.setattr(PackedTexts, "answer", watch)
    first, second = Lender(model), Lender(model, (8, 9))
    async with behind_link(first) as link, behind_link(second) as other:
        async with BorrowingAgent(config_for(link.address, other.address)) as agent:
            assert await output_of(agent) == [5, 6, 7]
        assert sum(one.part_of == pb.TOKENIZER_ARCHIVE_FACTS for one in wanted) == 2
        wanted.clear()
        async with BorrowingAgent(config_for(other.address)) as agent:
            assert await output_of(agent) == [8, 9]
    assert not any(one.part_of for one in wanted)


async def test_all_parts_of_a_tokenizer_are_requested_together() -> None:
    """No part is answered before all were requested."""
    texts = PackedTexts({"tokenizer.json": os.urandom(5 * PART_BYTES + 100)})
    waiting: list[asyncio.Future[None]] = []

    async def call(request: bytes) -> bytes:
        if request:
            waiting.append(asyncio.get_running_loop().create_future())
            if len(waiting) == 6:
                for one in waiting:
                    one.set_result(None)
            await waiting[-1]
        return texts.answer(request)

    fetch = TokenizerFetch(call, "there")
    async with asyncio.timeout(PATIENCE_S):
        found = await fetch.fetch_texts(await fetch.fetch_announcement())
    assert len(found["tokenizer.json"]) == 5 * PART_BYTES + 100
