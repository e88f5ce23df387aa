"""Tests that one request has one answer, whatever draft a device has: chat template, special tokens
and generation defaults come from the target.

Oracle: a device without a draft, which has no such files of its own; and, for its prompt, the
target's own chat template.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer

from edgespec.cli.device import choose_verifier
from edgespec.config import AgentConfig, DraftSection, PolicySection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core.device.goodput_policy import PolicyName
from edgespec.core.ports import Candidate
from edgespec.device import build
from edgespec.device.agent import AgentOptions
from edgespec.device.borrowed_tokenizer import BorrowingAgent, with_tokenizer
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.device.prober import VerifierMonitor, probe_all
from edgespec.models import folders as model_folders
from edgespec.models import model_source
from edgespec.models.lent_texts import is_lent
from edgespec.models.shared_ids import SharedIds, find_differing_ids
from edgespec.models.tokenizer import TextTokenizer, render_chat
from edgespec.models.toy import TOY_EOS, TOY_MODEL, toy_info
from edgespec.wire.tokenizer_lending import Announcement, EarlyParts, TokenizerFetch
from tests.endpoint.live_endpoint import start_endpoint
from tests.kit.live_verifier import own_port, serve_toy, start, wait_until_ready
from tests.kit.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint
from tests.present import require

ENDS = list(range(100, 116))
GENERATION = {"do_sample": True, "temperature": 0.8, "repetition_penalty": 1.2, "top_k": 200}
MESSAGES = [{"role": "user", "content": "the lazy dog"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
WAIT = {"reconnect.give_up_first_s": 200.0}


def model(folder: Path, rows: int, seed: int, **generation: Any) -> Path:
    """Write a model of ``rows`` ids, 320 of which have a text."""
    config = tiny_config(vocab_size=rows, eos_token_id=None)
    write_checkpoint(folder, config, tiny_tensors(config, seed))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def write_template(folder: Path, template: str, **tokens: str) -> None:
    texts = {"chat_template": template, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write targets of 384 rows, with the draft's table, with three more tokens, and with one
    renamed token; and two drafts of 320 rows whose other files all differ."""
    root, found = tmp_path_factory.mktemp("texts"), dict[str, Path]()
    for name in ("padded", "more", "renamed"):
        found[name] = model(root / name, 384, 0, **GENERATION, eos_token_id=ENDS)
        write_template(found[name], TEMPLATE, bos_token="<|end|>")
    path = found["more"] / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(f"<|extra_{n}|>", special=True) for n in range(3)])
    tokenizer.save(str(path))
    path = found["renamed"] / "tokenizer.json"
    path.write_text(path.read_text().replace("<|user|>", "<|human|>"))
    found["small"] = model(root / "small", 320, 0, repetition_penalty=1.9, eos_token_id=5)
    write_template(found["small"], "other words: {{ messages[0].content }}", bos_token="<|user|>")
    found["other"] = model(root / "other", 320, 2, do_sample=True, temperature=3.0)
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@dataclass
class Answers:
    completion: str
    chat: str
    prompt_tokens: int
    endings: list[str]
    sent: int
    failures: list[str]


def device(address: str, draft: object) -> AgentConfig:
    return AgentConfig(
        verifier=address,
        draft=DraftSection(str(draft), bits=32),
        policy=PolicySection(name=PolicyName.WINDOWED),
    )


@asynccontextmanager
async def endpoint(config: AgentConfig) -> AsyncIterator[tuple[AsyncOpenAI, Any]]:
    """Start an endpoint like ``edgespec serve``, over the verifier of ``config``."""
    config, info = await choose_verifier(config)
    reference = build.tokenizer_reference(config)
    text, watch = build.load_tokenizer(reference), VerifierMonitor({})
    sampling = build.with_model_sampling(config.sampling, reference)
    async with build.build_agent(config, target=info) as agent:
        async with (
            start_endpoint(agent, text, watch, sampling=sampling) as found,
            found.client() as client,
        ):
            yield client, agent


async def answers(client: Any, agent: Any = None) -> Answers:
    """Collect an endpoint's responses to requests that leave the model's defaults open."""
    texts, endings, sent, failures, prompt_tokens = list[str](), list[str](), 0, list[str](), 0
    for seed in (3, 3, 4, 4):
        given = {"model": "edgespec", "seed": seed, "max_tokens": 40}
        if len(texts) % 2:
            got = await client.chat.completions.create(messages=MESSAGES, **given)
            texts.append(got.choices[0].message.content)
        else:
            got = await client.completions.create(prompt="the quick brown", **given)
            texts.append(got.choices[0].text)
        endings.append(got.choices[0].finish_reason)
        prompt_tokens = got.usage.prompt_tokens
        if agent is not None:
            counters = agent.stats.counters
            sent += counters.sent
            failures += [counters.draft_failure] if counters.draft_failure else []
    return Answers(
        "|".join(texts[::2]), "|".join(texts[1::2]), prompt_tokens, endings, sent, failures
    )


@pytest.mark.parametrize("target", ["padded", "more", "renamed"])
async def test_every_draft_gets_the_same_answers(folders: dict[str, Path], target: str) -> None:
    async with serve_toy(config=VerifierConfig(model=str(folders[target]), port=0)) as (address, _):
        found: dict[str, Answers] = {}
        for draft in ("none", "lookup", folders["small"], folders["other"]):
            async with endpoint(device(address, draft)) as (client, agent):
                found[str(draft)] = await answers(client, agent)
    plain = found["none"]
    assert "stop" in plain.endings
    text = TextTokenizer(folders[target])
    assert plain.prompt_tokens == len(text.encode(render_chat(text, MESSAGES)))
    for name, one in found.items():
        assert (one.completion, one.chat, one.endings) == (
            plain.completion,
            plain.chat,
            plain.endings,
        ), name
        assert not one.failures, name
    for draft in ("small", "other"):
        assert found[str(folders[draft])].sent > 0


async def test_tokens_beyond_the_drafts_table_are_streamed_and_drafted_on(
    folders: dict[str, Path],
) -> None:
    async with serve_toy(config=VerifierConfig(model=str(folders["padded"]), port=0)) as (where, _):
        said, sent = dict[str, list[int]](), 0
        for draft in ("none", folders["small"]):
            config, info = await choose_verifier(device(where, draft))
            params = replace(config.sampling, temperature=1.5, max_tokens=60, ignore_eos=True)
            async with build.build_agent(config, target=info) as agent:
                prompt = [350, 7, 9]
                chunks = [chunk async for chunk in agent.generate(prompt, params)]
                said[str(draft)] = [token for chunk in chunks for token in chunk.tokens]
                counters = require(agent.stats).counters
                assert not counters.draft_failure
                sent += counters.sent
                with pytest.raises(
                    ValueError, match="token id 384, but the vocabulary has 384 ids"
                ):
                    await anext(agent.generate([384], params))
    plain, drafted = said.values()
    assert drafted == plain
    assert any(token >= 320 for token in plain)
    assert sent > 0


async def test_a_draft_of_another_family_is_translated(folders: dict[str, Path]) -> None:
    async with serve_toy(config=VerifierConfig(model=str(folders["padded"]), port=0)) as (where, _):
        config, info = await choose_verifier(device(where, "bundled"))
        lines = list[str]()
        params = replace(config.sampling, max_tokens=8)
        async with (
            BorrowingAgent(device(where, "bundled")) as late,
            build.build_agent(config, target=info, say=lines.append) as agent,
        ):
            said = [
                [one.tokens async for one in each.generate("the", params)] for each in (late, agent)
            ]
            shares = [require(each.options.translated_share) for each in (late, agent)]
    assert sum(said[0], ()) == sum(said[1], ())
    assert shares[0] == shares[1] > 0.5
    assert [line for line in lines if f"draft translated: {shares[0]:.0%} of the" in line]


async def test_an_older_verifier_is_met_with_the_drafts_texts_and_told_once(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TokenizerFetch.fetch_announcement

    async def older(self: TokenizerFetch, wanted: EarlyParts = EarlyParts.NONE) -> Announcement:
        found = await real(self)
        return Announcement(found.sha256, found.size)

    monkeypatch.setattr(TokenizerFetch, "fetch_announcement", older)
    said: list[str] = []
    small = str(folders["small"])
    async with serve_toy(config=VerifierConfig(model=str(folders["padded"]), port=0)) as (where, _):
        (answer,) = (await probe_all({where: build.connect(where)})).values()
        info = require(answer.info).model
        config = await with_tokenizer(device(where, small), info, said.append)
        assert config.tokenizer == small
        assert await with_tokenizer(config, info, said.append) == config
        (line,) = said
        assert "sampling defaults are those of" in line
        assert "older" in line
        borrowed = await with_tokenizer(device(where, "none"), info, said.append)
        assert (Path(borrowed.tokenizer) / "tokenizer.json").is_file()


async def test_only_what_the_draft_has_not_is_fetched(folders: dict[str, Path]) -> None:
    said: list[str] = []
    async with serve_toy(config=VerifierConfig(model=str(folders["padded"]), port=0)) as (where, _):
        config, info = await choose_verifier(device(where, folders["small"]))
        assert not said
        taken = Path(config.tokenizer)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert (taken / name).read_bytes() == (folders["padded"] / name).read_bytes()
        again = await with_tokenizer(device(where, "none"), info, said.append)
        assert (again.tokenizer, said) == (config.tokenizer, [])


async def test_a_service_that_was_there_first_takes_the_texts_of_who_comes(
    folders: dict[str, Path],
) -> None:
    port = own_port()
    options = ["--draft", str(folders["small"]), "--verifier", f"127.0.0.1:{port}", "--port", "0"]
    options += [f"--set={key}={value}" for key, value in WAIT.items()]
    with wait_until_ready(start("serve", *options), r"ready on (http://\S+/v1)") as (url, _):
        config = VerifierConfig(model=str(folders["padded"]), port=port)
        async with AsyncOpenAI(base_url=url, api_key="none", timeout=300.0) as client:
            early = asyncio.create_task(answers(client))
            async with serve_toy(config=config) as (address, _):
                late = await early
                async with endpoint(device(address, "none")) as (plain, agent):
                    expected = await answers(plain, agent)
    assert (late.completion, late.chat) == (expected.completion, expected.chat)


def find_differing(own: dict[int, Any], others: dict[int, Any]) -> frozenset[int]:
    none: Any = type(own[0])()
    ids = own.keys() | others.keys()
    tables = (lambda n: own.get(n, none)), (lambda n: others.get(n, none))
    return find_differing_ids(*tables, ids, draft="d", target="t")


@pytest.mark.parametrize("form", [str, str.encode])
def test_what_is_shared_by_two_tables(form: Callable[[str], str | bytes]) -> None:
    own = {n: form(f"w{n}") for n in range(400)}
    assert find_differing(own, dict(own)) == frozenset()
    more = own | {400 + n: form("x") for n in range(20)}
    assert find_differing(own, more) == frozenset()
    assert find_differing(more, own) == frozenset(range(400, 420))
    assert find_differing(own, own | {7: form("other")}) == {7}
    shifted = {n: form(f"w{n + 1}") for n in range(400)}
    said = r"400 of 400 ids differ, .*at most 20 may; .*id 0, which is 'w0' in .* and 'w1' in"
    with pytest.raises(SetupError, match=said):
        find_differing(own, shifted)
    with pytest.raises(SetupError) as refused:
        find_differing(own, {n: form("y" * 1_000_000) for n in range(400)})
    assert len(str(refused.value)) < 400


async def test_a_strangers_table_is_compared_in_no_process_of_ours(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[Path]()

    def note(path: Path) -> dict[int, str]:
        read.append(path)
        return real(path)

    def note_tokenizer(folder: Path, *given: Any) -> TextTokenizer:
        read.append(folder / "tokenizer.json")
        return TextTokenizer(folder, *given)

    real = model_folders.read_vocabulary
    monkeypatch.setattr(model_folders, "read_vocabulary", note)
    monkeypatch.setattr(model_source, "TextTokenizer", note_tokenizer)
    monkeypatch.setattr(model_source, "_tokenizers", WeakValueDictionary())
    async with serve_toy(config=VerifierConfig(model=str(folders["renamed"]), port=0)) as (
        where,
        _,
    ):
        config, info = await choose_verifier(device(where, folders["small"]))
        async with build.build_agent(config, target=info) as agent:
            renamed = TextTokenizer(folders["small"]).special_id("<|user|>")
            assert require(agent.options.shared_ids).differing == {renamed}
    assert is_lent(Path(config.tokenizer))
    assert folders["small"] / "tokenizer.json" in read
    assert Path(config.tokenizer) / "tokenizer.json" not in read


@pytest.mark.parametrize("more", [0, 2, None], ids=["as many", "more", "not known"])
def test_a_draft_that_shares_all_its_ids_is_used_as_it_is(more: int | None) -> None:
    drafter = ToyDrafter(TOY_MODEL, info := toy_info())
    size = info.vocabulary_size
    target = None if more is None else replace(info, vocabulary_size=size + more)
    options = build.with_shared_ids(AgentOptions(), drafter, AgentConfig(), target)
    expected = SharedIds(size, 0 if more is None else size + more, stand_in=TOY_EOS)
    assert options.shared_ids == (None if more == 0 else expected)


def test_what_a_draft_is_fed_and_may_propose() -> None:
    shared = SharedIds(10, 12, frozenset({3}), stand_in=2)
    assert list(shared.to_draft_ids((1, 9, 10, 11))) == [1, 9, 2, 2]
    guesses = tuple(Candidate(token, -1.0) for token in (3, 4, 11, 12))
    assert [one.token for one in shared.keep_shared(guesses)] == [4, 11]
    assert [one.token for one in SharedIds(10).keep_shared(guesses)] == [3, 4]
