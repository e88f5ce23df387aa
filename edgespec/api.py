"""The Python API: ``connect`` for asyncio, ``SyncAgent`` without it.

    async with edgespec.connect("localhost:7420") as agent:
        completion = await agent.complete("def fibonacci(n):", max_tokens=64)
        print(completion.text)

All exceptions are in ``core/protocol/errors.py``, drawn as a tree.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack

from edgespec.config import DEFAULT_ADDRESS, AgentConfig, DraftSection, load_config
from edgespec.config.common import DeviceTlsSection
from edgespec.config.device import LinkSection, PolicySection
from edgespec.config.files import read_bytes
from edgespec.core.device.events import TokenKind
from edgespec.core.device.goodput_policy import DEFAULT_POLICY
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol import errors
from edgespec.core.protocol.constraint import Constraint, ConstraintError, ConstraintKind
from edgespec.core.protocol.messages import EXACT_RULE, FaultCode, FinishReason
from edgespec.core.protocol.pictures import (
    MAX_PICTURE_BYTES,
    PictureInput,
    PlacedPicture,
    read_header,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import TokenScore
from edgespec.device.agent import Agent as DeviceAgent
from edgespec.device.agent import Chunk, GenerationStats
from edgespec.device.borrowed_tokenizer import BorrowingAgent, takes_target_texts
from edgespec.device.build import build_agent, load_tokenizer, tokenizer_reference
from edgespec.device.connections import Connections
from edgespec.local_verifier import LocalVerifier, run_verifier

if TYPE_CHECKING:
    from edgespec.device.build import PromptTokenizer
    from edgespec.endpoint.chat_prompt import ChatPrompt as RenderedPrompt
    from edgespec.endpoint.output_parser import Part
    from edgespec.endpoint.pictures import SentPicture
    from edgespec.endpoint.tool_calls import ToolCall

Draft = DraftSection
TLS = DeviceTlsSection
Link = LinkSection
Policy = PolicySection
EdgespecError = errors.EdgespecError
SetupError = errors.SetupError
GenerationError = errors.GenerationError
ConnectError = errors.ConnectError
GenerationTimeout = errors.GenerationTimeout
Refused = errors.Refused
InvalidRequest = errors.InvalidRequest
Unauthenticated = errors.Unauthenticated
Overloaded = errors.Overloaded

__all__ = [
    "TLS",
    "Agent",
    "AgentConfig",
    "CallOptions",
    "Chunk",
    "Completion",
    "ConnectError",
    "ConnectOptions",
    "Constraint",
    "ConstraintError",
    "ConstraintKind",
    "Draft",
    "EdgespecError",
    "FaultCode",
    "FinishReason",
    "GenerateOptions",
    "GenerationError",
    "GenerationStats",
    "GenerationStream",
    "GenerationTimeout",
    "InvalidRequest",
    "Link",
    "LocalVerifier",
    "ModelInfo",
    "Overloaded",
    "PictureInput",
    "PlacedPicture",
    "Policy",
    "Refused",
    "SamplingFields",
    "SamplingParams",
    "SetupError",
    "SyncAgent",
    "SyncGenerationStream",
    "TokenKind",
    "TokenScore",
    "Unauthenticated",
    "Usage",
    "connect",
    "picture_part",
    "run_verifier",
]

_log = logging.getLogger(__name__)
_DEFAULT_DRAFT = DraftSection().model
_T = TypeVar("_T")
Prompt = str | Sequence[int]
"""Text, or token ids of the target."""
Message = Mapping[str, Any]
"""A message as in OpenAI's chat API: ``{"role": "user", "content": "Hello"}``."""
Tool = Mapping[str, Any]
"""A tool as in OpenAI's chat API: ``{"type": "function", "function": {...}}``."""


class SamplingFields(TypedDict, total=False):
    """The fields of ``SamplingParams`` as keywords. Each has the meaning and default it has
    there."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    constraint: Constraint | None


class GenerateOptions(TypedDict, total=False):
    """Options of one generation beside its sampling. ``Agent.generate`` says what they do."""

    logprobs: int
    conversation: str
    model: str
    rule: str
    prediction: Prompt | None
    pictures: Sequence[PlacedPicture]


class CallOptions(SamplingFields, GenerateOptions, total=False):
    """Keywords of ``Agent.stream``, which ``complete`` and ``chat`` take too."""

    timeout_s: float | None
    sampling: SamplingParams | None


class ConnectOptions(TypedDict, total=False):
    """Keywords of ``connect``, which ``SyncAgent`` takes too."""

    draft: str | Draft
    tokenizer: str
    model: str
    rule: str
    policy: str | Policy
    link: Link | None
    tls: bool | TLS
    api_key_file: str
    insecure: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one completion."""

    prompt_tokens: int
    completion_tokens: int
    """Committed tokens, with the one that ended the output."""

    @property
    def total_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole output."""

    text: str
    """The output as text, without a stop string that ended it. In a chat it is the answer without
    the thought and the calls."""
    tokens: tuple[int, ...]
    finish: FinishReason
    usage: Usage
    stats: GenerationStats = field(repr=False)
    """Measurements of this generation: draft nodes, passes, estimates, verifiers."""
    logprobs: tuple[TokenScore, ...] = field(default=(), repr=False)
    """One score for each of ``tokens`` if ``logprobs`` was given, else empty."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that a chat's answer holds, in order. ``arguments`` of a call is JSON text."""
    thought: str = ""
    """The thought that a model wrote before its answer in a chat, if its template has thoughts."""


class GenerationStream:
    """One running generation: an asynchronous iterator of ``Chunk``.

        async with agent.stream("Once upon a time", max_tokens=64) as stream:
            async for chunk in stream:
                print(chunk.text, end="")
        print(stream.stats.counters.accepted)

    Leaving the block, or ``aclose``, cancels a generation that still runs.
    """

    def __init__(
        self, start: Callable[[Callable[[GenerationStats], None]], AsyncGenerator[Chunk, None]]
    ) -> None:
        """``start`` makes the generator of chunks. It is given a function that the generation calls
        with its statistics when it begins."""
        self._stats: GenerationStats | None = None
        self._chunks = start(self._keep_stats)

    def _keep_stats(self, stats: GenerationStats) -> None:
        self._stats = stats

    @property
    def stats(self) -> GenerationStats:
        """Measurements of this generation so far. Raises ``RuntimeError`` before the first chunk
        was asked for."""
        if self._stats is None:
            raise RuntimeError("the generation has not begun: ask for a chunk first")
        return self._stats

    async def read(self) -> Completion:
        """Read to the end, and return what came since the last chunk that was read. Raises what
        ``Agent.generate`` raises."""
        return self.completion_of([chunk async for chunk in self])

    def completion_of(self, chunks: Sequence[Chunk]) -> Completion:
        """Return ``chunks`` of this generation as one object. They are all that came since some
        point, up to the last. Raises ``RuntimeError`` if the last one is not among them."""
        finish = chunks[-1].finish if chunks else None
        if finish is None:
            raise RuntimeError("the generation was read to its end before, or closed")
        tokens = tuple(token for chunk in chunks for token in chunk.tokens)
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            tokens=tokens,
            finish=finish,
            usage=Usage(self.stats.prompt_tokens, len(tokens)),
            stats=self.stats,
            logprobs=tuple(score for chunk in chunks for score in chunk.logprobs),
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        """Cancel the generation if it still runs."""
        await self._chunks.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


class Agent:
    """A device: it drafts, and streams the target's own output from a verifier, or several.

    Use as ``async with``, or call ``close``. ``load`` runs in a thread at the first use, since
    a draft model may have to be fetched and exported.
    """

    def __init__(self, config: AgentConfig | None = None) -> None:
        """``config`` has every setting there is; ``connect`` takes the usual ones by name."""
        self.config = config or AgentConfig()
        self._device: DeviceAgent | None = None
        self._connections: Connections | None = None
        self._warming: asyncio.Task[None] | None = None
        self._loading = asyncio.Lock()
        self._is_closed = False

    @classmethod
    def around(cls, device: DeviceAgent) -> Self:
        """Return an agent that drives ``device``, which is made already (``edgespec.testing``)."""
        agent = cls()
        agent._device = device
        return agent

    async def load(self) -> None:
        """Load the draft model, without holding up the event loop. A second call does nothing.

        The connections to the verifiers are opened meanwhile, and kept open until ``close``
        (``AgentConfig.keep_warm_s``), so that the first text need not wait for them. A verifier
        that does not answer yet is logged, and is no error.

        Raises:
            SetupError: Something is not installed.
            ValueError: A setting or a file cannot be used; the message names it.
        """
        await self._loaded()

    async def _loaded(self) -> DeviceAgent:
        if self._is_closed:
            raise RuntimeError("the agent is closed")
        async with self._loading:
            if self._device is None:
                wants_texts = takes_target_texts(self.config)
                connections = Connections(self.config, with_texts=wants_texts)
                connections.start()
                try:
                    device = await asyncio.to_thread(_build, self.config, connections)
                except BaseException:
                    await connections.close()
                    raise
                connections.keep_warm()
                self._device, self._connections = device, connections
                self._warming = asyncio.create_task(_warm_up(device, connections))
            return self._device

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        logprobs: int = 0,
        conversation: str = "",
        model: str = "",
        rule: str = "",
        prediction: Prompt | None = None,
        pictures: Sequence[PlacedPicture] = (),
        started: Callable[[GenerationStats], None] | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the target's output. Leaving the loop early cancels the generation.

        Args:
            prompt: Text, or token ids. One that is longer than the draft's context is served
                without drafting.
            sampling: How to sample; None is greedy.
            logprobs: Return each token's log-probability with this many of the likeliest tokens
                (1 to 20); 0 returns none. The output is the same.
            conversation: Any name. Generations of one conversation go to the same replica where
                replicas are chosen by it. Only a hash leaves the device. Empty: prompts that begin
                alike belong together.
            model: The target or adapter to use, by name; empty: that of the configuration.
            rule: The acceptance rule; empty: that of the configuration.
            prediction: Text that the output is expected to be, such as the file that it edits, or
                its token ids. The device drafts from it: the more of it is right, the sooner the
                output arrives. It changes no token.
            pictures: Pictures of a prompt of token ids, at their placeholders. ``chat`` takes them
                from the messages and places them itself.
            started: Called with the statistics of this generation, which grow as it goes.

        Raises:
            TypeError, ValueError: An argument cannot be used. Nothing was sent.
            ConstraintError: The constraint of ``sampling`` cannot be kept.
            GenerationError: One of its kinds (``core/protocol/errors.py``).
        """
        device = await self._loaded()
        chunks = device.generate(
            prompt,
            sampling,
            logprobs=logprobs,
            conversation=conversation,
            model=model,
            rule=rule,
            prediction=prediction,
            pictures=pictures,
            started=started,
        )
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        sampling: SamplingParams | None = None,
        logprobs: int = 0,
        conversation: str = "",
        model: str = "",
        rule: str = "",
        prediction: Prompt | None = None,
        pictures: Sequence[PlacedPicture] = (),
        **fields: Unpack[SamplingFields],
    ) -> GenerationStream:
        """Return the stream of a generation, which begins when its first chunk is asked for.

        ``timeout_s`` are the seconds that the whole generation may take from then on; None sets no
        limit. ``fields`` are fields of ``SamplingParams``, and win over ``sampling``. Everything
        else is as in ``generate``, and so are the errors; beyond ``timeout_s`` the stream raises
        ``GenerationTimeout``.
        """
        wanted = replace(sampling or SamplingParams(), **fields)
        options: GenerateOptions = {
            "logprobs": logprobs,
            "conversation": conversation,
            "model": model,
            "rule": rule,
            "prediction": prediction,
            "pictures": pictures,
        }
        return GenerationStream(
            lambda started: self._chunks(prompt, wanted, timeout_s, options, started)
        )

    async def complete(self, prompt: Prompt, **options: Unpack[CallOptions]) -> Completion:
        """Return the whole output. Equivalent to ``await agent.stream(...).read()``, with the same
        ``options``."""
        async with self.stream(prompt, **options) as stream:
            return await stream.read()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        **options: Unpack[CallOptions],
    ) -> Completion:
        """Answer a conversation by the chat template of the target.

        ``messages`` and ``tools`` are as in OpenAI's chat API. A picture is a part of a user's
        message (``picture_part``), for a model that reads pictures. The calls that the answer holds
        are in ``Completion.tool_calls``, the model's thought in ``thought``, and the rest in
        ``text``. ``options`` are the keywords of ``stream``.

        Raises:
            ValueError: The model has no chat template, or the template refuses the messages; or it
                reads text only, or a picture exceeds a bound of its verifier.
            GenerationError: As ``generate`` does.
        """
        prompt = await self._chat_prompt(messages, tools)
        if prompt.pictures:
            bounds = await self._find_bounds(options.get("model") or self.config.model)
            placed = await asyncio.to_thread(_place_pictures, prompt, bounds)
            options = {**options, "pictures": placed}
        async with self.stream(prompt.tokens, **options) as stream:
            return await _read_parts(stream, prompt, tools)

    async def chat_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()
    ) -> tuple[int, ...]:
        """Return the prompt of a conversation as token ids, for ``stream`` or ``complete``. Raises
        ``ValueError`` as ``chat`` does."""
        return (await self._chat_prompt(messages, tools)).tokens

    async def models(self) -> tuple[ModelInfo, ...]:
        """Return the models and adapters of the verifiers that answer now, the usual one first.
        Raises ``ConnectError`` if none answers."""
        return await (await self._loaded()).models()

    @property
    def stats(self) -> GenerationStats | None:
        """Measurements of the generation that began last, or None before the first one. A
        ``GenerationStream`` and a ``Completion`` have their own measurements."""
        return None if self._device is None else self._device.stats

    async def close(self) -> None:
        """Cancel what runs, and free the draft model. A second call does nothing."""
        self._is_closed = True
        async with self._loading:
            device, self._device = self._device, None
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        if device is not None:
            await device.close()
        if self._connections is not None:
            await self._connections.close()

    async def __aenter__(self) -> Self:
        await self.load()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _chunks(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        timeout_s: float | None,
        options: GenerateOptions,
        started: Callable[[GenerationStats], None],
    ) -> AsyncGenerator[Chunk, None]:
        device = await self._loaded()
        loop = asyncio.get_running_loop()
        until = None if timeout_s is None else loop.time() + timeout_s
        chunks = device.generate(prompt, sampling, started=started, **options)
        try:
            while True:
                try:
                    # Only this wait is limited: what the reader does with a chunk is its own.
                    async with asyncio.timeout_at(until):
                        chunk = await anext(chunks, None)
                except TimeoutError as error:
                    if isinstance(error, GenerationError):
                        raise
                    late = f"the generation took longer than timeout_s, {timeout_s:g} s"
                    raise GenerationTimeout(late) from None
                if chunk is None:
                    return
                yield chunk
        finally:
            await chunks.aclose()

    async def _find_bounds(self, model: str) -> PictureInput:
        """Return the bounds on pictures of the model of that name, or of the usual one. Raises
        ``ValueError`` if it reads text only."""
        models = await self.models()
        found = next((one for one in models if one.name == model), models[0])
        if found.pictures is None:
            raise ValueError(f"the messages have pictures, but {found.name!r} reads text only here")
        return found.pictures

    async def _chat_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> _ChatPrompt:
        device = await self._loaded()
        reference = tokenizer_reference(self.config)
        if isinstance(device, BorrowingAgent):
            await device.take_texts()
            reference = device.reference
        return await asyncio.to_thread(_write_prompt, reference, messages, tools)


@dataclass(frozen=True, slots=True)
class _ChatPrompt:
    """The prompt of a conversation, and what reading the answer takes."""

    tokens: tuple[int, ...]
    written: RenderedPrompt
    """The prompt as text."""
    tokenizer: PromptTokenizer
    pictures: tuple[SentPicture, ...] = ()
    """The pictures of the messages."""


def _build(config: AgentConfig, connections: Connections) -> DeviceAgent:
    if takes_target_texts(config):
        return BorrowingAgent(config, connections=connections)
    return build_agent(config, lease=connections.lease)


async def _warm_up(device: DeviceAgent, connections: Connections) -> None:
    """Greet the verifiers before the first prompt. Log each that does not answer, once."""
    answers = (await connections.answers()).values()
    for answer in answers:
        if answer.error is not None:
            again = "; the first generation tries again" if answer.error.retryable else ""
            _log.warning("%s%s", answer.why, again)
    await device.warm_up()


def _write_prompt(
    reference: str, messages: Sequence[Message], tools: Sequence[Tool]
) -> _ChatPrompt:
    """Render the conversation by the chat template of the tokenizer ``reference``. Raises
    ``ValueError``."""
    from edgespec.endpoint.chat_prompt import write_chat_prompt
    from edgespec.endpoint.pictures import take_pictures
    from edgespec.endpoint.request_json import ApiError

    try:
        messages, pictures = take_pictures(messages)
    except ApiError as error:
        raise ValueError(error.message) from None
    tokenizer = load_tokenizer(reference)
    template = tokenizer.chat_template(tools=bool(tools))
    if template is None:
        raise ValueError("this model has no chat template: use complete() or stream()")
    written = write_chat_prompt(template, messages, tools)
    return _ChatPrompt(tuple(tokenizer.encode(written.text)), written, tokenizer, pictures)


def _place_pictures(prompt: _ChatPrompt, bounds: PictureInput) -> tuple[PlacedPicture, ...]:
    """Return the pictures of a prompt at their placeholders. Raises ``ValueError``."""
    from edgespec.endpoint.pictures import check_pictures, fetch_pictures, place_in_prompt
    from edgespec.endpoint.request_json import ApiError

    try:
        pictures = fetch_pictures(prompt.pictures, bounds.max_bytes, is_allowed=False)
        check_pictures(pictures, bounds)
        return place_in_prompt(prompt.tokens, pictures, bounds)
    except ApiError as error:
        raise ValueError(error.message) from None


def picture_part(source: str | Path | bytes) -> dict[str, Any]:
    """Return a picture as a part of a user's message, for ``Agent.chat``.

    ``source`` is the path of a file, or the bytes of one: PNG, JPEG, WebP or GIF, at most 64 MiB.
    Raises ``OSError`` if the file cannot be read, and ``ValueError`` if it is no picture."""
    try:
        if not isinstance(source, bytes):
            data = read_bytes(Path(source), MAX_PICTURE_BYTES)
        else:
            data = source
        kind = read_header(data).format.lower()
    except ValueError as error:
        what = "the picture" if isinstance(source, bytes) else str(source)
        raise ValueError(f"{what} {error}") from None
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def _read_parts(
    stream: GenerationStream, prompt: _ChatPrompt, tools: Sequence[Tool]
) -> Completion:
    """Read ``stream`` to its end, and part its text from its thought and its calls."""
    from edgespec.endpoint.chat_prompt import output_form
    from edgespec.endpoint.output_parser import join_parts
    from edgespec.endpoint.thoughts import Thought
    from edgespec.endpoint.tool_calls import ToolCall

    template = prompt.tokenizer.chat_template(tools=bool(tools))
    assert template is not None
    parser = output_form(template, tools, prompt.written).make_parser(prompt.tokenizer)
    if parser is None:
        return await stream.read()
    found: list[Part] = []
    chunks: list[Chunk] = []
    async for chunk in stream:
        chunks.append(chunk)
        for place, piece in enumerate(chunk.pieces):
            token = chunk.tokens[place] if place < len(chunk.tokens) else None
            found += parser.push(token, piece)
    items = join_parts([*found, *parser.flush()])
    return replace(
        stream.completion_of(chunks),
        text="".join(one for one in items if isinstance(one, str)),
        thought="".join(one.text for one in items if isinstance(one, Thought)),
        tool_calls=tuple(one for one in items if isinstance(one, ToolCall)),
    )


def connect(
    address: str | Sequence[str] = DEFAULT_ADDRESS,
    *,
    draft: str | Draft = _DEFAULT_DRAFT,
    tokenizer: str = "",
    model: str = "",
    rule: str = EXACT_RULE,
    policy: str | Policy = DEFAULT_POLICY.value,
    link: Link | None = None,
    tls: bool | TLS = False,
    api_key_file: str = "",
    insecure: bool = False,
) -> Agent:
    """Return an agent for the verifier at ``address``. Use it as ``async with``.

    Nothing is loaded or sent before the first use, which ``async with`` is: it loads the draft and
    opens the connections. Every other setting is in ``AgentConfig``, from which ``Agent(config)``
    makes an agent.

    Args:
        address: ``host:port`` or ``unix:path``, or several: the best is used, and if it
            fails in the middle of a generation, another goes on.
        draft: ``bundled``, a folder, a Hub id, ``lookup`` to draft from the text without a model,
            ``none`` to only stream; or a ``Draft`` with all its settings. In place of ``bundled``
            the draft of the catalogue is used if the verifier serves the target of a pair.
        tokenizer: A folder or Hub id. Empty: the verifier's, which it sends once.
        model: The target or adapter to ask for, by name; empty: what the verifier serves.
        rule: The acceptance rule; all but ``exact`` are LOSSY.
        policy: When to draft, by name, or a ``Policy`` with all its settings.
        link: A link to emulate on top of the real one.
        tls: True encrypts and trusts the CAs of the system; a ``TLS`` names files.
        api_key_file: The file of the API key. ``EDGESPEC_API_KEY`` wins over it.
        insecure: Send the API key even where it can be read on its way.

    Raises:
        ValueError: A setting cannot be; the message names it and what it must be.
    """
    settings = {
        "verifier": address if isinstance(address, str) else list(address),
        "model": model,
        "rule": rule,
        "tokenizer": tokenizer,
        "draft.model": draft if isinstance(draft, str) else None,
        "policy.name": policy if isinstance(policy, str) else None,
        "tls.enabled": tls if isinstance(tls, bool) else None,
        "api_key_file": api_key_file,
        "insecure": insecure,
    }
    config = load_config(AgentConfig, None, settings, overrides_from="connect")
    return Agent(
        replace(
            config,
            draft=draft if isinstance(draft, Draft) else config.draft,
            policy=policy if isinstance(policy, Policy) else config.policy,
            tls=tls if isinstance(tls, TLS) else config.tls,
            link=link or config.link,
        )
    )


class SyncGenerationStream:
    """``GenerationStream`` without asyncio: an iterator of ``Chunk``, and a context manager."""

    def __init__(self, call: _Call, stream: GenerationStream) -> None:
        self._call, self._stream = call, stream
        self._reading: asyncio.Task[Any] | None = None

    @property
    def stats(self) -> GenerationStats:
        """Measurements of the generation, like ``GenerationStream.stats``."""
        return self._stream.stats

    def read(self) -> Completion:
        """Read to the end, as ``GenerationStream.read``."""
        return self._call(self._watched(self._stream.read))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        chunk = self._call(self._watched(self._next))
        if chunk is None:
            raise StopIteration
        return chunk

    def close(self) -> None:
        """Cancel the generation if it still runs."""
        self._call(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _next(self) -> Chunk | None:
        return await anext(self._stream, None)

    async def _watched(self, read: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        self._reading = asyncio.current_task()
        try:
            return await read()
        finally:
            self._reading = None

    async def _close(self) -> None:
        """Close the stream, after a read that its caller has left with a Ctrl-C: a generator that
        still runs cannot be closed."""
        if (reading := self._reading) is not None:
            reading.cancel()
            await asyncio.wait([reading])
        await self._stream.aclose()


class SyncAgent:
    """``connect`` and ``Agent`` without asyncio: the same arguments, and plain ``for`` loops.

        with edgespec.SyncAgent("localhost:7420") as agent:
            print(agent.complete("def fibonacci(n):", max_tokens=64).text)

    An event loop runs in a thread of its own. Use as a context manager, or call ``close``. One
    object may be used from several threads.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        **options: Unpack[ConnectOptions],
    ) -> None:
        """Make the agent, and load its draft model. ``options`` are the keywords of ``connect``.
        Raises what ``Agent.load`` raises."""
        self._agent = connect(address, **options)
        self._call = _Call()
        try:
            self._call(self._agent.load())
        except BaseException:
            self._call.close()
            raise

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[Chunk, None, None]:
        """Stream the target's output, as ``Agent.generate``. Leaving the loop early cancels the
        generation."""
        with self.stream(prompt, sampling=sampling, **options) as stream:
            yield from stream

    def stream(self, prompt: Prompt, **options: Unpack[CallOptions]) -> SyncGenerationStream:
        """Return the stream of a generation, as ``Agent.stream``."""
        return SyncGenerationStream(self._call, self._agent.stream(prompt, **options))

    def complete(self, prompt: Prompt, **options: Unpack[CallOptions]) -> Completion:
        """Return the whole output, as ``Agent.complete``."""
        return self._call(self._agent.complete(prompt, **options))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        **options: Unpack[CallOptions],
    ) -> Completion:
        """Answer a conversation, as ``Agent.chat``."""
        return self._call(self._agent.chat(messages, tools=tools, **options))

    def models(self) -> tuple[ModelInfo, ...]:
        """Return what the verifiers serve now, as ``Agent.models``."""
        return self._call(self._agent.models())

    @property
    def stats(self) -> GenerationStats | None:
        """Measurements of the last generation, like ``Agent.stats``."""
        return self._agent.stats

    def close(self) -> None:
        """Cancel what runs and stop the thread. A second call does nothing."""
        if self._call.is_closed:
            return
        try:
            self._call(self._agent.close())
        finally:
            self._call.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Call:
    """Runs coroutines in an event loop of its own, which runs in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="edgespec-agent", daemon=True
        )
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def __call__(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return what ``work`` returns, or raise what it raises. Raises ``RuntimeError`` after
        ``close``."""
        if self.is_closed:
            work.close()
            raise RuntimeError("the agent is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # a Ctrl-C here must not leave the work running there
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
