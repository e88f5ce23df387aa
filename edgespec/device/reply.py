"""From what happens to a generation to what its reader is given, text and all.

What the reader is given is a function of the stream of tokens alone, not of how commits cut it up:
it ends with the token that completes a stop string. Text that the draft wrote offline is decoded by
a decoder of its own, which has seen the verified tokens and then the unverified ones, so that the
text of a token is the same whether it is verified or not yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgespec.core.device.events import Deliver, DraftCounters, TokenKind
from edgespec.core.device.offline import Correction, Provisional
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import TokenScore
from edgespec.device.text import StopFinder, TextDecoder


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


@dataclass(frozen=True, slots=True)
class UnverifiedChunk:
    """What the draft wrote while no verifier could be reached. The target has not seen it: a
    ``Chunk`` at the same positions confirms it, a ``Correction`` takes it back."""

    position: int
    """Absolute position of ``tokens[0]``."""
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """The text that came with each token."""

    @property
    def unverified_text(self) -> str:
        return "".join(self.pieces)


ReplyEvent = Chunk | UnverifiedChunk | Correction


@dataclass(slots=True)
class ReplyText:
    """The text of a reply as it stands, of all events so far: what is the target's own, and what
    stands behind it unverified."""

    verified: str = ""
    _unverified: dict[int, str] = field(default_factory=dict)
    """By position."""

    def add(self, event: ReplyEvent) -> None:
        match event:
            case Chunk():
                self.verified += event.text
                end = event.position + len(event.tokens)
                self._unverified = {at: t for at, t in self._unverified.items() if at >= end}
            case UnverifiedChunk():
                self._unverified.update(enumerate(event.pieces, event.position))
            case Correction(position):
                self._unverified = {at: t for at, t in self._unverified.items() if at < position}

    @property
    def unverified(self) -> str:
        return "".join(self._unverified.values())


class ReplyReader:
    """One generation's. ``decoder`` makes the detokenizer of a text that continues ``prompt``;
    ``counters`` are told of tokens behind a stop string."""

    def __init__(
        self,
        decoder: Callable[[Sequence[int]], TextDecoder],
        prompt: Sequence[int],
        sampling: SamplingParams,
        counters: DraftCounters,
    ) -> None:
        self._make, self._prompt, self._sampling = decoder, prompt, sampling
        self._counters = counters
        self._decoder, self._stops = decoder(prompt), StopFinder(sampling.stop)
        self._tokens: list[int] = []
        """Verified, and given to the reader."""
        self._ahead: tuple[TextDecoder, StopFinder] | None = None
        """Of the unverified text; they have seen ``_read_to`` tokens."""
        self._read_to = self._shown_to = len(prompt)
        """Where the unverified text ends, and where that ends of it which the reader was given."""

    @property
    def _position(self) -> int:
        return len(self._prompt) + len(self._tokens)

    @property
    def stopped(self) -> bool:
        """A stop string was found in verified text: it is complete."""
        return self._stops.found

    @property
    def pauses(self) -> bool:
        """A stop string was found in unverified text: nothing behind it is wanted yet."""
        return self._ahead is not None and self._ahead[1].found

    def finish(self, reason: FinishReason) -> list[ReplyEvent]:
        """The last events: what was held back, and how it ended."""
        rest = self._stops.push(self._decoder.flush()) + self._stops.flush()
        last = (Piece(rest, TokenKind.DECODED),) if rest else ()
        finish = FinishReason.STOP if self._stops.found else reason
        return [*self.correct(self._position), Chunk(self._position, (), last, finish)]

    def give_up(self) -> list[ReplyEvent]:
        """The last events before an error."""
        return self.correct(self._position)

    def deliver(self, event: Deliver) -> list[ReplyEvent]:
        """Verified tokens, up to the one that completes a stop string."""
        pieces: list[Piece] = []
        position = self._position
        for token, kind in zip(event.tokens, event.kinds, strict=True):
            if self._stops.found:
                break
            held = self._stops.held
            text = self._stops.push(self._decoder.push((token,)))
            pieces.append(Piece(text, kind, held))
        given = len(pieces)
        self._counters.take_back(event.kinds[given:])
        self._tokens += event.tokens[:given]
        if position + len(event.tokens) > self._read_to:
            self._ahead = None
        if not given:
            return []
        told = event.logprobs[:given]
        return [Chunk(position, event.tokens[:given], tuple(pieces), logprobs=told)]

    def write(self, event: Provisional) -> list[ReplyEvent]:
        """Unverified tokens, up to the one that completes a stop string."""
        if self._stops.found:
            return []
        if self._ahead is None:
            self._ahead = self._make(self._prompt), StopFinder(self._sampling.stop)
            for token in self._tokens:
                self._ahead[1].push(self._ahead[0].push((token,)))
        decoder, stops = self._ahead
        self._read_to = event.position + len(event.tokens)
        pieces: list[str] = []
        for token in event.tokens:
            if stops.found:
                break
            pieces.append(stops.push(decoder.push((token,))))
        if not pieces:
            return []
        self._shown_to = event.position + len(pieces)
        return [UnverifiedChunk(event.position, event.tokens[: len(pieces)], tuple(pieces))]

    def correct(self, position: int) -> list[ReplyEvent]:
        """Unverified text from ``position`` on does not hold."""
        self._ahead = None
        shown_to, self._shown_to = self._shown_to, min(self._shown_to, position)
        return [Correction(position)] if shown_to > position else []
