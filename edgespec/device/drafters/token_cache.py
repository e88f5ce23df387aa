"""The tokens a drafter holds, and the contract of ``Drafter.step`` checked in one place.

Invariants: ``len(tokens)`` is the cached length, at most ``context_length``; every id is inside
the vocabulary. A refused step changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.ports import Drafter, ModelInfo, Twinned
from edgespec.core.protocol.constraint import ConstrainedText
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.sampling.token_counts import TokenCounts


class TokenCache:
    """Ids of one sequence, with prompt and output told apart.

    ``counts`` are those of its tokens where the sampling has penalties, else None; ``constrained``
    is where it stands in the grammar of a constraint that this device has read.
    """

    def __init__(self, info: ModelInfo) -> None:
        self.sampling = SamplingParams()
        self.counts: TokenCounts | None = None
        self.constrained: ConstrainedText | None = None
        self._info = info
        self.tokens: list[int] = []
        self._prompt_length = 0

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        """Start an empty sequence. Raises ``ValueError`` when the prompt cannot fit."""
        limit = self._info.context_length
        if not 1 <= prompt_length <= limit:
            raise ValueError(f"prompt length is {prompt_length}, but must be in [1, {limit}]")
        self.tokens.clear()
        self._prompt_length = prompt_length
        self.sampling = sampling
        self.counts = TokenCounts(self._info.vocabulary_size) if sampling.penalised else None
        constraint, ends = sampling.constraint, self._info.eos_token_ids
        known = constraint is not None and constraint.matcher is not None and ends
        self.constrained = ConstrainedText(constraint, ends) if constraint and known else None

    def advance(self, keep_length: int, feed: Sequence[int]) -> int:
        """Truncate to ``keep_length``, append ``feed``, return the new length.

        Raises ``ValueError`` naming the value and the limit.
        """
        if not 0 <= keep_length <= len(self.tokens):
            raise ValueError(
                f"keep_length is {keep_length}, but {len(self.tokens)} tokens are cached"
            )
        if not feed:
            raise ValueError("feed must hold at least one token")
        length = keep_length + len(feed)
        if length > self._info.context_length:
            raise ValueError(
                f"{length} tokens do not fit the draft's context length"
                f" of {self._info.context_length}"
            )
        for token in feed:
            if not 0 <= token < self._info.vocabulary_size:
                raise ValueError(
                    f"token id is {token}, but the draft's vocabulary has"
                    f" {self._info.vocabulary_size} ids"
                )
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
        """What the constraint allows behind the tokens; None: it says nothing here."""
        if self.constrained is None:
            return None
        self.constrained.follow(self.output)
        return self.constrained.mask()

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

    def __len__(self) -> int:
        return len(self.tokens)


class DraftWindow:
    """Which tokens of a growing text a draft model holds keys and values of: the last ones. Row
    ``i`` is the token at position ``first + i``; ``held`` rows are valid, at most ``size``.

    So a position inside the model is never beyond the window's size, however long the text is. A
    text that outgrows the window slides it: the second half of what may be held is fed again from
    row 0 (its keys were rotated for other positions), and as many tokens fit until the next time.
    A token so costs one more token of prefill on average.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.first = self.held = 0

    def clear(self) -> None:
        """Nothing is held, of a text that begins."""
        self.first = self.held = 0

    def place(self, keep_length: int, length: int) -> int:
        """The text agrees in its first ``keep_length`` tokens with what was held, and is ``length``
        long: the position from which on it has to be fed. Everything before that, from ``first``
        on, is held."""
        self.held = min(self.held, max(0, keep_length - self.first), self.size)
        if length <= self.size and keep_length < self.first:
            self.clear()  # it fits again as a whole
        elif keep_length < self.first or length - self.first > self.size:
            self.first, self.held = max(0, length - max(1, self.size // 2)), 0
        return self.first + self.held


def twin_of(drafter: Drafter) -> Drafter:
    """Another sequence on the weights of ``drafter`` (``ports.Twinned``). Raises ``TypeError``
    naming its class where it can have one only, and what the drafter raises without room."""
    if not isinstance(drafter, Twinned):
        raise TypeError(f"{type(drafter).__name__} holds one sequence only")
    return drafter.twin()
