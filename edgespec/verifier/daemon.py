"""The verifier on asyncio: streams in, packed passes out.

This file decides nothing. Every stimulus becomes an engine event; every action the engine returns
is carried out here, in order: messages go to the streams' own queues (a slow device cannot hold up
another), sequence work and passes to the target's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import assert_never

from edgespec.core.engine_events import (
    BatchDone,
    BatchFailed,
    CloseSequence,
    CloseStream,
    EngineAction,
    EngineEvent,
    EngineLimits,
    KeepNodes,
    OpenSequence,
    Poll,
    RunBatch,
    SendTo,
    SequenceRefused,
    StreamLost,
    StreamMessage,
    StreamOpened,
)
from edgespec.core.messages import Downlink, Fault, FaultCode, Limits, Open, VerifierInfo
from edgespec.core.verify_engine import VerifyEngine
from edgespec.core.work import PassRequest
from edgespec.ports import CapacityError, LinkError, TargetModel, VerifierStream
from edgespec.telemetry.trace import NoTrace, Tracer
from edgespec.verifier.target_worker import TargetWorker

_LOG = logging.getLogger(__name__)
# Flow control keeps a stream's backlog below ``max_unreceived`` commits; more is a broken peer.
_MAX_BACKLOG = 4096
_OPEN_WITHIN_S = 10.0


class Verifier:
    """Serves one target model. ``serve`` is what a server transport calls for each stream."""

    def __init__(
        self,
        target: TargetModel,
        limits: Limits,
        engine_limits: EngineLimits | None = None,
        *,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = VerifyEngine(target.info, limits, engine_limits or EngineLimits())
        self._target, self._clock, self._tracer = target, clock, tracer or NoTrace()
        self._worker = TargetWorker(target, self._on_refused)
        self._backlogs: dict[int, asyncio.Queue[Downlink | None]] = {}
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._pass: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def info(self) -> VerifierInfo:
        """What is served and how busy this verifier is, now."""
        engine = self.engine
        bound = engine.engine_limits.max_sessions
        pass_us = round((engine.pass_s or 0.0) * 1e6)
        return VerifierInfo(self._target.info, engine.limits, len(engine.sessions), bound, pass_us)

    async def serve(self, stream: VerifierStream) -> None:
        """Run one stream to its end; never raises for what a peer does."""
        self._count += 1
        number = self._count
        backlog: asyncio.Queue[Downlink | None] = asyncio.Queue(_MAX_BACKLOG)
        self._backlogs[number] = backlog
        reader = asyncio.create_task(self._read(number, stream))
        try:
            while (message := await backlog.get()) is not None:
                await stream.send(message)
        except LinkError as error:
            _LOG.info("stream %d: %s", number, error)
        finally:
            reader.cancel()
            self._backlogs.pop(number, None)
            self._handle(StreamLost(number))
            await stream.close()

    async def _read(self, number: int, stream: VerifierStream) -> None:
        try:
            first = await asyncio.wait_for(stream.receive(), _OPEN_WITHIN_S)
            if not isinstance(first, Open):
                self._refuse(number, f"the first message is {type(first).__name__}, not Open")
                return
            if self._stopping:
                self._send(number, Fault(FaultCode.SHUTTING_DOWN, "the verifier is stopping", 1.0))
                self._close(number)
                return
            self._handle(StreamOpened(number, first))
            while True:
                message = await stream.receive()
                if isinstance(message, Open):
                    self._refuse(number, "a second Open on one stream")
                    return
                self._handle(StreamMessage(number, message))
        except TimeoutError:
            self._refuse(number, f"no Open within {_OPEN_WITHIN_S} s")
        except LinkError as error:
            _LOG.debug("stream %d ended: %s", number, error)
            self._close(number)

    def _refuse(self, number: int, why: str) -> None:
        self._send(number, Fault(FaultCode.INVALID, why))
        self._close(number)

    # --- the engine ------------------------------------------------------------------------

    def _handle(self, event: EngineEvent) -> None:
        now = self._clock()
        self._tracer.record(now, "verifier", "", "event", event)
        for action in self.engine.handle(event, now):
            self._tracer.record(now, "verifier", "", "action", action)
            self._do(action)
        if self._worker.has_queued and not self.engine.running:
            self._start(())
        self._arm()

    def _do(self, action: EngineAction) -> None:
        match action:
            case SendTo(number, message):
                self._send(number, message)
            case CloseStream(number):
                self._close(number)
            case OpenSequence() | CloseSequence() | KeepNodes():
                self._worker.queue(action)
            case RunBatch(requests):
                self._start(requests)
            case _:
                assert_never(action)

    def _send(self, number: int, message: Downlink) -> None:
        backlog = self._backlogs.get(number)
        if backlog is None:
            return
        try:
            backlog.put_nowait(message)
        except asyncio.QueueFull:
            _LOG.warning("stream %d: %d messages unread, closing it", number, _MAX_BACKLOG)
            self._backlogs.pop(number).get_nowait()
            backlog.put_nowait(None)

    def _close(self, number: int) -> None:
        backlog = self._backlogs.pop(number, None)
        if backlog is not None:
            if backlog.full():
                backlog.get_nowait()
            backlog.put_nowait(None)

    def _start(self, requests: tuple[PassRequest, ...]) -> None:
        task = asyncio.get_running_loop().create_task(self._run(requests))
        if requests:
            self._pass = task
        else:
            task.add_done_callback(_log_failure)

    async def _run(self, requests: tuple[PassRequest, ...]) -> None:
        try:
            results = await self._worker.forward(requests)
        except CapacityError as error:
            self._handle(BatchFailed(str(error), full=True))
            return
        except Exception as error:  # whatever a model raises ends a pass, not the daemon
            _LOG.exception("a pass of %d sessions failed", len(requests))
            if requests:
                self._handle(BatchFailed(f"{type(error).__name__}: {error}"))
            return
        if requests:
            self._handle(BatchDone(results))

    def _on_refused(self, key: str, why: str) -> None:
        self._handle(SequenceRefused(key, why))

    def _arm(self) -> None:
        """One timer, at the engine's deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.engine.deadline
        if deadline is not None and not self._stopping:
            delay_s = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._handle(Poll())

    # --- stopping --------------------------------------------------------------------------

    async def stop(self) -> None:
        """Tell every device to come back later, end the streams, let a running pass finish."""
        self._stopping = True
        fault = Fault(FaultCode.SHUTTING_DOWN, "the verifier is stopping", retry_after_s=1.0)
        for number in list(self._backlogs):
            self._send(number, fault)
            self._close(number)
        if self._timer is not None:
            self._timer.cancel()
        if self._pass is not None:
            await asyncio.wait([self._pass])
        await asyncio.to_thread(self._worker.close)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _LOG.error("sequence work failed", exc_info=task.exception())
