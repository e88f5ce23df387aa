"""Constraints that begin behind a thought, and the limit on the length of a thought.

Both are one grammar: any tokens up to the mark that ends the thought, and behind it the answer,
which is held to its constraint or free. After as many tokens as the limit allows, the grammar
allows only the closing mark, so the limit is exact and the same for every draft and verifier.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Final

from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.endpoint.marks import TokenNames
from edgespec.endpoint.request_json import invalid_request
from edgespec.endpoint.thoughts import ThoughtFormat
from edgespec.models.grammar import translate_gbnf

BUDGET: Final = "thinking_token_budget"
_SPACE: Final = r"SPACE: /[ \n]{0,8}/"
"""White space between a thought and its answer."""


def constrain_answer(
    constraint: Constraint | None,
    form: ThoughtFormat,
    names: TokenNames,
    *,
    is_thinking: bool,
    budget: int | None = None,
    is_call: bool = False,
) -> Constraint | None:
    """Return the constraint of an output that may begin with a thought.

    Args:
        constraint: The constraint of the answer; None: it is free.
        form: The format of the thought.
        names: The tokens of the vocabulary.
        is_thinking: Whether the output begins inside a thought.
        budget: Limit on the tokens of the thought; None: there is none.
        is_call: Whether the constraint is one of calls. In harmony it then has the header of its
            message.

    Returns None if nothing is constrained. Raises ``ApiError``, for instance for a budget where the
    closing mark is no token.
    """
    if constraint is None and budget is None:
        return None
    end = names.added.get(form.end)
    if form.is_harmony:
        lines = _harmony_lines(form, names, constraint, budget, is_call=is_call)
    elif end is not None:
        lines = _token_lines(form, names, end, constraint, budget, is_thinking=is_thinking)
    elif constraint is None or budget is not None:
        why = f"is given, but {form.end!r}, which ends a thought of this model, is no token"
        raise invalid_request(BUDGET, f"{BUDGET} {why}", "unsupported_parameter")
    else:
        lines = _text_lines(form, is_thinking=is_thinking)
    if constraint is not None:
        lines += [_answer_line(constraint), _SPACE]
    try:
        return Constraint(ConstraintKind.GRAMMAR, "\n".join(lines))
    except ValueError as error:
        raise invalid_request("response_format", str(error)) from None


def _token_lines(
    form: ThoughtFormat,
    names: TokenNames,
    end: int,
    constraint: Constraint | None,
    budget: int | None,
    *,
    is_thinking: bool,
) -> list[str]:
    """Return the rules of an output whose thought ends with the token ``end``."""
    begin = names.added.get(form.begin)
    if constraint is not None:
        thought = f"thought: {_any_but((end,), budget)} <[{end}]> SPACE"
        opening = "" if begin is None else f"<[{begin}]> "
        start = "thought answer" if is_thinking else f"({opening}thought)? answer"
        return [f"start: {start}", thought]
    lines = [*_free_thought((end,), end, budget), "rest: <[*]>*"]
    if is_thinking:
        return ["start: thought", *lines]
    if begin is None:
        return ["start: rest", "rest: <[*]>*"]
    return [f'start: <[{begin}]> thought | <[^{begin}]> rest | ""', *lines]


def _free_thought(ends: Collection[int], end: int, budget: int | None) -> list[str]:
    """Return the rules of a thought with free text behind it, which may also end in the thought
    while its budget lasts."""
    whole = f"{_any_but(ends, budget)} <[{end}]> rest"
    if budget == 0:
        return [f"thought: {whole}"]
    cut = _any_but(ends, None if budget is None else budget - 1)
    return [f"thought: {cut or chr(34) * 2} | {whole}"]


def _harmony_lines(
    form: ThoughtFormat,
    names: TokenNames,
    constraint: Constraint | None,
    budget: int | None,
    *,
    is_call: bool,
) -> list[str]:
    """Return the rules of an output that is messages in channels."""
    ids = {mark: names.added.get(mark) for mark in (form.begin, form.end, *_HARMONY)}
    missing = [mark for mark, token in ids.items() if token is None]
    if missing:
        why = f"{missing[0]!r}, which this model's template writes, is no token"
        raise invalid_request(BUDGET if constraint is None else "response_format", why)
    tokens = {mark: token for mark, token in ids.items() if token is not None}
    channel, end = tokens[form.begin], tokens[form.end]
    message, begin = tokens["<|message|>"], tokens["<|start|>"]
    ends = (end, tokens["<|call|>"], tokens["<|return|>"])
    opening = f'<[{channel}]> "analysis" <[{message}]>'
    if constraint is not None:
        header = "" if is_call else f'<[{channel}]> "final" <[{message}]>'
        return [
            f"start: analysis? {header} answer",
            f'analysis: {opening} {_any_but(ends, budget)} <[{end}]> <[{begin}]> "assistant"',
        ]
    others = f'<[{channel}]> ("final" | "commentary") rest | <[^{channel}]> rest | ""'
    return [
        f"start: {opening} thought | {others}",
        *_free_thought(ends, end, budget),
        "rest: <[*]>*",
    ]


_HARMONY: Final = ("<|start|>", "<|message|>", "<|call|>", "<|return|>")


def _text_lines(form: ThoughtFormat, *, is_thinking: bool) -> list[str]:
    """Return the rules of an output whose thought ends with a text."""
    opening, closing = json.dumps(form.begin), json.dumps(form.end)
    start = "thought SPACE answer" if is_thinking else f"({opening} thought SPACE)? answer"
    return [f"start: {start}", f"thought[lazy]: TEXT {closing}", r"TEXT: /(.|\n)*/"]


def _any_but(ends: Collection[int], limit: int | None) -> str:
    """Return the expression of at most ``limit`` tokens other than ``ends``."""
    if limit == 0:
        return ""
    tokens = f"<[^{','.join(map(str, sorted(ends)))}]>"
    return f"{tokens}*" if limit is None else f"{tokens}{{0,{limit}}}"


def _answer_line(constraint: Constraint) -> str:
    """Return the rule of an answer that is held to ``constraint``. Raises ``ApiError``."""
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return f"answer: %json {constraint.text}"
    if constraint.kind is ConstraintKind.REGEX:
        # A slash would end the expression, and so would a line break.
        text = re.sub(r"\\.|(/)", lambda one: r"\/" if one[1] else one[0], constraint.text)
        return "answer: /" + text.replace("\n", r"\n") + "/"
    try:
        return f"answer: %lark {{\n{translate_gbnf(constraint.text)}\n}}"
    except (ImportError, ValueError) as error:
        raise invalid_request("grammar", f"grammar cannot follow a thought: {error}") from None
