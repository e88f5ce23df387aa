"""What a chunk looks like on a terminal and in a pipe. Oracle: the bytes, by hand."""

from __future__ import annotations

import pytest

from edgespec.cli.device import JsonView, Progress, TextView, summary
from edgespec.core.device.events import TokenKind
from edgespec.core.protocol.messages import FinishReason
from edgespec.device.agent import Chunk, Piece

EVIL = "a\x1b]0;owned\x07b\n"
HARMLESS = "a\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}b\n"


def chunk(text: str, finish: FinishReason | None = None) -> Chunk:
    return Chunk(3, (1,), (Piece(text, TokenKind.DECODED),), finish)


@pytest.mark.parametrize(
    ("color", "terminal", "shown"),
    [(False, False, EVIL), (False, True, HARMLESS), (True, True, HARMLESS)],
)
def test_a_text_cannot_control_the_terminal(
    color: bool, terminal: bool, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    view = TextView(color, terminal)
    view.show(chunk(EVIL))
    view.end()
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("finish", list(FinishReason))
def test_a_full_context_is_said_beside_the_text(
    finish: FinishReason, capsys: pytest.CaptureFixture[str]
) -> None:
    view = TextView(color=False)
    view.show(chunk("text", finish))
    view.end()
    out, err = capsys.readouterr()
    assert out == "text\n"
    assert ("context is full" in err) == (finish is FinishReason.CONTEXT)
    progress = Progress()
    progress.add(chunk("text", finish))
    assert f"ended by {finish.value}" in summary(progress, None)
    JsonView().show(chunk("text", finish))
    assert f'"finish": "{finish.value}"' in capsys.readouterr().out
