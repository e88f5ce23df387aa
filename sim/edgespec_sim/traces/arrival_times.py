"""Recorded arrivals: when requests came, and how long they were where that is known.

Two forms, told from the first line: CSV with a header, JSONL with an object a line. Columns are
``time_s``, or ``timestamp`` (seconds, or a date and time), and as they are known ``prompt_tokens``
and ``output_tokens``; ``TIMESTAMP``, ``ContextTokens`` and ``GeneratedTokens``, as published traces
of cloud inference call them, are the same. The first request comes at 0.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from edgespec_sim.traces.network_trace import TraceError

MAX_ROWS: Final = 1_000_000
MAX_BYTES: Final = 256 << 20
MAX_TOKENS: Final = 32_000
_NAMES: Final = {
    "time_s": "time_s",
    "timestamp": "time_s",
    "prompt_tokens": "prompt_tokens",
    "contexttokens": "prompt_tokens",
    "output_tokens": "output_tokens",
    "generatedtokens": "output_tokens",
}


@dataclass(frozen=True, slots=True)
class RecordedArrival:
    time_s: float
    """From the first one's."""
    prompt_tokens: int | None
    output_tokens: int | None


def read_arrivals(path: Path) -> tuple[RecordedArrival, ...]:
    """In order of time. Raises ``TraceError`` that names file, line and what is wrong."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise TraceError(f"{path}: {size} bytes, but at most {MAX_BYTES} are read")
        with path.open(encoding="utf-8", newline="") as file:
            found = [_arrival(row, f"{path}:{line}") for line, row in _rows(file, path)]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: not readable as text: {error}") from error
    if not found:
        raise TraceError(f"{path}: no arrivals in it")
    for index, (before, after) in enumerate(itertools.pairwise(found)):
        if after.time_s < before.time_s:
            raise TraceError(f"{path}: arrival {index + 2} is earlier than the one before it")
    first_s = found[0].time_s
    return tuple(
        RecordedArrival(one.time_s - first_s, one.prompt_tokens, one.output_tokens) for one in found
    )


def _rows(file: Iterable[str], path: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    for count, (number, row) in enumerate(
        _objects(itertools.chain([first], lines), path)
        if first[1].lstrip().startswith("{")
        else _columns(first[1], lines, path)
    ):
        if count == MAX_ROWS:
            raise TraceError(f"{path}: more than {MAX_ROWS} arrivals, the limit")
        yield number, row


def _objects(
    lines: Iterable[tuple[int, str]], path: Path
) -> Iterable[tuple[int, Mapping[str, Any]]]:
    for number, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{number}: holds a {type(row).__name__}, not an object")
        yield number, _known(row)


def _columns(
    header: str, lines: Iterable[tuple[int, str]], path: Path
) -> Iterable[tuple[int, Mapping[str, Any]]]:
    names = next(csv.reader([header]))
    for number, line in lines:
        values = next(csv.reader([line]))
        if len(values) != len(names):
            raise TraceError(
                f"{path}:{number}: {len(values)} columns, but the header has {len(names)}"
            )
        yield number, _known(dict(zip(names, values, strict=True)))


def _known(row: Mapping[str, Any]) -> Mapping[str, Any]:
    named = {_NAMES.get(str(name).strip().lower()): value for name, value in row.items()}
    return {name: value for name, value in named.items() if name is not None}


def _arrival(row: Mapping[str, Any], where: str) -> RecordedArrival:
    if "time_s" not in row:
        raise TraceError(f"{where}: no time_s or timestamp")
    return RecordedArrival(
        _seconds(row["time_s"], where),
        _length(row, "prompt_tokens", where),
        _length(row, "output_tokens", where),
    )


def _seconds(value: Any, where: str) -> float:
    try:
        at_s = float(value)
    except (TypeError, ValueError):
        try:
            at_s = datetime.fromisoformat(str(value).strip()).timestamp()
        except ValueError:
            raise TraceError(
                f"{where}: time is {value!r}, but must be seconds or a date and time"
            ) from None
    if not math.isfinite(at_s):
        raise TraceError(f"{where}: time is {value!r}, but must be finite")
    return at_s


def _length(row: Mapping[str, Any], name: str, where: str) -> int | None:
    value = row.get(name)
    if value is None or value == "":
        return None
    try:
        length = int(value)
    except (TypeError, ValueError, OverflowError):
        length = 0
    if length < 1:
        raise TraceError(f"{where}: {name} is {value!r}, but must be a whole number of at least 1")
    return min(length, MAX_TOKENS)
