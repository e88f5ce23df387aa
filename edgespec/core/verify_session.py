"""The verifier's half of one generation, as a pure machine.

Theory of operation. The session owns the committed prefix, the speculation tree behind it and one
number, ``cache_length``: how many tokens the target's cache holds for it. A *pass* feeds the
committed tokens the cache lacks and the alive nodes; its result is walked by the acceptance rule
and committed. Drafts that arrive during a pass grow the tree for the next one.

    READY     no pass is running; ``Offer`` may start one
    PASSING   one is running; its request is frozen in ``_pass``
    FINISHED  the last token is committed, or the device cancelled
Attachment is apart from that: a session outlives its link by the lease, so that the device can
come back. Drafts only ever change *when* tokens are committed. Invariants: in a pass that samples,
``cache_length + len(feed) == prefix.length`` (between decoding passes the cache holds all but the
last committed token); every such pass commits at least one token; nothing is committed past a stop
id, max_tokens or the context. ``deadline`` is when to offer a pass, or look at ``over``, again.
"""

from __future__ import annotations

from typing import assert_never

from edgespec.core import verify_events as ev
from edgespec.core.acceptance import AcceptanceRule
from edgespec.core.draft_inbox import DraftInbox
from edgespec.core.ending import Ending
from edgespec.core.messages import (
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
from edgespec.core.prefix import CommittedPrefix
from edgespec.core.run_ahead import RunAheadPolicy
from edgespec.core.transitions import moved
from edgespec.core.value import value
from edgespec.core.work import ModelInfo, PassRequest


@value
class _Pass:
    request: PassRequest
    started_at: float
    queue_s: float


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
        self._detached_at: float | None = now
        self._idle_since = now
        self._received = self.prefix.length
        self._echo: tuple[int, float] | None = None
        self._pass: _Pass | None = None

    @property
    def attached(self) -> bool:
        return self._detached_at is None

    def resumes(self, request: Open) -> bool:
        """Whether ``request`` continues this very generation: same prompt, sampling and tokens."""
        return (
            request.sampling == self.request.sampling
            and request.prompt == self.request.prompt
            and self.prefix.starts_with(request.prompt + request.committed)
        )

    def over(self, now: float) -> bool:
        """Nothing more to do: all delivered and acknowledged, or the lease ran out."""
        if self.state is ev.FINISHED and self._received >= self.prefix.length:
            return True
        return self._detached_at is not None and now >= self._detached_at + self._limits.lease_s

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
                self._on_pass_failed()
                return ()
            case Cancel():
                self.finish = FinishReason.CANCELLED
                self.state = moved(self.state, ev.FINISHED)
                self._received = self.prefix.length
                return ()
            case _:
                assert_never(event)

    # --- the link --------------------------------------------------------------------------

    def _on_attach(self, request: Open, now: float) -> tuple[ev.VerifyAction, ...]:
        held = len(request.prompt) + len(request.committed)
        self.inbox.reset(request.drafting)
        self._detached_at, self.deadline, self._received = None, None, held
        self._echo, self._idle_since = None, now
        if self.finish is None and (finish := self._ending.reached(self.prefix)) is not None:
            self.state, self.finish = moved(self.state, ev.FINISHED), finish
        greeting = ev.Send(Opened(self._limits, self._model.name, held))
        if self.prefix.length == held and self.finish is None:
            return (greeting,)
        missing = tuple(self.prefix.tokens[held:])
        return greeting, ev.Send(Commit(held, missing, finish=self.finish))

    def _detach(self, now: float) -> None:
        if self._detached_at is None:
            self._detached_at = now
            self.deadline = now + self._limits.lease_s

    def _refuse(self, fault: Fault, now: float) -> tuple[ev.VerifyAction, ...]:
        self._detach(now)
        return ev.Send(fault), ev.Hangup()

    def _on_received(self, message: Received, now: float) -> tuple[ev.VerifyAction, ...]:
        length = self.prefix.length
        if message.position > length:
            why = f"received position {message.position} is beyond the committed length {length}"
            return self._refuse(Fault(FaultCode.RESYNC, why), now)
        self._received = max(self._received, message.position)
        if message.echo:
            self._echo = (message.echo, now)
        return ()

    # --- passes ----------------------------------------------------------------------------

    def _on_offer(self, offer: ev.Offer, now: float) -> tuple[ev.VerifyAction, ...]:
        if self.state is not ev.READY or not self.attached:
            return ()
        assert offer.max_rows >= 1
        self.deadline = None
        if self.prefix.length - self._received > self._limits.max_unreceived:
            return ()  # until a ``Received`` comes
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
        self._pass = _Pass(request, now, self.inbox.take_queue_s(now) if nodes else 0.0)
        self.state = moved(self.state, ev.PASSING)
        return request

    def _on_pass_failed(self) -> None:
        self._pass = None
        if self.state is ev.PASSING:
            self.state = moved(self.state, ev.READY)

    def _on_pass_done(self, targets: tuple[int, ...], now: float) -> tuple[ev.VerifyAction, ...]:
        assert self._pass is not None
        done, self._pass = self._pass, None
        if self.state is ev.FINISHED:  # cancelled meanwhile
            return ()
        self._idle_since = now
        self.cache_length += len(done.request.feed)
        if not done.request.sample:
            self.state = moved(self.state, ev.READY)
            return (ev.Keep(()),)
        assert self.cache_length == self.prefix.length
        walk = self._rule.walk(done.request.tokens, done.request.parents, targets)
        position = self.prefix.length
        tokens, self.finish = self._ending.cut(position, walk.tokens)
        self.cache_length += len(walk.nodes)
        self.inbox.commit(tokens, now, bool(walk.nodes) if done.request.tokens else None)
        commit = self._commit(position, tokens, min(len(walk.nodes), len(tokens)), done, now)
        send = (ev.Send(commit),) if self.attached else ()
        if self.finish is not None:
            self.state = moved(self.state, ev.FINISHED)
            return send
        self.state = moved(self.state, ev.READY)
        return ev.Keep(walk.nodes), *send

    def _commit(
        self, position: int, tokens: tuple[int, ...], accepted: int, done: _Pass, now: float
    ) -> Commit:
        rows = len(done.request.tokens)
        stale = self.inbox.take_stale()
        echo, held_at = self._echo or (0, now)
        self._echo = None
        self.counters.passes += 1
        self.counters.rows += rows
        self.counters.accepted += accepted
        self.counters.stale += stale
        return Commit(
            position=position,
            tokens=tokens,
            accepted=accepted,
            stale=stale,
            queue_us=round(done.queue_s * 1e6),
            verify_us=round((now - done.started_at) * 1e6),
            rows=rows,
            echo=echo,
            held_us=round((now - held_at) * 1e6),
            finish=self.finish,
        )
