"""Plays scenarios for the commands: options, progress on the terminal, and tables of results.

Progress is a bar on a terminal, and an occasional line elsewhere. Ctrl-C and SIGTERM end the
workers at once; the caller keeps what was complete by then.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from edgespec.cli.options import option
from edgespec.cli.running import Interrupted, say, signals_handled_by
from edgespec.config import ConfigError
from edgespec_sim.playing import (
    PlayProgress,
    Workers,
    default_processes,
)
from edgespec_sim.report import tables
from edgespec_sim.run_summary import LOSSY, WARNING, RunSummary, Spread

_SEED = option("Play this seed; equal seeds give equal results, bit for bit", min=0)
SeedOption = Annotated[int | None, _SEED]
_SEEDS = option(
    "Number of seeds, counted from --seed or 1; default: as many as the result needs",
    min=1,
    max=10_000,
)
SeedsOption = Annotated[int | None, _SEEDS]
TimeOption = Annotated[float, option("Seconds after which no further seed is started", min=1.0)]
_SET = option("Change a key, as links.wan.rtt_ms=80", "--set", metavar="KEY=VALUE")
SettingsOption = Annotated[list[str] | None, _SET]


@contextmanager
def named_as_typed(options: Mapping[str, str]) -> Iterator[None]:
    """Rewrite the errors raised in this block so that they name the option that the user typed.

    ``options`` maps the name under which the value is known inside, such as a key of a scenario, to
    the option. Every ``ValueError`` of the block becomes a ``ConfigError``."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        for name in sorted(options, key=len, reverse=True):
            known = rf"(?:command line: )?(?<![\w.-]){re.escape(name)} is\b"
            text = re.sub(known, f"{options[name]} is", text)
        raise ConfigError(text) from None


_LINE_EVERY_S: Final = 10.0


class ShownProgress:
    """A watcher that shows the progress as a bar on a terminal. Elsewhere it prints a line for each
    round, and one every 10 s. With ``quiet`` it shows nothing."""

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.bar = _make_bar(quiet)
        self._overall = self.bar.add_task("simulated", total=0.0)
        self._lines_every_s = _LINE_EVERY_S if self.bar.disable and not quiet else math.inf
        self._clock, self._line_at = clock, math.inf

    def __call__(self, progress: PlayProgress) -> None:
        self.bar.update(
            self._overall,
            total=progress.total_s,
            completed=progress.done_s,
            description=progress.doing,
        )
        if self._lines_every_s < math.inf:
            now = self._clock()
            if progress.is_new_round or now >= self._line_at:
                self._line_at = now + self._lines_every_s
                total_s = progress.total_s
                say(f"{progress.doing}: {progress.done_s:.0f} of {total_s:.0f} virtual s")


@contextmanager
def shown_workers(*, quiet: bool = False) -> Iterator[Workers]:
    """Enter workers on all cores whose progress is shown. A signal that stops the command raises
    ``Interrupted``."""
    with watched(quiet=quiet) as shown, Workers(default_processes(), shown) as workers:
        yield workers


@contextmanager
def watched(*, quiet: bool = False) -> Iterator[ShownProgress]:
    """Enter a watcher that shows the progress. A signal that stops the command raises
    ``Interrupted``."""
    shown = ShownProgress(quiet=quiet)
    with shown.bar, signals_handled_by(_raise_interrupted):
        yield shown


def _make_bar(quiet: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} virtual s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )


def _raise_interrupted(number: int, frame: FrameType | None) -> None:
    """Unwind like Ctrl-C on a signal, so that the workers end with this process."""
    raise Interrupted(number)


_SHOWN: Final = (
    *("TTFT p50 ms", "TPOT mean ms", "p95 ms", "speed-up", "tokens / pass", "acceptance"),
    *("wasted / token", "tokens/s", "GPU busy", "differ"),
)
"""The columns of a report page that a terminal shows."""


def arms_table(summary: RunSummary) -> Table:
    columns = tables.arm_columns(summary)
    table = Table(
        title=f"{summary.marked_name}, {tables.seeds_played(summary)}: {summary.tokens_from}",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("\narm", no_wrap=True)
    for name in (*_SHOWN, "requests"):
        table.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True)
    table.caption = (
        "speed-up: ratio of mean TPOTs, in brackets its 95 % interval; acceptance: share of"
        " positions at which the draft's first candidate was right; differ: tokens that are not"
        " the target's"
    )
    for arm in summary.arms:
        failed = f" ({arm.all.failed} failed)" if arm.all.failed else ""
        ended = tables.count(arm.all.requests) + failed
        cells = [columns[name](arm).replace(" (", "\n(") for name in _SHOWN]
        table.add_row(arm.name, *cells, ended)
    return table


def service_table(summary: RunSummary) -> Table | None:
    """Compare the arms with their objectives. None if neither objectives nor arrivals are given."""
    judged = [(arm, arm.attainment) for arm in summary.arms if arm.attainment is not None]
    if not judged:
        return None
    first = judged[0][1]
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in (
        "\narm",
        "TTFT ms\np50",
        f"p95 (95 %)\n{_show_objective(first.slo_ttft_s)}",
        "TPOT ms\np50",
        f"p95 (95 %)\n{_show_objective(first.slo_tpot_s)}",
        "attained\n(95 %)",
        "goodput\nrequests/s",
        "\nasked",
        "un-\nfinished",
    ):
        table.add_column(name, justify="left" if name == "\narm" else "right", no_wrap=True)
    table.caption = (
        "attained: share of the requests that ended and met every objective; goodput: such"
        " requests per second; TTFT is counted from arrival"
    )
    for arm, attained in judged:
        low, high = attained.share_interval
        table.add_row(
            arm.name,
            tables.quantile_ms(arm.all.ttft_s, 0.5),
            _show_p95(arm.all.ttft_s, attained.ttft_p95_interval),
            tables.quantile_ms(arm.all.tpot_s, 0.5),
            _show_p95(arm.all.tpot_s, attained.tpot_p95_interval),
            f"{100 * attained.share:.1f} % ({100 * low:.0f}–{100 * high:.0f})",
            f"{attained.goodput:.2f}",
            str(attained.asked),
            str(arm.all.unfinished),
        )
    return table


def _show_objective(slo_s: float | None) -> str:
    return "no objective" if slo_s is None else f"objective {1e3 * slo_s:g}"


def _show_p95(spread: Spread | None, ends: tuple[float, float] | None) -> str:
    if spread is None or ends is None:
        return "–"
    return f"{1e3 * spread.p95:.1f} ({1e3 * ends[0]:.1f}–{1e3 * ends[1]:.1f})"


def make_console() -> Console:
    """Return the console for tables: as wide as the terminal, or wide enough without one."""
    return Console(width=None if sys.stdout.isatty() else 120)


def show(summary: RunSummary) -> None:
    make_console().print(arms_table(summary))
    service = service_table(summary)
    if service is not None:
        make_console().print(service)
    for header, rows in (
        (tables.DRAFTS_HEADER, tables.drafts_rows(summary)),
        (tables.POWER_HEADER, tables.power_rows(summary)),
        (tables.RAN_HEADER, tables.ran_rows(summary)),
    ):
        if rows:
            table = Table(*header, box=box.SIMPLE, padding=(0, 1, 0, 0))
            for row in rows:
                table.add_row(*row)
            make_console().print(table)
    for index, note in enumerate(summary.notes):
        is_memory = note.startswith("Memory: ") and "memory has room" in note
        if note.startswith((LOSSY, WARNING)) or is_memory or (index == 0 and "peed-ups" in note):
            say(note)
