"""All sessions of one verifier and the packed passes they share, as a pure machine.

Theory of operation. Streams come and go; a stream that opens with a session id attaches to that
session, new or resumed, and replaces the stream that had it. One pass runs at a time; the
scheduler forms the next one whenever none does. A pass that fails is tried again session by session
and ends only what fails alone.

Law of the file: the engine routes and schedules; what is committed is the sessions' business.
``deadline`` is when ``Poll`` is worth sending if nothing else happens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import assert_never

from edgespec.core import verify_events as ev
from edgespec.core.acceptance import AcceptanceRule, ExactRule
from edgespec.core.admission import refuse_open
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
from edgespec.core.messages import EXACT_RULE, Fault, FaultCode, Limits, Open, RunAhead
from edgespec.core.pass_scheduler import PassScheduler
from edgespec.core.run_ahead import RunAheadPolicy, run_ahead_policy
from edgespec.core.verify_session import VerifySession
from edgespec.core.work import ModelInfo, PassResult


class VerifyEngine:
    def __init__(
        self,
        model: ModelInfo,
        limits: Limits,
        engine_limits: EngineLimits,
        rules: dict[str, AcceptanceRule] | None = None,
        run_ahead: Callable[[RunAhead], RunAheadPolicy] = run_ahead_policy,
    ) -> None:
        self.model, self.limits, self.engine_limits = model, limits, engine_limits
        self.sessions: dict[str, VerifySession] = {}
        self._run_ahead = run_ahead
        self._rules = rules or {EXACT_RULE: ExactRule()}
        self._stream_of: dict[str, int] = {}
        self._key_of: dict[int, str] = {}
        self._cached: set[str] = set()
        """Sessions for which the target holds a sequence."""
        self._scheduler = PassScheduler(engine_limits)
        self._deadlines: list[tuple[float, str]] = []

    @property
    def deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def running(self) -> bool:
        return self._scheduler.running is not None

    @property
    def passes(self) -> int:
        return self._scheduler.passes

    @property
    def pass_s(self) -> float | None:
        return self._scheduler.pass_s

    def handle(self, event: EngineEvent, now: float) -> tuple[EngineAction, ...]:
        actions: list[EngineAction] = []
        match event:
            case StreamMessage(stream, message):
                if (key := self._key_of.get(stream)) is not None:
                    self._tell(key, message, now, actions)
            case BatchDone(results):
                self._batch_done(results, now, actions)
            case StreamOpened(stream, request):
                self._open(stream, request, now, actions)
            case StreamLost(stream):
                if (key := self._key_of.pop(stream, None)) is not None:
                    del self._stream_of[key]
                    self._tell(key, ev.Detach(), now, actions)
            case BatchFailed():
                self._batch_failed(event, now, actions)
            case SequenceRefused(key, why):
                fault = Fault(FaultCode.OVERLOADED, why, retry_after_s=1.0)
                self._end(key, fault, actions)
            case Poll():
                pass
            case _:
                assert_never(event)
        self._wake(now, actions)
        if self._scheduler.running is None:
            self._start_batch(now, actions)
        return tuple(actions)

    # --- streams and sessions --------------------------------------------------------------

    def _open(self, stream: int, request: Open, now: float, actions: list[EngineAction]) -> None:
        fault = refuse_open(request, self.model, self.limits, frozenset(self._rules))
        key = request.session_id
        known = self.sessions.get(key)
        if (
            fault is None
            and known is None
            and len(self.sessions) >= self.engine_limits.max_sessions
        ):
            why = f"all {self.engine_limits.max_sessions} sessions are taken"
            fault = Fault(FaultCode.OVERLOADED, why, retry_after_s=1.0)
        if fault is not None:
            actions += (SendTo(stream, fault), CloseStream(stream))
            return
        if known is not None and not known.resumes(request):
            self._end(key, Fault(FaultCode.INVALID, "session id opened anew"), actions)
            known = None
        if known is None:
            self.sessions[key] = VerifySession(
                request,
                self.model,
                self.limits,
                self._rules[request.rule],
                self._run_ahead(request.run_ahead),
                now,
            )
            self._cached.add(key)
            actions.append(OpenSequence(key, len(request.prompt), request.sampling))
        elif (old := self._stream_of.pop(key, None)) is not None:
            del self._key_of[old]
            actions.append(CloseStream(old))
        self._stream_of[key], self._key_of[stream] = stream, key
        self._tell(key, ev.Attach(request), now, actions)

    def _tell(
        self, key: str, event: ev.VerifyEvent, now: float, actions: list[EngineAction]
    ) -> None:
        """Hand an event to a session and translate what it asks for."""
        session = self.sessions[key]
        for action in session.handle(event, now):
            match action:
                case ev.Send(message):
                    stream = self._stream_of.get(key)
                    if stream is not None:
                        actions.append(SendTo(stream, message))
                case ev.Keep(nodes):
                    actions.append(KeepNodes(key, nodes))
                case ev.Hangup():
                    self._drop_stream(key, actions)
                case ev.RunPass():
                    raise AssertionError("a pass only follows an offer")
                case _:
                    assert_never(action)
        self._settle(key, session, now, actions)

    def _settle(
        self, key: str, session: VerifySession, now: float, actions: list[EngineAction]
    ) -> None:
        """After an event: free what is finished, remember when to look again."""
        if session.over(now):
            self._end(key, None, actions)
            return
        if session.state is ev.FINISHED:
            self._scheduler.forget(key)
            self._free(key, actions)
        else:
            self._scheduler.enqueue(key)
        self._watch(key, session)

    def _watch(self, key: str, session: VerifySession) -> None:
        if session.deadline is not None:
            heapq.heappush(self._deadlines, (session.deadline, key))

    def _end(self, key: str, fault: Fault | None, actions: list[EngineAction]) -> None:
        """Forget a session; its stream hears ``fault`` and ends."""
        self.sessions.pop(key, None)
        self._scheduler.forget(key)
        if fault is not None and (stream := self._stream_of.get(key)) is not None:
            actions.append(SendTo(stream, fault))
        self._drop_stream(key, actions)
        self._free(key, actions)

    def _free(self, key: str, actions: list[EngineAction]) -> None:
        """The target need not hold its sequence any more."""
        if key in self._cached:
            self._cached.discard(key)
            actions.append(CloseSequence(key))

    def _drop_stream(self, key: str, actions: list[EngineAction]) -> None:
        stream = self._stream_of.pop(key, None)
        if stream is not None:
            del self._key_of[stream]
            actions.append(CloseStream(stream))

    # --- passes ----------------------------------------------------------------------------

    def _wake(self, now: float, actions: list[EngineAction]) -> None:
        """Sessions whose deadline has come might use a pass, or be over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            due, key = heapq.heappop(self._deadlines)
            session = self.sessions.get(key)
            if session is None or session.deadline != due:
                continue  # superseded
            if session.over(now):
                self._end(key, None, actions)
            elif session.attached:
                self._scheduler.enqueue(key)

    def _start_batch(self, now: float, actions: list[EngineAction]) -> None:
        requests, asked = self._scheduler.form(self.sessions, now)
        for key in asked:
            self._watch(key, self.sessions[key])
        if requests:
            actions.append(RunBatch(requests))

    def _batch_done(
        self, results: tuple[PassResult, ...], now: float, actions: list[EngineAction]
    ) -> None:
        batch, tokens = self._scheduler.finish(now), 0
        for (session, request), result in zip(batch.parts, results, strict=True):
            assert request.key == result.key
            self._scheduler.trust(request.key)
            if self.sessions.get(request.key) is session:
                before = session.prefix.length
                self._tell(request.key, ev.PassDone(result.targets), now, actions)
                tokens += session.prefix.length - before
        self._scheduler.count(tokens)

    def _batch_failed(self, failure: BatchFailed, now: float, actions: list[EngineAction]) -> None:
        batch = self._scheduler.finish(now)
        for session, request in batch.parts:
            if self.sessions.get(request.key) is not session:
                continue
            self._tell(request.key, ev.PassFailed(), now, actions)
            if len(batch.parts) > 1:
                self._scheduler.isolate(request.key)
            else:
                code = FaultCode.OVERLOADED if failure.full else FaultCode.INTERNAL
                self._end(request.key, Fault(code, failure.why, retry_after_s=1.0), actions)
