"""A reply as rendered markdown: finished blocks are printed once, the last one grows in place.

Below the open block stands a line with the numbers of the moment. The open block shows its last
lines only where it is higher than the terminal; once it is finished, all of it is printed. On a
terminal too narrow for markdown the text stands as it came.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

from rich.cells import chop_cells
from rich.console import Console
from rich.markdown import Markdown

from edgespec.cli.talk.live_region import LiveRegion
from edgespec.cli.talk.markdown_blocks import BlockSplitter
from edgespec.core.protocol.checks import printable
from edgespec.core.protocol.messages import FinishReason
from edgespec.device.agent import Chunk

FRAME_S: Final = 0.1
# Columns for text; the last one of a terminal stays free, for what erases a line's rest would
# erase the letter in it. With fewer the renderer leaves letters out, of tables and code above all.
_LEAST_RENDERED: Final = 20
# A letter may take two.
_LEAST_DRAWN: Final = 2
_TAB: Final = 4


class MarkdownView:
    """A ``View`` on a terminal. ``status`` makes the last line for a width in columns."""

    def __init__(
        self,
        status: Callable[[int], str],
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        size: tuple[int, int] | None = None,
    ) -> None:
        self._out = out or sys.stdout
        width, height = size or (None, None)
        self._console = Console(
            file=self._out, force_terminal=True, highlight=False, width=width, height=height
        )
        self._status, self._clock = status, clock
        self._splitter = BlockSplitter()
        self._region = LiveRegion(self._out)
        self._frame_at = -FRAME_S
        self._size = self._console.size
        self._context_full = False

    def show(self, chunk: Chunk) -> None:
        self._context_full = chunk.finish is FinishReason.CONTEXT
        blocks = self._splitter.push(printable(chunk.text))
        if blocks:
            above = [line for block in blocks for line in self._rendered(block, gap=True)]
            self._draw(above)
        else:
            self.tick()

    def tick(self) -> None:
        """Draw the frame anew, if it is time to."""
        if self._clock() - self._frame_at >= FRAME_S:
            self._draw([])

    def end(self) -> None:
        self._region.clear()
        rest = self._splitter.finish()
        if rest.strip():
            for line in self._rendered(rest):
                self._out.write(f"{line}\n")
        self._out.flush()
        if self._context_full:
            print("the text ends here: the model's context is full", file=sys.stderr)
        self._context_full = False

    def _draw(self, above: list[str]) -> None:
        self._frame_at = self._clock()
        size = self._console.size
        if size != self._size:  # lines were wrapped anew: nobody knows where the region begins
            self._region.let_go()
            self._size = size
        if self._width < _LEAST_DRAWN:  # no line fits: the terminal cuts what is finished
            self._region.let_go()
            self._out.write("".join(f"{line}\n" for line in above))
            self._out.flush()
            return
        room = max(1, size.height - 3)
        lines = self._rendered(self._tail(room))[-room:]
        status = self._status(self._width)
        self._region.draw([*lines, f"\x1b[2m{status}\x1b[0m"] if status else lines, above)

    def _tail(self, room: int) -> str:
        """Of the open block as much as may be seen: rendering all of a long code block ten times a
        second would take ever longer."""
        text, opener = self._splitter.open, self._splitter.fence_opener
        lines = text.split("\n")
        if not opener or len(lines) <= room + 2:
            return text
        return opener + "\n".join(lines[-room:])

    def _rendered(self, text: str, *, gap: bool = False) -> list[str]:
        """The lines of a block; ``gap``: with an empty one behind it, as between paragraphs."""
        if not text.strip():
            return []
        if self._width < _LEAST_RENDERED:
            lines = self._wrapped(text.strip("\n"))
            return [*lines, ""] if gap else lines
        try:
            with self._console.capture() as captured:
                self._console.print(
                    Markdown(text, code_theme="ansi_dark", hyperlinks=False), width=self._width
                )
            lines = [line.rstrip() for line in captured.get().split("\n")]
        except Exception:  # a text that a renderer stumbles over is still a text
            lines = self._wrapped(text)
        while lines and not lines[-1].strip():
            lines.pop()
        return [*lines, ""] if gap else lines

    def _wrapped(self, text: str) -> list[str]:
        """The text itself, in lines that fit."""
        width = max(_LEAST_DRAWN, self._width)
        lines = text.expandtabs(_TAB).split("\n")
        return [part for line in lines for part in chop_cells(line.rstrip(), width) or [""]]

    @property
    def _width(self) -> int:
        return self._console.size.width - 1
