"""Candidates from the text itself and from earlier texts, without a model. Both ends use them.

Theory of operation. Four sources give candidates for the next position, the surest first:

    match      what followed the longest end of the text that occurred in it before, two tokens or
               more, counted up to ``MAX_MATCH_LENGTH`` (prompt lookup decoding, Saxena 2023)
    corpus     what most often followed the longest end of the text that also occurs in other texts:
               files on the device (``Corpus``; REST, He et al., NAACL 2024) and earlier texts
               (``EarlierTexts``); it is ordered among the others by chance
    n-grams    what followed the last pair of tokens in committed texts, in an LRU table (Cacheback,
               Ma, Gim and Zhong, EMNLP 2025)
    recycled   what followed the last token alone, and the target's tokens in place of rejected
               nodes (Token Recycling, Luo et al., ACL 2025)

Each candidate belongs to a *cell*: its source, the length of its match, and its rank among the
candidates for the position (in a corpus: among its own, and by its share there). When a token is
committed, the candidates for its position are compared with it, whether they became nodes or not,
and their cells count: chance = (hits + prior * ``PRIOR_WEIGHT``) / (trials + ``PRIOR_WEIGHT``),
where hits and trials lose a share 1 - ``MEMORY`` at each trial of the cell.

**The lookup tree.** A *place* is the position behind a path of nodes, and its chance is the product
of the chances along the path. The tree (``LookupTree``) begins with the place behind the end of the
text. The likeliest place is visited next, and of equally likely places the one that was added
first. At every place the caller decides which candidates become nodes, and adds the places behind
those nodes that are likely enough to be visited too. What differs between the ends stays with the
callers: the least chance, the most nodes, and the nodes of other sources that are in the tree
already.

Bounds: an index takes 8 to 16 bytes for each of the last ``MAX_INDEXED`` tokens, so a long prompt
is indexed as a whole; tables of ``MAX_LEADERS`` rows of about 230 bytes are below 2 MiB
each.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

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
# A corpus has a cell for each pair of a match length (2, 3 to 4, 5 to 8, 9 to 15, 16 tokens) and a
# share (below a third, below two thirds, above).
_CORPUS_KINDS: Final = (0, 0, 0, 1, 1, *[2] * 4, *[3] * 7, 4)
_SHARES: Final = 3

# Measured chances on outputs of the bundled target, code and summaries, and for 16 tokens in a
# corpus on edited files (docs/measurements/edits.md): first candidates by kind, and the factor for
# second ones.
_INITIAL_CHANCES: Final = tuple(
    rate * share for rate in (0.5, 0.6, 0.75, 0.8, 0.9, 0.3, 0.3) for share in (1.0, 0.5)
) + tuple(
    rate * share * rank
    for rate in (0.15, 0.25, 0.4, 0.6, 0.9)
    for share in (0.3, 0.6, 1.0)
    for rank in (1.0, 0.5)
)


class TextChances:
    """Estimated chance of a candidate, by cell.

    ``by_cell[cell]`` begins at the estimate of ``shared``, in which records made here count too.
    Without ``shared`` it begins at ``initial``, which for lookup is what was measured on outputs of
    the bundled target."""

    def __init__(
        self, shared: TextChances | None = None, initial: Sequence[float] = _INITIAL_CHANCES
    ) -> None:
        self._shared = shared
        self.by_cell: list[float] = list(initial if shared is None else shared.by_cell)
        self._priors = tuple(self.by_cell)
        self._rates = [DecayedRate(MEMORY, PRIOR_WEIGHT) for _ in self.by_cell]

    def note(self, cell: int, hit: bool) -> None:
        self._rates[cell].add(hit)
        self.by_cell[cell] = self._rates[cell].rate(self._priors[cell])
        if self._shared is not None:
            self._shared.note(cell, hit)


# --- tables ---------------------------------------------------------------------------------

MAX_LEADERS: Final = 8192
MAX_FOLLOWERS: Final = 2


class FollowerTable:
    """Table of the tokens that followed a leader, with at most ``max_leaders`` rows, least recently
    added first to go."""

    def __init__(self, max_leaders: int = MAX_LEADERS) -> None:
        self._most_leaders = max_leaders
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
            rows[leader] = (token, *others[: MAX_FOLLOWERS - 1])


class Corpus(Protocol):
    """Texts beside the generation's own, which a generation only reads."""

    def after(self, end: tuple[int, ...]) -> tuple[int, Sequence[tuple[int, float]]]:
        """Return how many of the last tokens of ``end`` also occur in the corpus, and what followed
        them there.

        ``end`` holds the last ``CORPUS_LENGTH`` tokens of a text, or fewer. The count is at least
        two. The followers come most frequent first, each with its share, at most ``RANKS``. Returns
        0 and nothing if there is no match."""

    def find_text(self, part: tuple[int, ...]) -> FoundText | None:
        """Return a text that contains ``part``, at most ``CORPUS_LENGTH`` + 1 tokens; None if there
        is none."""


class FoundText(NamedTuple):
    """A text of a corpus, or what stands around a place in it."""

    tokens: Sequence[int]
    next_index: int
    """Index behind the part that was looked for."""


FOUND_BEFORE: Final = 4096
"""Tokens of a found text before the place, at most."""
FOUND_BEHIND: Final = 8192
"""Tokens of a found text behind the place, at most."""


def cut_found_text(tokens: Sequence[int], at: int) -> FoundText:
    """Return the text around the token at ``at``, which ends at marks: ids below 0."""
    start, end = at, at + 1
    while start > 0 and tokens[start - 1] >= 0:
        start -= 1
    while end < len(tokens) and tokens[end] >= 0:
        end += 1
    return FoundText(tokens[start:end], at + 1 - start)


CORPUS_LENGTH: Final = 16
_SURE_SHARE: Final = 0.5
"""Share of the places of a match that the likeliest follower has to exceed for one of the texts to
be followed."""


class TextTables:
    """Tables of committed texts, with a ``corpus`` beside them.

    ``ngrams`` False leaves the table of pairs out, for a text whose own index has them already.
    ``earlier`` are whole texts of earlier generations; None keeps none."""

    corpus: Corpus | None = None

    def __init__(
        self,
        *,
        ngrams: bool,
        max_leaders: int = MAX_LEADERS,
        earlier: EarlierTexts | None = None,
    ) -> None:
        self.recycled = FollowerTable(max_leaders)
        self.ngrams = FollowerTable(max_leaders) if ngrams else None
        self.earlier = earlier

    @property
    def reads_other_texts(self) -> bool:
        """Whether there may be a match in other texts than the generation's own."""
        return self.corpus is not None or self.earlier is not None

    def after(self, end: tuple[int, ...]) -> tuple[int, Sequence[tuple[int, float]]]:
        """Return the longest match of ``end`` in earlier texts and in the corpus, with the contract
        of ``Corpus.after``. Of equally long ones it is the one in earlier texts."""
        length, followers = (0, ()) if self.earlier is None else self.earlier.after(end)
        if self.corpus is not None and length < len(end):
            other_length, others = self.corpus.after(end)
            if other_length > length:
                return other_length, others
        return length, followers

    def find_text(self, end: tuple[int, ...], least: int) -> tuple[FoundText, int] | None:
        """Return an earlier text, or a text of the corpus, that surely contains ``end`` or at least
        its last ``least`` tokens, with the number of tokens that agree.

        Its next token is the most frequent one behind them. Returns None if there is no such text,
        or if other tokens follow there as often."""
        for corpus in (self.earlier, self.corpus):
            if corpus is None:
                continue
            length, followers = corpus.after(end)
            if length < least or followers[0][1] <= _SURE_SHARE:
                continue
            part = *end[len(end) - length :], followers[0][0]
            if (found := corpus.find_text(part)) is not None:
                return found._replace(next_index=found.next_index - 1), length
        return None

    def add(self, tokens: Sequence[int], at: int) -> None:
        """Record that the token at ``at`` >= 2 was committed behind those before it."""
        last, token = tokens[at - 1], tokens[at]
        self.recycled.add(last, token)
        if self.ngrams is not None:
            self.ngrams.add(tokens[at - 2] << 32 | last, token)


# --- matches --------------------------------------------------------------------------------

MAX_INDEXED: Final = 1 << 17
"""Most tokens of one text that are indexed. Of a longer one these are the last ones."""
MAX_MATCH_LENGTH = 12
"""Longest match that is counted; longer ones are treated as this long."""
_FEWEST_SLOTS: Final = 256
_MAX_MATCHES: Final = 16


class PairIndex:
    """Positions of all pairs of neighbouring tokens in one text, which only grows.

    Theory of operation. A pair is hashed to a slot, which has the last position behind a pair of
    that slot, and ``_earlier`` has the position before it, as in the window of a Lempel-Ziv coder.
    Whether a position belongs to a pair is seen in the text itself, so an entry takes 4 bytes and
    its slots 4 to 12. When ``max_length`` tokens are indexed, the older half is forgotten.
    """

    __slots__ = ("_earlier", "_latest", "_most", "_start", "length")

    def __init__(self, max_length: int = MAX_INDEXED) -> None:
        self.length = 0
        """Number of tokens of the text that were read."""
        self._most = max_length
        self._start = 0  # The tokens before it are not indexed any more.
        self._latest = array("i", [-1]) * _FEWEST_SLOTS
        self._earlier = array("i")

    def __len__(self) -> int:
        """Return the number of tokens that are indexed."""
        return len(self._earlier)

    def positions_after(self, tokens: Sequence[int], before: int, last: int) -> Iterator[int]:
        """Yield the positions of the tokens that followed the pair, the last one first."""
        latest, earlier, start = self._latest, self._earlier, self._start
        at = latest[hash((before, last)) & len(latest) - 1]
        while at >= 0:
            if tokens[at - 1] == last and tokens[at - 2] == before:
                yield at
            at = earlier[at - start]

    def extend(self, tokens: Sequence[int], end: int) -> None:
        """Index the tokens before ``end`` that were not read yet."""
        if end - self._start > self._most:
            # A text that grows by single tokens is indexed anew once in half of the bound.
            kept = max(self._most // 2, min(self._most, end - self.length))
            self._begin(max(0, end - kept), end)
        elif end - self._start > len(self._latest):
            self._begin(self._start, end + (end - self._start) // 2)
        latest, earlier, mask = self._latest, self._earlier, len(self._latest) - 1
        first = self.length
        while first < end and first - self._start < 2:
            earlier.append(-1)
            first += 1
        pairs = zip(tokens[first - 2 : end - 2], tokens[first - 1 : end - 1], strict=True)
        for at, pair in enumerate(pairs, first):
            slot = hash(pair) & mask
            earlier.append(latest[slot])
            latest[slot] = at
        self.length = max(self.length, end)

    def _begin(self, start: int, end: int) -> None:
        """Forget everything, with slots for the tokens from ``start`` to ``end``."""
        slots = _FEWEST_SLOTS
        while slots < min(end - start, self._most):
            slots *= 2
        self._latest, self._earlier = array("i", [-1]) * slots, array("i")
        self._start = self.length = start


def common_length(tokens: Sequence[int], position: int, end: int) -> int:
    """Return how many tokens before ``position`` equal those before ``end``, at most
    ``MAX_MATCH_LENGTH``."""
    length, most = 0, min(MAX_MATCH_LENGTH, position)
    while length < most and tokens[position - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class PromptLookup:
    """Index of one text, which only grows.

    ``position`` is the position behind the current match, and ``length`` is the match's length; 0:
    there is none."""

    def __init__(self, max_length: int = MAX_INDEXED) -> None:
        self.position = self.length = 0
        self._index = PairIndex(max_length)

    def __len__(self) -> int:
        """Return the number of tokens that are indexed."""
        return len(self._index)

    @property
    def indexed_length(self) -> int:
        """Number of tokens of the text that were read."""
        return self._index.length

    def position_after(self, tokens: Sequence[int], before: int, last: int) -> int:
        """Return the position of the last token that followed the pair; -1 if none did."""
        return next(self._index.positions_after(tokens, before, last), -1)

    def load(self, tokens: Sequence[int], end: int) -> None:
        """Index the tokens before ``end``, and look for a match of their end."""
        self._index.extend(tokens, end)
        self._search(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Index the next token, and follow the match that there is, or look for one."""
        at = self._index.length
        self._index.extend(tokens, at + 1)
        if self.length and tokens[self.position] == tokens[at]:
            self.position += 1
            if self.length < MAX_MATCH_LENGTH:
                self.length += 1
        else:
            self._search(tokens)

    def _search(self, tokens: Sequence[int]) -> None:
        """Find the longest match of the end of the text, and of equally long ones the last one. Of
        the places of the last pair the latest ``_MAX_MATCHES`` are looked at."""
        end, self.length = self._index.length, 0
        if end < 2:
            return
        places = self._index.positions_after(tokens, tokens[end - 2], tokens[end - 1])
        for position in islice(places, _MAX_MATCHES):
            length = common_length(tokens, position, end)
            if length > self.length:
                self.position, self.length = position, length
                if length == MAX_MATCH_LENGTH:
                    return


# --- earlier texts ---------------------------------------------------------------------------

_BLOCK: Final = 64
_MAX_TRIES: Final = 32
_INDEXED_PER_LOOKUP: Final = 2048
MAX_EARLIER_TOKENS: Final = 1 << 17


class EarlierTexts:
    """Texts of earlier generations, prompts included, as a ``Corpus``. They belong to one user.

    Theory of operation. The texts stand one behind another in one array, with a mark between them,
    and ``PairIndex`` finds the places where a pair occurs. A conversation's next prompt repeats all
    of it, so a text is cut into blocks, each is known by the hash of everything before its end, and
    only the blocks behind the last known one are added. When ``max_tokens`` are held, the older
    half is forgotten. A token takes 12 to 20 bytes. A lookup first indexes at most
    ``_INDEXED_PER_LOOKUP`` of the tokens that are not indexed yet, so no call takes long.
    """

    def __init__(self, max_tokens: int = MAX_EARLIER_TOKENS) -> None:
        self._most = max_tokens
        self._tokens = array("i")
        self._index = PairIndex(max_tokens)
        self._blocks: OrderedDict[int, None] = OrderedDict()
        """Hashes of the beginnings of texts, up to the end of a block, least recently seen first.
        """

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, text: Sequence[int]) -> None:
        """Add a text, less what earlier texts began with. Of a very long one the end is kept."""
        start, known, seen = 0, True, 0
        for end in range(_BLOCK, len(text) + 1, _BLOCK):
            seen = hash((seen, *text[end - _BLOCK : end]))
            if known and seen in self._blocks:
                start = end
            else:
                known = False
            self._blocks[seen] = None
            self._blocks.move_to_end(seen)
        while len(self._blocks) > self._most // _BLOCK:
            self._blocks.popitem(last=False)
        # The tokens before the new ones let a match begin there.
        start = max(0, start - CORPUS_LENGTH, len(text) - self._most // 2)
        if len(text) - start <= (CORPUS_LENGTH if start else 1):
            return
        if len(self._tokens) + len(text) - start + 1 > self._most:
            self._tokens = self._tokens[-(self._most // 2 - 1) :]
            self._index = PairIndex(self._most)
        self._tokens.extend(text[start:])
        self._tokens.append(-1)

    def after(self, end: tuple[int, ...]) -> tuple[int, Sequence[tuple[int, float]]]:
        """Return the longest match with the contract of ``Corpus.after``. Of the places of the last
        pair the latest ``_MAX_TRIES`` are looked at."""
        tokens, index, best = self._tokens, self._index, 0
        if index.length < len(tokens):
            index.extend(tokens, min(len(tokens), index.length + _INDEXED_PER_LOOKUP))
        followers = Counter[int]()
        for tried, at in enumerate(index.positions_after(tokens, end[-2], end[-1])):
            if tried == _MAX_TRIES:
                break
            if tokens[at] < 0:  # Nothing follows at the end of a text.
                continue
            length, most = 2, min(len(end), at)
            while length < most and tokens[at - 1 - length] == end[-1 - length]:
                length += 1
            if length > best:
                best = length
                followers.clear()
            if length == best:
                followers[tokens[at]] += 1
        count = followers.total()
        return best, [(token, one / count) for token, one in followers.most_common(RANKS)]

    def find_text(self, part: tuple[int, ...]) -> FoundText | None:
        """Return the text around the last place of ``part``, with the contract of
        ``Corpus.find_text``."""
        tokens, wanted = self._tokens, array("i", part)
        if len(part) < 2:
            return None
        places = self._index.positions_after(tokens, part[-2], part[-1])
        for at in islice(places, _MAX_TRIES):
            if at >= len(part) and tokens[at - len(part) : at] == wanted:
                first = max(0, at - FOUND_BEFORE)
                return cut_found_text(tokens[first : at + FOUND_BEHIND], at - 1 - first)
        return None


# --- candidates -----------------------------------------------------------------------------

TextCandidate = tuple[int, int]
"""A candidate: its cell and its token."""
LookupState = tuple[tuple[int, ...], int, int]
"""State of lookup at a position in or behind the text: the last tokens before it (two, or more with
a corpus), the position behind their match in the text, and the length of that match; 0: there is
none."""


SURE_MATCH_LENGTH: Final = 6
"""A match of at least this length is so sure that no other source is used beside it."""


class TextReader:
    """Offers candidates for one text as it grows. ``tables`` outlive the text and belong to its
    user alone."""

    def __init__(self, tables: TextTables, chances: TextChances) -> None:
        self.lookup = PromptLookup()
        self._tables, self._chances = tables, chances
        self._recycled = tables.recycled.after
        self._ngrams = None if tables.ngrams is None else tables.ngrams.after
        self._others = tables.after if tables.reads_other_texts else None
        self._context_length = CORPUS_LENGTH if tables.reads_other_texts else 2

    def learn(self, tokens: Sequence[int]) -> None:
        """Judge candidates by the new tokens of ``tokens``, then index those."""
        lookup, note = self.lookup, self._chances.note
        for at in range(lookup.indexed_length, len(tokens)):
            if at >= 2:
                match = tokens[lookup.position] if lookup.length else -1
                end = tuple(tokens[max(0, at - self._context_length) : at])
                candidates = self._look_up(end, match, lookup.length)
                for cell, token in candidates + self._look_up_corpus(end):
                    note(cell, token == tokens[at])
                self._tables.add(tokens, at)
            lookup.add(tokens)

    def state_at_end(self, tokens: Sequence[int]) -> LookupState:
        """Return the state behind the text, which must have at least two tokens and be learned
        completely."""
        return tuple(tokens[-self._context_length :]), self.lookup.position, self.lookup.length

    def candidates(
        self, tokens: Sequence[int], state: LookupState
    ) -> tuple[list[TextCandidate], LookupState]:
        """Return at most ``RANKS`` candidates for the position of ``state``, the surest source
        first.

        Also returns the state, with its match looked up again if that had reached the end of the
        text."""
        end, position, length = state
        if position >= len(tokens):  # it reaches the end, or was not looked up
            position = self.lookup.position_after(tokens, end[-2], end[-1])
            length = 0 if position < 0 else max(2, length)
        if length > MAX_MATCH_LENGTH:
            length = MAX_MATCH_LENGTH
        match = tokens[position] if length else -1
        candidates = self._look_up(end, match, length)
        if length < SURE_MATCH_LENGTH and (found := self._look_up_corpus(end)):
            candidates = self._keep_likeliest(candidates + found)
        return candidates, (end, position, length)

    def advance(self, tokens: Sequence[int], state: LookupState, token: int) -> LookupState:
        """Return the state behind ``token`` at the position of ``state``, as ``candidates``
        returned it."""
        end, position, length = state
        end = (*end[1 - self._context_length :], token)
        if length and tokens[position] == token:
            return end, position + 1, length + 1
        return end, len(tokens), 0

    def _look_up(self, end: tuple[int, ...], match: int, length: int) -> list[TextCandidate]:
        candidates = [(MATCH_CELLS[length], match)] if length else []
        if length >= SURE_MATCH_LENGTH:
            return candidates
        rank, last, other = len(candidates), end[-1], -1
        if self._ngrams is not None:
            for token in self._ngrams(end[-2] << 32 | last):
                if token != match:
                    candidates.append((rank + NGRAM_CELL, token))
                    rank += 1
                    if rank == RANKS:
                        return candidates
                    other = token
        for token in self._recycled(last):
            if token not in (match, other):
                candidates.append((rank + RECYCLED_CELL, token))
                rank += 1
                if rank == RANKS:
                    return candidates
        return candidates

    def _look_up_corpus(self, end: tuple[int, ...]) -> list[TextCandidate]:
        if self._others is None:
            return []
        length, followers = self._others(end)
        kind = _CORPUS_KINDS[min(length, len(_CORPUS_KINDS) - 1)]
        return [
            (_CORPUS_CELL + (kind * _SHARES + int(share * 2.99)) * RANKS + rank, token)
            for rank, (token, share) in enumerate(followers)
        ]

    def _keep_likeliest(self, found: list[TextCandidate]) -> list[TextCandidate]:
        """Return the likeliest ``RANKS`` candidates, each token once."""
        candidates: list[TextCandidate] = []
        for cell, token in sorted(found, key=lambda one: -self._chances.by_cell[one[0]]):
            if len(candidates) < RANKS and all(token != other for _, other in candidates):
                candidates.append((cell, token))
        return candidates


# --- places ------------------------------------------------------------------------------------

NodeT = TypeVar("NodeT")


class LookupTree(Generic[NodeT]):
    """The places behind ``tokens`` that are still to be visited.

    ``reader`` has learned all of ``tokens``, which are two or more. A place is named by the
    caller's description of the node before it; ``root`` describes the end of the text.
    """

    __slots__ = ("_added_count", "_depth", "_heap", "_reader", "_state", "_tokens")

    def __init__(self, reader: TextReader, tokens: Sequence[int], root: NodeT) -> None:
        self._reader, self._tokens = reader, tokens
        # The state of lookup at the place that is visited, and the number of nodes before it.
        self._state, self._depth = reader.state_at_end(tokens), 0
        self._added_count = 0
        # Places: negated chance, number of places added before, node, depth, state of lookup.
        self._heap: list[tuple[float, int, NodeT, int, LookupState]] = [
            (-1.0, 0, root, 0, self._state)
        ]

    def visit_places(self) -> Iterator[tuple[NodeT, float, int, list[TextCandidate]]]:
        """Yield the places, also the ones that ``add_place`` adds meanwhile.

        Each is the node before the place, the chance that all tokens on the path are right, the
        number of nodes on the path, and the candidates for the position, the surest source first.
        """
        look_up, tokens, heap = self._reader.candidates, self._tokens, self._heap
        while heap:
            negated_chance, _, node, depth, state = heappop(heap)
            candidates, self._state = look_up(tokens, state)
            self._depth = depth
            yield node, -negated_chance, depth, candidates

    def add_place(self, node: NodeT, token: int, chance: float) -> None:
        """Add the place behind ``node``, which has ``token`` and stands at the visited place.

        ``chance`` is the chance of the whole path.
        """
        self._added_count += 1
        state = self._reader.advance(self._tokens, self._state, token)
        heappush(self._heap, (-chance, self._added_count, node, self._depth + 1, state))
