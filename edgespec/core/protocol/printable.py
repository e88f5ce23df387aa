"""Text of a stranger is made harmless before a person sees it.

A fault's message, a model's name and the generated text itself come from the other end of a link.
Shown as they are, their control characters could move a terminal's cursor, change its title or
hide what stands before them. ``one_line`` is for messages, ``printable`` for text with lines.
"""

from __future__ import annotations

from typing import Final

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
MAX_MESSAGE_LENGTH: Final = 1000
# What text may hold although it is not printable: lines, columns, and the joiners that emoji and
# Indic scripts are written with.
_HARMLESS: Final = frozenset("\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}")


def printable(text: str) -> str:
    """``text`` with U+FFFD for every control or invisible character but newline, tab and the
    joiners. Its length stays."""
    if text.isprintable():  # as nearly always
        return text
    return "".join(c if c.isprintable() or c in _HARMLESS else REPLACEMENT for c in text)


def one_line(message: str) -> str:
    """``message`` as one printable line of at most ``MAX_MESSAGE_LENGTH`` characters."""
    short = message[:MAX_MESSAGE_LENGTH]
    more = "…" if len(message) > MAX_MESSAGE_LENGTH else ""
    return printable(" ".join(short.split())) + more
