"""Tests that a device without a tokenizer fetches the verifier's, and only the files that were
announced.

Oracle: the files in the model's folder, the text that a device with that folder gets, the bytes
that a verifier packed, and the bounds that the error messages name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from edgespec.config import AgentConfig, DraftSection
from edgespec.config.common import SetupError
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.ports import LinkError, ModelInfo
from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import GenerationError
from edgespec.device.borrowed_tokenizer import BorrowingAgent, with_tokenizer
from edgespec.device.build import build_agent
from edgespec.verifier.build import packed_texts
from edgespec.wire import tokenizer_lending
from edgespec.wire.access import DeviceAccess
from edgespec.wire.codec import ProtocolViolation
from edgespec.wire.grpc_client import GrpcTransport
from edgespec.wire.pb import speculation_pb2 as pb
from edgespec.wire.tokenizer_lending import (
    PART_BYTES,
    EarlyParts,
    PackedTexts,
    TokenizerFetch,
    unpack_texts,
)
from tests.kit.echo_verifier import echo, serve_streams
from tests.kit.gate import Gate
from tests.kit.live_verifier import run_command, serve_toy, start, wait_until_ready
from tests.kit.tiny_checkpoints import write_checkpoint

WITHIN_S = 200.0
NAMES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    with wait_until_ready(start("verifier", "--model", str(model), "--port", "0")) as (where, _):
        yield where


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "edgespec" / "tokenizers"


def test_generate_and_chat_just_work_and_fetch_once(address: str, model: Path, cache: Path) -> None:
    where = ("--verifier", address, "-n", "12", f"--set=reconnect.give_up_first_s={WITHIN_S}")
    with_folder = run_command(
        "generate", "the quick", *where, "--draft", "none", f"--set=tokenizer={model}"
    )
    assert with_folder.exit_code == 0, with_folder.output
    for draft in ("none", "lookup"):
        result = run_command("generate", "the quick", *where, "--draft", draft)
        assert (result.exit_code, result.stdout) == (0, with_folder.stdout)
        assert ("fetching the tokenizer of tiny" in result.stderr) == (draft == "none")
    (folder,) = cache.iterdir()
    for name in NAMES:
        assert (folder / name).read_bytes() == (model / name).read_bytes()
    # the cached copy is now incomplete, so it must be fetched again
    (folder / "tokenizer.json").unlink()
    talk = run_command("chat", *where, "--draft", "none", stdin="hello\n/quit\n")
    assert talk.exit_code == 0, talk.output
    assert "fetching the tokenizer of tiny" in talk.stderr
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


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
                await agent._borrow()
            gate.port = port
            found = list(await both)
        async with build_agent(dataclasses.replace(config, tokenizer=str(model))) as own:
            expected = "".join([chunk.text async for chunk in own.generate("the", params)])
    assert found == [expected] * 2


async def test_who_lends_none_ends_the_waiting() -> None:
    config = AgentConfig(verifier="127.0.0.1:1", draft=DraftSection("none"), model="other")
    hasty = dataclasses.replace(config, reconnect=ReconnectPolicy(give_up_first_s=0.1))
    async with BorrowingAgent(hasty) as agent:
        with pytest.raises(GenerationError, match=r"gave up on the verifier: .*127.0.0.1:1"):
            await anext(agent.generate("the"))
    async with serve_toy() as (where, _):
        async with BorrowingAgent(dataclasses.replace(config, verifier=where)) as agent:
            with pytest.raises(GenerationError, match="serves 'toy', not 'other'"):
                await anext(agent.generate("the"))


async def test_who_shows_no_key_gets_no_tokenizer(model: Path) -> None:
    keys = {"right": Credential("right")}
    async with serve_streams(echo, authenticate=keys.get, texts=packed_texts(str(model))) as (
        _,
        transport,
    ):
        with pytest.raises(LinkError, match="requires an API key"):
            await TokenizerFetch(
                partial(transport.call_unary, "Tokenizer"), "here"
            ).fetch_announcement()
        known = GrpcTransport(transport.address, DeviceAccess("right"))
        try:
            fetch = TokenizerFetch(partial(known.call_unary, "Tokenizer"), "here")
            found = await fetch.fetch_texts(await fetch.fetch_announcement())
            assert found == {name: (model / name).read_bytes() for name in NAMES}
        finally:
            await known.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "model.vocab is missing"), ('{"model": {"vocab": {"a": 0}}}', "not a readable")],
)
async def test_an_unreadable_tokenizer_is_told_and_not_kept(
    text: str, message: str, cache: Path
) -> None:
    texts = PackedTexts({"tokenizer.json": text.encode()})
    async with serve_streams(echo, texts=texts) as (_, transport):
        config = AgentConfig(verifier=transport.address, draft=DraftSection("none"))
        info = ModelInfo("strange", "strange", 10, 100)
        with pytest.raises(SetupError, match=f"'strange' sent cannot be used: .*{message}"):
            await with_tokenizer(config, info, lambda text: None)
    assert not any(os.scandir(cache))


def make_zip(*files: tuple[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files:
            with warnings.catch_warnings(action="ignore"):  # zipfile warns of a duplicate name
                file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return archive.getvalue()


ONE = ("tokenizer.json", b"x" * 100)
HONEST = make_zip(ONE)


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (make_zip(("../../.bashrc", b"x"), ONE), "'../../.bashrc' is none of tokenizer.json"),
        (make_zip(ONE, ONE), "must be distinct"),
        (make_zip(("chat_template.jinja", b"x")), "tokenizer.json among them"),
        (make_zip(*[(f"{n}", b"") for n in range(65)]), "files of the archive is 65"),
        (make_zip(ONE, ("chat_template.jinja", b"x" * 9)), "bytes of the files is 109"),
        # Both size fields of this archive claim 99 for 100 bytes.
        (HONEST.replace(b"\x64\0\0\0", b"\x63\0\0\0"), "cannot be unpacked: Bad CRC-32"),
        (HONEST[:-30], "cannot be unpacked"),
        (b"no archive", "cannot be unpacked"),
    ],
)
def test_archives_that_no_device_takes(
    archive: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_lending, "MAX_TEXT_BYTES", 108)
    with pytest.raises(ProtocolViolation, match=message):
        unpack_texts(archive)


@pytest.mark.parametrize(
    ("hash_bytes", "size", "message"),
    [
        (5, 9, "bytes of the SHA-256 is 5, but must be in"),
        (32, 0, "bytes of the archive is 0, but must be in"),
        (32, 67108865, "bytes of the archive is 67108865"),
    ],
)
async def test_what_cannot_be_an_archive_is_not_fetched(
    hash_bytes: int, size: int, message: str
) -> None:
    async def ask(request: bytes) -> bytes:
        return bytes(pb.TokenizerReply(sha256=bytes(hash_bytes), bytes=size).SerializeToString())

    with pytest.raises(LinkError, match=message) as refused:
        await TokenizerFetch(ask, "there").fetch_announcement()
    assert not refused.value.retryable


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda part: b"", "must be in"),
        (lambda part: part + part, "SHA-256 that was announced"),
        (lambda part: bytes(len(part)), "SHA-256 that was announced"),
    ],
)
async def test_parts_that_do_not_fit_are_refused(
    lie: Callable[[bytes], bytes], message: str
) -> None:
    texts = PackedTexts({"tokenizer.json": b"abc" * 1000})

    async def ask(request: bytes) -> bytes:
        reply = pb.TokenizerReply.FromString(texts.answer(request))
        if len(reply.data):
            reply.data = lie(reply.data)
        return bytes(reply.SerializeToString())

    fetch = TokenizerFetch(ask, "there")
    with pytest.raises(LinkError, match=message) as refused:
        await fetch.fetch_texts(await fetch.fetch_announcement())
    assert not refused.value.retryable


@pytest.mark.parametrize("size", [100, PART_BYTES, PART_BYTES + 1, 20 * PART_BYTES])
@pytest.mark.parametrize("wanted", EarlyParts)
async def test_early_parts_are_the_ones_that_would_be_fetched(
    size: int, wanted: EarlyParts
) -> None:
    """Oracle: what was packed. An archive may end before, at, or behind the early parts."""
    files = {"tokenizer.json": os.urandom(size), "chat_template.jinja": b"{{ messages }}"}
    texts, calls = PackedTexts(files), list[pb.TokenizerRequest]()

    async def ask(request: bytes) -> bytes:
        calls.append(pb.TokenizerRequest.FromString(request))
        return texts.answer(request)

    fetch = TokenizerFetch(ask, "there")
    announced = await fetch.fetch_announcement(wanted)
    before = len(calls)
    assert announced == texts.announced
    assert await fetch.fetch_facts(announced) == {"chat_template.jinja": b"{{ messages }}"}
    assert (len(calls) > before) is (wanted is EarlyParts.NONE)
    before = len(calls)
    assert await fetch.fetch_texts(announced) == files
    needs_more = wanted is not EarlyParts.ALL or size > 16 * PART_BYTES
    assert (len(calls) > before) is needs_more


async def test_a_lost_link_ends_no_fetch_and_a_gone_verifier_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_lending, "_RETRY_S", 0.0)
    tries = 0

    async def ask(request: bytes) -> bytes:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise LinkError("away")
        return FILES.answer(request)

    assert await TokenizerFetch(ask, "there").fetch_announcement() == FILES.announced
    tries = -100
    with pytest.raises(LinkError, match="away"):
        await TokenizerFetch(ask, "there").fetch_announcement()
    assert tries == -100 + 8


FILES = PackedTexts({"tokenizer.json": b"{}"})


async def test_a_request_for_what_is_not_there_is_refused() -> None:
    async with serve_streams(echo, texts=FILES) as (_, transport):
        assert await transport.call_unary("Tokenizer", b"") == FILES.answer(b"")
        other = bytes(pb.TokenizerRequest(sha256=b"x").SerializeToString())
        for bad in (b"\xff", b"x" * 2000, other):
            with pytest.raises(
                LinkError, match=r"a TokenizerRequest|bytes of the message|no archive"
            ):
                await transport.call_unary("Tokenizer", bad)


def test_files_that_cannot_be_lent_keep_no_verifier_from_serving(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packed_texts(str(tmp_path / "missing")) == packed_texts("no model")
    assert "the toy model has none" in str(packed_texts("toy"))
    monkeypatch.setattr("edgespec.verifier.build.MAX_TEXT_BYTES", 100)
    assert "at most 100 are sent" in str(packed_texts(str(model)))
