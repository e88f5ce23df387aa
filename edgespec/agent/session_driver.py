"""One generation on asyncio: a ``DraftSession`` with a real link, a real drafter and a real clock.

This file decides nothing. Draft steps run in the drafter's own thread, so a reply that arrives
during a step is read at once; the step's result comes back as an event like any other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import assert_never

from edgespec.agent.link import Link
from edgespec.core.draft_events import (
    Connect,
    Deliver,
    Disconnect,
    DraftAction,
    DraftEvent,
    Fail,
    Finish,
    Start,
    StartStep,
    StepDone,
    StepFailed,
    Stop,
    Tick,
    Transmit,
)
from edgespec.core.draft_session import DraftSession
from edgespec.ports import Drafter, Transport
from edgespec.telemetry.trace import NoTrace, Tracer

Outcome = Deliver | Finish | Fail


class SessionDriver:
    """Runs ``session`` until it finishes or fails; iterate ``outcomes`` to follow it.

    ``drafter`` None: the session must have been opened without drafting.
    """

    def __init__(
        self,
        session: DraftSession,
        transport: Transport,
        drafter: Drafter | None,
        thread: Executor,
        *,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self._transport, self._drafter, self._thread = transport, drafter, thread
        self._tracer, self._clock = tracer or NoTrace(), clock
        # Holds at most one entry a committed token, and max_tokens bounds those.
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._link: Link | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._step: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def outcomes(self) -> AsyncIterator[Outcome]:
        """Deliveries, and the ``Finish`` or ``Fail`` that ends them."""
        await self._begin()
        self._handle(Start())
        while True:
            outcome = await self._outcomes.get()
            yield outcome
            if isinstance(outcome, Finish | Fail):
                return

    async def _begin(self) -> None:
        if self._drafter is None:
            return
        request, loop = self.session.request, asyncio.get_running_loop()
        try:
            await loop.run_in_executor(
                self._thread, self._drafter.begin, len(request.prompt), request.sampling
            )
        except Exception as error:  # as for a step: the session goes on without drafting
            self._handle(StepFailed(f"{type(error).__name__}: {error}"))

    def stop(self, event: Stop) -> None:
        """End the generation; the outcome follows."""
        self._handle(event)

    async def close(self) -> None:
        """Cancel what still runs; a draft step that has begun is waited for."""
        if self._timer is not None:
            self._timer.cancel()
        self._handle(Stop())
        running = self._links | ({self._step} if self._step is not None else set())
        if running:
            await asyncio.wait(running)

    # --- the session -----------------------------------------------------------------------

    def _handle(self, event: DraftEvent) -> None:
        now, key = self._clock(), self.session.request.session_id
        self._tracer.record(now, "device", key, "event", event)
        for action in self.session.handle(event, now):
            self._tracer.record(now, "device", key, "action", action)
            self._do(action)
        self._arm()

    def _do(self, action: DraftAction) -> None:
        match action:
            case Connect():
                self._link = Link(self._transport, self._handle)
                self._links.add(self._link.task)
                self._link.task.add_done_callback(self._links.discard)
            case Disconnect():
                if self._link is not None:
                    self._link.close()
                    self._link = None
            case Transmit(message):
                if self._link is not None:
                    self._link.send(message)
            case StartStep():
                self._step = asyncio.create_task(self._run_step(action))
            case Deliver() | Finish() | Fail():
                self._outcomes.put_nowait(action)
            case _:
                assert_never(action)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.session.deadline
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._handle, Tick())

    async def _run_step(self, step: StartStep) -> None:
        assert self._drafter is not None
        loop = asyncio.get_running_loop()
        try:
            candidates = await loop.run_in_executor(
                self._thread, self._drafter.step, step.keep_length, step.feed, step.width
            )
        except Exception as error:  # whatever a model raises ends the drafting, not the session
            self._handle(StepFailed(f"{type(error).__name__}: {error}"))
        else:
            self._handle(StepDone(candidates))
