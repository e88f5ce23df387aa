"""Kept drafts: text that a device has sent, followed further where the output differs from it.

Theory of operation. A device that has the text of the output, such as an older version of it, sends
long runs of it. Where the output differs, every node behind that place is dead, and a distant
device sends the rest again a round trip later. But the verifier has already received that rest. So
it keeps the tokens of such runs as one text, finds the place at which the output goes on
(``core/protocol/predicted_text.py``, as the device does) and drafts from there by itself. The
device gave this knowledge, so its nodes count as the device's.

**The text** grows by the runs. Each node of a run is followed through the text, as if it were a
token of the output. Where the text ends, the node's token is appended. So a run that repeats a part
of the text adds only what is new in it. A run that fits the text nowhere for ``_NEW_PART`` tokens
is another part, and is appended as such. Nodes are followed whether they are alive or not: on a
distant link most nodes arrive behind a place that the output has left already.

Example: the text is "a b c d". A run "c d e" is followed from c to the end, and e is appended. Then
the output goes "a b x c": x fits nowhere, c is found again, and d and e are drafted behind it.

**Cost.** Nothing is kept until a message brings ``MIN_RUN`` nodes, more than draft models send at a
time. A node then costs about as much as its place in the tree. A pass that the device has half
filled itself gets no further nodes.

Bounds: the text begins anew after ``MAX_TEXT_TOKENS``, and a later message may continue the last
``_MAX_PLACES`` nodes. The text belongs to one generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from edgespec.core.protocol.draft_source import SourceKind
from edgespec.core.protocol.messages import Draft
from edgespec.core.protocol.predicted_text import (
    INITIAL_CHANCES,
    PredictedText,
    ReadingState,
    state_at,
    state_near,
)
from edgespec.core.protocol.text_lookup import TextChances
from edgespec.core.protocol.tree import ROOT, CommittedPrefix
from edgespec.core.verifier.pass_tree import PassView

MIN_RUN: Final = 16
"""Nodes in one message from which on its text is kept."""
MAX_TEXT_TOKENS: Final = 2048
"""Tokens of one generation that are kept."""
MIN_PATH_CHANCE: Final = 0.02
"""Least chance that the output goes through a node."""
_MAX_PLACES: Final = 512
"""Nodes whose place in the text is remembered."""
_NEW_PART: Final = 8
"""A run that fits the text nowhere for this many tokens is another part of it."""
_MAX_GAP: Final = 256
"""The text is dropped when the output has fitted it nowhere for this many tokens."""
_SURE_CHANCE: Final = 0.5
"""Chance of the next token from which on the verifier does not wait for the device."""


def make_chances(shared: TextChances | None = None) -> TextChances:
    """Return chances of kept drafts, which begin at ``shared`` if that is given."""
    return TextChances(shared, initial=INITIAL_CHANCES)


class KeptDrafts:
    """The runs of drafts that one session has received, as a source of further nodes.

    ``prefix`` is the session's text, ``vocabulary_size`` the target's. ``chances`` are shared by
    sessions: they are shares of right candidates, and hold nothing of a text."""

    def __init__(self, prefix: CommittedPrefix, vocabulary_size: int, chances: TextChances) -> None:
        self._prefix, self._vocabulary_size, self._shared = prefix, vocabulary_size, chances
        self._chances: TextChances | None = None
        self._text: PredictedText | None = None
        self._state = ReadingState(())
        """State behind the first ``_read_length`` tokens of the output."""
        self._read_length = 0
        self._last_id = 0
        """The last node that was followed."""
        self._last_state = self._state
        """The state behind that node."""
        self._places: dict[int, int] = {}
        """Index in the text behind a node, for the latest nodes that stand in it."""

    def begin_stream(self) -> None:
        """Forget the ids of nodes, which belong to a stream. The text stays."""
        self._places.clear()
        self._last_id = 0

    # --- what the device sends -----------------------------------------------------------------

    def note(self, draft: Draft) -> None:
        """Keep the tokens of a draft, whether its nodes are alive or not."""
        if self._text is None:
            if len(draft.tokens) < MIN_RUN:
                return
            self._begin_text()
        else:
            self._read_output()
        node_id = draft.first_node_id
        for parent, token in zip(draft.parents, draft.tokens, strict=True):
            if node_id > self._last_id and 0 <= token < self._vocabulary_size:
                self._follow(node_id, parent, token, draft.base_position)
            node_id += 1

    def _begin_text(self) -> PredictedText:
        """Begin a new text at the end of the output."""
        if self._chances is None:
            self._chances = make_chances(self._shared)
        text = PredictedText((), self._chances.by_cell)
        self._text, self._state, self._read_length = text, text.begin(), self._prefix.length
        self._places.clear()
        return text

    def _follow(self, node_id: int, parent: int, token: int, base_position: int) -> None:
        """Follow a node through the text; append its token if its parent is the end."""
        text = self._text
        if text is None or len(text.tokens) >= MAX_TEXT_TOKENS:
            text = self._begin_text()
            state = self._state
        else:
            state = self._state_behind(parent, base_position)
        if text.index_at(state) == len(text.tokens):
            text.extend((token,))
        after = text.advance(state, token)
        if after.gap_length >= _NEW_PART and all(one.length < 2 for one in after.anchors):
            text.extend(after.recent)
            after = state_at(len(text.tokens))
        self._last_id, self._last_state = node_id, after
        place = text.index_at(after)
        if place >= 0:
            self._places[node_id] = place
            if len(self._places) > _MAX_PLACES:
                del self._places[next(iter(self._places))]

    def _state_behind(self, parent: int, base_position: int) -> ReadingState:
        """Return the state of the text behind the node ``parent`` of a draft on the first
        ``base_position`` tokens."""
        if parent == self._last_id and parent != ROOT:  # the next node of a chain
            return self._last_state
        if (place := self._places.get(parent)) is not None:
            return state_at(place)
        if parent == ROOT and base_position == self._read_length:
            return self._state
        # The parent's place is not known, so the text is searched near the place of the output.
        return state_near(self._state, base_position - self._read_length)

    # --- what the output does ------------------------------------------------------------------

    def _read_output(self) -> None:
        """Judge the candidates by the newly committed tokens, and follow those."""
        text, chances, tokens = self._text, self._chances, self._prefix.tokens
        if text is None or chances is None:
            return
        state = self._state
        for position in range(self._read_length, len(tokens)):
            token = tokens[position]
            for cell, candidate in text.candidates(state):
                chances.note(cell, candidate == token)
            state = text.commit(state, token, tokens, position)
        self._state, self._read_length = state, len(tokens)
        if state.gap_length > _MAX_GAP:
            self._text = None

    @property
    def has_text(self) -> bool:
        """Whether any text is kept."""
        return self._text is not None

    @property
    def is_ready(self) -> bool:
        """Whether the next token of the output is likely to be in the text."""
        self._read_output()
        text, chances = self._text, self._chances
        if text is None or chances is None:
            return False
        found = text.candidates(self._state)
        return bool(found) and chances.by_cell[found[0][0]] >= _SURE_CHANCE

    def add_nodes(self, view: PassView) -> None:
        """Add the candidates that are worth a row, the likeliest place first."""
        tree = view.tree
        if tree.device_node_count > tree.room:
            return
        self._read_output()
        text, chances = self._text, self._chances
        if text is None or chances is None:
            return
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        least, added = max(view.least_chance, MIN_PATH_CHANCE), 0
        # Places: negated chance, number of places added before, node, depth, state of the text.
        heap: list[tuple[float, int, int, int, ReadingState]] = [(-1.0, 0, -1, 0, self._state)]
        while heap and tree.room > 0:
            negated_chance, _, parent, depth, state = heappop(heap)
            if depth >= view.depth:
                continue
            behind: Sequence[int] = children.get(parent, ())
            for cell, token in text.candidates(state):
                chance = -negated_chance * chances.by_cell[cell]
                if chance < least:
                    continue
                child = tree.add(parent, token, chance, SourceKind.DEVICE)
                if child is not None and child not in behind:
                    behind = [*behind, child]
            for child in behind:
                added += 1
                after = text.advance(state, tree.tokens[child])
                heappush(heap, (-tree.reach[child], added, child, depth + 1, after))
