"""Markdown that grows is cut into blocks that will not change any more, and the open rest.

A block is what a renderer can draw without what follows: a heading, a paragraph, a whole list, a
fenced code block. Its end is known with the line that ends it, so a block is handed out once and
never again. Blocks and rest together are the text, character for character, however it was cut.
"""

from __future__ import annotations

import re
from typing import Final

_FENCE: Final = re.compile(r"(?P<indent>\s*)(?P<mark>`{3,}|~{3,})(?P<info>[^\n]*)")
_HEADING: Final = re.compile(r" {0,3}#{1,6}(\s|$)")
_ITEM: Final = re.compile(r"\s*([-*+]|\d{1,9}[.)])\s")
_INDENTED: Final = re.compile(r"( {2}|\t)")


class BlockSplitter:
    """Text in, finished blocks out. ``open`` is the block that may still grow."""

    def __init__(self) -> None:
        self._block: list[str] = []
        """Whole lines of the open block."""
        self._partial = ""
        self._fence = ""
        """What closes the code block that is open: its marks."""
        self._in_list = self._has_content = self._after_blank = False

    @property
    def open(self) -> str:
        return "".join(self._block) + self._partial

    @property
    def fence_opener(self) -> str:
        """The line that opened the code block, if the open block is one; else empty."""
        if not self._fence or self._in_list:
            return ""
        return next((line for line in self._block if line.strip()), "")

    def push(self, text: str) -> list[str]:
        """The blocks that ``text`` completes, in order."""
        found: list[str] = []
        lines = (self._partial + text).split("\n")
        self._partial = lines.pop()
        for line in lines:
            self._take(line + "\n", found)
        return found

    def finish(self) -> str:
        """The rest, which ends here; the splitter starts anew."""
        rest = self.open
        self.__init__()  # type: ignore[misc]
        return rest

    def _take(self, line: str, found: list[str]) -> None:
        if self._fence:
            self._block.append(line)
            if _closes(line, self._fence):
                self._fence = ""
                if not self._in_list:
                    self._end(found)
            return
        if not line.strip():
            self._block.append(line)
            self._after_blank = True
            if self._has_content and not self._in_list:
                self._end(found)
            return
        if self._in_list and self._after_blank and not self._belongs_to_list(line):
            self._end(found)
        self._after_blank = False
        if (fence := _FENCE.match(line)) and _opens(fence):
            if self._has_content and not self._in_list:
                self._end(found)
            self._fence = fence["mark"]
        elif _HEADING.match(line) and not self._in_list:
            if self._has_content:
                self._end(found)
            self._block.append(line)
            self._end(found)
            return
        elif _ITEM.match(line):
            self._in_list = True
        self._has_content = True
        self._block.append(line)

    @staticmethod
    def _belongs_to_list(line: str) -> bool:
        return bool(_ITEM.match(line) or _INDENTED.match(line))

    def _end(self, found: list[str]) -> None:
        found.append("".join(self._block))
        self._block.clear()
        self._in_list = self._has_content = self._after_blank = False


def _opens(fence: re.Match[str]) -> bool:
    """A line of inline code such as ```x``` opens nothing."""
    return fence["mark"][0] == "~" or "`" not in fence["info"]


def _closes(line: str, mark: str) -> bool:
    said = line.strip()
    return len(said) >= len(mark) and set(said) == {mark[0]}
