"""Vectors of OMNeT++, such as Simu5G's signal qualities: result files (``.vec``) and CSV-R.

A vector is a module's statistic over time, ``Net.ue[0].cellularNic.nrPhy measuredSinrDl:vector``.
``--columns`` names vectors in place of columns, by the name (with or without ``:vector``) or by the
end of module and name joined by a dot, and the unit says what the values are:

    down=averageCqiDl:cqi@20MHz,up=ue[0].cellularNic.nrMac.averageCqiUl:cqi@20MHz

The time is that of the simulation. Each vector holds its value until its next one.

In a ``.vec`` file, ``vector ID MODULE NAME COLUMNS`` declares a vector, and a line that begins with
a number has its values in the order of COLUMNS (E event, T time, V value; TV if they are missing).
All other lines are attributes (OMNeT++ manual, appendix "Result file formats", versions 2 and 3).
``opp_scavetool export -F CSV-R`` writes a row for each vector, with all times in the cell
``vectime`` and all values in ``vecvalue``, separated by blanks.
"""

from __future__ import annotations

import csv
import itertools
import math
import shlex
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from edgespec_sim.links.column_tables import convert_cell, cut_cells, make_trace
from edgespec_sim.links.columns import Columns, ColumnUse
from edgespec_sim.links.network_trace import MAX_ROWS, NetworkTrace, TraceError
from edgespec_sim.links.trace_text import MAX_FILE_BYTES, TraceText, read_table

OMNET_FORMATS: Final = ("omnet-vec", "omnet-csv")
_SUFFIX: Final = ":vector"
_CSV_COLUMNS: Final = frozenset({"module", "name", "vectime", "vecvalue"})
_SHOWN_VECTORS: Final = 10
_EXAMPLE: Final = "--columns down=NAME:cqi@20MHz (or dB@20MHz, Mbit/s), rtt=NAME:s"


def is_omnet(head: str) -> bool:
    lines = head.split("\n")
    return lines[0].startswith("version ") and any(
        line.startswith(("run ", "vector ")) for line in lines
    )


def is_omnet_csv(head: str) -> bool:
    return set(cut_cells(head.partition("\n")[0], ",")) >= _CSV_COLUMNS


@dataclass(frozen=True, slots=True)
class _Vector:
    name: str
    """Module and statistic, joined by a dot."""
    times_s: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    """Values in the base unit of the column that they are read as."""
    numbers: array[int] = field(default_factory=lambda: array("q"))


def read_omnet(text: TraceText) -> NetworkTrace:
    """Raise ``TraceError`` that lists the vectors: only the user knows their meaning."""
    names = dict.fromkeys(name for name, *_ in _list_vectors(text))
    shown = ", ".join(itertools.islice(names, _SHOWN_VECTORS))
    more = f" and {len(names) - _SHOWN_VECTORS} more" if len(names) > _SHOWN_VECTORS else ""
    raise TraceError(
        f"{text.path}: expected the vectors to read as {_EXAMPLE}; it has {shown or 'none'}{more}"
        f" (read as {text.source})"
    )


def read_omnet_columns(text: TraceText, columns: Columns) -> NetworkTrace:
    """Read the vectors that ``columns`` names as a trace. Raises ``TraceError``."""
    measures = [use for use in columns.uses if use.what != "time"]
    read = _read_csv if text.source == "omnet-csv" else _read_vec
    vectors = read(text, measures)
    rows = _merge(vectors)
    return make_trace(text, measures, rows, notes_missing=False)


def _list_vectors(text: TraceText) -> Iterator[tuple[str, int, str]]:
    """Yield the name, the line and the declaration's last words of each vector."""
    if text.source == "omnet-csv":
        with _wide_cells():
            for number, cells in read_table(text):
                if cells.get("vectime"):
                    yield f"{cells.get('module', '')}.{cells.get('name', '')}", number, ""
        return
    for number, line in text.numbered_lines():
        if line.startswith("vector "):
            _, name, order = _parse_declaration(text, number, line)
            yield name, number, order


def _parse_declaration(text: TraceText, number: int, line: str) -> tuple[str, str, str]:
    """Return the id, the name and the order of the columns of a declared vector."""
    try:
        words = shlex.split(line) if '"' in line else line.split()
    except ValueError:
        words = []
    if len(words) < 4:
        raise text.error(number, "vector ID MODULE NAME COLUMNS")
    order = words[4] if len(words) > 4 else "TV"
    if not {"T", "V"} <= set(order):
        raise text.error(number, "columns with a T and a V, such as ETV")
    return words[1], f"{words[2]}.{words[3]}", order


def _find_measure(name: str, measures: Sequence[ColumnUse]) -> int | None:
    """Return the place of the measure that names this vector, or None."""
    short = name.removesuffix(_SUFFIX)
    for place, use in enumerate(measures):
        wanted = use.column.removesuffix(_SUFFIX)
        if short == wanted or short.endswith(f".{wanted}"):
            return place
    return None


def _claim(
    text: TraceText, found: dict[int, _Vector], place: int, name: str, use: ColumnUse
) -> _Vector:
    if place in found and found[place].name != name:
        raise TraceError(
            f"{text.path}: {use.what}={use.column} names several vectors, such as"
            f" {found[place].name} and {name}: put more of the module's name before it"
        )
    return found.setdefault(place, _Vector(name))


def _read_vec(text: TraceText, measures: Sequence[ColumnUse]) -> list[_Vector]:
    found: dict[int, _Vector] = {}
    wanted: dict[str, tuple[_Vector, ColumnUse, int, int]] = {}
    for number, line in text.numbered_lines():
        if line.startswith("vector "):
            identity, name, order = _parse_declaration(text, number, line)
            place = _find_measure(name, measures)
            if place is not None:
                vector = _claim(text, found, place, name, measures[place])
                wanted[identity] = (
                    vector,
                    measures[place],
                    1 + order.index("T"),
                    1 + order.index("V"),
                )
            continue
        cells = line.split()
        if not cells or cells[0] not in wanted:
            continue
        vector, use, time_place, value_place = wanted[cells[0]]
        if text.may_be_cut(number):
            break
        if len(cells) <= max(time_place, value_place):
            raise text.error(number, "the number, time and value of a vector", use.column)
        _append(text, number, vector, use, cells[time_place], cells[value_place])
    return _require_all(text, found, measures)


def _read_csv(text: TraceText, measures: Sequence[ColumnUse]) -> list[_Vector]:
    found: dict[int, _Vector] = {}
    with _wide_cells():
        for number, cells in read_table(text):
            name = f"{cells.get('module', '')}.{cells.get('name', '')}"
            times, values = cells.get("vectime", "").split(), cells.get("vecvalue", "").split()
            place = _find_measure(name, measures) if times else None
            if place is None:
                continue
            use = measures[place]
            if len(times) != len(values):
                expected = f"as many values as times, which are {len(times)}, not {len(values)}"
                raise text.error(number, expected, "vecvalue")
            vector = _claim(text, found, place, name, use)
            for time, value in zip(times, values, strict=True):
                _append(text, number, vector, use, time, value)
    return _require_all(text, found, measures)


def _append(
    text: TraceText, number: int, vector: _Vector, use: ColumnUse, time: str, value: str
) -> None:
    time_s = text.number(number, time, "a time in s", column=use.column)
    if vector.times_s and time_s < vector.times_s[-1]:
        raise text.error(number, f"a time not before {vector.times_s[-1]:g} s", use.column)
    if len(vector.times_s) == MAX_ROWS:
        raise TraceError(f"{text.path}: more than {MAX_ROWS} values of {vector.name}")
    vector.times_s.append(time_s)
    vector.values.append(convert_cell(text, number, use, value))
    vector.numbers.append(number)


def _require_all(
    text: TraceText, found: dict[int, _Vector], measures: Sequence[ColumnUse]
) -> list[_Vector]:
    for place, use in enumerate(measures):
        if place not in found or not found[place].times_s:
            names = dict.fromkeys(name for name, *_ in _list_vectors(text))
            shown = ", ".join(itertools.islice(names, _SHOWN_VECTORS))
            raise TraceError(
                f"{text.path}: expected values of a vector {use.column!r}, which --columns names;"
                f" it has {shown or 'none'} (read as {text.source})"
            )
    return [found[place] for place in range(len(measures))]


def _merge(vectors: Sequence[_Vector]) -> Iterator[tuple[int, float, Sequence[float]]]:
    """Yield the rows of all vectors in order of time. A row has NaN for vectors that have no value
    at its time, which means that they hold the one before."""
    events = sorted(
        (time_s, place, index)
        for place, vector in enumerate(vectors)
        for index, time_s in enumerate(vector.times_s)
    )
    for time_s, place, index in events:
        values = [math.nan] * len(vectors)
        values[place] = vectors[place].values[index]
        yield vectors[place].numbers[index], time_s, values


@contextmanager
def _wide_cells() -> Iterator[None]:
    """Admit cells of any length in CSV within a block; the limit is one of the whole process."""
    usual = csv.field_size_limit(MAX_FILE_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(usual)
