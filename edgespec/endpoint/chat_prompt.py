"""Prompts of conversations, rendered by the model's chat template, also where the template has no
tools or refuses messages that clients send.

A template without tools, or with a call format that is not known here, gets a description of the
tools in its system message, and earlier calls and their results as text. This text uses the format
of Hermes, on which many models were trained. Some templates refuse conversations that clients send,
for instance because they accept one system message at the beginning only, or because roles must
alternate. Such a template is rendered a second time, with neighbours of one role joined, system
messages at the front and call ids of nine characters, and then a third time without a system
message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgespec.endpoint.harmony import START_OF_ANSWER
from edgespec.endpoint.output_parser import OutputForm
from edgespec.endpoint.pictures import join_contents
from edgespec.endpoint.request_json import compact_json
from edgespec.endpoint.thoughts import ends_in_thought, thought_format
from edgespec.endpoint.tool_calls import CLOSE, OPEN, ToolFormat, tool_format
from edgespec.models.call_history import object_or_text
from edgespec.models.text_worker import TextWorkerError
from edgespec.models.tokenizer import ChatTemplate, ChatTemplateError

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_SEPARATOR: Final = "\n\n"
"""Separator between texts that are joined into one message."""
_MAX_BEGINNING: Final = 4096
"""Characters of a message to continue that are read for its header."""
_SHORT_ID_LENGTH: Final = 9
"""Length of a call id that the templates of Mistral accept."""
_PREAMBLE: Final = f"""\
# Tools

You may call functions to help the user. Each line between the tags describes one function in JSON:
<tools>
%s
</tools>

To call a function, answer with its name and its arguments as a JSON object between these tags:
{OPEN}
{{"name": "FUNCTION_NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
{CLOSE}

The result comes between <tool_response> and </tool_response> in the next message. Where no function
is needed, answer in plain text."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a conversation, as text."""

    text: str
    is_thinking: bool
    """Whether the output begins inside a thought that the template opened."""


def call_format(template: ChatTemplate) -> ToolFormat:
    """Return the format in which a model with this template should write its calls."""
    return _template_format(template) or ToolFormat.HERMES


def output_form(template: ChatTemplate, tools: Tools, prompt: ChatPrompt) -> OutputForm:
    """Return the way in which a model with this template writes the output for ``prompt``. Without
    ``tools`` no call is read."""
    return OutputForm(
        thoughts=thought_format(template.source),
        calls=call_format(template) if tools else None,
        schemas={one["function"]["name"]: one["function"].get("parameters") or {} for one in tools},
        is_thinking=prompt.is_thinking,
        beginning=prompt.text.rpartition(START_OF_ANSWER)[2][-_MAX_BEGINNING:],
    )


def template_writes_tools(template: ChatTemplate) -> bool:
    """Return whether the template itself presents tools to the model, in a format known here."""
    return _template_format(template) is not None


def _template_format(template: ChatTemplate) -> ToolFormat | None:
    return tool_format(template.source) if template.knows_tools else None


def write_chat_prompt(
    template: ChatTemplate,
    messages: Messages,
    tools: Tools,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Return the prompt of ``messages`` with ``tools``, which may be empty. The other arguments
    are as in ``ChatTemplate.render``. Raises ``ChatTemplateError`` if the template refuses the
    messages in every form."""
    has_own_tools = template_writes_tools(template)
    template_tools = tools if has_own_tools and tools else None
    if (tools and not has_own_tools) or (_has_calls(messages) and not _shows_calls(template)):
        messages = [*_write_calls_as_text(messages)]
    preamble = (
        "" if has_own_tools or not tools else _PREAMBLE % "\n".join(map(_describe_tool, tools))
    )
    first_refusal: ChatTemplateError | None = None
    for form in _message_forms(messages, preamble):
        try:
            text = template.render(
                form,
                tools=template_tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )
        except ChatTemplateError as error:
            if isinstance(error.__cause__, TextWorkerError):
                raise  # another form would take as long
            first_refusal = first_refusal or error
            continue
        if preamble in text:
            return ChatPrompt(text, ends_in_thought(thought_format(template.source), text))
    if first_refusal is None:  # the template drops system messages and changes users' messages
        first_refusal = ChatTemplateError("the chat template leaves out the text about the tools")
    raise first_refusal


def _message_forms(messages: Messages, preamble: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the forms of a conversation to try, without duplicates: as it is, with messages joined,
    and with the system message moved into the first user message."""
    seen = list[list[dict[str, Any]]]()
    plain = _with_preamble([dict(one) for one in messages], preamble)
    joined = _with_short_ids(_join_neighbours(plain))
    for form in (plain, joined, _join_neighbours(_move_system_to_user(joined))):
        if form and form not in seen:
            seen.append(form)
            yield form


def _with_preamble(messages: list[dict[str, Any]], preamble: str) -> list[dict[str, Any]]:
    if not preamble:
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": preamble}, *messages]
    first = {**messages[0], "content": _join(messages[0]["content"], preamble)}
    return [first, *messages[1:]]


def _join_neighbours(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with one system message at the front and with neighbours of one role
    joined. Results of tools stay separate messages."""
    system = [one["content"] for one in messages if one["role"] == "system"]
    joined = [{"role": "system", "content": _join(*system)}] if any(system) else []
    for message in messages:
        if message["role"] == "system":
            continue
        last = joined[-1] if joined else {"role": ""}
        if message["role"] != last["role"] or message["role"] == "tool":
            joined.append(dict(message))
            continue
        merged = {**last, **message, "content": _join(last["content"], message["content"])}
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            merged["tool_calls"] = calls
        joined[-1] = merged
    return joined


def _with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with call ids that Mistral's templates accept: nine letters and digits.
    Equal ids stay equal."""
    shortened = list[dict[str, Any]]()
    for message in messages:
        short = dict(message)
        if "tool_call_id" in short:
            short["tool_call_id"] = _short_id(short["tool_call_id"])
        if calls := short.get("tool_calls"):
            short["tool_calls"] = [{**one, "id": _short_id(one.get("id", ""))} for one in calls]
        shortened.append(short)
    return shortened


def _short_id(identity: str) -> str:
    if len(identity) == _SHORT_ID_LENGTH and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:_SHORT_ID_LENGTH]


def _move_system_to_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the text of the system message in front of the first user
    message."""
    if not messages or messages[0]["role"] != "system":
        return messages
    return [{**messages[0], "role": "user"}, *messages[1:]]


def _join(*contents: Any) -> Any:
    """Return the contents of messages as one, with a blank line between them."""
    return join_contents(_SEPARATOR, *contents)


def _describe_tool(tool: Mapping[str, Any]) -> str:
    return compact_json(tool["function"])


def _has_calls(messages: Messages) -> bool:
    return any(one["role"] == "tool" or one.get("tool_calls") for one in messages)


def _shows_calls(template: ChatTemplate) -> bool:
    return template_writes_tools(template) or template.call_form.is_shown


def _write_calls_as_text(messages: Messages) -> Iterator[dict[str, Any]]:
    """Yield the messages with calls and results as text. Results that follow each other become one
    user message."""
    results = list[str]()
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        if not message.get("tool_calls"):
            yield dict(message)
            continue
        calls = [_call_text(call["function"]) for call in message["tool_calls"]]
        kept = {key: one for key, one in message.items() if key != "tool_calls"}
        yield {**kept, "content": "\n".join(filter(None, [message["content"], *calls]))}
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = object_or_text(arguments)
    call = compact_json({"name": function["name"], "arguments": arguments})
    return f"{OPEN}\n{call}\n{CLOSE}"
