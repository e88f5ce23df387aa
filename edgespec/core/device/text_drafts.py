"""Device lookup: candidates from the text itself and from earlier texts, as nodes of a session's
tree.

Theory of operation. The tree has two draft sources: the device model, which takes the time of a
draft step for each position, and text lookup (``core/protocol/text_guesses.py``), which takes none.
After every event lookup's candidates are added where they are worth a row, behind whatever is in
the tree, the likeliest place first. So a chain of them is in flight before the model has begun a
step.

Each source has the accuracy that was measured (``estimates.DraftChances``), whether its candidate
was in the tree or not. The policy sees one tree of nodes with chances.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.policy import DraftView
from edgespec.core.protocol.text_guesses import TextCandidate, TextReader, TextTables
from edgespec.core.protocol.tree import NO_CELL, ROOT, UNRANKED, Node, SpeculationTree

MIN_PATH_CHANCE: Final = 0.03
"""Least chance that all tokens on a node's path are right."""
MAX_LOOKUP_NODES: Final = 64


class DeviceLookup:
    """Adds text lookup's candidates to one session's ``tree``. ``tables`` outlive the session and
    belong to its user alone."""

    def __init__(
        self, tree: SpeculationTree, tables: TextTables, estimates: DraftEstimates
    ) -> None:
        self._tree, self._chances = tree, estimates.guesses
        self._reader = TextReader(tables, self._chances.text)

    def learn(self) -> None:
        """Judge candidates by the newly committed tokens, then index those."""
        lookup, prefix = self._reader.lookup, self._tree.prefix
        if lookup.indexed_length < prefix.prompt_length:
            lookup.load(prefix.tokens, prefix.prompt_length)
        self._reader.learn(prefix.tokens)

    def grow(self, view: DraftView) -> None:
        """Add the candidates that are worth a row in the present state of the tree and the
        verifier."""
        tree, reader, tokens = self._tree, self._reader, self._tree.prefix.tokens
        end, settled, min_in_pass = len(tokens), view.settled_position, view.row_chance
        if end < 2 or reader.lookup.indexed_length < end:
            return
        room = min(view.room // 2, MAX_LOOKUP_NODES - sum(n.rank < 0 for n in tree.nodes.values()))
        # Entries, likeliest first, then oldest: negated chance, count, chance in its pass, node,
        # the position behind it, and the lookup state there.
        count = 0
        heap = [(-1.0, 0, 1.0, ROOT, end, reader.state_at_end(tokens))]
        while heap:
            negated, _, in_pass, parent, position, state = heappop(heap)
            candidates, state = reader.candidates(tokens, state)
            children = tree.children(parent)
            if position < view.end:
                room -= self._add(children, parent, candidates, -negated, room)
            for child in children:
                behind = negated * child.chance
                behind_in_pass = in_pass if position < settled else in_pass * child.chance
                if -behind >= MIN_PATH_CHANCE and behind_in_pass >= min_in_pass:
                    count += 1
                    after = reader.advance(tokens, state, child.token)
                    heappush(heap, (behind, count, behind_in_pass, child.id, position + 1, after))

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
