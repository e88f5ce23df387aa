"""Chains of the verifier's own draft model: where they begin, and how likely their tokens are.

Theory of operation. Before a pass the draft model may add a chain behind the likeliest nodes of a
session (``draft_round.py``). A ``ServerModel`` holds the chain of one session, knows which tokens
are in its draft cache, and decides where the chain begins: where a proposed token is expected to
gain most. After the pass it learns which proposed tokens were right.

Probabilities come from counts (``estimators.CalibratedChances``). Before a token is proposed, its
probability is the acceptance rate of this session's chain; once it is proposed, it is the
acceptance rate of tokens of that confidence. The counts are kept for greedy and sampled outputs
apart and are shared by all sessions; a session's own rate begins at the shared rate.

A session that is alone begins no round if the device's next draft is expected before the model
would have proposed as much. It waits for the device then (``run_ahead.auto_run_ahead``).

Probes. Where no step pays, one step in ``PROBE_EVERY`` passes is run all the same, so that a change
is noticed. A step that is longer than a pass is run proportionally less often, and so is each part
of a text that has to be read before it: eight agents with prompts of 16,000 to 75,000 tokens had
lost 30 % of the verifier's time to such reading, for conversations that ended before it did.

Rests. A step may propose no token at all: the model has no room, does not have a token of the text
in its vocabulary, or computes no finite numbers. The model then has to be fed the whole text again.
Such a session has no chain for ``FIRST_REST`` passes, then for twice as many, up to ``MAX_REST``.
When ``EMPTY_ROUNDS`` rounds in a row proposed no token for any session, the model rests in the same
way for all, beginning with ``PROBE_EVERY`` passes, and is tried on the shortest text. A log line
reports when it begins to rest, and when it proposes tokens again.

An engine speculator (vLLM) proposes a chain behind each pass instead (``EngineSpeculator``). One
that proposes a *block*, all its tokens in one run, proposes the whole block or nothing: the block
is run if its best part pays for the run, and the price of a row cuts it when the next pass is
formed. Behind the first place of a block the tokens are not conditioned on one another, so
acceptance falls from place to place (P-EAGLE, arXiv 2602.01469: 64, 40, 25 and 15 %), and each
place has a rate of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
from edgespec.core.verifier.draft_round import (
    FIRST_PROMPT_ROWS,
    LONGEST_CHAIN,
    Chain,
    ChainStart,
    RoundTimes,
)
from edgespec.core.verifier.pass_tree import PassVerdict, PassView

MAX_CATCH_UP_TOKENS: Final = 32
"""Most missing tokens that a sequence is fed in a guessing step. A sequence that lacks more is fed
apart from guessing, like a prompt.
"""
PROMPT_SHARE: Final = 0.25
"""Share of a pass that a round spends on prompts, once the time of a row is known; at most
``MAX_PROMPT_ROWS`` rows.
"""
MAX_PROMPT_ROWS: Final = 4096
PROBE_EVERY: Final = 64
"""Passes in which one step is run although none pays: 2 % of the time if a step is as long as a
pass."""
FIRST_REST: Final = 8
"""Passes for which a session rests after a step without a token, at first."""
MAX_REST: Final = 512
"""Most passes for which a session, or the whole model, rests."""
EMPTY_ROUNDS: Final = 8
"""Rounds in a row without a token after which the model rests for all sessions."""
INITIAL_RATE: Final = 0.7
"""Acceptance rate assumed before any verdict. Its weight is so small that an always wrong drafter
stops after twenty tokens.
"""
MAX_RATE: Final = 0.98
"""Highest acceptance rate assumed of a chain. A chain that is even longer saves little, and a
rejected token is expensive.
"""

INITIAL_SIBLING_RATE: Final = 0.05
"""Acceptance rate assumed of candidates beside the chain before any verdict."""
MIN_SIBLING_CHANCE: Final = 0.02
"""Candidates beside the chain with a lower probability are not considered."""

# Memory of an acceptance rate, about fifty verdicts; and the verdicts for which the rate counts
# that it begins with, in the counts of all sessions and in those of one.
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
        took_s = min(took_s, self._by_rows.longest(rows))
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
        """Learn which proposed tokens were right, then drop the chain. ``committed`` are the tokens
        that the output went on with. Tokens behind the first wrong one are not judged."""
        chain_start = len(self._path)
        for place, (guess, token) in enumerate(zip(self.tokens, committed, strict=False)):
            hit = guess == token
            if (in_chain := place - chain_start) >= 0:
                self._rate.add(hit)
                self._shared.note(in_chain, hit=hit)
                for rank, one in enumerate(self._guesses[in_chain] if self._guesses else ()):
                    self._shared.by_confidence.add(rank, one.logprob, hit=one.token == token)
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
        rate, start, most_gain = self.acceptance_rate, 0, 0.0
        for place, reach in enumerate((1.0, *reaches)):
            # A chain that begins at this place takes the place of the path's token there.
            replaced = reaches[place] if place < len(path) else 0.0
            gain = reach * rate - replaced
            if gain > most_gain:
                start, most_gain = place, gain
        length = min(LONGEST_CHAIN, room - start)
        if length <= 0:
            return None
        self._path, self._reaches = path[:start], reaches[:start]
        keep, feed = self._plan_feed(text)
        guess = len(feed) <= MAX_CATCH_UP_TOKENS
        step = DraftStep(key, keep, feed if guess else feed[:FIRST_PROMPT_ROWS], guess)
        return ChainStart(
            step,
            reach=reaches[start - 1] if start else 1.0,
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
