"""The device agent: it turns a prompt into the target's own output and drafts while that pays.

    async for chunk in agent.generate("Once upon a time", SamplingParams(max_tokens=64)):
        print(chunk.text, end="")

One agent holds one drafter, which drafts for all its generations (``drafter_pool.py``).
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Protocol, Self, assert_never

from edgespec.core.association.policies import hash_conversation_name, hash_prompt_beginning
from edgespec.core.device import estimates as es
from edgespec.core.device import events as ev
from edgespec.core.device.goodput_policy import (
    describe_useless_draft,
    explain_resting,
    judge_draft,
    make_policy,
)
from edgespec.core.device.kept_prefixes import KeptPrefixes
from edgespec.core.device.lead import describe_lead, find_case
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import DEFAULT_CACHES, Drafter, ModelInfo, Transport, count_places
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.acceptance import full_rule_name
from edgespec.core.protocol.checks import check_range, is_unicode
from edgespec.core.protocol.constraint import (
    ConstraintBusyError,
    ConstraintError,
    tokens_constraint,
)
from edgespec.core.protocol.errors import (
    ConnectError,
    InvalidRequest,
    Overloaded,
    Refused,
    Unauthenticated,
)
from edgespec.core.protocol.errors import GenerationError as GenerationError
from edgespec.core.protocol.messages import MAX_TOKEN_ID
from edgespec.core.protocol.pictures import PlacedPicture
from edgespec.core.protocol.predicted_text import MAX_PREDICTION_TOKENS, check_prediction_length
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import TextTables
from edgespec.core.protocol.work import MAX_LOGPROBS, TokenScore
from edgespec.device.activity import Activity
from edgespec.device.drafter_pool import DrafterLease, DrafterPool
from edgespec.device.followed_corpus import FollowedCorpus
from edgespec.device.generation_timeline import GenerationTimeline
from edgespec.device.prober import probe_all
from edgespec.device.same_prompts import SamePrompts
from edgespec.device.session_driver import SessionDriver
from edgespec.device.sleeping import Clocks, SleepDetector
from edgespec.device.verifier_pool import VerifierPool, VerifierRoute
from edgespec.models.grammar import GrammarReader, ReadConstraint
from edgespec.models.shared_ids import SharedIds
from edgespec.telemetry.recording import Recording, RecordingError
from edgespec.telemetry.trace import Tracer
from edgespec.worker_pool import PoolBusyError, PoolLateError, WorkerPool

# Seconds that closing waits for the last messages of generations that ended early.
_CLOSE_TIMEOUT_S: Final = 5.0
_MAX_REMEMBERED_WARNINGS: Final = 16
# Threads that read grammars, as many as a verifier has, and the time limit for one grammar.
_GRAMMAR_THREADS: Final = 4
_MAX_WAITING_GRAMMARS: Final = 64
_MAX_REASON_CHARS: Final = 400
_GRAMMAR_TIMEOUT_S: Final = 40.0
# Seconds after a sleep in which generations get more time for their first stream, and that time. A
# laptop is on its wireless network again two to ten seconds after it woke.
_WAKING_S: Final = 30.0
_NETWORK_WITHIN_S: Final = 20.0
# Seconds that a disk without an answer may delay the end of a generation.
_DISK_TIMEOUT_S: Final = 10.0
_MAX_WAITING_RECORDINGS: Final = 64
# Tokenizing a whole corpus anew takes a minute at most on a slow device.
_FILES_TIMEOUT_S: Final = 600.0
MAX_PREDICTION_CHARS: Final = 16 * MAX_PREDICTION_TOKENS
"""Longest predicted text that is tokenized at all, in characters."""
_log = logging.getLogger(__name__)


# --- from committed tokens to output text ---------------------------------------------------------
#
# The output is a function of the stream of tokens alone, not of how commits cut it up. It ends with
# the token that completes a stop string. Text that might begin a stop string is held back until it
# is known not to. The stop string itself is never shown.


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that became certain with one token, and how that token came about."""

    text: str
    kind: ev.TokenKind
    held_chars: int = 0
    """Number of characters before this token's own that were held back when it arrived, because
    they may begin a stop string. The text that the token stands for comes after them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one commit, up to the token that completed a stop string.

    The last chunk has ``finish`` and no token. It may have text that was held back until then."""

    position: int
    """Absolute position of ``tokens[0]``."""
    tokens: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish: m.FinishReason | None = None
    logprobs: tuple[TokenScore, ...] = ()
    """Scores of ``tokens``, one for each, if they were requested. The tuple is shorter where a
    broken link lost the scores."""
    stop: str = ""
    """The stop string that ended the output, in the last chunk. Empty: none did."""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class TextDecoder(Protocol):
    """Incremental detokenizer of one generation (``models.tokenizer.TextStream``)."""

    def push(self, tokens: Sequence[int]) -> str:
        """Add ``tokens`` and return the text that has become certain."""

    def flush(self) -> str:
        """Return the rest of the text; no token will follow."""


class OutputReader:
    """Cuts the committed tokens of one generation at its stop strings."""

    def __init__(
        self,
        decoder: TextDecoder,
        stops: Sequence[str],
        position: int,
        counters: ev.DraftCounters,
        min_tokens: int = 0,
    ) -> None:
        """Read output that begins at ``position``.

        A stop string that is complete within the first ``min_tokens`` tokens stops nothing, as in
        vLLM. ``counters`` lose the tokens that are cut off."""
        self._decoder, self._stops = decoder, tuple(stops)
        self._position, self._counters = position, counters
        self._first_stop_position = position + min_tokens
        self._held = ""
        """Text that may begin a stop string."""
        self.stop = ""
        """The stop string that was found, so that the output is complete. Empty before."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found, so that the output is complete."""
        return bool(self.stop)

    def deliver(self, event: ev.Deliver) -> Chunk | None:
        """Return the tokens up to the one that completes a stop string, or None if none is left."""
        pieces: list[Piece] = []
        for token, kind in zip(event.tokens, event.kinds, strict=True):
            if self.is_stopped:
                break
            held_chars = len(self._held)
            early = self._position + len(pieces) < self._first_stop_position
            shown = self._release(self._decoder.push((token,)), early=early)
            pieces.append(Piece(shown, kind, held_chars))
        count, position = len(pieces), self._position
        if count < len(event.kinds):
            predicted = sum(index >= count for index in event.predicted)
            self._counters.subtract_undelivered(event.kinds[count:], predicted)
        self._position += count
        if not count:
            return None
        return Chunk(position, event.tokens[:count], tuple(pieces), logprobs=event.logprobs[:count])

    def finish(self, reason: m.FinishReason) -> Chunk:
        """Return the last chunk: the text that was held back, and why the output ended."""
        early = self._position <= self._first_stop_position
        rest = (
            ""
            if self.is_stopped
            else self._release(self._decoder.flush(), early=early) + self._held
        )
        last = (Piece(rest, ev.TokenKind.DECODED),) if rest else ()
        reason = m.FinishReason.STOP if self.is_stopped else reason
        return Chunk(self._position, (), last, reason, stop=self.stop)

    def _release(self, text: str, *, early: bool) -> str:
        """Add ``text`` to the held text and return the part that can be shown now.

        While ``early``, no stop string may end here; one that begins here may end later."""
        old, held = len(self._held), self._held + text
        places = ((held.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stops)
        found = [(at, stop) for at, stop in places if at >= 0]
        if found and not early:
            start, self.stop = min(found)
            self._held = ""
            return held[:start]
        cut = len(held) - max((_overlap_length(held, stop) for stop in self._stops), default=0)
        self._held = held[cut:]
        return held[:cut]


def _overlap_length(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


# --- constraints ----------------------------------------------------------------------------------


def make_grammar_pool() -> WorkerPool:
    """Return the threads that read grammars."""
    return WorkerPool(
        "reading a grammar",
        threads=_GRAMMAR_THREADS,
        max_waiting=_MAX_WAITING_GRAMMARS,
        timeout_s=_GRAMMAR_TIMEOUT_S,
    )


async def read_matcher(
    pool: WorkerPool, read: ReadConstraint | None, sampling: SamplingParams, client: str
) -> SamplingParams:
    """Return ``sampling`` with its constraint read in a thread of ``pool``, if it has one and
    ``read`` is not None. Raises what ``Agent.with_matcher`` raises."""
    constraint = sampling.constraint
    if constraint is None or read is None or constraint.matcher is not None:
        return sampling
    try:
        readable = await pool.run_for(client, read, constraint)
    except (PoolBusyError, PoolLateError) as error:
        raise ConstraintBusyError(str(error)) from None
    except ConstraintError:
        raise
    except Exception as error:  # The error may quote the client, so it is not logged.
        why = " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
        raise ConstraintError(f"the {constraint.kind.value} cannot be read: {why}") from None
    return replace(sampling, constraint=readable)


# --- the agent ------------------------------------------------------------------------------------


_REFUSALS: Final[Mapping[m.FaultCode, type[Refused]]] = {
    m.FaultCode.INVALID: InvalidRequest,
    m.FaultCode.UNKNOWN_MODEL: InvalidRequest,
    m.FaultCode.VOCABULARY_MISMATCH: InvalidRequest,
    m.FaultCode.CONTEXT_TOO_LONG: InvalidRequest,
    m.FaultCode.UNAUTHENTICATED: Unauthenticated,
}


def generation_error(failure: ev.Fail) -> GenerationError:
    """Return the exception that stands for ``failure``."""
    why, code = failure.why, failure.code
    if failure.is_disconnected:
        return ConnectError(why)
    if code is None:
        return GenerationError(why)
    if code in (m.FaultCode.OVERLOADED, m.FaultCode.SHUTTING_DOWN):
        return Overloaded(why, code, failure.retry_after_s)
    return _REFUSALS.get(code, Refused)(why, code)


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Statistics of one generation, as far as it has come.

    Tokens behind a stop string are not counted, because the user never gets them."""

    counters: ev.DraftCounters
    estimates: es.DraftEstimates
    route: VerifierRoute
    policy: DraftPolicy
    session: DraftSession
    prompt_length: int
    """Tokens of the prompt. A picture is one of them, its placeholder."""
    rule: str
    """Acceptance rule with all its parameters. Every rule but the exact one is LOSSY:
    ``counters.replaced`` tokens are not the target's own, and later tokens depend on them."""

    is_translated: bool = False
    """Whether the draft has another tokenizer than the target."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the prompt takes in the target's context, pictures included. A
        picture counts as one until the verifier has read it, and always with an older verifier."""
        return self.prompt_length + self.counters.picture_tokens

    @property
    def is_connected(self) -> bool:
        """Whether a stream to a verifier is open now."""
        return self.session.state is ev.STREAMING

    @property
    def is_lossy(self) -> bool:
        return self.rule != m.EXACT_RULE

    @property
    def rest_reason(self) -> str | None:
        """Why drafting does not pay now. None if it does, or if the policy never rests."""
        return explain_resting(self.policy, self.estimates.price, self.estimates)

    @property
    def lead(self) -> str:
        """Whether the draft model can be ahead of the verifier, by how much, and what would change
        it (``core/device/lead.py``). Empty until steps, passes and the round trip were timed."""
        case = find_case(self.estimates)
        return "" if case is None else describe_lead(case)

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Addresses whose tokens arrived, each once, in order. Empty with a single verifier."""
        return tuple(self.route.current.served)

    @property
    def failovers(self) -> int:
        """How often the generation moved to another verifier."""
        return self.route.current.failovers


@dataclass(frozen=True, slots=True)
class AgentOptions:
    policy: DraftPolicy = field(default_factory=make_policy)
    run_ahead: m.RunAhead = m.RunAhead.AUTO
    reconnect: ReconnectPolicy = field(default_factory=ReconnectPolicy)
    model: str = ""
    """Name of the wanted target. An empty name takes the verifier's default."""
    rule: str = m.EXACT_RULE
    """Rule that accepts drafts (``core/protocol/acceptance.py``)."""
    vocabulary: str = ""
    """Fingerprint of the tokenizer. If empty, the drafter's is used; without a drafter, none is
    checked."""
    vocabulary_size: int = 0
    """Number of token ids that the target has, as its verifier reports it. 0 if it is not known;
    then only the limit of the wire bounds an id."""
    shared_ids: SharedIds | None = None
    """Ids that the draft shares with the target. None if it shares all its ids."""
    translated_share: float | None = None
    """Share of the target's words that are one word of the draft, for a draft with another
    tokenizer. None for a draft with the target's."""
    draft_caches: int = DEFAULT_CACHES
    """Generations that are drafted for at the same time. Further ones are streamed without
    drafts."""
    learned: es.KeptEstimates = field(default_factory=es.KeptEstimates, compare=False)
    """Estimates that earlier agents on this machine measured with this draft."""
    text_tables: TextTables | None = field(default=None, compare=False)
    """N-gram tables of the user's earlier texts. None if lookup is off."""
    recording: Recording | None = field(default=None, compare=False)
    """Stores the committed tokens of generations. None if they are not recorded."""


class Agent:
    """Runs generations against one verifier or several. Use it as an async context manager, or call
    ``close``.

    Args:
        transport: The way to one verifier, or a pool of several.
        drafter: The draft source. None if the agent only streams.
        encode: Turns a prompt into token ids.
        decoder: Makes the detokenizer of a generation that continues the given ids.
        options: Settings of the agent.
        tracer: Records the events and actions of every generation.
        read_constraint: Gives a constraint its matcher, or raises ``ConstraintError``. If None,
            drafts ignore constraints; the verifier enforces them all the same.
        encode_continuation: Turns text that continues a prompt into token ids, without the tokens
            that begin a text. None: ``encode``.
        clocks: Clocks of this device. None: the system's.
    """

    def __init__(
        self,
        transport: Transport | VerifierPool,
        drafter: Drafter | None,
        encode: Callable[[str], Sequence[int]],
        decoder: Callable[[Sequence[int]], TextDecoder],
        options: AgentOptions | None = None,
        *,
        tracer: Tracer | None = None,
        read_constraint: ReadConstraint | None = None,
        encode_continuation: Callable[[str], Sequence[int]] | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self._clocks = clocks or Clocks()
        self._sleep, self._woke_at = SleepDetector(self._clocks), -math.inf
        self.options = options or AgentOptions()
        self.stats: GenerationStats | None = None
        """Statistics of the generation that was started last."""
        self.activity = Activity()
        """Notes on all generations, for the agent's status."""
        self.transport, self.drafter = transport, drafter
        self._encode, self._decoder = encode, decoder
        self._encode_continuation = encode_continuation or encode
        self._tracer, self._read_constraint = tracer, read_constraint
        self._grammars = make_grammar_pool()
        self._disk = WorkerPool(
            "recording a generation",
            threads=1,
            max_waiting=_MAX_WAITING_RECORDINGS,
            timeout_s=_DISK_TIMEOUT_S,
        )
        self._files = WorkerPool(
            "following draft.corpus", threads=1, max_waiting=1, timeout_s=_FILES_TIMEOUT_S
        )
        self.following: asyncio.Task[None] | None = None
        """The last look for changed files, which may still go on."""
        draft_vocabulary = "" if drafter is None else drafter.info.vocabulary
        self._vocabulary = self.options.vocabulary or draft_vocabulary
        self._warned: set[str] = set()
        """Failures that were logged as warnings already."""
        self.verifier = es.VerifierEstimates()
        self._kept = KeptPrefixes(secrets.token_bytes(16))
        """The texts that verifiers keep, so that only what is new is sent."""
        self._same_prompts = SamePrompts()
        self._learned = es.KeptEstimatesByModel(self.options.model, self.options.learned)
        self._drivers: set[SessionDriver] = set()
        """Drivers of running generations, and of ended ones that still have tasks."""

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        logprobs: int = 0,
        conversation: str = "",
        model: str = "",
        rule: str = "",
        prediction: str | Sequence[int] | None = None,
        pictures: Sequence[PlacedPicture] = (),
        drafts: bool = True,
        timeline: GenerationTimeline | None = None,
        started: Callable[[GenerationStats], None] | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the target's output. Leaving the loop early cancels the generation.

        Args:
            prompt: Text or token ids. If it is longer than the draft's context, nothing is drafted.
            sampling: Sampling parameters and limits.
            logprobs: If 1 to 20, each token carries its score and that many of the likeliest
                tokens. The output is the same.
            conversation: Any name. Generations of one conversation go to the same replica, where
                replicas are chosen by conversation. Only its hash leaves the device. If empty,
                generations whose prompts begin alike belong together.
            model: Name of the model or adapter of this generation. If empty, the options name it.
            rule: Rule that accepts drafts. If empty, the options name it.
            prediction: Text that the output is expected to be, such as the file that it edits, or
                its token ids; at most ``MAX_PREDICTION_TOKENS``. It is drafted from, so a right one
                makes the output arrive sooner, and a wrong one changes nothing. It does not leave
                the device as a whole. None or empty: there is none.
            pictures: Pictures of the prompt, in the order of their placeholders, which are tokens
                of ``prompt``. Each leaves the device once in a conversation. Drafts are made from
                the text alone.
            drafts: Whether this device and the verifier may draft. Without drafts the output is
                the same, by plain streaming. A verifier of an older version drafts on by itself.
            timeline: Is written while the generation proceeds. None: nothing is recorded.
            started: Called once with the statistics of this generation, which grow as it proceeds.
                The attribute ``stats`` is always of the generation that was started last.

        Raises:
            TypeError, ValueError: The prompt is invalid.
            ConstraintError: The constraint cannot be enforced.
            GenerationError: The verifier refuses, or cannot be reached any more.
        """
        await self._prepare()
        self._follow_files()
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling is {type(sampling).__name__}, but must be SamplingParams")
        check_range("logprobs", logprobs, 0, MAX_LOGPROBS)
        model = check_model(model) or self.options.model
        rule = full_rule_name(rule or self.options.rule)
        text = self._encode(prompt) if isinstance(prompt, str) else prompt
        tokens = check_prompt(text, self.options.vocabulary_size)
        predicted = self._read_prediction(prediction)
        sampling = await self.with_matcher(sampling or SamplingParams())
        drafter = self.drafter if drafts else None
        if drafter is not None and self.options.text_tables is None:
            # Beyond the draft's context lookup alone has candidates.
            drafter = drafter if len(tokens) < drafter.info.context_length else None
        conversation_hash = (
            hash_conversation_name(conversation) if conversation else hash_prompt_beginning(tokens)
        )
        needed_length = len(tokens) + sampling.max_tokens
        route = VerifierRoute(
            self.transport,
            conversation_hash,
            needed_length,
            model,
            has_pictures=bool(pictures),
        )
        session = self._make_session(
            tokens,
            sampling,
            drafter,
            logprobs,
            model,
            rule,
            predicted if drafts else (),
            pictures,
            plain=not drafts,
        )
        notes = self.activity.start(session, route, self._tracer, timeline)
        lease = None if drafter is None else DrafterLease(self.drafter_pool, len(tokens), sampling)
        driver = SessionDriver(session, route.connect, lease, notes)
        self._drivers = {one for one in self._drivers if one.running_tasks} | {driver}
        is_translated = drafter is not None and self.options.translated_share is not None
        self.stats = GenerationStats(
            counters=session.counters,
            estimates=session.estimates,
            route=route,
            policy=self.options.policy,
            session=session,
            prompt_length=len(tokens),
            rule=rule,
            is_translated=is_translated,
        )
        committed: list[int] = []
        try:
            if started is not None:
                started(self.stats)
            await self._same_prompts.wait_for_first(tokens, driver, has_pictures=bool(pictures))
            async for chunk in self._read_chunks(driver, tokens, sampling):
                committed += chunk.tokens
                yield chunk
        finally:
            self._same_prompts.leave(tokens, driver)
            self.activity.finish(notes)
            if why := session.counters.draft_failure:
                self._warn_once(
                    f"the draft model failed, the generation went on without drafts: {why}"
                )
            elif session.has_given_up:
                why = describe_useless_draft(session.estimates.evidence)
                self._warn_once(why, about=f"useless draft for {model}, {rule}")
            elif is_translated:
                places = session.counters.tried, session.counters.hits
                if why := judge_draft(*places, is_translated=True):
                    level = logging.WARNING if judge_draft(*places) else logging.INFO
                    self._log_once(level, why, about=f"translated draft for {model}")
            try:
                await driver.close()
            finally:  # also where it is cancelled a second time
                route.close()
            self._keep_text(tokens, committed)
            await self._record(tokens, committed)

    async def score(
        self,
        prompt: Sequence[int],
        logprobs: int,
        *,
        conversation: str = "",
        model: str = "",
    ) -> tuple[TokenScore, ...]:
        """Return the scores of the tokens of a prompt behind its first one, each with the
        ``logprobs`` likeliest tokens at its place.

        The verifier generates the prompt from its first token under a constraint that allows
        nothing else; since it drafts what a constraint forces, a pass computes many tokens. Scores
        are of the target's raw distribution, so the constraint does not change them. Raises what
        ``generate`` raises, ``ValueError`` for more than ``MAX_FORCED_TOKENS`` tokens, and
        ``GenerationError`` if a broken link lost scores."""
        if len(prompt) < 2:
            return ()
        constraint = tokens_constraint(prompt[1:])
        sampling = SamplingParams(
            max_tokens=len(prompt) - 1, ignore_eos=True, constraint=constraint
        )
        scores: list[TokenScore] = []
        generation = self.generate(
            prompt[:1], sampling, logprobs=logprobs, conversation=conversation, model=model
        )
        async with aclosing(generation) as chunks:
            async for chunk in chunks:
                scores += chunk.logprobs
        if len(scores) != len(prompt) - 1:
            found = f"{len(scores)} of the {len(prompt) - 1} scores arrived"
            raise GenerationError(f"{found}: a link broke, try again")
        return tuple(scores)

    async def warm_up(self) -> None:
        """Learn of the verifiers before the first generation has to choose one. Never raises: a
        failure meets the first generation again."""
        if isinstance(self.transport, VerifierPool):
            await self.transport.warm_up()

    async def _prepare(self) -> None:
        """Prepare the agent before each generation. Raises ``GenerationError`` if that fails."""

    async def models(self) -> tuple[ModelInfo, ...]:
        """Return the models and adapters of all verifiers that answer now, the default one first.

        Raises ``GenerationError`` if no verifier answers."""
        transport = self.transport
        links: Mapping[str, Transport] = (
            await transport.find_transports()
            if isinstance(transport, VerifierPool)
            else {"": transport}
        )
        answers = (await probe_all(links)).values()
        infos = [one.info for one in answers if one.info is not None]
        if not infos:
            why = "; ".join(one.why for one in answers) or "no verifier is known"
            raise ConnectError(f"no verifier answers: {why}")
        models: dict[str, ModelInfo] = {}
        for info in infos:
            for model in info.models:
                known = models.setdefault(model.name, model)
                if known.pictures is None:  # a generation with pictures goes where they are read
                    models[model.name] = replace(known, pictures=model.pictures)
        return tuple(models.values())

    async def with_matcher(self, sampling: SamplingParams, client: str = "") -> SamplingParams:
        """Return ``sampling`` with its constraint read, if it has one and this device can read it.

        A thread reads it, which may take seconds. Several clients take turns; ``client`` names the
        caller. ``generate`` does this for a constraint that has not been read. Raises
        ``ConstraintError``, also for an unexpected error of the library, and
        ``ConstraintBusyError`` if there is no time or no room."""
        return await read_matcher(self._grammars, self._read_constraint, sampling, client)

    async def close(self) -> None:
        """Stop the running generations and free the model."""
        drivers, self._drivers = self._drivers, set()
        for driver in drivers:
            await driver.close()
        if ending := {task for driver in drivers for task in driver.running_tasks}:
            await asyncio.wait(ending, timeout=_CLOSE_TIMEOUT_S)
        await self.transport.close()
        if self.drafter is not None:
            self.drafter_pool.close()
        self._grammars.close()
        self._disk.close()
        tables = self.options.text_tables
        if tables is not None and isinstance(tables.corpus, FollowedCorpus):
            tables.corpus.close()
        self._files.close()
        if self.following is not None:
            self.following.cancel()
        if isinstance(self._read_constraint, GrammarReader):
            self._read_constraint.close()  # This ends the processes that try grammars.

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @cached_property
    def drafter_pool(self) -> DrafterPool:
        """The caches of the drafter. The agent must have one."""
        assert self.drafter is not None
        return DrafterPool(self.drafter, self.options.draft_caches, self.options.shared_ids)

    def _follow_files(self) -> None:
        """Look for changed files of ``draft.corpus`` in a thread, if it is time to. The generation
        does not wait; it drafts from the changed files as soon as they are read."""
        tables = self.options.text_tables
        corpus = None if tables is None else tables.corpus
        if isinstance(corpus, FollowedCorpus) and corpus.is_due:
            if self.following is None or self.following.done():
                self.following = asyncio.create_task(self._refresh_corpus(corpus))

    async def _refresh_corpus(self, corpus: FollowedCorpus) -> None:
        try:
            if await self._files.run(corpus.refresh):
                _log.info("draft.corpus has changed: %s", corpus.summary)
        except (PoolBusyError, PoolLateError) as error:
            self._warn_once(f"draft.corpus is not followed: {error}")

    def _keep_text(self, prompt: tuple[int, ...], committed: Sequence[int]) -> None:
        """Keep a text for lookup in later generations, until this process ends."""
        tables = self.options.text_tables
        if tables is not None and tables.earlier is not None:
            tables.earlier.add((*prompt, *committed))

    async def _record(self, prompt: Sequence[int], committed: Sequence[int]) -> None:
        """Record a generation in a thread, since the disk may be slow.

        A failure is logged once and does not affect the generation."""
        if (recording := self.options.recording) is None or not committed:
            return
        try:
            await self._disk.run(recording.add, self._vocabulary, prompt, committed)
        except (RecordingError, PoolBusyError, PoolLateError) as error:
            self._warn_once(f"a generation could not be recorded: {error}")

    def _warn_once(self, failure: str, about: str = "") -> None:
        """Log a warning, but only once for each text of it, or for each subject that it is
        ``about``."""
        about = about or failure
        self._log_once(logging.WARNING, failure, about)

    def _log_once(self, level: int, line: str, about: str) -> None:
        if about not in self._warned:
            if len(self._warned) < _MAX_REMEMBERED_WARNINGS:
                self._warned.add(about)
            _log.log(level, "%s", line)

    def _make_session(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        drafter: Drafter | None,
        logprobs: int,
        model: str,
        rule: str,
        prediction: tuple[int, ...],
        pictures: Sequence[PlacedPicture],
        *,
        plain: bool,
    ) -> DraftSession:
        request = m.Open(
            session_id=secrets.token_hex(16),
            model=model,
            vocabulary=self._vocabulary,
            prompt=prompt,
            sampling=sampling,
            run_ahead=self.options.run_ahead,
            rule=rule,
            drafting=drafter is not None or bool(prediction),
            session_secret=secrets.token_bytes(16),
            logprobs=logprobs,
            plain=plain,
            pictures=tuple([one.name for one in pictures]),
        )
        context_length = 0 if drafter is None else drafter.info.context_length
        if drafter is not None and self.options.shared_ids is None:
            # Its ids are the target's, whose number may be unknown.
            size = drafter.info.vocabulary_size
            prediction = tuple([token for token in prediction if token < size])
        # The acceptance rate under a relaxed rule is no estimate for the exact one.
        learned = self._learned.for_model(model if rule == m.EXACT_RULE else f"{model}\0{rule}")
        return DraftSession(
            request,
            self.options.policy,
            self._reconnect_policy(),
            context_length,
            jitter_seed=secrets.randbits(32),
            vocabulary_size=self.options.vocabulary_size,
            verifier=self.verifier,
            learned=learned,
            text=self.options.text_tables,
            prediction=prediction,
            kept=self._kept,
            draft_places=1 if drafter is None else count_places(drafter),
            pictures=[one.data for one in pictures],
        )

    def _reconnect_policy(self) -> ReconnectPolicy:
        """Return the policy for a generation that begins now. The network of a machine that has
        just woken may need some seconds, so its first stream gets more time."""
        policy, now = self.options.reconnect, self._clocks.monotonic()
        if self._sleep.look():
            self._woke_at = now
        if now - self._woke_at > _WAKING_S:
            return policy
        first_s = max(policy.give_up_first_s, min(policy.give_up_s, _NETWORK_WITHIN_S))
        return replace(policy, give_up_first_s=first_s)

    def _read_prediction(self, prediction: str | Sequence[int] | None) -> tuple[int, ...]:
        """Return the token ids of a prediction. Raises ``TypeError`` or ``ValueError``."""
        if not prediction:
            return ()
        if isinstance(prediction, str):
            check_prediction_text(prediction)
            prediction = self._encode_continuation(prediction)
        check_prediction_length(len(prediction))
        return check_tokens(prediction, 0, "prediction")  # ids beyond the vocabulary are left out

    async def _read_chunks(
        self, driver: SessionDriver, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> AsyncGenerator[Chunk, None]:
        reader = OutputReader(
            self._decoder(prompt),
            sampling.stop,
            position=len(prompt),
            counters=driver.session.counters,
            min_tokens=sampling.min_tokens,
        )
        async for outcome in driver.outcomes():
            match outcome:
                case ev.Deliver():
                    if (chunk := reader.deliver(outcome)) is not None:
                        yield chunk
                    if reader.is_stopped:
                        driver.stop(m.FinishReason.STOP)  # A second call does nothing.
                case ev.Finish(reason):
                    yield reader.finish(reason)
                case ev.Fail():
                    raise generation_error(outcome)
                case _:
                    assert_never(outcome)


# --- checks of a caller's values before they leave the device -------------------------------------


def check_model(name: str) -> str:
    """Return ``name`` if it fits on the wire, else raise ``TypeError`` or ``ValueError``."""
    if not isinstance(name, str):
        raise TypeError(f"model is {type(name).__name__}, but must be text")
    if not fits_on_wire(name):
        shown = repr(name[:40])
        raise ValueError(f"model is {shown}, but must be at most {m.MAX_NAME_BYTES} bytes of UTF-8")
    return name


def fits_on_wire(name: str) -> bool:
    return is_unicode(name) and len(name.encode()) <= m.MAX_NAME_BYTES


def check_prompt(prompt: Sequence[int], vocabulary_size: int) -> tuple[int, ...]:
    """Return the ids of ``prompt``, or raise ``TypeError`` or ``ValueError`` naming the first bad
    one.

    ``vocabulary_size`` is the target's, or 0 if it is not known."""
    tokens = check_tokens(prompt, vocabulary_size, "prompt")
    if not tokens:
        raise ValueError("the prompt is empty, but must hold at least one token")
    return tokens


def check_tokens(given: Sequence[int], vocabulary_size: int, name: str) -> tuple[int, ...]:
    """Return the ids of ``given``, which errors call ``name``. Raises as ``check_prompt`` does."""
    if isinstance(given, bytes | bytearray) or not isinstance(given, Iterable):
        raise TypeError(f"the {name} is {type(given).__name__}, but must be text or token ids")
    largest = vocabulary_size - 1 if vocabulary_size else MAX_TOKEN_ID
    whole = tuple(given)
    if set(map(type, whole)) == {int} and min(whole) >= 0 and max(whole) <= largest:
        return whole  # The usual case; the loop below takes three times as long.
    tokens: list[int] = []
    for index, token in enumerate(whole):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise TypeError(f"{name}[{index}] is {token!r}, but must be a token id, an integer")
        if not 0 <= (number := operator.index(token)) <= largest:
            wanted = f"must be in [0, {largest}]"
            if vocabulary_size:
                wanted = f"the vocabulary has {vocabulary_size} ids"
            raise ValueError(f"{name}[{index}] is the token id {number}, but {wanted}")
        tokens.append(number)
    return tuple(tokens)


def check_prediction_text(prediction: str) -> None:
    """Raise ``ValueError`` if a predicted text is too long to be tokenized, or no Unicode."""
    if len(prediction) > MAX_PREDICTION_CHARS:
        raise ValueError(
            f"the prediction has {len(prediction):,} characters, but may have at most"
            f" {MAX_PREDICTION_CHARS:,}: send the part that the output is expected to be"
        )
    if not is_unicode(prediction):
        raise ValueError("the prediction holds half of a surrogate pair, which is no character")
