"""A model of how drafts succeed and fail in real text: an easiness of each text, and stretches in
it.

Theory of operation. Acceptance is not a coin with a constant chance. Some texts are easy and some
are hard. Within a text, hits come in runs, because a quotation, a list or a loop is predicted to
its end. After a miss, or after only the prompt, a draft is less certain of the next token. The law
has two states, *easy* and *hard*, each with its own chances of the ranks, and a third set of
chances for the first position and those right after a miss. At every position the state stays with
chance ``persistence``; otherwise it is drawn again, and is easy with the text's own *share*. The
share of each text is drawn from a Beta distribution. A coin with the same mean makes long drafts
look better than they are, because its misses never cluster.

The draft's log-probabilities of its first two candidates are drawn, for each position, from those
of the tape at places of the same kind: the same state (or right after a miss), and the same outcome
(the first candidate right, the second, or neither). So a law that is moved to another mean keeps
how well confidences separate right from wrong. How often a candidate of some confidence is right
then follows from Bayes' rule.

``fit`` finds the law of a tape by expectation maximisation: a hidden Markov model with shared
emissions (Rabiner 1989), where the chance to stay is separated from the chance to be drawn into the
same state, as usual for such mixtures. Starting values are fixed, so equal tapes give equal laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgespec_sim.token_sources.match_tape import MISS, Agreement, MatchTape

_ROUNDS = 80
_LEAST_CHANCE = 1e-4
# A Beta distribution at the upper limit is practically constant; the lower limit keeps it from
# being wider than plausible.
_LEAST_CONCENTRATION, _MOST_CONCENTRATION = 0.5, 200.0
Floats = NDArray[np.float64]
ConfidencePair = tuple[float, float]
"""Log-probabilities of a draft's first and second candidate."""
_AFTER_MISS: Final = 2
_OUTCOMES: Final = 3
"""The first candidate was right, the second, or neither."""
_CONFIDENCES: Final = 200
"""Number of quantiles of log-probabilities that a law keeps for each kind of place."""


@dataclass(frozen=True, slots=True)
class AcceptanceLaw:
    """Chances of each rank in easy and hard stretches, and after a rank other than 0 or at the
    start. The rest of each set to 1 is the chance of a miss. The other fields describe the
    stretches."""

    easy: tuple[float, ...]
    hard: tuple[float, ...]
    after_miss: tuple[float, ...]
    share_alpha: float
    """Parameters of the Beta distribution of a text's share of easy stretches."""
    share_beta: float
    persistence: float
    """Chance that a state stays without being drawn again; 0: independent positions."""
    origin: str
    """The law's origin, for reports: the tape it was fitted to, or how it was made."""
    confidences: tuple[tuple[ConfidencePair, ...], ...] = ()
    """``_CONFIDENCES`` pairs for each kind of place: easy, hard and after a miss, each by
    ``_OUTCOMES``. Empty: the draft has no log-probabilities."""

    def __post_init__(self) -> None:
        assert len(self.easy) == len(self.hard) == len(self.after_miss)

    @property
    def width(self) -> int:
        """Number of known ranks. Candidates beyond them are never right."""
        return len(self.easy)

    def acceptance(self, rank: int = 0) -> float:
        """Return the mean share of positions whose token has this rank, in long texts."""
        share, weight = _beta_grid(self.share_alpha, self.share_beta)
        states = np.stack([share, 1 - share])
        own = np.array([[self.easy[0]], [self.hard[0]]])
        after, fresh = self.after_miss[0], 1 - self.persistence
        # The balance of the share of positions that are hits in a state: after a hit the state's
        # own chance applies, after a miss (the rest) that of ``after_miss``.
        gain = own - after
        damped = states / (1 - self.persistence * gain)
        hits = (damped * after).sum(0) / (1 - (damped * fresh * gain).sum(0))
        hit_in = damped * (fresh * gain * hits + after)
        behind_hit = self.persistence * hit_in + fresh * states * hits
        wanted = np.array([[self.easy[rank]], [self.hard[rank]]])
        chance = behind_hit * wanted + (states - behind_hit) * self.after_miss[rank]
        return float((chance.sum(0) * weight).sum())

    def at(self, acceptance: float) -> AcceptanceLaw:
        """Return a law with the same stretches and a mean of ``acceptance``. The odds of the first
        rank are scaled by one factor everywhere; other ranks keep their shares of the remainder."""
        low, high = -40.0, 40.0
        for _ in range(100):
            middle = (low + high) / 2
            below = self._shifted(middle).acceptance() < acceptance
            low, high = (middle, high) if below else (low, middle)
        return replace(self._shifted(low), origin=f"{self.origin}, moved to {acceptance:.0%}")

    def text(
        self, count: int, dice: np.random.Generator, thinking: np.random.Generator
    ) -> Agreement:
        """Draw the first ``count`` ranks of one text from ``dice``, and the draft's
        log-probabilities from ``thinking``. A longer draw from equal generators begins with the
        same values."""
        ranks, kinds = self._ranks_and_kinds(count, dice)
        if not self.confidences:
            return Agreement(tuple(ranks), (), ())
        places = thinking.integers(_CONFIDENCES, size=count).tolist()
        picked = [self.confidences[kind][at] for kind, at in zip(kinds, places, strict=True)]
        first, second = tuple(one for one, _ in picked), tuple(one for _, one in picked)
        return Agreement(tuple(ranks), first, second)

    def _ranks_and_kinds(
        self, count: int, dice: np.random.Generator
    ) -> tuple[list[int], list[int]]:
        share = dice.beta(self.share_alpha, self.share_beta)
        draws = dice.random((count, 3))
        fresh = draws[:, 0] >= self.persistence
        if count:
            fresh[0] = True
        # The state of each position is the one drawn at the last fresh position before or at it.
        last = np.maximum.accumulate(np.where(fresh, np.arange(count), 0))
        easy = (draws[:, 1] < share)[last]
        usual = np.where(easy, _rank_at(self.easy, draws[:, 2]), _rank_at(self.hard, draws[:, 2]))
        unsure = _rank_at(self.after_miss, draws[:, 2])
        ranks, kinds, width, rank = [], [], self.width, MISS
        hard = (~easy).astype(int)
        for one, other, place in zip(usual.tolist(), unsure.tolist(), hard.tolist(), strict=True):
            if rank:
                one, place = other, _AFTER_MISS
            rank = one
            ranks.append(rank if rank < width else MISS)
            kinds.append(_OUTCOMES * place + (rank if rank < _OUTCOMES else _OUTCOMES - 1))
        return ranks, kinds

    def _shifted(self, log_odds: float) -> AcceptanceLaw:
        sets = (
            _shift_odds(chances, log_odds) for chances in (self.easy, self.hard, self.after_miss)
        )
        easy, hard, after_miss = sets
        return replace(self, easy=easy, hard=hard, after_miss=after_miss)


def fit(tape: MatchTape) -> AcceptanceLaw:
    """Fit the law of a tape's texts. Its ``width`` is that of the tape."""
    ranks = [np.asarray(generation.ranks) for generation in tape.generations]
    hidden = _Hidden([np.where(one == MISS, tape.width, one) for one in ranks], tape.width + 1)
    for _ in range(_ROUNDS):
        hidden.improve()
    easy, hard = hidden.chances
    alpha, beta = _fit_beta(hidden.shares)
    law = AcceptanceLaw(
        easy=tuple(easy[:-1].tolist()),
        hard=tuple(hard[:-1].tolist()),
        after_miss=tuple(hidden.after_miss[:-1].tolist()),
        share_alpha=alpha,
        share_beta=beta,
        persistence=hidden.persistence,
        origin=f"fitted to {tape.draft} drafting for {tape.target}",
        confidences=_fit_confidences(tape, hidden.places),
    )
    # Shift the mean to that of the tape, which the moments of the shares meet only roughly.
    return replace(law.at(min(max(tape.acceptance(), 0.001), 0.999)), origin=law.origin)


def _fit_confidences(tape: MatchTape, places: Floats) -> tuple[tuple[ConfidencePair, ...], ...]:
    """Return the log-probabilities of each kind of place, as quantiles over the first candidate's.
    Empty if the tape lacks them in any text. ``places`` holds how far each position is easy, hard
    and after a miss."""
    texts = tape.generations
    if not all(text.logprobs and text.second_logprobs for text in texts):
        return ()
    found = [
        (first, second, rank if 0 <= rank < _OUTCOMES else _OUTCOMES - 1)
        for text in texts
        for first, second, rank in zip(text.logprobs, text.second_logprobs, text.ranks, strict=True)
    ]
    order = sorted(range(len(found)), key=lambda at: found[at])
    outcomes = np.array([found[at][2] for at in order])
    quantiles = (np.arange(_CONFIDENCES) + 0.5) / _CONFIDENCES
    kinds = []
    for place in places[order].T:
        for outcome in range(_OUTCOMES):
            # A kind that the tape lacks takes the values of any place with the same outcome.
            weights = (outcomes == outcome) * (place + 1e-6) + 1e-12
            reached = np.cumsum(weights) / weights.sum()
            picked = [found[order[at]] for at in np.searchsorted(reached, quantiles)]
            kinds.append(tuple((first, second) for first, second, _ in picked))
    return tuple(kinds)


class _Hidden:
    """The hidden Markov model during the fit; row 0 of ``chances`` is the easy state."""

    def __init__(self, texts: Sequence[NDArray[np.int64]], symbol_count: int) -> None:
        self._symbol_count = symbol_count
        self._lengths = np.array([len(text) for text in texts])
        self._symbols = np.zeros((self._lengths.max(), len(texts)), dtype=np.int64)
        for column, text in enumerate(texts):
            self._symbols[: len(text), column] = text
        self._live = np.arange(len(self._symbols))[:, None] < self._lengths
        missed = np.zeros_like(self._live)
        missed[0] = True
        missed[1:] = self._live[1:] & (self._symbols[:-1] != 0)
        counts = np.bincount(self._symbols[missed], minlength=symbol_count) + 0.5
        self.after_miss: Floats = counts / counts.sum()
        # A rank right after a miss carries no information about the state.
        self._telling = self._live & ~missed
        everything = np.bincount(self._symbols[self._telling], minlength=symbol_count) + 0.5
        tilt = np.ones(symbol_count)
        tilt[0] = 4.0
        self.chances: Floats = np.stack([everything * tilt, everything / tilt])
        self.chances /= self.chances.sum(axis=1, keepdims=True)
        self.shares: Floats = np.full(len(texts), 0.5)
        self.persistence = 0.7
        self.places: Floats = np.zeros((0, 3))
        """How far each position, text after text, is easy, hard and after a miss."""

    def improve(self) -> None:
        """Do one round of expectation and maximisation."""
        starts = np.stack([self.shares, 1 - self.shares])
        stay = self.persistence * np.eye(2)[:, :, None]
        moves = stay + (1 - self.persistence) * starts[None, :, :]  # from, to, text
        likely = self.chances[:, self._symbols].transpose(1, 0, 2)  # position, state, text
        likely = np.where(self._telling[:, None, :], likely, 1.0)
        forward = self._forward(starts, moves, likely)
        backward = np.ones_like(forward)
        stayed = np.zeros(2)
        fresh = np.zeros_like(starts)
        same = np.arange(2), np.arange(2)
        moves_on = moves[same]
        for at in range(len(likely) - 1, 0, -1):
            after = likely[at] * backward[at]
            joint = forward[at - 1][:, None, :] * moves * after[None, :, :]
            joint *= self._live[at] / joint.sum(axis=(0, 1))
            held = joint[same] * self.persistence / moves_on
            stayed += held.sum(), joint.sum()
            fresh += joint.sum(axis=0) - held
            before = (moves * after[None, :, :]).sum(axis=1)
            backward[at - 1] = before / before.sum(axis=0)
        weights = forward * backward
        weights *= self._live[:, None, :] / weights.sum(axis=1, keepdims=True)
        self._maximise(weights, fresh + weights[0], stayed)

    def _forward(self, starts: Floats, moves: Floats, likely: Floats) -> Floats:
        forward = np.empty_like(likely)
        now = starts * likely[0]
        forward[0] = now / now.sum(axis=0)
        for at in range(1, len(likely)):
            now = (forward[at - 1][:, None, :] * moves).sum(axis=0) * likely[at]
            forward[at] = now / now.sum(axis=0)
        return forward

    def _maximise(self, weights: Floats, fresh: Floats, stayed: Floats) -> None:
        missed = ~self._telling[:, None, :] * 1.0
        places = np.concatenate([weights * (1 - missed), missed], axis=1)
        self.places = places.transpose(2, 0, 1)[self._live.T]
        for state in range(2):
            counts = np.bincount(
                self._symbols.ravel(),
                weights=(weights[:, state, :] * self._telling).ravel(),
                minlength=self._symbol_count,
            )
            self.chances[state] = np.maximum(counts / max(counts.sum(), 1e-9), _LEAST_CHANCE)
        self.chances /= self.chances.sum(axis=1, keepdims=True)
        self.persistence = float(np.clip(stayed[0] / max(stayed[1], 1e-9), 0.0, 0.99))
        # Half an observation is added each way, so a text of one stretch still leaves some doubt.
        self.shares = (fresh[0] + 0.5) / (fresh.sum(axis=0) + 1.0)


def _fit_beta(shares: Floats) -> tuple[float, float]:
    """Return alpha and beta by the method of moments."""
    mean = float(np.clip(shares.mean(), 0.01, 0.99))
    variance = max(float(shares.var()), 1e-9)
    total = float(
        np.clip(mean * (1 - mean) / variance - 1, _LEAST_CONCENTRATION, _MOST_CONCENTRATION)
    )
    return mean * total, (1 - mean) * total


def _beta_grid(alpha: float, beta: float) -> tuple[Floats, Floats]:
    """Return values and weights of a Beta distribution, with an exact mean."""
    at = (np.arange(400) + 0.5) / 400
    log_weight = (alpha - 1) * np.log(at) + (beta - 1) * np.log1p(-at)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    mean = alpha / (alpha + beta)
    shifted = np.clip(at + mean - (at * weight).sum(), 0.0, 1.0)
    return shifted, weight


def _rank_at(chances: tuple[float, ...], draws: Floats) -> NDArray[np.intp]:
    return np.searchsorted(np.cumsum(chances), draws, side="right")


def _shift_odds(chances: tuple[float, ...], log_odds: float) -> tuple[float, ...]:
    first = chances[0]
    moved = first / (first + (1 - first) * float(np.exp(-log_odds)))
    scale = (1 - moved) / (1 - first) if first < 1 else 0.0
    return (moved, *(scale * chance for chance in chances[1:]))
