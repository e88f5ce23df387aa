"""Tests of the call formats of each family of models.

Oracle: a template of ours in the style of the family writes calls, and the reader must read the
same calls from that text, however it is cut and whether its marks are letters, shown tokens or
hidden tokens. What is no call stays text. llguidance checks that a forced call can be written and
read again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from edgespec.core.device.events import TokenKind
from edgespec.core.protocol.constraint import Constraint
from edgespec.device.agent import Piece
from edgespec.endpoint.chat_prompt import ChatPrompt, call_format, output_form, write_chat_prompt
from edgespec.endpoint.marks import deepseek_mark
from edgespec.endpoint.output_parser import OutputForm, Part, join_parts
from edgespec.endpoint.thoughts import Thought
from edgespec.endpoint.tool_calls import ToolCall, ToolFormat, forced_call_grammar
from edgespec.models.grammar import GrammarReader
from edgespec.models.tokenizer import ChatTemplate, TextTokenizer
from tests.kit.letters import Untried
from tests.kit.tiny_checkpoints import write_tokenizer
from tests.present import require

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "parts": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}},
]
KOELN = ("weather", {"city": "Köln, 'a' \"b\" {c} [d] <e> \\ \n f", "days": 3, "parts": ["x", "y"]})
ROME = ("weather", {"city": "Rome"})
HEAD = "{{ 'u' }}{% for m in messages if m.role == 'assistant' %}{{ m.content or '' }}"
TAIL = "{% endfor %}"


@dataclass(frozen=True)
class Style:
    """A style of templates. ``calls`` writes the calls of the message ``m``."""

    calls: str
    marks: Sequence[str] = ()
    is_single: bool = False

    @property
    def template(self) -> ChatTemplate:
        about = "{% if tools %}{{ tools | length }}{% endif %}"
        calls = "{% if m.tool_calls %}" + self.calls + "{% endif %}"
        return ChatTemplate(about + HEAD + calls + TAIL)


def each(body: str, separator: str = "") -> str:
    """Return the part of a template that writes ``body`` for each call ``f`` of a message."""
    between = f"{{{{ {separator!r} if not loop.last else '' }}}}" if separator else ""
    return "{% for c in m.tool_calls %}{% set f = c.function %}" + body + between + "{% endfor %}"


JSON_CALL = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
BEGIN_ALL, END_ALL = deepseek_mark("tool calls begin"), deepseek_mark("tool calls end")
BEGIN_ONE, END_ONE = deepseek_mark("tool call begin"), deepseek_mark("tool call end")
SEPARATOR = deepseek_mark("tool sep")
GEMMA_VALUE = (
    "{% macro value(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is sequence %}["
    "{% for one in v %}{{ value(one) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)
GEMMA_CALL = (
    "call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments.items() %}{{ k }}:{{ value(v) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
)
STYLES = {
    ToolFormat.HERMES: Style(
        each(f"<tool_call>\n{JSON_CALL}\n</tool_call>", "\n"), ["<tool_call>", "</tool_call>"]
    ),
    ToolFormat.MISTRAL: Style(f"[TOOL_CALLS][{each(JSON_CALL, ', ')}]", ["[TOOL_CALLS]"]),
    ToolFormat.MISTRAL_NAMED: Style(
        each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"), ["[TOOL_CALLS]", "[ARGS]"]
    ),
    ToolFormat.LLAMA: Style(
        "{# ipython #}"
        + each('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "; ")
    ),
    ToolFormat.PYTHONIC: Style(
        "{# <|python_start|> #}["
        + each(
            "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
            "{% if not loop.last %}, {% endif %}{% endfor %})",
            ", ",
        )
        + "]"
    ),
    ToolFormat.GRANITE: Style(f"<|tool_call|>[{each(JSON_CALL, ', ')}]", ["<|tool_call|>"]),
    ToolFormat.PHI: Style(
        f"<|tool_call|>[{each(JSON_CALL, ', ')}]<|/tool_call|>", ["<|tool_call|>", "<|/tool_call|>"]
    ),
    ToolFormat.DEEPSEEK: Style(
        BEGIN_ALL
        + each(
            f"{BEGIN_ONE}function{SEPARATOR}{{{{ f.name }}}}\n```json\n"
            f"{{{{ f.arguments | tojson }}}}\n```{END_ONE}",
            "\n",
        )
        + END_ALL,
        [BEGIN_ALL, END_ALL, BEGIN_ONE, END_ONE, SEPARATOR],
    ),
    ToolFormat.DEEPSEEK_V31: Style(
        BEGIN_ALL
        + each(f"{BEGIN_ONE}{{{{ f.name }}}}{SEPARATOR}{{{{ f.arguments | tojson }}}}{END_ONE}")
        + END_ALL,
        [BEGIN_ALL, END_ALL, BEGIN_ONE, END_ONE, SEPARATOR],
    ),
    ToolFormat.QWEN_XML: Style(
        each(
            "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
            "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n"
            "{% endfor %}</function>\n</tool_call>",
            "\n",
        ),
        ["<tool_call>", "</tool_call>"],
    ),
    ToolFormat.GLM: Style(
        each(
            "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}"
            "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}"
            "</arg_value>\n{% endfor %}</tool_call>",
            "\n",
        ),
        ["<tool_call>", "</tool_call>"],
    ),
    ToolFormat.GEMMA_FUNCTION: Style(
        GEMMA_VALUE.replace("QUOTE", "<escape>")
        + each(f"<start_function_call>{GEMMA_CALL}<end_function_call>"),
        ["<start_function_call>", "<end_function_call>", "<escape>"],
    ),
    ToolFormat.GEMMA4: Style(
        GEMMA_VALUE.replace("QUOTE", '<|"|>') + each(f"<|tool_call>{GEMMA_CALL}<tool_call|>"),
        ["<|tool_call>", "<tool_call|>", '<|"|>'],
    ),
    ToolFormat.HARMONY: Style(
        each(
            "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
            "{{ f.arguments | tojson }}<|call|>",
            "<|start|>assistant",
        ),
        ["<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|start|>", "<|end|>"],
        is_single=True,
    ),
}


def test_every_format_has_a_style() -> None:
    assert set(STYLES) == set(ToolFormat)


def written(form: ToolFormat, *calls: tuple[str, Any]) -> str:
    """Return the text of calls, as the template of a format writes it in the history."""
    functions = [{"name": name, "arguments": json.dumps(one)} for name, one in calls]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": f"call00{place}x", "type": "function", "function": one}
                for place, one in enumerate(functions)
            ],
        },
    ]
    text = write_chat_prompt(STYLES[form].template, messages, TOOLS).text
    return text.removeprefix("2").removeprefix("u")


@cache
def form_of(form: ToolFormat) -> OutputForm:
    assert call_format(STYLES[form].template) is form
    return output_form(STYLES[form].template, TOOLS, ChatPrompt("", False))


class Names:
    """A vocabulary in which each mark has a token."""

    def __init__(self, marks: Sequence[str], *, is_shown: bool) -> None:
        self.added: Mapping[str, int] = {mark: place + 1 for place, mark in enumerate(marks)}
        self._is_shown = is_shown

    def special_id(self, text: str) -> int | None:
        return None if self._is_shown else self.added.get(text)


def read(form: OutputForm, pieces: Iterable[str], names: Names) -> list[Any]:
    parser, found = require(form.make_parser(names)), list[Part]()
    for text in pieces:
        token = names.added.get(text)
        is_hidden = token is not None and names.special_id(text) is not None
        found += parser.push(token or 99, Piece("" if is_hidden else text, TokenKind.DECODED))
    found += parser.flush()
    return [
        (one.name, arguments_of(one)) if isinstance(one, ToolCall) else one
        for one in join_parts(found)
    ]


def arguments_of(call: ToolCall) -> Any:
    """Return the arguments of a call, or their text if they are no JSON."""
    with contextlib.suppress(ValueError):
        return json.loads(call.arguments)
    return call.arguments


def tokens_of(text: str, marks: Sequence[str]) -> list[str]:
    """Return the text cut at its marks, each of which is a piece of its own, and into letters."""
    for mark in sorted(marks, key=len, reverse=True):
        place = text.find(mark)
        if place >= 0:
            before, behind = text[:place], text[place + len(mark) :]
            return [*tokens_of(before, marks), mark, *tokens_of(behind, marks)]
    return [*text]


@pytest.mark.parametrize("form", ToolFormat, ids=lambda one: one.value)
@pytest.mark.parametrize("kind", ["spelled", "shown", "hidden"])
def test_calls_are_read_as_their_template_writes_them(form: ToolFormat, kind: str) -> None:
    style = STYLES[form]
    names = Names([] if kind == "spelled" else style.marks, is_shown=kind == "shown")
    several: list[list[Any]] = [[KOELN], [ROME, KOELN], [("stop", {})]]
    for calls in several:
        text = written(form, *calls)
        assert read(form_of(form), tokens_of(text, [*names.added]), names) == calls
        if kind != "hidden":
            assert read(form_of(form), [text], Names([], is_shown=True)) == calls


@pytest.mark.parametrize("form", ToolFormat, ids=lambda one: one.value)
def test_calls_are_read_however_the_text_is_cut(form: ToolFormat) -> None:
    text, names = written(form, ROME, ("stop", {})), Names([], is_shown=True)
    for first, second in itertools.combinations_with_replacement(range(0, len(text) + 1, 7), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert read(form_of(form), pieces, names) == [ROME, ("stop", {})], pieces


@pytest.mark.parametrize("form", ToolFormat, ids=lambda one: one.value)
def test_a_cut_or_damaged_call_is_not_lost(form: ToolFormat) -> None:
    """Every beginning of a call and every damaged call is read without a failure, and each word of
    it comes back, as text or in a call."""
    text, names = written(form, ROME), Names([], is_shown=True)
    damaged = [text.replace(one, "", 1) for one in ('"', "{", "}", "city", ">", "(", "]")]
    for cut in [*(text[:end] for end in range(len(text))), *damaged]:
        whole = read(form_of(form), [cut], names)
        assert whole == read(form_of(form), [*cut], names), cut
        assert "Rome" not in cut or "Rome" in json.dumps(whole, default=vars), cut


def tokenizer_of(folder: Path, marks: Sequence[str]) -> TextTokenizer:
    write_tokenizer(folder)
    if marks:
        library = Tokenizer.from_file(str(folder / "tokenizer.json"))
        library.add_special_tokens([*marks])
        library.save(str(folder / "tokenizer.json"))
    return TextTokenizer(folder)


def accepts(tokenizer: TextTokenizer, constraint: Constraint, text: str) -> tuple[bool, bool]:
    reader = GrammarReader(lambda: tokenizer.copy_tokenizer().to_str())
    reader.trials = Untried()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    matcher = require(reader(constraint).matcher)()
    count = matcher.consume(tokens)
    return count == len(tokens), count == len(tokens) and matcher.can_end


@pytest.mark.parametrize("form", ToolFormat, ids=lambda one: one.value)
@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_forced_call_is_one_that_the_template_writes(
    form: ToolFormat, has_tokens: bool, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tmp_path, STYLES[form].marks if has_tokens else ())
    strict = forced_call_grammar(form, TOOLS, tokenizer, single=False)
    plain = ("weather", {"city": "Rome", "days": 2, "parts": ["x", "y"]})
    for calls in ([ROME], [plain], [ROME, plain]):
        if len(calls) > 1 and STYLES[form].is_single:
            continue
        assert accepts(tokenizer, strict, written(form, *calls)) == (True, True), calls
    for wrong in (("weather", {"city": "Rome", "days": "x"}), ("weather", {"town": "Rome"})):
        assert accepts(tokenizer, strict, written(form, wrong))[1] is False
    assert accepts(tokenizer, strict, "Hello.") == (False, False)
    one = forced_call_grammar(form, TOOLS[1:], tokenizer, single=True)
    assert accepts(tokenizer, one, written(form, ("stop", {}))) == (True, True)


# --- peculiarities --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (
            "qwen_xml",
            "I look.\n<function=stop>\n</function>\n</tool_call>",
            ["I look.", ("stop", {})],
        ),
        ("qwen_xml", "<tool_call>\n<function=stop>\nx\n</function>", None),
        (
            "qwen_xml",
            "<tool_call><function=weather><parameter=city>7</parameter><parameter=days>7"
            "</parameter><parameter=other>7</parameter></function></tool_call>",
            [("weather", {"city": "7", "days": 7, "other": "7"})],
        ),
        ("pythonic", "[1, 2, 3] are numbers", None),
        ("pythonic", "[unknown(a=1)]", None),
        ("pythonic", "[weather('Rome')]", None),
        (
            "pythonic",
            "<|python_start|>[weather(city='R', days=-1, parts=[])]<|python_end|>",
            [("weather", {"city": "R", "days": -1, "parts": []})],
        ),
        ("pythonic", '{"name": "stop", "parameters": {}}', [("stop", {})]),
        ("phi", 'functools[{"name": "stop", "arguments": {}}]', [("stop", {})]),
        ("phi", "functools is a module of Python", None),
        ("granite", '<tool_call>[{"name": "stop", "arguments": {}}]', [("stop", {})]),
        (
            "gemma_function",
            "<start_function_call>call:weather{city:<escape>a,b}<escape>,days:2,x:{y:true}}"
            "<end_function_call>",
            [("weather", {"city": "a,b}", "days": 2, "x": {"y": True}})],
        ),
        ("gemma4", "<|tool_call>call:stop{}<tool_call|>", [("stop", {})]),
        ("gemma4", "<|tool_call>call:stop{" + "a:{" * 100 + "<tool_call|>", None),
        ("glm", "<tool_call>stop</tool_call>", [("stop", {})]),
        ("glm", "the mark <tool_call> opens calls", None),
        ("harmony", "plain text", None),
        ("harmony", "x<|start|>" + "y" * 600, None),
        ("harmony", "<|channel|>final<|message|>a < b<|return|>", ["a < b"]),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>I look.<|end|><|start|>assistant to=functions.stop<|channel|>commentary"
            "<|message|>{}<|call|>",
            [Thought("hm"), "I look.", ("stop", {})],
        ),
        ("harmony", "<|channel|>analysis<|message|>hm", [Thought("hm")]),
        (
            "harmony",
            "<|channel|>commentary to=functions.stop<|message|>{no<|call|>",
            [("stop", "{no")],
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.stop<|message|> {} and more<|call|>",
            [("stop", "{}and more")],
        ),
        ("harmony", "<|channel|>commentary to=functions.stop<|message|><|call|>", [("stop", {})]),
        (
            "harmony",
            "<|channel|>analysis to=python<|message|>1+1<|call|>",
            [Thought("1+1")],
        ),
    ],
)
def test_peculiar_outputs(form: str, text: str, expected: list[Any] | None) -> None:
    """``expected`` None: the text is no call and stays as it is."""
    for pieces in ([text], [*text], [text[:7], text[7:]]):
        found = read(form_of(ToolFormat(form)), pieces, Names([], is_shown=True))
        assert found == ([text] if expected is None else expected)


def test_a_message_of_harmony_is_continued() -> None:
    template = STYLES[ToolFormat.HARMONY].template
    prompt = "<|start|>assistant<|channel|>final<|message|>The answer"
    form = output_form(template, (), ChatPrompt(prompt, False))
    assert read(form, [" is 4<|return|>"], Names([], is_shown=True)) == [" is 4"]
