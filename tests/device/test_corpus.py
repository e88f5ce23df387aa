"""Tests of drafts from texts: the store of ``draft.corpus``, agents that draft from their own
output, alone and beside a model, and recordings of outputs. Oracles: a search of the texts from end
to end; the toy target; a list of the recorded texts; the scripted verifier's output."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, aclosing, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import yaml

from edgespec.config import (
    AgentConfig,
    ConfigError,
    DraftSection,
    PolicyName,
    PolicySection,
    VerifierConfig,
)
from edgespec.config.common import SetupError
from edgespec.config.loading import load_config
from edgespec.core.ports import VerifierStream
from edgespec.core.protocol.messages import Commit, Limits, Open, Opened, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import CORPUS_LENGTH, FOUND_BEFORE, FOUND_BEHIND, RANKS
from edgespec.core.toy_model import ToyModel
from edgespec.device import corpus, followed_corpus
from edgespec.device.agent import Agent
from edgespec.device.borrowed_tokenizer import BorrowingAgent
from edgespec.device.build import agent_options, build_agent, load_drafter
from edgespec.device.corpus import StoredCorpus
from edgespec.device.drafters.toy import SilentDrafter
from edgespec.device.followed_corpus import FollowedCorpus
from edgespec.models.folders import model_info
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.toy import TOY_CONTEXT_LENGTH, ToyTokenizer
from edgespec.telemetry.recording import (
    PROMPT_TOKENS,
    Recording,
    RecordingError,
    is_recording,
    read_recording,
)
from edgespec.testing import play_output
from edgespec.verifier.build import load_target
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.toy import ToyTarget
from tests.kit.live_verifier import child_environment, run_command, serve_toy, toy_text
from tests.kit.scripted_verifier import (
    PROMPT,
    TEXT,
    connect_loopback,
    generate,
    make_agent,
    stream_output,
)
from tests.present import require
from tests.sources import ROOT

CIRCLING = ToyModel(64, order=1, seed=4)
LONG = SamplingParams(max_tokens=120, ignore_eos=True)
WARM = SamplingParams(temperature=0.5, seed=9, max_tokens=60, ignore_eos=True, top_k=20)
CIRCLE = ToyTokenizer().encode("a circle")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def ignore_message(text: str) -> None: ...


def fail_if_asked(text: str) -> NoReturn:
    raise AssertionError("the store was made again")


def open_store(*paths: Path, vocabulary: str = "letters") -> FollowedCorpus:
    return FollowedCorpus([str(path) for path in paths], vocabulary, letters, ignore_message)


def list_stores(tmp_path: Path) -> list[Path]:
    return [*(tmp_path / "cache" / "edgespec" / "corpus").iterdir()]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def find_followers(texts: Sequence[str], end: str) -> tuple[int, Counter[str]]:
    """Return the number of last letters of ``end`` that occur in a text, at least two, and counts
    of the letters that follow them."""
    for length in range(min(len(end), CORPUS_LENGTH), 1, -1):
        tail, found = end[-length:], Counter[str]()
        for text in texts:
            for at in range(len(text) - length + 1):
                if text[at : at + length] == tail:
                    found.update(text[at + length : at + length + 1])
        if found:
            return length, found
    return 0, Counter()


@pytest.mark.parametrize("alphabet", ["ab", "abcd", "abcdefghijklmnopqrstuvwxyz"])
def test_what_is_found_is_what_a_search_finds(tmp_path: Path, alphabet: str) -> None:
    dice = random.Random(len(alphabet))
    for number in range(6):
        texts = ["".join(dice.choices(alphabet, k=dice.randrange(1, 90))) for _ in range(3)]
        texts[2] += texts[0][3:40]  # so that long ends are found
        paths = [write(tmp_path / f"{number}-{n}.txt", text) for n, text in enumerate(texts)]
        store = open_store(*paths)
        for _ in range(150):
            text = dice.choice(texts)
            at = dice.randrange(len(text) + 1)
            end = "".join(dice.choices(alphabet, k=2)) + text[max(0, at - 20) : at]
            end = end[-dice.randrange(2, CORPUS_LENGTH + 1) :]
            length, counts = find_followers(texts, end)
            found, named = store.after(tuple(letters(end)))
            assert found == length
            assert len(named) == min(RANKS, len(counts))
            # all places were counted, none sampled
            if counts.total() <= corpus._SAMPLE - len(texts):
                best = sorted(counts.values(), reverse=True)[:RANKS]
                assert [counts[chr(token)] for token, _ in named] == best
                for token, share in named:
                    ends = sum(text.endswith(end[-length:]) for text in texts)
                    assert share == pytest.approx(counts[chr(token)] / (counts.total() + ends))


def test_a_frequent_end_is_sampled(tmp_path: Path) -> None:
    """One third of 3,000 places is followed by x, all others by y."""
    store = open_store(write(tmp_path / "a.txt", "abyabyabx" * 1000))
    length, named = store.after(tuple(letters("zab")))
    assert length == 2
    assert [chr(token) for token, _ in named] == ["y", "x"]
    assert named[0][1] == pytest.approx(2 / 3, abs=0.1)


def test_of_a_long_text_the_part_around_a_place_is_found(tmp_path: Path) -> None:
    text = "".join(chr(0x4E00 + number) for number in range(15_000))
    corpus = open_store(write(tmp_path / "a.txt", "ahead"), write(tmp_path / "long.txt", text))
    found = require(corpus.find_text(tuple(letters(text[9_000:9_010]))))
    whole = "".join(map(chr, found.tokens))
    assert found.next_index == FOUND_BEFORE
    assert len(whole) == 15_000 - 9_010 + FOUND_BEFORE
    assert text.endswith(whole)
    first = require(corpus.find_text(tuple(letters(text[:9]))))
    assert (first.next_index, len(first.tokens)) == (9, 9 - 1 + FOUND_BEHIND + 1)
    assert corpus.find_text(tuple(letters("nowhere"))) is None


def test_a_store_is_made_once_and_a_changed_text_stands_beside_it(tmp_path: Path) -> None:
    path, said = write(tmp_path / "a.txt", "one two three"), list[str]()
    names = [str(path)]
    FollowedCorpus(names, "v", letters, said.append)
    assert said == ["draft.corpus: 1 file; 1 kB of text are new"]
    FollowedCorpus(names, "v", fail_if_asked, fail_if_asked)
    (store,) = list_stores(tmp_path)
    assert store.stat().st_mode & 0o777 == 0o600
    content = store.read_bytes()
    write(path, "one two four")
    changed = FollowedCorpus(names, "v", letters, ignore_message)
    assert changed.after(tuple(letters("two "))) == (4, [(ord("f"), 1.0)])
    assert store.read_bytes() == content
    write(path, "one two three")  # It is in the store still.
    FollowedCorpus(names, "v", fail_if_asked, fail_if_asked)
    with pytest.raises(AssertionError):
        FollowedCorpus(names, "another vocabulary", fail_if_asked, ignore_message)


@pytest.mark.parametrize("damage", [b"", b"x", b"x" * 40, None, "count"])
def test_a_damaged_store_is_made_anew(tmp_path: Path, damage: bytes | str | None) -> None:
    path = write(tmp_path / "a.txt", "one two three")
    open_store(path)
    (store,) = list_stores(tmp_path)
    whole = store.read_bytes()
    if damage == "count":
        store.write_bytes(whole[:32] + b"\xff\xff\xff\xff" + whole[36:])
    else:
        store.write_bytes(whole[:-4] if damage is None else damage)  # type: ignore[arg-type]
    assert open_store(path).after(tuple(letters("two "))) == (4, [(ord("t"), 1.0)])
    assert store.read_bytes() == whole


def test_stores_that_were_not_used_of_late_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_corpus, "_MAX_STORES", 2)
    for number in range(4):
        open_store(write(tmp_path / f"{number}.txt", f"text {number}"))
    assert len(list_stores(tmp_path)) == 2
    FollowedCorpus([str(tmp_path / "3.txt")], "letters", fail_if_asked, ignore_message)


@pytest.mark.parametrize("alphabet", [1, 2, 300])
@pytest.mark.parametrize("at_once", [1, 7, 1 << 15])
def test_places_are_sorted_by_their_tokens(
    alphabet: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: Python's own sort of the tokens before each place."""
    monkeypatch.setattr(corpus, "_SORTED_AT_ONCE", at_once)
    dice = np.random.default_rng(alphabet)
    texts = {bytes(15) + bytes([n]): dice.integers(0, alphabet, 90, np.int32) for n in range(3)}
    store = StoredCorpus(corpus.build_store(bytes(32), texts), bytes(32))
    backwards = [word for ids in texts.values() for word in [*(ids + 1).tolist(), 0]][::-1]
    keys = [backwards[at : at + CORPUS_LENGTH] for at in range(len(backwards))]
    padded = [key + [0] * (CORPUS_LENGTH - len(key)) for key in keys]
    assert [padded[at] for at in store._order.tolist()] == sorted(padded)
    assert sorted(store._order.tolist()) == [*range(len(backwards))]
    for one, ids in store.read_tokens().items():
        assert ids.tolist() == texts[one].tolist()


def test_large_texts_are_cut_into_pieces_and_told_of(tmp_path: Path) -> None:
    lines = "".join(f"line {number} ends here\n" for number in range(120_000))
    path, said, pieces = write(tmp_path / "a.txt", lines + "x" * 200_000), list[str](), list[str]()
    other = write(tmp_path / "b.txt", "the end")

    def encode(text: str) -> list[int]:
        pieces.append(text)
        return [len(pieces)]

    FollowedCorpus([str(path), str(other)], "v", encode, said.append)
    assert "".join(pieces) == lines + "x" * 200_000 + "the end"
    assert max(map(len, pieces)) <= followed_corpus._PIECE_CHARS
    assert said == [
        "draft.corpus: 2.7 MB are read",
        "draft.corpus: 2 files; 2.7 MB of text are new",
    ]


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    there, binary = write(tmp_path / "a.txt", "0123456789"), tmp_path / "b.bin"
    other, secret = write(tmp_path / "d.txt", "abcdefghij"), write(tmp_path / "e", "secret")
    binary.write_bytes(b"\xff\xfe\x00")
    cases: list[tuple[tuple[Path, ...], str]] = [
        ((tmp_path / "none",), "draft.corpus: .*none: No such file"),
        ((there, binary), "b.bin is not UTF-8 text"),
        ((there, other), "d.txt: 10 bytes, but at most 5 are read: a corpus has at most 15 bytes"),
        ((write(tmp_path / "c", ""),), r"c: there is no text \(0 files\)"),
    ]
    if os.geteuid():
        secret.chmod(0)
        cases.append(((there, secret), "e: Permission denied"))
    for paths, message in cases:
        with pytest.raises(ConfigError, match=message):
            FollowedCorpus([*map(str, paths)], "v", letters, ignore_message, 15)


def test_a_full_disk_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("edgespec.config.files.os.fsync", full)
    with pytest.raises(SetupError, match=r"corpus.*: No space left on device\n.*XDG_CACHE_HOME"):
        open_store(write(tmp_path / "a.txt", "some text"))
    assert not list_stores(tmp_path)


def test_file_flag_and_environment_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "config.yaml", "draft: {corpus: [a.txt, b c]}")
    listed = ("--draft-corpus", "a.txt", "--draft-corpus", "b c")
    for arguments, variable in (
        (("--config", path), ""),
        (listed, "d"),
        ((), os.pathsep.join(("a.txt", "b c"))),
    ):
        monkeypatch.setenv("EDGESPEC_DRAFT_CORPUS", variable)
        shown = yaml.safe_load(run_command("generate", *arguments, "--help-all").stdout)
        assert shown["draft"]["corpus"] == ["a.txt", "b c"]


def serve_circling() -> AbstractAsyncContextManager[tuple[str, Verifier]]:
    served = VerifierConfig(model="toy", port=0, server_drafts=False)
    vocabulary = load_target(served).info.vocabulary
    target = ToyTarget(CIRCLING, vocabulary=vocabulary, context_length=TOY_CONTEXT_LENGTH)
    return serve_toy(target, config=served)


async def test_texts_that_stand_in_the_corpus_take_fewer_passes(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.5, seed=9, top_k=20)
    expected = toy_text(CIRCLE, params, CIRCLING)
    tokenizer = ToyTokenizer()
    path = write(tmp_path / "a.txt", "a circle" + tokenizer.decode(expected))
    passes = []
    async with serve_circling() as (address, _):
        for names in ((), (str(path),)):
            draft = DraftSection("lookup", corpus=names)
            policy = PolicySection(run_ahead=RunAhead.NEVER)
            config = AgentConfig(address, tokenizer="toy", draft=draft, policy=policy)
            async with build_agent(config) as agent:
                found = [t async for c in agent.generate(CIRCLE, params) for t in c.tokens]
                assert found == expected
                passes.append(require(agent.stats).counters.passes)
    assert passes[1] < passes[0] / 2


async def test_a_lent_tokenizer_reads_the_corpus(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one two three")
    draft = DraftSection("lookup", corpus=(str(path),))
    async with serve_toy() as (address, _):
        agent = BorrowingAgent(AgentConfig(address, draft=draft))
        async with agent:
            await agent._borrow()
        store = require(require(agent.options.text_tables).corpus)
        end, (token,) = ToyTokenizer().encode("two "), ToyTokenizer().encode("t")
        assert store.after(tuple(end)) == (4, [(token, 1.0)])


DRAFTS = (DraftSection("lookup"), DraftSection("toy", lookup=True))


@pytest.mark.parametrize("draft", DRAFTS, ids=["lookup", "beside a model"])
@pytest.mark.parametrize(
    ("policy", "run_ahead"),
    [
        (PolicyName.WINDOWED, RunAhead.AUTO),
        (PolicyName.WINDOWED, RunAhead.NEVER),
        (PolicyName.FIXED, RunAhead.NEVER),
    ],
)
async def test_the_text_is_the_targets_own(
    draft: DraftSection, policy: PolicyName, run_ahead: RunAhead
) -> None:
    async with serve_circling() as (address, _):
        policies = PolicySection(policy, run_ahead=run_ahead)
        config = AgentConfig(address, tokenizer="toy", draft=draft, policy=policies)
        async with build_agent(config) as agent:
            for params in (LONG, WARM, LONG):  # the corpus holds the last one already
                found = [t async for c in agent.generate(CIRCLE, params) for t in c.tokens]
                assert found == toy_text(CIRCLE, params, CIRCLING)
            counters = require(agent.stats).counters
            assert counters.draft_failure == ""
            if run_ahead is RunAhead.NEVER:  # otherwise the toy's passes end before a draft arrives
                assert counters.accepted > 30
                assert counters.passes < LONG.max_tokens


async def test_an_agent_keeps_its_texts_for_lookup() -> None:
    """Prompts with their results of tools, and outputs, also of a generation that its reader
    left."""
    config = AgentConfig("nowhere", tokenizer="toy", draft=DraftSection("lookup"))
    tables = require(agent_options(config, "").text_tables)
    earlier, said = require(tables.earlier), "tool: a page that nobody has seen before"
    given = list[int]()
    async with make_agent(connect_loopback(stream_output(TOKENS))) as agent:
        agent.options = replace(agent.options, text_tables=tables)
        for sampling in (SamplingParams(max_tokens=11), SamplingParams(max_tokens=11)):
            async with aclosing(agent.generate(TEXT.encode(said), sampling)) as chunks:
                given = [*(await anext(chunks)).tokens, *(await anext(chunks)).tokens]
        end = (*TEXT.encode(said)[-14:], *given[:1])
        assert earlier.after(end) == (len(end), [(given[1], 1.0)])
        assert earlier.after(tuple(TEXT.encode("that nobody"))) == (
            11,
            [(TEXT.encode(" ")[0], 1.0)],
        )


def test_a_lookup_needs_a_tokenizer_and_no_more(tmp_path: Path) -> None:
    folder = resolve_source("bundled", Purpose.DRAFT).folder
    shutil.copy(folder / "tokenizer.json", tmp_path)
    for reference in (
        str(tmp_path),
        "bundled",
        str(resolve_source("bundled", Purpose.TARGET).folder),
    ):
        config = AgentConfig(tokenizer=reference, draft=DraftSection("lookup"))
        drafter = load_drafter(config)
        assert isinstance(drafter, SilentDrafter)
        info, own = drafter.info, model_info(folder)
        assert (info.vocabulary, info.vocabulary_size) == (own.vocabulary, own.vocabulary_size)
        assert info.context_length > own.context_length


def test_what_is_configured_is_built() -> None:
    for overrides, name, text in (
        ({"draft.model": "toy", "draft.lookup": True, "draft.draft_ms": 5.0}, "toy", True),
        ({"draft.model": "toy"}, "toy", False),
        ({"draft.model": "lookup", "draft.lookup": True}, "lookup", True),
        ({"draft.model": "lookup"}, "lookup", True),
    ):
        config = load_config(AgentConfig, None, {"tokenizer": "toy", **overrides})
        drafter = require(load_drafter(config))
        assert drafter.info.name == name
        assert (agent_options(config, "").text_tables is not None) == text


# --- recordings -----------------------------------------------------------------------------------


TOKENS = TEXT.encode("hello world")
MOST = 1 << 20
Row = tuple[list[int], int]


def read_texts(path: Path, vocabulary: str = "v") -> list[Row]:
    return [(list(tokens), start) for tokens, start in read_recording(path, vocabulary)]


@pytest.mark.parametrize("most", [MOST, 64 << 10])
def test_what_is_read_is_what_was_added_and_the_oldest_leave(tmp_path: Path, most: int) -> None:
    dice, added, path = random.Random(most), dict[str, list[Row]](v=[], w=[]), tmp_path / "r"
    recording, order = Recording(path, most), list[tuple[str, Row]]()
    for number in range(300):
        vocabulary = dice.choice("vvvw")
        prompt = [dice.randrange(1 << 31) for _ in range(dice.choice((1, 9, 400)))]
        said = [dice.randrange(1 << 31) for _ in range(dice.randrange(1, 200))]
        if number % 7 == 6:  # a text that is there already
            vocabulary, (tokens, start) = dice.choice(order[-9:])
            prompt, said = tokens[:start], tokens[start:]
        recording.add(vocabulary, prompt, said)
        tail = prompt[-PROMPT_TOKENS:]
        row = (vocabulary, ([*tail, *said], len(tail)))
        order = [other for other in order if other != row] + [row]
    for vocabulary in added:
        of_it = [row for other, row in order if other == vocabulary]
        found = read_texts(path, vocabulary)
        assert found == of_it[len(of_it) - len(found) :]
        assert found == of_it or most < MOST
    assert path.stat().st_size <= most + 4 * (PROMPT_TOKENS + 200) + 4096
    kept = 4 * sum(len(row[0]) for vocabulary in "vw" for row in read_texts(path, vocabulary))
    assert most == MOST or kept > most // 2
    recording.add("v", [1], range(most // 8))  # half of the bound, with its prompt
    assert read_texts(path)[-1][0][:3] != [1, 0, 1]


def test_it_is_private_and_what_leaves_it_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r"
    before = os.umask(0)
    try:
        recording = Recording(path, 64 << 10)
        assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
        for damage in (partial(path.chmod, 0o644), path.unlink):
            damage()
            recording.add("v", [1], [7, 7, 123_456_789])
            assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    secret = (123_456_789).to_bytes(4, sys.byteorder)
    assert secret in path.read_bytes()
    for number in range(20):
        recording.add("v", [number], range(2000))
    assert read_texts(path)[0][0] != [1, 7, 7, 123_456_789]
    assert secret not in path.read_bytes()
    assert [*path.parent.iterdir()] == [path]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    other, notes, folder = tmp_path / "other.db", tmp_path / "notes", tmp_path / "folder"
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE texts (id INTEGER PRIMARY KEY)")
    notes.write_text("dear diary")
    folder.mkdir()
    for path, words in (
        (other, "other.db: is there, but is no recording"),
        (notes, "notes: is there, but is no recording"),
        (folder, "folder: Is a directory"),
        (notes / "r", "notes: "),
    ):
        content = None if path.is_dir() or not path.exists() else path.read_bytes()
        with pytest.raises(RecordingError, match=words):
            Recording(path, MOST)
        assert content is None or path.read_bytes() == content
        assert not is_recording(path)
        with pytest.raises(ConfigError, match=f"record: .*{words}"):
            build_agent(AgentConfig(draft=DraftSection("toy"), record=str(path)))


_ADDING = """
import sys
from pathlib import Path
from edgespec.telemetry.recording import Recording
recording, own = Recording(Path(sys.argv[1]), 1 << 24), int(sys.argv[2])
for number in range(int(sys.argv[3])):
    recording.add("v", [own], [number] * 1000)
    print(number, flush=True)
"""


def start_adding(path: Path, own: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _ADDING, str(path), str(own), str(count)]
    return subprocess.Popen(
        command, cwd=ROOT, env=child_environment(), stdout=subprocess.PIPE, text=True
    )


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r"
    processes = [start_adding(path, own, 12) for own in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    for process in processes:
        process.communicate()
    found = sorted((tokens[0], tokens[1], len(tokens)) for tokens, _ in read_texts(path))
    assert found == [(own, number, 1001) for own in range(4) for number in range(12)]


def test_a_kill_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "r"
    for own, after in enumerate((1, 3, 4)):
        with start_adding(path, own, 10_000) as process:
            assert process.stdout is not None
            for _ in range(after):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        found = [tokens for tokens, _ in read_texts(path) if tokens[0] == own]
        assert len(found) >= after
        assert found == [[own] + [number] * 1000 for number in range(len(found))]
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


# --- recordings by an agent -----------------------------------------------------------------------


def recording_agent(one: Agent, path: Path) -> Agent:
    one.options = replace(one.options, recording=Recording(path, MOST))
    return one


async def test_a_text_is_recorded_once_as_far_as_it_was_given(tmp_path: Path) -> None:
    """The link breaks, the reader leaves early, and a stop string ends the text; each must be
    recorded once."""
    path = tmp_path / "r"

    async def breaking(stream: VerifierStream) -> None:
        opening = await stream.receive()
        assert isinstance(opening, Open)
        if opening.committed:
            await play_output(stream, opening, TOKENS, commit_sizes=(3,))
            return
        await stream.send(Opened(Limits(), "scripted", len(PROMPT)))
        await stream.send(Commit(len(PROMPT), tuple(TOKENS[:4])))

    async with recording_agent(make_agent(connect_loopback(breaking)), path) as one:
        assert [token async for c in generate(one, 11) for token in c.tokens] == TOKENS
        assert one.stats is not None
        assert one.stats.counters.reconnects == 1
    async with recording_agent(
        make_agent(connect_loopback(stream_output(TOKENS, (2,)))), path
    ) as one:
        async with aclosing(generate(one, 11)) as chunks:
            given = [*(await anext(chunks)).tokens, *(await anext(chunks)).tokens]
        stopped = [token async for c in generate(one, 11, stop=("lo",)) for token in c.tokens]
    wanted = [TOKENS, given, stopped]
    assert [(len(PROMPT), [*PROMPT, *said]) for said in wanted] == [
        (start, tokens) for tokens, start in read_texts(path, "")
    ]


async def test_a_full_disk_does_the_text_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r"
    async with recording_agent(make_agent(connect_loopback(stream_output(TOKENS))), path) as one:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        try:
            for _ in range(2):
                assert [t async for c in generate(one, 11) for t in c.tokens] == TOKENS
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caplog.text.count("a generation could not be recorded: ") == 1
        assert f"{path}: " in caplog.text
        assert read_texts(path, "") == []
        assert [t async for c in generate(one, 11) for t in c.tokens] == TOKENS
    assert len(read_texts(path, "")) == 1


# --- recordings as a corpus -----------------------------------------------------------------------


def test_guesses_come_from_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dice, path, corpus = random.Random(5), tmp_path / "r", list[str]()
    recording = Recording(path, MOST)

    def open_store(vocabulary: str = "v", say: Any = ignore_message) -> Any:
        return FollowedCorpus([str(path)], vocabulary, fail_if_asked, say)

    assert open_store().after((97, 98)) == (0, ())
    for _ in range(12):
        prompt, said = ("".join(dice.choices("abc", k=dice.randrange(1, 40))) for _ in range(2))
        recording.add("v", [ord(letter) for letter in prompt], [ord(letter) for letter in said])
        recording.add("w", [120], [121, 122])
        corpus.append(prompt[-CORPUS_LENGTH:] + said)
    store = open_store()
    for _ in range(200):
        end = "".join(dice.choices("abc", k=dice.randrange(2, CORPUS_LENGTH + 1)))
        length, counts = find_followers(corpus, end)
        found, named = store.after(tuple(map(ord, end)))
        assert found == length
        best = sorted(counts.values(), reverse=True)[:2]
        assert [counts[chr(token)] for token, _ in named] == best or counts.total() > 50
    assert open_store("w").after((120, 121)) == (2, [(122, 1.0)])
    said_of = list[str]()
    open_store("w", said_of.append)
    assert not said_of  # nothing was recorded since


def test_what_cannot_be_recorded_is_named() -> None:
    for value in (0, 33):
        with pytest.raises(ValueError, match=f"record_mib is {value}, but must be in"):
            AgentConfig(record_mib=value)
