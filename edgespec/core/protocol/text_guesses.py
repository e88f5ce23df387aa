"""Guesses from the text itself and from what was said before, without a model; both ends use them.

Theory of operation. Four sources name tokens for the next position, the surest first:

    match      what stood behind the last tokens the last time they stood in this text, two tokens
               or more, counted to ``LONGEST`` (prompt lookup decoding, Saxena 2023)
    corpus     what most often stood behind the longest end of the text that other texts hold too
               (``Corpus``; REST, He et al., NAACL 2024); by its chance among the others
    n-grams    what followed the last pair of tokens in committed texts, in an LRU table (Cacheback,
               Ma, Gim and Zhong, EMNLP 2025)
    recycled   what followed the last token alone, and what the target said after guesses that were
               wrong (Token Recycling, Luo et al., ACL 2025)

Each named token is a guess of a *cell*: its source, the length of its match and its rank among the
guesses for the position (of a corpus: among its own, and how often it came next there). With each
committed token the guesses for its position are compared, made or not, and their cells count:
chance = (hits + prior * ``PRIOR_WEIGHT``) / (trials + ``PRIOR_WEIGHT``), where hits and trials lose
a share 1 - ``MEMORY`` at each trial of the cell.

Bounds: an index of ``MOST_PAIRS`` entries of about 170 bytes, begun anew when it is full; tables of
``MOST_LEADERS`` rows of about 230 bytes, below 2 MiB each.
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
"""Guesses for one position; no more are made."""

# First cell of each kind. Prompt lookup has one for matches of 2, 3, 4 to 5, 6 to 9 and more.
MATCH_CELLS: Final = tuple(kind * RANKS for kind in (0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4))
NGRAM_CELL: Final = 5 * RANKS
RECYCLED_CELL: Final = 6 * RANKS
_CORPUS_CELL: Final = 7 * RANKS
# A corpus has one for ends of 2, of 3 to 4, of 5 to 8 and of more tokens, times shares below a
# third, below two thirds, and above.
_CORPUS_KINDS: Final = (0, 0, 0, 1, 1, 2, 2, 2, 2, 3)
_SHARES: Final = 3

# What the bundled target's texts gave on code and summaries (docs/measurements.md): first guesses
# by kind, and what is left for the second.
_FIRST: Final = tuple(
    rate * share for rate in (0.5, 0.6, 0.75, 0.8, 0.9, 0.3, 0.3) for share in (1.0, 0.5)
) + tuple(
    rate * share * rank
    for rate in (0.15, 0.25, 0.4, 0.6)
    for share in (0.3, 0.6, 1.0)
    for rank in (1.0, 0.5)
)


class TextChances:
    """``of[cell]`` is the estimated chance of a guess. It begins at that of ``everybodys``, where
    what is noted here counts too; without them, at what the bundled target's texts gave."""

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
    """Rows of followers by leader; at most ``most_leaders`` of them."""

    def __init__(self, most_leaders: int = MOST_LEADERS) -> None:
        self._most_leaders = most_leaders
        self._rows: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def after(self, leader: int) -> tuple[int, ...]:
        """What followed the leader, most recent first; empty: nothing that is remembered."""
        return self._rows.get(leader, ())

    def add(self, leader: int, token: int) -> None:
        """The token stood behind the leader just now."""
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
    """Texts that are there before the first word is said."""

    def after(self, end: tuple[int, ...]) -> tuple[int, Sequence[tuple[int, float]]]:
        """Of ``end``, the last ``CORPUS_LENGTH`` tokens of a text or fewer: how many of its last
        tokens stand in the corpus too, two or more, and what stood behind them there, the most
        frequent first, each with its share, at most ``RANKS``. 0 and nothing: they do not."""


CORPUS_LENGTH: Final = 16


class TextTables:
    """What was said in committed texts, and the ``corpus`` beside it. ``ngrams`` False leaves pairs
    out: the index of the one text that is read has them already."""

    corpus: Corpus | None = None

    def __init__(self, *, ngrams: bool, most_leaders: int = MOST_LEADERS) -> None:
        self.recycled = FollowerTable(most_leaders)
        self.ngrams = FollowerTable(most_leaders) if ngrams else None

    def enter(self, tokens: Sequence[int], at: int) -> None:
        """The token at ``at`` >= 2 was committed behind those before it."""
        last, token = tokens[at - 1], tokens[at]
        self.recycled.add(last, token)
        if self.ngrams is not None:
            self.ngrams.add(tokens[at - 2] << 32 | last, token)


# --- matches --------------------------------------------------------------------------------

MOST_PAIRS = 8192
LONGEST = 12
"""Longer matches are not told apart."""


def pair_of(before: int, last: int) -> int:
    """Two neighbouring tokens as one key."""
    return before << 32 | last


def common_length(tokens: Sequence[int], position: int, end: int) -> int:
    """How many tokens before ``position`` equal those before ``end``, counted to ``LONGEST``."""
    length, most = 0, min(LONGEST, position)
    while length < most and tokens[position - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class PromptLookup:
    """The index of one text, which only grows. ``position`` is where its match goes on, and
    ``length`` the match's length; 0: there is none."""

    def __init__(self, most_pairs: int = MOST_PAIRS) -> None:
        self.known = 0
        self.position = self.length = 0
        self._most_pairs = most_pairs
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def place(self, pair: int) -> int:
        """Where a token last stood behind the pair; -1: nowhere."""
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
"""Cell and token."""
Place = tuple[tuple[int, ...], int, int]
"""Where guesses may stand: the last tokens before it, two or with a corpus more, the position where
their match in the text goes on, and how long that match is; 0: there is none."""


SURE: Final = 6
"""Beside a match that is so long nothing else is guessed."""


class TextReader:
    """Reads one text as it grows; ``tables`` outlive it and are its user's own."""

    def __init__(self, tables: TextTables, chances: TextChances) -> None:
        self.lookup = PromptLookup()
        self._tables, self._chances = tables, chances
        self._recycled = tables.recycled.after
        self._ngrams = None if tables.ngrams is None else tables.ngrams.after
        self._corpus = None if tables.corpus is None else tables.corpus.after
        self._looked_at = 2 if tables.corpus is None else CORPUS_LENGTH

    def learn(self, tokens: Sequence[int]) -> None:
        """Judge guesses by the tokens that came since, then remember those."""
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
        """The place behind the text, which has two tokens or more, all of them learned."""
        return tuple(tokens[-self._looked_at :]), self.lookup.position, self.lookup.length

    def guesses(self, tokens: Sequence[int], place: Place) -> tuple[list[Guess], Place]:
        """At most ``RANKS`` guesses for the place, the surest source first, and the place with its
        match looked up again if it had come to the end of the text."""
        end, position, length = place
        if position >= len(tokens):  # in its own tail, or it is not known yet
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
        """The place behind a token that stands at ``place``, as ``guesses`` returned it."""
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
        """The best ``RANKS`` of them, each token once."""
        named: list[Guess] = []
        for cell, token in sorted(guesses, key=lambda guess: -self._chances.of[guess[0]]):
            if len(named) < RANKS and all(token != other for _, other in named):
                named.append((cell, token))
        return named
