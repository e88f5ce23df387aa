"""The engine of a verifier: a pure machine whose sessions share packed passes.

Theory of operation. One pass runs at a time, and the scheduler forms the next one whenever none
runs. After every event the engine reviews the sessions that the event changed: sessions that have
ended are removed, and sessions that may use a pass are queued. Every few seconds a *sweep* ends the
streams of devices that stopped reading, and sends a sign of life to devices whose sessions wait.
The engine routes and schedules; the sessions decide what is committed. ``deadline`` is the time at
which the driver should send ``Poll``.

A failure ends what failed, and nothing else. A session whose own machine or sequence fails is ended
with a fault that lets its device come back. The sessions of a failed pass are tried again one by
one. If a session fails alone, a *probe* (one row of a fresh sequence) finds out whether the session
or the target is at fault. A broken target ends everything (``GiveUp``), and so does a pass that
does not end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import assert_never

from edgespec.core.protocol.acceptance import AcceptanceRule, make_rule
from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.failures import describe_without_messages
from edgespec.core.protocol.messages import (
    Cancel,
    Fault,
    FaultCode,
    Limits,
    Open,
    PicturePart,
    PicturesMissing,
    PrefixMissing,
    PrefixTokens,
    RunAhead,
)
from edgespec.core.protocol.pictures import PART_BYTES, ReadPictures, check_picture
from edgespec.core.protocol.prefix_names import PrefixNames
from edgespec.core.protocol.work import ModelInfo, PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.admission import (
    DISPLACED_FAULT,
    SessionSlots,
    limits_of,
    refuse_open,
    shorten_context,
)
from edgespec.core.verifier.block_ledger import BlockLedger, SharePrefixes
from edgespec.core.verifier.cache_scheduler import CacheScheduler
from edgespec.core.verifier.picture_store import PictureStore
from edgespec.core.verifier.prefix_store import PrefixStore
from edgespec.core.verifier.run_ahead import RUN_AHEAD, DraftHistories, RunAheadPolicy
from edgespec.core.verifier.scheduler import PassScheduler
from edgespec.core.verifier.server_drafts import ServerDraftsFactory
from edgespec.core.verifier.server_model import ChainStart
from edgespec.core.verifier.session import VerifySession, same_device, same_generation

RunAheadFactory = Callable[[RunAhead], RunAheadPolicy]
RuleFactory = Callable[[str], AcceptanceRule]


@dataclass(frozen=True, slots=True)
class RunningRound:
    """The running steps of the server model, and the sessions that take part in them."""

    started_at: float
    sessions: Mapping[str, VerifySession]


SWEEP_S = 2.0
"""Interval at which sessions are searched for expired leases and silences. It is a small part of
each of those times, which are 5 s and more.
"""
LAST_RECEIVED_WITHIN_S = 5.0
"""Time for which a finished stream waits for its device to acknowledge the end of the output. A
session whose end was acknowledged is removed at once instead of being kept for its lease.
"""
_PROBE_KEY = "\0probe"  # No session has this key, since ids on the wire are printable.
_RESTART_FAULT = Fault(FaultCode.SHUTTING_DOWN, "the verifier failed and restarts", 1.0)


class VerifyEngine:
    """The pure machine that a verifier's driver and the simulator run.

    ``adapters`` are the adapters that the target serves beside ``model``. With ``contain`` False an
    exception in a session is raised instead of ending that session, for tests.
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
        self._has_drafter = engine_limits.drafter
        self._draft_steps = 0
        """Tokens that the engine speculator proposes in the pass that runs."""
        self._deadlines: list[tuple[float, str]] = []
        self._sweep_at: float | None = None
        self.broken: str | None = None
        """Reason why this verifier serves no requests any more; None while it does."""
        self._suspect: tuple[str, str, float] | None = None
        """Key of the session that failed alone, the reason, and when its probe was requested."""

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
        """True while the target's thread works."""
        busy = self._scheduler.running is not None or self._round is not None
        return busy or self._suspect is not None

    @property
    def passes(self) -> int:
        return self._scheduler.passes

    @property
    def pass_s(self) -> float | None:
        return self._scheduler.price.pass_s

    def handle(self, event: ee.EngineEvent, now: float) -> tuple[ee.EngineAction, ...]:
        if self.broken is not None:
            return self._refuse(event)
        registry = self.registry
        began_at: float | None = None
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
                began_at = self._drafts_done(event, now)
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
            if began_at is not None or not self._start_round(now):
                self._start_batch(now, began_at)
            self._review_changed(now)
        actions, registry.actions = tuple(registry.actions), []
        return actions

    def _owner_of(self, key: str) -> str:
        # Rows that one adapter has computed cannot be used with another, and equal tokens with
        # other pictures have other rows.
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
        limits, batch = self.engine_limits, self._scheduler.running
        since = None if batch is None else batch.started_at
        if self._round is not None:
            since = self._round.started_at
        elif batch is None and self._suspect is not None:
            _, _, since = self._suspect
        if since is not None and now - since >= limits.stuck_pass_s:
            return self._give_up(f"a pass has not ended for {now - since:.0f} s")
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

    # --- passes ----------------------------------------------------------------------------

    def _start_batch(self, now: float, began_at: float | None) -> None:
        requests, offered_keys = self._scheduler.form_pass(self.sessions, now, began_at)
        for key in offered_keys:
            self._schedule_review(key, now)
        if requests:
            self._draft_steps = self._scheduler.choose_speculator_steps()
            self.registry.actions.append(ee.RunBatch(requests, self._draft_steps))

    def _start_round(self, now: float) -> bool:
        """Start a round of the server model before the next pass, if that pays."""
        if not self._has_drafter:
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
        if why := self._scheduler.draft_report:
            self._scheduler.draft_report = ""
            self.registry.actions.append(ee.ReportDraftsRest(why))

    def _drafts_failed(self, why: str) -> None:
        """Stop using the server model after it failed; sessions continue without its drafts."""
        self._round, self._has_drafter = None, False
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
        self._suspect = key, why, now
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
        (key, why, _), self._suspect = self._suspect, None
        self.cache_scheduler.release(_PROBE_KEY)
        if broken is None:
            self._end_session(key, FaultCode.INTERNAL, why)
        else:
            self._give_up(f"{why}; then a probe failed: {broken}")

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
        if not isinstance(event, ee.StreamOpened):
            return ()
        return ee.SendTo(event.stream, _RESTART_FAULT), ee.CloseStream(event.stream)


@dataclass(slots=True)
class IncompleteOpen:
    """An ``Open`` that cannot open a session yet. Its device was asked for the ids of its prefix at
    ``since``, or sends its pictures."""

    event: ee.StreamOpened
    since: float
    """Time of the last question, or of the last part of a picture. Infinite while the target reads
    the pictures."""
    arriving: ArrivingPictures | None = None
    """The pictures; None while the ids of the prefix are awaited."""


class ArrivingPictures:
    """The pictures of one prompt, some of which are still on their way.

    ``known`` has the bytes of each picture that the verifier has, and None for each other one.
    ``names`` name the beginning of the prompt, if they are known."""

    def __init__(
        self, request: Open, known: Sequence[bytes | None], names: PrefixNames | None
    ) -> None:
        self.names = names
        self._pictures, self._known = request.pictures, list(known)
        self._growing = bytearray()
        """Bytes of the first missing picture so far."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the pictures that are not complete."""
        return tuple([number for number, data in enumerate(self._known) if data is None])

    @property
    def data(self) -> tuple[bytes, ...]:
        """The bytes of all pictures, once none is missing."""
        return tuple([data for data in self._known if data is not None])

    def find(self, number: int) -> bytes:
        """Return the bytes of a picture that is complete."""
        data = self._known[number]
        assert data is not None
        return data

    def add(self, part: PicturePart) -> bool:
        """Add a part; return whether it completes its picture. Raises ``ValueError`` for a part
        that does not continue the first missing picture, and for bytes that do not have its name.
        """
        number = self.missing[0]
        picture = self._pictures[number]
        at = len(self._growing)
        if (part.number, part.offset) != (number, at):
            raise ValueError(
                f"byte {part.offset} of picture {part.number} was sent, but byte {at} of picture"
                f" {number} comes next"
            )
        end, size = at + len(part.data), picture.size_bytes
        if end > size or (end < size and len(part.data) < PART_BYTES):
            raise ValueError(
                f"a part of {len(part.data)} bytes from byte {at} of picture {number} was sent, but"
                f" the picture has {size} bytes, in parts of {PART_BYTES}"
            )
        self._growing += part.data
        if end < size:
            return False
        data = bytes(self._growing)
        if sha256(data).digest() != picture.sha256:
            raise ValueError(f"the bytes of picture {number} do not have the SHA-256 of its name")
        # The same picture may stand in the prompt several times.
        for other, one in enumerate(self._pictures):
            if one.sha256 == picture.sha256 and one.size_bytes == size:
                self._known[other] = data
        self._growing = bytearray()
        return True


class SessionRegistry:
    """The sessions of one verifier: how they open, which device may resume them, and how they end.

    Every session has a key (its id on the wire), at most one stream, and a sequence in the target
    until it is finished. The actions that sessions request are collected in ``actions``. The keys
    of sessions that changed are collected in ``changed_keys``, for the engine to review. A session
    whose machine raises is ended alone; with ``contain`` False the exception is raised instead, for
    tests.

    ``prefixes`` keeps the ids of texts, so that a device can name the beginning of its prompt. A
    stream that names one that is not here is asked for its ids, and waits in ``incomplete``.
    """

    def __init__(
        self,
        model: ModelInfo,
        limits: Limits,
        engine_limits: ee.EngineLimits,
        rules: RuleFactory,
        run_ahead: RunAheadFactory,
        *,
        contain: bool,
        adapters: Sequence[ModelInfo] = (),
    ) -> None:
        self.sessions: dict[str, VerifySession] = {}
        self.actions: list[ee.EngineAction] = []
        self.changed_keys: dict[str, None] = {}
        self.stream_of: dict[str, int] = {}
        """The driver's number of each session's stream, while it has one; ``key_of`` is the
        inverse."""
        self.key_of: dict[int, str] = {}
        self._model, self._limits, self._rules = model, limits, rules
        self._models = {one.name: one for one in (model, *adapters)}
        self._run_ahead, self._contain = run_ahead, contain
        self._trees, self._offered = engine_limits.trees, engine_limits.rules
        self._slots = SessionSlots(engine_limits, self.sessions)
        self.credential_of: Mapping[str, Credential] = self._slots.credential_of
        self.draft_sources = ServerDraftsFactory(
            text=engine_limits.server_drafts,
            model=engine_limits.drafter,
            speculator=engine_limits.speculator_tokens > 0,
        )
        self._histories = DraftHistories()
        self._cached: set[str] = set()
        self.prefixes = PrefixStore(engine_limits.prefix_bytes, engine_limits.prefix_block)
        self._keeps_prefixes = engine_limits.prefix_bytes > 0
        self.pictures = PictureStore(engine_limits.picture_bytes)
        self._names: dict[str, PrefixNames] = {}
        """Names of the beginnings of each session's text, by session id, if they are kept."""
        self.incomplete: dict[int, IncompleteOpen] = {}
        """Opens that wait for the ids of their prefix, or for their pictures, by stream."""

    # --- streams ---------------------------------------------------------------------------

    def open(self, event: ee.StreamOpened, now: float) -> None:
        """Handle the first message of a stream: open a session, resume one, ask for the ids of its
        prefix, or refuse."""
        stream, key, names = event.stream, event.request.session_id, None
        if (prefix := event.request.prefix) is not None:
            self._keep_text(key)  # a resuming device may name what was committed just now
            owner, prefix_key = event.credential.name, event.request.prefix_key
            if (text := self.prefixes.find(owner, prefix_key, prefix)) is None:
                self.incomplete[stream] = IncompleteOpen(event, now)
                self.actions.append(ee.SendTo(stream, PrefixMissing()))
                return
            event, names = _complete_open(event, text.tokens), text.names
        self._open_whole(event, names, now)

    def _complete(self, stream: int, message: PrefixTokens, now: float) -> None:
        """Open the session of a stream that has sent the ids of its prefix.

        The ids count, whatever their name was: blocks of another version may have other names."""
        event, tokens = self.incomplete.pop(stream).event, message.tokens
        prefix = event.request.prefix
        if prefix is None or len(tokens) != prefix.length:
            named = 0 if prefix is None else prefix.length
            why = f"{len(tokens)} ids were sent for a prefix of {named}"
            self.refuse_stream(stream, Fault(FaultCode.INVALID, why))
            return
        self._open_whole(_complete_open(event, tokens), None, now)

    def refuse_incomplete(self, since: float) -> None:
        """Refuse the streams whose device has sent nothing that was asked for since ``since``."""
        for stream, one in tuple(self.incomplete.items()):
            if one.since <= since:
                what = "the ids of the prefix" if one.arriving is None else "the pictures"
                why = f"{what} did not arrive in time"
                self.refuse_stream(stream, Fault(FaultCode.OVERLOADED, why, 1.0))

    def refuse_stream(self, stream: int, fault: Fault) -> None:
        """End a stream that has no session."""
        self._drop_incomplete(stream)
        self.actions += (ee.SendTo(stream, fault), ee.CloseStream(stream))

    def _drop_incomplete(self, stream: int) -> None:
        self.incomplete.pop(stream, None)
        self.pictures.release(stream)

    # --- pictures --------------------------------------------------------------------------

    def _gather_pictures(
        self, event: ee.StreamOpened, names: PrefixNames | None, now: float
    ) -> None:
        """Look for the pictures of an admissible ``Open``, and ask for each that is not here."""
        stream, request, owner = event.stream, event.request, event.credential.name
        total = sum([one.size_bytes for one in request.pictures])
        if total > self.pictures.most_bytes_of_prompt:
            why = (
                f"the pictures have {total} bytes in all, but a prompt may have at most"
                f" {self.pictures.most_bytes_of_prompt} (half of limits.picture_mib)"
            )
            self.refuse_stream(stream, Fault(FaultCode.INVALID, why))
            return
        if (full := self.pictures.admit(stream, event.peer, total)) is not None:
            self.refuse_stream(stream, Fault(FaultCode.OVERLOADED, full, 1.0))
            return
        known: list[bytes | None] = []
        for one in request.pictures:
            data = self.pictures.find(owner, request.prefix_key, one.sha256)
            known.append(data if data is not None and len(data) == one.size_bytes else None)
        arriving = ArrivingPictures(request, known, names)
        self.incomplete[stream] = IncompleteOpen(event, now, arriving)
        if numbers := arriving.missing:
            first = {request.pictures[number].sha256: number for number in reversed(numbers)}
            asked = tuple([one for one in numbers if first[request.pictures[one].sha256] == one])
            self.actions.append(ee.SendTo(stream, PicturesMissing(asked)))
        else:
            self._read_pictures(stream)

    def _add_part(self, stream: int, part: PicturePart, now: float) -> None:
        one = self.incomplete[stream]
        arriving, request = one.arriving, one.event.request
        if arriving is None or not arriving.missing:
            why = "a part of a picture was sent, but none is missing"
            self.refuse_stream(stream, Fault(FaultCode.INVALID, why))
            return
        number = arriving.missing[0]
        try:
            is_complete = arriving.add(part)
        except ValueError as error:
            self.refuse_stream(stream, Fault(FaultCode.INVALID, str(error)))
            return
        one.since = now
        if is_complete:
            data, owner = arriving.find(number), one.event.credential.name
            self.pictures.keep(owner, request.prefix_key, request.pictures[number].sha256, data)
            if not arriving.missing:
                self._read_pictures(stream)

    def _read_pictures(self, stream: int) -> None:
        """Request that the target reads complete pictures, if their headers are within bounds."""
        one = self.incomplete[stream]
        bounds = self._model_of(one.event.request).pictures
        assert one.arriving is not None
        assert bounds is not None
        for number, data in enumerate(one.arriving.data):
            try:
                check_picture(data, bounds)
            except ValueError as error:
                self.refuse_stream(stream, Fault(FaultCode.INVALID, f"picture {number} {error}"))
                return
        one.since = math.inf
        request = one.event.request
        positions = tuple([picture.position for picture in request.pictures])
        self.actions.append(
            ee.ReadPictureData(stream, request.prompt, one.arriving.data, positions)
        )

    def open_with_pictures(self, event: ee.PicturesRead, now: float) -> None:
        """Open the session of a stream whose pictures the target has read, or refuse it."""
        stream, waiting = event.stream, self.incomplete.get(event.stream)
        if waiting is None or waiting.arriving is None:
            return  # the stream is gone
        if event.pictures is None:
            self.refuse_stream(stream, Fault(FaultCode.INVALID, event.why))
            return
        self._drop_incomplete(stream)
        self._open_whole(waiting.event, waiting.arriving.names, now, event.pictures)

    # --- whole opens -----------------------------------------------------------------------

    def _open_whole(
        self,
        event: ee.StreamOpened,
        names: PrefixNames | None,
        now: float,
        pictures: ReadPictures | None = None,
    ) -> None:
        """Handle an ``Open`` with all its ids. ``names`` name its beginning, if they are known.
        Without ``pictures`` the pictures of its prompt are gathered first."""
        stream, request, key = event.stream, event.request, event.request.session_id
        known = self.sessions.get(key)
        limits = limits_of(event.credential, self._limits)
        model, served = self._model_of(request), tuple(self._models)
        extra_tokens = 0 if pictures is None else pictures.extra_tokens
        fault = refuse_open(
            request, model, limits, self._offered, event.credential, served, extra_tokens
        )
        if fault is None and known is not None:
            fault = self._check_reopening(known, request, event.credential)
        if fault is None and key not in self.sessions:
            if request.pictures and pictures is None:
                self._gather_pictures(event, names, now)
                return
            limits = shorten_context(limits, extra_tokens)
            fault = self._add_session(event, limits, names, pictures, now)
        if fault is not None:
            self.refuse_stream(stream, fault)
            return
        self._close_stream(key)
        self.stream_of[key], self.key_of[stream] = stream, key
        self.dispatch(key, ev.Attach(request), now)

    def _check_reopening(
        self, known: VerifySession, request: Open, credential: Credential
    ) -> Fault | None:
        """Return the fault that keeps this device from a session of that id, or None.

        A device must show the credential of the session as well as its secret. A session that was
        opened without a secret is open to every device that has its credential and its id. If the
        session's own device opens another generation, the session is ended, and the request opens
        it anew.
        """
        first, key = known.request, request.session_id
        is_owner = self.credential_of[key].name == credential.name
        is_same_device = is_owner and same_device(first, request)
        if is_same_device and same_generation(first, request, known.prefix):
            return None
        if not is_same_device or not request.session_secret:
            return Fault(FaultCode.INVALID, "the session id is in use by another generation")
        self.remove(key, Fault(FaultCode.INVALID, "the device began another generation"))
        return None

    def _add_session(
        self,
        event: ee.StreamOpened,
        limits: Limits,
        names: PrefixNames | None,
        pictures: ReadPictures | None,
        now: float,
    ) -> Fault | None:
        request, credential, key = event.request, event.credential, event.request.session_id
        displaced_key = self._slots.make_room(key, event.peer, credential, now)
        if isinstance(displaced_key, Fault):
            return displaced_key
        if displaced_key is not None:
            self.remove(displaced_key, DISPLACED_FAULT)
        rule, run_ahead = self._rules(request.rule), self._run_ahead(request.run_ahead)
        model = self._model_of(request)
        draft_sources = self.draft_sources(request, credential, model.eos_token_ids)
        history = self._histories.get(
            credential.name,
            samples=request.sampling.temperature > 0.0,
            run_ahead=request.run_ahead,
        )
        keeps = self._keeps_prefixes and bool(request.prefix_key)
        self.sessions[key] = VerifySession(
            request=request,
            model=model,
            limits=limits,
            rule=rule,
            run_ahead=run_ahead,
            now=now,
            server_drafts=draft_sources,
            trees=self._trees,
            history=history,
            prefix_block=self.prefixes.block_tokens if keeps else 0,
            picture_tokens=0 if pictures is None else pictures.extra_tokens,
        )
        self._slots.occupy(key, event.peer, credential, now)
        if keeps:
            size = self.prefixes.block_tokens
            self._names[key] = names or PrefixNames(request.prefix_key, size)
            self._keep_text(key)
        self._cached.add(key)
        text = (*request.prompt, *request.committed)
        adapter = self.adapter_of(key)
        opening = ee.OpenSequence(
            key=key,
            prompt_length=len(request.prompt),
            sampling=request.sampling,
            text=text,
            adapter=adapter,
            pictures=pictures,
        )
        self.actions.append(opening)
        return None

    def _model_of(self, request: Open) -> ModelInfo:
        return self._models.get(request.model, self._model)

    def adapter_of(self, key: str) -> str:
        """Return the name of the session's adapter, or the empty string if it uses the model
        itself."""
        model = self._model_of(self.sessions[key].request)
        return "" if model is self._model else model.name

    def handle_message(self, event: ee.StreamMessage, now: float) -> None:
        """Handle a later message; a message on a stream without a session is dropped, unless the
        ids of its prefix are awaited."""
        stream, message = event.stream, event.message
        if (key := self.key_of.get(stream)) is not None:
            if isinstance(message, PrefixTokens):
                why = "PrefixTokens were sent, but no prefix is missing"
                self.remove(key, Fault(FaultCode.INVALID, why))
            elif isinstance(message, PicturePart):
                why = "a part of a picture was sent, but none is missing"
                self.remove(key, Fault(FaultCode.INVALID, why))
            else:
                self.dispatch(key, message, now)
        elif stream in self.incomplete:
            if isinstance(message, PrefixTokens):
                self._complete(stream, message, now)
            elif isinstance(message, PicturePart):
                self._add_part(stream, message, now)
            elif isinstance(message, Cancel):
                self._drop_incomplete(stream)
                self.actions.append(ee.CloseStream(stream))

    def handle_loss(self, stream: int, now: float) -> None:
        """Handle the loss of a stream; its session stays for the lease."""
        self._drop_incomplete(stream)
        if (key := self.key_of.get(stream)) is not None:
            self._keep_text(key)
            self._unbind_stream(key)
            self.dispatch(key, ev.Detach(), now)

    def mark_behind(self, stream: int) -> None:
        """Note that the send queue of the stream still holds messages from before the last pass."""
        if (key := self.key_of.get(stream)) is not None:
            self.sessions[key].device.is_behind = True

    def mark_caught_up(self, stream: int) -> None:
        if (key := self.key_of.get(stream)) is not None:
            self.sessions[key].device.is_behind = False
            self.changed_keys.setdefault(key)

    # --- sessions --------------------------------------------------------------------------

    def dispatch(self, key: str, event: ev.VerifyEvent, now: float) -> None:
        """Pass an event to a session and translate its actions."""
        self.changed_keys.setdefault(key)
        for action in self._handle(key, event, now):
            match action:  # The cases name no fields, since matching on fields takes twice as long.
                case ev.Send():
                    if (stream := self.stream_of.get(key)) is not None:
                        self.actions.append(ee.SendTo(stream, action.message))
                case ev.Keep():
                    self.actions.append(ee.KeepNodes(key, action.nodes))
                case ev.Hangup():
                    self._close_stream(key)
                case ev.RunPass() | ev.WantChain():
                    raise AssertionError("it only follows an offer")
                case _:
                    assert_never(action)

    def offer_rows(self, key: str, offer: ev.Offer, now: float) -> PassRequest | None:
        """Offer the session rows in a pass that starts now; return its request, or None if it
        declines."""
        request = None
        for action in self._handle(key, offer, now):
            assert isinstance(action, ev.RunPass)
            request = action.request
        return request

    def offer_chain(self, key: str, offer: ev.DraftOffer, now: float) -> ChainStart | None:
        """Return where a chain of the server model would begin for this session, or None."""
        start = None
        for action in self._handle(key, offer, now):
            assert isinstance(action, ev.WantChain)
            start = action.start
        return start

    def remove(self, key: str, fault: Fault | None) -> None:
        """Remove a session; its stream is sent ``fault``, if there is one, and is closed."""
        self._keep_text(key)
        self._names.pop(key, None)
        if self.sessions.pop(key, None) is None:
            return
        self.changed_keys.setdefault(key)
        self._slots.release(key)
        if fault is not None and (stream := self.stream_of.get(key)) is not None:
            self.actions.append(ee.SendTo(stream, fault))
        self._close_stream(key)
        self.close_sequence(key)

    def close_sequence(self, key: str) -> None:
        """Free the session's sequence in the target, and keep its text."""
        if key in self._cached:
            self._cached.discard(key)
            self._keep_text(key)
            self.actions.append(ee.CloseSequence(key))

    def _keep_text(self, key: str) -> None:
        """Store the ids of the session's text, if they are to be kept."""
        if (names := self._names.get(key)) is not None:
            owner = self.credential_of[key].name
            self.prefixes.keep(owner, names, self.sessions[key].prefix.tokens)

    def _handle(self, key: str, event: ev.VerifyEvent, now: float) -> tuple[ev.VerifyAction, ...]:
        if (session := self.sessions.get(key)) is None:
            return ()  # ended by an earlier action
        try:
            return session.handle(event, now)
        except Exception as error:
            if not self._contain:
                raise
            stream = self.stream_of.get(key)
            self.actions.append(ee.ReportFailure(key, describe_without_messages(error), stream))
            fault = Fault(FaultCode.INTERNAL, "the verifier failed in this session", 1.0)
            self.remove(key, fault)
            return ()

    def forget_texts(self, credential: str) -> None:
        """Drop the ids of all texts of a credential, because it was revoked."""
        for key in [key for key in self._names if self.credential_of[key].name == credential]:
            del self._names[key]
        self.prefixes.forget(credential)
        self.pictures.forget(credential)

    def _unbind_stream(self, key: str) -> int | None:
        stream = self.stream_of.pop(key, None)
        if stream is not None:
            del self.key_of[stream]
        return stream

    def _close_stream(self, key: str) -> None:
        if (stream := self._unbind_stream(key)) is not None:
            self.actions.append(ee.CloseStream(stream))


def _complete_open(event: ee.StreamOpened, prefix: tuple[int, ...]) -> ee.StreamOpened:
    """Return the event with the ids of its prefix in their places."""
    request, prompt_length = event.request, event.request.prompt_length
    whole = replace(
        request,
        prompt=prefix[:prompt_length] + request.prompt,
        committed=prefix[prompt_length:] + request.committed,
        prefix=None,
    )
    return replace(event, request=whole)
