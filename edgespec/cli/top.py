"""``edgespec top``: how an agent or a verifier is doing, live in a terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Annotated, Final

import typer
from rich.console import Console

from edgespec.cli.running import reported
from edgespec.cli.talk.editor import silent_keyboard
from edgespec.cli.talk.live_region import LiveRegion
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
Once = Annotated[bool, typer.Option("--once", help="Print one table and leave, as in a pipe")]
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
        if once or not console.is_terminal:
            _print_once(source, console)
        else:
            _watch(source, console, interval)


def _print_once(source: Source, console: Console) -> None:
    """One table. Rates of a verifier are differences of counters, so it is looked at twice."""
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
    region, size, trouble = LiveRegion(console.file), console.size, ""
    try:
        with silent_keyboard():
            while True:
                if console.size != size:
                    region.let_go()
                    size = console.size
                region.draw(_lines(console, found, trouble))
                sleep(interval_s)
                try:
                    found, heard_at, trouble = source.read(), clock(), ""
                except (UnreachableError, ReadingError) as error:
                    trouble = f"no answer for {clock() - heard_at:.0f} s: {error}"
    finally:
        region.let_go()


def _lines(console: Console, found: Reading, trouble: str) -> list[str]:
    """What fits on the terminal, which has to be one line less than it is high."""
    width = max(1, console.width - 1)  # behind a full line some terminals erase its last letter
    with console.capture() as captured:
        console.print(rendered(found, width, trouble), width=width)
    lines = [line.rstrip() for line in captured.get().rstrip("\n").split("\n")]
    return lines[: max(1, console.size.height - 1)]


def _first(source: Source) -> Reading:
    try:
        return source.read()
    except (UnreachableError, ReadingError) as error:
        raise SetupError(
            f"nothing to watch at {source.base}\n"
            "  start one:   edgespec serve, or edgespec verifier --metrics-port 9464\n"
            f"  ({error})"
        ) from error
