"""Tool calls: a reader that finds them in a growing output, and the grammars that constrain an
output to them.

    Hermes, Qwen   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, repeated
    Mistral        [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f[ARGS]{...}
    Llama 3        {"name": "f", "parameters": {...}} as the whole output, several with ; between

A mark such as ``<tool_call>`` opens a call only if a whole call follows it. A mark in prose, in a
code fence or inside ``<think>`` is text, and a mark inside an argument belongs to the argument. If
the vocabulary has a token for a mark, only that token is the mark; letters that spell it are text.
Text that is no call is returned unchanged, except for white space next to a call.

The reader depends on the text alone and not on how it is cut into chunks, so a streamed output
equals a whole one.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from edgespec.core.protocol.checks import is_unicode
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.endpoint.marks import (
    CALL_MARKS,
    MarkToken,
    TokenNames,
    partial_mark_length,
    replace_signs,
    stand_ins,
)
from edgespec.endpoint.request_json import compact_json, invalid

MISTRAL_MARK: Final = "[TOOL_CALLS]"
LLAMA_MARK: Final = "<|python_tag|>"
OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_ARGUMENTS: Final = "[ARGS]"
_CALL_ID: Final = "[CALL_ID]"
_THOUGHTS: Final[Mapping[str, str]] = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""Marks that open a thought, with the marks that close it."""
_MOST_CALLS: Final = 8
_ALPHANUMERIC: Final = string.ascii_letters + string.digits


class ToolFormat(Enum):
    HERMES = "hermes"
    MISTRAL = "mistral"
    """One mark, and a list of calls behind it."""
    MISTRAL_NAMED = "mistral_named"
    """For each call a mark, a name and the arguments."""
    LLAMA = "llama"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an output. ``arguments`` is JSON, except for a custom tool, which takes plain
    text."""

    id: str
    name: str
    arguments: str
    namespace: str = ""
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Further arguments of the call before, as a stream brings them."""

    text: str


CallPart = str | ToolCall | CallArguments


def marks_of_calls(form: ToolFormat) -> Collection[str]:
    """Return the marks that matter to a reader of calls in this format."""
    return (*CALL_MARKS, *_THOUGHTS, *_THOUGHTS.values())


def tool_format(template: str) -> ToolFormat | None:
    """Return the call format that a chat template's source teaches, or None if it teaches none that
    is known."""
    if OPEN in template:
        return ToolFormat.HERMES
    if MISTRAL_MARK in template:
        return ToolFormat.MISTRAL_NAMED if _ARGUMENTS in template else ToolFormat.MISTRAL
    if "python_tag" in template or ("ipython" in template and "parameters" in template):
        return ToolFormat.LLAMA
    return None


def _new_id(form: ToolFormat) -> str:
    """Return a random call id. Mistral's templates accept nine letters and digits only."""
    if form in (ToolFormat.MISTRAL, ToolFormat.MISTRAL_NAMED):
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return "call_" + secrets.token_hex(12)


# --- reading calls --------------------------------------------------------------------------------


_SPACE: Final = " \t\r\n"
_NAME: Final = re.compile(r"[\w./:-]+")
_PLAIN_JSON: Final = re.compile(r"[\s,:0-9eE+.\-truefalsn]*")
_PLAIN_STRING: Final = re.compile(r'[^"\\]*')


class _JsonEndFinder:
    """Incremental search for the end of the JSON object or list that begins at ``start``."""

    def __init__(self, start: int) -> None:
        self.start = self._at = start
        self._depth, self._is_in_string = 0, False

    def find(self, text: str) -> int | None:
        """Return the index behind the value, None if it is not complete, or -1 if it is not
        JSON."""
        while self._at < len(text):
            pattern = _PLAIN_STRING if self._is_in_string else _PLAIN_JSON
            run = pattern.match(text, self._at)
            self._at = self._at if run is None else run.end()
            if self._at == len(text):
                break
            character = text[self._at]
            if self._is_in_string and character == "\\":
                if self._at + 1 == len(text):
                    break
                self._at += 1
            elif character == '"':
                self._is_in_string = not self._is_in_string
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return self._at + 1
            else:
                return -1
            self._at += 1
        return None


class _QuoteState:
    """Line-by-line state of a text, which decides whether a mark is quoted as code."""

    _FENCE: Final = re.compile(r"\s*(`{3,}|~{3,})(.*)")
    _MAX_LINE: Final = 64
    """Characters of a line that are kept. A fence needs no more."""

    def __init__(self) -> None:
        self._fence = ""
        """The characters that opened the current fence; empty outside of fences."""
        self._line = self._last = ""

    @property
    def is_quoted(self) -> bool:
        """Whether a mark at this place is in a code fence, or directly behind a backtick."""
        return bool(self._fence) or self._last == "`"

    @property
    def is_line_blank(self) -> bool:
        return not self._fence and not self._line.strip()

    def feed(self, text: str) -> None:
        for part in text.splitlines(keepends=True):
            self._line = (self._line + part)[: self._MAX_LINE]
            self._last = part[-1:]
            if part.endswith(("\n", "\r")):
                self._end_line()

    def _end_line(self) -> None:
        match, self._line = self._FENCE.match(self._line), ""
        if match is None:
            return
        run, rest = match[1], match[2]
        if not self._fence:
            self._fence = "" if "`" in rest and run[0] == "`" else run
        elif run.startswith(self._fence) and not rest.strip():
            self._fence = ""


@dataclass(slots=True)
class _Candidate:
    """A mark that may open a call. ``body`` in the methods below is the text behind it."""

    mark: str
    """The mark; empty if the beginning of the output serves as one."""
    name: str = ""
    """Name of the call, if it stands in front of the arguments."""
    at: int = 0
    """Index in the body up to which it was read."""
    scan: _JsonEndFinder | None = None
    calls: list[ToolCall] = field(default_factory=list)


_NEEDS_MORE: Final = -1
_NO_CALL: Final = -2
_MAX_HEAD: Final = 512
"""Limit on the characters between a mark and the arguments."""


class ToolReader:
    """Reader of the calls in one output. ``push`` returns what is certain now, ``flush`` the rest.

    Args:
        form: The format in which the model writes calls.
        names: Names of the tools.
        tokens: Marks that are tokens, by id. The text has signs for them (``MarkedText``).
        is_thinking: Whether the output begins inside a thought.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        tokens: Mapping[int, MarkToken] | None = None,
        *,
        is_thinking: bool = False,
    ) -> None:
        self._form, self._names = form, frozenset(names)
        self._shown_texts = {token.sign: token.written for token in (tokens or {}).values()}
        self._argument_texts = {token.sign: token.text for token in (tokens or {}).values()}
        stands = stand_ins(tokens or {})
        self._close_mark, self._id_mark = stands[CLOSE], stands[_CALL_ID]
        self._arguments_mark = stands[_ARGUMENTS]
        opens = {ToolFormat.HERMES: OPEN, ToolFormat.LLAMA: LLAMA_MARK}
        self._open_mark = stands[opens.get(form, MISTRAL_MARK)]
        self._thoughts = {stands[begin]: stands[end] for begin, end in _THOUGHTS.items()}
        self._opening_marks = (self._open_mark, *self._thoughts)
        self._opening_pattern = re.compile("|".join(map(re.escape, self._opening_marks)))
        self._thought_ends = tuple(self._thoughts.values()) if is_thinking else ()
        """Marks that end the current thought; empty outside of thoughts."""
        self._buffer = ""
        """Text whose meaning is not certain yet; with a ``_candidate``, the text behind its
        mark."""
        self._candidate: _Candidate | None = None
        self._pending_space = ""
        """White space that belongs to the text unless a call follows."""
        self._is_after_call = False
        self._is_start = True
        """Whether no text has come yet, apart from thoughts."""
        self._quotes = _QuoteState()

    def push(self, text: str) -> list[CallPart]:
        self._buffer += text
        return self._read_all(is_last=False)

    def flush(self) -> list[CallPart]:
        items = self._read_all(is_last=True)
        if self._pending_space and not self._is_after_call:
            _append_text(items, self._pending_space)
        self._pending_space = ""
        return items

    def _read_all(self, *, is_last: bool) -> list[CallPart]:
        items: list[CallPart] = []
        while self._advance(items, is_last):
            pass
        return items

    def _advance(self, items: list[CallPart], is_last: bool) -> bool:
        """Read up to the next change of state. Return False if that needs more text."""
        if self._thought_ends:
            return self._read_thought(items, is_last)
        if self._candidate is not None:
            return self._read_candidate(self._candidate, items, is_last)
        return self._read_text(items, is_last)

    def _read_text(self, items: list[CallPart], is_last: bool) -> bool:
        start = self._buffer.lstrip(_SPACE)
        if self._form is ToolFormat.LLAMA and self._is_start and start.startswith("{"):
            self._emit_text(items, self._buffer[: len(self._buffer) - len(start)])
            self._buffer, self._candidate = start, _Candidate("")
            return True
        match = self._opening_pattern.search(self._buffer)
        if match is None:
            self._emit_text(items, self._take_certain_text(self._opening_marks, is_last))
            return False
        mark = match[0]
        self._emit_text(items, self._buffer[: match.start()])
        self._buffer = self._buffer[match.end() :]
        if mark in self._thoughts and self._quotes.is_line_blank:
            self._emit_text(items, mark, is_thought=True)
            self._thought_ends = (self._thoughts[mark],)
        elif mark in self._thoughts or self._quotes.is_quoted:
            self._emit_text(items, mark)
        else:
            self._candidate = _Candidate(mark)
        return True

    def _read_thought(self, items: list[CallPart], is_last: bool) -> bool:
        at = [(place, end) for end in self._thought_ends if (place := self._buffer.find(end)) >= 0]
        if not at:
            self._emit_text(
                items, self._take_certain_text(self._thought_ends, is_last), is_thought=True
            )
            return False
        place, mark = min(at)
        cut = place + len(mark)
        self._emit_text(items, self._buffer[:cut], is_thought=True)
        self._buffer, self._thought_ends = self._buffer[cut:], ()
        return True

    def _take_certain_text(self, marks: Sequence[str], is_last: bool) -> str:
        """Remove and return the buffer's text, except an end that may begin one of ``marks``."""
        cut = len(self._buffer) - (0 if is_last else partial_mark_length(self._buffer, marks))
        taken, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return taken

    def _read_candidate(self, candidate: _Candidate, items: list[CallPart], is_last: bool) -> bool:
        read = {ToolFormat.HERMES: self._read_hermes, ToolFormat.LLAMA: self._read_llama}
        end = read.get(self._form, self._read_mistral)(candidate, self._buffer, is_last)
        if end == _NEEDS_MORE and not is_last:
            return False
        self._candidate = None
        if end < 0:
            self._is_start = False
            self._emit_text(items, candidate.mark)
            return True
        items += candidate.calls
        self._buffer, self._pending_space = self._buffer[end:], ""
        self._is_after_call, self._is_start = True, False
        return True

    # Each method below returns the length of the part of ``body`` that is calls, ``_NEEDS_MORE`` or
    # ``_NO_CALL``.

    def _read_hermes(self, candidate: _Candidate, body: str, is_last: bool) -> int:
        if not candidate.calls:
            if candidate.scan is None:
                start = _skip_characters(body, 0)
                if start == len(body):
                    return _NEEDS_MORE
                if body[start] != "{":
                    return _NO_CALL
                candidate.scan = _JsonEndFinder(start)
            if (status := self._read_value(candidate, candidate.scan, body)) < 0:
                return status
        after = _skip_characters(body, candidate.at)
        if body.startswith(self._close_mark, after):
            return after + len(self._close_mark)
        if body.startswith(self._open_mark, after):
            return candidate.at
        if (
            partial_mark_length(body[after:], (self._close_mark, self._open_mark))
            == len(body) - after
        ):
            return len(body) if is_last else _NEEDS_MORE
        return _NO_CALL

    def _read_mistral(self, candidate: _Candidate, body: str, is_last: bool) -> int:
        if candidate.scan is None:
            start = _skip_characters(body, 0)
            if start == len(body):
                return _NEEDS_MORE
            if body[start] in "[{":
                candidate.scan = _JsonEndFinder(start)
            else:
                brace = body.find("{", start)
                head = body[start:] if brace < 0 else body[start:brace]
                name = self._name_before(head, is_whole=brace >= 0)
                if name is None or len(head) > _MAX_HEAD:
                    return _NO_CALL
                if brace < 0:
                    return _NEEDS_MORE
                candidate.name, candidate.scan = name, _JsonEndFinder(brace)
        return self._read_value(candidate, candidate.scan, body)

    def _name_before(self, head: str, *, is_whole: bool) -> str | None:
        """Return the name at the beginning of ``head``, the text between a mark and the arguments.
        None: it is not a name followed by marks. If ``head`` is not the whole text, None means that
        it cannot become one."""
        candidates = [name for name in self._names if head.startswith(name)]
        if (items := _NAME.match(head)) is not None:
            candidates.append(items[0])
        if not is_whole:
            candidates += [name for name in self._names if name.startswith(head)]
        for name in sorted(candidates, key=len, reverse=True):
            rest = head[len(name) :].strip()
            if rest.startswith(self._id_mark):
                identity = rest[len(self._id_mark) :]
                place = identity.find(self._arguments_mark)
                rest = "" if place < 0 else identity[place:]
            if rest.startswith(self._arguments_mark):
                rest = rest[len(self._arguments_mark) :]
            partial = (
                0 if is_whole else partial_mark_length(rest, (self._id_mark, self._arguments_mark))
            )
            if partial == len(rest):
                return name
        return None

    def _read_llama(self, candidate: _Candidate, body: str, is_last: bool) -> int:
        while True:
            if candidate.scan is None:
                candidate.at = _skip_characters(body, candidate.at, _SPACE + ";,")
                if body.startswith(self._open_mark, candidate.at):
                    candidate.at += len(self._open_mark)
                    continue
                rest = len(body) - candidate.at
                if (
                    rest == 0
                    or partial_mark_length(body[candidate.at :], (self._open_mark,)) == rest
                ):
                    return len(body) if is_last and candidate.calls and not rest else _NEEDS_MORE
                if body[candidate.at] != "{":
                    return _NO_CALL
                candidate.scan = _JsonEndFinder(candidate.at)
            if (status := self._read_value(candidate, candidate.scan, body)) < 0:
                return status
            if candidate.calls[-1].name not in self._names:
                return _NO_CALL
            candidate.scan = None

    def _read_value(self, candidate: _Candidate, scan: _JsonEndFinder, body: str) -> int:
        """Read one JSON value: a call, a list of calls, or the arguments of a call whose name was
        read before."""
        end = scan.find(body)
        if end is None or end < 0:
            return _NEEDS_MORE if end is None else _NO_CALL
        value = _parse_json(replace_signs(self._argument_texts, body[scan.start : end]))
        if candidate.name:
            value = {"name": candidate.name, "arguments": value}
        values = value if isinstance(value, list) else [value]
        calls = [call for item in values if (call := self._call(item)) is not None]
        if not calls or len(calls) < len(values):
            return _NO_CALL
        candidate.calls += calls
        candidate.at = end
        return end

    def _call(self, value: Any) -> ToolCall | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or not is_unicode(name):
            return None
        keys = ("arguments", "parameters")
        keys = keys[::-1] if self._form is ToolFormat.LLAMA else keys
        arguments: Any = next((value[key] for key in keys if key in value), {})
        arguments_text = None
        if isinstance(arguments, str):
            arguments_text, arguments = arguments, _parse_json(arguments)
        if not isinstance(arguments, dict):
            return None
        if arguments_text is None or "\n" in arguments_text or "\t" in arguments_text:
            arguments_text = json.dumps(arguments, ensure_ascii=False)
        arguments_text = arguments_text if is_unicode(arguments_text) else json.dumps(arguments)
        return ToolCall(_new_id(self._form), name, arguments_text)

    def _emit_text(self, items: list[CallPart], text: str, *, is_thought: bool = False) -> None:
        """Append text to ``found``. White space at its end waits, since it is dropped if a call
        follows. White space between and behind calls is dropped too."""
        text = replace_signs(self._shown_texts, text)
        if not is_thought:
            self._quotes.feed(text)
            self._is_start = self._is_start and not text.strip()
        else:
            self._quotes = _QuoteState()
        text = self._pending_space + text
        if self._is_after_call:
            text = text.lstrip()
            if not text:
                return
            self._is_after_call = False
        kept = text.rstrip()
        self._pending_space = text[len(kept) :]
        if kept:
            _append_text(items, kept)


def _append_text(items: list[CallPart], text: str) -> None:
    if items and isinstance(last := items[-1], str):
        items[-1] = last + text
    else:
        items.append(text)


def _skip_characters(text: str, start: int, characters: str = _SPACE) -> int:
    """Return the index of the first character from ``start`` on that is none of ``characters``."""
    while start < len(text) and text[start] in characters:
        start += 1
    return start


def _parse_json(text: str) -> Any:
    """Return the value of JSON in which texts may contain line breaks, or None if it is not
    JSON."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


# --- grammars of calls ----------------------------------------------------------------------------


Tools = Sequence[Mapping[str, Any]]


def forced_call_grammar(
    form: ToolFormat, tools: Tools, names: TokenNames, *, single: bool
) -> Constraint:
    """Return the grammar of an output that calls one of ``tools``, or up to eight of them unless
    ``single``. Arguments must fit the schemas of the tools. Raises ``ApiError``."""
    every = [tool["function"]["name"] for tool in tools]
    return _grammar_constraint(
        [
            f"start: {_calls_expression(form, names, single=single)}",
            *_call_rules(form, tools, every, names),
        ]
    )


def call_or_json_grammar(
    form: ToolFormat,
    tools: Tools,
    strict: Collection[str],
    names: TokenNames,
    *,
    single: bool,
    schema: str,
) -> Constraint:
    """Return the grammar of an output that is calls, or JSON that fits ``schema``. Arguments of the
    ``strict`` tools must fit their schemas. Raises ``ApiError``."""
    start = f"start: {_calls_expression(form, names, single=single)} | answer"
    rules = _call_rules(form, tools, strict, names)
    if form is ToolFormat.LLAMA:
        # The whole call is one JSON rule here, because llguidance cannot separate a text from an
        # ``answer`` that begins in the same way.
        rules = [f"call: {' | '.join(f'call_{place}' for place in range(len(tools)))}"]
        rules += [
            f"call_{place}: %json {compact_json(_call_schema(tool['function'], strict))}"
            for place, tool in enumerate(tools)
        ]
    return _grammar_constraint([start, f"answer: %json {schema}", *rules])


def _call_schema(function: Mapping[str, Any], strict: Collection[str]) -> dict[str, Any]:
    """Return the schema of a call in Llama's format. Definitions move to its root, to which
    references refer."""
    own = (function.get("parameters") or {}) if function["name"] in strict else {}
    definitions = {key: own[key] for key in ("$defs", "definitions") if key in own}
    inner = {key: value for key, value in own.items() if key not in definitions}
    return {
        **definitions,
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "parameters": {"type": "object", **inner},
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def free_call_grammar(
    form: ToolFormat,
    tools: Tools,
    strict: Collection[str],
    names: TokenNames,
    *,
    is_thinking: bool = False,
    has_thoughts: bool = True,
) -> Constraint:
    """Return the grammar of an output that is any text with calls in it. Arguments of the
    ``strict`` tools must fit their schemas. Raises ``ApiError``.

    If the mark of a call is a token, any other token may stand outside of calls. If it is not, the
    text is UTF-8 that does not contain the mark. A thought whose marks are tokens may contain
    anything. ``is_thinking``: the output begins inside one. Without ``has_thoughts`` the grammar is
    the one of an answer behind the thought."""
    opening = {ToolFormat.HERMES: OPEN, ToolFormat.LLAMA: LLAMA_MARK}.get(form, MISTRAL_MARK)
    mark = names.added.get(opening)
    rules = _call_rules(form, tools, strict, names)
    calls = _calls_expression(form, names, single=False)
    others = set(names.added.values()) - {mark}
    if form is ToolFormat.LLAMA:
        known = "|".join(_json_regex(tool["function"]["name"]) for tool in tools)
        space = r"[ \t\r\n]*"
        call = rf'{space}\{{{space}"name"{space}:{space}"({known})"(.|\n)*'
        behind = f" | TEXT <[{_token_set(others)}]> free" if others else ""
        tagged = "" if mark is None else f" | <[{mark}]> {calls}"
        lines = [f"start: {calls}{tagged} | TEXT{behind}", rf"TEXT: /(.|\n)*/ & ~/{call}/"]
        if others:
            lines.append("free: <[*]>*" if mark is None else f"free: <[^{mark}]>*")
        return _grammar_constraint([*lines, *rules])
    if mark is None:
        start = f"start: part (<[{_token_set(others)}]> part)*" if others else "start: part"
        lines = [start, "part: marked* TEXT", r"TEXT: /(.|\n)*/"]
        lines += [f"begin[lazy]: TEXT {json.dumps(opening)}", "marked: begin behind"]
        return _grammar_constraint(
            [*lines, *_call_rules(form, tools, strict, names, rule_name="behind")]
        )
    # The alternatives at each place are disjoint sets of tokens, since llguidance follows only one.
    openings = {names.added[one] for one in _THOUGHTS if one in names.added}
    if not has_thoughts:
        kept_out = _token_set({mark, *openings})
        lines = [f"start: free ({calls} free)*", f"free: <[^{kept_out}]>*"]
        return _grammar_constraint([*lines, *rules])
    lines = [f"rest: free ({calls} free)*", f"free: <[^{mark}]>*"]
    begins, starts = set[int](), list[str]()
    for begin, end in _THOUGHTS.items():
        first, last = names.added.get(begin), names.added.get(end)
        if first is None or last is None:
            continue
        begins.add(first)
        lines.append(f"thought_{first}: <[^{last}]>* | <[^{last}]>* <[{last}]> rest")
        starts.append(f"thought_{first}" if is_thinking else f"<[{first}]> thought_{first}")
    if not is_thinking or not starts:
        starts += ['""', f"<[^{_token_set({mark, *begins})}]> rest", f"{calls} rest"]
    return _grammar_constraint([f"start: {' | '.join(starts)}", *lines, *rules])


def _grammar_constraint(lines: Sequence[str]) -> Constraint:
    try:
        return Constraint(ConstraintKind.GRAMMAR, "\n".join(lines))
    except ValueError as error:
        raise invalid("tools", str(error)) from None


def _mark_expression(names: TokenNames, text: str) -> str:
    """Return a mark in the notation of a grammar: as a token if it has one, else as text."""
    token = names.added.get(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def _calls_expression(form: ToolFormat, names: TokenNames, *, single: bool) -> str:
    """Return the grammar expression of one call, or of one to eight unless ``single``."""
    before, between, after = "", '"; "', ""
    if form is ToolFormat.HERMES:
        between = '"\\n"'
    elif form is ToolFormat.MISTRAL_NAMED:
        between = ""
    elif form is ToolFormat.MISTRAL:
        before, between, after = f'{_mark_expression(names, MISTRAL_MARK)} "["', '", "', '"]"'
    more = "" if single else f"({between} call){{0,{_MOST_CALLS - 1}}}"
    return " ".join(part for part in (before, "call", more, after) if part)


def _call_rules(
    form: ToolFormat,
    tools: Tools,
    strict: Collection[str],
    names: TokenNames,
    *,
    rule_name: str = "",
) -> list[str]:
    """Return the grammar rules of ``call``. With ``rule_name``, a rule of that name has what
    follows the opening mark. Arguments of tools that are not ``strict`` are any JSON object."""
    key = "parameters" if form is ToolFormat.LLAMA else "arguments"
    lines, opening = [], ""
    if form is ToolFormat.HERMES:
        opening = _mark_expression(names, OPEN)
    elif form is ToolFormat.MISTRAL_NAMED:
        opening = _mark_expression(names, MISTRAL_MARK)
    for place, tool in enumerate(tools):
        function = tool["function"]
        name = function["name"]
        own = (function.get("parameters") or {}) if name in strict else {}
        head, tail = json.dumps(f'{{"name": {compact_json(name)}, "{key}": '), '"}"'
        if form is ToolFormat.MISTRAL_NAMED:
            head, tail = f"{json.dumps(name)} {_mark_expression(names, _ARGUMENTS)}", ""
        elif form is ToolFormat.HERMES:
            head, tail = f'"\\n" {head}', f'"}}\\n" {_mark_expression(names, CLOSE)}'
        lines.append(f"call_{place}: {head} arguments_{place} {tail}")
        lines.append(f"arguments_{place}: %json {compact_json({'type': 'object', **own})}")
    choices = " | ".join(f"call_{place}" for place in range(len(tools)))
    if rule_name and form is ToolFormat.MISTRAL:
        more = f'(", " call){{0,{_MOST_CALLS - 1}}}'
        return [f'{rule_name}: "[" call {more} "]"', f"call: {choices}", *lines]
    if rule_name:
        return [f"{rule_name}: {choices}", *lines]
    return [f"call: {opening} ({choices})", *lines]


def _token_set(tokens: Collection[int]) -> str:
    """Return a set of token ids in the notation of a grammar."""
    ranges: list[list[int]] = []
    for token in sorted(tokens):
        if ranges and token == ranges[-1][1] + 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)


def _json_regex(text: str) -> str:
    """Return the regular expression of the JSON of ``text``, without quotes."""
    return re.sub(r"([^A-Za-z0-9_ ])", r"\\\1", compact_json(text)[1:-1])
