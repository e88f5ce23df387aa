"""Tool calls: a reader that finds them in a growing output, and the grammars that constrain an
output to them.

    Hermes, Qwen   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, repeated
    Mistral        [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f[ARGS]{...}
    Llama 3        {"name": "f", "parameters": {...}} as the whole output, several with ; between
    Llama 4        [f(key=value), ...] as the whole output, or the format of Llama 3
    Granite        <|tool_call|>[{"name": "f", "arguments": {...}}, ...]
    Phi-4-mini     <|tool_call|>[...]<|/tool_call|>, or functools[...]
    DeepSeek       marks of its own around each name and its JSON, in two forms
    Qwen3-Coder    <tool_call><function=f><parameter=key>value</parameter></function></tool_call>
    GLM            <tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
    Gemma          <start_function_call>call:f{key:<escape>value<escape>}<end_function_call>
    gpt-oss        messages in channels (``harmony.py``)

A mark such as ``<tool_call>`` opens a call only if a call follows it. A mark in prose, in a code
fence or inside ``<think>`` is text, and a mark inside an argument belongs to the argument. If the
vocabulary has a token for a mark, only that token is the mark; letters that spell it are text.
Text that is no call is returned unchanged, except for white space next to a call.

In the formats whose arguments are JSON, a call is open as soon as the name of a known tool and the
brace of its arguments were read. From then on the arguments are returned as they grow
(``json_pieces.py``). If they turn out to be no JSON, the rest of the call is returned as it is, so
that a client sees what the model wrote. In all other formats, and for unknown names, a call is
returned when it is whole.

The reader depends on the text alone and not on how it is cut into chunks, so a streamed output
equals a whole one.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final

from edgespec.core.protocol.checks import is_unicode
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.endpoint.call_notations import (
    PythonEndFinder,
    parse_gemma_call,
    parse_glm_call,
    parse_python_calls,
    parse_xml_call,
)
from edgespec.endpoint.json_pieces import JsonPieces
from edgespec.endpoint.marks import (
    CALL_MARKS,
    HARMONY_MARKS,
    MarkToken,
    TokenNames,
    deepseek_mark,
    partial_mark_length,
    replace_signs,
    stand_ins,
)
from edgespec.endpoint.request_json import compact_json, invalid_request

MISTRAL_MARK: Final = "[TOOL_CALLS]"
LLAMA_MARK: Final = "<|python_tag|>"
OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_ARGUMENTS: Final = "[ARGS]"
_CALL_ID: Final = "[CALL_ID]"
_LIST_MARK, _LIST_CLOSE = "<|tool_call|>", "<|/tool_call|>"
_PYTHON_BEGIN, _PYTHON_END = "<|python_start|>", "<|python_end|>"
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
    PYTHONIC = "pythonic"
    GRANITE = "granite"
    PHI = "phi"
    DEEPSEEK = "deepseek"
    """The JSON of a call stands in a code fence, as in V3 and R1."""
    DEEPSEEK_V31 = "deepseek_v31"
    QWEN_XML = "qwen_xml"
    GLM = "glm"
    GEMMA_FUNCTION = "gemma_function"
    GEMMA4 = "gemma4"
    HARMONY = "harmony"


_HARMONY_ANSWER: Final = "<|channel|>final<|message|>"
_BEGIN_CALLS, _BEGIN_CALL = deepseek_mark("tool calls begin"), deepseek_mark("tool call begin")
_SEPARATOR: Final = deepseek_mark("tool sep")
_END_CALL, _END_CALLS = deepseek_mark("tool call end"), deepseek_mark("tool calls end")


@dataclass(frozen=True, slots=True)
class _Syntax:
    """One format as data: its marks, and the text around calls for grammars.

    A run of calls is ``before``, calls with ``between`` in between, and ``after``. A call is
    ``head``, its arguments and ``tail``; in these, NAME is the tool's name and JSON_NAME its JSON.
    """

    openings: tuple[str, ...]
    """Marks of which each opens a call or a run of calls."""
    close: str = ""
    """Mark that may close it."""
    before: str = ""
    between: str = ""
    after: str = ""
    head: str = ""
    tail: str = ""
    quote: str = ""
    """Mark on both sides of a text, in Gemma's notation."""
    at_start: str = ""
    """Characters that open a call without a mark at the beginning of an output."""


_JSON_CALL: Final = '{"name": JSON_NAME, "arguments": '
_SYNTAX: Final[Mapping[ToolFormat, _Syntax]] = {
    ToolFormat.HERMES: _Syntax(
        (OPEN,), CLOSE, between="\n", head=f"{OPEN}\n{_JSON_CALL}", tail=f"}}\n{CLOSE}"
    ),
    ToolFormat.MISTRAL: _Syntax(
        (MISTRAL_MARK,),
        before=f"{MISTRAL_MARK}[",
        between=", ",
        after="]",
        head=_JSON_CALL,
        tail="}",
    ),
    ToolFormat.MISTRAL_NAMED: _Syntax((MISTRAL_MARK,), head=f"{MISTRAL_MARK}NAME{_ARGUMENTS}"),
    ToolFormat.LLAMA: _Syntax(
        (LLAMA_MARK,),
        between="; ",
        head='{"name": JSON_NAME, "parameters": ',
        tail="}",
        at_start="{",
    ),
    ToolFormat.PYTHONIC: _Syntax(
        (_PYTHON_BEGIN, LLAMA_MARK),
        _PYTHON_END,
        before="[",
        between=", ",
        after="]",
        head="NAME(",
        tail=")",
        at_start="[{",
    ),
    ToolFormat.GRANITE: _Syntax(
        (_LIST_MARK, OPEN),
        before=f"{_LIST_MARK}[",
        between=", ",
        after="]",
        head=_JSON_CALL,
        tail="}",
    ),
    ToolFormat.PHI: _Syntax(
        (_LIST_MARK, "functools"),
        _LIST_CLOSE,
        before=f"{_LIST_MARK}[",
        between=", ",
        after=f"]{_LIST_CLOSE}",
        head=_JSON_CALL,
        tail="}",
    ),
    ToolFormat.DEEPSEEK: _Syntax(
        (_BEGIN_CALLS,),
        _END_CALLS,
        before=_BEGIN_CALLS,
        between="\n",
        after=_END_CALLS,
        head=f"{_BEGIN_CALL}function{_SEPARATOR}NAME\n```json\n",
        tail=f"\n```{_END_CALL}",
    ),
    ToolFormat.DEEPSEEK_V31: _Syntax(
        (_BEGIN_CALLS,),
        _END_CALLS,
        before=_BEGIN_CALLS,
        after=_END_CALLS,
        head=f"{_BEGIN_CALL}NAME{_SEPARATOR}",
        tail=_END_CALL,
    ),
    ToolFormat.QWEN_XML: _Syntax(
        (OPEN, "<function="),
        CLOSE,
        between="\n",
        head=f"{OPEN}\n<function=NAME>\n",
        tail=f"</function>\n{CLOSE}",
    ),
    ToolFormat.GLM: _Syntax((OPEN,), CLOSE, between="\n", head=f"{OPEN}NAME\n", tail=CLOSE),
    ToolFormat.GEMMA_FUNCTION: _Syntax(
        ("<start_function_call>",),
        "<end_function_call>",
        head="<start_function_call>call:NAME",
        tail="<end_function_call>",
        quote="<escape>",
    ),
    ToolFormat.GEMMA4: _Syntax(
        ("<|tool_call>",),
        "<tool_call|>",
        head="<|tool_call>call:NAME",
        tail="<tool_call|>",
        quote='<|"|>',
    ),
    ToolFormat.HARMONY: _Syntax(
        ("<|channel|>",),
        head="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        tail="<|call|>",
    ),
}


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
    syntax = _SYNTAX[form]
    written = "".join((syntax.before, syntax.head, syntax.tail, syntax.after, _CALL_ID))
    marks = {*syntax.openings, syntax.close, syntax.quote}
    marks |= {mark for mark in CALL_MARKS if mark in written}
    return (marks & {*CALL_MARKS}) | {*_THOUGHTS, *_THOUGHTS.values()}


_TEMPLATE_SIGNS: Final[Sequence[tuple[ToolFormat, tuple[str, ...]]]] = (
    (ToolFormat.HARMONY, ("<|channel|>", "<|message|>")),
    (ToolFormat.GEMMA4, ("<|tool_call>",)),
    (ToolFormat.GEMMA_FUNCTION, ("<start_function_call>",)),
    (ToolFormat.GLM, (OPEN, "<arg_key>")),
    (ToolFormat.QWEN_XML, ("<function=", "<parameter=")),
    (ToolFormat.HERMES, (OPEN,)),
    (ToolFormat.DEEPSEEK, (_BEGIN_CALLS, "```json")),
    (ToolFormat.DEEPSEEK_V31, (_BEGIN_CALLS,)),
    (ToolFormat.MISTRAL_NAMED, (MISTRAL_MARK, _ARGUMENTS)),
    (ToolFormat.MISTRAL, (MISTRAL_MARK,)),
    (ToolFormat.PHI, (_LIST_CLOSE,)),
    (ToolFormat.PHI, ("functools",)),
    (ToolFormat.GRANITE, (_LIST_MARK,)),
    (ToolFormat.PYTHONIC, (_PYTHON_BEGIN,)),
    (ToolFormat.PYTHONIC, ("func_name1(",)),
    (ToolFormat.LLAMA, ("python_tag",)),
    (ToolFormat.LLAMA, ("ipython", "parameters")),
)
"""Texts by which a template's format is known. The first line of which all texts occur counts."""


def tool_format(template: str) -> ToolFormat | None:
    """Return the call format that a chat template's source teaches, or None if it teaches none that
    is known."""
    return next(
        (form for form, signs in _TEMPLATE_SIGNS if all(one in template for one in signs)), None
    )


def _new_id(form: ToolFormat) -> str:
    """Return a random call id. Mistral's templates accept nine letters and digits only."""
    if form in (ToolFormat.MISTRAL, ToolFormat.MISTRAL_NAMED):
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return "call_" + secrets.token_hex(12)


# --- reading calls --------------------------------------------------------------------------------


_SPACE: Final = " \t\r\n"
_FENCE_END: Final = re.compile(r"\s*(?:```)?\s*")
_NAME: Final = re.compile(r"[\w./:-]+")
_PLAIN_JSON: Final = re.compile(r"[\s,:0-9eE+.\-truefalsn]*")
_PLAIN_STRING: Final = re.compile(r'[^"\\]*')


class _JsonEndFinder:
    """Incremental search for the end of the JSON object or list that begins at ``start``."""

    def __init__(self, start: int, depth: int = 0) -> None:
        """``depth``: number of objects and lists that are open at ``start``."""
        self.start = self._at = start
        self._depth, self._is_in_string = depth, False

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
    python: PythonEndFinder | None = None
    is_behind_arguments: bool = False
    """Whether the marks that end one of several calls are still to be read."""
    calls: list[ToolCall] = field(default_factory=list)
    opening: _Opening | None = None
    """The call that was found open when a method returned ``_OPENED``."""
    returned: int = 0
    """Number of ``calls`` that were returned already. Not 0: a call was open, so what follows it
    and is no call is text."""
    is_in_list: bool = False
    """Whether further elements of a list of calls may follow."""


@dataclass(frozen=True, slots=True)
class _Opening:
    """A call whose arguments are read as they grow."""

    name: str
    place: int
    """Index of the arguments in the body."""
    is_wrapped: bool
    """Whether an object with the name is around the arguments."""
    is_in_list: bool


class _OpenArguments:
    """The arguments of an open call, and the rest of the object around them."""

    def __init__(self, signs: Mapping[str, str], opening: _Opening) -> None:
        self.pieces = JsonPieces(signs)
        self.rest = _JsonEndFinder(0, depth=1) if opening.is_wrapped else None
        """Search for the end of the object around the arguments; None: there is none."""


_NEEDS_MORE: Final = -1
_NO_CALL: Final = -2
_OPENED: Final = -3
_HEAD_OF_CALL: Final = re.compile(
    r'(\[\s*)?\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(arguments|parameters)"\s*:\s*(?=\{)'
)
"""A call as JSON, perhaps the first one of a list, up to the brace of its arguments."""
_MAX_HEAD: Final = 512
"""Limit on the characters between a mark and the arguments."""


class ToolReader:
    """Reader of the calls in one output. ``push`` returns what is certain now, ``flush`` the rest.

    Args:
        form: The format in which the model writes calls.
        names: Names of the tools, or the schemas of their parameters by name.
        tokens: Marks that are tokens, by id. The text has signs for them (``MarkedText``).
        is_thinking: Whether the output begins inside a thought.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str] | Mapping[str, Mapping[str, Any]],
        tokens: Mapping[int, MarkToken] | None = None,
        *,
        is_thinking: bool = False,
    ) -> None:
        self._form, self._names = form, frozenset(names)
        self._schemas = names if isinstance(names, Mapping) else {}
        syntax = _SYNTAX[form]
        self._shown_texts = {token.sign: token.written for token in (tokens or {}).values()}
        self._argument_texts = {token.sign: token.text for token in (tokens or {}).values()}
        stands = stand_ins(tokens or {})
        self._open_mark = stands.get(syntax.openings[0], syntax.openings[0])
        self._close_mark = stands.get(syntax.close, syntax.close)
        self._at_start = syntax.at_start
        self._quote = syntax.quote
        self._id_mark, self._arguments_mark = stands[_CALL_ID], stands[_ARGUMENTS]
        self._deepseek = {one: stands[one] for one in (_BEGIN_CALL, _SEPARATOR, _END_CALL)}
        self._thoughts = {stands[begin]: stands[end] for begin, end in _THOUGHTS.items()}
        openings = tuple(stands.get(one, one) for one in syntax.openings)
        self._opening_marks = (*openings, *self._thoughts)
        self._opening_pattern = re.compile("|".join(map(re.escape, self._opening_marks)))
        self._thought_ends = tuple(self._thoughts.values()) if is_thinking else ()
        """Marks that end the current thought; empty outside of thoughts."""
        self._buffer = ""
        """Text whose meaning is not certain yet; with a ``_candidate``, the text behind its
        mark."""
        self._candidate: _Candidate | None = None
        self._arguments: _OpenArguments | None = None
        """Arguments that are read at the moment. The buffer begins with their unread part."""
        self._ends_of_call = tuple(
            one for one in (self._open_mark, self._close_mark, self._deepseek[_END_CALL]) if one
        )
        """Marks that end a call whose arguments are no JSON."""
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
        if self._arguments is not None:
            return self._read_arguments(self._arguments, items, is_last)
        if self._candidate is not None:
            return self._read_candidate(self._candidate, items, is_last)
        return self._read_text(items, is_last)

    def _read_text(self, items: list[CallPart], is_last: bool) -> bool:
        start = self._buffer.lstrip(_SPACE)
        if self._at_start and self._is_start and start[:1] and start[0] in self._at_start:
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
        end = self._read_form(candidate, self._buffer, is_last)
        if end == _OPENED:
            self._open_call(candidate, items)
            return True
        if end == _NEEDS_MORE and not is_last:
            return False
        self._candidate = None
        if end < 0 and not candidate.returned:
            self._is_start = False
            self._emit_text(items, candidate.mark)
            return True
        items += candidate.calls[candidate.returned :]
        self._buffer = self._buffer[candidate.at if end < 0 else end :]
        self._end_text()
        return True

    def _open_call(self, candidate: _Candidate, items: list[CallPart]) -> None:
        """Return the beginning of a call, and read its arguments from now on."""
        opening = candidate.opening
        assert opening is not None
        call = ToolCall(_new_id(self._form), opening.name, "")
        items += [*candidate.calls[candidate.returned :], call]
        self._buffer = self._buffer[opening.place :]
        self._arguments = _OpenArguments(self._argument_texts, opening)
        self._candidate = _Candidate(
            candidate.mark,
            is_behind_arguments=True,
            calls=[call],
            returned=1,
            is_in_list=opening.is_in_list,
        )
        self._end_text()

    def _end_text(self) -> None:
        """Note that a call follows the text so far."""
        self._pending_space = ""
        self._is_after_call, self._is_start = True, False

    def _read_arguments(
        self, arguments: _OpenArguments, items: list[CallPart], is_last: bool
    ) -> bool:
        """Read arguments, and behind them the rest of the object around them. Return False if that
        needs more text."""
        if not arguments.pieces.has_ended:
            return self._read_pieces(arguments.pieces, items, is_last)
        if arguments.pieces.is_broken:
            return self._read_broken_arguments(items, is_last)
        if arguments.rest is not None:
            end = arguments.rest.find(self._buffer)
            if end is None and not is_last:
                return False
            # A model may forget the last brace.
            self._buffer = self._buffer[max(0, end or 0) :]
        self._arguments = None
        return True

    def _read_pieces(self, pieces: JsonPieces, items: list[CallPart], is_last: bool) -> bool:
        """Read arguments as far as they go. Return False if they need more text."""
        text, length = pieces.push(self._buffer)
        self._buffer = self._buffer[length:]
        is_cut = is_last and not pieces.has_ended
        if is_cut:
            text += replace_signs(self._argument_texts, pieces.flush())
            self._arguments = self._candidate = None
        if text:
            items.append(CallArguments(text))
        return is_cut or pieces.has_ended

    def _read_broken_arguments(self, items: list[CallPart], is_last: bool) -> bool:
        """Return the text of arguments that are no JSON as it is, up to a mark that ends a call."""
        places = [self._buffer.find(one) for one in self._ends_of_call]
        place = min((one for one in places if one >= 0), default=-1)
        cut = place
        if place < 0:
            held = 0 if is_last else partial_mark_length(self._buffer, self._ends_of_call)
            cut = len(self._buffer) - held
        if text := replace_signs(self._argument_texts, self._buffer[:cut]):
            items.append(CallArguments(text))
        self._buffer = self._buffer[cut:]
        if place < 0 and not is_last:
            return False
        self._arguments = None
        if self._candidate is not None:
            self._candidate.is_in_list = False
        return True

    def _read_form(self, candidate: _Candidate, body: str, is_last: bool) -> int:
        match self._form:
            case ToolFormat.HERMES:
                return self._read_hermes(candidate, body, is_last)
            case ToolFormat.LLAMA:
                return self._read_llama(candidate, body, is_last)
            case ToolFormat.PYTHONIC:
                return self._read_pythonic(candidate, body, is_last)
            case ToolFormat.GRANITE | ToolFormat.PHI:
                return self._read_list(candidate, body, is_last)
            case ToolFormat.DEEPSEEK | ToolFormat.DEEPSEEK_V31:
                return self._read_deepseek(candidate, body, is_last)
            case ToolFormat.QWEN_XML:
                return self._read_xml(candidate, body, is_last)
            case ToolFormat.GLM | ToolFormat.GEMMA4 | ToolFormat.GEMMA_FUNCTION:
                return self._read_block(candidate, body, is_last)
            case _:
                return self._read_mistral(candidate, body, is_last)

    # Each method below returns the length of the part of ``body`` that is calls, ``_NEEDS_MORE``,
    # ``_NO_CALL``, or ``_OPENED`` if the next call is open. Behind an open call the candidate goes
    # on: the body is then the text behind that call.

    def _read_hermes(self, candidate: _Candidate, body: str, is_last: bool) -> int:
        if not candidate.calls:
            if (status := self._read_first_value(candidate, body, "{")) < 0:
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
        if candidate.returned:
            return self._read_list_behind(candidate, body, is_last)
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
            candidate.scan = None

    def _read_list(self, candidate: _Candidate, body: str, is_last: bool) -> int:
        """Read a list of calls, and the mark that may close it."""
        if candidate.returned:
            return self._read_list_behind(candidate, body, is_last)
        if not candidate.calls:
            if (status := self._read_first_value(candidate, body, "[")) < 0:
                return status
        return self._skip_close(body, candidate.at, is_last)

    def _read_list_behind(self, candidate: _Candidate, body: str, is_last: bool) -> int:
        """Read the rest of a list behind a call that was open, and the mark that may close it."""
        while candidate.is_in_list:
            if candidate.scan is None:
                at = _skip_characters(body, candidate.at)
                if at == len(body):
                    return _NEEDS_MORE
                if body[at] == "]":
                    candidate.at, candidate.is_in_list = at + 1, False
                    break
                following = _skip_characters(body, at + 1)
                if following == len(body) and body[at] == ",":
                    return _NEEDS_MORE
                if body[at] != "," or body[following] != "{":
                    return _NO_CALL
                candidate.scan = _JsonEndFinder(following)
            if (status := self._read_value(candidate, candidate.scan, body)) < 0:
                return status
            candidate.scan = None
        return self._skip_close(body, candidate.at, is_last)

    def _skip_close(self, body: str, at: int, is_last: bool) -> int:
        """Return the index behind the mark that may close a call at ``at``."""
        if not self._close_mark:
            return at
        after = _skip_characters(body, at)
        if body.startswith(self._close_mark, after):
            return after + len(self._close_mark)
        rest = body[after:]
        if not is_last and partial_mark_length(rest, (self._close_mark,)) == len(rest):
            return _NEEDS_MORE
        return at

    def _read_deepseek(self, candidate: _Candidate, body: str, is_last: bool) -> int:
        begin, separator, end = self._deepseek.values()
        while True:
            if candidate.is_behind_arguments:
                match = _FENCE_END.match(body, candidate.at)
                assert match is not None  # the pattern matches an empty text
                rest = body[match.end() :]
                if rest.startswith(end):
                    candidate.at = match.end() + len(end)
                elif not is_last and (
                    "```".startswith(rest) or partial_mark_length(rest, (end,)) == len(rest)
                ):
                    return _NEEDS_MORE
                candidate.is_behind_arguments = False
            if candidate.scan is None:
                at = _skip_characters(body, candidate.at)
                rest = body[at:]
                if partial_mark_length(rest, (begin, self._close_mark)) == len(rest):
                    return len(body) if is_last and candidate.calls and not rest else _NEEDS_MORE
                if candidate.calls and rest.startswith(self._close_mark):
                    return at + len(self._close_mark)
                if not rest.startswith(begin):
                    return candidate.at if candidate.calls else _NO_CALL
                at += len(begin)
                brace = body.find("{", at)
                head = body[at:] if brace < 0 else body[at:brace]
                if len(head) > _MAX_HEAD:
                    return _NO_CALL
                if brace < 0:
                    return _NEEDS_MORE
                name, found, behind = head.partition(separator)
                if behind.strip():  # the first text is "function", and the name ends its line
                    name = behind.strip().partition("\n")[0]
                if not found or not name.strip():
                    return _NO_CALL
                candidate.name, candidate.scan = name.strip(), _JsonEndFinder(brace)
            if (status := self._read_value(candidate, candidate.scan, body)) < 0:
                return status
            candidate.scan, candidate.is_behind_arguments = None, True

    def _read_pythonic(self, candidate: _Candidate, body: str, is_last: bool) -> int:
        start = _skip_characters(body, 0)
        if start == len(body):
            return _NEEDS_MORE
        if body[start] == "{" or candidate.returned:
            return self._read_llama(candidate, body, is_last)
        if body[start] != "[":
            return _NO_CALL
        if not candidate.calls:
            if candidate.python is None:
                candidate.python = PythonEndFinder(start)
            end = candidate.python.find(body)
            if end is None or end < 0:
                return _NEEDS_MORE if end is None else _NO_CALL
            calls = parse_python_calls(replace_signs(self._argument_texts, body[start:end]))
            if not calls or any(name not in self._names for name, _ in calls):
                return _NO_CALL
            candidate.at = end
            candidate.calls = [self._made_call(*one) for one in calls]
        return self._skip_close(body, candidate.at, is_last)

    def _read_xml(self, candidate: _Candidate, body: str, is_last: bool) -> int:
        """Read a function element; models may leave out the mark around it."""
        text = candidate.mark + body if candidate.mark == "<function=" else body
        shift = len(text) - len(body)
        start = _skip_characters(text, 0)
        if not candidate.calls:
            opening = "<function="
            if opening.startswith(text[start : start + len(opening)]):
                if len(text) - start < len(opening):
                    return _NEEDS_MORE
            else:
                return _NO_CALL
            place = text.find("</function>", max(0, candidate.at + shift - len("</function>")))
            if place < 0:
                candidate.at = len(body)
                return _NEEDS_MORE
            end = place + len("</function>")
            written = replace_signs(self._argument_texts, text[:end])
            if (call := parse_xml_call(written, self._schemas)) is None:
                return _NO_CALL
            candidate.calls, candidate.at = [self._made_call(*call)], end - shift
        return self._skip_close(body, candidate.at, is_last)

    def _read_block(self, candidate: _Candidate, body: str, is_last: bool) -> int:
        """Read the text up to the closing mark, or at the end of the output without it."""
        place = body.find(self._close_mark, max(0, candidate.at - len(self._close_mark)))
        if place < 0 and not is_last:
            candidate.at = len(body)
            return _NEEDS_MORE
        end = len(body) if place < 0 else place + len(self._close_mark)
        text = replace_signs(self._argument_texts, body if place < 0 else body[:place])
        if self._form is ToolFormat.GLM:
            call = parse_glm_call(text, self._schemas)
            if place < 0 and not text.rstrip().endswith("</arg_value>"):
                return _NO_CALL
        else:
            call = parse_gemma_call(text, self._quote)
        if call is None:
            return _NO_CALL
        candidate.calls = [self._made_call(*call)]
        return end

    def _made_call(self, name: str, arguments: Mapping[str, Any]) -> ToolCall:
        return ToolCall(_new_id(self._form), name, json.dumps(arguments, ensure_ascii=False))

    def _read_first_value(self, candidate: _Candidate, body: str, opening: str) -> int:
        """Read a JSON value that begins with ``opening``, behind blanks at the start of ``body``.
        Returns what ``_read_value`` returns."""
        if candidate.scan is None:
            start = _skip_characters(body, 0)
            if start == len(body):
                return _NEEDS_MORE
            if body[start] != opening:
                return _NO_CALL
            candidate.scan = _JsonEndFinder(start)
        return self._read_value(candidate, candidate.scan, body)

    def _read_value(self, candidate: _Candidate, scan: _JsonEndFinder, body: str) -> int:
        """Read one JSON value: a call, a list of calls, or the arguments of a call whose name was
        read before."""
        candidate.opening = self._find_opening(candidate, scan, body)
        if candidate.opening is not None:
            return _OPENED
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
        if self._at_start and any(one.name not in self._names for one in calls):
            return _NO_CALL  # without a mark, only the name shows that it is a call
        candidate.calls += calls
        candidate.at = end
        return end

    def _find_opening(
        self, candidate: _Candidate, scan: _JsonEndFinder, body: str
    ) -> _Opening | None:
        """Return the call that a JSON value begins, if its name is known and its arguments have
        begun."""
        if candidate.name:
            if body[scan.start] != "{" or candidate.name not in self._names:
                return None
            return _Opening(candidate.name, scan.start, is_wrapped=False, is_in_list=False)
        match = _HEAD_OF_CALL.match(body[scan.start : scan.start + _MAX_HEAD])
        if match is None:
            return None
        name = _parse_json(f'"{match[2]}"')
        usual = "parameters" if self._form is ToolFormat.LLAMA else "arguments"
        if name not in self._names or match[3] != usual:
            return None
        is_in_list = candidate.is_in_list or match[1] is not None
        place = scan.start + match.end()
        return _Opening(name, place, is_wrapped=True, is_in_list=is_in_list)

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


def new_call(name: str) -> ToolCall:
    """Return the beginning of a call in harmony."""
    return ToolCall(_new_id(ToolFormat.HARMONY), name, "")


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
    final = _written(names, _HARMONY_ANSWER) if form is ToolFormat.HARMONY else ""
    start = f"start: {_calls_expression(form, names, single=single)} | {final} answer"
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


_NEVER_FREE: Final = (ToolFormat.PYTHONIC, ToolFormat.HARMONY)
_FREE_WITHOUT_TOKENS: Final = (
    *(ToolFormat.HERMES, ToolFormat.MISTRAL, ToolFormat.MISTRAL_NAMED, ToolFormat.LLAMA),
    *(ToolFormat.GRANITE, ToolFormat.PHI),
)
"""Formats whose calls can be ensured in free text also where their marks are no tokens."""


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
    opening = _SYNTAX[form].openings[0]
    mark = names.added.get(opening)
    if form in _NEVER_FREE or (mark is None and form not in _FREE_WITHOUT_TOKENS):
        raise invalid_request("tools", f"strict tools cannot be ensured in the format {form.value}")
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
        raise invalid_request("tools", str(error)) from None


def _written(names: TokenNames, text: str) -> str:
    """Return a text in the notation of a grammar: marks that are tokens as tokens, the rest as
    text."""
    marks = [one for one in (*CALL_MARKS, *HARMONY_MARKS) if one in names.added]
    if not marks:
        return json.dumps(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
    return " ".join(
        f"<[{names.added[one]}]>" if one in marks else json.dumps(one) for one in parts if one
    )


def _calls_expression(form: ToolFormat, names: TokenNames, *, single: bool) -> str:
    """Return the grammar expression of one call, or of one to eight unless ``single``."""
    syntax = _SYNTAX[form]
    most = 1 if form is ToolFormat.HARMONY else _MOST_CALLS  # the mark of a call ends the output
    between = _written(names, syntax.between)
    more = "" if single or most == 1 else f"({between} call){{0,{most - 1}}}"
    parts = _written(names, syntax.before), "call", more, _written(names, syntax.after)
    return " ".join(part for part in parts if part)


def _call_rules(
    form: ToolFormat,
    tools: Tools,
    strict: Collection[str],
    names: TokenNames,
    *,
    rule_name: str = "",
) -> list[str]:
    """Return the grammar rules of ``call``. With ``rule_name``, a rule of that name has what
    follows the opening mark. Arguments of tools that are not ``strict`` are any object."""
    syntax, lines = _SYNTAX[form], list[str]()
    opening = syntax.openings[0]
    for place, tool in enumerate(tools):
        name = tool["function"]["name"]
        own = (tool["function"].get("parameters") or {}) if name in strict else {}
        # The mark stands in front of the choice among tools, and not in each alternative.
        head = syntax.head.removeprefix(opening)
        head = head.replace("JSON_NAME", compact_json(name)).replace("NAME", name)
        rule = f"arguments_{place}"
        parts = _written(names, head), rule, _written(names, syntax.tail)
        lines.append(f"call_{place}: {' '.join(part for part in parts if part)}")
        if form in _NOTATIONS:
            lines += _NOTATIONS[form](rule, own, names)
        else:
            lines.append(f"{rule}: %json {compact_json({'type': 'object', **own})}")
    choices = " | ".join(f"call_{place}" for place in range(len(tools)))
    if rule_name and syntax.before:
        more = f"({_written(names, syntax.between)} call){{0,{_MOST_CALLS - 1}}}"
        before = _written(names, syntax.before.removeprefix(opening))
        run = f"{before} call {more} {_written(names, syntax.after)}"
        return [f"{rule_name}: {run}", f"call: {choices}", *lines]
    if rule_name:
        return [f"{rule_name}: {choices}", *lines]
    mark = _written(names, opening) if syntax.head.startswith(opening) else ""
    return [f"call: {mark} ({choices})", *lines]


# Rules for arguments that are not JSON. Parameters come in the order of the schema, and any that
# are not required may be left out.


def _parameter_rules(
    rule: str, schema: Mapping[str, Any], separator: str
) -> tuple[list[str], dict[str, Mapping[str, Any]]]:
    """Return the rules of a list of parameters, and the schemas for their rules by name."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = schema.get("required") or ()
    count = len(properties)
    lines = [f"{rule}: {rule}_first_0" if count else f'{rule}: ""']
    for place, name in enumerate(properties):
        own, following = f"{rule}_{place}", f"{rule}_rest_{place + 1}"
        skipped = "" if name in required else f" | {rule}_first_{place + 1}"
        lines.append(f"{rule}_first_{place}: {own} {following}{skipped}")
        also = f"{separator} {own}"
        rest = also if name in required else f"({also})?"
        if place:
            lines.append(f"{rule}_rest_{place}: {rest} {following}")
    if count:
        lines += [f'{rule}_first_{count}: ""', f'{rule}_rest_{count}: ""']
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    schemas: dict[str, Mapping[str, Any]] = {
        name: {**definitions, **(one if isinstance(one, dict) else {})}
        for name, one in properties.items()
    }
    return lines, schemas


def _python_rules(rule: str, schema: Mapping[str, Any], names: TokenNames) -> list[str]:
    if not schema.get("properties"):
        one = f'{rule}_name "=" {rule}_value'
        return [
            f'{rule}: ({one} (", " {one})*)?',
            rf"{rule}_name: /[A-Za-z_]\w*/",
            f"{rule}_value: %json {{}}",
        ]
    lines, schemas = _parameter_rules(rule, schema, '", "')
    for place, (name, own) in enumerate(schemas.items()):
        lines += [
            f"{rule}_{place}: {json.dumps(name + '=')} {rule}_{place}_value",
            f"{rule}_{place}_value: %json {compact_json(own)}",
        ]
    return lines


def _element_rules(
    rule: str, schema: Mapping[str, Any], names: TokenNames, *, begin: str, middle: str, end: str
) -> list[str]:
    """Return the rules of parameters that are elements: ``begin``, a name, ``middle``, a value and
    ``end``."""
    closing, any_text = json.dumps(end), rf"{rule}_any: /(.|\n)*/"
    if not schema.get("properties"):
        one = f"{json.dumps(begin)} {rule}_name {json.dumps(middle)} {rule}_text"
        return [
            f"{rule}: ({one})*",
            rf"{rule}_name: /[^<>\n]+/",
            f"{rule}_text[lazy]: {rule.upper()}_ANY {closing}",
            any_text.replace(f"{rule}_any", f"{rule.upper()}_ANY"),
        ]
    lines, schemas = _parameter_rules(rule, schema, '""')
    for place, (name, own) in enumerate(schemas.items()):
        opening, value = json.dumps(f"{begin}{name}{middle}"), f"{rule}_{place}_value"
        lines.append(f"{rule}_{place}: {opening} {value}")
        if own.get("type") == "string" and isinstance(own.get("enum"), list):
            texts = " | ".join(json.dumps(str(one)) for one in own["enum"])
            lines.append(f"{value}: ({texts}) {closing}")
        elif own.get("type") in ("string", None):
            lines.append(f"{value}[lazy]: {rule.upper()}_ANY {closing}")
        else:
            lines += [
                f"{value}: {value}_json {closing}",
                f"{value}_json: %json {compact_json(own)}",
            ]
    return [*lines, rf"{rule.upper()}_ANY: /(.|\n)*/"]


def _gemma_rules(
    rule: str, schema: Mapping[str, Any], names: TokenNames, *, quote: str
) -> list[str]:
    mark, token = _written(names, quote), names.added.get(quote)
    rest = f"<[^{token}]>* {mark}" if token is not None else f"{rule}_rest"
    lines = [
        f"{rule}_text: {mark} {rest}",
        f'{rule}_value: {rule}_text | {rule}_scalar | "[" ({rule}_value ("," {rule}_value)*)? "]"'
        f' | "{{" ({rule}_pair ("," {rule}_pair)*)? "}}"',
        f'{rule}_pair: {rule}_name ":" {rule}_value',
        rf"{rule}_name: /[A-Za-z_]\w*/",
        rf"{rule}_scalar: /-?[0-9]+(\.[0-9]+)?|true|false|null/",
    ]
    if token is None:
        lines += [
            f"{rule}_rest[lazy]: {rule.upper()}_ANY {json.dumps(quote)}",
            rf"{rule.upper()}_ANY: /(.|\n)*/",
        ]
    if not schema.get("properties"):
        return [f'{rule}: "{{" ({rule}_pair ("," {rule}_pair)*)? "}}"', *lines]
    listed, schemas = _parameter_rules(f"{rule}_list", schema, '","')
    lines += [f'{rule}: "{{" {rule}_list "}}"', *listed]
    for place, (name, own) in enumerate(schemas.items()):
        kind, value = own.get("type"), f"{rule}_value"
        if kind == "string":
            value = f"{rule}_text"
            if isinstance(own.get("enum"), list):
                texts = " | ".join(json.dumps(str(one)) for one in own["enum"])
                value = f"{mark} ({texts}) {mark}"
        elif kind in ("integer", "number", "boolean", "null"):
            value = f"{rule}_list_{place}_value"
            lines.append(f"{value}: %json {compact_json(own)}")
        lines.append(f"{rule}_list_{place}: {json.dumps(name + ':')} {value}")
    return lines


_NOTATIONS: Final[Mapping[ToolFormat, Callable[..., list[str]]]] = {
    ToolFormat.PYTHONIC: _python_rules,
    ToolFormat.QWEN_XML: partial(
        _element_rules, begin="<parameter=", middle=">\n", end="\n</parameter>\n"
    ),
    ToolFormat.GLM: partial(
        _element_rules,
        begin="<arg_key>",
        middle="</arg_key>\n<arg_value>",
        end="</arg_value>\n",
    ),
    ToolFormat.GEMMA_FUNCTION: partial(_gemma_rules, quote="<escape>"),
    ToolFormat.GEMMA4: partial(_gemma_rules, quote='<|"|>'),
}
"""Makers of the rules for arguments that are not JSON."""


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
