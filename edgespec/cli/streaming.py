"""Text that grows is shown here, and the numbers of how it came.

On a terminal a token's origin shows in its style, and what the verifier sent cannot control the
terminal; anywhere else the text is plain, so that what is piped is the text and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from edgespec.core.device.events import TokenKind
from edgespec.core.protocol.checks import printable
from edgespec.core.protocol.messages import FinishReason
from edgespec.device.agent import Chunk, GenerationStats

STYLES = {TokenKind.ACCEPTED: "green", TokenKind.CORRECTED: "bold red", TokenKind.DECODED: ""}
_MEANINGS = {
    TokenKind.ACCEPTED: "accepted: drafted on the device, confirmed by the target",
    TokenKind.CORRECTED: "corrected: the draft said otherwise",
    TokenKind.DECODED: "decoded: by the target alone",
}
_ENDINGS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length (max_tokens)",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.CONTEXT: "context (the model's context is full)",
}


class View(Protocol):
    """Where chunks go."""

    def show(self, chunk: Chunk) -> None:
        """Show one chunk, at once."""

    def end(self) -> None:
        """The text is complete, or broke off: leave the cursor at the start of a line."""


@dataclass(slots=True)
class TextView:
    """Text on stdout; ``color`` tells tokens apart. A ``terminal`` (by default: if stdout is one)
    gets printable characters only."""

    color: bool
    terminal: bool = field(default_factory=lambda: sys.stdout.isatty())
    _column_open: bool = False
    _context_full: bool = False

    def show(self, chunk: Chunk) -> None:
        self._context_full = chunk.finish is FinishReason.CONTEXT
        if self.color:
            console = Console(file=sys.stdout, force_terminal=True, highlight=False)
            parts = ((printable(p.text), STYLES[p.kind]) for p in chunk.pieces)
            console.print(Text.assemble(*parts), end="", soft_wrap=True)
        else:
            sys.stdout.write(printable(chunk.text) if self.terminal else chunk.text)
        sys.stdout.flush()
        if chunk.text:
            self._column_open = not chunk.text.endswith("\n")

    def end(self) -> None:
        if self._column_open:
            sys.stdout.write("\n")
            sys.stdout.flush()
        if self._context_full:  # who sees only the text cannot tell it from a full output
            print("the text ends here: the model's context is full", file=sys.stderr)
        self._column_open = self._context_full = False


@dataclass(slots=True)
class JsonView:
    """One JSON object a chunk on stdout."""

    def show(self, chunk: Chunk) -> None:
        line: dict[str, Any] = {
            "position": chunk.position,
            "tokens": list(chunk.tokens),
            "text": chunk.text,
            "pieces": [{"text": p.text, "kind": p.kind.value} for p in chunk.pieces],
            "finish": chunk.finish.value if chunk.finish else None,
        }
        if chunk.logprobs:
            line["logprobs"] = [
                {
                    "logprob": score.logprob,
                    "margin": score.margin,
                    "top": [{"token": one, "logprob": logprob} for one, logprob in score.top],
                }
                for score in chunk.logprobs
            ]
        utf8 = (sys.stdout.encoding or "utf-8").lower() in ("utf-8", "utf8")
        print(json.dumps(line, ensure_ascii=not utf8), flush=True)

    def end(self) -> None:
        return


@dataclass(slots=True)
class ScoredView:
    """``inner``, and in the end one line a token on stderr: its log-probability, its text, and the
    ids and log-probabilities of the likeliest tokens."""

    inner: View
    _lines: list[str] = field(default_factory=list)

    def show(self, chunk: Chunk) -> None:
        self.inner.show(chunk)
        for piece, token, score in zip(chunk.pieces, chunk.tokens, chunk.logprobs, strict=False):
            top = " ".join(f"{one}:{logprob:.4f}" for one, logprob in score.top)
            self._lines.append(f"{score.logprob:9.4f}  {token:6} {piece.text!r}  {top}")

    def end(self) -> None:
        self.inner.end()
        for line in self._lines:
            print(line, file=sys.stderr)
        self._lines.clear()


@dataclass(slots=True)
class Progress:
    """What was received when; seconds since ``started_s``."""

    clock: Callable[[], float] = time.perf_counter
    started_s: float = field(init=False)
    first_s: float | None = None
    last_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    first_count: int = 0
    """Tokens of the first chunk: they all came at ``first_s``."""
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def add(self, chunk: Chunk) -> None:
        self.finish = chunk.finish
        if not chunk.tokens:
            return
        self.last_s = self.clock() - self.started_s
        if self.first_s is None:
            self.first_s, self.first_count = self.last_s, len(chunk.tokens)
        self.tokens += chunk.tokens

    @property
    def per_token_s(self) -> float | None:
        """Mean time of a token after those that came first; None with nothing after them."""
        later = len(self.tokens) - self.first_count
        return (self.last_s - self.first_s) / later if self.first_s is not None and later else None


def use_color() -> bool:
    """On a terminal, unless ``NO_COLOR`` is set (no-color.org); with ``FORCE_COLOR`` everywhere
    (force-color.org)."""
    wanted = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    return wanted and not os.environ.get("NO_COLOR")


def legend() -> Text:
    """What the styles mean, in one line."""
    parts = [Text(_MEANINGS[kind], STYLES[kind]) for kind in TokenKind]
    return Text("  ·  ").join(parts)


def worth(progress: Progress, stats: GenerationStats | None) -> str:
    """What drafts brought, in one line; empty for a text of which too little came to say."""
    per_token_s = progress.per_token_s
    if stats is None or not per_token_s:
        return ""
    parts = [f"{1 / per_token_s:.1f} tokens a second"]
    counters, pass_s = stats.counters, stats.estimates.pass_s.get(0.0)
    if counters.accepted and pass_s:
        parts.append(
            f"{pass_s / per_token_s:.2f} times as fast as streaming, one token a pass of"
            f" {pass_s * 1e3:.0f} ms"
        )
    share = counters.accepted / counters.committed if counters.committed else 0.0
    parts.append(f"{counters.accepted} of {counters.committed} tokens ({share:.0%}) drafted here")
    return " · ".join(parts)


def tell_worth(
    progress: Progress, stats: GenerationStats | None, *, color: bool, explain: bool
) -> None:
    """``worth`` on stderr; ``explain``: and what the colours of the text mean."""
    if line := worth(progress, stats):
        console = Console(stderr=True, highlight=False)
        console.print(line, style="dim" if color else "", soft_wrap=True)
        if explain:
            console.print(legend(), soft_wrap=True)


def summary(progress: Progress, stats: GenerationStats | None) -> str:
    """The numbers of one generation, in two lines; of several verifiers, who served in
    a third; another one if drafting failed."""
    count = len(progress.tokens)
    lines = [f"{count} tokens in {progress.last_s:.2f} s"]
    if progress.first_s is not None:
        lines[0] += f", first after {progress.first_s * 1e3:.0f} ms"
    if (per_token_s := progress.per_token_s) is not None:
        lines[0] += f", then {per_token_s * 1e3:.1f} ms a token"
    if progress.finish is not None:
        lines[0] += f", ended by {_ENDINGS[progress.finish]}"
    if stats is not None:
        c = stats.counters
        share = c.passes / c.committed if c.committed else 0.0
        rate = "–" if c.acceptance is None else f"{c.acceptance:.0%}"
        lines.append(
            f"accepted {c.accepted}, corrected {c.corrected}, decoded"
            f" {c.committed - c.accepted - c.corrected}; {share:.2f} passes a token;"
            f" acceptance {rate}; sent {c.sent} nodes, wasted {c.wasted};"
            f" reconnects {c.reconnects}; round trip {stats.estimates.rtt_s.get(0.0) * 1e3:.0f} ms"
        )
        if stats.verifiers:
            moved = f"{stats.failovers} failover{'' if stats.failovers == 1 else 's'}"
            lines.append(f"served by {', '.join(stats.verifiers)}; {moved}")
        if c.rested > c.committed // 10:
            why = f": {stats.resting}" if stats.resting else ""
            lines.append(f"drafting rested for {c.rested} of {c.committed} tokens{why}")
        if c.draft_failure:
            lines.append(f"drafting stopped: {c.draft_failure}")
    return "\n".join(lines)
