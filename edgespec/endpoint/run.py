"""The generations of one request, beside each other, as one stream of events.

Each runs in a task of its own, so that whoever reads can do other things between two events, such
as keeping an HTTP connection alive. Leaving cancels them all, and tells the verifier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Final, Self

from edgespec.core.protocol.constraint import ConstraintError, ConstraintKind
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, GenerationError, GenerationStats
from edgespec.device.reply import ReplyEvent
from edgespec.endpoint.errors import ApiError, from_generation, invalid

# Events that nobody has read yet; beyond them the generations wait.
_MOST_UNREAD: Final = 256
_PARAMS: Final = {
    ConstraintKind.JSON_SCHEMA: "response_format",
    ConstraintKind.GRAMMAR: "grammar",
    ConstraintKind.REGEX: "regex",
}
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """One text that is wanted; ``stats`` grow while it comes."""

    index: int
    prompt: Sequence[int]
    sampling: SamplingParams
    logprobs: int = 0
    must_call: bool = False
    """Its constraint is that of a call."""
    conversation: str = ""
    """Its name; empty: it has none."""
    model: str = ""
    """The name to ask a verifier for; empty: the agent's own."""
    stats: GenerationStats | None = field(default=None, init=False)


@dataclass(frozen=True, slots=True)
class _Ended:
    error: ApiError | None = None


class Run:
    """Use as an async context manager; then call ``next`` until it says that all is over."""

    def __init__(self, agent: Agent, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        self._agent = agent
        self._unread: asyncio.Queue[tuple[int, ReplyEvent] | _Ended] = asyncio.Queue(_MOST_UNREAD)
        self._tasks: list[asyncio.Task[None]] = []
        self._running = len(self.jobs)
        self._failed: ApiError | None = None
        self._wake = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._generate(job)) for job in self.jobs]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def over(self) -> bool:
        """Whether every text is complete and read."""
        return self._running == 0 and self._failed is None

    async def next(self, timeout_s: float | None = None) -> list[tuple[int, ReplyEvent]]:
        """Events with the index of their job, all that are there; none when ``timeout_s`` is over,
        or ``over``. Raises ``ApiError`` for the first generation that fails."""
        if found := self._take():
            return found
        while not self.over:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return []
            self._wake.clear()
            if found := self._take():
                return found
        return []

    def fail(self, error: ApiError) -> None:
        """Whoever calls ``next`` hears this instead of any further event."""
        self._failed = self._failed or error
        self._wake.set()

    def _take(self) -> list[tuple[int, ReplyEvent]]:
        found: list[tuple[int, ReplyEvent]] = []
        while self._failed is None and not self._unread.empty():
            one = self._unread.get_nowait()
            if isinstance(one, _Ended):
                self._running -= 1
                self._failed = one.error
            else:
                found.append(one)
        if self._failed is not None and not found:
            raise self._failed
        return found

    async def _generate(self, job: Job) -> None:
        begun, error = False, None
        try:
            generation = self._agent.follow(
                job.prompt,
                job.sampling,
                logprobs=job.logprobs,
                conversation=job.conversation,
                model=job.model,
                started=partial(setattr, job, "stats"),
            )
            async with aclosing(generation) as events:
                async for event in events:
                    begun = True
                    await self._put((job.index, event))
        except GenerationError as failure:
            error = from_generation(failure)
        except ConstraintError as failure:
            error = invalid(_param(job), str(failure))
        except Exception as failure:
            if not begun and isinstance(failure, ValueError | TypeError):
                error = invalid("prompt", str(failure))
            else:
                _log.exception("a generation failed")
                error = ApiError(500, f"the generation failed: {type(failure).__name__}: {failure}")
        await self._put(_Ended(error))

    async def _put(self, one: tuple[int, ReplyEvent] | _Ended) -> None:
        await self._unread.put(one)
        self._wake.set()


def _param(job: Job) -> str:
    """The parameter that a constraint came with."""
    constraint = job.sampling.constraint
    if job.must_call or constraint is None:
        return "tools"
    return _PARAMS[constraint.kind]
