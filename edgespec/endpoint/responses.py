"""Conversion of a ``/v1/responses`` request into a chat request.

An earlier response that the request continues was put in front of its input before. Fields that
refer to other stored state are refused with an error that names them. Tools and items that
only the service of another provider can run are left out and reported. The functions of a namespace
become functions whose names begin with the namespace; a call is reported to the client with both
names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgespec.endpoint.request_json import Fields, shown_value
from edgespec.endpoint.requests import (
    CUSTOM_INPUT,
    MAX_FUNCTIONS,
    MAX_TOOLS,
    ChatConversion,
    ClientTool,
)

_NEEDS_STATE: Final = ("conversation", "background", "prompt")
_CONVERTED: Final = frozenset("input instructions max_output_tokens text tools tool_choice".split())
_TEXT_PARTS: Final = ("input_text", "output_text", "text")
_PICTURE_PART: Final = "input_image"
_UNUSED: Final = frozenset(
    "include reasoning truncation top_logprobs stream_options client_metadata"
    " previous_response_id".split()
)
"""Parameters that do not change the output here, or that are read elsewhere."""
_ECHOED: Final = (
    *("instructions", "max_output_tokens", "metadata", "reasoning", "temperature", "text"),
    *("top_p", "truncation", "user", "previous_response_id"),
)
"""Parameters of the request that the response repeats if they were given."""


def convert_to_chat(data: Mapping[str, Any]) -> ChatConversion:
    """Return a request for a response as a chat request. Raises ``ApiError``."""
    fields = Fields(data)
    for name in _NEEDS_STATE:
        if data.get(name):
            why = "is given, but nothing is kept here: send the whole input"
            raise fields.error(name, why, "unsupported_parameter")
    chat = {name: value for name, value in data.items() if name not in _CONVERTED | _UNUSED}
    conversion = ChatConversion(chat, echo=_echo(data))
    conversion.names |= {"messages": "input", "prompt": "input"}
    conversion.names["max_completion_tokens"] = "max_output_tokens"
    conversion.names["response_format"] = conversion.names["response_format.json_schema"] = (
        "text.format"
    )
    conversion.names["reasoning_effort"] = "reasoning.effort"
    _add_tools(conversion, fields)
    _add_messages(conversion, fields)
    chat["max_completion_tokens"] = data.get("max_output_tokens")
    if (text := fields.section("text")).raw("format") is not None:
        form = text.section("format")
        kind = form.raw("type")
        inner = {"json_schema": {"schema": form.raw("schema")}} if kind == "json_schema" else {}
        chat["response_format"] = {"type": kind, **inner}
    if (effort := fields.section("reasoning").raw("effort")) is not None:
        chat["reasoning_effort"] = effort
    choice = data.get("tool_choice")
    chat["tool_choice"] = (
        _convert_choice(conversion, choice) if isinstance(choice, dict) else choice
    )
    return conversion


def _echo(data: Mapping[str, Any]) -> dict[str, Any]:
    parallel, choice = data.get("parallel_tool_calls"), data.get("tool_choice")
    return {
        **{name: data[name] for name in _ECHOED if data.get(name) is not None},
        "parallel_tool_calls": True if parallel is None else parallel,
        "tool_choice": "auto" if choice is None else choice,
        "tools": data.get("tools") or [],
    }


# --- tools ----------------------------------------------------------------------------------------


def _add_tools(conversion: ChatConversion, fields: Fields) -> None:
    tools = conversion.chat["tools"] = list[dict[str, Any]]()
    for tool in fields.sections("tools", MAX_TOOLS):
        if tool.raw("type") == "namespace":
            for one in tool.sections("tools", MAX_FUNCTIONS):
                _add_tool(conversion, one, tool.text("name") or "")
        else:
            _add_tool(conversion, tool, "")
    if len(tools) > MAX_FUNCTIONS:
        raise fields.error("tools", f"has {len(tools)} functions, but at most {MAX_FUNCTIONS}")


def _add_tool(conversion: ChatConversion, tool: Fields, namespace: str) -> None:
    """Add a tool in the form of a chat, and record the sent names of its fields."""
    kind = tool.raw("type")
    if kind not in ("function", "custom"):
        if not isinstance(kind, str) or not kind:
            raise tool.wrong_value("type", kind, "'function', 'custom' or 'namespace'")
        conversion.left_out.append(f"tools.{kind}")
        return
    tools = conversion.chat["tools"]
    place = f"tools[{len(tools)}]"
    conversion.names[place] = conversion.names[f"{place}.{kind}"] = tool.place.removesuffix(".")
    inner = {name: value for name, value in tool.data.items() if name != "type"}
    name = inner.get("name")
    if namespace and isinstance(name, str):
        flat = flat_name(namespace, name)
        used_names = {one[one["type"]].get("name") for one in tools}
        while flat in used_names:
            flat += "_"
        conversion.client_tools[flat] = ClientTool(name, namespace, kind == "custom")
        inner["name"] = flat
    tools.append({"type": kind, kind: inner})


def flat_name(namespace: str, name: str) -> str:
    """Return the name under which the model sees a function of a namespace."""
    return f"{namespace.removesuffix('__')}__{name}"


def _known_name(conversion: ChatConversion, namespace: Any, name: Any) -> Any:
    """Return the name under which the model sees a tool that the client names in two parts."""
    if not namespace or not isinstance(namespace, str) or not isinstance(name, str):
        return name
    for flat, one in conversion.client_tools.items():
        if (one.namespace, one.name) == (namespace, name):
            return flat
    return flat_name(namespace, name)


def _convert_choice(conversion: ChatConversion, choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    if kind == "allowed_tools":
        tools = choice.get("tools")
        known_tools = [
            _convert_choice(conversion, one) if isinstance(one, dict) else one
            for one in tools or ()
        ]
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": known_tools}}
    name = _known_name(conversion, choice.get("namespace"), choice.get("name"))
    return {"type": kind, kind: {"name": name}} if isinstance(kind, str) else {"type": kind}


# --- items ----------------------------------------------------------------------------------------


def _add_messages(conversion: ChatConversion, fields: Fields) -> None:
    messages = conversion.chat["messages"] = list[dict[str, Any]]()
    if instructions := fields.text("instructions"):
        conversion.names["messages[0].content"] = "instructions"
        messages.append({"role": "system", "content": instructions})
    value = fields.raw("input")
    if isinstance(value, str):
        conversion.names[f"messages[{len(messages)}].content"] = "input"
        messages.append({"role": "user", "content": value})
        return
    count_before = len(messages)
    for item in fields.sections("input"):
        _add_item(conversion, item)
    if len(messages) == count_before:
        raise fields.error("input", "must hold at least one message")


def _add_item(conversion: ChatConversion, item: Fields) -> None:
    messages, sent_place = conversion.chat["messages"], item.place.removesuffix(".")
    place = f"messages[{len(messages)}]"
    match item.raw("type"):
        case None | "message":
            content = _convert_parts(item, "content")
            if item.raw("role") == "assistant" and _is_thought(messages[-1:]):
                conversion.names[f"messages[{len(messages) - 1}]"] = sent_place
                messages[-1]["content"] = content
                return
            conversion.names[place] = sent_place
            messages.append({"role": item.raw("role"), "content": content})
        case "function_call" | "custom_tool_call" as kind:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            calls = messages[-1].setdefault("tool_calls", [])
            place = f"messages[{len(messages) - 1}].tool_calls[{len(calls)}]"
            conversion.names[place] = sent_place
            name = _known_name(conversion, item.raw("namespace"), item.raw("name"))
            call_id = {"id": item.raw("call_id")}
            conversion.names[f"{place}.id"] = f"{sent_place}.call_id"
            if kind == "custom_tool_call":
                conversion.names[f"{place}.custom"] = sent_place
                custom = {"name": name, CUSTOM_INPUT: item.raw("input")}
                calls.append({**call_id, "type": "custom", "custom": custom})
            else:
                conversion.names[f"{place}.function"] = sent_place
                function = {"name": name, "arguments": item.raw("arguments")}
                calls.append({**call_id, "type": "function", "function": function})
        case "function_call_output" | "custom_tool_call_output":
            conversion.names[place] = sent_place
            conversion.names[f"{place}.tool_call_id"] = f"{sent_place}.call_id"
            conversion.names[f"{place}.content"] = f"{sent_place}.output"
            output = {
                "tool_call_id": item.raw("call_id"),
                "content": _convert_parts(item, "output"),
            }
            messages.append({"role": "tool", **output})
        case "reasoning":
            parts = [*item.sections("content"), *item.sections("summary")]
            thought = "".join(part.text("text") or "" for part in parts[:MAX_FUNCTIONS])
            if thought:
                messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
        case "item_reference":
            why = "is 'item_reference', but nothing is kept here: send the item itself"
            raise item.error("type", why, "unsupported_parameter")
        case str() as kind:
            conversion.left_out.append(f"input.{kind}")
        case kind:
            raise item.error("type", f"is {shown_value(kind)}, but must be text")


def _is_thought(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last message has nothing but a thought."""
    return any(
        one.get("reasoning_content") and not one["content"] and "tool_calls" not in one
        for one in messages
    )


def _convert_parts(item: Fields, name: str) -> Any:
    value = item.raw(name)
    if not isinstance(value, list):
        return value
    return [_convert_part(part) for part in item.sections(name)]


def _convert_part(part: Fields) -> Mapping[str, Any]:
    """Return a part of a content as the chat API has it. Raises ``ApiError``."""
    kind = part.raw("type")
    if kind in _TEXT_PARTS:
        return {**part.data, "type": "text"}
    if kind == _PICTURE_PART:
        if part.raw("file_id"):
            why = "is given, but no files are stored here: send the picture as a data URL"
            raise part.error("file_id", why, "unsupported_parameter")
        return {"type": "image_url", "image_url": part.raw("image_url")}
    return part.data
