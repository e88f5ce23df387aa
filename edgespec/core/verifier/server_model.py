"""The server model: how many steps the verifier's own draft model runs before a pass, and for whom.

Theory of operation. A session that is to take part in the next pass has a *path*: the likeliest
nodes that other sources (its device, server lookup) offer. The draft model may add a *chain* behind
it. Its steps are packed: one step proposes one more token for every session in it. The steps run
before the pass, in a *round*, and one sum decides when to stop (goodput, as in SmartSpec, arXiv
2406.14066, which chooses one length for all sessions; here each step chooses its sessions, and the
draft's confidence in the earlier tokens is known):

    a step for the sessions A pays while   mean over A of p_i  >  x * (1 + max(r, x / 4)),
    x = r + G * step_s / |A|,   r = G * row_s

p_i is the probability that session i's output goes through its chain so far and the next token;
row_s is the time that the session's row takes in the step and in the pass; step_s is the time that
the step takes besides; G is the goodput in tokens per second that the pass would have if the round
ended now. G is raised for the prompts that wait for the pass, and leaves out the time of prompt
rows (``row_price.py``). So x is the cost of a session's part of the step, in tokens.

The factor on the right is a margin, for two reasons. A rejected token makes the pass longer for
sessions that gain nothing from it, so a row has to bring more than it costs. Estimates are too
optimistic for text that is hard to predict, so an expensive step has to bring clearly more than it
costs. A session is in A if p_i exceeds the cost of its row, and is high enough for the node to be
let into the pass. Each p_i falls with every step, so the first step that does not pay ends the
round.

Worked example: one session, passes of 25 ms and steps of 2.5 ms, tokens accepted with 0.88, rows
that cost nothing. G begins at 40 tokens per second, so the first step has to bring 0.10 of a token.
After eight steps G is 5.7 tokens in 45 ms: the next step has to bring 0.34, and 0.88**9 is 0.32.

Each step offers ``CHOICES`` candidates for its place. The chain goes on with the best of them; the
others become nodes beside it if they are worth their rows (siblings without replacement, as in RSD,
arXiv 2402.14160): where the chain is wrong, one of them is often right.

A device that stays ahead of the verifier makes time dearer for its session. Such a device drafts n
places while a pass runs, and adds D = a + a**2 + .. + a**n tokens to every pass. What the chain
proposes now, the device brings one pass later at no cost, together with what lies behind it. So a
step is worth its time only beside the session's best pace: its part of x is multiplied by

    max(1, D * passes / tokens)

with ``tokens`` what the session has of this pass so far, and ``passes`` the time of round and pass
so far over that of the pass. With passes of 40 ms, server steps of 4 ms, a device of 3 ms a place
and 0.95 at both ends, D is 9.4, and the first step has to bring 1.16 tokens instead of 0.10.
Without the factor both ends took up to 1.15 times as long as the device alone (one session, virtual
time). The factor is a session's own: when the nodes of devices raised G itself, eight devices kept
each other's verifier from drafting, at 0.83 of its speed. D is 0 if the device usually needs more
than a pass to answer a miss: at a round trip of 200 ms both ends took 1.17 times as long as the
server alone before that was asked.

A session that is alone begins no round either if the device's next draft is expected before the
model would have proposed as much. It waits for the device then (``drafts.auto_run_ahead``).

The draft model reads a prompt only if the tokens it can propose behind it repay the prompt's rows,
and the rounds that it takes, within ``PAID_BACK_IN`` passes. On a full verifier, whose passes go to
prompts, they do not.

Probabilities come from counts (``estimators.CalibratedChances``). Before a token is proposed, its
probability is the acceptance rate of this session's chain; once it is proposed, the acceptance rate
of tokens of that confidence. The counts are kept for greedy and sampled outputs apart and are
shared by all sessions; a session's own rate begins at the shared rate. Where no step pays, one step
in ``PROBE_EVERY`` passes is run all the same, so that a change is noticed. A step that is longer
than a pass is run proportionally less often, and so is each part of a text that has to be read
before it: eight agents with prompts of 16,000 to 75,000 tokens had lost 30 % of the verifier's time
to such reading, for conversations that ended before it did.

A step may propose no token at all: the model has no room, does not have a token of the text in its
vocabulary, or computes no finite numbers. The model then has to be fed the whole text again. Such a
session has no chain for ``FIRST_REST`` passes, then for twice as many, up to ``MAX_REST``. When
``EMPTY_ROUNDS`` rounds in a row proposed no token for any session, the model rests in the same way
for all, beginning with ``PROBE_EVERY`` passes, and is tried on the shortest text. A log line
reports when it begins to rest, and when it proposes tokens again.

An engine speculator (vLLM) proposes a chain behind each pass instead. The same sum chooses its
length beforehand, from acceptance rates alone. One that proposes a *block*, all its tokens in one
run, proposes the whole block or nothing: the block is run if its best part pays for the run, and
the price of a row cuts it when the next pass is formed. Behind the first place of a block the
tokens are not conditioned on one another, so acceptance falls from place to place (P-EAGLE, arXiv
2602.01469: 64, 40, 25 and 15 %), and each place has a rate of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import field
from typing import Final

from edgespec.core.protocol.draft_source import SourceKind
from edgespec.core.protocol.estimators import (
    ASSUMED_STEP_SHARE,
    CalibratedChances,
    DecayedRate,
    MovingAverage,
    SlopeEstimator,
)
from edgespec.core.protocol.work import Candidate, DraftStep
from edgespec.core.statically_frozen import statically_frozen
from edgespec.core.verifier.pass_tree import PassVerdict, PassView

LONGEST_CHAIN: Final = 16
MAX_STEPS_BEFORE_PROMPTS: Final = 4
"""Most steps of a round for which prompts of the target wait."""
MAX_CATCH_UP_TOKENS: Final = 32
"""Most missing tokens that a sequence is fed in a guessing step. A sequence that lacks more is fed
apart from guessing, like a prompt.
"""
FIRST_PROMPT_ROWS: Final = 512
"""Most tokens of such a sequence that one round feeds."""
PROMPT_SHARE: Final = 0.25
"""Share of a pass that a round spends on prompts, once the time of a row is known; at most
``MAX_PROMPT_ROWS`` rows.
"""
MAX_PROMPT_ROWS: Final = 4096
PAID_BACK_IN: Final = 32
PROBE_EVERY: Final = 64
FIRST_REST: Final = 8
MAX_REST: Final = 512
EMPTY_ROUNDS: Final = 8
INITIAL_RATE: Final = 0.7
"""Acceptance rate assumed before any verdict. Its weight is so small that an always wrong drafter
stops after twenty tokens.
"""
MIN_PASS_S: Final = 1e-6
"""Least duration of a pass, since a coarse clock may measure 0."""
MAX_RATE: Final = 0.98
"""Highest acceptance rate assumed of a chain. A chain that is even longer saves little, and a
rejected token is expensive.
"""

CHOICES: Final = 4
INITIAL_SIBLING_RATE: Final = 0.05
"""Acceptance rate assumed of candidates beside the chain before any verdict."""
MIN_SIBLING_CHANCE: Final = 0.02
"""Candidates beside the chain with a lower probability are not considered."""

_MEMORY, _SHARED_WEIGHT, _SESSION_WEIGHT = 0.98, 3.0, 6.0


class ChainChances:
    """Acceptance statistics of the draft model, for either greedy or sampled outputs, over all
    sessions of a verifier."""

    def __init__(self) -> None:
        self.by_confidence = CalibratedChances()
        self.rate = DecayedRate(_MEMORY, _SHARED_WEIGHT)
        self._places: list[DecayedRate] = []
        """The rate of each place of a chain, given that the tokens before it were accepted."""

    def note(self, place: int, *, hit: bool) -> None:
        """Record whether the token at ``place`` of a chain was right, given that all tokens before
        it were."""
        self.rate.add(hit)
        if place == len(self._places):
            self._places.append(DecayedRate(_MEMORY, _SHARED_WEIGHT))
        self._places[place].add(hit)

    def rate_at(self, place: int) -> float:
        """Return the acceptance rate at ``place``. A place without verdicts has the rate of the
        place before it, and the first one that of all places."""
        rate = self.rate.rate(INITIAL_RATE)
        for one in self._places[: place + 1]:
            rate = one.rate(rate)
        return rate


class DraftTimes:
    """Measured times of draft steps.

    The steps of a model that runs in rounds are timed by their rows. The steps of an engine
    speculator are estimated from the durations of the passes in which it ran.
    """

    def __init__(self) -> None:
        self._step_s = MovingAverage(0.1)
        self._by_rows = SlopeEstimator()
        self._by_steps = SlopeEstimator()

    def note_step(self, rows: int, took_s: float) -> None:
        self._step_s.add(took_s)
        self._by_rows.add(rows, took_s)

    def note_pass(self, draft_steps: int, took_s: float) -> None:
        """Record the duration of a pass in which the engine speculator ran ``draft_steps``
        steps."""
        # In half steps, so that a slope is known of a speculator with one step too.
        self._by_steps.add(2 * draft_steps, took_s)

    def step_s(self, pass_s: float) -> float:
        """Return the seconds of a step of the server model, beside the time of its rows once that
        is known; a share of ``pass_s`` is assumed until a step was timed."""
        base_s = self._by_rows.value(0.0)
        if base_s is None:
            return self._step_s.get(ASSUMED_STEP_SHARE * pass_s)
        return max(0.0, base_s)

    def round_times(self, pass_s: float, pass_row_s: float) -> RoundTimes:
        row_s, step_s = self._by_rows.get(), self.step_s(pass_s)
        if row_s is None:
            return RoundTimes(
                pass_s=pass_s,
                step_s=step_s,
                step_row_s=0.0,
                pass_row_s=pass_row_s,
                prompt_rows=FIRST_PROMPT_ROWS,
            )
        row_s = max(0.0, row_s)
        rows = MAX_PROMPT_ROWS
        if row_s * rows > PROMPT_SHARE * pass_s:
            rows = max(FIRST_PROMPT_ROWS // 8, int(PROMPT_SHARE * pass_s / row_s))
        return RoundTimes(
            pass_s=pass_s,
            step_s=step_s,
            step_row_s=row_s,
            pass_row_s=pass_row_s,
            prompt_rows=rows,
        )

    @property
    def speculator_step_s(self) -> float | None:
        """Seconds per step of the engine speculator; None until it is known."""
        half_s = self._by_steps.get()
        return None if half_s is None else 2 * half_s


class ChainSource(ABC):
    """One session's chain, a ``SteppedSource``: the tokens proposed behind the text, and their
    acceptance rate.

    ``chances`` and ``times`` are shared by the sessions of a verifier."""

    kind: SourceKind

    def __init__(self, chances: ChainChances, times: DraftTimes) -> None:
        self.tokens: tuple[int, ...] = ()
        """The proposed tokens behind the text: the path from other sources, then the model's own
        chain."""
        self._shared, self._times = chances, times
        self._rate = DecayedRate(_MEMORY, _SESSION_WEIGHT)
        self._path: tuple[int, ...] = ()
        self._reaches: list[float] = []
        """Probability that the output goes through each token of the path, and then of the
        chain."""
        self._guesses: tuple[tuple[Candidate, ...], ...] = ()
        """The candidates of the chain as in ``Chain``, if the model reports its confidence."""

    @property
    def acceptance_rate(self) -> float:
        """Probability that a token of the chain is accepted, before the token is proposed."""
        return min(MAX_RATE, self._rate.rate(self._shared.rate.rate(INITIAL_RATE)))

    @abstractmethod
    def step_s(self, pass_s: float) -> float:
        """Return the seconds of one more step, as ``SteppedSource`` states."""

    def add_nodes(self, view: PassView) -> None:
        """Add the chain and the candidates beside it that are worth their rows."""
        if self.tokens:
            view.tree.add_tree(*self.select_nodes(view.least_chance, view.depth), self.kind)

    def learn(self, verdict: PassVerdict) -> None:
        self.judge(verdict.committed)

    def select_nodes(
        self, least_chance: float, depth: int
    ) -> tuple[list[int], list[int], list[float]]:
        """Return the nodes with a probability of at least ``least_chance``, none deeper than
        ``depth``.

        The result holds their tokens, their parents as in ``PassRequest``, and their probabilities.
        The chain comes first, then the candidates beside it.
        """
        reaches = self._reaches[:depth]
        count = next((at for at, one in enumerate(reaches) if one < least_chance), len(reaches))
        tokens, parents = list(self.tokens[:count]), list(range(-1, count - 1))
        chances, chance = reaches[:count], self._shared.by_confidence.chance
        least = max(least_chance, MIN_SIBLING_CHANCE)
        for place, choices in enumerate(self._guesses, len(self._path)):
            if place > count or place >= depth:
                break
            before = reaches[place - 1] if place else 1.0
            for rank, one in enumerate(choices[1:], 1):
                sibling_chance = before * chance(rank, one.logprob, INITIAL_SIBLING_RATE)
                if sibling_chance >= least:
                    tokens.append(one.token)
                    parents.append(place - 1)
                    chances.append(sibling_chance)
        return tokens, parents, chances

    def judge(self, committed: Sequence[int]) -> None:
        """Learn from the tokens that the output went on with which proposed tokens were right; then
        drop the chain."""
        start = len(self._path)
        for at, (guess, token) in enumerate(zip(self.tokens, committed, strict=False)):
            hit = guess == token
            if at >= start:
                self._rate.add(hit)
                self._shared.note(at - start, hit=hit)
                for rank, one in enumerate(self._guesses[at - start] if self._guesses else ()):
                    right = one.token == token
                    self._shared.by_confidence.add(rank, one.logprob, hit=right)
            if not hit:
                break
        self.tokens = self._path = self._guesses = ()
        self._reaches = []

    def _set_chain(self, tokens: tuple[int, ...], chances: Sequence[float]) -> None:
        self.tokens = self._path + tokens
        reach = self._reaches[-1] if self._reaches else 1.0
        for chance in chances:
            reach *= chance
            self._reaches.append(reach)


class EngineSpeculator(ChainSource):
    """The chain that an engine speculator proposes behind each pass of one session."""

    kind = SourceKind.ENGINE_SPECULATOR

    def step_s(self, pass_s: float) -> float:
        step_s = self._times.speculator_step_s
        return ASSUMED_STEP_SHARE * pass_s if step_s is None else max(0.0, step_s)

    def chance_at(self, place: int) -> float:
        """Return the probability that the token at ``place`` of a proposal is accepted if those
        before it are: the rate of that place, raised or lowered as this session's rate is above or
        below that of all sessions."""
        usual = self._shared.rate.rate(INITIAL_RATE)
        ratio = self._rate.rate(usual) / usual if usual > 0.0 else 1.0
        return min(MAX_RATE, self._shared.rate_at(place) * ratio)

    def reaches(self, count: int) -> list[float]:
        """Return the probability that the output goes through the first 1, 2, .. ``count`` tokens
        of a proposal, before it is made. The first factor allows for no proposal."""
        found, reach = list[float](), self.acceptance_rate
        for place in range(count):
            reach *= self.chance_at(place) if place else 1.0
            found.append(reach)
        return found

    def set_proposal(self, tokens: tuple[int, ...]) -> None:
        """Set the tokens that the speculator proposes behind the text, without their confidence."""
        self._set_chain(tokens, [self.chance_at(place) for place in range(len(tokens))])

    def note_no_proposal(self) -> None:
        """Record that the speculator ran and proposed nothing for this session."""
        self._rate.add(False)
        self._shared.rate.add(False)


class ServerModel(ChainSource):
    """The chain of the server's draft model for one session, and the text in its cache."""

    kind = SourceKind.SERVER_MODEL

    def __init__(self, chances: ChainChances, times: DraftTimes) -> None:
        super().__init__(chances, times)
        self._cached: list[int] = []
        self._checked = 0
        """Leading cached tokens that are known to equal the text."""
        self._empty_rounds = self._rests = 0
        """Rounds in a row that proposed no token here, and passes for which there is no chain."""

    def step_s(self, pass_s: float) -> float:
        return self._times.step_s(pass_s)

    def begin_chain(
        self,
        key: str,
        text: Sequence[int],
        path: tuple[int, ...],
        reaches: list[float],
        room: int,
        device_tokens: float = 0.0,
    ) -> ChainStart | None:
        """Take part in a round; return None if there is no room for a chain or the session rests.

        ``path`` is the likeliest path behind ``text``, ``reaches`` the probability of each of its
        tokens. At most ``room`` nodes may lie on path and chain together. ``device_tokens`` is as
        in ``ChainStart``.

        The chain begins where a proposed token is expected to gain most: behind the path's last
        token, or in place of a path token that is less likely than the model's own.
        """
        if self._rests:
            return None
        rate, at, most = self.acceptance_rate, 0, 0.0
        for place, reach in enumerate((1.0, *reaches)):
            brings = reach * rate - (reaches[place] if place < len(path) else 0.0)
            if brings > most:
                at, most = place, brings
        length = min(LONGEST_CHAIN, room - at)
        if length <= 0:
            return None
        self._path, self._reaches = path[:at], reaches[:at]
        keep, feed = self._plan_feed(text)
        guess = len(feed) <= MAX_CATCH_UP_TOKENS
        step = DraftStep(key, keep, feed if guess else feed[:FIRST_PROMPT_ROWS], guess)
        return ChainStart(
            step,
            reach=reaches[at - 1] if at else 1.0,
            rate=rate,
            max_tokens=length,
            missing_tokens=len(feed),
            chances=self._shared.by_confidence,
            expected_tokens=1.0 + math.fsum(reaches),
            device_tokens=device_tokens,
        )

    def _plan_feed(self, text: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return how many cached tokens stay when the sequence goes on with ``text`` and the path,
        and the tokens to feed, at least one."""
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

    def record_round(self, chain: Chain) -> None:
        """Record what the round did for this session."""
        if chain.fed is None:
            self._cached, self._checked = [], 0
        else:
            self._cached[chain.keep_length :] = chain.fed
            self._checked = min(self._checked, chain.keep_length)
        if chain.guesses:
            self._empty_rounds = 0
        elif chain.fed is None:
            self._rests = min(MAX_REST, FIRST_REST << self._empty_rounds)
            self._empty_rounds = min(self._empty_rounds + 1, 16)
        if chain.guesses:
            rate, chance = self.acceptance_rate, self._shared.by_confidence.chance
            self._guesses, firsts = chain.guesses, [one[0] for one in chain.guesses]
            tokens = tuple([one.token for one in firsts])
            self._set_chain(tokens, [chance(0, one.logprob, rate) for one in firsts])

    def judge(self, committed: Sequence[int]) -> None:
        self._rests = max(0, self._rests - 1)
        super().judge(committed)


@statically_frozen
class ChainStart:
    """A session that may take part in a round."""

    step: DraftStep
    """The session's first step. A step that only feeds (``DraftStep.guess`` False) is not
    continued."""
    reach: float
    """Probability that the output goes through all tokens that the step feeds."""
    rate: float
    """Probability that a proposed token behind them is accepted, before it is proposed."""
    max_tokens: int
    """Most tokens to propose."""
    missing_tokens: int
    """Tokens of the text that the model has not read."""
    chances: CalibratedChances = field(repr=False)
    expected_tokens: float
    """Tokens that the session expects from the pass without a chain."""
    device_tokens: float = 0.0
    """Tokens that the device's drafts are expected to add to the next pass, whatever this one has
    (``DraftInbox.tokens_per_pass``)."""


@statically_frozen
class RoundTimes:
    """Measured times of the target and of the draft model, in seconds, and the limits of a
    round."""

    pass_s: float
    """Duration of a pass without its prompt rows and without the verifier's own nodes."""
    step_s: float
    step_row_s: float
    pass_row_s: float
    prompt_rows: int
    """Most tokens of prompts that a round may feed."""
    waiting_per_decoding: float = 1.0
    """Sessions that wait for the pass, for each that decodes (``RowPriceEstimator``): prompts that
    wait for the target wait for the round too."""
    least_chance: float = 0.0
    """Least probability with which a node is let into the pass."""
    max_steps: int = LONGEST_CHAIN


@statically_frozen
class Chain:
    """The result of a round for one session.

    ``fed`` went into its draft cache behind the first ``keep_length`` tokens; None means that the
    model had no room for it.
    """

    key: str
    keep_length: int
    fed: tuple[int, ...] | None
    guesses: tuple[tuple[Candidate, ...], ...]
    """The model's candidates at each place of the chain. The first is the best, with which the
    chain goes on."""


@statically_frozen
class DraftsDone:
    """A round has ended. ``steps`` holds the rows and seconds of each step."""

    chains: tuple[Chain, ...]
    steps: tuple[tuple[int, float], ...]


@statically_frozen
class RunDrafts:
    """Run a round as ``DraftRound`` directs; answer with ``DraftsDone`` or ``DraftsFailed``."""

    starts: tuple[ChainStart, ...]
    times: RoundTimes
    others: int = 0
    """Sessions that decode in the pass without a chain."""
    probe: bool = False
    """True if the first step runs whether it pays or not."""


class _Participant:
    """The state of one session in a running round."""

    def __init__(self, start: ChainStart) -> None:
        self.start, self.step = start, start.step
        self.reach = start.reach
        self.fed: list[int] | None = []
        self.guesses: list[tuple[Candidate, ...]] = []
        self.expected_tokens = start.expected_tokens
        self.open = True

    @property
    def chance(self) -> float:
        """Probability that the next proposed token is accepted."""
        return self.reach * self.start.rate

    def pace_ratio(self, passes: float) -> float:
        """Return how many times as many tokens as now the session would have in a second while its
        device stays ahead, at least 1.

        ``passes`` is the time of the round and the pass so far, over that of the pass alone.
        """
        return max(1.0, self.start.device_tokens * passes / self.expected_tokens)


class DraftRound:
    """The steps before one pass.

    ``next_step`` returns what to run, empty at the end; ``record_step`` receives the result. A
    round runs in the target's thread and shares no state with the engine.
    """

    def __init__(self, action: RunDrafts) -> None:
        self._times, self._probe = action.times, action.probe
        self._running = [_Participant(start) for start in action.starts]
        self._batch: list[_Participant] = []
        self._session_count = max(1, len(self._running) + action.others)
        """Sessions that would share a step in the end; prompts are fed only some at a time."""
        self._tokens = action.others + math.fsum(one.expected_tokens for one in action.starts)
        self._time_s = max(MIN_PASS_S, action.times.pass_s)
        self._steps: list[tuple[int, float]] = []

    def next_step(self) -> list[DraftStep]:
        times = self._times
        if len(self._steps) >= times.max_steps:
            return []
        goodput = times.waiting_per_decoding * self._tokens / self._time_s
        row = (times.step_row_s + times.pass_row_s) * goodput
        step = times.step_s * goodput
        passes = self._time_s / max(MIN_PASS_S, times.pass_s)
        paces = {one: one.pace_ratio(passes) for one in self._running}
        guessing = [one for one in self._running if one.open and one.step.guess]
        batch = [one for one in guessing if one.chance > max(row * paces[one], times.least_chance)]
        cost = row + step / max(1, len(batch))
        asked = math.fsum([_least_gain(cost * paces[one], row * paces[one]) for one in batch])
        if math.fsum([one.chance for one in batch]) <= asked:
            batch = guessing if self._probe and not self._steps else []
        if not self._steps:  # Prompts are fed once per round, if the tokens behind them will pay.
            cost = row + step / self._session_count
            token_s = times.step_row_s + times.step_s / FIRST_PROMPT_ROWS  # in rounds of that many
            fed = token_s * goodput / PAID_BACK_IN
            for one in self._running:
                least = _least_gain(cost * paces[one], row * paces[one])
                least = max(least + fed * one.start.missing_tokens, times.least_chance)
                if not one.step.guess and (one.chance > least or self._probe):
                    batch.append(one)
        self._batch = batch
        return [one.step for one in batch]

    def record_step(self, guesses: Sequence[tuple[Candidate, ...]], took_s: float) -> None:
        """Record the candidates of each session in the last step, in the order of ``next_step``."""
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
            one.expected_tokens += one.reach * hit
            one.reach *= hit
            one.open = len(one.guesses) < one.start.max_tokens
            keep = step.keep_length + len(step.feed)
            one.step = DraftStep(step.key, keep, (guess[0].token,))
        times = self._times
        self._steps.append((rows, took_s))
        self._time_s += times.step_s + (times.step_row_s + times.pass_row_s) * len(self._batch)

    def result(self) -> DraftsDone:
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


def _least_gain(cost: float, row: float) -> float:
    """Return the least mean gain at which a step pays, in tokens. ``cost`` is a session's part of
    the step, ``row`` the part of it that its row costs."""
    return cost * (1.0 + max(row, cost / 4))


def chain_length(
    reaches: Sequence[Sequence[float]], pass_s: float, step_s: float, row_s: float
) -> int:
    """Return how many tokens an engine speculator should propose behind a pass, one per step.

    It proposes equally many for each session. ``reaches`` holds for each session the probabilities
    that the output goes through the first 1, 2, .. tokens of its chain, up to the longest one. The
    length follows from the sum above, computed beforehand. Example: four sessions at 0.7 a token,
    passes of 25 ms, steps of 2.5 ms and rows that cost nothing give 4.
    """
    tokens, time_s, length = float(len(reaches)), pass_s, 0
    for brought in map(math.fsum, zip(*reaches, strict=True)):
        costs_s = step_s + row_s * len(reaches)
        if brought * time_s <= costs_s * tokens:
            break
        tokens, time_s, length = tokens + brought, time_s + costs_s, length + 1
    return length


def block_pays(
    reaches: Sequence[Sequence[float]], pass_s: float, run_s: float, row_s: float
) -> bool:
    """Return whether an engine speculator that proposes a whole block in one run of ``run_s``
    should run behind a pass.

    ``reaches`` is as in ``chain_length``. The part of the block that is worth its rows has to repay
    the run. Example: one session at 0.7 a token, passes of 25 ms and rows that cost nothing let a
    block of 8 pay up to a run of 54 ms.
    """
    sessions = float(len(reaches))
    tokens, time_s = sessions, pass_s + run_s
    for brought in map(math.fsum, zip(*reaches, strict=True)):
        costs_s = row_s * sessions
        if brought * time_s <= costs_s * tokens:
            break
        tokens, time_s = tokens + brought, time_s + costs_s
    return tokens * pass_s > sessions * time_s
