"""A trace file as bounded lines, and errors that say where in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgespec_sim.traces.network_trace import TraceError

MAX_FILE_BYTES: Final = 2**28


@dataclass(frozen=True, slots=True)
class TraceText:
    """The lines of one file; line numbers count from 1."""

    path: Path
    name: str
    lines: tuple[str, ...]
    ends_cut: bool
    """The last line has no line end, so it may be half a line: a recording that was killed."""

    def error(self, number: int, expected: str) -> TraceError:
        line = self.lines[number - 1] if 1 <= number <= len(self.lines) else ""
        return TraceError(f"{self.path}:{number}: expected {expected}, found {line[:80]!r}")

    def number(self, number: int, text: str, what: str, low: float = 0.0) -> float:
        """``text`` of line ``number`` as a finite number of at least ``low``."""
        try:
            value = float(text)
        except ValueError:
            raise self.error(number, f"{what} as a number") from None
        if not low <= value < math.inf:
            raise self.error(number, f"{what} finite and at least {low:g}")
        return value

    def may_be_cut(self, number: int) -> bool:
        return self.ends_cut and number == len(self.lines)

    def no_rows(self) -> TraceError:
        return TraceError(f"{self.path}: holds no measurement")


def read_bytes(path: Path) -> bytes:
    """The whole file; raises ``TraceError`` when it is missing or too large."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise TraceError(f"{path}: {size} bytes, but at most {MAX_FILE_BYTES} go")
        return path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error


def as_text(path: Path, name: str, data: bytes) -> TraceText:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(f"{path}:{line}: expected UTF-8 text, found byte {error.start}") from None
    lines = tuple(line.rstrip("\r") for line in text.split("\n"))
    ends_cut = lines[-1] != ""
    return TraceText(path, name, lines if ends_cut else lines[:-1], ends_cut)
