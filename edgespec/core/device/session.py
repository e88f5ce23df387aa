"""The device's half of one generation, as a pure machine.

Theory of operation. The session owns the committed prefix (the tokens delivered to the user, which
are the truth on reconnect), the tree of draft nodes behind it, and the plan of what to draft next.
Three things run side by side: the link (``LinkKeeper``), at most one draft step, and the stream of
commits (``CommitReader``). Every event ends in ``_send_and_draft``, which sends what the policy
decides to send and starts the step that it decides to start.

    IDLE -> CONNECTING -> STREAMING -> DONE, and BACKING_OFF -> CONNECTING after a broken link

Invariants: only committed tokens are delivered, once, in order and within ``CommitBounds``; a node
is sent at most once a stream; drafting goes on while the link is down, as far as the policy lets
it. ``deadline`` is when to send ``Tick``; there is one as long as the session runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from edgespec.core.device import events as ev
from edgespec.core.device.commit_reader import CommitBounds, CommitReader, DraftOutbox
from edgespec.core.device.device_lookup import DeviceLookup
from edgespec.core.device.estimates import Learned, VerifierEstimates
from edgespec.core.device.link_keeper import LinkKeeper, ReconnectPolicy
from edgespec.core.device.policy import DraftPolicy, DraftView
from edgespec.core.protocol.messages import Cancel, Commit, Fault, Limits, Open, Opened, RunAhead
from edgespec.core.protocol.text_lookup import TextTables
from edgespec.core.protocol.tree import ROOT, CommittedPrefix, Node, SpeculationTree
from edgespec.core.protocol.work import Candidate
from edgespec.core.statically_frozen import statically_frozen

# Interval, in steps, at which candidates that are hardly ever right are kept once.
_KEEP_ALL_EVERY = 16
# Assumed until ``Opened`` arrives. If the real limit is lower, the verifier drops the surplus
# nodes, which is harmless.
_LIMITS_BEFORE_OPENED = Limits(max_nodes_outstanding=16)


class DraftSession:
    """One generation.

    ``vocabulary_size`` bounds the token ids that a verifier may commit; 0 if it is not known.
    ``verifier`` and ``learned`` are estimates of earlier generations about this verifier and the
    draft, which the session updates in place. ``text`` are the tables of the user's earlier texts;
    None: no text lookup."""

    # A simulated city has thousands of sessions: without dictionaries an event touches less memory.
    __slots__ = (
        *("_bounds", "_busy_since", "_cache", "_committed_at", "_draft_context_length", "_end"),
        *("_opened_at", "_outbox", "_policy", "_reader", "_announced_no_draft", "_empty_step"),
        *("_step", "_text"),
        *("counters", "drafting", "estimates", "limits", "link", "prefix", "request", "tree"),
    )

    def __init__(
        self,
        request: Open,
        policy: DraftPolicy,
        reconnect: ReconnectPolicy,
        draft_context_length: int,
        jitter_seed: int = 0,
        vocabulary_size: int = 0,
        verifier: VerifierEstimates | None = None,
        learned: Learned | None = None,
        text: TextTables | None = None,
    ) -> None:
        self.request = request
        self.prefix = CommittedPrefix(request.prompt, request.committed)
        self.tree = SpeculationTree(self.prefix)
        self.limits = _LIMITS_BEFORE_OPENED
        self.drafting = request.drafting
        """Whether this device drafts. False once the draft model failed or was given up, unless
        text lookup is on."""
        self._policy = policy
        sampling, length = request.sampling, len(request.prompt)
        self._bounds = CommitBounds(length, sampling.max_tokens, vocabulary_size)
        self._draft_context_length = draft_context_length
        self._outbox = DraftOutbox(self.tree)
        verifier, learned = verifier or VerifierEstimates(), learned or Learned()
        self._reader = CommitReader(
            tree=self.tree,
            outbox=self._outbox,
            verifier=verifier,
            learned=learned,
            sampling=sampling,
        )
        self.counters, self.estimates = self._reader.counters, self._reader.estimates
        self._text = None if text is None else DeviceLookup(self.tree, text, self.estimates)
        self.link = LinkKeeper(reconnect, jitter_seed, self.counters)
        self._cache = DraftCache()
        self._step: _Step | None = None
        """The draft step that runs."""
        self._empty_step: tuple[int, int] | None = None
        """Committed length and parent of the last step if it returned no candidate."""
        self._announced_no_draft = False
        """Whether a draft without nodes was sent since the verifier's last commit."""
        self._busy_since: float | None = None
        """Time at which the last commit arrived, if it left nodes in flight."""
        self._committed_at: float | None = None
        """Time at which the last commit of a pass arrived on this stream."""
        self._opened_at: float | None = math.inf
        """Time at which this stream was opened; None once a pass of it has committed."""
        self._end = min(self._bounds.length - 1, draft_context_length)
        """Position from which on nodes cannot matter any more."""
        self._stop_if_useless()

    @property
    def has_given_up(self) -> bool:
        """Whether the draft model makes no steps any more, because it was found to be useless, in
        this generation or in earlier ones."""
        return self._policy.drops_useless_draft and self.estimates.evidence.is_useless

    @property
    def state(self) -> ev.LinkState:
        return self.link.state

    @property
    def deadline(self) -> float | None:
        return self.link.deadline

    def handle(self, event: ev.DraftEvent, now: float) -> tuple[ev.DraftAction, ...]:
        state = self.link.state
        if state is ev.DONE:
            return ()  # too late
        if state is not ev.STREAMING and isinstance(event, Commit | Opened | Fault):
            return ()  # a message of a stream that is closed
        match event:
            case ev.StepDone():
                self._on_step_done(event, now)
                actions = []
            case Commit():
                actions = self._on_commit(event, now)
            case Opened():
                actions = self._on_opened(event, now)
            case Fault():
                actions = self.link.on_fault(event, now)
            case ev.Start():
                actions = self.link.connect(now)
            case ev.Connected():
                actions = self._on_connected(now)
            case ev.LinkDown():
                actions = self.link.on_link_down(event, now)
            case ev.Tick():
                actions = self.link.on_tick(now)
            case ev.StepFailed(why):
                self.counters.draft_failure = why
                self._step, self.drafting, actions = None, False, []
            case ev.Stop(reason):
                actions = [ev.Transmit(Cancel())] if state is ev.STREAMING else []
                actions += self.link.end(ev.Finish(reason))
            case _:
                assert_never(event)
        self._send_and_draft(actions, now)
        return tuple(actions)

    # --- what the verifier says ------------------------------------------------------------

    def _on_connected(self, now: float) -> list[ev.DraftAction]:
        self.link.on_connected(self.request)
        self._outbox.new_stream()
        self._reader.new_stream()
        self._busy_since, self._committed_at, self._opened_at = None, None, now
        self._announced_no_draft = False
        held = tuple(self.prefix.output)
        return [ev.Transmit(replace(self.request, committed=held, drafting=self.drafting))]

    def _on_opened(self, opened: Opened, now: float) -> list[ev.DraftAction]:
        if refused := self.link.on_opened(self.request, opened, now):
            return refused
        self.limits = opened.limits
        if self._opened_at is not None:
            self.estimates.open_s = now - self._opened_at
        self._reader.on_opened(opened.limits.max_unreceived)
        self._outbox.trim(opened.limits.max_nodes_outstanding)
        self._bounds = replace(self._bounds, context_length=opened.limits.context_length)
        self._end = min(self._bounds.length - 1, self._draft_context_length)
        return []

    def _on_commit(self, commit: Commit, now: float) -> list[ev.DraftAction]:
        if not self._reader.continues(commit):
            why = f"commit at {commit.position} does not continue the {self.prefix.length} held"
            return self.link.abandon(why, now)
        commit, wrong = self._bounds.cut_to_bounds(commit)
        self._announced_no_draft = False
        may_draft = self.drafting or (self.request.drafting and self.has_given_up)
        rests = may_draft and self._step is None and not self._in_flight
        delivered = self._reader.read(commit, now)
        self.counters.rested += len(delivered.tokens) if delivered and rests else 0
        if commit.verify_us:
            self._busy_since = now if self._in_flight else None
            self._committed_at = now
            self._opened_at = None
        actions: list[ev.DraftAction] = []
        if delivered is None:
            self.counters.prompt_read = min(commit.read, self.prefix.length)
            self.link.note_prompt_progress(self.counters.prompt_read, now)
        else:
            self.link.note_token(now)
            actions.append(delivered)
        if wrong is not None:
            return actions + self.link.end(ev.Fail(wrong))
        received = self._reader.acknowledge(now, last=commit.finish is not None)
        if received is not None:
            actions.append(ev.Transmit(received))
        if commit.finish is not None:
            generated = self.prefix.length - self.prefix.prompt_length
            actions += self.link.end(
                ev.Finish(self._bounds.finish_reason(commit.finish, generated))
            )
        return actions

    # --- drafting --------------------------------------------------------------------------

    def _send_and_draft(self, actions: list[ev.DraftAction], now: float) -> None:
        """Send what the policy decides to send, and start the step that it decides to start."""
        state = self.link.state
        if state is ev.DONE:
            return
        self._stop_if_useless()
        if self._text is not None and self.drafting:
            self._text.learn()
            self._text.grow(self._view(self._outbox.unsent_count, now))
        streaming, view = state is ev.STREAMING, None
        unsent = self._outbox.unsent_count
        if streaming and unsent:
            view = self._view(unsent, now)
            if self._policy.should_send(view):
                actions += self._send_drafts()
                view.unsent = unsent = self._outbox.unsent_count
                view.in_flight = len(self.tree.nodes) - unsent
        if self._step is not None:
            return
        if self.drafting and not self.has_given_up:
            view = view or self._view(unsent, now)
            parent = self._policy.choose_parent(view)
            if parent is not None and self._empty_step != (self.prefix.length, parent):
                actions.append(self._start_step(parent, view, now))
                return
        if streaming and unsent and self._policy.should_send(self._view(unsent, now, resting=True)):
            actions += self._send_drafts()
            unsent = self._outbox.unsent_count
        if streaming and unsent == len(self.tree.nodes):
            actions += self._send_rest_or_announce_none()

    def _stop_if_useless(self) -> None:
        """Stop drafting if the draft model was given up and text lookup is off."""
        if self.drafting and self._text is None and self.has_given_up:
            self.drafting = False

    def _start_step(self, parent: int, view: DraftView, now: float) -> ev.StartStep:
        """Start a step behind ``parent`` with as many candidates as the policy asks for and the
        price allows."""
        width = view.affordable_width(parent, self._policy.width)
        keep, feed = self._cache.feed(self.prefix, self.tree.path(parent))
        least = self._policy.min_candidate_chance
        self._step = _Step(
            parent=parent,
            width=width,
            min_candidate_chance=least,
            base_position=self.prefix.length,
            started_at=now,
            fed=len(feed),
        )
        return ev.StartStep(keep, feed, width)

    def _on_step_done(self, event: ev.StepDone, now: float) -> None:
        """Add the step's candidates to the tree, or rank the lookup nodes that they confirm.

        If the root has moved meanwhile, the candidates become nodes behind the new root, or they
        are judged against what was committed (which still measures the draft), or they are
        dropped."""
        assert self._step is not None
        step, self._step = self._step, None
        if not event.candidates:
            self._empty_step = step.base_position, step.parent
            return
        self._empty_step = None
        self.counters.steps += 1
        self.estimates.note_step(step.fed, now - step.started_at)
        tree, base, length = self.tree, step.base_position, self.prefix.length
        position = tree.child_position(step.parent, base)
        if position is None:
            return  # the branch is dead
        late = position < length
        lookup_nodes = {} if late else {node.token: node for node in tree.children(step.parent)}
        candidates, least = event.candidates[: step.width], step.min_candidate_chance
        found = self._select_candidates(candidates, least, lookup_nodes)
        for rank, (token, logprob, chance) in enumerate(found):
            if (node := lookup_nodes.pop(token, None)) is not None:
                node.rank, node.logprob, node.chance = rank, logprob, chance
            else:
                node_id = tree.last_id + 1
                tree.grow(
                    node_id, step.parent, token, base, rank=rank, logprob=logprob, chance=chance
                )
        for node in lookup_nodes.values():
            node.chance = self.estimates.guesses.contradicted_chance(node.lookup_cell)
        if late:
            offered = [
                Node(
                    id=ROOT,
                    parent=ROOT,
                    token=token,
                    position=position,
                    rank=rank,
                    children=[],
                    logprob=logprob,
                )
                for rank, (token, logprob, _) in enumerate(found)
            ]
            self._reader.judge(offered, self.prefix.tokens[position])

    def _select_candidates(
        self, found: Sequence[Candidate], least: float, lookup_nodes: Mapping[int, Node]
    ) -> list[tuple[int, float, float]]:
        """Return the candidates to keep, as (token, log-probability, chance).

        They end before the first one that is hardly ever right; none behind it is kept, so that
        ranks have no gaps. Now and then all are kept, to measure their chances. ``lookup_nodes``
        are text lookup's nodes for the place, by token."""
        draft_chance, rate = self.estimates.guesses.draft_chance, self.estimates.acceptance.rate
        least = least if self.counters.steps % _KEEP_ALL_EVERY else 0.0
        kept = []
        for rank, one in enumerate(found):
            node = lookup_nodes.get(one.token)
            lookup_chance = None if node is None else node.chance
            chance = draft_chance(rank, one.logprob, rate(rank), lookup_chance)
            if rank and chance < least:
                break
            kept.append((one.token, one.logprob, chance))
        return kept

    def _send_drafts(self) -> list[ev.DraftAction]:
        drafts = self._outbox.take_unsent(self._max_outstanding)
        self.counters.sent += sum([len(draft.tokens) for draft in drafts])
        return [ev.Transmit(draft) for draft in drafts]

    def _send_rest_or_announce_none(self) -> list[ev.DraftAction]:
        """Send what is left, or announce that no draft is coming, if no step runs and no node is in
        flight.

        A verifier that waits for drafts then decodes on."""
        if self._outbox.unsent_count and (drafts := self._send_drafts()):
            return drafts
        if self._announced_no_draft or self.request.run_ahead is not RunAhead.NEVER:
            return []
        self._announced_no_draft = True
        return [ev.Transmit(self._outbox.announce_no_draft())]

    @property
    def _in_flight(self) -> int:
        return len(self.tree.nodes) - self._outbox.unsent_count

    @property
    def _max_outstanding(self) -> int:
        """Number of nodes that the verifier accepts outstanding, by its limits and its present
        credit."""
        most = self.limits.max_nodes_outstanding
        credit = self.estimates.price.credit
        return most if credit is None else min(most, credit)

    def _view(self, unsent: int, now: float, *, resting: bool = False) -> DraftView:
        alive, since, opened = len(self.tree.nodes), self._busy_since, self._opened_at
        # This takes 0.40 us by position and 0.68 us with names, at every event of a simulated city.
        return DraftView(
            self.tree,
            unsent,
            alive - unsent,
            self._max_outstanding - alive,
            self._end,
            self.estimates,
            None if since is None else now - since,
            resting,
            None if opened is None else max(0.0, now - opened),
            None if self._committed_at is None else now - self._committed_at,
        )


@statically_frozen
class _Step:
    parent: int
    width: int
    min_candidate_chance: float
    """Least chance of a kept candidate after the first one."""
    base_position: int
    started_at: float
    fed: int


class DraftCache:
    """The tokens of a drafter's cached rows, and the cheapest way from there to the next step.

    A drafter only truncates and appends: rolling back after a rejection costs one integer."""

    __slots__ = ("_agreed", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._agreed = 0
        """Number of leading cached tokens that are known to equal the committed prefix."""

    @property
    def length(self) -> int:
        return len(self._tokens)

    def feed(self, prefix: CommittedPrefix, path: list[int]) -> tuple[int, tuple[int, ...]]:
        """Make the cache hold ``prefix`` and then ``path``. Returns (tokens to keep, tokens to
        append).

        At least one token is appended, because its row of logits is what the step is for."""
        if self._agreed < prefix.length:
            self._catch_up(prefix)
        keep, length, cached = self._agreed, prefix.length, self._tokens
        last = length + len(path) - 1
        if keep == length:
            drafted = cached[length : length + len(path)]
            if drafted == path[: len(drafted)]:  # the usual case
                keep += len(drafted)
            else:
                while cached[keep] == path[keep - length]:
                    keep += 1
        if keep > last:
            keep = last
        drafted = path[keep - length :] if keep > length else path
        appended = (*prefix.tokens[keep:], *drafted)
        cached[keep:] = appended
        if keep < self._agreed:
            self._agreed = keep
        return keep, appended

    def _catch_up(self, prefix: CommittedPrefix) -> None:
        cached, tokens, start = self._tokens, prefix.tokens, self._agreed
        for held, token in zip(cached[start:], tokens[start:], strict=False):
            if held != token:
                del cached[self._agreed :]
                return
            self._agreed += 1
