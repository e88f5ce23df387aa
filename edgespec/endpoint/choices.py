"""Choices of a response, built from chunks as they arrive, and their form in OpenAI's JSON.

The same objects write a stream, delta by delta, and a whole response, which is all deltas together.
An ``Envelope`` is the one place with the JSON of a kind of response.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final

from edgespec.core.protocol.messages import EXACT_RULE, FinishReason
from edgespec.core.protocol.pictures import PlacedPicture
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import TokenScore
from edgespec.device.agent import Chunk, GenerationStats
from edgespec.device.generation_timeline import GenerationTimeline
from edgespec.endpoint.output_parser import OutputParser, Part, append_part
from edgespec.endpoint.request_json import ApiError, compact_json
from edgespec.endpoint.requests import CUSTOM_INPUT, GenerationRequest
from edgespec.endpoint.thoughts import Thought
from edgespec.endpoint.tool_calls import CallArguments, ToolCall

_REASONS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
}
KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"

_BYTES_PER_TOKEN: Final = 16
"""Bytes of waiting pictures that count as one waiting token, so that pictures of 64 MiB may wait by
default."""
Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its score; only the first token of a prompt has none."""

    token: int
    score: TokenScore | None
    offset: int
    """Number of characters in the output before the token's own text. A token that only continues
    or only completes a character has the place of that character."""


Scores = Sequence[ScoredToken]


@dataclass(frozen=True, slots=True)
class Delta:
    """New parts of a choice in their order, and scores.

    A ``ToolCall`` opens a call with the arguments so far, and each ``CallArguments`` behind it adds
    to them. Custom tools come whole."""

    parts: tuple[Part, ...] = ()
    scores: Scores = ()
    sources: Json | None = None
    """Origins of the tokens, and the events since the last delta; None: not requested."""


@dataclass(slots=True)
class Choice:
    """One choice of a response, which is one generation: its parameters, and its output so far.
    Chunks are added with ``add``."""

    index: int
    prompt: Sequence[int]
    request: GenerationRequest
    sampling: SamplingParams
    """The request's parameters, with the length and seed of this generation."""
    token_bytes: TokenBytes
    parser: OutputParser | None
    """Parser of the output; None: it is plain text."""
    model: str
    """Model name to request from a verifier; empty: the agent's own."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures of the prompt."""
    timeline: GenerationTimeline | None = None
    """Timeline of the generation; None: the request does not ask for it."""
    stats: GenerationStats | None = field(default=None, init=False)
    """Statistics of the generation, updated while it runs."""
    echo: str = ""
    """Text in front of the output, which repeats the prompt."""
    items: list[Part] = field(default_factory=list)
    """Texts, thoughts and whole calls in their order. No two texts and no two thoughts follow each
    other."""
    left_out: tuple[str, ...] = ()
    """Promises of the request that could not be kept, as words for a header."""
    scores: list[ScoredToken] = field(default_factory=list)
    prompt_scores: list[ScoredToken] = field(default_factory=list)
    """Scores of the prompt, if it is repeated with scores."""
    tokens: int = 0
    reasoning_tokens: int = 0
    """Tokens of the thought, its marks included."""
    _drops_arguments: bool = False
    """Whether the last call was left out, so that its further arguments are too."""
    _custom_call: ToolCall | None = None
    """A call of a custom tool whose arguments may still grow. It is added when it is whole."""
    _characters: int = 0
    """Characters of all pieces so far, whether or not they are part of the output."""
    finish: str | None = None
    """OpenAI's finish reason; None until the choice is complete."""
    stop: str = ""
    """The stop string that ended the output. Empty: none did."""

    @property
    def waiting_tokens(self) -> int:
        """Length of the prompt, and of its pictures in tokens of as many bytes as they hold while
        they wait."""
        picture_bytes = sum([len(one.data) for one in self.pictures])
        return len(self.prompt) + picture_bytes // _BYTES_PER_TOKEN

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the prompt takes in the target's context. A picture counts as one, its
        placeholder, until the verifier has read it."""
        return len(self.prompt) if self.stats is None else self.stats.prompt_tokens

    @property
    def logprobs(self) -> int:
        """Number of alternatives to request from the agent. It returns scores from 1 on, so
        logprobs 0 requests 1."""
        requested = self.request.logprobs
        return 0 if requested is None else max(1, requested)

    @property
    def text(self) -> str:
        return "".join(one for one in self.items if isinstance(one, str))

    @property
    def thought(self) -> str:
        return "".join(one.text for one in self.items if isinstance(one, Thought))

    @property
    def calls(self) -> list[ToolCall]:
        return [one for one in self.items if isinstance(one, ToolCall)]

    def token_text(self, token: int, prefix: str = "") -> str:
        """Return the text of a token. A token that is a part of a character is written as its bytes
        behind ``prefix``, such as ``\\xe6\\x97``, so that different parts have different names."""
        token_bytes = self.token_bytes(token)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def add(self, chunk: Chunk) -> Delta:
        """Add a chunk and return what is new. Raises ``ApiError`` if the generation was cancelled
        by this process."""
        first = self.tokens
        self.tokens += len(chunk.tokens)
        parts_by_piece = self._parse(chunk)
        parts = [part for parts in parts_by_piece for part in parts]
        new_items = self._append_items(parts, is_last=chunk.finish is not None)
        if chunk.finish is not None:
            if chunk.finish not in _REASONS:
                raise ApiError(503, "the generation was cancelled on this device", code="cancelled")
            self.stop = chunk.stop
            has_called = self.calls and chunk.finish is FinishReason.STOP
            self.finish = "tool_calls" if has_called else _REASONS[chunk.finish]
        scores = self._score_tokens(chunk) if self.request.logprobs is not None else []
        self.scores += scores
        return Delta(new_items, scores, self._describe_sources(chunk, parts_by_piece, first))

    def score_prompt(self, scores: Sequence[TokenScore]) -> None:
        """Store the scores of the prompt's tokens behind the first one, with their places in
        ``echo``. A token that the text does not show has the place of the next one."""
        decode, place = getincrementaldecoder("utf-8")("replace").decode, 0
        for token, score in zip(self.prompt, (None, *scores), strict=True):
            self.prompt_scores.append(ScoredToken(token, score, min(place, len(self.echo))))
            text = decode(self.token_bytes(token))
            place += len(text) if self.echo.startswith(text, place) else 0

    def _score_tokens(self, chunk: Chunk) -> list[ScoredToken]:
        """Return the tokens of a chunk that have scores, with their places in the output."""
        scored: list[ScoredToken] = []
        for place, score in enumerate(chunk.logprobs):
            piece = chunk.pieces[place]
            offset = len(self.echo) + self._characters + piece.held_chars
            scored.append(ScoredToken(chunk.tokens[place], score, offset))
            self._characters += len(piece.text)
        self._characters += sum(len(piece.text) for piece in chunk.pieces[len(scored) :])
        return scored

    def _parse(self, chunk: Chunk) -> list[list[Part]]:
        """Return the parts that became certain with each piece of the chunk and, at the end of the
        output, what had been held back."""
        if (parser := self.parser) is None:
            return [[piece.text] if piece.text else [] for piece in chunk.pieces]
        parts: list[list[Part]] = []
        for place, piece in enumerate(chunk.pieces):
            token = chunk.tokens[place] if place < len(chunk.tokens) else None
            was_thinking = parser.is_thinking
            parts.append(parser.push(token, piece))
            if token is not None and (was_thinking or parser.is_thinking):
                self.reasoning_tokens += 1
        if chunk.finish is not None:
            parts.append(parser.flush())
        return parts

    def _describe_sources(
        self, chunk: Chunk, parts_by_piece: Sequence[Sequence[Part]], first: int
    ) -> Json | None:
        """Return where the tokens of a chunk came from. ``first`` is the index of its first token
        in the output. Text without a token was held back until the output ended."""
        if (timeline := self.timeline) is None:
            return None
        tokens: list[Json] = []
        for place, parts in enumerate(parts_by_piece):
            has_token = place < len(chunk.tokens)
            if not (parts or has_token):
                continue
            entry: Json = {"source": timeline.origin(first + place).value} if has_token else {}
            for part in parts:
                name, text = _shown_text(part)
                entry[name] = entry.get(name, 0) + len(text.encode("utf-16-le")) // 2
            tokens.append(entry)
        events = [
            {"kind": one.kind.value, "at_s": round(one.at_s, 6), "count": one.count}
            | ({"took_s": round(one.took_s, 6)} if one.took_s else {})
            for one in timeline.take_events()
        ]
        return {"tokens": tokens, "events": events, **describe_speed(timeline)}

    def _append_items(self, parts: list[Part], *, is_last: bool) -> tuple[Part, ...]:
        """Append the new parts and return them as the client should receive them: neighbours of one
        kind joined, calls of custom tools whole, and no second call where only one is wanted."""
        new_parts: list[Part] = []
        for part in parts:
            if isinstance(part, CallArguments):
                if (call := self._custom_call) is not None:
                    self._custom_call = replace(call, arguments=call.arguments + part.text)
                elif self.calls and not self._drops_arguments:
                    self._append(part, new_parts)
                continue
            self._append_custom_call(new_parts)
            if not isinstance(part, ToolCall):
                self._append(part, new_parts)
                continue
            self._drops_arguments = self.request.single_call and bool(self.calls)
            if self._drops_arguments:
                continue
            part = self._as_client_calls(part)
            if part.is_custom:
                self._custom_call = part
            else:
                self._append(part, new_parts)
        if is_last:
            self._append_custom_call(new_parts)
        return tuple(new_parts)

    def _append(self, part: Part, new_parts: list[Part]) -> None:
        append_part(self.items, part)
        append_part(new_parts, part)

    def _append_custom_call(self, new_parts: list[Part]) -> None:
        """Append the call of a custom tool that is whole now, with its text as the arguments."""
        if (call := self._custom_call) is None:
            return
        self._custom_call = None
        parsed = arguments_object(call) or {}
        text = parsed.get(CUSTOM_INPUT)
        if isinstance(text, str) and len(parsed) == 1:
            call = replace(call, arguments=text)
        self._append(call, new_parts)

    def _as_client_calls(self, call: ToolCall) -> ToolCall:
        """Return a call with the names by which the client knows the tool. A model may leave out
        the namespace."""
        client_tools = self.request.client_tools
        client_tool = client_tools.get(call.name)
        if client_tool is None:
            client_tool = next(
                (one for one in client_tools.values() if one.name == call.name), None
            )
        if client_tool is None:
            return call
        return replace(
            call,
            name=client_tool.name,
            namespace=client_tool.namespace,
            is_custom=client_tool.is_custom,
        )


def _shown_text(part: Part) -> tuple[str, str]:
    """Return the field of a chat's delta in which a part is shown, and its text."""
    if isinstance(part, str):
        return "content", part
    if isinstance(part, Thought):
        return "reasoning_content", part.text
    return "tool_calls", part.arguments if isinstance(part, ToolCall) else part.text


def describe_speed(timeline: GenerationTimeline) -> Json:
    """Return the speed of a generation so far and that of plain streaming, as it is estimated. A
    value that is not known yet is null."""
    speed = timeline.speed
    return {"tokens_per_s": speed.tokens_per_s, "plain_tokens_per_s": speed.plain_tokens_per_s}


@dataclass(slots=True)
class Envelope(ABC):
    """Identity and times of one response. Each kind of envelope writes a response in the JSON of
    its API, as a stream or whole."""

    model: str
    fingerprint: str | None = None
    with_usage: bool = False
    """Whether the events of a stream have a ``usage``, which is null in all but the last."""
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""
    prepared_at_s: float = field(default_factory=time.monotonic)
    """Time at which the request was ready to wait for a slot."""
    first_token_at_s: float | None = None
    """Time of the first generated token; None before."""
    _head: str = field(default="", init=False)
    """Beginning of each chunk of a stream, where all have the same. Empty until the first one."""
    prefix: ClassVar[str]
    content_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    """Content type of a stream."""

    def __post_init__(self) -> None:
        self.id = self.prefix + secrets.token_hex(12)

    @abstractmethod
    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Return what opens a stream."""

    @abstractmethod
    def delta(self, choice: Choice, delta: Delta) -> bytes:
        """Return the part of a stream for new parts of a choice."""

    @abstractmethod
    def closing(self, choice: Choice) -> bytes:
        """Return the part of a stream for the end of a choice."""

    @abstractmethod
    def ending(self, choices: Sequence[Choice], usage: Json) -> bytes:
        """Return what ends a stream."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the last part of a stream that failed in the middle."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """Return the whole response."""

    def keep_alive(self) -> bytes:
        """Return the part of a stream that only shows that the connection is alive."""
        return KEEP_ALIVE


class ChoicesEnvelope(Envelope):
    """An envelope of a response that has a list of choices."""

    __slots__ = ()
    whole_object: ClassVar[str]
    delta_object: ClassVar[str]

    @abstractmethod
    def _choice(self, choice: Choice) -> Json: ...

    def ending(self, choices: Sequence[Choice], usage: Json) -> bytes:
        return (self._chunk([], usage) if self.with_usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed in the middle. Clients raise it as an
        exception."""
        return _encode_event(error.body)

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        choice_objects = [self._choice(one) | {"finish_reason": one.finish} for one in choices]
        return self._with_choices(self.whole_object, choice_objects) | {"usage": usage}

    def _chunks(self, *choices: Json) -> bytes:
        return b"".join(self._chunk([one]) for one in choices)

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> bytes:
        if not self._head:
            head = compact_json(self._identity(self.delta_object))[:-1]
            self._head = f'data: {head},"choices":'
        tail = f',"usage":{compact_json(usage)}' if self.with_usage else ""
        return f"{self._head}{compact_json(choices)}{tail}}}\n\n".encode()

    def _with_choices(self, kind: str, choices: list[Json]) -> Json:
        return {**self._identity(kind), "choices": choices}

    def _identity(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class ChatEnvelope(ChoicesEnvelope):
    """JSON of ``/v1/chat/completions``."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    delta_object = "chat.completion.chunk"
    _called: dict[int, int] = field(default_factory=dict)
    """Number of tool calls streamed so far, by choice."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        return self._chunks(
            *(_chat_chunk(one, {"role": "assistant", "content": ""}) for one in choices)
        )

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        chunks: list[Json] = []
        for part in delta.parts:
            if isinstance(part, str):
                chunks.append(_chat_chunk(choice, {"content": part}))
            elif isinstance(part, Thought):
                chunks.append(_chat_chunk(choice, {"reasoning_content": part.text}))
            elif isinstance(part, CallArguments):
                place = self._called[choice.index] - 1
                more = {"index": place, "function": {"arguments": part.text}}
                chunks.append(_chat_chunk(choice, {"tool_calls": [more]}))
            else:
                place = self._called.get(choice.index, 0)
                self._called[choice.index] = place + 1
                call = {"index": place, **_call(part)}
                chunks.append(_chat_chunk(choice, {"tool_calls": [call]}))
        if delta.scores:  # scores belong to the text that became certain with them
            if not chunks:
                chunks.append(_chat_chunk(choice, {"content": ""}))
            chunks[0]["logprobs"] = chat_scores(choice, delta.scores)
        if delta.sources is not None:
            if not chunks:
                chunks.append(_chat_chunk(choice, {"content": ""}))
            chunks[0]["edgespec"] = delta.sources
        return self._chunks(*chunks)

    def closing(self, choice: Choice) -> bytes:
        return self._chunks(_chat_chunk(choice, {}) | {"finish_reason": choice.finish})

    def _choice(self, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if thought := choice.thought:
            message["reasoning_content"] = thought
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(one) for one in choice.calls]
        scores = None if choice.request.logprobs is None else chat_scores(choice, choice.scores)
        return {"index": choice.index, "message": message, "logprobs": scores}


@dataclass(slots=True)
class CompletionEnvelope(ChoicesEnvelope):
    """JSON of ``/v1/completions``."""

    prefix = "cmpl-"
    whole_object = delta_object = "text_completion"
    _echoed: set[int] = field(default_factory=set)
    """Indices of the choices whose prompt was written."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        return b"".join(self._echo(one) for one in choices if not one.request.scores_prompt)

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        text = "".join(part for part in delta.parts if isinstance(part, str))
        return self._echo(choice) + self._chunks(self._part(choice, text, delta.scores or None))

    def closing(self, choice: Choice) -> bytes:
        last = self._part(choice, "", None) | {"finish_reason": choice.finish}
        return self._echo(choice) + self._chunks(last)

    def _echo(self, choice: Choice) -> bytes:
        """Return the event with the prompt of a choice, once. A prompt with scores waits for
        them."""
        if choice.index in self._echoed or not choice.echo:
            return b""
        self._echoed.add(choice.index)
        return self._chunks(self._part(choice, choice.echo, choice.prompt_scores or None))

    def _choice(self, choice: Choice) -> Json:
        scores = [*choice.prompt_scores, *choice.scores]
        has_scores = choice.request.logprobs is not None
        return self._part(choice, choice.echo + choice.text, scores if has_scores else None)

    def _part(self, choice: Choice, text: str, scores: Scores | None) -> Json:
        score_object = None if scores is None else self._scores(choice, scores)
        if score_object is not None and choice.finish is not None:  # a stop string is no output
            length = len(choice.echo) + len(choice.text)
            score_object["text_offset"] = [min(one, length) for one in score_object["text_offset"]]
        return {
            "index": choice.index,
            "text": text,
            "logprobs": score_object,
            "finish_reason": None,
        }

    def _scores(self, choice: Choice, scores: Scores) -> Json:
        name = partial(choice.token_text, prefix="bytes:")
        tops: list[Json | None] = []
        for one in scores:
            if one.score is None:
                tops.append(None)
                continue
            # Each token once, the generated one first with its own score.
            top = {name(one.token): one.score.logprob}
            for token, logprob in one.score.top[: choice.request.logprobs]:
                top.setdefault(name(token), logprob)
            tops.append(dict(sorted(top.items(), key=lambda item: -item[1])))
        return {
            "tokens": [name(one.token) for one in scores],
            "token_logprobs": [one.score and one.score.logprob for one in scores],
            "top_logprobs": tops,
            "text_offset": [one.offset for one in scores],
        }


@dataclass(slots=True)
class ResponseEnvelope(Envelope):
    """JSON of ``/v1/responses``."""

    prefix = "resp_"
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that the response repeats."""
    keep: Callable[[Json], None] | None = None
    """Stores the finished response; None: it is not stored."""
    _number: int = 0
    """Sequence number of the next event."""
    _items: list[Json] = field(default_factory=list)
    """Items of the stream so far. The last one may be open."""
    _open: str = ""
    """Type of the open item; empty: every item is complete."""
    _texts: list[str] = field(default_factory=list)
    """Pieces of the open item's text or arguments. The item gets them when it is complete, because
    a text that grows token by token is copied each time."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        item_begun = self._response(choices, [], None)
        events = self._event("response.created", response=item_begun)
        return events + self._event("response.in_progress", response=item_begun)

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        return b"".join(map(self._part, delta.parts))

    def closing(self, choice: Choice) -> bytes:
        has_answer = any(one["type"] != "reasoning" for one in self._items)
        is_cut = choice.finish == "length" and bool(self._items)
        events = b"" if has_answer or is_cut else self._text("")
        return events + self._end_item(_find_status(choice))

    def ending(self, choices: Sequence[Choice], usage: Json) -> bytes:
        whole = self._finished(choices, self._items, usage)
        return self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        (choice,) = choices
        parts = list(choice.items)
        if all(isinstance(one, Thought) for one in parts):
            # A response that was not cut inside its thought has a message, if an empty one.
            parts += [] if parts and choice.finish == "length" else [""]
        last = len(parts) - 1
        items = [
            _item(one, _find_status(choice) if place == last else "completed")
            for place, one in enumerate(parts)
        ]
        return self._finished(choices, items, usage)

    def _finished(self, choices: Sequence[Choice], items: list[Json], usage: Json) -> Json:
        response = self._response(choices, items, usage)
        if self.keep is not None:
            self.keep(response)
        return response

    def _part(self, part: Part) -> bytes:
        if isinstance(part, str):
            return self._text(part)
        if isinstance(part, Thought):
            return self._thought(part.text)
        if isinstance(part, CallArguments):
            return self._arguments(part.text)
        return self._call(part)

    def _text(self, text: str) -> bytes:
        events = self._begin_item("message", _write_message)
        if not text:
            return events
        self._texts.append(text)
        return events + self._part_event("output_text.delta", delta=text, logprobs=[])

    def _thought(self, text: str) -> bytes:
        events = self._begin_item("reasoning", _reasoning)
        self._texts.append(text)
        return events + self._part_event("reasoning_text.delta", delta=text)

    def _begin_item(self, kind: str, make: Callable[[str, str], Json]) -> bytes:
        """Open an item with content of one part, unless one of its kind is open. ``make`` returns
        an item with a text and a status."""
        if self._open == kind:
            return b""
        events = self._end_item()
        self._open = kind
        self._items.append(item := make("", "in_progress"))
        events += self._item_event("output_item.added", item={**item, "content": []})
        return events + self._part_event("content_part.added", part=item["content"][0])

    def _call(self, call: ToolCall) -> bytes:
        events = self._end_item()
        self._items.append(item := _tool_call(call, "in_progress"))
        self._open = item["type"]
        self._texts.append(call.arguments)
        item_begun = {**item, _arguments_name(item): ""}
        events += self._item_event("output_item.added", item=item_begun)
        return events + (self._arguments_event(call.arguments) if call.arguments else b"")

    def _arguments(self, text: str) -> bytes:
        self._texts.append(text)
        return self._arguments_event(text)

    def _arguments_event(self, text: str) -> bytes:
        item = self._items[-1]
        return self._item_event(f"{_ARGUMENT_EVENTS[item['type']]}.delta", **_id(item), delta=text)

    def _end_item(self, status: str = "completed") -> bytes:
        if not self._open:
            return b""
        kind, self._open = self._open, ""
        text, self._texts = "".join(self._texts), []
        item = self._items[-1] = {**self._items[-1], "status": status}
        if kind in _ARGUMENT_EVENTS:
            item[_arguments_name(item)] = text
        else:
            item["content"] = [_text_part(text) if kind == "message" else _thought_part(text)]
        if kind in _ARGUMENT_EVENTS:
            name = _arguments_name(item)
            done = {name: item[name]}
            if kind == "function_call":
                done["name"] = item["name"]
            events = self._item_event(f"{_ARGUMENT_EVENTS[kind]}.done", **_id(item), **done)
            return events + self._item_event("output_item.done", item=item)
        part = item["content"][0]
        if kind == "message":
            events = self._part_event("output_text.done", text=part["text"], logprobs=[])
        else:
            events = self._part_event("reasoning_text.done", text=part["text"])
        events += self._part_event("content_part.done", part=part)
        return events + self._item_event("output_item.done", item=item)

    def _part_event(self, kind: str, **data: Any) -> bytes:
        return self._item_event(kind, item_id=self._items[-1]["id"], content_index=0, **data)

    def _item_event(self, kind: str, **data: Any) -> bytes:
        return self._event(f"response.{kind}", output_index=len(self._items) - 1, **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return f"event: {kind}\n".encode() + _encode_event(numbered)

    def _response(self, choices: Sequence[Choice], items: list[Json], usage: Json | None) -> Json:
        (choice,) = choices
        status = {None: "in_progress", "length": "incomplete"}.get(choice.finish, "completed")
        incomplete_details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete_details,
            "model": self.model,
            "output": items,
            "usage": usage and _write_usage(usage),
            "store": self.keep is not None,
            **self.echo,
        }


def usage_of(choices: Sequence[Choice], prompt_tokens: int, seed: int) -> Json:
    """Return the ``usage`` of a response. Its section ``edgespec`` is not OpenAI's: how many tokens
    the device drafted, and by which rule drafts were accepted. Under a ``lossy`` rule,
    ``replaced_tokens`` counts the tokens that are not the target's own."""
    completion_tokens = sum(choice.tokens for choice in choices)
    stats = [choice.stats for choice in choices if choice.stats is not None]
    counters = [one.counters for one in stats]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices),
            "accepted_prediction_tokens": sum(one.predicted_accepted for one in counters),
            "rejected_prediction_tokens": sum(one.predicted_wrong for one in counters),
        },
        "edgespec": {
            "drafted_tokens": sum(one.sent for one in counters),
            "accepted_tokens": sum(one.accepted for one in counters),
            "replaced_tokens": sum(one.replaced for one in counters),
            "corrected_tokens": sum(one.corrected for one in counters),
            "verifier_passes": sum(one.passes for one in counters),
            "reconnects": sum(one.reconnects for one in counters),
            "named_tokens": sum(one.named_tokens for one in counters),
            "prefix_misses": sum(one.prefix_misses for one in counters),
            "failovers": sum(one.failovers for one in stats),
            "seed": seed,
            "rule": stats[0].rule if stats else EXACT_RULE,
            "lossy": any(one.is_lossy for one in stats),
            **_summarise_sources(choices),
        },
    }


def _summarise_sources(choices: Sequence[Choice]) -> Json:
    """Return the tokens of a response by their source and, for a single choice, its speed; nothing
    if the request does not ask for sources."""
    shown = [(one, one.timeline) for one in choices if one.timeline is not None]
    if not shown:
        return {}
    sources = Counter[str]()
    for choice, timeline in shown:
        sources.update(timeline.origin(index).value for index in range(choice.tokens))
    speed = describe_speed(shown[0][1]) if len(shown) == 1 else {}
    return {"tokens_by_source": dict(sources), **speed}


def _encode_event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + compact_json(data).encode() + b"\n\n"


def _chat_chunk(choice: Choice, delta: Json) -> Json:
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _call(call: ToolCall) -> Json:
    if call.is_custom:
        custom = {"name": call.name, CUSTOM_INPUT: call.arguments}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def arguments_object(call: ToolCall) -> Json | None:
    """Return the arguments of a call as an object, or None if the output was cut off in them."""
    try:
        # They may contain control characters, which strict JSON refuses.
        arguments = json.loads(call.arguments or "{}", strict=False)
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def chat_scores(choice: Choice, scores: Scores) -> Json:
    """Return scores in the form of a chat's ``logprobs``."""

    def scored(token: int, logprob: float) -> Json:
        written = list(choice.token_bytes(token))
        return {"token": choice.token_text(token), "logprob": logprob, "bytes": written}

    content = [
        {
            **scored(one.token, one.score.logprob),
            "top_logprobs": [scored(*top) for top in one.score.top[: choice.request.logprobs]],
        }
        for one in scores
        if one.score is not None
    ]
    return {"content": content, "refusal": None}


def _write_usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
        },
        "total_tokens": usage["total_tokens"],
        "edgespec": usage["edgespec"],
    }


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def _write_message(text: str, status: str) -> Json:
    kind = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
    return {**kind, "status": status, "content": [_text_part(text)]}


def _reasoning(text: str, status: str) -> Json:
    kind = {"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": []}
    return {**kind, "status": status, "content": [_thought_part(text)]}


def _item(part: Part, status: str) -> Json:
    if isinstance(part, str):
        return _write_message(part, status)
    if isinstance(part, Thought):
        return _reasoning(part.text, status)
    assert isinstance(part, ToolCall)  # a choice has whole calls
    return _tool_call(part, status)


def _find_status(choice: Choice) -> str:
    """Return the status of the item that was written last."""
    return "incomplete" if choice.finish == "length" else "completed"


_ARGUMENT_EVENTS: Final = {
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""Beginning of the names of the events for a call's arguments, by the type of its item."""


def _arguments_name(item: Json) -> str:
    return CUSTOM_INPUT if item["type"] == "custom_tool_call" else "arguments"


def _id(item: Json) -> Json:
    return {"item_id": item["id"]}


def _tool_call(call: ToolCall, status: str) -> Json:
    own = {CUSTOM_INPUT: call.arguments} if call.is_custom else {"arguments": call.arguments}
    return {
        "type": "custom_tool_call" if call.is_custom else "function_call",
        "id": f"{'ctc' if call.is_custom else 'fc'}_{secrets.token_hex(12)}",
        "call_id": call.id,
        "name": call.name,
        **({"namespace": call.namespace} if call.namespace else {}),
        **own,
        "status": status,
    }
