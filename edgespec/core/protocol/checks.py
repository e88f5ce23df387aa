"""Checks of numbers against ranges, of moves against tables, and of strangers' texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from enum import Enum
from typing import Any, Final, TypeVar


def bounded(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """The value lies in [low, high], or in (low, high] where ``open_low``.

    Raises ``ValueError`` with the name, the value and the range; NaN lies in no range."""
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} is {value}, but must be in {bracket}{low}, {high}]")


def limited(default: Any, low: float, high: float) -> Any:
    """A field whose value lies in [low, high], each one of a tuple's; the default always may."""
    return field(default=default, metadata={"limits": (low, high)})


def among(default: Any, known: tuple[object, ...]) -> Any:
    """A field whose value is one of these."""
    return field(default=default, metadata={"known": known})


def check_limits(section: Any) -> None:
    """Raises ``ValueError`` that names the field, its value and its limits."""
    for one in fields(section):
        value = getattr(section, one.name)
        if value == one.default:
            continue
        if "limits" in one.metadata:
            for number in value if isinstance(value, tuple) else (value,):
                bounded(one.name, number, *one.metadata["limits"])
        elif "known" in one.metadata and value not in (known := one.metadata["known"]):
            names = ", ".join(str(one) for one in known if one != "")
            empty = ", or left out" if "" in known else ""
            raise ValueError(f"{one.name} is {value!r}, but must be one of {names}{empty}")


class Section:
    """A dataclass that asks no more of its fields than their limits."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_limits(self)


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
    return printable(" ".join(short.split())) + ("…" if len(message) > MAX_MESSAGE_LENGTH else "")


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
