"""An agent that has no tokenizer of its own, until a verifier lends it one.

It is asked for before the first text, and again before the next one while nobody lends: an agent
that was made before its verifier was there works as soon as that is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NoReturn

from edgespec.config import AgentConfig
from edgespec.config.common import SetupError
from edgespec.core.ports import LinkError, ModelInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, GenerationError, GenerationStats
from edgespec.device.borrowed_tokenizer import with_lent_tokenizer
from edgespec.device.build import (
    agent_options,
    ask_verifiers,
    load_drafter,
    load_tokenizer,
    tokenizer_reference,
    verifier_transport,
    vocabulary_of,
)
from edgespec.device.prober import Answer
from edgespec.device.reply import Chunk
from edgespec.models.grammar import device_reader
from edgespec.telemetry.trace import Tracer

Say = Callable[[str], None]


class BorrowingAgent(Agent):
    """For a ``config`` that names no tokenizer (``borrows_tokenizer``)."""

    def __init__(
        self, config: AgentConfig, *, tracer: Tracer | None = None, say: Say | None = None
    ) -> None:
        options = agent_options(config, "")
        super().__init__(
            verifier_transport(config), None, _no_text, _no_text, options, tracer=tracer
        )
        self.lent: AgentConfig | None = None
        """The configuration with the tokenizer that was lent; None: none was yet."""
        self._config, self._say = config, say or (lambda text: None)
        self._one_at_a_time = asyncio.Lock()

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        logprobs: int = 0,
        conversation: str = "",
        model: str = "",
        started: Callable[[GenerationStats], None] | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """``Agent.generate``, once a tokenizer is lent; a verifier is waited for as long as a first
        stream is. Raises ``GenerationError`` also where none lends one."""
        await self._patiently()
        texts = super().generate(
            prompt,
            sampling,
            logprobs=logprobs,
            conversation=conversation,
            model=model,
            started=started,
        )
        async with aclosing(texts) as chunks:
            async for chunk in chunks:
                yield chunk

    async def borrow(self) -> AgentConfig:
        """Ask all verifiers once, and take the tokenizer of the first of them that fits. Raises
        ``LinkError`` where nobody answers who may do so later, ``SetupError`` where nobody will."""
        async with self._one_at_a_time:
            if self.lent is None:
                address, info = await self._first_answer()
                config = await with_lent_tokenizer(self._config, info, self._say, address)
                await asyncio.to_thread(self._take, config)
                self.lent = config
            return self.lent

    def _take(self, config: AgentConfig) -> None:
        """From here on this is an agent as ``build_agent`` makes it. Raises ``SetupError``."""
        try:
            text = load_tokenizer(reference := tokenizer_reference(config))
            vocabulary, drafter = vocabulary_of(reference), load_drafter(config, say=self._say)
        except ValueError as error:
            raise SetupError(str(error)) from error
        self.options = replace(self.options, vocabulary=vocabulary)
        self._vocabulary, self._drafter = vocabulary, drafter
        self._encode, self._decoder = text.encode, text.stream
        self._read_constraint = device_reader(reference)

    async def _patiently(self) -> None:
        policy = self.options.reconnect
        until, pause_s = time.monotonic() + policy.give_up_first_s, policy.first_s
        while self.lent is None:
            try:
                await self.borrow()
            except SetupError as error:
                raise GenerationError(str(error), None) from error
            except LinkError as error:
                if not error.retryable or time.monotonic() + pause_s > until:
                    raise GenerationError(f"gave up on the verifier: {error}", None) from error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, policy.longest_s)

    async def _first_answer(self) -> tuple[str, ModelInfo]:
        answers, wanted = await ask_verifiers(self._config), self._config.model
        for address, answer in answers.items():
            if answer.info is not None and (model := answer.info.of(wanted)) is not None:
                return address, model
        _refuse(answers, wanted)


def _refuse(answers: Mapping[str, Answer], wanted: str) -> NoReturn:
    why = [
        answer.why
        if answer.info is None
        else f"{address} serves {', '.join(repr(one.name) for one in answer.info.served)},"
        f" not {wanted!r}"
        for address, answer in answers.items()
    ]
    if any(answer.error is not None and answer.error.retryable for answer in answers.values()):
        raise LinkError("; ".join(why))
    raise SetupError("\n".join(why))


def _no_text(*_: object) -> NoReturn:
    raise RuntimeError("no tokenizer was lent yet")
