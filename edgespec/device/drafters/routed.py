"""A router: the text's own guesses where they are good enough, else the model.

Theory of operation. At each step the text's guesses (``text_drafter.py``) are named first. Their
*kind* is the cell of the best one: how long its match is, or which table named it. For each kind it
is counted how often the model was right where such a guess stood, and where none stood
(``ModelRates``). A step is answered without the model

    where the guesses are as likely right as the model's, or as likely as not: what costs no time
    is followed by another guess at once, while a model's step can make the drafts miss a pass
    where the model is not worth its time: the chance that the text so far is the target's, times
    that of the model being right, is below ``LEAST_WORTH``. Without guesses, the session rests

Then the model's cache is behind, and it catches up with one longer feed when it is asked again (a
feed of 5 tokens takes about 1.4 times as long as one of 1). A feed longer than ``PREFILL_CHUNK``
is split: a chunk is fed, and guesses answer the step, so that a long prompt does not keep them
waiting. Where the model answers, the best guess takes the place of its last choice if it has been
right there more often. Passed over ``EXPLORE`` times, it is asked all the same, so that its rates
stay known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.core.ports import (
    PREFILL_CHUNK,
    Cancelled,
    Candidate,
    Drafter,
    ModelInfo,
    StepCancelledError,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.text_drafter import (
    LEAST_CHANCE,
    Guess,
    SettledText,
    TextGuesses,
    permitted,
)
from edgespec.device.drafters.token_cache import twin_of

TRUSTED = 0.5
LEAST_WORTH = 0.025
EXPLORE = 12
NO_GUESS = -1
_MEMORY, _PRIOR_WEIGHT = 0.98, 4.0
# The model is taken to be so good until it was judged: its choices together, first and second.
_MODEL_PRIOR, _FIRST_PRIOR, _SECOND_PRIOR = 0.8, 0.7, 0.1


class Rate:
    """How often something was right of late.

    Formula: (hits + prior * 4) / (trials + 4), where both lose a share of 0.02 at each trial. With
    a prior of 0.8, 2 hits in 4 trials give about (2 + 3.2) / (4 + 4) = 0.65.
    """

    def __init__(self) -> None:
        self._hits = self.trials = 0.0

    def note(self, hit: bool) -> None:
        self.trials = self.trials * _MEMORY + 1.0
        self._hits = self._hits * _MEMORY + hit

    def value(self, prior: float) -> float:
        return (self._hits + prior * _PRIOR_WEIGHT) / (self.trials + _PRIOR_WEIGHT)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the model answered at a position, and the guess that stood beside it."""

    kind: int
    answers: tuple[int, ...]
    guess: int | None


class ModelRates:
    """How good the model is beside guesses of each kind; it outlives a generation."""

    def __init__(self) -> None:
        self._overall, self._first = Rate(), Rate()
        self._of_kind: dict[int, Rate] = {}
        self._last_choice: dict[int, Rate] = {}
        self._sibling: dict[int, Rate] = {}
        self._passed_over: dict[int, int] = {}
        """By kind: steps in a row that the model was not asked."""

    def passes_over(self, kind: int, chance: float, reach: float) -> bool:
        """Whether guesses of this kind, with this chance of holding the target's token, answer the
        step behind a text that is the target's with the chance ``reach``. Asking counts."""
        if chance >= TRUSTED:
            return True
        rate = self._of_kind.setdefault(kind, Rate())
        its = rate.value(self._overall.value(_MODEL_PRIOR))
        if chance < its and reach * its >= LEAST_WORTH:
            return False
        passed_over = self._passed_over.get(kind, 0) + 1
        self._passed_over[kind] = passed_over % EXPLORE
        return passed_over < EXPLORE

    def chances(self, count: int) -> tuple[float, ...]:
        """Those of the model's choices."""
        first = self._first.value(_FIRST_PRIOR)
        rest = max(0.0, self._overall.value(_MODEL_PRIOR) - first)
        return (first, *(rest,) * (count - 1))

    def wants_sibling(self, kind: int) -> bool:
        """Whether a guess of this kind is right more often than the model's last choice."""
        sibling, last = self._sibling.get(kind), self._last_choice.get(kind)
        if sibling is None or last is None:
            return False
        return sibling.value(0.0) > last.value(_SECOND_PRIOR)

    def note(self, asked: _Asked, token: int) -> None:
        """The target's token where the model was asked."""
        hit = token in asked.answers
        self._overall.note(hit)
        self._first.note(token in asked.answers[:1])
        self._of_kind.setdefault(asked.kind, Rate()).note(hit)
        if asked.guess is not None and len(asked.answers) > 1 and asked.guess not in asked.answers:
            self._sibling.setdefault(asked.kind, Rate()).note(asked.guess == token)
            last = self._last_choice.setdefault(asked.kind, Rate())
            last.note(asked.answers[-1] == token)


class RoutedDrafter:
    """``Drafter`` over a model's drafter and the text's own guesses; ``info`` is the model's.

    ``fed`` is how many tokens the model was fed in the last step, 0 where it was not asked. Raises
    what the model raises.
    """

    def __init__(self, model: Drafter, least_chance: float = LEAST_CHANCE) -> None:
        self.fed = 0
        self._model, self._least_chance = model, least_chance
        self._text = SettledText(model.info)
        self._guesses, self._rates = TextGuesses(), ModelRates()
        self._asked: dict[int, _Asked] = {}
        """By position: what is not judged yet."""
        self._agreed = 0
        """How many leading tokens of the text the model has in its cache."""

    @property
    def info(self) -> ModelInfo:
        return self._model.info

    def twin(self) -> RoutedDrafter:
        """The model's twin behind a router that has learned, and learns, the same. Raises
        ``TypeError`` where the model has none."""
        twin = RoutedDrafter(twin_of(self._model), self._least_chance)
        twin._guesses, twin._rates = self._guesses.twin(), self._rates
        return twin

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
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
            raise StepCancelledError("a routed step was cancelled before it began")
        text = self._text
        text.advance(keep_length, feed)
        self._agreed = min(self._agreed, text.kept)
        self._guesses.read(text)
        self._judge()
        named = permitted(self._guesses.named(text), text)
        worth = [guess for guess in named[:width] if guess.chance >= self._least_chance]
        kind = worth[0].cell if worth else NO_GUESS
        chance = min(1.0, sum(guess.chance for guess in worth))
        self.fed = 0
        passed_over = self._rates.passes_over(kind, chance, text.reach)
        if not passed_over and len(text.tokens) - self._agreed <= PREFILL_CHUNK:
            return self._beside_model(worth[0] if worth else None, keep_length, width, cancelled)
        if not passed_over:
            self._ask(self._agreed + PREFILL_CHUNK, 1, keep_length, cancelled)
        text.offer((guess.token, guess.chance) for guess in worth)
        return tuple([guess.candidate for guess in worth])

    def close(self) -> None:
        self._text.forget(0)
        self._model.close()

    def _beside_model(
        self, best: Guess | None, keep_length: int, width: int, cancelled: Cancelled
    ) -> tuple[Candidate, ...]:
        """The model's choices, and the best guess in place of the last one where that is better."""
        length = len(self._text.tokens)
        answers = self._ask(length, width, keep_length, cancelled)
        kind, token = (NO_GUESS, None) if best is None else (best.cell, best.token)
        ids = tuple([candidate.token for candidate in answers])
        self._asked[length] = _Asked(kind, ids, token)
        chances = dict(zip(ids, self._rates.chances(len(ids)), strict=True))
        if best is not None and len(ids) > 1 and token not in ids:
            if self._rates.wants_sibling(kind):
                answers = (answers[0], best.candidate, *answers[1:-1])
                del chances[ids[-1]]
                chances[best.token] = best.chance
        self._text.offer(chances.items())
        return answers

    def _ask(
        self, length: int, width: int, keep_length: int, cancelled: Cancelled
    ) -> tuple[Candidate, ...]:
        """Feed the model what it lacks of the first ``length`` tokens; its answers."""
        keep = min(self._agreed, length - 1)
        self._agreed = keep
        try:
            answers = self._model.step(keep, self._text.tokens[keep:length], width, cancelled)
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
            self._rates.note(asked.pop(position), text.tokens[position])
