"""A drafter without a model: it guesses from the text itself and from what was said before.

Theory of operation. Guesses come from ``core/protocol/text_guesses.py``. A drafter sees drafted
tokens as well as committed ones, and nobody tells it which is which. But whatever was drafted is
something that it *offered* at that position. So a token that it is fed where it never offered it
comes from the target, and then so does everything before it. A draft that is always right gives no
such sign; there a token counts as *settled* when the text is ``LAG`` tokens further, by when a
wrong one has mostly been taken back. Guesses are learned from settled text, and judged by it. Where
even that was wrong the text is cut back below ``settled``, which then says so.

Guesses below ``least_chance`` are not made, and where none is left the drafter has nothing to say:
the session rests until the next commit. Tables and chances belong to the drafter, whose agent
serves one user, and outlive a generation: below 2 MiB together, and an index of each text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from edgespec.core.ports import (
    Cancelled,
    Candidate,
    ModelInfo,
    StepCancelledError,
    never_cancelled,
)
from edgespec.core.protocol.constraint import Constraint, allows
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_guesses import (
    BEHIND,
    PromptLookup,
    TextChances,
    TextTables,
    common_length,
    named_tokens,
    pair_of,
)
from edgespec.device.drafters.token_cache import TokenCache

NAME = "lookup"
MOST_LEADERS = 4096
LEAST_CHANCE = 0.3
LAG = 32


class SettledText:
    """The tokens of one sequence and how many of them, from the first on, are settled."""

    def __init__(self, info: ModelInfo) -> None:
        self._cache = TokenCache(info)
        self.prompt_length = 0
        self.settled = 0
        self.kept = 0
        """How many leading tokens the last ``advance`` left as they were."""
        self._offered: dict[int, dict[int, float]] = {}
        """By position and token: the chance with which it was offered last."""

    @property
    def tokens(self) -> Sequence[int]:
        return self._cache.tokens

    def begin(self, prompt_length: int, constraint: Constraint | None = None) -> None:
        """Start an empty sequence. Raises ``ValueError`` when the prompt cannot fit."""
        # Nothing here counts penalties.
        self._cache.begin(prompt_length, SamplingParams(constraint=constraint))
        self.prompt_length = prompt_length
        self.settled = self.kept = 0
        self._offered = {}

    def mask(self) -> bytes | None:
        """As ``TokenCache.mask``."""
        return self._cache.mask()

    def advance(self, keep_length: int, feed: Sequence[int]) -> int:
        """Truncate to ``keep_length``, append ``feed``, return the new length. Raises
        ``ValueError`` as ``TokenCache.advance`` does, and then changes nothing."""
        before = list(self.tokens[keep_length:]) if keep_length >= 0 else []
        length = self._cache.advance(keep_length, feed)
        same = 0
        for old, new in zip(before, feed, strict=False):
            if old != new:
                break
            same += 1
        self.kept = keep_length + same
        settled = min(self.settled, self.kept)
        for position in range(length - 1, max(settled, keep_length) - 1, -1):
            if feed[position - keep_length] not in self._offered.get(position, ()):
                settled = position + 1
                break
        self.settled = max(settled, length - LAG)
        if len(self._offered) > LAG:
            self._offered = {at: ids for at, ids in self._offered.items() if at >= self.settled}
        return length

    def forget(self, length: int) -> None:
        """Truncate to ``length`` (a step did not end)."""
        self._cache.forget(length)
        self.settled = min(self.settled, length)
        self.kept = min(self.kept, length)

    def offer(self, guesses: Iterable[tuple[int, float]]) -> None:
        """These tokens are guessed for the next position, each with its chance."""
        self._offered.setdefault(len(self.tokens), {}).update(guesses)

    @property
    def reach(self) -> float:
        """The chance that all of the text is the target's: the product of those with which its
        tokens behind the settled ones were offered."""
        tokens, chance = self.tokens, 1.0
        for position in range(self.settled, len(tokens)):
            chance *= self._offered.get(position, {}).get(tokens[position], 1.0)
        return chance


@dataclass(frozen=True, slots=True)
class Guess:
    """A token named for the next position; ``cell`` is that of ``GuessChances``."""

    token: int
    cell: int
    chance: float

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.token, math.log(self.chance))


class TextGuesses:
    """Learns from one text after the other, and names guesses behind each."""

    def __init__(self, most_leaders: int = MOST_LEADERS) -> None:
        self.chances = TextChances()
        self._tables = TextTables(ngrams=True, most_leaders=most_leaders)
        self.begin()

    def twin(self) -> TextGuesses:
        """Of another text beside this one, with the same tables and chances."""
        twin = copy(self)
        twin.begin()
        return twin

    def begin(self) -> None:
        """Another text begins; what was learned stays."""
        self._lookup = PromptLookup()
        self._entered = 0
        self._matches: dict[int, int] = {}
        """By length of the text: where its match goes on."""
        self._pending: dict[int, tuple[Guess, ...]] = {}
        """By position: what was named there and is not judged yet."""

    def read(self, text: SettledText) -> None:
        """The text has changed: learn from what is settled now."""
        for by_length in (self._matches, self._pending):
            for at in [at for at in by_length if at > text.kept]:
                del by_length[at]
        tokens, settled = text.tokens, text.settled
        for position in [at for at in self._pending if at < settled]:
            for guess in self._pending.pop(position):
                self.chances.note(guess.cell, guess.token == tokens[position])
        self._matches = {at: place for at, place in self._matches.items() if at >= settled}
        lookup = self._lookup
        if lookup.known > settled:  # cut back: what is indexed is not there any more
            self._lookup = lookup = PromptLookup()
        if lookup.known < text.prompt_length:
            lookup.load(tokens, min(text.prompt_length, settled))
        for _ in range(lookup.known, settled):
            lookup.add(tokens)
        for at in range(max(self._entered, text.prompt_length, 2), settled):
            self._tables.enter(tokens, at)
        self._entered = max(self._entered, settled)

    def named(self, text: SettledText) -> tuple[Guess, ...]:
        """Guesses for the next position, at most ``RANKS``, likeliest first; all are judged later,
        whether they are offered or not."""
        tokens = text.tokens
        length, last = len(tokens), tokens[-1]
        matched, position = self._match(tokens)
        found = named_tokens(
            pair_of(tokens[length - 2] if length > 1 else -1, last),
            last,
            tokens[position] if matched else -1,
            matched,
            BEHIND if length > text.settled else 0,
            self._tables.ngrams.after if self._tables.ngrams and length > 1 else None,
            self._tables.recycled.after,
        )
        chances = self.chances.of
        guesses = [Guess(token, cell, chances[cell]) for cell, token, _ in found]
        guesses.sort(key=lambda guess: -guess.chance)
        self._pending[length] = tuple(guesses)
        return self._pending[length]

    def _match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The longest match known, and where it goes on; (0, 0): there is none."""
        length = len(tokens)
        if length < 2:
            return 0, 0
        going_on = self._matches.get(length - 1, -2) + 1
        latest = self._lookup.place(pair_of(tokens[length - 2], tokens[length - 1]))
        best, best_position = 0, 0
        for position in (going_on, latest):
            if 2 <= position < length:
                matched = common_length(tokens, position, length)
                if matched >= 2 and matched > best:
                    best, best_position = matched, position
        if best:
            self._matches[length] = best_position
        return best, best_position


class TextDrafter:
    """``Drafter`` of ``TextGuesses``; it only needs to know how large the vocabulary is.

    A step returns at most ``RANKS`` guesses, and none where no chance is ``least_chance``. What it
    returns depends on the text and on what was learned before, never on ``sampling``.
    """

    def __init__(self, info: ModelInfo, least_chance: float = LEAST_CHANCE) -> None:
        if not 0.0 <= least_chance <= 1.0:
            raise ValueError(f"least_chance is {least_chance}, but must be in [0, 1]")
        self._info = replace(info, name=NAME)
        self._least_chance = least_chance
        self._text = SettledText(info)
        self._guesses = TextGuesses()

    @property
    def info(self) -> ModelInfo:
        return self._info

    def twin(self) -> TextDrafter:
        """Another sequence, which shares what is learned (``ports.Twinned``)."""
        twin = TextDrafter(self._info, self._least_chance)
        twin._guesses = self._guesses.twin()
        return twin

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._text.begin(prompt_length, sampling.constraint)
        self._guesses.begin()

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        if cancelled():
            raise StepCancelledError("a lookup was cancelled before it began")
        self._text.advance(keep_length, feed)
        self._guesses.read(self._text)
        named = permitted(self._guesses.named(self._text), self._text)[:width]
        worth = [one for one in named if one.chance >= self._least_chance]
        self._text.offer((one.token, one.chance) for one in worth)
        return tuple([one.candidate for one in worth])

    def close(self) -> None:
        self._text.forget(0)


def permitted(named: tuple[Guess, ...], text: SettledText) -> tuple[Guess, ...]:
    """Those that the constraint of the text allows."""
    mask = text.mask()
    return named if mask is None else tuple([one for one in named if allows(mask, one.token)])
