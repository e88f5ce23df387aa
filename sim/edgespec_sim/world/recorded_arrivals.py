"""Arrivals of requests that were recorded: the plain table, published workloads, any other table.

The plain table has ``time_s`` (or ``timestamp``: seconds, or a date and a time), and optionally
``prompt_tokens`` and ``output_tokens``. The first request arrives at 0. A file is read as far as it
is played, so it may hold weeks.

Published workloads are recognised by their header. Azure's traces of LLM inference have
``TIMESTAMP``, ``ContextTokens`` and ``GeneratedTokens``, and one with images ``NumImages``, which
is ignored. BurstGPT has ``Timestamp`` in seconds, ``Request tokens`` and ``Response tokens``. A
request of theirs without input or output failed where it was recorded, and is left out.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgespec_sim.links.column_tables import NamedTable, cut_cells, find_gaps, first_line
from edgespec_sim.links.columns import Columns
from edgespec_sim.links.network_trace import TraceError
from edgespec_sim.links.trace_text import TraceText, parse_date_s, read_table

MAX_ROWS: Final = 1_000_000
MAX_TOKENS: Final = 65_536
AUTO: Final = "auto"
_LENGTHS: Final = ("prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class RecordedArrival:
    """One recorded request."""

    at_s: float
    """Time since the first request."""
    prompt_tokens: int | None
    """None: the file has no length. At most ``MAX_TOKENS``."""
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class _Format:
    """The columns of a workload by their names in lower case."""

    columns: Mapping[str, str]
    """Names in the file -> names in the plain table."""
    required: tuple[str, ...]
    """Names by which the header is recognised."""
    omits_failed: bool = False
    """Whether a request without input or output is left out. Otherwise it is an error."""


ARRIVAL_FORMATS: Final[dict[str, _Format]] = {
    "azure": _Format(
        {
            "timestamp": "time_s",
            "contexttokens": "prompt_tokens",
            "generatedtokens": "output_tokens",
        },
        ("timestamp", "contexttokens", "generatedtokens"),
        omits_failed=True,
    ),
    "burstgpt": _Format(
        {
            "timestamp": "time_s",
            "request tokens": "prompt_tokens",
            "response tokens": "output_tokens",
        },
        ("timestamp", "request tokens", "response tokens"),
        omits_failed=True,
    ),
    "arrivals": _Format(
        {
            "timestamp": "time_s",
            "contexttokens": "prompt_tokens",
            "generatedtokens": "output_tokens",
        },
        (),
    ),
}
"""The formats of workloads by name, in the order in which they are tried."""


def find_arrival_format(text: TraceText) -> str:
    """Return the format of published workloads that the header shows, or an empty text."""
    names = {name.lower() for name in cut_cells(first_line(text.head)[1], ",")}
    if names & {"time_s", "timestamp"} and names & {*_LENGTHS}:
        return "arrivals"
    return next(
        (
            name
            for name, one in ARRIVAL_FORMATS.items()
            if one.required and names >= set(one.required)
        ),
        "",
    )


class ArrivalFile:
    """Recorded arrivals in order of time. Raises ``TraceError`` that names the line and the
    column."""

    def __init__(
        self, path: Path, columns: Columns | None = None, format: str = AUTO, from_s: float = 0.0
    ) -> None:
        """``columns`` is the meaning of the columns, in place of a ``format``. Requests in the
        first ``from_s`` seconds are left out."""
        if format not in (*ARRIVAL_FORMATS, AUTO):
            known = ", ".join(ARRIVAL_FORMATS)
            raise TraceError(f"format is {format!r}, but must be auto or one of {known}")
        self.text = TraceText(path)
        self.left_out = 0
        """Number of failed requests that were left out so far."""
        self._columns, self._from_s = columns, from_s
        found = find_arrival_format(self.text) or "arrivals" if format == AUTO else format
        self.text.source = "table" if columns is not None else found

    def __iter__(self) -> Iterator[RecordedArrival]:
        first_s: float | None = None
        latest_s = -math.inf
        count = 0
        for number, time_s, prompt, output in self._rows():
            if first_s is None:
                first_s = time_s
            if time_s < latest_s:
                raise self.text.error(number, f"a time not before {latest_s:.12g} s")
            latest_s = time_s
            if prompt == 0 or output == 0:
                self.left_out += 1
                continue
            if time_s - first_s < self._from_s:
                continue
            if count == MAX_ROWS:
                raise TraceError(
                    f"{self.text.path}: more than {MAX_ROWS} arrivals, which is the limit"
                )
            count += 1
            yield RecordedArrival(time_s - first_s - self._from_s, prompt, output)
        if first_s is None:
            raise TraceError(f"{self.text.path}: contains no arrivals")
        if count == 0:
            raise TraceError(
                f"{self.text.path}: contains no arrivals from {self._from_s:g} s on: its last one"
                f" is at {latest_s - first_s:g} s"
            )

    def _rows(self) -> Iterator[tuple[int, float, int | None, int | None]]:
        """Yield the line, the time in seconds and the lengths of each request; 0 for a failed
        one."""
        text = self.text
        if self._columns is not None:
            table = NamedTable(text, self._columns)
            uses = [self._columns.find(what) for what in ("prompt", "output")]
            for number, row in table.rows():
                prompt, output = (
                    None
                    if use is None
                    else self._length(number, use.column, table.cell(row, use.what))
                    for use in uses
                )
                yield number, table.time_s(number, row), prompt, output
            return
        format = ARRIVAL_FORMATS[text.source]
        header = first_line(text.head)[0]
        heading = cut_cells(text.line(header), ",")
        names = {format.columns.get(name.lower(), name.lower()): name for name in heading}
        for number, cells in read_table(text, header, drops_cut=False):
            time_column = names.get("time_s", "time_s")
            time_s = self._time_s(number, cells.get(time_column), time_column)
            prompt, output = (
                self._length(number, names.get(name, name), cells.get(names.get(name, name)) or "")
                for name in _LENGTHS
            )
            yield number, time_s, prompt, output

    def _time_s(self, number: int, cell: str | None, column: str) -> float:
        if cell is None:
            raise self.text.error(number, "seconds or a date and a time", column)
        try:
            time_s = float(cell)
        except ValueError:
            try:
                time_s = parse_date_s(cell.strip())
            except (ValueError, OverflowError):
                raise self.text.error(number, "seconds or a date and a time", column) from None
        if not math.isfinite(time_s):
            raise self.text.error(number, "a finite time", column)
        return time_s

    def _length(self, number: int, column: str, cell: str) -> int | None:
        """Return a length in tokens, None if the cell is empty, or 0 for a failed request."""
        if not cell.strip():
            return None
        is_number = cell.strip().isdecimal()
        format = ARRIVAL_FORMATS.get(self.text.source)
        least = 0 if format is not None and format.omits_failed else 1
        if not is_number or int(cell) < least:
            raise self.text.error(number, f"a whole number of at least {least}", column)
        return min(int(cell), MAX_TOKENS)


def read_arrivals(
    path: Path, columns: Columns | None = None, format: str = AUTO, *, from_s: float = 0.0
) -> Iterator[RecordedArrival]:
    """Yield recorded arrivals in order of time, which starts at 0. Raises ``TraceError``."""
    return iter(ArrivalFile(path, columns, format, from_s))


# --- a summary, and the plain table --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """Statistics of a recorded workload."""

    span_s: float
    requests: int
    rate_per_s: float
    """Mean rate over the span. 0 for a single request."""
    prompt_tokens: tuple[float, float] | None
    """Median and 95th percentile of the prompts. None: not recorded."""
    output_tokens: tuple[float, float] | None
    longest_pause_s: float
    gaps: int
    """Pauses of more than five usual ones, and than a second."""


def summarise_arrivals(arrivals: Iterable[RecordedArrival]) -> WorkloadSummary:
    """Return statistics of recorded arrivals. There must be at least one."""
    kept = list(arrivals)
    times_s = [one.at_s for one in kept]
    span_s = times_s[-1] - times_s[0]
    pauses_s = [after_s - before_s for before_s, after_s in itertools.pairwise(times_s)]
    return WorkloadSummary(
        span_s=span_s,
        requests=len(kept),
        rate_per_s=(len(kept) - 1) / span_s if span_s > 0.0 else 0.0,
        prompt_tokens=_two_quantiles([one.prompt_tokens for one in kept]),
        output_tokens=_two_quantiles([one.output_tokens for one in kept]),
        longest_pause_s=max(pauses_s, default=0.0),
        gaps=len(find_gaps(times_s)),
    )


def _two_quantiles(lengths: Iterable[int | None]) -> tuple[float, float] | None:
    known = sorted(length for length in lengths if length is not None)
    if not known:
        return None
    return statistics.median(known), float(known[min(len(known) - 1, int(0.95 * len(known)))])


def write_arrivals(arrivals: Iterable[RecordedArrival]) -> str:
    """Return the plain table of arrivals, which ``read_arrivals`` reads as the same ones."""

    def show(length: int | None) -> str:
        return "" if length is None else str(length)

    lines = ["time_s,prompt_tokens,output_tokens"]
    lines += [
        f"{one.at_s!r},{show(one.prompt_tokens)},{show(one.output_tokens)}" for one in arrivals
    ]
    return "\n".join(lines) + "\n"
