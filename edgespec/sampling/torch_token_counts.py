"""How often each token stands in a text so far, kept from pass to pass for the penalties.

Theory of operation. A text grows by a few tokens a pass and is sometimes cut back. ``TokenCounts``
follows it: it takes the tokens behind the last unchanged one off its counts and adds the new ones,
so a pass costs what has changed and not the length of the text. ``TokenCountsCache`` keeps the
counts of the sequences used last. It is only a cache: the sequence's own tokens are the truth, from
which counts that are missing are made anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_FIRST_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class Occurrences:
    """The tokens that stand before each of one session's sampled rows."""

    tokens: npt.NDArray[np.int64]
    """[distinct tokens], each once."""
    in_prompt: npt.NDArray[np.bool_]
    """[distinct tokens]: whether the prompt holds it."""
    output_counts: npt.NDArray[np.int32]
    """[rows, distinct tokens]: how often it stands in the output before this row's position."""


class TokenCounts:
    """Counts of one text, whose first ``prompt_length`` tokens are the prompt."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._counted: list[int] = []
        self._place: dict[int, int] = {}
        self._tokens = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.zeros((2, _FIRST_CAPACITY), dtype=np.int32)
        """Of the prompt and of the output, by place."""

    def follow(self, text: Sequence[int], unchanged_length: int) -> None:
        """Make the counts those of ``text``, of which the first ``unchanged_length`` tokens are
        the same as at the last call."""
        kept = min(unchanged_length, len(self._counted), len(text))
        for position in range(len(self._counted) - 1, kept - 1, -1):
            self._add(self._counted[position], position, -1)
        del self._counted[kept:]
        for position in range(kept, len(text)):
            self._add(text[position], position, 1)
        self._counted += text[kept:]

    def before(self, nodes: Sequence[int], parents: Sequence[int]) -> Occurrences:
        """Occurrences before the token behind the text, and before that behind each of ``nodes``,
        a tree behind the text whose parents (-1: the text) come before their children."""
        known = len(self._place)
        fresh = {token: known + i for i, token in enumerate(set(nodes) - self._place.keys())}
        size = known + len(fresh)
        tokens = np.concatenate([self._tokens[:known], np.array(list(fresh), dtype=np.int64)])
        in_prompt = np.zeros(size, dtype=np.bool_)
        in_prompt[:known] = self._counts[0, :known] > 0
        outputs = np.zeros((1 + len(nodes), size), dtype=np.int32)
        outputs[0, :known] = self._counts[1, :known]
        for row, (token, parent) in enumerate(zip(nodes, parents, strict=True), start=1):
            outputs[row] = outputs[1 + parent]
            place = self._place.get(token)
            outputs[row, fresh[token] if place is None else place] += 1
        return Occurrences(tokens, in_prompt, outputs)

    def _add(self, token: int, position: int, change: int) -> None:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
            self._tokens[place] = token
        self._counts[0 if position < self._prompt_length else 1, place] += change


class TokenCountsCache:
    """The counts of at most ``limit`` texts, by key; the one not used for longest goes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, tuple[list[int], TokenCounts]] = OrderedDict()

    def of(
        self, key: str, text: list[int], prompt_length: int, unchanged_length: int
    ) -> TokenCounts:
        """The counts of ``text``, which is known by its identity: another list under the same key
        is another text. As for ``unchanged_length``, see ``TokenCounts.follow``."""
        known, counts = self._kept.pop(key, (None, None))
        if counts is None or known is not text:
            counts = TokenCounts(prompt_length)
        counts.follow(text, unchanged_length)
        self._kept[key] = (text, counts)
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)
        return counts
