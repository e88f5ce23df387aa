"""Tool calls of earlier messages, in the form that a chat template reads.

Clients send the arguments of a call as JSON in a text, and ``content`` null or empty beside calls.
Some templates write the arguments with ``tojson``, so they need an object; others join them to a
text. Some recognise a call by ``content is none``; others fail on None, or print it. A template is
a program, so the only safe way to find its form is to render a small conversation in each form and
to look for the call in the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgespec.models.text_worker import TextWorkerError

Messages = Sequence[Mapping[str, Any]]

_NAME: Final = "probe_function"
_KEY, _VALUE = "probe_key", "probe_value"
_ID: Final = "probe1234"
"""Nine letters and digits, which Mistral's templates require."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template reads the tool calls of earlier messages."""

    has_text_arguments: bool = False
    """Whether arguments are JSON in a text instead of an object."""
    has_no_content: bool = False
    """Whether ``content`` beside calls is None instead of an empty text."""
    is_shown: bool = False
    """Whether the template writes calls at all."""


_FORMS: Final = tuple(
    CallForm(text, none, True) for none in (False, True) for text in (False, True)
)


def find_call_form(render: Callable[[Messages, Messages], str]) -> CallForm:
    """Return the first form in which a template writes a call as JSON.

    ``render`` renders messages and tools, and raises any exception if the template fails. Raises
    ``TextWorkerError`` if ``render`` does, since such a template would cost as much at each further
    try."""
    parameters = {"type": "object", "properties": {_KEY: {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": _NAME, "parameters": parameters}}]
    json_texts = [f'"{_KEY}":{space}"{_VALUE}"' for space in (" ", "")]
    texts = dict[CallForm, str]()
    for form in _FORMS:
        texts[form] = text = _render_form(render, form, tools)
        if _NAME in text and any(one in text for one in json_texts):
            return form
    # Some templates write each argument in their own notation, which must not be Python's.
    for form, text in texts.items():
        if _KEY in text and _VALUE in text and f"'{_KEY}'" not in text and '\\"' not in text:
            return form
    return CallForm()


def _render_form(
    render: Callable[[Messages, Messages], str], form: CallForm, tools: Messages
) -> str:
    """Return what the template writes for a call in this form, or an empty text if it fails. Tools
    are left out in the first try, because their schemas contain the name of the argument too."""
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
    conversation: list[Mapping[str, Any]] = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "-"},
    ]
    for messages in (conversation, conversation[:2]):
        for template_tools in ((), tools):
            try:
                return render(fit_calls(messages, form), template_tools)
            except TextWorkerError:
                raise
            except Exception:  # a template is a program that can raise anything
                continue
    return ""


THOUGHT: Final = "reasoning_content"
"""The field of a message in which clients send an earlier thought."""
_THOUGHT_FIELDS: Final = (THOUGHT, "thinking", "reasoning")
_THOUGHT_PROBE: Final = "probe thought"


def find_thought_field(render: Callable[[Messages, Messages], str], form: CallForm) -> str:
    """Return the field from which a template reads the thought of an earlier message; empty if it
    shows none. Most templates show only thoughts behind the last message of a user. ``render`` is
    as for ``find_call_form``."""
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
    user = {"role": "user", "content": "-"}
    result = {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "-"}
    for name in _THOUGHT_FIELDS:
        answer = {"role": "assistant", "content": "-", name: _THOUGHT_PROBE}
        calling = {"role": "assistant", "content": "", name: _THOUGHT_PROBE, "tool_calls": [call]}
        for messages in ([user, answer], [user, *fit_calls([calling], form), result]):
            try:
                if _THOUGHT_PROBE in render(messages, ()):
                    return name
            except TextWorkerError:
                raise
            except Exception:  # a template is a program that can raise anything
                continue
    return ""


def fit_thoughts(messages: Messages, name: str) -> list[dict[str, Any]]:
    """Return copies of ``messages`` whose thoughts stand in the field ``name``. A template that
    reads ``thinking`` takes no content beside a thought and calls, so content becomes a message of
    its own there."""
    fitted = list[dict[str, Any]]()
    for message in messages:
        copied = dict(message)
        if THOUGHT in copied and name not in ("", THOUGHT):
            copied[name] = copied.pop(THOUGHT)
            if name == "thinking" and copied.get("tool_calls") and copied.get("content"):
                fitted.append({"role": copied["role"], "content": copied["content"]})
                copied["content"] = ""
        fitted.append(copied)
    return fitted


def fit_calls(messages: Messages, form: CallForm) -> list[dict[str, Any]]:
    """Return copies of ``messages`` whose tool calls have the form that a template reads. If
    content beside calls must be None, existing content becomes a message of its own."""
    fitted = list[dict[str, Any]]()
    for message in messages:
        copied = dict(message)
        if copied.get("tool_calls"):
            copied["tool_calls"] = [_fit_call(call, form) for call in copied["tool_calls"]]
            if form.has_no_content and copied.get("content"):
                fitted.append({"role": copied["role"], "content": copied["content"]})
            if form.has_no_content:
                copied["content"] = None
            elif copied.get("content") is None:
                copied["content"] = ""
        fitted.append(copied)
    return fitted


def _fit_call(call: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if form.has_text_arguments:
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        arguments = object_or_text(arguments)
    elif arguments is None:
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def object_or_text(text: str) -> Any:
    """Return the JSON object in ``text``, or the text itself if it contains none."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
