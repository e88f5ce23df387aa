"""Marks in an output: texts such as ``<tool_call>`` and ``<think>`` that open or close a call or a
thought.

Many vocabularies have a token for a mark. Then only that token is the mark, and letters that spell
it are text. Decoded text shows some such tokens and hides others, so ``MarkedText`` replaces
each such token by a *sign*, a character that no text contains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from edgespec.device.agent import Piece


def deepseek_mark(words: str) -> str:
    """Return the mark of DeepSeek's vocabulary that is written with these words. It has a wide bar
    (U+FF5C) at its ends and a low block (U+2581) for each space."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


CALL_MARKS: Final = (
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>"),
    *("<|tool_call|>", "<|/tool_call|>", "<|python_start|>", "<|python_end|>"),
    *(deepseek_mark(one) for one in ("tool calls begin", "tool call begin", "tool sep")),
    *(deepseek_mark(one) for one in ("tool call end", "tool calls end")),
    *("<start_function_call>", "<end_function_call>", "<escape>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>'),
)
"""Marks of tool calls. Where they open no call, a hidden one is written out."""
THOUGHT_MARKS: Final = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>"),
    *("<|START_THINKING|>", "<|END_THINKING|>", "◁think▷", "◁/think▷", "<|channel>", "<channel|>"),
)
"""Marks of thoughts. A hidden one stays hidden."""
HARMONY_MARKS: Final = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
"""Marks of gpt-oss. A hidden one stays hidden."""
_ALL_MARKS: Final = (*CALL_MARKS, *THOUGHT_MARKS, *HARMONY_MARKS)
_FIRST_SIGN: Final = 0xDC00
"""First of the characters that stand for mark tokens. They are unpaired surrogates, which decoded
text never contains."""


class TokenNames(Protocol):
    """The part of a tokenizer that has the tokens added to its vocabulary."""

    @property
    def added(self) -> Mapping[str, int]:
        """Ids of all added tokens, special or not, by their text."""

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with exactly this text, which decoded text leaves
        out."""


@dataclass(frozen=True, slots=True)
class MarkToken:
    """A mark that is one token of the vocabulary. ``is_shown``: decoded text contains it."""

    text: str
    is_shown: bool

    @property
    def sign(self) -> str:
        """The character that stands for the mark while an output is read."""
        return chr(_FIRST_SIGN + _ALL_MARKS.index(self.text))

    @property
    def written(self) -> str:
        """The text that the output shows for a mark which opens or closes nothing. A hidden mark of
        a call is written out; a hidden mark of a thought stays hidden."""
        return self.text if self.is_shown or self.text in CALL_MARKS else ""


def mark_tokens(
    names: TokenNames, marks: Collection[str] = (*CALL_MARKS, *THOUGHT_MARKS)
) -> dict[int, MarkToken]:
    """Return the ``marks`` that are tokens of a vocabulary, by token id."""
    ids = {mark: names.added.get(mark) for mark in marks}
    return {
        token: MarkToken(mark, names.special_id(mark) is None)
        for mark, token in ids.items()
        if token is not None
    }


def stand_ins(tokens: Mapping[int, MarkToken]) -> dict[str, str]:
    """Return what stands for each mark in the text of ``MarkedText``: its sign if it is a token,
    otherwise the mark itself."""
    return {mark: mark for mark in _ALL_MARKS} | {one.text: one.sign for one in tokens.values()}


def write_signs(tokens: Mapping[int, MarkToken], text: str) -> str:
    """Return ``text`` with signs for the marks in it that are tokens."""
    for one in tokens.values():
        text = text.replace(one.text, one.sign)
    return text


def replace_signs(texts: Mapping[str, str], text: str) -> str:
    """Return ``text`` with signs replaced by their texts."""
    for sign, written in texts.items():
        text = text.replace(sign, written)
    return text


def partial_mark_length(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` that is a proper beginning of one of
    ``marks``."""
    longest = min(len(text), max(map(len, marks), default=0) - 1)
    for length in range(longest, 0, -1):
        if any(len(mark) > length and mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


_LONGEST_UNFINISHED: Final = 4
"""Characters that a decoder may emit late, in front of the text of a mark."""


class MarkedText:
    """One decoded output in which signs replace the marks that are tokens."""

    def __init__(self, tokens: Mapping[int, MarkToken]) -> None:
        self._tokens = tokens
        self._text = ""
        """Decoded text that was not returned yet."""
        self._length = 0
        """Characters of decoded text so far, without hidden marks."""
        self._waiting: deque[tuple[int, MarkToken]] = deque()
        """Marks with their places in characters, counted like ``_length``, that were not reached
        yet."""

    def push(self, token: int | None, piece: Piece) -> str:
        """Return the text of ``piece`` with signs for its marks. ``token`` None: the piece belongs
        to no token."""
        if token is not None and (mark := self._tokens.get(token)) is not None:
            self._waiting.append((self._length + piece.held_chars, mark))
        self._length += len(piece.text)
        self._text += piece.text
        return self._release(is_last=False)

    def flush(self) -> str:
        """Return the rest, when no token will follow."""
        return self._release(is_last=True)

    def _release(self, *, is_last: bool) -> str:
        parts, ready = [], -1
        while self._waiting:
            place, mark = self._waiting[0]
            at = max(0, place - self._length + len(self._text))
            if place > self._length:
                break
            width = len(mark.text) if mark.is_shown else 0
            if width:
                end = at + width + _LONGEST_UNFINISHED
                place_of_mark = self._text.find(mark.text, at, end)
                if place_of_mark < 0 and not is_last and len(self._text) < end:
                    ready = at
                    break
                at = place_of_mark
            self._waiting.popleft()
            if at >= 0:
                parts += [self._text[:at], mark.sign]
                self._text = self._text[at + width :]
        cut = len(self._text) if ready < 0 else ready
        parts.append(self._text[:cut])
        self._text = self._text[cut:]
        if is_last:
            self._waiting.clear()
        return "".join(parts)
