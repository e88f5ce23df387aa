"""Sampled texts, drawn through both sessions with a drafter, follow the target's own law.

Oracle: the exact joint law of the first two and three tokens, multiplied out of the target's
conditional probabilities, and Pearson's chi-square against it; and the texts themselves, one token
after the other by the scalar specification. Good, random and hostile drafters must pass; a rule
with the classic mistake (siblings accepted independently) must not.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from edgespec.core.device.events import DraftCounters, Finish
from edgespec.core.device.policy import WindowedPolicy
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import Drafter
from edgespec.core.protocol.messages import EXACT_RULE, Limits, Open, RunAhead
from edgespec.core.protocol.sampling import SamplingParams, choose, warp
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.drafts import AcceptanceRule, ExactRule, Walk
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.device.drafters.toy import RandomDrafter, ToyDrafter, toy_info
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.sessions import FixedDelay, PassTime, SimulatedDevice, SimulatedVerifier, Stream
from tests.adversarial import AdversarialDrafter

LAW = ToyModel(vocabulary_size=4, order=2, seed=5, sharpness=1.0)
PROMPT = (1, 2)
LENGTH = 4
TEXTS, MANY_TEXTS = 600, 2500
# A standard normal variate exceeds this with a chance of 3e-5.
CRITICAL = 4.0
SIZES = [TEXTS, pytest.param(MANY_TEXTS, marks=pytest.mark.slow)]
Text = tuple[int, ...]
DrafterOf = Callable[[int], Drafter]


@dataclass(frozen=True, slots=True)
class IndependentSiblings:
    """Wrong on purpose: a node counts when any row of the pass happens to predict its token."""

    def walk(self, tokens: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> Walk:
        path: list[int] = []
        for node in range(len(tokens)):
            if parents[node] == (path[-1] if path else -1) and tokens[node] in targets:
                path.append(node)
        last = targets[1 + path[-1]] if path else targets[0]
        return Walk(tuple(path), (*(tokens[node] for node in path), last))


def good(seed: int) -> Drafter:
    return ToyDrafter(LAW.perturbed(0.3))


def blind(seed: int) -> Drafter:
    return RandomDrafter(toy_info(LAW), seed)


def hostile(seed: int) -> Drafter:
    return AdversarialDrafter(ToyDrafter(LAW), seed)


def _params(top_p: float, seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.9, top_p=top_p, seed=seed, max_tokens=LENGTH)


def _draw(
    seed: int, top_p: float, drafter: Drafter, width: int, rule: AcceptanceRule
) -> tuple[Text, DraftCounters]:
    """One text through both sessions. Its first token comes of the prompt's own pass, so no draft
    counts there."""
    queue, target = EventQueue(), ToyTarget(LAW)
    engine = VerifyEngine(target.info, Limits(), EngineLimits(), {EXACT_RULE: rule})
    server = SimulatedVerifier(queue, engine, target, PassTime(queue, lambda requests: 0.02))

    def connect() -> tuple[Stream, float]:
        stream = Stream(queue, FixedDelay(queue, 0.001), FixedDelay(queue, 0.001))
        server.accept(stream)
        return stream, 0.0

    params = _params(top_p, seed)
    request = Open("s", "", "", PROMPT, sampling=params, run_ahead=RunAhead.NEVER)
    session = DraftSession(request, WindowedPolicy(width), ReconnectPolicy(), 1000)
    device = SimulatedDevice(queue, session, drafter, lambda kept, fed: 0.002, connect)
    device.start()
    queue.run(1e3)
    assert isinstance(device.delivery.ended, Finish)
    return tuple(device.delivery.tokens), session.counters


@dataclass(frozen=True, slots=True)
class Sample:
    texts: tuple[Text, ...]
    verified: int
    """Draft nodes that a pass looked at; of them ``accepted``."""
    accepted: int
    tried: int
    """Positions decided while the draft had a guess; at ``hits`` of them its first choice won."""
    hits: int


@cache
def _sample(
    drafter_of: DrafterOf, width: int, rule: AcceptanceRule, top_p: float, size: int = TEXTS
) -> Sample:
    drawn = [_draw(seed, top_p, drafter_of(seed), width, rule) for seed in range(size)]
    return Sample(
        texts=tuple(text for text, _ in drawn),
        verified=sum(counters.rows for _, counters in drawn),
        accepted=sum(counters.accepted for _, counters in drawn),
        tried=sum(counters.tried for _, counters in drawn),
        hits=sum(counters.hits for _, counters in drawn),
    )


def _direct(seed: int, top_p: float) -> Text:
    """The text of this seed without sessions, drafts or links."""
    tokens = list(PROMPT)
    for position in range(len(PROMPT), len(PROMPT) + LENGTH):
        output = tokens[len(PROMPT) :]
        tokens.append(choose(LAW.logits(tokens), _params(top_p, seed), position, PROMPT, output))
    return tuple(tokens[len(PROMPT) :])


@cache
def _law(length: int, top_p: float) -> dict[Text, float]:
    """The exact probability of every beginning of this length."""
    params = _params(top_p, 0)
    law: dict[Text, float] = {}
    for text in itertools.product(range(LAW.vocabulary_size), repeat=length):
        chance = 1.0
        for index, token in enumerate(text):
            scores = warp(LAW.logits((*PROMPT, *text[:index])), params)
            weights = [math.exp(score) for score in scores]
            chance *= weights[token] / sum(weights)
        law[text] = chance
    return law


def _excess(texts: Sequence[Text], law: dict[Text, float]) -> float:
    """Pearson's chi-square as a standard normal variate (Wilson and Hilferty 1931). Outcomes
    expected less than five times are one; an impossible one is infinitely bad."""
    counts = Counter(texts)
    if any(law[text] == 0.0 for text in counts):
        return math.inf
    cells = [(counts[text], len(texts) * chance) for text, chance in law.items()]
    large = [cell for cell in cells if cell[1] >= 5.0]
    small = [cell for cell in cells if 0.0 < cell[1] < 5.0]
    pooled = (sum(count for count, _ in small), sum(expected for _, expected in small))
    large += [pooled] if pooled[1] >= 5.0 else []
    statistic = sum((count - expected) ** 2 / expected for count, expected in large)
    degrees = len(large) - 1
    spread = 2.0 / (9.0 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1.0 - spread)) / math.sqrt(spread))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize(
    ("drafter_of", "width"), [(good, 1), (blind, 2), (hostile, 1)], ids=["good", "blind", "hostile"]
)
def test_the_joint_law_is_the_targets(
    drafter_of: DrafterOf, width: int, top_p: float, size: int
) -> None:
    sample = _sample(drafter_of, width, ExactRule(), top_p, size)
    assert sample.verified > size
    assert list(sample.texts) == [_direct(seed, top_p) for seed in range(size)]
    for length in (2, 3, 4):
        beginnings = [text[:length] for text in sample.texts]
        assert abs(_excess(beginnings, _law(length, top_p))) < CRITICAL, length


@pytest.mark.parametrize("size", SIZES)
def test_a_biased_rule_is_noticed(size: int) -> None:
    """By the law alone: no seed is compared with its own text."""
    texts = _sample(blind, 2, IndependentSiblings(), 1.0, size).texts
    for length in (2, 3):
        assert _excess([text[:length] for text in texts], _law(length, 1.0)) > 2 * CRITICAL


def test_acceptance_is_earned() -> None:
    """A blind first choice is right by chance, a hostile one never, a good one often."""
    by_chance = _sample(blind, 2, ExactRule(), 1.0)
    share, chance = by_chance.hits / by_chance.tried, 1 / LAW.vocabulary_size
    assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / by_chance.tried)
    never = _sample(hostile, 1, ExactRule(), 1.0)
    assert (never.hits, never.accepted) == (0, 0)
    often = _sample(good, 1, ExactRule(), 1.0)
    assert often.accepted > 0.8 * often.verified
