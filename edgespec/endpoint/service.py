"""One endpoint: an agent, its tokenizer, and all that requests share. From the words of a request
to an answer, without HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from edgespec.config.endpoint import EndpointSection
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent
from edgespec.endpoint.admission import Admission
from edgespec.endpoint.answer import Choice
from edgespec.endpoint.counts import OTHER, EndpointCounts, Gauges
from edgespec.endpoint.errors import ApiError, no_tokenizer, stopping
from edgespec.endpoint.events import ChatShape, CompletionShape, Envelope, Shape, usage_of
from edgespec.endpoint.models import Chosen, ServedModels
from edgespec.endpoint.prompt_log import PromptLog
from edgespec.endpoint.prompting import (
    chat_tokens,
    choices_of,
    prompt_tokens,
    sampling_of,
    with_forced_call,
)
from edgespec.endpoint.requests import Asked, ChatRequest, chat_request, completion_request
from edgespec.endpoint.run import Run
from edgespec.endpoint.verifiers import VerifierWatch
from edgespec.models.chat_template import ChatTokenizer
from edgespec.telemetry.request_id import request_id


@dataclass(slots=True)
class Answer:
    """What one request asks for, ready to run."""

    envelope: Envelope
    choices: list[Choice]
    prompt_tokens: int
    stream: bool
    seed: int
    counted_as: str
    """The name of its model, or what stands for it in metrics."""
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

    def gauges(self) -> Gauges:
        names = tuple(one.name for one in self.models.listed)
        return Gauges(self.admission.running, self.admission.waiting, self.verifiers.ready, names)

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

    async def completion(self, data: Mapping[str, Any]) -> Answer:
        """Raises ``ApiError``."""
        most = self.settings.max_concurrent
        request = await asyncio.to_thread(completion_request, data, self.sampling, most)
        chosen = await self.choose_model(request.asked.model)
        tokenizer, context = await self._its_tokenizer(), chosen.context_length
        prompts = [
            await prompt_tokens(tokenizer, one, context, self._one_long) for one in request.prompts
        ]
        return self._answer(CompletionShape(), tokenizer, request.asked, prompts)

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
        return Answer(envelope, choices, count, asked.stream, asked.sampling.seed, counted_as)

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
