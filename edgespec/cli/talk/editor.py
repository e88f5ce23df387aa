"""Where the user's messages come from: an editor on a terminal, plain lines from anywhere else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Protocol

from edgespec.cli.running import say
from edgespec.cli.talk.commands import Name

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

PROMPT: Final = "> "
_MORE: Final = "  "
_REFRESH_S: Final = 1.0


class Editor(Protocol):
    def ask(self) -> str:
        """The next message. Raises ``EOFError`` at the end, ``KeyboardInterrupt`` for a Ctrl-C."""


class PlainEditor:
    """A line at a time."""

    def ask(self) -> str:
        return input(PROMPT)


class TerminalEditor:
    """Several lines, a history, completion of commands, and a line of numbers below.

    It runs in the agent's own event loop, so the link is kept up while somebody types. ``status``
    makes the line below for a width in columns; ``remember`` False keeps nothing on disk.
    """

    def __init__(
        self, runner: asyncio.Runner, status: Callable[[int], str], *, remember: bool
    ) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import NestedCompleter, PathCompleter
        from prompt_toolkit.history import InMemoryHistory

        from edgespec.cli.talk.history import TypedHistory, history_file

        path = history_file() if remember else None
        self._kept = None if path is None else TypedHistory(path)
        files = PathCompleter(expanduser=True)
        takes_file = (Name.SAVE, Name.LOAD)
        self._runner = runner
        self._asking: asyncio.Task[str] | None = None
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=_MORE,
            key_bindings=_bindings(),
            history=InMemoryHistory() if self._kept is None else self._kept,
            completer=NestedCompleter(
                {one.value: files if one in takes_file else None for one in Name}
            ),
            complete_while_typing=False,
            reserve_space_for_menu=4,
            enable_open_in_editor=True,
            bottom_toolbar=lambda: status(_columns()),
            refresh_interval=_REFRESH_S,
        )

    def ask(self) -> str:
        try:
            message = self._runner.run(self._ask())
        except (SystemExit, KeyboardInterrupt):  # a signal: else it would be set back too late
            self._runner.run(self._ended())
            raise
        if self._kept is not None and (trouble := self._kept.trouble()):
            say(trouble)
        return message

    async def _ask(self) -> str:
        self._asking = asyncio.current_task()
        return await self._session.prompt_async()

    async def _ended(self) -> None:
        """The question that was left open has left the terminal as it found it."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])


def make_editor(runner: asyncio.Runner, status: Callable[[int], str], *, remember: bool) -> Editor:
    """The terminal's editor where there is a terminal that can be drawn on, else plain lines."""
    if not is_drawable():
        return PlainEditor()
    return TerminalEditor(runner, status, remember=remember)


def is_drawable() -> bool:
    """Whether keyboard and screen are a terminal that knows how to move its cursor."""
    both = sys.stdin.isatty() and sys.stdout.isatty()
    return both and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


@contextlib.contextmanager
def silent_keyboard() -> Iterator[None]:
    """Keys are not echoed while nobody asks for them: they would stand in the middle of what is
    drawn. What is typed waits for the next message; Ctrl-C works."""
    try:
        import termios

        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (ImportError, OSError, ValueError):
        yield
        return
    except Exception:  # termios.error, which is of no class that could be named without it
        yield
        return
    silent = [*before]
    silent[3] &= ~termios.ECHO
    silent[0] &= ~termios.ICRNL  # an Enter stays one
    termios.tcsetattr(number, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if (
            buffer.document.text_before_cursor.endswith("\\")
            and buffer.document.is_cursor_at_the_end
        ):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns - 1
    except (OSError, ValueError):
        return 79
