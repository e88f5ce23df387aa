"""The verifier drafts too: how many steps its own draft model runs before a pass, and for whom.

Theory of operation. A session that is to take part in the next pass has a *path*: the likeliest
nodes that are there, of its device or from the text. The verifier's draft model may add a *chain*
behind it. Its steps are packed: one step guesses one token more for every session in it. They run
before the pass, in a *round*, and one sum says when to stop (goodput, as in SmartSpec, arXiv
2406.14066, which chooses one length for all; here each step chooses its sessions, and knows how
sure the draft was of the guesses before):

    a step for the sessions A pays while   mean over A of p_i  >  x * (1 + max(r, x / 4)),
    x = r + G * step_s / |A|,   r = G * row_s

with p_i the chance that session i's text goes through its chain so far and the next guess, row_s
what the session's row takes in the step and in the pass, step_s what the step takes besides, and G
the tokens a second that the pass would bring if the round ended now. G is larger by the prompts
that wait for the pass, and leaves out the time that prompt rows take (``row_price.py``). So x is
what a session's part of the step costs, in tokens. A row costs once more, since a miss falls on
those who have only the longer pass of it; and a dear step has to be more than worth it, for chances
are estimates, too good for the texts that are hardest to guess. A session is in A if p_i is more
than its row costs, and enough for the node to be let into the pass. Each p_i falls with every step,
so the first step that does not pay ends the round. One session, passes of 25 ms and steps of 2.5
ms, guesses right with 0.88, rows for nothing: G begins at 40 tokens a second, so the first step has
to bring 0.10 of a token. After eight steps it is 5.7 tokens in 45 ms: the next has to bring 0.34,
and 0.88**9 is 0.32.

Each step names ``CHOICES`` tokens for its place. The chain goes on with the best of them; the
others become nodes beside it if they are worth their rows (siblings without replacement, as in RSD,
arXiv 2402.14160): where the chain is wrong, one of them is often right.

What the device brings does not count against a step. It would have a pass later what the chain
brings now, so eight devices kept each other's verifier from drafting, at 0.83 of its speed.

A prompt is read if the guesses behind it repay its rows within ``PAID_BACK_IN`` passes: on a full
verifier, whose passes go to prompts, they do not.

Chances come from what was counted (``estimators.GuessChances``): of a guess that is not made yet,
how often this session's guesses were right; once it is made, how often guesses of that confidence
were. They are kept for greedy and sampled texts apart, for all sessions together, and a session's
own rate begins at everybody's. Where nothing pays, one step in ``PROBE_EVERY`` passes is run all
the same, so that it is noticed when that changes; a step that is longer than a pass as much more
seldom.

A step may bring no guess at all (the model has no room, does not know a token of the text, or
computes no numbers), after which it has to be fed the whole text again. Such a session has no chain
for ``FIRST_REST`` passes, then for twice as many, up to ``MOST_REST``. When ``EMPTY_ROUNDS`` rounds
in a row brought no guess for anybody, the model rests in the same way for all, from ``PROBE_EVERY``
passes on, and is tried on the shortest text. The operator is told when it begins to rest, and when
it guesses again.

A target that speculates by itself (vLLM) proposes a chain behind each pass instead; the same sum
chooses its length beforehand, by the mean chance alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Final

from edgespec.core.protocol.estimators import (
    GUESSED_STEP_SHARE,
    DecayedRate,
    GuessChances,
    MovingAverage,
    SlopeEstimator,
)
from edgespec.core.protocol.work import Candidate, DraftStep
from edgespec.core.statically_frozen import statically_frozen

LONGEST_CHAIN: Final = 16
MOST_STEPS: Final = 4
"""Of a round that prompts of the target wait for."""
CATCH_UP: Final = 32
"""A sequence that lacks more tokens than this is fed apart from the guessing, like a prompt."""
PROMPT_ROWS: Final = 512
"""Then at most so many tokens of it a round."""
PROMPT_SHARE: Final = 0.25
"""Of the time of a pass, what a round spends on prompts, once the time of a row is known; at most
``MOST_PROMPT_ROWS``."""
MOST_PROMPT_ROWS: Final = 4096
PAID_BACK_IN: Final = 32
PROBE_EVERY: Final = 64
FIRST_REST: Final = 8
MOST_REST: Final = 512
EMPTY_ROUNDS: Final = 8
FIRST_RATE: Final = 0.7
"""Guesses are taken to be right so often until some were judged, and so few trials count as much:
a draft that is always wrong is given up after twenty."""
LEAST_PASS_S: Final = 1e-6
"""A clock may say that a pass took no time."""
SURE_RATE: Final = 0.98
"""No chain is taken to be better than that: a longer one costs little, and a miss is dear."""

CHOICES: Final = 4
OTHER_RATE: Final = 0.05
"""Other choices are taken to be right so often until some were judged."""
LEAST_OTHER: Final = 0.02
"""Those that are right less often are not looked at."""

_MEMORY, _EVERYBODYS_WEIGHT, _OWN_WEIGHT = 0.98, 3.0, 6.0


class ChainChances:
    """How likely guesses of the draft model are right: of one kind of text, greedy or sampled, for
    all sessions of a verifier."""

    def __init__(self) -> None:
        self.by_confidence = GuessChances()
        self.rate = DecayedRate(_MEMORY, _EVERYBODYS_WEIGHT)


class ChainRecord:
    """One session's chain: what the draft model's cache holds of its text, what it guessed behind
    it, and how often it was right here."""

    def __init__(self, chances: ChainChances) -> None:
        self.tokens: tuple[int, ...] = ()
        """What is guessed behind the text: a path of other sources' guesses, then the model's."""
        self._everybodys = chances
        self._rate = DecayedRate(_MEMORY, _OWN_WEIGHT)
        self._path: tuple[int, ...] = ()
        self._reaches: list[float] = []
        """Of each token of the path, and then of the chain, that the text goes through it."""
        self._guesses: tuple[tuple[Candidate, ...], ...] = ()
        """The chain, as in ``Chain``, where the model says how sure it is."""
        self._cached: list[int] = []
        self._checked = 0
        """So many of the cached tokens are known to be the text's."""
        self._empty_rounds = self._rests = 0
        """Rounds in a row that brought no guess here, and passes for which there is no chain."""

    @property
    def rate(self) -> float:
        """The chance that a guess is right before it is made."""
        return min(SURE_RATE, self._rate.rate(self._everybodys.rate.rate(FIRST_RATE)))

    def begin(
        self, key: str, text: Sequence[int], path: tuple[int, ...], reaches: list[float], room: int
    ) -> ChainStart | None:
        """Take part in a round. ``path`` is the likeliest one behind ``text``, of whose tokens
        ``reaches`` are the chances; at most ``room`` nodes may lie on it. None: there is no room.

        The chain begins where a guess is expected to bring most: behind the path's last token, or
        before one that is right less often than the model is."""
        if self._rests:
            return None
        rate, at, most = self.rate, 0, 0.0
        for place, reach in enumerate((1.0, *reaches)):
            brings = reach * rate - (reaches[place] if place < len(path) else 0.0)
            if brings > most:
                at, most = place, brings
        length = min(LONGEST_CHAIN, room - at)
        if length <= 0:
            return None
        self._path, self._reaches = path[:at], reaches[:at]
        keep, feed = self._missing(text)
        guess = len(feed) <= CATCH_UP
        step = DraftStep(key, keep, feed if guess else feed[:PROMPT_ROWS], guess)
        return ChainStart(
            step,
            reach=reaches[at - 1] if at else 1.0,
            rate=rate,
            most=length,
            missing=len(feed),
            chances=self._everybodys.by_confidence,
            expected=1.0 + sum(reaches),
        )

    def _missing(self, text: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """How many cached tokens stay when the sequence goes on with ``text`` and the path, and
        what it has to be fed: one token at least."""
        cached, path, at, end = self._cached, self._path, self._checked, len(text)
        most = min(len(cached), end)
        while at < most and cached[at] == text[at]:
            at += 1
        self._checked = at
        if at == end:
            most = min(len(cached), end + len(path))
            while at < most and cached[at] == path[at - end]:
                at += 1
        keep = min(at, end + len(path) - 1)
        return keep, (*text[keep:end], *path[max(0, keep - end) :])

    def drafted(self, chain: Chain) -> None:
        """Note what the round did."""
        if chain.fed is None:
            self._cached, self._checked = [], 0
        else:
            self._cached[chain.keep_length :] = chain.fed
            self._checked = min(self._checked, chain.keep_length)
        if chain.guesses:
            self._empty_rounds = 0
        elif chain.fed is None:
            self._rests = min(MOST_REST, FIRST_REST << self._empty_rounds)
            self._empty_rounds = min(self._empty_rounds + 1, 16)
        if chain.guesses:
            rate, chance = self.rate, self._everybodys.by_confidence.chance
            self._guesses, firsts = chain.guesses, [one[0] for one in chain.guesses]
            tokens = tuple([one.token for one in firsts])
            self._guess(tokens, [chance(0, one.logprob, rate) for one in firsts])

    def propose(self, tokens: tuple[int, ...]) -> None:
        """The target's own speculator guesses these behind the text, and does not say how sure it
        is."""
        self._path, self._reaches, self._guesses = (), [], ()
        self._guess(tokens, [self.rate] * len(tokens))

    def _guess(self, tokens: tuple[int, ...], chances: Sequence[float]) -> None:
        self.tokens = self._path + tokens
        reach = self._reaches[-1] if self._reaches else 1.0
        for chance in chances:
            reach *= chance
            self._reaches.append(reach)

    def worth(self, least_chance: float, depth: int) -> tuple[list[int], list[int], list[float]]:
        """The nodes that are at least so likely right, none deeper than ``depth``: tokens, parents
        as in ``PassRequest``, chances. First the chain, then the other choices beside it."""
        reaches = self._reaches[:depth]
        count = next((at for at, one in enumerate(reaches) if one < least_chance), len(reaches))
        tokens, parents = list(self.tokens[:count]), list(range(-1, count - 1))
        chances, chance = reaches[:count], self._everybodys.by_confidence.chance
        least = max(least_chance, LEAST_OTHER)
        for place, choices in enumerate(self._guesses, len(self._path)):
            if place > count or place >= depth:
                break
            before = reaches[place - 1] if place else 1.0
            for rank, one in enumerate(choices[1:], 1):
                its = before * chance(rank, one.logprob, OTHER_RATE)
                if its >= least:
                    tokens.append(one.token)
                    parents.append(place - 1)
                    chances.append(its)
        return tokens, parents, chances

    def note_no_guess(self) -> None:
        """The target's own speculator ran and proposed nothing for this session."""
        self._rate.add(False)
        self._everybodys.rate.add(False)

    def judge(self, committed: Sequence[int]) -> None:
        """The text went on with these tokens: learn which guesses they confirm, and drop them."""
        self._rests = max(0, self._rests - 1)
        start = len(self._path)
        for at, (guess, token) in enumerate(zip(self.tokens, committed, strict=False)):
            hit = guess == token
            if at >= start:
                self._rate.add(hit)
                self._everybodys.rate.add(hit)
                for rank, one in enumerate(self._guesses[at - start] if self._guesses else ()):
                    right = one.token == token
                    self._everybodys.by_confidence.add(rank, one.logprob, hit=right)
            if not hit:
                break
        self.tokens = self._path = self._guesses = ()
        self._reaches = []


@statically_frozen
class ChainStart:
    """A session that may take part in a round."""

    step: DraftStep
    """Its first step. One that only feeds (``DraftStep.guess`` False) is not continued."""
    reach: float
    """The chance that its text goes through all that is fed."""
    rate: float
    """The chance that a guess behind that is right, before it is made."""
    most: int
    """Guesses at most."""
    missing: int
    """Tokens of its text that the model has not read."""
    chances: GuessChances = field(repr=False)
    expected: float
    """Tokens that it has of the pass without a chain."""


@statically_frozen
class RoundTimes:
    """Seconds, as measured."""

    pass_s: float
    """Of a pass, but what its prompt rows and the verifier's own guesses take."""
    step_s: float
    step_row_s: float
    pass_row_s: float
    prompt_rows: int
    """How many tokens of prompts a round may feed."""
    held_up: float = 1.0
    """As of ``RowPriceKeeper``: prompts that wait for the target wait for the round too."""
    least_chance: float = 0.0
    """That a node has to be right with to be let into the pass."""
    most_steps: int = LONGEST_CHAIN


@statically_frozen
class Chain:
    """What a round did for one session: ``fed`` went into its cache behind ``keep_length``; None:
    the model had no room for it."""

    key: str
    keep_length: int
    fed: tuple[int, ...] | None
    guesses: tuple[tuple[Candidate, ...], ...]
    """At each place of the chain the model's choices, the best, which the chain goes on with,
    first."""


@statically_frozen
class DraftsDone:
    """A round is over. ``steps``: rows and seconds of each step."""

    chains: tuple[Chain, ...]
    steps: tuple[tuple[int, float], ...]


@statically_frozen
class RunDrafts:
    """Run a round: ``DraftRound`` says how; answer with ``DraftsDone`` or ``DraftsFailed``."""

    starts: tuple[ChainStart, ...]
    times: RoundTimes
    others: int = 0
    """Sessions that decode in the pass without a chain."""
    probe: bool = False
    """Run the first step whether it pays or not."""


class _Running:
    """A session in a round."""

    def __init__(self, start: ChainStart) -> None:
        self.start, self.step = start, start.step
        self.reach = start.reach
        self.fed: list[int] | None = []
        self.guesses: list[tuple[Candidate, ...]] = []
        self.open = True

    @property
    def gain(self) -> float:
        return self.reach * self.start.rate


class DraftRound:
    """The steps before one pass. ``next_step`` says what to run, empty at the end; ``take`` hands
    over what came of it. Runs in the target's thread: it has no part in the engine's state."""

    def __init__(self, action: RunDrafts) -> None:
        self._times, self._probe = action.times, action.probe
        self._running = [_Running(start) for start in action.starts]
        self._batch: list[_Running] = []
        self._sharing = max(1, len(self._running) + action.others)
        """Those who would share a step in the end: prompts are fed some at a time."""
        self._tokens = action.others + sum(start.expected for start in action.starts)
        self._time_s = max(LEAST_PASS_S, action.times.pass_s)
        self._steps: list[tuple[int, float]] = []

    def next_step(self) -> list[DraftStep]:
        times = self._times
        if len(self._steps) >= times.most_steps:
            return []
        goodput = times.held_up * self._tokens / self._time_s
        row = (times.step_row_s + times.pass_row_s) * goodput
        step = times.step_s * goodput
        guessing = [one for one in self._running if one.open and one.step.guess]
        batch = [one for one in guessing if one.gain > max(row, times.least_chance)]
        cost = row + step / max(1, len(batch))
        if sum(one.gain for one in batch) <= len(batch) * _asked(cost, row):
            batch = guessing if self._probe and not self._steps else []
        if not self._steps:  # prompts are fed once a round, if guesses behind them will pay
            cost = row + step / self._sharing
            fed = times.step_row_s * goodput / PAID_BACK_IN
            batch += [
                one
                for one in self._running
                if not one.step.guess
                and (
                    one.gain > max(_asked(cost, row) + fed * one.start.missing, times.least_chance)
                    or self._probe
                )
            ]
        self._batch = batch
        return [one.step for one in batch]

    def take(self, guesses: Sequence[tuple[Candidate, ...]], took_s: float) -> None:
        """What the step that ``next_step`` asked for brought, in its order."""
        rows = 0
        for one, guess in zip(self._batch, guesses, strict=True):
            step = one.step
            rows += len(step.feed)
            if one.fed is not None:
                one.fed += step.feed
            one.open = False
            if not guess:
                one.fed = one.fed if not step.guess else None
                continue
            one.guesses.append(guess)
            hit = one.start.chances.chance(0, guess[0].logprob, one.start.rate)
            self._tokens += one.reach * hit
            one.reach *= hit
            one.open = len(one.guesses) < one.start.most
            keep = step.keep_length + len(step.feed)
            one.step = DraftStep(step.key, keep, (guess[0].token,))
        times = self._times
        self._steps.append((rows, took_s))
        self._time_s += times.step_s + (times.step_row_s + times.pass_row_s) * len(self._batch)

    def done(self) -> DraftsDone:
        chains = [
            Chain(
                one.start.step.key,
                one.start.step.keep_length,
                None if one.fed is None else tuple(one.fed),
                tuple(one.guesses),
            )
            for one in self._running
            if one.fed or one.fed is None
        ]
        return DraftsDone(tuple(chains), tuple(self._steps))


def _asked(cost: float, row: float) -> float:
    """What a session's part of a step that costs it ``cost`` tokens, of these ``row`` for its row,
    has to bring."""
    return cost * (1.0 + max(row, cost / 4))


class DraftTimes:
    """What the draft model's steps take, measured: of a model that runs in rounds by their rows, of
    a target's own speculator by how long the passes are in which it ran."""

    def __init__(self) -> None:
        self._step_s = MovingAverage(0.1)
        self._by_rows = SlopeEstimator()
        self._by_steps = SlopeEstimator()

    def note_step(self, rows: int, took_s: float) -> None:
        self._step_s.add(took_s)
        self._by_rows.add(rows, took_s)

    def note_pass(self, draft_steps: int, took_s: float) -> None:
        """A pass was over in which the target's own speculator ran so many steps."""
        self._by_steps.add(draft_steps, took_s)

    def of(self, pass_s: float, pass_row_s: float) -> RoundTimes:
        row_s, base_s = self._by_rows.get(), self._by_rows.value(0.0)
        if row_s is None or base_s is None:
            step_s = self._step_s.get(GUESSED_STEP_SHARE * pass_s)
            return RoundTimes(pass_s, step_s, 0.0, pass_row_s, PROMPT_ROWS)
        row_s = max(0.0, row_s)
        rows = MOST_PROMPT_ROWS
        if row_s * rows > PROMPT_SHARE * pass_s:
            rows = max(PROMPT_ROWS // 8, int(PROMPT_SHARE * pass_s / row_s))
        return RoundTimes(pass_s, max(0.0, base_s), row_s, pass_row_s, rows)

    @property
    def own_step_s(self) -> float | None:
        """A step of the target's own speculator; None while that is not known."""
        return self._by_steps.get()


def chain_length(
    rates: Sequence[float], most: int, pass_s: float, step_s: float, row_s: float
) -> int:
    """How many tokens a target's own speculator should propose behind a pass, where it proposes
    equally many for each of these sessions, whose guesses are right at these rates: the sum above,
    beforehand. Four sessions at 0.7, passes of 25 ms, steps of 2.5 ms and no price of rows: 4."""
    tokens, time_s = float(len(rates)), pass_s
    reach = [1.0] * len(rates)
    for length in range(most):
        reach = [one * rate for one, rate in zip(reach, rates, strict=True)]
        brought, costs_s = sum(reach), step_s + row_s * len(rates)
        if brought * time_s <= costs_s * tokens:
            return length
        tokens, time_s = tokens + brought, time_s + costs_s
    return most
