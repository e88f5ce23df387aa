"""Tests of thoughts: their place in outputs, in every API, and in the history of a chat.

Oracle: the whole text. However it is cut, and whether its marks are letters, shown tokens or hidden
tokens, the thought and the answer must be the same, and a stream must equal the response without
streaming.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from edgespec.core.device.events import TokenKind
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import FinishReason
from edgespec.device.agent import Piece
from edgespec.endpoint.answer_grammar import constrain_answer
from edgespec.endpoint.marks import MarkToken
from edgespec.endpoint.output_parser import OutputForm, OutputParser, Part, join_parts
from edgespec.endpoint.request_json import ApiError
from edgespec.endpoint.thoughts import (
    HARMONY,
    THINK,
    Thought,
    ThoughtFormat,
    ends_in_thought,
    thought_format,
)
from edgespec.endpoint.tool_calls import ToolCall, ToolFormat
from edgespec.models.grammar import GrammarReader
from edgespec.models.tokenizer import TextTokenizer
from tests.endpoint.live_endpoint import ScriptedAgent, ask, events_of, over_script
from tests.kit.letters import LettersTokenizer, Untried
from tests.kit.tiny_checkpoints import write_tokenizer
from tests.present import require

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{% set end = '</think>' %}"
OPENS = THINKS + "<think>\n"
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}
CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


def format_of(template: str) -> ThoughtFormat:
    found = thought_format(template)
    assert found is not None
    return found


def read(form: OutputForm, pieces: Iterable[str], tokens: dict[int, MarkToken]) -> list[Any]:
    """Return the parts of an output. A piece that is the text of a mark token is that token."""
    ids = {one.text: token for token, one in tokens.items()}
    parser, found = OutputParser(form, tokens), list[Part]()
    for text in pieces:
        token = ids.get(text)
        is_hidden = token is not None and not tokens[token].is_shown
        found += parser.push(token or 99, Piece("" if is_hidden else text, TokenKind.DECODED))
    found += parser.flush()
    return [
        (one.name, one.arguments) if isinstance(one, ToolCall) else one for one in join_parts(found)
    ]


def cuts_of(text: str) -> Iterable[Sequence[str]]:
    """Yield the text in one piece, letter by letter, and cut at each two places."""
    yield [*text]
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        yield [text[:first], text[first:second], text[second:]]


@pytest.mark.parametrize(
    ("template", "text", "is_thinking", "expected"),
    [
        ("</think>", "<think>\na b\n</think>\n\nc ", False, [Thought("a b"), "c "]),
        ("</think>", "a</think>c", True, [Thought("a"), "c"]),
        ("</think>", "\n<think>a</think>c", True, [Thought("a"), "c"]),
        ("</think>", "<think>\n\n</think>\n\nc", False, ["c"]),
        ("</think>", "<think>a\n", False, [Thought("a")]),
        ("</think>", "a </thi", True, [Thought("a </thi")]),
        ("</think>", "", True, []),
        ("</think>", "c <think>a</think>", False, ["c <think>a</think>"]),
        ("</think>", "<thin", False, ["<thin"]),
        ("</think>", " \n c", False, [" \n c"]),
        ("</think>", "<think>a</think>", False, [Thought("a")]),
        ("</think>", "a <think> b</think>c</think>", True, [Thought("a <think> b"), "c</think>"]),
        ("[THINK]", "[THINK]a[/THINK]c", False, [Thought("a"), "c"]),
        ("<|channel>thought", "<|channel>thought\na\n<channel|>c", False, [Thought("a"), "c"]),
        (
            "Here is my thought process: Here is my response:",
            "Here is my thought process: a\n\nHere is my response: c",
            False,
            [Thought("a"), "c"],
        ),
        (
            "<think></think><response></response>",
            "<think>a</think><response>c</response>\n",
            False,
            [Thought("a"), "c"],
        ),
        (
            "<think></think><response></response>",
            "<think>a</think><response>c</response> d",
            False,
            [Thought("a"), "c</response> d"],
        ),
        ("<think></think><response></response>", "<think>a</think>c", False, [Thought("a"), "c"]),
    ],
)
def test_a_thought_is_read_however_the_text_is_cut(
    template: str, text: str, is_thinking: bool, expected: list[Part]
) -> None:
    form = OutputForm(format_of(template), is_thinking=is_thinking)
    for pieces in cuts_of(text):
        assert read(form, pieces, {}) == expected, pieces


@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize("form", [THINK, format_of("[THINK]"), format_of("<|channel>thought")])
def test_a_mark_that_is_a_token_is_the_only_mark(form: ThoughtFormat, is_shown: bool) -> None:
    tokens = {1: MarkToken(form.begin, is_shown), 2: MarkToken(form.end, is_shown)}
    spelled = f"{form.end[:3]}", form.end[3:]
    pieces = [form.begin, form.label, " a ", *spelled, "b ", form.end, "\n", "c", *spelled]
    expected = [Thought(f"a {form.end}b"), f"c{form.end}"]
    assert read(OutputForm(form), pieces, tokens) == expected


def test_calls_are_read_behind_the_thought_and_not_in_it() -> None:
    form = OutputForm(THINK, ToolFormat.HERMES, {"time": {}}, is_thinking=True)
    for pieces in ([f"a {CALL} b</think>c\n{CALL}"], [*f"a {CALL} b</think>c\n{CALL}"]):
        assert read(form, pieces, {}) == [Thought(f"a {CALL} b"), "c", ("time", "{}")]


@pytest.mark.parametrize(
    ("prompt", "is_thinking"),
    [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("a", False)],
)
def test_a_prompt_may_open_the_thought(prompt: str, is_thinking: bool) -> None:
    assert ends_in_thought(THINK, prompt) == is_thinking
    assert not ends_in_thought(None, prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_has_its_thought_beside_the_content(stream: bool) -> None:
    agent = ScriptedAgent(["a", " b", "\n</th", "ink>", "\nc", " d"])
    async with over_script(agent, LettersTokenizer(OPENS)) as live:
        reply = await ask(live, CHAT, {**ASKED, "stream": stream, "stream_options": USAGE})
    if stream:
        events = [one for one in events_of(reply.body) if isinstance(one, dict)]
        deltas = [one["choices"][0]["delta"] for one in events if one["choices"]]
        thoughts = [one["reasoning_content"] for one in deltas if "reasoning_content" in one]
        assert thoughts == ["a", " b"]
        message = {
            name: "".join(one.get(name) or "" for one in deltas)
            for name in ("content", "reasoning_content")
        }
        usage = events[-1]["usage"]
    else:
        message, usage = reply.json["choices"][0]["message"], reply.json["usage"]
    assert (message["reasoning_content"], message["content"]) == ("a b", "c d")
    assert usage["completion_tokens"] == 6
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 4


USAGE = {"include_usage": True}


async def test_a_thought_that_is_cut_off_leaves_no_content() -> None:
    agent = ScriptedAgent(["a", " b"], FinishReason.LENGTH)
    async with over_script(agent, LettersTokenizer(OPENS)) as live:
        chat = (await ask(live, CHAT, ASKED)).json["choices"][0]
        response = (await ask(live, RESPONSES, {"input": "Hi"})).json
    assert chat["finish_reason"] == "length"
    assert (chat["message"]["reasoning_content"], chat["message"]["content"]) == ("a b", "")
    assert response["status"] == "incomplete"
    assert [(one["type"], one["status"]) for one in response["output"]] == [
        ("reasoning", "incomplete")
    ]


async def test_a_response_has_a_reasoning_item_and_a_message() -> None:
    agent = ScriptedAgent(["<think>", "a", " b", "</think>", "\nc", " d"])
    async with over_script(agent, LettersTokenizer(THINKS)) as live:
        whole = (await ask(live, RESPONSES, {"input": "Hi"})).json
        reply = await ask(live, RESPONSES, {"input": "Hi", "stream": True})
    thought, message = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "a b"}]
    assert (thought["type"], message["type"]) == ("reasoning", "message")
    assert message["content"][0]["text"] == "c d"
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    events = [
        one.removeprefix("event: ").partition("\ndata: ")
        for one in reply.body.decode().split("\n\n")
    ]
    kinds = [kind.removeprefix("response.") for kind, _, _ in events if kind]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]


async def test_a_template_without_thoughts_has_none() -> None:
    agent = ScriptedAgent(["<think>a</think>", "c"])
    async with over_script(agent, LettersTokenizer("{{ messages[0].content }}")) as live:
        message = (await ask(live, CHAT, ASKED)).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>a</think>c", "refusal": None}


# --- constraints behind a thought, and its budget -------------------------------------------------


SCHEMA = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer"}')
REGEX = Constraint(ConstraintKind.REGEX, r"a/b|c\/d")
GRAMMAR = Constraint(ConstraintKind.GRAMMAR, 'start: "yes" x\nx: "1" | "}"')
GBNF = Constraint(ConstraintKind.GRAMMAR, 'root ::= "yes" "1"')
SPECIAL = ["<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("spelled"), [])


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("special"), [*SPECIAL, "<|return|>"])


def make_tokenizer(folder: Path, marks: Sequence[str]) -> TextTokenizer:
    write_tokenizer(folder)
    if marks:
        library = Tokenizer.from_file(str(folder / "tokenizer.json"))
        library.add_special_tokens([*marks])
        library.save(str(folder / "tokenizer.json"))
    return TextTokenizer(folder)


def accepts(tokenizer: TextTokenizer, constraint: Constraint | None, text: str) -> tuple[bool, ...]:
    """Return whether a grammar accepts the tokens of a text, and whether it may end there."""
    assert constraint is not None
    reader = GrammarReader(lambda: tokenizer.copy_tokenizer().to_str())
    reader.trials = Untried()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    matcher = require(reader(constraint).matcher)()
    count = matcher.consume(tokens)
    return count == len(tokens), count == len(tokens) and matcher.can_end


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [(SCHEMA, "12", "x"), (REGEX, "a/b", "a-"), (GRAMMAR, "yes}", "no"), (GBNF, "yes1", "no")],
)
@pytest.mark.parametrize("is_thinking", [False, True])
@pytest.mark.parametrize("kind", ["spelled", "special"])
def test_a_constraint_begins_behind_the_thought(
    request: pytest.FixtureRequest,
    kind: str,
    is_thinking: bool,
    constraint: Constraint,
    right: str,
    wrong: str,
) -> None:
    tokenizer: TextTokenizer = request.getfixturevalue(kind)
    found = constrain_answer(constraint, THINK, tokenizer, is_thinking=is_thinking)
    thought = f"{'' if is_thinking else '<think>'}\nno {{\n</think>"
    assert accepts(tokenizer, found, thought) == (True, False)
    assert accepts(tokenizer, found, f"{thought}\n\n{right}") == (True, True)
    assert accepts(tokenizer, found, f"{thought}{wrong}") == (False, False)
    if not is_thinking:
        assert accepts(tokenizer, found, right) == (True, True)
        assert accepts(tokenizer, found, wrong) == (False, False)


def test_a_constraint_holds_the_last_message_of_harmony(special: TextTokenizer) -> None:
    found = constrain_answer(SCHEMA, HARMONY, special, is_thinking=False)
    between = "<|end|><|start|>assistant"
    assert accepts(special, found, f"{FINAL}12") == (True, True)
    assert accepts(special, found, f"{ANALYSIS}no{between}{FINAL}12") == (True, True)
    assert accepts(special, found, f"{ANALYSIS}no{between}{FINAL}x") == (False, False)


@pytest.mark.parametrize("budget", [0, 1, 3, 900])
@pytest.mark.parametrize("constraint", [None, SCHEMA])
def test_a_thought_ends_where_its_budget_does(
    special: TextTokenizer, budget: int, constraint: Constraint | None
) -> None:
    limited = partial(constrain_answer, constraint, names=special, budget=budget)
    answer = "12" if constraint is not None else "Well 12."
    close = "<|end|><|start|>assistant"
    for form, is_thinking, opening, end in (
        (THINK, True, "", "</think>"),
        (THINK, False, "<think>", "</think>"),
        (HARMONY, False, ANALYSIS, f"{close}{FINAL}"),
    ):
        found = limited(form=form, is_thinking=is_thinking)
        within, beyond = "a" * budget, "a" * (budget + 1)
        assert len(special.encode(within, add_special_tokens=False)) == budget
        assert accepts(special, found, opening + within) == (True, False)
        assert accepts(special, found, opening + beyond) == (False, False)
        assert accepts(special, found, opening + within + end + answer) == (True, True)
        assert accepts(special, found, opening + "a" * (budget // 2) + end + answer) == (True, True)


def test_a_budget_needs_a_mark_that_is_a_token(spelled: TextTokenizer) -> None:
    with pytest.raises(ApiError, match="'</think>', which ends a thought of this model"):
        constrain_answer(None, THINK, spelled, is_thinking=True, budget=4)
    assert constrain_answer(None, THINK, spelled, is_thinking=True) is None


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget_tokens"])
async def test_a_budget_is_read_under_the_names_of_other_servers(name: str) -> None:
    agent = ScriptedAgent(["c"])
    async with over_script(agent, LettersTokenizer("{{ messages[0].content }}")) as live:
        ignored = await ask(live, CHAT, {**ASKED, name: 4})
        unlimited = await ask(live, CHAT, {**ASKED, name: -1})
        wrong = await ask(live, CHAT, {**ASKED, name: -2})
    assert ignored.headers["x-edgespec-ignored"] == name
    assert "x-edgespec-ignored" not in unlimited.headers
    assert (wrong.status, wrong.error["param"]) == (400, name)
