"""A verifier in virtual time: the product's engine, with a target whose passes take model time."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from edgespec.core.engine_events import (
    BatchDone,
    BatchFailed,
    CloseSequence,
    CloseStream,
    EngineAction,
    EngineEvent,
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
from edgespec.core.messages import Open, Uplink
from edgespec.core.sampling import SamplingParams
from edgespec.core.verify_engine import VerifyEngine
from edgespec.core.work import PassRequest
from edgespec.ports import CapacityError, TargetModel
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.stream import Stream

PassTime = Callable[[tuple[PassRequest, ...]], float]


class SimulatedVerifier:
    """Interprets a ``VerifyEngine``'s actions on an event queue."""

    def __init__(
        self, queue: EventQueue, engine: VerifyEngine, target: TargetModel, pass_s: PassTime
    ) -> None:
        self.engine = engine
        self._queue, self._target, self._pass_s = queue, target, pass_s
        self._streams: dict[int, Stream] = {}
        self._count = 0

    def accept(self, stream: Stream) -> None:
        self._count += 1
        number = self._count
        self._streams[number] = stream

        def receive(message: Uplink) -> None:
            if isinstance(message, Open):
                self._handle(StreamOpened(number, message))
            else:
                self._handle(StreamMessage(number, message))

        stream.to_verifier = receive
        stream.lost_at_verifier = lambda: self._handle(StreamLost(number))

    def _handle(self, event: EngineEvent) -> None:
        for action in self.engine.handle(event, self._queue.now):
            self._do(action)
        deadline = self.engine.deadline
        if deadline is not None:
            self._queue.at(max(deadline, self._queue.now), self._poll)

    def _poll(self) -> None:
        deadline = self.engine.deadline
        if deadline is not None and deadline <= self._queue.now:
            self._handle(Poll())

    def _do(self, action: EngineAction) -> None:
        match action:
            case SendTo(number, message):
                self._streams[number].send_down(message)
            case CloseStream(number):
                self._streams.pop(number).close_from_verifier()
            case OpenSequence(key, prompt_length, sampling):
                self._open(key, prompt_length, sampling)
            case CloseSequence(key):
                self._target.close(key)
            case KeepNodes(key, nodes):
                self._target.keep(key, nodes)
            case RunBatch(requests):
                self._run(requests)
            case _:
                assert_never(action)

    def _open(self, key: str, prompt_length: int, sampling: SamplingParams) -> None:
        try:
            self._target.open(key, prompt_length, sampling)
        except CapacityError as error:
            refused = SequenceRefused(key, str(error))
            self._queue.after(0.0, lambda: self._handle(refused))

    def _run(self, requests: tuple[PassRequest, ...]) -> None:
        outcome: BatchDone | BatchFailed
        try:
            outcome = BatchDone(tuple(self._target.forward(requests)))
        except CapacityError as error:
            outcome = BatchFailed(str(error))
        self._queue.after(self._pass_s(requests), lambda: self._handle(outcome))
