"""A drafter that guesses from the text itself and from what was said before, with or without a
model beside it.

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

*Beside a model* the kind of a step is the cell of its best guess: how long its match is, or which
table named it. For each kind it is counted how often the model was right where such a guess stood,
and where none stood. A step is answered without the model

    where the guesses are as likely right as the model's, or as likely as not: what costs no time
    is followed by another guess at once, while a model's step can make the drafts miss a pass
    where the model is not worth its time: the chance that the text so far is the target's, times
    that of the model being right, is below ``LEAST_WORTH``. Without guesses, the session rests

Then the model's cache is behind, and it catches up with one longer feed when it is asked again (a
feed of 5 tokens takes about 1.4 times as long as one of 1). A feed longer than ``PREFILL_CHUNK``
is split: a chunk is fed, and guesses answer the step, so that a long prompt does not keep them
waiting. Passed over ``EXPLORE`` times, the model is asked all the same, so that its rates stay
known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

from edgespec.core.ports import (
    PREFILL_CHUNK,
    Cancelled,
    Candidate,
    Drafter,
    ModelInfo,
    StepCancelledError,
    never_cancelled,
)
from edgespec.core.protocol.constraint import Constraint, allows
from edgespec.core.protocol.estimators import DecayedRate
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
from edgespec.device.drafters.token_cache import TokenCache, twin_of

NAME = "lookup"
MOST_LEADERS = 4096
LEAST_CHANCE = 0.3
LAG = 32
TRUSTED = 0.5
LEAST_WORTH = 0.025
EXPLORE = 12
NO_GUESS = -1
_rate = partial(DecayedRate, memory=0.98, weight=4.0)
# The model is taken to be so good until it was judged: its choices together, and its first.
_MODEL_PRIOR, _FIRST_PRIOR = 0.8, 0.7


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


class ModelRates:
    """How good the model is beside guesses of each kind; it outlives a generation."""

    def __init__(self) -> None:
        self._overall, self._first = _rate(), _rate()
        self._of_kind: dict[int, DecayedRate] = {}
        self._passed_over: dict[int, int] = {}
        """By kind: steps in a row that the model was not asked."""

    def passes_over(self, kind: int, chance: float, reach: float) -> bool:
        """Whether guesses of this kind, with this chance of holding the target's token, answer the
        step behind a text that is the target's with the chance ``reach``. Asking counts."""
        if chance >= TRUSTED:
            return True
        rate = self._of_kind.setdefault(kind, _rate())
        its = rate.rate(self._overall.rate(_MODEL_PRIOR))
        if chance < its and reach * its >= LEAST_WORTH:
            return False
        passed_over = self._passed_over.get(kind, 0) + 1
        self._passed_over[kind] = passed_over % EXPLORE
        return passed_over < EXPLORE

    def chances(self, count: int) -> tuple[float, ...]:
        """Those of the model's choices."""
        first = self._first.rate(_FIRST_PRIOR)
        rest = max(0.0, self._overall.rate(_MODEL_PRIOR) - first)
        return (first, *(rest,) * (count - 1))

    def note(self, kind: int, answers: tuple[int, ...], token: int) -> None:
        """What the model answered, and the target's token."""
        hit = token in answers
        self._overall.add(hit)
        self._first.add(token in answers[:1])
        self._of_kind.setdefault(kind, _rate()).add(hit)


class TextDrafter:
    """``Drafter`` of ``TextGuesses``, and of ``model`` where there is one, whose ``info`` it has
    then; alone it only needs to know how large the vocabulary is.

    Without the model a step returns at most ``RANKS`` guesses, and none where no chance is
    ``least_chance``; they depend on the text and on what was learned before, never on ``sampling``.
    ``fed`` is how many tokens the model was fed in the last step. Raises what the model raises.
    """

    def __init__(
        self, info: ModelInfo, least_chance: float = LEAST_CHANCE, model: Drafter | None = None
    ) -> None:
        if not 0.0 <= least_chance <= 1.0:
            raise ValueError(f"least_chance is {least_chance}, but must be in [0, 1]")
        self.fed = 0
        self._info = replace(info, name=NAME) if model is None else model.info
        self._least_chance, self._model = least_chance, model
        self._text = SettledText(info)
        self._guesses, self._rates = TextGuesses(), ModelRates()
        self._asked: dict[int, tuple[int, tuple[int, ...]]] = {}
        """By position, until it is judged: the kind of step, and the model's answers."""
        self._agreed = 0
        """How many leading tokens of the text the model has in its cache."""

    @property
    def info(self) -> ModelInfo:
        return self._info

    def twin(self) -> TextDrafter:
        """Another sequence, which shares what is learned (``ports.Twinned``). Raises ``TypeError``
        where the model has none."""
        model = None if self._model is None else twin_of(self._model)
        twin = TextDrafter(self._info, self._least_chance, model)
        twin._guesses, twin._rates = self._guesses.twin(), self._rates
        return twin

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        if self._model is not None:
            self._model.begin(prompt_length, sampling)
        self._text.begin(prompt_length, sampling.constraint)
        self._guesses.begin()
        self._asked.clear()
        self._agreed = 0

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        if cancelled():
            raise StepCancelledError("a step without a model was cancelled before it began")
        text = self._text
        text.advance(keep_length, feed)
        self._agreed = min(self._agreed, text.kept)
        self._guesses.read(text)
        self._judge()
        mask = text.mask()
        named = self._guesses.named(text)
        allowed = [one for one in named if mask is None or allows(mask, one.token)][:width]
        worth = [one for one in allowed if one.chance >= self._least_chance]
        self.fed = 0
        if self._model is not None:
            kind = worth[0].cell if worth else NO_GUESS
            chance = min(1.0, sum(guess.chance for guess in worth))
            if not self._rates.passes_over(kind, chance, text.reach):
                length = len(text.tokens)
                if length - self._agreed <= PREFILL_CHUNK:
                    return self._ask(self._model, kind, length, keep_length, width, cancelled)
                part = self._agreed + PREFILL_CHUNK
                self._fed(self._model, part, keep_length, 1, cancelled)
        text.offer((one.token, one.chance) for one in worth)
        return tuple([one.candidate for one in worth])

    def close(self) -> None:
        self._text.forget(0)
        if self._model is not None:
            self._model.close()

    def _ask(
        self,
        model: Drafter,
        kind: int,
        length: int,
        keep_length: int,
        width: int,
        cancelled: Cancelled,
    ) -> tuple[Candidate, ...]:
        answers = self._fed(model, length, keep_length, width, cancelled)
        ids = tuple([candidate.token for candidate in answers])
        self._asked[length] = kind, ids
        self._text.offer(zip(ids, self._rates.chances(len(ids)), strict=True))
        return answers

    def _fed(
        self, model: Drafter, length: int, keep_length: int, width: int, cancelled: Cancelled
    ) -> tuple[Candidate, ...]:
        """Feed the model what it lacks of the first ``length`` tokens; its answers."""
        keep = self._agreed = min(self._agreed, length - 1)
        try:
            answers = model.step(keep, self._text.tokens[keep:length], width, cancelled)
        except BaseException:
            self._text.forget(keep_length)
            self._agreed = min(keep, keep_length)
            raise
        self._agreed, self.fed = length, length - keep
        return answers

    def _judge(self) -> None:
        text, asked = self._text, self._asked
        for position in [at for at in asked if at > text.kept]:
            del asked[position]
        for position in [at for at in asked if at < text.settled]:
            self._rates.note(*asked.pop(position), text.tokens[position])
