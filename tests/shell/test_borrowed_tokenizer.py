"""A device without a tokenizer takes the verifier's, and nothing that was not announced.

Oracle: the files in the model's folder, and the text that a device with that folder gets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from edgespec.api import connect
from edgespec.cli.main import app
from edgespec.config import AgentConfig, DraftSection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.ports import LinkError, ModelInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.credential import Credential
from edgespec.device.agent import Agent, GenerationError
from edgespec.device.borrowed_tokenizer import _place, with_tokenizer
from edgespec.device.borrowing_agent import BorrowingAgent
from edgespec.device.build import build_agent, load_tokenizer
from edgespec.models.folders import Role, model_info, resolve_model, vocabulary_fingerprint
from edgespec.verifier.build import packed_texts
from edgespec.wire.grpc_client import GrpcTransport
from edgespec.wire.tokenizer_lending import PART_BYTES, PackedFile, TextFile, TokenizerFetch
from tests.endpoint.live_endpoint import exchange, request_bytes
from tests.shell.echo_verifier import echo, served
from tests.shell.gate import Gate
from tests.shell.live_verifier import ready, serving, start
from tests.shell.tiny_checkpoints import write_checkpoint, write_tokenizer

WITHIN_S = 200.0
NAMES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    with ready(start("verifier", "--model", str(model), "--port", "0")) as (where, _):
        yield where


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "edgespec" / "tokenizers"


def call(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


def test_generate_and_chat_just_work_and_fetch_once(address: str, model: Path, cache: Path) -> None:
    where = ("--verifier", address, "-n", "12")
    with_folder = call(
        "generate", "the quick", *where, "--draft", "none", f"--set=tokenizer={model}"
    )
    assert with_folder.exit_code == 0, with_folder.output
    for draft in ("none", "lookup"):
        result = call("generate", "the quick", *where, "--draft", draft)
        assert (result.exit_code, result.stdout) == (0, with_folder.stdout)
        assert ("fetching the tokenizer of tiny" in result.stderr) == (draft == "none")
    (folder,) = cache.iterdir()
    for name in NAMES:
        assert (folder / name).read_bytes() == (model / name).read_bytes()
    (folder / "tokenizer.json").write_text("{}")  # damaged on disk: it is fetched again
    talk = call("chat", *where, "--draft", "none", stdin="hello\n/quit\n")
    assert talk.exit_code == 0, talk.output
    assert "fetching the tokenizer of tiny" in talk.stderr
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("draft", ["none", "lookup"])
async def test_the_python_api_fetches_it_too(address: str, model: Path, draft: str) -> None:
    params = SamplingParams(max_tokens=12)

    async def text(agent: Agent) -> str:
        async with agent:
            return "".join([chunk.text async for chunk in agent.generate("the quick", params)])

    expected = await text(connect(address, draft="none", tokenizer=str(model)))
    agent = connect(address, draft=draft)
    assert await text(agent) == expected
    assert (agent.drafter is None) == (draft == "none")


PATIENT = ReconnectPolicy(give_up_first_s=WITHIN_S, first_s=0.01, longest_s=0.05)


async def test_an_agent_waits_for_who_lends_it(address: str, model: Path) -> None:
    """Oracle: the same agent with the folder."""
    params, port = SamplingParams(max_tokens=12), int(address.rpartition(":")[2])
    async with Gate(None) as gate:
        config = AgentConfig(verifier=gate.address, draft=DraftSection("none"), reconnect=PATIENT)
        agent = BorrowingAgent(config)
        async with agent:

            async def text() -> str:
                return "".join([chunk.text async for chunk in agent.generate("the", params)])

            both = asyncio.gather(text(), text())
            with pytest.raises(LinkError, match=gate.address):
                await agent.borrow()
            assert agent.lent is None
            gate.port = port
            found = list(await both)
        async with build_agent(dataclasses.replace(config, tokenizer=str(model))) as own:
            expected = "".join([chunk.text async for chunk in own.generate("the", params)])
    assert found == [expected] * 2


async def test_a_verifier_that_is_lost_while_it_lends_is_asked_again(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come back, so an endpoint goes on; a command that asks once says what to give."""
    params, whole = SamplingParams(max_tokens=4), TokenizerFetch.content

    async def lost(fetch: TokenizerFetch, entry: TextFile) -> bytes:
        monkeypatch.setattr(TokenizerFetch, "content", whole)
        raise LinkError("the verifier went while it lent")

    config = AgentConfig(verifier=address, draft=DraftSection("none"), reconnect=PATIENT)
    agent = BorrowingAgent(config)
    async with agent:
        for _ in range(2):
            monkeypatch.setattr(TokenizerFetch, "content", lost)
            with pytest.raises(LinkError, match="went while it lent"):
                await agent.borrow()
        monkeypatch.setattr(TokenizerFetch, "content", lost)
        assert [chunk async for chunk in agent.generate("the", params)]
        assert agent.lent is not None
    transport = GrpcTransport(address)
    info = (await transport.info()).model
    await transport.close()
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)  # where nothing can lie
    monkeypatch.setattr(TokenizerFetch, "content", lost)
    with pytest.raises(SetupError, match=r"went while it lent\n  name a folder"):
        await with_tokenizer(config, info, lambda text: None)


async def test_who_lends_none_ends_the_waiting() -> None:
    config = AgentConfig(verifier="127.0.0.1:1", draft=DraftSection("none"), model="other")
    hasty = dataclasses.replace(config, reconnect=ReconnectPolicy(give_up_first_s=0.1))
    async with BorrowingAgent(hasty) as agent:
        with pytest.raises(GenerationError, match=r"gave up on the verifier: .*127.0.0.1:1"):
            await anext(agent.generate("the"))
    async with serving() as (where, _):
        async with BorrowingAgent(dataclasses.replace(config, verifier=where)) as agent:
            with pytest.raises(GenerationError, match="serves 'toy', not 'other'"):
                await anext(agent.generate("the"))


async def test_an_endpoint_begins_without_a_verifier_and_takes_its_tokenizer_later(
    address: str, model: Path, tmp_path: Path
) -> None:
    """Oracle: what the verifier gives to a device that has the folder."""
    params, asked = SamplingParams(max_tokens=8), {"prompt": "the quick", "max_tokens": 8}
    config = AgentConfig(verifier=address, draft=DraftSection("none"), tokenizer=str(model))
    async with build_agent(config) as agent:
        text = "".join([chunk.text async for chunk in agent.generate("the quick", params)])
    file = tmp_path / "device.yaml"
    file.write_text("reconnect: {give_up_first_s: 0.2}\ndraft: {model: none}\n")
    async with Gate(None) as gate:
        where = ("--port", "0", "--verifier", gate.address)
        process = start("serve", "--config", str(file), *where)
        with process:
            try:
                assert process.stdout is not None
                line = await asyncio.to_thread(process.stdout.readline)
                found = re.search(r"ready on http://127.0.0.1:(\d+)/v1", line)
                assert found is not None, line
                port = int(found[1])
                health = await exchange(port, request_bytes("/health"))
                assert health.json["status"] == "waiting"
                assert (await exchange(port, request_bytes("/"))).status == 200
                refused = await exchange(port, completion(asked))
                assert refused.status == 503
                assert "takes its tokenizer from one" in refused.error["message"]
                gate.port = int(address.rpartition(":")[2])
                while (answer := await exchange(port, completion(asked))).status != 200:
                    assert answer.status == 503
                assert answer.json["choices"][0]["text"] == text
                health = await exchange(port, request_bytes("/health"))
                assert health.json["verifiers"][0]["model"] == "tiny"
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait) == 0
            finally:
                process.kill()


def completion(asked: dict[str, object]) -> bytes:
    return request_bytes("/v1/completions", json.dumps(asked).encode())


async def test_a_verifier_that_lends_none_says_so(tmp_path: Path) -> None:
    """The toy has no tokenizer file; a device that has its vocabulary all the same goes on."""
    async with serving() as (address, verifier):
        config = AgentConfig(verifier=address, draft=DraftSection("none"))
        said: list[str] = []
        info = verifier.info.model
        assert (await with_tokenizer(config, info, said.append)).tokenizer == "toy"
        strange = dataclasses.replace(info, vocabulary="strange")
        with pytest.raises(SetupError, match=r"toy model has none(.|\n)*name a folder"):
            await with_tokenizer(config, strange, said.append)
        assert not said
    # What is served is not what is lent.
    model = write_checkpoint(tmp_path / "other")
    async with serving(config=VerifierConfig(model="toy")) as (address, verifier):
        config = AgentConfig(verifier=address, draft=DraftSection("none"), tokenizer=str(model))
        assert await with_tokenizer(config, verifier.info.model, said.append) is config


async def test_an_older_verifier_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(echo) as (_, transport):
        with pytest.raises(LinkError, match="has no tokenizer to send"):
            await TokenizerFetch(transport.ask_tokenizer, "here").entries()
        monkeypatch.setattr("edgespec.wire.grpc_client.SERVICE", "edgespec.v1.Nobody")
        with pytest.raises(LinkError, match="UNIMPLEMENTED") as refused:
            await TokenizerFetch(transport.ask_tokenizer, "here").entries()
        assert not refused.value.retryable


async def test_who_shows_no_key_gets_no_tokenizer(model: Path) -> None:
    keys = {"right": Credential("right")}
    async with served(echo, authenticate=keys.get, texts=partial(packed_texts, str(model))) as (
        _,
        transport,
    ):
        with pytest.raises(LinkError, match="asks for a key"):
            await TokenizerFetch(transport.ask_tokenizer, "here").entries()
        known = GrpcTransport(transport.address, api_key="right")
        try:
            fetch = TokenizerFetch(known.ask_tokenizer, "here")
            entries = await fetch.entries()
            assert {entry.name for entry in entries} == set(NAMES)
            for entry in entries:
                assert await fetch.content(entry) == (model / entry.name).read_bytes()
        finally:
            await known.close()


async def test_a_file_of_many_parts_comes_whole() -> None:
    text = random.Random(0).randbytes(5 * PART_BYTES // 2)
    texts = [PackedFile.of("tokenizer.json", text)]
    async with served(echo, texts=lambda: texts) as (_, transport):
        fetch = TokenizerFetch(transport.ask_tokenizer, "here")
        (entry,) = await fetch.entries()
        assert await asyncio.gather(*(fetch.content(entry) for _ in range(3))) == [text] * 3


# --- what a device does not take ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "model.vocab is missing"), ('{"model": {"vocab": {"a": 0}}}', "not a readable")],
)
async def test_an_unreadable_tokenizer_is_told_and_not_kept(
    text: str, message: str, cache: Path
) -> None:
    texts = [PackedFile.of("tokenizer.json", text.encode())]
    async with served(echo, texts=lambda: texts) as (_, transport):
        config = AgentConfig(verifier=transport.address, draft=DraftSection("none"))
        info = ModelInfo("strange", "strange", 10, 100)
        with pytest.raises(SetupError, match=f"'strange' sent cannot be used: .*{message}"):
            await with_tokenizer(config, info, lambda text: None)
    assert not any(os.scandir(cache))


async def test_another_vocabulary_than_what_is_served_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "lent")
    texts = [PackedFile.of(name, (folder / name).read_bytes()) for name in NAMES]
    async with served(echo, texts=lambda: texts) as (_, transport):
        config = AgentConfig(verifier=transport.address, draft=DraftSection("none"))
        info = ModelInfo("strange", "strange", 320, 100)
        with pytest.raises(SetupError, match="but it serves strange"):
            await with_tokenizer(config, info, lambda text: None)


async def test_the_bundled_target_lends_its_own() -> None:
    info = model_info(resolve_model("bundled", Role.TARGET))
    async with served(echo, texts=partial(packed_texts, "bundled")) as (_, transport):
        config = AgentConfig(verifier=transport.address, draft=DraftSection("lookup"))
        config = await with_tokenizer(config, info, lambda text: None)
    lent, own = load_tokenizer(config.tokenizer), load_tokenizer("bundled")
    assert lent.encode("def f(x): ...") == own.encode("def f(x): ...")


def test_a_tokenizer_that_another_process_has_put_there_stays(tmp_path: Path) -> None:
    """That process may be about to read it."""
    lent = write_tokenizer(tmp_path / "lent")
    packed = [PackedFile.of(name, (lent / name).read_bytes()) for name in NAMES]
    contents = {one.entry.name: (lent / one.entry.name).read_bytes() for one in packed}
    info = ModelInfo("tiny", vocabulary_fingerprint(lent / "tokenizer.json"), 320, 100)
    folder, entries = tmp_path / "cache" / "key", [one.entry for one in packed]
    _place(folder, entries, contents, info)
    before = folder.stat().st_ino
    _place(folder, entries, contents, info)
    assert folder.stat().st_ino == before
    (folder / "tokenizer.json").write_text("damaged")
    _place(folder, entries, contents, info)
    assert (folder / "tokenizer.json").read_bytes() == contents["tokenizer.json"]
    assert [one.name for one in folder.parent.iterdir()] == ["key"]
