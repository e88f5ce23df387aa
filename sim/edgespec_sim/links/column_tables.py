"""Tables of numbers over time: the plain format, and any other table with named columns."""

from __future__ import annotations

import csv
import itertools
import math
import statistics
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from edgespec_sim.links.columns import EXAMPLE, Columns, ColumnUse, columns_of_header
from edgespec_sim.links.network_trace import (
    MAX_ROWS,
    NetworkTrace,
    TraceError,
    in_outage,
    values_at,
)
from edgespec_sim.links.trace_text import (
    TraceText,
    find_outages,
    read_table,
    stamp_s,
    usual_step_s,
)

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# --- the plain format --------------------------------------------------------------------------
# The format ``time_s[,rtt_ms,loss,up_mbps,down_mbps]`` is read and written. The header names the
# columns: a delay or a capacity, and any of the others. Times begin at 0 and increase. A row holds
# until the next one. A ``loss`` of 1 is an outage until the next row below 1; its other values
# still count. ``# duration_s=...`` before the header gives the end of the last row; without it,
# that row lasts as long as the one before. Other lines with ``#`` are comments. An empty cell of an
# optional column has the value of the row before. A last line without a line end may be incomplete
# and is then left out.

_KNOWN: Final = ("time_s", "rtt_ms", "loss", "up_mbps", "down_mbps")
_MEASURED: Final = {"rtt_ms", "up_mbps", "down_mbps"}
_DURATION: Final = "# duration_s="


def is_plain(head: str) -> bool:
    lines = (line for line in head.splitlines() if not line.startswith("#"))
    columns = next(lines, "").split(",")
    return columns[:2] == ["time_s", "rtt_ms"] or (
        columns[0] == "time_s" and len(columns) > 1 and set(columns) <= set(_KNOWN)
    )


def read_plain(text: TraceText) -> NetworkTrace:
    duration_s: float | None = None
    header = 1 + next(n for n, line in enumerate(text.head) if not line.startswith("#"))
    for number, line in enumerate(text.head[:header], start=1):
        if line.startswith(_DURATION):
            duration_s = text.number(number, line[len(_DURATION) :], "duration_s")
    columns = text.head[header - 1].split(",")
    if len({*columns} & {*_KNOWN}) != len(columns) or not _MEASURED & {*columns}:
        raise text.error(
            header,
            "the header time_s,rtt_ms[,loss,up_mbps,down_mbps], or without rtt_ms if only the"
            " capacity was measured; a table with other columns is read with --columns"
            " time=NAME:s,rtt=NAME:ms",
        )
    required = [name for name in ("time_s", "rtt_ms") if name in columns]
    rows: list[dict[str, float]] = []
    for number, cells in read_table(text, header):
        rows.append(_plain_row(text, number, cells, rows[-1] if rows else {}, required))
    if not rows:
        raise text.no_rows()

    def column(name: str, scale: float) -> tuple[float, ...] | None:
        """Return a column. A missing cell has the value of the row before, or else the first
        value."""
        first = next((row[name] for row in rows if name in row), None)
        return None if first is None else tuple(row.get(name, first) * scale for row in rows)

    times_s = column("time_s", 1.0) or ()
    if duration_s is None:
        duration_s = times_s[-1] + (times_s[-1] - times_s[-2] if len(times_s) > 1 else 1.0)
    loss = column("loss", 1.0)
    return NetworkTrace(
        text.name,
        text.source,
        times_s,
        column("rtt_ms", 1e-3),
        duration_s,
        loss=loss and tuple(0.0 if value >= 1.0 else value for value in loss),
        up_bits_per_s=column("up_mbps", 1e6),
        down_bits_per_s=column("down_mbps", 1e6),
        outages_s=find_outages(times_s, duration_s, (row.get("loss", 0.0) >= 1.0 for row in rows)),
    )


def _plain_row(
    text: TraceText,
    number: int,
    cells: dict[str, str],
    before: dict[str, float],
    required: Sequence[str],
) -> dict[str, float]:
    given = (name for name in _KNOWN if name in required or cells.get(name))
    row = {name: text.number(number, cells.get(name, ""), name) for name in given}
    if not before and row["time_s"] != 0.0:
        raise text.error(number, "the first time_s to be 0")
    if before and row["time_s"] <= before["time_s"]:
        raise text.error(number, f"a time_s after {before['time_s']:g}")
    if row.get("loss", 0.0) > 1.0:
        raise text.error(number, "a loss in [0, 1], 1 for an outage")
    for name in ("up_mbps", "down_mbps"):
        if row.get(name) == 0.0:
            raise text.error(number, f"{name} above 0 (an outage is a loss of 1)")
    return {**before, **row}


def write_plain(trace: NetworkTrace) -> str:
    """Return the trace as text that ``read_trace`` turns into an equivalent trace. Rows are added
    where an outage begins or ends within a row. Reading and writing the result again changes
    nothing."""
    edges_s = {edge_s for outage_s in trace.outages_s for edge_s in outage_s}
    times_s = sorted({*trace.time_s, *(edge_s for edge_s in edges_s if edge_s < trace.duration_s)})
    grid = np.array(times_s)
    loss = trace.loss or (0.0,) * len(trace.time_s) if trace.outages_s else trace.loss
    columns: dict[str, Sequence[float]] = {"time_s": times_s}
    for name, values, scale in (
        ("rtt_ms", trace.rtt_s, 1e3),
        ("loss", loss, 1.0),
        ("up_mbps", trace.up_bits_per_s, 1e-6),
        ("down_mbps", trace.down_bits_per_s, 1e-6),
    ):
        if values is not None:
            scaled = (values_at(trace, values, grid) * scale).tolist()
            columns[name] = [float(f"{value:.12g}") for value in scaled]
    if "loss" in columns:
        columns["loss"] = np.where(in_outage(trace, grid), 1.0, columns["loss"]).tolist()
    lines = [
        f"# {trace.name.splitlines()[0] if trace.name else 'trace'}",
        f"{_DURATION}{trace.duration_s!r}",
        ",".join(columns),
        *(",".join(map(repr, row)) for row in zip(*columns.values(), strict=True)),
    ]
    return "\n".join(lines) + "\n"


# --- any table, by its columns -----------------------------------------------------------------
# The user names the columns (``columns.py``), or the header does by names with only one meaning
# (``_KNOWN_COLUMNS``). Cells are separated by commas, semicolons, tabs or blanks. Times may begin
# anywhere and increase; among rows of the same time the last one counts. An empty cell, or one that
# says that there is no number (``-``, ``nan``, ``*``), has the value of the row before; rows
# without any measurement are left out. A loss of 1 and a capacity of 0 are outages until the next
# row. A pause in the rows is no outage: the row before holds, and a remark names the line.

_KNOWN_COLUMNS: Final[Mapping[str, tuple[str, str]]] = {
    # Wireshark's fields, as `tshark -T fields -E header=y` names them.
    "frame.time_epoch": ("time", "s"),
    "frame.time_relative": ("time", "s"),
    "tcp.analysis.ack_rtt": ("rtt", "s"),
    "icmp.resptime": ("rtt", "ms"),
}
NOTHING: Final = {"", "-", "--", "*", "?", "na", "n/a", "nan", "none", "null", "inf"}
_GAP_STEPS, _GAP_S = 5.0, 1.0
"""A pause is a gap if it is longer than this many usual steps, and than this many seconds."""
_SHOWN_NAMES: Final = 20


def known_columns(line: str) -> Columns | None:
    """Return the columns of a header that names a time and a delay or a capacity unambiguously.
    None otherwise."""
    found = columns_of_header(cut_cells(line, find_delimiter(line)), _KNOWN_COLUMNS)
    if "time" not in found or not {"rtt", "up", "down"} & found.keys():
        return None
    return Columns(tuple(found.values()))


def is_known_table(head: str) -> bool:
    return known_columns(first_line(head.splitlines())[1]) is not None


def read_known_table(text: TraceText) -> NetworkTrace:
    """Read a table whose header identifies its columns. Raises ``TraceError``."""
    columns = known_columns(first_line(text.head)[1])
    assert columns is not None, "as the header says"
    return read_columns(text, columns)


def explain_columns(lines: Sequence[str]) -> str:
    """Describe how a file of unknown format can be read as a table, with the columns that it
    has."""
    _, line = first_line(lines)
    cells = cut_cells(line, find_delimiter(line))
    wanted = (
        "a table can be read if you name its columns of time and of delay, loss or capacity, by"
        " name or number"
    )
    if len(cells) < 2:
        return f"{wanted}: edgespec-sim trace FILE {EXAMPLE}"
    if all(_parse_number(cell) is not None for cell in cells):
        return (
            f"{wanted}: edgespec-sim trace FILE --columns time=1:s,rtt=2:s (it has {len(cells)}"
            " columns without names)"
        )
    return f"{wanted}: edgespec-sim trace FILE {EXAMPLE} (it has {_show_names(cells)})"


def _show_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")


Row = tuple[int, float, Sequence[float]]
"""Line number, time in seconds, and one value for each quantity; NaN where there is none."""


def read_columns(text: TraceText, columns: Columns, step_s: float = 0.0) -> NetworkTrace:
    """Read a table whose columns the user has named. With ``step_s``, the rows of each step are
    merged into one. Raises ``TraceError``."""
    table = NamedTable(text, columns)
    measures = [use for use in columns.uses if use.what != "time"]
    rows = _parse_measures(table, measures)
    return make_trace(text, measures, rows, step_s=step_s)


class NamedTable:
    """The rows of a table whose columns the user has named. Raises ``TraceError`` that names the
    line and the column."""

    def __init__(self, text: TraceText, columns: Columns) -> None:
        self.text = text
        time = columns.find("time")
        if time is None:
            raise TraceError(f"{text.path}: --columns must name the column of time: {EXAMPLE}")
        self._header, _ = first_line(text.head)
        line = text.line(self._header)
        self._delimiter = find_delimiter(line)
        names = cut_cells(line, self._delimiter)
        self.places = {use.what: self._find_place(names, use.column) for use in columns.uses}
        self.names = {use.what: use.column for use in columns.uses}
        self._has_header = any(
            _parse_number(names[self.places[use.what]]) is None
            and names[self.places[use.what]].lower() not in NOTHING
            for use in columns.uses
            if not use.is_date and use.what != "device"
        )
        self._heading = names
        self.time = time
        self._has_decimal_commas = self._delimiter != ","

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the number and the cells of each line, without comments, empty lines, an incomplete
        last line and repetitions of the header."""
        first = self._header + self._has_header
        for number, cells in self._cut_lines(first):
            if self.text.may_be_cut(number):
                return
            if cells and cells[0][:1] != "#" and not self._is_heading(cells):
                yield number, cells

    def time_s(self, number: int, cells: Sequence[str]) -> float:
        """Return the time of a row in seconds. It may be negative."""
        cell = self.cell(cells, "time")
        if self.time.is_date:
            return stamp_s(
                self.text, number, cell, "a date and a time (ISO 8601)", self.time.column
            )
        try:
            value = float(cell.replace(",", ".", 1) if self._has_decimal_commas else cell)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            expected = f"a time in {self.time.unit} as a number"
            raise self.text.error(number, expected, self.time.column)
        return value * self.time.factor

    def cell(self, cells: Sequence[str], what: str) -> str:
        """Return the cell of a quantity; empty if the row is too short."""
        place = self.places[what]
        return cells[place].strip() if place < len(cells) else ""

    def number(self, number: int, cells: Sequence[str], use: ColumnUse) -> float:
        """Return the value of a quantity in a row, in its base unit. NaN if the row has none."""
        cell = self.cell(cells, use.what)
        if cell.lower() in NOTHING:
            return math.nan
        commas = self._has_decimal_commas
        return convert_cell(self.text, number, use, cell, has_decimal_commas=commas)

    def _find_place(self, names: Sequence[str], column: str) -> int:
        if column in names:
            return names.index(column)
        if column.isdigit() and 1 <= int(column) <= len(names):
            return int(column) - 1
        expected = f"a column {column!r}, which --columns names, among {_show_names(names)}"
        raise self.text.error(self._header, expected)

    def _cut_lines(self, first: int) -> Iterator[tuple[int, list[str]]]:
        lines = self.text.numbered_lines(first)
        if self._delimiter == " ":
            for number, line in lines:
                yield number, line.split()
            return
        rows = csv.reader((line for _, line in lines), delimiter=self._delimiter)
        try:
            for cells in rows:
                yield first - 1 + rows.line_num, cells
        except csv.Error as error:
            number = first - 1 + rows.line_num
            raise self.text.error(number, f"a table in CSV ({error})") from None

    def _is_heading(self, cells: Sequence[str]) -> bool:
        return (
            self._has_header
            and cells[0].strip() == self._heading[0]
            and [cell.strip() for cell in cells] == self._heading
        )


def convert_cell(
    text: TraceText, number: int, use: ColumnUse, cell: str, *, has_decimal_commas: bool = False
) -> float:
    """Return the number in a cell in its base unit. Raises ``TraceError`` that names the line and
    the column."""
    quality, name = use.quality, f"{use.what} in {use.unit}"
    if quality is None:
        value = text.number(
            number, cell, name, column=use.column, has_decimal_commas=has_decimal_commas
        )
        if use.what == "loss" and value * use.factor > 1.0:
            hint = "" if use.unit == "%" else "; is it in %?"
            raise text.error(number, f"a loss of at most 1{hint}", use.column)
        return value * use.factor
    try:
        value = float(cell.replace(",", ".", 1) if has_decimal_commas else cell)
    except ValueError:
        raise text.error(number, f"{name} as a number", use.column) from None
    try:
        return quality(value)
    except ValueError as error:
        raise text.error(number, str(error), use.column) from None


def _parse_measures(table: NamedTable, measures: Sequence[ColumnUse]) -> Iterator[Row]:
    """Yield the rows of a table of measurements. A row of plain numbers takes a short way."""
    places = [
        (table.places[use.what], use.factor, 1.0 if use.what == "loss" else sys.float_info.max)
        for use in measures
    ]
    time_place, time_factor = table.places["time"], table.time.factor
    has_quality = any(use.quality is not None for use in measures)
    for number, cells in table.rows():
        try:
            if has_quality or table.time.is_date:
                raise ValueError("not a row of plain numbers")
            time_s = float(cells[time_place]) * time_factor
            values = []
            for place, factor, most in places:
                value = float(cells[place]) * factor
                if not 0.0 <= value <= most:
                    raise ValueError("an unusual value")
                values.append(value)
            if not math.isfinite(time_s):
                raise ValueError("an unusual time")
        except (ValueError, IndexError):
            time_s = table.time_s(number, cells)
            values = [table.number(number, cells, use) for use in measures]
        yield number, time_s, values


def make_trace(
    text: TraceText,
    measures: Sequence[ColumnUse],
    rows: Iterable[Row],
    *,
    step_s: float = 0.0,
    notes_missing: bool = True,
    remarks: tuple[str, ...] = (),
    ends_s: Sequence[float] = (),
) -> NetworkTrace:
    """Make a trace of rows in order of time.

    Args:
        text: The file, for errors.
        measures: The quantities of which each row has a value.
        rows: The rows.
        step_s: Seconds of which the rows are merged into one. 0: none are.
        notes_missing: Whether remarks on missing values are added.
        remarks: Remarks of the caller.
        ends_s: Filled by ``rows``: the last one is the end of the last row. Empty: the last row
            lasts for the usual step.

    Raises:
        TraceError: A row is out of order, or there is none.
    """
    times, numbers = array("d"), array("q")
    columns = [array("d") for _ in measures]
    appends = [column.append for column in columns]
    latest_s = -math.inf
    skipped = 0
    for number, time_s, row in _merge_steps(measures, rows, step_s) if step_s else rows:
        if time_s < latest_s:
            raise text.error(number, f"a time not before {latest_s:.12g} s")
        for value in row:
            if value == value:
                break
        else:  # Every value is NaN.
            skipped += 1
            continue
        if time_s == latest_s:
            for column, value in zip(columns, row, strict=True):
                column[-1] = column[-1] if math.isnan(value) else value
            continue
        times.append(time_s)
        numbers.append(number)
        latest_s = time_s
        for append, value in zip(appends, row, strict=True):
            append(value)
        if len(times) > MAX_ROWS:
            raise TraceError(
                f"{text.path}: more than {MAX_ROWS} rows, which is the limit: `edgespec-sim trace"
                " FILE --columns ... --step 0.1 --out SHORT.csv` merges the rows of each 0.1 s"
            )
    if not times:
        raise text.no_rows()
    found = list(remarks)
    if skipped and notes_missing:
        found.append(f"rows without a measurement were left out: {skipped}")
    times_s = [time_s - times[0] for time_s in times]
    end_s = ends_s[-1] - times[0] if ends_s else times_s[-1] + usual_step_s(times_s)
    out = np.zeros(len(times), dtype=np.bool_)
    filled: dict[str, tuple[float, ...] | None] = {}
    for use, column in zip(measures, columns, strict=True):
        values = np.array(column)
        if notes_missing:
            found += _describe_missing(use, values, numbers)
        filled[use.what], is_out, more = _fill(text, use, values, numbers)
        out |= is_out
        found += more
    found += describe_gaps(times_s, numbers, out.tolist())
    return NetworkTrace(
        text.name,
        text.source,
        tuple(times_s),
        filled.get("rtt"),
        end_s,
        loss=filled.get("loss"),
        up_bits_per_s=filled.get("up"),
        down_bits_per_s=filled.get("down"),
        outages_s=find_outages(times_s, end_s, out.tolist()),
        remarks=tuple(found),
    )


def _fill(
    text: TraceText, use: ColumnUse, values: Floats, numbers: Sequence[int]
) -> tuple[tuple[float, ...] | None, Flags, list[str]]:
    """Return a column in which every row has a value, the rows that are outages, and a remark on
    them.

    A missing value is that of the row before, or else the first one. The column is None if it has
    no value at all."""
    missing = np.isnan(values)
    if missing.all():
        return None, np.zeros(len(values), dtype=np.bool_), []
    remarks = []
    known = _hold(values, missing)
    is_rate = use.what in ("up", "down")
    out = known == 0.0 if is_rate else known >= 1.0
    if use.what == "rtt":
        out = np.zeros(len(values), dtype=np.bool_)
    # Nothing is known before the first value.
    out[: int(np.argmin(missing))] = False
    if is_rate and out.any():
        if not (known > 0.0).any():
            name = f"column {use.column!r}"
            raise TraceError(f"{text.path}: {name}: the capacity {use.what} is 0 in every row")
        first = numbers[int(np.argmax(out))]
        remarks.append(
            f"a capacity {use.what} of 0 counts as an outage: {int(out.sum())} of the rows, the"
            f" first in line {first}"
        )
        known = _hold(known, known == 0.0)
    if use.what == "loss":
        known = np.where(known >= 1.0, 0.0, known)
    return tuple(known.tolist()), out, remarks


def _describe_missing(use: ColumnUse, values: Floats, numbers: Sequence[int]) -> list[str]:
    missing = np.isnan(values)
    if not missing.any() or missing.all():
        return []
    first = numbers[int(np.argmax(missing))]
    return [
        f"cells of column {use.column!r} without a number have the value before:"
        f" {int(missing.sum())}, the first in line {first}"
    ]


def _hold(values: Floats, missing: Flags) -> Floats:
    """Return the values with each missing one replaced by the one before it, or by the first."""
    places = np.where(missing, 0, np.arange(len(values)))
    np.maximum.accumulate(places, out=places)
    first = int(np.argmin(missing))
    return np.asarray(values[np.maximum(places, first)])


def describe_gaps(
    times_s: Sequence[float], numbers: Sequence[int], out: Sequence[bool]
) -> list[str]:
    """Return a remark on the pauses between rows that are no outages, with the line behind the
    first and the longest. Empty if there is none."""
    gaps = find_gaps(times_s, out)
    if not gaps:
        return []
    longest = max(gaps, key=lambda place: times_s[place + 1] - times_s[place])
    longest_s = times_s[longest + 1] - times_s[longest]
    return [
        f"the rows have gaps, in which the row before holds: {len(gaps)}, the first before line"
        f" {numbers[gaps[0] + 1]}, the longest ({longest_s:g} s) before line {numbers[longest + 1]}"
    ]


def find_gaps(times_s: Sequence[float], out: Sequence[bool] = ()) -> list[int]:
    """Return the places of the rows behind which a pause is: more than five usual steps, and more
    than a second. A row that is ``out`` lasts for any time."""
    least_s = max(_GAP_S, _GAP_STEPS * usual_step_s(times_s))
    return [
        place
        for place, (before_s, after_s) in enumerate(itertools.pairwise(times_s))
        if after_s - before_s > least_s and not (out and out[place])
    ]


def _merge_steps(
    measures: Sequence[ColumnUse], rows: Iterable[Row], step_s: float
) -> Iterator[Row]:
    """Merge the rows of each step into one, at the time of its first: the median delay (an upper
    one), and the mean loss and capacity. Rows of one step must be neighbours."""
    first_s: float | None = None
    group: list[Row] = []
    for row in rows:
        if first_s is None:
            first_s = row[1]
        if group and (
            row[1] < group[0][1]
            or int((row[1] - first_s) / step_s) != int((group[0][1] - first_s) / step_s)
        ):
            yield _merge(measures, group)
            group = []
        group.append(row)
    if group:
        yield _merge(measures, group)


def _merge(measures: Sequence[ColumnUse], group: Sequence[Row]) -> Row:
    merged = []
    for place, use in enumerate(measures):
        values = [row[2][place] for row in group if not math.isnan(row[2][place])]
        if not values:
            merged.append(math.nan)
        elif use.what == "rtt":
            merged.append(statistics.median_high(values))
        else:
            merged.append(math.fsum(values) / len(values))
    return group[0][0], group[0][1], merged


def first_line(lines: Sequence[str]) -> tuple[int, str]:
    """Return the number and the text of the first line that is neither empty nor a comment."""
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            return number, line
    return 1, ""


def find_delimiter(line: str) -> str:
    """Return the separator of a line's cells. A blank stands for any amount of white space."""
    return next((one for one in "\t;," if one in line), " ")


def cut_cells(line: str, delimiter: str) -> list[str]:
    """Return the cells of one line, without the blanks around them."""
    if delimiter == " ":
        return line.split()
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return []


def _parse_number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", "."))
    except ValueError:
        return None
