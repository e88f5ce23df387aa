"""The plain format: ``time_s,rtt_ms[,loss,up_mbps,down_mbps]``, read and written.

The header names the columns, the optional ones in any number; times begin at 0 and increase. A row
holds until the next one. A ``loss`` of 1 is an outage until the next row below 1; its other
values stand all the same. ``# duration_s=...`` before the header says how long the last row holds,
otherwise it does for as long as the one before it. Other lines with ``#`` are comments. A last line
without a line end may be cut and is then left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from edgespec_sim.traces.network_trace import NetworkTrace
from edgespec_sim.traces.readers.source import TraceText

FORMAT: Final = "plain"
_REQUIRED: Final = ("time_s", "rtt_ms")
_OPTIONAL: Final = ("loss", "up_mbps", "down_mbps")
_DURATION: Final = "# duration_s="


@dataclass(slots=True)
class _Table:
    columns: list[str] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)
    duration_s: float | None = None

    def column(self, name: str, scale: float = 1.0) -> tuple[float, ...] | None:
        if name not in self.columns:
            return None
        index = self.columns.index(name)
        return tuple(row[index] * scale for row in self.rows)


def sniff(head: str) -> bool:
    lines = (line for line in head.splitlines() if not line.startswith("#"))
    return next(lines, "").startswith(",".join(_REQUIRED))


def read(text: TraceText) -> NetworkTrace:
    table = _table(text)
    times_s, rtts_s = table.column("time_s"), table.column("rtt_ms", 1e-3)
    if not times_s or rtts_s is None:
        raise text.no_rows()
    step_s = times_s[-1] - times_s[-2] if len(times_s) > 1 else 1.0
    duration_s = times_s[-1] + step_s if table.duration_s is None else table.duration_s
    loss = table.column("loss")
    return NetworkTrace(
        text.name,
        FORMAT,
        times_s,
        rtts_s,
        duration_s,
        loss=None if loss is None else tuple(0.0 if value >= 1.0 else value for value in loss),
        up_bits_per_s=table.column("up_mbps", 1e6),
        down_bits_per_s=table.column("down_mbps", 1e6),
        outages_s=_outages(times_s, loss or (), duration_s),
    )


def _table(text: TraceText) -> _Table:
    table = _Table()
    for number, line in enumerate(text.lines, start=1):
        if line.startswith(_DURATION):
            table.duration_s = text.number(number, line[len(_DURATION) :], "duration_s")
        elif line.startswith("#"):
            continue
        elif not table.columns:
            table.columns = line.split(",")
            known = (*_REQUIRED, *_OPTIONAL)
            names = table.columns
            if names[:2] != [*_REQUIRED] or len({*names} & {*known}) != len(names):
                raise text.error(number, "the header time_s,rtt_ms[,loss,up_mbps,down_mbps]")
        elif not text.may_be_cut(number):
            table.rows.append(_row(text, number, table))
    return table


def _row(text: TraceText, number: int, table: _Table) -> list[float]:
    fields = text.lines[number - 1].split(",")
    if len(fields) != len(table.columns):
        raise text.error(number, f"{len(table.columns)} columns ({','.join(table.columns)})")
    row = [
        text.number(number, value, name) for name, value in zip(table.columns, fields, strict=True)
    ]
    values = dict(zip(table.columns, row, strict=True))
    if not table.rows and row[0] != 0.0:
        raise text.error(number, "the first time_s to be 0")
    if table.rows and row[0] <= table.rows[-1][0]:
        raise text.error(number, f"a time_s after {table.rows[-1][0]:g}")
    if values.get("loss", 0.0) > 1.0:
        raise text.error(number, "a loss in [0, 1], 1 for an outage")
    for name in ("up_mbps", "down_mbps"):
        if values.get(name) == 0.0:
            raise text.error(number, f"{name} above 0 (an outage is a loss of 1)")
    return row


def _outages(
    times_s: tuple[float, ...], loss: tuple[float, ...], duration_s: float
) -> tuple[tuple[float, float], ...]:
    found: list[tuple[float, float]] = []
    for time_s, until_s, value in zip(times_s, (*times_s[1:], duration_s), loss, strict=False):
        if value < 1.0:
            continue
        if found and found[-1][1] == time_s:
            found[-1] = (found[-1][0], until_s)
        else:
            found.append((time_s, until_s))
    return tuple(found)


def write_plain(trace: NetworkTrace) -> str:
    """The trace as text that ``read`` turns into one that behaves the same: rows are added where an
    outage begins and ends within a row. Reading and writing that one again changes nothing."""
    columns: list[tuple[str, tuple[float, ...], float]] = [("rtt_ms", trace.rtt_s, 1e3)]
    if trace.loss is not None or trace.outages_s:
        columns.append(("loss", trace.loss or (0.0,) * len(trace.time_s), 1.0))
    if trace.up_bits_per_s is not None:
        columns.append(("up_mbps", trace.up_bits_per_s, 1e-6))
    if trace.down_bits_per_s is not None:
        columns.append(("down_mbps", trace.down_bits_per_s, 1e-6))
    edges_s = {edge_s for outage_s in trace.outages_s for edge_s in outage_s}
    times_s = sorted({*trace.time_s, *(edge_s for edge_s in edges_s if edge_s < trace.duration_s)})
    lines = [
        f"# {trace.name.splitlines()[0] if trace.name else 'trace'}",
        f"{_DURATION}{trace.duration_s!r}",
        ",".join(("time_s", *(name for name, _, _ in columns))),
    ]
    row = outage = 0
    for time_s in times_s:
        while row + 1 < len(trace.time_s) and trace.time_s[row + 1] <= time_s:
            row += 1
        while outage < len(trace.outages_s) and trace.outages_s[outage][1] <= time_s:
            outage += 1
        out = outage < len(trace.outages_s) and trace.outages_s[outage][0] <= time_s
        values = [
            1.0 if out and name == "loss" else float(f"{values[row] * scale:.12g}")
            for name, values, scale in columns
        ]
        lines.append(",".join(repr(value) for value in (time_s, *values)))
    return "\n".join(lines) + "\n"
