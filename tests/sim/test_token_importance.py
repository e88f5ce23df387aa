"""Thresholds by importance: what the two laws say of a token, and what a relaxed rule makes of it.

Oracles: the definitions, computed another way; a rule that is stricter everywhere takes no draft
that the other would not.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.bench.arms import Arm
from edgespec.core.ports import PassRequest, TargetModel
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.token_sources.relaxed_rule import (
    Matches,
    ThresholdTarget,
    importance,
    law,
    threshold_of,
)
from edgespec_sim.world.run import Job, play
from tests.sim.test_decentralized import HERE, lossy, summary

MODEL = ToyModel(vocabulary_size=64, order=3, sharpness=2.0)
LOGITS = st.lists(st.floats(-30.0, 30.0), min_size=5, max_size=5)


@given(LOGITS, LOGITS, st.integers(0, 20), st.integers(0, 20))
def test_importance_is_the_mean_of_three_shares(
    ours: list[float], theirs: list[float], same: int, other: int
) -> None:
    target, draft = law(ours), law(theirs)
    assert math.isclose(sum(target), 1.0)
    matches = Matches()
    for _ in range(same):
        matches.note(True)
    for _ in range(other):
        matches.note(False)
    found = importance(target, draft, matches)
    assert 0.0 <= found <= 1.0
    least = 1e-12
    crossed = -sum(
        own * math.log(max(share, least)) for own, share in zip(target, draft, strict=True)
    )
    entropy = -sum(own * math.log(own) for own in target if own)
    agreement = sum(map(min, target, draft))
    surprise = 1.0 - (1 + same) / (2 + same + other)
    shares = (1.0 - math.exp(-max(0.0, crossed - entropy)), 1.0 - agreement, surprise)
    assert math.isclose(found, sum(shares) / 3.0, rel_tol=1e-6, abs_tol=1e-6)


def test_a_token_that_both_know_matters_least() -> None:
    sure, unsure = law([9.0, 0.0, 0.0, 0.0]), law([1.0, 0.9, 0.8, 0.7])
    wrong = law([0.0, 9.0, 0.0, 0.0])
    known = importance(sure, sure, Matches())
    assert known == pytest.approx(1.0 / 6.0)
    assert known < importance(unsure, wrong, Matches()) < importance(sure, wrong, Matches())
    assert importance(sure, sure, Matches(9, 10)) < known < importance(sure, sure, Matches(1, 10))


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_thresholds_rise_with_importance_to_the_exact_rule(
    least: float, one: float, other: float
) -> None:
    assert threshold_of(least, 0.0) == least
    assert threshold_of(least, 1.0) == pytest.approx(1.0)
    low, high = sorted([one, other])
    assert least <= threshold_of(least, low) <= threshold_of(least, high) + 1e-12


def test_what_is_tolerated_by_importance_is_tolerated_by_the_fixed_threshold() -> None:
    dice, draft = random.Random(4), MODEL.perturbed(0.4)
    targets: list[TargetModel] = [
        ToyTarget(MODEL),
        ThresholdTarget(ToyTarget(MODEL), 0.1),
        ThresholdTarget(ToyTarget(MODEL), 0.1, draft),
    ]
    by_fixed = by_importance = 0
    for number in range(200):
        prompt = tuple(dice.randrange(64) for _ in range(4))
        likely = sorted(range(64), key=draft.logits(prompt).__getitem__)
        request = PassRequest(f"{number}", 0, prompt, (likely[-1],), (-1,))
        for target in targets:
            target.open(request.key, 4, SamplingParams())
        exact, fixed, weighed = (target.forward([request])[0].targets for target in targets)
        for own, loose, strict in zip(exact, fixed, weighed, strict=True):
            by_fixed += loose != own
            by_importance += strict != own
            if strict != own:
                assert strict == loose
    assert by_fixed > by_importance > 5


def test_a_world_by_importance_changes_less_and_says_so() -> None:
    tokens = replace(lossy(0.1).tokens, lossy_by_importance=True)
    weighed = replace(lossy(0.1), tokens=tokens, arms=(Arm.VANILLA,))
    ours, fixed = (play(Job(one, Arm.VANILLA, 0, 1, HERE)).meters for one in (weighed, lossy(0.1)))
    assert 0 < ours.changed[0] < fixed.changed[0]
    passes = [sum(record.counters.passes for record in one.records) for one in (ours, fixed)]
    assert passes[0] > passes[1]
    (note,) = [note for note in summary(weighed).notes if "LOSSY" in note]
    assert "from 0.1 of the best token's probability on, more for what matters" in note
