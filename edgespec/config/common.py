"""What the configurations of both roles share: defaults, and checks that name the field.

Every section checks itself: ``ValueError`` names the field, the value and the range.
"""

from __future__ import annotations

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 7420
DEFAULT_ADDRESS = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
HASHED, PLAIN = "hashed", "plain"
TRACE_TOKENS = (HASHED, PLAIN)
MINUTE_MS = 60_000.0


def one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        names = ", ".join(str(one) for one in known if one != "")
        empty = ", or left out" if "" in known else ""
        raise ValueError(f"{name} is {value!r}, but must be one of {names}{empty}")


def not_empty(name: str, value: str) -> None:
    if not value.strip():
        raise ValueError(f"{name} is empty")
