"""``edgespec-sim trace``: look at a network trace, and write it as a plain CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from edgespec.cli.running import reported, say
from edgespec_sim.commands.play import output
from edgespec_sim.traces.formats import read_trace, write_plain
from edgespec_sim.traces.generators import KINDS, generate
from edgespec_sim.traces.network_trace import NetworkTrace, TraceStatistics, rtt_line

_SEED, _SECONDS = 1, 600.0
"""Of a generated trace."""


def trace(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="A trace file, or generate:KIND", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Write time_s,rtt_ms[,loss,up_mbps,down_mbps]"),
    ] = None,
) -> None:
    """Show a trace of any known format: statistics, round-trip time over time, outages.

    edgespec-sim trace ride.ping.txt --out ride.csv

    edgespec-sim trace generate:starlink
    """
    with reported():
        found = _load(file)
        console = output()
        console.print(_statistics(found))
        console.print(rtt_line(found, width=min(console.width, 120) - 2))
        if out is not None:
            out.write_text(write_plain(found), encoding="utf-8")
            say(f"wrote {out}: {len(found.time_s)} rows, {found.duration_s:.0f} s")


def _load(file: str) -> NetworkTrace:
    kind = file.removeprefix("generate:")
    if kind != file:
        return generate(kind, _SEED, _SECONDS)
    if not Path(file).is_file():
        kinds = ", ".join(f"generate:{kind}" for kind in KINDS)
        raise ValueError(f"{file}: no such file; generated ones are {kinds}")
    return read_trace(Path(file))


def _statistics(trace: NetworkTrace) -> Table:
    statistics = TraceStatistics.of(trace)
    table = Table(title=f"{trace.name} ({trace.source})")
    for name in ("length s", "rows", "median ms", "p95 ms", "p99 ms", "autocorrelation 1 s"):
        table.add_column(name, justify="right")
    for name in ("loss %", "outages", "longest s"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{trace.duration_s:.0f}",
        str(len(trace.time_s)),
        f"{1e3 * statistics.rtt_median_s:.1f}",
        f"{1e3 * statistics.rtt_p95_s:.1f}",
        f"{1e3 * statistics.rtt_p99_s:.1f}",
        f"{statistics.autocorrelation:.2f}",
        f"{100 * statistics.loss:.2f}",
        str(len(trace.outages_s)),
        f"{statistics.outage_max_s:.1f}",
    )
    return table
