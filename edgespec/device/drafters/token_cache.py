"""What a drafter holds: its tokens, with the contract of ``Drafter.step`` checked in one place, the
window of them that a model looks at, and what a memory budget leaves of that.

Invariants: ``len(tokens)`` is the cached length, at most ``context_length``; every id is inside
the vocabulary. A refused step changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

from edgespec.core.device.memory import MemoryGuard
from edgespec.core.ports import Cancelled, Candidate, Drafter, ModelInfo, Twinned, never_cancelled
from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.constraint import ConstrainedText
from edgespec.core.protocol.sampling import HeldEnds, SamplingParams, TokenCounts

_log = logging.getLogger(__name__)


class TokenCache:
    """Ids of one sequence, with prompt and output told apart.

    ``counts`` are those of its tokens where the sampling has penalties, else None; ``constrained``
    is where it stands in the grammar of a constraint that this device has read."""

    def __init__(self, info: ModelInfo) -> None:
        self.sampling = SamplingParams()
        self.counts: TokenCounts | None = None
        self.constrained: ConstrainedText | None = None
        self._held: HeldEnds | None = None
        self._info = info
        self.tokens: list[int] = []
        self._prompt_length = 0

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        """Start an empty sequence. Raises ``ValueError`` when the prompt cannot fit."""
        bounded("prompt length", prompt_length, 1, self._info.context_length)
        self.tokens.clear()
        self._prompt_length = prompt_length
        self.sampling = sampling
        self.counts = TokenCounts(self._info.vocabulary_size) if sampling.penalised else None
        constraint, ends = sampling.constraint, self._info.eos_token_ids
        known = constraint is not None and constraint.matcher is not None and ends
        self.constrained = ConstrainedText(constraint, ends) if constraint and known else None
        size, least = self._info.vocabulary_size, sampling.min_tokens
        self._held = HeldEnds(sampling, size, ends) if least else None

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
        self.forget(keep_length)
        self.tokens.extend(feed)
        if self.counts is not None:
            for part, in_output in self._parts(keep_length):
                self.counts.add(part, in_output=in_output)
        return length

    def forget(self, length: int) -> None:
        """Truncate to ``length`` (a forward pass failed after ``advance``)."""
        if self.counts is not None:
            for part, in_output in self._parts(length):
                self.counts.remove(part, in_output=in_output)
        del self.tokens[length:]

    def mask(self) -> bytes | None:
        """Return what constraint and ``min_tokens`` allow behind the tokens; None: everything."""
        mask = None
        if self.constrained is not None:
            self.constrained.follow(self.output)
            mask = self.constrained.mask()
        if self._held is None:
            return mask
        return self._held.mask(mask, len(self.tokens) - self._prompt_length)

    def _parts(self, start: int) -> tuple[tuple[Sequence[int], bool], tuple[Sequence[int], bool]]:
        """What lies behind ``start``: that of the prompt and that of the output."""
        middle = max(start, self._prompt_length)
        return (self.tokens[start:middle], False), (self.tokens[middle:], True)

    @property
    def prompt(self) -> Sequence[int]:
        return self.tokens[: self._prompt_length]

    @property
    def output(self) -> Sequence[int]:
        return self.tokens[self._prompt_length :]


SINKS: Final = 4
"""So many first tokens of a text never leave: large models lean on them, whatever they say, and go
astray without (StreamingLLM, Xiao et al. 2023, section 3)."""


class DraftWindow:
    """Which tokens of a growing text a draft model holds keys and values of: the first ones
    (``sinks``) and the last ones, as if they were one text. Row ``i`` is token ``i`` of the text,
    and behind the sinks token ``i + skipped``. ``held`` rows are valid, at most ``size``.

    So a position inside the model is never beyond the window's size, however long the text is. When
    a text outgrows the window, a block of tokens behind the sinks leaves and the rows behind it
    move down: nothing is computed again. The end of the text is fed anew where a correction is
    older than the window, and where more is fed than the window holds.

    Rows that are not ``moving`` have no sinks either: the second half of the window is fed again
    when a text outgrows it, so a token costs one more token of prefill on average."""

    def __init__(self, size: int, *, moving: bool = False) -> None:
        self.moving = moving
        self.size = self.sinks = self.skipped = self.held = 0
        self.resize(size)

    @property
    def block(self) -> int:
        """How many rows leave at a time: to move the others costs the same behind one or many."""
        return max(1, self.size // (8 if self.moving else 2))

    def resize(self, size: int) -> None:
        """Hold at most so many rows. Those beyond are lost, and a step that would reach further
        back than before feeds its rows anew."""
        sinks = min(SINKS, size // 8) if self.moving else 0
        if size > self.size or sinks != self.sinks:
            self.clear()
        self.size, self.sinks = size, sinks

    def clear(self) -> None:
        """Nothing is held, of a text that begins."""
        self.skipped = self.held = 0

    def place(self, keep_length: int, length: int) -> int:
        """The text agrees in its first ``keep_length`` tokens with what was held, and is ``length``
        long. Returns how many rows behind the sinks are to leave the cache. Then ``held`` rows are
        valid, and those from ``held`` to ``length - skipped`` are to be fed."""
        sinks, kept = min(self.sinks, self.held, keep_length), keep_length - self.skipped
        if self.skipped and kept < self.sinks:  # a correction from before the window
            self._fill(sinks, length)
            return 0
        self.held = min(self.held, self.size, kept)
        excess = length - self.skipped - self.size
        if excess <= 0:
            return 0
        leaving = -(-excess // self.block) * self.block
        if not self.moving or self.held <= self.sinks + leaving:
            self._fill(sinks, length)
            return 0
        self.skipped += leaving
        self.held -= leaving
        return leaving

    def tokens(self, text: Sequence[int], start: int, end: int) -> Sequence[int]:
        """Those of rows ``start`` to ``end``."""
        sinks, skipped = self.sinks, self.skipped
        last = text[max(start, sinks) + skipped : max(end, sinks) + skipped]
        return [*text[start : min(end, sinks)], *last]

    def _fill(self, held: int, length: int) -> None:
        room = self.size if length <= self.size else max(1, self.size - self.block)
        self.skipped, self.held = max(0, length - room), held


def twin_of(drafter: Drafter) -> Drafter:
    """Another sequence on the weights of ``drafter`` (``ports.Twinned``). Raises ``TypeError``
    naming its class where it can have one only, and what the drafter raises without room."""
    if not isinstance(drafter, Twinned):
        raise TypeError(f"{type(drafter).__name__} holds one sequence only")
    return drafter.twin()


# --- below a memory budget ------------------------------------------------------------------------
#
# A governor is asked before steps, and the draft restricted. Measuring takes part of a millisecond,
# so it is done when time has passed or the step adds much. It happens in the drafter's own thread,
# where the drafter may be changed; nothing runs beside it that could die. A measurement that fails
# is taken for the last one plus what was added since.

MEASURE_EVERY_S: Final = 0.5
_MUCH_BYTES: Final = 1 << 20


@runtime_checkable
class Restrictable(Drafter, Protocol):
    """A drafter that can be bounded while it runs."""

    @property
    def held_tokens(self) -> int:
        """Rows that are resident."""

    def growth_bytes(self, length: int) -> int:
        """What a step that makes the text ``length`` long may add to what is resident."""

    def restrict(self, window: int, width: int) -> None:
        """Hold at most ``window`` rows, give at most ``width`` guesses; 0 rests."""


class CacheGroup:
    """The caches of one draft, which ``governor`` bounds together: it is to know that a row it
    takes away goes in each of them. ``measure`` gives the process's resident bytes, ``most`` says
    how many caches there may be, and ``budget_bytes`` is for whoever shows it."""

    def __init__(
        self,
        governor: MemoryGuard,
        measure: Callable[[], int],
        clock: Callable[[], float],
        most: int = 1,
        budget_bytes: int = 0,
    ) -> None:
        self.members: list[Restrictable] = []
        self.most, self.budget_bytes = most, budget_bytes
        self.governor, self._measure, self._clock = governor, measure, clock
        self._measured_at = -MEASURE_EVERY_S
        self._resident = 0
        self._failed = False

    def look(self, growth: int) -> None:
        """Before a step that may add so many bytes."""
        now = self._clock()
        if growth < _MUCH_BYTES and now - self._measured_at < MEASURE_EVERY_S:
            return
        self._measured_at = now
        try:
            self._resident = self._measure()
        except Exception as error:  # whatever a system says about itself, or does not
            self._resident += growth
            if not self._failed:
                self._failed = True
                _log.warning("this process's memory cannot be measured any more: %s", error)
        held = max(member.held_tokens for member in self.members)
        restriction = self.governor.observe(self._resident, growth, held, now)
        if restriction is None:
            return
        window, width = restriction.window, restriction.width
        told = "%d MiB resident: the draft may hold %d tokens and give %d guesses a step"
        _log.info(told, self._resident >> 20, window, width)
        for member in self.members:
            member.restrict(window, width)


class GuardedDrafter:
    """``inner`` as one of ``caches``."""

    def __init__(self, inner: Restrictable, caches: CacheGroup) -> None:
        self.inner, self.info, self.caches = inner, inner.info, caches
        self.begin, self.close = inner.begin, inner.close
        caches.members.append(inner)

    def twin(self) -> GuardedDrafter:
        """Another one of the same caches. Raises ``MemoryError`` when there is no room."""
        if len(self.caches.members) >= self.caches.most:
            raise MemoryError(f"the memory budget was planned with {self.caches.most} caches")
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
        self.caches.look(self.inner.growth_bytes(keep_length + len(feed)))
        return self.inner.step(keep_length, feed, width, cancelled)
