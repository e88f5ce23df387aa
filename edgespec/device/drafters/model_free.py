"""A drafter without a model: it guesses from the text itself and from what was said before.

Theory of operation. Three sources name tokens for the next position, the surest first:

    match      what stood behind the last tokens the last time they stood in prompt or output; the
               longest match is taken, counted to 12 tokens (prompt lookup decoding, Saxena 2023)
    n-grams    what followed the last pair of tokens in outputs, this one and those of earlier
               generations, in an LRU table (Cacheback, Ma, Gim and Zhong, EMNLP 2025)
    followers  what followed the last token alone (after Token Recycling, Luo et al., ACL 2025)

Each guess has a *chance*, counted by its kind, the length of its match, and whether it stands at
the end of the settled text or behind guesses (``core/verifier/guess_chances.py``). It is judged
when its position is settled (``settled_text.py``). Guesses below ``least_chance`` are not made, and
where none is left the drafter has nothing to say: the session rests until the next commit.

Tables and chances belong to the drafter, whose agent serves one user, and outlive a generation.
Bounds: ``MOST_LEADERS`` rows a table, below 2 MiB together; the index of one text about 170 bytes a
token and ``MOST_PAIRS`` entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from edgespec.core.ports import (
    Cancelled,
    Candidate,
    ModelInfo,
    StepCancelledError,
    never_cancelled,
)
from edgespec.core.protocol.constraint import allows
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.follower_tables import FollowerTable
from edgespec.core.verifier.guess_chances import (
    BEHIND,
    MATCH_CELLS,
    NGRAM_CELL,
    RANKS,
    RECYCLED_CELL,
    GuessChances,
)
from edgespec.core.verifier.prompt_lookup import LONGEST, PromptLookup, pair_of
from edgespec.device.drafters.settled_text import SettledText

NAME = "lookup"
MOST_LEADERS = 4096
LEAST_CHANCE = 0.3


@dataclass(frozen=True, slots=True)
class Guess:
    """A token named for the next position; ``cell`` is that of ``GuessChances``."""

    token: int
    cell: int
    chance: float

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.token, math.log(self.chance))


class ModelFreeGuesses:
    """Learns from one text after the other, and names guesses behind each."""

    def __init__(self, most_leaders: int = MOST_LEADERS) -> None:
        self.chances = GuessChances()
        self._ngrams = FollowerTable(most_leaders)
        self._followers = FollowerTable(most_leaders)
        self.begin()

    def twin(self) -> ModelFreeGuesses:
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
            self._ngrams.add(pair_of(tokens[at - 2], tokens[at - 1]), tokens[at])
            self._followers.add(tokens[at - 1], tokens[at])
        self._entered = max(self._entered, settled)

    def named(self, text: SettledText) -> tuple[Guess, ...]:
        """Guesses for the next position, at most ``RANKS``, likeliest first; all are judged later,
        whether they are offered or not."""
        tokens = text.tokens
        length, last = len(tokens), tokens[-1]
        before = tokens[length - 2] if length > 1 else -1
        place = BEHIND if length > text.settled else 0
        found: list[tuple[int, int]] = []
        matched, position = self._match(tokens)
        if matched:
            found.append((place + MATCH_CELLS[matched], tokens[position]))
        sources = ((NGRAM_CELL, self._ngrams.after(pair_of(before, last)) if length > 1 else ()),)
        for cell, others in (*sources, (RECYCLED_CELL, self._followers.after(last))):
            for token in others:
                if len(found) < RANKS and all(token != named for _, named in found):
                    found.append((place + cell + len(found), token))
        chances = self.chances.of
        guesses = [Guess(token, cell, chances[cell]) for cell, token in found]
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
                matched = _common(tokens, position)
                if matched >= 2 and matched > best:
                    best, best_position = matched, position
        if best:
            self._matches[length] = best_position
        return best, best_position


class ModelFreeDrafter:
    """``Drafter`` of ``ModelFreeGuesses``; it only needs to know how large the vocabulary is.

    A step returns at most ``RANKS`` guesses, and none where no chance is ``least_chance``. What it
    returns depends on the text and on what was learned before, never on ``sampling``.
    """

    def __init__(self, info: ModelInfo, least_chance: float = LEAST_CHANCE) -> None:
        if not 0.0 <= least_chance <= 1.0:
            raise ValueError(f"least_chance is {least_chance}, but must be in [0, 1]")
        self._info = replace(info, name=NAME)
        self._least_chance = least_chance
        self._text = SettledText(info)
        self._guesses = ModelFreeGuesses()

    @property
    def info(self) -> ModelInfo:
        return self._info

    def twin(self) -> ModelFreeDrafter:
        """Another sequence, which shares what is learned (``ports.Twinned``)."""
        twin = ModelFreeDrafter(self._info, self._least_chance)
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


def _common(tokens: Sequence[int], position: int) -> int:
    """How many tokens before ``position`` equal the last ones, counted to ``LONGEST``."""
    end, length, most = len(tokens), 0, min(LONGEST, position)
    while length < most and tokens[position - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length
