"""The last lines of a terminal, drawn over and over without a flicker.

A frame is written in one go, and only what changed: a line that is the same is passed over, another
one is overwritten and its rest erased, so nothing is ever blank for a moment. Terminals that know
synchronized output (mode 2026) show each frame at once; others ignore the two marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Final

_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
_ERASE_LINE: Final = "\x1b[K"
_ERASE_BELOW: Final = "\x1b[J"


class LiveRegion:
    """Draws on ``out``. No line may be wider than the terminal, nor the region as high as it."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._shown: list[str] = []

    def draw(self, lines: Sequence[str], above: Sequence[str] = ()) -> None:
        """Show ``lines`` in the region's place; ``above`` is put before it and stays for good."""
        if not above and list(lines) == self._shown:
            return
        parts = [_BEGIN, self._to_top()]
        shown = self._shown
        if above:
            parts += [f"{line}{_ERASE_LINE}\n" for line in above]
            shown = []
        fewer = bool(above) or len(lines) < len(shown)
        last = len(lines) - 1
        for index, line in enumerate(lines):
            parts.append("\n" if index else "")
            same = index < len(shown) and shown[index] == line
            if not same or (fewer and index == last):  # erasing below begins behind the last line
                parts.append(f"\r{line}{_ERASE_LINE}")
        parts.append(_ERASE_BELOW if fewer else "")
        parts.append("\r" + _END)
        self._write("".join(parts))
        self._shown = list(lines)

    def clear(self) -> None:
        """The region is gone; the cursor is where it began."""
        if self._shown:
            self._write(f"{_BEGIN}{self._to_top()}{_ERASE_BELOW}{_END}")
            self._shown = []

    def let_go(self) -> None:
        """What stands there stays; the region begins anew below it."""
        if self._shown:
            self._write("\n")
            self._shown = []

    def _to_top(self) -> str:
        up = len(self._shown) - 1
        return "\r" + (f"\x1b[{up}A" if up > 0 else "")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
