"""The endpoint without HTTP: an agent, its tokenizer and all that requests share. It turns the JSON
of a request into generations, which run beside each other and whose chunks come as one stream.

A bounded number of generations runs at a time (``admission.py``). Blocking work (parsing requests,
tokenizing texts, rendering templates) runs in threads, in one pool for each kind, in which clients
alternate. Tokenizing takes some hundred times the memory of the text. So the tokens of a long text
are first counted piece by piece, until the context is exceeded: 4 MB for a context of 512 tokens
are refused after one piece of 64 KiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Self, TypeVar

from edgespec.config.device import EndpointSection
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.constraint import (
    ConstraintBusyError,
    ConstraintError,
    ConstraintKind,
)
from edgespec.core.protocol.sampling import MAX_TOKENS, SamplingParams
from edgespec.device.agent import Agent, Chunk, GenerationError, fits_on_wire
from edgespec.device.prober import VerifierWatch
from edgespec.endpoint.admission import RETRY_AFTER_S, Admission, current_client
from edgespec.endpoint.answer import (
    ChatEnvelope,
    Choice,
    CompletionEnvelope,
    ResponseEnvelope,
    usage_of,
)
from edgespec.endpoint.bodies import BodyRoom
from edgespec.endpoint.chat_prompt import call_format, write_chat_prompt, writes_tools
from edgespec.endpoint.request_json import (
    MAX_VALUES,
    ApiError,
    Fields,
    check_members,
    from_generation,
    invalid,
    no_such_model,
    read_object,
    renaming,
    unavailable,
)
from edgespec.endpoint.requests import (
    TEMPLATE_VARIABLES,
    Request,
    chat_request,
    completion_request,
    seed_of,
)
from edgespec.endpoint.responses import MAX_FUNCTIONS, AsChat, as_chat
from edgespec.endpoint.tool_calls import (
    ToolReader,
    call_or_json,
    forced_call,
    free_call,
    mark_tokens,
)
from edgespec.models.tokenizer import ChatTokenizer, TokenizerError
from edgespec.telemetry.logs import log_failure
from edgespec.telemetry.metric_table import LATENCY_S, Histogram, metrics
from edgespec.worker_pool import PoolBusyError, PoolLateError, WorkerPool

# Chunks that were generated and not yet read by their request. At this number generations wait.
_MOST_UNREAD: Final = 256
_PARAMS: Final = {
    ConstraintKind.JSON_SCHEMA: "response_format",
    ConstraintKind.GRAMMAR: "grammar",
    ConstraintKind.REGEX: "regex",
}
STRICT: Final = "tools.strict"
"""The word in ``X-Edgespec-Ignored`` for strict tools whose calls may not fit their schemas."""
_PIECE: Final = 1 << 16
"""Characters that are tokenized at a time while the tokens of a long text are counted."""
_SLACK: Final = 2
"""Factor by which the sum over pieces may exceed the tokens of the whole text. Cutting a text
changes the tokens beside each cut, but with no tokenizer does it double their number."""
_WORK_WITHIN_S: Final = 30.0
"""Seconds that one piece of blocking work may take, including its time in the queue."""
_PREPARE_WITHIN_S: Final = 60.0
"""Seconds from a request's body to its tokens and its compiled constraint."""
_MOST_WAITING: Final = 512  # equal to the number of connections
_MOST_PROMPTS: Final = 16
"""Limit on the token ids in one request, in prompts that fill the context."""
METRICS_PREFIX: Final = "edgespec_endpoint_"
OTHER: Final = "other"
"""Label for the names of models that no verifier serves any more, or of too many models."""
MOST_NAMES: Final = 256
METRICS: Final = metrics("""
counter requests_total{path,outcome} counts.requests Requests by path and outcome
counter answers_total{model} counts.answers Requests that were generated for, completed or not
counter prompt_tokens_total{model} counts.prompt_tokens Prompt tokens of generated requests
counter completion_tokens_total{model} counts.completion_tokens Generated tokens
counter drafted_tokens_total{model} counts.drafted_tokens Draft nodes sent to verifiers
counter accepted_tokens_total{model} counts.accepted_tokens Generated tokens drafted on the device
counter replaced_tokens_total{model} counts.replaced_tokens LOSSY: accepted, not the target's
gauge texts_running admission.running Generations that run now
gauge requests_waiting admission.waiting Requests that wait for a slot
gauge body_bytes bodies.held_bytes Bytes of request bodies that are being read
gauge verifier_ready verifiers.ready 1 if a verifier is ready, else 0
histogram time_to_first_token_seconds counts.first_token_s From request to first token
histogram request_seconds counts.duration_s From request to end of response
""")
"""Metrics of an ``Endpoint``: kind, name, attribute and help text."""

_log = logging.getLogger(__name__)


def stopping() -> ApiError:
    return unavailable("this endpoint is stopping", "shutting_down")


class EndpointCounts:
    """Totals since the start. Totals by model keep at most ``MOST_NAMES`` names; further models
    count as ``OTHER``."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """Requests by path and outcome. The outcome is a status code, ``gone`` if the client left
        before the end, or ``cut`` for a stream that failed in the middle."""
        self.answers, self.prompt_tokens = Counter[str](), Counter[str]()
        self.completion_tokens, self.drafted_tokens = Counter[str](), Counter[str]()
        self.accepted_tokens, self.replaced_tokens = Counter[str](), Counter[str]()
        self.first_token_s, self.duration_s = Histogram(LATENCY_S), Histogram(LATENCY_S)

    def add_answer(
        self, model: str, prompt_tokens: int = 0, choices: Sequence[Choice] = (), answers: int = 1
    ) -> None:
        """Add the tokens of one request, whether or not it was completed."""
        if model not in self.answers and len(self.answers) >= MOST_NAMES:
            model = OTHER
        stats = [one.stats.counters for one in choices if one.stats is not None]
        self.answers[model] += answers
        self.prompt_tokens[model] += prompt_tokens
        self.completion_tokens[model] += sum(one.tokens for one in choices)
        self.drafted_tokens[model] += sum(one.sent for one in stats)
        self.accepted_tokens[model] += sum(one.accepted for one in stats)
        self.replaced_tokens[model] += sum(one.replaced for one in stats)


class Run:
    """The generations of one request. Each begins when a slot is free for it, so a request may have
    more generations than can run at a time. Use as an async context manager and call ``next`` until
    ``over``."""

    def __init__(self, agent: Agent, choices: Sequence[Choice], admission: Admission) -> None:
        self._agent, self._choices, self._admission = agent, tuple(choices), admission
        # Queue of chunks with the index of their choice. None marks the end of a generation, an
        # error its failure.
        self._unread: asyncio.Queue[tuple[int, Chunk] | ApiError | None] = asyncio.Queue(
            _MOST_UNREAD
        )
        self._running = len(self._choices)
        self._failed: ApiError | None = None
        self.begun = False
        """Whether the first generation has got its slot."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def over(self) -> bool:
        return self._running == 0 and self._failed is None

    async def next(self, timeout_s: float | None = None) -> list[tuple[int, Chunk]]:
        """Return all chunks that are ready, with the index of their choice. The list is empty after
        ``timeout_s`` without a chunk, and when ``over``. Raises ``ApiError`` for the first
        generation that fails."""
        found: list[tuple[int, Chunk]] = []
        while self._running and not self._failed and not (found and self._unread.empty()):
            try:
                async with asyncio.timeout(timeout_s):
                    one = await self._unread.get()
            except TimeoutError:
                return []
            if isinstance(one, tuple):
                found.append(one)
            else:
                self._running -= 1
                self._failed = self._failed or one
        if self._failed is not None and not found:
            raise self._failed
        return found

    def fail(self, error: ApiError) -> None:
        """Make every further call of ``next`` raise ``error``."""
        self._failed = self._failed or error
        with contextlib.suppress(asyncio.QueueFull):  # a full queue wakes its reader anyway
            self._unread.put_nowait(error)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for choice in self._choices:
                try:
                    await self._admission.enter(len(choice.prompt), begun=self.begun)
                except ApiError as error:
                    await self._unread.put(error)
                    return
                self.begun = True
                # A done-callback also runs for a task that is cancelled before its first step.
                task = group.create_task(self._generate(choice))
                task.add_done_callback(lambda _: self._admission.leave())

    async def _generate(self, choice: Choice) -> None:
        error, begun = await self._try_to_generate(choice)
        if error is not None and error.status == 400 and choice.request.may_lose_constraint:
            if not begun:
                choice.left_out = (STRICT,)
                choice.sampling = replace(choice.sampling, constraint=None)
                error, _ = await self._try_to_generate(choice)
        await self._unread.put(None if error is None else error.renamed(choice.request.names))

    async def _try_to_generate(self, choice: Choice) -> tuple[ApiError | None, bool]:
        """Run one generation. Return its error, and whether any chunk of it was produced."""
        begun, error = False, None
        try:
            generation = self._agent.generate(
                choice.prompt,
                choice.sampling,
                logprobs=choice.logprobs,
                conversation=choice.request.conversation,
                model=choice.model,
                rule=choice.request.rule,
                started=partial(setattr, choice, "stats"),
            )
            async with aclosing(generation) as chunks:
                async for chunk in chunks:
                    begun = True
                    await self._unread.put((choice.index, chunk))
        except GenerationError as failure:
            error = from_generation(failure)
            held = choice.sampling.constraint
            if held is not None and error.status == 400 and held.kind.value in error.message:
                error.param = _constraint_param(choice.request)
        except ConstraintError as failure:
            error = _refused_constraint(choice.request, failure)
        except Exception as failure:
            if not begun and isinstance(failure, ValueError | TypeError):
                error = invalid("prompt", str(failure))
            else:
                log_failure(_log, "a generation failed", error=failure, may_quote_client=True)
                error = ApiError(500, f"the generation failed: {type(failure).__name__}: {failure}")
        return error, begun


def _constraint_param(request: Request) -> str:
    """Return our name of the field from which the constraint of a request was read."""
    held, param = request.sampling.constraint, request.constraint_param
    return param or ("tools" if held is None else _PARAMS[held.kind])


def _refused_constraint(request: Request, failure: ConstraintError) -> ApiError:
    if isinstance(failure, ConstraintBusyError):
        return ApiError(503, str(failure), code="grammar_busy", retry_after_s=RETRY_AFTER_S)
    return invalid(_constraint_param(request), str(failure))


def _too_long(why: str, context_length: int, param: str) -> ApiError:
    room = f"which leaves no room for output in the context of {context_length} tokens"
    return invalid(param, f"{why}, {room}", "context_length_exceeded")


# Models that the verifiers serve, by name.
#
# A name belongs to one model: that of a verifier, or an adapter beside it. Verifiers may serve
# different models; the agent sends a request to one that serves the requested name.

ALIAS: Final = "edgespec"
"""A model name that always means the default model."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    info: ModelInfo
    context_length: int
    """Limit on prompt plus output, in tokens."""
    parent: str | None
    """Name of the model to which this adapter belongs. None: not an adapter."""

    @property
    def name(self) -> str:
        return self.info.name


@dataclass(frozen=True, slots=True)
class Chosen:
    asked: str
    """The name to request from a verifier; empty if none is requested."""
    served: ServedModel | None
    """None: no verifier has reported its models yet."""

    @property
    def context_length(self) -> int | None:
        return None if self.served is None else self.served.context_length


class ServedModels:
    """The models of the verifiers behind ``watch``. If ``only`` is not empty, other names are
    refused."""

    def __init__(self, watch: VerifierWatch, only: str = "") -> None:
        self._watch, self._only = watch, only

    @property
    def name(self) -> str:
        """Name of the default model, which serves requests that name none."""
        usual = self.usual
        return usual.name if usual is not None else self._only or ALIAS

    @property
    def usual(self) -> ServedModel | None:
        """The default model, which serves requests that name none. None until a verifier has
        reported its models."""
        return next(iter(self.listed), None)

    @property
    def listed(self) -> tuple[ServedModel, ...]:
        """All served models without duplicates, the default one first, then in the order of the
        verifiers. Models with another vocabulary than the default one are left out, since the
        endpoint has one tokenizer."""
        found: dict[str, ServedModel] = {}
        vocabulary = ""
        for info in self._watch.told:
            for model in info.models:
                if self._only not in ("", model.name):
                    continue
                vocabulary = vocabulary or model.vocabulary
                if model.vocabulary != vocabulary:
                    continue
                parent = None if model is info.model else info.model.name
                longest = info.limits.context_length or model.context_length
                found.setdefault(model.name, ServedModel(model, longest, parent))
        return tuple(found.values())

    def choose(self, name: str) -> Chosen:
        """Return the model for a request that names ``name``, which may be empty. Names are checked
        only after a verifier has reported its models. Raises ``ApiError`` for an unknown name."""
        listed = {one.name: one for one in self.listed}
        if (served := listed.get(name)) is not None:
            return Chosen(self._asked(served), served)
        if name in ("", ALIAS, self._only):
            return Chosen(self._only, self.usual)
        if listed or self._only or not fits_on_wire(name):
            raise no_such_model(name, tuple(listed) or (self.name,))
        return Chosen(name, None)

    def _asked(self, served: ServedModel) -> str:
        """Return the name to request for ``served``. If the verifiers serve one and the same model
        under several names, none is requested, so that each of them can serve it."""
        models = [info.model for info in self._watch.told]
        marks = {one.fingerprint for one in models}
        if len({one.name for one in models}) > 1 and marks == {served.info.fingerprint} != {""}:
            return self._only
        return served.name


def _pool(name: str, threads: int) -> WorkerPool:
    return WorkerPool(name, threads=threads, most_waiting=_MOST_WAITING, within_s=_WORK_WITHIN_S)


def _late(why: str) -> ApiError:
    return ApiError(503, f"{why}: try again", code="too_slow", retry_after_s=RETRY_AFTER_S)


_T = TypeVar("_T")
Tokens = Sequence[int]
AnyEnvelope = ChatEnvelope | CompletionEnvelope | ResponseEnvelope
MakeEnvelope = Callable[[str, str | None, bool], AnyEnvelope]


@dataclass(slots=True)
class Answer:
    envelope: AnyEnvelope
    choices: list[Choice]
    prompt_tokens: int
    request: Request
    counted_as: str
    """Name of the model in metrics, or ``OTHER``."""
    began_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    """Seconds from the request to its first tokens; None before."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of request fields that had no effect, and of promises that were not kept, for a
        header."""
        lost = dict.fromkeys(one for choice in self.choices for one in choice.left_out)
        return (*self.request.ignored, *lost)

    def usage(self) -> dict[str, Any]:
        return usage_of(self.choices, self.prompt_tokens, self.request.sampling.seed)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The prompt of a chat in tokens."""

    tokens: list[int]
    is_thinking: bool
    """Whether the output begins inside a thought."""
    lacks_tools: bool = False
    """Whether the description of the tools was left out."""


class Endpoint:
    """What all requests of one HTTP server share.

    Args:
        agent: The agent that generates.
        tokenizer: The tokenizer of the target.
        verifiers: The watch that shows which verifiers are ready and what they serve.
        settings: Limits and defaults.
        sampling: Defaults for parameters that requests leave open.
        key: API key that clients must send; empty if none is required.
        has_budget: Whether the process has a memory budget, which gives bodies less memory.

    Its threads end with ``close``.
    """

    def __init__(
        self,
        agent: Agent,
        tokenizer: ChatTokenizer,
        verifiers: VerifierWatch,
        settings: EndpointSection,
        sampling: SamplingParams | None = None,
        *,
        key: str = "",
        has_budget: bool = False,
    ) -> None:
        self.agent, self.tokenizer, self.verifiers = agent, tokenizer, verifiers
        self.models = ServedModels(verifiers, agent.options.model)
        self.settings, self.sampling, self.key = settings, sampling or SamplingParams(), key
        is_shared = settings.most_of_client < settings.max_concurrent
        self.admission = Admission(
            settings.max_concurrent,
            settings.max_queue,
            max_waiting_tokens=settings.max_queue_tokens,
            within_s=settings.queue_within_s,
            most_of_client=settings.most_of_client if is_shared else None,
            unread_within_s=settings.unread_within_s,
        )
        self.bodies = BodyRoom(
            settings.most_bodies_bytes(has_budget=has_budget), shared_by_clients=is_shared
        )
        self._requests = _pool("reading a request", threads=2)
        self._texts = _pool("tokenizing a text", threads=4)
        # One thread, since the process that renders templates handles one call at a time.
        self._templates = _pool("rendering a chat template", threads=1)
        self.one_large = asyncio.Lock()
        """Held from a large body to its tokens, since parsed values take many times the body's
        memory."""
        self._one_long = asyncio.Lock()
        """Held while a long text is tokenized, which bounds the memory that all requests take for
        it."""
        self.counts = EndpointCounts()
        self.started = int(time.time())
        self.stopping = False
        """Whether new requests are refused while running ones end."""
        self.prepare: Callable[[], Awaitable[None]] | None = None
        """Awaited before a request is read. Where the target's tokenizer and sampling defaults are
        not known yet, it fetches them and stores them here. May raise ``GenerationError``."""
        self._runs: set[Run] = set()
        self.idle = asyncio.Event()
        """Set while no request runs or waits."""
        self.idle.set()

    @property
    def active(self) -> int:
        return sum(one.begun for one in self._runs)

    def counted(self) -> Self:
        """Return itself, for its metrics, after giving each served model its series."""
        for one in self.models.listed:
            self.counts.add_answer(one.name, answers=0)
        return self

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """Bound the time that a request may take before it waits for its slot. Work that is not
        done in time becomes an ``ApiError`` with ``Retry-After``. The tokenizer of the target is
        fetched first, which may include waiting for a verifier."""
        if self.prepare is not None:
            try:
                await self.prepare()
            except GenerationError as failure:
                raise from_generation(failure) from failure
        limit = asyncio.timeout(_PREPARE_WITHIN_S)
        try:
            async with limit:
                yield
        except PoolBusyError as error:
            raise ApiError(
                429, f"{error}: try again", code="queue_full", retry_after_s=RETRY_AFTER_S
            ) from None
        except PoolLateError as error:
            raise _late(str(error)) from None
        except TimeoutError:
            if not limit.expired():
                raise
            raise _late(f"the request was not read within {_PREPARE_WITHIN_S:g} s") from None

    async def read(self, function: Callable[..., _T], *given: Any) -> _T:
        """Return the result of ``function``, run in a thread of the pool that reads requests."""
        return await self._requests.run_for(current_client.get(), function, *given)

    def read_json(self, body: bytes) -> Mapping[str, Any]:
        """Return the JSON object of a request. Raises ``ApiError`` before much of it is parsed, if
        it has more members than the token ids of some full prompts and ``MAX_VALUES`` other
        values."""
        longest = max((one.context_length for one in self.models.listed), default=MAX_TOKENS)
        check_members(body, MAX_VALUES + _MOST_PROMPTS * longest)
        return read_object(body)

    def close(self) -> None:
        """End the threads that work for requests."""
        for pool in (self._requests, self._texts, self._templates):
            pool.close()

    def begin_stop(self) -> None:
        self.stopping = True
        self.admission.close(stopping())

    def cut(self) -> None:
        for run in tuple(self._runs):
            run.fail(stopping())

    # --- requests, all of which may raise ``ApiError`` ----------------------------------------

    async def chat(self, data: Mapping[str, Any]) -> Answer:
        request = await self.read(chat_request, data, self.sampling)
        return await self._chat_answer(request, ChatEnvelope)

    async def response(self, data: Mapping[str, Any]) -> Answer:
        made, request = await self.read(self._response_request, data)
        if request.n > 1:
            raise invalid("n", f"n is {request.n}, but a response is one text")
        return await self._chat_answer(request, partial(ResponseEnvelope, echo=made.echo))

    def _response_request(self, data: Mapping[str, Any]) -> tuple[AsChat, Request]:
        made = as_chat(data)
        request = chat_request(made.chat, self.sampling, most_tools=MAX_FUNCTIONS, names=made.names)
        called_as = {**request.called_as, **made.called_as}
        ignored = (*request.ignored, *made.left_out)
        return made, replace(request, called_as=called_as, ignored=ignored)

    async def _chat_answer(self, request: Request, envelope: MakeEnvelope) -> Answer:
        with renaming(request.names):
            chosen = await self.choose_model(request.model)
            prompt = await self._chat_prompt(request, chosen.context_length)
            request = await self._rendered(self._with_unread_variables, request)
            if prompt.lacks_tools:
                request = replace(request, tools=[], ignored=(*request.ignored, "tools"))
            if request.tools:
                request = await self.read(self._held_to_calls, request, prompt)
            request = await self._with_matcher(request)
            return self._answer(envelope, request, chosen, [prompt.tokens], prompt.is_thinking)

    async def completion(self, data: Mapping[str, Any]) -> Answer:
        request = await self.read(completion_request, data, self.sampling)
        with renaming(request.names):
            return await self._completion_answer(request)

    async def _completion_answer(self, request: Request) -> Answer:
        chosen = await self.choose_model(request.model)
        longest = chosen.context_length
        prompts: list[Tokens] = [
            await self._encode(one, longest, "prompt", request.special)
            if isinstance(one, str)
            else one
            for one in request.prompts
        ]
        request = await self._with_matcher(request)
        answer = self._answer(CompletionEnvelope, request, chosen, prompts)
        if request.echo:
            # A prompt that was sent as text is repeated as it is; token ids are decoded as in an
            # output, without special tokens.
            texts = [
                one if isinstance(one, str) else await self._tokenized(self._shown, one)
                for one in request.prompts
            ]
            for choice in answer.choices:
                choice.echo = texts[choice.index // request.n]
        return answer

    async def tokenize(self, data: Mapping[str, Any]) -> tuple[Sequence[int], int | None]:
        """Return the tokens of a text or of a conversation, and the context length."""
        fields = Fields(data)
        context = (await self.choose_model(fields.text("model") or "")).context_length
        if data.get("messages") is not None:
            request = await self.read(chat_request, data, self.sampling)
            with renaming(request.names):
                return (await self._chat_prompt(request, context)).tokens, context
        text = fields.text("prompt") or fields.text("content") or ""
        special = fields.flag("add_special_tokens", absent=True)
        return await self._encode(text, context, "prompt", special), context

    async def detokenize(self, data: Mapping[str, Any]) -> str:
        """Return the text of token ids. Their number is limited to the context length."""
        fields = Fields(data)
        chosen = await self.choose_model(fields.text("model") or "")
        most = chosen.context_length or MAX_TOKENS
        tokens = await self.read(fields.token_ids, "tokens", most)
        return await self._tokenized(self._text_of, tokens)

    @asynccontextmanager
    async def running(self, answer: Answer) -> AsyncIterator[Run]:
        """Run the generations of a request while the block is open. The verifiers are asked for
        their state again if the outcome contradicts the known state; a client that disconnects
        contradicts nothing."""
        run = Run(self.agent, answer.choices, self.admission)
        came: bool | None = None
        self._runs.add(run)
        self.idle.clear()
        try:
            async with run:
                yield run
            came = True
        except ApiError as error:
            came = False if error.status == 503 else None
            raise
        finally:
            self._runs.discard(run)
            if not self._runs:
                self.idle.set()
            if run.begun:
                if came not in (None, self.verifiers.ready):
                    self.verifiers.hurry()
                self.counts.add_answer(answer.counted_as, answer.prompt_tokens, answer.choices)
                self.counts.duration_s.add(time.monotonic() - answer.began_s)

    def note_first(self, answer: Answer) -> None:
        if answer.first_s is None:
            answer.first_s = time.monotonic() - answer.began_s
            self.counts.first_token_s.add(answer.first_s)

    async def choose_model(self, name: str) -> Chosen:
        """Return the model for a request that names ``name``. Before an unknown name is refused,
        the verifiers are asked for their models once more."""
        try:
            return self.models.choose(name)
        except ApiError:
            await self.verifiers.look_anew()
            return self.models.choose(name)

    async def _chat_prompt(self, request: Request, context_length: int | None) -> _Prompt:
        """Return the prompt of a chat. A description of the tools that the template does not write
        itself is left out if it leaves no room in the context and no call is forced."""
        template = self.tokenizer.chat_template(tools=bool(request.tools))
        if template is None:
            why = "this model has no chat template; use /v1/completions"
            raise invalid("messages", why, "no_chat_template")
        encode = partial(
            self._encode, context_length=context_length, param="messages", special=request.special
        )
        write = partial(
            write_chat_prompt,
            template,
            request.messages,
            add_generation_prompt=request.generation_prompt,
            continue_final_message=request.continues,
            variables=request.variables,
        )
        try:
            own = await self._rendered(writes_tools, template)
            may_lack = bool(request.tools) and not own and not request.must_call
            try:
                written = await self._rendered(write, request.tools)
                tokens = await self._encode(
                    written.text, context_length, "messages", request.special
                )
                if not may_lack or context_length is None or len(tokens) < context_length:
                    return _Prompt(tokens, written.is_thinking)
            except (ApiError, TokenizerError):
                if not may_lack:
                    raise
            written = await self._rendered(write, ())
            tokens = await encode(written.text)
            return _Prompt(tokens, written.is_thinking, lacks_tools=True)
        except TokenizerError as error:
            raise invalid("messages", str(error)) from None

    async def _encode(
        self, text: str, context_length: int | None, param: str, special: bool = True
    ) -> list[int]:
        """Return the tokens of ``text``. ``special``: add the tokens that begin a text."""
        long = len(text) > _PIECE
        async with self._one_long if long else contextlib.nullcontext():
            if long:
                await self._tokenized(self._check_length, text, context_length, param)
            encode = partial(self.tokenizer.encode, add_special_tokens=special)
            return await self._tokenized(encode, text)

    async def _tokenized(self, function: Callable[..., _T], *given: Any) -> _T:
        return await self._texts.run_for(current_client.get(), function, *given)

    async def _rendered(self, function: Callable[..., _T], *given: Any) -> _T:
        return await self._templates.run_for(current_client.get(), function, *given)

    async def _with_matcher(self, request: Request) -> Request:
        """Return ``request`` with its constraint compiled, before it waits for a slot, so that slow
        compilation occupies none. Raises ``ApiError``."""
        try:
            sampling = await self.agent.with_matcher(request.sampling, current_client.get())
        except ConstraintError as failure:
            if not request.may_lose_constraint:
                raise _refused_constraint(request, failure) from None
            sampling = replace(request.sampling, constraint=None)
            ignored = (*request.ignored, STRICT)
            return replace(request, sampling=sampling, may_lose_constraint=False, ignored=ignored)
        return replace(request, sampling=sampling)

    def _check_length(self, text: str, context_length: int | None, param: str) -> None:
        """Raise ``ApiError`` for a text with far more tokens than the context length; a text that
        passes still has to be counted exactly. ``context_length`` None: the largest that a verifier
        can have."""
        longest, counted = context_length or MAX_TOKENS, 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            counted += len(self.tokenizer.encode(piece, add_special_tokens=False))
            if counted > _SLACK * longest:
                read = f"the first {start + len(piece)} of the prompt's {len(text)} characters"
                raise _too_long(f"{read} are some {counted} tokens", longest, param)

    def _text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of a whole sequence with its special tokens. Raises ``ApiError`` for an
        id without text."""
        try:
            return self.tokenizer.decode(tokens, skip_special_tokens=False)
        except (LookupError, ValueError, OverflowError, TokenizerError) as error:
            raise invalid("tokens", f"the token ids stand for no text: {error}") from None

    def _with_unread_variables(self, request: Request) -> Request:
        """Add variables that the chat template does not read to the ignored parameters."""
        template = self.tokenizer.chat_template(tools=bool(request.tools))
        if template is None or not request.variables:
            return request
        unread = [name for name in request.variables if name not in template.variables]
        named = [
            name if name in TEMPLATE_VARIABLES else f"chat_template_kwargs.{name}"
            for name in unread
        ]
        return replace(request, ignored=(*request.ignored, *named))

    def _shown(self, tokens: Sequence[int]) -> str:
        """Return the text of a prompt's ids, without special tokens. Raises ``ApiError``."""
        try:
            return self.tokenizer.decode(tokens)
        except (LookupError, ValueError, OverflowError, TokenizerError) as error:
            raise invalid("prompt", f"the token ids stand for no text: {error}") from None

    def _held_to_calls(self, request: Request, prompt: _Prompt) -> Request:
        """Return the request with the constraint that its tools require.

        The constraint is a forced call; a call or JSON that fits a schema; or free text in which
        calls of strict tools fit their schemas. The last one is dropped with a word in the header
        if it cannot be kept; the others are not."""
        template, names, tools = (
            self.tokenizer.chat_template(tools=True),
            self.tokenizer,
            request.tools,
        )
        assert template is not None
        form, held, one = call_format(template), request.sampling.constraint, request.one_call
        strict = request.strict & {tool["function"]["name"] for tool in tools}
        may_lose, left_out, param = False, tuple[str, ...](), "tools"
        if request.must_call:
            held = forced_call(form, tools, names, one=one)
        elif held is not None and held.kind is ConstraintKind.JSON_SCHEMA:
            param = _PARAMS[held.kind]
            make = partial(call_or_json, form, tools, names=names, one=one, schema=held.text)
            try:
                held = make(strict)
            except ApiError:
                if not strict:
                    raise
                held, left_out = make(()), (STRICT,)
        elif held is None and strict:
            try:
                held = free_call(form, tools, strict, names, is_thinking=prompt.is_thinking)
                may_lose = True
            except ApiError:
                left_out = (STRICT,)
        else:
            left_out, param = (STRICT,) if strict else (), request.constraint_param
        return replace(
            request,
            sampling=replace(request.sampling, constraint=held),
            constraint_param=param,
            may_lose_constraint=may_lose,
            ignored=(*request.ignored, *left_out),
        )

    def _tool_reader(self, request: Request, is_thinking: bool) -> ToolReader | None:
        """Return a reader of tool calls, or None if the request can have none."""
        template = self.tokenizer.chat_template(tools=True) if request.tools else None
        if template is None:
            return None
        names = [tool["function"]["name"] for tool in request.tools]
        tokens = mark_tokens(self.tokenizer)
        return ToolReader(call_format(template), names, tokens, is_thinking=is_thinking)

    def _sampling(
        self, request: Request, tokens: Sequence[int], context_length: int | None
    ) -> SamplingParams:
        """Return the sampling parameters with the ``max_tokens`` of the request or the default,
        limited to the room in the context. ``context_length`` None: not known yet."""
        if not tokens:
            raise invalid("prompt", "the prompt is empty, but must hold at least one token")
        param, usual = "prompt", self.settings.default_max_tokens
        if request.messages:
            param, usual = "messages", usual or context_length
        least = request.sampling.min_tokens
        longest = request.max_tokens or max(usual or self.sampling.max_tokens, least)
        if context_length is not None:
            room = context_length - len(tokens)
            if room < 1:
                raise _too_long(f"the prompt has {len(tokens)} tokens", context_length, param)
            longest = min(longest, room)
        return replace(request.sampling, max_tokens=longest, min_tokens=min(least, longest))

    def _check_ids(self, request: Request, chosen: Chosen) -> None:
        """Raise ``ApiError`` for a token id of the client's that is outside the model's vocabulary.
        Nothing is checked while the model is not known."""
        if chosen.served is None:
            return
        info = chosen.served.info
        prompts = [one for one in request.prompts if not isinstance(one, str)]
        for name, ids in (
            *(("prompt", one) for one in prompts),
            ("stop_token_ids", request.sampling.stop_token_ids),
            ("logit_bias", request.sampling.logit_bias),
        ):
            wrong = next((one for one in ids if one >= info.vocabulary_size), None)
            if wrong is not None:
                size = f"the vocabulary of {info.name!r} has {info.vocabulary_size} ids"
                raise invalid(name, f"{name} holds the token id {wrong}, but {size}")

    def _answer(
        self,
        envelope: MakeEnvelope,
        request: Request,
        chosen: Chosen,
        prompts: Sequence[Tokens],
        is_thinking: bool = False,
    ) -> Answer:
        """Return the request with its choices: n generations for each prompt, in the order of the
        prompts. Generation k (from 0) of a prompt has the seed ``seed_of(seed, k)``."""
        # The texts of a request are dropped here, as its body is: they are many times as large as
        # the tokens.
        names = {ours: sent for ours, sent in request.names.items() if "[" not in ours}
        wordless = replace(request, prompts=(), messages=[], tools=[], variables={}, names=names)
        choices, token_bytes = list[Choice](), self.tokenizer.token_bytes
        self._check_ids(request, chosen)
        for prompt in prompts:
            tokens = array("I", prompt)  # 4 bytes each while they wait for a slot
            sampling = self._sampling(request, tokens, chosen.context_length)
            for k in range(request.n):
                own = replace(sampling, seed=seed_of(sampling.seed, k))
                place, tools = len(choices), self._tool_reader(request, is_thinking)
                choices.append(
                    Choice(place, tokens, wordless, own, token_bytes, tools, chosen.asked)
                )
        served = chosen.served
        name = served.name if served is not None else request.model or self.models.name
        mark = served.info.fingerprint[:12] if served is not None else ""
        told = served is not None or not chosen.asked or chosen.asked == self.models.name
        around = envelope(name, f"fp_{mark}" if mark else None, request.include_usage)
        prompt_tokens = sum(map(len, prompts))
        return Answer(around, choices, prompt_tokens, wordless, name if told else OTHER)
