"""``edgespec top``: how an agent or a verifier is doing, live in a terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from edgespec.cli.running import reported
from edgespec.cli.top_view.reading import Reading, ReadingError
from edgespec.cli.top_view.source import Source, UnreachableError
from edgespec.cli.top_view.table import rendered
from edgespec.compose import SetupError

DEFAULT_URL: Final = "http://127.0.0.1:7421"
KEY_VARIABLE: Final = "EDGESPEC_ENDPOINT_KEY"
_ONCE_S: Final = 1.0

Url = Annotated[
    str,
    typer.Argument(
        metavar="[URL]",
        help="An agent (`edgespec serve`) or the metrics of a verifier (`edgespec verifier "
        "--metrics-port`): HOST:PORT, or with /status.json or /metrics at its end",
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Print one table and leave")]
Interval = Annotated[
    float, typer.Option("--interval", min=0.2, max=3600.0, help="Seconds from one look to the next")
]


def top(url: Url = DEFAULT_URL, once: Once = False, interval: Interval = 1.0) -> None:
    """Watch an agent or a verifier: sessions, tokens a second, acceptance, passes, memory.

    A key that an agent asks for is taken from EDGESPEC_ENDPOINT_KEY. Ctrl-C leaves.

    [dim]edgespec top[/]

    [dim]edgespec top gpu-box:9464 --once[/]
    """
    with reported():
        source = Source(url, os.environ.get(KEY_VARIABLE, "").strip())
        console = Console(highlight=False)
        if once:
            _print_once(source, console)
        else:
            _watch(source, console, interval)


def _print_once(source: Source, console: Console) -> None:
    found = _first(source)
    if source.needs_two:
        time.sleep(_ONCE_S)
        found = _first(source)
    console.print(rendered(found, console.width))


def _watch(
    source: Source,
    console: Console,
    interval_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until Ctrl-C. A source that goes away is a state; one that never was there is an error."""
    found, heard_at = _first(source), clock()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        trouble = ""
        while True:
            live.update(rendered(found, console.width, trouble), refresh=True)
            sleep(interval_s)
            try:
                found, heard_at, trouble = source.read(), clock(), ""
            except (UnreachableError, ReadingError) as error:
                trouble = f"no answer for {clock() - heard_at:.0f} s: {error}"


def _first(source: Source) -> Reading:
    try:
        return source.read()
    except (UnreachableError, ReadingError) as error:
        raise SetupError(
            f"nothing to watch at {source.base}\n"
            "  start one:   edgespec serve, or edgespec verifier --metrics-port 9464\n"
            f"  ({error})"
        ) from error
