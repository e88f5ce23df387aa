"""Candidates from the text itself and from earlier texts, without a model. Both ends use them.

Theory of operation. Four sources give candidates for the next position, the surest first:

    match      what followed the last tokens the last time they occurred in this text, two tokens
               or more, counted up to ``MAX_MATCH_LENGTH`` (prompt lookup decoding, Saxena 2023)
    corpus     what most often followed the longest end of the text that also occurs in other texts
               (``Corpus``; REST, He et al., NAACL 2024); it is ordered among the others by chance
    n-grams    what followed the last pair of tokens in committed texts, in an LRU table (Cacheback,
               Ma, Gim and Zhong, EMNLP 2025)
    recycled   what followed the last token alone, and the target's tokens in place of rejected
               nodes (Token Recycling, Luo et al., ACL 2025)

Each candidate belongs to a *cell*: its source, the length of its match, and its rank among the
candidates for the position (in a corpus: among its own, and by its share there). When a token is
committed, the candidates for its position are compared with it, whether they became nodes or not,
and their cells count: chance = (hits + prior * ``PRIOR_WEIGHT``) / (trials + ``PRIOR_WEIGHT``),
where hits and trials lose a share 1 - ``MEMORY`` at each trial of the cell.

Bounds: an index of ``MAX_PAIRS`` entries of about 170 bytes, cleared when it is full; tables of
``MAX_LEADERS`` rows of about 230 bytes, below 2 MiB each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Protocol

from edgespec.core.protocol.estimators import DecayedRate

# --- chances --------------------------------------------------------------------------------

MEMORY: Final = 0.98
PRIOR_WEIGHT: Final = 2.0
RANKS: Final = 2
"""Maximum number of candidates for one position."""

# First cell of each kind. Prompt lookup has one for matches of 2, 3, 4 to 5, 6 to 9 and more
# tokens.
MATCH_CELLS: Final = tuple(kind * RANKS for kind in (0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4))
NGRAM_CELL: Final = 5 * RANKS
RECYCLED_CELL: Final = 6 * RANKS
_CORPUS_CELL: Final = 7 * RANKS
# A corpus has a cell for each pair of a match length (2, 3 to 4, 5 to 8, more tokens) and a share
# (below a third, below two thirds, above).
_CORPUS_KINDS: Final = (0, 0, 0, 1, 1, 2, 2, 2, 2, 3)
_SHARES: Final = 3

# Measured chances on outputs of the bundled target, code and summaries (docs/measurements.md):
# first candidates by kind, and the factor for second ones.
_FIRST: Final = tuple(
    rate * share for rate in (0.5, 0.6, 0.75, 0.8, 0.9, 0.3, 0.3) for share in (1.0, 0.5)
) + tuple(
    rate * share * rank
    for rate in (0.15, 0.25, 0.4, 0.6)
    for share in (0.3, 0.6, 1.0)
    for rank in (1.0, 0.5)
)


class TextChances:
    """Estimated chance of a candidate, by cell.

    ``by_cell[cell]`` begins at the estimate of ``shared``, in which records made here count too.
    Without ``shared`` it begins at what was measured on outputs of the bundled target."""

    def __init__(self, everybodys: TextChances | None = None) -> None:
        self._everybodys = everybodys
        self.of: list[float] = list(_FIRST if everybodys is None else everybodys.of)
        self._priors = tuple(self.of)
        self._rates = [DecayedRate(MEMORY, PRIOR_WEIGHT) for _ in self.of]

    def note(self, cell: int, hit: bool) -> None:
        self._rates[cell].add(hit)
        self.of[cell] = self._rates[cell].rate(self._priors[cell])
        if self._everybodys is not None:
            self._everybodys.note(cell, hit)


# --- tables ---------------------------------------------------------------------------------

MOST_LEADERS: Final = 8192
MOST_FOLLOWERS: Final = 2


class FollowerTable:
    """Table of the tokens that followed a leader, with at most ``max_leaders`` rows, least recently
    added first to go."""

    def __init__(self, most_leaders: int = MOST_LEADERS) -> None:
        self._most_leaders = most_leaders
        self._rows: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def after(self, leader: int) -> tuple[int, ...]:
        """Return the tokens that followed the leader, most recent first; empty if none is
        remembered."""
        return self._rows.get(leader, ())

    def add(self, leader: int, token: int) -> None:
        """Record that the token followed the leader just now."""
        rows = self._rows
        row = rows.get(leader)
        if row is None:
            rows[leader] = (token,)
            if len(rows) > self._most_leaders:
                rows.popitem(last=False)
            return
        rows.move_to_end(leader)
        if row[0] != token:
            others = [other for other in row if other != token]
            rows[leader] = (token, *others[: MOST_FOLLOWERS - 1])


class Corpus(Protocol):
    """Texts that were indexed before the generation began."""

    def after(self, end: tuple[int, ...]) -> tuple[int, Sequence[tuple[int, float]]]:
        """Return how many of the last tokens of ``end`` also occur in the corpus, and what followed
        them there.

        ``end`` holds the last ``CORPUS_LENGTH`` tokens of a text, or fewer. The count is at least
        two. The followers come most frequent first, each with its share, at most ``RANKS``. Returns
        0 and nothing if there is no match."""


CORPUS_LENGTH: Final = 16


class TextTables:
    """Tables of committed texts, with a ``corpus`` beside them.

    ``ngrams`` False leaves the table of pairs out, for a text whose own index has them already."""

    corpus: Corpus | None = None

    def __init__(self, *, ngrams: bool, most_leaders: int = MOST_LEADERS) -> None:
        self.recycled = FollowerTable(most_leaders)
        self.ngrams = FollowerTable(most_leaders) if ngrams else None

    def enter(self, tokens: Sequence[int], at: int) -> None:
        """Record that the token at ``at`` >= 2 was committed behind those before it."""
        last, token = tokens[at - 1], tokens[at]
        self.recycled.add(last, token)
        if self.ngrams is not None:
            self.ngrams.add(tokens[at - 2] << 32 | last, token)


# --- matches --------------------------------------------------------------------------------

MOST_PAIRS = 8192
LONGEST = 12
"""Longest match that is counted; longer ones are treated as this long."""


def pair_of(before: int, last: int) -> int:
    """Return two neighbouring tokens as one dictionary key."""
    return before << 32 | last


def common_length(tokens: Sequence[int], position: int, end: int) -> int:
    """Return how many tokens before ``position`` equal those before ``end``, at most
    ``MAX_MATCH_LENGTH``."""
    length, most = 0, min(LONGEST, position)
    while length < most and tokens[position - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class PromptLookup:
    """Index of one text, which only grows.

    ``position`` is the position behind the current match, and ``length`` is the match's length; 0:
    there is none."""

    def __init__(self, most_pairs: int = MOST_PAIRS) -> None:
        self.known = 0
        self.position = self.length = 0
        self._most_pairs = most_pairs
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def place(self, pair: int) -> int:
        """Return the position of the last token that followed the pair; -1 if none did."""
        return self._places.get(pair, -1)

    def load(self, tokens: Sequence[int], end: int) -> None:
        places, start = self._places, max(self.known, end - self._most_pairs)
        if len(places) + end - start > self._most_pairs:
            places.clear()
        for at in range(max(2, start), end):
            places[tokens[at - 2] << 32 | tokens[at - 1]] = at
        self.known = end
        self._search(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        at = self.known
        if at >= 2:
            if len(self._places) >= self._most_pairs:
                self._places.clear()
            self._places[tokens[at - 2] << 32 | tokens[at - 1]] = at
        self.known = at + 1
        if self.length and tokens[self.position] == tokens[at]:
            self.position += 1
            if self.length < LONGEST:
                self.length += 1
        else:
            self._search(tokens)

    def _search(self, tokens: Sequence[int]) -> None:
        end, self.length = self.known, 0
        if end < 2:
            return
        position = self.place(pair_of(tokens[end - 2], tokens[end - 1]))
        if position < 0:
            return
        self.position, self.length = position, common_length(tokens, position, end)


# --- guesses --------------------------------------------------------------------------------

Guess = tuple[int, int]
"""A candidate: its cell and its token."""
Place = tuple[tuple[int, ...], int, int]
"""State of lookup at a position in or behind the text: the last tokens before it (two, or more with
a corpus), the position behind their match in the text, and the length of that match; 0: there is
none."""


SURE: Final = 6
"""A match of at least this length is so sure that no other source is used beside it."""


class TextReader:
    """Offers candidates for one text as it grows. ``tables`` outlive the text and belong to its
    user alone."""

    def __init__(self, tables: TextTables, chances: TextChances) -> None:
        self.lookup = PromptLookup()
        self._tables, self._chances = tables, chances
        self._recycled = tables.recycled.after
        self._ngrams = None if tables.ngrams is None else tables.ngrams.after
        self._corpus = None if tables.corpus is None else tables.corpus.after
        self._looked_at = 2 if tables.corpus is None else CORPUS_LENGTH

    def learn(self, tokens: Sequence[int]) -> None:
        """Judge candidates by the new tokens of ``tokens``, then index those."""
        lookup, note = self.lookup, self._chances.note
        for at in range(lookup.known, len(tokens)):
            if at >= 2:
                match = tokens[lookup.position] if lookup.length else -1
                end = tuple(tokens[max(0, at - self._looked_at) : at])
                named = self._named(end, match, lookup.length)
                for cell, token in named + self._of_corpus(end):
                    note(cell, token == tokens[at])
                self._tables.enter(tokens, at)
            lookup.add(tokens)

    def end(self, tokens: Sequence[int]) -> Place:
        """Return the state behind the text, which must have at least two tokens, all of them
        learned."""
        return tuple(tokens[-self._looked_at :]), self.lookup.position, self.lookup.length

    def guesses(self, tokens: Sequence[int], place: Place) -> tuple[list[Guess], Place]:
        """Return at most ``RANKS`` candidates for the position of ``state``, the surest source
        first.

        Also returns the state, with its match looked up again if that had reached the end of the
        text."""
        end, position, length = place
        if position >= len(tokens):  # it reaches the end, or was not looked up
            position = self.lookup.place(end[-2] << 32 | end[-1])
            length = 0 if position < 0 else max(2, length)
        if length > LONGEST:
            length = LONGEST
        match = tokens[position] if length else -1
        named = self._named(end, match, length)
        if length < SURE and (found := self._of_corpus(end)):
            named = self._likeliest(named + found)
        return named, (end, position, length)

    def behind(self, tokens: Sequence[int], place: Place, token: int) -> Place:
        """Return the state behind ``token`` at the position of ``state``, as ``candidates``
        returned it."""
        end, position, length = place
        end = (*end[1 - self._looked_at :], token)
        if length and tokens[position] == token:
            return end, position + 1, length + 1
        return end, len(tokens), 0

    def _named(self, end: tuple[int, ...], match: int, length: int) -> list[Guess]:
        named = [(MATCH_CELLS[length], match)] if length else []
        if length >= SURE:
            return named
        rank, last, other = len(named), end[-1], -1
        if self._ngrams is not None:
            for token in self._ngrams(end[-2] << 32 | last):
                if token != match:
                    named.append((rank + NGRAM_CELL, token))
                    rank += 1
                    if rank == RANKS:
                        return named
                    other = token
        for token in self._recycled(last):
            if token not in (match, other):
                named.append((rank + RECYCLED_CELL, token))
                rank += 1
                if rank == RANKS:
                    return named
        return named

    def _of_corpus(self, end: tuple[int, ...]) -> list[Guess]:
        if self._corpus is None:
            return []
        length, followers = self._corpus(end)
        kind = _CORPUS_KINDS[min(length, len(_CORPUS_KINDS) - 1)]
        return [
            (_CORPUS_CELL + (kind * _SHARES + int(share * 2.99)) * RANKS + rank, token)
            for rank, (token, share) in enumerate(followers)
        ]

    def _likeliest(self, guesses: list[Guess]) -> list[Guess]:
        """Return the likeliest ``RANKS`` candidates, each token once."""
        named: list[Guess] = []
        for cell, token in sorted(guesses, key=lambda guess: -self._chances.of[guess[0]]):
            if len(named) < RANKS and all(token != other for _, other in named):
                named.append((cell, token))
        return named
