"""The device's half of one generation, as a pure machine.

Theory of operation. The session owns the committed prefix (what the user has been given: the truth
on reconnect), the tree of guesses behind it, and the plan of what to draft next. Three things run
side by side: the link, at most one draft step, and the stream of commits. Every event ends in
``_pump``, which sends what the policy wants sent and starts the step it wants started.

    IDLE -> CONNECTING -> STREAMING -> DONE, and BACKING_OFF -> CONNECTING after a broken link

A step that was running when a commit moved the root is matched against the new root when it ends:
its guesses become nodes, agree with what is committed already, or are dropped. Invariants: only
committed tokens are delivered, once and in order; a node is sent at most once a stream; drafting
goes on while the link is down, as far as the policy lets it. ``deadline`` is when to send ``Tick``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from edgespec.core import draft_events as ev
from edgespec.core.commit_reader import CommitReader
from edgespec.core.draft_cache import DraftCache
from edgespec.core.draft_outbox import DraftOutbox
from edgespec.core.draft_policy import DraftPolicy, DraftView
from edgespec.core.messages import Cancel, Commit, Fault, FaultCode, Limits, Open, Opened, RunAhead
from edgespec.core.prefix import CommittedPrefix
from edgespec.core.reconnect import Reconnect, ReconnectPolicy
from edgespec.core.transitions import moved
from edgespec.core.tree import FORWARDED, SpeculationTree
from edgespec.core.value import value


@value
class _Step:
    parent: int
    base_position: int
    started_at: float
    fed: int


# Until ``Opened`` tells; a verifier that takes less drops the rest, which is harmless.
_LIMITS_BEFORE_OPENED = Limits(max_nodes_outstanding=16)
# Feeding more than this is prefill or catching up, and says little about a usual step.
_USUAL_FEED = 2


class DraftSession:
    def __init__(
        self,
        request: Open,
        policy: DraftPolicy,
        reconnect: ReconnectPolicy,
        draft_context_length: int,
        jitter_seed: int = 0,
    ) -> None:
        self.request = request
        self.state = ev.IDLE
        self.deadline: float | None = None
        self.prefix = CommittedPrefix(request.prompt, request.committed)
        self.tree = SpeculationTree(self.prefix)
        self.limits = _LIMITS_BEFORE_OPENED
        self.drafting = request.drafting
        self._policy, self._reconnect_policy = policy, reconnect
        self._reconnect = Reconnect(reconnect, jitter_seed)
        self._end = len(request.prompt) + request.sampling.max_tokens - 1
        self._end = min(self._end, draft_context_length)
        self._cache = DraftCache()
        self._outbox = DraftOutbox(self.tree)
        self._reader = CommitReader(self.tree, self._outbox)
        self.counters, self.estimates = self._reader.counters, self._reader.estimates
        self._step: _Step | None = None
        self._barren: tuple[int, int] | None = None  # where the drafter had nothing to say
        self._told_to_go = False

    def handle(self, event: ev.DraftEvent, now: float) -> tuple[ev.DraftAction, ...]:
        if self.state is ev.DONE:
            return ()
        match event:
            case ev.StepDone():
                actions = self._on_step_done(event, now)
            case Commit() | Opened() | Fault():
                if self.state is not ev.STREAMING:
                    return ()  # said on a link that is gone
                actions = self._on_message(event, now)
            case ev.Start():
                actions = self._connect(now)
            case ev.Connected():
                actions = self._on_connected(now)
            case ev.LinkDown(why, retryable):
                actions = self._on_link_down(why, retryable, now)
            case ev.Tick():
                actions = self._on_tick(now)
            case ev.StepFailed():
                self._step, self.drafting = None, False
                actions = []
            case ev.Stop(reason):
                actions = [ev.Transmit(Cancel())] if self.state is ev.STREAMING else []
                actions += self._done(ev.Finish(reason))
            case _:
                assert_never(event)
        self._pump(actions, now)
        return tuple(actions)

    def _move(self, state: ev.LinkState, deadline: float | None) -> None:
        self.state, self.deadline = moved(self.state, state), deadline

    def _on_message(self, message: Commit | Opened | Fault, now: float) -> list[ev.DraftAction]:
        match message:
            case Commit():
                return self._on_commit(message, now)
            case Opened():
                return self._on_opened(message)
            case Fault():
                return self._on_fault(message, now)

    # --- the link --------------------------------------------------------------------------

    def _connect(self, now: float) -> list[ev.DraftAction]:
        self._move(ev.CONNECTING, now + self._reconnect_policy.answer_s)
        return [ev.Connect()]

    def _on_connected(self, now: float) -> list[ev.DraftAction]:
        self.state = moved(self.state, ev.STREAMING)
        self._outbox.new_stream()
        self._reader.new_stream()
        self._told_to_go = False
        held = tuple(self.prefix.output)
        return [ev.Transmit(replace(self.request, committed=held, drafting=self.drafting))]

    def _on_opened(self, opened: Opened) -> list[ev.DraftAction]:
        self.limits, self.deadline = opened.limits, None
        self._reader.max_unreceived = opened.limits.max_unreceived
        self._outbox.trim(opened.limits.max_nodes_outstanding)
        self._end = min(self._end, opened.limits.context_length - 1)
        self._reconnect.succeeded()
        return []

    def _on_link_down(
        self, why: str, retryable: bool, now: float, retry_after_s: float = 0.0
    ) -> list[ev.DraftAction]:
        if not retryable:
            return self._done(ev.Fail(why))
        again_at = self._reconnect.failed(now, retry_after_s)
        if again_at is None:
            return self._done(ev.Fail(f"gave up on the verifier: {why}", FaultCode.OVERLOADED))
        self.counters.reconnects += 1
        self._move(ev.BACKING_OFF, again_at)
        return []

    def _on_tick(self, now: float) -> list[ev.DraftAction]:
        if self.deadline is None or now < self.deadline:
            return []
        if self.state is ev.BACKING_OFF:
            return self._connect(now)
        why = f"no answer from the verifier within {self._reconnect_policy.answer_s} s"
        return [ev.Disconnect(), *self._on_link_down(why, True, now)]

    def _on_fault(self, fault: Fault, now: float) -> list[ev.DraftAction]:
        if not fault.code.retryable:
            return self._done(ev.Fail(fault.message, fault.code))
        return [ev.Disconnect(), *self._on_link_down(fault.message, True, now, fault.retry_after_s)]

    def _done(self, last: ev.Finish | ev.Fail) -> list[ev.DraftAction]:
        self._move(ev.DONE, None)
        return [ev.Disconnect(), last]

    # --- commits and steps -----------------------------------------------------------------

    def _on_commit(self, commit: Commit, now: float) -> list[ev.DraftAction]:
        if not self._reader.continues(commit):
            why = f"commit at {commit.position} does not continue the {self.prefix.length} held"
            return [ev.Disconnect(), *self._on_link_down(why, True, now)]
        self._told_to_go = False
        delivered = self._reader.read(commit, now)
        actions: list[ev.DraftAction] = [] if delivered is None else [delivered]
        received = self._reader.acknowledge(now, last=commit.finish is not None)
        if received is not None:
            actions.append(ev.Transmit(received))
        if commit.finish is not None:
            actions += self._done(ev.Finish(commit.finish))
        return actions

    def _on_step_done(self, done: ev.StepDone, now: float) -> list[ev.DraftAction]:
        assert self._step is not None
        step, self._step = self._step, None
        self.counters.steps += 1
        self._barren = None if done.candidates else (step.parent, step.base_position)
        if step.fed <= _USUAL_FEED:
            self.estimates.step_s.add(now - step.started_at)
        winner, late = None, False
        if step.base_position < self.prefix.length:  # the root moved meanwhile
            position = self.tree.place(step.parent, step.base_position)
            late = position is not None and position < self.prefix.length
        for rank, candidate in enumerate(done.candidates):
            node_id = self.tree.last_id + 1
            growth = self.tree.grow(node_id, step.parent, candidate.token, step.base_position, rank)
            winner = rank if growth is FORWARDED else winner
        if late:  # decided while the step ran; it still says how good the draft is
            self._reader.score(winner)
        return []

    def _pump(self, actions: list[ev.DraftAction], now: float) -> None:
        """Send what the policy wants sent, start the step it wants started."""
        if self.state is ev.DONE:
            return
        streaming = self.state is ev.STREAMING
        unsent = self._outbox.unsent
        if streaming and unsent and self._policy.flush(self._view(unsent)):
            actions += self._send_drafts()
            unsent = self._outbox.unsent
        if self._step is not None:
            return
        if self.drafting:
            parent = self._policy.extend(self._view(unsent))
            if parent is not None and (parent, self.prefix.length) != self._barren:
                actions.append(self._start_step(parent, now))
                return
        if streaming and unsent == len(self.tree.nodes):
            actions += self._nothing_to_come()

    def _send_drafts(self) -> list[ev.DraftAction]:
        drafts = self._outbox.take(self.limits.max_nodes_outstanding)
        self.counters.sent += sum([len(draft.tokens) for draft in drafts])
        return [ev.Transmit(draft) for draft in drafts]

    def _nothing_to_come(self) -> list[ev.DraftAction]:
        """Nothing is drafted or in flight: hand over what there is, or tell the verifier to go."""
        if self._outbox.unsent:
            return self._send_drafts()
        if self._told_to_go or self.request.run_ahead is not RunAhead.NEVER:
            return []
        self._told_to_go = True
        return [ev.Transmit(self._outbox.nothing())]

    def _start_step(self, parent: int, now: float) -> ev.StartStep:
        base = self.prefix.length
        keep, feed = self._cache.feed(self.prefix, self.tree.path(parent))
        self._step = _Step(parent, base, now, len(feed))
        return ev.StartStep(keep, feed, self._policy.width)

    def _view(self, unsent: int) -> DraftView:
        alive = len(self.tree.nodes)
        room = self.limits.max_nodes_outstanding - alive
        return DraftView(self.tree, unsent, alive - unsent, room, self._end, self.estimates)
