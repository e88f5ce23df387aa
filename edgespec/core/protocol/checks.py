"""Checks of numbers against ranges, of state changes against tables, and of untrusted text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from enum import Enum
from typing import Any, Final, TypeVar


def check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    """Check that ``value`` lies in [low, high], or in (low, high] if ``open_low``.

    Raises ``ValueError`` with the name, the value and the range. NaN lies in no range."""
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} is {value}, but must be in {bracket}{low}, {high}]")


def range_field(default: Any, low: float, high: float) -> Any:
    """Return a dataclass field whose value must lie in [low, high].

    Each element of a tuple is checked. The default value is always allowed."""
    return field(default=default, metadata={"limits": (low, high)})


def choice_field(default: Any, known: tuple[object, ...]) -> Any:
    """Return a dataclass field whose value must be one of ``known``."""
    return field(default=default, metadata={"known": known})


def check_limits(section: Any) -> None:
    """Check the fields of ``section`` that ``range_field`` or ``choice_field`` made.

    Raises ``ValueError`` with the field, its value and its limits."""
    for one in fields(section):
        value = getattr(section, one.name)
        if value == one.default:
            continue
        if "limits" in one.metadata:
            for number in value if isinstance(value, tuple) else (value,):
                check_range(one.name, number, *one.metadata["limits"])
        elif "known" in one.metadata and value not in (known := one.metadata["known"]):
            names = ", ".join(str(one) for one in known if one != "")
            empty = ", or left out" if "" in known else ""
            raise ValueError(f"{one.name} is {value!r}, but must be one of {names}{empty}")


class Section:
    """Base class of a dataclass whose only check is that its fields keep their limits."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_limits(self)


REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
MAX_MESSAGE_LENGTH: Final = 1000
# Characters of untrusted text that are kept although they are not printable: line breaks, tabs, and
# the joiners of emoji and Indic scripts. Other control characters could move a terminal's cursor.
_HARMLESS: Final = frozenset("\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}")


def make_printable(text: str) -> str:
    """Replace every control or invisible character of ``text`` by U+FFFD.

    Newlines, tabs and the joiners are kept. The length does not change."""
    if text.isprintable():  # the usual case
        return text
    return "".join(c if c.isprintable() or c in _HARMLESS else REPLACEMENT for c in text)


def make_one_line(message: str) -> str:
    """Return ``message`` as one printable line of at most ``MAX_MESSAGE_LENGTH`` characters."""
    short = message[:MAX_MESSAGE_LENGTH]
    return make_printable(" ".join(short.split())) + (
        "…" if len(message) > MAX_MESSAGE_LENGTH else ""
    )


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode ``text``.

    It cannot if the text has half of a surrogate pair. An escape in JSON, or a command-line
    argument in another encoding, may bring one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


State = TypeVar("State", bound=Enum)


def check_transition(
    moves: Mapping[tuple[State, State], str], source: State, target: State
) -> State:
    """Return ``target``, the state that a session enters.

    ``moves`` is the session's transition table, from which ``docs/session-states.md`` is drawn; a
    change that is not in it fails an assertion. Staying in a state is always allowed."""
    assert source is target or (source, target) in moves, f"{source} -> {target}"
    return target
