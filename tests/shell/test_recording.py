"""Recordings. Oracles: a list of what was added; the brute-force search of ``test_corpus.py``; what
the scripted verifier says."""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgespec.config import AgentConfig, ConfigError, DraftSection
from edgespec.core.ports import VerifierStream
from edgespec.core.protocol.messages import Commit, Limits, Open, Opened
from edgespec.core.protocol.text_guesses import CORPUS_LENGTH
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent
from edgespec.device.corpus import open_corpus
from edgespec.telemetry.recording import (
    PROMPT_TOKENS,
    Recording,
    RecordingError,
    is_recording,
    read_recording,
)
from tests.shell.live_verifier import environment
from tests.shell.scripted_verifier import PROMPT, TEXT, agent, generate, loopback, play, streaming
from tests.shell.test_corpus import followers, quiet, unasked
from tests.sources import ROOT

TOKENS = TEXT.encode("hello world")
MOST = 1 << 20
Row = tuple[list[int], int]


def texts(path: Path, vocabulary: str = "v") -> list[Row]:
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
        found = texts(path, vocabulary)
        assert found == of_it[len(of_it) - len(found) :]
        assert found == of_it or most < MOST
    assert path.stat().st_size <= most + 4 * (PROMPT_TOKENS + 200) + 4096
    kept = 4 * sum(len(row[0]) for vocabulary in "vw" for row in texts(path, vocabulary))
    assert most == MOST or kept > most // 2
    recording.add("v", [1], range(most // 8))  # of half the bound, with its prompt
    assert texts(path)[-1][0][:3] != [1, 0, 1]


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
    assert texts(path)[0][0] != [1, 7, 7, 123_456_789]
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


def adding(path: Path, own: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _ADDING, str(path), str(own), str(count)]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r"
    processes = [adding(path, own, 12) for own in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    for process in processes:
        process.communicate()
    found = sorted((tokens[0], tokens[1], len(tokens)) for tokens, _ in texts(path))
    assert found == [(own, number, 1001) for own in range(4) for number in range(12)]


def test_a_kill_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "r"
    for own, after in enumerate((1, 3, 4)):
        with adding(path, own, 10_000) as process:
            assert process.stdout is not None
            for _ in range(after):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        found = [tokens for tokens, _ in texts(path) if tokens[0] == own]
        assert len(found) >= after
        assert found == [[own] + [number] * 1000 for number in range(len(found))]
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


# --- by an agent ----------------------------------------------------------------------------------


def recording_agent(one: Agent, path: Path) -> Agent:
    one.options = replace(one.options, recording=Recording(path, MOST))
    return one


async def test_a_text_is_recorded_once_as_far_as_it_was_given(tmp_path: Path) -> None:
    """Over a link that breaks, left early, and up to a stop string."""
    path = tmp_path / "r"

    async def breaking(stream: VerifierStream) -> None:
        opening = await stream.receive()
        assert isinstance(opening, Open)
        if opening.committed:
            await play(stream, opening, TOKENS, (3,))
            return
        await stream.send(Opened(Limits(), "scripted", len(PROMPT)))
        await stream.send(Commit(len(PROMPT), tuple(TOKENS[:4])))

    async with recording_agent(agent(loopback(breaking)), path) as one:
        assert [token async for c in generate(one, 11) for token in c.tokens] == TOKENS
        assert one.stats is not None
        assert one.stats.counters.reconnects == 1
    async with recording_agent(agent(loopback(streaming(TOKENS, (2,)))), path) as one:
        async with aclosing(generate(one, 11)) as chunks:
            given = [*(await anext(chunks)).tokens, *(await anext(chunks)).tokens]
        stopped = [token async for c in generate(one, 11, stop=("lo",)) for token in c.tokens]
    wanted = [TOKENS, given, stopped]
    assert [(len(PROMPT), [*PROMPT, *said]) for said in wanted] == [
        (start, tokens) for tokens, start in texts(path, "")
    ]


async def test_a_full_disk_does_the_text_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r"
    async with recording_agent(agent(loopback(streaming(TOKENS))), path) as one:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        try:
            for _ in range(2):
                assert [t async for c in generate(one, 11) for t in c.tokens] == TOKENS
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caplog.text.count("a text could not be recorded: ") == 1
        assert f"{path}: " in caplog.text
        assert texts(path, "") == []
        assert [t async for c in generate(one, 11) for t in c.tokens] == TOKENS
    assert len(texts(path, "")) == 1


# --- as a corpus ----------------------------------------------------------------------------------


def test_guesses_come_from_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dice, path, corpus = random.Random(5), tmp_path / "r", list[str]()
    recording = Recording(path, MOST)

    def opened(vocabulary: str = "v", say: Any = quiet) -> Any:
        return open_corpus([str(path)], vocabulary, unasked, say)

    assert opened().after((97, 98)) == (0, ())
    for _ in range(12):
        prompt, said = ("".join(dice.choices("abc", k=dice.randrange(1, 40))) for _ in range(2))
        recording.add("v", [ord(letter) for letter in prompt], [ord(letter) for letter in said])
        recording.add("w", [120], [121, 122])
        corpus.append(prompt[-CORPUS_LENGTH:] + said)
    store = opened()
    for _ in range(200):
        end = "".join(dice.choices("abc", k=dice.randrange(2, CORPUS_LENGTH + 1)))
        length, counts = followers(corpus, end)
        found, named = store.after(tuple(map(ord, end)))
        assert found == length
        best = sorted(counts.values(), reverse=True)[:2]
        assert [counts[chr(token)] for token, _ in named] == best or counts.total() > 50
    assert opened("w").after((120, 121)) == (2, [(122, 1.0)])
    said_of = list[str]()
    opened("w", said_of.append)
    assert not said_of  # nothing was recorded since


def test_what_cannot_be_recorded_is_named() -> None:
    for value in (0, 33):
        with pytest.raises(ValueError, match=f"record_mib is {value}, but must be in"):
            AgentConfig(record_mib=value)
