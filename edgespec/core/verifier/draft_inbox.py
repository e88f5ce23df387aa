"""The inbox receives the drafts of one session: it checks them, grows the tree and times them.

Drafts are hints, so nothing here can change a token. A node behind a dead or unknown parent, or one
that is no token of the target, is dropped and counted. A draft on tokens that the verifier does not
have is answered by a ``Fault``, after which the device reopens with the tokens that it holds.
"""

from __future__ import annotations

import math
from typing import Final

from edgespec.core.protocol.draft_source import SourceKind
from edgespec.core.protocol.estimators import AcceptanceEstimator, MovingAverage
from edgespec.core.protocol.messages import Draft, Fault, FaultCode, Limits
from edgespec.core.protocol.tree import ALIVE, ROOT, STALE, CommittedPrefix, SpeculationTree
from edgespec.core.verifier.kept_drafts import KeptDrafts
from edgespec.core.verifier.pass_tree import PassVerdict, PassView
from edgespec.core.verifier.run_ahead import ArrivalEstimator, DraftHistory, RunAheadView

# No acceptance rate is taken to be higher than this; it was counted over some fifty places.
_MAX_RATE: Final = 0.99
# A device drafts a place in no less than this, since a coarse clock may measure 0.
_MIN_PLACE_S: Final = 1e-6


class DraftInbox:
    """The device's drafts of one session: the tree behind ``prefix``, and when drafts arrive. They
    are one of the session's draft sources.

    ``vocabulary_size`` is the target's; ``limits`` bounds the nodes that may be outstanding.
    """

    def __init__(
        self,
        prefix: CommittedPrefix,
        vocabulary_size: int,
        limits: Limits,
        history: DraftHistory | None = None,
    ) -> None:
        self._history = history = history or DraftHistory()
        self.kind = SourceKind.DEVICE
        self.tree = SpeculationTree(prefix)
        self.arrivals = ArrivalEstimator(history)
        self._announced_none = False
        """True if the device announced that no draft is coming, so there is nothing to wait for."""
        self._prefix, self._vocabulary_size, self._limits = prefix, vocabulary_size, limits
        self._hit_rate = MovingAverage(0.05)
        rates = history.acceptance.rates
        self._acceptance = AcceptanceEstimator(prior=tuple(rates[:-1]))
        self.kept = KeptDrafts(prefix, vocabulary_size, history.kept_chances)
        self._stale = 0
        self._waiting_since: float | None = None
        self._dropped_positions: set[int] = set()
        """Positions, none before the end of the text, of nodes that could be no token."""
        self._missed_length = 0
        """Committed tokens when the tree lost its last node; 0 while it has nodes."""

    def reset(self, drafting: bool) -> None:
        """Drop the tree when a device opens a stream; ``drafting`` is whether it will draft."""
        self.tree.clear()
        self._dropped_positions.clear()
        self.kept.begin_stream()
        self._announced_none, self._waiting_since = not drafting, None

    def receive(self, draft: Draft, now: float) -> Fault | None:
        """Grow the tree by ``draft``; return a fault if it was not made for this prefix."""
        if not draft.tokens:
            self._announced_none = True
            return None
        if ROOT in draft.parents:
            base, length = draft.base_position, self._prefix.length
            if base > length:
                why = f"the draft begins at position {base}, but only {length} tokens are committed"
                return Fault(FaultCode.RESYNC, why)
            if self._prefix.hash_at(base) != draft.base_hash:
                why = f"the first {base} tokens of the verifier and of the draft differ"
                return Fault(FaultCode.RESYNC, why)
        self._announced_none = False
        self.kept.note(draft)
        places = self._grow(draft)
        if places is not None:
            deepest = max(node.position for node in self.tree.nodes.values())
            depth = deepest - self._prefix.length + 1
            responds = ROOT in draft.parents and draft.base_position >= self._missed_length
            self.arrivals.on_useful_draft(now, depth, places, responds=responds)
            self._missed_length = 0
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
        return None

    @property
    def no_draft_coming(self) -> bool:
        """True if there is no draft to wait for: the device drafts nothing, or its draft behind the
        committed tokens was dropped because it could be no token. In the second case the device
        itself waits for a verdict."""
        is_dropped = self._prefix.length in self._dropped_positions and not self.tree.nodes
        return self._announced_none or is_dropped

    def _grow(self, draft: Draft) -> int | None:
        """Add the nodes of a draft to the tree. Return the number of places for which it has the
        first candidate, or None if none of its nodes is alive."""
        useful, places = False, 0
        tree, most = self.tree, self._limits.max_nodes_outstanding
        nodes, grow, size = tree.nodes, tree.grow, self._vocabulary_size
        first, base = draft.first_node_id, draft.base_position
        for index, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            if len(nodes) >= most:
                break
            growth = STALE
            if 0 <= token < size:  # A padded draft may contain ids that are no tokens.
                growth = grow(first + index, parent, token, base)
            elif parent == ROOT and base == self._prefix.length:
                self._dropped_positions.add(base)
            elif parent in nodes:
                self._dropped_positions.add(nodes[parent].position + 1)
            if growth is ALIVE:
                useful = True
                places += nodes[first + index].rank == 0
            elif growth is STALE:
                self._stale += 1
        return places if useful else None

    def add_nodes(self, view: PassView) -> None:
        """Add the device's nodes to the empty tree of the next pass, oldest first.

        A node is worth its row only if the product of the acceptance rates of the ranks on its path
        is at least ``view.least_chance``. A parent is older and likelier than its children, so a
        chosen node's parent is always chosen too.
        """
        tree, rates, places = view.tree, self._acceptance.rates, {ROOT: -1}
        room, least_chance, last = tree.room, view.least_chance, len(rates) - 1
        end = self._prefix.length + view.depth
        for node in self.tree.nodes.values():
            if len(places) > room:
                break
            parent, rank = places.get(node.parent), node.rank
            if parent is None:  # the parent was not chosen
                continue
            before = 1.0 if parent < 0 else tree.reach[parent]
            reach = before * rates[rank if rank < last else last]
            if reach >= least_chance and node.position < end:
                place = tree.add(parent, node.token, reach, SourceKind.DEVICE)
                assert place is not None
                places[node.id] = place
        view.has_drafts = len(places) > 1
        self.kept.add_nodes(view)

    @property
    def has_nodes(self) -> bool:
        """Whether the device's drafts, or text that it has sent before, may bring nodes."""
        return bool(self.tree.nodes) or self.kept.has_text

    @property
    def top_acceptance_rate(self) -> float:
        """Acceptance rate of the device's first candidate; no draft of this device is likelier to
        pay."""
        return self._acceptance.rate(0)

    def tokens_per_pass(self, pass_s: float, now: float) -> float:
        """Return how many tokens the device's drafts are expected to add to the pass after next: a
        pass of ``pass_s`` seconds begins now, and the one in question follows it. 0 if nothing is
        known of the device.

        Formula: a + a**2 + .. + a**n, with a the acceptance rate of first candidates and n the
        number of places that the device drafts while a pass runs. After a miss, n is the length of
        its first draft, and the places that it drafts in the rest of the pass. A device adds
        nothing if it usually needs more than a pass to answer a miss, or if its answer is overdue.
        Example: a device that needs 3 ms for a place drafts 13 places in a pass of 40 ms. If 0.9
        are accepted, that adds 6.8 tokens.
        """
        place_s = self.arrivals.place_s
        response_s = self.arrivals.usual_response_s
        if place_s is None or self.no_draft_coming or response_s > pass_s:
            return 0.0
        left_s, places = pass_s, 0.0
        if not self.tree.nodes:
            expected_at = self.arrivals.expected_at()
            if expected_at is None or not now - response_s <= expected_at <= now + pass_s:
                return 0.0
            left_s -= max(0.0, expected_at - now)
            places = self.arrivals.response_depth
        places += left_s / max(place_s, _MIN_PLACE_S)
        rate = min(self._acceptance.rate(0), _MAX_RATE)
        return rate * (1.0 - math.pow(rate, places)) / (1.0 - rate)

    def count_matching_steps(self, rate: float, max_steps: int) -> int:
        """Return how many steps a server model needs to match the device's next draft: to be
        expected to propose as many right tokens. ``rate`` is the share of the server model's tokens
        that are right. The result is at most ``max_steps``."""
        device_rate = self._acceptance.rate(0)
        depths = range(1, 1 + round(self.arrivals.response_depth))
        missing = math.fsum([device_rate**depth for depth in depths])
        steps, reach = 0, 1.0
        while missing > 0.0 and steps < max_steps:
            reach *= rate
            missing -= reach
            steps += 1
        return steps

    def pop_queue_s(self, now: float) -> float:
        """Return how long the oldest node has waited for the pass that starts now, in seconds, and
        reset it; 0 if no node waits."""
        since, self._waiting_since = self._waiting_since, None
        return 0.0 if since is None else now - since

    def pop_stale_count(self) -> int:
        """Return the number of nodes dropped as stale on arrival since the last call."""
        stale, self._stale = self._stale, 0
        return stale

    def run_ahead_view(
        self,
        now: float,
        idle_since: float,
        pass_s: float,
        *,
        runs_anyway: bool = False,
        server_draft_s: float = math.inf,
    ) -> RunAheadView:
        """Return what a run-ahead policy may use when no node is waiting."""
        return RunAheadView(
            now=now,
            idle_since=idle_since,
            pass_s=pass_s,
            expected_at=self.arrivals.expected_at(),
            no_draft_coming=self.no_draft_coming,
            hit_rate=self._hit_rate.get(0.0),
            runs_anyway=runs_anyway,
            response_depth=self.arrivals.response_depth,
            response_s=self.arrivals.response_s,
            server_draft_s=server_draft_s,
            arrival_rate=self.arrivals.arrival_rate,
        )

    def learn(self, verdict: PassVerdict) -> None:
        """Advance by the tokens that a pass committed."""
        if verdict.request.device_nodes:
            self._hit_rate.add(verdict.count_device_tokens() > 0)
        tokens, siblings = verdict.committed, self.tree.roots
        for token in tokens:
            if not siblings:
                break
            for node in siblings:
                if node.token == token:
                    self._count_place(node.rank, len(siblings))
                    siblings = node.children
                    break
            else:
                self._count_place(None, len(siblings))
                break
        self.tree.commit(tokens)
        if self._dropped_positions:
            length = self._prefix.length
            self._dropped_positions = {one for one in self._dropped_positions if one >= length}
        if not self.tree.nodes:
            self._waiting_since = None
            self.arrivals.on_miss(verdict.now)
            self._missed_length = self._missed_length or self._prefix.length

    def _count_place(self, rank: int | None, offered: int) -> None:
        """Count a place at which ``offered`` siblings were judged. ``rank`` is that of the accepted
        one; None means that all were rejected."""
        self._acceptance.add(rank, offered)
        self._history.acceptance.add(rank, offered)
