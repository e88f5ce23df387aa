"""Where a chat's messages come from: an editor on a terminal, plain lines from anywhere else. With
them what a line that begins with a slash asks for, what a Ctrl-C ends, and the history of what was
typed, which is kept in a file of its own, newest last.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, Protocol

from prompt_toolkit.history import FileHistory

from edgespec.cli.running import say
from edgespec.cli.talk.record import private_folder, state_folder
from edgespec.config.files import PRIVATE, replace_file

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings


class Name(Enum):
    HELP = "/help"
    SYSTEM = "/system"
    SAVE = "/save"
    LOAD = "/load"
    MODEL = "/model"
    STATS = "/stats"
    RESET = "/reset"
    QUIT = "/quit"


_ABOUT: Final = {
    Name.HELP: ("", "this list"),
    Name.SYSTEM: ("[TEXT|-]", "tell the model how to be; alone: show it; -: no more"),
    Name.SAVE: ("FILE", "write the conversation to a file"),
    Name.LOAD: ("FILE", "go on with a conversation from a file"),
    Name.MODEL: ("[NAME]", "which models talk, and where; NAME: talk with this one"),
    Name.STATS: ("", "numbers of the last reply, and of this chat"),
    Name.RESET: ("", "forget the conversation and begin another"),
    Name.QUIT: ("", "leave, like Ctrl-D"),
}

_NEEDS_FILE: Final = (Name.SAVE, Name.LOAD)

_TAKES_TEXT: Final = (Name.SYSTEM, Name.MODEL, *_NEEDS_FILE)


class CommandError(ValueError):
    """The line is no command; the message says what would be one."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command and what stood behind it, without spaces around."""

    name: Name
    argument: str = ""


def is_command(line: str) -> bool:
    """Two slashes begin a message that begins with one."""
    return line.startswith("/") and not line.startswith("//")


def message_of(line: str) -> str:
    """What is sent to the model for a line that is no command."""
    return line[1:] if line.startswith("//") else line


def parse(line: str) -> Command:
    """Raises ``CommandError``."""
    word, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    try:
        name = Name(word)
    except ValueError:
        close = difflib.get_close_matches(word, [one.value for one in Name], 1)
        hint = f"did you mean {close[0]}?" if close else "/help lists the commands"
        raise CommandError(f"unknown command {word!r}; {hint}") from None
    if name in _NEEDS_FILE and not argument:
        raise CommandError(f"{word} needs the name of a file: {word} FILE")
    if argument and name not in _TAKES_TEXT:
        raise CommandError(f"{word} takes nothing behind it, but got {argument!r}")
    return Command(name, argument)


def command_help() -> str:
    """The commands and keys, a line each."""
    width = max(len(f"{name.value} {_ABOUT[name][0]}") for name in Name)
    lines = [f"  {f'{name.value} {_ABOUT[name][0]}':{width}}  {_ABOUT[name][1]}" for name in Name]
    keys = (
        "Enter sends; Alt-Enter, Ctrl-J or a \\ at the end of a line begins another line",
        "Ctrl-C ends a reply and keeps what came of it; Ctrl-D leaves",
        "// at the beginning sends a message that begins with a slash",
    )
    return "\n".join([*lines, *(f"  {key}" for key in keys)])


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

        from edgespec.cli.talk.editor import TypedHistory, history_file

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


_MOST_ENTRIES: Final = 1000

_MOST_BYTES: Final = 4 << 20

_BETWEEN: Final = b"\n# "

"""Each entry begins with a comment that tells when."""


class TypedHistory(FileHistory):
    """A history that goes without its file where that cannot be written: no message is lost to a
    full disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._trouble: OSError | None = None
        self._told = False

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError as error:
            self._trouble = error

    def trouble(self) -> str:
        """Why what was typed is not kept, in words, the first time this is asked; else empty."""
        if self._trouble is None or self._told:
            return ""
        self._told = True
        why = self._trouble.strerror or str(self._trouble)
        return f"{os.fspath(self.filename)!s}: what you type is not kept: {why}"


def history_file() -> Path | None:
    """The file of what was typed before, its oldest entries dropped; None where none can be."""
    try:
        path = state_folder() / "chat_history"
        private_folder(path.parent)
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE)
        with os.fdopen(number, "rb") as file:
            os.fchmod(number, PRIVATE)
            size = os.fstat(number).st_size
            file.seek(max(0, size - _MOST_BYTES))
            text = file.read()
        entries = text.split(_BETWEEN)
        if size > _MOST_BYTES or len(entries) > _MOST_ENTRIES:
            newest = entries[1:][-_MOST_ENTRIES // 2 :]  # the first may have lost its beginning
            replace_file(path, b"".join(_BETWEEN + entry for entry in newest))
    except OSError:
        return None
    return path


class CtrlC:
    """``arm`` it, inside of a ``try``, for each thing that a Ctrl-C may end. The next one cancels
    the ``task`` that was named since, and raises ``KeyboardInterrupt`` where there is none. Those
    behind it, of who is impatient, do nothing, so that what it ended can be tidied up."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self._armed = False

    def arm(self) -> None:
        self.task, self._armed = None, True

    def disarm(self) -> None:
        self._armed = False

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Meanwhile; one that whoever started us wants ignored stays so."""
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN:
            yield
            return
        signal.signal(signal.SIGINT, self._pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        armed, self._armed = self._armed, False
        if not armed:
            return
        if self.task is None:
            raise KeyboardInterrupt
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)
