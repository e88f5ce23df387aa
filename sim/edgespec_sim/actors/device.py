"""A device in virtual time: the product's draft session, with a drafter whose steps take time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from edgespec.core.device.events import (
    Connect,
    Connected,
    Deliver,
    Disconnect,
    DraftAction,
    DraftEvent,
    Fail,
    Finish,
    LinkDown,
    Start,
    StartStep,
    StepDone,
    Tick,
    TokenKind,
    Transmit,
)
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import Drafter
from edgespec.core.protocol.messages import Cancel
from edgespec.telemetry.trace import Tracer
from edgespec_sim.actors.stream import Stream
from edgespec_sim.event_queue import EventQueue

StepTime = Callable[[int, int], float]
"""Seconds of a draft step that keeps so many tokens in the cache and feeds so many, on whatever
branches."""


@dataclass(slots=True)
class Delivery:
    """What the user of the device saw."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    ended: Finish | Fail | None = None


class SimulatedDevice:
    """Interprets a ``DraftSession``'s actions on an event queue.

    ``connect`` opens a stream (None: the verifier cannot be reached) that is usable after its
    set-up time. ``on_end`` hears when the session is over. A session draws with a drafter that
    nothing else uses meanwhile.
    """

    def __init__(
        self,
        queue: EventQueue,
        session: DraftSession,
        drafter: Drafter,
        step_s: StepTime,
        connect: Callable[[], tuple[Stream, float] | None],
        tracer: Tracer | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.session, self.delivery = session, Delivery()
        self.stream: Stream | None = None
        self.drafting_s = 0.0
        """Time the drafter was at work."""
        self._tracer, self._on_end = tracer, on_end
        self._tick_at_s = math.inf
        self._queue, self._drafter, self._step_s, self._connect = queue, drafter, step_s, connect
        request = session.request
        drafter.begin(len(request.prompt), request.sampling)

    def start(self) -> None:
        self.handle(Start())

    def handle(self, event: DraftEvent) -> None:
        actions = self.session.handle(event, self._queue.now)
        if self._tracer is not None:
            self._trace(self._tracer, event, actions)
        for action in actions:
            self._do(action)
        if self.session.deadline is not None:
            self._schedule_tick()

    def _schedule_tick(self) -> None:
        deadline = self.session.deadline
        if deadline is not None and deadline < self._tick_at_s:
            self._tick_at_s = max(deadline, self._queue.now)
            self._queue.at(self._tick_at_s, self._tick)

    def _tick(self) -> None:
        self._tick_at_s = math.inf
        deadline = self.session.deadline
        if deadline is not None and deadline <= self._queue.now:
            self.handle(Tick())
        else:
            self._schedule_tick()

    def _trace(self, tracer: Tracer, event: DraftEvent, actions: tuple[DraftAction, ...]) -> None:
        now, key = self._queue.now, self.session.request.session_id
        tracer.record(now, "device", key, "event", event)
        for action in actions:
            tracer.record(now, "device", key, "action", action)

    def _do(self, action: DraftAction) -> None:
        match action:
            case Transmit(message):
                if self.stream is not None:
                    self.stream.send_up(message)
            case StartStep(keep, feed, width):
                done = StepDone(self._drafter.step(keep, feed, width))
                step_s = self._step_s(keep, len(feed))
                self.drafting_s += step_s
                self._queue.after(step_s, lambda: self.handle(done))
            case Deliver(position, tokens, kinds):
                prompt_length = len(self.session.request.prompt)
                assert position == prompt_length + len(self.delivery.tokens)
                self.delivery.tokens += tokens
                self.delivery.kinds += kinds
                self.delivery.times_s += [self._queue.now] * len(tokens)
            case Connect():
                self._open_stream()
            case Disconnect():
                if self.stream is not None:
                    self.stream.close_from_device()
                    self.stream = None
            case Finish() | Fail():
                self.delivery.ended = action
                self._on_end()
            case _:
                assert_never(action)

    def reconnect(self, why: str) -> None:
        """Let go of the stream, if there is one, and open another at once. The session that it
        leads to is told that it is over, so that nothing there waits for its return."""
        if self.stream is None:
            return
        self.stream.send_up(Cancel())
        self.stream.close_from_device()
        self.stream = None
        self.handle(LinkDown(why, again_s=0.0))

    def _open_stream(self) -> None:
        opened = self._connect()
        if opened is None:
            self._queue.after(0.0, lambda: self.handle(LinkDown("no verifier there")))
            return
        stream, setup_s = opened

        def lost(why: str) -> None:
            if self.stream is stream:
                self.stream = None
                self.handle(LinkDown(why))

        self.stream = stream
        stream.to_device = self.handle
        stream.lost_at_device = lost

        def ready() -> None:
            if self.stream is stream:
                self.handle(Connected())

        self._queue.after(setup_s, ready)
