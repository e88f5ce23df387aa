"""The device agent: text in, the target's own text out, drafting as long as it can.

    async for chunk in agent.generate("Once upon a time", SamplingParams(max_tokens=64)):
        print(chunk.text, end="")

One agent holds one drafter, which drafts for one generation at a time; generations that run beside
it are served all the same, without drafting.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from edgespec.agent.activity import Activity
from edgespec.agent.session_driver import SessionDriver
from edgespec.agent.text import StopFinder, TextDecoder
from edgespec.agent.verifier_pool import RoutedTransport, VerifierPool
from edgespec.core.device.commit_bounds import largest_id
from edgespec.core.device.estimates import DraftEstimates, RowPrice
from edgespec.core.device.events import (
    Deliver,
    DraftCounters,
    Fail,
    Finish,
    Stop,
    TokenKind,
)
from edgespec.core.device.policy import DraftPolicy, default_policy
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import FaultCode, FinishReason, Open, RunAhead
from edgespec.core.protocol.ranges import bounded
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.scores import MAX_LOGPROBS, TokenScore
from edgespec.ports import Drafter, Transport
from edgespec.telemetry.trace import NoTrace, Tracer

# Token ids travel as 32-bit numbers; a sane vocabulary is far smaller.
MAX_TOKEN_ID: Final = (1 << 31) - 1
# How long closing waits for what generations that ended early still have to say.
_CLOSING_S: Final = 5.0
_MOST_TOLD: Final = 16
_log = logging.getLogger(__name__)


class GenerationError(RuntimeError):
    """The generation could not be completed; ``code`` says why when the verifier refused it.

    What was yielded before is valid: it is the beginning of the target's own text.
    """

    def __init__(self, message: str, code: FaultCode | None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that became certain with one token, and how that token came about."""

    text: str
    kind: TokenKind


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one commit brought, up to the token that completed a stop string. The last chunk has
    ``finish``, and perhaps text that was held back, but no token."""

    position: int
    """Absolute position of ``tokens[0]``."""
    tokens: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenScore, ...] = ()
    """Of ``tokens``, one each, when asked for; none of tokens whose scores a broken link lost."""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Numbers of one generation, as far as it has come. Tokens behind a stop string, which the user
    never got, are not counted."""

    counters: DraftCounters
    estimates: DraftEstimates
    route: RoutedTransport | None = None
    """None where the agent knows one verifier only."""

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The addresses that brought tokens, in order, each once; empty where only one is known."""
        return () if self.route is None else self.route.served

    @property
    def failovers(self) -> int:
        """How often the text went on at another verifier."""
        return 0 if self.route is None else self.route.failovers


@dataclass(frozen=True, slots=True)
class AgentOptions:
    policy: DraftPolicy = field(default_factory=default_policy)
    run_ahead: RunAhead = RunAhead.AUTO
    reconnect: ReconnectPolicy = field(default_factory=ReconnectPolicy)
    model: str = ""
    """Name of the target wanted; empty takes what the verifier serves."""
    vocabulary: str = ""
    """Fingerprint of the tokenizer, for an agent without a drafter; empty is not checked."""


class Agent:
    """Drives generations against one verifier, or several. ``drafter`` None only streams.

    ``encode`` turns a prompt into ids, ``decoder`` makes the detokenizer of a text that continues
    the given ids. Use as an async context manager, or call ``close``.
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
    ) -> None:
        self.options = options or AgentOptions()
        self.stats: GenerationStats | None = None
        """Of the generation started last."""
        self.activity = Activity()
        """What its generations do, for a status."""
        self._transport, self._drafter = transport, drafter
        self._encode, self._decoder = encode, decoder
        self._tracer = tracer or NoTrace()
        self._vocabulary = self.options.vocabulary if drafter is None else drafter.info.vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgespec-draft")
        self._drafter_taken = False
        self._told: set[str] = set()
        """Reasons of a failed drafter that the user has heard of."""
        self._price = RowPrice()
        self._drivers: set[SessionDriver] = set()
        """Of generations that run, and of those that ended whose tasks still do."""

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        logprobs: int = 0,
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the target's text. Leaving the loop early cancels the generation.

        With ``logprobs`` (1 to 20) each token comes with its score and so many of the likeliest
        ones; the text is the same.

        ``prompt`` is text or token ids. One longer than the draft's context is served without
        drafting. Raises ``TypeError`` or ``ValueError`` for a prompt that cannot be, and
        ``GenerationError`` when the verifier refuses or cannot be reached any more.
        """
        sampling = _checked_sampling(sampling)
        bounded("logprobs", logprobs, 0, MAX_LOGPROBS)
        tokens = self._checked_prompt(self._encode(prompt) if isinstance(prompt, str) else prompt)
        drafter = None if self._drafter_taken else self._drafter
        if drafter is not None and len(tokens) >= drafter.info.context_length:
            drafter = None
        self._drafter_taken = self._drafter_taken or drafter is not None
        route, link = None, self._transport
        if isinstance(link, VerifierPool):
            link = route = link.route(len(tokens) + sampling.max_tokens)
        session = self._session(tokens, sampling, drafter, logprobs)
        notes = self.activity.began(session, route, self._tracer)
        driver = SessionDriver(session, link, drafter, self._thread, tracer=notes)
        self._drivers = {one for one in self._drivers if one.running} | {driver}
        self.stats = GenerationStats(driver.session.counters, driver.session.estimates, route)
        try:
            async for chunk in self._chunks(driver, sampling, tokens):
                yield chunk
        finally:
            notes.ended()
            self._tell_of_failure(driver.session.counters.draft_failure)
            # A step that still runs ends soon, and what comes next waits behind it in its thread.
            self._drafter_taken = self._drafter_taken and drafter is None
            await driver.close()
            if route is not None:
                await route.close()

    @property
    def transport(self) -> Transport | VerifierPool:
        return self._transport

    @property
    def drafter(self) -> Drafter | None:
        return self._drafter

    @property
    def price(self) -> RowPrice:
        """What the verifier last said that a draft node costs."""
        return self._price

    async def close(self) -> None:
        """End what runs, and free the model."""
        drivers, self._drivers = self._drivers, set()
        for driver in drivers:
            await driver.close()
        if ending := {task for driver in drivers for task in driver.running}:
            await asyncio.wait(ending, timeout=_CLOSING_S)
        await self._transport.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._drafter is not None:
            self._drafter.close()

    async def __aenter__(self) -> Agent:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _tell_of_failure(self, why: str) -> None:
        """Say once, for each reason, that a generation went on without drafts."""
        if why and why not in self._told:
            if len(self._told) < _MOST_TOLD:
                self._told.add(why)
            _log.warning("the draft model failed, the text went on without drafts: %s", why)

    def _session(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        drafter: Drafter | None,
        logprobs: int,
    ) -> DraftSession:
        request = Open(
            session_id=secrets.token_hex(16),
            model=self.options.model,
            vocabulary=self._vocabulary,
            prompt=prompt,
            sampling=sampling,
            run_ahead=self.options.run_ahead,
            drafting=drafter is not None,
            session_secret=secrets.token_bytes(16),
            logprobs=logprobs,
        )
        context_length = 0 if drafter is None else drafter.info.context_length
        return DraftSession(
            request,
            self.options.policy,
            self.options.reconnect,
            context_length,
            jitter_seed=secrets.randbits(32),
            vocabulary_size=self._vocabulary_size,
            price=self._price,
        )

    @property
    def _vocabulary_size(self) -> int:
        """0: not known. Whether this very generation drafts makes no difference."""
        return 0 if self._drafter is None else self._drafter.info.vocabulary_size

    def _checked_prompt(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The ids of ``prompt``. Raises ``TypeError`` or ``ValueError`` naming the first that is
        none."""
        if isinstance(prompt, bytes | bytearray):
            raise TypeError(f"the prompt is {type(prompt).__name__}, but must be text or token ids")
        tokens: list[int] = []
        for index, token in enumerate(prompt):
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise TypeError(f"prompt[{index}] is {token!r}, but must be a token id, an integer")
            tokens.append(operator.index(token))
        if not tokens:
            raise ValueError("the prompt is empty, but must hold at least one token")
        size = self._vocabulary_size
        largest = largest_id(size) if size else MAX_TOKEN_ID
        for index, token in enumerate(tokens):
            if not 0 <= token <= largest:
                raise ValueError(
                    f"prompt[{index}] is the token id {token}, but must be in [0, {largest}]"
                )
        return tuple(tokens)

    async def _chunks(
        self, driver: SessionDriver, sampling: SamplingParams, prompt: Sequence[int]
    ) -> AsyncIterator[Chunk]:
        """What the user sees is a function of the stream of tokens alone, not of how commits cut it
        up: it ends with the token that completes a stop string."""
        decoder, stops = self._decoder(prompt), StopFinder(sampling.stop)
        position, counters = len(prompt), driver.session.counters
        async for outcome in driver.outcomes():
            match outcome:
                case Fail(why, code):
                    raise GenerationError(why, code)
                case Finish(reason):
                    rest = stops.push(decoder.flush()) + stops.flush()
                    last = (Piece(rest, TokenKind.DECODED),) if rest else ()
                    finish = FinishReason.STOP if stops.found else reason
                    yield Chunk(position, (), last, finish)
                case Deliver(tokens=tokens, kinds=kinds, logprobs=scores):
                    pieces: list[Piece] = []
                    for token, kind in zip(tokens, kinds, strict=True):
                        if stops.found:
                            break
                        pieces.append(Piece(stops.push(decoder.push((token,))), kind))
                    given = len(pieces)
                    counters.take_back(kinds[given:])
                    if stops.found:
                        driver.stop(Stop(FinishReason.STOP))  # nothing to do the second time
                    if given:
                        told = scores[:given]
                        yield Chunk(position, tokens[:given], tuple(pieces), logprobs=told)
                    position += given


def _checked_sampling(sampling: SamplingParams | None) -> SamplingParams:
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling is {type(sampling).__name__}, but must be SamplingParams")
    return sampling or SamplingParams()
