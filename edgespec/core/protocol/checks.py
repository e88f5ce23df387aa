"""Checks of numbers against ranges, of moves against tables, and of strangers' texts."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, TypeVar


def bounded(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """The value lies in [low, high], or in (low, high] where ``open_low``.

    Raises ``ValueError`` with the name, the value and the range; NaN lies in no range.
    """
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} is {value}, but must be in {bracket}{low}, {high}]")


REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
MAX_MESSAGE_LENGTH: Final = 1000
# Of a stranger's text, whose control characters could move a terminal's cursor, that much is shown
# although it is not printable: lines, columns, and the joiners of emoji and Indic scripts.
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


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold it: an escape in JSON, or the bytes of an argument that was in another
    encoding, may bring half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


State = TypeVar("State", bound=Enum)


def transition(moves: Mapping[tuple[State, State], str], source: State, target: State) -> State:
    """``target``, to which a session goes along a move of its table (``docs/session-states.md`` is
    drawn from it). Staying in a state is always allowed."""
    assert source is target or (source, target) in moves, f"{source} -> {target}"
    return target
