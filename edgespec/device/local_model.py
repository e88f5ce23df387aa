"""A model of this device that writes answers by itself while no verifier can be reached.

It is the agent's own draft model, or another model of this device. Both draw each token by the
sampling law of a request, as a draft does: the best candidate of a step is the token that a target
with the same scores would choose. So temperature, truncation, penalties, seed, constraint and
``min_tokens`` apply, and the output is cut at end tokens and stop strings as any other. What it
writes is the text of a smaller model, and never a part of the target's text.

The draft model shares its caches and its thread with the sessions that draft (``drafter_pool.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Final

from edgespec.core.device import events as ev
from edgespec.core.device.token_origins import TokenOrigin
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.constraint import ConstraintError
from edgespec.core.protocol.errors import FaultCode, GenerationError, Overloaded
from edgespec.core.protocol.messages import EXACT_RULE, FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import TokenScore
from edgespec.device.agent import (
    Chunk,
    GenerationStats,
    OutputReader,
    check_prompt,
    make_grammar_pool,
    read_matcher,
)
from edgespec.device.drafter_pool import DrafterLease, DrafterPool
from edgespec.device.generation_timeline import GenerationTimeline
from edgespec.models.grammar import GrammarReader, ReadConstraint
from edgespec.models.model_source import PromptTokenizer

CACHE_TIMEOUT_S: Final = 30.0
"""Seconds that a generation waits for a free cache. Sessions that lost their verifier keep theirs
while they try to reconnect."""


class LocalModel:
    """Generates with a model of this device. It has the methods of ``Agent`` that an endpoint
    calls. Call ``close`` at the end.

    Args:
        info: The model. Its context length bounds the prompt and the output together.
        pool: The caches of the model.
        tokenizer: The tokenizer of the model.
        read_constraint: Gives a constraint its matcher, or raises ``ConstraintError``. If None,
            constraints are refused.
        owns_pool: Whether ``close`` closes the pool too.
    """

    def __init__(
        self,
        info: ModelInfo,
        pool: DrafterPool,
        tokenizer: PromptTokenizer,
        *,
        read_constraint: ReadConstraint | None = None,
        owns_pool: bool = False,
    ) -> None:
        self.info, self.tokenizer = info, tokenizer
        self._pool, self._owns_pool = pool, owns_pool
        self._read_constraint, self._grammars = read_constraint, make_grammar_pool()

    @property
    def answered_by(self) -> str:
        """The text that marks an answer of this model wherever it is shown."""
        return f"draft {self.info.name}"

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        logprobs: int = 0,
        conversation: str = "",
        model: str = "",
        rule: str = "",
        drafts: bool = True,
        timeline: GenerationTimeline | None = None,
        started: Callable[[GenerationStats], None] | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the model's output, one token in a chunk. Leaving the loop early cancels it.

        Args:
            prompt: Token ids of the model's own vocabulary.
            sampling: Sampling parameters and limits.
            logprobs: Must be 0, because a draft computes no scores of the raw distribution.
            conversation: Has no effect, because there is one model.
            model: Has no effect, because there is one model.
            rule: Must be empty or exact, because no draft is judged.
            drafts: Has no effect, because nothing is drafted.
            timeline: Gets the origin of each token, ``LOCAL``. None: nothing is recorded.
            started: Not called, because there are no statistics of a session.

        Raises:
            TypeError, ValueError: The prompt or an argument is invalid.
            ConstraintError: The constraint cannot be enforced here.
            GenerationError: The model failed, or no cache was free in time (``Overloaded``).
        """
        if logprobs:
            raise ValueError(f"logprobs is {logprobs}, but a model on the device has no scores")
        if rule not in ("", EXACT_RULE):
            raise ValueError(f"rule is {rule!r}, but a model on the device judges no drafts")
        tokens = check_prompt(prompt, self.info.vocabulary_size)
        if (room := self.info.context_length - len(tokens)) < 1:
            limit = f"the context of {self.info.name} has {self.info.context_length}"
            raise ValueError(f"the prompt has {len(tokens)} tokens, but {limit}")
        params = await self.with_matcher(sampling or SamplingParams())
        self._check_constraint(params)
        lease = DrafterLease(self._pool, len(tokens), params, has_draft_ids=True)
        lease.tokens += tokens
        try:
            await self._wait_for_cache(lease)
            reader = OutputReader(
                self.tokenizer.stream(tokens),
                params.stop,
                position=len(tokens),
                counters=ev.DraftCounters(),
                min_tokens=params.min_tokens,
            )
            ends = params.end_tokens(self.info.eos_token_ids)
            length, feed, reason = len(tokens), tokens, FinishReason.LENGTH
            for _ in range(min(params.max_tokens, room)):
                token = await self._next_token(lease, length - len(feed), feed)
                if timeline is not None:
                    timeline.origins.append(TokenOrigin.LOCAL)
                chunk = reader.deliver(ev.Deliver(length, (token,), (ev.TokenKind.LOCAL,)))
                if chunk is not None:
                    yield chunk
                if reader.is_stopped or token in ends:
                    reason = FinishReason.STOP
                    break
                length, feed = length + 1, (token,)
            yield reader.finish(reason)
        finally:
            lease.end()

    async def score(
        self,
        prompt: Sequence[int],
        logprobs: int,
        *,
        conversation: str = "",
        model: str = "",
    ) -> tuple[TokenScore, ...]:
        """Raise ``ValueError``: a draft computes no scores of the raw distribution."""
        raise ValueError(f"{self.info.name} is a model on the device, which scores no prompt")

    async def with_matcher(self, sampling: SamplingParams, client: str = "") -> SamplingParams:
        """Return ``sampling`` with its constraint read by the model's own vocabulary, as
        ``Agent.with_matcher``."""
        return await read_matcher(self._grammars, self._read_constraint, sampling, client)

    def close(self) -> None:
        """Free the model, unless it is the agent's draft model."""
        self._grammars.close()
        if isinstance(self._read_constraint, GrammarReader):
            self._read_constraint.close()
        if self._owns_pool:
            self._pool.close()

    def _check_constraint(self, sampling: SamplingParams) -> None:
        """Raise ``ConstraintError`` for a constraint that a draft step would not keep."""
        if (constraint := sampling.constraint) is None:
            return
        kind = constraint.kind.value
        if constraint.matcher is None:
            raise ConstraintError(
                f"no grammar library is installed on this device to read a {kind}:"
                " pip install 'edgespec[grammar]'"
            )
        if not self.info.eos_token_ids:
            raise ConstraintError(f"{self.info.name} has no end token, which a {kind} needs")

    async def _wait_for_cache(self, lease: DrafterLease) -> None:
        """Raise ``GenerationError`` if ``lease`` gets no cache in time."""
        try:
            async with asyncio.timeout(CACHE_TIMEOUT_S):
                has_cache = await self._pool.acquire(lease)
        except TimeoutError:
            why = f"no cache of {self.info.name} became free within {CACHE_TIMEOUT_S:g} s"
            raise Overloaded(why, FaultCode.OVERLOADED, retry_after_s=CACHE_TIMEOUT_S) from None
        if not has_cache:
            raise GenerationError("this device is closing its models")

    async def _next_token(self, lease: DrafterLease, keep: int, feed: tuple[int, ...]) -> int:
        """Return the token behind ``keep`` cached tokens and ``feed``. Raises
        ``GenerationError``."""
        outcome = await lease.step(ev.StartStep(keep, feed, 1))
        if isinstance(outcome, ev.StepFailed):
            raise GenerationError(f"{self.info.name} failed: {outcome.why}")
        if not outcome.candidates:
            why = "the memory budget leaves nothing to it, or nothing may follow"
            raise GenerationError(f"{self.info.name} proposes no token: {why}")
        return outcome.candidates[0].token


def with_own_context(info: ModelInfo, own: ModelInfo) -> ModelInfo:
    """Return the description of a drafter with the context length of its model. A drafter with a
    sliding window accepts longer texts, which the model was not made for."""
    return replace(info, context_length=min(info.context_length, own.context_length))
