"""``/v1/responses`` as far as it keeps nothing: its request becomes one for a chat, and the chat's
answer is written in its own JSON and events.

What would need a memory here (``previous_response_id``, ``conversation``, ``background``) is
refused by name. An item is a message of text or a call of a function.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from edgespec.endpoint.answer import Choice, Delta, Envelope, Json
from edgespec.endpoint.request_json import ApiError, Fields, shown
from edgespec.endpoint.tool_calls import ToolCall

_KEEPS: Final = ("previous_response_id", "conversation", "background", "prompt")
_OURS: Final = frozenset("input instructions max_output_tokens text tools tool_choice".split())
_SAID: Final = ("input_text", "output_text", "text")
_LEFT_OUT: Final = frozenset("include reasoning truncation top_logprobs stream_options".split())


def as_chat(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same as a request for a chat. Raises ``ApiError``."""
    fields = Fields(data)
    for name in _KEEPS:
        if data.get(name):
            why = "is given, but nothing is kept here: send the whole input"
            raise fields.error(name, why, "unsupported_parameter")
    chat = {name: value for name, value in data.items() if name not in _OURS | _LEFT_OUT}
    instructions = fields.text("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] = system + _messages(fields)
    chat["max_completion_tokens"] = data.get("max_output_tokens")
    if (text := fields.section("text")).raw("format") is not None:
        form = text.section("format")
        kind = form.raw("type")
        inner = {"json_schema": {"schema": form.raw("schema")}} if kind == "json_schema" else {}
        chat["response_format"] = {"type": kind, **inner}
    if (effort := fields.section("reasoning").raw("effort")) is not None:
        chat["reasoning_effort"] = effort
    given = [dict(one.data) for one in fields.sections("tools")]
    chat["tools"] = [{"type": one.pop("type", None), "function": one} for one in given]
    choice = data.get("tool_choice")
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    chat["tool_choice"] = choice
    return chat


def _messages(fields: Fields) -> list[Json]:
    value = fields.raw("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    found: list[Json] = []
    for item in fields.sections("input"):
        match item.raw("type"):
            case None | "message":
                found.append({"role": item.raw("role"), "content": _content(item)})
            case "function_call":
                function = {"name": item.raw("name"), "arguments": item.raw("arguments")}
                call = {"id": item.raw("call_id"), "type": "function", "function": function}
                if not found or "tool_calls" not in found[-1]:
                    found.append({"role": "assistant", "tool_calls": []})
                found[-1]["tool_calls"].append(call)
            case "function_call_output":
                called = item.raw("call_id")
                found.append(
                    {"role": "tool", "tool_call_id": called, "content": _content(item, "output")}
                )
            case "reasoning":
                continue
            case kind:
                raise item.error("type", f"is {shown(kind)}, which no model here reads")
    return found


def _content(item: Fields, name: str = "content") -> Any:
    value = item.raw(name)
    if not isinstance(value, list):
        return value
    return [
        {**part.data, "type": "text"} if part.raw("type") in _SAID else part.data
        for part in item.sections(name)
    ]


@dataclass(slots=True)
class ResponseEnvelope(Envelope):
    prefix = "resp_"
    _number: int = 2
    """Of the next event; the first two open the stream, and are made when it begins to be sent."""
    _items: list[Json] = field(default_factory=list)
    """Those of a stream, the last of which may be open."""
    _open: bool = False

    def opening(self, choices: Sequence[Choice]) -> bytes:
        begun = self._response("in_progress", [], None)
        kinds = ("response.created", "response.in_progress")
        return b"".join(_event(kind, place, response=begun) for place, kind in enumerate(kinds))

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        return b"".join(
            self._text(part) if isinstance(part, str) else self._call(part) for part in delta.parts
        )

    def closing(self, choice: Choice) -> bytes:
        return self._end_text()

    def ending(self, choices: Sequence[Choice], usage: Json) -> bytes:
        (choice,) = choices
        whole = self._ended(choice, self._items, usage)
        return self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> bytes:
        said = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", **said)

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        (choice,) = choices
        items = [_message(choice.text, "completed")] if choice.text or not choice.calls else []
        return self._ended(choice, [*items, *(_function_call(one) for one in choice.calls)], usage)

    def _text(self, text: str) -> bytes:
        said = b""
        if not self._open:
            self._open = True
            self._items.append(item := _message("", "in_progress"))
            part, empty = item["content"][0], {**item, "content": []}
            said += self._event("response.output_item.added", output_index=self._last, item=empty)
            said += self._event("response.content_part.added", **self._place(), part=part)
        item = self._items[-1]
        item["content"] = [_part(item["content"][0]["text"] + text)]
        more = {"delta": text, "logprobs": []}
        return said + self._event("response.output_text.delta", **self._place(), **more)

    def _end_text(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        item = self._items[-1] = {**self._items[-1], "status": "completed"}
        part = item["content"][0]
        text = {"text": part["text"], "logprobs": []}
        said = self._event("response.output_text.done", **self._place(), **text)
        said += self._event("response.content_part.done", **self._place(), part=part)
        return said + self._event("response.output_item.done", output_index=self._last, item=item)

    def _call(self, call: ToolCall) -> bytes:
        said = self._end_text()
        self._items.append(item := _function_call(call))
        at: Json = {"output_index": self._last}
        whole, which = call.arguments, {**at, "item_id": item["id"]}
        begun = {**item, "status": "in_progress", "arguments": ""}
        said += self._event("response.output_item.added", **at, item=begun)
        said += self._event("response.function_call_arguments.delta", **which, delta=whole)
        done = {"name": call.name, "arguments": whole}
        said += self._event("response.function_call_arguments.done", **which, **done)
        return said + self._event("response.output_item.done", **at, item=item)

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": self._last, "content_index": 0}

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return _event(kind, self._number - 1, **data)

    def _ended(self, choice: Choice, items: list[Json], usage: Json) -> Json:
        status = "incomplete" if choice.finish == "length" else "completed"
        return self._response(status, items, usage)

    def _response(self, status: str, items: list[Json], usage: Json | None) -> Json:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self.model,
            "output": items,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage and _usage(usage),
        }


def _event(kind: str, number: int, **data: Any) -> bytes:
    said = json.dumps({"type": kind, "sequence_number": number, **data}, ensure_ascii=False)
    return f"event: {kind}\ndata: {said}\n\n".encode()


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        "edgespec": usage["edgespec"],
    }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(text: str, status: str) -> Json:
    kind = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
    return {**kind, "status": status, "content": [_part(text)]}


def _function_call(call: ToolCall) -> Json:
    return {
        "type": "function_call",
        "id": f"fc_{secrets.token_hex(12)}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }
