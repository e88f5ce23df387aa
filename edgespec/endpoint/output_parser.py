"""Parser of an output: it parts the thought of a model, its tool calls and its text.

This is the one place that knows how a model's output is read. Every API gets the same parts, in
their order, and writes them in its own form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgespec.device.agent import Piece
from edgespec.endpoint.harmony import HarmonyReader
from edgespec.endpoint.marks import (
    HARMONY_MARKS,
    MarkedText,
    MarkToken,
    TokenNames,
    mark_tokens,
    replace_signs,
    write_signs,
)
from edgespec.endpoint.thoughts import Thought, ThoughtFormat, ThoughtReader
from edgespec.endpoint.tool_calls import (
    CallArguments,
    ToolCall,
    ToolFormat,
    ToolReader,
    marks_of_calls,
)

Part = str | Thought | ToolCall | CallArguments
"""A part of an output, as it arrives: text; a part of the thought; a call, with its arguments as
far as they are known; further arguments of the call before. A call is complete when a part of
another kind follows, or when the output ends."""


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The way in which a model writes its output."""

    thoughts: ThoughtFormat | None = None
    """None: it writes no thoughts, or in an unknown format."""
    calls: ToolFormat | None = None
    """None: no calls are expected."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the parameters of the tools, by their names."""
    is_thinking: bool = False
    """Whether the output begins inside a thought."""
    beginning: str = ""
    """In harmony, the part of the output's first message that the prompt holds."""

    @property
    def is_harmony(self) -> bool:
        return self.thoughts is not None and self.thoughts.is_harmony

    def make_parser(self, names: TokenNames) -> OutputParser | None:
        """Return a parser of one output for a vocabulary, or None if the output is plain text."""
        if self.thoughts is None and self.calls is None:
            return None
        if self.is_harmony:
            return OutputParser(self, mark_tokens(names, HARMONY_MARKS))
        marks = set[str]()
        if self.thoughts is not None:
            marks |= {self.thoughts.begin, self.thoughts.end}
        if self.calls is not None:
            marks.update(marks_of_calls(self.calls))
        return OutputParser(self, mark_tokens(names, marks))


class OutputParser:
    """Parser of one output. ``push`` returns what is certain now, ``flush`` the rest.

    Args:
        form: The way in which the model writes.
        tokens: Marks that are tokens of the vocabulary, by id.
    """

    def __init__(self, form: OutputForm, tokens: Mapping[int, MarkToken] | None = None) -> None:
        tokens = tokens or {}
        self._marks = MarkedText(tokens)
        self._texts = {token.sign: token.written for token in tokens.values()}
        self._thoughts: ThoughtReader | None = None
        self._calls: ToolReader | None = None
        self._harmony: HarmonyReader | None = None
        if form.is_harmony:
            self._harmony = HarmonyReader(form.schemas, tokens)
            self._harmony.push(write_signs(tokens, form.beginning))
            return
        if form.thoughts is not None:
            self._thoughts = ThoughtReader(form.thoughts, tokens, is_thinking=form.is_thinking)
        if form.calls is not None:
            self._calls = ToolReader(form.calls, form.schemas, tokens)

    @property
    def is_thinking(self) -> bool:
        """Whether the output read so far ends inside a thought."""
        reader = self._harmony or self._thoughts
        return reader is not None and reader.is_thinking

    def push(self, token: int | None, piece: Piece) -> list[Part]:
        """Add the text of one token, or with ``token`` None text that belongs to no token."""
        return self._read(self._marks.push(token, piece))

    def flush(self) -> list[Part]:
        """Return what was held back. No token follows."""
        return self._read(self._marks.flush(), is_last=True)

    def _read(self, text: str, *, is_last: bool = False) -> list[Part]:
        if self._harmony is not None:
            messages = self._harmony.push(text)
            return messages + self._harmony.flush() if is_last else messages
        answer: list[str | Thought] = [text] if text else []
        if self._thoughts is not None:
            answer = self._thoughts.push(text)
            if is_last:
                answer += self._thoughts.flush()
        parts: list[Part] = []
        for one in answer:
            if isinstance(one, Thought):
                parts.append(one)
            elif self._calls is not None:
                parts += self._calls.push(one)
            else:
                parts.append(replace_signs(self._texts, one))
        if is_last and self._calls is not None:
            parts += self._calls.flush()
        return [one for one in parts if one]


def join_parts(parts: Iterable[Part]) -> list[Part]:
    """Return parts with neighbours of one kind joined, and calls with all their arguments."""
    joined: list[Part] = []
    for part in parts:
        append_part(joined, part)
    return joined


def append_part(parts: list[Part], part: Part) -> None:
    """Append a part, or add it to the last one if it continues it."""
    last = parts[-1] if parts else None
    if isinstance(part, str) and isinstance(last, str):
        parts[-1] = last + part
    elif isinstance(part, Thought) and isinstance(last, Thought):
        parts[-1] = Thought(last.text + part.text)
    elif isinstance(part, CallArguments) and isinstance(last, CallArguments):
        parts[-1] = CallArguments(last.text + part.text)
    elif isinstance(part, CallArguments) and isinstance(last, ToolCall):
        parts[-1] = replace(last, arguments=last.arguments + part.text)
    else:
        parts.append(part)
