"""``edgespec-sim report``: pages and tables of a run that is over, simulated or real."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.running import reported, say
from edgespec_sim.commands.seeds import ForceOption
from edgespec_sim.report.write import report_on

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="A run's folder, its summary.json, or one or two traces (device's, verifier's)",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", help="Where to write (default: beside the run)"),
]


def report(runs: Runs, out: Out = None, force: ForceOption = False) -> None:
    """Write the report of a run: a page, tables, and a timeline for ui.perfetto.dev.

    A trace is what --trace wrote, of `edgespec generate`, `chat` or `verifier`. What a run left is
    never replaced by less: a trace in a run's folder gets a folder of its own there.

    [dim]edgespec-sim report runs/household[/]

    [dim]edgespec-sim report device.jsonl verifier.jsonl --out report[/]
    """
    with reported():
        for path in report_on(runs, out, force=force):
            size = path.stat().st_size
            say(
                f"wrote {path} ({size / 1e6:.1f} MB)" if size >= 1e6 else f"wrote {path} ({size} B)"
            )
