"""The verifier's half of one generation, as a pure machine.

Theory of operation. The session owns the committed prefix, the speculation tree behind it and one
number, ``cache_length``: how many tokens the target's cache holds for it. A *pass* feeds the
committed tokens the cache lacks and the alive nodes; its result is walked by the acceptance rule
and committed. Drafts that arrive during a pass grow the tree for the next one.

    READY     no pass is running; ``Offer`` may start one
    PASSING   one is running; its request is kept in ``_pass``
    FINISHED  the last token is committed, or the device cancelled
A session outlives its stream by the lease (``attachment.py``). Drafts only ever change *when*
tokens are committed. Invariants: in a pass that samples, ``cache_length + len(feed) ==
prefix.length`` (between decoding passes the cache holds all but the last committed token); every
such pass commits at least one token; nothing is committed past a stop id, max_tokens or the
context. ``Evicted`` takes its cache away: it feeds its prefix again. ``deadline`` is when to offer
a pass, or look at ``over``, again.
"""

from __future__ import annotations

from typing import assert_never

from edgespec.core.protocol.ending import Ending
from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Limits,
    Open,
    Opened,
    Received,
)
from edgespec.core.protocol.prefix import CommittedPrefix
from edgespec.core.protocol.transitions import transition
from edgespec.core.protocol.work import ModelInfo, PassRequest
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.acceptance import AcceptanceRule
from edgespec.core.verifier.attachment import Attachment
from edgespec.core.verifier.inbox import DraftInbox
from edgespec.core.verifier.resume import missed_commits
from edgespec.core.verifier.run_ahead import RunAheadPolicy
from edgespec.core.verifier.transitions import VERIFY_MOVES


class VerifySession:
    def __init__(
        self,
        request: Open,
        model: ModelInfo,
        limits: Limits,
        rule: AcceptanceRule,
        run_ahead: RunAheadPolicy,
        now: float,
    ) -> None:
        self.request = request
        self.state = ev.READY
        self.finish: FinishReason | None = None
        self.prefix = CommittedPrefix(request.prompt, request.committed)
        self.inbox = DraftInbox(self.prefix, model.vocabulary_size, limits)
        self.counters = ev.VerifyCounters()
        self.cache_length = 0
        self.deadline: float | None = None
        self._model, self._limits, self._rule, self._run_ahead = model, limits, rule, run_ahead
        self._ending = Ending.of(
            request.sampling, len(request.prompt), limits.context_length, model.eos_token_ids
        )
        self.device = Attachment(self.prefix.length, now)
        self._idle_since = now
        self._pass: ev.RunningPass | None = None

    @property
    def attached(self) -> bool:
        return self.device.attached

    @property
    def wants_pass(self) -> bool:
        """Whether it would take part in a pass, were there room and time."""
        return self.state is ev.READY and self.device.attached and self.device.unread_since is None

    def over(self, now: float) -> bool:
        """Nothing more to do: all delivered and acknowledged, or the lease ran out."""
        if self.state is ev.FINISHED and self.device.received >= self.prefix.length:
            return True
        detached_at = self.device.detached_at
        return detached_at is not None and now >= detached_at + self._limits.lease_s

    def handle(self, event: ev.VerifyEvent, now: float) -> tuple[ev.VerifyAction, ...]:
        match event:
            case Draft():
                fault = self.inbox.receive(event, now)
                return () if fault is None else self._refuse(fault, now)
            case ev.Offer():
                return self._on_offer(event, now)
            case ev.PassDone(targets):
                return self._on_pass_done(targets, now)
            case Received():
                return self._on_received(event, now)
            case ev.Attach(request):
                return self._on_attach(request, now)
            case ev.Detach():
                self._detach(now)
                return ()
            case ev.PassFailed():
                self._pass = None
                if self.state is ev.PASSING:
                    self.state = transition(VERIFY_MOVES, self.state, ev.READY)
                return ()
            case ev.Evicted():
                assert self._pass is None
                self.cache_length = 0
                return ()
            case ev.Stalled(waited_s):
                why = f"nothing was acknowledged for {waited_s:.0f} s"
                return self._refuse(Fault(FaultCode.OVERLOADED, why, retry_after_s=1.0), now)
            case ev.SayAlive():
                return (self._say(Commit(self.prefix.length, ()), now),)
            case Cancel():
                self._give_up()
                return ()
            case _:
                assert_never(event)

    # --- the link --------------------------------------------------------------------------

    def _on_attach(self, request: Open, now: float) -> tuple[ev.VerifyAction, ...]:
        held = len(request.prompt) + len(request.committed)
        self.inbox.reset(request.drafting)
        self.device.attach(held, now)
        self.deadline, self._idle_since = None, now
        if self.finish is None and (finish := self._ending.reached(self.prefix)) is not None:
            self.state, self.finish = transition(VERIFY_MOVES, self.state, ev.FINISHED), finish
        self._note_unread(now)
        greeting = self._say(Opened(self._limits, self._model.name, held), now)
        missed = missed_commits(self.prefix, held, self.finish)
        return greeting, *(self._say(commit, now) for commit in missed)

    def _say(self, message: Opened | Commit | Fault, now: float) -> ev.Send:
        self.device.spoke_at = now
        return ev.Send(message)

    def _detach(self, now: float) -> None:
        if self.attached:
            self.device.detach(now)
            self.deadline = now + self._limits.lease_s

    def _refuse(self, fault: Fault, now: float) -> tuple[ev.VerifyAction, ...]:
        """End the stream; the session too, if coming back cannot help."""
        self._detach(now)
        if not fault.code.retryable:
            self._give_up()
        return self._say(fault, now), ev.Hangup()

    def _give_up(self) -> None:
        """Nobody wants the rest: nothing is delivered or waited for any more."""
        self.finish = FinishReason.CANCELLED
        self.state = transition(VERIFY_MOVES, self.state, ev.FINISHED)
        self.device.received = self.prefix.length

    def _on_received(self, message: Received, now: float) -> tuple[ev.VerifyAction, ...]:
        if message.position > self.prefix.length:
            why = f"received position {message.position} is beyond the {self.prefix.length} known"
            return self._refuse(Fault(FaultCode.RESYNC, why), now)
        self.device.acknowledge(message, now)
        self._note_unread(now)
        return ()

    def _note_unread(self, now: float) -> None:
        most = 0 if self.state is ev.FINISHED else self._limits.max_unreceived
        self.device.note_unread(self.prefix.length, most, now)

    # --- passes ----------------------------------------------------------------------------

    def _on_offer(self, offer: ev.Offer, now: float) -> tuple[ev.VerifyAction, ...]:
        if not self.wants_pass:
            return ()
        assert offer.max_rows >= 1
        self.deadline = None
        last = self._ending.end - 1  # there a draft cannot help, so none is waited for
        decoding = self.prefix.prompt_length < self.cache_length + 1 == self.prefix.length < last
        if decoding and not self.inbox.verifiable(1, self._ending.end):
            view = self.inbox.view(now, self._idle_since, offer.pass_s)
            start_at = self._run_ahead.start_at(view)
            if start_at > now:
                self.deadline = start_at
                return ()
        return (ev.RunPass(self._start_pass(offer, now)),)

    def _start_pass(self, offer: ev.Offer, now: float) -> PassRequest:
        first, last = self.cache_length, self.prefix.length
        feed = tuple(self.prefix.tokens[first : min(last, first + offer.max_rows)])
        sample = first + len(feed) == last
        room = min(offer.max_rows - len(feed), self._limits.max_nodes_per_pass) if sample else 0
        nodes = self.inbox.verifiable(room, self._ending.end, offer.least_chance)
        index = {node.id: i for i, node in enumerate(nodes)}
        request = PassRequest(
            key=self.request.session_id,
            cache_length=first,
            feed=feed,
            tokens=tuple([node.token for node in nodes]),
            parents=tuple([index.get(node.parent, -1) for node in nodes]),
            sample=sample,
        )
        self._pass = ev.RunningPass(request, now, self.inbox.take_queue_s(now) if nodes else 0.0)
        self.state = transition(VERIFY_MOVES, self.state, ev.PASSING)
        return request

    def _on_pass_done(self, targets: tuple[int, ...], now: float) -> tuple[ev.VerifyAction, ...]:
        assert self._pass is not None
        done, self._pass = self._pass, None
        if self.state is ev.FINISHED:  # cancelled meanwhile
            return ()
        self._idle_since = now
        self.cache_length += len(done.request.feed)
        if not done.request.sample:
            self.state = transition(VERIFY_MOVES, self.state, ev.READY)
            return (ev.Keep(()),)
        assert self.cache_length == self.prefix.length
        walk = self._rule.walk(done.request.tokens, done.request.parents, targets)
        tokens, self.finish = self._ending.cut(self.prefix.length, walk.tokens)
        self.cache_length += len(walk.nodes)
        self.inbox.commit(tokens, now, bool(walk.nodes) if done.request.tokens else None)
        commit = self._commit(tokens, min(len(walk.nodes), len(tokens)), done, now)
        send = (self._say(commit, now),) if self.attached else ()
        following = ev.READY if self.finish is None else ev.FINISHED
        self.state = transition(VERIFY_MOVES, self.state, following)
        self._note_unread(now)
        return send if self.finish is not None else (ev.Keep(walk.nodes), *send)

    def _commit(
        self, tokens: tuple[int, ...], accepted: int, done: ev.RunningPass, now: float
    ) -> Commit:
        rows = len(done.request.tokens)
        stale = self.inbox.take_stale()
        echo, held_us = self.device.take_echo(now)
        self.counters.count(rows, accepted, stale)
        return Commit(
            position=self.prefix.length - len(tokens),
            tokens=tokens,
            accepted=accepted,
            stale=stale,
            queue_us=round(done.queue_s * 1e6),
            verify_us=round((now - done.started_at) * 1e6),
            rows=rows,
            echo=echo,
            held_us=held_us,
            finish=self.finish,
        )
