"""Measurements of a device: its link, its draft steps, the verifier's passes, its draft's accuracy.

Estimates about the draft (``KeptEstimates``) and about a verifier (``VerifierEstimates``) outlive a
generation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Final

from edgespec.core.protocol.estimators import (
    ASSUMED_STEP_SHARE,
    MOST_TIMES,
    AcceptanceEstimator,
    CalibratedChances,
    DecayedRate,
    MovingAverage,
    SlopeEstimator,
)
from edgespec.core.protocol.messages import MAX_PRICE, Commit
from edgespec.core.protocol.predicted_text import INITIAL_CHANCES
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import MEMORY, PRIOR_WEIGHT, TextChances
from edgespec.core.protocol.tree import NO_CELL, UNRANKED, Node

LONG_FEED: Final = 16
"""Tokens from which on a draft step's duration is that of prefill."""
USUAL_FEED: Final = 2
"""Tokens that a usual draft step feeds at most: a corrected token and the one behind it. A longer
feed is prefill or catching up."""
PRIOR_SAMPLES: Final = 2
"""Weight, in samples, that measurements of earlier generations have at the start of a
generation."""
MAX_OTHER_MODELS: Final = 64
"""Models beside the usual one whose estimates are kept."""


MAX_TIMED_ROWS: Final = 32
"""Rows of a parallel draft's step, tokens and masks, up to which its time counts. Longer ones are
prefill."""
ASSUMED_ROW_SHARE: Final = 0.2
"""Share of a step that a further row takes, until it was timed: measured 0.14 to 0.26 at 0.6B
parameters in 4 bits, with two threads and with one."""
ASSUMED_FURTHER_SHARE: Final = 0.8
"""Acceptance rate of a further place, as a share of the one before it, until it was tried."""
USEFUL_RATE: Final = 0.03
"""Acceptance rate below which a draft model is useless: each of its steps saves at most this share
of a pass. ``plan link`` also calls a gain of 3 % the smallest that is worth the effort."""
_DEVIATIONS: Final = 3.0
"""Standard deviations by which a draft has to miss ``USEFUL_RATE``: a draft that is exactly that
good is given up once in 700 times."""


@dataclass(slots=True)
class DraftEvidence:
    """Share of positions at which a draft model offered the target's token, over the life of a
    process.

    Only positions count at which the model had offered its candidates, and a hit of any of them
    counts. ``DraftChances`` forget old trials, so that they follow the current output. This count
    forgets nothing."""

    tried: int = 0
    """Decided positions at which the model had offered candidates."""
    hits: int = 0
    """Decided positions at which one of the candidates was the target's token."""

    def add(self, *, hit: bool) -> None:
        """Count one decided position."""
        self.tried += 1
        self.hits += hit

    @property
    def is_useless(self) -> bool:
        """Whether the model is right less often than ``USEFUL_RATE``, almost certainly.

        Formula: Wilson's upper bound at three standard deviations is below ``USEFUL_RATE``. Without
        a hit that takes 292 trials; with one hit, 355."""
        n, z = self.tried, _DEVIATIONS
        if self.hits >= USEFUL_RATE * n:
            return False
        share = self.hits / n
        spread = z * math.sqrt(share * (1.0 - share) / n + z * z / (4.0 * n * n))
        return (share + z * z / (2.0 * n) + spread) / (1.0 + z * z / n) < USEFUL_RATE


_ASSUMED_MODEL_RATE: Final = 0.6
"""Acceptance rate of a draft model that is assumed where it contradicts a prediction."""


class PredictionChances:
    """Chances of the candidates of predictions, by cell (``predicted_text.INITIAL_CHANCES``)."""

    def __init__(self) -> None:
        self.cells = TextChances(initial=INITIAL_CHANCES)
        """Accuracy of the candidates, whatever the draft model offered."""
        self._contradicted = [DecayedRate(MEMORY, PRIOR_WEIGHT) for _ in INITIAL_CHANCES]

    def contradicted_chance(self, cell: int, chance: float) -> float:
        """Return the chance of a candidate where the draft model offered other tokens.

        ``chance`` is its chance elsewhere. Formula until there are observations: if the model errs
        independently of the prediction, and is right at a rate a, then chance * (1 - a) / (chance *
        (1 - a) + 1 - chance). With a = 0.6, 0.97 becomes 0.93 and 0.5 becomes 0.29."""
        right = chance * (1.0 - _ASSUMED_MODEL_RATE)
        return self._contradicted[cell].rate(right / (right + 1.0 - min(chance, 0.999)))

    def add_contradicted(self, cell: int, *, hit: bool) -> None:
        """Record a candidate of a decided position at which the draft model had offered others."""
        self._contradicted[cell].add(hit)


class PlaceChances:
    """Chances that the draft model's candidates of one place of a step are right, if those before
    them are.

    Places: 0 for the next position, 1 for the one behind it, and so on. Further ones are less sure,
    since a parallel draft does not know which token stands before them."""

    def __init__(self, acceptance: AcceptanceEstimator) -> None:
        self.alone = CalibratedChances()
        """Accuracy of the draft model's candidates that no other source offered."""
        self.confirmed = CalibratedChances()
        """Accuracy of the draft model's candidates that text lookup or the prediction offered as
        well."""
        self.acceptance = acceptance
        """Accuracy of the draft model's candidates by their rank alone."""

    def draft_chance(
        self, rank: int, logprob: float, rate: float, lookup_chance: float | None = None
    ) -> float:
        """Return the chance of the draft model's candidate of this rank.

        ``rate`` is the acceptance rate of the rank. ``lookup_chance`` is the chance of the same
        token as a candidate of text lookup or of the prediction; None if neither offered it."""
        chance = self.alone.chance(rank, logprob, rate)
        if lookup_chance is None:
            return chance
        # For rank > 0 the draft prefers another token, so lookup's chance is no lower bound.
        least = 0.0 if rank else lookup_chance
        return max(self.confirmed.chance(rank, logprob, max(chance, least)), least)


class DraftChances(PlaceChances):
    """Chances that nodes of a device's tree are right, by their draft source.

    They depend on the two models and on whether they sample, and outlive a generation. The
    inherited attributes belong to the next position."""

    def __init__(self) -> None:
        super().__init__(AcceptanceEstimator())
        self.text = TextChances()
        """Accuracy of text lookup's candidates, whatever the draft model offered."""
        self._further: list[PlaceChances] = []
        self._contradicted = [DecayedRate(MEMORY, PRIOR_WEIGHT) for _ in self.text.by_cell]
        self._prediction: PredictionChances | None = None

    @property
    def prediction(self) -> PredictionChances:
        """Accuracy of the candidates of predictions. It is made at the first use, because few
        generations have a prediction and each device of a simulated city has such an object."""
        if self._prediction is None:
            self._prediction = PredictionChances()
        return self._prediction

    def contradicted_node_chance(self, node: Node) -> float:
        """Return the chance of a node that lookup or the prediction has added, where the draft
        model offered other tokens."""
        chance, cell = 0.0, node.prediction_cell
        if cell != NO_CELL:
            chance = self.prediction.contradicted_chance(cell, node.chance)
        if node.lookup_cell != NO_CELL:
            chance = max(chance, self.contradicted_chance(node.lookup_cell))
        return chance

    def at(self, place: int) -> PlaceChances:
        """Return the chances of a place.

        A place that was never tried begins with a share ``ASSUMED_FURTHER_SHARE`` of the rate of
        the one before it."""
        if not place:
            return self
        while len(self._further) < place:
            before = self.at(len(self._further)).acceptance
            first = ASSUMED_FURTHER_SHARE * before.rate(0)
            self._further.append(PlaceChances(AcceptanceEstimator((first, *before.prior[1:]))))
        return self._further[place - 1]

    def contradicted_chance(self, cell: int) -> float:
        """Return the chance of a lookup candidate where the draft model offered other tokens.

        Until there are observations it is a quarter of the candidate's usual chance."""
        return self._contradicted[cell].rate(self.text.by_cell[cell] / 4.0)

    def add(self, guess: Node, *, hit: bool) -> None:
        """Record a candidate of a decided position at which the draft model had offered its
        candidates."""
        if guess.rank != UNRANKED:
            is_alone = guess.lookup_cell == guess.prediction_cell == NO_CELL
            at = self.at(guess.place)
            chances = at.alone if is_alone else at.confirmed
            chances.add(guess.rank, guess.logprob, hit=hit)
        elif guess.lookup_cell != NO_CELL:
            self._contradicted[guess.lookup_cell].add(hit)


def _make_steady_average() -> MovingAverage:
    return MovingAverage(most_times=MOST_TIMES)


TRIAL_EVERY: Final = 32
"""Generations after which a draft model that cannot get ahead is tried again at the latest."""


@dataclass(slots=True)
class ModelRest:
    """Generations in which the draft model rests, because it cannot get ahead of the verifier.

    The verifier's speed and the round trip are measured without draft steps. The duration of a step
    and the acceptance rate are not, so now and then a generation is a *trial*: 1, 2, 4, 8, 16 and
    32 generations after the last one in which the model could be of use, then every
    ``TRIAL_EVERY``."""

    generations: int = 0
    """Generations in a row at whose beginning the model could not be of use; 0: it can be."""

    def begin_generation(self, *, is_hopeless: bool) -> None:
        """Count a generation that begins."""
        self.generations = self.generations + 1 if is_hopeless else 0

    @property
    def is_trial(self) -> bool:
        """Whether the model may be tried where its steps do not pay."""
        count = self.generations
        return count & (count - 1) == 0 or count % TRIAL_EVERY == 0


@dataclass(slots=True)
class KeptEstimates:
    """Estimates that are kept between generations: pass the same object to the next
    ``DraftSession``."""

    greedy: DraftChances = field(default_factory=DraftChances)
    sampled: DraftChances = field(default_factory=DraftChances)
    step_s: MovingAverage = field(default_factory=_make_steady_average)
    """Seconds that a usual draft step takes. They depend on the device alone, so drafts for all
    models share them."""
    feed_s: MovingAverage = field(default_factory=_make_steady_average)
    """Seconds per token of prefill on the device."""
    step_row_s: SlopeEstimator = field(default_factory=SlopeEstimator)
    """Seconds that a further row adds to a step of a parallel draft."""
    evidence: DraftEvidence = field(default_factory=DraftEvidence)
    """Evidence whether the draft model is useful for this model, from greedy and sampled outputs
    together."""
    rest: ModelRest = field(default_factory=ModelRest)
    """Generations in which the draft model rests."""

    def guesses(self, sampling: SamplingParams) -> DraftChances:
        """Return the chances for outputs that are sampled like this one: shared noise changes what
        a probability means."""
        return self.sampled if sampling.temperature > 0.0 else self.greedy


class KeptEstimatesByModel:
    """Estimates for each model that is requested by name.

    ``usual`` are those for the model called ``name``. Beyond ``MAX_OTHER_MODELS`` the estimates of
    the model requested longest ago are dropped."""

    def __init__(self, name: str, usual: KeptEstimates) -> None:
        self._name, self._usual = name, usual
        self._others: dict[str, KeptEstimates] = {}

    def for_model(self, name: str) -> KeptEstimates:
        """Return the estimates for the next session of this model."""
        if name == self._name:
            return self._usual
        learned = self._others.pop(name, None) or KeptEstimates(
            step_s=self._usual.step_s, feed_s=self._usual.feed_s
        )
        self._others[name] = learned
        if len(self._others) > MAX_OTHER_MODELS:
            del self._others[next(iter(self._others))]
        return learned


@dataclass(slots=True)
class RowPrice:
    """The verifier's latest price of a row, credit of nodes and limit of nodes."""

    least_chance: float = 0.0
    """Price of a row: a node that is less likely to be right is not worth its row."""
    credit: int | None = None
    """Number of nodes that may be outstanding; None: as many as the limits allow."""
    max_nodes_outstanding: int = 0
    """Limit that the verifier announced when a stream was opened last; 0 before that."""

    def update(self, commit: Commit) -> None:
        """Update from a commit of a pass. A commit without a price means that rows cost nothing,
        and one without a credit that the limits apply."""
        self.least_chance = (commit.row_price or 0) / MAX_PRICE
        self.credit = commit.credit


@dataclass(slots=True)
class OwnSpeed:
    """Time in which a verifier makes a token without a device, over some hundred tokens.

    Formula: seconds / tokens over its commits that had no node of the device in their pass. Both
    sums lose a hundredth at each commit. Shorter averages follow the text: where a device's
    drafts are wrong, the verifier's are too, and a device that is too slow seems to be ahead."""

    seconds: float = 0.0
    tokens: float = 0.0
    memory: float = 0.99

    def add(self, seconds: float, tokens: int) -> None:
        """Add a commit of ``tokens`` that came ``seconds`` after the one before."""
        if (token_s := self.token_s) is not None:
            seconds = min(seconds, MOST_TIMES * token_s * max(1, tokens))
        self.seconds = self.memory * self.seconds + seconds
        self.tokens = self.memory * self.tokens + tokens

    @property
    def token_s(self) -> float | None:
        """Seconds per token; None until some tokens were counted."""
        return self.seconds / self.tokens if self.tokens >= _MIN_OWN_TOKENS else None


_MIN_OWN_TOKENS: Final = 8.0


@dataclass(slots=True)
class VerifierEstimates:
    """Estimates of one verifier and the link to it.

    They outlive a generation: pass the same object to the next ``DraftSession`` with this verifier.
    All times are in seconds and unknown until first measured."""

    price: RowPrice = field(default_factory=RowPrice)
    rtt_s: MovingAverage = field(default_factory=_make_steady_average)
    pass_s: MovingAverage = field(default_factory=MovingAverage)
    commit_s: MovingAverage = field(default_factory=MovingAverage)
    """Time between two commits, as they arrive."""
    commit_tokens: MovingAverage = field(default_factory=MovingAverage)
    server_tokens: MovingAverage = field(default_factory=MovingAverage)
    """Tokens of a commit that did not come from this device: the target's own token and the
    verifier's own accepted drafts."""
    own_speed: OwnSpeed = field(default_factory=OwnSpeed)


@dataclass(slots=True)
class DraftEstimates(VerifierEstimates):
    """All estimates of one generation: those of its verifier and those of its draft."""

    step_s: MovingAverage = field(default_factory=_make_steady_average)
    """Seconds that a draft step takes that feeds one or two tokens."""
    feed_s: MovingAverage = field(default_factory=_make_steady_average)
    """Seconds per token of prefill on the device."""
    row_s: SlopeEstimator = field(default_factory=SlopeEstimator)
    """Seconds that one more draft node adds to a pass."""
    max_places: int = 1
    """Most positions that one step can draft for. More than 1 for a parallel draft."""
    places: int = 1
    """Positions that steps draft for at present."""
    step_row_s: SlopeEstimator = field(default_factory=SlopeEstimator)
    """Seconds that a further row adds to a step of a parallel draft."""
    guesses: DraftChances = field(default_factory=DraftChances)
    """Chances that draft nodes are right, by their source."""
    evidence: DraftEvidence = field(default_factory=DraftEvidence)
    """Evidence whether the draft model is useful."""
    rest: ModelRest = field(default_factory=ModelRest)
    """Generations in which the draft model rests."""
    open_s: float = math.inf
    """Seconds that opening this stream took; a round trip takes no longer."""

    @classmethod
    def of(
        cls, verifier: VerifierEstimates, learned: KeptEstimates, sampling: SamplingParams
    ) -> DraftEstimates:
        """Begin a generation with the estimates of earlier ones, which it goes on updating.

        The next generation may have another verifier or another network, or find the same verifier
        busy, or the device in another state of its battery. So each average starts with a weight of
        at most ``PRIOR_SAMPLES`` samples."""
        known = {one.name: getattr(verifier, one.name) for one in fields(verifier)}
        for value in (*known.values(), learned.step_s, learned.feed_s):
            if isinstance(value, MovingAverage):
                value.limit_weight(PRIOR_SAMPLES)
        return cls(
            **known,
            step_s=learned.step_s,
            feed_s=learned.feed_s,
            step_row_s=learned.step_row_s,
            guesses=learned.guesses(sampling),
            evidence=learned.evidence,
            rest=learned.rest,
        )

    def note_step(self, fed: int, took_s: float, places: int = 1) -> None:
        """Update ``step_s`` from a step that fed ``fed`` tokens and drafted for ``places``
        positions.

        A step that feeds more than ``USUAL_FEED`` tokens is not a usual one, but it bounds it: a
        usual one takes no longer. While the policy rests its probes feed many tokens, and without
        the bound one slow step would count as the usual duration for ever. The bound does not stand
        for a step that was never timed: that of a long prompt would be far from it.

        A parallel draft is timed by rows, since it feeds what it drafted several tokens at a time:
        ``step_s`` is then what a step with one row would take."""
        rows = fed + places - 1
        if self.max_places > 1 and rows <= MAX_TIMED_ROWS:
            usual_s = self.step_row_s.value(rows) or rows * self.step_s.get(0.0)
            if usual_s > 0.0:
                took_s = min(took_s, MOST_TIMES * usual_s)
            self.step_row_s.add(rows, took_s)
            row_s = self.step_row_s.get()
            single_s = took_s / (1.0 + ASSUMED_ROW_SHARE * (rows - 1))
            if row_s is not None and row_s > 0.0:
                single_s = max(took_s - row_s * (rows - 1), took_s / rows)
            self.step_s.add(single_s)
            return
        if fed <= USUAL_FEED or (self.step_s.count and took_s < self.step_s.get(0.0)):
            self.step_s.add(took_s)
        if fed >= LONG_FEED:
            self.feed_s.add(took_s / fed)

    def single_step_s(self, pass_s: float) -> float:
        """Return the seconds of a draft step of one row; a share of a pass until one was timed."""
        return self.step_s.get(ASSUMED_STEP_SHARE * pass_s)

    @property
    def further_row_s(self) -> float:
        """Seconds that a further row adds to a draft step; a share of a step until it was
        measured."""
        found = self.step_row_s.get()
        return ASSUMED_ROW_SHARE * self.step_s.get(0.0) if found is None else max(found, 0.0)

    def position_s(self, pass_s: float, places: int) -> float:
        """Return the seconds per position of steps that draft for ``places`` positions.

        Formula: (step + 2 * (places - 1) * row) / places, since the tokens that the step before
        drafted are fed with the mask tokens. A step of 20 ms with rows of 4 ms takes 11 ms per
        position with four places."""
        further_s = 2 * (places - 1) * self.further_row_s
        return (self.single_step_s(pass_s) + further_s) / places

    @property
    def acceptance(self) -> AcceptanceEstimator:
        return self.guesses.acceptance
