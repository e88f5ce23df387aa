"""One endpoint without HTTP: an agent, its tokenizer, and all that requests share; from the words
of a request to its generations, which run beside each other as one stream of events.

A bounded number of texts runs at a time (``admission.py``). Blocking work runs in threads, in one
pool for each kind, in which clients take turns: requests are read, texts are tokenized, templates
are rendered. To tokenize takes some hundred times the memory of the text, so a long text is first
counted piece by piece, as far as the context reaches: 4 MB for a context of 512 tokens are refused
after one piece of 64 KiB.
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

# Chunks that nobody has read yet; beyond them the generations wait.
_MOST_UNREAD: Final = 256
_PARAMS: Final = {
    ConstraintKind.JSON_SCHEMA: "response_format",
    ConstraintKind.GRAMMAR: "grammar",
    ConstraintKind.REGEX: "regex",
}
STRICT: Final = "tools.strict"
"""Names the promise that calls fit their schemas, where it is not kept."""
_PIECE: Final = 1 << 16
"""Characters that are counted at once."""
_SLACK: Final = 2
"""A text cut into pieces may have other tokens than the whole one, beside each cut. No tokenizer
makes half of them by it."""
_WORK_WITHIN_S: Final = 30.0
"""Seconds that one piece of blocking work may take, its time in the queue included."""
_PREPARE_WITHIN_S: Final = 60.0
"""Seconds from a request's body to its tokens and its grammar."""
_MOST_WAITING: Final = 512  # as many as there are connections
_MOST_PROMPTS: Final = 16
"""Prompts as long as the context that one request may hold as token ids."""
METRICS_PREFIX: Final = "edgespec_endpoint_"
OTHER: Final = "other"
"""Stands for the names of models that nobody serves any more, or of too many."""
MOST_NAMES: Final = 256
METRICS: Final = metrics("""
counter requests_total{path,outcome} counts.requests Requests by path and outcome
counter answers_total{model} counts.answers Requests that were served, to the end or not
counter prompt_tokens_total{model} counts.prompt_tokens Prompt tokens of the requests served
counter completion_tokens_total{model} counts.completion_tokens Tokens of their answers
counter drafted_tokens_total{model} counts.drafted_tokens Draft nodes sent for them
counter accepted_tokens_total{model} counts.accepted_tokens Of the tokens, those drafted here
counter replaced_tokens_total{model} counts.replaced_tokens Of these, LOSSY ones: not the target's
gauge texts_running admission.running Texts that are generated now
gauge requests_waiting admission.waiting Requests that wait for their turn
gauge body_bytes bodies.held_bytes Bytes of requests that are being read
gauge verifier_ready verifiers.ready 1: a verifier is there
histogram time_to_first_token_seconds counts.first_token_s Until text comes
histogram request_seconds counts.duration_s From request to the end
""")
"""Read from an ``Endpoint``."""

_log = logging.getLogger(__name__)


def stopping() -> ApiError:
    return unavailable("this endpoint is stopping", "shutting_down")


class EndpointCounts:
    """Totals since the start; those of models by name, of which there are at most ``MOST_NAMES``
    and ``OTHER``."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """By path and status; ``gone`` for a client that left before the end, ``cut`` for a stream
        that failed in the middle."""
        self.answers, self.prompt_tokens = Counter[str](), Counter[str]()
        self.completion_tokens, self.drafted_tokens = Counter[str](), Counter[str]()
        self.accepted_tokens, self.replaced_tokens = Counter[str](), Counter[str]()
        self.first_token_s, self.duration_s = Histogram(LATENCY_S), Histogram(LATENCY_S)

    def add_answer(
        self, model: str, prompt_tokens: int = 0, choices: Sequence[Choice] = (), answers: int = 1
    ) -> None:
        """Tokens of one answer, whether or not it came to its end."""
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
    """The generations of ``choices``. Each begins when its own turn comes, so a request may have
    more texts than run at a time. Use as an async context manager; then call ``next`` until
    ``over``."""

    def __init__(self, agent: Agent, choices: Sequence[Choice], admission: Admission) -> None:
        self._agent, self._choices, self._admission = agent, tuple(choices), admission
        # An error, or None, says that one of them has ended.
        self._unread: asyncio.Queue[tuple[int, Chunk] | ApiError | None] = asyncio.Queue(
            _MOST_UNREAD
        )
        self._running = len(self._choices)
        self._failed: ApiError | None = None
        self.begun = False
        """Whether the turn of the first text has come."""

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
        """Chunks with the index of their choice, all that are there; none when ``timeout_s`` is
        over, or ``over``. Raises ``ApiError`` for the first generation that fails."""
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
        """Whoever calls ``next`` gets this instead of any further chunk."""
        self._failed = self._failed or error
        with contextlib.suppress(asyncio.QueueFull):  # else nobody waits for one
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
                # As a callback it also runs for a task that is cancelled before its first step.
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
        """Generate one text; return why it failed, and whether any of it came."""
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
    """Return our name of the field that the constraint of a request came from."""
    held, param = request.sampling.constraint, request.constraint_param
    return param or ("tools" if held is None else _PARAMS[held.kind])


def _refused_constraint(request: Request, failure: ConstraintError) -> ApiError:
    if isinstance(failure, ConstraintBusyError):
        return ApiError(503, str(failure), code="grammar_busy", retry_after_s=RETRY_AFTER_S)
    return invalid(_constraint_param(request), str(failure))


def _too_long(why: str, context_length: int, param: str) -> ApiError:
    room = f"which leaves no room for output in the context of {context_length} tokens"
    return invalid(param, f"{why}, {room}", "context_length_exceeded")


# --- which models the verifiers serve, by name ----------------------------------------------------
#
# A name is one model's: that of a verifier, or of an adapter beside it. Verifiers may serve
# different ones; the agent takes a request to one that serves what it names.

ALIAS: Final = "edgespec"
"""A model name that always means whatever the verifier serves."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    info: ModelInfo
    context_length: int
    """Prompt plus output, in tokens."""
    parent: str | None
    """The model that it is an adapter of, by name."""

    @property
    def name(self) -> str:
        return self.info.name


@dataclass(frozen=True, slots=True)
class Chosen:
    asked: str
    """The name to ask a verifier for; empty: for none."""
    served: ServedModel | None
    """None: no verifier has told yet what it serves."""

    @property
    def context_length(self) -> int | None:
        return None if self.served is None else self.served.context_length


class ServedModels:
    """Of the verifiers behind ``watch``. ``only``: no other name is answered; empty: all are."""

    def __init__(self, watch: VerifierWatch, only: str = "") -> None:
        self._watch, self._only = watch, only

    @property
    def name(self) -> str:
        """Of the model of requests that name none."""
        usual = self.usual
        return usual.name if usual is not None else self._only or ALIAS

    @property
    def usual(self) -> ServedModel | None:
        """The model of requests that name none, once a verifier has told of it."""
        return next(iter(self.listed), None)

    @property
    def listed(self) -> tuple[ServedModel, ...]:
        """All of them, each name once: the usual one first, then as the verifiers tell them. Those
        whose vocabulary is another cannot be asked for: there is one tokenizer here."""
        found: dict[str, ServedModel] = {}
        vocabulary = ""
        for info in self._watch.told:
            for model in info.served:
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
        """What a request takes that names ``name``, or nothing. A name is checked once it is known
        what is served. Raises ``ApiError``."""
        listed = {one.name: one for one in self.listed}
        if (served := listed.get(name)) is not None:
            return Chosen(self._asked(served), served)
        if name in ("", ALIAS, self._only):
            return Chosen(self._only, self.usual)
        if listed or self._only or not fits_on_wire(name):
            raise no_such_model(name, tuple(listed) or (self.name,))
        return Chosen(name, None)

    def _asked(self, served: ServedModel) -> str:
        """Verifiers may serve one and the same model by several names; then none is asked for, so
        that each of them can answer."""
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
    """The name of its model, or what stands for it in metrics."""
    began_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    """When the first tokens came."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """What the answer does without, by words for a header."""
        lost = dict.fromkeys(one for choice in self.choices for one in choice.left_out)
        return (*self.request.ignored, *lost)

    def usage(self) -> dict[str, Any]:
        return usage_of(self.choices, self.prompt_tokens, self.request.sampling.seed)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The prompt of a chat in tokens."""

    tokens: list[int]
    is_thinking: bool
    """The answer begins inside a thought."""
    lacks_tools: bool = False
    """The text about the tools was left out."""


class Endpoint:
    """``sampling`` holds for what requests leave open; ``key`` empty: none is asked for.
    ``has_budget``: the process has a memory budget, so bodies get less room. ``close`` it."""

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
        # One after the other: the process that renders them answers one question at a time.
        self._templates = _pool("rendering a chat template", threads=1)
        self.one_large = asyncio.Lock()
        """Held from a large body to its tokens, since its values take many times its memory."""
        self._one_long = asyncio.Lock()
        """Held while a long text is tokenized, which bounds the memory that all of them take."""
        self.counts = EndpointCounts()
        self.started = int(time.time())
        self.stopping = False
        """New requests are refused; those that run may end."""
        self.prepare: Callable[[], Awaitable[None]] | None = None
        """Awaited before a request is read: puts the target's tokenizer and sampling defaults here
        where they are not known yet. May raise ``GenerationError``."""
        self._runs: set[Run] = set()
        self.idle = asyncio.Event()
        """Set while nothing runs or waits."""
        self.idle.set()

    @property
    def active(self) -> int:
        return sum(one.begun for one in self._runs)

    def counted(self) -> Self:
        """Itself, for its metrics: each model that is served has its series."""
        for one in self.models.listed:
            self.counts.add_answer(one.name, answers=0)
        return self

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """Bound the time of what happens to a request before it waits for its turn; what cannot be
        done in time becomes an ``ApiError`` with ``Retry-After``. The target's texts come first,
        which may have to wait for a verifier."""
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
        """Return what ``function`` makes of a request, in a thread for that."""
        return await self._requests.run_for(current_client.get(), function, *given)

    def read_json(self, body: bytes) -> Mapping[str, Any]:
        """Return the object that a request is. Raises ``ApiError`` before much of it is read, if it
        has more members than the token ids of some prompts and the other values that it may have
        (``MAX_VALUES``)."""
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
            # A text comes back as it was sent, ids as in an output: without special tokens.
            texts = [
                one if isinstance(one, str) else await self._tokenized(self._shown, one)
                for one in request.prompts
            ]
            for choice in answer.choices:
                choice.echo = texts[choice.index // request.n]
        return answer

    async def tokenize(self, data: Mapping[str, Any]) -> tuple[Sequence[int], int | None]:
        """The tokens of a text or of a conversation, and how many the context has."""
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
        """The text of token ids, of which there may be as many as the context has."""
        fields = Fields(data)
        chosen = await self.choose_model(fields.text("model") or "")
        most = chosen.context_length or MAX_TOKENS
        tokens = await self.read(fields.token_ids, "tokens", most)
        return await self._tokenized(self._text_of, tokens)

    @asynccontextmanager
    async def running(self, answer: Answer) -> AsyncIterator[Run]:
        """Run the generations of ``answer`` while this is open. The verifiers are asked anew where
        the outcome contradicts what is known of them; a client that leaves says nothing of them."""
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
        """What a request gets that names ``name``, or nothing; verifiers are asked once more for a
        name that none has told of."""
        try:
            return self.models.choose(name)
        except ApiError:
            await self.verifiers.look_anew()
            return self.models.choose(name)

    async def _chat_prompt(self, request: Request, context_length: int | None) -> _Prompt:
        """Return the prompt of a chat. A text about tools that the template does not write itself
        is left out where it leaves no room in the context and no call is forced."""
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
        """``special``: with the tokens that begin a text."""
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
        """Return ``request`` with its constraint read, so that a slow one holds no turn. Raises
        ``ApiError``."""
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
        """Raises ``ApiError`` for a text of far more tokens than the context has. What passes is
        still to be counted. ``context_length`` None: the longest that a verifier can have."""
        longest, counted = context_length or MAX_TOKENS, 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            counted += len(self.tokenizer.encode(piece, add_special_tokens=False))
            if counted > _SLACK * longest:
                read = f"the first {start + len(piece)} of the prompt's {len(text)} characters"
                raise _too_long(f"{read} are some {counted} tokens", longest, param)

    def _text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of a whole sequence with its special tokens. Raises ``ApiError`` for an
        id that is none."""
        try:
            return self.tokenizer.decode(tokens, skip_special_tokens=False)
        except (LookupError, ValueError, OverflowError, TokenizerError) as error:
            raise invalid("tokens", f"the token ids stand for no text: {error}") from None

    def _with_unread_variables(self, request: Request) -> Request:
        """Count variables that the chat template does not read as ignored parameters."""
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
        """The text of a prompt's ids, without special tokens. Raises ``ApiError``."""
        try:
            return self.tokenizer.decode(tokens)
        except (LookupError, ValueError, OverflowError, TokenizerError) as error:
            raise invalid("prompt", f"the token ids stand for no text: {error}") from None

    def _held_to_calls(self, request: Request, prompt: _Prompt) -> Request:
        """Return the request with the constraint that its tools ask for: a call that is forced, a
        call beside a schema of the text, or free text in which calls of strict tools fit their
        schemas. The last is a promise that may be broken by name, the others are not."""
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
        """None where no calls are to be looked for."""
        template = self.tokenizer.chat_template(tools=True) if request.tools else None
        if template is None:
            return None
        names = [tool["function"]["name"] for tool in request.tools]
        tokens = mark_tokens(self.tokenizer)
        return ToolReader(call_format(template), names, tokens, is_thinking=is_thinking)

    def _sampling(
        self, request: Request, tokens: Sequence[int], context_length: int | None
    ) -> SamplingParams:
        """With the ``max_tokens`` that was asked for, or the default, but no more than the context
        has room for; ``context_length`` None: nobody knows it yet."""
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
        """Raises ``ApiError`` that names a token id of the client's which the model lacks, once it
        is known which model that is."""
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
        """Of n texts of each prompt, one prompt's after the other's. Text k of a prompt (from 0)
        has the seed ``seed_of(seed, k)``."""
        # The words of a request are let go, as its body is: they are many times as large.
        names = {ours: sent for ours, sent in request.names.items() if "[" not in ours}
        wordless = replace(request, prompts=(), messages=[], tools=[], variables={}, names=names)
        choices, token_bytes = list[Choice](), self.tokenizer.token_bytes
        self._check_ids(request, chosen)
        for prompt in prompts:
            tokens = array("I", prompt)  # 4 bytes each, while they wait for their turn
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
