"""Processes that try grammars: kept, replaced, and gone with whoever started them. Oracles: the
process table, and a grammar that never ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from edgespec.core.protocol.constraint import (
    Constraint,
    ConstraintBusyError,
    ConstraintError,
    ConstraintKind,
)
from edgespec.core.protocol.messages import Limits
from edgespec.models.grammar import GrammarReader, letters_tokenizer
from edgespec.models.trial_processes import TrialProcesses
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.toy import ToyTarget
from tests.core.token_grammars import EOS
from tests.shell.letters import LETTERS, MODEL
from tests.shell.live_verifier import environment
from tests.shell.test_grammar import ENDLESS, schema
from tests.shell.tiny_checkpoints import write_tokenizer

WITHIN_S = 120.0
EASY = [schema({"enum": [number]}) for number in range(9)]
TOO_MUCH = "takes more time or memory than is given"


def until(holds: Callable[[], object]) -> None:
    """Returns when it holds, however long that takes here."""
    end, pause = time.monotonic() + WITHIN_S, threading.Event()
    while not holds():
        assert time.monotonic() < end
        pause.wait(0.01)


def runs(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr("edgespec.models.grammar._TRIAL_S", WITHIN_S)


@pytest.fixture
def reader() -> Iterator[GrammarReader]:
    found = GrammarReader(lambda: letters_tokenizer(LETTERS, EOS))
    yield found
    found.close()


def trials(reader: GrammarReader) -> TrialProcesses:
    assert reader.trials is not None
    return reader.trials


def test_one_process_tries_one_grammar_after_the_other(
    reader: GrammarReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.models.trial_processes._BEHIND_S", WITHIN_S)  # none is slow
    reader.get_ready()
    (first,) = trials(reader).pids
    for easy in EASY[:4]:
        assert reader.read(easy).matcher is not None
    with pytest.raises(ConstraintError, match="Invalid type: objekt"):
        reader.read(schema({"type": "objekt"}))
    assert first in trials(reader).pids
    reader.close()
    assert not runs(first)
    with pytest.raises(ConstraintError, match="this side is stopping"):
        reader.read(EASY[5])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_died_or_hangs_as_it_waited_is_replaced(
    reader: GrammarReader, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.models.trial_processes._READS_WITHIN_S", 0.2)
    monkeypatch.setattr("edgespec.models.trial_processes._SLOW_S", WITHIN_S)  # there is only one
    assert reader.read(EASY[0]).matcher is not None
    before = trials(reader).pids
    for pid in before:
        os.kill(pid, number)
    assert reader.read(EASY[1]).matcher is not None
    until(lambda: not any(map(runs, before)))


def test_who_asks_for_something_endless_keeps_nobody_waiting(reader: GrammarReader) -> None:
    """Oracle: the endless one is not done when all others are; it is stopped, for else it would be
    killed after a while."""
    reader.get_ready()
    (pid,) = trials(reader).pids
    with ThreadPoolExecutor(2) as threads:
        endless = threads.submit(reader.read, ENDLESS)
        until(lambda: len(trials(reader).pids) == 2)  # it is at it, and another one is ready
        os.kill(pid, signal.SIGSTOP)
        for easy in EASY:
            assert reader.read(easy).matcher is not None
        assert not endless.done()
        every = trials(reader).pids
        reader.close()
        with pytest.raises(ConstraintError, match="this side is stopping"):
            endless.result(WITHIN_S)
    assert not any(map(runs, every))
    assert not trials(reader).pids


def test_one_that_dies_of_a_grammar_says_so_and_is_replaced(reader: GrammarReader) -> None:
    reader.get_ready()
    (pid,) = trials(reader).pids
    with ThreadPoolExecutor(1) as threads:
        endless = threads.submit(reader.read, ENDLESS)
        until(lambda: len(trials(reader).pids) == 2)  # it is at it for long: the next is ready
        with suppress(ProcessLookupError):  # it has had its share by now
            os.kill(pid, signal.SIGKILL)  # as the kernel does to who takes all memory
        with pytest.raises(ConstraintError, match=TOO_MUCH):
            endless.result(WITHIN_S)
    assert reader.read(EASY[0]).matcher is not None
    assert pid not in trials(reader).pids


def test_one_that_cannot_begin_is_told_apart_from_a_grammar_that_takes_too_much() -> None:
    reader = GrammarReader(lambda: letters_tokenizer(LETTERS, EOS), most_bytes=1 << 20)
    with pytest.raises(ConstraintError, match=r"cannot be tried now: the process .* ended with"):
        reader.read(EASY[0])
    reader.close()


def test_one_that_nobody_needs_ends() -> None:
    reader = GrammarReader(lambda: letters_tokenizer(LETTERS, EOS), idle_s=0.01)
    assert reader.read(EASY[0]).matcher is not None
    until(lambda: not trials(reader).pids)
    assert reader.read(EASY[1]).matcher is not None
    reader.close()


def test_a_reader_that_is_let_go_of_leaves_no_process() -> None:
    reader = GrammarReader(lambda: letters_tokenizer(LETTERS, EOS))
    assert reader.read(EASY[0]).matcher is not None
    every = trials(reader).pids
    assert any(map(runs, every))
    del reader
    until(lambda: not any(map(runs, every)))


KILLED = """
import sys, threading
from edgespec.models.grammar import GrammarReader, letters_tokenizer
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
reader = GrammarReader(lambda: letters_tokenizer("ab", 1))
endless = Constraint(ConstraintKind.JSON_SCHEMA, sys.argv[1])
threading.Thread(target=reader.read, args=(endless,), daemon=True).start()
while len(reader.trials.pids) < 2:  # one that is busy, and one that is ready
    threading.Event().wait(0.01)
print(*reader.trials.pids, flush=True)
sys.stdin.read()
"""


def test_none_outlives_a_parent_that_was_killed() -> None:
    """Neither one that waits nor one that is busy; the latter would go on for seconds."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, ENDLESS.text],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    until(lambda: not any(map(runs, pids)))


def test_a_grammar_is_tried_with_the_special_tokens_of_its_vocabulary(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    reader = GrammarReader((folder / "tokenizer.json").read_text)
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(folder / "tokenizer.json")).get_added_tokens_decoder()
    number, token = next(iter(known.items()))
    for text in (f'start: "a" <[{number}]>', f'start: "a" {token.content}'):
        assert reader.read(Constraint(ConstraintKind.GRAMMAR, text)).matcher is not None
    with pytest.raises(ConstraintError, match="nobody"):
        reader.read(Constraint(ConstraintKind.GRAMMAR, "start: <|nobody|>"))
    reader.close()


async def test_a_verifier_has_one_ready_and_takes_it_along() -> None:
    reader = GrammarReader(lambda: letters_tokenizer(LETTERS, EOS))
    verifier = Verifier(ToyTarget(MODEL), Limits(), read_constraint=reader)
    assert not trials(reader).pids
    await asyncio.to_thread(verifier.get_ready)
    (pid,) = trials(reader).pids
    await verifier.stop()
    assert not trials(reader).pids
    until(lambda: not runs(pid))
    await asyncio.to_thread(verifier.get_ready)  # nothing begins any more
    assert not trials(reader).pids


def test_with_endless_ones_in_all_places_the_slowest_is_given_up(
    reader: GrammarReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the endless ones cannot end by themselves, for they are stopped."""
    monkeypatch.setattr("edgespec.models.trial_processes._BEHIND_S", 0.2)
    with ThreadPoolExecutor(4) as threads:
        endless = [threads.submit(reader.read, ENDLESS) for _ in range(4)]
        busy = trials(reader)._busy
        until(lambda: sum(one.behind_since is not None for one in set(busy)) == 4)
        for pid in [one.pid for one in busy]:
            os.kill(pid, signal.SIGSTOP)
        assert reader.read(EASY[0]).matcher is not None
        given_up = [one for one in endless if one.done()]
        assert len(given_up) == 1
        with pytest.raises(ConstraintBusyError, match="others wait"):
            given_up[0].result()
        reader.close()
