"""A device without a tokenizer takes the verifier's, and nothing that was not announced.

Oracle: the files in the model's folder, and the text that a device with that folder gets; the bytes
that a verifier packed, and the bounds that the messages name."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.config import AgentConfig, DraftSection
from edgespec.config.common import SetupError
from edgespec.core.device.link_keeper import ReconnectPolicy
from edgespec.core.ports import LinkError, ModelInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.credential import Credential
from edgespec.device.agent import GenerationError
from edgespec.device.borrowed_tokenizer import BorrowingAgent, with_tokenizer
from edgespec.device.build import build_agent
from edgespec.verifier.build import packed_texts
from edgespec.wire.callers import TOKENIZER_LIMITS, Authenticator, CallLine, TokenizerAnswers
from edgespec.wire.grpc_client import GrpcTransport
from edgespec.wire.tokenizer_lending import (
    MAX_TEXT_BYTES,
    PackedFile,
    TextFile,
    TextFileError,
    TokenizerFetch,
    check_entries,
    decode_list,
    decode_request,
    encode_list,
    encode_part,
    encode_request,
    unpacked,
)
from tests.shell.echo_verifier import echo, served
from tests.shell.gate import Gate
from tests.shell.live_verifier import call, ready, serving, start
from tests.shell.tiny_checkpoints import write_checkpoint

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


def entry(**changes: object) -> TextFile:
    found = PackedFile.of("tokenizer.json", b"x" * 100).entry
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(name="../../.bashrc")], "none of tokenizer.json"),
        ([entry(), entry()], "must be distinct"),
        ([entry(name="chat_template.jinja")], "tokenizer.json among them"),
        ([entry(sha256=b"short")], "has 5 bytes, but must have 32"),
        ([entry(packed_size=1 << 30)], "1073741824 packed ones"),
        ([entry(packed_size=0)], "0 packed ones"),
        ([entry(size=MAX_TEXT_BYTES + 1)], "at most 67108864 are taken"),
    ],
)
def test_lists_over_a_bound_are_refused(entries: list[TextFile], message: str) -> None:
    with pytest.raises(TextFileError, match=message):
        check_entries(entries)


def test_nothing_is_unpacked_beyond_what_was_announced() -> None:
    bomb = zlib.compress(bytes(1 << 26))
    sha256 = hashlib.sha256(bytes(1000)).digest()
    for packed, message in (
        (bomb, "not the 1000 bytes"),
        (b"no zlib", "cannot be unpacked"),
        (zlib.compress(bytes(999)), "not the 1000 bytes"),
        (zlib.compress(bytes(1000)) + b"more", "not the 1000 bytes"),
        (zlib.compress(b"y" * 1000), "SHA-256"),
    ):
        with pytest.raises(TextFileError, match=message):
            unpacked(TextFile("tokenizer.json", 1000, sha256, len(packed)), packed)


Lie = Callable[[bytes], bytes]


def answering(files: list[PackedFile], lie: Lie = lambda part: part) -> TokenizerFetch:
    """A verifier that sends these files, each part changed by ``lie``."""

    async def ask(request: bytes) -> bytes:
        name, offset = decode_request(request)
        if not name:
            return encode_list([file.entry for file in files])
        (file,) = (file for file in files if file.entry.name == name)
        return encode_part(lie(file.part(offset)))

    return TokenizerFetch(ask, "there")


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda part: b"", "must be in"),
        (lambda part: part + part, "longer than was announced"),
        (lambda part: bytes(len(part)), "cannot be unpacked"),
    ],
)
async def test_parts_that_do_not_fit_are_refused(lie: Lie, message: str) -> None:
    fetch = answering([PackedFile.of("tokenizer.json", b"abc" * 1000)], lie)
    (found,) = await fetch.entries()
    with pytest.raises(LinkError, match=message) as refused:
        await fetch.content(found)
    assert not refused.value.retryable


async def test_a_lost_link_ends_no_fetch_and_a_gone_verifier_does() -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    tries = 0

    async def ask(request: bytes) -> bytes:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise LinkError("away")
        return encode_list([entry()])

    assert await TokenizerFetch(ask, "there", pause).entries() == (entry(),)
    tries = -100
    with pytest.raises(LinkError, match="away"):
        await TokenizerFetch(ask, "there", pause).entries()
    assert len(pauses) == 2 + 7


FILE = PackedFile.of("tokenizer.json", b"{}")
LIST = encode_request("", 0)


class Refused(Exception):
    """The call was ended with this text."""


async def _abort(code: object, details: str, metadata: object = ()) -> None:
    raise Refused(details)


CONTEXT: Any = SimpleNamespace(
    peer=lambda: "ipv4:10.0.0.1:5", invocation_metadata=lambda: (), abort=_abort
)


def _answers(*attempts: Exception | Sequence[PackedFile]) -> TokenizerAnswers:
    """Of files that are read as told, one attempt after the other."""
    left = list(attempts)

    def load() -> Sequence[PackedFile]:
        now = left.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    return TokenizerAnswers(load, CallLine(TOKENIZER_LIMITS, lambda: 0.0), Authenticator(None))


async def test_files_that_could_not_be_read_once_are_read_again() -> None:
    answers = _answers(OSError("too many open files"), [FILE])
    with pytest.raises(Refused, match=r"no tokenizer that it could send$"):
        await answers.answer(LIST, CONTEXT)
    for _ in range(2):
        assert decode_list(await answers.answer(LIST, CONTEXT)) == (FILE.entry,)
    await answers.close()
