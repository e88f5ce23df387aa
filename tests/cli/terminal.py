"""A terminal for tests: a pseudo-terminal with a child in it, and a screen that reads escapes.

The screen knows what our programs write: moves of the cursor, erasing, and newlines; all other
escape sequences have no place on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

from rich.cells import cell_len

from tests.kit.live_verifier import environment
from tests.sources import ROOT

_ESCAPE = re.compile(
    r"\x1b(?:\[([0-9;?<>=]*)([A-Za-z])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[=>78()][AB0]?)"
)
_WHERE = "\x1b[6n"
# Standard input becomes the terminal that sends the child its signals. The child does so itself: no
# Python may run between a fork and the child's program where other threads hold locks.
_ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'edgespec', *sys.argv[1:]])"
)
_LONGEST = 32
ROWS = 24


_FILLER = "\0"


class Screen:
    """What a terminal shows that got this text; lines that scrolled out are kept above.

    With ``columns`` it goes on in the next line behind the last column, once another letter comes;
    until then the cursor is on the last letter, as xterm has it, and erasing erases that.
    """

    def __init__(self, columns: int = 0) -> None:
        self.columns = columns
        self.lines = [""]
        self.row = self.column = 0
        self._cut = ""
        """An escape sequence of which the rest has not come yet."""

    @property
    def cursor(self) -> tuple[int, int]:
        """Row and column as a terminal reports them, from 1."""
        return self.row - max(0, len(self.lines) - ROWS) + 1, self.column + 1

    def feed(self, text: str) -> None:
        text, self._cut = self._cut + text, ""
        begun = text.rfind("\x1b")
        if begun >= 0 and len(text) - begun < _LONGEST and not _ESCAPE.match(text, begun):
            text, self._cut = text[:begun], text[begun:]
        at = 0
        while at < len(text):
            if (found := _ESCAPE.match(text, at)) is not None:
                self._obey(found[1] or "", found[2] or "")
                at = found.end()
                continue
            self._put(text[at])
            at += 1

    @property
    def text(self) -> str:
        return "\n".join(line.replace(_FILLER, "").rstrip() for line in self.lines)

    def _put(self, letter: str) -> None:
        if letter == "\n":
            self._down(1)
        elif letter == "\r":
            self.column = 0
        elif letter == "\b":
            self.column = max(0, self.column - 1)
        elif letter >= " ":
            cells = letter + _FILLER * (cell_len(letter) - 1)
            if self.columns and self.column + len(cells) > self.columns:
                self.column = 0
                self._down(1)
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + cells + line[self.column + len(cells) :]
            self.column += len(cells)

    def _down(self, count: int) -> None:
        self.row += count
        while len(self.lines) <= self.row:
            self.lines.append("")

    def _obey(self, numbers: str, letter: str) -> None:
        if numbers.startswith(("?", ">", "<", "=")):
            return
        count = int(numbers.split(";")[0] or 0)
        if self.columns:
            self.column = min(self.column, self.columns - 1)
        match letter:
            case "A":
                self.row = max(0, self.row - max(1, count))
            case "B":
                self._down(max(1, count))
            case "C":
                self.column += max(1, count)
            case "D":
                self.column = max(0, self.column - max(1, count))
            case "G":
                self.column = max(0, count - 1)
            case "K":
                if count == 0:
                    self.lines[self.row] = self.lines[self.row][: self.column]
                elif count == 2:
                    self.lines[self.row] = ""
            case "J":
                self.lines[self.row] = self.lines[self.row][: self.column]
                del self.lines[self.row + 1 :]


class Terminal:
    """A child on a pseudo-terminal of so many columns and 24 rows."""

    def __init__(self, process: subprocess.Popen[bytes], number: int) -> None:
        self.process, self._number = process, number
        self.said = ""
        self._screen = Screen()

    def type(self, keys: str | bytes) -> None:
        os.write(self._number, keys.encode() if isinstance(keys, str) else keys)

    @property
    def modes(self) -> list[object]:
        """How the terminal is set: whether it echoes, and all the rest."""
        return termios.tcgetattr(self._number)

    def ended(self, within_s: float = 60.0) -> int:
        """The exit code, once the child has left."""
        with contextlib.suppress(AssertionError):
            self.until("\0", within_s)  # which no screen shows: all that is said is read
        return self.process.wait(within_s)

    def until(self, wanted: str, within_s: float = 60.0) -> str:
        """What the screen shows, once that holds ``wanted``; fails when it does not come."""
        deadline = time.monotonic() + within_s
        while wanted not in self._screen.text:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._number], [], [], max(0.0, left))
            try:
                data = os.read(self._number, 65536) if ready else b""
            except OSError:  # the child has gone
                data = b""
            assert data, f"{wanted!r} did not come; the screen:\n{self._screen.text}"
            text = data.decode(errors="replace")
            self.said += text
            self._screen.feed(text)
            if _WHERE in text:
                row, column = self._screen.cursor
                self.type(f"\x1b[{row};{column}R")
        return self._screen.text


@contextlib.contextmanager
def on_terminal(*arguments: str, columns: int = 80, **variables: str) -> Iterator[Terminal]:
    """``edgespec`` with these arguments on a terminal of its own; killed in the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    shown = {"TERM": "xterm-256color", "COLUMNS": "", "NO_COLOR": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_TERMINAL, *arguments],
        cwd=ROOT,
        env={**environment(), **shown, **variables},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
