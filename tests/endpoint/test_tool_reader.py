"""Tests of tool calls in outputs.

Oracle: the text itself. Cut into any pieces, with marks that are spelled, shown tokens or hidden
tokens, it must give the same calls and the same remaining text; text that is no call is returned
unchanged. Grammars of calls are checked in both directions: the reader must read all text that they
allow, and llguidance's own matcher must refuse all text that they forbid.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from edgespec.core.device.events import TokenKind
from edgespec.core.protocol.constraint import ConstrainedText, Constraint
from edgespec.device.agent import Piece
from edgespec.endpoint.marks import MarkedText, MarkToken, mark_tokens
from edgespec.endpoint.output_parser import join_parts
from edgespec.endpoint.tool_calls import (
    CallPart,
    ToolCall,
    ToolFormat,
    ToolReader,
    _JsonEndFinder,
    call_or_json_grammar,
    forced_call_grammar,
    free_call_grammar,
)
from edgespec.models.grammar import GrammarReader
from edgespec.models.tokenizer import TextTokenizer
from tests.kit.letters import Untried
from tests.kit.tiny_checkpoints import write_tokenizer
from tests.present import require

NAMES = ["weather", "time", "server/look up"]
JSON_FORMS = [ToolFormat(one) for one in ("hermes", "mistral", "mistral_named", "llama")]
PARTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *("<think>", "</think>", "[THINK]", "[/THINK]"),
    *('{"name": "time", "arguments": {"at": "', '"}}', '{"name": "time"}', '[{"name": "time"}]'),
    *("time", "server/look up", "{", "}", "[", "]", '"', "\\", ";", "\n", " ", "\t"),
    *("```", "`", "~~~", "<", "</", "<tool", "x", "é", "1"),
]
MARKS = PARTS[:10]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=16).map("".join)


def join_texts(found: Sequence[CallPart]) -> list[Any]:
    """Return texts and calls in their order, without ids, with adjacent texts joined. Arguments
    that are no JSON are texts."""
    joined: list[Any] = []
    for one in join_parts(found):
        arguments: Any = one
        if isinstance(one, ToolCall):
            arguments = one.arguments
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
            arguments = (one.name, arguments)
        joined.append(arguments)
    return joined


def read(form: ToolFormat, parts: Sequence[str], is_thinking: bool = False) -> list[Any]:
    reader = ToolReader(form, NAMES, is_thinking=is_thinking)
    found = [one for part in parts for one in reader.push(part)]
    assert all(found)
    return join_texts([*found, *reader.flush()])


@pytest.mark.parametrize("form", JSON_FORMS)
@settings(max_examples=60)
@given(text=TEXTS, data=st.data())
def test_any_text_is_the_same_however_it_is_cut(
    form: ToolFormat, text: str, data: st.DataObject
) -> None:
    whole = read(form, [text])
    assert read(form, [*text]) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    ends = itertools.pairwise([0, *cuts, len(text)])
    assert read(form, [text[begin:end] for begin, end in ends]) == whole
    if not any(isinstance(one, tuple) for one in whole):
        assert "".join(whole) == text


@pytest.mark.parametrize("form", JSON_FORMS)
@settings(max_examples=40)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), data=st.data())
def test_marks_that_are_tokens_stand_where_they_were(
    form: ToolFormat, parts: list[str], data: st.DataObject
) -> None:
    """Oracle: the reader of spelled marks. A hidden mark of a thought stays hidden in the text, and
    a stop string may hold back any end of the text so far."""
    is_shown = data.draw(st.booleans())
    tokens = {number: MarkToken(mark, is_shown) for number, mark in enumerate(MARKS)}
    reader, marks = ToolReader(form, NAMES, tokens), MarkedText(tokens)
    found: list[CallPart] = []
    held = ""
    for part in parts:
        token = MARKS.index(part) if part in MARKS else None
        before, held = len(held), held + ("" if token is not None and not is_shown else part)
        cut = data.draw(st.integers(0, len(held)))
        piece, held = Piece(held[:cut], TokenKind.DECODED, before), held[cut:]
        found += reader.push(marks.push(99 if token is None else token, piece))
    found += reader.push(marks.push(None, Piece(held, TokenKind.DECODED)) + marks.flush())
    found += reader.flush()
    expected = read(form, ["".join(parts)])
    hidden = [] if is_shown else MARKS[6:]
    for mark in hidden:
        expected = [one.replace(mark, "") if isinstance(one, str) else one for one in expected]
    assert "".join(map(str, join_texts(found))).split() == "".join(map(str, expected)).split()
    assert [one for one in join_texts(found) if isinstance(one, tuple)] == [
        one for one in expected if isinstance(one, tuple)
    ]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        # A mark may occur in prose, at any place, with its white space.
        ("hermes", "Models write <tool_call> first.", ("Models write <tool_call> first.",)),
        (
            "hermes",
            "one\n\n<tool_call>\nno json\n</tool_call>\n",
            ("one\n\n<tool_call>\nno json\n</tool_call>\n",),
        ),
        (
            "hermes",
            '<tool_call>{"name": "time"} or </tool_call> ',
            ('<tool_call>{"name": "time"} or </tool_call> ',),
        ),
        (
            "hermes",
            'a <tool_call> b <tool_call>{"name": "time"}</tool_call>',
            ("a <tool_call> b", ("time", {})),
        ),
        ("mistral", "Say [TOOL_CALLS] twice", ("Say [TOOL_CALLS] twice",)),
        ("mistral", "Say [TOOL_CALLS][1, 2]", ("Say [TOOL_CALLS][1, 2]",)),
        (
            "mistral_named",
            "[TOOL_CALLS]time is a function {",
            ("[TOOL_CALLS]time is a function {",),
        ),
        ("llama", "The <|python_tag|> opens code", ("The <|python_tag|> opens code",)),
        (
            "llama",
            '{"name": "other", "parameters": {}} is JSON',
            ('{"name": "other", "parameters": {}} is JSON',),
        ),
        ("llama", '{"name": "time"} is JSON', ('{"name": "time"} is JSON',)),
        # A mark may occur inside an argument.
        (
            "hermes",
            '<tool_call>{"name": "time", "arguments": {"at": "</tool_call>"}}</tool_call>',
            (("time", {"at": "</tool_call>"}),),
        ),
        (
            "hermes",
            (
                '<tool_call>{"name": "time", "arguments": {"at": '
                '"\\"<tool_call>{\\\\"}}</tool_call>!'
            ),
            (("time", {"at": '"<tool_call>{\\'}), "!"),
        ),
        (
            "hermes",
            (
                '<tool_call>{"name": "time", "arguments": {"at": '
                '"\\\\\\"<tool_call>{"}}</tool_call>!'
            ),
            (("time", {"at": '\\"<tool_call>{'}), "!"),
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "time", "arguments": {"at": "[TOOL_CALLS]]}"}}]',
            (("time", {"at": "[TOOL_CALLS]]}"}),),
        ),
        (
            "mistral_named",
            '[TOOL_CALLS]time[ARGS]{"at": "[TOOL_CALLS][ARGS]{"}',
            (("time", {"at": "[TOOL_CALLS][ARGS]{"}),),
        ),
        (
            "llama",
            '{"name": "time", "parameters": {"at": "<|python_tag|>; {"}}',
            (("time", {"at": "<|python_tag|>; {"}),),
        ),
        # Models write raw line breaks inside JSON strings.
        (
            "hermes",
            '<tool_call>{"name": "time", "arguments": {"at": "a\nb"}}</tool_call>',
            (("time", {"at": "a\nb"}),),
        ),
        (
            "hermes",
            '<tool_call>{"name": "time", "arguments": "{\\"at\\": \\"a\nb\\"}"}</tool_call>',
            (("time", {"at": "a\nb"}),),
        ),
        # Marks may occur in code fences and in inline code.
        (
            "hermes",
            'So:\n```xml\n<tool_call>{"name": "time"}</tool_call>\n```\n',
            ('So:\n```xml\n<tool_call>{"name": "time"}</tool_call>\n```\n',),
        ),
        (
            "hermes",
            '~~~~\n```\n~~~\n<tool_call>{"name": "time"}</tool_call>',
            ('~~~~\n```\n~~~\n<tool_call>{"name": "time"}</tool_call>',),
        ),
        (
            "hermes",
            '```\nx\n```\n<tool_call>{"name": "time"}</tool_call>',
            ("```\nx\n```", ("time", {})),
        ),
        (
            "hermes",
            'Write `<tool_call>{"name": "time"}</tool_call>`',
            ('Write `<tool_call>{"name": "time"}</tool_call>`',),
        ),
        ("mistral", "```\n[TOOL_CALLS]time{}\n```", ("```\n[TOOL_CALLS]time{}\n```",)),
        # Marks may occur in thoughts.
        (
            "hermes",
            '<think>a <tool_call>{"name": "time"}</tool_call> b</think>\n\nHello.',
            ('<think>a <tool_call>{"name": "time"}</tool_call> b</think>\n\nHello.',),
        ),
        (
            "hermes",
            '<think>```\n</think>\n<tool_call>{"name": "time"}</tool_call>',
            ("<think>```\n</think>", ("time", {})),
        ),
        (
            "hermes",
            '<think>a <tool_call>{"name": "time"}</tool_call>',
            ('<think>a <tool_call>{"name": "time"}</tool_call>',),
        ),
        (
            "hermes",
            'The tag <think> is old. <tool_call>{"name": "time"}</tool_call>',
            ("The tag <think> is old.", ("time", {})),
        ),
        (
            "mistral",
            "[THINK][TOOL_CALLS]time{}[/THINK] So [TOOL_CALLS]time{}",
            ("[THINK][TOOL_CALLS]time{}[/THINK] So", ("time", {})),
        ),
        (
            "llama",
            '<think>{"name": "time"}</think>\n{"name": "time"}',
            ('<think>{"name": "time"}</think>', ("time", {})),
        ),
        # Names may contain any characters that clients use, calls may have ids, and end marks may
        # be missing.
        ("mistral_named", "[TOOL_CALLS]server/look up[ARGS]{}", (("server/look up", {}),)),
        (
            "mistral_named",
            '[TOOL_CALLS]a/b:c [CALL_ID]x1 [ARGS] {"k": {}}',
            (("a/b:c", {"k": {}}),),
        ),
        (
            "hermes",
            '<tool_call>{"name": "time"}<tool_call>{"name": "weather"}',
            (("time", {}), ("weather", {})),
        ),
        ("hermes", '<tool_call>{"name": "time"}</tool_', (("time", {}),)),
    ],
)
def test_only_a_whole_call_in_its_place_is_a_call(
    form: str, text: str, expected: Sequence[Any]
) -> None:
    found = read(ToolFormat(form), [text])
    assert found == [one if isinstance(one, str) else (one[0], dict(one[1])) for one in expected]
    assert read(ToolFormat(form), [*text]) == found


def test_a_prompt_may_have_opened_the_thought() -> None:
    call = '<tool_call>{"name": "time"}</tool_call>'
    text = f"perhaps {call}</think>\n\n{call}"
    found = read(ToolFormat.HERMES, [text], is_thinking=True)
    assert found == [f"perhaps {call}</think>", ("time", {})]


def test_letters_that_spell_a_token_are_text() -> None:
    tokens = {7: MarkToken("<tool_call>", True), 8: MarkToken("</tool_call>", True)}
    reader, marks = ToolReader(ToolFormat.HERMES, NAMES, tokens), MarkedText(tokens)
    text = '<tool_call>{"name": "time"}</tool_call>'
    pieces = [Piece(letter, TokenKind.DECODED) for letter in text]
    found = [one for piece in pieces for one in reader.push(marks.push(3, piece))]
    found += reader.push(marks.flush())
    assert join_texts([*found, *reader.flush()]) == [text]


@pytest.mark.parametrize("form", JSON_FORMS)
@pytest.mark.parametrize(
    "part", [*MARKS, '<tool_call>{"', "[TOOL_CALLS][", "[TOOL_CALLS]time", "{"]
)
def test_a_long_answer_of_marks_takes_time_in_proportion(form: ToolFormat, part: str) -> None:
    """The cost is counted in characters that are scanned as JSON. A bad reader would scan them
    again and again."""
    reader, count, read_characters = ToolReader(form, NAMES), 1000, 0
    find = _JsonEndFinder.find

    def counted(end: _JsonEndFinder, text: str) -> int | None:
        nonlocal read_characters
        before, found = end._at, find(end, text)
        read_characters += end._at - before
        return found

    with patch.object(_JsonEndFinder, "find", counted):
        found = [*reader.push(part * count), *reader.flush()]
    assert "".join(map(str, join_texts(found))) == part * count
    assert read_characters <= 2 * count * len(part)


# --- grammars of calls ----------------------------------------------------------------------------


SPEECH = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": SPEECH}},
    {"type": "function", "function": {"name": "server/look up", "parameters": {"type": "object"}}},
]
BEGIN = {
    ToolFormat.HERMES: ('<tool_call>\n{"name": "weather", "arguments": ', "}\n</tool_call>"),
    ToolFormat.MISTRAL: ('[TOOL_CALLS][{"name": "weather", "arguments": ', "}]"),
    ToolFormat.MISTRAL_NAMED: ("[TOOL_CALLS]weather[ARGS]", ""),
    ToolFormat.LLAMA: ('{"name": "weather", "parameters": ', "}"),
}
RIGHT, WRONG = '{"city":"Köln"}', '{"city":1}'
ADDED = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<think>",
    "</think>",
    "<|other|>",
]
KINDS = {"spelled": None, "shown": False, "hidden": True}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a folder's tokenizer whose marks are spelled, added tokens, or special tokens."""
    folder = write_tokenizer(tmp_path_factory.mktemp(request.param))
    if (special := KINDS[request.param]) is not None:
        inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
        add = [AddedToken(one, special=special, normalized=False) for one in ADDED]
        (inner.add_special_tokens if special else inner.add_tokens)(add)
        inner.save(str(folder / "tokenizer.json"))
    return TextTokenizer(folder)


def accepts(tokenizer: TextTokenizer, constraint: Constraint, text: str) -> tuple[bool, bool]:
    """Return whether llguidance accepts the tokens of a text, and whether the text may end
    there."""
    reader = _READERS.setdefault(id(tokenizer), _reader(tokenizer))
    tokens, end = tokenizer.encode(text), require(tokenizer.special_id("<|end|>"))
    known = ConstrainedText(reader(constraint), (end,))
    took = known.follow(tokens) == len(tokens)
    return took, took and known.follow([*tokens, end]) == len(tokens) + 1


_READERS: dict[int, GrammarReader] = {}


def _reader(tokenizer: TextTokenizer) -> GrammarReader:
    path: Path = tokenizer._folder / "tokenizer.json"
    reader = GrammarReader(lambda: path.read_text(encoding="utf-8"))
    reader.trials = Untried()
    return reader


@pytest.mark.parametrize("form", JSON_FORMS)
def test_a_forced_call_can_be_written_with_every_kind_of_mark(
    tokenizer: TextTokenizer, form: ToolFormat
) -> None:
    """Qwen's ``<tool_call>`` is an added token that is not special."""
    constraint = forced_call_grammar(form, TOOLS, tokenizer, single=True)
    begin, end = BEGIN[form]
    assert accepts(tokenizer, constraint, begin + RIGHT + end) == (True, True)
    assert accepts(tokenizer, constraint, begin + WRONG + end) == (False, False)
    assert accepts(tokenizer, constraint, "Hello.") == (False, False)
    reader = ToolReader(form, NAMES, mark_tokens(tokenizer))
    assert read_token_by_token(tokenizer, reader, begin + RIGHT + end) == [
        ("weather", {"city": "Köln"})
    ]


def read_token_by_token(tokenizer: TextTokenizer, reader: ToolReader, text: str) -> list[Any]:
    """Return the reader's result for a text that arrives token by token."""
    stream, found = tokenizer.stream(), list[CallPart]()
    marks = MarkedText(mark_tokens(tokenizer))
    for token in tokenizer.encode(text):
        piece = Piece(stream.push([token]), TokenKind.DECODED)
        found += reader.push(marks.push(token, piece))
    found += reader.push(marks.flush())
    return join_texts([*found, *reader.flush()])


@pytest.mark.parametrize("form", JSON_FORMS)
def test_strict_calls_fit_and_free_text_is_free(tokenizer: TextTokenizer, form: ToolFormat) -> None:
    constraint = free_call_grammar(form, TOOLS, ["weather"], tokenizer)
    begin, end = BEGIN[form]
    for text in (
        "",
        "Hello.\n\n",
        "naïve 漢字 👩",
        '{"answer": 42}',
        "a <tool> or [TOOL",
        "<|user|>x",
    ):
        assert accepts(tokenizer, constraint, text) == (True, True), text
    assert accepts(tokenizer, constraint, begin + RIGHT + end) == (True, True)
    assert accepts(tokenizer, constraint, begin + WRONG + end) == (False, False)
    assert accepts(tokenizer, constraint, begin + RIGHT[:-1]) == (True, False)
    if form is not ToolFormat.LLAMA:
        assert accepts(tokenizer, constraint, f"I look. {begin}{RIGHT}{end} So.") == (True, True)
        assert accepts(tokenizer, constraint, f"I look. {begin}{WRONG}") == (False, False)
    other = begin.replace("weather", "server/look up") + '{"any": [1, {}]}' + end
    assert accepts(tokenizer, constraint, other) == (True, True)


def test_a_thought_may_hold_anything_where_its_marks_are_tokens(tokenizer: TextTokenizer) -> None:
    begin, end = BEGIN[ToolFormat.HERMES]
    if tokenizer.added.get("<think>") is None:
        pytest.skip("marks are spelled")
    thought = f"perhaps <tool_call> or {begin}{WRONG}{end}</think>Well"
    for is_thinking, text in ((False, f"<think>{thought}"), (True, thought)):
        constraint = free_call_grammar(
            ToolFormat.HERMES, TOOLS, ["weather"], tokenizer, is_thinking=is_thinking
        )
        assert accepts(tokenizer, constraint, text) == (True, True)
        assert accepts(tokenizer, constraint, f"{text} {begin}{RIGHT}{end}") == (True, True)
        assert accepts(tokenizer, constraint, f"{text} {begin}{WRONG}") == (False, False)


@pytest.mark.parametrize("form", JSON_FORMS)
def test_a_schema_beside_tools_leaves_calls_possible(
    tokenizer: TextTokenizer, form: ToolFormat
) -> None:
    schema = json.dumps({**SPEECH, "properties": {"city": {"enum": ["Rome"]}}})
    constraint = call_or_json_grammar(form, TOOLS, (), tokenizer, single=False, schema=schema)
    begin, end = BEGIN[form]
    assert accepts(tokenizer, constraint, '{"city": "Rome"}') == (True, True)
    assert accepts(tokenizer, constraint, '{"city": "Köln"') == (False, False)
    assert accepts(tokenizer, constraint, begin + '{"any": 1}' + end) == (True, True)
    assert accepts(tokenizer, constraint, "Hello.") == (False, False)


def test_marks_are_found_by_kind(tokenizer: TextTokenizer) -> None:
    found: Mapping[int, MarkToken] = mark_tokens(tokenizer)
    texts = {one.text for one in found.values()}
    spelled = tokenizer.added.get("<tool_call>") is None
    assert texts == (set() if spelled else set(ADDED) - {"<|other|>"})
    for token, one in found.items():
        assert tokenizer.encode(one.text) == [token]
        assert one.is_shown == (tokenizer.decode([token]) == one.text)
