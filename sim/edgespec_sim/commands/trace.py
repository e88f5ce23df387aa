"""``edgespec-sim trace``: look at network traces, make them, translate them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from edgespec.cli.running import EXIT_CODES, reported, say
from edgespec_sim.commands.simulate import output
from edgespec_sim.report.document import write_page
from edgespec_sim.report.trace_page import render_trace
from edgespec_sim.traces.formats import FORMATS, read_trace, write_plain
from edgespec_sim.traces.generators import KINDS, generate
from edgespec_sim.traces.network_trace import NetworkTrace, TraceStatistics, describe, rtt_line

app = typer.Typer(no_args_is_help=True, help="Look at network traces, make and translate them.")
File = Annotated[
    str, typer.Argument(metavar="FILE", help="A trace file, or generate:KIND", show_default=False)
]
Format = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join(FORMATS)} \\[default: told from the content]"),
]
Seed = Annotated[int, typer.Option(help="Of a generated trace")]
Seconds = Annotated[float, typer.Option(min=1.0, help="Length of a generated trace")]
Pair = Annotated[
    tuple[int, int] | None, typer.Option(help="Two nodes, of a matrix of round-trip times")
]


@app.command(epilog=EXIT_CODES)
def inspect(
    file: File,
    format: Format = None,
    pair: Pair = None,
    seed: Seed = 1,
    seconds: Seconds = 600.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Draw it as a page, too")
    ] = None,
) -> None:
    """Draw a trace: statistics, round-trip time over time, outages.

    edgespec-sim trace inspect ride.csv --out ride.html

    edgespec-sim trace inspect generate:starlink
    """
    with reported():
        trace = _load(file, format, pair, seed, seconds)
        console = output()
        console.print(_statistics(trace))
        console.print(rtt_line(trace, width=min(console.width, 120) - 2))
        if out is not None:
            write_page(out, render_trace(describe(trace)))
            say(f"wrote {out}")


@app.command(epilog=EXIT_CODES)
def convert(
    file: File,
    out: Annotated[Path, typer.Argument(help="time_s,rtt_ms[,loss,up_mbps,down_mbps]")],
    format: Format = None,
    pair: Pair = None,
    seed: Seed = 1,
    seconds: Seconds = 600.0,
) -> None:
    """Write a trace of any known format, or a generated one, as a plain CSV.

    edgespec-sim trace convert generate:lte lte.csv --seed 7 --seconds 300
    """
    with reported():
        trace = _load(file, format, pair, seed, seconds)
        out.write_text(write_plain(trace), encoding="utf-8")
        say(f"wrote {out}: {len(trace.time_s)} rows, {trace.duration_s:.0f} s")


def _load(
    file: str, format: str | None, pair: tuple[int, int] | None, seed: int, seconds: float
) -> NetworkTrace:
    kind = file.removeprefix("generate:")
    if kind != file:
        return generate(kind, seed, seconds)
    if not Path(file).is_file():
        kinds = ", ".join(f"generate:{kind}" for kind in KINDS)
        raise ValueError(f"{file}: no such file; generated ones are {kinds}")
    return read_trace(Path(file), format=format, pair=pair)


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
