"""One endpoint without HTTP: an agent, its tokenizer, and all that requests share; from the words
of a request to its generations, which run beside each other as one stream of events.

So many texts run at a time, so many requests wait in the order of arrival, the rest is refused. A
text is tokenized in a thread. The memory that this takes is some hundred times the text, so a long
text is first counted piece by piece, as far as the context reaches: 4 MB for a context of 512
tokens are refused after one piece of 64 KiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from edgespec.config.device import EndpointSection
from edgespec.core.protocol.constraint import ConstraintError, ConstraintKind
from edgespec.core.protocol.sampling import MAX_TOKENS, SamplingParams
from edgespec.device.agent import Agent, GenerationError
from edgespec.device.reply import Chunk
from edgespec.endpoint.answer import (
    ChatShape,
    Choice,
    CompletionShape,
    Envelope,
    Job,
    Shape,
    ToolUse,
    usage_of,
)
from edgespec.endpoint.counts import OTHER, EndpointCounts, PromptLog
from edgespec.endpoint.models import Chosen, ServedModels, VerifierWatch
from edgespec.endpoint.request_json import (
    ApiError,
    Fields,
    from_generation,
    invalid,
    no_tokenizer,
    stopping,
)
from edgespec.endpoint.requests import (
    Asked,
    ChatRequest,
    Prompt,
    chat_request,
    completion_request,
    seed_of,
    token_ids,
)
from edgespec.endpoint.responses import ResponseEnvelope, as_chat
from edgespec.endpoint.tool_calls import (
    MARKS,
    MarkedText,
    forced_call,
    no_format,
    tool_format,
    tool_reader,
)
from edgespec.models.chat_template import ChatTokenizer, TokenizerError
from edgespec.telemetry.logs import request_id

RETRY_AFTER_S = 1


class Admission:
    """``capacity`` texts run, ``max_waiting`` requests wait."""

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self.capacity, self._max_waiting = capacity, max_waiting
        self.running = 0
        """Texts that have their turn."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._closed: ApiError | None = None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, texts: int) -> AsyncIterator[None]:
        """Room for so many texts, at most ``capacity``, while this is open. Raises ``ApiError``:
        429 where the queue is full, and what ``close`` was given."""
        await self._enter(texts)
        try:
            yield
        finally:
            self.running -= texts
            self._let_in()

    def check(self, texts: int = 1) -> None:
        """Raises ``ApiError`` 429 where so many texts would have to wait and the queue is full. Ask
        before the work that a request is: it is for nothing where this holds."""
        has_room = not self._waiting and self.running + texts <= self.capacity
        if not has_room and len(self._waiting) >= self._max_waiting:
            raise ApiError(
                429,
                f"{self.running} texts run and {len(self._waiting)} requests wait, of at most"
                f" {self.capacity} and {self._max_waiting}: try again",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )

    def close(self, why: ApiError) -> None:
        """From now on nobody gets a turn, those who wait included; who has one keeps it."""
        self._closed = why
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(why)

    async def _enter(self, texts: int) -> None:
        assert 0 < texts <= self.capacity
        if self._closed is not None:
            raise self._closed
        self.check(texts)
        if not self._waiting and self.running + texts <= self.capacity:
            self.running += texts
            return
        entry = (texts, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        except BaseException:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif entry[1].done() and not entry[1].cancelled() and entry[1].exception() is None:
                self.running -= texts  # the turn came in the very moment of the cancellation
            self._let_in()
            raise

    def _let_in(self) -> None:
        while self._waiting and self.running + self._waiting[0][0] <= self.capacity:
            texts, future = self._waiting.popleft()
            if not future.done():
                self.running += texts
                future.set_result(None)


# Events that nobody has read yet; beyond them the generations wait.
_MOST_UNREAD: Final = 256
_PARAMS: Final = {
    ConstraintKind.JSON_SCHEMA: "response_format",
    ConstraintKind.GRAMMAR: "grammar",
    ConstraintKind.REGEX: "regex",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ended:
    error: ApiError | None = None


class Run:
    """Use as an async context manager; then call ``next`` until it says that all is over."""

    def __init__(self, agent: Agent, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        self._agent = agent
        self._unread: asyncio.Queue[tuple[int, Chunk] | _Ended] = asyncio.Queue(_MOST_UNREAD)
        self._tasks: list[asyncio.Task[None]] = []
        self._running = len(self.jobs)
        self._failed: ApiError | None = None
        self._wake = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._generate(job)) for job in self.jobs]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def over(self) -> bool:
        """Whether every text is complete and read."""
        return self._running == 0 and self._failed is None

    async def next(self, timeout_s: float | None = None) -> list[tuple[int, Chunk]]:
        """Events with the index of their job, all that are there; none when ``timeout_s`` is over,
        or ``over``. Raises ``ApiError`` for the first generation that fails."""
        if found := self._take():
            return found
        while not self.over:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return []
            self._wake.clear()
            if found := self._take():
                return found
        return []

    def fail(self, error: ApiError) -> None:
        """Whoever calls ``next`` hears this instead of any further event."""
        self._failed = self._failed or error
        self._wake.set()

    def _take(self) -> list[tuple[int, Chunk]]:
        found: list[tuple[int, Chunk]] = []
        while self._failed is None and not self._unread.empty():
            one = self._unread.get_nowait()
            if isinstance(one, _Ended):
                self._running -= 1
                self._failed = one.error
            else:
                found.append(one)
        if self._failed is not None and not found:
            raise self._failed
        return found

    async def _generate(self, job: Job) -> None:
        begun, error = False, None
        try:
            generation = self._agent.generate(
                job.prompt,
                job.sampling,
                logprobs=job.logprobs,
                conversation=job.conversation,
                model=job.model,
                started=partial(setattr, job, "stats"),
            )
            async with aclosing(generation) as chunks:
                async for chunk in chunks:
                    begun = True
                    await self._put((job.index, chunk))
        except GenerationError as failure:
            error = from_generation(failure)
        except ConstraintError as failure:
            error = invalid(_param(job), str(failure))
        except Exception as failure:
            if not begun and isinstance(failure, ValueError | TypeError):
                error = invalid("prompt", str(failure))
            else:
                _log.exception("a generation failed")
                error = ApiError(500, f"the generation failed: {type(failure).__name__}: {failure}")
        await self._put(_Ended(error))

    async def _put(self, one: tuple[int, Chunk] | _Ended) -> None:
        await self._unread.put(one)
        self._wake.set()


def _param(job: Job) -> str:
    """The parameter that a constraint came with."""
    constraint = job.sampling.constraint
    if job.must_call or constraint is None:
        return "tools"
    return _PARAMS[constraint.kind]


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


def text_of(tokenizer: ChatTokenizer, tokens: Sequence[int]) -> str:
    """Raises ``ApiError`` for an id that is none."""
    try:
        written = b"".join(map(tokenizer.token_bytes, tokens))
    except (LookupError, ValueError, OverflowError, TokenizerError) as error:
        raise invalid("tokens", f"the token ids stand for no text: {error}") from None
    return written.decode("utf-8", errors="replace")


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


@dataclass(slots=True)
class Answer:
    """What one request asks for, ready to run."""

    envelope: Envelope | ResponseEnvelope
    choices: list[Choice]
    prompt_tokens: int
    stream: bool
    seed: int
    counted_as: str
    """The name of its model, or what stands for it in metrics."""
    ignored: tuple[str, ...] = ()
    """Names of parameters that count for nothing."""
    began_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    """When the first tokens came."""

    def usage(self) -> dict[str, Any]:
        return usage_of(self.choices, self.prompt_tokens, self.seed)


class Endpoint:
    """``sampling`` holds for what requests leave open; ``key`` empty: none is asked for;
    ``prompt_log`` None: no word of a request is logged. ``tokenizer`` None: requests wait for the
    one that ``take_tokenizer`` brings, as long as for a verifier."""

    def __init__(
        self,
        agent: Agent,
        tokenizer: ChatTokenizer | None,
        verifiers: VerifierWatch,
        settings: EndpointSection,
        sampling: SamplingParams | None = None,
        *,
        key: str = "",
        prompt_log: PromptLog | None = None,
    ) -> None:
        self.agent, self.tokenizer, self.verifiers = agent, tokenizer, verifiers
        self.models = ServedModels(verifiers, agent.options.model)
        self.settings, self.sampling, self.key = settings, sampling or SamplingParams(), key
        self._prompt_log = prompt_log
        self.admission = Admission(settings.max_concurrent, settings.max_queue)
        self.one_large = asyncio.Lock()
        """Held while a large body is read."""
        self._one_long = asyncio.Lock()
        self.counts = EndpointCounts()
        self.started = int(time.time())
        self.stopping = False
        """New requests are refused; those that run may end."""
        self._wake = asyncio.Event()
        """The tokenizer is there, or nobody waits for it any more."""
        self._runs: set[Run] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        """Requests that are being answered."""
        return len(self._runs)

    def counted(self) -> Self:
        """Itself, for its metrics: each model that is served has its series."""
        for one in self.models.listed:
            self.counts.add_answer(one.name, answers=0)
        return self

    async def idle(self) -> None:
        """Returns when no request is being answered."""
        await self._idle.wait()

    def take_tokenizer(self, tokenizer: ChatTokenizer) -> None:
        """What was not there at the beginning."""
        self.tokenizer = tokenizer
        self._wake.set()

    def begin_stop(self) -> None:
        """Take nothing new; who waits for a turn is told."""
        self.stopping = True
        self._wake.set()
        self.admission.close(stopping())

    def cut(self) -> None:
        """What still runs is told that it ends here."""
        for run in tuple(self._runs):
            run.fail(stopping())

    # --- requests ---------------------------------------------------------------------------

    async def chat(self, data: Mapping[str, Any]) -> Answer:
        """Raises ``ApiError``."""
        most = self.settings.max_concurrent
        request = await asyncio.to_thread(chat_request, data, self.sampling, most)
        chosen = await self.choose_model(request.asked.model)
        tokenizer = await self._its_tokenizer()
        tokens = await chat_tokens(tokenizer, request, chosen.context_length, self._one_long)
        request = await asyncio.to_thread(with_forced_call, tokenizer, request)
        return self._answer(ChatShape(), tokenizer, request.asked, [tokens], request)

    async def response(self, data: Mapping[str, Any]) -> Answer:
        """Raises ``ApiError``."""
        answer = await self.chat(as_chat(data))
        if len(answer.choices) > 1:
            raise invalid("n", f"n is {len(answer.choices)}, but a response is one text")
        chat = answer.envelope
        made = "resp_" + secrets.token_hex(12)
        answer.envelope = ResponseEnvelope(made, int(time.time()), chat.model)
        return answer

    async def completion(self, data: Mapping[str, Any]) -> Answer:
        """Raises ``ApiError``."""
        most = self.settings.max_concurrent
        request = await asyncio.to_thread(completion_request, data, self.sampling, most)
        chosen = await self.choose_model(request.asked.model)
        tokenizer, context = await self._its_tokenizer(), chosen.context_length
        prompts = [
            await prompt_tokens(tokenizer, one, context, self._one_long) for one in request.prompts
        ]
        answer = self._answer(CompletionShape(), tokenizer, request.asked, prompts)
        if request.echo:
            for choice in answer.choices:
                choice.echo = text_of(tokenizer, choice.job.prompt)
        return answer

    async def tokenize(self, data: Mapping[str, Any]) -> tuple[Sequence[int], int | None]:
        """The tokens of a text or of a conversation, and how many the context has. Raises
        ``ApiError``."""
        model = Fields(data).text("model") or ""
        chosen, tokenizer = await self.choose_model(model), await self._its_tokenizer()
        context = chosen.context_length
        if data.get("messages") is not None:
            request = await asyncio.to_thread(chat_request, data, self.sampling, 1)
            return await chat_tokens(tokenizer, request, context, self._one_long), context
        fields = Fields(data)
        text = fields.text("prompt") or fields.text("content") or ""
        special = fields.raw("add_special_tokens") is None or fields.flag("add_special_tokens")
        tokens = await _encode(
            tokenizer, text, context, "prompt", self._one_long, add_special_tokens=special
        )
        return tokens, context

    async def detokenize(self, data: Mapping[str, Any]) -> str:
        """Raises ``ApiError``."""
        tokens = token_ids(Fields(data), "tokens", data.get("tokens"), MAX_TOKENS)
        return await asyncio.to_thread(text_of, await self._its_tokenizer(), tokens)

    @asynccontextmanager
    async def running(self, answer: Answer) -> AsyncIterator[Run]:
        """The generations of ``answer``, once it is their turn. Raises ``ApiError``."""
        request_id.set(answer.envelope.id)  # whatever is logged from here on names it
        async with self.admission.turn(len(answer.choices)):
            if self._prompt_log is not None:
                self._prompt_log.asked(answer.envelope.id, answer.choices)
            run = Run(self.agent, [choice.job for choice in answer.choices])
            self._runs.add(run)
            self._idle.clear()
            came = False
            try:
                async with run:
                    yield run
                came = True
            finally:
                if came is not self.verifiers.ready:
                    self.verifiers.hurry()
                self._runs.discard(run)
                if not self._runs:
                    self._idle.set()
                self.counts.add_answer(answer.counted_as, answer.prompt_tokens, answer.choices)
                self.counts.duration_s.add(time.monotonic() - answer.began_s)
                if self._prompt_log is not None:
                    self._prompt_log.answered(answer.envelope.id, answer.choices)

    def note_first(self, answer: Answer) -> None:
        """Tokens of ``answer`` have come."""
        if answer.first_s is None:
            answer.first_s = time.monotonic() - answer.began_s
            self.counts.first_token_s.add(answer.first_s)

    def _answer(
        self,
        shape: Shape,
        tokenizer: ChatTokenizer,
        asked: Asked,
        prompts: list[Any],
        request: ChatRequest | None = None,
    ) -> Answer:
        chosen = self.models.choose(asked.model)
        served = chosen.served
        context = chosen.context_length
        longest = self.settings.default_max_tokens or self.sampling.max_tokens
        if request is not None and context and self.settings.default_max_tokens is None:
            longest = context
        came_as = "prompt" if request is None else "messages"
        samplings = [sampling_of(asked, one, context, longest, came_as) for one in prompts]
        fingerprint = "" if served is None else served.info.fingerprint
        envelope = Envelope(
            shape,
            shape.id_prefix + secrets.token_hex(12),
            int(time.time()),
            served.name if served is not None else asked.model or self.models.name,
            f"fp_{fingerprint[:12]}" if fingerprint else None,
            asked.include_usage,
        )
        choices = choices_of(asked, prompts, samplings, tokenizer, request, chosen.asked)
        count = sum(len(tokens) for tokens in prompts)
        told = served is not None or not chosen.asked or chosen.asked == self.models.name
        counted_as = envelope.model if told else OTHER
        return Answer(
            envelope, choices, count, asked.stream, asked.sampling.seed, counted_as, asked.ignored
        )

    async def _its_tokenizer(self) -> ChatTokenizer:
        """Raises ``ApiError`` where none comes in time."""
        if self.tokenizer is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.agent.options.reconnect.give_up_first_s):
                    await self._wake.wait()
        if self.tokenizer is None:
            raise stopping() if self.stopping else no_tokenizer()
        return self.tokenizer

    async def choose_model(self, name: str) -> Chosen:
        """What a request gets that names ``name``, or nothing; verifiers are asked once more for a
        name that none has told of. Raises ``ApiError``."""
        try:
            return self.models.choose(name)
        except ApiError:
            await self.verifiers.look_anew()
            return self.models.choose(name)
