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


# Text of a stranger is made harmless before a person sees it.
#
# A fault's message, a model's name and the generated text itself come from the other end of a link.
# Shown as they are, their control characters could move a terminal's cursor, change its title or
# hide what stands before them. ``one_line`` is for messages, ``printable`` for text with lines.

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


# The one way in which a session changes its state: along a move of its table.
#
# ``core/device/transitions.py`` and ``core/verifier/session_events.py`` hold the tables, each move
# with its causes; ``docs/session-states.md`` is drawn from them.

State = TypeVar("State", bound=Enum)


def transition(moves: Mapping[tuple[State, State], str], source: State, target: State) -> State:
    """The result is ``target``. A move that is not in the table is a failed assertion; staying in
    a state is always allowed."""
    assert source is target or (source, target) in moves, f"{source} -> {target}"
    return target
