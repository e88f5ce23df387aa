"""Which nodes of the device's tree the verifier has been sent, and the messages that send the rest.

A stream knows only what was sent on it: after a reconnect every alive node is unsent again.
"""

from __future__ import annotations

from itertools import islice

from edgespec.core.messages import Draft
from edgespec.core.tree import ROOT, Node, SpeculationTree

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
        for node in self._tree.newest_first():
            if node.id <= self._sent_through:
                break
            count += 1
        return count

    @property
    def in_flight(self) -> int:
        return len(self._tree) - self.unsent

    def trim(self, limit: int) -> None:
        """The verifier takes ``limit`` nodes: it dropped what was sent beyond them."""
        in_flight = (node.id for node in self._tree if node.id <= self._sent_through)
        self._sent_through = max(islice(in_flight, limit), default=0)

    def take(self, limit: int) -> list[Draft]:
        """Messages for the unsent alive nodes, oldest first, until ``limit`` are in flight; one a
        run of consecutive ids."""
        unsent = self.unsent
        room = max(0, limit - (len(self._tree) - unsent))
        waiting = list(islice(self._tree.newest_first(), unsent))[::-1][:room]
        runs: list[list[Node]] = []
        for node in waiting:
            fits = runs and runs[-1][-1].id + 1 == node.id and len(runs[-1]) < MAX_NODES_PER_DRAFT
            if fits:
                runs[-1].append(node)
            else:
                runs.append([node])
        if waiting:
            self._sent_through = waiting[-1].id
        return [self._message(run) for run in runs]

    def nothing(self) -> Draft:
        """The message that says no draft is coming."""
        return Draft(self._tree.last_id + 1, (), ())

    def _message(self, run: list[Node]) -> Draft:
        prefix = self._tree.prefix
        rooted = any(node.parent == ROOT for node in run)
        return Draft(
            first_node_id=run[0].id,
            parents=tuple(node.parent for node in run),
            tokens=tuple(node.token for node in run),
            base_position=prefix.length if rooted else 0,
            base_hash=prefix.hash_at(prefix.length) if rooted else 0,
        )
