"""Reader of harmony, the format of gpt-oss: an output is a series of messages in channels.

    <|channel|>analysis<|message|>a thought<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The channel ``analysis`` has thoughts; a message to a function is a call, whose arguments are
returned as they grow; every other message is text. The prompt ends with ``<|start|>assistant``, or
in the middle of a message to continue. An output without marks is text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from edgespec.endpoint.json_pieces import JsonPieces
from edgespec.endpoint.marks import (
    HARMONY_MARKS,
    MarkToken,
    partial_mark_length,
    replace_signs,
    stand_ins,
)
from edgespec.endpoint.thoughts import Thought
from edgespec.endpoint.tool_calls import CallArguments, new_call

_MAX_HEADER: Final = 512
"""Limit on the characters of a header. A longer one is text."""
_RECIPIENT: Final = re.compile(r"\bto=(\S+)")
_START, _CHANNEL, _CONSTRAIN, _MESSAGE = HARMONY_MARKS[:4]
_ENDS: Final = HARMONY_MARKS[4:]
_FUNCTIONS: Final = "functions."
_TO: Final = "to="
START_OF_ANSWER: Final = f"{_START}assistant"


class HarmonyReader:
    """Reader of one output in harmony.

    Args:
        tokens: Marks that are tokens, by id. The text has signs for them (``MarkedText``).
        tool_names: Names of the tools. Messages to another recipient are thoughts, since they
            belong to the model's own work.
    """

    def __init__(
        self, tool_names: Collection[str] = (), tokens: Mapping[int, MarkToken] | None = None
    ) -> None:
        stands = stand_ins(tokens or {})
        self._texts = {token.sign: token.written for token in (tokens or {}).values()}
        self._arguments: JsonPieces | None = None
        """Arguments of the call that is read; None before their first character."""
        self._names = frozenset(tool_names)
        self._start, self._message = stands[_START], stands[_MESSAGE]
        self._openings = (stands[_START], stands[_CHANNEL], stands[_MESSAGE])
        self._header_marks = (stands[_CHANNEL], stands[_CONSTRAIN])
        self._ends = (*(stands[one] for one in _ENDS), self._start)
        self._buffer = ""
        self._is_in_header = True
        self._kind = "text"
        """Kind of the message: text, thought or call."""
        self._recipient = ""
        self._has_message = False
        """Whether a message was read, behind which only a header can follow."""

    @property
    def is_thinking(self) -> bool:
        return not self._is_in_header and self._kind == "thought"

    def push(self, text: str) -> list[Any]:
        """Add text and return what is certain now."""
        self._buffer += text
        return self._read(is_last=False)

    def flush(self) -> list[Any]:
        """Return the rest, when no text will follow."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> list[Any]:
        parts: list[Any] = []
        while (
            self._read_header(parts, is_last)
            if self._is_in_header
            else self._read_body(parts, is_last)
        ):
            pass
        return parts

    def _read_header(self, parts: list[Any], is_last: bool) -> bool:
        place = self._buffer.find(self._message)
        if not self._may_be_header(place):
            # The mark that should open a header is text, or it would be read again.
            start = self._start if self._buffer.startswith(self._start) else ""
            self._begin_message("", "")
            self._add_text(parts, start)
            self._buffer = self._buffer[len(start) :]
            return bool(self._buffer)
        if place < 0 and is_last:
            if not self._has_message and not self._buffer.lstrip().startswith(self._openings):
                self._begin_message("", "")
                return True
            self._buffer = ""  # a header that was cut off
        if place < 0:
            return False
        header = self._buffer[:place]
        self._buffer = self._buffer[place + len(self._message) :]
        recipient = _RECIPIENT.search(header)
        for mark in self._header_marks:
            header = header.replace(mark, f" {_CHANNEL if mark == self._header_marks[0] else ''}")
        words = header.partition(_CHANNEL)[2].split()
        name = recipient[1] if recipient is not None else ""
        for mark in self._header_marks:
            name = name.partition(mark)[0]
        self._begin_message(words[0] if words else "", name)
        return True

    def _may_be_header(self, place: int) -> bool:
        """Return whether the buffer may begin with a header, whose end is at ``place``, or which is
        not complete if that is negative."""
        length = place
        if place < 0:
            length = len(self._buffer) - partial_mark_length(self._buffer, (self._message,))
        if length > _MAX_HEADER:
            return False
        text = self._buffer.lstrip()
        return (
            self._has_message
            or text.startswith((*self._openings, _TO))
            or partial_mark_length(text, (*self._openings, _TO)) == len(text)
        )

    def _begin_message(self, channel: str, recipient: str) -> None:
        self._is_in_header, self._has_message = False, True
        self._arguments = None
        self._recipient = recipient.removeprefix(_FUNCTIONS)
        if recipient and self._recipient in self._names:
            self._kind = "call"
        else:
            self._kind = "thought" if recipient or channel == "analysis" else "text"

    def _read_body(self, parts: list[Any], is_last: bool) -> bool:
        places = [(place, mark) for mark in self._ends if (place := self._buffer.find(mark)) >= 0]
        if not places:
            held = 0 if is_last else partial_mark_length(self._buffer, self._ends)
            cut = len(self._buffer) - held
            if cut or self._arguments is not None:
                self._add_part(parts, self._buffer[:cut], is_last=is_last)
            self._buffer = self._buffer[cut:]
            return False
        place, mark = min(places)
        self._add_part(parts, self._buffer[:place], is_last=True)
        # A new message may begin without the mark that ends the one before.
        self._buffer = self._buffer[place + (0 if mark == self._start else len(mark)) :]
        self._is_in_header = True
        return True

    def _add_part(self, parts: list[Any], text: str, *, is_last: bool) -> None:
        """Add text of the message. ``is_last``: the message ends behind it."""
        if self._kind != "call":
            self._add_text(parts, text)
            return
        text = replace_signs(self._texts, text)
        if (arguments := self._arguments) is None:
            if not (text := text.lstrip()) and not is_last:
                return
            parts.append(new_call(self._recipient))
            self._arguments = arguments = JsonPieces()
            text = text or "{}"
        written, length = arguments.push(text)
        if is_last and not arguments.is_complete:
            written += arguments.flush()
        rest = text[length:]
        if arguments.is_complete and not arguments.is_broken:
            rest = rest.lstrip()
            arguments.is_broken = bool(rest)
        # Text that is no JSON is passed on, so that a client sees what the model wrote.
        if written := written + rest:
            parts.append(CallArguments(written))

    def _add_text(self, parts: list[Any], text: str) -> None:
        if text := replace_signs(self._texts, text):
            parts.append(Thought(text) if self._kind == "thought" else text)
