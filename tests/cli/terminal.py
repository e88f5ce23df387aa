"""A terminal for tests: a pseudo-terminal with a child in it, and a screen that reads escapes.

The screen understands what our programs write: cursor moves, erasing, and newlines. It ignores all
other escape sequences.
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

from tests.kit.live_verifier import child_environment
from tests.sources import ROOT

_ESCAPE = re.compile(
    r"\x1b(?:\[([0-9;?<>=]*)([A-Za-z])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[=>78()][AB0]?)"
)
_WHERE = "\x1b[6n"
# Standard input becomes the terminal that sends signals to the child. The child sets this itself,
# because no Python code may run between a fork and the child's program while other threads hold
# locks.
_ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'edgespec', *sys.argv[1:]])"
)
_LONGEST = 32
ROWS = 24


_FILLER = "\0"


class Screen:
    """The contents of a terminal that received the given text; lines that scrolled out are kept
    above.

    If ``columns`` is set, text wraps behind the last column once another letter comes. Until then
    the cursor stays on the last letter, as in xterm, and erasing erases that letter.
    """

    def __init__(self, columns: int = 0) -> None:
        self.columns = columns
        self.lines = [""]
        self.row = self.column = 0
        self._cut = ""
        """An escape sequence whose rest has not come yet."""

    @property
    def cursor(self) -> tuple[int, int]:
        """Row and column, counted from 1, as a terminal reports them."""
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
    """A child on a pseudo-terminal with 24 rows."""

    def __init__(self, process: subprocess.Popen[bytes], number: int) -> None:
        self.process, self._number = process, number
        self.said = ""
        self._screen = Screen()

    def type(self, keys: str | bytes) -> None:
        os.write(self._number, keys.encode() if isinstance(keys, str) else keys)

    @property
    def modes(self) -> list[object]:
        """The settings of the terminal, such as echo."""
        return termios.tcgetattr(self._number)

    def wait_for_exit(self, within_s: float = 60.0) -> int:
        """Wait until the child has left, and return its exit code."""
        with contextlib.suppress(AssertionError):
            self.wait_for("\0", within_s)  # the screen never shows NUL, so this reads all output
        return self.process.wait(within_s)

    def wait_for(self, wanted: str, within_s: float = 60.0) -> str:
        """Return the screen's text once it holds ``wanted``; fail if that does not come."""
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
    """Run ``edgespec`` with these arguments on its own terminal, and kill it in the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    shown = {"TERM": "xterm-256color", "COLUMNS": "", "NO_COLOR": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_TERMINAL, *arguments],
        cwd=ROOT,
        env={**child_environment(), **shown, **variables},
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
