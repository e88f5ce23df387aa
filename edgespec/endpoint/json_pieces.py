"""Incremental writer of JSON: it reads a JSON object as it grows and writes it in one form.

The form is that of ``json.dumps(..., ensure_ascii=False)``: one blank behind commas and colons,
numbers as Python writes them, and no escape that is not needed. So the arguments of a call have the
same text whether they are written whole or piece by piece. Two kinds of objects are an exception,
because a piece that was written cannot be taken back: of two members with one name both are
written, and an unpaired surrogate is written as an escape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from edgespec.endpoint.marks import replace_signs

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z]*")
_MAX_SCALAR: Final = 4096
"""Limit on the characters of a number. Python reads no integer of more than 4,300 digits."""
_MAX_DEPTH: Final = 512
_TEXT: Final = re.compile(r'[^"\\]*')
_ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPES.update({one: one for one in '"\\/'})
_HEX: Final = re.compile("[0-9A-Fa-f]{0,4}")
_HIGH, _LOW, _END = 0xD800, 0xDC00, 0xE000
"""Bounds of the surrogates: the first that begins a pair, the first that ends one, and the code
behind all surrogates."""


class _Expected(Enum):
    """The kind of token that may come next."""

    VALUE = auto()
    FIRST_ITEM = auto()
    """A value of a list, or its end."""
    KEY = auto()
    FIRST_KEY = auto()
    """A name in an object, or its end."""
    COLON = auto()
    COMMA = auto()
    """A comma, or the end of the list or object."""


class JsonPieces:
    """One JSON object that is read and written as it grows.

    Args:
        signs: Texts for the signs in its strings (``marks.py``).
    """

    def __init__(self, signs: Mapping[str, str] | None = None) -> None:
        self._signs = signs or {}
        self._closing: list[str] = []
        """The character that closes each open list and object, the innermost last."""
        self._expected = _Expected.VALUE
        self._before = ""
        """Separator that is written in front of the next token."""
        self._is_in_string = self._is_key = False
        self._high = 0
        """A surrogate that may begin a pair, read as an escape; 0: none."""
        self._held = ""
        """The beginning of a token that was read and is not written yet."""
        self.is_complete = False
        """Whether the object has ended."""
        self.is_broken = False
        """Whether the text is no JSON. What was read before that is written."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing that follows is a part of the object."""
        return self.is_complete or self.is_broken

    def push(self, text: str) -> tuple[str, int]:
        """Read ``text``, which follows the text of the last call, to the end of the object or to a
        character that is no JSON there. Return what is certain now, and the number of characters
        that were read. The rest is not part of the object."""
        text, old = self._held + text, len(self._held)
        self._held = ""
        written, at = list[str](), 0
        while at < len(text) and not self.has_ended:
            read = self._read_string if self._is_in_string else self._read_token
            following = read(text, at, written)
            if following is None:  # the token may go on in the next text
                self._held = text[at:]
                return "".join(written), len(text) - old
            at = following
        if self.is_broken:
            self._break(written)
            if at < old:  # a held token turned out to be no JSON
                written.append(text[at:old])
                at = old
        return "".join(written), at - old

    def flush(self) -> str:
        """Return what was held back, when no text will follow."""
        written = list[str]()
        self._break(written)
        written.append(self._held)
        self._held = ""
        return "".join(written)

    def _break(self, written: list[str]) -> None:
        """Write what waits for a token that does not come."""
        self._end_pair(written)
        written.append(self._before)
        self._before = ""

    # Both methods below read one token, or a part of a string, from ``at`` on. They return the
    # index behind it, or None if its end is not there yet.

    def _read_token(self, text: str, at: int, written: list[str]) -> int | None:
        space = _SPACE.match(text, at)
        assert space is not None  # the pattern matches an empty text
        if space[0]:
            return space.end()
        character, expected = text[at], self._expected
        if expected is _Expected.COLON:
            return self._separate(": ", _Expected.VALUE, at) if character == ":" else self._fail(at)
        if self._closing and character == self._closing[-1]:
            if expected in (_Expected.COMMA, _Expected.FIRST_ITEM, _Expected.FIRST_KEY):
                return self._close(character, at, written)
            return self._fail(at)
        if expected is _Expected.COMMA:
            is_object = self._closing[-1] == "}"
            following = _Expected.KEY if is_object else _Expected.VALUE
            return self._separate(", ", following, at) if character == "," else self._fail(at)
        if expected in (_Expected.KEY, _Expected.FIRST_KEY):
            return (
                self._open_string(at, written, is_key=True) if character == '"' else self._fail(at)
            )
        if character == '"' and self._closing:
            return self._open_string(at, written, is_key=False)
        if character in ("{[" if self._closing else "{"):
            return self._open(character, at, written)
        return self._read_scalar(text, at, written) if self._closing else self._fail(at)

    def _read_scalar(self, text: str, at: int, written: list[str]) -> int | None:
        """Read a number or a word."""
        match = _SCALAR.match(text, at)
        assert match is not None  # the pattern matches an empty text
        if len(match[0]) >= _MAX_SCALAR:
            return self._fail(at)
        if match.end() == len(text):
            return None
        try:
            value = None if match[0] in ("NaN", "Infinity", "-Infinity") else json.loads(match[0])
        except ValueError:
            return self._fail(at)
        if value is None and match[0] != "null":
            return self._fail(at)
        self._write(json.dumps(value), written)
        self._expected = _Expected.COMMA
        return match.end()

    def _read_string(self, text: str, at: int, written: list[str]) -> int | None:
        run = _TEXT.match(text, at)
        assert run is not None  # the pattern matches an empty text
        if run[0]:
            self._end_pair(written)
            written.append(_escape(replace_signs(self._signs, run[0])))
            return run.end()
        if text[at] == "\\":
            return self._read_escape(text, at, written)
        self._end_pair(written)
        written.append('"')
        self._is_in_string = False
        self._expected = _Expected.COLON if self._is_key else _Expected.COMMA
        return at + 1

    def _read_escape(self, text: str, at: int, written: list[str]) -> int | None:
        if at + 1 == len(text):
            return None
        if (character := text[at + 1]) != "u":
            if character not in _ESCAPES:
                return self._fail(at)
            self._end_pair(written)
            written.append(_escape(_ESCAPES[character]))
            return at + 2
        digits = _HEX.match(text, at + 2)
        assert digits is not None  # the pattern matches an empty text
        if len(digits[0]) < 4:
            return None if digits.end() == len(text) else self._fail(at)
        code = int(digits[0], 16)
        if self._high and _LOW <= code < _END:
            pair = chr(0x10000 + ((self._high - _HIGH) << 10) + (code - _LOW))
            self._high = 0
            written.append(pair)
            return digits.end()
        self._end_pair(written)
        if _HIGH <= code < _LOW:
            self._high = code
        elif _LOW <= code < _END:
            written.append(f"\\u{code:04x}")
        else:
            written.append(_escape(chr(code)))
        return digits.end()

    def _end_pair(self, written: list[str]) -> None:
        """Write a surrogate whose other half did not follow."""
        if self._high:
            written.append(f"\\u{self._high:04x}")
            self._high = 0

    def _open_string(self, at: int, written: list[str], *, is_key: bool) -> int:
        self._write('"', written)
        self._is_in_string, self._is_key = True, is_key
        return at + 1

    def _open(self, character: str, at: int, written: list[str]) -> int:
        if len(self._closing) == _MAX_DEPTH:
            return self._fail(at)
        self._write(character, written)
        is_object = character == "{"
        self._closing.append("}" if is_object else "]")
        self._expected = _Expected.FIRST_KEY if is_object else _Expected.FIRST_ITEM
        return at + 1

    def _close(self, character: str, at: int, written: list[str]) -> int:
        self._write(character, written)
        self._closing.pop()
        self._expected = _Expected.COMMA
        self.is_complete = not self._closing
        return at + 1

    def _separate(self, separator: str, expected: _Expected, at: int) -> int:
        self._before, self._expected = separator, expected
        return at + 1

    def _write(self, token: str, written: list[str]) -> None:
        written += (self._before, token)
        self._before = ""

    def _fail(self, at: int) -> int:
        self.is_broken = True
        return at


def _escape(text: str) -> str:
    """Return ``text`` as a JSON string has it, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
