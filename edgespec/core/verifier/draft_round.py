"""A round: the steps that the verifier's own draft model runs before a pass.

Theory of operation. A session that is to take part in the next pass has a *path*: the likeliest
nodes that other sources (its device, server lookup) offer. The draft model may add a *chain* behind
the path. Its steps are packed: one step proposes one more token for every session in it. The steps
of a *round* run before the pass, and one sum decides when the round ends (goodput, as in SmartSpec,
arXiv 2406.14066, which chooses one length for all sessions; here each step chooses its sessions,
and the draft's confidence in the earlier tokens is known):

    a step for the sessions A pays while   mean over A of p_i  >  x * (1 + max(r, x / 4)),
    x = r + G * step_s / |A|,   r = G * row_s

    p_i     probability that the output of session i goes through its chain so far and the next
            token
    G       goodput: tokens per second that the pass would bring if the round ended now
    row_s   seconds that the row of one session takes in the step and in the pass
    step_s  seconds that the step takes besides
    r       cost of a session's row, in tokens
    x       cost of a session's part of the step, in tokens

G is raised for the prompts that wait for the pass, and leaves out the time of prompt rows
(``row_price.py``).

The factor (1 + max(r, x / 4)) is a margin, for two reasons. A rejected token makes the pass longer
for sessions that gain nothing from it, so a row has to bring more than it costs. Estimates are too
optimistic for text that is hard to predict, so an expensive step has to bring clearly more than it
costs. A session is in A if p_i exceeds the cost of its row, and is high enough for the node to be
let into the pass. Each p_i falls with every step, so the first step that does not pay ends the
round.

Worked example: one session, passes of 25 ms and steps of 2.5 ms, tokens accepted with 0.88, rows
that cost nothing. G begins at 40 tokens per second, so the first step has to bring 0.10 of a token.
After eight steps G is 5.7 tokens in 45 ms: the next step has to bring 0.34, and 0.88**9 is 0.32.

Siblings. Each step offers ``CHOICES`` candidates for its place. The chain goes on with the best
one; the others become nodes beside it if they are worth their rows (siblings without replacement,
as in RSD, arXiv 2402.14160). Where the chain is wrong, a sibling is often right.

Devices that stay ahead. A device that stays ahead of the verifier makes time more expensive for its
session. It drafts n places while a pass runs, and adds D = a + a**2 + .. + a**n tokens to every
pass. What the chain proposes now, the device brings one pass later at no cost, together with what
lies behind it. So a step is worth its time only beside the best pace of the session: its part of x
is multiplied by

    max(1, D * passes / tokens)

``tokens`` is what the session has of this pass so far, ``passes`` the time of round and pass so far
over that of the pass. With passes of 40 ms, server steps of 4 ms, a device of 3 ms a place and 0.95
at both ends, D is 9.4, and the first step has to bring 1.16 tokens instead of 0.10. Without the
factor both ends took up to 1.15 times as long as the device alone (one session, virtual time). The
factor is a session's own: when the nodes of devices raised G itself, eight devices kept each
other's verifier from drafting, at 0.83 of its speed. D is 0 if the device usually needs more than a
pass to answer a miss. Before that was asked, both ends took 1.17 times as long as the server alone
at a round trip of 200 ms.

Prompts. The draft model reads a prompt only if the tokens that it can propose behind it repay the
prompt's rows, and the rounds that it takes, within ``PAID_BACK_IN`` passes. On a full verifier,
whose passes go to prompts, they do not.

An engine speculator (vLLM) proposes its tokens behind each pass instead. The same sum chooses the
number beforehand, from acceptance rates alone (``chain_length``, ``block_pays``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from edgespec.core.protocol.estimators import CalibratedChances
from edgespec.core.protocol.work import Candidate, DraftStep
from edgespec.core.statically_frozen import statically_frozen

LONGEST_CHAIN: Final = 16
"""Most tokens of a chain."""
MAX_STEPS_BEFORE_PROMPTS: Final = 4
"""Most steps of a round for which prompts of the target wait."""
FIRST_PROMPT_ROWS: Final = 512
"""Most tokens of a prompt that a round feeds to the draft model while the time of a row is not
known."""
PAID_BACK_IN: Final = 32
"""Passes within which the tokens behind a prompt have to repay the reading of it."""
CHOICES: Final = 4
"""Candidates that a step offers for its place."""
MIN_PASS_S: Final = 1e-6
"""Least duration of a pass, since a coarse clock may measure 0."""


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
        """Probability that the output goes through the chain so far."""
        self.fed: list[int] | None = []
        """Tokens that went into the draft cache; None if the model had no room for them."""
        self.guesses: list[tuple[Candidate, ...]] = []
        self.expected_tokens = start.expected_tokens
        """Tokens that the session expects from the pass, the chain so far included."""
        self.is_open = True
        """True while the chain may become longer."""

    @property
    def chance(self) -> float:
        """Probability that the output goes through the chain so far and the next proposed token."""
        return self.reach * self.start.rate

    def pace_ratio(self, passes: float) -> float:
        """Return the factor by which time is worth more to a session whose device stays ahead, at
        least 1.

        ``passes`` is the time of the round and the pass so far, over that of the pass alone.
        """
        return max(1.0, self.start.device_tokens * passes / self.expected_tokens)


@dataclass(frozen=True, slots=True)
class _StepCosts:
    """The costs of the next step, in tokens that the pass would bring in the same time."""

    row: float
    """Cost of a session's row in the step and in the pass."""
    step: float
    """Cost of the step besides its rows; its sessions share it."""
    read_token: float
    """Cost of a token of a prompt that the draft model reads, in each of the passes that have to
    repay it."""
    passes: float
    """Time of the round and the pass so far, over that of the pass alone."""

    def row_of(self, one: _Participant) -> float:
        """Return the cost of the session's row."""
        return self.row * one.pace_ratio(self.passes)

    def least_gain(self, one: _Participant, session_count: int) -> float:
        """Return how much the session has to gain from the step, which ``session_count`` sessions
        share, so that its part of the step pays."""
        pace = one.pace_ratio(self.passes)
        row, cost = self.row * pace, (self.row + self.step / session_count) * pace
        return cost * (1.0 + max(row, cost / 4))


class DraftRound:
    """The steps before one pass.

    ``next_step`` returns what to run, empty at the end; ``record_step`` receives the result. A
    round runs in the target's thread and shares no state with the engine.
    """

    def __init__(self, action: RunDrafts) -> None:
        self._times, self._is_probe = action.times, action.probe
        self._sessions = [_Participant(start) for start in action.starts]
        self._batch: list[_Participant] = []
        """The sessions of the step that runs."""
        self._session_count = max(1, len(self._sessions) + action.others)
        """Sessions that would share a step in the end; prompts are fed only some at a time."""
        self._tokens = action.others + math.fsum(one.expected_tokens for one in action.starts)
        """Tokens that the pass is expected to bring, the chains so far included."""
        self._time_s = max(MIN_PASS_S, action.times.pass_s)
        """Expected time of the steps so far and of the pass with their rows."""
        self._steps: list[tuple[int, float]] = []

    def next_step(self) -> list[DraftStep]:
        """Return the next step, with one entry for each session in it; empty if no step pays."""
        if len(self._steps) >= self._times.max_steps:
            return []
        costs = self._find_costs()
        self._batch = self._choose_guessing(costs)
        if not self._steps:  # Prompts are fed once per round.
            self._batch += self._choose_reading(costs)
        return [one.step for one in self._batch]

    def _find_costs(self) -> _StepCosts:
        """Return the costs of a step now. The longer the round has become, the lower the goodput,
        and with it the price of time."""
        times = self._times
        goodput = times.waiting_per_decoding * self._tokens / self._time_s
        # A prompt is read in rounds of at most this many rows, each of which takes a step.
        token_s = times.step_row_s + times.step_s / FIRST_PROMPT_ROWS
        return _StepCosts(
            row=(times.step_row_s + times.pass_row_s) * goodput,
            step=times.step_s * goodput,
            read_token=token_s * goodput / PAID_BACK_IN,
            passes=self._time_s / max(MIN_PASS_S, times.pass_s),
        )

    def _choose_guessing(self, costs: _StepCosts) -> list[_Participant]:
        """Return the sessions for which the next step proposes a token; none if it does not pay.
        The first step of a probe runs in any case."""
        able = [one for one in self._sessions if one.is_open and one.step.guess]
        least_chance = self._times.least_chance
        chosen = [one for one in able if one.chance > max(costs.row_of(one), least_chance)]
        gain = math.fsum([one.chance for one in chosen])
        if gain > math.fsum([costs.least_gain(one, len(chosen)) for one in chosen]):
            return chosen
        return able if self._is_probe and not self._steps else []

    def _choose_reading(self, costs: _StepCosts) -> list[_Participant]:
        """Return the sessions whose text the draft model reads in this step without proposing a
        token, because the tokens behind it will repay that."""
        chosen: list[_Participant] = []
        for one in self._sessions:
            reading = costs.read_token * one.start.missing_tokens
            least = costs.least_gain(one, self._session_count) + reading
            pays = one.chance > max(least, self._times.least_chance)
            if not one.step.guess and (pays or self._is_probe):
                chosen.append(one)
        return chosen

    def record_step(self, guesses: Sequence[tuple[Candidate, ...]], took_s: float) -> None:
        """Record the candidates of each session in the last step, in the order of ``next_step``,
        and the seconds that the step took."""
        rows = 0
        for one, guess in zip(self._batch, guesses, strict=True):
            step = one.step
            rows += len(step.feed)
            if one.fed is not None:
                one.fed += step.feed
            one.is_open = False
            if not guess:
                if step.guess:  # The model had no room for the session.
                    one.fed = None
                continue
            one.guesses.append(guess)
            one.reach *= one.start.chances.chance(0, guess[0].logprob, one.start.rate)
            self._tokens += one.reach
            one.expected_tokens += one.reach
            one.is_open = len(one.guesses) < one.start.max_tokens
            keep = step.keep_length + len(step.feed)
            one.step = DraftStep(step.key, keep, (guess[0].token,))
        times = self._times
        self._steps.append((rows, took_s))
        self._time_s += times.step_s + (times.step_row_s + times.pass_row_s) * len(self._batch)

    def result(self) -> DraftsDone:
        """Return the chains of the sessions that took part in a step, and the time of each step."""
        chains = [
            Chain(
                key=one.start.step.key,
                keep_length=one.start.step.keep_length,
                fed=None if one.fed is None else tuple(one.fed),
                guesses=tuple(one.guesses),
            )
            for one in self._sessions
            if one.fed or one.fed is None
        ]
        return DraftsDone(tuple(chains), tuple(self._steps))


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
