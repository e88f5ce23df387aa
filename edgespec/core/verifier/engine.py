"""All sessions of one verifier and the packed passes they share, as a pure machine.

Theory of operation. ``session_registry.py`` holds the sessions and their streams; one pass runs at
a time, and the scheduler forms the next one whenever none does. After every event the sessions it
touched are looked after: what is over is forgotten, what may use a pass stands in line. Every few
seconds a *sweep* ends the streams of devices that stopped reading, and tells those whose sessions
wait that they are alive.

Failures stay where they belong. A session whose own machine or sequence fails is ended, and its
device told to come back. A pass that fails is tried again session by session; when a session fails
alone, a *probe* (one row of a fresh sequence) finds out whether the session or the target is to
blame. A broken target ends everything (``GiveUp``), and so does a pass that does not end.

Law of the file: the engine routes and schedules; what is committed is the sessions' business.
``deadline`` is when ``Poll`` is worth sending if nothing else happens.
"""

from __future__ import annotations

import heapq
from typing import assert_never

from edgespec.core.protocol.messages import EXACT_RULE, Fault, FaultCode, Limits
from edgespec.core.protocol.work import ModelInfo, PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.acceptance import AcceptanceRule, ExactRule
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.run_ahead import run_ahead_policy
from edgespec.core.verifier.scheduler import PassScheduler
from edgespec.core.verifier.session_registry import RunAheadFactory, SessionRegistry

SWEEP_S = 2.0
_PROBE_KEY = "\0probe"  # no session has it: ids on the wire are printable
_RESTARTS = Fault(FaultCode.SHUTTING_DOWN, "the verifier failed and restarts", 1.0)


class VerifyEngine:
    """``contain`` False lets an exception of a session's machine out, for tests."""

    def __init__(
        self,
        model: ModelInfo,
        limits: Limits,
        engine_limits: ee.EngineLimits,
        rules: dict[str, AcceptanceRule] | None = None,
        run_ahead: RunAheadFactory = run_ahead_policy,
        *,
        contain: bool = True,
    ) -> None:
        cache = engine_limits.cache
        assert cache is None or cache.tokens >= limits.context_length
        self.model, self.limits, self.engine_limits = model, limits, engine_limits
        self.broken: str | None = None
        """Why this verifier serves nobody any more."""
        rules = rules or {EXACT_RULE: ExactRule()}
        self.registry = SessionRegistry(
            model, limits, engine_limits, rules, run_ahead, contain=contain
        )
        self.sessions = self.registry.sessions
        ledger = None if cache is None else BlockLedger(cache)
        self.keeper = CacheKeeper(ledger, self.sessions)
        self._scheduler = PassScheduler(engine_limits, self.keeper, self.registry.ask)
        self._deadlines: list[tuple[float, str]] = []
        self._sweep_at: float | None = None
        self._suspect: tuple[str, str, float] | None = None  # who failed alone, why, and when

    @property
    def deadline(self) -> float | None:
        if self.broken is not None:
            return None
        first = self._deadlines[0][0] if self._deadlines else None
        return min((at for at in (first, self._sweep_at) if at is not None), default=None)

    @property
    def running(self) -> bool:
        """Whether the target is at work, or about to be."""
        return self._scheduler.running is not None or self._suspect is not None

    @property
    def passes(self) -> int:
        return self._scheduler.passes

    @property
    def pass_s(self) -> float | None:
        return self._scheduler.pass_s

    def handle(self, event: ee.EngineEvent, now: float) -> tuple[ee.EngineAction, ...]:
        if self.broken is not None:
            return self._refuse(event)
        registry = self.registry
        match event:
            case ee.StreamMessage():
                registry.message(event, now)
            case ee.BatchDone():
                self._batch_done(event, now)
            case ee.StreamOpened():
                registry.open(event, now)
            case ee.StreamLost(stream):
                registry.lost(stream, now)
            case ee.BatchFailed():
                self._batch_failed(event, now)
            case ee.SequenceFailed(key, why, full):
                self._end(key, FaultCode.OVERLOADED if full else FaultCode.INTERNAL, why)
            case ee.ProbeDone(why):
                self._probe_done(why)
            case ee.Poll():
                pass
            case _:
                assert_never(event)
        self._wake(now)
        self._look_after(now)
        if not self.running and self.broken is None:
            self._start_batch(now)
            self._look_after(now)
        actions, registry.actions = tuple(registry.actions), []
        return actions

    # --- between events --------------------------------------------------------------------

    def _look_after(self, now: float) -> None:
        """Forget what is over, free what is finished, put in line what may use a pass."""
        registry = self.registry
        while registry.touched:
            keys, registry.touched = list(registry.touched), {}
            for key in keys:
                session = self.sessions.get(key)
                if session is not None and session.over(now):
                    registry.end(key, None)
                elif session is None or session.state is ev.FINISHED:
                    self._scheduler.forget(key)
                    self.keeper.release(key)
                    registry.close_sequence(key)
                else:
                    self._scheduler.enqueue(key)
                self._watch(key, now)
        if not self.sessions:
            self._sweep_at = None
        elif self._sweep_at is None:
            self._sweep_at = now + SWEEP_S

    def _watch(self, key: str, now: float) -> None:
        """Remember when to look at the session again, if it wishes so."""
        session = self.sessions.get(key)
        if session is not None and session.deadline is not None and session.deadline > now:
            heapq.heappush(self._deadlines, (session.deadline, key))

    def _wake(self, now: float) -> None:
        """Sessions whose deadline has come might use a pass, or be over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            due, key = heapq.heappop(self._deadlines)
            session = self.sessions.get(key)
            if session is not None and session.deadline == due:
                self.registry.touched.setdefault(key)
        if self._sweep_at is not None and self._sweep_at <= now:
            self._sweep_at = None
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        limits, batch, suspect = self.engine_limits, self._scheduler.running, self._suspect
        since = batch.started_at if batch is not None else now if suspect is None else suspect[2]
        if now - since >= limits.stuck_pass_s:
            return self._give_up(f"a pass has not ended for {now - since:.0f} s")
        for key, session in tuple(self.sessions.items()):
            device = session.device
            if not device.attached:
                continue
            waited_s = 0.0 if device.unread_since is None else now - device.unread_since
            if waited_s >= limits.stall_s:
                self.registry.tell(key, ev.Stalled(waited_s), now)
            elif session.finish is None and now - device.spoke_at >= limits.silence_s:
                self.registry.tell(key, ev.SayAlive(), now)

    # --- passes ----------------------------------------------------------------------------

    def _start_batch(self, now: float) -> None:
        requests, asked = self._scheduler.form(self.sessions, now)
        for key in asked:
            self._watch(key, now)
        if requests:
            self.registry.actions.append(ee.RunBatch(requests))

    def _batch_done(self, event: ee.BatchDone, now: float) -> None:
        batch, tokens = self._scheduler.finish(now), 0
        results = {result.key: result for result in event.results}
        for session, request in batch.parts:
            key, result = request.key, results.get(request.key)
            if self.sessions.get(key) is not session:
                continue
            if result is None:
                self._end(key, FaultCode.INTERNAL, "the pass was run without this session")
                continue
            self._scheduler.run_with_others(key)
            before = session.prefix.length
            self.registry.tell(key, ev.PassDone(result.targets), now)
            tokens += session.prefix.length - before
            self.keeper.trim(key, session.prefix.length)
        self._scheduler.count(tokens)

    def _batch_failed(self, failure: ee.BatchFailed, now: float) -> None:
        batch = self._scheduler.finish(now)
        for session, request in batch.parts:
            key = request.key
            if self.sessions.get(key) is not session:
                continue
            self.registry.tell(key, ev.PassFailed(), now)
            if failure.culprit == key:
                self._end(key, FaultCode.INTERNAL, failure.why)
            elif len(batch.parts) > 1:
                if not failure.culprit:
                    self._scheduler.run_alone(key)
            elif failure.full:
                self._end(key, FaultCode.OVERLOADED, failure.why)
            else:
                self._probe(key, failure.why, now)

    def _probe(self, key: str, why: str, now: float) -> None:
        self._suspect = key, why, now
        self.keeper.release(key)
        self.registry.tell(key, ev.Evicted(), now)
        table = self.keeper.reserve(_PROBE_KEY, 1)
        request = PassRequest(_PROBE_KEY, 0, (0,), blocks=table)
        self.registry.actions.append(ee.RunProbe(request))

    def _probe_done(self, broken: str | None) -> None:
        assert self._suspect is not None
        (key, why, _), self._suspect = self._suspect, None
        self.keeper.release(_PROBE_KEY)
        if broken is None:
            self._end(key, FaultCode.INTERNAL, why)
        else:
            self._give_up(f"{why}; then a probe failed: {broken}")

    # --- the end ---------------------------------------------------------------------------

    def _end(self, key: str, code: FaultCode, why: str) -> None:
        """End one session; its device may come back in a second."""
        self.registry.end(key, Fault(code, why, retry_after_s=1.0))

    def _give_up(self, why: str) -> None:
        self.broken = why
        for key in tuple(self.sessions):
            self.registry.end(key, _RESTARTS)
        self.registry.actions.append(ee.GiveUp(why))

    def _refuse(self, event: ee.EngineEvent) -> tuple[ee.EngineAction, ...]:
        if not isinstance(event, ee.StreamOpened):
            return ()
        return ee.SendTo(event.stream, _RESTARTS), ee.CloseStream(event.stream)
