"""A verifier in virtual time: the product's engine, with a target whose passes take model time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Protocol, assert_never

from edgespec.core.ports import CapacityError, TargetModel
from edgespec.core.protocol.messages import Open, Uplink
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import (
    BatchDone,
    BatchFailed,
    CloseSequence,
    CloseStream,
    EngineAction,
    EngineEvent,
    GiveUp,
    KeepNodes,
    OpenSequence,
    Poll,
    ProbeDone,
    ReportFailure,
    RunBatch,
    RunProbe,
    SendTo,
    SequenceFailed,
    StreamLost,
    StreamMessage,
    StreamOpened,
)
from edgespec.telemetry.trace import Tracer
from edgespec_sim.actors.stream import Stream
from edgespec_sim.event_queue import EventQueue

_LOG = logging.getLogger(__name__)


class Compute(Protocol):
    """What a pass runs on."""

    def run(self, requests: tuple[PassRequest, ...], done: Callable[[], None]) -> None:
        """Call ``done`` when a pass over these requests that starts now is over."""


class PassTime:
    """A machine that does one pass at a time and nothing else."""

    def __init__(
        self, queue: EventQueue, pass_s: Callable[[tuple[PassRequest, ...]], float]
    ) -> None:
        self._queue, self._pass_s = queue, pass_s
        self.busy_s = 0.0

    def run(self, requests: tuple[PassRequest, ...], done: Callable[[], None]) -> None:
        pass_s = self._pass_s(requests)
        self.busy_s += pass_s
        self._queue.after(pass_s, done)


class SimulatedVerifier:
    """Interprets a ``VerifyEngine``'s actions on an event queue."""

    def __init__(
        self,
        queue: EventQueue,
        engine: VerifyEngine,
        target: TargetModel,
        compute: Compute,
        tracer: Tracer | None = None,
        name: str = "",
    ) -> None:
        self.engine, self.name = engine, name
        self._queue, self._target, self._compute = queue, target, compute
        self._tracer = tracer
        self._streams: dict[int, Stream] = {}
        self._count = 0
        self._poll_at_s = math.inf
        self._stopped = False
        self._failed: set[str] = set()
        """Keys of sequences that miss the next pass."""
        self.gave_up: str | None = None
        """Why the engine ended everything, if it has."""

    def accept(self, stream: Stream, credential: Credential = ANYBODY) -> None:
        self._count += 1
        number = self._count
        self._streams[number] = stream

        def receive(message: Uplink) -> None:
            if isinstance(message, Open):
                self._handle(StreamOpened(number, message, credential=credential))
            else:
                self._handle(StreamMessage(number, message))

        stream.to_verifier = receive
        stream.lost_at_verifier = lambda: self._handle(StreamLost(number))

    def stop(self, device_notice_s: float = 0.0) -> None:
        """The process is gone: every stream breaks, nothing more is committed."""
        for stream in tuple(self._streams.values()):
            stream.cut(device_notice_s, 0.0, "the verifier is gone")
        self.halt()

    def halt(self) -> None:
        """The process is gone, and its streams are somebody else's to break."""
        self._streams.clear()
        self._stopped = True

    def _handle(self, event: EngineEvent) -> None:
        if self._stopped:
            return
        actions = self.engine.handle(event, self._queue.now)
        if self._tracer is not None:
            self._trace(self._tracer, event, actions)
        for action in actions:
            self._do(action)
        if self.engine.deadline is not None:
            self._schedule_poll()

    def _schedule_poll(self) -> None:
        deadline = self.engine.deadline
        if deadline is not None and deadline < self._poll_at_s:
            self._poll_at_s = max(deadline, self._queue.now)
            self._queue.at(self._poll_at_s, self._poll)

    def _poll(self) -> None:
        self._poll_at_s = math.inf
        deadline = self.engine.deadline
        if deadline is not None and deadline <= self._queue.now:
            self._handle(Poll())
        else:
            self._schedule_poll()

    def _trace(self, tracer: Tracer, event: EngineEvent, actions: tuple[EngineAction, ...]) -> None:
        tracer.record(self._queue.now, "verifier", self.name, "event", event)
        for action in actions:
            tracer.record(self._queue.now, "verifier", self.name, "action", action)

    def _do(self, action: EngineAction) -> None:
        match action:
            case SendTo(number, message):
                self._streams[number].send_down(message)
            case CloseStream(number):
                self._streams.pop(number).close_from_verifier()
            case OpenSequence(key, prompt_length, sampling, text):
                self._failed.discard(key)
                self._attempt(key, lambda: self._target.open(key, prompt_length, sampling, text))
            case CloseSequence(key):
                self._attempt(key, lambda: self._target.close(key))
            case KeepNodes(key, nodes):
                self._attempt(key, lambda: self._target.keep(key, nodes))
            case RunBatch(requests):
                self._run(requests)
            case RunProbe(request):
                self._probe(request)
            case ReportFailure(key, details, _):
                _LOG.warning("%s: session %s failed: %s", self.name, key, details)
            case GiveUp(why):
                _LOG.error("%s: %s", self.name, why)
                self.gave_up = why
            case _:
                assert_never(action)

    def _attempt(self, key: str, work: Callable[[], None]) -> None:
        """Sequence work; what fails is told to the engine, and misses the next pass."""
        try:
            work()
        except Exception as error:
            failed = SequenceFailed(key, str(error), full=isinstance(error, CapacityError))
            self._failed.add(key)
            self._queue.after(0.0, lambda: self._handle(failed))

    def _run(self, requests: tuple[PassRequest, ...]) -> None:
        failed, self._failed = self._failed, set()
        outcome: BatchDone | BatchFailed
        try:
            batch = tuple(request for request in requests if request.key not in failed)
            outcome = BatchDone(tuple(self._target.forward(batch)))
        except CapacityError as error:
            outcome = BatchFailed(str(error), full=True)
        except Exception as error:
            if isinstance(error, AssertionError):
                raise
            outcome = BatchFailed(f"{type(error).__name__}: {error}")
        self._compute.run(requests, lambda: self._handle(outcome))

    def _probe(self, request: PassRequest) -> None:
        why: str | None = None
        try:
            self._target.open(request.key, 1, SamplingParams())
            self._target.forward((request,))
            self._target.close(request.key)
        except Exception as error:
            why = str(error)
        self._queue.after(0.0, lambda: self._handle(ProbeDone(why)))
