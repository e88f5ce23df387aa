"""An agent that has no tokenizer of its own, until a verifier lends it one.

It is asked for before the first text, and again before the next one while nobody lends: an agent
that was made before its verifier was there works as soon as that is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NoReturn

from edgespec.config import AgentConfig
from edgespec.config.setup_error import SetupError
from edgespec.core.ports import LinkError, ModelInfo
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, GenerationError, GenerationStats
from edgespec.device.borrowed_tokenizer import with_lent_tokenizer
from edgespec.device.build import (
    agent_options,
    connect,
    load_drafter,
    load_tokenizer,
    tokenizer_reference,
    verifier_transport,
    vocabulary_of,
)
from edgespec.device.many_verifiers import with_port
from edgespec.device.reply import Chunk
from edgespec.models.grammar import device_reader
from edgespec.telemetry.trace import Tracer
from edgespec.wire.access import DeviceAccess, device_access

Say = Callable[[str], None]
_ANSWER_S = 3.0


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
        access = device_access(self._config)
        addresses = [with_port(one) for one in self._config.verifiers]
        answers = await asyncio.gather(*(_asked(one, access) for one in addresses))
        wanted = self._config.model
        for address, answer in zip(addresses, answers, strict=True):
            if isinstance(answer, VerifierInfo) and (model := answer.of(wanted)) is not None:
                return address, model
        _refuse(addresses, answers, wanted)


async def _asked(address: str, access: DeviceAccess) -> VerifierInfo | LinkError:
    transport = connect(address, access=access)
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await transport.info()
    except TimeoutError:
        return LinkError(f"{address}: no answer within {_ANSWER_S:g} s")
    except LinkError as error:
        return error
    finally:
        await transport.close()


def _refuse(
    addresses: Sequence[str], answers: Sequence[VerifierInfo | LinkError], wanted: str
) -> NoReturn:
    why = [
        f"{address} serves {', '.join(repr(one.name) for one in answer.served)}, not {wanted!r}"
        if isinstance(answer, VerifierInfo)
        else str(answer)
        for address, answer in zip(addresses, answers, strict=True)
    ]
    if any(isinstance(answer, LinkError) and answer.retryable for answer in answers):
        raise LinkError("; ".join(why))
    raise SetupError("\n".join(why))


def _no_text(*_: object) -> NoReturn:
    raise RuntimeError("no tokenizer was lent yet")
