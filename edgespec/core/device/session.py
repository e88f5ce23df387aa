"""The device's half of one generation, as a pure machine.

Theory of operation. The session owns the committed prefix (the tokens delivered to the user, which
are the truth on reconnect), the tree of draft nodes behind it, and the plan of what to draft next.
Three things run side by side: the link (``LinkSession``), at most one draft step, and the stream of
commits (``CommitReader``). Every event ends in ``_send_and_draft``, which sends what the policy
decides to send and starts the step that it decides to start.

    IDLE -> CONNECTING -> STREAMING -> DONE, and BACKING_OFF -> CONNECTING after a broken link

Invariants: only committed tokens are delivered, once, in order and within ``CommitBounds``; a node
is sent at most once a stream; drafting goes on while the link is down, as far as the policy lets
it. ``deadline`` is when to send ``Tick``; there is one as long as the session runs.

Every position at which a source had a candidate is one trial of its ranks, whether the candidate
was sent or not: the acceptance rate is a property of the draft on committed prefixes. A verifier
that sends more tokens than were requested, or ids that do not exist, breaks the protocol: the
tokens before the first such one are delivered, the rest is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import assert_never

from edgespec.core.device import events as ev
from edgespec.core.device.device_lookup import DeviceLookup
from edgespec.core.device.device_model import DeviceModel
from edgespec.core.device.device_prediction import DevicePrediction
from edgespec.core.device.estimates import DraftEstimates, KeptEstimates, VerifierEstimates
from edgespec.core.device.kept_prefixes import KeptPrefixes, SentPrefix
from edgespec.core.device.link_session import LinkSession, ReconnectPolicy
from edgespec.core.device.policy import DeviceSource, DraftPolicy, DraftView, JudgedPlace
from edgespec.core.protocol.checks import make_one_line
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
    PicturePart,
    PicturesMissing,
    PrefixMissing,
    Received,
    RunAhead,
)
from edgespec.core.protocol.pictures import PART_BYTES
from edgespec.core.protocol.text_lookup import TextTables
from edgespec.core.protocol.tree import (
    NO_CELL,
    ROOT,
    UNRANKED,
    CommittedPrefix,
    Node,
    SpeculationTree,
)
from edgespec.core.statically_frozen import statically_frozen

MAX_NODES_PER_DRAFT = 64
_MESSAGES = Commit | Opened | Fault | PrefixMissing | PicturesMissing
# Acknowledge at least every this many tokens, or before the verifier would pause, if that is
# sooner: flow control and round-trip samples cost a few bytes each.
RECEIVED_EVERY = 8
# Assumed until ``Opened`` arrives. If the real limit is lower, the verifier drops the surplus
# nodes, which is harmless.
_LIMITS_BEFORE_OPENED = Limits(max_nodes_outstanding=16)
# The same with a prediction, for a verifier that has announced no limit yet: its first chain is
# complete before the stream is open, and the first pass, behind the prompt, may commit all of it.
_NODES_WITH_PREDICTION = 64


class DraftSession:
    """One generation.

    The draft model makes no step for positions from ``draft_context_length`` on, and text lookup
    goes on there.

    ``vocabulary_size`` bounds the token ids that a verifier may commit; 0 if it is not known.
    ``verifier`` and ``learned`` are estimates of earlier generations about this verifier and the
    draft, which the session updates in place. ``text`` are the tables of the user's earlier texts;
    None: no text lookup. ``prediction`` are token ids that the output is expected to be; empty:
    none. ``draft_context_length`` is 0 without a draft model. Raises ``ValueError`` if the
    prediction exceeds ``MAX_PREDICTION_TOKENS``. ``kept`` are the texts that verifiers keep, shared
    by the sessions of an agent; None: every stream gets the whole text. ``draft_places`` is
    the number of positions that one draft step can offer candidates for (``ports.count_places``).
    ``pictures`` are the bytes of ``request.pictures``; a prompt with pictures needs ``kept``, whose
    key names them. Nothing is drafted from them, and drafts wait for ``Opened``.
    """

    # A simulated city has thousands of sessions: without dictionaries an event touches less memory.
    __slots__ = (
        *("_bounds", "_busy_since", "_committed_at", "_draft_context_length", "_end", "_lookup"),
        *("_model", "_opened_at", "_outbox", "_policy", "_prediction", "_reader"),
        *("_announced_no_draft", "_has_prediction", "_pictures", "_sent"),
        *("_was_asked_for_pictures",),
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
        learned: KeptEstimates | None = None,
        text: TextTables | None = None,
        prediction: Sequence[int] = (),
        kept: KeptPrefixes | None = None,
        draft_places: int = 1,
        pictures: Sequence[bytes] = (),
    ) -> None:
        if pictures and kept is None:
            raise ValueError("pictures are named under the key of kept prefixes, but kept is None")
        self.request, self._pictures = request, tuple(pictures)
        self.prefix = CommittedPrefix(request.prompt, request.committed)
        self.tree = SpeculationTree(self.prefix)
        self.limits = _LIMITS_BEFORE_OPENED
        self.drafting = request.drafting
        """Whether this device drafts. False once the draft model was given up, unless text lookup
        is on or there is a prediction; or once it failed, unless there is a prediction."""
        self._policy = policy
        sampling, length = request.sampling, len(request.prompt)
        self._bounds = CommitBounds(length, sampling.max_tokens, vocabulary_size)
        self._draft_context_length = draft_context_length
        self._outbox = DraftOutbox(self.tree)
        verifier, learned = verifier or VerifierEstimates(), learned or KeptEstimates()
        self.estimates = DraftEstimates.of(verifier, learned, sampling)
        self.estimates.max_places = draft_places
        if prediction:
            known = verifier.price.max_nodes_outstanding
            self.limits = Limits(max_nodes_outstanding=known or _NODES_WITH_PREDICTION)
        if request.drafting:
            is_hopeless = policy.is_hopeless(self.estimates)
            self.estimates.rest.begin_generation(is_hopeless=is_hopeless)
        self.counters = ev.DraftCounters()
        self._model = DeviceModel(self.tree, self.estimates, self.counters)
        self._lookup = None if text is None else DeviceLookup(self.tree, text, self.estimates)
        self._prediction: DevicePrediction | None = None
        self._has_prediction = bool(prediction)
        if prediction or (text is not None and text.reads_other_texts):
            self._prediction = DevicePrediction(
                self.tree, prediction, self.estimates, vocabulary_size, text
            )
        sources = (self._model, self._prediction, self._lookup)
        self._reader = CommitReader(
            tree=self.tree,
            outbox=self._outbox,
            estimates=self.estimates,
            counters=self.counters,
            sources=tuple([one for one in sources if one is not None]),
            has_prediction=self._has_prediction,
        )
        self._sent = None if kept is None else SentPrefix(kept, self.prefix, self.counters)
        self.link = LinkSession(reconnect, jitter_seed, self.counters)
        self._was_asked_for_pictures = False
        """Whether the verifier has asked for pictures on this stream."""
        self._announced_no_draft = False
        """Whether a draft without nodes was sent since the verifier's last commit."""
        self._busy_since: float | None = None
        """Time at which the last commit arrived, if it left nodes in flight."""
        self._committed_at: float | None = None
        """Time at which the last commit of a pass arrived on this stream."""
        self._opened_at: float | None = math.inf
        """Time at which this stream was opened; None once a pass of it has committed."""
        self._end = self._bounds.length - 1
        """Position from which on nodes cannot matter any more."""
        self._stop_if_useless()

    @property
    def has_given_up(self) -> bool:
        """Whether the draft model makes no steps any more, because it was found to be useless, in
        this generation or in earlier ones."""
        return self._policy.drops_useless_draft and self.estimates.evidence.is_useless

    @property
    def has_prediction(self) -> bool:
        """Whether the client has sent a prediction."""
        return self._has_prediction

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
        if state is not ev.STREAMING and isinstance(event, _MESSAGES):
            return ()  # a message of a stream that is closed
        match event:
            case ev.StepDone():
                for late in self._model.record_step(event, now):
                    self._reader.judge(late, self.prefix.tokens[late[0].position])
                actions = []
            case Commit():
                actions = self._on_commit(event, now)
            case Opened():
                actions = self._on_opened(event, now)
            case Fault():
                actions = self._on_fault(event, now)
            case PrefixMissing():
                actions = self._on_prefix_missing(now)
            case PicturesMissing(numbers):
                actions = self._on_pictures_missing(numbers, now)
            case ev.Start():
                actions = self.link.connect(now)
            case ev.Connected(verifier):
                actions = self._on_connected(verifier, now)
            case ev.LinkDown():
                actions = self._on_link_down(event, now)
            case ev.Tick():
                actions = self.link.on_tick(now)
            case ev.StepFailed(why):
                self.counters.draft_failure = why
                self._model.drop_step()
                self._draft_context_length = 0
                self.drafting, actions = self._has_prediction, []
            case ev.Stop(reason):
                actions = [ev.Transmit(Cancel())] if state is ev.STREAMING else []
                actions += self.link.end(ev.Finish(reason))
            case _:
                assert_never(event)
        if self._sent is not None and self.link.state is ev.DONE:
            self._sent.note_text()
        self._send_and_draft(actions, now)
        return tuple(actions)

    # --- what the verifier says ------------------------------------------------------------

    def _on_connected(self, verifier: str, now: float) -> list[ev.DraftAction]:
        self.link.on_connected(self.request)
        self._outbox.new_stream()
        self._reader.new_stream()
        self._busy_since, self._committed_at, self._opened_at = None, None, now
        self._announced_no_draft = self._was_asked_for_pictures = False
        if self._prediction is not None:
            self._prediction.has_unsent = bool(self.tree.nodes)
        held = tuple(self.prefix.output)
        opening = replace(self.request, committed=held, drafting=self.drafting)
        if self._sent is not None:
            opening = self._sent.shorten(opening, verifier)
        return [ev.Transmit(opening)]

    def _on_prefix_missing(self, now: float) -> list[ev.DraftAction]:
        """Send the ids of the beginning that was named. Drafts sent before are sent again, since
        the verifier had no session for them."""
        tokens = None if self._sent is None else self._sent.on_missing()
        if tokens is None:
            return self.link.abandon("the verifier misses a prefix that was not named", now)
        self._outbox.new_stream()
        self._announced_no_draft = False
        if self._prediction is not None:
            self._prediction.has_unsent = bool(self.tree.nodes)
        self.link.on_prefix_missing(now)
        return [ev.Transmit(tokens)]

    def _on_pictures_missing(self, numbers: tuple[int, ...], now: float) -> list[ev.DraftAction]:
        """Send the pictures that the verifier lacks."""
        was_asked, self._was_asked_for_pictures = self._was_asked_for_pictures, True
        if was_asked or self.link.is_opened or max(numbers, default=0) >= len(self._pictures):
            why = f"the verifier misses the pictures {list(numbers)}, which it has or cannot know"
            return self.link.abandon(why, now)
        if self._sent is not None:
            self._sent.on_found()
        self.counters.picture_misses += len(numbers)
        missing = [(number, self._pictures[number]) for number in numbers]
        size_bytes = sum([len(data) for _, data in missing])
        self.counters.picture_bytes += size_bytes
        self.link.on_pictures_missing(size_bytes, now)
        return [
            ev.Transmit(PicturePart(number, start, data[start : start + PART_BYTES]))
            for number, data in missing
            for start in range(0, len(data), PART_BYTES)
        ]

    def _on_fault(self, fault: Fault, now: float) -> list[ev.DraftAction]:
        if fault.code is FaultCode.INVALID and self._was_named_in_vain():
            return self.link.abandon(make_one_line(fault.message), now, at_once=True)
        if fault.code is FaultCode.INVALID and self._pictures and not self.link.is_opened:
            # An older version finds no prompt, since the ids travel beside the pictures.
            why = f"the verifier refuses a prompt with pictures: {fault.message}"
            fault = replace(fault, message=why)
        return self.link.on_fault(fault, now)

    def _on_link_down(self, event: ev.LinkDown, now: float) -> list[ev.DraftAction]:
        if not event.retryable and self._was_named_in_vain():
            event = replace(event, retryable=True, again_s=0.0)
        return self.link.on_link_down(event, now)

    def _was_named_in_vain(self) -> bool:
        """Return whether the verifier that refuses this stream was given a name in place of ids. A
        version that does not know names refuses such a request, so it is sent whole once more."""
        if self._sent is None or not self._sent.is_unconfirmed:
            return False
        self._sent.on_refused()
        return True

    def _on_opened(self, opened: Opened, now: float) -> list[ev.DraftAction]:
        if refused := self.link.on_opened(self.request, opened, now):
            return refused
        self.limits = opened.limits
        self.counters.picture_tokens = opened.picture_tokens
        self.estimates.price.max_nodes_outstanding = opened.limits.max_nodes_outstanding
        if self._sent is not None:
            self._sent.on_opened(opened)
        if self._opened_at is not None:
            self.estimates.open_s = now - self._opened_at
        self._reader.on_opened(opened.limits.max_unreceived)
        self._outbox.trim(opened.limits.max_nodes_outstanding)
        self._bounds = replace(self._bounds, context_length=opened.limits.context_length)
        self._end = self._bounds.length - 1
        return []

    def _on_commit(self, commit: Commit, now: float) -> list[ev.DraftAction]:
        if not self._reader.continues(commit):
            why = f"commit at {commit.position} does not continue the {self.prefix.length} held"
            return self.link.abandon(why, now)
        commit, wrong = self._bounds.cut_to_bounds(commit)
        self._announced_no_draft = False
        may_draft = self._draft_context_length > 0 and (
            self.drafting or (self.request.drafting and self.has_given_up)
        )
        rests = may_draft and not self._model.is_running and not self._in_flight
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
        # A verifier reads pictures before it opens the session, and drops what comes meanwhile.
        may_send = self.link.is_opened or not self._pictures
        streaming, view = state is ev.STREAMING and may_send, None
        has_text = self._lookup is not None or self._prediction is not None
        if has_text or self._model.has_candidates:
            view = self._add_nodes(now)
        unsent = self._outbox.unsent_count if view is None else view.unsent
        if streaming and unsent:
            view = view or self._view(unsent, now)
            # Nodes of a prediction are complete: they do not wait for the next step.
            is_complete = self._prediction is not None and self._prediction.has_unsent
            if is_complete or self._policy.should_send(view):
                actions += self._send_drafts()
                view.unsent = unsent = self._outbox.unsent_count
                view.in_flight = len(self.tree.nodes) - unsent
        if self._model.is_running:
            return
        if self.drafting and not self.has_given_up:
            view = view or self._view(unsent, now)
            view.end = min(self._end, self._draft_context_length)
            parent = self._policy.choose_parent(view)
            if parent is not None and self._model.can_step(parent):
                actions.append(self._model.begin_step(parent, view, self._policy, now))
                return
        if streaming and unsent and self._policy.should_send(self._view(unsent, now, resting=True)):
            actions += self._send_drafts()
            unsent = self._outbox.unsent_count
        if streaming and unsent == len(self.tree.nodes):
            actions += self._send_rest_or_announce_none()

    def _add_nodes(self, now: float) -> DraftView | None:
        """Let the sources add their nodes. Return the view that they had, brought up to date; None
        if no source had anything to add."""
        view = None
        if self._model.has_candidates:
            view = self._view(self._outbox.unsent_count, now)
            self._model.add_nodes(view)
            self._count_nodes(view)
        if self._prediction is not None and self.drafting:
            view = view or self._view(self._outbox.unsent_count, now)
            self._prediction.add_nodes(view)
            self._count_nodes(view)
            confirmed = self._prediction.pop_confirmed()
            if confirmed and self._has_prediction:
                highest_sent = self._outbox.highest_sent
                self.counters.predicted_sent += sum([one <= highest_sent for one in confirmed])
        if self._lookup is not None and self.drafting:
            view = view or self._view(self._outbox.unsent_count, now)
            self._lookup.add_nodes(view)
            self._count_nodes(view)
        return view

    def _count_nodes(self, view: DraftView) -> None:
        """Bring the numbers of nodes in ``view`` up to date."""
        alive, unsent = len(self.tree.nodes), self._outbox.unsent_count
        view.unsent, view.in_flight = unsent, alive - unsent
        view.room = self._max_outstanding - alive

    def _stop_if_useless(self) -> None:
        """Stop drafting if the draft model was given up and no other source is there."""
        has_text = self._lookup is not None or self._prediction is not None
        if self.drafting and not has_text and self.has_given_up:
            self.drafting = False

    def _send_drafts(self) -> list[ev.DraftAction]:
        highest_sent = self._outbox.highest_sent
        drafts = self._outbox.take_unsent(self._max_outstanding)
        self.counters.sent += sum([len(draft.tokens) for draft in drafts])
        if self._prediction is not None:
            self._prediction.has_unsent = False
        if self._has_prediction:
            self.counters.predicted_sent += self._count_predicted(highest_sent)
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

    def _count_predicted(self, above: int) -> int:
        """Return how many sent nodes with ids above ``above`` the prediction has offered."""
        nodes, last = self.tree.nodes, self._outbox.highest_sent
        found = [nodes[one] for one in range(above + 1, last + 1) if one in nodes]
        return sum([node.prediction_cell != NO_CELL for node in found])

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


class DraftOutbox:
    """Keeps which nodes of the tree were sent, and makes the messages that send the rest.

    A verifier's stream has only the nodes that were sent on it: after a reconnect every alive node
    is unsent again."""

    __slots__ = ("_sent_through", "_tree", "highest_sent")

    def __init__(self, tree: SpeculationTree) -> None:
        self._tree = tree
        self._sent_through = 0
        """Highest id of the sent nodes: alive nodes are sent lowest id first."""
        self.highest_sent = 0
        """Highest id of the nodes that were sent on any stream."""

    def new_stream(self) -> None:
        self._sent_through = 0

    def was_sent(self, node_id: int) -> bool:
        return node_id <= self._sent_through

    @property
    def unsent_count(self) -> int:
        count = 0
        if self._tree.last_id > self._sent_through:
            for node_id in reversed(self._tree.nodes):
                if node_id <= self._sent_through:
                    break
                count += 1
        return count

    def trim(self, limit: int) -> None:
        """Forget that nodes beyond the first ``limit`` were sent: the verifier dropped them."""
        in_flight = (node_id for node_id in self._tree.nodes if node_id <= self._sent_through)
        self._sent_through = max(islice(in_flight, limit), default=0)

    def take_unsent(self, limit: int) -> list[Draft]:
        """Return messages with the unsent alive nodes, oldest first, until ``limit`` nodes are in
        flight.

        Each message holds one run of consecutive ids. The nodes count as sent."""
        nodes, unsent = self._tree.nodes, self.unsent_count
        waiting = list(islice(reversed(nodes.values()), unsent))[::-1]
        if (room := limit - (len(nodes) - unsent)) < unsent:
            del waiting[max(0, room) :]
        if not waiting:
            return []
        first, last = waiting[0].id, waiting[-1].id
        self._sent_through = last
        self.highest_sent = max(self.highest_sent, last)
        if last - first < len(waiting) <= MAX_NODES_PER_DRAFT:  # the usual case: one run
            return [self._message(waiting)]
        runs = [[waiting[0]]]
        for before, node in pairwise(waiting):
            if before.id + 1 == node.id and len(runs[-1]) < MAX_NODES_PER_DRAFT:
                runs[-1].append(node)
            else:
                runs.append([node])
        return [self._message(run) for run in runs]

    def announce_no_draft(self) -> Draft:
        """Return the message that announces that no draft is coming."""
        return Draft(self._tree.last_id + 1, (), ())

    def _message(self, run: list[Node]) -> Draft:
        prefix = self._tree.prefix
        parents = tuple([node.parent for node in run])
        base = prefix.length if ROOT in parents else 0
        return Draft(
            first_node_id=run[0].id,
            parents=parents,
            tokens=tuple([node.token for node in run]),
            base_position=base,
            base_hash=prefix.hash_at(base) if base else 0,
        )


class CommitReader:
    """Reads one session's commits: moves the root, keeps the counters and estimates, and lets the
    draft sources learn."""

    def __init__(
        self,
        tree: SpeculationTree,
        outbox: DraftOutbox,
        estimates: DraftEstimates,
        counters: ev.DraftCounters,
        sources: tuple[DeviceSource, ...],
        *,
        has_prediction: bool,
    ) -> None:
        self._has_prediction = has_prediction
        self.estimates, self.counters, self._sources = estimates, counters, sources
        self._acknowledge_every = RECEIVED_EVERY
        self._tree, self._prefix, self._outbox = tree, tree.prefix, outbox
        self._acknowledged = tree.prefix.length
        self._echo: tuple[int, float] | None = None
        """The position that the verifier is to repeat, and when it was sent."""
        self._commit_at: float | None = None
        self._predicted: list[int] = []
        """Positions of tokens of the present commit that were accepted from the prediction."""

    def new_stream(self) -> None:
        self._acknowledged, self._echo = self._prefix.length, None
        self._commit_at = None

    def on_opened(self, max_unreceived: int) -> None:
        """Adapt to the verifier's limit: it pauses before this many tokens are unacknowledged."""
        self._acknowledge_every = min(RECEIVED_EVERY, max(1, max_unreceived))

    def continues(self, commit: Commit) -> bool:
        """Return whether the commit starts at or before the end of the prefix and agrees where they
        overlap."""
        overlap = self._prefix.length - commit.position
        if overlap < 0:
            return False
        known = self._prefix.tokens[commit.position :][: len(commit.tokens)]
        return tuple(known) == commit.tokens[: len(known)]

    def read(self, commit: Commit, now: float) -> ev.Deliver | None:
        """Commit the message's new tokens and return them for delivery; None if there are none."""
        self._measure(commit, now)
        position = self._prefix.length
        overlap = position - commit.position
        tokens = commit.tokens[overlap:]
        kinds = tuple(
            [
                self._commit_one(token, index < commit.accepted, index in commit.replaced)
                for index, token in enumerate(tokens, overlap)
            ]
        )
        if not tokens:
            return None
        predicted = tuple([at - position for at in self._predicted])
        self._predicted.clear()
        return ev.Deliver(position, tokens, kinds, commit.logprobs[overlap:], predicted)

    def acknowledge(self, now: float, *, last: bool) -> Received | None:
        """Return the acknowledgement if one is due, else None: after ``_acknowledge_every`` tokens,
        or with ``last``, at the end.

        It also measures the round-trip time. The position in it is repeated as an echo by the next
        commit; one echo is under way at a time, and further acknowledgements have echo 0."""
        length = self._prefix.length
        if not last and length - self._acknowledged < self._acknowledge_every:
            return None
        self._acknowledged = length
        if self._echo is not None:
            return Received(length, 0)
        self._echo = (length, now)
        return Received(length, length)

    def judge(self, offered: Sequence[Node], token: int) -> Node | None:
        """Judge the nodes ``offered`` for one position by the target's ``token``, and return the
        right one."""
        self.counters.tried += 1
        self.counters.hits += offered[0].token == token
        right, drafted = None, 0
        for node in offered:
            drafted += node.rank != UNRANKED
            if right is None and node.token == token:
                right = node
        verdict = JudgedPlace(offered, right, drafted)
        for source in self._sources:
            source.learn(verdict)
        return right

    def _commit_one(self, token: int, accepted: bool, replaced: bool) -> ev.TokenKind:
        """Commit one token, count it, and return its kind for the user.

        A token is CORRECTED if nodes for its position were sent, but none is this token."""
        children = self._tree.roots
        missed = False
        if children:
            right = self.judge(children, token)
            if right is None:
                missed = any(self._outbox.was_sent(node.id) for node in children)
            elif self._has_prediction and self._is_sent_prediction(right):
                self.counters.predicted_right += 1
                if accepted or replaced:
                    self.counters.predicted_accepted += 1
                    self._predicted.append(self._prefix.length)
        self._tree.commit((token,))
        self.counters.committed += 1
        self.counters.accepted += accepted or replaced
        self.counters.corrected += missed
        if replaced:  # a resent commit carries ``replaced`` but not ``accepted``
            self.counters.replaced += 1
            return ev.TokenKind.REPLACED
        if accepted:
            return ev.TokenKind.ACCEPTED
        return ev.TokenKind.CORRECTED if missed else ev.TokenKind.DECODED

    def _is_sent_prediction(self, node: Node) -> bool:
        return node.prediction_cell != NO_CELL and node.id <= self._outbox.highest_sent

    def _measure(self, commit: Commit, now: float) -> None:
        """Update the counters and estimates from a commit. A commit with ``verify_us`` 0 belongs to
        no pass, such as one that is sent again after a reconnect."""
        counters = self.counters
        counters.stale += commit.stale
        counters.rows += commit.rows
        if commit.verify_us:
            counters.passes += 1
            self.estimates.price.update(commit)
            counters.queue_s += commit.queue_us / 1e6
            counters.verify_s += commit.verify_us / 1e6
            self.estimates.pass_s.add(commit.verify_us / 1e6)
            self.estimates.commit_tokens.add(len(commit.tokens))
            server_tokens = self.estimates.server_tokens
            if not commit.rows or not server_tokens.count:
                # A token that both ends had drafted counts as accepted from the device, so passes
                # with nodes of the device would make the verifier look slower than it is.
                server_tokens.add(len(commit.tokens) - commit.accepted)
            if self._commit_at is not None:
                self.estimates.commit_s.add(now - self._commit_at)
                if not commit.rows:
                    own_tokens = len(commit.tokens) - commit.accepted
                    self.estimates.own_speed.add(now - self._commit_at, own_tokens)
            self._commit_at = now
            self.estimates.row_s.add(commit.rows, commit.verify_us / 1e6)
        if self._echo is not None and commit.echo == self._echo[0]:
            self.estimates.rtt_s.add(max(0.0, now - self._echo[1] - commit.held_us / 1e6))
            self._echo = None


@statically_frozen
class CommitBounds:
    """Bounds on an output: its length and its token ids.

    ``context_length`` is 0 until the first ``Opened`` reports the verifier's. ``vocabulary_size``
    is the target's; 0 if it is not known."""

    prompt_length: int
    max_tokens: int
    vocabulary_size: int = 0
    context_length: int = 0

    @property
    def length(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        asked_for, context = self.prompt_length + self.max_tokens, self.context_length
        return context if 0 < context < asked_for else asked_for

    def cut_to_bounds(self, commit: Commit) -> tuple[Commit, str | None]:
        """Return the part of ``commit`` that is within the bounds, and what is wrong with the rest
        (None if nothing is)."""
        tokens, why = commit.tokens, None
        size = self.vocabulary_size
        if size and max(tokens, default=0) >= size:
            wrong = next(token for token in tokens if token >= size)
            tokens = tokens[: tokens.index(wrong)]
            why = f"token id {wrong} is beyond the vocabulary of {self.vocabulary_size}"
        if commit.position + len(tokens) > self.length:
            tokens = tokens[: max(0, self.length - commit.position)]
            limit, last = "the context it announced", commit.position + len(commit.tokens)
            if self.length == self.prompt_length + self.max_tokens:
                limit = f"a prompt of {self.prompt_length} and max_tokens {self.max_tokens}"
            why = f"tokens up to position {last}, but {limit} end at {self.length}"
        if why is None:
            return commit, None
        commit = replace(commit, tokens=tokens, logprobs=commit.logprobs[: len(tokens)])
        return commit, f"the verifier broke the protocol: {why}"

    def finish_reason(self, finish: FinishReason, generated: int) -> FinishReason:
        """Return the finish reason as the user sees it.

        The wire only has LENGTH. If fewer than ``max_tokens`` were generated, the context was full:
        CONTEXT."""
        if finish is FinishReason.LENGTH and generated < self.max_tokens:
            return FinishReason.CONTEXT
        return finish
