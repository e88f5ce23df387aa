"""From the messages and tools of a chat request to what a chat template reads.

Templates know texts and objects, so a list of text parts becomes one text, ``developer`` becomes
``system``, and the arguments of earlier tool calls, which travel as JSON in a text, become objects.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from edgespec.endpoint.errors import invalid
from edgespec.endpoint.fields import Fields, encodable, shown
from edgespec.models.chat_template import MAX_MESSAGES

MAX_TOOLS: Final = 128
_ROLES: Final = {"developer": "system", "function": "tool"}
_KNOWN_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def messages_of(fields: Fields) -> list[dict[str, Any]]:
    """Raises ``ApiError`` naming the message and what is wrong with it."""
    given = fields.sections("messages", MAX_MESSAGES)
    if not given:
        raise invalid("messages", "messages must hold at least one message")
    return [_message(one) for one in given]


def tools_of(fields: Fields) -> list[dict[str, Any]]:
    """The functions that the model may call, as templates read them; none: an empty list. Raises
    ``ApiError``."""
    given = fields.sections("tools", MAX_TOOLS) or ()
    forced = fields.raw("tool_choice") not in (None, "auto", "none")
    return [_tool(one, forced=forced) for one in given]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.one_of("role", _KNOWN_ROLES)
    if role is None:
        raise invalid(fields.name("role"), f"{fields.name('role')} is missing")
    calls = fields.sections("tool_calls")
    if calls and role != "assistant":
        name = fields.name("tool_calls")
        raise invalid(name, f"{name} stands in a message of {role}, but only assistants call tools")
    content = _content(fields)
    if content is None:
        if role != "assistant":
            raise invalid(fields.name("content"), f"{fields.name('content')} is missing")
        content = fields.text("refusal") or ""
    message: dict[str, Any] = {"role": _ROLES.get(role, role), "content": content}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if (text := fields.text(key)) is not None:
            message[key] = text
    if calls:
        message["tool_calls"] = [_earlier_call(one) for one in calls]
    for key in ("function_call", "audio"):
        if fields.raw(key) is not None:
            raise invalid(fields.name(key), f"{fields.name(key)} is not supported")
    return message


def _content(fields: Fields) -> str | None:
    value = fields.raw("content")
    if not isinstance(value, list):
        return fields.text("content")
    parts = []
    for part in fields.sections("content") or ():
        kind = part.text("type")
        if kind not in ("text", "refusal"):
            name = part.name("type")
            raise invalid(name, f"{name} is {shown(kind)}, but this model reads text only")
        text = part.text(kind)
        if text is None:
            raise invalid(part.name(kind), f"{part.name(kind)} is missing")
        parts.append(text)
    return "".join(parts)


def _earlier_call(fields: Fields) -> dict[str, Any]:
    function = fields.section("function")
    name = None if function is None else function.text("name")
    if function is None or not name:
        raise invalid(fields.name("function"), f"{fields.name('function')} has no name")
    arguments: Any = function.raw("arguments")
    if isinstance(arguments, str):
        arguments = _object_or_text(encodable(function.name("arguments"), arguments))
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }
    if (identity := fields.text("id")) is not None:
        call["id"] = identity
    return call


def _object_or_text(text: str) -> Any:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _tool(fields: Fields, *, forced: bool) -> dict[str, Any]:
    kind = fields.text("type")
    if kind != "function":
        name = fields.name("type")
        raise invalid(name, f"{name} is {shown(kind)}, but only tools of type 'function' are known")
    function = fields.section("function")
    called = None if function is None else function.text("name")
    if function is None or called is None or not _TOOL_NAME.fullmatch(called):
        name = fields.name("function.name")
        raise invalid(
            name,
            f"{name} is {shown(called)}, but must be 1 to 128 letters, digits, dots, dashes or"
            " underscores",
        )
    function.section("parameters")  # an object, if it is there
    if function.flag("strict") and not forced:
        name = function.name("strict")
        why = f"{name} is true, but only a call that tool_choice forces is held to a schema"
        raise invalid(name, why)
    told = {key: value for key, value in function.data.items() if key != "strict"}
    return {"type": "function", "function": told}
