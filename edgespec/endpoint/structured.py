"""What a request wants its text held to: ``response_format``, ``grammar``, ``regex``, or a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.endpoint.errors import ApiError, invalid
from edgespec.endpoint.fields import Fields, shown
from edgespec.endpoint.tool_calls import CLOSE, MISTRAL_MARK, OPEN, ToolFormat

MISTRAL_ARGUMENTS: Final = "[ARGS]"
_MOST_CALLS: Final = 8
_FORMATS: Final = ("text", "json_object", "json_schema")
_ANY_OBJECT: Final = '{"type": "object"}'


def constraint_of(fields: Fields) -> Constraint | None:
    """Raises ``ApiError``, also where a request asks for two of them."""
    given = {
        "response_format": _response_format(fields),
        "grammar": _text(fields, "grammar", ConstraintKind.GRAMMAR),
        "regex": _text(fields, "regex", ConstraintKind.REGEX),
    }
    found = {name: one for name, one in given.items() if one is not None}
    if len(found) > 1:
        first, second, *_ = found
        raise invalid(second, f"{first} and {second} are both given, but a text is held to one")
    return next(iter(found.values()), None)


def _response_format(fields: Fields) -> Constraint | None:
    asked = fields.section("response_format")
    if asked is None:
        return None
    kind = asked.raw("type")
    if kind not in _FORMATS:
        known = ", ".join(map(repr, _FORMATS))
        why = f"response_format is of type {shown(kind)}, but must be of one of {known}"
        raise invalid("response_format", why)
    if kind == "text":
        return None
    if kind == "json_object":
        return _constraint("response_format", ConstraintKind.JSON_SCHEMA, _ANY_OBJECT)
    described = asked.section("json_schema")
    schema = None if described is None else described.raw("schema")
    if not isinstance(schema, dict):
        name = "response_format.json_schema.schema"
        raise invalid("response_format", f"{name} is {shown(schema)}, but must be an object")
    return _constraint("response_format", ConstraintKind.JSON_SCHEMA, _json(schema))


def _text(fields: Fields, name: str, kind: ConstraintKind) -> Constraint | None:
    text = fields.text(name)
    return _constraint(name, kind, text) if text else None


def _constraint(name: str, kind: ConstraintKind, text: str) -> Constraint:
    try:
        return Constraint(kind, text)
    except ValueError as error:
        raise invalid(name, str(error)) from None


# --- calls that must be ----------------------------------------------------------------------


def forced_call(
    form: ToolFormat,
    template: str,
    tools: Sequence[Mapping[str, Any]],
    special_id: Callable[[str], int | None],
    *,
    one: bool,
) -> Constraint:
    """What a text has to be that calls one of ``tools``, or several of them unless ``one``, in the
    words of the model's template. ``special_id`` tells the marks that are tokens of their own: no
    text stands for them. Raises ``ApiError``."""

    def mark(text: str) -> str:
        found = special_id(text)
        return json.dumps(text) if found is None else f"<[{found}]>"

    named = form is ToolFormat.MISTRAL and MISTRAL_ARGUMENTS in template
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
        name, start = function["name"], f"call_{place}: "
        head = json.dumps(f'{{"name": {_json(name)}, "{key}": ')
        if named:
            rule = f"{mark(MISTRAL_MARK)} {json.dumps(name)} {mark(MISTRAL_ARGUMENTS)} "
            rules.append(f"{start}{rule}arguments_{place}")
        elif form is ToolFormat.HERMES:
            inner = f'"\\n" {head} arguments_{place} "}}\\n"'
            rules.append(f"{start}{mark(OPEN)} {inner} {mark(CLOSE)}")
        else:
            rules.append(f'{start}{head} arguments_{place} "}}"')
        rules.append(f"arguments_{place}: %json {_json(arguments)}")
    calls = " | ".join(f"call_{place}" for place in range(len(tools)))
    more = "" if one else f" ({between}call){{0,{_MOST_CALLS - 1}}}"
    lines = [f"start: {before}call{more}{after}", f"call: {calls}", *rules]
    return _constraint("tools", ConstraintKind.GRAMMAR, "\n".join(lines))


def no_format() -> ApiError:
    """The template teaches no way to call a tool."""
    return invalid(
        "tool_choice",
        "the chat template of this model teaches no format of tool calls that is known here, so"
        " that none can be forced",
        "unsupported_parameter",
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
