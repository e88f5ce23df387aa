"""The trace of a run: one JSON object a line, for every event a session got and action it took.

Metrics, timelines, replay and golden tests read it. A line holds ``at_s`` (the side's monotonic
clock), ``side`` ("device" or "verifier"), ``session`` (a key or stream number), ``kind`` ("event"
or "action"), ``name`` (the class) and the fields of the class. Tokens are ids, never text.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self


class Tracer(Protocol):
    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        """Note one event or action; must not raise and must not keep ``item`` alive."""


class NoTrace:
    """Records nothing."""

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        return


class TraceFile:
    """Writes the trace to ``path``, replacing it. A context manager; buffered until ``close``."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        line = {
            "at_s": round(at_s, 6),
            "side": side,
            "session": session,
            "kind": kind,
            "name": type(item).__name__,
            **_plain_fields(item),
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _plain_fields(item: object) -> dict[str, Any]:
    if not is_dataclass(item):
        return {"value": str(item)}
    return {field.name: _plain(getattr(item, field.name)) for field in fields(item)}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {"name": type(value).__name__, **_plain_fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, int | float | str | bool | None) else str(value)
