"""Parser of a request: from its JSON to the parameters, messages and tools of its generations.

Chat templates handle plain texts, so a list of text parts becomes one text, unless there are
pictures among them (``pictures.py``), and the role ``developer`` becomes ``system``. Tools that no
model here can have are left out and reported. A custom tool, which takes plain text, becomes a
function with one argument.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from edgespec.core.association.policies import hash_conversation_name
from edgespec.core.protocol.acceptance import full_rule_name
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import MAX_TOKEN_ID
from edgespec.core.protocol.sampling import (
    MAX_BIASES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    MAX_TOKENS,
    SamplingParams,
)
from edgespec.core.protocol.work import MAX_LOGPROBS
from edgespec.device.agent import MAX_PREDICTION_CHARS
from edgespec.endpoint.pictures import PICTURE_PART, SentPicture, check_count, read_picture_part
from edgespec.endpoint.request_json import (
    Fields,
    check_encodable,
    compact_json,
    errors_with_sent_names,
    invalid_request,
    shown_value,
)
from edgespec.models.tokenizer import MAX_MESSAGES

COMMON: Final = frozenset(
    "model stream stream_options n stop seed max_tokens temperature top_p logit_bias logprobs"
    " prompt_cache_key frequency_penalty presence_penalty response_format grammar regex"
    " prediction"
    # Not OpenAI's, but common in servers that people run themselves.
    " top_k min_p repetition_penalty stop_token_ids ignore_eos min_tokens add_special_tokens"
    # Only edgespec's.
    " rule drafts".split()
)
CHAT: Final = COMMON | frozenset(
    "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls"
    " chat_template_kwargs reasoning_effort verbosity thinking_token_budget"
    # Not OpenAI's: continuation of the last message.
    " continue_final_message add_generation_prompt"
    # Only edgespec's.
    " token_sources".split()
)
COMPLETION: Final = COMMON | {"prompt", "echo", "suffix"}
IGNORED: Final = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_retention"
    " cache_prompt request_id priority".split()
)
"""Parameters that are accepted without effect, because they only identify, file or accelerate a
request. The output is the same, so they are not reported as ignored."""
_UNSUPPORTED_BY_NEUTRAL_VALUE: Final[tuple[tuple[tuple[Any, ...], str], ...]] = (
    ((), "audio chat_template truncate_prompt_tokens web_search_options allowed_token_ids"),
    ((), "guided_whitespace_pattern structural_tag negative_prompt"),
    ((True,), "skip_special_tokens spaces_between_special_tokens do_sample"),
    ((False,), "include_stop_str_in_output use_beam_search echo ban_eos_token"),
    ((0,), "mirostat dry_multiplier xtc_probability dynatemp_range top_a smoothing_factor"),
    ((0,), "no_repeat_ngram_size penalty_alpha epsilon_cutoff eta_cutoff prompt_logprobs"),
    ((0,), "n_indent"),
    ((0, -1), "t_max_predict_ms"),
    ((1,), "best_of length_penalty tfs_z tfs typical_p typical encoder_repetition_penalty"),
    ((1,), "guidance_scale"),
    (([],), "documents functions bad_words banned_tokens banned_strings logits_processors lora"),
    (([], ""), "custom_token_bans"),
    ((["text"],), "modalities"),
    (("none", "auto"), "function_call"),
)
UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    name: values for values, names in _UNSUPPORTED_BY_NEUTRAL_VALUE for name in names.split()
}
"""Parameters that are refused because they would change the output. Null and the values listed here
mean that they are not used."""


def known_fields(
    data: Mapping[str, Any], known_names: frozenset[str]
) -> tuple[Fields, tuple[str, ...]]:
    """Return the known fields of a request under their names here, and the names of unknown fields.
    Raises ``ApiError`` for the first parameter that would change the output and is not supported,
    and for two parameters that contradict each other.
    """
    sent, unknown = _SentFields(), []
    for name, value in data.items():
        if value is None or name in IGNORED:
            continue
        if name in known_names:
            sent.add(name, name, value)
        elif name in UNSUPPORTED:
            if not _is_neutral_value(value, UNSUPPORTED[name]):
                why = f"{name} is {shown_value(value)}, but {name} is not supported"
                raise invalid_request(name, why, "unsupported_parameter")
        elif not _add_renamed(name, value, sent):
            unknown.append(name)
    fields = Fields(sent.fields, spelling=sent.spelling)
    _check_penalty_window(fields, data)
    return fields, tuple(one for one in unknown if one != _PENALTY_WINDOW)


def _is_neutral_value(value: Any, neutral: Sequence[Any]) -> bool:
    # 1 == True in Python, but not in JSON.
    return any(value == one and type(value) in (type(one), float) for one in neutral)


_PENALTY_WINDOW: Final = "repeat_last_n"
_PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _check_penalty_window(fields: Fields, data: Mapping[str, Any]) -> None:
    """Raise ``ApiError`` for a window of tokens to which penalties are limited, if the request has
    penalties. Here they apply to the whole text, which is a window of -1."""
    window = data.get(_PENALTY_WINDOW)
    if window in (None, -1):
        return
    usual = SamplingParams()
    for name in _PENALTIES:
        if fields.raw(name) not in (None, getattr(usual, name)):
            sent = shown_value(window)
            why = f"{_PENALTY_WINDOW} is {sent}, but {name} looks at the whole text (-1)"
            raise invalid_request(_PENALTY_WINDOW, why, "unsupported_parameter")


class _SentFields:
    """Fields under our names, each with the name under which the client sent it."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.spelling: dict[str, str] = {}

    def add(self, name: str, spelling: str, value: Any) -> None:
        """Add a field. Raises ``ApiError`` if it was added under another name with another
        value."""
        earlier = self.fields.get(name)
        if earlier is None or _is_default(name, earlier) or earlier == value:
            self.fields[name], self.spelling[name] = value, spelling
        elif not _is_default(name, value):
            first = self.spelling[name]
            raise invalid_request(
                spelling, f"{first} and {spelling} are both given, and contradict"
            )


def _is_default(name: str, value: Any) -> bool:
    return name == "response_format" and value == {"type": "text"}


def _add_renamed(name: str, value: Any, given: _SentFields) -> bool:
    """Add a field that another server calls by another name to ``given``. Return whether ``name``
    is such a name. Raises ``ApiError``."""
    if name in _OTHER_SERVERS:
        ours, convert = _OTHER_SERVERS[name]
        converted = value if convert is None else convert(name, value)
        if converted is not None:
            given.add(ours, name, converted)
    elif name == "structured_outputs":
        for inner, one in Fields({name: value}).section(name).data.items():
            if one is None or one is False:
                continue
            if not _add_renamed(f"guided_{inner}", one, given):
                raise invalid_request(
                    name, f"{name}.{inner} is not supported", "unsupported_parameter"
                )
    else:
        return False
    return True


def names_of_other_servers(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the other servers' names of fields that a request contains, by our names."""
    sent_names = dict[str, str]()
    for name in data:
        if name in _OTHER_SERVERS:
            sent_names.setdefault(_OTHER_SERVERS[name][0], name)
    inner = data.get("structured_outputs")
    for name in inner if isinstance(inner, dict) else ():
        if f"guided_{name}" in _OTHER_SERVERS:
            sent_name = sent_names[f"guided_{name}"] = f"structured_outputs.{name}"
            sent_names.setdefault(_OTHER_SERVERS[f"guided_{name}"][0], sent_name)
    return {ours: sent_name for ours, sent_name in sent_names.items() if data.get(ours) is None}


def _schema_format(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise invalid_request(
                name, f"{name} is {shown_value(value)}, but must be a JSON schema"
            ) from None
    return {"type": "json_schema", "json_schema": {"schema": value}}


def _object_format(name: str, value: Any) -> dict[str, Any] | None:
    return {"type": "json_object"} if Fields({name: value}).boolean(name) else None


def _choice_regex(name: str, value: Any) -> str:
    choices = Fields({name: value}).texts(name, MAX_CHOICE_TEXTS)
    if not any(choices):
        raise invalid_request(
            name, f"{name} is {shown_value(value)}, but must hold a text that is not empty"
        )
    return "|".join(re.sub(r"([\\.+*?()|\[\]{}^$#&~-])", r"\\\1", one) for one in choices)


_OTHER_SERVERS: Final[Mapping[str, tuple[str, Callable[[str, Any], Any] | None]]] = {
    "repeat_penalty": ("repetition_penalty", None),
    "n_predict": ("max_tokens", None),
    "guided_regex": ("regex", None),
    "guided_grammar": ("grammar", None),
    "guided_choice": ("regex", _choice_regex),
    "thinking_budget_tokens": ("thinking_token_budget", None),
    "thinking_budget": ("thinking_token_budget", None),
    "reasoning_budget": ("thinking_token_budget", None),
    "guided_json": ("response_format", _schema_format),
    "guided_json_object": ("response_format", _object_format),
    "json_schema": ("response_format", _schema_format),
}
"""Parameters of other servers: our name, and the conversion of the value."""
MAX_CHOICE_TEXTS: Final = 1024
"""Limit on the texts of ``guided_choice``. The regular expression made of them has a limit in bytes
too."""
MAX_TOOLS: Final = 128
MAX_FUNCTIONS: Final = 1024
"""Limit on the functions of a request of another API, over all of its namespaces."""
MAX_CHOICES: Final = 128
"""The largest ``n``, as in OpenAI's API."""
MAX_GENERATIONS: Final = 1024
"""Limit on the generations of one request, over all of its prompts. They wait for slots one by
one."""
# A random seed survives JavaScript, whose numbers hold 53 bits.
_SEED_BITS: Final = 48
TEMPLATE_VARIABLES: Final = ("reasoning_effort", "verbosity")
"""Parameters of a chat that are variables of its template."""
_LARGEST_INTEGER: Final = (1 << 64) - 1
_UNFORCED_CHOICES: Final = (None, "auto", "none")
"""Values of ``tool_choice`` that force no call."""
_ROLES: Final = {"developer": "system", "function": "tool"}
_KNOWN_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_MAX_TOOL_NAME: Final = 256
CUSTOM_INPUT: Final = "input"
"""The one argument of the function that stands for a custom tool."""
_PICTURE_KIND: Final = "image_url"
_FORMATS: Final = ("text", "json_object", "json_schema")

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClientTool:
    """The names by which a client calls a tool, where the model sees another name."""

    name: str
    namespace: str = ""
    is_custom: bool = False
    """Whether the tool takes plain text instead of JSON."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for generations, parsed. If ``max_tokens`` is None, the one in ``sampling`` is not
    meant."""

    model: str
    sampling: SamplingParams
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    conversation: str
    """Hash that identifies the conversation; empty: not known."""
    ignored_fields: tuple[str, ...]
    """Names of parameters that have no effect here."""
    rule: str
    """Rule by which drafts are accepted; empty: as the device is configured."""
    drafts: bool = True
    """Whether this device and the verifier may draft for the request."""
    prediction: str = ""
    """Text that the output is expected to be. Empty: none is given."""
    prediction_tokens: tuple[int, ...] = ()
    """Token ids of ``prediction``, once it is tokenized."""
    shows_sources: bool = False
    """Whether the response shows where each token came from, and when."""
    logprobs: int | None = None
    """Number of likeliest tokens to report beside each token's score. None: no scores."""
    prompts: tuple[Prompt, ...] = ()
    """Texts to continue."""
    echo: bool = False
    """Whether each output begins with its prompt. With ``logprobs`` the prompt has scores too."""
    suffix: str = ""
    """Text that follows the output. Empty: none is known."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Conversation whose next message is generated. Empty: ``prompts`` are continued."""
    pictures: tuple[SentPicture, ...] = ()
    """Pictures of ``messages``, in the order of their parts."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools that the model may call."""
    single_call: bool = False
    """Whether an output may contain one call at most."""
    forces_call: bool = False
    """Whether the output must be a call of one of ``tools``."""
    strict: frozenset[str] = frozenset()
    """Names of the tools whose calls must fit their schemas, also if no call is forced."""
    client_tools: Mapping[str, ClientTool] = field(default_factory=dict)
    """Names that the client uses for tools, by the names that the model sees."""
    constraint_param: str = ""
    """The field to name in an error about the constraint of ``sampling``. Empty: the one that
    belongs to the constraint's kind."""
    is_constraint_optional: bool = False
    """Whether the constraint of ``sampling`` only keeps a promise about ``strict`` tools. If it
    cannot be compiled, the output is generated without it and a header reports this."""
    sent_names: Mapping[str, str] = field(default_factory=dict)
    """Names of fields as the client sent them, by our names, for errors."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the chat template."""
    thinking_budget: int | None = None
    """Limit on the tokens of the thought before the answer; None: there is none."""
    adds_special_tokens: bool = True
    """Whether the tokenizer adds the tokens that begin a text. A chat template writes them
    itself."""
    continues_last_message: bool = False
    """Whether the output continues the last message."""
    has_generation_prompt: bool = True
    """Whether the prompt of a chat ends with the beginning of an assistant's message."""

    @property
    def scores_prompt(self) -> bool:
        """Whether the tokens of each prompt have scores."""
        return self.echo and self.logprobs is not None

    @property
    def is_empty(self) -> bool:
        """Whether no token is generated."""
        return self.max_tokens == 0


@dataclass(slots=True)
class ChatConversion:
    """A request of another API in the form of a chat request."""

    chat: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    """Names of fields as the client sent them, by their names in the chat."""
    client_tools: dict[str, ClientTool] = field(default_factory=dict)
    echo: dict[str, Any] = field(default_factory=dict)
    """Fields of the request that the response repeats."""
    left_out: list[str] = field(default_factory=list)
    """Kinds of tools and items that no model here has."""
    hides_thoughts: bool = False
    """Whether the response shows that there was a thought, and not its text."""


def chat_request(
    data: Mapping[str, Any],
    defaults: SamplingParams,
    *,
    max_tools: int = MAX_TOOLS,
    names: Mapping[str, str] | None = None,
) -> GenerationRequest:
    """Return a parsed chat request.

    ``defaults`` are used for parameters that it leaves open. ``names`` maps our names of
    fields to those the client sent, if the request was converted from another kind. Raises
    ``ApiError`` with the sent names."""
    sent_names = {"prompt": "messages", **names_of_other_servers(data)} if names is None else names
    with errors_with_sent_names(sent_names):
        return replace(_chat_request(data, defaults, max_tools), sent_names=sent_names)


def _chat_request(
    data: Mapping[str, Any], defaults: SamplingParams, max_tools: int
) -> GenerationRequest:
    fields, request = _read_common(data, CHAT, defaults)
    wants_scores = fields.boolean("logprobs")
    top_count = fields.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
    if top_count and not wants_scores:
        raise fields.error("top_logprobs", f"is {top_count}, but logprobs is not true")
    tools = read_tools(fields, max_tools)
    mode, callable_tools = _choose_tools(fields, tools)
    is_forced = mode == "required"
    constraint = _read_constraint(fields)
    if is_forced and constraint is not None and constraint.kind is not ConstraintKind.JSON_SCHEMA:
        # A call takes precedence over a JSON schema, as at OpenAI. A grammar or regular expression
        # does not give way.
        why = f"forces a call, which cannot fit the {constraint.kind.value} beside it"
        raise fields.error("tool_choice", why)
    sent_messages = fields.sections("messages", MAX_MESSAGES)
    if not sent_messages:
        raise fields.error("messages", "must hold at least one message")
    pictures: list[SentPicture] = []
    messages = [_read_message(one, pictures) for one in sent_messages]
    check_count(pictures)
    variables = {**fields.section("chat_template_kwargs").data}
    for name in TEMPLATE_VARIABLES:
        if (value := fields.raw(name)) is not None:
            variables.setdefault(name, value)
    allows_parallel_calls = fields.boolean("parallel_tool_calls", absent=True)
    continues, generation_prompt = _read_ending(fields, messages)
    request = replace(
        request,
        max_tokens=_read_length(fields, "max_completion_tokens") or request.max_tokens,
        conversation=request.conversation or _conversation_hash(messages),
        ignored_fields=request.ignored_fields + tools.left_out,
        logprobs=top_count if wants_scores else None,
        messages=messages,
        pictures=tuple(pictures),
        tools=callable_tools,
        strict=frozenset(tools.strict),
        client_tools=tools.client_tools,
        single_call=_names_function(fields) or not allows_parallel_calls,
        forces_call=is_forced,
        variables=variables,
        thinking_budget=_read_thinking_budget(fields),
        adds_special_tokens=fields.boolean("add_special_tokens"),
        continues_last_message=continues,
        has_generation_prompt=generation_prompt,
        shows_sources=fields.boolean("token_sources"),
    )
    return _check_lengths(fields, request)


def _read_ending(fields: Fields, messages: Sequence[Mapping[str, Any]]) -> tuple[bool, bool]:
    """Return whether the output continues the last message of a chat, and whether the prompt ends
    with the beginning of an assistant's message. By default a last message of an assistant is
    continued, as in llama.cpp's server. Raises ``ApiError``."""
    is_requested, last = fields.boolean("continue_final_message"), messages[-1]
    has_generation_prompt = fields.boolean("add_generation_prompt", absent=not is_requested)
    if is_requested and has_generation_prompt:
        why = "and add_generation_prompt are both true, but a message is continued or begun"
        raise fields.error("continue_final_message", why)
    if is_requested and (last.get("tool_calls") or not last["content"]):
        raise fields.error("continue_final_message", "is true, but the last message has no text")
    flags = fields.raw("continue_final_message"), fields.raw("add_generation_prompt")
    can_continue = last["role"] == "assistant" and last["content"] and not last.get("tool_calls")
    continues = is_requested or bool(can_continue and flags == (None, None))
    return continues, has_generation_prompt and not continues


def completion_request(
    data: Mapping[str, Any],
    defaults: SamplingParams,
    *,
    names: Mapping[str, str] | None = None,
) -> GenerationRequest:
    """Return a parsed completion request. Arguments and errors are as in
    ``chat_request``."""
    sent_names = names_of_other_servers(data) if names is None else names
    with errors_with_sent_names(sent_names):
        return replace(_completion_request(data, defaults), sent_names=sent_names)


def _completion_request(data: Mapping[str, Any], defaults: SamplingParams) -> GenerationRequest:
    fields, request = _read_common(data, COMPLETION, defaults)
    logprobs, echo = fields.integer("logprobs", 0, MAX_LOGPROBS), fields.boolean("echo")
    suffix = fields.text("suffix") or ""
    # A gap may be at the beginning of a file, so that nothing stands in front of it.
    is_first = bool(suffix) and fields.raw("prompt") == ""
    prompts = ("",) if is_first else _read_prompts(fields, request.n)
    if suffix and not all(isinstance(one, str) for one in prompts):
        raise fields.error("suffix", "is given, but prompt holds token ids instead of text")
    request = replace(
        request,
        prompts=prompts,
        suffix=suffix,
        echo=echo,
        logprobs=logprobs,
        adds_special_tokens=fields.boolean("add_special_tokens", absent=True),
    )
    return _check_lengths(fields, request)


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of choice ``choice`` (from 0) of a request with n > 1. The first has the
    request's own seed; each other one has the first eight bytes, big-endian, of the SHA-256 of
    ``"SEED:CHOICE"``."""
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{choice}".encode()).digest()[:8], "big")


def _read_common(
    data: Mapping[str, Any], known: frozenset[str], defaults: SamplingParams
) -> tuple[Fields, GenerationRequest]:
    """Return a request with the fields that all kinds share, and the ``Fields`` to read the others
    from."""
    fields, ignored = known_fields(data, known)
    options, stream = fields.section("stream_options"), fields.boolean("stream")
    key = fields.text("prompt_cache_key")
    try:
        rule = full_rule_name(text) if (text := fields.text("rule")) else ""
    except ValueError as error:
        raise invalid_request("rule", str(error)) from None
    return fields, GenerationRequest(
        model=fields.text("model") or "",
        sampling=_read_sampling(fields, defaults),
        max_tokens=_read_length(fields, "max_tokens", 0 if known is COMPLETION else 1),
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        stream=stream,
        include_usage=options.boolean("include_usage"),
        conversation=hash_conversation_name(json.dumps(["key", key])) if key else "",
        ignored_fields=ignored,
        rule=rule,
        drafts=fields.boolean("drafts", absent=True),
        prediction=_read_prediction(fields),
    )


def _read_prediction(fields: Fields) -> str:
    """Return the text of ``prediction``, an object as in OpenAI's chat API; empty if there is none.
    Raises ``ApiError``."""
    if fields.raw("prediction") is None:
        return ""
    prediction = fields.section("prediction")
    if (kind := prediction.text("type")) != "content":
        raise prediction.wrong_value("type", kind, '"content"')
    content = prediction.raw("content")
    if isinstance(content, list):
        parts = prediction.sections("content")
        for part in parts:
            if part.raw("type") != "text":
                raise part.wrong_value("type", part.raw("type"), '"text"')
        text = "".join([part.text("text") or "" for part in parts])
    else:
        text = prediction.text("content") or ""
        if content is None:
            raise prediction.wrong_value("content", None, "text, or a list of parts with text")
    if len(text) > MAX_PREDICTION_CHARS:
        why = f"has {len(text):,} characters, but at most {MAX_PREDICTION_CHARS:,}"
        raise prediction.error("content", f"{why}: send the part that the output is expected to be")
    return text


def _conversation_hash(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the hash of the beginning of a chat: all messages up to the first one of a user."""
    roles = [message["role"] for message in messages]
    first = roles.index("user") + 1 if "user" in roles else len(messages)
    begins = [[message["role"], message["content"]] for message in messages[:first]]
    return hash_conversation_name(json.dumps(["chat", begins]))


def _read_sampling(fields: Fields, defaults: SamplingParams) -> SamplingParams:
    values = {
        name: read(fields, name) for name, read in _SAMPLING_READERS.items() if name in fields.data
    }
    sent_values = {name: value for name, value in values.items() if value is not None}
    sent_values = {"seed": secrets.randbits(_SEED_BITS), **sent_values}
    if (min_tokens := sent_values.get("min_tokens", 0)) > defaults.max_tokens:
        sent_values["max_tokens"] = min_tokens  # placeholder until the length is known
    if (constraint := _read_constraint(fields)) is not None:
        sent_values["constraint"] = constraint
    try:
        return replace(defaults, **sent_values)
    except ValueError as error:  # the message contains the field's name
        fields_at_fault = [name for name in sent_values if name in str(error)]
        raise invalid_request(
            fields_at_fault[0] if fields_at_fault else "sampling", str(error)
        ) from None


def _read_length(fields: Fields, name: str, least: int = 1) -> int | None:
    """Return the limit on generated tokens, or None if it is left open. As in llama.cpp, -1 means
    as many as the context has room for; so does a number above any context length. Only
    completions may generate nothing (``least`` 0)."""
    length = fields.integer(name, -1, _LARGEST_INTEGER)
    if length is not None and 0 <= length < least:
        raise fields.error(name, "is 0, but a text has at least 1 token (-1: as many as fit)")
    return None if length is None else MAX_TOKENS if length < 0 else min(length, MAX_TOKENS)


def _read_thinking_budget(fields: Fields) -> int | None:
    """Return the limit on the tokens of a thought. As in llama.cpp, -1 means that there is none."""
    budget = fields.integer("thinking_token_budget", -1, MAX_TOKENS)
    return None if budget == -1 else budget


_LENGTH_FIELDS: Final = ("max_completion_tokens", "max_tokens")


def _check_lengths(fields: Fields, request: GenerationRequest) -> GenerationRequest:
    """Return ``request``. Raises ``ApiError`` if ``min_tokens`` exceeds ``max_tokens``."""
    min_tokens, max_tokens = fields.integer("min_tokens", 0, MAX_TOKENS), request.max_tokens
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        name = next(one for one in _LENGTH_FIELDS if fields.raw(one) is not None)
        more = f"is {min_tokens}, but {fields.name(name)} is {max_tokens}: a text cannot be both"
        raise fields.error("min_tokens", more)
    return request


def _read_number(fields: Fields, name: str) -> float | None:
    return fields.number(name, -1e6, 1e6)


def _read_top_k(fields: Fields, name: str) -> int:
    return max(0, fields.integer(name, -1, 1 << 24) or 0)  # elsewhere -1 keeps all


def _read_seed(fields: Fields, name: str) -> int | None:
    """Return the seed, or None for -1, which requests a random one, as in llama.cpp."""
    seed = fields.integer(name, -(1 << 63), _LARGEST_INTEGER) or 0
    return None if seed == -1 else seed % (1 << 64)


def _read_stops(fields: Fields, name: str) -> tuple[str, ...] | None:
    """Return the stop strings. Empty ones are left out, as llama.cpp does."""
    stops = tuple(filter(None, fields.texts(name, MAX_STOP_STRINGS)))
    if (size := sum(map(len, stops))) > MAX_STOP_CHARACTERS:
        why = f"has {size} characters in all, but at most {MAX_STOP_CHARACTERS}"
        raise fields.error(name, why)
    return stops or None


def _read_biases(fields: Fields, name: str) -> dict[int, float]:
    biases, by_token = fields.section(name), dict[int, float]()
    if (count := len(biases.data)) > MAX_BIASES:
        raise fields.error(name, f"has {count} keys, but at most {MAX_BIASES}")
    for key in biases.data:
        try:
            token = int(key)
        except ValueError:
            token = -1
        if not 0 <= token <= MAX_TOKEN_ID:
            why = f"has the key {shown_value(key)}, which is no token id in [0, {MAX_TOKEN_ID}]"
            raise fields.error(name, why)
        if (bias := biases.number(key, -100.0, 100.0)) is not None:
            by_token[token] = bias
    return by_token


_SAMPLING_READERS: Final[Mapping[str, Callable[[Fields, str], Any]]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), _read_number),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _read_number),
    "top_k": _read_top_k,
    "seed": _read_seed,
    "stop": _read_stops,
    "stop_token_ids": lambda fields, name: fields.token_ids(name, MAX_STOP_IDS),
    "logit_bias": _read_biases,
    "ignore_eos": Fields.boolean,
    "min_tokens": lambda fields, name: fields.integer(name, 0, MAX_TOKENS),
}
"""Reader of each sampling parameter; it returns None for a value that means the default."""


def _read_constraint(fields: Fields) -> Constraint | None:
    """Return the constraint of a request. Raises ``ApiError`` for two constraints, or for an
    empty one."""
    texts_of = {
        "response_format": (ConstraintKind.JSON_SCHEMA, _read_schema(fields)),
        "grammar": (ConstraintKind.GRAMMAR, fields.text("grammar")),
        "regex": (ConstraintKind.REGEX, fields.text("regex")),
    }
    sent = [(name, kind, text) for name, (kind, text) in texts_of.items() if text is not None]
    if len(sent) > 1:
        first, second = fields.name(sent[0][0]), fields.name(sent[1][0])
        raise invalid_request(
            second, f"{first} and {second} are both given, but a text is held to one"
        )
    for name, kind, text in sent:
        if not text.strip():
            raise fields.error(name, "is empty, but must say what the text is held to")
        try:
            return Constraint(kind, text)
        except ValueError as error:
            raise invalid_request(fields.name(name), str(error)) from None
    return None


def _read_schema(fields: Fields) -> str | None:
    """Return the JSON schema of ``response_format``, or None. It stands in ``json_schema.schema``,
    as in OpenAI's API, or in ``schema``, as in llama.cpp's server, where a ``json_object`` can have
    one too."""
    if fields.raw("response_format") is None:
        return None
    response_format = fields.section("response_format")
    format_type = response_format.raw("type")
    if format_type not in _FORMATS:
        known = ", ".join(map(repr, _FORMATS))
        why = f"is of type {shown_value(format_type)}, but must be of one of {known}"
        raise fields.error("response_format", why)
    schema_beside_type = response_format.raw("schema")
    nested_schema = response_format.section("json_schema").raw("schema")
    if (
        schema_beside_type is not None
        and nested_schema is not None
        and schema_beside_type != nested_schema
    ):
        why = "has a schema and another json_schema.schema, but a text is held to one"
        raise fields.error("response_format", why)
    place, schema = (
        ("schema", schema_beside_type)
        if schema_beside_type is not None
        else ("json_schema.schema", nested_schema)
    )
    if format_type == "text" and schema is not None:
        raise fields.error("response_format", f"is of type 'text', but has a {place}")
    if schema is None and format_type != "json_schema":
        return None if format_type == "text" else '{"type": "object"}'
    if not isinstance(schema, dict):
        name = f"response_format.{place}"
        raise invalid_request(
            "response_format", f"{name} is {shown_value(schema)}, but must be an object"
        )
    return compact_json(schema)


def _read_prompts(fields: Fields, n: int) -> tuple[Prompt, ...]:
    value = fields.raw("prompt")
    if value is None or value in ("", []):
        raise fields.error("prompt", "is missing or empty, but must hold at least one token")
    if not isinstance(value, list) or isinstance(value[0], int):
        return (_read_prompt(fields, "prompt"),)
    if (texts := len(value) * n) > MAX_GENERATIONS:
        asked = f"{len(value)} prompts with n {n} are {texts} texts"
        raise invalid_request(
            "prompt", f"{asked}, but a request may ask for at most {MAX_GENERATIONS}"
        )
    several = Fields({f"prompt[{place}]": one for place, one in enumerate(value)})
    return tuple([_read_prompt(several, name) for name in several.data])


def _read_prompt(fields: Fields, name: str) -> Prompt:
    value = fields.raw(name)
    if not isinstance(value, str | list) or not value:
        raise fields.wrong_value(name, value, "text or token ids, and not empty")
    if isinstance(value, list):
        return fields.token_ids(name, MAX_TOKENS)
    return check_encodable(fields.name(name), value)


def _read_message(fields: Fields, pictures: list[SentPicture]) -> dict[str, Any]:
    """Return a message, and add its pictures to ``pictures``. Raises ``ApiError``."""
    role = fields.text("role")
    if role is None or role not in _KNOWN_ROLES:
        raise fields.wrong_value("role", role, f"one of {', '.join(_KNOWN_ROLES)}")
    calls = fields.sections("tool_calls")
    if calls and role != "assistant":
        why = f"stands in a message of {role}, but only assistants call tools"
        raise fields.error("tool_calls", why)
    content = _read_content(fields, pictures if role == "user" else None)
    if content is None:
        if role != "assistant":
            raise fields.error("content", "is missing")
        content = fields.text("refusal") or ""
    message: dict[str, Any] = {"role": _ROLES.get(role, role), "content": content}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if (text := fields.text(key)) is not None:
            message[key] = text
    if calls:
        message["tool_calls"] = [_read_earlier_call(one) for one in calls]
    for key in ("function_call", "audio"):
        if fields.raw(key) is not None:
            raise fields.error(key, "is not supported")
    return message


def _read_content(
    fields: Fields, pictures: list[SentPicture] | None
) -> str | list[dict[str, Any]] | None:
    """Return the content of a message: a text, or a list of parts if it has pictures, which are
    added to ``pictures``. None for ``pictures`` refuses them. Raises ``ApiError``."""
    value = fields.raw("content")
    if not isinstance(value, list):
        return fields.text("content")
    parts: list[dict[str, Any]] = []
    for part in fields.sections("content"):
        kind = part.text("type")
        if kind == _PICTURE_KIND:
            if pictures is None:
                raise part.error("type", f"is {kind!r}, but pictures stand in messages of users")
            pictures.append(read_picture_part(part))
            parts.append(PICTURE_PART)
            continue
        if kind not in ("text", "refusal"):
            known = f"'text' and {_PICTURE_KIND!r}"
            raise part.error("type", f"is {shown_value(kind)}, but only {known} are read")
        if (text := part.text(kind)) is None:
            raise part.error(kind, "is missing")
        parts.append({"type": "text", "text": text})
    if PICTURE_PART not in parts:
        return "".join(part["text"] for part in parts)
    return parts


def _read_earlier_call(fields: Fields) -> dict[str, Any]:
    """Return an earlier call in the form of a function call. The arguments stay as they were sent,
    since the chat template decides on their form."""
    arguments: Any
    if fields.raw("type") == "custom":
        custom = fields.section("custom")
        arguments = {CUSTOM_INPUT: custom.text(CUSTOM_INPUT) or ""}
        if not (name := custom.text("name")):
            raise fields.error("custom", "has no name")
    else:
        function = fields.section("function")
        if not (name := function.text("name")):
            raise fields.error("function", "has no name")
        arguments = function.raw("arguments")
        if isinstance(arguments, str):
            check_encodable(function.name("arguments"), arguments)
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }
    if (identity := fields.text("id")) is not None:
        call["id"] = identity
    return call


# --- tools ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class RequestTools:
    """The parsed tools of a request."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """Functions for the model, in the form of a chat's ``tools`` without ``strict``."""
    strict: set[str] = field(default_factory=set)
    client_tools: dict[str, ClientTool] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Kinds of tools that no model here has, as words for a header."""


def read_tools(fields: Fields, max_tools: int = MAX_TOOLS) -> RequestTools:
    """Return the parsed ``tools``, at most ``most`` of them. Kinds that only the service of another
    provider can run, such as ``web_search``, are left out. Raises ``ApiError``."""
    tools = RequestTools()
    for one in fields.sections("tools", max_tools):
        kind = one.text("type")
        if kind == "function":
            function = one.section("function")
            name = _read_tool_name(function)
            function.section("parameters")  # raises if it is not an object
            if function.boolean("strict"):
                tools.strict.add(name)
            description = {key: value for key, value in function.data.items() if key != "strict"}
        elif kind == "custom":
            custom = one.section("custom")
            name = _read_tool_name(custom)
            tools.client_tools[name] = ClientTool(name, is_custom=True)
            description = custom_function(custom)
        elif kind:
            tools.left_out += (f"tools.{kind}",)
            continue
        else:
            raise one.wrong_value("type", kind, "'function' or 'custom'")
        tools.functions.append({"type": "function", "function": description})
    return tools


def custom_function(custom: Fields) -> dict[str, Any]:
    """Return the function that stands for a custom tool. The tool takes plain text, so its format
    is described in words."""
    descriptions = [custom.text("description") or ""]
    form = custom.section("format")
    if form.text("type") == "grammar":
        grammar = form.section("grammar") if form.raw("grammar") is not None else form
        syntax, rules = grammar.text("syntax") or "", grammar.text("definition") or ""
        descriptions.append(f"The input has to match this {syntax} grammar:\n{rules}")
    text = {"type": "string", "description": "The input of the tool, as plain text"}
    return {
        "name": custom.text("name"),
        "description": "\n\n".join(filter(None, descriptions)),
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        },
    }


def _read_tool_name(fields: Fields) -> str:
    name = fields.text("name")
    if not name or len(name) > _MAX_TOOL_NAME or not name.isprintable():
        wanted = f"1 to {_MAX_TOOL_NAME} characters without line breaks"
        raise fields.wrong_value("name", name, wanted)
    return name


def _choose_tools(fields: Fields, tools: RequestTools) -> tuple[str, list[dict[str, Any]]]:
    """Return ``auto``, ``none`` or ``required``, and the tools that may be called."""
    value = fields.raw("tool_choice")
    if value in _UNFORCED_CHOICES:
        return "auto", [] if value == "none" else tools.functions
    if value == "required":
        mode, names = value, None
    elif isinstance(value, dict):
        mode, names = _read_tool_choice(fields.section("tool_choice"))
    else:
        raise fields.wrong_value("tool_choice", value, "'auto', 'none', 'required' or a function")
    callable_tools = [
        one for one in tools.functions if names is None or one["function"]["name"] in names
    ]
    if not callable_tools and (mode == "required" or names):
        raise fields.error("tool_choice", f"is {shown_value(value)}, but tools has no such tool")
    return mode, callable_tools


def _names_function(fields: Fields) -> bool:
    """Return whether ``tool_choice`` is the name of one function, which is then called once."""
    choice = fields.raw("tool_choice")
    return isinstance(choice, dict) and choice.get("type") != "allowed_tools"


def _read_tool_choice(choice: Fields) -> tuple[str, set[str | None]]:
    """Return the mode and the names of a ``tool_choice`` that is an object."""
    if choice.raw("type") != "allowed_tools":
        return "required", {_chosen_name(choice)}
    allowed = choice.section("allowed_tools")
    mode = allowed.text("mode")
    if mode not in ("auto", "required"):
        raise allowed.wrong_value("mode", mode, "'auto' or 'required'")
    return mode, {_chosen_name(one) for one in allowed.sections("tools", MAX_TOOLS)}


def _chosen_name(choice: Fields) -> str | None:
    kind = choice.text("type")
    return choice.section(kind).text("name") if kind in ("function", "custom") else None
