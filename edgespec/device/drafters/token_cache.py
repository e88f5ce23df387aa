"""The tokens of a drafter: their cache, the window that a model looks at, and the memory budget.

The contract of ``Drafter.step`` is checked here, for all drafters. Invariants: ``len(tokens)`` is
the cached length, at most ``context_length``; every id is inside the vocabulary. A refused step
changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

from edgespec.core.device.memory import MemoryGuard
from edgespec.core.ports import Cancelled, Candidate, Drafter, ModelInfo, Twinned, never_cancelled
from edgespec.core.protocol.checks import check_range
from edgespec.core.protocol.constraint import ConstrainedText
from edgespec.core.protocol.sampling import MinTokensMask, SamplingParams, TokenCounts

_log = logging.getLogger(__name__)


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


SINKS: Final = 4
"""First tokens of a sequence that never leave the window. Large models put much of their attention
on them, whatever they are, and fail without them (StreamingLLM, Xiao et al. 2023, section 3)."""


class DraftWindow:
    """The tokens of a growing sequence whose keys and values a draft model holds.

    They are the first ones (``sinks``) and the last ones, as if they were one sequence. Row ``i``
    is token ``i`` for the sinks, and token ``i + skipped`` behind them. The first ``held_rows``
    rows are valid, at most ``size``.

    So a position inside the model is never beyond the window's size, however long the sequence is.
    When a sequence outgrows the window, a block of tokens behind the sinks leaves and the rows
    behind it move down: nothing is computed again. The end of the sequence is fed again if a
    correction is older than the window, or if more is fed than the window holds.

    If the rows cannot move (``can_move`` is False), there are no sinks either. The second half of
    the window is then fed again when a sequence outgrows it, so a token costs one more token of
    prefill on average."""

    def __init__(self, size: int, *, can_move: bool = False) -> None:
        self.can_move = can_move
        self.size = self.sinks = self.skipped = self.held_rows = 0
        self.resize(size)

    @property
    def block_rows(self) -> int:
        """Number of rows that leave at a time. Moving the others costs the same for one or for
        many."""
        return max(1, self.size // (8 if self.can_move else 2))

    def resize(self, size: int) -> None:
        """Hold at most ``size`` rows.

        Rows beyond it are lost, and a step that needs them feeds them again."""
        sinks = min(SINKS, size // 8) if self.can_move else 0
        if size > self.size or sinks != self.sinks:
            self.clear()
        self.size, self.sinks = size, sinks

    def clear(self) -> None:
        """Hold nothing, because another sequence begins."""
        self.skipped = self.held_rows = 0

    def move_to(self, keep_length: int, length: int) -> int:
        """Move the window to the end of the sequence and return how many rows behind the sinks
        leave.

        The sequence agrees with the held rows in its first ``keep_length`` tokens and is ``length``
        long. Afterwards ``held_rows`` rows are valid, and the rows from there to
        ``length - skipped`` have to be fed."""
        sinks, kept = min(self.sinks, self.held_rows, keep_length), keep_length - self.skipped
        if self.skipped and kept < self.sinks:  # The correction is from before the window.
            self._refill(sinks, length)
            return 0
        self.held_rows = min(self.held_rows, self.size, kept)
        excess = length - self.skipped - self.size
        if excess <= 0:
            return 0
        leaving = -(-excess // self.block_rows) * self.block_rows
        if not self.can_move or self.held_rows <= self.sinks + leaving:
            self._refill(sinks, length)
            return 0
        self.skipped += leaving
        self.held_rows -= leaving
        return leaving

    def tokens(self, text: Sequence[int], start: int, end: int) -> Sequence[int]:
        """Return the tokens of rows ``start`` to ``end``."""
        sinks, skipped = self.sinks, self.skipped
        last = text[max(start, sinks) + skipped : max(end, sinks) + skipped]
        return [*text[start : min(end, sinks)], *last]

    def _refill(self, held: int, length: int) -> None:
        room = self.size if length <= self.size else max(1, self.size - self.block_rows)
        self.skipped, self.held_rows = max(0, length - room), held


def twin_of(drafter: Drafter) -> Drafter:
    """Return another sequence on the weights of ``drafter`` (``ports.Twinned``).

    Raises ``TypeError`` naming its class if it can have only one, and the drafter's own error if
    there is no room."""
    if not isinstance(drafter, Twinned):
        raise TypeError(f"{type(drafter).__name__} holds one sequence only")
    return drafter.twin()


# --- a draft within a memory budget ---------------------------------------------------------------
#
# The memory guard is consulted before steps, and restricts the draft. A measurement takes part of a
# millisecond, so it is made when time has passed or the step adds much. It happens in the drafter's
# own thread, where the drafter may be changed, so no watching thread is needed that could fail. If
# a measurement fails, the last one counts, plus all growth since.

MEASURE_EVERY_S: Final = 0.5
_LARGE_GROWTH_BYTES: Final = 1 << 20


@runtime_checkable
class Restrictable(Drafter, Protocol):
    """A drafter that can be bounded while it runs."""

    @property
    def held_tokens(self) -> int:
        """Number of rows that are resident."""

    def growth_bytes(self, length: int) -> int:
        """Return the bytes that a step may add to the resident memory.

        ``length`` is the length of the sequence after the step."""

    def restrict(self, window: int, width: int) -> None:
        """Hold at most ``window`` rows and give at most ``width`` candidates. A window of 0
        rests."""


class CacheGroup:
    """The caches of one draft, which one memory guard bounds together.

    A row that the guard takes away is taken from every cache. ``measure`` returns the resident
    bytes of the process, ``max_caches`` is the largest number of caches, and ``budget_bytes`` is
    for display."""

    def __init__(
        self,
        guard: MemoryGuard,
        measure: Callable[[], int],
        clock: Callable[[], float],
        max_caches: int = 1,
        budget_bytes: int = 0,
    ) -> None:
        self.members: list[Restrictable] = []
        self.max_caches, self.budget_bytes = max_caches, budget_bytes
        self.guard, self._measure, self._clock = guard, measure, clock
        self._measured_at = -MEASURE_EVERY_S
        self._resident = 0
        self._has_failed = False

    def check(self, growth: int) -> None:
        """Measure, if it is time, before a step that may add ``growth`` bytes, and restrict the
        draft."""
        now = self._clock()
        if growth < _LARGE_GROWTH_BYTES and now - self._measured_at < MEASURE_EVERY_S:
            return
        self._measured_at = now
        try:
            self._resident = self._measure()
        except Exception as error:  # Systems differ in the errors that they raise here.
            self._resident += growth
            if not self._has_failed:
                self._has_failed = True
                _log.warning("this process's memory cannot be measured any more: %s", error)
        held = max(member.held_tokens for member in self.members)
        restriction = self.guard.observe(self._resident, growth, held, now)
        if restriction is None:
            return
        window, width = restriction.window, restriction.width
        text = "%d MiB resident: the draft may hold %d tokens and propose %d candidates a step"
        _log.info(text, self._resident >> 20, window, width)
        for member in self.members:
            member.restrict(window, width)


class GuardedDrafter:
    """The drafter ``inner`` as a member of ``caches``."""

    def __init__(self, inner: Restrictable, caches: CacheGroup) -> None:
        self.inner, self.info, self.caches = inner, inner.info, caches
        self.begin, self.close = inner.begin, inner.close
        caches.members.append(inner)

    def twin(self) -> GuardedDrafter:
        """Return a twin in the same caches. Raises ``MemoryError`` if there is no room."""
        if len(self.caches.members) >= self.caches.max_caches:
            raise MemoryError(f"the memory budget was planned with {self.caches.max_caches} caches")
        inner = twin_of(self.inner)
        assert isinstance(inner, Restrictable)
        return GuardedDrafter(inner, self.caches)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        self.caches.check(self.inner.growth_bytes(keep_length + len(feed)))
        return self.inner.step(keep_length, feed, width, cancelled)
