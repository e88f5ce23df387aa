"""From committed tokens to what the reader of a generation is given: text, up to a stop string.

What the reader is given is a function of the stream of tokens alone, not of how commits cut it up:
it ends with the token that completes a stop string. Text that might begin one is held back until it
is known not to; the stop string itself is never shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgespec.core.device.events import Deliver, DraftCounters, TokenKind
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.work import TokenScore


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that became certain with one token, and how that token came about."""

    text: str
    kind: TokenKind
    held: int = 0
    """So many characters before the token's own were held back when it came: they may begin a stop
    string. What the token stands for without text is behind them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one commit brought, up to the token that completed a stop string. The last chunk has
    ``finish``, and perhaps text that was held back, but no token."""

    position: int
    """Absolute position of ``tokens[0]``."""
    tokens: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenScore, ...] = ()
    """Of ``tokens``, one each, when asked for; none of tokens whose scores a broken link lost."""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class TextDecoder(Protocol):
    """Incremental detokenizer of one text (``models.tokenizer.TextStream``)."""

    def push(self, tokens: Sequence[int]) -> str:
        """Text that is certain after these further tokens."""

    def flush(self) -> str:
        """The rest, when no token will follow."""


class StopFinder:
    """Feeds text through; ``found`` once a stop string was seen."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    @property
    def held(self) -> int:
        """Characters that may begin a stop string."""
        return len(self._held)

    def push(self, text: str) -> str:
        """The part of what was held and ``text`` that can be shown now."""
        if self.found:
            return ""
        self._held += text
        starts = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if starts:
            self.found = True
            shown, self._held = self._held[: min(starts)], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        shown, self._held = self._held, ""
        return "" if self.found else shown

    def _overlap(self, stop: str) -> int:
        """The longest end of the held text that begins ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if stop.startswith(self._held[-n:])), 0)


class ReplyReader:
    """One generation's. ``position`` is where its output begins; ``counters`` are told of tokens
    behind a stop string."""

    def __init__(
        self, decoder: TextDecoder, stops: Sequence[str], position: int, counters: DraftCounters
    ) -> None:
        self._decoder, self._stops = decoder, StopFinder(stops)
        self._position, self._counters = position, counters

    @property
    def stopped(self) -> bool:
        """A stop string was found: the text is complete."""
        return self._stops.found

    def deliver(self, event: Deliver) -> Chunk | None:
        """The tokens up to the one that completes a stop string."""
        pieces: list[Piece] = []
        for token, kind in zip(event.tokens, event.kinds, strict=True):
            if self._stops.found:
                break
            held = self._stops.held
            pieces.append(Piece(self._stops.push(self._decoder.push((token,))), kind, held))
        given, position = len(pieces), self._position
        self._counters.take_back(event.kinds[given:])
        self._position += given
        if not given:
            return None
        return Chunk(position, event.tokens[:given], tuple(pieces), logprobs=event.logprobs[:given])

    def finish(self, reason: FinishReason) -> Chunk:
        """The last chunk: what was held back, and how the text ended."""
        rest = self._stops.push(self._decoder.flush()) + self._stops.flush()
        last = (Piece(rest, TokenKind.DECODED),) if rest else ()
        finish = FinishReason.STOP if self._stops.found else reason
        return Chunk(self._position, (), last, finish)
