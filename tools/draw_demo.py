"""Draw a recorded terminal as SVG: ``python -m tools.draw_demo RECORD --out FILE.svg``.

A record is what ``script`` of util-linux writes: the command, the date and the exit status stand
in its first and last line, between them every byte that the terminal got. Nothing is left out or
put right; a line longer than the terminal is wide goes on in the next one, as it did there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.ansi import AnsiDecoder
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style

from tools.svg import MONO, PictureError, command, picture, read, text

COLUMNS: Final = 80
_CELL, _ROW, _MARGIN, _BAR = 8.4, 19, 16, 36
_HEAD = re.compile(
    r'Script started on (?P<date>\S+) [^\n]*?\[COMMAND="(?P<command>.*?)"'
    r'(?: (?:TERM|TTY|COLUMNS|LINES)="| <not executed|\])[^\n]*\n'
)
_FOOT = re.compile(r'\n?Script done on [^\n]*\[COMMAND_EXIT_CODE="(?P<status>\d+)"[^\n]*\s*\Z')
# The demo's; what else a terminal may be sent stays ink.
_NUMBERS: Final = {1: "red", 2: "green"}
_COLORS: Final = (
    ("green", "#1a7f37", "#57c76a"),
    ("red", "#cf222e", "#ff7b72"),
)
_STYLE: Final = f"""
text {{ font: 14px {MONO}; fill: var(--ink); white-space: pre; }}
.green {{ fill: var(--green); }} .red {{ fill: var(--red); }}
.dim {{ fill: var(--soft); }} .bold {{ font-weight: 700; }} .italic {{ font-style: italic; }}
"""


@dataclass(frozen=True, slots=True)
class Recording:
    """What one command wrote to a terminal."""

    command: str
    date: str
    lines: tuple[str, ...]
    """With their escape sequences, without line ends."""


@dataclass(frozen=True, slots=True)
class Run:
    """Characters of one style, beside each other on one row."""

    column: int
    characters: str
    style: Style


def recording(path: Path) -> Recording:
    """Raises ``PictureError`` for what ``script`` did not write or a command that failed."""
    content = read(path).replace("\r\n", "\n")
    head = _HEAD.match(content)
    foot = _FOOT.search(content)
    if head is None or foot is None:
        missing = "its first line" if head is None else "its last line: it was cut short"
        raise PictureError(f"{path}: not a whole record of `script -c COMMAND`, by {missing}")
    if foot["status"] != "0":
        raise PictureError(f"{path}: the command failed with exit code {foot['status']}")
    lines = content[head.end() : max(head.end(), foot.start())].strip("\n").split("\n")
    if not any(line.strip() for line in lines):
        raise PictureError(f"{path}: the command wrote nothing")
    return Recording(head["command"], head["date"], tuple(lines))


def draw(path: Path) -> str:
    """The picture of the record at ``path``. Raises ``PictureError``."""
    seen = recording(path)
    rows = list(_rows((f"$ {seen.command}", *seen.lines)))
    width = round(COLUMNS * _CELL) + 2 * _MARGIN
    height = _BAR + _MARGIN + _ROW * len(rows) + _MARGIN // 2
    body = [
        f'<path d="M1 {_BAR}H{width - 1}" stroke="var(--line)"/>',
        *(
            f'<circle cx="{_MARGIN + 6 + 20 * i}" cy="{_BAR / 2:g}" r="6" fill="var(--line)"/>'
            for i in range(3)
        ),
        f'<text class="dim" x="{width - _MARGIN}" y="{_BAR / 2 + 5:g}" text-anchor="end">'
        f"recorded {text(seen.date)}</text>",
    ]
    for number, runs in enumerate(rows, start=1):
        baseline = _BAR + _MARGIN // 2 + _ROW * number - 5
        body += [part for run in runs for part in _drawn(run, baseline)]
    title = f"{seen.command}, in a terminal"
    plain = "\n".join("".join(run.characters for run in runs) for runs in rows)
    return picture((width, height), title, plain, _STYLE, body, _COLORS)


def _rows(lines: Sequence[str]) -> Iterator[list[Run]]:
    """The rows of the terminal, of styled runs each."""
    decoder, console = AnsiDecoder(), Console(color_system="truecolor", width=COLUMNS)
    for line in lines:
        # A carriage return begins the row again: what stood there is written over.
        decoded = decoder.decode_line(line.rsplit("\r", 1)[-1].expandtabs(8))
        row: list[Run] = []
        column = 0
        for segment in decoded.render(console):
            style = segment.style or Style.null()
            for part in _split(segment.text, column):
                if column + cell_len(part) > COLUMNS:
                    yield row
                    row, column = [], 0
                if part:
                    row.append(Run(column, part, style))
                    column += cell_len(part)
        yield row


def _split(characters: str, column: int) -> Iterator[str]:
    """Parts that end where a row of ``COLUMNS`` cells ends; no wide character is cut in two."""
    part = ""
    for character in characters:
        if column + cell_len(character) > COLUMNS:
            yield part
            part, column = "", 0
        part += character
        column += cell_len(character)
    yield part


def _drawn(run: Run, baseline: int) -> Iterator[str]:
    characters = run.characters.strip(" ")
    if not characters:
        return
    blank = len(run.characters) - len(run.characters.lstrip(" "))
    left = _MARGIN + (run.column + blank) * _CELL
    length = cell_len(characters) * _CELL
    names = " ".join(_classes(run.style))
    if set(characters) == {"─"}:  # fonts leave gaps between them
        yield f'<path d="M{left:.1f} {baseline - 5}h{length:.1f}" stroke="var(--soft)"/>'
        return
    yield (
        f'<text{f" class={chr(34)}{names}{chr(34)}" if names else ""} x="{left:.1f}"'
        f' y="{baseline}" textLength="{length:.1f}">{text(characters)}</text>'
    )


def _classes(style: Style) -> Iterator[str]:
    if style.color is not None and style.color.number in _NUMBERS:
        yield _NUMBERS[style.color.number]
    for name in ("dim", "bold", "italic"):
        if getattr(style, name):
            yield name


if __name__ == "__main__":
    command(
        draw,
        {
            "description": "Draw what a command wrote to a terminal as SVG.",
            "record": "what `script -qec COMMAND RECORD` wrote",
        },
    )
