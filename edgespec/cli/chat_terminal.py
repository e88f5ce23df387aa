"""Terminal of a chat: an editor for messages, Ctrl-C, and replies that are drawn as markdown.

A reply grows above one line of numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from prompt_toolkit.history import FileHistory
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import SegmentLines
from rich.text import Text

from edgespec import operating_system
from edgespec.config.files import PRIVATE
from edgespec.core.device.memory import in_mib
from edgespec.core.protocol.checks import make_printable
from edgespec.core.protocol.messages import FinishReason
from edgespec.device.agent import Chunk
from edgespec.telemetry.agent_status import AgentStatus, VerifierState

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

_T = TypeVar("_T")
PROMPT: Final = "> "
FRAME_S: Final = 0.1
"""Shortest time between two drawings of a growing reply."""
_NUMBERS_EVERY_S: Final = 1.0
_DRAWN_CHARS: Final = 8000
"""Characters at the end of a growing reply that are rendered for each drawing."""


def is_drawable() -> bool:
    """Return whether stdin and stdout are a terminal that can move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and operating_system.can_move_cursor()


class TypedHistory(FileHistory):
    """Messages typed before, in a file that only its owner can read. On a full disk a message is
    missing from the file, and the chat continues."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        with contextlib.suppress(OSError):
            path.touch(PRIVATE)

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


class TerminalEditor:
    """Editor for messages of several lines, with a history, completion, and a line of numbers.

    It runs in the agent's own event loop, so the link is kept up while the user types.

    ``runner``: runs the agent's event loop.
    ``status``: returns the line of numbers for a width in columns.
    ``history``: file of earlier messages, or None to keep nothing on disk.
    ``commands``: commands to complete, by name, and whether each takes a file."""

    def __init__(
        self,
        runner: SignalRunner,
        status: Callable[[int], str],
        history: Path | None,
        commands: Mapping[str, bool],
    ) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import NestedCompleter, PathCompleter

        files = PathCompleter(expanduser=True)
        self._runner = runner
        self._reading: asyncio.Task[str] | None = None
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_bindings(),
            history=None if history is None else TypedHistory(history),
            completer=NestedCompleter(
                {name: files if takes_file else None for name, takes_file in commands.items()}
            ),
            complete_while_typing=False,
            reserve_space_for_menu=4,
            enable_open_in_editor=True,
            bottom_toolbar=lambda: status(self._session.output.get_size().columns - 1),
            refresh_interval=_NUMBERS_EVERY_S,
        )

    def read_message(self) -> str:
        """Return the next message. Raises ``EOFError`` at the end of the input, and
        ``KeyboardInterrupt`` for a Ctrl-C."""
        try:
            return self._runner.run(self._read())
        except (SystemExit, KeyboardInterrupt):  # a signal; the terminal must be restored now
            self._runner.run(self._cancel_read())
            raise

    async def _read(self) -> str:
        self._reading = asyncio.current_task()
        return await self._session.prompt_async()

    async def _cancel_read(self) -> None:
        """Cancel a read that a signal has left, and wait until it has restored the terminal."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        typed = buffer.document
        if typed.text_before_cursor.endswith("\\") and typed.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


@contextlib.contextmanager
def silent_keyboard() -> Iterator[None]:
    """Turn off the terminal's echo in this block, because keys would appear in the middle of a
    reply. Typed keys wait for the next message; Ctrl-C still works."""
    with operating_system.silent_keyboard(sys.stdin.fileno()):
        yield


class SignalRunner:
    """Runs coroutines, one after the other, in one event loop that a signal can end.

    ``end`` is the handler of the signals. It cancels the coroutine that runs, so that this can
    clean up, and ``run`` then raises ``SystemExit``. Raised in the handler itself, the exception
    would hit whatever step the loop happens to take, and the loop would report it as the failure of
    that step. Where no coroutine runs, the handler raises it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._task: asyncio.Task[Any] | None = None
        self._number = 0
        """Number of the signal that is to end the process; 0 if there is none."""

    def __enter__(self) -> Self:
        self._runner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.close()

    def run(self, coro: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coro``, and return what it returns. Raises ``SystemExit`` after a signal."""
        try:
            return self._runner.run(self._watch(coro))
        finally:
            if number := self._number:
                self._number = 0  # what closes the agent afterwards is run to its end
                raise SystemExit(128 + number)

    async def _watch(self, coro: Coroutine[Any, Any, _T]) -> _T:
        self._task = asyncio.current_task()
        try:
            return await coro
        finally:
            self._task = None

    def end(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that ends the process."""
        if self._task is None:
            raise SystemExit(128 + number)
        self._number = number
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)


class CtrlC:
    """Handler of Ctrl-C in a chat.

    In the block ``armed``, which stands inside a ``try``, a Ctrl-C cancels ``task`` if that is set,
    and raises ``KeyboardInterrupt`` otherwise. Further ones do nothing, so that the work that was
    stopped can clean up."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self._armed = False

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        self.task, self._armed = None, True
        try:
            yield
        finally:
            self._armed = False

    def pressed(self, number: int, frame: FrameType | None) -> None:
        armed, self._armed = self._armed, False
        if not armed:
            return
        if self.task is None:
            raise KeyboardInterrupt
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)


class MarkdownView:
    """``View`` that draws a reply as markdown on a terminal.

    While the reply grows, as much of its end as fits on the screen is drawn again and again. The
    whole reply is printed when it is complete. ``status`` returns the last line for a width in
    columns."""

    def __init__(self, status: Callable[[int], str]) -> None:
        self._console = Console(force_terminal=True, highlight=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._status, self._text = status, ""
        self._frame_at = -math.inf
        self._finish: FinishReason | None = None

    def show(self, chunk: Chunk) -> None:
        self._finish = chunk.finish
        self._text += make_printable(chunk.text)
        self.refresh()

    def refresh(self) -> None:
        """Draw again, if the last drawing is old enough."""
        now = time.monotonic()
        if now - self._frame_at < FRAME_S:
            return
        self._frame_at = now
        self._live.start()
        self._live.update(self._frame(), refresh=True)

    def end(self) -> None:
        self._live.stop()
        text, self._text = self._text, ""
        if text.strip():
            self._console.print(self._rendered(text))
        if self._finish is FinishReason.CONTEXT:
            print("the output ends here: the model's context is full", file=sys.stderr)

    def _frame(self) -> RenderableType:
        size = self._console.size
        status = Text(self._status(size.width), style="dim", no_wrap=True, overflow="crop")
        text = self._text
        if not text.strip():
            return status
        if len(text) > _DRAWN_CHARS:  # the cut may fall into a block of code, which is reopened
            start = text.find("\n", len(text) - _DRAWN_CHARS) + 1
            text = "```\n" * (text.count("```", 0, start) % 2) + text[start:]
        return Group(self._rendered(text, max(1, size.height - 3)), status)

    def _rendered(self, text: str, max_lines: int = 0) -> RenderableType:
        """Return the last ``max_lines`` lines of ``text`` as markdown; 0 returns all."""
        try:
            markdown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
            lines = self._console.render_lines(markdown, pad=False)
        except Exception:  # the renderer may fail on a strange text, which is then shown plainly
            lines = self._console.render_lines(Text(text.strip("\n"), overflow="fold"), pad=False)
        return SegmentLines(lines[-max_lines:], new_lines=True)


def prompt_line(read: int, prompt_length: int, width: int) -> str:
    """Return the line of numbers while the verifier reads a long prompt: how many of its tokens are
    read, in at most ``width`` columns."""
    return f"reading the prompt, {read:,} of {prompt_length:,} tokens"[:width]


def status_line(status: AgentStatus, width: int, last_per_s: float | None = None) -> str:
    """Return the line of numbers, in at most ``width`` columns.

    The most important numbers come first. A number that does not fit is left out, and none is cut.
    ``last_per_s`` is the speed to show while no reply is being received."""
    per_s = status.tokens_per_s if status.running else last_per_s
    verifier, memory, drafting = status.verifier, status.memory, status.drafting
    away = where = rtt = ""
    if verifier is not None and verifier.state is VerifierState.AWAY:
        since = "" if verifier.since_s is None else f" for {verifier.since_s:.0f} s"
        away = f"{verifier.address} away{since}"
    elif verifier is not None:
        where = verifier.address
    if verifier is not None and verifier.rtt_s is not None:
        rtt = f"RTT {verifier.rtt_s * 1e3:.0f} ms"
    budget = memory.budget_bytes
    parts = (
        away,
        "" if per_s is None else f"{per_s:.1f} tok/s",
        "" if drafting.acceptance is None else f"accepted {drafting.acceptance:.0%}",
        rtt,
        "" if budget is None else f"memory {memory.resident_bytes >> 20}/{in_mib(budget)}",
        where,
        "drafting rests" if drafting.worth is False and status.draft else "",
    )
    line = ""
    for part in filter(None, parts):
        longer = f"{line} · {part}" if line else part
        if len(longer) <= width:
            line = longer
    return line
