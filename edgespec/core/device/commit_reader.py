"""The device reads a commit: checks that it continues, moves the root, learns from it.

Every position at which the drafter had a guess is one trial of its ranks, whoever decided it: the
acceptance rate is a property of the draft on committed prefixes, not of what happened to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.device.draft_lengths import RoundMeter
from edgespec.core.device.estimates import DraftEstimates, RowPrice
from edgespec.core.device.events import Deliver, DraftCounters, TokenKind
from edgespec.core.device.learned import Learned
from edgespec.core.device.outbox import DraftOutbox
from edgespec.core.protocol.messages import Commit, Received
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import SpeculationTree

# Acknowledge at least this often, or before the verifier would pause, if that is sooner: flow
# control and round-trip samples cost a few bytes each.
RECEIVED_EVERY = 8


class CommitReader:
    """Moves one session's root, and holds what it counts and estimates."""

    def __init__(
        self,
        tree: SpeculationTree,
        outbox: DraftOutbox,
        price: RowPrice,
        learned: Learned,
        sampling: SamplingParams,
    ) -> None:
        guesses = learned.guesses(sampling)
        self.estimates = DraftEstimates(price=price, learned=learned, guesses=guesses)
        self.counters = DraftCounters()
        self._round = RoundMeter(learned.lengths)
        self.max_unreceived = RECEIVED_EVERY
        self._tree, self._prefix, self._outbox = tree, tree.prefix, outbox
        self._acknowledged = tree.prefix.length
        self._echo: tuple[int, float] | None = None
        self._commit_at: float | None = None

    def new_stream(self) -> None:
        self._acknowledged, self._echo = self._prefix.length, None
        self._commit_at = None
        self._round.new_stream()

    def continues(self, commit: Commit) -> bool:
        """Whether it starts at or before the end of what is held, and agrees where it overlaps."""
        overlap = self._prefix.length - commit.position
        if overlap < 0:
            return False
        known = self._prefix.tokens[commit.position :][: len(commit.tokens)]
        return tuple(known) == commit.tokens[: len(known)]

    def read(self, commit: Commit, now: float) -> Deliver | None:
        """Commit its new tokens; None when there are none."""
        self._measure(commit, now)
        position = self._prefix.length
        overlap = position - commit.position
        tokens = commit.tokens[overlap:]
        kinds = tuple(
            [
                self._commit_one(token, index < commit.accepted)
                for index, token in enumerate(tokens, overlap)
            ]
        )
        self._round.committed(len(tokens), len(self._tree.nodes) - self._outbox.unsent, now)
        return Deliver(position, tokens, kinds, commit.logprobs[overlap:]) if tokens else None

    def acknowledge(self, now: float, *, last: bool) -> Received | None:
        """What to answer, if it is time to."""
        length = self._prefix.length
        every = min(RECEIVED_EVERY, max(1, self.max_unreceived))
        if not last and length - self._acknowledged < every:
            return None
        self._acknowledged = length
        if self._echo is not None:
            return Received(length, 0)
        self._echo = (length, now)
        return Received(length, length)

    def sent(self, nodes: int) -> None:
        """So many nodes have left together."""
        self.counters.sent += nodes
        self._round.sent(nodes)

    def score(self, winner: int | None, offered: Sequence[tuple[int, float]]) -> None:
        """A position was decided: by the drafter's choice of rank ``winner``, or by none of those
        ``offered``: ranks, with the draft's log-probabilities."""
        self.counters.tried += 1
        self.counters.hits += winner == 0
        estimates = self.estimates
        estimates.acceptance.add(winner, len(offered))
        for rank, logprob in offered:
            estimates.guesses.add(rank, logprob, hit=rank == winner)

    def _commit_one(self, token: int, accepted: bool) -> TokenKind:
        children = self._tree.roots
        matching = next((node for node in children if node.token == token), None)
        if children:
            first = children[0]
            if first.rank == 0:
                self.estimates.learned.confidence.add(first.logprob, hit=matching is first)
            offered = [(node.rank, node.logprob) for node in children]
            self.score(None if matching is None else matching.rank, offered)
        missed = matching is None and any(self._outbox.was_sent(node.id) for node in children)
        self._tree.commit((token,))
        self.counters.committed += 1
        self.counters.accepted += accepted
        self.counters.corrected += missed
        if accepted:
            return TokenKind.ACCEPTED
        return TokenKind.CORRECTED if missed else TokenKind.DECODED

    def _measure(self, commit: Commit, now: float) -> None:
        counters = self.counters
        counters.stale += commit.stale
        counters.rows += commit.rows
        if commit.verify_us:
            counters.passes += 1
            self.estimates.price.hear(commit)
            counters.queue_s += commit.queue_us / 1e6
            counters.verify_s += commit.verify_us / 1e6
            self.estimates.pass_s.add(commit.verify_us / 1e6)
            self.estimates.commit_tokens.add(len(commit.tokens))
            if self._commit_at is not None:
                self.estimates.commit_s.add(now - self._commit_at)
            self._commit_at = now
            self.estimates.row_s.add(commit.rows, commit.verify_us / 1e6)
        if self._echo is not None and commit.echo == self._echo[0]:
            rtt_s = now - self._echo[1] - commit.held_us / 1e6
            self.estimates.rtt_s.add(max(0.0, rtt_s))
            self._echo = None
