"""Tables of numbers over time: the plain format, and any other table with named columns."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from edgespec_sim.links.network_trace import (
    MAX_ROWS,
    NetworkTrace,
    TraceError,
    in_outage,
    values_at,
)
from edgespec_sim.links.trace_text import TraceText, find_outages, read_table, stamp_s, usual_step_s

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
    header = 1 + next(n for n, line in enumerate(text.lines) if not line.startswith("#"))
    for number, line in enumerate(text.lines[:header], start=1):
        if line.startswith(_DURATION):
            duration_s = text.number(number, line[len(_DURATION) :], "duration_s")
    columns = text.lines[header - 1].split(",")
    if len({*columns} & {*_KNOWN}) != len(columns) or not _MEASURED & {*columns}:
        raise text.error(
            header,
            "the header time_s,rtt_ms[,loss,up_mbps,down_mbps], or without rtt_ms if only the"
            " capacity was measured; a table with other columns is read with --columns"
            " time_s=NAME,rtt_ms=NAME",
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
# ``--columns QUANTITY=COLUMN,...`` gives the meaning and the unit of columns. A COLUMN is a name of
# the header, or the number of the column from 1, with a header or without one. Columns are
# separated by commas, semicolons, tabs or blanks. Times may begin anywhere and increase; among rows
# of the same time the last one counts. An empty cell, or one that is no number (``-``, ``nan``,
# ``*``), has the value of the row before; rows without any measurement are left out. A loss of 1 is
# an outage, as in the plain format. A few column names have only one meaning (``_KNOWN_COLUMNS``),
# and tables with these need no ``--columns``.

_UNITS: Final[Mapping[str, tuple[str, float]]] = {
    "time_s": ("time", 1.0),
    "time_ms": ("time", 1e-3),
    "time_us": ("time", 1e-6),
    "time_ns": ("time", 1e-9),
    "time": ("stamp", 1.0),
    "rtt_s": ("rtt", 1.0),
    "rtt_ms": ("rtt", 1e-3),
    "rtt_us": ("rtt", 1e-6),
    "rtt_ns": ("rtt", 1e-9),
    "loss": ("loss", 1.0),
    "loss_percent": ("loss", 1e-2),
    "up_bps": ("up", 1.0),
    "up_kbps": ("up", 1e3),
    "up_mbps": ("up", 1e6),
    "down_bps": ("down", 1.0),
    "down_kbps": ("down", 1e3),
    "down_mbps": ("down", 1e6),
}
"""For each quantity, what it measures and its unit in seconds, shares or bits per second. ``time``
is a date and a time of day (ISO 8601)."""
_KNOWN_COLUMNS: Final[Mapping[str, str]] = {
    **{name: name for name in _UNITS if name not in ("time", "loss_percent")},
    # Wireshark's fields, as `tshark -T fields -E header=y` names them.
    "frame.time_epoch": "time_s",
    "frame.time_relative": "time_s",
    "tcp.analysis.ack_rtt": "rtt_s",
    "icmp.resptime": "rtt_ms",
}
_EXAMPLE: Final = "--columns time_s=NAME,rtt_ms=NAME,down_mbps=NAME"
_NOTHING: Final = {"", "-", "--", "*", "?", "na", "n/a", "nan", "none", "null", "inf"}
_WORD: Final = re.compile(r"[^\s]+")


@dataclass(frozen=True, slots=True)
class Columns:
    """The meaning of a table's columns: quantities, such as ``rtt_ms``, with names or numbers."""

    columns: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, text: str) -> Columns:
        """Parse ``QUANTITY=COLUMN,...``. Raises ``ValueError`` that lists the possible
        quantities."""
        pairs: list[tuple[str, str]] = []
        for item in text.split(","):
            quantity, _, column = item.partition("=")
            quantity, column = quantity.strip(), column.strip()
            if quantity not in _UNITS or not column:
                raise ValueError(
                    f"--columns has {item!r}, but must be QUANTITY=COLUMN with a quantity of"
                    f" {', '.join(_UNITS)} (such as {_EXAMPLE})"
                )
            pairs.append((quantity, column))
        of = [_UNITS[quantity][0].replace("stamp", "time") for quantity, _ in pairs]
        for what in of:
            if of.count(what) > 1:
                raise ValueError(f"--columns names {of.count(what)} columns for {what}")
        if "time" not in of:
            raise ValueError(f"--columns is {text!r}, but must name the column of time: {_EXAMPLE}")
        if not {"rtt", "up", "down"} & set(of):
            raise ValueError(
                f"--columns is {text!r}, but must name a delay or a capacity: {_EXAMPLE}"
            )
        return cls(tuple(pairs))


def known_columns(line: str) -> Columns | None:
    """Return the columns of a header that names a time and a delay or a capacity unambiguously.
    None otherwise."""
    cells = _cut_cells(line, _find_delimiter(line))
    found = dict[str, tuple[str, str]]()
    for cell in cells:
        if (quantity := _KNOWN_COLUMNS.get(cell)) is not None:
            found.setdefault(_UNITS[quantity][0], (quantity, cell))
    if "time" not in found or not {"rtt", "up", "down"} & found.keys():
        return None
    return Columns(tuple(found.values()))


def is_known_table(head: str) -> bool:
    return known_columns(_first_line(head.splitlines())[1]) is not None


def read_known_table(text: TraceText) -> NetworkTrace:
    """Read a table whose header identifies its columns. Raises ``TraceError``."""
    columns = known_columns(_first_line(text.lines)[1])
    assert columns is not None, "as the header says"
    return read_columns(text, columns)


def explain_columns(lines: Sequence[str]) -> str:
    """Describe how a file of unknown format can be read as a table, with the columns that it
    has."""
    _, line = _first_line(lines)
    cells = _cut_cells(line, _find_delimiter(line))
    wanted = (
        "a table can be read if you name its columns of time and of delay, loss or capacity, by"
        " name or number"
    )
    if len(cells) < 2:
        return f"{wanted}: edgespec-sim trace FILE {_EXAMPLE}"
    if all(_parse_number(cell) is not None for cell in cells):
        return (
            f"{wanted}: edgespec-sim trace FILE --columns time_s=1,rtt_s=2 (it has {len(cells)}"
            " columns without names)"
        )
    shown = ", ".join(cells[:20]) + (", ..." if len(cells) > 20 else "")
    return f"{wanted}: edgespec-sim trace FILE {_EXAMPLE} (it has {shown})"


def read_columns(text: TraceText, columns: Columns) -> NetworkTrace:
    """Read a table whose columns the user has named. Raises ``TraceError``."""
    header, line = _first_line(text.lines)
    delimiter = _find_delimiter(line)
    names = _cut_cells(line, delimiter)
    places = {quantity: _find_column(text, header, names, one) for quantity, one in columns.columns}
    has_header = any(_parse_number(names[place]) is None for place in places.values())
    comma = delimiter != ","
    values: dict[str, float] = {}
    rows: list[tuple[float, dict[str, float]]] = []
    for number, cells in _read_rows(text, header + has_header, delimiter):
        if text.may_be_cut(number):
            break
        time_s: float | None = None
        measured = False
        for quantity, place in places.items():
            cell = cells[place].strip() if place < len(cells) else ""
            what, unit = _UNITS[quantity]
            if what == "stamp":
                time_s = stamp_s(text, number, cell, f"{quantity} as a date and a time")
            elif what == "time":
                time_s = text.number(number, cell, quantity, has_decimal_commas=comma) * unit
            elif cell.lower() not in _NOTHING:
                value = text.number(number, cell, quantity, has_decimal_commas=comma)
                _check_value(text, number, quantity, value * unit)
                values[what] = value * unit
                measured = True
        assert time_s is not None, "as Columns makes sure"
        if rows and time_s < rows[-1][0]:
            raise text.error(number, f"a time not before {rows[-1][0]:.12g} s")
        if not measured:
            continue
        if rows and time_s == rows[-1][0]:
            rows.pop()
        rows.append((time_s, dict(values)))
        if len(rows) > MAX_ROWS:
            raise TraceError(f"{text.path}: more than {MAX_ROWS} rows, which is the limit")
    if not rows:
        raise text.no_rows()
    times_s = [time_s - rows[0][0] for time_s, _ in rows]
    end_s = times_s[-1] + usual_step_s(times_s)

    def column(what: str) -> tuple[float, ...] | None:
        first = next((row[what] for _, row in rows if what in row), None)
        return None if first is None else tuple(row.get(what, first) for _, row in rows)

    loss = column("loss")
    return NetworkTrace(
        text.name,
        text.source,
        tuple(times_s),
        column("rtt"),
        end_s,
        loss=loss and tuple(0.0 if value >= 1.0 else value for value in loss),
        up_bits_per_s=column("up"),
        down_bits_per_s=column("down"),
        outages_s=find_outages(times_s, end_s, (row.get("loss", 0.0) >= 1.0 for _, row in rows)),
    )


def _check_value(text: TraceText, number: int, quantity: str, value: float) -> None:
    if _UNITS[quantity][0] == "loss" and value > 1.0:
        hint = "" if quantity == "loss_percent" else "; is it loss_percent?"
        raise text.error(number, f"{quantity} of at most 1{hint}")
    if _UNITS[quantity][0] in ("up", "down") and value == 0.0:
        raise text.error(number, f"{quantity} above 0 (an outage is a loss of 1)")


def _find_column(text: TraceText, header: int, names: Sequence[str], column: str) -> int:
    if column in names:
        return names.index(column)
    if column.isdigit() and 1 <= int(column) <= len(names):
        return int(column) - 1
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    raise text.error(header, f"a column {column!r}, which --columns names, among {shown}")


def _first_line(lines: Sequence[str]) -> tuple[int, str]:
    """Return the number and the text of the first line that is neither empty nor a comment."""
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            return number, line
    return 1, ""


def _find_delimiter(line: str) -> str:
    """Return the separator of a line's cells. A blank stands for any amount of white space."""
    return next((one for one in "\t;," if one in line), " ")


def _cut_cells(line: str, delimiter: str) -> list[str]:
    if delimiter == " ":
        return _WORD.findall(line)
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return []


def _read_rows(text: TraceText, first: int, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each line from ``first`` on, without comments, empty lines
    and repetitions of the header."""
    header = text.lines[first - 2] if first > 1 else None
    for number, line in enumerate(text.lines[first - 1 :], start=first):
        if line.strip() and not line.startswith("#") and line != header:
            yield number, _cut_cells(line, delimiter)


def _parse_number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", "."))
    except ValueError:
        return None
