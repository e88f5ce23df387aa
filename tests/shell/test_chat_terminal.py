"""The chat on a terminal, as a user has it. Oracles: the toy's text, and the file that is kept."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.toy import ToyTokenizer
from tests.shell.live_verifier import daemon, toy_text
from tests.shell.terminal import Terminal, on_terminal

COUNT = 30
TEXT = ToyTokenizer()
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with daemon("--pass-ms", "20") as (where, _):
        yield where


def expected(prompt: str) -> str:
    sampling = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    return TEXT.decode(toy_text(TEXT.encode(prompt), sampling))


def chat(address: str, home: Path, *options: str, count: int = COUNT) -> tuple[str, ...]:
    where = ("--verifier", address, "--draft", "toy", "-n", str(count))
    # The verifier waits for drafts, so that the line of numbers tells of some.
    settings = ("--set", "sampling.ignore_eos=true", "--set", "policy.run_ahead=never")
    return ("chat", *where, *settings, *options)


def left(terminal: Terminal) -> int:
    terminal.type("/quit\r")
    return terminal.ended()


def test_several_lines_a_history_and_going_on(address: str, tmp_path: Path) -> None:
    first = expected("hello\nworld ")
    with on_terminal(*chat(address, tmp_path), XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.until(address)  # the line of numbers below the prompt
        terminal.type("hello\x1b\rworld\r")
        shown = terminal.until(first)
        assert "> hello\n  world" in shown
        terminal.until("accepted")
        terminal.type("/stats\r")
        terminal.until("this chat: 30 tokens in 1 reply,")
        assert left(terminal) == 0
        assert "\x1b[?25l" in terminal.said
    (kept,) = (tmp_path / "edgespec/conversations").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    said = json.loads(kept.read_text())
    assert [one["content"] for one in said["messages"]] == ["hello\nworld", first]
    history = tmp_path / "edgespec/chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+hello\n+world" in history.read_text()
    again = ("--continue",)
    with on_terminal(*chat(address, tmp_path, *again), XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.until("going on with a conversation of 2 messages")
        terminal.until(address)
        terminal.type("more\r")
        terminal.until(expected(f"hello\nworld {first} more "))
        assert left(terminal) == 0
    (kept,) = (tmp_path / "edgespec/conversations").iterdir()
    assert len(json.loads(kept.read_text())["messages"]) == 4


def test_ctrl_c_ends_a_reply_and_keeps_what_came(address: str, tmp_path: Path) -> None:
    command = chat(address, tmp_path, count=3000)
    with on_terminal(*command, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.until(address)
        terminal.type("hello\r")
        terminal.until("accepted")
        terminal.type("\x03")
        terminal.until("(stopped)")
        saved = tmp_path / "saved.json"
        terminal.type(f"/save {saved}\r")
        terminal.until("2 messages written")
        assert left(terminal) == 0
    reply = json.loads(saved.read_text())["messages"][1]["content"]
    assert 0 < len(reply) < 3000
    assert expected("hello ")[: len(reply)] == reply[:COUNT]


@pytest.mark.parametrize("typing", [True, False])
def test_sigterm_leaves_the_terminal_as_it_was(address: str, tmp_path: Path, typing: bool) -> None:
    command = chat(address, tmp_path, count=3000)
    with on_terminal(*command, XDG_STATE_HOME=str(tmp_path)) as terminal:
        before = terminal.modes
        terminal.until(address)
        if not typing:
            terminal.type("hello\r")
            terminal.until("accepted")
        assert terminal.modes != before
        terminal.process.terminate()
        assert terminal.ended() == 143
        assert terminal.modes == before


def test_bytes_that_are_no_text_cost_one_message(address: str, tmp_path: Path) -> None:
    """As a terminal sends that is set to another encoding."""
    with on_terminal(*chat(address, tmp_path), XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.until(address)
        terminal.type(b"caf\xe9\r")
        terminal.until("your message is not UTF-8")
        terminal.type("hello\r")
        terminal.until(expected("hello "))
        assert left(terminal) == 0
    (kept,) = (tmp_path / "edgespec/conversations").iterdir()
    said = json.loads(kept.read_text())["messages"]
    assert [one["content"] for one in said] == ["hello", expected("hello ")]
