"""The engine of a verifier: a pure machine whose sessions share packed passes.

Theory of operation. One pass runs at a time, and the scheduler forms the next one whenever none
runs. After every event the engine reviews the sessions that the event changed: sessions that have
ended are removed, and sessions that may use a pass are queued. Every few seconds a *sweep* ends the
streams of devices that stopped reading, and sends a sign of life to devices whose sessions wait.
The engine schedules; ``session_registry.py`` opens and ends the sessions, which decide what is
committed. ``deadline`` is the time at which the driver should send ``Poll``.

A failure ends what failed, and nothing else. A session whose own machine or sequence fails is ended
with a fault that lets its device come back. The sessions of a failed pass are tried again one by
one. If a session fails alone, a *probe* (one row of a fresh sequence) finds out whether the session
or the target is at fault. A broken target ends everything (``GiveUp``), and so does a pass that
does not end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from edgespec.core.protocol.acceptance import make_rule
from edgespec.core.protocol.messages import Fault, FaultCode, Limits
from edgespec.core.protocol.work import ModelInfo, PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.block_ledger import BlockLedger, SharePrefixes
from edgespec.core.verifier.cache_scheduler import CacheScheduler
from edgespec.core.verifier.run_ahead import RUN_AHEAD
from edgespec.core.verifier.scheduler import PassScheduler
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_registry import (
    RuleFactory,
    RunAheadFactory,
    SessionRegistry,
)


@dataclass(frozen=True, slots=True)
class RunningRound:
    """The round of the server model that runs, and the sessions that take part in it."""

    started_at: float
    sessions: Mapping[str, VerifySession]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A session that failed in a pass of its own. A probe finds out whether it is at fault."""

    key: str
    session: VerifySession
    why: str
    """The failure, in words."""
    probed_at: float
    """Time at which the probe was requested."""


SWEEP_S = 2.0
"""Seconds between two sweeps. It is a small part of the times that a sweep compares, which are 5 s
and more.
"""
LAST_RECEIVED_WITHIN_S = 5.0
"""Time for which a finished stream waits for its device to acknowledge the end of the output. A
session whose end was acknowledged is removed at once instead of being kept for its lease.
"""
_PROBE_KEY = "\0probe"  # No session has this key, since ids on the wire are printable.
_RESTART_FAULT = Fault(FaultCode.SHUTTING_DOWN, "the verifier failed and restarts", 1.0)


class VerifyEngine:
    """The pure machine that a verifier's driver and the simulator run.

    Call ``handle`` for every event, carry out the actions that it returns in order, and send
    ``Poll`` at ``deadline``. ``docs/driving-the-core.md`` shows such a program. The arguments go on
    to ``SessionRegistry``.
    """

    def __init__(
        self,
        model: ModelInfo,
        limits: Limits,
        engine_limits: ee.EngineLimits,
        rules: RuleFactory = make_rule,
        run_ahead: RunAheadFactory = RUN_AHEAD.__getitem__,
        *,
        contain: bool = True,
        adapters: Sequence[ModelInfo] = (),
    ) -> None:
        cache = engine_limits.cache
        assert cache is None or cache.tokens >= limits.context_length
        self.model, self.limits, self.engine_limits = model, limits, engine_limits
        self.registry = SessionRegistry(
            model=model,
            limits=limits,
            engine_limits=engine_limits,
            rules=rules,
            run_ahead=run_ahead,
            contain=contain,
            adapters=adapters,
        )
        self.sessions, self.prefixes = self.registry.sessions, self.registry.prefixes
        self.pictures = self.registry.pictures
        ledger = None if cache is None else BlockLedger(cache)
        shares = engine_limits.share_prefixes is not SharePrefixes.NONE
        self.cache_scheduler = CacheScheduler(
            ledger,
            self.sessions,
            self._owner_of if shares else None,
            self.registry.credential_of,
        )
        self._scheduler = PassScheduler(
            limits=engine_limits,
            cache_scheduler=self.cache_scheduler,
            offer_rows=self.registry.offer_rows,
            credential_of=self.registry.credential_of,
            draft_times=self.registry.draft_sources.times,
        )
        self.cache_scheduler.is_over_rate = self._scheduler.fairness.is_over_rate
        self.draft_counts = self.registry.draft_sources.counts
        self._round: RunningRound | None = None
        """The round of the server model that runs now."""
        self._uses_server_model = engine_limits.drafter
        self._draft_steps = 0
        """Tokens that the engine speculator proposes in the pass that runs."""
        self._deadlines: list[tuple[float, str]] = []
        self._sweep_at: float | None = None
        self.broken: str | None = None
        """Reason why this verifier serves no requests any more; None while it does."""
        self._suspect: Suspect | None = None
        """The session for which a probe runs."""

    @property
    def deadline(self) -> float | None:
        """Time at which the driver should send ``Poll``; None if there is nothing to wait for."""
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
        """True while the target's thread works: on a pass, a round of drafts or a probe."""
        busy = self._scheduler.running is not None or self._round is not None
        return busy or self._suspect is not None

    @property
    def passes(self) -> int:
        """Number of passes that have ended."""
        return self._scheduler.passes

    @property
    def pass_s(self) -> float | None:
        """Mean duration of a pass in seconds; None before the first."""
        return self._scheduler.price.pass_s

    def handle(self, event: ee.EngineEvent, now: float) -> tuple[ee.EngineAction, ...]:
        """Handle an event at the time ``now``, in seconds; return the actions to carry out."""
        if self.broken is not None:
            return self._refuse(event)
        registry = self.registry
        round_began_at: float | None = None
        match event:
            case ee.StreamMessage():
                registry.handle_message(event, now)
            case ee.BatchDone():
                self._batch_done(event, now)
            case ee.StreamOpened():
                registry.open(event, now)
            case ee.StreamLost(stream):
                registry.handle_loss(stream, now)
            case ee.StreamCaughtUp(stream):
                registry.mark_caught_up(stream)
            case ee.BatchFailed():
                self._batch_failed(event, now)
            case ee.DraftsDone():
                round_began_at = self._drafts_done(event, now)
            case ee.DraftsFailed(why):
                self._drafts_failed(why)
            case ee.SequenceFailed(key, why, full):
                self._end_session(key, FaultCode.OVERLOADED if full else FaultCode.INTERNAL, why)
            case ee.ProbeDone(why):
                self._probe_done(why)
            case ee.PicturesRead():
                registry.open_with_pictures(event, now)
            case ee.Poll():
                pass
            case _:
                assert_never(event)
        self._mark_due_sessions(now)
        self._review_changed(now)
        if not self.running and self.broken is None:
            # A round of drafts comes before a pass. If one has just ended, the pass is due.
            has_round = round_began_at is None and self._start_round(now)
            if not has_round:
                self._start_batch(now, round_began_at)
            self._review_changed(now)
        actions, registry.actions = tuple(registry.actions), []
        return actions

    def _owner_of(self, key: str) -> str:
        """Return the owner of the session's cached blocks; sessions of equal owners share them.

        Sessions with different adapters never share blocks, since equal tokens have other rows. The
        same holds for different pictures, of which the text shows the placeholder only."""
        adapter = self.registry.adapter_of(key)
        pictures = b"".join(one.sha256 for one in self.sessions[key].request.pictures).hex()
        apart = "\0".join(one for one in (adapter, pictures) if one)
        if self.engine_limits.share_prefixes is SharePrefixes.ALL:
            return apart and f"\0{apart}"
        name = self.registry.credential_of[key].name
        return f"{name}\0{apart}" if apart else name

    # --- between events --------------------------------------------------------------------

    def _review_changed(self, now: float) -> None:
        """Remove ended sessions, free finished ones, and queue the others that may use a pass."""
        registry = self.registry
        while keys := registry.changed_keys:
            registry.changed_keys = {}
            for key in keys:
                session = self.sessions.get(key)
                if session is not None and session.can_be_removed(now):
                    registry.remove(key, None)
                elif session is None or session.state is ev.FINISHED:
                    self._scheduler.forget(key)
                    self.cache_scheduler.release(key)
                    registry.close_sequence(key)
                    self._schedule_review(key, now)
                else:
                    self._scheduler.enqueue(key)
                    if session.deadline is not None:
                        self._schedule_review(key, now)
        if not (self.sessions or registry.incomplete):
            self._sweep_at = None
        elif self._sweep_at is None:
            self._sweep_at = now + SWEEP_S

    def _schedule_review(self, key: str, now: float) -> None:
        """Schedule a review of the session at its deadline, if it has one."""
        session = self.sessions.get(key)
        if session is not None and session.deadline is not None and session.deadline > now:
            heapq.heappush(self._deadlines, (session.deadline, key))

    def _mark_due_sessions(self, now: float) -> None:
        """Mark the sessions whose deadline has passed for review; they may use a pass, or have
        ended."""
        while self._deadlines and self._deadlines[0][0] <= now:
            due, key = heapq.heappop(self._deadlines)
            session = self.sessions.get(key)
            if session is not None and session.deadline == due:
                self.registry.changed_keys.setdefault(key)
        if self._sweep_at is not None and self._sweep_at <= now:
            self._sweep_at = None
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """End what hangs: a pass without an end, which breaks the verifier, and sessions whose
        device acknowledges nothing. Send keepalives to silent streams."""
        limits = self.engine_limits
        started_at = self._work_started_at()
        if started_at is not None and now - started_at >= limits.stuck_pass_s:
            return self._give_up(f"a pass has not ended for {now - started_at:.0f} s")
        self.registry.refuse_incomplete(now - limits.stall_s)
        for key, session in tuple(self.sessions.items()):
            device = session.device
            if device.detached_at is not None:
                continue
            waited_s = (
                0.0 if device.unacknowledged_since is None else now - device.unacknowledged_since
            )
            patience_s = limits.stall_s if session.finish is None else LAST_RECEIVED_WITHIN_S
            if waited_s >= patience_s:
                self.registry.dispatch(key, ev.Stalled(waited_s), now)
            elif session.finish is None and now - device.last_sent_at >= limits.silence_s:
                self.registry.dispatch(key, ev.SendKeepalive(), now)

    def _work_started_at(self) -> float | None:
        """Return when the round, the pass or the probe began that runs now; None if none runs."""
        if self._round is not None:
            return self._round.started_at
        if self._scheduler.running is not None:
            return self._scheduler.running.started_at
        return None if self._suspect is None else self._suspect.probed_at

    # --- passes ----------------------------------------------------------------------------

    def _start_batch(self, now: float, round_began_at: float | None) -> None:
        """Start a pass, if any session wants one. ``round_began_at`` is when the round of drafts
        before it began."""
        requests, offered_keys = self._scheduler.form_pass(self.sessions, now, round_began_at)
        for key in offered_keys:
            self._schedule_review(key, now)
        if requests:
            self._draft_steps = self._scheduler.choose_speculator_steps()
            self.registry.actions.append(ee.RunBatch(requests, self._draft_steps))

    def _start_round(self, now: float) -> bool:
        """Start a round of the server model before the next pass, if that pays."""
        if not self._uses_server_model:
            return False
        action = self._scheduler.plan_round(self.sessions, self.registry.offer_chain, now)
        self._report_drafts()
        if action is None:
            self._review_changed(now)  # a session that failed leaves the queue
            return False
        keys = [start.step.key for start in action.starts]
        self._round = RunningRound(now, {key: self.sessions[key] for key in keys})
        self.registry.actions.append(action)
        return True

    def _drafts_done(self, event: ee.DraftsDone, now: float) -> float:
        """Distribute the chains to their sessions; return when the round had begun."""
        assert self._round is not None
        began_at, sessions, self._round = self._round.started_at, self._round.sessions, None
        self._scheduler.finish_round(event)
        self._report_drafts()
        self.draft_counts.steps += len(event.steps)
        self.draft_counts.seconds += math.fsum(took_s for _, took_s in event.steps)
        for chain in event.chains:
            if self.sessions.get(chain.key) is sessions[chain.key]:
                self.registry.dispatch(chain.key, ev.Drafted(chain), now)
        return began_at

    def _report_drafts(self) -> None:
        """Log what the scheduler has found out about the server model, if that is new."""
        if why := self._scheduler.draft_report:
            self._scheduler.draft_report = ""
            self.registry.actions.append(ee.ReportDraftsRest(why))

    def _drafts_failed(self, why: str) -> None:
        """Stop using the server model after it failed; sessions continue without its drafts."""
        self._round, self._uses_server_model = None, False
        self.draft_counts.failures += 1
        self.registry.actions.append(ee.ReportDraftsOff(why))

    def _batch_done(self, event: ee.BatchDone, now: float) -> None:
        """Give each session of a finished pass its result, and count tokens and nodes. A session
        that closed meanwhile is passed over."""
        batch = self._scheduler.finish_pass(now, event.target_s, self._draft_steps)
        tokens, device = 0, self.draft_counts.device
        self.draft_counts.steps += self._draft_steps
        price = self._scheduler.row_price
        results = {result.key: result for result in event.results}
        for stream in event.behind:
            self.registry.mark_behind(stream)
        for session, request in batch.parts:
            key, result = request.key, results.get(request.key)
            if self.sessions.get(key) is not session:
                continue
            if result is None:
                why = "the pass was run without this session"
                self._end_session(key, FaultCode.INTERNAL, why)
                continue
            self._scheduler.isolated_keys.discard(key)
            length_before, accepted_before = session.prefix.length, session.device_accepted
            if self._draft_steps and request.sample and not result.guesses:
                session.note_no_proposal()
            done = ev.PassDone(
                targets=result.targets,
                scores=result.scores,
                row_price=price,
                guesses=result.guesses,
                node_scores=result.node_scores,
            )
            self.registry.dispatch(key, done, now)
            tokens += session.prefix.length - length_before
            self._scheduler.fairness.spend_tokens(key, session.prefix.length - length_before, now)
            self.cache_scheduler.settle_pass(request, session.prefix.length)
            device.nodes += request.device_nodes
            device.accepted += session.device_accepted - accepted_before
        if tokens:  # a pass without tokens did not sample
            self._scheduler.price.note_tokens(tokens)

    # --- failures --------------------------------------------------------------------------

    def _batch_failed(self, failure: ee.BatchFailed, now: float) -> None:
        """Handle a failed pass. Its sessions stay, except one that is known to be at fault; if none
        is, they are tried again one by one, and a session that was alone in the pass leads to a
        probe."""
        batch = self._scheduler.finish_pass(now)
        for session, request in batch.parts:
            key = request.key
            if self.registry.sessions.get(key) is not session:
                continue
            self.registry.dispatch(key, ev.PassFailed(), now)
            if failure.culprit == key and failure.requested:
                self.registry.remove(key, Fault(FaultCode.INVALID, failure.why))
            elif failure.culprit == key:
                self._end_session(key, FaultCode.INTERNAL, failure.why)
            elif len(batch.parts) > 1:
                if not failure.culprit:
                    self._scheduler.isolated_keys.add(key)
            elif failure.full:
                self._end_session(key, FaultCode.OVERLOADED, failure.why)
            else:
                self._probe(key, failure.why, now)

    def _probe(self, key: str, why: str, now: float) -> None:
        """Request a probe of the target, because the session ``key`` failed in a pass of its own.

        Its blocks are freed first, so that the probe has room. The session itself stays until the
        probe has ended."""
        self._suspect = Suspect(key, self.sessions[key], why, now)
        self.cache_scheduler.withdraw(key)
        self.cache_scheduler.release(key)
        self.registry.dispatch(key, ev.Cached(0), now)
        table = self.cache_scheduler.reserve(_PROBE_KEY, 1)
        request = PassRequest(_PROBE_KEY, 0, (0,), blocks=table)
        self.registry.actions.append(ee.RunProbe(request))

    def _probe_done(self, broken: str | None) -> None:
        """Handle the end of the probe; ``broken`` says what failed, None means that the target
        works."""
        assert self._suspect is not None
        suspect, self._suspect = self._suspect, None
        self.cache_scheduler.release(_PROBE_KEY)
        if broken is not None:
            self._give_up(f"{suspect.why}; then a probe failed: {broken}")
        elif self.sessions.get(suspect.key) is suspect.session:  # it may have ended meanwhile
            self._end_session(suspect.key, FaultCode.INTERNAL, suspect.why)

    def _end_session(self, key: str, code: FaultCode, why: str) -> None:
        """End one session; its device may come back after a second."""
        if code is FaultCode.INTERNAL:
            self.cache_scheduler.withdraw(key)
        self.registry.remove(key, Fault(code, why, retry_after_s=1.0))

    def _give_up(self, why: str) -> None:
        """End all sessions and this verifier, whose target is broken."""
        self.broken = why
        for key in tuple(self.registry.sessions):
            self.registry.remove(key, _RESTART_FAULT)
        for stream in tuple(self.registry.incomplete):
            self.registry.refuse_stream(stream, _RESTART_FAULT)
        self.registry.actions.append(ee.GiveUp(why))

    def _refuse(self, event: ee.EngineEvent) -> tuple[ee.EngineAction, ...]:
        """Refuse new streams after ``_give_up``, and ignore all other events."""
        if not isinstance(event, ee.StreamOpened):
            return ()
        return ee.SendTo(event.stream, _RESTART_FAULT), ee.CloseStream(event.stream)
