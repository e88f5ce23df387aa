"""Device lookup: candidates from the text itself and from earlier texts, as nodes of a session's
tree.

Theory of operation. The tree has two draft sources: the device model, which takes the time of a
draft step for each position, and text lookup (``core/protocol/text_lookup.py``), which takes none.
After every event lookup's candidates are added where they are worth a row, behind whatever is in
the tree, the likeliest place first (``core/protocol/text_lookup.py``). So such a chain is in
flight before the model has begun a step.

Each source has the accuracy that was measured (``estimates.DraftChances``), whether its candidate
was in the tree or not. The policy sees one tree of nodes with chances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.policy import DraftView, JudgedPlace
from edgespec.core.protocol.draft_source import SourceKind
from edgespec.core.protocol.text_lookup import LookupTree, TextCandidate, TextReader, TextTables
from edgespec.core.protocol.tree import NO_CELL, ROOT, UNRANKED, Node, SpeculationTree

MIN_PATH_CHANCE: Final = 0.03
"""Least chance that all tokens on a node's path are right."""
MAX_LOOKUP_NODES: Final = 192
"""Most nodes at the same time. They fill three passes, so that a text that is followed for long
fills the passes of a distant verifier."""
_NODES_FOR_OTHERS: Final = 32
"""Nodes that are left to the other sources; they are half of the room if that is less."""
INDEXED_PER_EVENT: Final = 8192
"""Most tokens of a prompt that are indexed at one event, which takes about two milliseconds."""


class DeviceLookup:
    """Adds text lookup's candidates to one session's ``tree``, as a ``DraftSource``. ``tables``
    outlive the session and belong to its user alone."""

    def __init__(
        self, tree: SpeculationTree, tables: TextTables, estimates: DraftEstimates
    ) -> None:
        self.kind = SourceKind.DEVICE_LOOKUP
        self._tree, self._chances = tree, estimates.guesses
        self._reader = TextReader(tables, self._chances.text)
        self._seen: tuple[int, int, int] | None = None
        """Committed length, last node and room when nodes were added last."""

    def learn(self, verdict: JudgedPlace) -> None:
        """Count the candidates of a place at which the device model offered other tokens.

        What candidates are worth elsewhere is counted when ``add_nodes`` reads the text."""
        if verdict.model_nodes:
            for node in verdict.offered:
                if node.rank == UNRANKED and node.lookup_cell != NO_CELL:
                    self._chances.add(node, hit=node is verdict.right)

    def _read_text(self) -> None:
        """Judge candidates by the newly committed tokens, then index those.

        A long prompt is indexed a part at a time, at the events of the seconds before the first
        token."""
        lookup, prefix = self._reader.lookup, self._tree.prefix
        if (indexed := lookup.indexed_length) < prefix.prompt_length:
            lookup.load(prefix.tokens, min(prefix.prompt_length, indexed + INDEXED_PER_EVENT))
            if lookup.indexed_length < prefix.prompt_length:
                return
        self._reader.learn(prefix.tokens)

    def add_nodes(self, view: DraftView) -> None:
        """Add the candidates that are worth a row in the present state of the tree and the
        verifier."""
        self._read_text()
        tree, reader, tokens = self._tree, self._reader, self._tree.prefix.tokens
        end, settled, min_in_pass = len(tokens), view.settled_position, view.row_chance
        if end < 2 or reader.lookup.indexed_length < end:
            return
        spare = MAX_LOOKUP_NODES - sum(n.rank < 0 for n in tree.nodes.values())
        if spare < 0:
            return  # the prediction has filled the tree
        room = min(max(view.room // 2, view.room - _NODES_FOR_OTHERS), spare)
        if (end, tree.last_id, room) == self._seen:
            return
        # The node before a place is described by its id and the path's chance within its pass.
        lookup_tree = LookupTree(reader, tokens, (ROOT, 1.0))
        for (parent, chance_in_pass), path_chance, depth, candidates in lookup_tree.visit_places():
            children, position = tree.children(parent), end + depth
            if position < view.end:
                room -= self._add(children, parent, candidates, path_chance, room)
            for child in children:
                chance = path_chance * child.chance
                in_pass = chance_in_pass if position < settled else chance_in_pass * child.chance
                if chance >= MIN_PATH_CHANCE and in_pass >= min_in_pass:
                    lookup_tree.add_place((child.id, in_pass), child.token, chance)
        self._seen = end, tree.last_id, room

    def _add(
        self,
        children: Sequence[Node],
        parent: int,
        candidates: Sequence[TextCandidate],
        chance: float,
        room: int,
    ) -> int:
        """Add the candidates that are worth a row as children of ``parent``, and return the number
        of new nodes.

        A candidate that the draft model offered too confirms that node instead."""
        before, chances, tree = len(children), self._chances, self._tree
        has_draft_candidates = any(child.rank != UNRANKED for child in children)
        for cell, token in candidates:
            node = next((child for child in children if child.token == token), None)
            lookup_chance = chances.text.by_cell[cell]
            if has_draft_candidates and node is None:
                lookup_chance = chances.contradicted_chance(cell)
            if node is not None:
                if node.lookup_cell == NO_CELL:
                    node.lookup_cell = cell
                    rank, logprob, rate = node.rank, node.logprob, node.chance
                    if rank == UNRANKED:  # the prediction's: both may have read the same text
                        node.chance = max(rate, lookup_chance)
                    else:
                        node.chance = chances.draft_chance(rank, logprob, rate, lookup_chance)
            elif chance * lookup_chance >= MIN_PATH_CHANCE and room > len(children) - before:
                node_id, base = tree.last_id + 1, tree.prefix.length
                tree.grow(
                    node_id,
                    parent,
                    token,
                    base,
                    rank=UNRANKED,
                    chance=lookup_chance,
                    lookup_cell=cell,
                )
        return len(children) - before
