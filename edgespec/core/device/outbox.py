"""The outbox knows which nodes of the tree were sent, and makes the messages that send the rest.

A stream knows only what was sent on it: after a reconnect every alive node is unsent again.
"""

from __future__ import annotations

from itertools import islice, pairwise

from edgespec.core.protocol.messages import Draft
from edgespec.core.protocol.tree import ROOT, Node, SpeculationTree

MAX_NODES_PER_DRAFT = 64


class DraftOutbox:
    def __init__(self, tree: SpeculationTree) -> None:
        self._tree = tree
        self._sent_through = 0
        """Alive nodes up to this id were sent: the oldest always go first."""

    def new_stream(self) -> None:
        self._sent_through = 0

    def was_sent(self, node_id: int) -> bool:
        return node_id <= self._sent_through

    @property
    def unsent(self) -> int:
        count = 0
        if self._tree.last_id > self._sent_through:
            for node_id in reversed(self._tree.nodes):
                if node_id <= self._sent_through:
                    break
                count += 1
        return count

    def trim(self, limit: int) -> None:
        """The verifier takes ``limit`` nodes: it dropped what was sent beyond them."""
        in_flight = (node_id for node_id in self._tree.nodes if node_id <= self._sent_through)
        self._sent_through = max(islice(in_flight, limit), default=0)

    def take(self, limit: int) -> list[Draft]:
        """Messages for the unsent alive nodes, oldest first, until ``limit`` are in flight; one a
        run of consecutive ids."""
        nodes, unsent = self._tree.nodes, self.unsent
        waiting = list(islice(reversed(nodes.values()), unsent))[::-1]
        del waiting[max(0, limit - (len(nodes) - unsent)) :]
        if not waiting:
            return []
        first, last = waiting[0].id, waiting[-1].id
        self._sent_through = last
        if last - first < min(len(waiting), MAX_NODES_PER_DRAFT):  # one run, as usual
            return [self._message(waiting)]
        runs = [[waiting[0]]]
        for before, node in pairwise(waiting):
            if before.id + 1 == node.id and len(runs[-1]) < MAX_NODES_PER_DRAFT:
                runs[-1].append(node)
            else:
                runs.append([node])
        return [self._message(run) for run in runs]

    def nothing(self) -> Draft:
        """The message that says no draft is coming."""
        return Draft(self._tree.last_id + 1, (), ())

    def _message(self, run: list[Node]) -> Draft:
        prefix = self._tree.prefix
        parents = tuple([node.parent for node in run])
        base = prefix.length if ROOT in parents else 0
        return Draft(
            run[0].id,
            parents,
            tuple([node.token for node in run]),
            base,
            prefix.hash_at(base) if base else 0,
        )
