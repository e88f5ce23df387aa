"""What one choice of an answer is made of, as its chunks come, and how it looks in OpenAI's JSON.

The same objects feed a stream, delta by delta, and an answer at once, which is all deltas together.
``Shape`` is the one place that knows the JSON of a kind of answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import TokenScore
from edgespec.device.agent import Chunk, GenerationStats
from edgespec.endpoint.request_json import ApiError
from edgespec.endpoint.tool_calls import MarkedText, ToolCall, ToolReader

TOOL_CALLS: Final = "tool_calls"
_REASONS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
}
TokenBytes = Callable[[int], bytes]


@dataclass(slots=True)
class Job:
    """One text that is wanted; ``stats`` grow while it comes."""

    index: int
    prompt: Sequence[int]
    sampling: SamplingParams
    logprobs: int = 0
    must_call: bool = False
    """Its constraint is that of a call."""
    conversation: str = ""
    """Its name; empty: it has none."""
    model: str = ""
    """The name to ask a verifier for; empty: the agent's own."""
    stats: GenerationStats | None = field(default=None, init=False)


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
    echo: str = ""
    """Stands before the text."""
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


KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
Json = dict[str, Any]


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return (
        b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


class Shape(Protocol):
    """The JSON of one kind of answer. Objects that it returns stand in ``choices``."""

    whole_object: str
    delta_object: str
    id_prefix: str

    def opening(self, choice: Choice) -> Json | None:
        """The first event of a choice, before any text; None: there is none."""

    def delta(self, choice: Choice, delta: Delta) -> list[Json]:
        """What came anew."""

    def closing(self, choice: Choice) -> Json:
        """The last event of a choice, which says why it is complete."""

    def whole(self, choice: Choice) -> Json:
        """All of it at once."""


@dataclass(slots=True)
class ChatShape:
    """``/v1/chat/completions``."""

    whole_object: str = "chat.completion"
    delta_object: str = "chat.completion.chunk"
    id_prefix: str = "chatcmpl-"
    _called: dict[int, int] = field(default_factory=dict)
    """Tool calls that were streamed, by choice."""

    def opening(self, choice: Choice) -> Json | None:
        return _chunk(choice.index, {"role": "assistant", "content": ""})

    def delta(self, choice: Choice, delta: Delta) -> list[Json]:
        found: list[Json] = []
        for part in delta.parts:
            if isinstance(part, str):
                found.append(_chunk(choice.index, {"content": part}))
            else:
                place = self._called.get(choice.index, 0)
                self._called[choice.index] = place + 1
                call = {"index": place, **_call(part)}
                found.append(_chunk(choice.index, {"tool_calls": [call]}))
        if delta.scores:  # they belong to the text, if some became certain with them
            if not found:
                found.append(_chunk(choice.index, {"content": ""}))
            found[0]["logprobs"] = _chat_scores(delta.scores)
        return found

    def closing(self, choice: Choice) -> Json:
        return _chunk(choice.index, {}) | {"finish_reason": choice.finish}

    def whole(self, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(one) for one in choice.calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": _chat_scores(choice.scores) if choice.scored else None,
            "finish_reason": choice.finish,
        }


@dataclass(slots=True)
class CompletionShape:
    """``/v1/completions``."""

    whole_object: str = "text_completion"
    delta_object: str = "text_completion"
    id_prefix: str = "cmpl-"
    _offsets: dict[int, int] = field(default_factory=dict)
    """Characters of the scored tokens so far, by choice."""

    def opening(self, choice: Choice) -> Json | None:
        return self._choice(choice, choice.echo, ()) if choice.echo else None

    def delta(self, choice: Choice, delta: Delta) -> list[Json]:
        text = "".join(part for part in delta.parts if isinstance(part, str))
        return [self._choice(choice, text, delta.scores)]

    def closing(self, choice: Choice) -> Json:
        return self._choice(choice, "", ()) | {"finish_reason": choice.finish}

    def whole(self, choice: Choice) -> Json:
        found = self._choice(choice, choice.echo + choice.text, choice.scores)
        if choice.scored and not choice.scores:
            found["logprobs"] = self._scores(choice.index, ())
        return found | {"finish_reason": choice.finish}

    def _choice(self, choice: Choice, text: str, scores: Sequence[ScoredToken]) -> Json:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._scores(choice.index, scores) if scores else None,
            "finish_reason": None,
        }

    def _scores(self, index: int, scores: Sequence[ScoredToken]) -> Json:
        offset, offsets = self._offsets.get(index, 0), []
        for one in scores:
            offsets.append(offset)
            offset += len(_text(one.written))
        self._offsets[index] = offset
        return {
            "tokens": [_text(one.written) for one in scores],
            "token_logprobs": [one.logprob for one in scores],
            "top_logprobs": [
                {_text(written): logprob for written, logprob in one.top} for one in scores
            ],
            "text_offset": offsets,
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands around the choices of one answer."""

    shape: Shape
    id: str
    created: int
    model: str
    fingerprint: str | None
    with_usage: bool
    """Whether the events of a stream have a ``usage``, null but in the last one."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """The first events of a stream."""
        found = map(self.shape.opening, choices)
        return b"".join(self._chunk([one]) for one in found if one is not None)

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        """Events of what came anew."""
        return b"".join(self._chunk([one]) for one in self.shape.delta(choice, delta))

    def closing(self, choice: Choice) -> bytes:
        """The event of a choice that is complete."""
        return self._chunk([self.shape.closing(choice)])

    def ending(self, choices: Sequence[Choice], usage: Json) -> bytes:
        """The last events of a stream."""
        return (self._chunk([], usage) if self.with_usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed in the middle; clients raise it."""
        return event(error.body)

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> bytes:
        data = self._around(self.shape.delta_object, choices)
        if self.with_usage:
            data["usage"] = usage
        return event(data)

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """An answer at once."""
        found = [self.shape.whole(one) for one in choices]
        return self._around(self.shape.whole_object, found) | {"usage": usage}

    def _around(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


def usage_of(choices: Sequence[Choice], prompt_tokens: int, seed: int) -> Json:
    """Counts of an answer. ``edgespec`` is ours: how much of it was drafted on the device."""
    completion = sum(choice.tokens for choice in choices)
    stats = [choice.job.stats for choice in choices if choice.job.stats is not None]
    counters = [one.counters for one in stats]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "edgespec": {
            "drafted_tokens": sum(one.sent for one in counters),
            "accepted_tokens": sum(one.accepted for one in counters),
            "corrected_tokens": sum(one.corrected for one in counters),
            "verifier_passes": sum(one.passes for one in counters),
            "reconnects": sum(one.reconnects for one in counters),
            "failovers": sum(one.failovers for one in stats),
            "seed": seed,
        },
    }


def _chunk(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _chat_scores(scores: Sequence[ScoredToken]) -> Json:
    content = [
        {
            **_chat_score(one.written, one.logprob),
            "top_logprobs": [_chat_score(written, logprob) for written, logprob in one.top],
        }
        for one in scores
    ]
    return {"content": content, "refusal": None}


def _chat_score(written: bytes, logprob: float) -> Json:
    return {"token": _text(written), "logprob": logprob, "bytes": list(written)}


def _text(written: bytes) -> str:
    return written.decode("utf-8", errors="replace")
