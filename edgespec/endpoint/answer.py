"""What one choice of an answer is made of: text, tool calls, scores and counts, as chunks come.

The same object feeds a stream, delta by delta, and an answer at once, which is all deltas together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.work import TokenScore
from edgespec.device.agent import Chunk
from edgespec.endpoint.errors import ApiError
from edgespec.endpoint.marked_text import MarkedText
from edgespec.endpoint.run import Job
from edgespec.endpoint.tool_calls import ToolCall, ToolReader

TOOL_CALLS: Final = "tool_calls"
_REASONS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
}
TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token and the likeliest ones at its place, as bytes with their log-probabilities."""

    written: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What came anew: text and calls in the order they stand in, and scores."""

    parts: tuple[str | ToolCall, ...] = ()
    scores: tuple[ScoredToken, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.parts or self.scores)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``reader`` finds the calls; ``marks`` puts the special tokens that it needs to see back."""

    reader: ToolReader
    marks: MarkedText
    one_call: bool = False


@dataclass(slots=True)
class Choice:
    """One of the texts of an answer; hand in its chunks with ``add``."""

    job: Job
    scored: bool
    top_logprobs: int
    token_bytes: TokenBytes
    tools: ToolUse | None = None
    parts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None
    """Why it is complete, in OpenAI's words; None: it is not."""

    @property
    def index(self) -> int:
        return self.job.index

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, chunk: Chunk) -> Delta:
        """Raises ``ApiError`` for a generation that was cancelled from elsewhere."""
        self.tokens += len(chunk.tokens)
        found = self._found(chunk)
        if chunk.finish is not None:
            if self.tools is not None:
                found += self.tools.reader.flush()
            found = self._kept(found)
            self.finish = self._reason(chunk.finish)
        else:
            found = self._kept(found)
        scores = tuple(map(self._score, chunk.tokens, chunk.logprobs)) if self.scored else ()
        self.scores += scores
        return Delta(_joined(found), scores)

    def _found(self, chunk: Chunk) -> list[str | ToolCall]:
        if self.tools is None:
            return [chunk.text] if chunk.text else []
        found: list[str | ToolCall] = []
        for place, piece in enumerate(chunk.pieces):
            token = chunk.tokens[place] if place < len(chunk.tokens) else None
            found += self.tools.reader.push(self.tools.marks.push(token, piece))
        return found

    def _kept(self, found: list[str | ToolCall]) -> list[str | ToolCall]:
        kept: list[str | ToolCall] = []
        for one in found:
            if isinstance(one, str):
                self.parts.append(one)
            elif self.tools is not None and self.tools.one_call and self.calls:
                continue
            else:
                self.calls.append(one)
            kept.append(one)
        return kept

    def _reason(self, finish: FinishReason) -> str:
        if finish not in _REASONS:
            raise ApiError(503, "the generation was cancelled on this device", code="cancelled")
        return TOOL_CALLS if self.calls and finish is FinishReason.STOP else _REASONS[finish]

    def _score(self, token: int, score: TokenScore) -> ScoredToken:
        top = tuple(
            (self.token_bytes(one), logprob) for one, logprob in score.top[: self.top_logprobs]
        )
        return ScoredToken(self.token_bytes(token), score.logprob, top)


def _joined(found: list[str | ToolCall]) -> tuple[str | ToolCall, ...]:
    """Texts that follow each other as one."""
    joined: list[str | ToolCall] = []
    for one in found:
        if isinstance(one, str) and joined and isinstance(joined[-1], str):
            joined[-1] += one
        else:
            joined.append(one)
    return tuple(joined)
