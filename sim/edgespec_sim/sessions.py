"""Sessions in virtual time: both ends of a stream, interpreted on an event queue.

``SimulatedDevice`` carries out the actions of a ``DraftSession``, and ``SimulatedVerifier`` those
of a ``VerifyEngine``, as the asyncio drivers of the product do. What takes time there is scheduled
here: a draft step or a pass is computed at once, and its event comes when it would have ended.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from edgespec.core.device import events as ev
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import CapacityError, Drafter, TargetModel, draft_places
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import Candidate, DraftStep, PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.draft_round import CHOICES, DraftRound
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.telemetry.trace import Tracer
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import Path
from edgespec_sim.message_sizes import message_bytes
from edgespec_sim.scenario.sections import FRAMING_BYTES
from edgespec_sim.scenario.verifiers import RadioMeter
from edgespec_sim.world.conservation import StreamWatch


@dataclass(slots=True)
class WayTimes:
    """One-way times of the messages in one direction of a stream, from sending to arrival."""

    seconds: float = 0.0
    """Sum of the times."""
    messages: int = 0
    """Number of messages that have arrived."""

    def add(self, seconds: float) -> None:
        """Add a message that has arrived."""
        self.seconds += seconds
        self.messages += 1


def mean_way_s(ways: Iterable[WayTimes]) -> float | None:
    """Return the mean one-way time over several streams; None if no message has arrived."""
    seconds, messages = 0.0, 0
    for one in ways:
        seconds, messages = seconds + one.seconds, messages + one.messages
    return seconds / messages if messages else None


class Stream:
    """One generation's stream between a device and the verifier with the name ``verifier``.

    Messages travel on the paths ``up`` and ``down``. Each end sets the functions that are called
    there: ``to_verifier`` and ``to_device`` with every message that arrives, ``lost_at_verifier``
    and ``lost_at_device`` once, if the link breaks or the other end closes the stream.

    ``up_bytes`` and ``down_bytes`` count drafts, acknowledgements and commits. The request with its
    prompt, which any system must send, is counted apart (``request_bytes``). ``watch`` checks every
    message in a checked world. ``radio`` records every packet of the device, both ways."""

    __slots__ = (
        *("_down", "_queue", "_radio", "_up", "_watch", "down_bytes", "down_ways"),
        *("lost_at_device", "lost_at_verifier", "open", "to_device", "to_verifier"),
        *("request_bytes", "up_bytes", "up_ways", "verifier"),
    )

    def __init__(
        self,
        queue: EventQueue,
        up: Path,
        down: Path,
        watch: StreamWatch | None = None,
        radio: RadioMeter | None = None,
        verifier: str = "",
    ) -> None:
        self.verifier = verifier
        self._queue, self._up, self._down = queue, up, down
        self._watch, self._radio = watch, radio
        self.up_bytes = self.down_bytes = self.request_bytes = 0
        self.up_ways, self.down_ways = WayTimes(), WayTimes()
        self.open = True
        self.to_verifier: Callable[[m.Uplink], None] = lambda message: None
        self.to_device: Callable[[m.Downlink], None] = lambda message: None
        self.lost_at_verifier: Callable[[], None] = lambda: None
        self.lost_at_device: Callable[[str], None] = lambda why: None

    def send_up(self, message: m.Uplink) -> None:
        """Send a message from the device."""
        size_bytes = message_bytes(message)
        if isinstance(message, m.Open | m.PrefixTokens | m.PicturePart):
            self.request_bytes += size_bytes
        else:
            self.up_bytes += size_bytes
        if self._radio is not None:
            self._radio.add_packet(self._queue.now, up_bytes=size_bytes + FRAMING_BYTES)
        if self._watch is not None:
            self._watch.up.sent(message, self._queue.now, size_bytes)
        sent_s = self._queue.now
        self._up.send(size_bytes, lambda: self._arrive_up(message, sent_s))

    def send_down(self, message: m.Downlink) -> None:
        """Send a message from the verifier."""
        size_bytes = message_bytes(message)
        if isinstance(message, m.Commit):
            self.down_bytes += size_bytes
        if self._watch is not None:
            self._watch.sent_down(message, self._queue.now, size_bytes)
        sent_s = self._queue.now
        self._down.send(size_bytes, lambda: self._arrive_down(message, sent_s))

    def _arrive_up(self, message: m.Uplink, sent_s: float) -> None:
        self.up_ways.add(self._queue.now - sent_s)
        if self._watch is not None:
            self._watch.up.arrived(message, self._queue.now)
        if self.open:
            self.to_verifier(message)

    def _arrive_down(self, message: m.Downlink, sent_s: float) -> None:
        self.down_ways.add(self._queue.now - sent_s)
        if self._watch is not None:
            self._watch.arrived_down(message, self._queue.now)
        if self._radio is not None:
            size_bytes = message_bytes(message) + FRAMING_BYTES
            self._radio.add_packet(self._queue.now, down_bytes=size_bytes)
        if self.open:
            self.to_device(message)

    def cut(self, device_notice_s: float, verifier_notice_s: float, why: str = "link cut") -> None:
        """Break the link now: messages in transit are lost, and each end notices after its own
        delay."""
        if self.open:
            self.open = False
            self._queue.after(verifier_notice_s, lambda: self.lost_at_verifier())
            self._queue.after(device_notice_s, lambda: self.lost_at_device(why))

    def close_from_device(self) -> None:
        """Close the stream from the device. Messages sent before still arrive, then the verifier's
        end closes."""
        self.to_device = lambda message: None
        self.lost_at_device = lambda why: None
        self._up.send(0, lambda: self._end(self.lost_at_verifier))

    def close_from_verifier(self) -> None:
        """Close the stream from the verifier. Messages sent before still arrive, then the device's
        end closes."""
        self.to_verifier = lambda message: None
        self.lost_at_verifier = lambda: None
        why = "the verifier closed the stream"
        self._down.send(0, lambda: self._end(lambda: self.lost_at_device(why)))

    def _end(self, notify: Callable[[], None]) -> None:
        if self.open:
            self.open = False
            notify()


StepTime = Callable[[int, int], float]
"""Returns the seconds of a draft step from the cached tokens it keeps and the tokens it feeds."""


@dataclass(slots=True)
class Delivery:
    """The output as the user of the device saw it."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[ev.TokenKind] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    ended: ev.Finish | ev.Fail | None = None


class SimulatedDevice:
    """Interprets a ``DraftSession``'s actions on an event queue.

    ``connect`` returns a new stream and the seconds after which it is usable, or None if the
    verifier cannot be reached. ``step_s`` gives the duration of each draft step. ``on_end`` is
    called when the session has ended. Nothing else may use ``drafter`` during the session."""

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
        """Seconds of draft steps."""
        self._tracer, self._on_end = tracer, on_end
        self._tick_at_s = math.inf
        self._queue, self._drafter, self._step_s, self._connect = queue, drafter, step_s, connect
        request = session.request
        drafter.begin(len(request.prompt), request.sampling)

    def start(self) -> None:
        self.handle(ev.Start())

    def handle(self, event: ev.DraftEvent) -> None:
        """Pass an event to the session, and carry out its actions."""
        actions = self.session.handle(event, self._queue.now)
        if self._tracer is not None:
            self._trace(self._tracer, event, actions)
        for action in actions:
            self._perform(action)
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        deadline = self.session.link.deadline
        if deadline is not None and deadline < self._tick_at_s:
            self._tick_at_s = max(deadline, self._queue.now)
            self._queue.at(self._tick_at_s, self._tick)

    def _tick(self) -> None:
        self._tick_at_s = math.inf
        deadline = self.session.link.deadline
        if deadline is not None and deadline <= self._queue.now:
            self.handle(ev.Tick())
        else:
            self._schedule_tick()

    def _trace(
        self, tracer: Tracer, event: ev.DraftEvent, actions: tuple[ev.DraftAction, ...]
    ) -> None:
        now, key = self._queue.now, self.session.request.session_id
        tracer.record(now, "device", key, "event", event)
        for action in actions:
            tracer.record(now, "device", key, "action", action)
            if isinstance(action, ev.Finish | ev.Fail):
                tracer.record(now, "device", key, "event", self.session.counters)

    def _perform(self, action: ev.DraftAction) -> None:
        match action:  # Class patterns with fields would take three times as long.
            case ev.Transmit():
                if self.stream is not None:
                    self.stream.send_up(action.message)
            case ev.StartStep():
                keep, feed, places = action.keep_length, action.feed, action.places
                if places == 1:
                    done = ev.StepDone(self._drafter.step(keep, feed, action.width))
                else:
                    found = draft_places(self._drafter, keep, feed, action.width, places)
                    done = ev.StepDone(found[0] if found else (), found[1:])
                step_s = self._step_s(keep, len(feed) + places - 1)
                self.drafting_s += step_s
                self._queue.after(step_s, lambda: self.handle(done))
            case ev.Deliver():
                delivery, tokens = self.delivery, action.tokens
                assert action.position == len(self.session.request.prompt) + len(delivery.tokens)
                delivery.tokens += tokens
                delivery.kinds += action.kinds
                delivery.times_s += [self._queue.now] * len(tokens)
            case ev.Connect():
                self._open_stream()
            case ev.Disconnect():
                if self.stream is not None:
                    self.stream.close_from_device()
                    self.stream = None
            case ev.Finish() | ev.Fail():
                self.delivery.ended = action
                self._on_end()
            case _:
                assert_never(action)

    def _open_stream(self) -> None:
        opened = self._connect()
        if opened is None:
            self._queue.after(0.0, lambda: self.handle(ev.LinkDown("no verifier there")))
            return
        stream, setup_s = opened

        def lost(why: str) -> None:
            if self.stream is stream:
                self.stream = None
                self.handle(ev.LinkDown(why))

        self.stream = stream
        stream.to_device = self.handle
        stream.lost_at_device = lost

        def ready() -> None:
            if self.stream is stream:
                self.handle(ev.Connected(stream.verifier))

        self._queue.after(setup_s, ready)


_LOG = logging.getLogger(__name__)


class Compute(Protocol):
    """The machine that runs passes and draft steps."""

    def run(self, requests: tuple[PassRequest, ...], done: Callable[[], None]) -> None:
        """Start a pass over these requests, and call ``done`` at its end."""

    def draft(self, keys: Sequence[str], seconds: float, done: Callable[[], None]) -> None:
        """Start draft steps of ``seconds`` in all for these sessions, and call ``done`` at their
        end."""


class DraftedSequence:
    """One session's cache in a verifier's own draft model.

    A device's drafter always proposes candidates for what it is fed. So tokens that are fed without
    a request for candidates (a part of a prompt) wait in ``_unfed`` for the next step that requests
    some."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._cached = 0
        """Leading tokens in the drafter's cache."""
        self._unfed: list[int] = []
        """Tokens behind them."""

    @property
    def length(self) -> int:
        """Tokens that the session's cache counts as fed."""
        return self._cached + len(self._unfed)

    def step(self, step: DraftStep) -> tuple[Candidate, ...]:
        """Take a step, as ``ServerDrafter.step`` for one session."""
        self.truncate(step.keep_length)
        self._unfed += step.feed
        if not step.guess:
            return ()
        guesses = self._drafter.step(self._cached, self._unfed, CHOICES)
        self._cached, self._unfed = self.length, []
        return guesses

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens only."""
        self._cached = min(self._cached, length)
        del self._unfed[length - self._cached :]


class ServerDraftModel:
    """A verifier's own draft model with a cache for each session. It implements ``ServerDrafter``
    with any drafter of a device. ``step_s`` returns the seconds of a step from its rows."""

    def __init__(self, make: Callable[[], Drafter], step_s: Callable[[int], float]) -> None:
        self._make, self.step_s = make, step_s
        self._sequences: dict[str, DraftedSequence] = {}

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        drafter = self._make()
        drafter.begin(prompt_length, sampling)
        self._sequences[key] = DraftedSequence(drafter)

    def step(self, batch: Sequence[DraftStep]) -> list[tuple[Candidate, ...]]:
        return [self._step_one(step) for step in batch]

    def close(self, key: str) -> None:
        self._sequences.pop(key, None)

    def _step_one(self, step: DraftStep) -> tuple[Candidate, ...]:
        sequence = self._sequences.get(step.key)
        if sequence is None or step.keep_length > sequence.length:
            return ()
        return sequence.step(step)


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
        drafter: ServerDraftModel | None = None,
    ) -> None:
        """``drafter`` is the verifier's own draft model, to be given if ``EngineLimits.drafter`` is
        True."""
        self.engine, self.name = engine, name
        self._drafter = drafter
        self._queue, self._target, self._compute = queue, target, compute
        self._tracer = tracer
        self._streams: dict[int, Stream] = {}
        self._count = 0
        self._poll_at_s = math.inf
        self._stopped = False
        self._failed: set[str] = set()
        """Keys of sequences that are left out of the next pass."""
        self.gave_up: str | None = None
        """The reason why the engine ended everything, if it has."""

    @property
    def stream_count(self) -> int:
        """Number of streams that neither end has closed or lost."""
        return len(self._streams)

    def accept(self, stream: Stream, credential: Credential = ANYBODY) -> None:
        """Serve a stream, whose first message will be an ``Open``."""
        self._count += 1
        number = self._count
        self._streams[number] = stream

        def receive(message: m.Uplink) -> None:
            if isinstance(message, m.Open):
                self._handle(ee.StreamOpened(number, message, credential=credential))
            else:
                self._handle(ee.StreamMessage(number, message))

        def lose() -> None:
            self._handle(ee.StreamLost(number))
            self._streams.pop(number, None)

        stream.to_verifier = receive
        stream.lost_at_verifier = lose

    def stop(self, device_notice_s: float = 0.0) -> None:
        """End the process: every stream breaks, and nothing more is committed."""
        for stream in tuple(self._streams.values()):
            stream.cut(device_notice_s, 0.0, "the verifier is gone")
        self.halt()

    def halt(self) -> None:
        """End the process without breaking its streams, which the caller does."""
        self._streams.clear()
        self._stopped = True

    def _handle(self, event: ee.EngineEvent) -> None:
        if self._stopped:
            return
        actions = self.engine.handle(event, self._queue.now)
        if self._tracer is not None:
            self._trace(self._tracer, event, actions)
        for action in actions:
            self._perform(action)
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
            self._handle(ee.Poll())
        else:
            self._schedule_poll()

    def _trace(
        self, tracer: Tracer, event: ee.EngineEvent, actions: tuple[ee.EngineAction, ...]
    ) -> None:
        tracer.record(self._queue.now, "verifier", self.name, "event", event)
        for action in actions:
            tracer.record(self._queue.now, "verifier", self.name, "action", action)

    def _perform(self, action: ee.EngineAction) -> None:
        match action:  # Most cases have no field patterns, as in ``SimulatedDevice._perform``.
            case ee.SendTo():
                self._streams[action.stream].send_down(action.message)
            case ee.KeepNodes():
                key, nodes = action.key, action.nodes
                self._attempt(key, lambda: self._target.keep(key, nodes))
            case ee.CloseStream(number):
                self._streams.pop(number).close_from_verifier()
            case ee.ReadPictureData():
                raise AssertionError("no simulated prompt has pictures")
            case ee.OpenSequence(key, prompt_length, sampling, text):
                self._failed.discard(key)
                self._attempt(key, lambda: self._target.open(key, prompt_length, sampling, text))
                if self._drafter is not None:
                    self._drafter.open(key, prompt_length, sampling, text)
            case ee.CloseSequence(key):
                self._attempt(key, lambda: self._target.close(key))
                if self._drafter is not None:
                    self._drafter.close(key)
            case ee.RunBatch(requests):
                self._run(requests)
            case ee.RunDrafts():
                self._draft(action)
            case ee.RunProbe(request):
                self._probe(request)
            case ee.ReportFailure(key, details, _):
                _LOG.warning("%s: session %s failed: %s", self.name, key, details)
            case ee.ReportDraftsOff(why):
                _LOG.warning("%s: the verifier's own drafts are off: %s", self.name, why)
                self._drafter = None
            case ee.ReportDraftsRest(why):
                _LOG.info("%s: the verifier's own drafts: %s", self.name, why)
            case ee.GiveUp(why):
                _LOG.error("%s: %s", self.name, why)
                self.gave_up = why
            case _:
                assert_never(action)

    def _attempt(self, key: str, work: Callable[[], None]) -> None:
        """Do work on a sequence. A failure is reported to the engine, and the sequence misses the
        next pass."""
        try:
            work()
        except Exception as error:
            failed = ee.SequenceFailed(key, str(error), full=isinstance(error, CapacityError))
            self._failed.add(key)
            self._queue.after(0.0, lambda: self._handle(failed))

    def _run(self, requests: tuple[PassRequest, ...]) -> None:
        failed, self._failed = self._failed, set()
        outcome: ee.BatchDone | ee.BatchFailed
        try:
            batch = requests
            if failed:
                batch = tuple(request for request in requests if request.key not in failed)
            outcome = ee.BatchDone(tuple(self._target.forward(batch)))
        except CapacityError as error:
            outcome = ee.BatchFailed(str(error), full=True)
        except Exception as error:
            if isinstance(error, AssertionError):
                raise
            outcome = ee.BatchFailed(f"{type(error).__name__}: {error}")
        self._compute.run(requests, lambda: self._handle(outcome))

    def _draft(self, action: ee.RunDrafts) -> None:
        drafter, drafting, round_s = self._drafter, DraftRound(action), 0.0
        assert drafter is not None
        outcome: ee.DraftsDone | ee.DraftsFailed
        try:
            while batch := drafting.next_step():
                guesses = drafter.step(batch)
                step_s = drafter.step_s(sum(len(step.feed) for step in batch))
                drafting.record_step(guesses, step_s)
                round_s += step_s
            outcome = drafting.result()
        except Exception as error:
            if isinstance(error, AssertionError):
                raise
            outcome = ee.DraftsFailed(f"{type(error).__name__}: {error}")
        keys = [start.step.key for start in action.starts]
        self._compute.draft(keys, round_s, lambda: self._handle(outcome))

    def _probe(self, request: PassRequest) -> None:
        why: str | None = None
        try:
            self._target.open(request.key, 1, SamplingParams())
            self._target.forward((request,))
            self._target.close(request.key)
        except Exception as error:
            why = str(error)
        self._queue.after(0.0, lambda: self._handle(ee.ProbeDone(why)))
