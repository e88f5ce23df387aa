"""From the JSON of a request to what is to be generated."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from edgespec.core.protocol.sampling import (
    MAX_BIASES,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    MAX_TOKENS,
)
from edgespec.core.protocol.sampling import SamplingParams as SamplingParams
from edgespec.core.protocol.work import MAX_LOGPROBS
from edgespec.endpoint.chat_messages import messages_of, tools_of
from edgespec.endpoint.conversations import chat_conversation, named_conversation
from edgespec.endpoint.errors import invalid
from edgespec.endpoint.fields import Fields, shown, texts
from edgespec.endpoint.parameters import CHAT, COMPLETION, check_names
from edgespec.endpoint.structured import constraint_of

Prompt = str | tuple[int, ...]
MAX_TOKEN_ID: Final = (1 << 31) - 1
# A drawn seed survives JavaScript, whose numbers hold 53 bits.
_SEED_BITS: Final = 48
_SAMPLED: Final = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What both kinds of request say. ``sampling`` lacks ``max_tokens`` where that is None."""

    model: str
    sampling: SamplingParams
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    scored: bool
    """Whether log-probabilities were asked for."""
    top_logprobs: int
    """How many of the likeliest tokens to tell with each."""
    conversation: str
    """Its hash; empty: the request does not tell which one it belongs to."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the next message of a conversation."""

    asked: Asked
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    """Empty: none, or none wanted."""
    one_call: bool
    """No more than one tool may be called in an answer."""
    must_call: bool
    """The answer has to be a call of one of ``tools``."""
    variables: Mapping[str, Any]
    """Further ones for the chat template."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request to continue texts."""

    asked: Asked
    prompts: tuple[Prompt, ...]


def chat_request(data: Mapping[str, Any], defaults: SamplingParams, most: int) -> ChatRequest:
    """``defaults`` hold for what is not said; ``most`` texts may be asked for. Raises
    ``ApiError``."""
    check_names(data, CHAT)
    fields = Fields(data)
    scored = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    if top and not scored:
        raise invalid("top_logprobs", f"top_logprobs is {top}, but logprobs is not true")
    longest = fields.whole("max_completion_tokens", 1, MAX_TOKENS)
    tools = tools_of(fields)
    callable_tools, must_call = _tool_choice(fields, tools)
    variables = fields.section("chat_template_kwargs")
    parallel = fields.raw("parallel_tool_calls")
    asked, messages = _asked(fields, defaults, most, scored, top or 0, longest), messages_of(fields)
    return ChatRequest(
        replace(asked, conversation=asked.conversation or chat_conversation(messages)),
        messages,
        callable_tools,
        (must_call and len(callable_tools) < len(tools))
        or (parallel is not None and not fields.flag("parallel_tool_calls")),
        must_call,
        {} if variables is None else variables.data,
    )


def completion_request(
    data: Mapping[str, Any], defaults: SamplingParams, most: int
) -> CompletionRequest:
    """As ``chat_request``."""
    check_names(data, COMPLETION)
    fields = Fields(data)
    top = fields.whole("logprobs", 0, MAX_LOGPROBS)
    asked = _asked(fields, defaults, most, top is not None, top or 0, None)
    return CompletionRequest(asked, _prompts(fields, asked.n, most))


def seed_of(seed: int, choice: int) -> int:
    """The seed of choice ``choice`` (from 0) of a request with n > 1: the first has the request's
    own, each other the first eight bytes of SHA-256 of ``"SEED:CHOICE"``, big-endian."""
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{choice}".encode()).digest()[:8], "big")


def _asked(
    fields: Fields,
    defaults: SamplingParams,
    most: int,
    scored: bool,
    top: int,
    longest: int | None,
) -> Asked:
    n = fields.whole("n", 1, most) or 1
    options = fields.section("stream_options")
    stream = fields.flag("stream")
    if options is not None and not stream:
        raise invalid("stream_options", "stream_options is given, but stream is not true")
    return Asked(
        fields.text("model") or "",
        _sampling(fields, defaults),
        longest or fields.whole("max_tokens", 1, MAX_TOKENS),
        n,
        stream,
        options is not None and options.flag("include_usage"),
        scored,
        top,
        named_conversation(fields),
    )


def _sampling(fields: Fields, defaults: SamplingParams) -> SamplingParams:
    given: dict[str, Any] = {}
    for name in _SAMPLED:
        if (number := fields.number(name, -1e6, 1e6)) is not None:
            given[name] = number
    if (top_k := fields.whole("top_k", -1, 1 << 24)) is not None:
        given["top_k"] = max(0, top_k)  # elsewhere -1 keeps all
    seed = fields.whole("seed", -(1 << 63), (1 << 64) - 1)
    given["seed"] = secrets.randbits(_SEED_BITS) if seed is None else seed % (1 << 64)
    if stop := texts(fields, "stop", MAX_STOP_STRINGS):
        given["stop"] = stop
    if (ids := fields.raw("stop_token_ids")) is not None:
        given["stop_token_ids"] = _token_ids(fields, "stop_token_ids", ids, MAX_STOP_IDS)
    if (biases := fields.section("logit_bias")) is not None:
        given["logit_bias"] = _biases(biases)
    if (constraint := constraint_of(fields)) is not None:
        given["constraint"] = constraint
    if fields.raw("ignore_eos") is not None:
        given["ignore_eos"] = fields.flag("ignore_eos")
    try:
        return replace(defaults, **given)
    except ValueError as error:  # its message begins with the name, or with "number of" one
        named = [one for one in given if one in str(error)]
        raise invalid(named[0] if named else "sampling", str(error)) from None


def _biases(fields: Fields) -> dict[int, float]:
    if len(fields.data) > MAX_BIASES:
        count = len(fields.data)
        raise invalid("logit_bias", f"logit_bias has {count} keys, but at most {MAX_BIASES}")
    biases: dict[int, float] = {}
    for name in fields.data:
        try:
            token = int(name)
        except ValueError:
            raise invalid(
                "logit_bias", f"logit_bias has the key {shown(name)}, which is no token id"
            ) from None
        if not 0 <= token <= MAX_TOKEN_ID:
            raise invalid(
                "logit_bias",
                f"logit_bias has the key {shown(name)}, but must be in [0, {MAX_TOKEN_ID}]",
            )
        bias = fields.number(name, -100.0, 100.0)
        if bias is not None:
            biases[token] = bias
    return biases


_Tools = list[dict[str, Any]]


def _tool_choice(fields: Fields, tools: _Tools) -> tuple[_Tools, bool]:
    """The tools that may be called, and whether one of them must be."""
    value = fields.raw("tool_choice")
    if value in (None, "auto", "none"):
        return (tools if value != "none" else []), False
    chosen = tools
    if isinstance(value, dict):
        function = Fields(value, "tool_choice.").section("function")
        name = None if function is None else function.text("name")
        chosen = [one for one in tools if one["function"]["name"] == name]
    elif value != "required":
        wanted = "'auto', 'none', 'required' or a function"
        raise invalid("tool_choice", f"tool_choice is {shown(value)}, but must be {wanted}")
    if not chosen:
        raise invalid("tool_choice", f"tool_choice is {shown(value)}, but tools has no such tool")
    if constraint_of(fields) is not None:
        raise invalid("tool_choice", "tool_choice forces a call, which no other format fits beside")
    return chosen, True


def _prompts(fields: Fields, n: int, most: int) -> tuple[Prompt, ...]:
    """``n`` texts of each, and at most ``most`` of all."""
    value = fields.raw("prompt")
    if value is None or value in ("", []):
        raise invalid("prompt", "prompt is missing or empty, but must hold at least one token")
    if isinstance(value, str):
        return (fields.text("prompt") or "",)
    if not isinstance(value, list):
        raise fields.wrong("prompt", value, "text, token ids, or a list of either")
    if isinstance(value[0], int):
        return (_token_ids(fields, "prompt", value, MAX_TOKENS),)
    if len(value) * n > most:
        texts_asked = f"{len(value)} prompts with n {n} are {len(value) * n} texts"
        raise invalid("prompt", f"{texts_asked}, but a request may ask for at most {most}")
    prompts: list[Prompt] = []
    for place, one in enumerate(value):
        name = f"prompt[{place}]"
        if isinstance(one, str) and one:
            prompts.append(Fields({name: one}).text(name) or "")
        elif isinstance(one, list) and one:
            prompts.append(_token_ids(fields, name, one, MAX_TOKENS))
        else:
            raise fields.wrong(name, one, "text or token ids, and not empty")
    return tuple(prompts)


def _token_ids(fields: Fields, name: str, value: Any, most: int) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > most:
        raise fields.wrong(name, value, f"a list of at most {most} token ids")
    for one in value:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= MAX_TOKEN_ID:
            raise invalid(
                fields.name(name),
                f"{fields.name(name)} holds {shown(one)}, but token ids are in [0, {MAX_TOKEN_ID}]",
            )
    return tuple(value)
