"""Status of an agent: a snapshot that costs nothing until it is requested.

``StatusSource`` reads the counts that the agent keeps anyway and the notes of ``Activity``, in any
thread. While no generation runs, no message shows how the verifiers are; a ``VerifierMonitor``
probes them then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from edgespec.core.association.known_verifiers import CLOSED
from edgespec.core.device.estimates import DraftEstimates, RowPrice
from edgespec.core.device.events import STREAMING, DraftCounters
from edgespec.core.device.goodput_policy import explain_resting
from edgespec.core.device.lead import (
    MIN_GAIN,
    describe_lateness,
    describe_lead,
    find_case,
    find_lead,
)
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.device.streaming_speed import StreamingSpeed
from edgespec.core.guarded_drafter import GuardedDrafter
from edgespec.core.protocol.checks import make_one_line
from edgespec.device.activity import GenerationNotes
from edgespec.device.prober import VerifierMonitor
from edgespec.device.verifier_pool import VerifierPool
from edgespec.telemetry import agent_status as st
from edgespec.telemetry.process_memory import resident_bytes

if TYPE_CHECKING:
    from edgespec.device.agent import Agent


_MAX_WHY: Final = 200
_MAX_VERIFIERS: Final = 64
_AVAILABLE_STATES: Final = (st.VerifierState.READY, st.VerifierState.SERVING)


class StatusSource:
    """Makes snapshots of ``agent``.

    ``addresses`` are its verifiers as they were configured. Without a ``watch``, verifiers are not
    probed while no generation runs."""

    def __init__(
        self,
        agent: Agent,
        addresses: tuple[str, ...],
        version: str = "",
        watch: VerifierMonitor | None = None,
    ) -> None:
        self._agent, self._addresses, self._version = agent, addresses, version
        self._watch = watch
        self._since: dict[str, tuple[st.VerifierState, float]] = {}

    def snapshot(self, after: int = 0) -> st.AgentStatus:
        """Return the status now, with the events numbered above ``after``. Any thread may call
        this."""
        agent, activity = self._agent, self._agent.activity
        now = time.monotonic()
        with activity.lock:
            running = tuple(activity.running.values())
        memory = self._memory_status()
        events, lost = activity.events_after(after)
        return st.AgentStatus(
            version=self._version,
            clock_s=now,
            uptime_s=now - activity.began_at,
            running=len(running),
            tokens_per_s=activity.tokens_per_s(now),
            verifiers=self._verifier_statuses(running, now),
            generations=tuple(
                self._generation_status(one, now) for one in running[-st.MAX_GENERATIONS :]
            ),
            totals=activity.totals(),
            drafting=self._drafting_status(running, memory),
            memory=memory,
            events=events,
            last_event=events[-1].number if events else max(after, 0),
            lost_events=lost,
            draft="" if agent.drafter is None else agent.drafter.info.name,
            translated_share=agent.options.translated_share,
            policy=type(agent.options.policy).__name__.removesuffix("Policy").lower(),
        )

    def refresh_for_display(self) -> None:
        """Note that a status is displayed, so that its verifiers are probed soon if need be."""
        if self._watch is not None:
            self._watch.refresh_for_display()

    # --- the parts -----------------------------------------------------------------------------

    def _verifier_statuses(
        self, running: tuple[GenerationNotes, ...], now: float
    ) -> tuple[st.VerifierStatus, ...]:
        pool, watch = self._agent.transport, self._watch
        probed = {one.address: one for one in (() if watch is None else watch.statuses)}
        if isinstance(pool, VerifierPool):
            statuses = self._pool_verifiers(pool, running, probed)
        else:
            statuses = [self._single_verifier(running, probed)]
        return tuple(self._add_duration(one, now) for one in statuses[:_MAX_VERIFIERS])

    def _single_verifier(
        self, running: tuple[GenerationNotes, ...], probed: Mapping[str, st.VerifierStatus]
    ) -> st.VerifierStatus:
        """Return the status of the only verifier.

        It follows the link while a generation runs, and the latest probe otherwise."""
        address = self._addresses[0] if self._addresses else ""
        link, status = self._agent.activity.link, probed.get(address, st.VerifierStatus(address))
        if running or self._watch is None or self._watch.refreshed_at <= link.since:
            status = replace(status, state=link.state, why=link.why)
        return self._add_measurements(status, running)

    def _pool_verifiers(
        self,
        pool: VerifierPool,
        running: tuple[GenerationNotes, ...],
        probed: Mapping[str, st.VerifierStatus],
    ) -> list[st.VerifierStatus]:
        serving = {one.verifier for one in running if one.session.state is STREAMING}
        statuses = []
        for candidate in tuple(pool.failover.candidates.listed.values()):
            address, info = candidate.address, candidate.info
            # One of several addresses behind a name ("NAME (ADDRESS)") is probed by that name.
            status = probed.get(address) or probed.get(address.partition(" ")[0])
            status = replace(status or st.VerifierStatus(address), address=address)
            if info is not None and status.state is st.VerifierState.UNKNOWN:
                status = replace(status.with_info(info), state=st.VerifierState.READY)
            status = replace(status, rtt_s=candidate.rtt_s or status.rtt_s)
            if address in serving:
                status = self._add_measurements(
                    replace(status, state=st.VerifierState.SERVING), running
                )
            elif candidate.breaker.state is not CLOSED:
                status = replace(status, state=st.VerifierState.AWAY, why=candidate.error)
            statuses.append(status)
        return statuses or [probed.get(one, st.VerifierStatus(one)) for one in self._addresses]

    def _add_measurements(
        self, status: st.VerifierStatus, running: tuple[GenerationNotes, ...]
    ) -> st.VerifierStatus:
        """Add the times that the latest generation measured, which are those under load."""
        last = running[-1] if running else self._agent.activity.last
        if last is None:
            return status
        estimates = last.session.estimates
        rtt_s, pass_s = estimates.rtt_s.get(0.0), estimates.pass_s.get(0.0)
        return replace(status, rtt_s=rtt_s or status.rtt_s, pass_s=pass_s or status.pass_s)

    def _add_duration(self, status: st.VerifierStatus, now: float) -> st.VerifierStatus:
        """Add the time since the verifier entered its state, as far as it was observed."""
        link, is_available = self._agent.activity.link, status.state in _AVAILABLE_STATES
        kind = st.VerifierState.READY if is_available else status.state
        state, since = self._since.get(status.address, (None, now))
        if state is not kind:
            since = link.since if status.state is link.state else now
        self._since[status.address] = (kind, since)
        return replace(status, since_s=max(0.0, now - since))

    def _generation_status(self, notes: GenerationNotes, now: float) -> st.GenerationStatus:
        session, counters = notes.session, notes.session.counters
        first_at, tokens = notes.first_token_at, counters.committed
        later, took_s = tokens - notes.first_count, notes.last_token_at - (first_at or 0.0)
        has_rate = first_at is not None and later > 0 and took_s > 0.0
        return st.GenerationStatus(
            number=notes.number,
            link=session.state.value,
            verifier=notes.verifier or (self._addresses[0] if self._addresses else ""),
            age_s=now - notes.began_at,
            quiet_s=max(0.0, now - notes.last_token_at),
            prompt_tokens=len(session.request.prompt),
            tokens=tokens,
            tokens_per_s=later / took_s if has_rate else None,
            acceptance=counters.acceptance,
            drafting=session.drafting,
            accepted=counters.accepted,
            sent=counters.sent,
            passes=counters.passes,
            reconnects=counters.reconnects,
            model=make_one_line(notes.model),
            rule=session.request.rule,
        )

    def _drafting_status(
        self, running: tuple[GenerationNotes, ...], memory: st.MemoryStatus
    ) -> st.DraftingStatus:
        agent, activity = self._agent, self._agent.activity
        if agent.drafter is None:
            why = "this agent has no draft model: it drafts only from predictions of requests"
            return st.DraftingStatus(False, why)
        drafts = [one for one in running if one.session.drafting]
        notes = drafts[-1] if drafts else activity.last_drafted or activity.last
        session = None if notes is None else notes.session
        status = assess_drafting(
            agent.options.policy,
            agent.verifier.price,
            None if session is None else session.estimates,
            None if session is None else session.counters,
            None if notes is None else notes.speed,
        )
        if memory.resting:
            why = "the memory budget leaves nothing to the draft: it rests"
            return replace(status, worth=False, why=why)
        latest, limit = running[-1] if running else activity.last, agent.drafter.info.context_length
        if latest is not None and latest.session.prefix.length >= limit:
            return explain_long_text(status, latest.session, limit)
        failed = session is not None and session.counters.draft_failure
        given_up = session is not None and session.has_given_up
        if running and not drafts and session is not None and not failed and not given_up:
            return replace(status, worth=False, why="the draft is busy")
        return status

    def _memory_status(self) -> st.MemoryStatus:
        """Return the memory in use, with the current limits of a guarded drafter at any depth."""
        try:
            resident = resident_bytes()
        except Exception:  # Systems differ in the errors that they raise here.
            resident = 0
        drafter = self._agent.drafter
        while drafter is not None and not isinstance(drafter, GuardedDrafter):
            drafter = drafter.inner
        if drafter is None:
            return st.MemoryStatus(resident)
        budget, now = drafter.caches.budget_bytes, drafter.caches.guard.current
        return st.MemoryStatus(resident, budget, now.window, now.width, resting=not now.window)


def assess_drafting(
    policy: DraftPolicy,
    price: RowPrice,
    estimates: DraftEstimates | None,
    counters: DraftCounters | None,
    speed: StreamingSpeed | None = None,
) -> st.DraftingStatus:
    """Return what the policy makes of the price and of the latest generation's measurements.

    Drafting is worth it if that generation was faster than the verifier is estimated to be without
    this device: by plain streaming, or by drafts of its own. Without such a speed, it is worth what
    the lead formula states (``core/device/lead.py``), and the policy's own decision stands where
    that cannot be computed. ``estimates``, ``counters`` and ``speed`` are None before the first
    generation."""
    status = st.DraftingStatus(
        None,
        "nothing was drafted yet",
        acceptance=None if counters is None else counters.acceptance,
        least_chance=price.least_chance,
        credit=price.credit,
    )
    if estimates is None or counters is None:
        return status
    status = replace(
        status,
        step_s=estimates.step_s.get(0.0) or None,
        tokens_per_pass=counters.committed / counters.passes if counters.passes else None,
        lead="" if (case := find_case(estimates)) is None else describe_lead(case),
    )
    if counters.draft_failure:
        why = f"the draft model failed: {counters.draft_failure}"
        return replace(status, worth=False, why=make_one_line(why)[:_MAX_WHY])
    if (rest_reason := explain_resting(policy, price, estimates)) is not None:
        return replace(status, worth=False, why=rest_reason)
    if not counters.tried:
        return status
    now = None if speed is None else speed.tokens_per_s
    plain = None if speed is None else speed.plain_tokens_per_s
    if now is None or plain is None:
        if case is not None and find_lead(case).speedup < 1.0 + MIN_GAIN:
            return replace(status, worth=False, why=describe_lateness(case))
        return replace(status, worth=True, why=_explain_acceptance(status, price))
    status = replace(status, tokens_per_s=now, plain_tokens_per_s=plain)
    alone = plain if case is None else max(plain, 1.0 / case.token_s)
    return replace(status, worth=now >= alone, why=_explain_gain(now, alone))


def explain_long_text(
    status: st.DraftingStatus, session: DraftSession, context_length: int
) -> st.DraftingStatus:
    """Return the status while a text is longer than the context of the draft model."""
    why = f"the text has {session.prefix.length} tokens, and the draft model's context holds"
    why += f" {context_length}: "
    if session.drafting:
        return replace(
            status, why=make_one_line(f"{why}only lookup drafts; {status.why}")[:_MAX_WHY]
        )
    advice = "nothing drafts; draft.window or draft.lookup would"
    return replace(status, worth=False, why=why + advice)


def _explain_gain(now: float, alone: float) -> str:
    """Return how a generation compares with one without this device, by the time that drafts
    saved."""
    speeds = f"{now:.1f} tokens a second against an estimated {alone:.1f} without this device"
    if now >= alone:
        return f"drafts saved {1.0 - alone / now:.0%} of the time of the last answer: {speeds}"
    return f"the last answer took {alone / now - 1.0:.0%} longer than without drafts: {speeds}"


def _explain_acceptance(found: st.DraftingStatus, price: RowPrice) -> str:
    why = f"{found.acceptance:.0%} of the draft's first choices were right"
    why += f", and a chance of {price.least_chance:.2f} would pay" if price.least_chance else ""
    if found.tokens_per_pass is not None:
        why += f"; a pass brings {found.tokens_per_pass:.1f} tokens"
    return why
