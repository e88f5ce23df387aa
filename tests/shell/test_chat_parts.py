"""The parts of the chat that need no terminal.

Oracle: the screen of a terminal after many small frames is that of one large one.
"""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.cli.chat import Conversation
from edgespec.cli.device import Progress, summary
from edgespec.cli.talk import reply_view as reply_view
from edgespec.cli.talk.editor import (
    Command,
    CommandError,
    Name,
    PlainEditor,
    command_help,
    is_command,
    message_of,
    parse,
)
from edgespec.cli.talk.record import Record
from edgespec.cli.talk.reply_view import MarkdownView, status_line
from edgespec.config import AgentConfig
from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.events import DraftCounters, TokenKind
from edgespec.device.agent import Chunk, GenerationStats, Piece
from edgespec.telemetry.agent_status import (
    AgentStatus,
    AgentTotals,
    DraftingStatus,
    MemoryStatus,
    VerifierState,
    VerifierStatus,
)
from tests.shell.terminal import Screen

REPLY = """# Title
A paragraph
of two lines.

- one

- two

  still two
1. three

```python
# no heading

x = 1
```
after
## Next
last"""


# --- the terminal -----------------------------------------------------------------------------


def on_a_terminal(text: str) -> str:
    """A terminal's driver makes a new line of a line feed."""
    return text.replace("\n", "\r\n")


def shown(text: str, step: int, columns: int = 40) -> tuple[str, str]:
    """What a terminal shows after a reply that came in pieces, and all that was written."""
    out, now = io.StringIO(), iter(range(100_000))
    size = (columns, 24)
    view = MarkdownView(lambda width: "numbers"[:width], out, lambda: float(next(now)), size)
    for start in range(0, len(text), step):
        piece = Piece(text[start : start + step], TokenKind.DECODED)
        view.show(Chunk(start, (1,), (piece,)))
    view.end()
    screen = Screen(columns)
    screen.feed(on_a_terminal(out.getvalue()))
    return screen.text, out.getvalue()


def test_a_reply_looks_the_same_however_it_came() -> None:
    whole, _ = shown(REPLY, len(REPLY))
    by_letter, written = shown(REPLY, 1)
    assert by_letter == whole
    assert "numbers" not in whole
    assert "numbers" in written
    for word in ("Title", "A paragraph of two lines.", "still two", "x = 1", "Next", "last"):
        assert whole.count(word) == 1, word
    assert "```" not in whole


NARROW = """\tx = supercalifragilistic

- 漢字と仮名 an item


| a | b |
|---|---|
| one | two |

"""


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 20, 21, 22])
def test_a_narrow_terminal_loses_and_repeats_no_letter(columns: int) -> None:
    """Where it is too narrow to draw markdown, the text stands there as it came."""
    reply = NARROW + REPLY
    if columns == 1:
        reply = "".join(letter for letter in reply if letter <= "~")  # no terminal shows others
    for step in (5, len(reply)):
        text, _ = shown(reply, step, columns)
        if columns <= 20:
            assert "".join(text.split()) == "".join(reply.split()), step
        for word in ("Title", "A", "paragraph", "still", "two", "no", "heading", "Next", "last"):
            assert word in "".join(text.split()), (word, step)


def test_a_reply_cannot_control_the_terminal() -> None:
    assert "\x1b]" not in shown("a\x1b]0;owned\x07 [x](http://e\x1bvil)", 3)[1]


def test_a_long_code_block_is_printed_once_and_whole() -> None:
    code = "```\n" + "".join(f"line {number}\n" for number in range(200)) + "```\n"
    text, _ = shown(code, 40)
    for number in range(200):
        assert text.split().count(str(number)) == 1


def test_a_text_that_no_renderer_takes_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*arguments: object, **options: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(reply_view, "Markdown", stumble)
    text, _ = shown("> " * 30 + "deep\n\nlast", 7)
    assert "".join(text.split()).endswith("deeplast")


# --- commands ---------------------------------------------------------------------------------


def test_commands() -> None:
    assert parse("/quit") == Command(Name.QUIT)
    assert parse("  /system  be brief ") == Command(Name.SYSTEM, "be brief")
    assert parse("/save a b.json") == Command(Name.SAVE, "a b.json")
    assert is_command("/x")
    assert not is_command("//x")
    assert message_of("//x") == "/x"
    assert all(name.value in command_help() for name in Name)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/foo", "unknown command '/foo'; /help lists the commands"),
        ("/quti", "did you mean /quit?"),
        ("/save", "/save needs the name of a file"),
        ("/reset now", "/reset takes nothing behind it, but got 'now'"),
    ],
)
def test_what_is_no_command_says_what_would_be_one(line: str, said: str) -> None:
    with pytest.raises(CommandError) as error:
        parse(line)
    assert said in str(error.value)


# --- the line of numbers ----------------------------------------------------------------------

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


def test_the_line_leaves_out_what_matters_least() -> None:
    assert status_line(STATUS, 120) == (
        "42.1 tok/s · accepted 78% · RTT 51 ms · memory 412/600.0 MiB · gpu-box:7420"
    )
    assert status_line(STATUS, 40) == "42.1 tok/s · accepted 78% · RTT 51 ms"
    assert status_line(STATUS, 12) == "42.1 tok/s"
    for width in range(100):
        assert len(status_line(STATUS, width)) <= width
    idle = replace(STATUS, running=0)
    assert status_line(idle, 12, 9.96) == "10.0 tok/s"
    assert status_line(idle, 13) == "accepted 78%"


def test_a_verifier_that_is_away_comes_first() -> None:
    gone = replace(STATUS.verifiers[0], state=VerifierState.AWAY, since_s=12.2)
    line = status_line(replace(STATUS, verifiers=(gone,)), 60)
    assert line.startswith("gpu-box:7420 away for 12 s · 42.1 tok/s")


def test_a_reply_has_one_acceptance() -> None:
    """The line of numbers and /stats; the policy's estimate may be another."""
    anything: Any = None
    for counters, line, said in (
        (DraftCounters(tried=100, hits=97), "accepted 97%", "acceptance 97%"),
        (DraftCounters(), "", "acceptance –"),
    ):
        stats = GenerationStats(counters, DraftEstimates())
        agent: Any = SimpleNamespace(stats=stats)
        source: Any = SimpleNamespace(snapshot=lambda after=0: STATUS)
        talk = Conversation(
            agent, anything, AgentConfig(), anything, anything, source, Record(), PlainEditor()
        )
        assert line in talk.line(120)
        assert ("accepted" in talk.line(120)) is bool(line)
        assert said in summary(Progress(), stats)
