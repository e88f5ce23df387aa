"""A whole text as a draft source: the prediction of a client, or a text of the device that the
output follows.

Theory of operation. ``predicted_text.py`` knows where in the prediction the output stands, behind
any path of the tree. After every event the candidates are added that are worth a row, the likeliest
place first: behind the end of the output, and behind whatever is in the tree. So where the output
leaves the prediction, a token of the draft model or of lookup may lead back to it.

A prediction takes no step, and its chains are as long as the verifier takes nodes. Its chances
begin at the chances of earlier predictions (``estimates.PredictionChances``) and soon follow the
verdicts on this one. Candidates are judged whether they were in the tree or not.

**A text that is found.** Without a prediction, a text of the corpus or an earlier text takes its
place once the last ``LEAST_FOUND`` tokens of the output stand in it. Lookup sees only the last
tokens, and at most what followed them. A whole text is followed over differences as well. When the
output has left it for ``_LOST_TOKENS`` tokens, another one may take its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.policy import DraftView, JudgedPlace
from edgespec.core.protocol.draft_source import SourceKind
from edgespec.core.protocol.messages import MAX_TOKEN_ID
from edgespec.core.protocol.predicted_text import PredictedText, ReadingState, state_at
from edgespec.core.protocol.text_lookup import (
    CORPUS_LENGTH,
    TextCandidate,
    TextChances,
    TextTables,
)
from edgespec.core.protocol.tree import NO_CELL, ROOT, UNRANKED, Node, SpeculationTree

MIN_PATH_CHANCE: Final = 0.01
"""Least chance that all tokens on a node's path are right. It bounds the bytes of far nodes: rows
are paid for by the chance in their pass."""
MIN_BRANCH_CHANCE: Final = 0.05
"""The same for a path that is not the likeliest everywhere, or that leaves the prediction: such a
branch saves little where the other one is right."""
MIN_FAR_CHANCE: Final = 1e-4
"""The same for the path that follows the prediction everywhere. A verifier goes on in text that it
has received where the output differs from it, so far nodes are of use even where the path breaks.
"""
_FOLLOWED_CHANCE: Final = 0.75
"""Least chance of a token that counts as following the prediction."""
_MIN_BEGINNING: Final = 0.3
"""Least chance of the other tokens of such a path: that it begins at the right place."""
RESERVED_NODES: Final = 4
"""Nodes that are left to the other sources."""
LEAST_FOUND: Final = 8
"""Tokens at the end of the output that have to stand in a text for it to be followed."""
_LOST_TOKENS: Final = 16
"""Tokens that the output may leave a found text before another one is looked for."""


class DevicePrediction:
    """Adds the candidates of a whole text to one session's ``tree``, as a ``DraftSource``.

    ``prediction`` are token ids; ids beyond the vocabulary of ``vocabulary_size`` ids (0 if it is
    not known) are left out. If it is empty, a text of ``tables`` is followed once it is found.
    Raises ``ValueError`` if there are more than ``MAX_PREDICTION_TOKENS``."""

    def __init__(
        self,
        tree: SpeculationTree,
        prediction: Sequence[int],
        estimates: DraftEstimates,
        vocabulary_size: int = 0,
        tables: TextTables | None = None,
    ) -> None:
        self.kind = SourceKind.PREDICTION if prediction else SourceKind.DEVICE_LOOKUP
        size = vocabulary_size or MAX_TOKEN_ID + 1
        self._tree, self._guesses = tree, estimates.guesses
        self._chances = TextChances(self._guesses.prediction.cells)
        tokens = [token for token in prediction if 0 <= token < size]
        self._text = PredictedText(tokens, self._chances.by_cell)
        self._tables = None if prediction else tables
        """Texts among which one is looked for."""
        self._state = self._text.begin()
        self._read_length = tree.prefix.prompt_length
        self._seen: tuple[int, int, int] | None = None
        """Committed length, last node and room when nodes were added last."""
        self.has_unsent = False
        """Whether nodes were added since the session sent nodes the last time."""
        self._confirmed: list[int] = []

    def learn(self, verdict: JudgedPlace) -> None:
        """Count the candidates of a place at which the device model offered other tokens.

        What candidates are worth elsewhere is counted when ``add_nodes`` reads the output."""
        if verdict.model_nodes:
            for node in verdict.offered:
                if node.rank == UNRANKED and node.prediction_cell != NO_CELL:
                    hit = node is verdict.right
                    self._guesses.prediction.add_contradicted(node.prediction_cell, hit=hit)

    def add_nodes(self, view: DraftView) -> None:
        """Add the candidates that are worth a row in the present state of the tree and the
        verifier."""
        if self._read_length < self._tree.prefix.length:
            self._read_output()
            self._find_text()
        if not self._text.tokens:
            return
        tree, end, room = self._tree, self._read_length, view.room - RESERVED_NODES
        seen = end, tree.last_id, room
        if room <= 0 or seen == self._seen:
            return
        last, settled, min_in_pass = tree.last_id, view.settled_position, view.row_chance
        count = 0
        # Places: negated chance, number of places added before, node, depth, chance in its pass,
        # least chance of a path, chance that its beginning is right, state of the prediction.
        heap: list[tuple[float, int, int, int, float, float, float, ReadingState]] = [
            (-1.0, 0, ROOT, 0, 1.0, MIN_PATH_CHANCE, 1.0, self._state)
        ]
        while heap and room > 0:
            negated_chance, _, parent, depth, in_pass, least, beginning, state = heappop(heap)
            children, position = tree.children(parent), end + depth
            if position >= view.end:
                continue
            is_far = beginning >= _MIN_BEGINNING
            price = least / -negated_chance
            far_price = MIN_FAR_CHANCE / -negated_chance if is_far else price
            if position >= settled and min_in_pass > price * in_pass:
                price = min_in_pass / in_pass
            candidates = self._text.candidates(state)
            room -= self._add(children, parent, candidates, price, far_price, room)
            for child in children:
                chance = negated_chance * child.chance
                behind = in_pass if position < settled else in_pass * child.chance
                is_main = child is children[0] and child.prediction_cell != NO_CELL
                least_behind = least if is_main else MIN_BRANCH_CHANCE
                begins = beginning if is_main else 0.0
                if child.chance < _FOLLOWED_CHANCE:
                    begins *= child.chance
                goes_on = -chance >= least_behind and behind >= min_in_pass
                if goes_on or (begins >= _MIN_BEGINNING and -chance >= MIN_FAR_CHANCE):
                    count += 1
                    after = self._text.advance(state, child.token)
                    place = chance, count, child.id, depth + 1, behind, least_behind, begins, after
                    heappush(heap, place)
        self.has_unsent |= tree.last_id > last
        self._seen = end, tree.last_id, room

    def pop_confirmed(self) -> Sequence[int]:
        """Return the ids of the nodes of other sources that the prediction offered too since the
        last call."""
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def _read_output(self) -> None:
        """Judge the candidates by the newly committed tokens, and follow those."""
        text, tokens, note = self._text, self._tree.prefix.tokens, self._chances.note
        state, first = self._state, self._read_length
        if not text.tokens:
            first = len(tokens)
        for position in range(first, len(tokens)):
            token = tokens[position]
            for cell, candidate in text.candidates(state):
                note(cell, candidate == token)
            state = text.commit(state, token, tokens, position)
        self._state, self._read_length = state, len(tokens)

    def _find_text(self) -> None:
        """Follow a text of the tables that contains the end of the output, if the output follows
        none."""
        text, tables, tokens = self._text, self._tables, self._tree.prefix.tokens
        if tables is None or (text.tokens and self._state.gap_length < _LOST_TOKENS):
            return
        if len(tokens) < LEAST_FOUND or not tables.reads_other_texts:
            return
        found = tables.find_text(tuple(tokens[-CORPUS_LENGTH:]), LEAST_FOUND)
        if found is None:
            return
        (others, index), length = found
        self._text = PredictedText(others, self._chances.by_cell)
        self._state = state_at(index, length)

    def _add(
        self,
        children: Sequence[Node],
        parent: int,
        candidates: Sequence[TextCandidate],
        min_chance: float,
        min_far_chance: float,
        room: int,
    ) -> int:
        """Add the candidates that have at least ``min_chance`` as children of ``parent``, and
        return the number of new nodes. ``min_far_chance`` is that of a candidate that follows the
        prediction.

        A candidate that another source offered too confirms that node instead."""
        before, guesses, tree = len(children), self._guesses, self._tree
        has_model_nodes = bool(children) and any(child.rank != UNRANKED for child in children)
        for cell, token in candidates:
            chance = self._chances.by_cell[cell]
            node = next((child for child in children if child.token == token), None)
            if node is not None:
                if node.prediction_cell == NO_CELL:
                    node.prediction_cell = cell
                    self._confirmed.append(node.id)
                    self._confirm(node, chance)
                continue
            if has_model_nodes:
                chance = guesses.prediction.contradicted_chance(cell, chance)
            least = min_far_chance if chance >= _FOLLOWED_CHANCE else min_chance
            if chance >= least and room > len(children) - before:
                tree.grow(
                    tree.last_id + 1,
                    parent,
                    token,
                    tree.prefix.length,
                    rank=UNRANKED,
                    chance=chance,
                    prediction_cell=cell,
                )
        return len(children) - before

    def _confirm(self, node: Node, chance: float) -> None:
        """Raise the chance of a node that another source has added: the prediction, where the token
        has ``chance``, offers it too."""
        if node.rank == UNRANKED:  # lookup's: both may have read the same text
            node.chance = max(node.chance, chance)
            return
        guesses, rank = self._guesses, node.rank
        found = guesses.draft_chance(rank, node.logprob, node.chance, chance)
        if rank:  # the model prefers another token
            contradicted = guesses.prediction.contradicted_chance(node.prediction_cell, chance)
            found = max(found, contradicted)
        node.chance = found
