"""The inbox takes in the drafts of one session: it checks them, grows the tree and times them.

Drafts are hints, so nothing here can change a token: a node behind a dead or unknown parent, or one
that is no token of the target, is dropped and counted; a draft on tokens the verifier does not have
is a ``Fault`` that makes the device come back with what it holds.
"""

from __future__ import annotations

from itertools import islice

from edgespec.core.protocol.estimators import AcceptanceEstimator, MovingAverage
from edgespec.core.protocol.messages import Draft, Fault, FaultCode, Limits
from edgespec.core.protocol.prefix import CommittedPrefix
from edgespec.core.protocol.tree import ALIVE, ROOT, STALE, Node, SpeculationTree
from edgespec.core.verifier.arrivals import ArrivalEstimator
from edgespec.core.verifier.run_ahead import RunAheadView


class DraftInbox:
    def __init__(self, prefix: CommittedPrefix, vocabulary_size: int, limits: Limits) -> None:
        self.tree = SpeculationTree(prefix)
        self.arrivals = ArrivalEstimator()
        self.no_draft_coming = False
        """The device said that no draft is coming, so there is nothing to wait for."""
        self.overflow = 0
        """Nodes dropped because the tree was full."""
        self._prefix, self._vocabulary_size, self._limits = prefix, vocabulary_size, limits
        self._hit_rate = MovingAverage(0.05)
        self._acceptance = AcceptanceEstimator()
        self._stale = 0
        self._waiting_since: float | None = None

    def reset(self, drafting: bool) -> None:
        """A new stream: ids start over and nothing is outstanding."""
        self.tree.clear()
        self.no_draft_coming, self._waiting_since = not drafting, None

    def receive(self, draft: Draft, now: float) -> Fault | None:
        """Grow the tree by ``draft``; a fault when it cannot have been meant for this prefix."""
        if not draft.tokens:
            self.no_draft_coming = True
            return None
        if ROOT in draft.parents:
            base, length = draft.base_position, self._prefix.length
            if base > length:
                why = f"draft on position {base}, but only {length} are committed"
                return Fault(FaultCode.RESYNC, why)
            if self._prefix.hash_at(base) != draft.base_hash:
                why = f"the first {base} tokens differ here from those the draft stands on"
                return Fault(FaultCode.RESYNC, why)
        self.no_draft_coming = False
        if self._grow(draft):
            self.arrivals.on_useful_draft(now)
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
        return None

    def _grow(self, draft: Draft) -> bool:
        useful, tree, most = False, self.tree, self._limits.max_nodes_outstanding
        nodes, grow, size = tree.nodes, tree.grow, self._vocabulary_size
        first, base = draft.first_node_id, draft.base_position
        for index, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            if len(nodes) >= most:
                self.overflow += len(draft.tokens) - index
                break
            growth = STALE
            if 0 <= token < size:  # a padded draft may propose what is no token
                growth = grow(first + index, parent, token, base)
            if growth is ALIVE:
                useful = True
            elif growth is STALE:
                self._stale += 1
        return useful

    def verifiable(self, room: int, end: int, least_chance: float = 0.0) -> list[Node]:
        """The nodes that the next pass should look at, at most ``room``, oldest first.

        A node can matter only if the target's token after it lies before ``end``. It is worth its
        row only if it is right with at least ``least_chance``: the chance of its path is the
        product of the acceptance rates of the ranks on it, so two first choices at a rate of 0.8
        have 0.8 * 0.8 = 0.64. A parent is older and likelier than its children, so every node that
        is chosen has its parent chosen too.
        """
        nodes = self.tree.nodes
        if not nodes or room <= 0:
            return []
        if least_chance <= 0.0:
            return list(islice((node for node in nodes.values() if node.position < end - 1), room))
        chosen: list[Node] = []
        chances, rates = {ROOT: 1.0}, self._acceptance.rates
        last = len(rates) - 1
        for node in nodes.values():
            before = chances.get(node.parent)
            if before is None:  # its parent was not chosen
                continue
            rank = node.rank
            chance = before * rates[rank if rank < last else last]
            if chance >= least_chance and node.position < end - 1:
                chances[node.id] = chance
                chosen.append(node)
                if len(chosen) == room:
                    break
        return chosen

    @property
    def best_chance(self) -> float:
        """How likely the device's first choice is right: no draft of it is likelier to pay."""
        return self._acceptance.rate(0)

    def take_queue_s(self, now: float) -> float:
        """How long the oldest node has waited for the pass that starts now; 0 without nodes."""
        since, self._waiting_since = self._waiting_since, None
        return 0.0 if since is None else now - since

    def take_stale(self) -> int:
        """Nodes dropped as stale on arrival since the last call."""
        stale, self._stale = self._stale, 0
        return stale

    def view(
        self, now: float, idle_since: float, pass_s: float, *, runs_anyway: bool = False
    ) -> RunAheadView:
        """What a run-ahead policy may know when no node is waiting."""
        return RunAheadView(
            now,
            idle_since,
            pass_s,
            self.arrivals.expected_at(),
            self.no_draft_coming,
            self._hit_rate.get(0.0),
            runs_anyway,
        )

    def commit(self, tokens: tuple[int, ...], now: float, hit: bool | None) -> None:
        """A pass committed ``tokens``; ``hit``: whether the first was a node of it (None: it had
        no nodes)."""
        if hit is not None:
            self._hit_rate.add(hit)
        siblings = self.tree.roots
        for token in tokens:
            if not siblings:
                break
            for node in siblings:
                if node.token == token:
                    self._acceptance.add(node.rank, len(siblings))
                    siblings = node.children
                    break
            else:
                self._acceptance.add(None, len(siblings))
                break
        self.tree.commit(tokens)
        if not self.tree.nodes:
            self._waiting_since = None
            self.arrivals.on_miss(now)
