"""Reading a trace back: lines of ``telemetry/trace.py`` as plain dicts, one at a time.

A line keeps the names it was written under. Messages inside lines are turned back into the core's
own classes only where a size is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from edgespec.core.protocol.messages import Commit, Draft, Received

Line = dict[str, Any]
DEVICE: Final = "device"
VERIFIER: Final = "verifier"
_COMMIT_NUMBERS: Final = (
    *("accepted", "stale", "queue_us", "verify_us"),
    *("rows", "echo", "held_us"),
)
_FARTHEST_S: Final = 1e12
_KEYS: Final = ("at_s", "side", "session", "kind", "name")


class TraceLineError(ValueError):
    """A trace cannot be read; the message names the file, the line and what is wrong."""


def read_lines(paths: Sequence[Path]) -> Iterator[Line]:
    """All lines, file by file. A last line that was cut off is left out, as by a run that was
    killed. Raises ``TraceLineError``, ``OSError``."""
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith("\n"):
                    try:
                        json.loads(text)
                    except ValueError:
                        break
                yield _parsed(path, number, text)


def _parsed(path: Path, number: int, text: str) -> Line:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise TraceLineError(f"{path}:{number}: not a line of a trace: {error}") from error
    if not isinstance(line, dict):
        raise TraceLineError(f"{path}:{number}: a line of a trace is an object")
    for key in _KEYS:
        if key not in line:
            raise TraceLineError(f"{path}:{number}: a line of a trace has {key!r}")
    at_s, side = line["at_s"], line["side"]
    timed = isinstance(at_s, int | float) and abs(at_s) <= _FARTHEST_S
    if not timed or side not in (DEVICE, VERIFIER):
        where = f"at_s {at_s!r} on side {side!r}"
        raise TraceLineError(f"{path}:{number}: {where} is no place in a run")
    for key in ("session", "name"):
        if not isinstance(line[key], str):
            raise TraceLineError(f"{path}:{number}: {key} is {line[key]!r}, but must be text")
    return line


def fed_by(step: Line) -> int:
    """How many tokens a ``StartStep`` feeds, on whatever branches."""
    rows = step.get("rows") or {"tokens": ()}
    return len(step["feed"]) + len(rows["tokens"])


def sized(message: Line) -> Draft | Received | Commit | None:
    """A message as its core class, to be sized; None for those that travel once a stream, whose
    size says more about the prompt than about the way of decoding. A commit's reason to finish is
    left out."""
    match message["name"]:
        case "Draft":
            return Draft(
                message["first_node_id"],
                tuple(message["parents"]),
                tuple(message["tokens"]),
                message["base_position"],
                message["base_hash"],
            )
        case "Received":
            return Received(message["position"], message["echo"])
        case "Commit":
            return Commit(
                message["position"],
                tuple(message["tokens"]),
                *(message[key] for key in _COMMIT_NUMBERS),
            )
        case _:
            return None
