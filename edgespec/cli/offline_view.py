"""What the draft wrote while no verifier could be reached, marked, beside the verified text.

Unverified text goes to stderr and never to stdout, each stretch of it on lines of its own behind
``[unverified]``; when the target has been asked, its own text follows on stdout from where it was.
So what is piped is verified, and a screen shows both, with and without colour.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from edgespec.cli.streaming import View
from edgespec.core.device.offline import Correction
from edgespec.core.protocol.checks import printable
from edgespec.device.agent import Chunk
from edgespec.device.reply import UnverifiedChunk

MARK = "[unverified]"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def _dims() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


@dataclass(slots=True)
class OfflineView:
    """``inner`` gets the verified chunks."""

    inner: View
    dims: bool = field(default_factory=_dims)
    _open: bool = False
    """Whether unverified text stands on the last line."""
    _written: int = 0
    _first: int = 0

    def show(self, chunk: Chunk) -> None:
        if chunk.tokens or chunk.finish is not None:
            end = chunk.position + len(chunk.tokens)
            if self._written and end >= self._first + self._written:
                self._close(f"[verified: all {self._written} tokens]")
        self.inner.show(chunk)

    def show_unverified(self, event: UnverifiedChunk | Correction) -> None:
        """Text that the target has not seen, or that it does not say."""
        if isinstance(event, Correction):
            kept = max(0, event.position - self._first)
            self._close(f"[replaced: {kept} of {self._written} tokens were verified]")
            return
        if not self._open:
            sys.stderr.write(f"\n{MARK} " if sys.stdout.isatty() else f"{MARK} ")
            self._open = True
        if not self._written:
            self._first = event.position
        self._written += len(event.tokens)
        text = printable(event.unverified_text)
        sys.stderr.write(f"{_DIM}{text}{_PLAIN}" if self.dims else text)
        sys.stderr.flush()

    def end(self) -> None:
        self._close("")
        self.inner.end()

    def _close(self, why: str) -> None:
        if self._open:
            sys.stderr.write("\n")
        if why:
            print(why, file=sys.stderr)
        self._open, self._written = False, 0
