"""From a request's words to token ids and the jobs that an agent runs.

A text is tokenized in a thread. The memory that this takes is some hundred times the text, so that
a long text is first counted piece by piece, as far as the context reaches: 4 MB for a context of
512 tokens are refused after one piece of 64 KiB.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from edgespec.core.protocol.sampling import MAX_TOKENS, SamplingParams
from edgespec.endpoint.answer import Choice, ToolUse
from edgespec.endpoint.errors import ApiError, invalid
from edgespec.endpoint.marked_text import MarkedText
from edgespec.endpoint.requests import Asked, ChatRequest, Prompt, seed_of
from edgespec.endpoint.run import Job
from edgespec.endpoint.structured import forced_call, no_format
from edgespec.endpoint.tool_calls import MARKS, tool_format, tool_reader
from edgespec.models.chat_template import ChatTokenizer, TokenizerError

_PIECE: Final = 1 << 16
"""Characters that are counted at once."""
_SLACK: Final = 2
"""A text cut into pieces may have other tokens than the whole one, beside each cut. No tokenizer
makes half of them by it."""


async def chat_tokens(
    tokenizer: ChatTokenizer,
    request: ChatRequest,
    context_length: int | None,
    one_long: asyncio.Lock,
) -> list[int]:
    """The prompt of a conversation. Templates and long texts take a while, so this runs in a
    thread; ``one_long`` as in ``_encode``. Raises ``ApiError``."""
    template = tokenizer.chat_template(tools=bool(request.tools))
    if template is None:
        raise invalid(
            "messages",
            "this model has no chat template; use /v1/completions",
            "no_chat_template",
        )
    try:
        if request.tools and not template.knows_tools:
            raise invalid("tools", "the chat template of this model knows no tools", "no_tools")
        text = await asyncio.to_thread(
            tokenizer.render_chat,
            request.messages,
            tools=request.tools or None,
            variables=request.variables,
        )
        return await _encode(
            tokenizer, text, context_length, "messages", one_long, add_special_tokens=False
        )
    except TokenizerError as error:
        raise invalid("messages", str(error)) from None


async def prompt_tokens(
    tokenizer: ChatTokenizer, prompt: Prompt, context_length: int | None, one_long: asyncio.Lock
) -> Sequence[int]:
    """The ids of a text, as ``edgespec generate`` makes them, or those given. Raises
    ``ApiError``."""
    if not isinstance(prompt, str):
        return prompt
    return await _encode(tokenizer, prompt, context_length, "prompt", one_long)


async def _encode(
    tokenizer: ChatTokenizer,
    text: str,
    context_length: int | None,
    param: str,
    one_long: asyncio.Lock,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """In a thread; a long text while it holds ``one_long``, which bounds the memory that all of
    them take. Raises ``ApiError``."""
    long = len(text) > _PIECE
    async with one_long if long else contextlib.nullcontext():
        if long:
            await asyncio.to_thread(_check_length, tokenizer, text, context_length, param)
        return await asyncio.to_thread(
            tokenizer.encode, text, add_special_tokens=add_special_tokens
        )


def _check_length(
    tokenizer: ChatTokenizer, text: str, context_length: int | None, param: str
) -> None:
    """Raises ``ApiError`` for a text of far more tokens than the context has. What passes is still
    to be counted. ``context_length`` None: the longest that a verifier can have."""
    longest, counted = context_length or MAX_TOKENS, 0
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE]
        counted += len(tokenizer.encode(piece, add_special_tokens=False))
        if counted > _SLACK * longest:
            read = start + len(piece)
            raise _too_long(
                f"the first {read} of the prompt's {len(text)} characters are some {counted}"
                " tokens",
                longest,
                param,
            )


def _too_long(why: str, context_length: int, param: str) -> ApiError:
    return ApiError(
        400,
        f"{why}, which leaves no room for output in the context of {context_length} tokens",
        param=param,
        code="context_length_exceeded",
    )


def with_forced_call(tokenizer: ChatTokenizer, request: ChatRequest) -> ChatRequest:
    """The same request, held to a call where there must be one. Raises ``ApiError``."""
    if not request.must_call:
        return request
    template = tokenizer.chat_template(tools=True)
    form = None if template is None else tool_format(template.source)
    if template is None or form is None:
        raise no_format()
    constraint = forced_call(
        form, template.source, request.tools, tokenizer.special_id, one=request.one_call
    )
    sampling = replace(request.asked.sampling, constraint=constraint)
    return replace(request, asked=replace(request.asked, sampling=sampling))


def sampling_of(
    asked: Asked,
    tokens: Sequence[int],
    context_length: int | None,
    default_max_tokens: int,
    param: str = "messages",
) -> SamplingParams:
    """The sampling of one prompt. ``max_tokens`` is what was asked for, or the default, but no more
    than the context has room for; ``context_length`` None: nobody knows it yet. Raises ``ApiError``
    for a prompt that leaves no room, which came as ``param``."""
    if not tokens:
        raise invalid("prompt", "the prompt is empty, but must hold at least one token")
    longest = asked.max_tokens or default_max_tokens
    if context_length is not None:
        room = context_length - len(tokens)
        if room < 1:
            raise _too_long(f"the prompt has {len(tokens)} tokens", context_length, param)
        longest = min(longest, room)
    return replace(asked.sampling, max_tokens=longest)


def choices_of(
    asked: Asked,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    tokenizer: ChatTokenizer,
    request: ChatRequest | None = None,
    model: str = "",
) -> list[Choice]:
    """The texts to generate by the model of that name: n of each prompt, one prompt's after the
    other's. Text k of a prompt (from 0) has the seed ``seed_of(seed, k)``."""
    found: list[Choice] = []
    # Of the agent one score is the least that can be asked for.
    logprobs = max(1, asked.top_logprobs) if asked.scored else 0
    for tokens, sampling in zip(prompts, samplings, strict=True):
        for k in range(asked.n):
            own = replace(sampling, seed=seed_of(sampling.seed, k))
            job = Job(len(found), tokens, own, logprobs)
            job.must_call = request is not None and request.must_call
            job.conversation, job.model = asked.conversation, model
            tools = None if request is None else _tool_use(request, tokenizer)
            found.append(
                Choice(job, asked.scored, asked.top_logprobs, tokenizer.token_bytes, tools)
            )
    return found


def _tool_use(request: ChatRequest, tokenizer: ChatTokenizer) -> ToolUse | None:
    """None where no calls are to be looked for, or in a format that nobody here knows."""
    template = tokenizer.chat_template(tools=True) if request.tools else None
    form = None if template is None else tool_format(template.source)
    if form is None:
        return None
    names = [tool["function"]["name"] for tool in request.tools]
    ids = {tokenizer.special_id(mark): mark for mark in MARKS}
    marks = {token: mark for token, mark in ids.items() if token is not None}
    return ToolUse(tool_reader(form, names), MarkedText(marks), request.one_call)
