"""Notes on an agent's generations, from which its status is made.

Theory of operation. A ``SessionDriver`` passes every event and action to its tracer anyway. A
``GenerationNotes`` stands in for that tracer: it keeps what a status needs and passes everything on
if there is a trace. The notes of all generations share one ring of events, a few counts and the
state of the link, behind a lock that is held for single assignments.

A fast agent has thousands of events a second, and a timeline of ten seconds cannot show anything
shorter than 10 ms. So events of one kind that end within 10 ms of the first are folded into one
entry. This makes at most 400 entries a second, and the ring holds ten seconds of them. An entry
that a reader was given never changes afterwards; the next event begins a new entry. At 5,700 events
a second, a reader that polls once a second receives about 400 entries, which stand for all events.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, fields
from typing import Final

from edgespec.core.device import events as ev
from edgespec.core.device.session import DraftSession
from edgespec.core.device.streaming_speed import StreamingSpeed
from edgespec.core.device.token_origins import find_origins
from edgespec.core.protocol.checks import make_one_line
from edgespec.core.protocol.messages import Commit, Draft, Fault, FinishReason, Opened
from edgespec.device.generation_timeline import GenerationTimeline
from edgespec.device.verifier_pool import VerifierRoute
from edgespec.telemetry import agent_status as st
from edgespec.telemetry.trace import Tracer

_COUNTED_FIELDS: Final = tuple(
    {field.name for field in fields(ev.DraftCounters)}
    & {field.name for field in fields(st.AgentTotals)}
)
_MAX_WHY: Final = 200
FOLD_S: Final = 0.01
"""A hundredth of a second is one column of pixels in a timeline of ten seconds."""
RATE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """State of the link to the verifier, since when (on the agent's clock), and why."""

    state: st.VerifierState
    since: float
    why: str = ""


class Activity:
    """The notes of one agent. The event loop writes them; any thread may read them."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()
        self.lock = threading.Lock()
        self.running: dict[int, GenerationNotes] = {}
        self.last: GenerationNotes | None = None
        """The generation that was started last."""
        self.last_drafted: GenerationNotes | None = None
        """The generation that ended last among the ones whose drafts were judged."""
        self.link = LinkStatus(st.VerifierState.UNKNOWN, self.began_at)
        self.last_event = 0
        self._events: deque[st.TimelineEvent] = deque(maxlen=st.MAX_EVENTS)
        self._open: dict[st.EventKind, tuple[float, st.TimelineEvent]] = {}
        """The entry of each kind that still absorbs events, and the time at which that ends."""
        self._ended = Counter[str]()
        self.generation_count = 0

    def start(
        self,
        session: DraftSession,
        route: VerifierRoute,
        inner: Tracer | None,
        timeline: GenerationTimeline | None = None,
    ) -> GenerationNotes:
        """Return the notes of a new generation, which also write its ``timeline`` if it has one.

        They are the tracer of its driver. Call ``finish`` with them when it has ended."""
        with self.lock:
            self.generation_count += 1
            notes = GenerationNotes(self, session, route, inner, timeline)
            self.running[notes.number] = self.last = notes
        return notes

    def finish(self, notes: GenerationNotes) -> None:
        """Add an ended generation to the totals. A second call does nothing."""
        with self.lock:
            if self.running.pop(notes.number, None) is None:
                return
            self._ended.update({**notes.count_totals(), notes.outcome: 1})
            if notes.session.counters.tried:
                self.last_drafted = notes
            idle = not self.running
        if idle and self.link.state is st.VerifierState.SERVING:
            self.set_link_state(st.VerifierState.READY, time.monotonic())

    def events_after(self, number: int) -> tuple[tuple[st.TimelineEvent, ...], int]:
        """Return the events with a number above ``number``, and how many of them the ring has
        lost."""
        with self.lock:
            behind = self.last_event - number
            if behind <= 0:
                return (), 0
            self._open.clear()  # An entry that a reader was given must not change any more.
            kept = tuple(self._events)
        return kept[-behind:], max(0, behind - len(kept))

    def tokens_per_s(self, now: float) -> float:
        """Return the rate of all generations together over the last ``RATE_S`` seconds.

        If their first token is younger than that, its age is the time that counts, at least one
        second."""
        count, first_at = 0, now
        with self.lock:
            for event in reversed(self._events):
                if event.at_s < now - RATE_S:
                    break
                if event.kind is st.EventKind.COMMIT:
                    count, first_at = count + event.count, event.at_s
        return count / max(now - first_at, 1.0)

    def totals(self) -> st.AgentTotals:
        """Return all counts, including those of running generations so far."""
        with self.lock:
            counts = self._ended.copy()
            running = tuple(self.running.values())
        for notes in running:
            counts.update(notes.count_totals())
        return st.AgentTotals(**{"generations": self.generation_count, **counts})

    # --- for the notes ---------------------------------------------------------------------

    def note(
        self,
        at_s: float,
        generation: int,
        kind: st.EventKind,
        count: int = 0,
        accepted: int = 0,
        served: int = 0,
        took_s: float = 0.0,
    ) -> None:
        with self.lock:
            end_s, entry = self._open.get(kind, (at_s, None))
            if entry is None or at_s >= end_s or kind is st.EventKind.LINK:
                self.last_event += 1
                entry = st.TimelineEvent(self.last_event, at_s, generation, kind, events=0)
                self._events.append(entry)
                self._open[kind] = (at_s + FOLD_S, entry)
            entry.took_s = max(took_s, entry.took_s + at_s - entry.at_s)
            entry.at_s = at_s
            entry.generation = generation if entry.generation == generation else 0
            entry.count += count
            entry.accepted += accepted
            entry.served += served
            entry.events += 1

    def set_link_state(self, state: st.VerifierState, at_s: float, why: str = "") -> None:
        """Note a state of the link. An unchanged state keeps its time."""
        if self.link.state is not state:
            self.link = LinkStatus(state, at_s, make_one_line(why)[:_MAX_WHY])


class GenerationNotes:
    """A ``Tracer`` that notes what one generation does and passes everything on to ``inner``, if
    there is one."""

    def __init__(
        self,
        activity: Activity,
        session: DraftSession,
        route: VerifierRoute,
        inner: Tracer | None,
        timeline: GenerationTimeline | None = None,
    ) -> None:
        self.number, self.session = activity.generation_count, session
        self.speed = StreamingSpeed() if timeline is None else timeline.speed
        """Speed of this generation, and the estimate for plain streaming."""
        self._timeline = timeline
        self.began_at = self.last_token_at = time.monotonic()
        self.first_token_at: float | None = None
        self.first_count = 0
        """Tokens of the first commit."""
        self.outcome = "cancelled"
        self.model = session.request.model
        """Name of the model. It is the verifier's own name for it once `Opened` has arrived."""
        self._activity, self._inner, self._route = activity, inner, route
        self._step_at: float | None = None

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        if type(item) in _NOTED_TYPES:
            self._note_event(at_s, item)
        if self._inner is not None:
            self._inner.record(at_s, side, session, kind, item)

    @property
    def verifier(self) -> str:
        """The address in use, or that of the last token. Empty with a single verifier."""
        return self._route.current.address_in_use or self._route.current.last_address or ""

    def count_totals(self) -> dict[str, int]:
        """Return this generation's part of ``AgentTotals``."""
        counters, request = self.session.counters, self.session.request
        counts = {name: int(getattr(counters, name)) for name in _COUNTED_FIELDS}
        counts["tokens"] = counters.committed
        counts["prompt_tokens"] = len(request.prompt)
        counts["draft_failures"] = int(bool(counters.draft_failure))
        return counts

    def _note_event(self, at_s: float, item: object) -> None:
        note = self._note
        match item:
            case ev.StartStep():
                self._step_at = at_s
            case ev.StepDone(candidates):
                began, self._step_at = self._step_at, None
                took_s = 0.0 if began is None else at_s - began
                note(at_s, st.EventKind.DRAFT, len(candidates), took_s=took_s)
            case ev.Transmit(message):
                if isinstance(message, Draft) and message.tokens:
                    note(at_s, st.EventKind.SEND, len(message.tokens))
            case Commit():
                if item.verify_us:
                    took_s = item.verify_us / 1e6
                    note(at_s, st.EventKind.PASS, item.rows, took_s=took_s)
                    self.speed.add(at_s, len(item.tokens), took_s, item.rows)
                if count := len(item.tokens):
                    # The last token of a pass is the target's own.
                    served = max(0, count - item.accepted - 1) if item.verify_us else 0
                    note(at_s, st.EventKind.COMMIT, count, item.accepted, served)
                    if self._timeline is not None:
                        # The session reads the commit after this, so the tree is as it was.
                        prefix = self.session.prefix
                        held = prefix.length - prefix.prompt_length
                        self._timeline.origins[held:] = find_origins(
                            self.session.tree, item, has_prediction=self.session.has_prediction
                        )
            case ev.Deliver():
                self._note_tokens(at_s, len(item.tokens))
            case ev.Finish(reason):
                self.outcome = "cancelled" if reason is FinishReason.CANCELLED else "finished"
            case ev.Fail():
                self.outcome = "failed"
            case _:
                self._note_link(at_s, item)

    def _note(
        self,
        at_s: float,
        kind: st.EventKind,
        count: int = 0,
        accepted: int = 0,
        served: int = 0,
        took_s: float = 0.0,
    ) -> None:
        self._activity.note(at_s, self.number, kind, count, accepted, served, took_s)
        if self._timeline is not None:
            self._timeline.add(kind, at_s, count, took_s)

    def _note_link(self, at_s: float, item: object) -> None:
        activity, link_state = self._activity, self._activity.link.state
        match item:
            case ev.Connect():
                # A verifier that was away stays away until it answers. One that serves keeps that
                # state, since another generation runs there.
                if link_state in (st.VerifierState.UNKNOWN, st.VerifierState.READY):
                    activity.set_link_state(st.VerifierState.CONNECTING, at_s)
            case ev.Connected():
                self._note(at_s, st.EventKind.LINK, 1)
            case Opened(model=model):
                self.model = model
                activity.set_link_state(st.VerifierState.SERVING, at_s)
            case ev.LinkDown(why):
                self._note_loss(at_s, why)
            case Fault(code, message):
                # Other faults refuse this one generation and do not concern the link.
                if code.retryable:
                    self._note_loss(at_s, message)

    def _note_tokens(self, at_s: float, count: int) -> None:
        self.last_token_at = at_s
        if self.first_token_at is None:
            self.first_token_at, self.first_count = at_s, count
        # Another generation had lost its link.
        if self._activity.link.state is not st.VerifierState.SERVING:
            self._activity.set_link_state(st.VerifierState.SERVING, at_s)

    def _note_loss(self, at_s: float, why: str) -> None:
        self._note(at_s, st.EventKind.LINK, 0)
        self._activity.set_link_state(st.VerifierState.AWAY, at_s, why)


_NOTED_TYPES: Final = frozenset(
    {ev.StartStep, ev.StepDone, ev.Transmit, Commit, ev.Deliver, ev.Finish, ev.Fail}
    | {ev.Connect, ev.Connected, Opened, ev.LinkDown, Fault}
)
