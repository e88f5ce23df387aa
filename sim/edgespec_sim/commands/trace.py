"""``edgespec-sim trace``: shows a recorded network, workload or movement, and writes it as a plain
table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Column, Table

from edgespec.cli.options import option
from edgespec.cli.running import reporting_errors, say
from edgespec.config.files import write_output
from edgespec.config.loading import ConfigError
from edgespec_sim.commands import play
from edgespec_sim.links.column_tables import find_gaps, write_plain
from edgespec_sim.links.columns import Columns, TableKind
from edgespec_sim.links.formats import AUTO, FORMATS, open_trace, read_trace
from edgespec_sim.links.generators import KINDS, generate
from edgespec_sim.links.network_trace import (
    NetworkTrace,
    TraceStatistics,
    longest_outage_s,
    mean_loss,
    median_capacity,
    rtt_line,
)
from edgespec_sim.run_summary import WARNING
from edgespec_sim.world.recorded_arrivals import (
    ARRIVAL_FORMATS,
    ArrivalFile,
    find_arrival_format,
    summarise_arrivals,
    write_arrivals,
)
from edgespec_sim.world.recorded_mobility import (
    MOBILITY_FORMATS,
    find_mobility_format,
    read_mobility,
    summarise_mobility,
    write_positions,
)

_SEED, _SECONDS = 1, 600.0
"""Seed and length in seconds of a generated trace."""

_COLUMNS = option(
    "Meaning of the columns of a table: time, rtt, loss, up, down; or time, prompt, output; or"
    " time, device, x, y (lat, lon); a COLUMN is a name or a number",
    metavar="QUANTITY=COLUMN:UNIT,...",
)
_FORMAT = option("Format of the file, if its content does not show it", metavar="NAME")
_STEP = option("Merge the rows of each step of a table, if it has too many", metavar="S", min=0.0)


def trace(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A recorded file, or generate:KIND", show_default=False
        ),
    ],
    out: Annotated[
        Path | None, option("Write the plain table that scenarios read", metavar="FILE.csv")
    ] = None,
    columns: Annotated[str | None, _COLUMNS] = None,
    format: Annotated[str, _FORMAT] = AUTO,
    step: Annotated[float, _STEP] = 0.0,
) -> None:
    """Show a recorded network, workload or movement: span, samples, quantiles, gaps, outages.

    Known formats are logs of ping (Linux, BusyBox, macOS, Windows) and fping, irtt, iperf3,
    Wireshark, mahimahi, pensieve, Starlink dishes, UCC's and Lumos5G's datasets, OMNeT++ (Simu5G);
    Azure's and BurstGPT's requests; SUMO and GPX. Any other table is read with --columns, in units
    that are named: s, ms, us, ns, date; %, share; kbit/s, Mbit/s, MB/s and so on; cqi@20MHz and
    dB@20MHz for a signal quality and a bandwidth; m, km, deg. --out converts a file to a plain
    table.

    edgespec-sim trace ride.ping.txt --out ride.csv

    edgespec-sim trace drive.csv --columns "time=Timestamp:date,rtt=Ping avg:ms,down=DL:kbit/s"

    edgespec-sim trace cell.tsv --columns time=1:s,down=3:dB@20MHz --step 0.1 --out cell.csv

    edgespec-sim trace trace_1 --format pensieve

    edgespec-sim trace BurstGPT_1.csv --out load.csv

    edgespec-sim trace generate:starlink"""
    with reporting_errors():
        kind = file.removeprefix("generate:")
        if kind != file:
            _show_network(generate(kind, _SEED, _SECONDS), out)
            return
        path = Path(file)
        if not path.is_file():  # A pipe cannot be read twice: for its kind, and for its content.
            kinds = ", ".join(f"generate:{kind}" for kind in KINDS)
            raise ValueError(f"{file}: no such file; generated traces are {kinds}")
        named = _parse_columns(columns)
        content = _find_kind(path, named, format)
        if content is TableKind.WORKLOAD:
            _show_workload(ArrivalFile(path, named, format), out)
        elif content is TableKind.MOBILITY:
            _show_mobility(path, named, format, out)
        else:
            _show_network(read_trace(path, named, format, step), out)


def _parse_columns(columns: str | None) -> Columns | None:
    if columns is None:
        return None
    try:
        return Columns.of(columns)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _find_kind(path: Path, columns: Columns | None, format: str) -> TableKind:
    """Return what a file describes. Raises ``ConfigError`` for an unknown format, and
    ``TraceError``."""
    if columns is not None:
        return columns.kind
    if format in ARRIVAL_FORMATS:
        return TableKind.WORKLOAD
    if format in MOBILITY_FORMATS:
        return TableKind.MOBILITY
    if format not in (*FORMATS, AUTO):
        known = ", ".join((AUTO, *FORMATS, *ARRIVAL_FORMATS, *MOBILITY_FORMATS))
        raise ConfigError(f"--format is {format!r}, but must be one of {known}")
    text = open_trace(path, format)
    if text.source:
        return TableKind.NETWORK
    if find_arrival_format(text):
        return TableKind.WORKLOAD
    return TableKind.MOBILITY if find_mobility_format(text) else TableKind.NETWORK


def _show_network(found: NetworkTrace, out: Path | None) -> None:
    console = play.make_console()
    console.print(_statistics_table(found))
    console.print(rtt_line(found, width=min(console.width, 120) - 2))
    for remark in found.remarks:
        say(f"note: {remark}")
    for warning in found.warnings:
        say(f"{WARNING}{warning}")
    if out is not None:
        write_output(out, write_plain(found))
        say(f"wrote {out}: {len(found.time_s)} rows, {found.duration_s:.0f} s")


def _show_workload(arrivals: ArrivalFile, out: Path | None) -> None:
    kept = list(arrivals)
    summary = summarise_arrivals(kept)
    values = {
        "span s": f"{summary.span_s:.0f}",
        "requests": f"{summary.requests}",
        "requests/s": _format_number(summary.rate_per_s),
        "longest pause s": _format_number(summary.longest_pause_s),
        "gaps": f"{summary.gaps}",
    }
    for name, quantiles in (("prompt", summary.prompt_tokens), ("output", summary.output_tokens)):
        if quantiles is not None:
            values[f"{name} tokens, median"] = f"{quantiles[0]:.0f}"
            values[f"{name} tokens, p95"] = f"{quantiles[1]:.0f}"
    _print_table(f"{arrivals.text.name} ({arrivals.text.source})", values)
    if arrivals.left_out:
        say(f"note: {arrivals.left_out} requests without input or output failed and were left out")
    if out is not None:
        write_output(out, write_arrivals(kept))
        say(f"wrote {out}: {len(kept)} requests, {summary.span_s:.0f} s")


def _show_mobility(path: Path, columns: Columns | None, format: str, out: Path | None) -> None:
    mobility = read_mobility(path, columns, format)
    summary = summarise_mobility(mobility)
    median, p95 = summary.speed_m_per_s
    values = {
        "span s": f"{summary.span_s:.0f}",
        "tracks": f"{summary.tracks}",
        "positions": f"{summary.positions}",
        "width m": _format_number(summary.width_m),
        "height m": _format_number(summary.height_m),
        "speed m/s, median": _format_number(median),
        "p95": _format_number(p95),
        "gaps": f"{summary.gaps}",
    }
    _print_table(f"{mobility.name} ({mobility.source})", values)
    for warning in mobility.warnings:
        say(f"{WARNING}{warning}")
    if out is not None:
        write_output(out, write_positions(mobility))
        say(f"wrote {out}: {summary.positions} positions of {summary.tracks} tracks")


def _format_number(value: float) -> str:
    """Format a number with one decimal, or with three digits if it is small."""
    return f"{value:.1f}" if value >= 10.0 else f"{value:.3g}"


def _statistics_table(trace: NetworkTrace) -> Table:
    """Return a table of the measured delays, capacities, losses, gaps and outages."""
    values = {"length s": f"{trace.duration_s:.0f}", "rows": str(len(trace.time_s))}
    if trace.rtt_s is not None:
        statistics = TraceStatistics.of(trace)
        values |= {
            "median ms": _format_number(1e3 * statistics.rtt_median_s),
            "p95 ms": _format_number(1e3 * statistics.rtt_p95_s),
            "p99 ms": _format_number(1e3 * statistics.rtt_p99_s),
            "autocorrelation 1 s": f"{statistics.autocorrelation:.2f}",
        }
    for way, column in (("up", trace.up_bits_per_s), ("down", trace.down_bits_per_s)):
        if column is not None:
            values[f"{way} Mbit/s, median"] = _format_number(1e-6 * median_capacity(trace, column))
    if trace.loss is not None:
        values["loss %"] = f"{100 * mean_loss(trace):.2f}"
    values |= {
        "gaps": str(_count_gaps(trace)),
        "outages": str(len(trace.outages_s)),
        "longest s": f"{longest_outage_s(trace):.1f}",
    }
    return _make_table(f"{trace.name} ({trace.source})", values)


def _count_gaps(trace: NetworkTrace) -> int:
    """Return the number of pauses between rows in which no outage lies."""
    gaps = find_gaps(trace.time_s)
    starts_s = np.array([start_s for start_s, _ in trace.outages_s])
    return sum(
        not np.any((starts_s >= trace.time_s[place]) & (starts_s < trace.time_s[place + 1]))
        for place in gaps
    )


def _print_table(title: str, values: dict[str, str]) -> None:
    play.make_console().print(_make_table(title, values))


def _make_table(title: str, values: dict[str, str]) -> Table:
    table = Table(*(Column(name, justify="right") for name in values), title=title)
    table.add_row(*values.values())
    return table
