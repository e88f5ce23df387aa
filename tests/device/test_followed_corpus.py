"""Tests of a corpus whose files change. Oracles: a search of the files as they are now; the texts
that were tokenized; the scripted verifier's output."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from edgespec.config import ConfigError, DraftSection
from edgespec.core.device import memory
from edgespec.core.protocol.text_lookup import CORPUS_LENGTH, RANKS, TextTables
from edgespec.device import followed_corpus
from edgespec.device.followed_corpus import FollowedCorpus
from edgespec.device.model_drafter import corpus_bytes, max_corpus_bytes
from tests.device.test_corpus import find_followers, ignore_message, letters, write
from tests.kit.scripted_verifier import TEXT, connect_loopback, generate, make_agent, stream_output
from tests.present import require

TOKENS = TEXT.encode("hello world")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


class Encoder:
    """Encodes letters, and keeps the texts."""

    def __init__(self, before: Callable[[str], None] = ignore_message) -> None:
        self.texts: list[str] = []
        self._before = before

    def __call__(self, text: str) -> list[int]:
        self._before(text)
        self.texts.append(text)
        return letters(text)


def follow(folder: Path, encode: Encoder | None = None, vocabulary: str = "v") -> FollowedCorpus:
    return FollowedCorpus([str(folder)], vocabulary, encode or Encoder(), ignore_message)


def look_up(corpus: FollowedCorpus, end: str) -> tuple[int, str]:
    length, named = corpus.after(tuple(letters(end)))
    return length, "".join(chr(token) for token, _ in named)


def check_all(corpus: FollowedCorpus, dice: random.Random, texts: list[str]) -> None:
    """Compare lookups with a search of the texts."""
    for _ in range(12):
        text = dice.choice([*texts, "abcabc"])
        at = dice.randrange(len(text) + 1)
        end = ("".join(dice.choices("abcd", k=2)) + text[max(0, at - 20) : at])[-CORPUS_LENGTH:]
        length, counts = find_followers(texts, end)
        found, named = look_up(corpus, end)
        assert found == length
        assert set(named) <= set(counts)
        assert bool(named) == bool(counts)
        assert len(named) <= RANKS
        if named:
            part = end[-found:] + named[0]
            whole = require(corpus.find_text(tuple(letters(part))))
            shown = "".join(map(chr, whole.tokens))
            assert shown in texts
            assert shown[: whole.next_index].endswith(part)


@pytest.mark.parametrize("layer_tokens", [8, 60, 1 << 17])
def test_lookups_find_the_files_as_they_are(
    tmp_path: Path, layer_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files come, go, move and change at random, and the corpus is opened again now and then."""
    monkeypatch.setattr(followed_corpus, "_LAYER_TOKENS", layer_tokens)
    dice, folder, files = random.Random(layer_tokens), tmp_path / "project", dict[Path, str]()
    write(folder / "start.txt", "the start")
    corpus = follow(folder)
    files[folder / "start.txt"] = "the start"
    for step in range(60):
        for _ in range(dice.randrange(3)):
            change, chosen = dice.randrange(4), dice.choice([*files])
            if change == 0 and len(files) > 1:
                chosen.unlink()
                del files[chosen]
                continue
            if change == 1:
                target = folder / f"{step}" / chosen.name
                target.parent.mkdir(exist_ok=True)
                files[target] = files.pop(chosen)
                chosen.rename(target)
                continue
            path = chosen if change == 2 else folder / f"{step}.txt"
            files[path] = "".join(dice.choices("abcd", k=dice.randrange(1, 40)))
            write(path, files[path])
            os.utime(path, ns=(step, step))  # a coarse clock would show no change
        corpus.refresh()
        if dice.random() < 0.2:
            corpus = follow(folder)
        check_all(corpus, dice, [*files.values()])
    assert corpus.summary == f"{len(files)} file{'s' if len(files) > 1 else ''}"


def test_only_what_changed_is_tokenized(tmp_path: Path) -> None:
    folder, encode = tmp_path / "project", Encoder()
    for name in "abc":
        write(folder / name, f"text of {name}")
    corpus = follow(folder, encode)
    assert encode.texts == ["text of a", "text of b", "text of c"]
    assert not corpus.refresh()
    (folder / "d").mkdir()
    (folder / "a").rename(folder / "d" / "e")
    os.utime(folder / "b")
    assert not corpus.refresh()
    write(folder / "b", "another text of b")
    assert corpus.refresh()
    assert encode.texts[3:] == ["another text of b"]
    assert look_up(corpus, "another text") == (12, " ")
    assert look_up(corpus, "text of ") == (8, "b")  # The text that changed last comes first.
    write(folder / "b", "text of b")
    assert corpus.refresh()
    assert encode.texts[4:] == []
    again = follow(folder, encode)
    assert encode.texts[4:] == []
    assert look_up(again, "ext of ") == (7, "abc"[:RANKS])


def test_a_large_change_makes_the_store_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_corpus, "_LAYER_TOKENS", 100)
    folder, encode = tmp_path / "project", Encoder()
    for number in range(10):
        write(folder / f"{number}.txt", f"number {number} " * 5)
    corpus = follow(folder, encode)
    (store,) = (tmp_path / "cache" / "edgespec" / "corpus").iterdir()
    before = store.stat().st_ino
    write(folder / "new.txt", "something else " * 8)
    assert corpus.refresh()
    assert store.stat().st_ino != before
    assert len(encode.texts) == 11
    for number in range(9):
        (folder / f"{number}.txt").unlink()
    before, size = store.stat().st_ino, store.stat().st_size
    assert corpus.refresh()
    assert (store.stat().st_ino != before, store.stat().st_size < size / 2) == (True, True)
    assert len(encode.texts) == 11
    assert look_up(corpus, "number ") == (7, "9")


def test_files_that_vanish_or_grow_while_they_are_read_are_counted(tmp_path: Path) -> None:
    """They do so while the first file is tokenized, when all have been found."""
    folder = tmp_path / "project"

    def change(text: str) -> None:
        if text == "first":
            (folder / "b").unlink()
            (folder / "c").write_bytes(b"x" * ((1 << 20) + 1))
            (folder / "d").write_bytes(b"now\0binary")
            (folder / "e").unlink()
            (folder / "e").mkdir()

    for name, text in zip("abcdef", ("first", *["text"] * 4, "last"), strict=True):
        write(folder / name, text)
    corpus = follow(folder, Encoder(change))
    assert corpus.summary.startswith("2 files, 4 skipped: ")
    assert sorted(corpus.summary.partition(": ")[2].split(", ")) == [
        "binary 1",
        "over 1 MiB 1",
        "unreadable 1",
        "vanished 1",
    ]
    assert look_up(corpus, "las") == (3, "t")
    write(folder / "b", "beautiful")
    (folder / "c").write_text("caesar")
    assert corpus.refresh()
    assert corpus.summary == "4 files, 1 skipped: binary 1"
    assert look_up(corpus, "caesa") == (5, "r")


def test_a_named_file_that_goes_is_missed_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "project" / "a.txt", "one two three")
    corpus = FollowedCorpus([str(path)], "v", letters, ignore_message)
    path.unlink()
    assert corpus.refresh()
    assert (look_up(corpus, "one"), corpus.summary) == ((0, ""), "0 files, 1 skipped: vanished 1")
    path.write_bytes(b"\xff\xfe")
    assert not corpus.refresh()
    assert corpus.summary == "0 files, 1 skipped: unreadable 1"
    write(path, "one two four")
    assert corpus.refresh()
    assert look_up(corpus, "two ") == (4, "f")
    shutil.rmtree(path.parent)
    assert corpus.refresh()
    assert not caplog.records


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"text from a pipe")
    os.close(writing)
    try:
        corpus = FollowedCorpus([f"/dev/fd/{reading}"], "v", letters, ignore_message)
        assert not corpus.refresh()
        assert look_up(corpus, "from ") == (5, "a")
    finally:
        os.close(reading)


def test_a_failure_leaves_the_texts_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "project"
    write(folder / "a", "one two three")
    corpus = follow(folder)

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(followed_corpus, "_LAYER_TOKENS", 0)
    with monkeypatch.context() as patch:
        patch.setattr("edgespec.config.files.os.fsync", full)
        write(folder / "b", "four five six")
        assert not corpus.refresh()
    assert "draft.corpus stays as it was: " in caplog.text
    assert look_up(corpus, "one ") == (4, "t")
    assert look_up(corpus, "four ") == (0, "")
    assert corpus.refresh()
    assert look_up(corpus, "four ") == (5, "f")


def test_closing_ends_a_look(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    for name in "abc":
        write(folder / name, f"old {name}")
    encode = Encoder(lambda text: corpus.close() if text == "new a" else None)
    corpus = follow(folder, encode)
    for name in "abc":
        write(folder / name, f"new {name}")
    assert not corpus.refresh()
    assert encode.texts[3:] == ["new a"]


def test_looks_take_a_tenth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("edgespec.device.followed_corpus.time.monotonic", lambda: now_s[0])
    write(tmp_path / "project" / "a", "text")

    def slow(text: str) -> None:
        now_s[0] += 7.0

    corpus, due = follow(tmp_path / "project", Encoder(slow)), list[bool]()
    for wait_s in (0.0, 1.0):
        now_s[0] += wait_s
        due.append(corpus.is_due)
    write(tmp_path / "project" / "b", "more text")
    corpus.refresh()
    for wait_s in (69.0, 1.0):
        now_s[0] += wait_s
        due.append(corpus.is_due)
    assert due == [False, True, False, True]


async def test_a_generation_does_not_wait_for_a_look(tmp_path: Path) -> None:
    """A changed file takes until after the end of the generation to be tokenized. The next
    generation, and the rest of one that runs, would draft from it."""
    folder, go_on, begun = tmp_path / "project", threading.Event(), threading.Event()

    def wait(text: str) -> None:
        if text.startswith("new"):
            begun.set()
            assert go_on.wait(60.0)

    write(folder / "a", "old text")
    corpus = follow(folder, Encoder(wait))
    corpus._next_at_s = 0.0
    tables = TextTables(ngrams=True)
    tables.corpus = corpus
    async with make_agent(connect_loopback(stream_output(TOKENS))) as agent:
        agent.options = replace(agent.options, text_tables=tables)
        write(folder / "a", "new text, longer")
        assert [t async for c in generate(agent, 11) for t in c.tokens] == TOKENS
        look = agent.following
        assert look is not None
        assert not look.done()
        # A second generation begins no second look.
        assert [t async for c in generate(agent, 11) for t in c.tokens] == TOKENS
        assert agent.following is look
        go_on.set()
        await look
        assert begun.is_set()
        assert look_up(corpus, "new text, ") == (10, "l")


def test_a_memory_budget_bounds_the_text(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    for number in range(40):
        write(folder / f"{number:02}.txt", "x" * (1 << 20))
    free = DraftSection("lookup", corpus=(str(folder),))
    assert corpus_bytes(free) == max_corpus_bytes(free) == 32 << 20
    bounded = replace(free, memory_budget="200MiB")
    assert max_corpus_bytes(bounded) == memory.corpus_text_bytes(200 << 20)
    assert corpus_bytes(bounded) == 5 << 20
    terms = memory.corpus_terms(5 << 20)
    assert sum(term.bytes for term in terms) <= 0.25 * (200 << 20)
    assert memory.corpus_text_bytes(1 << 20) == 0
    with pytest.raises(ConfigError, match="none: No such file"):
        corpus_bytes(replace(free, corpus=(str(tmp_path / "none"),)))
