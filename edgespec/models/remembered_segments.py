"""Token ids of the parts of earlier texts, so that a conversation is tokenized as it grows.

A chat prompt contains all earlier messages. It is cut before each *mark*, a special token that the
chat template writes, and the ids of each segment are remembered. A turn then tokenizes its new
segments only.

The segments' ids one after another are the ids of the text, because of how the library works: it
searches a text for added tokens first, and normalizes and tokenizes what lies between two of
them by itself. So a place at which an added token is found always divides a text. A token is a
mark only if it is found wherever its name stands (``find_marks``):

    1. It is searched before the text is normalized, as special tokens usually are.
    2. It takes in no blanks before it, and does not depend on the letters around it.
    3. No other token that is searched then contains its name, or ends with its beginning.

A tokenizer with an added token that depends on the letters around it has no marks, because cutting
changes these. Some tokenizers treat the beginning of a text in a way of its own; only the first
segment begins there, since each other one begins with a mark.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from edgespec.models.added_tokens import AddedToken

EncodeMany = Callable[[list[str]], list[list[int]]]
"""Returns the ids of each text, without tokens that begin or end a text."""
MAX_CHARACTERS: Final = 1 << 21
"""Characters of the segments that are remembered, of some eight conversations of 64,000 tokens.
They and their ids take about 4 MiB, and four times as much for letters beyond U+FFFF."""
LEAST_CHARACTERS: Final = 2048
"""A shorter text is tokenized in less than a millisecond."""
MAX_MARKS: Final = 64


class RememberedSegments:
    """The ids of segments, the most recently used ones. Calls may come from any thread.

    Args:
        marks: The texts before which a text is cut; none: nothing is remembered.
        encode_many: Encodes the segments that are not known.
    """

    def __init__(self, marks: Sequence[str], encode_many: EncodeMany) -> None:
        self._pattern = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._encode_many = encode_many
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        """Ids by segment; the segment that was used longest ago is in front."""
        self._characters = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``. Raises what ``encode_many`` raises."""
        segments = self._cut(text)
        if len(segments) == 1 and not self._may_remember(segments[0]):
            return self._encode_many(segments)[0]
        with self._lock:
            known = {one: self._ids[one] for one in segments if one in self._ids}
        new = [one for one in dict.fromkeys(segments) if one not in known]
        if new:
            encoded = zip(new, self._encode_many(new), strict=True)
            known |= {segment: array("I", ids) for segment, ids in encoded}
        ids: array[int] = array("I")
        for segment in segments:
            ids += known[segment]
        with self._lock:
            self._remember(segments, known)
        return ids.tolist()

    def find_new(self, text: str) -> list[str]:
        """Return the segments of ``text`` whose ids are not remembered, in their order."""
        segments = self._cut(text)
        with self._lock:
            return [one for one in segments if one not in self._ids]

    def _cut(self, text: str) -> list[str]:
        """Return the segments of ``text``, at least one. All but the first begin with a mark."""
        if self._pattern is None or len(text) < LEAST_CHARACTERS:
            return [text]
        starts = [match.start() for match in self._pattern.finditer(text)]
        ends = [*starts[1:], len(text)] if starts and not starts[0] else [*starts, len(text)]
        begins = starts if starts and not starts[0] else [0, *starts]
        return [text[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def _may_remember(self, segment: str) -> bool:
        return self._pattern is not None and LEAST_CHARACTERS <= len(segment) <= MAX_CHARACTERS

    def _remember(self, segments: Iterable[str], known: dict[str, array[int]]) -> None:
        for segment in segments:
            if segment in self._ids:
                self._ids.move_to_end(segment)
            elif len(segment) <= MAX_CHARACTERS:
                self._ids[segment] = known[segment]
                self._characters += len(segment)
        while self._characters > MAX_CHARACTERS:
            dropped, _ = self._ids.popitem(last=False)
            self._characters -= len(dropped)


def find_marks(added: Sequence[AddedToken], written: Iterable[str]) -> list[str]:
    """Return the texts before which a text can be cut without a change of its ids.

    ``added`` are all tokens that are added to the vocabulary. ``written`` are texts in which marks
    are searched: the sources of the chat templates and the special tokens that they may name."""
    if any(one.single_word for one in added):
        return []
    sources = "\n".join(written)
    found_first = [one.content for one in added if not one.normalized]
    marks = list[str]()
    for one in added:
        name = one.content
        if not one.special or one.normalized or one.lstrip or name not in sources:
            continue
        if not name.strip() or name[0].isspace():
            continue
        if any(_can_cover(other, name) for other in found_first if other != name):
            continue
        marks.append(name)
    return marks[:MAX_MARKS]


def _can_cover(other: str, name: str) -> bool:
    """Return whether ``other`` can be found in place of ``name`` where that stands: it contains
    ``name``, or ends with its beginning. The search goes from left to right and takes the longest
    token at a place, so a token that begins later or is shorter does not matter."""
    if name in other:
        return True
    if name[0] not in other[1:]:
        return False
    shorter = min(len(name), len(other))
    return any(other.endswith(name[:length]) for length in range(1, shorter))
