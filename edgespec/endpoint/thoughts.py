"""Thoughts: the part of an output that a model writes for itself before its answer.

A thought stands between two marks at the beginning of the output. Many chat templates write the
opening mark themselves, so that the output begins inside the thought. Which marks a model uses is
known by its template. The reader depends on the text alone and not on how it is cut into chunks.
White space at both ends of a thought, and between the thought and the answer, is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from edgespec.endpoint.marks import (
    MarkToken,
    partial_mark_length,
    replace_signs,
    stand_ins,
)


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of a thought. The parts of one output, joined, are its whole thought."""

    text: str


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """The way in which a family of models writes thoughts. The usual fields are marks."""

    begin: str
    end: str
    label: str = ""
    """Text behind ``begin`` that belongs to it."""
    answer_begin: str = ""
    """Text around the answer that is not part of it: in front, and behind (``answer_end``)."""
    answer_end: str = ""
    is_harmony: bool = False
    """Whether the output consists of messages in channels, one of which has the thoughts."""


THINK: Final = ThoughtFormat("<think>", "</think>")
HARMONY: Final = ThoughtFormat("<|channel|>", "<|end|>", "analysis<|message|>", is_harmony=True)
_FORMATS: Final = (
    HARMONY,  # gpt-oss
    ThoughtFormat("<|channel>", "<channel|>", "thought"),  # Gemma 4
    ThoughtFormat("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ThoughtFormat("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThoughtFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ThoughtFormat("◁think▷", "◁/think▷"),  # Kimi-VL
    ThoughtFormat("Here is my thought process:", "Here is my response:"),  # Granite 3.2
    ThoughtFormat(
        "<think>", "</think>", answer_begin="<response>", answer_end="</response>"
    ),  # Granite 3.3
    THINK,  # Qwen 3, DeepSeek, GLM, SmolLM3, Phi-4-reasoning, Nemotron and others
)
"""Known formats. The first one whose texts a template contains is taken."""


def thought_format(template: str) -> ThoughtFormat | None:
    """Return the format of thoughts that a chat template's source uses, or None if it uses none
    that is known."""
    for one in _FORMATS:
        if one.is_harmony:
            is_used = one.begin in template and "<|message|>" in template
        elif one.answer_begin:
            is_used = one.end in template and one.answer_begin in template
        else:
            is_used = one.end in template or one.begin + one.label in template
        if is_used:
            return one
    return None


def ends_in_thought(form: ThoughtFormat | None, prompt: str) -> bool:
    """Return whether an output for ``prompt`` begins inside a thought that the prompt opened."""
    if form is None or form.is_harmony:
        return False
    return prompt.rstrip().endswith(form.begin + form.label)


class _State(Enum):
    START = auto()
    """Nothing but white space has come."""
    THOUGHT_START = auto()
    THOUGHT = auto()
    ANSWER_START = auto()
    """The thought has ended, and only white space has come since."""
    ANSWER = auto()


class ThoughtReader:
    """Reader that parts the thought of one output from its answer.

    Args:
        form: The format in which the model writes thoughts, other than harmony.
        tokens: Marks that are tokens, by id. The text has signs for them (``MarkedText``), and so
            has the answer that is returned.
        is_thinking: Whether the output begins inside a thought.
    """

    def __init__(
        self,
        form: ThoughtFormat,
        tokens: Mapping[int, MarkToken] | None = None,
        *,
        is_thinking: bool = False,
    ) -> None:
        stands = stand_ins(tokens or {})
        self._begin = stands.get(form.begin, form.begin) + form.label
        self._end = stands.get(form.end, form.end)
        self._answer_begin, self._answer_end = form.answer_begin, form.answer_end
        self._texts = {token.sign: token.written for token in (tokens or {}).values()}
        self._state = _State.THOUGHT_START if is_thinking else _State.START
        self._buffer = ""
        self._is_wrapped = False
        """Whether the text that opens the answer was found."""

    @property
    def is_thinking(self) -> bool:
        return self._state in (_State.THOUGHT_START, _State.THOUGHT)

    def push(self, text: str) -> list[str | Thought]:
        """Add text and return what is certain now."""
        self._buffer += text
        return self._read(is_last=False)

    def flush(self) -> list[str | Thought]:
        """Return the rest, when no text will follow."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> list[str | Thought]:
        parts: list[str | Thought] = []
        step = {
            _State.START: self._read_start,
            _State.THOUGHT_START: self._read_thought_start,
            _State.THOUGHT: self._read_thought,
            _State.ANSWER_START: self._read_answer_start,
            _State.ANSWER: self._read_answer,
        }
        while step[self._state](parts, is_last):
            pass
        return parts

    # Each method below reads the buffer in one state. It returns whether the state has changed.

    def _read_start(self, parts: list[str | Thought], is_last: bool) -> bool:
        stripped = self._buffer.lstrip()
        if stripped.startswith(self._begin):
            self._buffer = stripped[len(self._begin) :]
            self._state = _State.THOUGHT_START
            return True
        if self._begin.startswith(stripped) and not is_last:
            return False
        self._state = _State.ANSWER
        return True

    def _read_thought_start(self, parts: list[str | Thought], is_last: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(self._begin):  # some models repeat the mark of the prompt
            self._buffer = self._buffer[len(self._begin) :].lstrip()
        elif self._begin.startswith(self._buffer) and not is_last:
            return False
        self._state = _State.THOUGHT
        return True

    def _read_thought(self, parts: list[str | Thought], is_last: bool) -> bool:
        place = self._buffer.find(self._end)
        is_complete = place >= 0
        if not is_complete:
            held = 0 if is_last else partial_mark_length(self._buffer, (self._end,))
            place = len(self._buffer) - held
        text = self._buffer[:place].rstrip()
        if shown := replace_signs(self._texts, text):
            parts.append(Thought(shown))
        if is_complete:
            self._buffer = self._buffer[place + len(self._end) :]
            self._state = _State.ANSWER_START
            return True
        self._buffer = "" if is_last else self._buffer[len(text) :]
        return False

    def _read_answer_start(self, parts: list[str | Thought], is_last: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._answer_begin:
            if self._buffer.startswith(self._answer_begin):
                self._buffer = self._buffer[len(self._answer_begin) :].lstrip()
                self._answer_begin, self._is_wrapped = "", True
            elif self._answer_begin.startswith(self._buffer) and not is_last:
                return False
        if not self._buffer and not is_last:
            return False
        self._state = _State.ANSWER
        return True

    def _read_answer(self, parts: list[str | Thought], is_last: bool) -> bool:
        cut = len(self._buffer)
        if self._is_wrapped:
            # The closing text is dropped only at the end of the output.
            stripped = self._buffer.rstrip()
            if stripped.endswith(self._answer_end):
                cut = len(stripped) - len(self._answer_end)
                if is_last:
                    self._buffer = self._buffer[:cut].rstrip()
                    cut = len(self._buffer)
            elif not is_last:
                cut -= partial_mark_length(self._buffer, (self._answer_end,))
        if text := self._buffer[:cut]:
            parts.append(text)
        self._buffer = self._buffer[cut:]
        return False
