"""All sessions of one verifier and the packed passes they share, as a pure machine.

Theory of operation. ``session_registry.py`` holds the sessions and their streams; one pass runs at
a time, and the scheduler forms the next one whenever none does. After every event the sessions it
touched are looked after: what is over is forgotten, what may use a pass stands in line. Every few
seconds a *sweep* ends the streams of devices that stopped reading, and tells those whose sessions
wait that they are alive.

Failures stay where they belong: ``containment.py``.

Law of the file: the engine routes and schedules; what is committed is the sessions' business.
``deadline`` is when ``Poll`` is worth sending if nothing else happens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import assert_never

from edgespec.core.protocol.messages import EXACT_RULE, FaultCode, Limits
from edgespec.core.protocol.work import ModelInfo
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.acceptance import AcceptanceRule, ExactRule
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.core.verifier.block_names import SharePrefixes
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.containment import RESTARTS, Containment
from edgespec.core.verifier.run_ahead import run_ahead_policy
from edgespec.core.verifier.scheduler import PassScheduler
from edgespec.core.verifier.session_registry import RunAheadFactory, SessionRegistry

SWEEP_S = 2.0
LAST_RECEIVED_WITHIN_S = 5.0
"""A finished stream waits so long for its device to acknowledge the end of the text: a session
whose end was received is forgotten at once, and need not be kept for its lease."""


class VerifyEngine:
    """``contain`` False lets an exception of a session's machine out, for tests. ``adapters``: the
    target serves these beside ``model``."""

    def __init__(
        self,
        model: ModelInfo,
        limits: Limits,
        engine_limits: ee.EngineLimits,
        rules: dict[str, AcceptanceRule] | None = None,
        run_ahead: RunAheadFactory = run_ahead_policy,
        *,
        contain: bool = True,
        adapters: Sequence[ModelInfo] = (),
    ) -> None:
        cache = engine_limits.cache
        assert cache is None or cache.tokens >= limits.context_length
        self.model, self.limits, self.engine_limits = model, limits, engine_limits
        rules = rules or {EXACT_RULE: ExactRule()}
        self.registry = SessionRegistry(
            model, limits, engine_limits, rules, run_ahead, contain=contain, adapters=adapters
        )
        self.sessions = self.registry.sessions
        ledger = None if cache is None else BlockLedger(cache)
        shares = engine_limits.share_prefixes is not SharePrefixes.NONE
        self.keeper = CacheKeeper(ledger, self.sessions, self._owner_of if shares else None)
        self._scheduler = PassScheduler(
            engine_limits, self.keeper, self.registry.ask, self.registry.credential_of
        )
        self.keeper.over_rate = self._scheduler.fairness.over_rate
        self.server_drafted_tokens = 0
        """Committed tokens that the verifier's own drafters had guessed."""
        self._deadlines: list[tuple[float, str]] = []
        self._sweep_at: float | None = None
        self._containment = Containment(self.registry, self._scheduler, self.keeper)

    @property
    def broken(self) -> str | None:
        """Why this verifier serves nobody any more; None while it does."""
        return self._containment.broken

    @property
    def deadline(self) -> float | None:
        if self.broken is not None:
            return None
        soonest = self._deadlines[0][0] if self._deadlines else None
        if (at := self._sweep_at) is not None and (soonest is None or at < soonest):
            soonest = at
        if (at := self._scheduler.fairness.wake_at) is not None and not self.running:
            soonest = at if soonest is None or at < soonest else soonest
        return soonest

    @property
    def running(self) -> bool:
        """Whether the target is at work, or about to be."""
        return self._scheduler.running is not None or self._containment.probing_since is not None

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
            case ee.StreamCaughtUp(stream):
                registry.caught_up(stream)
            case ee.BatchFailed():
                self._containment.batch_failed(event, now)
            case ee.SequenceFailed(key, why, full):
                self._containment.end(
                    key, FaultCode.OVERLOADED if full else FaultCode.INTERNAL, why
                )
            case ee.ProbeDone(why):
                self._containment.probe_done(why)
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

    def _owner_of(self, key: str) -> str:
        """Sessions with equal owners may use each other's cached prefixes."""
        # What an adapter has computed is of no use to another one.
        adapter = self.registry.adapter_of(key)
        if self.engine_limits.share_prefixes is SharePrefixes.ALL:
            return adapter and f"\0{adapter}"
        name = self.registry.credential_of[key].name
        return f"{name}\0{adapter}" if adapter else name

    # --- between events --------------------------------------------------------------------

    def _look_after(self, now: float) -> None:
        """Forget what is over, free what is finished, put in line what may use a pass."""
        registry = self.registry
        while keys := registry.touched:
            registry.touched = {}
            for key in keys:
                session = self.sessions.get(key)
                if session is not None and session.over(now):
                    registry.end(key, None)
                elif session is None or session.state is ev.FINISHED:
                    self._scheduler.forget(key)
                    self.keeper.release(key)
                    registry.close_sequence(key)
                    self._watch(key, now)
                else:
                    self._scheduler.enqueue(key)
                    if session.deadline is not None:
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
        limits, batch = self.engine_limits, self._scheduler.running
        since = self._containment.probing_since if batch is None else batch.started_at
        if since is not None and now - since >= limits.stuck_pass_s:
            return self._containment.give_up(f"a pass has not ended for {now - since:.0f} s")
        for key, session in tuple(self.sessions.items()):
            device = session.device
            if not device.attached:
                continue
            waited_s = 0.0 if device.unread_since is None else now - device.unread_since
            patience_s = limits.stall_s if session.finish is None else LAST_RECEIVED_WITHIN_S
            if waited_s >= patience_s:
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
        batch, tokens = self._scheduler.finish(now, event.target_s), 0
        price = self._scheduler.row_price
        results = {result.key: result for result in event.results}
        for stream in event.behind:
            self.registry.fell_behind(stream)
        for session, request in batch.parts:
            key, result = request.key, results.get(request.key)
            if self.sessions.get(key) is not session:
                continue
            if result is None:
                self._containment.end(
                    key, FaultCode.INTERNAL, "the pass was run without this session"
                )
                continue
            self._scheduler.run_with_others(key)
            before, guessed = session.prefix.length, session.counters.server_accepted
            self.registry.tell(key, ev.PassDone(result.targets, result.scores, price), now)
            tokens += session.prefix.length - before
            self._scheduler.fairness.spend(key, session.prefix.length - before, now)
            self.keeper.settle(request, session.prefix.length)
            self.server_drafted_tokens += session.counters.server_accepted - guessed
        self._scheduler.count(tokens)

    # --- the end ---------------------------------------------------------------------------

    def _refuse(self, event: ee.EngineEvent) -> tuple[ee.EngineAction, ...]:
        if not isinstance(event, ee.StreamOpened):
            return ()
        return ee.SendTo(event.stream, RESTARTS), ee.CloseStream(event.stream)
