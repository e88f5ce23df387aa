"""A device's conditions over time: stated in a scenario, or recorded in a file.

Rows hold until the next one; a cell that is empty holds what the row before said.
"""

from __future__ import annotations

import bisect
import csv
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from edgespec.core.device.draft_ladder import MachineReading
from edgespec_sim.scenario.condition_sections import (
    MOST_ROWS,
    ConditionSection,
    ConditionsSection,
    check_order,
)
from edgespec_sim.traces.network_trace import TraceError

MAX_BYTES: Final = 64 << 20
_NAMES: Final = tuple(field.name for field in fields(ConditionSection))
_MIB: Final = 1 << 20


class ConditionCourse:
    """``rows`` begin at 0, each later than the one before."""

    def __init__(self, rows: Sequence[ConditionSection]) -> None:
        self._rows = tuple(_carried(rows))
        self._times_s = [row.at_s for row in self._rows]

    @property
    def most_slowdown(self) -> float:
        return max(row.slowdown or 1.0 for row in self._rows)

    def reading(self, now_s: float, battery: float | None) -> MachineReading:
        """What the device reads of itself; ``battery`` counts where the course has none."""
        row = self._at(now_s)
        charge = battery if row.battery is None else row.battery
        return MachineReading(charge, row.celsius, row.others_load)

    def resident_bytes(self, now_s: float) -> int:
        return int((self._at(now_s).resident_mib or 0.0) * _MIB)

    def slowdown(self, now_s: float) -> float:
        return self._at(now_s).slowdown or 1.0

    def _at(self, now_s: float) -> ConditionSection:
        return self._rows[max(0, bisect.bisect_right(self._times_s, now_s) - 1)]


def course_of(section: ConditionsSection, folder: Path) -> ConditionCourse:
    """``folder`` is where relative file names start. Raises ``TraceError``."""
    if not section.file:
        return ConditionCourse(section.course)
    return ConditionCourse(read_course(folder / section.file))


def read_course(path: Path) -> tuple[ConditionSection, ...]:
    """Raises ``TraceError`` that names file, line and what is wrong."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise TraceError(f"{path}: {size} bytes, but at most {MAX_BYTES} are read")
        with path.open(encoding="utf-8", newline="") as file:
            rows = tuple(_rows(csv.reader(file), path))
        check_order(rows)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except TraceError:
        raise
    except (csv.Error, ValueError) as error:
        raise TraceError(f"{path}: {error}") from error
    if not rows:
        raise TraceError(f"{path}: no conditions in it")
    return rows


def _rows(lines: Iterator[list[str]], path: Path) -> Iterator[ConditionSection]:
    header = [name.strip() for name in next(lines, [])]
    unknown = [name for name in header if name not in _NAMES]
    if unknown or "at_s" not in header or len(set(header)) != len(header):
        said, known = ", ".join(header), ", ".join(_NAMES)
        raise TraceError(f"{path}: columns are {said}, but must be at_s and some of {known}")
    for count, cells in enumerate((one for one in lines if one), start=1):
        where = f"{path}: row {count}"
        if count > MOST_ROWS:
            raise TraceError(f"{path}: more than {MOST_ROWS} rows, the limit")
        if len(cells) != len(header):
            raise TraceError(f"{where}: {len(cells)} cells, but the header has {len(header)}")
        try:
            named = zip(header, cells, strict=True)
            given: dict[str, Any] = {name: float(cell) for name, cell in named if cell.strip()}
            yield ConditionSection(**given)
        except (TypeError, ValueError) as error:
            raise TraceError(f"{where}: {error}") from error


def _carried(rows: Sequence[ConditionSection]) -> Iterator[ConditionSection]:
    """Each with what the rows before it said and it does not."""
    held: dict[str, Any] = {}
    for row in rows:
        told = {name: getattr(row, name) for name in _NAMES}
        held |= {name: value for name, value in told.items() if value is not None}
        yield ConditionSection(**held)
