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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, Final, Self, TypeVar

from edgespec.config.device import EndpointSection
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.constraint import (
    MAX_FORCED_TOKENS,
    ConstraintBusyError,
    ConstraintError,
    ConstraintKind,
)
from edgespec.core.protocol.messages import EXACT_RULE, FinishReason
from edgespec.core.protocol.pictures import PictureInput, PlacedPicture
from edgespec.core.protocol.predicted_text import check_prediction_length
from edgespec.core.protocol.sampling import MAX_TOKENS, SamplingParams
from edgespec.device.agent import Agent, Chunk, GenerationError, fits_on_wire
from edgespec.device.generation_timeline import GenerationTimeline
from edgespec.device.local_model import LocalModel
from edgespec.device.prober import VerifierMonitor
from edgespec.endpoint.admission import RETRY_AFTER_S, Admission, current_client
from edgespec.endpoint.answer_grammar import BUDGET, constrain_answer
from edgespec.endpoint.bodies import BodyRoom
from edgespec.endpoint.chat_prompt import (
    call_format,
    output_form,
    template_writes_tools,
    write_chat_prompt,
)
from edgespec.endpoint.choices import (
    ChatEnvelope,
    Choice,
    CompletionEnvelope,
    Envelope,
    ResponseEnvelope,
    usage_of,
)
from edgespec.endpoint.infilling import infilling_prompt
from edgespec.endpoint.messages import MessageEnvelope, convert_message_request
from edgespec.endpoint.ollama import (
    OllamaChatEnvelope,
    OllamaGenerateEnvelope,
    convert_ollama_chat,
    convert_ollama_generate,
)
from edgespec.endpoint.output_parser import OutputForm
from edgespec.endpoint.pictures import (
    SentPicture,
    check_count,
    check_pictures,
    explain_text_model,
    fetch_pictures,
    place_in_prompt,
)
from edgespec.endpoint.recent_failures import RecentFailures
from edgespec.endpoint.request_json import (
    MAX_VALUES,
    ApiError,
    Fields,
    check_members,
    errors_with_sent_names,
    fallback_refusal,
    generation_error,
    invalid_request,
    read_object,
    sent_name,
    unavailable_error,
    unknown_model_error,
)
from edgespec.endpoint.requests import (
    MAX_FUNCTIONS,
    TEMPLATE_VARIABLES,
    ChatConversion,
    GenerationRequest,
    chat_request,
    choice_seed,
    completion_request,
)
from edgespec.endpoint.response_store import ResponseStore, as_items
from edgespec.endpoint.responses import convert_to_chat
from edgespec.endpoint.tool_calls import (
    call_or_json_grammar,
    forced_call_grammar,
    free_call_grammar,
)
from edgespec.models.tokenizer import ChatTokenizer, TokenizerError
from edgespec.telemetry.logs import log_failure
from edgespec.telemetry.metric_table import LATENCY_S, Histogram, parse_metrics
from edgespec.worker_pool import PoolBusyError, PoolLateError, WorkerPool

# Chunks that were generated and not yet read by their request. At this number generations wait.
_MAX_UNREAD_CHUNKS: Final = 256
_CONSTRAINT_FIELDS: Final = {
    ConstraintKind.JSON_SCHEMA: "response_format",
    ConstraintKind.GRAMMAR: "grammar",
    ConstraintKind.REGEX: "regex",
}
STRICT_TOOLS: Final = "tools.strict"
"""The word in ``X-Edgespec-Ignored`` for strict tools whose calls may not fit their schemas."""
_PIECE_CHARACTERS: Final = 1 << 16
"""Characters that are tokenized at a time while the tokens of a long text are counted."""
_PIECEWISE_FACTOR: Final = 2
"""Factor by which the sum over pieces may exceed the tokens of the whole text. Cutting a text
changes the tokens beside each cut, but with no tokenizer does it double their number."""
_WORK_WITHIN_S: Final = 30.0
"""Seconds that one piece of blocking work may take, including its time in the queue."""
_FETCH_THREADS: Final = 4
_FETCHES_WITHIN_S: Final = 40.0
"""Seconds that fetching the pictures of one request may take, including its time in the queue."""
_PREPARE_WITHIN_S: Final = 60.0
"""Seconds from a request's body to its tokens and its compiled constraint."""
_PROBE_WITHIN_S: Final = 0.5
"""Seconds that a request waits for a probe of verifiers that were away before the fallback
answers."""
_MAX_WAITING: Final = 512  # equal to the number of connections
_MAX_FULL_PROMPTS: Final = 16
"""Limit on the token ids in one request, in prompts that fill the context."""
METRICS_PREFIX: Final = "edgespec_endpoint_"
OTHER_MODEL: Final = "other"
"""Label for the names of models that no verifier serves any more, or of too many models."""
MAX_MODEL_NAMES: Final = 256
METRICS: Final = parse_metrics("""
counter requests_total{path,outcome} counts.requests Requests by path and outcome
counter answers_total{model} counts.answers Requests that were generated for, completed or not
counter prompt_tokens_total{model} counts.prompt_tokens Prompt tokens of generated requests
counter completion_tokens_total{model} counts.completion_tokens Generated tokens
counter drafted_tokens_total{model} counts.drafted_tokens Draft nodes sent to verifiers
counter accepted_tokens_total{model} counts.accepted_tokens Generated tokens drafted on the device
counter prediction_nodes_total{model} counts.prediction_nodes Draft nodes from predictions
counter accepted_prediction_tokens_total{model} counts.predicted_tokens Accepted of these
counter replaced_tokens_total{model} counts.replaced_tokens LOSSY: accepted, not the target's
counter fallback_answers_total{answered_by} counts.fallback_answers Requests without a verifier
gauge texts_running admission.running Generations that run now
gauge requests_waiting admission.waiting Requests that wait for a slot
gauge body_bytes bodies.held_bytes Bytes of request bodies that are being read
gauge verifier_ready verifiers.ready 1 if a verifier is ready, else 0
histogram time_to_first_token_seconds counts.first_token_s From request to first token
histogram request_seconds counts.duration_s From request to end of response
""")
"""Metrics of an ``Endpoint``: kind, name, attribute and help text."""

_log = logging.getLogger(__name__)


def stopping_error() -> ApiError:
    return unavailable_error("this endpoint is stopping", "shutting_down")


class EndpointCounts:
    """Totals since the start. Totals by model keep at most ``MAX_MODEL_NAMES`` names; further
    models count as ``OTHER_MODEL``."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """Requests by path and outcome. The outcome is a status code, ``gone`` if the client left
        before the end, or ``cut`` for a stream that failed in the middle."""
        self.answers, self.prompt_tokens = Counter[str](), Counter[str]()
        self.completion_tokens, self.drafted_tokens = Counter[str](), Counter[str]()
        self.accepted_tokens, self.replaced_tokens = Counter[str](), Counter[str]()
        self.prediction_nodes, self.predicted_tokens = Counter[str](), Counter[str]()
        self.fallback_answers = Counter[str]()
        """Requests that a model of this device was generated for, by its name."""
        self.first_token_s, self.duration_s = Histogram(LATENCY_S), Histogram(LATENCY_S)

    def add_answer(
        self, model: str, prompt_tokens: int = 0, choices: Sequence[Choice] = (), answers: int = 1
    ) -> None:
        """Add the tokens of one request, whether or not it was completed."""
        if model not in self.answers and len(self.answers) >= MAX_MODEL_NAMES:
            model = OTHER_MODEL
        stats = [one.stats.counters for one in choices if one.stats is not None]
        self.answers[model] += answers
        self.prompt_tokens[model] += prompt_tokens
        self.completion_tokens[model] += sum(one.tokens for one in choices)
        self.drafted_tokens[model] += sum(one.sent for one in stats)
        self.accepted_tokens[model] += sum(one.accepted for one in stats)
        self.prediction_nodes[model] += sum(one.predicted_sent for one in stats)
        self.predicted_tokens[model] += sum(one.predicted_accepted for one in stats)
        self.replaced_tokens[model] += sum(one.replaced for one in stats)


class _Quiet(Enum):
    QUIET = auto()
    """The reader has waited for long enough."""


_QUIET: Final = _Quiet.QUIET


class RequestRun:
    """The generations of one request. Each begins when a slot is free for it, so a request may have
    more generations than can run at a time. Use as an async context manager and call ``next`` until
    ``is_finished``."""

    def __init__(
        self, agent: Agent | LocalModel, choices: Sequence[Choice], admission: Admission
    ) -> None:
        self._agent, self._choices, self._admission = agent, tuple(choices), admission
        # Queue of chunks with the index of their choice. None marks the end of a generation, an
        # error its failure. ``_QUIET`` wakes a reader that has waited for long enough.
        self._unread: asyncio.Queue[tuple[int, Chunk] | ApiError | _Quiet | None] = asyncio.Queue(
            _MAX_UNREAD_CHUNKS
        )
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the reader. It is set again only when it is due, since it seldom is."""
        self._quiet_at_s: float | None = None
        """Time, on the loop's clock, until which the reader waits. None: it does not wait, or for
        any time."""
        self._is_quiet = False
        """Whether that time is over."""
        self._running = len(self._choices)
        self._failed: ApiError | None = None
        self.has_begun = False
        """Whether the first generation has got its slot."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def has_tokens(self) -> bool:
        """Whether chunks are ready."""
        return not self._unread.empty()

    @property
    def is_connected(self) -> bool:
        """Whether a verifier has a stream of one of the generations now."""
        stats = [one.stats for one in self._choices if one.stats is not None]
        return any(one.is_connected for one in stats)

    @property
    def is_finished(self) -> bool:
        return self._running == 0 and self._failed is None

    async def next(self, timeout_s: float | None = None) -> list[tuple[int, Chunk]]:
        """Return all chunks that are ready, with the index of their choice. The list is empty after
        ``timeout_s`` without a chunk, and when ``is_finished``. Raises ``ApiError`` for the first
        generation that fails."""
        chunks: list[tuple[int, Chunk]] = []
        self._set_timer(timeout_s)
        while self._running and not self._failed and not (chunks and self._unread.empty()):
            item = await self._unread.get()
            if isinstance(item, tuple):
                chunks.append(item)
            elif not isinstance(item, _Quiet):
                self._running -= 1
                self._failed = self._failed or item
            elif self._is_quiet and not chunks:
                return []
        self._quiet_at_s = None
        if self._failed is not None and not chunks:
            raise self._failed
        return chunks

    def _set_timer(self, timeout_s: float | None) -> None:
        """Let the reader wait for ``timeout_s`` from now. A timer for an earlier time stays."""
        self._is_quiet = False
        if timeout_s is None:
            self._quiet_at_s = None
            return
        loop = asyncio.get_running_loop()
        self._quiet_at_s = loop.time() + timeout_s
        if self._timer is not None:
            if self._timer.when() <= self._quiet_at_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(self._quiet_at_s, self._wake_reader)

    def _wake_reader(self) -> None:
        """Wake the reader if its time is over, and else set the timer again."""
        self._timer = None
        if (until_s := self._quiet_at_s) is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < until_s:
            self._timer = loop.call_at(until_s, self._wake_reader)
            return
        self._quiet_at_s, self._is_quiet = None, True
        with contextlib.suppress(asyncio.QueueFull):  # a full queue wakes its reader anyway
            self._unread.put_nowait(_QUIET)

    def fail(self, error: ApiError) -> None:
        """Make every further call of ``next`` raise ``error``."""
        self._failed = self._failed or error
        with contextlib.suppress(asyncio.QueueFull):  # a full queue wakes its reader anyway
            self._unread.put_nowait(error)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for choice in self._choices:
                try:
                    await self._admission.enter(choice.waiting_tokens, begun=self.has_begun)
                except ApiError as error:
                    await self._unread.put(error)
                    return
                self.has_begun = True
                # A done-callback also runs for a task that is cancelled before its first step.
                task = group.create_task(self._generate(choice))
                task.add_done_callback(lambda _: self._admission.leave())

    async def _generate(self, choice: Choice) -> None:
        error, has_begun = await self._try_to_generate(choice)
        if error is not None and error.status == 400 and choice.request.is_constraint_optional:
            if not has_begun:
                choice.left_out = (STRICT_TOOLS,)
                choice.sampling = replace(choice.sampling, constraint=None)
                error, _ = await self._try_to_generate(choice)
        await self._unread.put(
            None if error is None else error.with_sent_names(choice.request.sent_names)
        )

    async def _try_to_generate(self, choice: Choice) -> tuple[ApiError | None, bool]:
        """Run one generation. Return its error, and whether any chunk of it was produced."""
        has_begun, error = False, None
        try:
            if choice.request.scores_prompt and not choice.prompt_scores:
                choice.score_prompt(
                    await self._agent.score(
                        choice.prompt,
                        choice.logprobs,
                        conversation=choice.request.conversation,
                        model=choice.model,
                    )
                )
            if choice.request.is_empty:
                last = Chunk(len(choice.prompt), (), (), FinishReason.LENGTH)
                await self._unread.put((choice.index, last))
                return None, True
            generation = self._agent.generate(
                choice.prompt,
                choice.sampling,
                logprobs=choice.logprobs,
                conversation=choice.request.conversation,
                model=choice.model,
                rule=choice.request.rule,
                started=partial(setattr, choice, "stats"),
                **_drafting_arguments(choice),
            )
            async with aclosing(generation) as chunks:
                async for chunk in chunks:
                    has_begun = True
                    await self._unread.put((choice.index, chunk))
        except GenerationError as failure:
            error = generation_error(failure)
            constraint = choice.sampling.constraint
            if (
                constraint is not None
                and error.status == 400
                and constraint.kind.value in error.message
            ):
                error.param = _constraint_param(choice.request)
        except ConstraintError as failure:
            error = _constraint_error(choice.request, failure)
        except Exception as failure:
            if not has_begun and isinstance(failure, ValueError | TypeError):
                error = invalid_request("prompt", str(failure))
            else:
                log_failure(_log, "a generation failed", error=failure, may_quote_client=True)
                error = ApiError(500, f"the generation failed: {type(failure).__name__}: {failure}")
        return error, has_begun


def _drafting_arguments(choice: Choice) -> dict[str, Any]:
    """Return the arguments of ``Agent.generate`` that few requests set."""
    arguments: dict[str, Any] = {}
    if not choice.request.drafts:
        arguments["drafts"] = False
    if choice.timeline is not None:
        arguments["timeline"] = choice.timeline
    if choice.request.prediction_tokens:
        arguments["prediction"] = choice.request.prediction_tokens
    if choice.pictures:
        arguments["pictures"] = choice.pictures
    return arguments


def _constraint_param(request: GenerationRequest) -> str:
    """Return our name of the field from which the constraint of a request was read."""
    constraint, param = request.sampling.constraint, request.constraint_param
    return param or ("tools" if constraint is None else _CONSTRAINT_FIELDS[constraint.kind])


def _constraint_error(request: GenerationRequest, failure: ConstraintError) -> ApiError:
    if isinstance(failure, ConstraintBusyError):
        return ApiError(503, str(failure), code="grammar_busy", retry_after_s=RETRY_AFTER_S)
    return invalid_request(_constraint_param(request), str(failure))


def _context_exceeded(why: str, context_length: int, param: str) -> ApiError:
    room = f"which leaves no room for output in the context of {context_length} tokens"
    return invalid_request(param, f"{why}, {room}", "context_length_exceeded")


# Models that the verifiers serve, by name.
#
# A name belongs to one model: that of a verifier, or an adapter beside it. Verifiers may serve
# different models; the agent sends a request to one that serves the requested name.

ALIAS: Final = "edgespec"
"""A model name that always means the default model."""
_OLLAMA_TAG: Final = ":latest"


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
class ModelChoice:
    requested_name: str
    """The name to request from a verifier; empty if none is requested."""
    served: ServedModel | None
    """None: no verifier has reported its models yet."""

    @property
    def context_length(self) -> int | None:
        return None if self.served is None else self.served.context_length


class ServedModels:
    """The models of the verifiers behind ``watch``. If ``only`` is not empty, other names are
    refused."""

    def __init__(self, watch: VerifierMonitor, only: str = "") -> None:
        self._watch, self._only = watch, only

    @property
    def name(self) -> str:
        """Name of the default model, which serves requests that name none."""
        default = self.default
        return default.name if default is not None else self._only or ALIAS

    @property
    def default(self) -> ServedModel | None:
        """The default model, which serves requests that name none. None until a verifier has
        reported its models."""
        return next(iter(self.listed), None)

    @property
    def listed(self) -> tuple[ServedModel, ...]:
        """All served models without duplicates, the default one first, then in the order of the
        verifiers. Models with another vocabulary than the default one are left out, since the
        endpoint has one tokenizer."""
        models: dict[str, ServedModel] = {}
        vocabulary = ""
        for info in self._watch.known_infos:
            for model in info.models:
                if self._only not in ("", model.name):
                    continue
                vocabulary = vocabulary or model.vocabulary
                if model.vocabulary != vocabulary:
                    continue
                parent = None if model is info.model else info.model.name
                context_length = info.limits.context_length or model.context_length
                served = ServedModel(model, context_length, parent)
                known = models.setdefault(model.name, served)
                if known.info.pictures is None:  # requests with pictures go where they are read
                    info_with_pictures = replace(known.info, pictures=model.pictures)
                    models[model.name] = replace(known, info=info_with_pictures)
        return tuple(models.values())

    def without_tag(self, name: str) -> str:
        """Return ``name`` without the tag that Ollama's clients add to names, unless a model has
        the name with the tag."""
        is_known = any(one.name == name for one in self.listed)
        return name if is_known else name.removesuffix(_OLLAMA_TAG)

    def choose(self, name: str) -> ModelChoice:
        """Return the model for a request that names ``name``, which may be empty. Names are checked
        only after a verifier has reported its models. Raises ``ApiError`` for an unknown name."""
        by_name = {one.name: one for one in self.listed}
        if (served := by_name.get(name)) is not None:
            return ModelChoice(self._name_to_request(served), served)
        if name in ("", ALIAS, self._only):
            return ModelChoice(self._only, self.default)
        if by_name or self._only or not fits_on_wire(name):
            raise unknown_model_error(name, tuple(by_name) or (self.name,))
        return ModelChoice(name, None)

    def _name_to_request(self, served: ServedModel) -> str:
        """Return the name to request for ``served``. If the verifiers serve one and the same model
        under several names, none is requested, so that each of them can serve it."""
        models = [info.model for info in self._watch.known_infos]
        fingerprints = {one.fingerprint for one in models}
        is_one_model = fingerprints == {served.info.fingerprint} != {""}
        if len({one.name for one in models}) > 1 and is_one_model:
            return self._only
        return served.name


class FallbackModels(ServedModels):
    """The one model of the device, which answers in place of every model that ``usual`` has. A name
    that ``usual`` refuses is refused here too."""

    def __init__(self, usual: ServedModels, info: ModelInfo) -> None:
        self._usual, self._served = usual, ServedModel(info, info.context_length, None)

    @property
    def listed(self) -> tuple[ServedModel, ...]:
        return (self._served,)

    def without_tag(self, name: str) -> str:
        return self._usual.without_tag(name)

    def choose(self, name: str) -> ModelChoice:
        if name != self._served.name:
            self._usual.choose(name)
        return ModelChoice("", self._served)


def _make_pool(name: str, threads: int) -> WorkerPool:
    return WorkerPool(name, threads=threads, max_waiting=_MAX_WAITING, timeout_s=_WORK_WITHIN_S)


def _too_slow(why: str) -> ApiError:
    return ApiError(503, f"{why}: try again", code="too_slow", retry_after_s=RETRY_AFTER_S)


_T = TypeVar("_T")
TokenIds = Sequence[int]
MakeEnvelope = Callable[[str, str | None, bool], Envelope]
Convert = Callable[[Mapping[str, Any]], ChatConversion]


@dataclass(slots=True)
class PreparedRequest:
    envelope: Envelope
    choices: list[Choice]
    request: GenerationRequest
    metric_name: str
    """Name of the model in metrics, or ``OTHER_MODEL``."""
    answered_by: str = ""
    """The model of this device that answers in place of the target. Empty: the target does."""

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names of request fields that had no effect, and of promises that were not kept, for a
        header."""
        lost = dict.fromkeys(one for choice in self.choices for one in choice.left_out)
        return (*self.request.ignored_fields, *lost)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once for all of its choices."""
        return sum(one.prompt_tokens for one in self.choices[:: self.request.n])

    def usage(self) -> dict[str, Any]:
        usage = usage_of(self.choices, self.prompt_tokens, self.request.sampling.seed)
        if self.answered_by:  # no token is the target's own
            own = {"rule": "fallback", "lossy": True, "answered_by": self.answered_by}
            usage["edgespec"] |= own
        return usage


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The prompt of a chat in tokens."""

    tokens: list[int]
    form: OutputForm
    """The way in which the model writes the output."""
    lacks_tools: bool = False
    """Whether the description of the tools was left out."""


class Endpoint:
    """The state that all requests of one HTTP server share.

    Args:
        agent: The agent that generates.
        tokenizer: The tokenizer of the target.
        verifiers: The watch that shows which verifiers are ready and what they serve.
        settings: Limits and defaults.
        sampling: Defaults for parameters that requests leave open.
        key: API key that clients must send; empty if none is required.
        has_budget: Whether the process has a memory budget, for which request bodies have
            smaller bounds.

    Its threads end with ``close``.
    """

    def __init__(
        self,
        agent: Agent,
        tokenizer: ChatTokenizer,
        verifiers: VerifierMonitor,
        settings: EndpointSection,
        sampling: SamplingParams | None = None,
        *,
        key: str = "",
        has_budget: bool = False,
    ) -> None:
        self.agent = agent
        self.generator: Agent | LocalModel = agent
        """The agent, or in a fallback the model of the device that generates instead."""
        self.tokenizer, self.verifiers = tokenizer, verifiers
        self.models = ServedModels(verifiers, agent.options.model)
        self.fallback: Endpoint | None = None
        """The endpoint of a model on this device, which answers while no verifier can be reached.
        None: such requests fail."""
        self.answered_by = ""
        """In a fallback, the text that marks its answers."""
        self.report: Callable[[str], None] = lambda text: None
        """Called with a line for people when answers begin to come from the fallback, and when they
        come from verifiers again."""
        self._is_falling_back = False
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
        self.max_body_bytes = settings.most_body_bytes(has_budget=has_budget)
        self.bodies = BodyRoom(
            settings.most_bodies_bytes(has_budget=has_budget), shared_by_clients=is_shared
        )
        self._requests = _make_pool("reading a request", threads=2)
        self._texts = _make_pool("tokenizing a text", threads=4)
        # One thread, since the process that renders templates handles one call at a time.
        self._templates = _make_pool("rendering a chat template", threads=1)
        self._fetches = WorkerPool(
            "fetching a picture",
            threads=_FETCH_THREADS,
            max_waiting=_MAX_WAITING,
            timeout_s=_FETCHES_WITHIN_S,
        )
        self.large_body_lock = asyncio.Lock()
        """Held from a large body to its tokens, since parsed values take many times the body's
        memory."""
        self._long_text_lock = asyncio.Lock()
        """Held while a long text is tokenized, which bounds the memory that all requests take for
        it."""
        self.responses = ResponseStore()
        """Responses that may be continued."""
        self.counts, self.failures = EndpointCounts(), RecentFailures()
        self.created_at_s = int(time.time())
        self.is_stopping = False
        """Whether new requests are refused while running ones end."""
        self.load_target_texts: Callable[[], Awaitable[None]] | None = None
        """Awaited before a request is read. Where the target's tokenizer and sampling defaults are
        not known yet, it fetches them and stores them here. May raise ``GenerationError``."""
        self._runs: set[RequestRun] = set()
        self.idle = asyncio.Event()
        """Set while no request runs or waits."""
        self.idle.set()

    def use_fallback(self, model: LocalModel, sampling: SamplingParams) -> None:
        """Let a model of this device answer while no verifier can be reached. ``sampling`` has the
        defaults for parameters that requests leave open."""
        fallback = copy(self)  # limits, queues, threads and counts are the same objects
        fallback.generator, fallback.tokenizer = model, model.tokenizer
        fallback.sampling = sampling
        fallback.models = FallbackModels(self.models, model.info)
        fallback.load_target_texts, fallback.answered_by = None, model.answered_by
        self.fallback = fallback

    async def choose_answerer(self) -> Endpoint:
        """Return the endpoint that should answer a request which has just arrived: the fallback if
        there is one and no verifier can be reached, else this one. Verifiers that were away are
        probed once more, for ``_PROBE_WITHIN_S`` at most."""
        if self.fallback is None:
            return self
        if not self.verifiers.ready:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_WITHIN_S):
                    await self.verifiers.refresh_if_stale()
        return self._report_answerer(is_away=self.verifiers.is_away)

    async def find_fallback(self) -> Endpoint | None:
        """Return the fallback if there is one and no verifier answers a probe now. A request that
        has no token yet is then answered by it."""
        if self.fallback is None:
            return None
        await self.verifiers.refresh_after(time.monotonic())
        return self._report_answerer(is_away=True) if self.verifiers.is_away else None

    def _report_answerer(self, *, is_away: bool) -> Endpoint:
        """Return the endpoint that answers now, and report a change."""
        assert self.fallback is not None
        name = self.fallback.answered_by
        if is_away and not self._is_falling_back:
            self.report(f"no verifier can be reached: answers are by {name} until one is back")
        elif self._is_falling_back and not is_away:
            self.report(f"a verifier is back: answers are no longer by {name}")
        self._is_falling_back = is_away
        return self.fallback if is_away else self

    @contextlib.contextmanager
    def _refusing_by_name(self) -> Iterator[None]:
        """Turn refusals of a request in this block into 503 in a fallback. A verifier may be able
        to serve the request, so it is not invalid."""
        try:
            yield
        except ApiError as error:
            if not self.answered_by or error.status != 400:
                raise
            raise fallback_refusal(self.answered_by, error) from None

    def _check_fallback(self, request: GenerationRequest) -> None:
        """Raise ``ApiError`` for what no model on the device can do."""
        if not self.answered_by:
            return
        if request.pictures:
            raise explain_text_model(self.models.name, request.pictures[0])
        if request.logprobs is not None:
            raise invalid_request("logprobs", "logprobs is given, but it computes no scores")
        if request.rule not in ("", EXACT_RULE):
            why = f"rule is {request.rule!r}, but it judges no drafts"
            raise invalid_request("rule", why)

    @property
    def running_count(self) -> int:
        return sum(one.has_begun for one in self._runs)

    def with_model_series(self) -> Self:
        """Return itself, for its metrics, after giving each served model its series."""
        for one in self.models.listed:
            self.counts.add_answer(one.name, answers=0)
        return self

    @asynccontextmanager
    async def prepare_within_limit(self) -> AsyncIterator[None]:
        """Bound the time that a request may take before it waits for its slot. Work that is not
        done in time becomes an ``ApiError`` with ``Retry-After``. The tokenizer of the target is
        fetched first, which may include waiting for a verifier."""
        if self.load_target_texts is not None:
            try:
                await self.load_target_texts()
            except GenerationError as failure:
                raise generation_error(failure) from failure
        limit = asyncio.timeout(_PREPARE_WITHIN_S)
        try:
            async with limit:
                yield
        except PoolBusyError as error:
            raise ApiError(
                429, f"{error}: try again", code="queue_full", retry_after_s=RETRY_AFTER_S
            ) from None
        except PoolLateError as error:
            raise _too_slow(str(error)) from None
        except TimeoutError:
            if not limit.expired():
                raise
            raise _too_slow(f"the request was not read within {_PREPARE_WITHIN_S:g} s") from None

    async def run_reader(self, function: Callable[..., _T], *given: Any) -> _T:
        """Return the result of ``function``, run in a thread of the pool that reads requests."""
        return await self._requests.run_for(current_client.get(), function, *given)

    def read_json(self, body: bytes) -> Mapping[str, Any]:
        """Return the JSON object of a request. Raises ``ApiError`` before much of it is parsed, if
        it has more members than the token ids of some full prompts and ``MAX_VALUES`` other
        values."""
        longest = max((one.context_length for one in self.models.listed), default=MAX_TOKENS)
        check_members(body, MAX_VALUES + _MAX_FULL_PROMPTS * longest)
        return read_object(body)

    def close(self) -> None:
        """End the threads that work for requests."""
        for pool in (self._requests, self._texts, self._templates, self._fetches):
            pool.close()

    def begin_stop(self) -> None:
        self.is_stopping = True
        self.admission.close(stopping_error())

    def cut_off_requests(self) -> None:
        for run in tuple(self._runs):
            run.fail(stopping_error())

    # --- requests, all of which may raise ``ApiError`` ----------------------------------------

    async def prepare_chat(self, data: Mapping[str, Any]) -> PreparedRequest:
        request = await self.run_reader(chat_request, data, self.sampling)
        return await self._prepare_chat(request, ChatEnvelope)

    async def prepare_response(self, data: Mapping[str, Any]) -> PreparedRequest:
        data = await self.run_reader(self._with_earlier_response, data)
        conversion, request = await self._convert(convert_to_chat, data)
        keep = partial(self.responses.add, input_items=as_items(data.get("input")))
        envelope = partial(
            ResponseEnvelope,
            echo=conversion.echo,
            keep=keep if Fields(data).boolean("store", absent=True) else None,
        )
        return await self._prepare_chat(request, envelope)

    def _with_earlier_response(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a request for a response with the conversation of the response that it continues
        in front of its input. Raises ``ApiError``."""
        name = "previous_response_id"
        if not (identity := Fields(data).text(name)):
            return data
        earlier = self.responses.find(identity, name).conversation
        added = as_items(data.get("input")) or []
        if not isinstance(added, list):
            raise Fields(data).wrong_value("input", added, "text or a list of items")
        return {**data, "input": [*earlier, *added]}

    async def prepare_message(self, data: Mapping[str, Any]) -> PreparedRequest:
        conversion, request = await self._convert(convert_message_request, data)
        envelope = partial(MessageEnvelope, hides_thoughts=conversion.hides_thoughts)
        return await self._prepare_chat(request, envelope)

    async def count_message_tokens(self, data: Mapping[str, Any]) -> int:
        """Return the number of prompt tokens of a request for a message."""
        convert = partial(convert_message_request, needs_length=False)
        _, request = await self._convert(convert, data)
        with errors_with_sent_names(request.sent_names):
            chosen = await self.choose_model(request.model)
            return len((await self._chat_prompt(request, chosen.context_length)).tokens)

    async def prepare_ollama_chat(self, data: Mapping[str, Any]) -> PreparedRequest:
        if not data.get("messages"):
            return await self._prepare_nothing(data, OllamaChatEnvelope)
        _, request = await self._convert(convert_ollama_chat, data)
        return await self._prepare_chat(self._without_tag(request), OllamaChatEnvelope)

    async def prepare_ollama_generate(self, data: Mapping[str, Any]) -> PreparedRequest:
        if data.get("prompt") in (None, "") and not (data.get("suffix") or data.get("images")):
            return await self._prepare_nothing(data, OllamaGenerateEnvelope)
        conversion, request = await self._convert(convert_ollama_generate, data)
        request = self._without_tag(request)
        if "messages" in conversion.chat:
            return await self._prepare_chat(request, OllamaGenerateEnvelope)
        with self._refusing_by_name(), errors_with_sent_names(request.sent_names):
            return await self._prepare_completion(request, OllamaGenerateEnvelope)

    def _without_tag(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, model=self.models.without_tag(request.model))

    async def _prepare_nothing(
        self, data: Mapping[str, Any], envelope: MakeEnvelope
    ) -> PreparedRequest:
        """Return a request without generations. Ollama's clients send one to load a model."""
        empty = {**data, "messages": [{"role": "user", "content": ""}]}
        _, request = await self._convert(convert_ollama_chat, empty)
        request = self._without_tag(request)
        chosen = await self.choose_model(request.model)
        return self._with_choices(envelope, request, chosen, ())

    async def _convert(
        self, convert: Convert, data: Mapping[str, Any]
    ) -> tuple[ChatConversion, GenerationRequest]:
        """Return a request of another API as a chat request, and parsed. The response to it has
        one choice."""
        conversion, request = await self.run_reader(self._read_converted, convert, data)
        if request.n > 1:
            raise invalid_request(
                "n", f"n is {request.n}, but this API has one output for a request"
            )
        return conversion, request

    def _read_converted(
        self, convert: Convert, data: Mapping[str, Any]
    ) -> tuple[ChatConversion, GenerationRequest]:
        conversion = convert(data)
        chat, names = conversion.chat, conversion.names
        if "messages" in chat:
            request = chat_request(chat, self.sampling, max_tools=MAX_FUNCTIONS, names=names)
        else:
            request = completion_request(chat, self.sampling, names=names)
        client_tools = {**request.client_tools, **conversion.client_tools}
        ignored = (
            *(sent_name(one, names) for one in request.ignored_fields),
            *conversion.left_out,
        )
        return conversion, replace(request, client_tools=client_tools, ignored_fields=ignored)

    async def _prepare_chat(
        self, request: GenerationRequest, envelope: MakeEnvelope
    ) -> PreparedRequest:
        with self._refusing_by_name(), errors_with_sent_names(request.sent_names):
            self._check_fallback(request)
            chosen = await self.choose_model(request.model)
            pictures, bounds = await self._fetch_pictures(request, chosen)
            prompt = await self._chat_prompt(request, chosen.context_length)
            placed = place_in_prompt(prompt.tokens, pictures, bounds) if bounds else ()
            request = await self._run_template(self._with_unread_variables, request)
            if prompt.lacks_tools:
                if self.answered_by:
                    raise invalid_request("tools", "tools have no room in its context")
                request = replace(
                    request, tools=[], ignored_fields=(*request.ignored_fields, "tools")
                )
            if request.tools:
                request = await self.run_reader(self._constrain_to_calls, request, prompt)
            request = await self.run_reader(self._constrain_answer, request, prompt)
            request = await self._with_compiled_constraint(request)
            if self.answered_by:
                if STRICT_TOOLS in request.ignored_fields:
                    raise invalid_request("tools", f"{STRICT_TOOLS} cannot be ensured")
                request = replace(request, is_constraint_optional=False)
            request = await self._with_encoded_prediction(request)
            return self._with_choices(
                envelope, request, chosen, [prompt.tokens], prompt.form, pictures=placed
            )

    async def _fetch_pictures(
        self, request: GenerationRequest, chosen: ModelChoice
    ) -> tuple[tuple[SentPicture, ...], PictureInput | None]:
        """Return the pictures of a request, all with their bytes, and the bounds on them; None for
        the bounds if there are no pictures. Raises ``ApiError`` for a model that reads text only,
        and for a picture that exceeds a bound or cannot be fetched."""
        pictures = request.pictures
        if not pictures:
            return (), None
        if chosen.served is None:
            await self.verifiers.refresh_if_stale()
            chosen = self.models.choose(request.model)
        if chosen.served is None:
            why = "the request has pictures, but no verifier has reported which models read them"
            raise unavailable_error(why)
        if (bounds := chosen.served.info.pictures) is None:
            raise explain_text_model(chosen.served.name, pictures[0])
        check_count(pictures, bounds.max_count)
        if any(one.url for one in pictures):
            is_allowed = self.settings.picture_urls
            fetch = partial(fetch_pictures, pictures, bounds.max_bytes, is_allowed=is_allowed)
            pictures = await self._fetches.run_for(current_client.get(), fetch)
        await self.run_reader(check_pictures, pictures, bounds)
        return pictures, bounds

    async def prepare_completion(self, data: Mapping[str, Any]) -> PreparedRequest:
        request = await self.run_reader(completion_request, data, self.sampling)
        with self._refusing_by_name(), errors_with_sent_names(request.sent_names):
            return await self._prepare_completion(request)

    async def _prepare_completion(
        self, request: GenerationRequest, envelope: MakeEnvelope = CompletionEnvelope
    ) -> PreparedRequest:
        self._check_fallback(request)
        chosen = await self.choose_model(request.model)
        context_length = chosen.context_length
        prompts: list[TokenIds] = [
            await self._encode_prompt(one, request, context_length) for one in request.prompts
        ]
        request = await self._with_compiled_constraint(request)
        request = await self._with_encoded_prediction(request)
        prepared = self._with_choices(envelope, request, chosen, prompts)
        if request.echo:
            # A prompt that was sent as text is repeated as it is; token ids are decoded as in an
            # output, without special tokens.
            texts = [
                one if isinstance(one, str) else await self._run_tokenizer(self._decode_prompt, one)
                for one in request.prompts
            ]
            for choice in prepared.choices:
                choice.echo = texts[choice.index // request.n]
                if request.scores_prompt and len(choice.prompt) - 1 > MAX_FORCED_TOKENS:
                    why = f"at most {MAX_FORCED_TOKENS + 1} can be scored"
                    raise invalid_request(
                        "prompt", f"a prompt has {len(choice.prompt)} tokens, but {why}"
                    )
        return prepared

    async def _encode_prompt(
        self, prompt: str | TokenIds, request: GenerationRequest, context_length: int | None
    ) -> TokenIds:
        if not isinstance(prompt, str):
            return prompt
        if not request.suffix:
            return await self._encode(prompt, context_length, "prompt", request.adds_special_tokens)
        for name, text in (("prompt", prompt), ("suffix", request.suffix)):
            await self._run_tokenizer(self._check_length, text, context_length, name)
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        return await self._run_tokenizer(
            infilling_prompt, self.tokenizer, encode, prompt, request.suffix
        )

    async def tokenize(self, data: Mapping[str, Any]) -> tuple[Sequence[int], int | None]:
        """Return the tokens of a text or of a conversation, and the context length."""
        fields = Fields(data)
        context = (await self.choose_model(fields.text("model") or "")).context_length
        if data.get("messages") is not None:
            request = await self.run_reader(chat_request, data, self.sampling)
            with errors_with_sent_names(request.sent_names):
                return (await self._chat_prompt(request, context)).tokens, context
        text = fields.text("prompt") or fields.text("content") or ""
        special = fields.boolean("add_special_tokens", absent=True)
        return await self._encode(text, context, "prompt", special), context

    async def detokenize(self, data: Mapping[str, Any]) -> str:
        """Return the text of token ids. Their number is limited to the context length."""
        fields = Fields(data)
        chosen = await self.choose_model(fields.text("model") or "")
        limit = chosen.context_length or MAX_TOKENS
        tokens = await self.run_reader(fields.token_ids, "tokens", limit)
        return await self._run_tokenizer(self._decode_ids, tokens)

    @asynccontextmanager
    async def run_generations(self, prepared: PreparedRequest) -> AsyncIterator[RequestRun]:
        """Run the generations of a request while the block is open. The verifiers are asked for
        their state again if the outcome contradicts the known state; a client that disconnects
        contradicts nothing. Raises ``ApiError``."""
        run = RequestRun(self.generator, prepared.choices, self.admission)
        has_succeeded: bool | None = None
        self._runs.add(run)
        self.idle.clear()
        try:
            async with run:
                yield run
            has_succeeded = True
        except ApiError as error:
            has_succeeded = False if error.status == 503 else None
            with self._refusing_by_name():
                raise
        finally:
            self._runs.discard(run)
            if not self._runs:
                self.idle.set()
            if run.has_begun:
                if has_succeeded not in (None, self.verifiers.ready):
                    self.verifiers.refresh_soon()
                self.counts.add_answer(
                    prepared.metric_name, prepared.prompt_tokens, prepared.choices
                )
                self.counts.duration_s.add(time.monotonic() - prepared.envelope.prepared_at_s)
                if self.answered_by:
                    self.counts.fallback_answers[self.answered_by] += 1

    def record_first_token(self, prepared: PreparedRequest) -> None:
        envelope = prepared.envelope
        if envelope.first_token_at_s is None:
            envelope.first_token_at_s = time.monotonic()
            self.counts.first_token_s.add(envelope.first_token_at_s - envelope.prepared_at_s)

    async def choose_model(self, name: str) -> ModelChoice:
        """Return the model for a request that names ``name``. Before an unknown name is refused,
        the verifiers are asked for their models once more."""
        try:
            return self.models.choose(name)
        except ApiError:
            await self.verifiers.refresh_if_stale()
            return self.models.choose(name)

    async def _chat_prompt(self, request: GenerationRequest, context_length: int | None) -> _Prompt:
        """Return the prompt of a chat. A description of the tools that the template does not write
        itself is left out if it leaves no room in the context and no call is forced."""
        template = self.tokenizer.chat_template(tools=bool(request.tools))
        if template is None:
            why = "this model has no chat template; use /v1/completions"
            raise invalid_request("messages", why, "no_chat_template")
        encode = partial(
            self._encode,
            context_length=context_length,
            param="messages",
            special=request.adds_special_tokens,
        )
        write = partial(
            write_chat_prompt,
            template,
            request.messages,
            add_generation_prompt=request.has_generation_prompt,
            continue_final_message=request.continues_last_message,
            variables=request.variables,
        )
        try:
            has_tools = await self._run_template(template_writes_tools, template)
            may_omit_tools = bool(request.tools) and not has_tools and not request.forces_call
            try:
                rendered = await self._run_template(write, request.tools)
                tokens = await self._encode(
                    rendered.text, context_length, "messages", request.adds_special_tokens
                )
                if not may_omit_tools or context_length is None or len(tokens) < context_length:
                    form = output_form(template, request.tools, rendered)
                    return _Prompt(tokens, form)
            except (ApiError, TokenizerError):
                if not may_omit_tools:
                    raise
            rendered = await self._run_template(write, ())
            tokens = await encode(rendered.text)
            return _Prompt(tokens, output_form(template, (), rendered), lacks_tools=True)
        except TokenizerError as error:
            raise invalid_request("messages", str(error)) from None

    async def _encode(
        self, text: str, context_length: int | None, param: str, special: bool = True
    ) -> list[int]:
        """Return the tokens of ``text``. ``adds_special_tokens``: add the tokens that begin a
        text."""
        new = text
        if len(text) > _PIECE_CHARACTERS and not special:
            new = "".join(await self._run_tokenizer(self.tokenizer.find_new, text))
        is_long = len(new) > _PIECE_CHARACTERS
        async with self._long_text_lock if is_long else contextlib.nullcontext():
            if is_long:
                await self._run_tokenizer(self._check_length, new, context_length, param)
            encode = partial(self.tokenizer.encode, add_special_tokens=special)
            return await self._run_tokenizer(encode, text)

    async def _run_tokenizer(self, function: Callable[..., _T], *given: Any) -> _T:
        return await self._texts.run_for(current_client.get(), function, *given)

    async def _run_template(self, function: Callable[..., _T], *given: Any) -> _T:
        return await self._templates.run_for(current_client.get(), function, *given)

    async def _with_encoded_prediction(self, request: GenerationRequest) -> GenerationRequest:
        """Return ``request`` with the token ids of its prediction. A model of the device that
        answers in place of the target needs no drafts. Raises ``ApiError``."""
        if not request.prediction or not request.drafts or self.answered_by:
            return request
        tokens = await self._encode(request.prediction, None, "prediction.content", special=False)
        try:
            check_prediction_length(len(tokens))
        except ValueError as error:
            raise invalid_request("prediction.content", str(error)) from None
        return replace(request, prediction_tokens=tuple(tokens))

    async def _with_compiled_constraint(self, request: GenerationRequest) -> GenerationRequest:
        """Return ``request`` with its constraint compiled, before it waits for a slot, so that slow
        compilation occupies none. Raises ``ApiError``."""
        try:
            sampling = await self.generator.with_matcher(request.sampling, current_client.get())
        except ConstraintError as failure:
            if not request.is_constraint_optional:
                raise _constraint_error(request, failure) from None
            sampling = replace(request.sampling, constraint=None)
            ignored = (*request.ignored_fields, STRICT_TOOLS)
            return replace(
                request, sampling=sampling, is_constraint_optional=False, ignored_fields=ignored
            )
        return replace(request, sampling=sampling)

    def _check_length(self, text: str, context_length: int | None, param: str) -> None:
        """Raise ``ApiError`` for a text with far more tokens than the context length; a text that
        passes still has to be counted exactly. ``context_length`` None: the largest that a verifier
        can have."""
        limit, counted = context_length or MAX_TOKENS, 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[start : start + _PIECE_CHARACTERS]
            counted += len(self.tokenizer.encode(piece))  # which remembers nothing
            if counted > _PIECEWISE_FACTOR * limit:
                counted_part = (
                    f"the first {start + len(piece)} of the prompt's {len(text)} characters"
                )
                raise _context_exceeded(f"{counted_part} are some {counted} tokens", limit, param)

    def _decode_ids(self, tokens: Sequence[int]) -> str:
        """Return the text of a whole sequence with its special tokens. Raises ``ApiError`` for an
        id without text."""
        try:
            return self.tokenizer.decode(tokens, skip_special_tokens=False)
        except (LookupError, ValueError, OverflowError, TokenizerError) as error:
            raise invalid_request("tokens", f"the token ids stand for no text: {error}") from None

    def _with_unread_variables(self, request: GenerationRequest) -> GenerationRequest:
        """Add variables that the chat template does not read to the ignored parameters."""
        template = self.tokenizer.chat_template(tools=bool(request.tools))
        if template is None or not request.variables:
            return request
        unread = [name for name in request.variables if name not in template.variables]
        ours = [
            name if name in TEMPLATE_VARIABLES else f"chat_template_kwargs.{name}"
            for name in unread
        ]
        named = [sent_name(name, request.sent_names) for name in ours]
        return replace(request, ignored_fields=(*request.ignored_fields, *named))

    def _decode_prompt(self, tokens: Sequence[int]) -> str:
        """Return the text of a prompt's ids, without special tokens. Raises ``ApiError``."""
        try:
            return self.tokenizer.decode(tokens)
        except (LookupError, ValueError, OverflowError, TokenizerError) as error:
            raise invalid_request("prompt", f"the token ids stand for no text: {error}") from None

    def _constrain_to_calls(self, request: GenerationRequest, prompt: _Prompt) -> GenerationRequest:
        """Return the request with the constraint that its tools require.

        The constraint is a forced call; a call or JSON that fits a schema; or free text in which
        calls of strict tools fit their schemas. The last one is dropped with a word in the header
        if it cannot be kept; the others are not."""
        template = self.tokenizer.chat_template(tools=True)
        names, tools = self.tokenizer, request.tools
        assert template is not None
        form, constraint, single = (
            call_format(template),
            request.sampling.constraint,
            request.single_call,
        )
        strict = request.strict & {tool["function"]["name"] for tool in tools}
        is_optional, left_out, param = False, tuple[str, ...](), "tools"
        if request.forces_call:
            constraint = forced_call_grammar(form, tools, names, single=single)
        elif constraint is not None and constraint.kind is ConstraintKind.JSON_SCHEMA:
            param = _CONSTRAINT_FIELDS[constraint.kind]
            make_grammar = partial(
                call_or_json_grammar,
                form,
                tools,
                names=names,
                single=single,
                schema=constraint.text,
            )
            try:
                constraint = make_grammar(strict)
            except ApiError:
                if not strict:
                    raise
                constraint, left_out = make_grammar(()), (STRICT_TOOLS,)
        elif constraint is None and strict:
            try:
                constraint = free_call_grammar(
                    form,
                    tools,
                    strict,
                    names,
                    is_thinking=prompt.form.is_thinking,
                    has_thoughts=request.thinking_budget is None,
                )
                is_optional = True
            except ApiError:
                left_out = (STRICT_TOOLS,)
        else:
            left_out, param = (STRICT_TOOLS,) if strict else (), request.constraint_param
        return replace(
            request,
            sampling=replace(request.sampling, constraint=constraint),
            constraint_param=param,
            is_constraint_optional=is_optional,
            ignored_fields=(*request.ignored_fields, *left_out),
        )

    def _constrain_answer(self, request: GenerationRequest, prompt: _Prompt) -> GenerationRequest:
        """Return the request with a constraint that begins behind the model's thought, and with the
        limit on the thought. Without a known format of thoughts the limit has no effect."""
        form = prompt.form.thoughts
        budget = request.thinking_budget
        if request.is_constraint_optional and budget is None:
            return request  # the grammar of free text with calls has the thought
        if form is None:
            if budget is None:
                return request
            name = sent_name(BUDGET, request.sent_names)
            return replace(request, ignored_fields=(*request.ignored_fields, name))
        try:
            constraint = constrain_answer(
                request.sampling.constraint,
                form,
                self.tokenizer,
                is_thinking=prompt.form.is_thinking,
                budget=budget,
                is_call=bool(request.tools) and request.sampling.constraint is not None,
            )
        except ApiError:
            if not request.is_constraint_optional or budget is not None:
                raise
            # The promise about strict tools is reported as lost.
            sampling = replace(request.sampling, constraint=None)
            ignored = (*request.ignored_fields, STRICT_TOOLS)
            return replace(
                request, sampling=sampling, is_constraint_optional=False, ignored_fields=ignored
            )
        return replace(
            request,
            sampling=replace(request.sampling, constraint=constraint),
            is_constraint_optional=request.is_constraint_optional and budget is None,
            constraint_param=_constraint_param(request)
            if request.sampling.constraint is not None
            else BUDGET,
        )

    def _limit_length(
        self, request: GenerationRequest, tokens: Sequence[int], context_length: int | None
    ) -> SamplingParams:
        """Return the sampling parameters with the ``max_tokens`` of the request or the default,
        limited to the room in the context. ``context_length`` None: not known yet."""
        if not tokens:
            raise invalid_request("prompt", "the prompt is empty, but must hold at least one token")
        param, default = "prompt", self.settings.default_max_tokens
        if request.messages:
            param, default = "messages", default or context_length
        min_tokens = request.sampling.min_tokens
        if request.is_empty:
            if context_length is not None and len(tokens) > context_length:
                why = f"the prompt has {len(tokens)} tokens"
                raise _context_exceeded(why, context_length, param)
            return request.sampling
        max_tokens = request.max_tokens or max(default or self.sampling.max_tokens, min_tokens)
        if context_length is not None:
            room = context_length - len(tokens)
            if room < 1:
                raise _context_exceeded(
                    f"the prompt has {len(tokens)} tokens", context_length, param
                )
            max_tokens = min(max_tokens, room)
        return replace(
            request.sampling, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens)
        )

    def _check_ids(self, request: GenerationRequest, chosen: ModelChoice) -> None:
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
            outside = next((one for one in ids if one >= info.vocabulary_size), None)
            if outside is not None:
                size = f"the vocabulary of {info.name!r} has {info.vocabulary_size} ids"
                raise invalid_request(name, f"{name} holds the token id {outside}, but {size}")

    def _with_choices(
        self,
        envelope: MakeEnvelope,
        request: GenerationRequest,
        chosen: ModelChoice,
        prompts: Sequence[TokenIds],
        form: OutputForm | None = None,
        *,
        pictures: tuple[PlacedPicture, ...] = (),
    ) -> PreparedRequest:
        """Return the request with its choices: n generations for each prompt, in the order of the
        prompts. Generation k (from 0) of a prompt has the seed ``seed_of(seed, k)``."""
        # The texts of a request are dropped here, as its body is: they are many times as large as
        # the tokens.
        names = {ours: sent for ours, sent in request.sent_names.items() if "[" not in ours}
        kept_request = replace(
            request,
            prompts=(),
            messages=[],
            pictures=(),
            tools=[],
            variables={},
            sent_names=names,
        )
        # A fallback has no draft whose tokens could be shown or switched off.
        shows_sources = request.shows_sources and not self.answered_by
        if self.answered_by:
            kept_request = replace(kept_request, drafts=True)
        choices, token_bytes = list[Choice](), self.tokenizer.token_bytes
        form = form or OutputForm()
        self._check_ids(request, chosen)
        for prompt in prompts:
            tokens = array("I", prompt)  # 4 bytes each while they wait for a slot
            sampling = self._limit_length(request, tokens, chosen.context_length)
            for k in range(request.n):
                choice_sampling = replace(sampling, seed=choice_seed(sampling.seed, k))
                choices.append(
                    Choice(
                        index=len(choices),
                        prompt=tokens,
                        request=kept_request,
                        sampling=choice_sampling,
                        token_bytes=token_bytes,
                        parser=form.make_parser(self.tokenizer),
                        model=chosen.requested_name,
                        pictures=pictures,
                        timeline=GenerationTimeline() if shows_sources else None,
                    )
                )
        served = chosen.served
        name = served.name if served is not None else request.model or self.models.name
        fingerprint = served.info.fingerprint[:12] if served is not None else ""
        is_known = (
            served is not None
            or not chosen.requested_name
            or chosen.requested_name == self.models.name
        )
        response_envelope = envelope(
            name, f"fp_{fingerprint}" if fingerprint else None, request.include_usage
        )
        return PreparedRequest(
            envelope=response_envelope,
            choices=choices,
            request=kept_request,
            metric_name=name if is_known else OTHER_MODEL,
            answered_by=self.answered_by,
        )
