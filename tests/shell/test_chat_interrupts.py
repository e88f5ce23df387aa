"""Ctrl-C in a chat, pressed at the worst moments. Oracles: the chat goes on, and what came of a
reply is kept."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import chat
from edgespec.cli.talk.record import KeptFile, Record, read
from edgespec.config import AgentConfig
from edgespec.core.device.events import TokenKind
from edgespec.core.ports import ModelInfo
from edgespec.device.agent import GenerationError
from edgespec.device.reply import Chunk, Piece


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class SlowAgent:
    """Says one word; then its user presses Ctrl-C, and it takes a while to stop."""

    def __init__(self, while_stopping: Callable[[], None]) -> None:
        self._while_stopping = while_stopping
        self.stopped = 0

    async def generate(self, *prompt: Any, **more: Any) -> AsyncGenerator[Chunk, None]:
        try:
            yield Chunk(1, (1,), (Piece("word", TokenKind.DECODED),))
            press()
            await asyncio.Event().wait()
        finally:
            self._while_stopping()
            await asyncio.sleep(0)
            self.stopped += 1


class Lines:
    """An editor that reads these."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    def ask(self) -> str:
        for line in self._lines:
            if line == "\x03":
                press()
            return line
        raise EOFError


class Text:
    def render_chat(self, messages: list[dict[str, str]]) -> str:
        if messages[-1]["content"] == "a long text":
            press()
        return "a" * len(messages)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * len(text)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as found:
        yield found


def talk(runner: asyncio.Runner, agent: Any, path: Path, *lines: str) -> chat.Conversation:
    anything: Any = None
    text: Any = Text()
    found = chat.Conversation(
        agent,
        text,
        AgentConfig(),
        runner,
        ModelInfo("toy", "v", 64, 4096),
        anything,
        Record(),
        Lines(*lines),
        KeptFile(path),
    )
    found.run()
    return found


def contents(path: Path) -> list[str]:
    return [one["content"] for one in read(path).messages]


def test_whoever_presses_on_ends_one_reply_and_keeps_it(
    runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        press()

    monkeypatch.setattr(chat, "say", say)
    agent = SlowAgent(while_stopping=press)
    path = tmp_path / "talk.json"
    talk(runner, agent, path, "one", "two", "/help x")
    assert said == [
        "(stopped)",
        "(stopped)",
        "error: /help takes nothing behind it, but got 'x'",
        "",
    ]
    assert contents(path) == ["one", "word", "two", "word"]
    assert agent.stopped == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_a_reply_begins_and_where_nothing_runs(
    runner: asyncio.Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = SlowAgent(while_stopping=lambda: None)
    path = tmp_path / "talk.json"
    talk(runner, agent, path, "\x03", "a long text", "one")
    assert agent.stopped == 1
    assert contents(path) == ["one", "word"]
    told = capsys.readouterr().err
    assert told.index("(Ctrl-D or /quit leaves)") < told.index("(stopped; an empty line sends")


def test_a_message_whose_verifier_stays_away_is_sent_again_by_an_empty_line(
    runner: asyncio.Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    errors = [GenerationError("gave up on the verifier", None)] * 2

    async def away_twice(
        agent: Any, prompt: Any, sampling: Any, shown: Any, *_: Any, **__: Any
    ) -> None:
        if errors:
            raise errors.pop()
        shown.parts.append("word")

    monkeypatch.setattr(chat, "stream", away_twice)
    path = tmp_path / "talk.json"
    talk(runner, SlowAgent(while_stopping=lambda: None), path, "", "a question", "", "", "", "two")
    assert contents(path) == ["a question", "word", "two", "word"]
    assert capsys.readouterr().err.count("(an empty line sends your message again)") == 2
