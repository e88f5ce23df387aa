"""The verifier on asyncio: it carries out the engine's actions for streams and the target.

This file decides nothing. Every stimulus becomes an engine event. Every action that the engine
returns is carried out here, in order: messages go to the streams' send queues, sequence work and
passes to the target's thread. An exception from a model goes to the engine as an event, which
decides what it ends. An exception from the engine itself, or a broken target, ends this verifier:
every stream is closed with a fault that lets its device come back, and ``broken`` is set, so that
the process can end with a failure and be restarted.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, assert_never

from edgespec.core import ports
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.checks import make_one_line
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.draft_round import DraftRound
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.models.grammar import ReadConstraint
from edgespec.telemetry.logs import log_failure, new_request_id, request_id
from edgespec.telemetry.trace import Tracer
from edgespec.telemetry.verifier_counts import StreamMeter
from edgespec.verifier.constraint_reader import ConstraintReader


class SendQueue:
    """Send queue of one stream: at most ``limit`` messages, one reader, and an end.

    ``put`` and ``end`` never wait. An ``asyncio.Queue`` would take three times as long at every
    commit.
    """

    __slots__ = ("_ended", "_limit", "_messages", "_reader")

    def __init__(self, limit: int) -> None:
        self._messages: deque[m.Downlink] = deque()
        self._limit, self._ended = limit, False
        self._reader: asyncio.Future[None] | None = None

    @property
    def is_empty(self) -> bool:
        return not self._messages

    @property
    def is_idle(self) -> bool:
        """True if the reader waits, so that no message is being sent."""
        return self._reader is not None and not self._messages and not self._reader.done()

    def put(self, message: m.Downlink) -> bool:
        """Append a message; return False, and change nothing, if the queue is full or has ended."""
        if self._ended or len(self._messages) >= self._limit:
            return False
        self._messages.append(message)
        self._wake()
        return True

    def end(self) -> None:
        """End the queue after the messages that are in it."""
        self._ended = True
        self._wake()

    async def get(self) -> m.Downlink | None:
        """Return the next message, or None after the last. One reader at a time; it may be
        cancelled."""
        while not self._messages:
            if self._ended:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._messages.popleft()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
SequenceWork = ee.OpenSequence | ee.CloseSequence | ee.KeepNodes


class TargetWorker:
    """Runs the target, and the server model, in a thread of their own.

    Sequence work is queued and carried out just before the next pass, so that it takes one hop to
    the thread. An exception from it is reported to ``failed`` on the event loop, and its session
    misses that pass.
    """

    def __init__(
        self,
        target: ports.TargetModel,
        failed: Callable[[ee.SequenceFailed], None],
        drafter: ports.ServerDrafter | None = None,
    ) -> None:
        self._target, self._failed, self._drafter = target, failed, drafter
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgespec-target")
        self._picture_thread = ThreadPoolExecutor(1, thread_name_prefix="edgespec-pictures")
        self.queued: list[SequenceWork] = []
        """Sequence work that the next ``submit`` begins with."""
        self._draft_steps = 0
        """Tokens that the target's own speculator proposes behind each pass."""
        self._draft_error: Exception | None = None
        """The drafter's exception between rounds; the next round raises it."""
        self._last: asyncio.Future[Any] | None = None
        """The work that was given to the thread last; when it has ended, so has all earlier
        work."""

    def submit(
        self, requests: tuple[PassRequest, ...], draft_steps: int = 0
    ) -> asyncio.Future[ee.BatchDone]:
        """Carry out the queued sequence work, then one pass of ``requests``, if there are any.

        Work that is queued later waits for the next call. The future has the results in the order
        of the requests.
        """
        loop = asyncio.get_running_loop()
        queued, self.queued = self.queued, []

        def work() -> ee.BatchDone:
            missing: set[str] = set()
            for item in queued:
                failure = self._carry_out(item)
                self._update_drafter(item)
                if isinstance(item, ee.OpenSequence):
                    missing.discard(item.key)
                if failure is not None:
                    missing.add(item.key)
                    loop.call_soon_threadsafe(self._failed, failure)
            batch = [request for request in requests if request.key not in missing]
            if draft_steps != self._draft_steps:
                self._target.set_draft_steps(draft_steps)
                self._draft_steps = draft_steps
            began_s = time.perf_counter()
            results = tuple(self._target.forward(batch)) if batch else ()
            return ee.BatchDone(results, time.perf_counter() - began_s)

        return self._submit(work)

    def draft(self, action: ee.RunDrafts) -> asyncio.Future[ee.DraftsDone]:
        """Run a round of the server model; every session in it has had a pass."""
        drafter = self._drafter
        assert drafter is not None

        def work() -> ee.DraftsDone:
            if self._draft_error is not None:
                raise self._draft_error
            drafting = DraftRound(action)
            while batch := drafting.next_step():
                began_s = time.perf_counter()
                guesses = drafter.step(batch)
                drafting.record_step(guesses, time.perf_counter() - began_s)
            return drafting.result()

        return self._submit(work)

    def drop_drafter(self) -> None:
        """Free the memory of the draft model; no round may follow."""
        self._drafter = self._draft_error = None

    def probe(self, request: PassRequest) -> asyncio.Future[None]:
        """Open a sequence, run this one request and close it; the future has the exception, if
        any."""

        def work() -> None:
            self._target.open(request.key, 1, SamplingParams())
            try:
                self._target.forward([request])
            finally:
                self._target.close(request.key)

        return self._submit(work)

    def read_pictures(self, action: ee.ReadPictureData) -> asyncio.Future[ports.ReadPictures]:
        """Let the target read pictures, in a thread of its own beside the passes."""
        read = partial(self._target.read_pictures, action.prompt, action.data, action.positions)
        return asyncio.get_running_loop().run_in_executor(self._picture_thread, read)

    def _submit(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        self._last = done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        return done

    def _carry_out(self, item: SequenceWork) -> ee.SequenceFailed | None:
        try:
            match item:
                case ee.OpenSequence(key, prompt_length, sampling, text, adapter, pictures):
                    self._target.open(key, prompt_length, sampling, text)
                    if adapter:
                        self._target.use_adapter(key, adapter)
                    if pictures is not None:
                        self._target.use_pictures(key, pictures)
                case ee.KeepNodes(key, nodes):
                    self._target.keep(key, nodes)
                case ee.CloseSequence(key):
                    self._target.close(key)
        except ports.TargetLostError:
            raise  # A lost target ends the whole verifier, not one session.
        except ports.CapacityError as error:
            return ee.SequenceFailed(item.key, str(error), full=True)
        except Exception as error:  # any exception of a model ends one session, not the daemon
            what, name = "%s of a session failed", type(item).__name__
            log_failure(_LOG, what, name, error=error, may_quote_client=True)
            return ee.SequenceFailed(item.key, f"{name} failed: {type(error).__name__}")
        return None

    def _update_drafter(self, item: SequenceWork) -> None:
        """Open or close the sequence in the drafter. An exception ends no session, since sessions
        can go on without the drafter."""
        drafter = self._drafter  # bound here, since the event loop may drop it meanwhile
        if drafter is None or self._draft_error is not None:
            return
        try:
            if isinstance(item, ee.OpenSequence):
                drafter.open(item.key, item.prompt_length, item.sampling, item.text)
            elif isinstance(item, ee.CloseSequence):
                drafter.close(item.key)
        except Exception as error:
            self._draft_error = error

    async def close(self, within_s: float) -> bool:
        """Take no more work and wait for the work that was submitted; return whether it ended in
        time.

        If not, the thread is left behind, and the interpreter would wait for it at its own end.
        """
        if self._last is not None:
            await asyncio.wait([self._last], timeout=within_s)
        has_ended = self._last is None or self._last.done()
        self._thread.shutdown(wait=has_ended, cancel_futures=True)
        self._picture_thread.shutdown(wait=False, cancel_futures=True)
        return has_ended


# --- the verifier ------------------------------------------------------------------------------

# Longest send queue of a stream. Flow control keeps it below ``max_unreceived`` commits; a longer
# queue means a broken peer.
_MAX_QUEUED_MESSAGES = 4096
_OPEN_WITHIN_S = 10.0

# Seconds for a slow device to read its last message before the stream is cut.
_LAST_WORDS_S = 1.0
# Seconds to wait for the running pass when the verifier stops.
_LAST_PASS_S = 30.0
_TARGET_ACTIONS = frozenset(
    (ee.OpenSequence, ee.CloseSequence, ee.KeepNodes, ee.RunBatch, ee.RunDrafts, ee.RunProbe)
)

_RESTART_FAULT = m.Fault(
    m.FaultCode.SHUTTING_DOWN, "the verifier failed and restarts", retry_after_s=1.0
)
_STOP_FAULT = m.Fault(
    m.FaultCode.SHUTTING_DOWN, "the verifier is stopping; resume elsewhere", retry_after_s=1.0
)

_REVOKED_FAULT = m.Fault(
    m.FaultCode.UNAUTHENTICATED, "the key of this device (EDGESPEC_API_KEY) was revoked"
)


class Verifier:
    """Serves one target model; a server transport calls ``serve`` for each stream."""

    def __init__(
        self,
        target: ports.TargetModel,
        limits: m.Limits,
        engine_limits: ee.EngineLimits | None = None,
        *,
        tracer: Tracer | None = None,
        telemetry: StreamMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
        read_constraint: ReadConstraint | None = None,
        drafter: ports.ServerDrafter | None = None,
    ) -> None:
        """Create the engine and the worker. ``engine_limits.drafter`` must be True if ``drafter``
        is given."""
        self._constraints = ConstraintReader(read_constraint, target.info.eos_token_ids)
        # The announced context is the one that is served: a small cache shortens a model's context.
        most = limits.context_length
        model, *adapters = (
            replace(one, context_length=min(one.context_length, most))
            for one in (target.info, *target.adapters)
        )
        self._model, self._adapters = model, tuple(adapters)
        self.engine = VerifyEngine(
            model, limits, engine_limits or ee.EngineLimits(), adapters=adapters
        )
        self.broken = asyncio.Event()
        """Set when this verifier has failed as a whole; ``why_broken`` has the reason."""
        self.why_broken: str | None = None
        """The reason of the failure; also set if the target does not end its work when the verifier
        stops."""
        self._target, self._clock = target, clock
        self._tracer = tracer
        self._telemetry = telemetry
        self._worker = TargetWorker(target, self._handle, drafter)
        self._streams: dict[int, ports.VerifierStream] = {}
        self._send_queues: dict[int, SendQueue] = {}
        self._senders: dict[int, Callable[[m.Downlink], bool]] = {}
        """The ``send_now`` of each stream that can send without waiting
        (``VerifierStream.send_now``)."""
        self._blocked: set[int] = set()
        """Streams with a message in their send queue; ``_reported_blocked`` holds those reported to
        the engine."""
        self._reported_blocked: set[int] = set()
        self._requests: dict[int, str] = {}
        """The request ids that identify streams in the log."""
        self._context = contextvars.copy_context()
        """Context of work that belongs to no stream, so that log lines carry no request id."""
        self._stream_count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def cache_share(self) -> float:
        """Share of the KV cache in use, if the target assigns its blocks itself, else 0."""
        return self._target.cache_share

    @property
    def info(self) -> m.VerifierInfo:
        engine = self.engine
        bound = engine.engine_limits.max_sessions
        pass_us = round((engine.pass_s or 0.0) * 1e6)
        held, drafts = len(engine.sessions), engine.draft_counts.totals
        return m.VerifierInfo(
            model=self._model,
            limits=engine.limits,
            sessions=held,
            max_sessions=bound,
            pass_us=pass_us,
            adapters=self._adapters,
            drafts=drafts,
        )

    def warm_up(self) -> None:
        """Load what the first constraint would otherwise wait for. Call this before there are
        streams, and in a thread, since it blocks."""
        self._constraints.warm_up()

    # --- streams ---------------------------------------------------------------------------

    async def serve(self, stream: ports.VerifierStream) -> None:
        """Run one stream to its end; never raises for anything that a peer does."""
        self._stream_count += 1
        number = self._stream_count
        send_queue = SendQueue(_MAX_QUEUED_MESSAGES)
        self._streams[number], self._send_queues[number] = stream, send_queue
        self._senders[number] = stream.send_now
        self._requests[number] = new_request_id()
        request_id.set(self._requests[number])
        reader = asyncio.create_task(self._read(number, stream))
        try:
            while (message := await send_queue.get()) is not None:
                await stream.send(message)
                if send_queue.is_empty and self._clear_blocked(number):
                    self._handle(ee.StreamCaughtUp(number))
        except ports.LinkError as error:
            _LOG.info("stream %d: %s", number, error)
        finally:
            reader.cancel()
            self._streams.pop(number, None)
            self._send_queues.pop(number, None)
            self._senders.pop(number, None)
            self._requests.pop(number, None)
            self._clear_blocked(number)
            self._handle(ee.StreamLost(number))
            if self._telemetry is not None:
                self._telemetry.end_stream(number, self._clock())
            await stream.close()

    def _clear_blocked(self, number: int) -> bool:
        """Note that the send queue of a stream is empty, or the stream gone; return whether the
        engine was informed that it was blocked."""
        was_reported = number in self._reported_blocked
        self._reported_blocked.discard(number)
        self._blocked.discard(number)
        return was_reported

    async def _read(self, number: int, stream: ports.VerifierStream) -> None:
        try:
            # In Python 3.11 ``wait_for`` might return an Open for a stream that is gone, so it is
            # not used.
            async with asyncio.timeout(_OPEN_WITHIN_S):
                first = await stream.receive()
            if not isinstance(first, m.Open):
                self._refuse(number, f"the first message is {type(first).__name__}, not Open")
                return
            opening = await self._constraints.read_constraint(first, stream.peer, stream.credential)
            if self._stopping or isinstance(opening, m.Fault):
                self._send(number, opening if isinstance(opening, m.Fault) else _STOP_FAULT)
                self._close(number)
                return
            self._handle(ee.StreamOpened(number, opening, stream.peer, stream.credential))
            await stream.feed(partial(self._receive, number))
        except TimeoutError:
            self._refuse(number, f"no Open within {_OPEN_WITHIN_S} s")
        except ports.LinkError as error:
            _LOG.debug("stream %d ended: %s", number, error)
            self._close(number)
        # A failure of one stream must be reported, and must not end another.
        except Exception as error:
            what = "stream %d: reading failed"
            log_failure(_LOG, what, number, error=error, may_quote_client=True)
            why = f"the verifier failed while it read the stream: {type(error).__name__}"
            self._send(number, m.Fault(m.FaultCode.INTERNAL, why, 1.0))
            self._close(number)

    def _receive(self, number: int, message: m.Uplink) -> None:
        if isinstance(message, m.Open):
            self._refuse(number, "a second Open on one stream")
        else:
            self._handle(ee.StreamMessage(number, message))

    def _refuse(self, number: int, why: str) -> None:
        self._send(number, m.Fault(m.FaultCode.INVALID, why))
        self._close(number)

    def _send(self, number: int, message: m.Downlink) -> None:
        send_queue = self._send_queues.get(number)
        if send_queue is None:
            return
        if isinstance(message, m.Fault):
            message = self._fault_to_send(number, message)
        elif send_queue.is_idle and self._try_send_now(number, message):
            return
        if send_queue.put(message):
            self._blocked.add(number)
        else:
            _LOG.warning("stream %d: %d messages unread, closing it", number, _MAX_QUEUED_MESSAGES)
            self._close(number)

    def _try_send_now(self, number: int, message: m.Downlink) -> bool:
        """Send a message without waiting, if possible; return whether it was sent.

        An exception closes this stream alone, since the caller is the engine's step, on which all
        streams depend.
        """
        try:
            return self._senders[number](message)
        except Exception as error:
            what = "stream %d: sending failed, closing it"
            log_failure(_LOG, what, number, error=error, may_quote_client=True)
            self._close(number)
            return True

    def _fault_to_send(self, number: int, fault: m.Fault) -> m.Fault:
        """Return the fault to send. A failure of the verifier itself gets the request id, under
        which the log has the details."""
        if self._telemetry is not None:
            self._telemetry.record_fault(number, fault)
        if fault.code is not m.FaultCode.INTERNAL:
            return fault
        request = self._requests[number]
        _LOG.warning("ended by a failure: %s", fault.message, extra={"request_id": request})
        return replace(fault, message=f"{fault.message} (request {request})")

    def _close(self, number: int) -> None:
        """Close the stream after its messages were sent; after ``_LAST_WORDS_S`` even if its device
        reads nothing."""
        send_queue = self._send_queues.pop(number, None)
        if send_queue is None:
            return
        send_queue.end()
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._cut, number)

    def _cut(self, number: int) -> None:
        if (stream := self._streams.get(number)) is not None:
            task = asyncio.ensure_future(stream.close())
            self._closing_tasks.add(task)
            task.add_done_callback(self._closing_tasks.discard)

    # --- the engine ------------------------------------------------------------------------

    def _handle(self, event: ee.EngineEvent) -> None:
        if self._stopping:
            return
        try:
            self._step(event)
        except Exception as error:
            what, name = "the engine failed at %s", type(event).__name__
            log_failure(_LOG, what, name, error=error, may_quote_client=True)
            self.fail(f"the engine failed at {name}: {type(error).__name__}")

    def _step(self, event: ee.EngineEvent) -> None:
        now, tracer = self._clock(), self._tracer
        if tracer is not None:
            tracer.record(now, "verifier", "", "event", event)
        actions = self.engine.handle(event, now)
        if tracer is not None:
            for action in actions:
                tracer.record(now, "verifier", "", "action", action)
        # The target idles until its work is submitted, so that comes first; all else can wait.
        rest: list[ee.EngineAction] = []
        for action in actions:
            if type(action) in _TARGET_ACTIONS:
                self._carry_out(action)
            else:
                rest.append(action)
        if self._telemetry is not None:
            self._telemetry.observe(event, actions, now)
        for action in rest:
            self._carry_out(action)
        if self._worker.queued and not self.engine.running:
            self._when_done(self._worker.submit(()), self._on_work_done)
        self._set_timer()

    def _carry_out(self, action: ee.EngineAction) -> None:
        match action:
            case ee.SendTo():  # Nearly always; matching on its fields would take twice as long.
                self._send(action.stream, action.message)
            case ee.CloseStream(number):
                self._close(number)
            case ee.OpenSequence() | ee.CloseSequence() | ee.KeepNodes():
                self._worker.queued.append(action)
            case ee.RunBatch(requests, draft_steps):
                self._when_done(self._worker.submit(requests, draft_steps), self._on_pass_done)
            case ee.RunDrafts():
                self._when_done(self._worker.draft(action), self._on_drafts_done)
            case ee.RunProbe(request):
                self._when_done(self._worker.probe(request), self._on_probe_done)
            case ee.ReadPictureData():
                on_read = partial(self._on_pictures_read, action.stream)
                self._when_done(self._worker.read_pictures(action), on_read)
            case ee.ReportFailure(_, details, stream):
                whose = {"request_id": self._requests.get(stream or 0, "-")}
                _LOG.error("a session failed and was ended:\n%s", details, extra=whose)
            case ee.ReportDraftsOff(why):
                _LOG.error("the server model failed and drafts no more: %s", why)
                self._worker.drop_drafter()
            case ee.ReportDraftsRest(why):
                _LOG.warning("server model: %s", why)
            case ee.GiveUp(why):
                self.fail(why)
            case _:
                assert_never(action)

    def _when_done(
        self, work: asyncio.Future[_T], on_done: Callable[[asyncio.Future[_T]], None]
    ) -> None:
        """Call ``on_done`` when the target's work has ended, in a context that belongs to no
        stream."""
        work.add_done_callback(
            lambda done: None if done.cancelled() else on_done(done), context=self._context
        )

    def _on_drafts_done(self, done: asyncio.Future[ee.DraftsDone]) -> None:
        if (error := done.exception()) is None:
            self._handle(done.result())
        else:
            # The target and the drafter receive token ids only, so their errors quote no text.
            what = "the verifier's draft model failed"
            log_failure(_LOG, what, error=error, may_quote_client=False)
            self._handle(ee.DraftsFailed(f"{type(error).__name__}: {error}"))

    def _on_pass_done(self, done: asyncio.Future[ee.BatchDone]) -> None:
        if (error := done.exception()) is None:
            self._reported_blocked |= self._blocked
            self._handle(replace(done.result(), behind=tuple(self._blocked)))
        elif isinstance(error, ports.CapacityError):
            self._handle(ee.BatchFailed(str(error), full=True))
        elif isinstance(error, ports.TargetLostError):
            self.fail(str(error))
        elif isinstance(error, ports.ModelOutputError) and error.requested:
            self._handle(ee.BatchFailed(str(error), culprit=error.key, requested=True))
        else:
            log_failure(_LOG, "a pass failed", error=error, may_quote_client=False)
            culprit = error.key if isinstance(error, ports.ModelOutputError) else ""
            self._handle(ee.BatchFailed(f"{type(error).__name__}: {error}", culprit=culprit))

    def _on_work_done(self, done: asyncio.Future[ee.BatchDone]) -> None:
        if (error := done.exception()) is not None:
            lost = isinstance(error, ports.TargetLostError)
            self.fail(str(error) if lost else f"the target's thread failed: {error}")

    def _on_pictures_read(self, number: int, done: asyncio.Future[ports.ReadPictures]) -> None:
        error = done.exception()
        if error is None:
            self._handle(ee.PicturesRead(number, done.result()))
            return
        why = f"the pictures cannot be read: {make_one_line(str(error))}"
        if not isinstance(error, ValueError):  # a library that failed on hostile bytes, perhaps
            log_failure(_LOG, "reading pictures failed", error=error, may_quote_client=True)
            why = f"the pictures cannot be read: {type(error).__name__}"
        self._handle(ee.PicturesRead(number, None, why))

    def _on_probe_done(self, done: asyncio.Future[None]) -> None:
        error = done.exception()
        self._handle(ee.ProbeDone(None if error is None else f"{type(error).__name__}: {error}"))

    def _set_timer(self) -> None:
        """Set one timer for the engine's deadline or earlier. Deadlines move at every event, mostly
        to later; a timer that fires too early sets a new one."""
        deadline = self.engine.deadline
        if deadline is None or self._stopping:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        delay_s = max(0.0, deadline - self._clock())
        self._timer = asyncio.get_running_loop().call_later(
            delay_s, self._on_timer, context=self._context
        )
        self._timer_at = deadline

    def _on_timer(self) -> None:
        self._timer = None
        deadline = self.engine.deadline
        if deadline is not None and deadline <= self._clock():
            self._handle(ee.Poll())
        else:
            self._set_timer()

    # --- stopping --------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """End this verifier as a whole: close every stream with a fault and set ``broken``."""
        if not self.broken.is_set():
            _LOG.critical("the verifier failed: %s", why)
            self.why_broken = why
            self.broken.set()
            self._end_streams(_RESTART_FAULT)

    def _end_streams(self, fault: m.Fault) -> None:
        self._stopping = True
        for number in list(self._send_queues):
            self._send(number, fault)
            self._close(number)
        if self._timer is not None:
            self._timer.cancel()

    def revoke(self, names: Collection[str]) -> int:
        """End the streams and generations of these credentials now; return how many streams there
        were. The ids of their texts are dropped.

        A session that such a device left detached ends with its lease.
        """
        found = [n for n, one in self._streams.items() if one.credential.name in names]
        for number in found:
            self._send(number, _REVOKED_FAULT)
            self._close(number)
            if self._telemetry is not None:  # it did not end because its device cancelled
                self._telemetry.end_stream(number, self._clock())
            self._handle(ee.StreamMessage(number, m.Cancel()))
        for name in names:
            self.engine.registry.forget_texts(name)
        return len(found)

    async def stop(self) -> None:
        """End all streams with a fault that lets devices come back later, and let the target finish
        its work.

        After ``_LAST_PASS_S`` the target's thread is left behind, which counts as a failure
        (``why_broken``).
        """
        self._end_streams(_STOP_FAULT)
        self._constraints.close()
        if not await self._worker.close(_LAST_PASS_S):
            why = f"the target is still at work after {_LAST_PASS_S:g} s"
            _LOG.error("%s: leaving it", why)
            self.why_broken = self.why_broken or why
