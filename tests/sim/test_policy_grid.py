"""The default policy is nowhere slower than fixed ones. Oracle: the fixed ones, in the same worlds.

These are a few cells of the grid that ``benchmarks/policy_grid.py`` plays, with short passes.
"""

from __future__ import annotations

import random

import pytest

from edgespec.bench.arms import Arm
from edgespec.core.device.comparison_policies import WindowedPolicy
from edgespec.core.device.estimates import (
    DraftEstimates,
    DraftEvidence,
    KeptEstimates,
    RowPrice,
    VerifierEstimates,
)
from edgespec.core.device.goodput_policy import GoodputPolicy, explain_resting
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.ports import Drafter
from edgespec.core.protocol.messages import Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.run_ahead import ArrivalEstimator
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyTarget
from tests.adversarial import AdversarialDrafter
from tests.sim.one_session import play_alone
from tests.sim.policy_grid import LIMIT, Cell, World, play_grid, play_world

CELLS = (
    Cell(0.0, False, rtt_ms=2.0, step_ms=2.0, pass_ms=8.0, acceptance=0.8),
    Cell(0.0, False, rtt_ms=0.5, step_ms=1.0, pass_ms=3.0, acceptance=0.95),
    Cell(0.7, False, rtt_ms=5.0, step_ms=1.0, pass_ms=3.0, acceptance=0.8),
    Cell(0.7, True, rtt_ms=5.0, step_ms=1.0, pass_ms=8.0, acceptance=0.8),
    Cell(0.0, True, rtt_ms=0.5, step_ms=3.0, pass_ms=8.0, acceptance=0.6),
    # Both ends, and a device that drafts faster than the server.
    Cell(0.0, True, rtt_ms=5.0, step_ms=3.0, pass_ms=40.0, acceptance=0.95),
    Cell(0.7, True, rtt_ms=0.5, step_ms=1.0, pass_ms=40.0, acceptance=0.95),
    # A device alone whose first draft after a miss is worth waiting for.
    Cell(0.7, False, rtt_ms=0.5, step_ms=1.0, pass_ms=40.0, acceptance=0.9),
)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_default_is_as_fast_as_the_best_fixed_policy(cell: Cell) -> None:
    (verdict,) = play_grid([cell], lambda worlds: map(play_world, worlds))
    assert verdict.is_decided
    assert verdict.ratio <= LIMIT, verdict


@pytest.mark.parametrize(("rtt_ms", "acceptance"), [(5.0, 0.8), (30.0, 0.95)])
def test_no_response_is_shorter_than_a_round_trip(
    rtt_ms: float, acceptance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that was in flight when the tree became empty is no response. Oracle: the link."""
    samples, note = list[float](), ArrivalEstimator.on_useful_draft

    def record(
        arrivals: ArrivalEstimator,
        now: float,
        depth: int = 1,
        places: int = 1,
        *,
        responds: bool = True,
    ) -> None:
        if responds and arrivals._missed_at is not None:
            samples.append(1e3 * (now - arrivals._missed_at))
        note(arrivals, now, depth, places, responds=responds)

    monkeypatch.setattr(ArrivalEstimator, "on_useful_draft", record)
    cell = Cell(0.0, False, rtt_ms=rtt_ms, step_ms=3.0, pass_ms=40.0, acceptance=acceptance)
    for seed in range(1, 7):
        play_world(World(cell, seed, (Arm.EDGESPEC,)))
    assert len(samples) > 50
    assert min(samples) >= rtt_ms


MODEL = ToyModel(vocabulary_size=64, order=3, sharpness=2.0)
TOKENS = 300


def steps_of(
    texts: int, policy: DraftPolicy, learned: KeptEstimates, *, right_from: int | None = None
) -> list[int]:
    """Count the draft steps of each text of ``TOKENS`` tokens. The draft is always wrong, or
    follows the target's own law from text ``right_from`` on. Steps take 2 ms, passes 63 ms."""
    found = []
    for text in range(texts):
        sampling = SamplingParams(temperature=1.0, seed=text, max_tokens=TOKENS, ignore_eos=True)
        request = Open("s", "", "", tuple(range(10)), sampling=sampling)
        drafter: Drafter = ToyDrafter(MODEL)
        if right_from is None or text < right_from:
            drafter = AdversarialDrafter(drafter, seed=text)
        device = play_alone(ToyTarget(MODEL), drafter, request, policy, 0.02, 0.002, 0.063, learned)
        assert len(device.delivery.tokens) == TOKENS
        found.append(device.session.counters.steps)
    return found


def test_a_draft_that_is_never_right_is_given_up_for_the_process() -> None:
    learned = KeptEstimates()
    steps = steps_of(12, GoodputPolicy(), learned)
    assert learned.evidence.hits == 0
    assert sum(steps) < 2 * learned.evidence.tried, "half of the steps or more are judged"
    assert learned.evidence.tried < 300
    assert steps[-3:] == [0, 0, 0]
    estimates = DraftEstimates.of(VerifierEstimates(), learned, SamplingParams())
    why = explain_resting(GoodputPolicy(), RowPrice(), estimates)
    assert f"0 of {learned.evidence.tried} places" in str(why)
    assert "edgespec distill" in str(why)


def test_a_published_scheme_drafts_on() -> None:
    assert min(steps_of(3, WindowedPolicy(), KeptEstimates())) > TOKENS // 2


def test_a_draft_that_begins_badly_is_not_given_up() -> None:
    steps = steps_of(6, GoodputPolicy(), KeptEstimates(), right_from=1)
    assert min(steps[2:]) > TOKENS // 4, steps


@pytest.mark.parametrize("tried", [50, 100, 291])
def test_little_evidence_is_none(tried: int) -> None:
    evidence = DraftEvidence()
    for _ in range(tried):
        evidence.add(hit=False)
        assert not evidence.is_useless


@pytest.mark.parametrize(("rate", "useless"), [(0.0, True), (0.005, True), (0.04, False)])
def test_a_rate_is_told_from_one_that_is_of_use(rate: float, useless: bool) -> None:
    """A draft above the limit is never dropped; one far below it is dropped within a thousand
    places."""
    given_up = 0
    for seed in range(50):
        evidence, dice = DraftEvidence(), random.Random(seed)
        for _ in range(1000):
            evidence.add(hit=dice.random() < rate)
            if evidence.is_useless:
                given_up += 1
                break
    assert given_up == (50 if useless else 0)
