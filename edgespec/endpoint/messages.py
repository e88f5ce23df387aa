"""Anthropic's Messages API: its requests as chat requests, and its JSON for responses, for the
events of a stream and for errors.

Pictures become parts of a chat's content. A picture in the result of a tool follows it in a message
of the user, because chat templates have no place for pictures in results. Other blocks that are no
text are refused by name. Tools and blocks that
only the service of another provider can run are left out and reported. ``cache_control`` has no
effect, because a prompt's cache is kept anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgespec.endpoint.choices import Choice, Delta, Envelope, Json, arguments_object
from edgespec.endpoint.output_parser import Part
from edgespec.endpoint.request_json import ApiError, Fields, compact_json, shown_value
from edgespec.endpoint.requests import MAX_FUNCTIONS, ChatConversion
from edgespec.endpoint.thoughts import Thought
from edgespec.endpoint.tool_calls import CallArguments, ToolCall
from edgespec.telemetry.logs import request_id

_CONVERTED: Final = frozenset(
    "messages system tools tool_choice stop_sequences thinking output_config output_format".split()
)
_UNUSED: Final = frozenset(
    "cache_control inference_geo diagnostics speed betas billing_policy fallbacks"
    " fallback_credit_token user_profile_id workspace_id".split()
)
"""Parameters that do not change the output here."""
_ROLES: Final = ("user", "assistant", "system")
"""Roles of messages. Claude Code sends messages of the system among the others."""
_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_THOUGHTS_WANTED: Final = {
    "enabled": True,
    "disabled": False,
    "adaptive": None,
    "between_tools": None,
}
"""Kinds of ``thinking``, with the value of ``enable_thinking``. None: the template decides."""
_OMITTED: Final = "omitted"
_DISPLAYS: Final = ("summarized", _OMITTED)
"""Values of ``thinking.display``. Thoughts are not summarised here, so the first one shows them
whole."""
_EFFORTS: Final = {"xhigh": "high", "max": "high"}
"""Efforts that templates do not know, with the highest one that they know."""
_HOSTED_RESULT: Final = "_tool_result"
"""End of the name of a block with the result of a tool that another service ran."""
_HOSTED_BLOCKS: Final = ("server_tool_use", "mcp_tool_use", "tool_reference", "redacted_thinking")
_SIGNATURE: Final = "edgespec"
"""Signature of thinking blocks. Clients send it back with the thought, and nothing reads it."""
_SEPARATOR: Final = "\n"
"""Separator between the text blocks of a message."""
_PICTURE: Final = "image"
"""Kind of a block that is a picture."""
_SENT_NAME: Final = "sent_name"
"""Key of the name of a picture's block, until its place in the chat is known."""
Content = str | list[Json]
"""A text, or parts of a chat's content."""


# --- requests -------------------------------------------------------------------------------------


def convert_message_request(
    data: Mapping[str, Any], *, needs_length: bool = True
) -> ChatConversion:
    """Return a request for a message as a chat request. ``needs_length``: ``max_tokens`` must be
    given. Raises ``ApiError``."""
    fields = Fields(data)
    if needs_length and fields.raw("max_tokens") is None:
        raise fields.error("max_tokens", "is missing, but limits the tokens of the answer")
    if fields.sections("mcp_servers"):
        why = "are given, but nothing here connects to them"
        raise fields.error("mcp_servers", why, "unsupported_parameter")
    if fields.raw("thread") is not None:
        why = "is given, but no thread is kept here: send all messages"
        raise fields.error("thread", why, "unsupported_parameter")
    chat = {name: value for name, value in data.items() if name not in _CONVERTED | _UNUSED}
    chat.pop("mcp_servers", None)
    conversion = ChatConversion(chat, {"prompt": "messages"})
    if (stops := fields.raw("stop_sequences")) is not None:
        conversion.names["stop"] = "stop_sequences"
        chat["stop"] = stops
    _convert_tools(conversion, fields)
    _convert_tool_choice(conversion, fields)
    _convert_thinking(conversion, fields)
    _convert_output(conversion, fields)
    messages = chat["messages"] = list[Json]()
    if system := _read_texts(conversion, fields, "system"):
        conversion.names["messages[0].content"] = "system"
        messages.append({"role": "system", "content": system})
    count_before = len(messages)
    for message in fields.sections("messages"):
        _add_message(conversion, message)
    if len(messages) == count_before:
        raise fields.error("messages", "must hold at least one message")
    return conversion


def _convert_tools(conversion: ChatConversion, fields: Fields) -> None:
    tools = conversion.chat["tools"] = list[Json]()
    for tool in fields.sections("tools", MAX_FUNCTIONS):
        kind = tool.raw("type")
        if kind not in (None, "custom"):
            conversion.left_out.append(f"tools.{tool.text('type')}")
            continue
        if tool.raw("input_schema") is None:
            raise tool.error("input_schema", "is missing")
        sent_place, place = tool.place.removesuffix("."), f"tools[{len(tools)}]"
        conversion.names |= {
            place: sent_place,
            f"{place}.function": sent_place,
            f"{place}.function.parameters": f"{sent_place}.input_schema",
        }
        function = {
            "name": tool.raw("name"),
            "description": tool.text("description") or "",
            "parameters": tool.raw("input_schema"),
            "strict": tool.boolean("strict"),
        }
        tools.append({"type": "function", "function": function})


def _convert_tool_choice(conversion: ChatConversion, fields: Fields) -> None:
    if fields.raw("tool_choice") is None:
        return
    choice = fields.section("tool_choice")
    kind = choice.text("type")
    if kind == "tool":
        name = choice.text("name")
        conversion.chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind is not None and kind in _TOOL_CHOICES:
        conversion.chat["tool_choice"] = _TOOL_CHOICES[kind]
    else:
        raise choice.wrong_value("type", kind, "'auto', 'any', 'tool' or 'none'")
    if choice.boolean("disable_parallel_tool_use"):
        conversion.chat["parallel_tool_calls"] = False


def _convert_thinking(conversion: ChatConversion, fields: Fields) -> None:
    if fields.raw("thinking") is None:
        return
    thinking = fields.section("thinking")
    kind = thinking.text("type")
    if kind is None or kind not in _THOUGHTS_WANTED:
        known = ", ".join(map(repr, _THOUGHTS_WANTED))
        raise thinking.wrong_value("type", kind, f"one of {known}")
    display = thinking.text("display")
    if display not in (None, *_DISPLAYS):
        known = ", ".join(map(repr, _DISPLAYS))
        raise thinking.wrong_value("display", display, f"one of {known}")
    conversion.hides_thoughts = display == _OMITTED
    if (is_wanted := _THOUGHTS_WANTED[kind]) is not None:
        conversion.names["chat_template_kwargs.enable_thinking"] = "thinking"
        variables = fields.section("chat_template_kwargs").data
        conversion.chat["chat_template_kwargs"] = {**variables, "enable_thinking": is_wanted}
    if thinking.raw("budget_tokens") is not None:
        conversion.names["thinking_token_budget"] = "thinking.budget_tokens"
        conversion.chat["thinking_token_budget"] = thinking.raw("budget_tokens")


def _convert_output(conversion: ChatConversion, fields: Fields) -> None:
    """Convert ``output_config``, and ``output_format``, which is an older name of its format."""
    output = fields.section("output_config")
    if (effort := output.text("effort")) is not None:
        conversion.names["reasoning_effort"] = "output_config.effort"
        conversion.chat["reasoning_effort"] = _EFFORTS.get(effort, effort)
    for parent, name in ((output, "format"), (fields, "output_format")):
        if parent.raw(name) is None:
            continue
        form = parent.section(name)
        if form.raw("type") != "json_schema":
            raise form.wrong_value("type", form.raw("type"), "'json_schema'")
        for ours in ("response_format", "response_format.json_schema"):
            conversion.names[ours] = parent.name(name)
        inner = {"schema": form.raw("schema")}
        conversion.chat["response_format"] = {"type": "json_schema", "json_schema": inner}


def _add_message(conversion: ChatConversion, message: Fields) -> None:
    role = message.raw("role")
    if role not in _ROLES:
        raise message.wrong_value("role", role, "'user' or 'assistant'")
    content = message.raw("content")
    if not isinstance(content, list):
        if (text := message.text("content")) is None:
            raise message.error("content", "is missing")
        _append(conversion, message, {"role": role, "content": text})
    elif role == "assistant":
        _add_assistant_message(conversion, message)
    else:
        _add_blocks(conversion, message, role)


def _append(conversion: ChatConversion, sent: Fields, message: Json) -> None:
    messages = conversion.chat["messages"]
    conversion.names[f"messages[{len(messages)}]"] = sent.place.removesuffix(".")
    messages.append(message)


def _add_blocks(conversion: ChatConversion, message: Fields, role: str) -> None:
    """Add a message of the user or of the system: its texts, and results of tools as messages of
    their own."""
    contents = list[Content]()
    for block in message.sections("content"):
        kind = block.raw("type")
        if kind == "tool_result":
            if contents:
                _append_contents(conversion, message, role, contents)
                contents = []
            pictures = list[Content]()
            _append(conversion, block, _tool_result(conversion, block, pictures))
            contents += pictures  # chat templates have no place for them in a result
        elif kind == _PICTURE:
            contents.append(_picture_content(block))
        elif (text := _block_text(conversion, block)) is not None:
            contents.append(text)
    if contents:
        _append_contents(conversion, message, role, contents)


def _append_contents(
    conversion: ChatConversion, message: Fields, role: str, contents: Sequence[Content]
) -> None:
    """Add a message with these texts and pictures."""
    joined = list[Json]()
    for one in contents:
        if not isinstance(one, str):
            joined += one
        # Neighbouring texts are one text, as in a message without pictures.
        elif joined and joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": f"{joined[-1]['text']}{_SEPARATOR}{one}"}
        else:
            joined.append({"type": "text", "text": one})
    is_text = len(joined) == 1 and joined[0]["type"] == "text"
    place = f"messages[{len(conversion.chat['messages'])}]"
    for number, part in enumerate(joined):
        if part["type"] != "text":
            sent = part.pop(_SENT_NAME)
            conversion.names[f"{place}.content[{number}]"] = sent
            conversion.names[f"{place}.content[{number}].image_url.url"] = f"{sent}.source"
    content = joined[0]["text"] if is_text else joined
    _append(conversion, message, {"role": role, "content": content})


def _picture_content(block: Fields) -> list[Json]:
    """Return a block of the kind ``image`` as a part of a chat's content, with the name of the
    block. Raises ``ApiError``."""
    source = block.section("source")
    match source.raw("type"):
        case "base64":
            if not (data := source.text("data")):
                raise source.error("data", "is missing, but must be a picture in base64")
            url = f"data:{source.text('media_type') or 'image'};base64,{data}"
        case "url":
            if not (url := source.text("url") or ""):
                raise source.error("url", "is missing, but must be the URL of a picture")
        case kind:
            raise source.wrong_value("type", kind, "'base64' or 'url'")
    name = block.place.removesuffix(".")
    return [{"type": "image_url", "image_url": {"url": url}, _SENT_NAME: name}]


def _tool_result(conversion: ChatConversion, block: Fields, pictures: list[Content]) -> Json:
    """Return the result of a tool as a message, and add its pictures to ``pictures``."""
    text = _read_texts(conversion, block, "content", pictures)
    if not text and block.boolean("is_error"):
        text = "error"
    if (identity := block.text("tool_use_id")) is None:
        raise block.error("tool_use_id", "is missing")
    return {"role": "tool", "tool_call_id": identity, "content": text}


def _add_assistant_message(conversion: ChatConversion, message: Fields) -> None:
    place = f"messages[{len(conversion.chat['messages'])}]"
    texts, thoughts, calls = list[str](), list[str](), list[Json]()
    for block in message.sections("content"):
        match block.raw("type"):
            case "thinking":
                thoughts.append(block.text("thinking") or "")
            case "tool_use":
                call_place, sent_place = f"{place}.tool_calls[{len(calls)}]", block.place[:-1]
                conversion.names |= {
                    call_place: sent_place,
                    f"{call_place}.function": sent_place,
                    f"{call_place}.function.arguments": f"{sent_place}.input",
                }
                arguments = block.section("input").data
                function = {"name": block.raw("name"), "arguments": arguments}
                calls.append({"id": block.text("id"), "type": "function", "function": function})
            case _:
                if (text := _block_text(conversion, block)) is not None:
                    texts.append(text)
    # The texts are the model's own, and the prompt repeats them as they were generated.
    turn: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        turn["reasoning_content"] = _SEPARATOR.join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    _append(conversion, message, turn)


def _read_texts(
    conversion: ChatConversion, fields: Fields, name: str, pictures: list[Content] | None = None
) -> str:
    """Return a field that is a text, or a list of text blocks; empty if it is absent. Pictures
    among the blocks are added to ``pictures``, if that is a list."""
    if not isinstance(fields.raw(name), list):
        return fields.text(name) or ""
    texts = list[str | None]()
    for block in fields.sections(name):
        if pictures is not None and block.raw("type") == _PICTURE:
            pictures.append(_picture_content(block))
        else:
            texts.append(_block_text(conversion, block))
    return _SEPARATOR.join(text for text in texts if text is not None)


def _block_text(conversion: ChatConversion, block: Fields) -> str | None:
    """Return the text of a block. None: another service's block, which is left out. Raises
    ``ApiError`` for a block that is no text."""
    kind = block.text("type")
    if kind is not None and (kind in _HOSTED_BLOCKS or kind.endswith(_HOSTED_RESULT)):
        conversion.left_out.append(f"messages.{kind}")
        return None
    if kind != "text":
        known = "text, and pictures in messages of users"
        raise block.error("type", f"is {shown_value(kind)}, but is read as {known} only")
    if (text := block.text("text")) is None:
        raise block.error("text", "is missing")
    return text


# --- responses ------------------------------------------------------------------------------------


@dataclass(slots=True)
class MessageEnvelope(Envelope):
    """JSON of ``/v1/messages``."""

    prefix = "msg_"
    hides_thoughts: bool = False
    """Whether the text of thinking blocks is left out."""
    _open_kind: str = ""
    """Kind of the block that is open; empty if none is."""
    _block_count: int = 0
    """Number of blocks that have begun."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        usage = _usage(choice.prompt_tokens, 0)
        return _event("message_start", message=self._message([], None, None, usage))

    def keep_alive(self) -> bytes:
        return _event("ping")

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        return b"".join(map(self._part, delta.parts))

    def closing(self, choice: Choice) -> bytes:
        return self._end_block()

    def ending(self, choices: Sequence[Choice], usage: Json) -> bytes:
        (choice,) = choices
        end = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stop or None}
        return _event("message_delta", delta=end, usage=_usage_of(usage)) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return f"event: error\ndata: {compact_json(error_reply(error)[1])}\n\n".encode()

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        (choice,) = choices
        content = [_block(one, hides_thoughts=self.hides_thoughts) for one in choice.items]
        reason, stop = _stop_reason(choice), choice.stop or None
        return self._message(content, reason, stop, _usage_of(usage))

    def _part(self, part: Part) -> bytes:
        if isinstance(part, str):
            return self._begin_block("text", text="") + self._delta("text_delta", text=part)
        if isinstance(part, Thought):
            begin = self._begin_block("thinking", thinking="", signature="")
            if self.hides_thoughts:
                return begin
            return begin + self._delta("thinking_delta", thinking=part.text)
        if isinstance(part, CallArguments):
            return self._delta("input_json_delta", partial_json=part.text)
        ended = self._end_block()
        begin = self._begin_block("tool_use", id=part.id, name=part.name, input={})
        return ended + begin + self._delta("input_json_delta", partial_json=part.arguments)

    def _begin_block(self, kind: str, **data: Any) -> bytes:
        """Return the events that open a block, unless one of this kind is open already."""
        if self._open_kind == kind:
            return b""
        ended = self._end_block()
        self._open_kind = kind
        self._block_count += 1
        block = {"type": kind, **data}
        index = self._block_count - 1
        return ended + _event("content_block_start", index=index, content_block=block)

    def _end_block(self) -> bytes:
        if not self._open_kind:
            return b""
        kind, self._open_kind = self._open_kind, ""
        signature = b""
        if kind == "thinking":
            signature = self._delta("signature_delta", signature=_SIGNATURE)
        return signature + _event("content_block_stop", index=self._block_count - 1)

    def _delta(self, kind: str, **data: Any) -> bytes:
        delta = {"type": kind, **data}
        return _event("content_block_delta", index=self._block_count - 1, delta=delta)

    def _message(
        self, content: list[Json], reason: str | None, stop: str | None, usage: Json
    ) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def _event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\ndata: {compact_json({'type': kind, **data})}\n\n".encode()


def _block(part: Part, *, hides_thoughts: bool) -> Json:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Thought):
        text = "" if hides_thoughts else part.text
        return {"type": "thinking", "thinking": text, "signature": _SIGNATURE}
    assert isinstance(part, ToolCall)  # a choice has whole calls
    arguments = arguments_object(part)
    # A call that was cut off has no arguments yet; ``stop_reason`` says so.
    use = {"type": "tool_use", "id": part.id, "name": part.name}
    return {**use, "input": {} if arguments is None else arguments}


def _stop_reason(choice: Choice) -> str:
    if choice.finish == "tool_calls":
        return "tool_use"
    if choice.finish == "length":
        is_full = choice.tokens < (choice.request.max_tokens or 0)
        return "model_context_window_exceeded" if is_full else "max_tokens"
    return "stop_sequence" if choice.stop else "end_turn"


def _usage(input_tokens: int, output_tokens: int) -> Json:
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _usage_of(usage: Json) -> Json:
    thinking = usage["completion_tokens_details"]["reasoning_tokens"]
    return {
        **_usage(usage["prompt_tokens"], usage["completion_tokens"]),
        "output_tokens_details": {"thinking_tokens": thinking},
        "edgespec": usage["edgespec"],
    }


def model_page(models: Sequence[Json], created_at: str) -> Json:
    """Return what Anthropic's list of models adds to OpenAI's, given the models in OpenAI's form.
    ``created_at`` is a time in RFC 3339."""
    data = [
        {**one, "type": "model", "display_name": one["id"], "created_at": created_at}
        for one in models
    ]
    return {
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


# --- errors ---------------------------------------------------------------------------------------


OVERLOADED: Final = 529
_OVERLOAD_CODES: Final = frozenset(
    "queue_full bodies_full too_slow grammar_busy too_many_connections".split()
)
"""Codes of errors that say that there is too much to do. Anthropic's API has a status of its own
for them."""
_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    OVERLOADED: "overloaded_error",
}


def error_reply(error: ApiError) -> tuple[int, Json]:
    """Return the status and the body of an error."""
    status = OVERLOADED if error.code in _OVERLOAD_CODES else error.status
    usual = "api_error" if status >= 500 else "invalid_request_error"
    message = error.body["error"]["message"]
    if error.code == "context_length_exceeded":
        # Agents that shorten their conversation look for these words.
        message = f"prompt is too long: {message}"
    inner = {"type": _ERROR_TYPES.get(status, usual), "message": message}
    return status, {"type": "error", "error": inner, "request_id": request_id.get()}
