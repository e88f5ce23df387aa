"""Predicted text: where in it the output stands, and which tokens may follow there.

Theory of operation. A client may send text that it expects the output to be, such as the file that
the output edits. As long as the output follows that text, the next token is known without a model.
The two differ where text was inserted, deleted, replaced, renamed or moved, and behind such a place
the output usually follows the prediction again, at another index. An *anchor* is an index of the
prediction at which the output may go on. A ``ReadingState`` holds the likeliest anchors. It
advances with each token, committed or drafted, so the same code follows the output and looks ahead
in the tree.

As long as an anchor agrees, it advances, and its chance rises with the number of tokens that have
agreed in a row. When the last anchor is contradicted, a *gap* begins: at the index ``gap`` of the
prediction, behind which ``gap_length`` tokens of the output do not fit. Until an anchor has agreed
two or three times in a row, these are tried beside each other:

    replaced     ``gap_length`` tokens were replaced by as many: go on at gap + gap_length
    inserted     the output has more tokens: go on at gap
    deleted      the last token stands a little further on: go on behind it
    moved        the last two tokens or more stand anywhere: go on behind them; the longest match
                 first, and of equally long ones the nearest (suffix match, as in prompt lookup)
    returned     the output was elsewhere in the prediction and goes on where it had left

**Edits that repeat.** When a gap is closed, the tokens that stood in its place in the prediction
and in the output are remembered (``_Substitution``). Where the prediction holds the same tokens
again, their replacement is a candidate beside them. So a renamed word costs one gap, and not one at
each use.

Each candidate belongs to a *cell*: the rule that found it and the number of tokens that agreed
before it. The caller counts how often the candidates of a cell are right. So a prediction that is
wrong, or wrong for a while, soon has candidates of little chance, and they stay in the count
(``core/protocol/text_lookup.py`` counts in the same way).

Bounds: ``MAX_PREDICTION_TOKENS``; an index of 12 bytes a token, made at the first gap;
``_MAX_SUBSTITUTIONS``. A token costs a constant number of steps beside two binary searches.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from edgespec.core.protocol.text_lookup import TextCandidate

MAX_PREDICTION_TOKENS: Final = 1 << 16
"""Longest prediction, in tokens. It exceeds the outputs of today's models."""

# --- cells ----------------------------------------------------------------------------------------

# Classes of the number of tokens that agreed in a row, and of the length of a gap.
_LENGTH_CLASSES: Final = (0, 0, 1, 2, 3, 3, 4, 4, 4, *[5] * 8, *[6] * 16, 7)
_LAST_LENGTH: Final = len(_LENGTH_CLASSES) - 1
_GAP_CLASSES: Final = (0, 0, 1, 2, 2, *[3] * 4, *[4] * 8, 5)
_LAST_GAP: Final = len(_GAP_CLASSES) - 1

# Chances until a cell was tried: agreement in a row near the place expected, the same elsewhere,
# then by the length of the gap: replaced, inserted, returned.
_AGREED: Final = (0.35, 0.6, 0.75, 0.85, 0.9, 0.94, 0.96, 0.98)
_AGREED_ELSEWHERE: Final = (0.1, 0.35, 0.55, 0.7, 0.8, 0.9, 0.95, 0.97)
_REPLACED: Final = (0.4, 0.15, 0.1, 0.05, 0.03, 0.02)
_INSERTED: Final = (0.2, 0.15, 0.1, 0.08, 0.05, 0.03)
_RETURNED: Final = (0.2, 0.1, 0.05, 0.03, 0.02, 0.01)
_ELSEWHERE_CELL: Final = len(_AGREED)
_REPLACED_CELL: Final = _ELSEWHERE_CELL + len(_AGREED_ELSEWHERE)
_INSERTED_CELL: Final = _REPLACED_CELL + len(_REPLACED)
_RETURNED_CELL: Final = _INSERTED_CELL + len(_INSERTED)
_START_CELL: Final = _RETURNED_CELL + len(_RETURNED)
_SUBSTITUTED_CELL: Final = _START_CELL + 1
"""First token of a replacement whose neighbour in the prediction is the same as where it was
learned. The next three cells belong to one without that, to the prediction's own token beside the
first and beside the second. The last cell belongs to the further tokens of a replacement."""
_BESIDE_CELL: Final = _SUBSTITUTED_CELL + 2
_PENDING_CELL: Final = _SUBSTITUTED_CELL + 4

INITIAL_CHANCES: Final = (
    *(*_AGREED, *_AGREED_ELSEWHERE, *_REPLACED, *_INSERTED, *_RETURNED),
    *(0.6, 0.6, 0.35, 0.4, 0.6, 0.95),
)
"""Chance of a candidate by its cell, until it was tried."""

# --- bounds ---------------------------------------------------------------------------------------

MAX_CANDIDATES: Final = 3
"""Candidates for one position."""
_MAX_ANCHORS: Final = 3
_CLOSING_LENGTH: Final = 2
"""Agreements in a row that close a gap if they are close behind it. No other place is searched for
from then on."""
_CLOSING_LENGTH_ELSEWHERE: Final = 3
"""The same further away, where a short match is often a coincidence."""
_START_LENGTH: Final = 6
"""Agreements in a row for which the beginning counts: a prediction that begins right is most likely
no coincidence."""
_SURE_LENGTH: Final = 9
"""Agreements in a row from which on no other anchor is kept."""
_NEAR: Final = 64
"""Tokens behind a gap in which its end is searched by one token, which has to be a rare one further
away."""
_CLOSE: Final = 8
_FAR: Final = 256
"""Tokens behind a gap in which an anchor counts as near."""
_RECENT: Final = 8
"""Tokens that a match of the output's end is compared by."""
_OCCURRENCES: Final = 4
"""Occurrences of a pair that are compared on each side of the gap."""
_MAX_SUBSTITUTIONS: Final = 256
_MAX_REPLACED: Final = 8
"""Tokens on either side of a substitution."""
_ANY: Final = 0xFFFFFFFF
"""Stands for any token in the key of a substitution."""


class Anchor(NamedTuple):
    """A place in the prediction at which the output may go on."""

    next_index: int
    """Index of the next token in the prediction, behind ``pending``."""
    length: int
    """Number of tokens before it that have agreed in a row, at most ``_LAST_LENGTH``."""
    cell: int
    """Cell of the next token."""
    is_elsewhere: bool = False
    """Whether the anchor was found far from the place at which the output was expected to go on."""
    pending: tuple[int, ...] = ()
    """Rest of a replacement, which comes before the token at ``index``."""


class ReadingState(NamedTuple):
    """The places at which the next token may stand in the prediction."""

    anchors: tuple[Anchor, ...]
    """Anchors that agreed with the last token, the likeliest first."""
    gap: int = -1
    """Index of the prediction at which the output left it; -1: it is not known to have left."""
    gap_length: int = 0
    """Number of tokens of the output since then."""
    elsewhere: int = -1
    """Index at which the output had left the prediction before it went on elsewhere; -1: none."""
    recent: tuple[int, ...] = ()
    """Last tokens of the output, while a place is searched for; else empty."""


class _Reading(NamedTuple):
    """A candidate for the next token."""

    cell: int
    token: int
    anchor: Anchor
    """The anchor behind it."""


class _Substitution(NamedTuple):
    """An edit that may repeat: ``old`` in the prediction became ``new`` in the output."""

    old: tuple[int, ...]
    new: tuple[int, ...]


class PredictedText:
    """A prediction, and the edits that the output has made to it so far.

    ``chances`` has the chance of each cell, which the caller goes on updating. Raises
    ``ValueError`` if ``tokens`` exceed ``MAX_PREDICTION_TOKENS``."""

    def __init__(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        check_prediction_length(len(tokens))
        self.tokens = list(tokens)
        self._chances = chances
        self._pairs: _PairIndex | None = None
        self._substitutions: OrderedDict[int, _Substitution] = OrderedDict()
        self._gap_position = -1
        """Position of the output at which the present gap began; -1: it was learned from."""

    def begin(self) -> ReadingState:
        """Return the state before the output's first token."""
        return ReadingState((Anchor(0, _START_LENGTH, _START_CELL),))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. The caller checks the length."""
        self.tokens += tokens

    def index_at(self, state: ReadingState) -> int:
        """Return the index at which the next token is expected, if it is the only one; else -1."""
        return state.anchors[0].next_index if self._is_usual(state) else -1

    def candidates(self, state: ReadingState) -> list[TextCandidate]:
        """Return at most ``MAX_CANDIDATES`` candidates for the next token, each token once, the
        likeliest first."""
        if self._is_usual(state):
            anchor, tokens = state.anchors[0], self.tokens
            return (
                [(anchor.cell, tokens[anchor.next_index])]
                if anchor.next_index < len(tokens)
                else []
            )
        best: dict[int, int] = {}
        chances = self._chances
        for cell, token, _ in self._readings(state):
            other = best.get(token)
            if other is None or chances[cell] > chances[other]:
                best[token] = cell
        found = [(cell, token) for token, cell in best.items()]
        found.sort(key=lambda one: -chances[one[0]])
        return found[:MAX_CANDIDATES]

    def advance(self, state: ReadingState, token: int) -> ReadingState:
        """Return the state behind ``token``, whatever the candidates were."""
        if self._is_usual(state):
            index, length, _, is_elsewhere, _ = state.anchors[0]
            if index < len(self.tokens) and self.tokens[index] == token:
                behind = _anchor(index + 1, length + 1, is_elsewhere)
                return ReadingState((behind,), elsewhere=state.elsewhere)
        agreed = [one.anchor for one in self._readings(state) if one.token == token]
        return self._keep_likeliest(state, token, agreed)

    def commit(
        self, state: ReadingState, token: int, output: Sequence[int], position: int
    ) -> ReadingState:
        """Return the state behind ``token``, which the target committed at ``position`` of
        ``output``, and remember the edit of a gap that it closes."""
        after = self.advance(state, token)
        if after.gap >= 0:
            if after.gap_length == 1:
                self._gap_position = position
        elif state.gap >= 0 and self._gap_position >= 0:
            self._learn(state.gap, after.anchors[0], output, position + 1)
        return after

    # --- anchors -----------------------------------------------------------------------------

    def _is_usual(self, state: ReadingState) -> bool:
        """Return whether the prediction's next token is the only candidate."""
        anchors = state.anchors
        if len(anchors) != 1 or state.gap >= 0 or anchors[0].pending:
            return False
        return not (self._substitutions and self._find_substitutions(anchors[0].next_index))

    def _readings(self, state: ReadingState) -> Iterator[_Reading]:
        tokens, count = self.tokens, len(self.tokens)
        longest = 0
        for anchor in state.anchors:
            index, length, cell, elsewhere, pending = anchor
            longest = max(longest, length)
            if pending:
                rest = pending[1:]
                behind = anchor._replace(cell=_PENDING_CELL, pending=rest)
                if not rest:
                    behind = _anchor(index, length, elsewhere)
                yield _Reading(cell, pending[0], behind)
                continue
            if self._substitutions:
                for which, (old, new) in self._find_substitutions(index):
                    cell = _BESIDE_CELL + which
                    yield from self._substitute(anchor, old, new, _SUBSTITUTED_CELL + which)
            if index < count:
                yield _Reading(cell, tokens[index], _anchor(index + 1, length + 1, elsewhere))
        gap, gap_length = state.gap, state.gap_length
        if gap < 0 or longest > 1:
            return
        size = _GAP_CLASSES[min(gap_length, _LAST_GAP)]
        places = (
            (gap + gap_length, _REPLACED_CELL, False),
            (gap, _INSERTED_CELL, False),
            (state.elsewhere + gap_length, _RETURNED_CELL, True),
        )
        for index, first_cell, elsewhere in places:
            if (not elsewhere or state.elsewhere >= 0) and index < count:
                yield _Reading(first_cell + size, tokens[index], _anchor(index + 1, 1, elsewhere))

    def _substitute(
        self, anchor: Anchor, old: tuple[int, ...], new: tuple[int, ...], cell: int
    ) -> Iterator[_Reading]:
        """Yield the candidate of a substitution at ``anchor``, if the prediction goes on there."""
        index, length = anchor.next_index + len(old), anchor.length
        if len(new) > 1:
            behind = anchor._replace(next_index=index, cell=_PENDING_CELL, pending=new[1:])
            yield _Reading(cell, new[0], behind)
        elif new:
            yield _Reading(cell, new[0], _anchor(index, length, anchor.is_elsewhere))
        elif index < len(self.tokens):
            behind = _anchor(index + 1, length + 1, anchor.is_elsewhere)
            yield _Reading(cell, self.tokens[index], behind)

    def _keep_likeliest(
        self, state: ReadingState, token: int, agreed: list[Anchor]
    ) -> ReadingState:
        """Return the state behind ``token`` with the likeliest anchors: some ``agreed`` with it,
        others are found by the last tokens."""
        gap, gap_length, elsewhere = state.gap, state.gap_length, state.elsewhere
        recent: tuple[int, ...] = ()
        resumed = max(agreed, key=_length_of, default=None)
        if resumed is None and gap < 0:  # a gap begins
            gap, gap_length = max(state.anchors, key=_length_of).next_index, 1
        elif gap >= 0:
            gap_length += 1
            if resumed is not None and resumed.length >= _CLOSING_LENGTH:
                is_close = gap <= resumed.next_index - resumed.length <= gap + _CLOSE
                if is_close or resumed.length >= _CLOSING_LENGTH_ELSEWHERE:
                    gap, elsewhere = -1, -1 if is_close else gap
        if gap < 0:
            gap_length = 0
        else:
            recent = (*(state.recent or self._read_before(state)), token)[-_RECENT:]
            longest = 0 if resumed is None else resumed.length
            agreed += self._search(recent, gap, elsewhere, longest)
        return ReadingState(self._sort(agreed), gap, gap_length, elsewhere, recent)

    def _sort(self, anchors: list[Anchor]) -> tuple[Anchor, ...]:
        """Return the likeliest anchors, one for each place."""
        if len(anchors) > 1:
            anchors.sort(key=lambda one: (-self._chances[one.cell], -one.length))
            if any(one.length >= _SURE_LENGTH for one in anchors):
                del anchors[1:]
        kept: list[Anchor] = []
        for anchor in anchors:
            place = anchor.next_index, anchor.pending
            if all(place != (other.next_index, other.pending) for other in kept):
                kept.append(anchor)
                if len(kept) == _MAX_ANCHORS:
                    break
        return tuple(kept)

    def _read_before(self, state: ReadingState) -> tuple[int, ...]:
        """Return tokens of the output before ``state``, which agree with its anchor."""
        if not state.anchors:
            return ()
        best = max(state.anchors, key=_length_of)
        first = max(0, best.next_index - min(best.length, _RECENT))
        return tuple(self.tokens[first : best.next_index])

    def _search(
        self, recent: tuple[int, ...], gap: int, elsewhere: int, longest: int
    ) -> list[Anchor]:
        """Return anchors behind places of the prediction that equal the end of the output."""
        found: list[Anchor] = []
        if longest <= 1:
            for start, end in ((gap, gap + _NEAR), (elsewhere, elsewhere + _CLOSE)):
                if start >= 0 and (index := self._find(recent[-1], start, end)) >= 0:
                    is_far = start != gap or index - gap > _CLOSE
                    found.append(_anchor(index + 1, 1, is_far))
        if len(recent) < 2:
            return found
        if self._pairs is None:
            self._pairs = _PairIndex(self.tokens)
        self._pairs.extend(self.tokens)
        matches = [
            (self._common_length(recent, index), -abs(index - gap), index)
            for index in self._pairs.find(recent[-2], recent[-1], gap)
        ]
        matches.sort(reverse=True)
        for length, _, index in matches[:2]:
            if length > longest:
                found.append(_anchor(index, length, not 0 <= index - gap <= _FAR))
        return found

    def _find(self, token: int, start: int, end: int) -> int:
        """Return the first index of ``token`` in [start, end); -1 if there is none."""
        try:
            return self.tokens.index(token, start, end)
        except ValueError:
            return -1

    def _common_length(self, recent: tuple[int, ...], index: int) -> int:
        """Return how many tokens before ``index`` equal the end of ``recent``."""
        length, most, tokens = 2, min(len(recent), index), self.tokens
        while length < most and tokens[index - 1 - length] == recent[-1 - length]:
            length += 1
        return length

    # --- edits that repeat -------------------------------------------------------------------

    def _find_substitutions(self, index: int) -> list[tuple[int, _Substitution]]:
        """Return the substitution that was learned for this place, with 0 if the token before it is
        the same too, else with 1; none if there is none."""
        tokens, known = self.tokens, self._substitutions
        before = tokens[index - 1] if index else _ANY
        here = tokens[index] if index < len(tokens) else _ANY
        for which, key in enumerate((_key(before, here), _key(_ANY, here), _key(before, _ANY))):
            found = known.get(key)
            if found is None:
                continue
            if tuple(tokens[index : index + len(found.old)]) == found.old:
                return [(min(which, 1), found)]
        return []

    def _learn(self, gap: int, anchor: Anchor, output: Sequence[int], end: int) -> None:
        """Remember what the output has in place of the prediction's tokens from ``gap`` on, now
        that it goes on at ``anchor`` and is ``end`` tokens long."""
        old_end, new_end = anchor.next_index - anchor.length, end - anchor.length
        new_start, self._gap_position = self._gap_position, -1
        if anchor.pending or old_end < gap or new_end < new_start:
            return
        old, new = tuple(self.tokens[gap:old_end]), tuple(output[new_start:new_end])
        if max(len(old), len(new)) > _MAX_REPLACED or not (old or new):
            return
        learned, known = _Substitution(old, new), self._substitutions
        before = self.tokens[gap - 1] if gap else _ANY
        here = self.tokens[gap] if gap < len(self.tokens) else _ANY
        # An insertion belongs to the token before it, a replacement to the tokens that it replaces.
        for key in (_key(before, here), _key(_ANY, here) if old else _key(before, _ANY)):
            known[key] = learned
            known.move_to_end(key)
            if len(known) > _MAX_SUBSTITUTIONS:
                known.popitem(last=False)


class _PairIndex:
    """Index of the places behind each pair of neighbouring tokens: sorted arrays of the pairs and
    of the places.

    ``text_lookup.PairIndex`` finds the latest places first, and here the nearest are wanted."""

    def __init__(self, tokens: Sequence[int]) -> None:
        pairs = [_key(before, token) for before, token in itertools.pairwise(tokens)]
        order = sorted(range(len(pairs)), key=pairs.__getitem__)
        self._places = array("I", [at + 2 for at in order])
        self._pairs = array("Q", [pairs[at] for at in order])

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the pairs of ``tokens`` that are not in the index. A text that grows does so by a
        few tokens at a time, so moving the entries behind each new one costs little."""
        for place in range(len(self._places) + 2, len(tokens) + 1):
            key = _key(tokens[place - 2], tokens[place - 1])
            at = bisect_right(self._pairs, key)
            self._pairs.insert(at, key)
            self._places.insert(at, place)

    def find(self, before: int, last: int, near: int) -> Sequence[int]:
        """Return places behind the pair, ``_OCCURRENCES`` at most on each side of ``near``."""
        key = _key(before, last)
        first = bisect_left(self._pairs, key)
        end = bisect_right(self._pairs, key, first)
        middle = bisect_left(self._places, near, first, end)
        return self._places[max(first, middle - _OCCURRENCES) : min(end, middle + _OCCURRENCES)]


def _length_of(anchor: Anchor) -> int:
    return anchor.length


def _key(before: int, here: int) -> int:
    return before << 32 | here


def _anchor(index: int, length: int, is_elsewhere: bool) -> Anchor:
    if length > _LAST_LENGTH:
        length = _LAST_LENGTH
    cell = _LENGTH_CLASSES[length] + (_ELSEWHERE_CELL if is_elsewhere else 0)
    return Anchor(index, length, cell, is_elsewhere)


def state_at(index: int, length: int = _LAST_LENGTH) -> ReadingState:
    """Return the state of an output that goes on at ``index`` of the text, before which ``length``
    tokens agree."""
    return ReadingState((_anchor(index, length, False),))


def state_near(state: ReadingState, offset: int) -> ReadingState:
    """Return the state of an output that may go on anywhere, most likely ``offset`` tokens from
    where one in ``state`` does."""
    index = state.gap
    if index < 0:
        index = max(state.anchors, key=_length_of).next_index if state.anchors else 0
    return ReadingState((), gap=max(0, index + offset))


def check_prediction_length(length: int) -> None:
    """Raise ``ValueError`` if a prediction of ``length`` tokens is too long."""
    if length > MAX_PREDICTION_TOKENS:
        raise ValueError(
            f"the prediction has {length:,} tokens, but may have at most"
            f" {MAX_PREDICTION_TOKENS:,}: send the part that the output is expected to be"
        )
