"""How a reply looks on a terminal: as markdown that grows, above one line of numbers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import SegmentLines
from rich.text import Text

from edgespec.core.device.memory import in_mib
from edgespec.core.protocol.checks import printable
from edgespec.core.protocol.messages import FinishReason
from edgespec.device.agent import Chunk
from edgespec.telemetry.agent_status import AgentStatus, VerifierState, VerifierStatus

FRAME_S: Final = 0.1
_LEAST_RENDERED: Final = 21
"""Columns. With fewer, rich leaves letters out of tables and code."""
_DRAWN: Final = 8000
"""Characters of a growing reply that are rendered, ten times a second."""
_FENCE: Final = "```"
_BETWEEN = " · "


class MarkdownView:
    """A ``View`` on a terminal. While a reply grows its end is drawn over and over, as much as the
    terminal has room for; all of it is printed when it is complete. ``status`` makes the last line
    for a width in columns."""

    def __init__(
        self,
        status: Callable[[int], str],
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        size: tuple[int, int] | None = None,
    ) -> None:
        width, height = size or (None, None)
        self._console = Console(
            file=out or sys.stdout, force_terminal=True, highlight=False, width=width, height=height
        )
        self._status, self._clock = status, clock
        self._text = ""
        self._live: Live | None = None
        self._frame_at = -FRAME_S
        self._context_full = False

    def show(self, chunk: Chunk) -> None:
        self._context_full = chunk.finish is FinishReason.CONTEXT
        self._text += printable(chunk.text)
        self.tick()

    def tick(self) -> None:
        """Draw the frame anew, if it is time to."""
        if self._clock() - self._frame_at < FRAME_S:
            return
        self._frame_at = self._clock()
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(self._frame(), refresh=True)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        text, self._text = self._text, ""
        if text.strip():
            self._console.print(*self._rendered(text), sep="")
        if self._context_full:
            print("the text ends here: the model's context is full", file=sys.stderr)
        self._context_full = False

    def _frame(self) -> RenderableType:
        size = self._console.size
        status = Text(self._status(size.width), style="dim", no_wrap=True, overflow="crop")
        if not self._text.strip():
            return status
        room = max(1, size.height - 3)
        return Group(*self._rendered(self._tail(), room), status)

    def _tail(self) -> str:
        """The end of a long text; where it begins in a code block, the block is opened again."""
        if len(self._text) <= _DRAWN:
            return self._text
        start = self._text.find("\n", len(self._text) - _DRAWN) + 1
        inside = self._text.count(_FENCE, 0, start) % 2
        return (f"{_FENCE}\n" if inside else "") + self._text[start:]

    def _rendered(self, text: str, most: int | None = None) -> list[RenderableType]:
        """The lines of ``text``, the last ``most`` of them."""
        plain = Text(text.strip("\n"), overflow="fold")
        try:
            shown: RenderableType = plain
            if self._console.size.width >= _LEAST_RENDERED:
                shown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
            lines = self._console.render_lines(shown, pad=False)
        except Exception:  # a text that a renderer stumbles over is still a text
            lines = self._console.render_lines(plain, pad=False)
        return [SegmentLines(lines if most is None else lines[-most:], new_lines=True)]


def status_line(status: AgentStatus, width: int, last_per_s: float | None = None) -> str:
    """At most ``width`` columns; what matters least is left out first, and no number is cut.
    ``last_per_s`` is shown while nothing runs."""
    per_s = status.tokens_per_s if status.running else last_per_s
    parts = [part for part in _parts(status, per_s) if part]
    line = ""
    for part in parts:
        longer = f"{line}{_BETWEEN}{part}" if line else part
        if len(longer) <= width:
            line = longer
    return line


def _parts(status: AgentStatus, per_s: float | None) -> list[str]:
    """By how much they matter."""
    verifier = status.verifier
    away = verifier is not None and verifier.state is VerifierState.AWAY
    acceptance = status.drafting.acceptance
    return [
        _away(verifier) if away and verifier is not None else "",
        f"{per_s:.1f} tok/s" if per_s is not None else "",
        f"accepted {acceptance:.0%}" if acceptance is not None else "",
        _round_trip(verifier),
        _memory(status),
        verifier.address if verifier is not None and not away else "",
        "drafting rests" if status.drafting.worth is False and status.draft else "",
    ]


def _away(verifier: VerifierStatus) -> str:
    for_s = "" if verifier.since_s is None else f" for {verifier.since_s:.0f} s"
    return f"{verifier.address} away{for_s}"


def _round_trip(verifier: VerifierStatus | None) -> str:
    if verifier is None or verifier.rtt_s is None:
        return ""
    return f"RTT {verifier.rtt_s * 1e3:.0f} ms"


def _memory(status: AgentStatus) -> str:
    memory = status.memory
    if memory.budget_bytes is None:
        return ""
    return f"memory {memory.resident_bytes >> 20}/{in_mib(memory.budget_bytes)}"
