"""A chat's terminal: where messages are typed, what a Ctrl-C ends, and how a reply is drawn, as
markdown that grows above one line of numbers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from prompt_toolkit.history import FileHistory
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import SegmentLines
from rich.text import Text

from edgespec.config.files import PRIVATE
from edgespec.core.device.memory import in_mib
from edgespec.core.protocol.checks import printable
from edgespec.core.protocol.messages import FinishReason
from edgespec.device.agent import Chunk
from edgespec.telemetry.agent_status import AgentStatus, VerifierState

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

PROMPT: Final = "> "
FRAME_S: Final = 0.1
_NUMBERS_EVERY_S: Final = 1.0
_DRAWN: Final = 8000
"""Characters of a growing reply that are rendered, ten times a second."""


def is_drawable() -> bool:
    """Whether keyboard and screen are a terminal that knows how to move its cursor."""
    both = sys.stdin.isatty() and sys.stdout.isatty()
    return both and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


class TypedHistory(FileHistory):
    """What was typed before, readable for its owner alone. No message is lost to a full disk, only
    its place in the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        with contextlib.suppress(OSError):
            path.touch(PRIVATE)

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


class TerminalEditor:
    """Several lines, a history, completion of ``commands`` (by name, and whether a file stands
    behind it), and a line of numbers below. It runs in the agent's own event loop, so the link is
    kept up while somebody types. ``status`` makes the line below for a width in columns;
    ``history`` None keeps nothing on disk."""

    def __init__(
        self,
        runner: asyncio.Runner,
        status: Callable[[int], str],
        history: Path | None,
        commands: Mapping[str, bool],
    ) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import NestedCompleter, PathCompleter

        files = PathCompleter(expanduser=True)
        self._runner = runner
        self._asking: asyncio.Task[str] | None = None
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

    def ask(self) -> str:
        """The next message. Raises ``EOFError`` at the end, ``KeyboardInterrupt`` for a Ctrl-C."""
        try:
            return self._runner.run(self._ask())
        except (SystemExit, KeyboardInterrupt):  # a signal: else it would be set back too late
            self._runner.run(self._ended())
            raise

    async def _ask(self) -> str:
        self._asking = asyncio.current_task()
        return await self._session.prompt_async()

    async def _ended(self) -> None:
        """The question that was left open has left the terminal as it found it."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])


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
    """Keys are not echoed while nobody asks for them: they would stand in the middle of what is
    drawn. What is typed waits for the next message; Ctrl-C works."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    silent[0] &= ~termios.ICRNL  # an Enter stays one
    termios.tcsetattr(number, termios.TCSANOW, silent)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(number, termios.TCSANOW, before)


class CtrlC:
    """A Ctrl-C ends what runs in ``armed``, which stands inside of a ``try``: it cancels the
    ``task`` that was named since, and raises ``KeyboardInterrupt`` where there is none. Those
    behind it, of who is impatient, do nothing, so that what it ended can be tidied up."""

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
    """A ``View`` on a terminal. While a reply grows its end is drawn over and over, as much as the
    terminal has room for; all of it is printed when it is complete. ``status`` makes the last line
    for a width in columns."""

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
        self._text += printable(chunk.text)
        self.tick()

    def tick(self) -> None:
        """Draw the frame anew, if it is time to."""
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
            print("the text ends here: the model's context is full", file=sys.stderr)

    def _frame(self) -> RenderableType:
        size = self._console.size
        status = Text(self._status(size.width), style="dim", no_wrap=True, overflow="crop")
        text = self._text
        if not text.strip():
            return status
        if len(text) > _DRAWN:  # its end; a block of code that it begins in is opened again
            start = text.find("\n", len(text) - _DRAWN) + 1
            text = "```\n" * (text.count("```", 0, start) % 2) + text[start:]
        return Group(self._rendered(text, max(1, size.height - 3)), status)

    def _rendered(self, text: str, most: int = 0) -> RenderableType:
        """The lines of ``text``, the last ``most`` of them (0: all)."""
        try:
            shown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
            lines = self._console.render_lines(shown, pad=False)
        except Exception:  # a text that a renderer stumbles over is still a text
            lines = self._console.render_lines(Text(text.strip("\n"), overflow="fold"), pad=False)
        return SegmentLines(lines[-most:], new_lines=True)


def reading_line(read: int, prompt_length: int, width: int) -> str:
    """Return what stands in the line of numbers while the verifier reads a long prompt: how many
    of its tokens are read, in at most ``width`` columns."""
    return f"reading the prompt, {read:,} of {prompt_length:,} tokens"[:width]


def status_line(status: AgentStatus, width: int, last_per_s: float | None = None) -> str:
    """At most ``width`` columns, by how much it matters: what does not fit is left out, and no
    number is cut. ``last_per_s`` is shown while nothing runs."""
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
