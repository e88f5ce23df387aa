"""The tokens that a drafter's cache holds: the contract of ``Drafter.step``, for all drafters.

Invariants: ``len(tokens)`` is the cached length, at most ``context_length``; every id is inside the
vocabulary. A refused step changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.core.protocol.checks import check_range
from edgespec.core.protocol.constraint import ConstrainedText
from edgespec.core.protocol.sampling import MinTokensMask, SamplingParams, TokenCounts
from edgespec.core.protocol.work import Candidate, ModelInfo


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading tokens in which two sequences agree."""
    low, high = 0, min(len(first), len(second))
    if [*first[:high]] == [*second[:high]]:  # the usual case, at the speed of memory
        return high
    while high - low > 1:  # They agree before ``low`` and differ somewhere before ``high``.
        middle = (low + high) // 2
        if [*first[low:middle]] == [*second[low:middle]]:
            low = middle
        else:
            high = middle
    return low


class TokenCache:
    """Ids of one sequence, in which prompt and output are separate.

    ``counts`` counts its tokens if the sampling has penalties, else it is None. ``constrained`` is
    the position in the grammar of a constraint, if this device has read one."""

    def __init__(self, info: ModelInfo) -> None:
        self.sampling = SamplingParams()
        self.counts: TokenCounts | None = None
        self.constrained: ConstrainedText | None = None
        self._min_tokens_mask: MinTokensMask | None = None
        self._info = info
        self.tokens: list[int] = []
        self._prompt_length = 0

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        """Start an empty sequence. Raises ``ValueError`` if the prompt cannot fit."""
        check_range("prompt length", prompt_length, 1, self._info.context_length)
        self.tokens.clear()
        self._prompt_length = prompt_length
        self.sampling = sampling
        self.counts = TokenCounts(self._info.vocabulary_size) if sampling.is_penalised else None
        constraint, ends = sampling.constraint, self._info.eos_token_ids
        is_readable = constraint is not None and constraint.matcher is not None and ends
        self.constrained = ConstrainedText(constraint, ends) if constraint and is_readable else None
        size, min_tokens = self._info.vocabulary_size, sampling.min_tokens
        self._min_tokens_mask = MinTokensMask(sampling, size, ends) if min_tokens else None

    def advance(self, keep_length: int, feed: Sequence[int]) -> int:
        """Truncate to ``keep_length``, append ``feed``, return the new length.

        Raises ``ValueError`` naming the value and the limit."""
        cached, size = len(self.tokens), self._info.vocabulary_size
        if not 0 <= keep_length <= cached:
            raise ValueError(f"keep_length is {keep_length}, but {cached} tokens are cached")
        if not feed:
            raise ValueError("feed must hold at least one token")
        length, limit = keep_length + len(feed), self._info.context_length
        if length > limit:
            raise ValueError(f"{length} tokens do not fit the draft's context length of {limit}")
        for token in feed:
            if not 0 <= token < size:
                raise ValueError(f"token id is {token}, but the draft's vocabulary has {size} ids")
        self.truncate(keep_length)
        self.tokens.extend(feed)
        if self.counts is not None:
            for part, in_output in self._split_at(keep_length):
                self.counts.add(part, in_output=in_output)
        return length

    def truncate(self, length: int) -> None:
        """Truncate to ``length``, for example because a forward pass failed after ``advance``."""
        if self.counts is not None:
            for part, in_output in self._split_at(length):
                self.counts.remove(part, in_output=in_output)
        del self.tokens[length:]

    def allowed_mask(self) -> bytes | None:
        """Return the tokens that constraint and ``min_tokens`` allow next. None if all are
        allowed."""
        mask = None
        if self.constrained is not None:
            self.constrained.follow(self.output)
            mask = self.constrained.mask()
        if self._min_tokens_mask is None:
            return mask
        return self._min_tokens_mask.mask(mask, len(self.tokens) - self._prompt_length)

    def _split_at(
        self, start: int
    ) -> tuple[tuple[Sequence[int], bool], tuple[Sequence[int], bool]]:
        """Return the tokens from ``start`` on, separately for the prompt and the output."""
        middle = max(start, self._prompt_length)
        return (self.tokens[start:middle], False), (self.tokens[middle:], True)

    @property
    def prompt(self) -> Sequence[int]:
        return self.tokens[: self._prompt_length]

    @property
    def output(self) -> Sequence[int]:
        return self.tokens[self._prompt_length :]


def draft_chain(
    cache: TokenCache, places: int, draft: Callable[[int], tuple[Candidate, ...]]
) -> tuple[tuple[Candidate, ...], ...]:
    """Return the candidates of up to ``places`` consecutive positions.

    ``draft`` returns the candidates of a place, 0 for the next position. Meanwhile ``cache`` holds
    the first candidates of the places before it, because penalties and constraints depend on them.
    They are gone at the end. A place without candidates ends the chain."""
    length, found = len(cache.tokens), list[tuple[Candidate, ...]]()
    try:
        for place in range(places):
            if not (candidates := draft(place)):
                break
            found.append(candidates)
            if place + 1 < places:
                cache.advance(length + place, (candidates[0].token,))
    finally:
        cache.truncate(length)
    return tuple(found)
