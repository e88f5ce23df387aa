"""Progress of a long run on stderr: a bar on a terminal, a line a step in a log."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class BenchProgress:
    """``runner.Progress`` as a context manager; ``expected_s`` is the length of the bar."""

    def __init__(self, console: Console, expected_s: float) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("loading", total=expected_s)
        self._stack = ExitStack()

    def __enter__(self) -> BenchProgress:
        self._stack.enter_context(self._bar)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def say(self, text: str) -> None:
        """A step begins; in a log this is a line, on a terminal the bar's label."""
        if self._console.is_terminal:
            self._bar.update(self._task, description=text)
        else:
            self._console.print(text, markup=False, highlight=False)

    def done(self, what: str, worth_s: float) -> None:
        self._bar.update(self._task, advance=worth_s, description=what)
