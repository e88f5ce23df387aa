"""The device's side of the stream: the drafts it sends, and how it reads a commit.

Reading a commit checks that it continues the committed prefix, moves the root, and updates the
estimates. Every position at which the drafter had a candidate is one trial of its ranks, whether
the candidate was sent or not: the acceptance rate is a property of the draft on committed prefixes.
A verifier that sends more tokens than were requested, or ids that do not exist, breaks the
protocol: the tokens before the first such one are delivered, the rest is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise

from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.events import Deliver, DraftCounters, TokenKind
from edgespec.core.device.policy import DeviceSource, JudgedPlace
from edgespec.core.protocol.messages import Commit, Draft, FinishReason, Received
from edgespec.core.protocol.tree import ROOT, UNRANKED, Node, SpeculationTree
from edgespec.core.statically_frozen import statically_frozen

MAX_NODES_PER_DRAFT = 64
# Acknowledge at least every this many tokens, or before the verifier would pause, if that is
# sooner: flow control and round-trip samples cost a few bytes each.
RECEIVED_EVERY = 8


class DraftOutbox:
    """Keeps which nodes of the tree were sent, and makes the messages that send the rest.

    A verifier's stream has only the nodes that were sent on it: after a reconnect every alive node
    is unsent again."""

    __slots__ = ("_sent_through", "_tree")

    def __init__(self, tree: SpeculationTree) -> None:
        self._tree = tree
        self._sent_through = 0
        """Highest id of the sent nodes: alive nodes are sent lowest id first."""

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
        counters: DraftCounters,
        sources: tuple[DeviceSource, ...],
    ) -> None:
        self.estimates, self.counters, self._sources = estimates, counters, sources
        self._acknowledge_every = RECEIVED_EVERY
        self._tree, self._prefix, self._outbox = tree, tree.prefix, outbox
        self._acknowledged = tree.prefix.length
        self._echo: tuple[int, float] | None = None
        """The position that the verifier is to repeat, and when it was sent."""
        self._commit_at: float | None = None

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

    def read(self, commit: Commit, now: float) -> Deliver | None:
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
        return Deliver(position, tokens, kinds, commit.logprobs[overlap:]) if tokens else None

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

    def _commit_one(self, token: int, accepted: bool, replaced: bool) -> TokenKind:
        """Commit one token, count it, and return its kind for the user.

        A token is CORRECTED if nodes for its position were sent, but none is this token."""
        children = self._tree.roots
        missed = False
        if children and self.judge(children, token) is None:
            missed = any(self._outbox.was_sent(node.id) for node in children)
        self._tree.commit((token,))
        self.counters.committed += 1
        self.counters.accepted += accepted or replaced
        self.counters.corrected += missed
        if replaced:  # a resent commit carries ``replaced`` but not ``accepted``
            self.counters.replaced += 1
            return TokenKind.REPLACED
        if accepted:
            return TokenKind.ACCEPTED
        return TokenKind.CORRECTED if missed else TokenKind.DECODED

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
            self.estimates.server_tokens.add(len(commit.tokens) - commit.accepted)
            if self._commit_at is not None:
                self.estimates.commit_s.add(now - self._commit_at)
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
