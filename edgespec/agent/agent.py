"""The device agent: text in, the target's own text out, drafting as long as it can.

    async for chunk in agent.generate("Once upon a time", SamplingParams(max_tokens=64)):
        print(chunk.text, end="")

One agent holds one drafter, which drafts for one generation at a time; generations that run beside
it are served all the same, without drafting.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from edgespec.agent.session_driver import SessionDriver
from edgespec.agent.text import StopFinder, TextDecoder
from edgespec.core.arms import default_policy
from edgespec.core.draft_events import DraftCounters, Fail, Finish, Stop, TokenKind
from edgespec.core.draft_policy import DraftPolicy
from edgespec.core.draft_session import DraftSession
from edgespec.core.estimators import DraftEstimates
from edgespec.core.messages import FaultCode, FinishReason, Open, RunAhead
from edgespec.core.reconnect import ReconnectPolicy
from edgespec.core.sampling import SamplingParams
from edgespec.ports import Drafter, Transport
from edgespec.telemetry.trace import NoTrace, Tracer


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
    """What one commit brought. The last chunk has ``finish`` and may have neither."""

    position: int
    """Absolute position of ``tokens[0]``."""
    tokens: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Numbers of one generation, as far as it has come."""

    counters: DraftCounters
    estimates: DraftEstimates


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
    """Drives generations against one verifier. ``drafter`` None only streams.

    ``encode`` turns a prompt into ids, ``decoder`` makes a fresh detokenizer. Use as an async
    context manager, or call ``close``.
    """

    def __init__(
        self,
        transport: Transport,
        drafter: Drafter | None,
        encode: Callable[[str], Sequence[int]],
        decoder: Callable[[], TextDecoder],
        options: AgentOptions | None = None,
        *,
        tracer: Tracer | None = None,
    ) -> None:
        self.options = options or AgentOptions()
        self.stats: GenerationStats | None = None
        """Of the generation started last."""
        self._transport, self._drafter = transport, drafter
        self._encode, self._decoder = encode, decoder
        self._tracer = tracer or NoTrace()
        self._vocabulary = self.options.vocabulary if drafter is None else drafter.info.vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgespec-draft")
        self._drafter_taken = False

    async def generate(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the target's text. Leaving the loop early cancels the generation.

        A prompt longer than the draft's context is served without drafting. Raises
        ``GenerationError`` when the verifier refuses or cannot be reached any more.
        """
        sampling = sampling or SamplingParams()
        tokens = tuple(self._encode(prompt) if isinstance(prompt, str) else prompt)
        drafter = None if self._drafter_taken else self._drafter
        if drafter is not None and len(tokens) >= drafter.info.context_length:
            drafter = None
        self._drafter_taken = self._drafter_taken or drafter is not None
        driver = SessionDriver(
            self._session(tokens, sampling, drafter),
            self._transport,
            drafter,
            self._thread,
            tracer=self._tracer,
        )
        self.stats = GenerationStats(driver.session.counters, driver.session.estimates)
        try:
            async for chunk in self._chunks(driver, sampling, len(tokens)):
                yield chunk
        finally:
            await driver.close()
            self._drafter_taken = self._drafter_taken and drafter is None

    async def close(self) -> None:
        await self._transport.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._drafter is not None:
            self._drafter.close()

    async def __aenter__(self) -> Agent:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _session(
        self, prompt: tuple[int, ...], sampling: SamplingParams, drafter: Drafter | None
    ) -> DraftSession:
        request = Open(
            session_id=secrets.token_hex(16),
            model=self.options.model,
            vocabulary=self._vocabulary,
            prompt=prompt,
            sampling=sampling,
            run_ahead=self.options.run_ahead,
            drafting=drafter is not None,
        )
        context_length = 0 if drafter is None else drafter.info.context_length
        return DraftSession(
            request,
            self.options.policy,
            self.options.reconnect,
            context_length,
            jitter_seed=secrets.randbits(32),
        )

    async def _chunks(
        self, driver: SessionDriver, sampling: SamplingParams, prompt_length: int
    ) -> AsyncIterator[Chunk]:
        decoder, stops = self._decoder(), StopFinder(sampling.stop)
        position, stopped = prompt_length, False
        async for outcome in driver.outcomes():
            if isinstance(outcome, Fail):
                raise GenerationError(outcome.why, outcome.code)
            if isinstance(outcome, Finish):
                rest = stops.push(decoder.flush()) + stops.flush()
                last = (Piece(rest, TokenKind.DECODED),) if rest else ()
                reason = FinishReason.STOP if stops.found else outcome.reason
                yield Chunk(position, (), last, reason)
                return
            if stopped:
                continue  # committed before the verifier heard of it
            pieces = tuple(
                Piece(stops.push(decoder.push((token,))), kind)
                for token, kind in zip(outcome.tokens, outcome.kinds, strict=True)
            )
            position = outcome.position + len(outcome.tokens)
            yield Chunk(outcome.position, outcome.tokens, pieces)
            stopped = stops.found
            if stopped:
                driver.stop(Stop(FinishReason.STOP))
