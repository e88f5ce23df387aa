"""Finds the tool calls in a text that grows, in the format that the model's template teaches it,
and says what a text must be that has to call one.

    Hermes, Qwen   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, repeated
    Mistral        [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f[ARGS]{...}
    Llama 3        {"name": "f", "parameters": {...}} as the whole answer, several with ; between

What cannot be read as a call stays text. However the text is cut up, the same pieces of text and
the same calls come out, so that a streamed answer equals one at once.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from edgespec.core.protocol.checks import is_unicode
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.device.agent import Piece
from edgespec.endpoint.request_json import compact, invalid

MISTRAL_MARK: Final = "[TOOL_CALLS]"
LLAMA_MARK: Final = "<|python_tag|>"
OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_ARGUMENTS: Final = "[ARGS]"
MARKS: Final = (MISTRAL_MARK, "[CALL_ID]", _ARGUMENTS, LLAMA_MARK, OPEN, CLOSE)
"""Where one of these is a special token, decoded text does not show it; it is put back."""
_NAMED: Final = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{)")
_MOST_CALLS: Final = 8
_ALPHANUMERIC: Final = string.ascii_letters + string.digits


class ToolFormat(Enum):
    HERMES = "hermes"
    MISTRAL = "mistral"
    LLAMA = "llama"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """``arguments`` is JSON."""

    id: str
    name: str
    arguments: str


Found = str | ToolCall


def tool_format(template: str) -> ToolFormat | None:
    """What a chat template's source teaches; None: nothing that is known here."""
    if OPEN in template:
        return ToolFormat.HERMES
    if MISTRAL_MARK in template:
        return ToolFormat.MISTRAL
    if "python_tag" in template or ("ipython" in template and "parameters" in template):
        return ToolFormat.LLAMA
    return None


def _new_id(form: ToolFormat) -> str:
    """Mistral's templates take nine letters and digits."""
    if form is ToolFormat.MISTRAL:
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return "call_" + secrets.token_hex(12)


class ToolReader:
    """Reads one answer: ``push`` returns what is certain now, ``flush`` the rest. ``names`` are the
    tools that there are; ``marks`` are texts by token id, which have to be put back into what is
    pushed (``MarkedText``)."""

    def __init__(
        self, form: ToolFormat, names: Collection[str], marks: Mapping[int, str] | None = None
    ) -> None:
        self._form, self._names, self.marks = form, frozenset(names), MarkedText(marks or {})
        self._mark = MISTRAL_MARK if form is ToolFormat.MISTRAL else OPEN
        self._held = ""
        self._inside = self._after_call = False
        self._is_text = False
        """Of an answer in Llama's format, which is all text or all calls."""

    def push(self, text: str) -> list[Found]:
        self._held += text
        if self._form is ToolFormat.LLAMA:
            start = self._held.lstrip()
            may_call = start.startswith(("{", LLAMA_MARK)) or LLAMA_MARK.startswith(start)
            self._is_text = self._is_text or not may_call
            return self._say(self._take(len(self._held))) if self._is_text else []
        found: list[Found] = []
        while not (self._inside and self._form is ToolFormat.MISTRAL):
            mark = CLOSE if self._inside else self._mark
            before, there, rest = self._held.partition(mark)
            if not there:
                break
            found += self._read(before, CLOSE) if self._inside else self._say(before.rstrip())
            self._held, self._inside = rest, not self._inside
        if not self._inside:
            found += self._say(self._take(len(self._held) - _may_begin(self._mark, self._held)))
        return found

    def flush(self) -> list[Found]:
        held, inside = self._take(len(self._held)), self._inside
        self._inside = False
        if self._form is ToolFormat.LLAMA:
            calls = [] if self._is_text else self._calls(held.replace(LLAMA_MARK, ""))
            known = calls and all(call.name in self._names for call in calls)
            return list(calls) if known else self._say(held)
        return self._read(held, "") if inside else self._say(held)

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _say(self, text: str) -> list[Found]:
        """White space between and behind calls is nobody's text."""
        if self._after_call:
            text = text.lstrip()
        self._after_call = self._after_call and not text
        return [text] if text else []

    def _read(self, body: str, close: str) -> list[Found]:
        if not (calls := self._calls(body)):
            return self._say(self._mark + body + close)
        self._after_call = True
        return list(calls)

    def _calls(self, text: str) -> list[ToolCall]:
        """None of them if one cannot be read."""
        values: list[Any] = []
        if self._form is ToolFormat.LLAMA:
            values += _sequence(text)
        elif self._form is ToolFormat.HERMES:
            values.append(_json(text))
        else:
            for part in text.split(MISTRAL_MARK):
                value = _json(part)
                values += value if isinstance(value, list) else [_named(part)]
        calls = [call for value in values if (call := self._call(value)) is not None]
        return calls if len(calls) == len(values) else []

    def _call(self, value: Any) -> ToolCall | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or not is_unicode(name):
            return None
        keys = ("arguments", "parameters")
        keys = keys[::-1] if self._form is ToolFormat.LLAMA else keys
        arguments: Any = next((value[key] for key in keys if key in value), {})
        written = None
        if isinstance(arguments, str):
            written, arguments = arguments, _json(arguments)
        if not isinstance(arguments, dict):
            return None
        if written is None:
            written = json.dumps(arguments, ensure_ascii=False)
        written = written if is_unicode(written) else json.dumps(arguments)
        return ToolCall(_new_id(self._form), name, written)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _sequence(text: str) -> Iterator[Any]:
    """JSON values with white space, commas or semicolons between; a None for what is none."""
    decoder = json.JSONDecoder()
    while text := text.strip(" \t\r\n;,"):
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        text = text[end:]


def _named(text: str) -> Any:
    """``name[ARGS]{...}``, as newer Mistral models write it; None for what is no such call."""
    if (found := _NAMED.match(text)) is None:
        return None
    values = list(_sequence(text[found.end() :]))
    return {"name": found[1], "arguments": values[0] if len(values) == 1 else None}


def _may_begin(mark: str, text: str) -> int:
    """How much of the end of ``text`` must be held: what may begin ``mark``, and the white space
    before it, which is dropped where it does."""
    longest = min(len(mark) - 1, len(text))
    begun = next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())


def forced_call(
    template: str,
    tools: Sequence[Mapping[str, Any]],
    special_id: Callable[[str], int | None],
    *,
    one: bool,
) -> Constraint:
    """What a text has to be that calls one of ``tools``, or several of them unless ``one``, in the
    words of the model's template. ``special_id`` tells the marks that are tokens of their own: no
    text stands for them. Raises ``ApiError``."""
    if (form := tool_format(template)) is None:
        why = "the chat template of this model teaches no format of tool calls that is known here"
        raise invalid("tool_choice", f"{why}, so that none can be forced", "unsupported_parameter")

    def mark(text: str) -> str:
        found = special_id(text)
        return json.dumps(text) if found is None else f"<[{found}]>"

    named = form is ToolFormat.MISTRAL and _ARGUMENTS in template
    key = "parameters" if form is ToolFormat.LLAMA else "arguments"
    before, between, after = "", '"; " ', ""
    if form is ToolFormat.HERMES:
        between = '"\\n" '
    elif named:
        between = ""
    elif form is ToolFormat.MISTRAL:
        before, between, after = f'{mark(MISTRAL_MARK)} "[" ', '", " ', ' "]"'
    rules = []
    for place, tool in enumerate(tools):
        function = tool["function"]
        arguments = {"type": "object", **(function.get("parameters") or {})}
        name = function["name"]
        head, tail = json.dumps(f'{{"name": {compact(name)}, "{key}": '), '"}"'
        if named:
            head, tail = f"{mark(MISTRAL_MARK)} {json.dumps(name)} {mark(_ARGUMENTS)}", ""
        elif form is ToolFormat.HERMES:
            head, tail = f'{mark(OPEN)} "\\n" {head}', f'"}}\\n" {mark(CLOSE)}'
        rules.append(f"call_{place}: {head} arguments_{place} {tail}")
        rules.append(f"arguments_{place}: %json {compact(arguments)}")
    calls = " | ".join(f"call_{place}" for place in range(len(tools)))
    more = "" if one else f" ({between}call){{0,{_MOST_CALLS - 1}}}"
    lines = [f"start: {before}call{more}{after}", f"call: {calls}", *rules]
    try:
        return Constraint(ConstraintKind.GRAMMAR, "\n".join(lines))
    except ValueError as error:
        raise invalid("tools", str(error)) from None


class MarkedText:
    """Of one answer; ``marks`` are texts by token id."""

    def __init__(self, marks: Mapping[int, str]) -> None:
        self._marks = marks
        self._length = 0
        """Of the text so far, without marks."""
        self._waiting: deque[tuple[int, str]] = deque()
        """Marks whose place, counted as ``_length`` is, the text has not reached."""

    def push(self, token: int | None, piece: Piece) -> str:
        """The text of ``piece`` and all marks that stand in it; ``token`` None: it has none."""
        if token is not None and (mark := self._marks.get(token, "")):
            self._waiting.append((self._length + piece.held, mark))
        begin, self._length = self._length, self._length + len(piece.text)
        parts, done = [], 0
        while self._waiting and self._waiting[0][0] <= self._length:
            place, mark = self._waiting.popleft()
            parts += [piece.text[done : place - begin], mark]
            done = place - begin
        return "".join((*parts, piece.text[done:]))
