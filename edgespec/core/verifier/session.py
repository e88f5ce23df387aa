"""The verifier's half of one generation, as a pure machine.

Theory of operation. The session owns the committed prefix, the speculation tree behind it and one
number, ``cache_length``: how many tokens the target's cache holds for it. A *pass* feeds the
committed tokens the cache lacks and the alive nodes; its result is walked by the acceptance rule
and committed. Drafts that arrive during a pass grow the tree for the next one.

    READY     no pass is running; ``Offer`` may start one
    PASSING   one is running; its request is kept in ``_pass``
    FINISHED  the last token is committed, or the device cancelled
A session outlives its stream by the lease (``attachment.py``). Drafts only change *when* tokens are
committed. Invariants: in a pass that samples, ``cache_length + len(feed) == prefix.length``; every
such pass commits at least one token; nothing is committed past a stop id, max_tokens or the
context. ``Evicted`` takes its cache away, ``Cached`` gives some back. ``deadline``: look again.
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
from edgespec.core.protocol.work import ModelInfo
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.acceptance import AcceptanceRule
from edgespec.core.verifier.attachment import Attachment
from edgespec.core.verifier.inbox import DraftInbox
from edgespec.core.verifier.pass_report import PassReport
from edgespec.core.verifier.pass_request import PassFormer
from edgespec.core.verifier.priced_share import PricedShare
from edgespec.core.verifier.resume import missed_commits
from edgespec.core.verifier.run_ahead import RunAheadPolicy
from edgespec.core.verifier.score_keeper import ScoreKeeper
from edgespec.core.verifier.served_drafts import ServedDrafts
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
        served: ServedDrafts | None = None,
        *,
        trees: bool = True,
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
        share, most, end = PricedShare(request), limits.max_nodes_per_pass, self._ending.end
        self._former = PassFormer(
            request, self.prefix, self.inbox, most, end, served, share, trees=trees
        )
        self.device = Attachment(self.prefix.length, now)
        self._idle_since, self._scores = now, ScoreKeeper()
        self._pass: ev.RunningPass | None = None
        self._report = PassReport(
            request, self.inbox, self.device, self._scores, self.counters, share
        )

    @property
    def attached(self) -> bool:
        return self.device.attached

    @property
    def wants_pass(self) -> bool:
        """Whether it would take part in a pass, were there room and time."""
        return self.state is ev.READY and self.device.attached and self.device.unread_since is None

    @property
    def missing_rows(self) -> int:
        """Committed tokens that it has to feed in the pass it wants; 0 if it wants none, or what
        it said last has not left."""
        device = self.device
        if self.state is not ev.READY or device.detached_at is not None or device.behind:
            return 0
        return 0 if device.unread_since is not None else self.prefix.length - self.cache_length

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
            case ev.PassDone():
                return self._on_pass_done(event, now)
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
            case ev.Evicted() | ev.Cached():
                assert self._pass is None
                self.cache_length = event.length
                return ()
            case ev.Stalled(waited_s):
                if self.state is ev.FINISHED:  # all was sent: a good end, acknowledged or not
                    self._detach(now)
                    return (ev.Hangup(),)
                why = f"nothing was acknowledged for {waited_s:.0f} s"
                return self._refuse(Fault(FaultCode.OVERLOADED, why, retry_after_s=1.0), now)
            case ev.SayAlive():
                return (self._say(Commit(self.prefix.length, ()), now),)
            case Cancel():
                return self._on_cancel(now)
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
        name, fingerprint = self._model.name, self._model.fingerprint
        constrained = request.sampling.constraint is not None
        opened = Opened(self._limits, name, held, fingerprint, constrained)
        greeting = self._say(opened, now)
        missed = missed_commits(self.prefix, held, self.finish, self._scores)
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

    def _on_cancel(self, now: float) -> tuple[ev.VerifyAction, ...]:
        """The device hears that the text ends here, unless it was told of an end before."""
        news = self.state is not ev.FINISHED and self.attached
        self._give_up()
        if not news:
            return ()
        return (self._say(Commit(self.prefix.length, (), finish=self.finish), now),)

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
        self._scores.acknowledged(self.device.received)
        self._note_unread(now)
        return ()

    def _note_unread(self, now: float) -> None:
        most = 0 if self.state is ev.FINISHED else self._limits.max_unreceived
        self.device.note_unread(self.prefix.length, most, now)

    # --- passes ----------------------------------------------------------------------------

    def _on_offer(self, offer: ev.Offer, now: float) -> tuple[ev.VerifyAction, ...]:
        if not self.missing_rows:
            return ()
        assert offer.max_rows >= 1
        self.deadline = None
        last = self._ending.end - 1  # there a draft cannot help, so none is waited for
        decoding = self.prefix.prompt_length < self.cache_length + 1 == self.prefix.length < last
        if decoding and not self.inbox.tree.nodes:
            view = self.inbox.view(
                now, self._idle_since, offer.pass_s, runs_anyway=offer.runs_anyway
            )
            start_at = self._run_ahead.start_at(view)
            if start_at > now:
                self.deadline = start_at
                return ()
        request = self._former.form(self.cache_length, offer)
        queue_s = self.inbox.take_queue_s(now) if request.drafted else 0.0
        self._pass = ev.RunningPass(request, now, queue_s)
        self.state = transition(VERIFY_MOVES, self.state, ev.PASSING)
        return (ev.RunPass(request),)

    def _on_pass_done(self, event: ev.PassDone, now: float) -> tuple[ev.VerifyAction, ...]:
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
        walk = self._rule.walk(done.request.tokens, done.request.parents, event.targets)
        tokens, self.finish = self._ending.cut(self.prefix.length, walk.tokens)
        self.cache_length += len(walk.nodes)
        inside = walk.nodes[: len(tokens)]  # not those behind the end
        accepted = self._former.learn(done.request, event.targets, inside, self.counters)
        if event.scores:
            self._scores.commit(self.prefix.length, event.scores, walk.nodes, len(tokens))
        self.inbox.commit(tokens, now, bool(accepted) if done.request.drafted else None)
        position = self.prefix.length - len(tokens)
        commit = self._report.commit(
            position, tokens, accepted, self.finish, done, event.row_price, now
        )
        send = (self._say(commit, now),) if self.attached else ()
        following = ev.READY if self.finish is None else ev.FINISHED
        self.state = transition(VERIFY_MOVES, self.state, following)
        self._note_unread(now)
        return send if self.finish is not None else (ev.Keep(walk.nodes), *send)
