"""Ollama's API: its requests as chat or completion requests, and its JSON for responses, for the
lines of a stream, for models and for errors.

Options about how a model is loaded have no effect, because the verifiers have loaded it. Options
that would change the output are applied or refused by name. An option that a request leaves out
comes from the model or the device, as for the other APIs, and not from Ollama's own defaults.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from edgespec.core.protocol.pictures import MAX_PICTURES
from edgespec.endpoint.choices import (
    Choice,
    Delta,
    Envelope,
    Json,
    arguments_object,
    chat_scores,
)
from edgespec.endpoint.request_json import ApiError, Fields, compact_json
from edgespec.endpoint.requests import ChatConversion
from edgespec.endpoint.thoughts import Thought, thought_format
from edgespec.endpoint.tool_calls import CallArguments, ToolCall

VERSION: Final = "0.13.0"
"""Version of Ollama whose API this is. Clients refuse to work with a version that is too old."""
NDJSON: Final = "application/x-ndjson"
_CONVERTED: Final = frozenset(
    "messages prompt system suffix template context raw images format options think".split()
)
_UNUSED: Final = frozenset("keep_alive truncate shift".split())
"""Parameters that do not change the output here."""
_PASSED_OPTIONS: Final = frozenset(
    "temperature top_k top_p min_p seed stop presence_penalty frequency_penalty repeat_penalty"
    " repeat_last_n typical_p tfs_z mirostat".split()
)
"""Options that are parameters of a chat request under the same name."""
_UNUSED_OPTIONS: Final = frozenset(
    "num_ctx num_batch num_gpu main_gpu num_thread num_keep numa low_vram f16_kv logits_all"
    " vocab_only use_mmap use_mlock embedding_only mirostat_tau mirostat_eta".split()
)
"""Options about how a model is loaded, or about methods that are refused where they are used."""
_ROLES: Final = ("system", "user", "assistant", "tool")
_NO_END: Final = "9999-12-31T23:59:59Z"
"""Time at which a model is unloaded, which never happens here."""


# --- requests -------------------------------------------------------------------------------------


def convert_ollama_chat(data: Mapping[str, Any]) -> ChatConversion:
    """Return a request of ``/api/chat`` as a chat request. Raises ``ApiError``."""
    fields = Fields(data)
    conversion = _convert_common(data, fields)
    messages = conversion.chat["messages"] = list[Json]()
    unanswered = list[Json]()
    for message in fields.sections("messages"):
        messages.append(_convert_message(conversion, message, unanswered, len(messages)))
    if tools := fields.sections("tools"):
        conversion.chat["tools"] = [{"type": "function", **tool.data} for tool in tools]
    return conversion


def convert_ollama_generate(data: Mapping[str, Any]) -> ChatConversion:
    """Return a request of ``/api/generate`` as a chat request or, if it is ``raw``, as a completion
    request. Raises ``ApiError``.

    With a ``suffix`` it is a completion too, whose output stands between both texts."""
    fields = Fields(data)
    conversion = _convert_common(data, fields)
    is_raw, prompt = fields.boolean("raw"), fields.text("prompt") or ""
    system, suffix = fields.text("system"), fields.text("suffix")
    if fields.text("template"):
        why = "is given, but the chat template is the model's own: send the text as a raw prompt"
        raise fields.error("template", why, "unsupported_parameter")
    if fields.raw("context"):
        why = "is given, but no tokens of earlier requests are read: use /api/chat"
        raise fields.error("context", why, "unsupported_parameter")
    if is_raw or suffix:
        if fields.raw("images"):
            why = "are given, but a raw prompt or one with a suffix has no template to place them"
            raise fields.error("images", why, "unsupported_parameter")
        if system:
            kind = "prompt with a suffix" if suffix else "raw prompt"
            raise fields.error("system", f"is given, but a {kind} has no template to hold it")
        conversion.names["prompt"] = "prompt"
        conversion.chat |= {"prompt": prompt, "suffix": suffix}
        return conversion
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    conversion.names |= {"prompt": "prompt", "messages": "prompt"}
    content = _with_pictures(conversion, fields, prompt, len(messages))
    conversion.chat["messages"] = [*messages, {"role": "user", "content": content}]
    return conversion


def _convert_common(data: Mapping[str, Any], fields: Fields) -> ChatConversion:
    """Return a conversion with everything but the prompt."""
    if not fields.text("model"):
        raise fields.error("model", "is missing")
    chat = {name: value for name, value in data.items() if name not in _CONVERTED | _UNUSED}
    conversion = ChatConversion(chat, {"prompt": "messages"})
    chat["stream"] = fields.boolean("stream", absent=True)
    options = fields.section("options")
    for name, value in options.data.items():
        conversion.names[name] = f"options.{name}"
        if name in _PASSED_OPTIONS:
            chat[name] = value
        elif name == "num_predict":
            length = options.integer(name, -(1 << 31), (1 << 63) - 1)
            chat["max_tokens"] = length if length is None or length > 0 else -1
        elif name not in _UNUSED_OPTIONS:
            conversion.left_out.append(f"options.{name}")
    conversion.names |= {
        "max_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
    }
    _convert_format(conversion, fields)
    _convert_think(conversion, fields)
    return conversion


def _with_pictures(
    conversion: ChatConversion, fields: Fields, text: str, place: int
) -> str | list[Json]:
    """Return the content of the message at ``place``: ``text``, with the field ``images`` in front
    of it, as Ollama has them. Raises ``ApiError``."""
    images = fields.texts("images", MAX_PICTURES) if fields.raw("images") else ()
    if not images:
        return text
    parts = list[Json]()
    for number, image in enumerate(images):
        url = image if image.startswith("data:") else f"data:image;base64,{image}"
        part = f"messages[{place}].content[{number}]"
        sent = fields.name(f"images[{number}]")
        conversion.names |= {part: sent, f"{part}.image_url.url": sent}
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [*parts, {"type": "text", "text": text}]


def _convert_format(conversion: ChatConversion, fields: Fields) -> None:
    form = fields.raw("format")
    for name in ("response_format", "response_format.json_schema"):
        conversion.names[name] = "format"
    if form == "json":
        conversion.chat["response_format"] = {"type": "json_object"}
    elif isinstance(form, dict):
        inner = {"schema": form}
        conversion.chat["response_format"] = {"type": "json_schema", "json_schema": inner}
    elif form not in (None, ""):
        raise fields.wrong_value("format", form, "'json' or a JSON schema")


def _convert_think(conversion: ChatConversion, fields: Fields) -> None:
    """Convert ``think``: whether the model should think, or how hard."""
    think = fields.raw("think")
    if think in (None, ""):
        return
    if not isinstance(think, bool | str):
        raise fields.wrong_value("think", think, "true, false or an effort such as 'low'")
    chat = conversion.chat
    conversion.names |= dict.fromkeys(
        ("reasoning_effort", "chat_template_kwargs.enable_thinking"), "think"
    )
    if isinstance(think, str):
        chat["reasoning_effort"] = think
    variables = fields.section("chat_template_kwargs").data
    chat["chat_template_kwargs"] = {**variables, "enable_thinking": bool(think)}


def _convert_message(
    conversion: ChatConversion, message: Fields, unanswered: list[Json], place: int
) -> Json:
    """Return a message in the form of a chat. ``unanswered`` are earlier calls without a result;
    ``place`` is the index of the message.

    Ollama's clients may send calls without ids. Such calls get ids here, because some templates
    need them, and results of tools get the ids of their calls."""
    role = message.raw("role")
    if role not in _ROLES:
        raise message.wrong_value("role", role, f"one of {', '.join(_ROLES)}")
    text = message.text("content") or ""
    content = _with_pictures(conversion, message, text, place)
    chat_message: Json = {"role": role, "content": content}
    if thought := message.text("thinking"):
        chat_message["reasoning_content"] = thought
    if calls := message.sections("tool_calls"):
        unanswered[:] = chat_message["tool_calls"] = [
            {
                "id": call.text("id") or f"call_{place}_{number}",
                "type": "function",
                "function": call.section("function").data,
            }
            for number, call in enumerate(calls)
        ]
    if role == "tool":
        name = message.text("tool_name") or message.text("name")
        call_id = message.text("tool_call_id")
        named = [one for one in unanswered if name in (None, one["function"].get("name"))]
        answered = next((one for one in named if call_id in (None, one["id"])), None)
        if answered is not None:
            unanswered.remove(answered)
            call_id = answered["id"]
        chat_message |= {"name": name, "tool_call_id": call_id}
    return chat_message


# --- responses ------------------------------------------------------------------------------------


@dataclass(slots=True)
class OllamaEnvelope(Envelope):
    """JSON that ``/api/chat`` and ``/api/generate`` share. A stream has one object a line."""

    prefix = ""
    content_type = NDJSON
    _call: ToolCall | None = None
    """Call whose arguments may still grow. A line has whole calls only."""
    _called: int = 0
    """Number of calls streamed so far."""

    @abstractmethod
    def part(self, text: str, thought: str = "", calls: Sequence[Json] = ()) -> Json:
        """Return the fields with generated text, thought and calls."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return self._line(self._object(self.part("")))

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        lines = list[Json]()
        for part in delta.parts:
            if isinstance(part, CallArguments):
                assert self._call is not None
                whole = self._call.arguments + part.text
                self._call = replace(self._call, arguments=whole)
                continue
            lines += self._take_call()
            if isinstance(part, str):
                lines.append(self._object(self.part(part)))
            elif isinstance(part, Thought):
                lines.append(self._object(self.part("", part.text)))
            else:
                self._call = part
        if delta.scores:
            lines = lines or [self._object(self.part(""))]
            lines[0]["logprobs"] = chat_scores(choice, delta.scores)["content"]
        return b"".join(map(self._line, lines))

    def closing(self, choice: Choice) -> bytes:
        return b"".join(map(self._line, self._take_call()))

    def _take_call(self) -> list[Json]:
        """Return the object with the call that is complete now, if there is one."""
        if (call := self._call) is None:
            return []
        self._call = None
        calls = _calls([call], self._called)
        self._called += len(calls)
        return [self._object(self.part("", calls=calls))] if calls else []

    def ending(self, choices: Sequence[Choice], usage: Json) -> bytes:
        return self._line(self._object(self.part("")) | self._end(choices, usage))

    def failed(self, error: ApiError) -> bytes:
        return self._line(error_reply(error)[1])

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        if not choices:
            return self._object(self.part("")) | self._end(choices, usage)
        (choice,) = choices
        whole = self._object(self.part(choice.text, choice.thought, _calls(choice.calls)))
        if choice.request.logprobs is not None:
            whole["logprobs"] = chat_scores(choice, choice.scores)["content"]
        return whole | self._end(choices, usage)

    def _object(self, part: Json) -> Json:
        return {"model": self.model, "created_at": time_text(), **part, "done": False}

    def _end(self, choices: Sequence[Choice], usage: Json) -> Json:
        """Return what the last object adds. A request without choices only loads the model."""
        if not choices:
            return {"done": True, "done_reason": "load"}
        now_s = time.monotonic()
        first_s = now_s if self.first_token_at_s is None else self.first_token_at_s
        return {
            "done": True,
            "done_reason": "length" if choices[0].finish == "length" else "stop",
            "total_duration": _nanoseconds(now_s - self.prepared_at_s),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first_s - self.prepared_at_s),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(now_s - first_s),
            "edgespec": usage["edgespec"],
        }

    def _line(self, data: Json) -> bytes:
        return compact_json(data).encode() + b"\n"


class OllamaChatEnvelope(OllamaEnvelope):
    """JSON of ``/api/chat``."""

    __slots__ = ()

    def part(self, text: str, thought: str = "", calls: Sequence[Json] = ()) -> Json:
        message: Json = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class OllamaGenerateEnvelope(OllamaEnvelope):
    """JSON of ``/api/generate``."""

    __slots__ = ()

    def part(self, text: str, thought: str = "", calls: Sequence[Json] = ()) -> Json:
        return {"response": text, **({"thinking": thought} if thought else {})}


def _calls(calls: Sequence[ToolCall], first: int = 0) -> list[Json]:
    """Return calls with their arguments as objects, without a call that was cut off. ``first`` is
    the index of the first one among all calls of the output."""
    with_arguments = [(call, arguments_object(call)) for call in calls]
    whole = [(call, arguments) for call, arguments in with_arguments if arguments is not None]
    return [
        {
            "id": call.id,
            "function": {"index": place, "name": call.name, "arguments": arguments},
        }
        for place, (call, arguments) in enumerate(whole, first)
    ]


def _nanoseconds(duration_s: float) -> int:
    return max(0, int(duration_s * 1e9))


def time_text(at_s: float | None = None) -> str:
    """Return a time in RFC 3339. ``at_s`` are seconds since 1970; None: now."""
    at = datetime.now(UTC) if at_s is None else datetime.fromtimestamp(at_s, UTC)
    return at.isoformat().replace("+00:00", "Z")


def model_entry(
    name: str, *, parent: str | None, fingerprint: str, context_length: int | None, since_s: float
) -> Json:
    """Return a model as ``/api/tags`` and ``/api/ps`` list it. Its size and number format are not
    known to a device. ``since_s`` are the seconds since 1970 at which the endpoint began."""
    return {
        "name": name,
        "model": name,
        "modified_at": time_text(since_s),
        "size": 0,
        "digest": fingerprint,
        "details": _details(parent),
        "expires_at": _NO_END,
        "size_vram": 0,
        "context_length": context_length,
    }


def _details(parent: str | None) -> Json:
    return {
        "parent_model": parent or "",
        "format": "",
        "family": "",
        "families": None,
        "parameter_size": "",
        "quantization_level": "",
    }


def model_description(
    *, parent: str | None, template: str, context_length: int | None, since_s: float
) -> Json:
    """Return a model as ``/api/show`` describes it. ``template`` is the source of its chat
    template; empty if it has none."""
    capabilities = ["completion", *(["tools"] if template else [])]
    if thought_format(template) is not None:
        capabilities.append("thinking")
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": _details(parent),
        "model_info": {
            "general.architecture": "edgespec",
            "edgespec.context_length": context_length,
        },
        "capabilities": capabilities,
        "modified_at": time_text(since_s),
    }


# --- errors ---------------------------------------------------------------------------------------


def error_reply(error: ApiError) -> tuple[int, Json]:
    """Return the status and the body of an error."""
    return error.status, {"error": error.body["error"]["message"]}
