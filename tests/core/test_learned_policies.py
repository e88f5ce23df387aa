"""Policies that learn, and preferences. Oracles: the formulas of their docstrings by hand, and a
bandit with arms whose worth is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edgespec.core.device.confidence import ConfidenceEstimator, GuessChances
from edgespec.core.device.draft_lengths import MAX_LENGTH, LengthOutcomes, RoundMeter
from edgespec.core.device.draft_view import DraftView
from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.learned import Learned
from edgespec.core.device.policy import DEFAULT_WIDTH, GATHER_SHARE, WindowedPolicy
from edgespec.core.device.policy_names import (
    DEFAULT_POLICY,
    default_policy,
    named_policy,
)
from edgespec.core.device.round_policies import LENGTHS, BanditPolicy, ConfidencePolicy
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import ROOT, CommittedPrefix, SpeculationTree


def _view(
    *logprobs: float,
    in_flight: int = 0,
    rate: float | None = None,
    rtt_s: float = 0.02,
    decoding: bool = True,
    prefix_length: int = 2,
) -> DraftView:
    """A chain of nodes with these log-probabilities. Passes and commits take 25 ms, steps 10."""
    tree = SpeculationTree(CommittedPrefix((1,) * prefix_length))
    for index, logprob in enumerate(logprobs):
        tree.grow(index + 1, index, 10 + index, prefix_length, 0, logprob)
    estimates = DraftEstimates()
    estimates.step_s.add(0.01)
    estimates.pass_s.add(0.025)
    estimates.rtt_s.add(rtt_s)
    estimates.commit_s.add(0.025 if decoding else 0.1)
    estimates.commit_tokens.add(1)
    if rate is not None:
        for trial in range(2000):
            estimates.acceptance.add(0 if trial % 100 < 100 * rate else None)
    count = len(logprobs)
    return DraftView(tree, count - in_flight, in_flight, 100, 1000, estimates)


# --- confidences ------------------------------------------------------------------------------


def test_confidence_is_what_was_counted() -> None:
    found = ConfidenceEstimator()
    assert found.chance(math.log(0.65)) == pytest.approx(0.65)
    assert found.chance(0.0) == pytest.approx(0.95)
    for trial in range(14):
        found.add(math.log(0.65), hit=trial % 2 == 0)
    assert found.chance(math.log(0.61)) == pytest.approx((7 + 3.9) / 20, abs=0.01)
    assert found.chance(math.log(0.55)) == pytest.approx(0.55)


@pytest.mark.parametrize("logprob", [-math.inf, -1e9, -1e-300, 0.0, 3.0, math.nan])
def test_any_confidence_has_a_chance(logprob: float) -> None:
    found = ConfidenceEstimator()
    found.add(logprob, hit=False)
    assert 0.0 < found.chance(logprob) < 1.0


def test_a_guess_of_any_rank_has_the_chance_of_its_cell() -> None:
    found = GuessChances()
    hardly, likely = math.log(0.01), math.log(0.3)
    assert found.chance(1, hardly, 0.1) == pytest.approx(0.1)
    for _ in range(60):
        found.add(1, hardly, hit=False)
    assert found.chance(1, math.log(0.015), 0.1) == pytest.approx(0.6 / 66, rel=0.15)
    assert found.chance(1, likely, 0.1) == pytest.approx(0.1)
    assert found.chance(2, hardly, 0.1) == pytest.approx(0.1)
    found.add(2, likely, hit=True)
    assert found.chance(7, likely, 0.1) == pytest.approx(1.6 / 7)
    found.add(0, likely, hit=False)
    assert found.chance(0, math.log(0.35), 0.8) == pytest.approx(4.8 / 7)


@pytest.mark.parametrize("rank", [0, 1, 9])
@pytest.mark.parametrize("logprob", [-math.inf, -1e9, -1e-300, 0.0, 3.0, math.nan])
def test_any_guess_has_a_chance(rank: int, logprob: float) -> None:
    found = GuessChances()
    found.add(rank, logprob, hit=False)
    assert 0.0 < found.chance(rank, logprob, 0.5) < 0.5


def test_texts_with_noise_and_without_are_counted_apart() -> None:
    learned = Learned()
    greedy, sampled = (learned.guesses(SamplingParams(t)) for t in (0.0, 0.7))
    assert greedy is learned.guesses(SamplingParams(0.0, seed=9)) is not sampled
    assert sampled is learned.guesses(SamplingParams(1.0))


def test_specdec_stops_when_a_miss_is_likely() -> None:
    """0.65 * 0.65 * 0.65 = 0.27: three such nodes are wrong with 0.73, two with 0.58."""
    policy, unsure = ConfidencePolicy(), math.log(0.65)
    assert [policy.extend(_view(*[unsure] * n)) for n in range(4)] == [ROOT, 1, 2, None]
    assert [policy.flush(_view(*[unsure] * n)) for n in range(4)] == [False, False, False, True]
    waiting = _view(*[unsure] * 3, in_flight=3)
    assert (policy.extend(waiting), policy.flush(waiting)) == (None, False)
    assert policy.extend(_view(*[-0.001] * 5)) == 5
    assert policy.extend(_view(math.log(0.15))) is None


# --- draft lengths ----------------------------------------------------------------------------


def test_a_round_ends_when_nothing_is_in_flight() -> None:
    outcomes = LengthOutcomes()
    meter = RoundMeter(outcomes)
    meter.committed(1, 0, 1.0)
    meter.sent(3)
    meter.committed(2, 1, 1.1)
    assert outcomes.rounds(3) == 0.0
    meter.committed(1, 0, 1.5)
    assert outcomes.rounds(3) == 1.0
    assert outcomes.tokens_per_s(3) == pytest.approx(6.0)


@pytest.mark.parametrize("batches", [(2, 3), (MAX_LENGTH + 1,)])
def test_rounds_of_no_single_length_do_not_count(batches: tuple[int, ...]) -> None:
    outcomes = LengthOutcomes()
    meter = RoundMeter(outcomes)
    meter.committed(1, 0, 1.0)
    for nodes in batches:
        meter.sent(nodes)
    meter.committed(1, 0, 2.0)
    assert not any(outcomes.rounds(length) for length in range(MAX_LENGTH + 1))


def test_a_new_stream_ends_no_round() -> None:
    outcomes = LengthOutcomes()
    meter = RoundMeter(outcomes)
    meter.committed(1, 0, 1.0)
    meter.sent(3)
    meter.new_stream()
    meter.committed(1, 0, 9.0)
    assert outcomes.rounds(3) == 0.0


def _paying(length: int) -> float:
    """Tokens a second of a made-up link: best at 6."""
    return max(4.0, 40.0 - abs(length - 6) * 3.0)


def test_the_bandit_finds_the_best_length_and_a_new_one() -> None:
    policy, view = BanditPolicy(), _view()
    outcomes = view.estimates.learned.lengths
    chosen = []
    for _ in range(300):
        length = policy.choose(view)
        outcomes.add(length, 10, 10 / _paying(length))
        chosen.append(length)
    assert chosen[: len(LENGTHS)] == list(LENGTHS)
    assert chosen[-100:].count(6) > 60
    for _ in range(300):  # the link has changed
        length = policy.choose(view)
        outcomes.add(length, 10, 10 / _paying(length + 5))
        chosen.append(length)
    assert chosen[-100:].count(1) > 60


def test_the_bandit_drafts_sends_and_waits() -> None:
    policy, view = BanditPolicy(lengths=(2,)), _view()
    assert policy.extend(view) == ROOT
    two = _view(-0.1, -0.1)
    assert (policy.extend(two), policy.flush(two)) == (None, True)
    assert not policy.flush(_view(-0.1, -0.1, in_flight=2))


# --- goodput ----------------------------------------------------------------------------------


def test_goodput_goes_on_where_a_node_is_in_time() -> None:
    """A verifier that waits for drafts: each node is in time, so a step saves what it hits."""
    policy = GoodputPolicy(1)
    waiting = _view(rate=0.8, decoding=False)
    leaf, gain = policy.best(waiting)
    rate = waiting.estimates.acceptance.rate(0)
    assert leaf == ROOT
    assert gain == pytest.approx(rate)
    leaf, gain = policy.best(_view(-0.1, rate=0.8, decoding=False))
    assert leaf == 1
    assert gain == pytest.approx(rate * rate)


def test_goodput_counts_the_steps_that_only_catch_up() -> None:
    """RTT 20 ms, steps 10, passes 25: a node drafted now comes after ceil(30 / 25) = 2 tokens; the
    second after ceil(40 / 25) = 2, the third too, and it is in time."""
    view = _view(rate=0.8)
    rate = view.estimates.acceptance.rate(0)
    gains = [sum(rate**j for j in range(3, k + 1)) / k for k in range(3, 25)]
    leaf, gain = GoodputPolicy(1).best(view)
    assert leaf == ROOT
    assert gain == pytest.approx(max(gains))


def test_goodput_rests_where_it_does_not_pay_and_probes() -> None:
    """At 0.2 and a round trip of 200 ms no step saves anything; one guess in eight positions keeps
    the acceptance rate known, and is not sent."""
    policy = GoodputPolicy(1)
    lengths = range(8, 40)
    asked = [policy.extend(_view(rate=0.2, rtt_s=0.2, prefix_length=n)) for n in lengths]
    assert [n for n, node in zip(lengths, asked, strict=True) if node == ROOT] == [8, 16, 24, 32]
    probe = _view(-0.1, rate=0.2, rtt_s=0.2)
    assert (policy.extend(probe), policy.flush(probe)) == (None, False)
    better = _view(-0.1, rate=0.95, rtt_s=0.02)
    assert (policy.extend(better), policy.flush(better)) == (1, True)


def _unsure_and_sure() -> DraftView:
    """Two guesses at the root, 1 and 2, held for so likely that the first is right at 0.45 and the
    second at 0.4, and behind the first one two of which nobody is sure."""
    view = _view(rate=0.8, decoding=False)
    guesses, first, second = view.estimates.guesses, math.log(0.35), math.log(0.3)
    for trial in range(2000):
        guesses.add(0, first, hit=trial % 20 < 9)
        guesses.add(1, second, hit=trial % 20 < 8)
    for node, (parent, rank, logprob) in enumerate(
        [(ROOT, 0, first), (ROOT, 1, second), (1, 0, first), (1, 1, second)], 1
    ):
        view.tree.grow(node, parent, 10 + node, 2, rank, logprob)
    return view


def test_goodput_goes_by_what_the_draft_thought() -> None:
    """By rank alone the chain's end has 0.8 * 0.8; by confidence it has 0.45 * 0.45, and the second
    choice at the root 0.4."""
    view = replace(_unsure_and_sure(), unsent=4)
    assert WindowedPolicy(2).extend(view) == 3
    assert GoodputPolicy(2).extend(view) == 2


def test_goodput_has_a_window() -> None:
    view = _unsure_and_sure()
    assert GoodputPolicy(2, window=3).extend(view) == 2
    assert GoodputPolicy(2, window=2).extend(view) is None


def test_goodput_asks_what_is_preferred() -> None:
    view = _view(rate=0.7, rtt_s=0.05)
    gain = GoodputPolicy(1).best(view)[1]
    assert GoodputPolicy(1, least_gain=gain).extend(view) == ROOT
    assert GoodputPolicy(1, least_gain=gain * 1.01).extend(replace(view, end=2)) is None


# --- by name -----------------------------------------------------------------------


def test_who_names_no_policy_has_goodput() -> None:
    policy = default_policy()
    assert policy == named_policy(DEFAULT_POLICY)
    assert isinstance(policy, GoodputPolicy)
    assert (policy.width, policy.gather, policy.window) == (DEFAULT_WIDTH, GATHER_SHARE, None)
