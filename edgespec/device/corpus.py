"""A store of texts for lookup drafts (``draft.corpus``), in a mapped file or in memory.

Theory of operation. A retrieval draft (REST, arXiv 2311.08252; SuffixDecoding, 2411.04975; RASD,
Quan et al. 2025) finds the longest suffix of the output that the corpus contains too, and proposes
the tokens that follow it there. The texts are stored backwards, each token as a big-endian 32-bit
number. Beside them stands the order of all their places by the ``CORPUS_LENGTH`` tokens that end
there, which is a suffix array of the texts read backwards. Bytes compare as their tokens do, so one
binary search finds the place with the longest common suffix, and two more find all places that
share it. Evenly spread, ``_SAMPLE`` places at most are counted. A lookup in 10 million
tokens takes 24 comparisons a search and no array library.

    identity, 32 bytes | number of texts, 4 bytes | for each text: hash, 16 bytes, and tokens, 4
    bytes | order, 4 bytes a token | tokens backwards, 4 bytes each

Ids are stored one higher, since 0 ends a text and matches nothing. The identity covers the
vocabulary and the format, and a text is known by the hash of its content. So a store also
serves for a part of its texts: the others are switched off (``only``), and their places are passed
over.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

from edgespec.core.protocol.text_lookup import (
    CORPUS_LENGTH,
    FOUND_BEFORE,
    FOUND_BEHIND,
    RANKS,
    FoundText,
    cut_found_text,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FORMAT: Final = "2"
_MIN_MATCH: Final = 2
_SAMPLE: Final = 64
_CACHED_LOOKUPS: Final = 4096
_IDENTITY_BYTES: Final = 32
HASH_BYTES: Final = 16
_WORD_BYTES: Final = 4
_ENTRY_BYTES: Final = HASH_BYTES + _WORD_BYTES
_MAX_TEXTS: Final = 1 << 20
# Places that are sorted at once. Each takes about 150 bytes meanwhile.
_SORTED_AT_ONCE: Final = 1 << 15


def store_identity(vocabulary: str) -> bytes:
    """Return what a store must begin with: a hash of the vocabulary's fingerprint and the
    format."""
    text = f"{_FORMAT} {sys.byteorder} {CORPUS_LENGTH} {vocabulary}"
    return hashlib.sha256(text.encode()).digest()


def hash_text(content: bytes) -> bytes:
    """Return the hash by which a store knows a text."""
    return hashlib.sha256(content).digest()[:HASH_BYTES]


class StoredCorpus:
    """A ``Corpus`` in the bytes of a store.

    ``content`` is the store, which stays mapped for the life of this object. Raises ``ValueError``
    if it cannot be a store of this ``identity``."""

    def __init__(self, content: memoryview | mmap.mmap | bytearray, identity: bytes) -> None:
        view = memoryview(content)
        head = _IDENTITY_BYTES + _WORD_BYTES
        if len(view) < head or bytes(view[:_IDENTITY_BYTES]) != identity:
            raise ValueError("this is no store of a corpus with this vocabulary")
        count = int.from_bytes(view[_IDENTITY_BYTES:head], "big")
        entries_end = head + min(count, _MAX_TEXTS) * _ENTRY_BYTES
        entries = bytes(view[head:entries_end])
        starts = range(0, len(entries) - _ENTRY_BYTES + 1, _ENTRY_BYTES)
        self.token_counts: dict[bytes, int] = {}
        """Tokens of each text with the mark behind it, by its hash, in the order of the texts."""
        for at in starts:
            end = at + HASH_BYTES
            words = int.from_bytes(entries[end : end + _WORD_BYTES], "big")
            self.token_counts[entries[at:end]] = words
        self.length = sum(self.token_counts.values())
        if not self.length or len(view) != entries_end + self.length * 2 * _WORD_BYTES:
            raise ValueError(f"{len(view)} bytes are no store of {count} texts")
        middle = entries_end + self.length * _WORD_BYTES
        self._order, self._tokens = view[entries_end:middle].cast("i"), view[middle:]
        # The last text comes first, since the tokens stand backwards.
        backwards = list(reversed(self.token_counts.values()))
        self._first_places = [0, *accumulate(backwards)][:-1]
        self._is_off: list[bool] = []
        """Whether each text, the last one first, is switched off. Empty: none is."""
        self.after = lru_cache(_CACHED_LOOKUPS)(self._after)
        """Cached lookup with the contract of ``Corpus.after``."""

    def only(self, hashes: Collection[bytes]) -> StoredCorpus:
        """Return this store with all texts switched off but these."""
        other = StoredCorpus.__new__(StoredCorpus)
        other.token_counts, other.length = self.token_counts, self.length
        other._order, other._tokens = self._order, self._tokens
        other._first_places = self._first_places
        off = [one not in hashes for one in reversed(self.token_counts)]
        other._is_off = off if any(off) else []
        other.after = lru_cache(_CACHED_LOOKUPS)(other._after)
        return other

    def read_tokens(self) -> dict[bytes, NDArray[np.int32]]:
        """Return the ids of each text, by its hash."""
        import numpy as np

        texts = np.frombuffer(self._tokens, ">u4")[::-1]
        ends = [*accumulate(self.token_counts.values())]
        return {
            one: texts[end - count : end - 1].astype(np.int32) - 1
            for (one, count), end in zip(self.token_counts.items(), ends, strict=True)
        }

    def _after(self, end: tuple[int, ...]) -> tuple[int, Sequence[tuple[int, float]]]:
        """Return the length of the longest suffix of ``end`` that the corpus continues, and the
        tokens that follow it there with their shares, most frequent first. Both are empty below
        ``_MIN_MATCH``.

        At most ``_SAMPLE`` places of the suffix array are looked at, evenly spaced."""
        wanted = b"".join([(token + 1).to_bytes(_WORD_BYTES, "big") for token in reversed(end)])
        near, last = self._find_place(bisect_left, wanted), self.length - 1
        longest = max(
            _count_common_words(wanted, self._read(self._order[at], len(wanted)))
            for at in (max(0, near - 1), min(near, last))
        )
        for length in range(longest, _MIN_MATCH - 1, -1):
            places = self._sample_places(wanted[: length * _WORD_BYTES])
            counts = Counter([self._read(place - 1, _WORD_BYTES) for place in places])
            del counts[bytes(_WORD_BYTES)]  # A zero marks the end of a text.
            if counts:
                return length, [
                    (int.from_bytes(token, "big") - 1, count / len(places))
                    for token, count in counts.most_common(RANKS)
                ]
        return 0, ()

    def find_text(self, part: tuple[int, ...]) -> FoundText | None:
        """Return the text around one place of ``part``, with the contract of
        ``Corpus.find_text``."""
        wanted = b"".join([(token + 1).to_bytes(_WORD_BYTES, "big") for token in reversed(part)])
        places = self._sample_places(wanted)
        if not places:
            return None
        first = max(0, places[0] - FOUND_BEHIND)
        last = min(self.length, places[0] + FOUND_BEFORE)
        words = self._read(first, (last - first) * _WORD_BYTES)
        tokens = [word - 1 for word in struct.unpack(f">{last - first}I", words)]
        return cut_found_text(tokens[::-1], last - 1 - places[0])

    def _sample_places(self, shared: bytes) -> list[int]:
        """Return places at which these words stand, in texts that are not switched off."""
        first = self._find_place(bisect_left, shared)
        behind = self._find_place(bisect_right, shared)
        step = -(-(behind - first) // _SAMPLE) or 1
        places: list[int] = self._order[first:behind:step].tolist()
        if self._is_off:
            starts, is_off = self._first_places, self._is_off
            places = [one for one in places if not is_off[bisect_right(starts, one) - 1]]
        return places

    def _find_place(self, bisect: Callable[..., int], wanted: bytes) -> int:
        """Return the index at which ``wanted`` would stand in the order."""
        order, read, size = self._order, self._read, len(wanted)
        return bisect(order, wanted, key=lambda place: read(place, size))

    def _read(self, place: int, size: int) -> bytes:
        return bytes(self._tokens[place * _WORD_BYTES : place * _WORD_BYTES + size])


def _count_common_words(one: bytes, other: bytes) -> int:
    """Return the number of equal words at the beginning of two byte strings."""
    size = min(len(one), len(other)) // _WORD_BYTES * _WORD_BYTES
    while one[:size] != other[:size]:
        size -= _WORD_BYTES
    return size // _WORD_BYTES


# --- making a store -----------------------------------------------------------------------------


def build_store(identity: bytes, texts: Mapping[bytes, NDArray[np.int32]]) -> bytearray:
    """Return the store of texts, which are given as ids by their hash, at least one.

    It takes 12 bytes for each token while it is made, and 5 MiB."""
    import numpy as np

    count = sum(map(len, texts.values())) + len(texts)
    head = bytearray(identity) + len(texts).to_bytes(_WORD_BYTES, "big")
    for one, tokens in texts.items():
        head += one + (len(tokens) + 1).to_bytes(_WORD_BYTES, "big")
    # Zeros behind the end let every place have ``CORPUS_LENGTH`` tokens. They are cut off below.
    store = head + bytes((2 * count + CORPUS_LENGTH) * _WORD_BYTES)
    words = np.frombuffer(store, ">u4", offset=len(head))
    backwards = words[count:]
    at = count
    for tokens in texts.values():
        backwards[at - len(tokens) : at] = tokens[::-1] + 1
        at -= len(tokens) + 1
    order = words[:count].view(np.int32)
    _sort_places(backwards, order)
    del words, backwards, order  # They would forbid the change of the length.
    del store[-CORPUS_LENGTH * _WORD_BYTES :]
    return store


def _sort_places(tokens: NDArray[Any], order: NDArray[np.int32]) -> None:
    """Write all places into ``order``, sorted by the ``CORPUS_LENGTH`` tokens that begin there.

    ``tokens`` are big-endian, with ``CORPUS_LENGTH`` zeros behind the last place. Places are spread
    by their first token, and by the next one where there are too many with the same, until there
    are few enough to be sorted by all their tokens at once (a radix sort from the first digit on).
    """
    import numpy as np

    windows = np.lib.stride_tricks.sliding_window_view(tokens, CORPUS_LENGTH)
    edges = _spread_places(tokens[: len(order)], order)
    waiting = [(first, end, 1) for first, end in _group_parts(0, edges)]
    while waiting:
        first, end, depth = waiting.pop()
        places = order[first:end]
        if end - first <= _SORTED_AT_ONCE:
            keys = windows[places].view(f"S{CORPUS_LENGTH * _WORD_BYTES}").ravel()
            order[first:end] = places[np.argsort(keys, kind="stable")]
        elif depth < CORPUS_LENGTH:  # All places begin with the same tokens, as many as ``depth``.
            digits = tokens[places + depth].astype(np.int32)
            by_digit = np.argsort(digits, kind="stable")
            order[first:end], digits = places[by_digit], digits[by_digit]
            edges = [*(first + 1 + np.flatnonzero(np.diff(digits))).tolist(), end]
            waiting += [(*part, depth + 1) for part in _group_parts(first, edges)]


def _group_parts(first: int, edges: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the parts that end at these edges. Neighbours are taken together as far as they are no
    more than ``_SORTED_AT_ONCE`` places."""
    for edge, next_edge in pairwise([*edges, math.inf]):
        if next_edge - first > _SORTED_AT_ONCE:
            yield first, int(edge)
            first = int(edge)


def _spread_places(tokens: NDArray[Any], order: NDArray[np.int32]) -> list[int]:
    """Sort all places by their first token, a part at a time (a counting sort). Return where the
    places with each token end."""
    import numpy as np

    parts = range(0, len(order), 8 * _SORTED_AT_ONCE)
    highest = max(int(tokens[at : at + parts.step].max()) for at in parts)
    counts = np.zeros(highest + 1, np.int64)
    for at in parts:
        counts += np.bincount(tokens[at : at + parts.step].astype(np.int64), minlength=len(counts))
    edges = np.cumsum(counts)
    places = edges - counts
    for at in parts:
        part = tokens[at : at + parts.step].astype(np.int64)
        by_token = np.argsort(part, kind="stable")
        found = part[by_token]
        ranks = np.arange(len(part)) - np.searchsorted(found, found)
        order[places[found] + ranks] = at + by_token
        places += np.bincount(part, minlength=len(counts))
    ends: list[int] = edges[counts > 0].tolist()
    return ends
