"""Tests of the chat: its parts, and the whole of it on a terminal, as a user has it.

Oracles: the toy's text; a screen after many small frames equals the screen after one large frame;
after a Ctrl-C at the worst moment the chat goes on and keeps what had come of the reply; files read
back equal, and only their owner can read them.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import stat
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from prompt_toolkit.history import FileHistory

from edgespec.cli import chat, chat_terminal
from edgespec.cli.chat import ConversationError, KeptFile, Record, parse, read_record
from edgespec.cli.chat_terminal import MarkdownView, SignalRunner, TypedHistory
from edgespec.config import AgentConfig
from edgespec.core.device.events import DraftCounters, TokenKind
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Chunk, GenerationError, Piece
from edgespec.models.toy import ToyTokenizer
from edgespec.telemetry.agent_status import (
    AgentStatus,
    AgentTotals,
    DraftingStatus,
    MemoryStatus,
    VerifierState,
    VerifierStatus,
)
from tests.cli.terminal import Screen, Terminal, on_terminal
from tests.kit.live_verifier import run_command, start_daemon, toy_text

INFO = ModelInfo("m", "v", 64, 512)
TALK = Record(
    "m",
    "be brief",
    [{"role": "user", "content": "hä?\n"}, {"role": "assistant", "content": ""}],
    "2026-01-31T12:00:00+00:00",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "edgespec"


REPLY = """# Title
A paragraph
of two lines.

- one
- two

  still two

```python
# no heading

x = 1
```
after
## Next
last"""


def render_reply(text: str, step: int) -> tuple[str, str]:
    """Return a terminal's screen after a reply that came in pieces, and everything that was
    written."""
    size = patch.dict(os.environ, COLUMNS="40", LINES="24")
    every_frame = patch.object(chat_terminal, "FRAME_S", 0.0)
    with size, every_frame, redirect_stdout(io.StringIO()) as out:
        view = MarkdownView(lambda width: "numbers"[:width])
        for start in range(0, len(text), step):
            piece = Piece(text[start : start + step], TokenKind.DECODED)
            view.show(Chunk(start, (1,), (piece,)))
        view.end()
    screen = Screen(40)
    screen.feed(out.getvalue().replace("\n", "\r\n"))  # as a terminal's driver does
    return screen.text, out.getvalue()


def test_a_reply_looks_the_same_however_it_came() -> None:
    whole, _ = render_reply(REPLY, len(REPLY))
    by_letter, written = render_reply(REPLY, 1)
    assert by_letter == whole
    assert "numbers" not in whole
    assert "numbers" in written
    for word in ("Title", "A paragraph of two lines.", "still two", "x = 1", "Next", "last"):
        assert whole.count(word) == 1, word
    assert "```" not in whole
    code = "```\n" + "".join(f"line {number}\n" for number in range(200)) + "```\n"
    text, _ = render_reply(code, 40)
    assert text.split() == [word for number in range(200) for word in ("line", str(number))]


def test_a_reply_cannot_control_the_terminal() -> None:
    assert "\x1b]" not in render_reply("a\x1b]0;owned\x07 [x](http://e\x1bvil)", 3)[1]


def test_a_text_that_no_renderer_takes_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*arguments: object, **options: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(chat_terminal, "Markdown", stumble)
    text, _ = render_reply("> " * 30 + "deep\n\nlast", 7)
    assert "".join(text.split()).endswith("deeplast")


STATUS = AgentStatus(
    version="1",
    clock_s=9.0,
    uptime_s=9.0,
    running=1,
    tokens_per_s=42.14,
    verifiers=(VerifierStatus("gpu-box:7420", VerifierState.SERVING, 5.0, rtt_s=0.0514),),
    generations=(),
    totals=AgentTotals(tried=10, hits=8),
    drafting=DraftingStatus(True, "", acceptance=0.784),
    memory=MemoryStatus(412 << 20, 600 << 20),
)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class SlowAgent:
    """An agent that sends one word, then presses Ctrl-C for its user, and is slow to stop."""

    def __init__(self, while_stopping: Callable[[], None] = lambda: None) -> None:
        self._while_stopping = while_stopping
        self.stopped = 0
        self.stats = None

    async def generate(self, *prompt: Any, **more: Any) -> AsyncGenerator[Chunk, None]:
        try:
            yield Chunk(1, (1,), (Piece("word", TokenKind.DECODED),))
            press()
            await asyncio.Event().wait()
        finally:
            self._while_stopping()
            await asyncio.sleep(0)
            self.stopped += 1


class Text:
    def chat_template(self) -> Text:
        return self

    def render(self, messages: list[dict[str, str]]) -> str:
        if messages[-1]["content"] == "a long text":
            press()
        return "a" * len(messages)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * len(text)


@pytest.fixture
def runner() -> Iterator[SignalRunner]:
    with SignalRunner() as found:
        yield found


def hold_conversation(runner: SignalRunner, agent: Any, *lines: str) -> list[str]:
    """Hold a conversation of these lines and return the messages it keeps; the line \\x03 is a
    Ctrl-C."""
    remaining = iter(lines)

    def ask() -> str:
        for line in remaining:
            if line == "\x03":
                press()
            return line
        raise EOFError

    anything: Any = None
    text: Any = Text()
    kept = KeptFile()
    chat.Conversation(agent, text, AgentConfig(), runner, INFO, anything, Record(), kept, ask).run()
    return [one["content"] for one in read_record(kept.path).messages]


def test_the_line_of_numbers_says_how_much_of_a_long_prompt_is_read(
    runner: SignalRunner,
) -> None:
    counters = DraftCounters(prompt_read=2_048)
    agent: Any = SimpleNamespace(stats=SimpleNamespace(counters=counters))
    status: Any = SimpleNamespace(snapshot=lambda after: None)
    text: Any = Text()
    one = chat.Conversation(agent, text, AgentConfig(), runner, INFO, status, Record())
    one._prompt_length = 6_500
    assert one.status_line(80) == "reading the prompt, 2,048 of 6,500 tokens"
    assert one.status_line(18) == "reading the prompt"


def test_whoever_presses_on_ends_one_reply_and_keeps_it(
    runner: SignalRunner, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        press()

    monkeypatch.setattr(chat, "say", say)
    agent = SlowAgent(while_stopping=press)
    assert hold_conversation(runner, agent, "one", "two", "/help x") == [
        "one",
        "word",
        "two",
        "word",
    ]
    refused = "error: /help takes no argument, but got 'x'"
    assert said == ["(stopped)", "(stopped)", refused, ""]
    assert agent.stopped == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_a_reply_begins_and_where_nothing_runs(
    runner: SignalRunner, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hold_conversation(runner, SlowAgent(), "\x03", "a long text", "one") == ["one", "word"]
    errors = capsys.readouterr().err
    assert errors.index("(Ctrl-D or /quit leaves)") < errors.index("(stopped; an empty line sends")


def test_a_message_whose_verifier_stays_away_is_sent_again_by_an_empty_line(
    runner: SignalRunner,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    errors = [GenerationError("gave up on the verifier", None)] * 2

    async def away_twice(generation: Any, view: Any, progress: Any) -> None:
        if errors:
            raise errors.pop()
        progress.parts.append("word")

    monkeypatch.setattr("edgespec.cli.device.stream", away_twice)
    found = hold_conversation(runner, SlowAgent(), "", "a question", "", "", "", "two")
    assert found == ["a question", "word", "two", "word"]
    assert capsys.readouterr().err.count("(an empty line sends your message again)") == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/foo", "unknown command '/foo'; /help lists the commands"),
        ("/quti", "did you mean /quit?"),
        ("/save", "/save needs the name of a file"),
        ("/reset now", "/reset takes no argument, but got 'now'"),
    ],
)
def test_what_is_no_command_says_what_would_be_one(line: str, said: str) -> None:
    with pytest.raises(ConversationError) as error:
        parse(line)
    assert said in str(error.value)


def test_a_conversation_reads_back_and_is_for_its_owner_alone(home: Path) -> None:
    kept = KeptFile()
    kept.write(TALK)
    assert read_record(kept.path) == TALK
    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.path.parent.stat().st_mode) == 0o700
    assert os.listdir(kept.path.parent) == [kept.path.name]
    assert kept.path.is_relative_to(home)
    assert TALK.prompt_messages == [{"role": "system", "content": "be brief"}, *TALK.messages]


def test_a_write_that_fails_leaves_the_file_as_it_was(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptFile()
    kept.write(TALK)

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConversationError, match="No space left"):
        kept.write(replace(TALK, system=""))
    monkeypatch.undo()
    assert read_record(kept.path) == TALK
    assert os.listdir(kept.path.parent) == [kept.path.name]


def test_two_chats_that_go_on_with_one_conversation_lose_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat._open_record(TALK, resume=True)[0] is TALK, "there is no earlier one"
    KeptFile().write(TALK)
    (record, one), (_, other) = (chat._open_record(Record(), resume=True) for _ in range(2))
    assert record == TALK
    one.write(replace(TALK, system="one"))
    other.write(replace(TALK, system="other"))
    one.write(replace(TALK, system="one at last"))
    assert sorted(chat.kept_conversations()) == sorted([one.path, other.path])
    assert read_record(one.path).system == "one at last"
    assert read_record(other.path).system == "other"
    monkeypatch.setattr(chat, "MAX_KEPT", 1)
    last = chat.kept_conversations()[-1]
    chat._open_record(Record(), resume=False)
    assert chat.kept_conversations() == [last]


GOOD = {"format": "edgespec-conversation", "version": 1, "messages": []}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(GOOD | {"version": 9}), "its format is not"),
        (json.dumps(GOOD | {"messages": [{"role": "root", "content": ""}]}), r"\[0\] must have a"),
        (json.dumps(GOOD | {"messages": [{"role": "user"}]}), "and text as content"),
        (json.dumps(GOOD | {"system": "\ud800"}), "surrogates not allowed"),
        ("[" * 100_000, "not a conversation file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConversationError, match=said) as error:
        read_record(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_missing_or_endless_is_not_read(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "x.json", "No such file"), (Path("/dev/zero"), "at most 16777")):
        with pytest.raises(ConversationError, match=said):
            read_record(path)


def test_what_was_typed_is_found_again_and_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "chat_history"
    entries = [f"message {number}\nof two lines" for number in range(50)]
    for entry in entries:
        TypedHistory(path).store_string(entry)
    assert list(FileHistory(str(path)).load_history_strings())[::-1] == entries
    assert path.stat().st_mode & 0o777 == 0o600
    full = TypedHistory(Path("/dev/full"))
    full.append_string("one")
    assert full.get_strings() == ["one"]


# --- on a terminal --------------------------------------------------------------------------------

COUNT = 30
TEXT = ToyTokenizer()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with start_daemon("--pass-ms", "20") as (where, _):
        yield where


def expected_reply(prompt: str) -> str:
    sampling = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    return TEXT.decode(toy_text(TEXT.encode(prompt), sampling))


def chat_command(address: str, home: Path, *options: str, count: int = COUNT) -> tuple[str, ...]:
    where = ("--verifier", address, "--draft", "toy", "-n", str(count))
    # The verifier waits for drafts, so that the line of numbers counts some.
    settings = ("--set", "sampling.ignore_eos=true", "--set", "policy.run_ahead=never")
    return ("chat", *where, *settings, *options)


def quit_chat(terminal: Terminal) -> int:
    terminal.type("/quit\r")
    return terminal.wait_for_exit()


def test_one_message_is_answered_and_ends_the_command(address: str, home: Path) -> None:
    command = chat_command(address, home)
    asked = run_command(*command, "hello")
    piped = run_command(*command, "-", stdin="hello")
    assert (asked.exit_code, asked.stdout) == (0, expected_reply("hello ") + "\n")
    assert (piped.exit_code, piped.stdout) == (0, asked.stdout)
    assert "talking with" not in asked.stderr
    assert not home.exists()  # nothing is kept


def test_one_message_continues_the_last_conversation(address: str, home: Path) -> None:
    command = chat_command(address, home, "--continue")
    first = run_command(*command, "hello")
    second = run_command(*command, "more")
    reply = first.stdout.rstrip("\n")
    assert second.stdout == expected_reply(f"hello {reply} more ") + "\n"
    (kept,) = (home / "conversations").iterdir()
    assert len(read_record(kept).messages) == 4


def test_lines_from_a_pipe_get_their_replies_alone(address: str, home: Path) -> None:
    result = run_command(*chat_command(address, home), stdin="hello\n")
    assert (result.exit_code, result.stdout) == (0, expected_reply("hello ") + "\n")


def test_ctrl_c_in_the_one_reply_ends_the_command(runner: SignalRunner, home: Path) -> None:
    anything: Any = None
    agent: Any = SlowAgent()
    text: Any = Text()
    one = chat.Conversation(agent, text, AgentConfig(), runner, INFO, anything, Record())
    with pytest.raises(KeyboardInterrupt):
        one.answer("one")
    assert agent.stopped == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_several_lines_a_history_and_going_on(address: str, tmp_path: Path) -> None:
    first = expected_reply("hello\nworld ")
    with on_terminal(*chat_command(address, tmp_path), XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for(address)  # the line of numbers below the prompt
        terminal.type("hello\x1b\rworld\r")
        shown = terminal.wait_for(first)
        assert "> hello\n  world" in shown
        terminal.wait_for("accepted")
        terminal.type("/stats\r")
        terminal.wait_for("this chat: 30 tokens in 1 reply,")
        assert quit_chat(terminal) == 0
        assert "\x1b[?25l" in terminal.said
    (kept,) = (tmp_path / "edgespec/conversations").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    said = json.loads(kept.read_text())
    assert [one["content"] for one in said["messages"]] == ["hello\nworld", first]
    history = tmp_path / "edgespec/chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+hello\n+world" in history.read_text()
    again = ("--continue",)
    with on_terminal(
        *chat_command(address, tmp_path, *again), XDG_STATE_HOME=str(tmp_path)
    ) as terminal:
        terminal.wait_for("continuing a conversation of 2 messages")
        terminal.wait_for(address)
        terminal.type("more\r")
        terminal.wait_for(expected_reply(f"hello\nworld {first} more "))
        assert quit_chat(terminal) == 0
    (kept,) = (tmp_path / "edgespec/conversations").iterdir()
    assert len(json.loads(kept.read_text())["messages"]) == 4


@pytest.mark.slow
def test_ctrl_c_ends_a_reply_and_keeps_what_came(address: str, tmp_path: Path) -> None:
    command = chat_command(address, tmp_path, count=3000)
    with on_terminal(*command, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for(address)
        terminal.type("hello\r")
        terminal.wait_for("accepted")
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
        saved = tmp_path / "saved.json"
        terminal.type(f"/save {saved}\r")
        terminal.wait_for("2 messages written")
        assert quit_chat(terminal) == 0
    reply = json.loads(saved.read_text())["messages"][1]["content"]
    assert 0 < len(reply) < 3000
    assert expected_reply("hello ")[: len(reply)] == reply[:COUNT]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("typing", [True, False])
def test_a_signal_leaves_the_terminal_as_it_was(
    address: str, tmp_path: Path, typing: bool, number: signal.Signals
) -> None:
    command = chat_command(address, tmp_path, count=3000)
    with on_terminal(*command, XDG_STATE_HOME=str(tmp_path)) as terminal:
        before = terminal.modes
        terminal.wait_for(address)
        if not typing:
            terminal.type("hello\r")
            terminal.wait_for("accepted")
        assert terminal.modes != before
        terminal.process.send_signal(number)
        assert terminal.wait_for_exit() == 128 + number
        assert terminal.modes == before
        assert "Traceback" not in terminal.said


@pytest.mark.slow
def test_bytes_that_are_no_text_cost_one_message(address: str, tmp_path: Path) -> None:
    """A terminal that is set to another encoding sends such bytes."""
    with on_terminal(*chat_command(address, tmp_path), XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for(address)
        terminal.type(b"caf\xe9\r")
        terminal.wait_for("your message is not UTF-8")
        terminal.type("hello\r")
        terminal.wait_for(expected_reply("hello "))
        assert quit_chat(terminal) == 0
    (kept,) = (tmp_path / "edgespec/conversations").iterdir()
    said = json.loads(kept.read_text())["messages"]
    assert [one["content"] for one in said] == ["hello", expected_reply("hello ")]
