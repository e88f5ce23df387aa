"""The verifier's half of one generation, as a pure machine.

Theory of operation. The session owns the committed prefix, the speculation tree behind it and one
number, ``cache_length``: how many tokens the target's cache holds for it. A *pass* feeds the
committed tokens that the cache lacks, and the alive nodes. The acceptance rule walks the result,
and the accepted tokens are committed. Drafts that arrive during a pass grow the tree for the next
one.

    READY     no pass is running; ``Offer`` may start one
    PASSING   one is running; its request is kept in ``_pass``
    FINISHED  the last token is committed, or the device cancelled

A session outlives its stream by the lease (``Attachment``). Drafts only change *when* tokens are
committed; under a relaxed rule also which. ``Cached`` reports that the session's cache was evicted,
or that part of it was filled by another session. ``deadline`` is the time at which the engine
should review the session.

Invariants: in a pass that samples, ``cache_length + len(feed) == prefix.length``; every such pass
commits at least one token; no token is committed past a stop id, max_tokens or the context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hmac import compare_digest
from typing import Final, assert_never

from edgespec.core.protocol.acceptance import AcceptanceRule, Walk
from edgespec.core.protocol.checks import check_transition
from edgespec.core.protocol.draft_source import SourceKind
from edgespec.core.protocol.messages import (
    EXACT_RULE,
    MAX_COMMIT_TOKENS,
    MAX_PRICE,
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
from edgespec.core.protocol.tree import CommittedPrefix, EndCondition
from edgespec.core.protocol.work import ModelInfo, PassRequest, TokenScore
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.draft_inbox import DraftInbox
from edgespec.core.verifier.draft_round import LONGEST_CHAIN
from edgespec.core.verifier.pass_tree import PassTree, PassVerdict, PassView
from edgespec.core.verifier.row_price import PricedShare
from edgespec.core.verifier.run_ahead import DraftHistory, RunAheadPolicy
from edgespec.core.verifier.server_drafts import ServerDrafts
from edgespec.core.verifier.session_events import VERIFY_MOVES

READ_REPORT_S: Final = 1.0
"""Least interval of the messages that report how much of the prompt is read."""


class Attachment:
    """The state of a session's link to its device, which held ``length`` tokens when it opened.

    A session outlives its stream by the lease, so that the device can come back.
    """

    def __init__(self, length: int, now: float, detached_at: float | None = None) -> None:
        self.detached_at = detached_at
        """Time since which the session has no stream; None while it has one."""
        self.unacknowledged_since: float | None = None
        """Time since which no more is sent because the device acknowledges nothing; None
        otherwise."""
        self.is_behind = False
        """True while the send queue still holds messages from before the last pass."""
        self.last_sent_at = now
        self.received = length
        self._echo: tuple[int, float] | None = None

    def acknowledge(self, message: Received, now: float) -> None:
        """Record the length that the device holds, which never decreases, and its echo."""
        if message.position > self.received:
            self.received, self.unacknowledged_since = message.position, None
        if message.echo:
            self._echo = (message.echo, now)

    def update_unacknowledged(self, length: int, most: int, now: float) -> None:
        """Update ``unacknowledged_since``: at most ``most`` of ``length`` committed tokens may be
        unacknowledged before no more is sent."""
        if length - self.received <= most:
            self.unacknowledged_since = None
        elif self.unacknowledged_since is None:
            self.unacknowledged_since = now

    def pop_echo(self, now: float) -> tuple[int, int]:
        """Return the echo to send back and the microseconds for which it was held; zeros without
        one."""
        if self._echo is None:
            return 0, 0
        (echo, held_at), self._echo = self._echo, None
        return echo, round((now - held_at) * 1e6)


class KeptScores:
    """Keeps the scores of committed tokens until the device has acknowledged them, so that they can
    be sent again after a reconnect. A session that requested no scores has none."""

    def __init__(self) -> None:
        self._kept: dict[int, TokenScore] = {}
        """Scores by position, in ascending order."""

    def store(self, position: int, done: ev.PassDone, walk: Walk, count: int) -> None:
        """Store the scores of the first ``count`` tokens of ``walk``, committed from ``position``
        on."""
        if not done.scores:
            return
        scores = [done.scores[row] for row in (0, *(1 + node for node in walk.nodes))]
        for place in walk.replaced:
            raw_logprob = done.node_scores[walk.nodes[place]].raw_logprob
            scores[place] = replace(scores[place], logprob=raw_logprob)
        self._kept.update(enumerate(scores[:count], position))

    def drop_acknowledged(self, position: int) -> None:
        while self._kept and (first := next(iter(self._kept))) < position:
            del self._kept[first]

    def get(self, position: int, count: int) -> tuple[TokenScore, ...]:
        """Return the scores of ``count`` tokens from ``position`` on; empty unless they are all
        kept."""
        kept, places = self._kept, range(position, position + count)
        return tuple([kept[at] for at in places]) if kept.keys() >= {*places} else ()


def same_device(first: Open, later: Open) -> bool:
    """Return whether both were sent by one device: they carry the same secret, or none."""
    return compare_digest(first.session_secret, later.session_secret)


def same_generation(first: Open, later: Open, prefix: CommittedPrefix) -> bool:
    """Return whether ``later`` continues the generation that ``first`` began.

    Model, prompt, pictures, sampling, rule and run-ahead must be equal, and the tokens that the
    device holds must agree with ``prefix``.
    """
    return (
        later.model == first.model
        and later.sampling == first.sampling
        and later.rule == first.rule
        and later.run_ahead is first.run_ahead
        and later.prompt == first.prompt
        and later.pictures == first.pictures
        and prefix.starts_with(later.prompt + later.committed)
    )


def catch_up_commits(
    prefix: CommittedPrefix,
    held: int,
    finish: FinishReason | None,
    scores: KeptScores,
    replaced: Sequence[int] = (),
) -> Iterator[Commit]:
    """Yield the commits that bring a device with ``held`` tokens up to date, within the wire's
    limits.

    The last one carries the finish reason, if the generation has ended, and the scores that are
    kept. ``replaced`` are the positions of tokens that are not the target's own.
    """

    def places(end: int) -> tuple[int, ...]:
        return tuple([at - start for at in replaced if start <= at < end])

    start = held
    while prefix.length - start > MAX_COMMIT_TOKENS:
        end = start + MAX_COMMIT_TOKENS
        yield Commit(start, tuple(prefix.tokens[start:end]), replaced=places(end))
        start = end
    if start < prefix.length or finish is not None:
        tokens, logprobs = tuple(prefix.tokens[start:]), scores.get(start, prefix.length - start)
        changed = places(prefix.length)
        yield Commit(start, tokens, finish=finish, logprobs=logprobs, replaced=changed)


class VerifySession:
    """The pure machine of one generation on the verifier.

    Call ``handle`` for every event and carry out the actions that it returns, in order.
    ``server_drafts`` are the session's server-side draft sources, if it has any. With ``trees``
    False its part of a pass is cut to a chain, for a target that verifies no trees.
    ``prefix_block`` and ``picture_tokens`` go into ``Opened``.
    """

    def __init__(
        self,
        request: Open,
        model: ModelInfo,
        limits: Limits,
        rule: AcceptanceRule,
        run_ahead: RunAheadPolicy,
        now: float,
        server_drafts: ServerDrafts | None = None,
        *,
        trees: bool = True,
        history: DraftHistory | None = None,
        prefix_block: int = 0,
        picture_tokens: int = 0,
    ) -> None:
        self.request = request
        self.state = ev.READY
        self.finish: FinishReason | None = None
        self.prefix = CommittedPrefix(request.prompt, request.committed)
        self.inbox = DraftInbox(self.prefix, model.vocabulary_size, limits, history)
        self.passes = self.device_accepted = 0
        """Passes that sampled, and device nodes that they accepted."""
        self.cache_length = 0
        """Committed tokens in the target's cache."""
        self.deadline: float | None = None
        """Time at which the engine should review the session; None if nothing is waited for."""
        self._model, self._limits, self._rule, self._run_ahead = model, limits, rule, run_ahead
        self._ending = EndCondition.of(
            request.sampling, len(request.prompt), limits.context_length, model.eos_token_ids
        )
        self._price_share, self._trees = PricedShare(request), trees
        self._prefix_block, self._picture_tokens = prefix_block, picture_tokens
        self._server_drafts = server_drafts
        self.device = Attachment(self.prefix.length, now, detached_at=now)
        self._idle_since, self._scores = now, KeptScores()
        self._declined_round_until = math.inf
        """Time until which the session waits for its device, for which it declined to take part in
        a round of the server model; infinite if it did not decline."""
        self._pass: ev.RunningPass | None = None
        self._node_kinds: Sequence[SourceKind] = ()
        """Kinds of the sources of the nodes in the pass that runs."""
        self._replaced_positions: list[int] = []
        """Positions of committed tokens that are not the target's own."""

    @property
    def attached(self) -> bool:
        """True while the session has a stream."""
        return self.device.detached_at is None

    @property
    def rows_to_feed(self) -> int:
        """Committed tokens that are not in the KV cache yet. 0 while the session is not ready for a
        pass, its send queue is behind, or its device does not acknowledge."""
        device = self.device
        if self.state is not ev.READY or device.detached_at is not None or device.is_behind:
            return 0
        return (
            0 if device.unacknowledged_since is not None else self.prefix.length - self.cache_length
        )

    def speculator_reaches(self, count: int) -> list[float]:
        """Return the probability that the output goes through the first 1, 2, .. ``count`` tokens
        that the engine speculator would propose for this session; empty without one."""
        return [] if self._server_drafts is None else self._server_drafts.reaches(count)

    def note_no_proposal(self) -> None:
        """Record that the engine speculator ran in the pass and proposed nothing for this
        session."""
        if self._server_drafts is not None:
            self._server_drafts.note_no_proposal()

    def can_be_removed(self, now: float) -> bool:
        """Return whether the session can be removed: everything is acknowledged, or the lease has
        expired."""
        if self.state is ev.FINISHED and self.device.received >= self.prefix.length:
            return True
        detached_at = self.device.detached_at
        return detached_at is not None and now >= detached_at + self._limits.lease_s

    def handle(self, event: ev.VerifyEvent, now: float) -> tuple[ev.VerifyAction, ...]:
        """Handle an event at the time ``now``, in seconds; return the actions to carry out."""
        match event:
            case Draft():
                fault = self.inbox.receive(event, now)
                return () if fault is None else self._refuse(fault, now)
            case ev.Offer():
                return self._on_offer(event, now)
            case ev.PassDone():
                return self._on_pass_done(event, now)
            case ev.DraftOffer():
                return self._on_draft_offer(event, now)
            case ev.Drafted(chain):
                assert self._server_drafts is not None
                self._server_drafts.record_round(chain, wanted=self.state is ev.READY)
                return ()
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
                    self.state = check_transition(VERIFY_MOVES, self.state, ev.READY)
                return ()
            case ev.Cached(length):
                assert self._pass is None
                self.cache_length = length
                return ()
            case ev.Stalled(waited_s):
                if self.state is ev.FINISHED:  # all was sent: a good end, acknowledged or not
                    self._detach(now)
                    return (ev.Hangup(),)
                why = f"nothing was acknowledged for {waited_s:.0f} s"
                return self._refuse(Fault(FaultCode.OVERLOADED, why, retry_after_s=1.0), now)
            case ev.SendKeepalive():
                return (self._send(self._keepalive(), now),)
            case Cancel():
                return self._on_cancel(now)
            case _:
                assert_never(event)

    # --- the link --------------------------------------------------------------------------

    def _on_attach(self, request: Open, now: float) -> tuple[ev.VerifyAction, ...]:
        """Take a stream that opens this session or resumes it: send ``Opened``, and every token
        that the device does not hold yet."""
        held = len(request.prompt) + len(request.committed)
        self.inbox.reset(request.drafting)
        self.device = Attachment(held, now)
        self.deadline, self._idle_since = None, now
        if self.finish is None and (finish := self._ending.finish_reason(self.prefix)) is not None:
            self.state, self.finish = (
                check_transition(VERIFY_MOVES, self.state, ev.FINISHED),
                finish,
            )
        self._update_unacknowledged(now)
        name, fingerprint = self._model.name, self._model.fingerprint
        constrained = request.sampling.constraint is not None
        least = request.sampling.min_tokens
        opened = Opened(
            limits=self._limits,
            model=name,
            position=held,
            fingerprint=fingerprint,
            constrained=constrained,
            min_tokens=least,
            prefix_block=self._prefix_block,
            picture_tokens=self._picture_tokens,
        )
        opening = self._send(opened, now)
        commits = catch_up_commits(
            self.prefix, held, self.finish, self._scores, self._replaced_positions
        )
        return opening, *(self._send(commit, now) for commit in commits)

    def _send(self, message: Opened | Commit | Fault, now: float) -> ev.Send:
        self.device.last_sent_at = now
        return ev.Send(message)

    def _keepalive(self) -> Commit:
        """Return a commit without tokens, which reports how much of the text has been read."""
        return Commit(self.prefix.length, (), read=self.cache_length)

    def _detach(self, now: float) -> None:
        if self.attached:
            self.device.detached_at = now
            self.deadline = now + self._limits.lease_s

    def _refuse(self, fault: Fault, now: float) -> tuple[ev.VerifyAction, ...]:
        """Close the stream; also end the session, unless the device may come back."""
        self._detach(now)
        if not fault.code.retryable:
            self._end_cancelled()
        return self._send(fault, now), ev.Hangup()

    def _on_cancel(self, now: float) -> tuple[ev.VerifyAction, ...]:
        """Acknowledge with a final empty commit, unless a final commit was sent already."""
        is_unfinished = self.state is not ev.FINISHED and self.attached
        self._end_cancelled()
        if not is_unfinished:
            return ()
        return (self._send(Commit(self.prefix.length, (), finish=self.finish), now),)

    def _end_cancelled(self) -> None:
        """End the session as cancelled; nothing more is delivered or awaited."""
        self.finish = FinishReason.CANCELLED
        self.state = check_transition(VERIFY_MOVES, self.state, ev.FINISHED)
        self.device.received = self.prefix.length

    def _on_received(self, message: Received, now: float) -> tuple[ev.VerifyAction, ...]:
        if message.position > self.prefix.length:
            position, length = message.position, self.prefix.length
            why = f"position {position} was acknowledged, but only {length} tokens are committed"
            return self._refuse(Fault(FaultCode.RESYNC, why), now)
        self.device.acknowledge(message, now)
        self._scores.drop_acknowledged(self.device.received)
        self._update_unacknowledged(now)
        return ()

    def _update_unacknowledged(self, now: float) -> None:
        most = 0 if self.state is ev.FINISHED else self._limits.max_unreceived
        self.device.update_unacknowledged(self.prefix.length, most, now)

    # --- passes ----------------------------------------------------------------------------

    def _on_offer(self, offer: ev.Offer, now: float) -> tuple[ev.VerifyAction, ...]:
        """Answer the scheduler's offer of rows: run a pass now, or wait for a draft until
        ``deadline``."""
        if not self.rows_to_feed:
            return ()
        assert offer.max_rows >= 1
        self.deadline = None
        # A session that has declined a round waits no longer than it meant to then.
        start_at = min(self._earliest_start(offer, now), self._declined_round_until)
        self._declined_round_until = math.inf
        if start_at > now:
            self.deadline = start_at
            return ()
        request = self._build_request(offer)
        queue_s = self.inbox.pop_queue_s(now) if request.device_nodes else 0.0
        started_at = now if offer.began_at is None else offer.began_at
        self._pass = ev.RunningPass(request, started_at, queue_s)
        self.state = check_transition(VERIFY_MOVES, self.state, ev.PASSING)
        return (ev.RunPass(request),)

    @property
    def _may_draft(self) -> bool:
        """True if a draft could help the next pass: the pass feeds no prompt and not the last
        token."""
        prefix = self.prefix
        decoding = prefix.prompt_length < self.cache_length + 1 == prefix.length
        return decoding and prefix.length < self._ending.end - 1

    def _earliest_start(
        self, offer: ev.Offer, now: float, server_draft_s: float = math.inf
    ) -> float:
        """Return the time from which the session takes part in a pass.

        The run-ahead policy decides if the session could wait for a draft of its device and has no
        nodes yet; otherwise it takes part at once. ``server_draft_s`` is as in ``RunAheadView``.
        """
        has_chain = self._server_drafts is not None and self._server_drafts.has_chain
        if not self._may_draft or self.inbox.tree.nodes or has_chain or self.inbox.kept.is_ready:
            return now
        if not self.inbox.no_draft_coming:
            self.inbox.arrivals.on_possible_pass(self._idle_since, offer.pass_s)
        view = self.inbox.run_ahead_view(
            now,
            self._idle_since,
            offer.pass_s,
            runs_anyway=offer.runs_anyway,
            server_draft_s=server_draft_s,
        )
        return self._run_ahead(view)

    def _on_draft_offer(self, event: ev.DraftOffer, now: float) -> tuple[ev.VerifyAction, ...]:
        """Take part in a round of the server model, unless the device's next draft is expected to
        bring as much sooner.

        In company the wait is compared with a single step: the round runs for the others anyway.
        """
        server_drafts, offer = self._server_drafts, event.offer
        model = None if server_drafts is None else server_drafts.chain
        if server_drafts is None or model is None or not self.rows_to_feed or not self._may_draft:
            return ()
        server_draft_s = model.step_s(offer.pass_s)
        if event.is_alone:
            rate = model.acceptance_rate
            server_draft_s *= self.inbox.count_matching_steps(rate, LONGEST_CHAIN)
        start_at = self._earliest_start(offer, now, server_draft_s)
        if start_at > now:
            self._declined_round_until = start_at
            return ()
        device_tokens = self.inbox.tokens_per_pass(offer.pass_s, now)
        start = server_drafts.begin_chain(self._view_device_nodes(offer, 1), device_tokens)
        return () if start is None else (ev.WantChain(start),)

    def _on_pass_done(self, event: ev.PassDone, now: float) -> tuple[ev.VerifyAction, ...]:
        """Commit what a pass has decided and send it. A pass that did not sample has only fed a
        part of the prompt, and commits nothing."""
        assert self._pass is not None
        done, self._pass = self._pass, None
        if self.state is ev.FINISHED:  # cancelled meanwhile
            return ()
        self._idle_since, self._declined_round_until = now, math.inf
        self.cache_length += len(done.request.feed)
        if not done.request.sample:
            self.state = check_transition(VERIFY_MOVES, self.state, ev.READY)
            if self.attached and now - self.device.last_sent_at >= READ_REPORT_S:
                return ev.Keep(()), self._send(self._keepalive(), now)
            return (ev.Keep(()),)
        assert self.cache_length == self.prefix.length
        walk = self._judge(done.request, event)
        tokens, self.finish = self._ending.cut(self.prefix.length, walk.tokens)
        self.cache_length += len(walk.nodes)
        committed_nodes = walk.nodes[: len(tokens)]  # without nodes behind the end
        # This takes 0.3 us by position and 0.5 us with names, for each session of a pass.
        verdict = PassVerdict(
            done.request, self._node_kinds, event.targets, committed_nodes, tokens, now
        )
        accepted = verdict.count_device_tokens()
        if self._server_drafts is not None:
            self._server_drafts.learn(verdict)
        if event.scores:
            self._scores.store(self.prefix.length, event, walk, len(tokens))
        self.inbox.learn(
            verdict
        )  # From here on ``prefix`` has the tokens, and the tree its new root.
        if self._server_drafts is not None and event.guesses and self.finish is None:
            self._server_drafts.set_proposal(event.guesses)
        position = self.prefix.length - len(tokens)
        replaced = tuple([at for at in walk.replaced if at < len(tokens)])
        self._replaced_positions += [position + at for at in replaced]
        commit = self._build_commit(
            position, tokens, accepted, replaced, done, event.row_price, now
        )
        send = (self._send(commit, now),) if self.attached else ()
        next_state = ev.READY if self.finish is None else ev.FINISHED
        self.state = check_transition(VERIFY_MOVES, self.state, next_state)
        self._update_unacknowledged(now)
        return send if self.finish is not None else (ev.Keep(walk.nodes), *send)

    def _judge(self, request: PassRequest, event: ev.PassDone) -> Walk:
        """Judge the nodes of a pass. Server-side nodes come last and are judged by the exact
        rule."""
        scores, ends = event.node_scores[: request.device_nodes], self._ending.stop_ids
        return self._rule.walk(request.tokens, request.parents, event.targets, scores, ends)

    def _build_request(self, offer: ev.Offer) -> PassRequest:
        """Return the request for a pass in which ``offer`` leaves room.

        It feeds the committed tokens that the cache lacks. If it can feed all, the device's nodes
        that are worth their row follow, and then the server-side nodes. For a target that verifies
        no trees only the likeliest path is kept.
        """
        key, first, last = self.request.session_id, self.cache_length, self.prefix.length
        logprobs = self.request.logprobs
        feed = tuple(self.prefix.tokens[first : first + offer.max_rows])
        if first + len(feed) < last:
            return PassRequest(key, first, feed, sample=False)
        self._node_kinds = ()
        if self._server_drafts is None and not self.inbox.has_nodes:
            return PassRequest(key, first, feed, logprobs=logprobs)
        view = self._view_device_nodes(offer, len(feed))
        tree = view.tree
        if self._server_drafts is not None:
            self._server_drafts.add_nodes(view)
        if not self._trees:
            tree.cut_to_chain()
        self._node_kinds = tree.sources
        server_nodes = len(tree.tokens) - tree.device_node_count
        tokens, parents = tuple(tree.tokens), tuple(tree.parents)
        judged = tree.device_node_count > 0 and self.request.rule != EXACT_RULE
        return PassRequest(
            key=key,
            cache_length=first,
            feed=feed,
            tokens=tokens,
            parents=parents,
            server_nodes=server_nodes,
            logprobs=logprobs,
            node_scores=judged,
        )

    def _view_device_nodes(self, offer: ev.Offer, fed: int) -> PassView:
        """Return a view of a pass that feeds ``fed`` tokens, with the device's nodes that are worth
        their row in its tree."""
        lookup_chance = offer.least_lookup_chance
        view = PassView(
            tree=PassTree(min(offer.max_rows - fed, self._limits.max_nodes_per_pass)),
            text=self.prefix.tokens,
            depth=self._ending.end - 1 - self.prefix.length,  # It must lie before the last token.
            least_chance=min(1.0, offer.least_chance) * self._price_share.value,
            least_lookup_chance=offer.least_chance if lookup_chance is None else lookup_chance,
        )
        self.inbox.add_nodes(view)
        return view

    def _build_commit(
        self,
        position: int,
        tokens: tuple[int, ...],
        accepted: int,
        replaced: tuple[int, ...],
        done: ev.RunningPass,
        row_price: int,
        now: float,
    ) -> Commit:
        """Return the commit of ``tokens`` and update the statistics.

        ``accepted`` of the tokens were drafted by the device; those at the indices ``replaced`` are
        not the target's own. A device that goes on drafting is sent its part of the row price;
        ``row_price`` 0 means that there is none.
        """
        rows, verify_us = done.request.device_nodes, round((now - done.started_at) * 1e6)
        price = credit = None
        self._price_share.note_pass(done.started_at, now)
        row_price = round(row_price * self._price_share.value)
        if row_price and verify_us and self.request.drafting and self.finish is None:
            price = row_price
            credit = 0 if self.inbox.top_acceptance_rate < row_price / MAX_PRICE else None
        stale, (echo, held_us) = self.inbox.pop_stale_count(), self.device.pop_echo(now)
        self.passes += 1
        self.device_accepted += accepted
        queue_us = round(done.queue_s * 1e6)
        logprobs = self._scores.get(position, len(tokens)) if self.request.logprobs else ()
        return Commit(
            position=position,
            tokens=tokens,
            accepted=accepted,
            stale=stale,
            queue_us=queue_us,
            verify_us=verify_us,
            rows=rows,
            echo=echo,
            held_us=held_us,
            finish=self.finish,
            row_price=price,
            credit=credit,
            logprobs=logprobs,
            replaced=replaced,
        )
